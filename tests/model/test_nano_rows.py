"""The bundled model on the paged path: the reference's numbers, and the same bits alone, in a batch, in any chunk."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model import reference
from engine.model.rows import RowBatch
from engine.model.transformer import PagedTransformer
from tests.e2e.prompts import RING, WINDOW, cut, fresh_seed, random_ids, text_ids
from tests.e2e.truth import LONGEST, Truth, load_nano, make_nano

PAGE = 64
LOGIT = 2e-4
"""Absolute, float32, on logits of up to 30: some 200 roundings of the largest. Measured: 4e-5, and 1.1e-4 in one of
many texts."""
CLOSE = 1e-4
"""A choice this near to a tie may fall the other way where numbers differ in their last bits."""


# ---------------------------------------------------------------- against the reference


def compare(model: PagedTransformer, ids: Sequence[int]) -> tuple[int, float]:
    """Run one text both ways.

    Returns:
        How many rows come before the first that chose otherwise (at a near-tie; anything else fails here), and the
        largest logit difference among them.
    """
    shape, weights, tables = load_nano()
    array = np.array(ids, np.int64)
    pages = np.arange(model.arena.num_pages)[None]
    logits = model.forward(RowBatch(np.array([0]), np.array([0]), array[None], pages))
    record = reference.Record(choices=True)
    with torch.inference_mode():
        truth = reference.forward(weights, shape, torch.from_numpy(array)[None], engram=tables, record=record)
    assert truth.logits is not None and record.min_gap is not None
    otherwise = _other_choices(model, record, len(ids))
    rows = int(otherwise.nonzero()[0]) if bool(otherwise.any()) else len(ids)
    if rows < len(ids):
        assert float(record.min_gap[0, rows]) < CLOSE, f"row {rows} chose otherwise, and not at a tie"
    difference = (logits - truth.logits[0]).abs().amax(1)
    return rows, float(difference[:rows].max()) if rows else 0.0


def _other_choices(model: PagedTransformer, record: reference.Record, length: int) -> Tensor:
    """bool[length], rows in which an expert, an entry or a candidate block is not the reference's."""
    shape, probe = model.shape, model.probe
    assert probe is not None
    other = torch.zeros(length, dtype=torch.bool)
    for layer, experts in enumerate(record.experts):
        ours = torch.from_numpy(probe.experts[layer]).sort(-1).values
        other |= (ours != experts[0].sort(-1).values).any(-1)
    for layer, entries in record.index_topk.items():
        seen = torch.arange(1, length + 1) // shape.layer_roles[layer].ratio
        ours = probe.entries[layer]
        ours = torch.where(ours < seen[:, None], ours, -1).sort(-1).values
        other |= (ours != entries[0].sort(-1).values).any(-1)
    if probe.blocks is not None:
        assert record.candidate_blocks is not None
        # Scores reach to a page's end, so there may be blocks beyond the text's, and beyond those stands "no block".
        blocks = record.candidate_blocks.shape[-1]
        kept = torch.zeros((length, int(probe.blocks.max()) + 1 + blocks), dtype=torch.bool)
        kept.scatter_(1, probe.blocks, True)
        other |= (kept[:, :blocks] != record.candidate_blocks[0]).any(-1)
    return other


def test_the_bundled_model_computes_what_the_reference_computes() -> None:
    rng = random.Random(fresh_seed())
    model = make_nano()
    texts = [random_ids(rng, 200), cut(rng, text_ids(), 200), cut(rng, text_ids(), 300)]
    texts.append(random_ids(rng, 400) + cut(rng, text_ids(), 500))
    compared, worst = 0, 0.0
    for ids in texts:
        rows, difference = compare(model, ids)
        print(f"{len(ids)} ids: {rows} rows before a near-tie fell otherwise, largest difference {difference:.1e}")
        compared, worst = compared + rows, max(worst, difference)
    assert worst < LOGIT
    # A near-tie falls otherwise about once in five thousand rows: a third of all rows is left even on a bad day.
    assert compared > sum(map(len, texts)) // 3
    # The long text was one in which choices bite, of entries and of blocks.
    shape, probe = model.shape, model.probe
    assert probe is not None and probe.blocks is not None
    assert len(texts[-1]) // 2 > shape.index_topk
    assert probe.blocks.shape == (len(texts[-1]), shape.candidate_blocks)
    assert len(texts[-1]) > 2 * shape.candidate_blocks * shape.candidate_block_size


