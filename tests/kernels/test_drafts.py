"""Drafting's own kernels against their truths: rows, verdicts, slots, and what is kept, padding and ends among them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import drafts, reference
from kernels.forms import DraftState, Judged, StepRows, StreamPlace

POISON = 0xFF


def make_state(slabs: int, most: int, device: torch.device, seed: int) -> DraftState:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, dtype=torch.int32, generator=generator).to(device)

    return DraftState(
        draw(5, 9, slabs + 1), draw(0, 2, slabs + 1), draw(0, most + 1, slabs + 1), draw(0, 2, slabs + 1, most)
    )


def copy(state: DraftState) -> DraftState:
    return DraftState(*(getattr(state, field.name).clone() for field in dataclasses.fields(state)))


def make_told(sequences: int, slabs: int, most: int, device: torch.device, seed: int) -> Tensor:
    """Every kind of sequence: named by the host or not, with its drafts or not, at its end, padding."""
    generator = torch.Generator().manual_seed(seed)
    told = torch.randint(0, 2, (5 + most, sequences), generator=generator, dtype=torch.int32)
    told[0][torch.rand(sequences, generator=generator) < 0.5] = -1
    told[1] = torch.randint(4, 9, (sequences,), generator=generator)
    told[1][torch.rand(sequences, generator=generator) < 0.5] = -1
    told[2] = torch.randperm(slabs, generator=generator)[:sequences]
    told[3] = torch.randint(5, 14, (sequences,), generator=generator)
    told[4] = torch.randint(-1, most + 1, (sequences,), generator=generator)
    told[:, -1] = torch.tensor([-1, -1, slabs, 0, 0] + [0] * most)
    return told.to(device)


def make_rows(sequences: int, span: int, device: torch.device) -> tuple[StepRows, Tensor]:
    def unset(*sizes: int) -> Tensor:
        return torch.full(sizes, -7, dtype=torch.int32, device=device)

    return StepRows(unset(sequences * span), unset(sequences), unset(sequences, 1), span), unset(sequences * span)


@pytest.mark.parametrize(("sequences", "span", "most"), [(33, 4, 3), (33, 2, 3), (16, 1, 2), (1, 3, 2)])
def test_rows_verdicts_and_what_is_kept(sequences: int, span: int, most: int, device: torch.device) -> None:
    """A step after the other on the same state; tokens are two, so that drafts hold often."""
    slabs, rounds = sequences + 3, most if span > 1 else 0
    state = make_state(slabs, most, device, seed=span)
    truth = copy(state)
    seen: set[int] = set()
    for step in range(6):
        told = make_told(sequences, slabs, most, device, seed=10 * sequences + step)
        (rows, tokens), (rows_truth, tokens_truth) = (make_rows(sequences, span, device) for _ in range(2))
        drafts.open_rows(told, state, rows, tokens)
        reference.open_rows(told, truth, rows_truth, tokens_truth)
        assert torch.equal(tokens, tokens_truth)
        assert torch.equal(rows.positions, rows_truth.positions) and torch.equal(rows.slabs, rows_truth.slabs)
        assert (rows.positions.view(sequences, span)[-1] == -1).all() and int(rows.slabs[-1]) == 0
        greedy = torch.randint(0, 2, (sequences * span,), generator=torch.Generator().manual_seed(step)).to(device)
        judged = drafts.judge_rows(greedy, tokens, rows.positions, told, state, rounds)
        expected = reference.judge_rows(greedy, tokens, rows.positions, told, truth, rounds)
        if rounds:
            found = torch.randint(0, 2, (rounds, sequences), generator=torch.Generator().manual_seed(-step)).to(device)
            drafts.keep_drafts(found, told, judged, state)
            reference.keep_drafts(found, told, expected, truth)
        for field in dataclasses.fields(Judged):
            assert torch.equal(getattr(judged, field.name), getattr(expected, field.name)), field.name
        for field in dataclasses.fields(DraftState):
            assert torch.equal(getattr(state, field.name), getattr(truth, field.name)), field.name
        seen |= set(judged.result[:, 1].tolist())
    if sequences > 1:
        assert seen == set(range(span + 1))


def test_a_verdict_by_hand(device: torch.device) -> None:
    state = DraftState(
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in ([20, 9], [5, 0], [2, 0])),
        torch.tensor([[6, 7], [0, 0]], dtype=torch.int32, device=device),
    )
    told = torch.tensor([[-1], [-1], [0], [30], [-1], [0], [0]], dtype=torch.int32, device=device)
    rows, tokens = make_rows(1, 3, device)
    drafts.open_rows(told, state, rows, tokens)
    assert tokens.tolist() == [5, 6, 7] and rows.positions.tolist() == [20, 21, 22]
    # The first draft holds, the second does not: 8 is what comes behind it.
    greedy = torch.tensor([6, 8, 9], device=device)
    judged = drafts.judge_rows(greedy, tokens, rows.positions, told, state, 2)
    assert judged.kept.tolist() == [20, 21, -1] and judged.last.tolist() == [1]
    assert judged.slots.tolist() == [[21], [22]]
    assert state.stands.tolist() == [22, 9] and state.tokens.tolist() == [8, 0] and state.counts.tolist() == [2, 0]
    drafts.keep_drafts(torch.tensor([[3], [4]], device=device), told, judged, state)
    assert judged.result.tolist() == [[20, 2, 2, 6, 8, 9, 3, 4]]
    # Named by another token than the state's last one, it has no drafts; one place before its end neither.
    for token, end, expected in ((8, 30, [8, 3, 4]), (2, 30, [2, 0, 0]), (8, 24, [8, 3, 0]), (8, 23, [8, 0, 0])):
        told[:4, 0] = torch.tensor([token, 22, 0, end])
        drafts.open_rows(told, state, rows, tokens)
        assert tokens.tolist() == expected
    told[3] = 22
    drafts.open_rows(told, state, rows, tokens)
    assert rows.positions.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("hidden", "n", "dtype"), [(72, 4, torch.bfloat16), (1032, 2, torch.float32)])
def test_slots_and_streams(hidden: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(hidden)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    streams, embed = draw(5, n, hidden).to(dtype), draw(9, hidden).to(dtype)
    tokens = torch.tensor([8, 0, -1, 3, 3], dtype=torch.int32, device=device)
    norms = draw(hidden), draw(hidden)
    got = drafts.open_slots(streams, tokens, embed, *norms, 1e-6)
    expected = reference.open_slots(streams, tokens, embed, *norms, 1e-6)
    limit = 1e-5 if dtype == torch.float32 else 2**-7 * float(expected.abs().max())  # one rounding
    assert (got.float() - expected.float()).abs().max() <= limit
    assert torch.equal(drafts.open_slots(streams[3:4], tokens[3:4], embed, *norms, 1e-6), got[3 * n : 4 * n])

    picked = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    tables = [streams, draw(5, n), draw(5, n, n), draw(5, 24).to(dtype)]
    for found, table in zip(drafts.pick_rows(picked, tables), tables, strict=True):
        assert torch.equal(found, table[picked.long()])
    assert torch.equal(drafts.pick_rows(picked, [tables[1]])[0], tables[1][picked.long()])

    place = StreamPlace(64, 64 + 4 * n * hidden)
    last = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    kept = torch.tensor([7, -1, -1, 9, -1], dtype=torch.int32, device=device)
    judged = Judged(kept, kept, last, kept, kept)
    slabs = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    arenas = [torch.full((4 * place.stride,), POISON, dtype=torch.uint8, device=device) for _ in range(2)]
    drafts.keep_streams(streams, judged, slabs, arenas[0], place)
    reference.keep_streams(streams, judged, slabs, arenas[1], place)
    assert torch.equal(*arenas)
    assert (arenas[0].view(4, place.stride)[1] == POISON).all()
    kept_row = arenas[0].view(4, place.stride)[0, 64:].view(torch.float32)
    assert torch.equal(kept_row, streams[3].float().flatten())


def test_more_rows_than_drafts_is_refused(device: torch.device) -> None:
    rows, tokens = make_rows(2, 4, device)
    state = make_state(3, 2, device, seed=1)
    with pytest.raises(ValueError, match="4 rows of a sequence need 3 drafts, the state has 2"):
        drafts.open_rows(make_told(2, 3, 2, device, seed=1), state, rows, tokens)
    with pytest.raises(ValueError, match="1 to 4 tables, found 5"):
        drafts.pick_rows(tokens, [tokens.unsqueeze(1)] * 5)
