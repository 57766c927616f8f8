"""Prompts and rows through the device's step, against the paged model on the CPU: the same model, other sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from engine.config import Limits, RankConfig
from engine.errors import ConfigError
from engine.model.kv import SPARE_ROWS
from engine.model.ops import reference_ops
from engine.model.rows import RowBatch
from engine.model.step_loading import load_step_model
from engine.model.step_model import StepModel
from tests.model.conftest import Golden

LIMIT = 1e-4
"""As for the step itself, `test_step_forward.py`."""
PROMPT_ROWS = (16, 48)
"""Longer than the tiny models' windows and groups, so that a step writes more rows than a slab's rings hold."""


def open_model(directory: Path, *, device: str = "cpu", kv_dtype: Literal["float32", "fp8"] = "float32") -> StepModel:
    config = RankConfig(
        role="decode", model=str(directory), device="cuda", fabric="nixl", page_tokens=16, max_model_tokens=320,
        num_pages=60, num_slabs=6, kv_dtype=kv_dtype, threads=1, replay_rows=0, config_digest="0",
        limits=Limits(decode_rows=4),
    )  # fmt: skip
    on_gpu = device == "cuda"
    model, _ = load_step_model(
        config,
        lambda *_: None,
        torch.device(device),
        poison=True,
        ops=None if on_gpu else reference_ops(),
        prompt_rows=PROMPT_ROWS,
    )
    return model


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, oracle: Path) -> StepModel:
    return open_model(oracle / "v4-tiny-fast", device=request.param)


def rows(start: int, ids: np.ndarray, *, slab: int, first_page: int) -> RowBatch:
    table = np.arange(first_page, first_page + 20)[None]
    return RowBatch(np.array([slab]), np.array([start]), ids[None], table)


@pytest.mark.parametrize("cuts", [(47,), (1, 46), (16, 17, 14), (30, 9, 8)])
def test_a_prompt_in_pieces_has_the_golden_logits(
    golden: Callable[[str], Golden], model: StepModel, cuts: tuple[int, ...]
) -> None:
    case = golden("v4-tiny-fast").cases
    ids = case["len47.ids"].long().numpy()
    slab, found, start = len(cuts), [], 0
    for cut in cuts:
        found.append(model.forward(rows(start, ids[start : start + cut], slab=slab, first_page=20)).cpu())
        start += cut
    assert (torch.cat(found) - case["len47.logits"]).abs().max() < LIMIT


def test_a_prompt_longer_than_a_step_and_rows_after_it(golden: Callable[[str], Golden], model: StepModel) -> None:
    case = golden("v4-tiny-fast").cases
    ids = case["len100.ids"].long().numpy()
    head = model.forward(rows(0, ids[:90], slab=0, first_page=0), wanted=[3, 60, 89]).cpu()
    tail = [model.forward(rows(at, ids[at : at + 1], slab=0, first_page=0)).cpu() for at in range(90, 100)]
    stored = case["len100.logits_at"] if "len100.logits_at" in case else case["len100.logits"]
    places = case["len100.pos"].long() if "len100.pos" in case else torch.arange(100)
    got = {3: head[0], 60: head[1], 89: head[2]} | {90 + at: line[0] for at, line in enumerate(tail)}
    compared = [(int(place), line) for place, line in zip(places, stored, strict=True) if int(place) in got]
    assert len(compared) >= 4
    for place, line in compared:
        assert (got[place] - line).abs().max() < LIMIT, place


def test_sequences_of_one_pass_do_not_meet(golden: Callable[[str], Golden], model: StepModel) -> None:
    case = golden("v4-tiny-fast").cases
    texts = [case[f"{name}.ids"].long().numpy() for name in ("len33", "len17", "len47")]
    tokens = np.zeros((3, 47), np.int64)
    for line, ids in zip(tokens, texts, strict=True):
        line[: len(ids)] = ids
    tables = np.arange(60).reshape(3, 20)
    counts = np.array([len(ids) for ids in texts])
    slabs = np.array([3, 1, 4])
    batch = RowBatch(slabs, np.zeros(3, np.int64), tokens, tables, counts)
    last = model.forward(batch, wanted=(batch.firsts + counts - 1).tolist()).cpu()
    for name, line in zip(("len33", "len17", "len47"), last, strict=True):
        assert (line - case[f"{name}.logits"][-1]).abs().max() < LIMIT, name
    # Rows after it, three of them where a step has room for four.
    follow = np.array([5, 6, 7])
    step = RowBatch(slabs, counts, follow[:, None], tables)
    alone = []
    for at in range(3):
        own = slice(at, at + 1)
        alone.append(model.forward(RowBatch(slabs[own], counts[own], follow[own, None], tables[own])).clone())
    assert (model.forward(step) - torch.cat(alone)).abs().max() < LIMIT


def test_rows_come_in_the_order_in_which_they_are_asked_for(model: StepModel) -> None:
    tables = np.arange(40).reshape(2, 20)
    batch = RowBatch(np.array([0, 1]), np.zeros(2, np.int64), np.array([[5], [6]]), tables)
    both = model.forward(batch).clone()
    assert not torch.equal(both[0], both[1])
    for wanted in ([1, 0], [0, 0], [1]):
        assert torch.equal(model.forward(batch, wanted), both[wanted])


def test_pages_past_the_longest_sequence_are_left_out(model: StepModel) -> None:
    one = model.forward(rows(0, np.array([5]), slab=0, first_page=0)).clone()
    wide = RowBatch(np.array([0]), np.array([0]), np.array([[5]]), np.arange(25)[None])
    assert torch.equal(model.forward(wide), one)


def test_a_copied_slab_goes_on_as_the_first(golden: Callable[[str], Golden], model: StepModel) -> None:
    ids = golden("v4-tiny-fast").cases["len47.ids"].long().numpy()
    model.forward(rows(0, ids[:32], slab=0, first_page=0), wanted=[31])
    model.arena.slab_bytes_of(5).copy_(model.arena.slab_bytes_of(0))
    first = model.forward(rows(32, ids[32:], slab=0, first_page=0)).clone()
    model.arena.slab_bytes_of(0).fill_(255)
    again = model.forward(rows(32, ids[32:], slab=5, first_page=0))
    assert torch.equal(first, again)


def test_counts_and_tokens_are_kept_by_slab(model: StepModel) -> None:
    arena = model.arena
    vocab = model.shape.vocab_size
    for slab in (0, 3):
        arena.write_count(slab, torch.zeros(vocab, dtype=torch.int16))
    arena.add_counts(np.array([3, 0]), np.array([7, vocab - 1]))
    arena.add_counts(np.array([3]), np.array([7]))
    first, second = arena.read_counts(np.array([0, 3]))
    assert (int(first[vocab - 1]), int(second[7]), int(second.sum() + first.sum())) == (1, 2, 3)
    arena.write_sampled(np.array([2, 4]), np.array([11, 12]))
    assert arena.read_sampled(np.array([4, 2])).tolist() == [12, 11]


def test_a_private_block_lies_behind_the_slabs(model: StepModel) -> None:
    records = model.arena.records
    window = records.staging[0].window
    assert window.rows == model.shape.window + max(PROMPT_ROWS) > records.layers[0].window.rows
    assert window.data >= records.slabs_at + records.num_slabs * records.slab_bytes
    assert records.layers[0].window.rows == model.shape.window + SPARE_ROWS


def test_a_format_that_records_can_not_have_is_refused_by_its_key(oracle: Path) -> None:
    with pytest.raises(ConfigError, match="kv_dtype fp8, page_tokens 16: fp8 records need a multiple of 64 channels"):
        open_model(oracle / "v4-tiny-fast", kv_dtype="fp8")
