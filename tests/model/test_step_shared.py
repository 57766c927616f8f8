"""V4.1's step against golden numbers of other implementations, and its prompts and rows against the CPU's path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import Limits, RankConfig, model_directory
from engine.errors import ConfigError
from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.model.graph import StepGraph
from engine.model.ops import reference_ops, triton_ops
from engine.model.records import plan_records
from engine.model.rows import RowBatch
from engine.model.shapes import shape_from_config
from engine.model.step_loading import load_step_model
from engine.model.step_model import StepModel
from engine.model.step_shared import SharingStep
from engine.model.step_weights import make_step_weights
from engine.model.weight_sources import PlainSource, StoredSource
from kernels.forms import RecordFormat
from tests.model.conftest import Golden
from tests.model.paged_cases import Source, make_model, open_sequence, random_ids, small_config, write_checkpoint
from tests.model.step_cases import StepRig, fill_inputs, make_rig
from tests.model.test_step_forward import check_exact, check_rounded, run_cases

CPU = torch.device("cpu")
MODELS = ("v41-tiny", "v41-tiny-quant")
SHORT = {"v41-tiny": ["len17", "len31", "len1", "len3"], "v41-tiny-quant": ["len31", "len2", "len17"]}
"""Cases that run as sequences of one batch."""
LONG = {"v41-tiny": ["len150", "len200"], "v41-tiny-quant": ["len128", "len200"]}
RELATIVE = 1e-4
PAGES = 60
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def plain_rig(golden: Callable[[str], Golden]) -> Callable[..., StepRig]:
    """Rigs by model and type: kernels on a CUDA device, the reference elsewhere."""
    rigs: dict[tuple[str, torch.dtype, bool], StepRig] = {}

    def make(name: str, dtype: torch.dtype = torch.float32, *, on_gpu: bool = False) -> StepRig:
        key = (name, dtype, on_gpu)
        if key not in rigs:
            gold = golden(name)
            device = torch.device("cuda") if on_gpu else CPU
            ops = triton_ops() if on_gpu else reference_ops()
            rigs[key] = make_rig(gold.shape, PlainSource(gold.weights, device, dtype), ops, engram=gold.tables)
        return rigs[key]

    return make


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_one_batch_are_as_other_implementations_have_them(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold, cases = golden(name), SHORT[name]
    for case, got in zip(cases, run_cases(gold, plain_rig(name), cases, span, "fp32"), strict=True):
        check_exact(gold, case, got)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_limit_what_later_layers_select(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str
) -> None:
    gold = golden(name)
    (got,) = run_cases(gold, plain_rig(name), ["wide60"], 8, "fp32")
    check_exact(gold, "wide60", got)
    assert (gold.cases["wide60.candidate_blocks"].sum(-1) < -(-60 // gold.shape.candidate_block_size)).any()


@pytest.mark.slow
@pytest.mark.parametrize("span", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_long_texts_are_as_other_implementations_have_them(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold = golden(name)
    for case, got in zip(LONG[name], run_cases(gold, plain_rig(name), LONG[name], span, "fp32"), strict=True):
        check_exact(gold, case, got)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_stays_within_its_rounding(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str
) -> None:
    gold = golden(name)
    (got,) = run_cases(gold, plain_rig(name, torch.bfloat16), ["wide60"], 4, "bf16")
    check_rounded(gold, "wide60", got)


def test_stored_bytes_give_what_their_values_give(golden: Callable[[str], Golden]) -> None:
    gold = golden("v41-tiny-quant")
    source = StoredSource(gold.directory, gold.shape, CPU)
    rig = make_rig(gold.shape, source, reference_ops(), engram=gold.tables)
    source.close()
    memories = [layer.memory for layer in rig.weights.layers if layer.memory is not None]
    assert memories and all(memory.table.scale is not None for memory in memories)
    assert rig.weights.slots.is_mxfp4 and rig.weights.layers[1].project_query.block == (32, 32)
    rig.weights = rig.weights.__class__(**{**vars(rig.weights), "embed": rig.weights.embed.float()})
    (got,) = run_cases(gold, rig, ["len3"], 2, "fp32")
    check_exact(gold, "len3", got)


def test_rows_of_padding_touch_neither_experts_nor_the_arena(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig]
) -> None:
    text = golden("v41-tiny").cases["len31.ids"]
    step = plain_rig("v41-tiny").open(2, 4, "fp32")
    assert isinstance(step, SharingStep)
    before = step.arena.clone()
    fill_inputs(step, [text[:0]] * 2, 0)
    outputs = step.run()
    assert outputs.logits.isfinite().all()
    assert all((ids == -1).all() for ids in outputs.ids)
    assert torch.equal(step.arena, before)


def test_a_memory_wants_its_constants(golden: Callable[[str], Golden]) -> None:
    gold = golden("v41-tiny")
    with pytest.raises(ConfigError, match="pass the tables made by engram_tables"):
        make_step_weights(gold.shape, PlainSource(gold.weights, CPU, torch.float32), max_tokens=1)


# Prompts and rows, as a rank's passes have them


def open_model(directory: Path, *, model: str = "", device: str = "cpu", rows: tuple[int, ...] = (16, 48)) -> StepModel:
    config = RankConfig(
        role="decode", model=model or str(directory), device="cuda", fabric="nixl", page_tokens=16,
        max_model_tokens=320, num_pages=PAGES, num_slabs=6, kv_dtype="float32", threads=1, replay_rows=0,
        config_digest="0", limits=Limits(decode_rows=4),
    )  # fmt: skip
    ops = triton_ops() if device == "cuda" else reference_ops()
    return load_step_model(config, lambda *_: None, torch.device(device), poison=True, ops=ops, prompt_rows=rows)[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_chunks_and_rows_are_those_of_the_paged_model(tmp_path: Path, device: str) -> None:
    write_checkpoint(tmp_path, seed=3)
    model = open_model(tmp_path, device=device)
    shape, weights = load_checkpoint(tmp_path)
    assert {role.ratio for role in shape.layer_roles} == {0, 1, 2} and shape.index_topk == 12
    paged = make_model(Source(shape, weights, load_tables(tmp_path, shape)), page_tokens=16, pages=PAGES)
    ids = random_ids(90, shape.vocab_size, seed=1)
    wanted = open_sequence(paged, 90).run(ids)
    start, found = 0, []
    here = open_sequence(paged, 90, slab=2)
    # Longer than the window, and over the ends of groups and pages; then one by one.
    for cut in (31, 1, 46, *[1] * 12):
        found.append(model.forward(here.batch(ids[start : start + cut], start)).cpu().clone())
        start += cut
    error = (torch.cat(found) - wanted).abs().max() / wanted.abs().max()
    assert error < RELATIVE, float(error)
    assert small_config()["text_config"]["candidate_topk_blocks"] * shape.candidate_block_size < 90


def test_a_copied_slab_goes_on_as_the_first(tmp_path: Path) -> None:
    """With the ids that memories look back at."""
    write_checkpoint(tmp_path, seed=3)
    model = open_model(tmp_path)
    ids = random_ids(40, model.shape.vocab_size, seed=2)
    first, second = (RowBatch(np.array([slab]), np.array([32]), ids[None, 32:], np.arange(20)[None]) for slab in (0, 5))
    model.forward(dataclasses.replace(first, starts=np.zeros(1, np.int64), tokens=ids[None, :32]), wanted=[31])
    model.arena.slab_bytes_of(5).copy_(model.arena.slab_bytes_of(0))
    wanted = model.forward(first).clone()
    model.arena.slab_bytes_of(0).fill_(255)
    assert torch.equal(model.forward(second), wanted)


def test_a_memory_that_looks_too_far_back_is_refused() -> None:
    config = small_config()
    config["text_config"] |= {"engram_max_ngram_size": 10, "engram_n_heads": 1, "engram_num_embeddings": [2000, 2000]}
    with pytest.raises(ConfigError, match="may look at 8 earlier ids, found 9"):
        plan_records(shape_from_config(config), page_tokens=16, num_pages=1, num_slabs=1, format="fp32")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_the_bundled_model_says_the_same(device: str) -> None:
    directory = model_directory("nano")
    model = open_model(directory, model="nano", device=device, rows=(16, 72))
    shape, weights = load_checkpoint(directory)
    paged = make_model(Source(shape, weights, load_tables(directory, shape)), page_tokens=16, pages=PAGES)
    ids = np.array([0, *random_ids(69, 2000, seed=4)])
    here, there = (open_sequence(paged, 80, slab=slab) for slab in (1, 2))
    wanted = here.run(ids)[-1]
    found = model.forward(there.batch(ids, 0), wanted=[len(ids) - 1])[-1].cpu()
    for at in range(len(ids), len(ids) + 4):
        assert (found - wanted).abs().max() < RELATIVE * wanted.abs().max()
        token = np.array([int(wanted.argmax())])
        assert int(found.argmax()) == token[0]
        wanted = here.run(token, at)[-1]
        found = model.forward(there.batch(token, at))[-1].cpu()


# On a CUDA device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_as_other_implementations_have_it(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int
) -> None:
    gold, cases = golden(name), [*SHORT[name], "wide60", *LONG[name]]
    for case, got in zip(cases, run_cases(gold, plain_rig(name, on_gpu=True), cases, span, "fp32"), strict=True):
        check_exact(gold, case, got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_computes_what_the_step_does(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], name: str, span: int, dtype: torch.dtype
) -> None:
    gold, rig = golden(name), plain_rig(name, dtype, on_gpu=True)
    texts = [gold.cases[f"{case}.ids"] for case in (*SHORT[name], "wide60")]
    format: RecordFormat = "fp32" if dtype == torch.float32 else "bf16"
    eager, captured = (rig.open(len(texts), span, format, seed=4) for _ in range(2))
    graph: StepGraph | None = None
    # The shorter texts end on the way: the same graph then has padding rows.
    for start in range(0, 60, span):
        fill_inputs(eager, texts, start)
        fill_inputs(captured, texts, start)
        graph = StepGraph(captured) if graph is None else graph
        wanted, found = eager.run(), graph.replay()
        used = captured.rows.positions >= 0
        assert torch.equal(wanted.logits[used], found.logits[used]), start
        assert torch.equal(wanted.greedy[used], found.greedy[used]), start
    assert graph is not None and graph.count_nodes().kernels > 10 * len(gold.shape.layer_roles)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("span", [1, 4])
def test_kernels_in_bf16_stay_within_its_rounding(
    golden: Callable[[str], Golden], plain_rig: Callable[..., StepRig], span: int
) -> None:
    gold, rig = golden("v41-tiny"), plain_rig("v41-tiny", torch.bfloat16, on_gpu=True)
    (got,) = run_cases(gold, rig, ["wide60"], span, "bf16")
    check_rounded(gold, "wide60", got)