@pytest.mark.slow
@pytest.mark.parametrize("length", [500, 1000, 2000])
def test_the_bundled_model_computes_what_the_reference_computes_on_many_texts(length: int) -> None:
    rng = random.Random(fresh_seed())
    model = make_nano()
    rows_of = []
    for number in range(8000 // length):
        ids = random_ids(rng, length) if number % 2 else cut(rng, text_ids(), length)
        rows, difference = compare(model, ids)
        rows_of.append(rows)
        assert difference < LOGIT
    print(rows_of)
    assert sum(rows_of) > 4000


# ---------------------------------------------------------------- batches


def lengths_up_to(longest: int, count: int, rng: random.Random) -> list[int]:
    """Mixed lengths: the ends of what there is, boundaries, and anything between."""
    fixed = [1, longest, 2, WINDOW - 1, WINDOW, RING, PAGE * 2 - 1, PAGE * 2, PAGE * 8, PAGE * 8 + 1]
    return [*fixed, *(rng.randint(1, 300) for _ in range(count - len(fixed)))]


def stand(model: PagedTransformer, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
    """Compute each text up to its length on pages and a slab of its own; the page tables."""
    free = np.random.default_rng(1).permutation(model.arena.num_pages)
    tables, at = [], 0
    for slab, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        pages = -(-len(text) // PAGE)
        tables.append(free[at : at + pages])
        at += pages
        batch = RowBatch(np.array([slab]), np.array([0]), text[None, :length], tables[-1][None])
        model.forward(batch, wanted=[])
    return tables


def copy_arena(source: PagedTransformer, target: PagedTransformer) -> None:
    for page in range(source.arena.num_pages):
        target.arena.page_bytes_of(page).copy_(source.arena.page_bytes_of(page))
    for slab in range(source.arena.num_slabs):
        target.arena.slab_bytes_of(slab).copy_(source.arena.slab_bytes_of(slab))


def joined(
    texts: Sequence[np.ndarray], tables: Sequence[np.ndarray], starts: Sequence[int], span: int, rows: Sequence[int]
) -> RowBatch:
    widest = max(len(tables[row]) for row in rows)
    padded = np.zeros((len(rows), widest), np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(tables[row])] = tables[row]
    tokens = np.stack([texts[row][starts[row] : starts[row] + span] for row in rows])
    return RowBatch(np.array(rows), np.array([starts[row] for row in rows]), tokens, padded)


def test_a_batch_of_mixed_lengths_gives_each_request_the_bits_it_gets_alone() -> None:
    """Decode steps of 8 to 32 rows, and verify steps of all drafts that a step can hold, on lengths of 1 to 1500."""
    rng = random.Random(fresh_seed())
    count, ahead = 32, 12
    lengths = lengths_up_to(1500, count, rng)
    texts = [np.array(random_ids(rng, length + ahead), np.int64) for length in lengths]
    num_pages = sum(-(-len(text) // PAGE) for text in texts)
    alone, together = (make_nano(num_pages=num_pages, num_slabs=count) for _ in range(2))
    tables = stand(alone, texts, lengths)
    copy_arena(alone, together)

    starts = list(lengths)
    for span, size in ((1, 8), (1, 17), (1, 32), (8, 16), (3, 32), (1, 32)):
        rows = [0, 1, *rng.sample(range(2, count), size - 2)]  # the shortest and the longest are always there
        rng.shuffle(rows)
        logits = together.forward(joined(texts, tables, starts, span, rows)).view(size, span, -1)
        for place, row in enumerate(rows):
            single = alone.forward(joined(texts, tables, starts, span, [row]))
            assert torch.equal(logits[place], single), f"{lengths[row]} ids, {span} rows at {starts[row]}, batch {size}"
            # Part of a verify step's rows are accepted; the next step starts behind them.
            if starts[row] + 1 + 8 <= lengths[row] + ahead:
                starts[row] += 1
    assert int(max(starts)) > max(lengths)


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("page_tokens", [16, PAGE])
def test_chunks_and_single_rows_of_any_size_give_the_bits_of_one_pass(page_tokens: int) -> None:
    rng = random.Random(fresh_seed())
    truth = Truth(page_tokens)
    for length in (WINDOW + 1, 2 * PAGE + 1, rng.randint(150, 400)):
        ids = random_ids(rng, length) if rng.random() < 0.5 else cut(rng, text_ids(), length)
        whole, _ = truth.run(ids, [LONGEST])
        for sizes in ([page_tokens], [rng.randint(1, 90) for _ in range(30)]):
            assert torch.equal(truth.run(ids, sizes)[0], whole), f"{length} ids in chunks of {sizes}"
    # As a decode rank goes on: behind a chunk, row by row.
    assert torch.equal(truth.run(ids, [length - 12, 1])[0], whole)
