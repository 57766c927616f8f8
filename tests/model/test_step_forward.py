"""The device's step against golden numbers of other implementations, token by token from an empty, poisoned arena."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.model.graph import StepGraph
from engine.model.ops import reference_ops, triton_ops
from engine.model.step_weights import local_experts, make_step_weights
from engine.model.weight_sources import PlainSource, StoredSource
from kernels.forms import RecordFormat, Weight
from tests.model.conftest import Golden
from tests.model.step_cases import Decoded, StepRig, decode, fill_inputs, make_rig

CPU = torch.device("cpu")
LIMIT = 1e-4
"""Two float32 implementations of these models differ by at most 4e-5; the smallest real mistake shows as 1.3e-4."""
MODELS = ("v4-tiny", "v4-tiny-fast", "v4-tiny-quant")
SHORT = {
    "v4-tiny": ["len17", "len5", "len3"],
    "v4-tiny-fast": ["len47", "len33", "len1", "len17"],
    "v4-tiny-quant": ["len5", "len3"],
}
"""Cases that run as sequences of one batch."""
LONG = {"v4-tiny": ["len260", "wide280"], "v4-tiny-fast": ["len100"], "v4-tiny-quant": ["len260"]}
WIDE = {"v4-tiny": ["wide140"], "v4-tiny-fast": ["wide60"], "v4-tiny-quant": ["wide136"]}


@pytest.fixture(scope="module")
def plain_rig(golden: Callable[[str], Golden]) -> Callable[..., StepRig]:
    """Rigs by model and type, on the device that is there: kernels on a CUDA device, the reference elsewhere."""
    rigs: dict[tuple[str, torch.dtype, bool], StepRig] = {}

    def make(name: str, dtype: torch.dtype = torch.float32, *, on_gpu: bool = False) -> StepRig:
        key = (name, dtype, on_gpu)
        if key not in rigs:
            gold = golden(name)
            device = torch.device("cuda") if on_gpu else CPU
            ops = triton_ops() if on_gpu else reference_ops()
            rigs[key] = make_rig(gold.shape, PlainSource(gold.weights, device, dtype), ops)
        return rigs[key]

    return make


def run_cases(gold: Golden, rig: StepRig, cases: list[str], span: int, format: RecordFormat) -> list[Decoded]:
    step = rig.open(len(cases), span, format, seed=span)
    return decode(step, [gold.cases[f"{case}.ids"] for case in cases])


def check_exact(gold: Golden, case: str, got: Decoded) -> None:
    """As other float32 implementations: logits, likeliest tokens, experts."""
    stored = gold.cases.get(f"{case}.logits")
    if stored is None:
        at = gold.cases[f"{case}.pos"].long()
        stored, compared = gold.cases[f"{case}.logits_at"], got.logits[at]
    else:
        compared = got.logits
    assert (compared - stored).abs().max() < LIMIT, case
    clear = gold.cases[f"{case}.margin"] > 1e-3
    assert torch.equal(got.logits.argmax(-1)[clear], gold.cases[f"{case}.argmax"].long()[clear]), case
    assert torch.equal(got.experts, gold.cases[f"{case}.experts"].long()), case


def check_rounded(gold: Golden, case: str, got: Decoded) -> None:
    """Within what other implementations deviate by in bf16, on texts where no choice is near a tie."""
    stored = gold.cases.get(f"{case}.logits")
    if stored is None:
        stored, compared = gold.cases[f"{case}.logits_at"], got.logits[gold.cases[f"{case}.pos"].long()]
    else:
        compared = got.logits
    difference = (compared - stored).abs()
    assert difference.mean() <= 0.05 and difference.max() <= 0.5, (case, difference.mean(), difference.max())


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_one_batch_are_as_other_implementations_have_them(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold, cases = golden(name), SHORT[name]
    for case, got in zip(cases, run_cases(gold, plain_rig(name), cases, span, "fp32"), strict=True):
        check_exact(gold, case, got)


def test_entries_of_128_tokens_are_pooled_in_steps(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig]
) -> None:
    gold = golden("v4-tiny-quant")
    (got,) = run_cases(gold, plain_rig("v4-tiny-quant"), ["len129"], 8, "fp32")
    check_exact(gold, "len129", got)


def test_stored_bytes_give_what_their_values_give(golden: Callable[[str], Golden]) -> None:
    gold = golden("v4-tiny-quant")
    source = StoredSource(gold.directory, gold.shape, CPU)
    rig = make_rig(gold.shape, source, reference_ops())
    source.close()
    assert rig.weights.slots.is_mxfp4 and rig.weights.layers[1].project_query.scale is not None
    rig.weights = rig.weights.__class__(**{**vars(rig.weights), "embed": rig.weights.embed.float()})
    (got,) = run_cases(gold, rig, ["len5"], 4, "fp32")
    check_exact(gold, "len5", got)


def test_scales_that_the_experts_products_can_not_take_are_refused(
    golden: Callable[[str], Golden], tmp_path: Path
) -> None:
    gold = golden("v4-tiny-quant")
    name = "layers.1.ffn.experts.2.w3"
    tensors = load_file(gold.directory / "model.safetensors")
    tensors[f"{name}.scale"].view(torch.uint8)[3, 1] = 193
    save_file(tensors, tmp_path / "model.safetensors")
    source = StoredSource(tmp_path, gold.shape, CPU)
    with pytest.raises(ConfigError, match=rf"scales of {name}.weight may be at most byte 192, found 193"):
        source.slots([(1, 2)])
    source.close()


@pytest.mark.parametrize("name", MODELS)
def test_bf16_stays_within_its_rounding(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str
) -> None:
    gold = golden(name)
    for case, got in zip(
        WIDE[name], run_cases(gold, plain_rig(name, torch.bfloat16), WIDE[name], 4, "bf16"), strict=True
    ):
        check_rounded(gold, case, got)


@pytest.mark.slow
@pytest.mark.parametrize("span", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_long_texts_are_as_other_implementations_have_them(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold = golden(name)
    cases = [*WIDE[name], *LONG[name]]
    for case, got in zip(cases, run_cases(gold, plain_rig(name), cases, span, "fp32"), strict=True):
        check_exact(gold, case, got)


def test_rows_of_a_span_are_as_steps_of_one(golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig]) -> None:
    gold = golden("v4-tiny-fast")
    spans = [run_cases(gold, plain_rig("v4-tiny-fast"), ["len33"], span, "fp32")[0] for span in (1, 5, 8)]
    for other in spans[1:]:
        assert (other.logits - spans[0].logits).abs().max() < LIMIT
        assert torch.equal(other.experts, spans[0].experts)


def test_rows_of_padding_touch_neither_experts_nor_the_arena(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig]
) -> None:
    text = golden("v4-tiny-fast").cases["len33.ids"]
    step = plain_rig("v4-tiny-fast").open(3, 4, "fp32")
    before = step.arena.clone()
    fill_inputs(step, [text[:0]] * 3, 0)
    outputs = step.run()
    assert outputs.logits.isfinite().all()
    assert all((ids == -1).all() for ids in outputs.ids)
    assert torch.equal(step.arena, before)


def test_ranks_add_up_to_the_whole_mixture(golden: Callable[[str], Golden]) -> None:
    gold, ops = golden("v4-tiny-fast"), reference_ops()
    source = PlainSource(gold.weights, CPU, torch.float32)
    count = gold.shape.num_experts
    shares = [range(count), *(local_experts(count, 4, rank) for rank in range(4))]
    whole, *ranks = [make_step_weights(gold.shape, source, max_tokens=1, experts=share) for share in shares]
    assert all(len(rank.slots.up) == count // 4 * gold.shape.num_layers for rank in ranks)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((5, gold.shape.hidden), generator=generator)
    for layer in (0, 3):
        gate = Weight(torch.randn((count, gold.shape.hidden), generator=generator))
        ids, shares_of = ops.route(x, gate, whole.layers[3].bias, None, gold.shape.top_k, 2.5)
        results = [
            ops.mix_experts(x, ids, shares_of, rank.layers[layer].expert_to_slot, rank.slots, 1.0)
            for rank in (whole, *ranks)
        ]
        assert (sum(results[1:]) - results[0]).norm() < 1e-5 * results[0].norm()
    with pytest.raises(ConfigError, match="must divide the 8 experts, found 3"):
        local_experts(count, 3, 0)


def write_again(rig: StepRig, text: torch.Tensor, spoiled: torch.Tensor) -> torch.Tensor:
    """Logits behind `text[:8]`, after the same step with spoiled drafts behind `text[:10]`."""
    step = rig.open(1, 8, "fp32")
    decode(step, [text[:8]])
    for ids in (torch.cat((text[8:10], spoiled)), text[8:16]):
        fill_inputs(step, [torch.cat((text[:8], ids))], 8)
        outputs = step.run()
    return outputs.logits


def test_rejected_drafts_leave_nothing_behind(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig]
) -> None:
    rig = plain_rig("v4-tiny-fast")
    text = golden("v4-tiny-fast").cases["len33.ids"]
    spoiled = torch.tensor([9, 8, 7, 6, 5, 4], dtype=torch.int32)
    assert torch.equal(write_again(rig, text, spoiled), write_again(rig, text, text[10:16]))


# On a CUDA device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_as_other_implementations_have_it(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold, cases = golden(name), [*SHORT[name], *WIDE[name], *LONG[name]]
    for case, got in zip(cases, run_cases(gold, plain_rig(name, on_gpu=True), cases, span, "fp32"), strict=True):
        check_exact(gold, case, got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_in_bf16_stay_within_its_rounding(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold, rig = golden(name), plain_rig(name, torch.bfloat16, on_gpu=True)
    for case, got in zip(WIDE[name], run_cases(gold, rig, WIDE[name], span, "bf16"), strict=True):
        check_rounded(gold, case, got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_computes_what_the_step_does(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int, dtype: torch.dtype
) -> None:
    gold, rig = golden(name), plain_rig(name, dtype, on_gpu=True)
    texts = [gold.cases[f"{case}.ids"] for case in (*SHORT[name], *WIDE[name])]
    format: RecordFormat = "fp32" if dtype == torch.float32 else "bf16"
    eager, captured = (rig.open(len(texts), span, format, seed=4) for _ in range(2))
    graph: StepGraph | None = None
    # The shorter texts end on the way: the same graph then has padding rows.
    for start in range(0, 64, span):
        fill_inputs(eager, texts, start)
        fill_inputs(captured, texts, start)
        graph = StepGraph(captured) if graph is None else graph
        wanted, found = eager.run(), graph.replay()
        used = captured.rows.positions >= 0
        assert torch.equal(wanted.logits[used], found.logits[used]), start
        assert torch.equal(wanted.greedy[used], found.greedy[used]), start
    assert graph is not None and graph.count_nodes().kernels > 10 * len(gold.shape.layer_roles)
