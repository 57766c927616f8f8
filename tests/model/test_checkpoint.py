"""Reading checkpoints: names, shapes, formats, shards, and the errors that name a tensor."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.model.checkpoint import dequantise_fp8, dequantise_mxfp4, load_checkpoint, power_of_two, tensor_specs
from engine.model.quantise import quantise_fp8, save_checkpoint


@pytest.fixture
def broken(quant, tmp_path):
    """Write the quantised set with some tensors replaced (None drops one); returns the folder."""

    def write(changes):
        tensors = load_file(quant.directory / "model.safetensors")
        tensors.update(changes)
        save_file({k: v for k, v in tensors.items() if v is not None}, str(tmp_path / "model.safetensors"))
        shutil.copy(quant.directory / "config.json", tmp_path)
        return tmp_path

    return write


def test_both_golden_sets_load_whole_with_stacked_experts(tiny, quant):
    for model in (tiny, quant):
        assert not any(name.endswith(".scale") or ".experts.0." in name for name in model.weights)
        assert all(value.dtype == torch.float32 and value.isfinite().all() for value in model.weights.values())
    assert tiny.weights["layers.3.ffn.experts.w1"].shape == (8, 64, 96)
    assert tiny.weights["layers.3.ffn.experts.w2"].shape == (8, 96, 64)
    assert tiny.weights["mtp.1.ffn.experts.w3"].shape == (4, 64, 96)
    stored = load_file(tiny.directory / "model.safetensors")
    for expert in range(8):
        assert torch.equal(
            tiny.weights["layers.3.ffn.experts.w2"][expert], stored[f"layers.3.ffn.experts.{expert}.w2.weight"].float()
        )


def test_bfloat16_weights_are_exact_and_leave_float32_tensors_alone(quant):
    _, weights = load_checkpoint(quant.directory, dtype=torch.bfloat16)
    for name, value in weights.items():
        assert torch.equal(value.float(), quant.weights[name]), name
    kept = {name for name, value in weights.items() if value.dtype == torch.float32}
    assert kept == {n for n in weights if any(part in n for part in ("hc_", "attn_sink", "gate.bias"))}


def test_shards_read_like_one_file(quant, tmp_path):
    tensors = load_file(quant.directory / "model.safetensors")
    name_to_file = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file_name in set(name_to_file.values()):
        save_file({n: tensors[n] for n in tensors if name_to_file[n] == file_name}, str(tmp_path / file_name))
    shutil.copy(quant.directory / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": name_to_file}))
    _, weights = load_checkpoint(tmp_path)
    assert weights.keys() == quant.weights.keys()
    assert all(torch.equal(weights[name], quant.weights[name]) for name in weights)

    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors does not exist"):
        load_checkpoint(tmp_path)


def test_an_index_that_points_to_the_wrong_shard_is_refused(quant, tmp_path):
    shutil.copy(quant.directory / "config.json", tmp_path)
    shutil.copy(quant.directory / "model.safetensors", tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"nothing": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"tensor nothing must be in a\.safetensors by the index, found in no file"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        load_checkpoint(tmp_path)


def test_the_image_parts_of_a_multimodal_checkpoint_are_passed_over(broken, quant):
    _, weights = load_checkpoint(broken({"vision.blocks.0.weight": torch.zeros(2), "image_start": torch.zeros(2)}))
    assert weights.keys() == quant.weights.keys()


FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
REFUSED = [
    ({"norm.weight": None}, r"tensor norm\.weight \[96\] is missing"),
    ({"layers.3.ffn.experts.5.w2.weight": None}, r"layers\.3\.ffn\.experts\.5\.w2\.weight \[96, 64\] is missing"),
    ({"layers.9.attn_norm.weight": torch.zeros(96)}, r"tensor layers\.9\.attn_norm\.weight is unexpected"),
    ({"mtp.0.attn_norm.weight": torch.zeros(96)}, r"tensor mtp\.0\.attn_norm\.weight is unexpected"),
    ({"layers.0.ghost.scale": torch.zeros(1)}, r"tensor layers\.0\.ghost\.scale is unexpected"),
    ({"norm.weight": torch.zeros(95)}, r"norm\.weight must have shape \[96\], found \[95\]"),
    ({"embed.weight": torch.zeros(96, 288)}, r"embed\.weight must have shape \[288, 96\], found \[96, 288\]"),
    ({"norm.weight": torch.zeros(96, dtype=torch.int32)}, r"norm\.weight must be stored as bf16, found torch\.int32"),
    ({"norm.weight": torch.zeros(96).to(FP8)}, r"norm\.weight must be stored as bf16, found torch\.float8"),
    ({"layers.0.attn.wkv.scale": None}, r"layers\.0\.attn\.wkv\.scale is missing"),
    (
        {"layers.0.attn.wkv.scale": torch.zeros(3, 2, dtype=torch.uint8).view(E8M0)},
        r"layers\.0\.attn\.wkv\.scale must have shape \[2, 3\], found \[3, 2\]",
    ),
    ({"layers.0.attn.wkv.scale": torch.ones(2, 3)}, r"wkv\.scale must be e8m0 bytes, found torch\.float32"),
    ({"layers.0.attn.wkv.weight": torch.ones(64, 96)}, r"wkv\.scale is unexpected: .* stored as torch\.float32"),
    (
        {"layers.0.ffn.experts.0.w1.weight": torch.zeros(64, 96, dtype=torch.int8)},
        r"experts\.0\.w1\.weight must have shape \[64, 48\], found \[64, 96\]",
    ),
    (
        {"layers.0.ffn.experts.0.w1.scale": torch.zeros(64, 2, dtype=torch.uint8).view(E8M0)},
        r"experts\.0\.w1\.scale must have shape \[64, 3\], found \[64, 2\]",
    ),
    (
        {"layers.1.engram.embed.scale": torch.zeros(660, 1, dtype=torch.uint8).view(E8M0)},
        r"engram\.embed\.scale must have shape \[660, 2\], found \[660, 1\]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_bad_tensor_is_named_with_what_was_wanted_and_found(broken, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(broken(changes))


def test_a_folder_without_weights_or_with_garbage_is_refused(quant, tmp_path):
    shutil.copy(quant.directory / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.safetensors does not exist"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load_checkpoint(tmp_path)


def test_the_block_size_follows_from_the_shapes_when_the_configuration_is_silent(broken, quant):
    directory = broken({})
    config = dict(quant.config, quantization_config={"quant_method": "fp8"})
    (directory / "config.json").write_text(json.dumps(config))
    _, weights = load_checkpoint(directory)
    assert all(torch.equal(weights[name], quant.weights[name]) for name in weights)


def test_wide_blocks_are_recognised_by_their_grid(broken, quant):
    name = "layers.2.attn.indexer.wq_b"
    stored, scale = quantise_fp8(quant.weights[f"{name}.weight"], (128, 128))
    directory = broken({f"{name}.weight": stored, f"{name}.scale": scale.view(E8M0)})
    with pytest.raises(ConfigError, match=r"wq_b\.scale must have shape \[16, 2\], found \[4, 1\]"):
        load_checkpoint(directory)
    (directory / "config.json").write_text(json.dumps(dict(quant.config, quantization_config=None)))
    _, weights = load_checkpoint(directory)
    assert torch.equal(weights[f"{name}.weight"], dequantise_fp8(stored, scale, (128, 128)))


def test_scales_are_bytes_of_an_exponent_from_end_to_end():
    stored = torch.ones(2, 64).to(FP8)
    scale = torch.tensor([[127, 130]], dtype=torch.uint8)
    values = dequantise_fp8(stored, scale, (32, 32))
    assert values[0, 31] == 1.0
    assert values[1, 32] == 8.0
    every = power_of_two(torch.arange(255, dtype=torch.uint8)).double()
    assert torch.equal(every, torch.pow(2.0, torch.arange(255, dtype=torch.float64) - 127))


def test_the_low_nibble_is_the_even_column():
    packed = torch.tensor([[0x21 - 256 * 0, 0x7F]], dtype=torch.int8).repeat(1, 8)
    scale = torch.tensor([[128]], dtype=torch.uint8)
    assert dequantise_mxfp4(packed, scale)[0, :4].tolist() == [1.0, 2.0, -12.0, 12.0]


def test_only_float_matrices_lack_scales_in_an_unquantised_file(tiny, tmp_path):
    save_checkpoint(tmp_path, tiny.config, tiny.weights)
    assert load_file(tmp_path / "model.safetensors").keys() == tensor_specs(tiny.shape).keys()


V4_REFUSED = [
    (
        {"layers.0.ffn.gate.tid2eid": lambda t: torch.where(t == t.max(), 8, t)},
        r"tensor layers.0.ffn.gate.tid2eid must name experts 0 to 7, found 0 to 8",
    ),
    (
        {"layers.0.ffn.gate.tid2eid": lambda t: t.float()},
        r"tensor layers.0.ffn.gate.tid2eid must be stored as int32 or int64, found torch.float32",
    ),
    (
        {"layers.0.ffn.gate.tid2eid": lambda t: t[:, :2].contiguous()},
        r"tid2eid must have shape \[256, 3\], found \[256, 2\]",
    ),
    ({"layers.1.attn.compressor.ape": lambda t: None}, r"tensor layers.1.attn.compressor.ape \[4, 256\] is missing"),
    (
        {"layers.2.attn.compressor.ape": lambda t: t[:, :64].contiguous()},
        r"layers.2.attn.compressor.ape must have shape \[128, 128\], found \[128, 64\]",
    ),
    ({"hc_head_fn": lambda t: None}, r"tensor hc_head_fn \[4, 512\] is missing"),
    (
        {"layers.1.ffn.gate.bias_vl": lambda t: torch.zeros(8)},
        r"tensor layers.1.ffn.gate.bias_vl is unexpected: config.json asks for no such tensor",
    ),
]


@pytest.mark.parametrize(("changes", "message"), V4_REFUSED)
def test_a_bad_tensor_of_v4_is_named_with_what_was_wanted_and_found(golden, tmp_path, changes, message):
    directory = golden("v4-tiny-quant").directory
    tensors = load_file(directory / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change(tensors.get(name))
    save_file({k: v for k, v in tensors.items() if v is not None}, str(tmp_path / "model.safetensors"))
    shutil.copy(directory / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path)
