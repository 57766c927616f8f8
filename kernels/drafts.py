"""Drafts: what a step that verifies and drafts needs beside the target's and the drafter's operations.

Its rows from what the host says and what earlier steps have left, which drafts hold, what the layer that predicts ahead
enters with, and where drafts and streams are kept. All of it is little and serial: a program has one sequence or row.
None is launched early, nor lets the next one be before it has ended. To a kernel further on that reads positions before
it waits that is no promise: it needs one between that waits before it lets the next one be, as `open_streams` does, or
that is not launched early (`tests/model/launch_rule.py` has the rule, `launch_order.py` checks steps).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import DraftState, Judged, StepRows, StreamPlace
from kernels.records import norm

WORDS = 1024
"""Words of a row that a program of `pick_rows` copies, and numbers that one of `keep_streams` does."""
MOST_TABLES = 4


@triton.jit(do_not_specialize=["sequences", "padding"])
def _open_rows_kernel(
    told,  # int32[5 + MOST, sequences]
    stands,  # int32[padding + 1]
    held_tokens,  # int32[padding + 1]
    counts,  # int32[padding + 1]
    held_drafts,  # int32[padding + 1, MOST]
    tokens,  # int32[sequences * SPAN], written
    positions,  # int32[sequences * SPAN], written
    slabs,  # int32[sequences], written
    sequences,
    padding,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
):
    b = tl.program_id(0)
    said_token = tl.load(told + b)
    said_position = tl.load(told + sequences + b)
    place = tl.load(told + 2 * sequences + b)
    end = tl.load(told + 3 * sequences + b)
    said_count = tl.load(told + 4 * sequences + b)
    held_token, stand, held_count = tl.load(held_tokens + place), tl.load(stands + place), tl.load(counts + place)
    token = tl.where(said_token < 0, held_token, said_token)
    position = tl.where(said_position < 0, stand, said_position)
    follows = (stand == position) & (held_token == token)
    count = tl.where(said_count < 0, tl.where(follows, held_count, 0), said_count)
    is_live = (position >= 0) & (position < end)
    # Rows of the sequence; a token of its own comes first.
    rows = tl.where(is_live, 1 + tl.maximum(tl.minimum(tl.minimum(count, end - 1 - position), SPAN - 1), 0), 0)
    tl.store(tokens + b * SPAN, tl.where(is_live, token, 0))
    tl.store(positions + b * SPAN, tl.where(is_live, position, -1))
    for i in tl.static_range(1, SPAN):
        said = tl.load(told + (4 + i) * sequences + b)
        held = tl.load(held_drafts + place.to(tl.int64) * MOST + i - 1)
        draft = tl.where(said_count < 0, held, said)
        tl.store(tokens + b * SPAN + i, tl.where(i < rows, draft, 0))
        tl.store(positions + b * SPAN + i, tl.where(i < rows, position + i, -1))
    tl.store(slabs + b, tl.where(place < padding, place, 0))


def open_rows(told: Tensor, state: DraftState, rows: StepRows, tokens: Tensor) -> None:
    """See `kernels.reference.open_rows`; all tensors must be contiguous."""
    sequences, most = told.shape[1], state.drafts.shape[1]
    if rows.span - 1 > most:
        raise ValueError(f"{rows.span} rows of a sequence need {rows.span - 1} drafts, the state has {most}")
    _open_rows_kernel[(sequences,)](
        told, state.stands, state.tokens, state.counts, state.drafts, tokens, rows.positions, rows.slabs,
        sequences, len(state.stands) - 1, SPAN=rows.span, MOST=most, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sequences"])
def _judge_rows_kernel(
    greedy,  # int64[sequences * SPAN]
    tokens,  # int32[sequences * SPAN]
    positions,  # int32[sequences * SPAN]
    told,  # int32[5 + MOST, sequences]
    stands,  # int32[slabs + 1], written, as the next two
    held_tokens,
    counts,
    nexts,  # int32[sequences * SPAN], written, as all that follow
    kept,
    last,  # int32[sequences]
    slots,  # int32[ROUNDS, sequences]
    result,  # int32[sequences, 3 + SPAN + ROUNDS]
    sequences,
    SPAN: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    b = tl.program_id(0)
    first = b * SPAN
    place = tl.load(told + 2 * sequences + b)
    end = tl.load(told + 3 * sequences + b)
    start = tl.load(positions + first)
    going = (start >= 0).to(tl.int32)
    count = going
    held = 0 * going
    line = result + b * (3 + SPAN + ROUNDS)
    best = tl.load(greedy + first).to(tl.int32)
    newest = best
    tl.store(nexts + first, best)
    tl.store(line + 3, best)
    tl.store(kept + first, start)
    for i in tl.static_range(1, SPAN):
        position = tl.load(positions + first + i)
        going = going * ((position >= 0) & (tl.load(tokens + first + i) == best)).to(tl.int32)
        best = tl.load(greedy + first + i).to(tl.int32)
        tl.store(nexts + first + i, best)
        tl.store(line + 3 + i, best)
        tl.store(kept + first + i, tl.where(going > 0, position, -1))
        newest = tl.where(going > 0, best, newest)
        count += going
        held += (position >= 0).to(tl.int32)
    stand = start + count
    drafts = tl.maximum(tl.minimum(end - 1 - stand, ROUNDS), 0)
    tl.store(last + b, first + tl.maximum(count - 1, 0))
    for k in tl.static_range(ROUNDS):
        tl.store(slots + k * sequences + b, tl.where((count > 0) & (k < drafts), stand - 1 + k, -1))
        tl.store(line + 3 + SPAN + k, -1)
    tl.store(line, start)
    tl.store(line + 1, count)
    tl.store(line + 2, held)
    if count > 0:
        tl.store(stands + place, stand)
        tl.store(held_tokens + place, newest)
        tl.store(counts + place, drafts)


def judge_rows(
    greedy: Tensor, tokens: Tensor, positions: Tensor, told: Tensor, state: DraftState, rounds: int
) -> Judged:
    """See `kernels.reference.judge_rows`; all tensors must be contiguous."""
    sequences = told.shape[1]
    span = len(tokens) // sequences
    judged = Judged(
        torch.empty_like(tokens),
        torch.empty_like(positions),
        tokens.new_empty(sequences),
        tokens.new_empty((rounds, sequences)),
        tokens.new_empty((sequences, 3 + span + rounds)),
    )
    _judge_rows_kernel[(sequences,)](
        greedy, tokens, positions, told, state.stands, state.tokens, state.counts,
        judged.nexts, judged.kept, judged.last, judged.slots, judged.result, sequences,
        SPAN=span, ROUNDS=rounds, num_warps=1,
    )  # fmt: skip
    return judged


@triton.jit(do_not_specialize=["sequences"])
def _keep_drafts_kernel(
    found,  # int64[ROUNDS, sequences]
    told,  # int32[5 + MOST, sequences]
    slots,  # int32[ROUNDS, sequences]
    result,  # int32[sequences, WIDTH], written
    drafts,  # int32[slabs + 1, MOST], written
    sequences,
    ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
):
    b = tl.program_id(0)
    place = tl.load(told + 2 * sequences + b).to(tl.int64)
    for k in tl.static_range(ROUNDS):
        is_wanted = tl.load(slots + k * sequences + b) >= 0
        draft = tl.load(found + k * sequences + b).to(tl.int32)
        tl.store(result + b * WIDTH + WIDTH - ROUNDS + k, draft, mask=is_wanted)
        tl.store(drafts + place * MOST + k, draft, mask=is_wanted)


def keep_drafts(found: Tensor, told: Tensor, judged: Judged, state: DraftState) -> None:
    """See `kernels.reference.keep_drafts`; all tensors must be contiguous."""
    rounds, sequences = found.shape
    _keep_drafts_kernel[(sequences,)](
        found, told, judged.slots, judged.result, state.drafts, sequences,
        ROUNDS=rounds, WIDTH=judged.result.shape[1], MOST=state.drafts.shape[1], num_warps=1,
    )  # fmt: skip


@triton.jit
def _open_slots_kernel(
    streams,  # A[rows, N, HIDDEN]
    tokens,  # int[rows]
    embed,  # A[vocab, HIDDEN]
    stream_norm,  # float32[HIDDEN]
    token_norm,  # float32[HIDDEN]
    out,  # A[rows * N, 2 * HIDDEN], written
    eps,
    N: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program has one stream of a row, or the line of its token.
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    if part < N:
        at = row * N + part
        value = tl.load(streams + at * HIDDEN + channel, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(stream_norm + channel, mask=inside, other=0.0)
        normed = (norm(value, HIDDEN, eps) * factor).to(out.dtype.element_ty)
        tl.store(out + at * 2 * HIDDEN + channel, normed, mask=inside)
    else:
        token = tl.maximum(tl.load(tokens + row), 0).to(tl.int64)
        value = tl.load(embed + token * HIDDEN + channel, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(token_norm + channel, mask=inside, other=0.0)
        normed = (norm(value, HIDDEN, eps) * factor).to(out.dtype.element_ty)
        for k in tl.static_range(N):
            tl.store(out + ((row * N + k) * 2 + 1) * HIDDEN + channel, normed, mask=inside)


def open_slots(
    streams: Tensor, tokens: Tensor, embed: Tensor, stream_norm: Tensor, token_norm: Tensor, eps: float
) -> Tensor:
    """See `kernels.reference.open_slots`; all tensors must be contiguous."""
    rows, n, hidden = streams.shape
    out = streams.new_empty((rows * n, 2 * hidden))
    block = triton.next_power_of_2(hidden)
    if rows:
        _open_slots_kernel[(rows, n + 1)](
            streams, tokens, embed, stream_norm, token_norm, out, eps, N=n, HIDDEN=hidden, BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return out


@triton.jit
def _copy_block(table, out, source, row, block, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """Words `block` of row `source` become those of row `row`."""
    word = block * WORDS + tl.arange(0, WORDS)
    inside = word < COUNT
    tl.store(out + row * COUNT + word, tl.load(table + source * COUNT + word, mask=inside, other=0), mask=inside)


@triton.jit
def _pick_rows_kernel(
    rows,  # int32[picked]
    table_0, table_1, table_2, table_3,  # int32[any, COUNT_i]
    out_0, out_1, out_2, out_3,  # int32[picked, COUNT_i], written
    COUNT_0: tl.constexpr, COUNT_1: tl.constexpr, COUNT_2: tl.constexpr, COUNT_3: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(rows + row).to(tl.int64)
    _copy_block(table_0, out_0, source, row, block, COUNT_0, WORDS)
    _copy_block(table_1, out_1, source, row, block, COUNT_1, WORDS)
    _copy_block(table_2, out_2, source, row, block, COUNT_2, WORDS)
    _copy_block(table_3, out_3, source, row, block, COUNT_3, WORDS)


def pick_rows(rows: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """See `kernels.reference.pick_rows`; a row must be whole words of 32 bits."""
    if not 1 <= len(tables) <= MOST_TABLES:
        raise ValueError(f"pick_rows takes 1 to {MOST_TABLES} tables, found {len(tables)}")
    outs = [table.new_empty((len(rows), *table.shape[1:])) for table in tables]
    sources = [table.flatten(1).view(torch.int32) for table in tables]
    places = [out.flatten(1).view(torch.int32) for out in outs]
    widest = max(source.shape[1] for source in sources)
    # Tables that are not there have no words.
    missing = MOST_TABLES - len(tables)
    counts = [source.shape[1] for source in sources] + [0] * missing
    words = min(WORDS, triton.next_power_of_2(widest))
    _pick_rows_kernel[(len(rows), triton.cdiv(widest, words))](
        rows, *sources, *[sources[0]] * missing, *places, *[places[0]] * missing, *counts, words, num_warps=4
    )
    return outs


@triton.jit
def _keep_streams_kernel(
    streams,  # A[rows, WIDTH]
    last,  # int32[sequences]
    kept,  # int32[rows]
    slabs,  # int32[sequences]
    arena,  # uint8[bytes], written
    data,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    row = tl.load(last + b).to(tl.int64)
    if tl.load(kept + row) >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < WIDTH
        value = tl.load(streams + row * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
        at = (arena + tl.load(slabs + b).to(tl.int64) * stride + data).to(tl.pointer_type(tl.float32))
        tl.store(at + channel, value, mask=inside)


def keep_streams(streams: Tensor, judged: Judged, slabs: Tensor, arena: Tensor, place: StreamPlace) -> None:
    """See `kernels.reference.keep_streams`; streams must be contiguous."""
    width = streams.shape[1] * streams.shape[2]
    block = min(WORDS, triton.next_power_of_2(width))
    _keep_streams_kernel[(len(slabs), triton.cdiv(width, block))](
        streams, judged.last, judged.kept, slabs, arena, place.data, place.stride,
        WIDTH=width, BLOCK=block, num_warps=4,
    )  # fmt: skip
