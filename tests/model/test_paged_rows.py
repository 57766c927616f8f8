"""A row's result is the same bits, whatever shares its pass, however its prompt was cut, wherever its state lies."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.model import reference
from engine.model.kv import SPARE_ROWS
from tests.model.paged_cases import (
    Source,
    join,
    make_model,
    open_sequence,
    random_ids,
    random_model,
    small_config,
    small_v4_config,
    smallest_page,
)

LENGTH = 150


@pytest.fixture(scope="module", params=["v4.1", "v4"])
def source(request: pytest.FixtureRequest) -> Source:
    return random_model(config=small_v4_config() if request.param == "v4" else small_config())


@pytest.fixture(scope="module")
def ids(source: Source) -> np.ndarray:
    return random_ids(LENGTH, source.shape.vocab_size, seed=1)


@pytest.fixture(scope="module")
def whole(source: Source, ids: np.ndarray) -> torch.Tensor:
    """Logits of all rows, computed in one pass."""
    return open_sequence(make_model(source), LENGTH).run(ids)


def test_one_pass_agrees_with_the_full_forward(source: Source, ids: np.ndarray, whole: torch.Tensor) -> None:
    truth = reference.forward(source.weights, source.shape, torch.from_numpy(ids)[None], engram=source.tables)
    assert truth.logits is not None
    assert (whole - truth.logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("sizes", [[1], [2], [3], [7], [8], [9], [16], [33], [64], [149], [1, 9, 8, 40, 13]])
@pytest.mark.parametrize("pages_joined", [1, 2])
def test_chunks_of_any_size_give_the_same_bits(
    source: Source, ids: np.ndarray, whole: torch.Tensor, sizes: list[int], pages_joined: int
) -> None:
    model = make_model(source, page_tokens=pages_joined * smallest_page(source.shape))
    assert torch.equal(open_sequence(model, LENGTH, slab=5).run_chunks(ids, sizes), whole)


@pytest.mark.parametrize("start", [1, 2, 17, 63, 64, 100])
@pytest.mark.parametrize("span", [2, 5, SPARE_ROWS])
def test_verify_rows_equal_single_decode_rows(
    source: Source, ids: np.ndarray, whole: torch.Tensor, start: int, span: int
) -> None:
    model = make_model(source)
    ours, other = open_sequence(model, LENGTH, slab=2), open_sequence(model, 80, slab=3, seed=1)
    ours.run(ids[:start])
    noise = random_ids(80, source.shape.vocab_size, seed=8)
    other.run(noise[:40])
    pass_rows = join([other.batch(noise[40 : 40 + span], 40), ours.batch(ids[start : start + span], start)])
    assert torch.equal(model.forward(pass_rows)[span:], whole[start : start + span])


@pytest.mark.parametrize("accepted", range(SPARE_ROWS))
@pytest.mark.parametrize("start", [30, 31])
def test_rejected_drafts_are_overwritten_without_rollback(
    source: Source, ids: np.ndarray, whole: torch.Tensor, start: int, accepted: int
) -> None:
    model = make_model(source)
    sequence = open_sequence(model, LENGTH)
    sequence.run(ids[:start])
    drafts = ids[start : start + SPARE_ROWS].copy()
    drafts[accepted + 1 :] = random_ids(SPARE_ROWS, source.shape.vocab_size, seed=4)[accepted + 1 :]
    rows = sequence.run(drafts, start)
    assert torch.equal(rows[: accepted + 1], whole[start : start + accepted + 1])
    after = start + accepted + 1
    again = torch.cat([sequence.run(ids[at : at + 1], at) for at in range(after, after + 30)])
    assert torch.equal(again, whole[after : after + 30])


def test_a_batch_of_mixed_lengths_equals_its_rows_alone(source: Source) -> None:
    model = make_model(source)
    lengths = [1, 2, 37, 130]
    texts = [random_ids(length + 6, source.shape.vocab_size, seed=10 + length) for length in lengths]
    together = [open_sequence(model, len(text), slab=slab, seed=slab) for slab, text in enumerate(texts)]
    for sequence, text, length in zip(together, texts, lengths, strict=True):
        sequence.run(text[:length])
    alone_model = make_model(source)
    alone = [open_sequence(alone_model, len(text)).run_chunks(text, [11]) for text in texts]
    for step in range(6):
        batch = join(
            [s.batch(t[n + step : n + step + 1], n + step) for s, t, n in zip(together, texts, lengths, strict=True)]
        )
        rows = model.forward(batch)
        for row, single, length in zip(rows, alone, lengths, strict=True):
            assert torch.equal(row, single[length + step])


@pytest.mark.parametrize("seed", range(12))
def test_prompts_in_one_pass_have_the_bits_that_they_have_alone(source: Source, seed: int) -> None:
    """Prompts of any lengths, begun and continued together in chunks of any sizes, and what they leave behind."""
    rng = random.Random(seed)
    ahead = 3
    lengths = [rng.choice([1, 2, 3, 7, 8, 9, 19, 20, 21, 28, 29, 40, 63, 64, 65, 100, 130]) for _ in range(4)]
    texts = [
        random_ids(length + ahead, source.shape.vocab_size, seed=50 * seed + n) for n, length in enumerate(lengths)
    ]
    alone = [open_sequence(make_model(source), len(text)).run(text) for text in texts]
    model = make_model(source)
    together = [open_sequence(model, len(text), slab=slab, seed=slab) for slab, text in enumerate(texts)]
    done = [0] * len(texts)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        left = [n for n in range(len(texts)) if done[n] < lengths[n] and rng.random() < 0.7]
        if not left:
            continue
        rng.shuffle(left)
        sizes = [min(rng.choice([1, 3, 8, 9, 30, 64, 130]), lengths[n] - done[n]) for n in left]
        batches = [
            together[n].batch(texts[n][done[n] : done[n] + size], done[n]) for n, size in zip(left, sizes, strict=True)
        ]
        parts = model.forward(join(batches)).split(sizes)
        for n, size, rows in zip(left, sizes, parts, strict=True):
            assert torch.equal(rows, alone[n][done[n] : done[n] + size])
            done[n] += size
    for step in range(ahead):
        batch = join(
            [s.batch(t[n + step : n + step + 1], n + step) for s, t, n in zip(together, texts, lengths, strict=True)]
        )
        for row, single, length in zip(model.forward(batch), alone, lengths, strict=True):
            assert torch.equal(row, single[length + step])


def test_the_same_row_many_times_in_a_batch_has_the_same_bits_everywhere(
    source: Source, ids: np.ndarray, whole: torch.Tensor
) -> None:
    model = make_model(source, slabs=24)
    sequence = open_sequence(model, LENGTH)
    sequence.run(ids[:70])
    for slab in range(1, 24):
        model.arena.slab_bytes_of(slab).copy_(model.arena.slab_bytes_of(0))
    # All slabs share the pages: the entry that position 70 would close is the same in each.
    batches = []
    for slab in range(24):
        sequence.slab = slab
        batches.append(sequence.batch(ids[70:71], 70))
    rows = model.forward(join(batches))
    assert torch.equal(rows, whole[70:71].expand(24, -1))


@pytest.mark.parametrize("length", [1, 2, 19, 20, 64, 65])
def test_state_moved_to_another_arena_continues_with_the_same_bits(
    source: Source, ids: np.ndarray, whole: torch.Tensor, length: int
) -> None:
    sender, receiver = make_model(source), make_model(source, pages=120, slabs=5)
    assert sender.arena.layout.digest == receiver.arena.layout.digest
    here, there = open_sequence(sender, length, slab=6), open_sequence(receiver, LENGTH, slab=1)
    here.run_chunks(ids[:length], [16])
    for source_page, target_page in zip(here.pages.tolist(), there.pages.tolist(), strict=False):
        receiver.arena.page_bytes_of(target_page).copy_(sender.arena.page_bytes_of(source_page))
    receiver.arena.slab_bytes_of(1).copy_(sender.arena.slab_bytes_of(6))
    rows = torch.cat([there.run(ids[at : at + 1], at) for at in range(length, LENGTH)])
    assert torch.equal(rows, whole[length:])


def test_a_repeated_step_gives_the_same_bits(source: Source, ids: np.ndarray, whole: torch.Tensor) -> None:
    model = make_model(source)
    sequence = open_sequence(model, LENGTH)
    sequence.run(ids[:50])
    for at in (50, 50, 51, 50, 51, 52):
        assert torch.equal(sequence.run(ids[at : at + 1], at)[0], whole[at])


def test_a_used_slab_and_used_pages_do_not_show(source: Source, ids: np.ndarray, whole: torch.Tensor) -> None:
    model = make_model(source)
    sequence = open_sequence(model, LENGTH)
    sequence.run(random_ids(LENGTH, source.shape.vocab_size, seed=77))
    assert torch.equal(sequence.run_chunks(ids, [40]), whole)


def test_a_bfloat16_cache_stays_near_and_keeps_its_own_bits(
    source: Source, ids: np.ndarray, whole: torch.Tensor
) -> None:
    one = open_sequence(make_model(source, dtype="bfloat16"), LENGTH).run(ids)
    cut = open_sequence(make_model(source, dtype="bfloat16"), LENGTH).run_chunks(ids, [1, 30, 8])
    assert torch.equal(one, cut)
    # Up to the first full set of entries no rounding can change a choice of entries; experts may flip on few rows.
    early = (one[:12] - whole[:12]).abs()
    assert 0 < float(early.median()) < 0.05


def test_only_wanted_rows_come_back_and_all_layers_see_all_rows(
    source: Source, ids: np.ndarray, whole: torch.Tensor
) -> None:
    model = make_model(source)
    sequence = open_sequence(model, LENGTH)
    picked = model.forward(sequence.batch(ids[:90], 0), wanted=[89, 3])
    assert torch.equal(picked, whole[[89, 3]])
    assert model.forward(sequence.batch(ids[:1], 0), wanted=[]).shape == (0, source.shape.vocab_size)
    assert model.probe is not None
    assert model.probe.rows_entered == [91] * source.shape.num_layers


def test_a_span_beyond_the_staging_rows_is_refused(source: Source, ids: np.ndarray) -> None:
    model = make_model(source, chunk=32)
    with pytest.raises(ConfigError, match="at most 32 rows, found 33"):
        open_sequence(model, LENGTH).run(ids[:33])
    both = [open_sequence(model, LENGTH, slab=slab).batch(ids[:26], 0) for slab in range(2)]
    with pytest.raises(ConfigError, match="need 52 staging rows, there are 51"):
        model.forward(join(both))
