"""Writing checkpoints: rounding rules, bitwise round trips, and the golden set's stored bytes."""

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.model.checkpoint import E2M1, dequantise_fp8, dequantise_mxfp4, load_checkpoint, power_of_two
from engine.model.quantise import (
    fake_quantise,
    fake_quantise_fp8,
    fake_quantise_mxfp4,
    fake_quantise_rows,
    quantise_fp8,
    quantise_mxfp4,
    round_entry,
    save_checkpoint,
    scale_bytes,
    weight_specs,
)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def random_weights(shape, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor at a magnitude of its own, so that a misplaced scale shows."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=random) * 10 ** torch.randn((), generator=random)
        for name, spec in weight_specs(shape).items()
    }


@pytest.mark.parametrize("name", ["v41-tiny", "v41-tiny-quant"])
def test_what_is_read_back_is_bitwise_the_fake_quantised_weights(golden, tmp_path, name):
    model = golden(name)
    config = dict(model.config, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    weights = random_weights(model.shape, 7)
    save_checkpoint(tmp_path, config, weights)
    shape, read = load_checkpoint(tmp_path)
    want = fake_quantise(weights, shape)
    assert read.keys() == want.keys()
    assert all(torch.equal(read[key], want[key]) for key in want)
    assert read["layers.2.attn.wq_b.weight"].allclose(weights["layers.2.attn.wq_b.weight"], rtol=0.07, atol=1e-2)


def test_a_model_may_store_tables_more_narrowly_than_the_vendor(quant, tmp_path):
    stores = {"embed.weight": "fp8", "head.weight": "fp8", "layers.0.hc_attn_fn": "bf16"}
    weights = random_weights(quant.shape, 9)
    save_checkpoint(tmp_path, quant.config, weights, stores)
    dtypes = {name: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert dtypes["embed.weight"] == dtypes["head.weight"] == torch.float8_e4m3fn
    assert dtypes["layers.0.hc_attn_fn"] == torch.bfloat16
    _, read = load_checkpoint(tmp_path)
    want = fake_quantise(weights, quant.shape, stores)
    assert all(torch.equal(read[name], want[name]) for name in want)
    assert not torch.equal(read["embed.weight"], fake_quantise(weights, quant.shape)["embed.weight"])


def test_fake_quantised_weights_do_not_change_a_second_time(quant):
    once = fake_quantise(random_weights(quant.shape, 8), quant.shape)
    twice = fake_quantise(once, quant.shape)
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_an_unquantised_checkpoint_is_rewritten_byte_for_byte(tiny, tmp_path):
    save_checkpoint(tmp_path, tiny.config, tiny.weights)
    stored, written = load_file(tiny.directory / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert stored.keys() == written.keys()
    assert all(same_bytes(stored[name], written[name]) for name in stored)


def test_the_golden_quantised_values_are_rewritten_exactly(quant, tmp_path):
    """Bytes agree but where a group's largest value was rounded down to half the range: there the smallest scale that
    fits is one power lower, and the same numbers have other codes."""
    save_checkpoint(tmp_path, quant.config, quant.weights)
    stored, written = load_file(quant.directory / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert {name: (v.dtype, v.shape) for name, v in stored.items()} == {
        name: (v.dtype, v.shape) for name, v in written.items()
    }
    _, again = load_checkpoint(tmp_path)
    assert all(torch.equal(again[name], quant.weights[name]) for name in again)
    compared = 0
    for name, scale in stored.items():
        if not name.endswith(".scale"):
            owner = name.replace(".weight", ".scale")
            if owner == name or owner not in stored:
                assert same_bytes(scale, written[name]), name
            continue
        weight = stored[name.replace(".scale", ".weight")]
        factor, found = scale.view(torch.uint8).int(), written[name].view(torch.uint8).int()
        if weight.dtype == torch.int8:
            limit, values, block = 6.0, dequantise_mxfp4(weight, scale.view(torch.uint8)), (1, 32)
        else:
            block = (1, 32) if "engram.embed" in name else (32, 32)
            limit, values = 448.0, dequantise_fp8(weight, scale.view(torch.uint8), block)
        groups = values.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
        largest = groups.abs().amax((1, 3)) / power_of_two(factor.to(torch.uint8))
        assert torch.equal(found, torch.where(largest <= limit / 2, factor - 1, factor)), name
        compared += int((largest > limit / 2).sum())
    assert compared > 10_000


def test_a_scale_is_the_smallest_power_of_two_that_fits():
    largest = torch.tensor([448.0, 448.1, 224.0, 224.1, 1e-30, 0.0, 3.0e38])
    exponents = scale_bytes(largest, 448.0).int() - 127
    assert exponents.tolist() == [0, 1, -1, 0, -108, 0, 120]
    assert (scale_bytes(torch.tensor([6.0, 6.1, 3.0, 12.0]), 6.0).int() - 127).tolist() == [0, 1, -1, 1]


def test_mxfp4_rounds_to_nearest_and_ties_to_the_even_code():
    values = [0.0, 0.2, 0.25, 0.3, 0.75, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 6.0, -0.25, -0.75, -5.0]
    wanted = [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 0.0, -1.0, -4.0]
    row = torch.zeros(1, 32)
    row[0, : len(values)] = torch.tensor(values)
    assert fake_quantise_mxfp4(row)[0, : len(values)].tolist() == wanted


def test_every_mxfp4_code_survives_its_round_trip():
    row = torch.tensor([[*E2M1, *(-v for v in E2M1)] * 2]) * 2.0**-9
    packed, scale = quantise_mxfp4(row)
    assert packed.shape == (1, 16)
    assert scale.tolist() == [[118]]
    assert torch.equal(dequantise_mxfp4(packed, scale), row)


def test_blocks_cut_off_at_the_edge_have_scales_of_their_own():
    weight = torch.full((33, 65), 448.0)
    weight[32:] = 7.0
    weight[:, 64:] = 0.0
    stored, scale = quantise_fp8(weight, (32, 32))
    assert scale.tolist() == [[127, 127, 127], [121, 121, 127]]
    assert torch.equal(dequantise_fp8(stored, scale, (32, 32)), weight)


@pytest.mark.parametrize("seed", range(3))
def test_relative_error_stays_within_half_a_step_of_the_format(seed):
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 128, generator=random)
    # Half a step of a 3-bit mantissa, for values that are not subnormal in their block.
    large = weight.abs() > weight.abs().max() * 2.0**-12
    for quantised in (fake_quantise_fp8(weight, (32, 32)), fake_quantise_rows(weight)):
        assert ((quantised - weight).abs() / weight.abs())[large].max() <= 2.0**-4
    nearest = fake_quantise_mxfp4(weight)
    amax = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    # Scale is at most amax / 3, the widest gap is 2 codes, half of it 1.
    assert ((nearest - weight).abs() <= amax / 3).all()


def test_a_group_of_zeros_stays_zero_in_every_format():
    zeros = torch.zeros(2, 32)
    for quantised in (fake_quantise_rows(zeros), fake_quantise_mxfp4(zeros), round_entry(zeros)):
        assert torch.equal(quantised, zeros)


def test_weights_that_do_not_fit_the_configuration_are_refused(quant, tmp_path):
    weights = dict(quant.weights)
    weights.pop("norm.weight")
    with pytest.raises(ConfigError, match=r"tensor norm\.weight \[96\] is missing"):
        save_checkpoint(tmp_path, quant.config, weights)
    with pytest.raises(ConfigError, match=r"tensor ghost is unexpected"):
        fake_quantise(dict(quant.weights, ghost=torch.zeros(1)), quant.shape)
    with pytest.raises(ConfigError, match=r"experts\.w1 must have shape \[8, 64, 96\], found \[7, 64, 96\]"):
        few = {"layers.0.ffn.experts.w1": quant.weights["layers.0.ffn.experts.w1"][:7]}
        fake_quantise(dict(quant.weights, **few), quant.shape)
