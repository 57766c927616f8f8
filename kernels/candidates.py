"""Candidates: blocks of entries that one layer keeps, and the choice of later layers among the entries in them.

A layer that keeps blocks scores all that its rows see (`indexer`), ranks blocks by their best score, and keeps the best
of them (`choice`). A layer that is limited scores the entries of these blocks only, side by side: place p of a row is
entry p % size of block p // size of those that it keeps. Blocks ascend, so places do as entries do, and the newest
block, which may not be full, comes last. What `choice` gives are places, which become entries at the end. The cost of a
limited layer thus does not grow with the text.

`choice` finds the end of what a row may choose from by the row's position, so it is told a position that stands for as
many blocks, or places, as there are.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import choice, indexer
from kernels.forms import Plane, StepRows
from kernels.indexer import INTERPRETED, load_keys
from kernels.rows import await_inputs, launch_options, prepare_queries

RANKED = 256
"""Blocks that a program ranks."""
PLACES = 512
"""Places that a program scores, at most."""
LATE = dataclasses.replace(choice.DEFAULT, overlaps=False)
"""Choices look at positions before the kernel in front of them has ended, and here that one writes them."""


@triton.jit(do_not_specialize=["capacity", "room"])
def _rank_blocks_kernel(
    scores,  # float32[rows, ...], rows `capacity` apart: SIZE for each block, or the best one: EACH
    positions,  # int32[rows]
    ranked,  # float32[rows, room], written up to the end of a program's blocks
    ends,  # int32[rows], written: blocks of a row, less one
    capacity,
    room,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + row) + 1) // RATIO
    blocks = tl.cdiv(visible, SIZE)
    first = tl.program_id(1) * BLOCK
    await_inputs(EARLY)
    if first == 0:
        tl.store(ends + row, blocks - 1)
    if (blocks > COUNT) & (first < blocks):
        block = first + tl.arange(0, BLOCK)
        within = tl.arange(0, triton.next_power_of_2(EACH))
        entry = block[:, None] * EACH + within[None, :]
        mask = (within < EACH)[None, :] & (entry * (SIZE // EACH) < visible)
        best = tl.max(tl.load(scores + row * capacity + entry, mask=mask, other=float("-inf")), 1)
        best = tl.where(block == blocks - 1, float("inf"), best)
        tl.store(ranked + row * room + block, best, mask=block < room)


@triton.jit(do_not_specialize=["pages"])
def _score_places_kernel(
    query,  # A[rows, HEADS, WIDTH], rotated
    share,  # float32[rows, HEADS], rows `share_stride` apart
    positions,  # int32[rows]
    tables,  # int32[sequences, pages]
    arena,  # uint8[bytes]
    blocks,  # int32[rows, COUNT]
    scores,  # float32[rows, CAPACITY], written up to the end of a program's places
    ends,  # int32[rows], written: the position that stands for so many places
    share_stride,
    pages,
    data,
    scale,
    stride,
    share_scale,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    SPAN: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    visible = (tl.load(positions + row) + 1) // RATIO
    seen = tl.cdiv(visible, SIZE)
    places = tl.where(seen <= COUNT, visible, (COUNT - 1) * SIZE + (visible - 1) % SIZE + 1)
    await_inputs(EARLY)
    if first == 0:
        tl.store(ends + row, places * RATIO - 1)
    if (places > TOP_K) & (first < places):
        head = tl.arange(0, HEADS_PADDED)
        channel = tl.arange(0, WIDTH_PADDED)
        at = row * (HEADS * WIDTH) + head[:, None] * WIDTH + channel[None, :]
        heads = tl.load(query + at, mask=(head < HEADS)[:, None] & (channel < WIDTH)[None, :], other=0.0)
        heads = heads.to(tl.float32 if WIDE else tl.bfloat16).T
        factors = tl.load(share + row * share_stride + head, mask=head < HEADS, other=0.0) * share_scale
        table = tables + row // SPAN * pages
        for start in range(0, CHUNK, BLOCK):
            place = first + start + tl.arange(0, BLOCK)
            here = place < places
            kept = tl.load(blocks + row * COUNT + place // SIZE, mask=here, other=0)
            entry = tl.where(here, kept * SIZE + place % SIZE, 0)
            block_at = tl.load(table + entry // PAGE).to(tl.int64) * stride
            keys = load_keys(
                arena + (data + block_at) + entry % PAGE * DATA_BYTES, channel, WIDTH, WIDTH_PADDED, FORMAT, WIDE
            )
            score = tl.sum(tl.maximum(tl.dot(keys, heads, input_precision="ieee"), 0.0) * factors[None, :], 1)
            if FORMAT == "fp8":
                power_at = arena + (scale + block_at) + entry % PAGE * SCALE_BYTES
                # Powers of two: they can be applied to the sum, and to what passed the relu.
                score *= tl.load(power_at.to(tl.pointer_type(tl.float32)))
            # Plus zero, so that negative zero, which equals zero, has its bits too.
            score = tl.where(here, score + 0.0, float("-inf"))
            tl.store(scores + row * CAPACITY + place, score, mask=place < CAPACITY)


@triton.jit
def _find_entries_kernel(
    places,  # int32[rows, TOP_K]
    blocks,  # int32[rows, COUNT]
    entries,  # int32[rows, TOP_K], written
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, triton.next_power_of_2(TOP_K))
    await_inputs(EARLY)
    place = tl.load(places + row * TOP_K + line, mask=line < TOP_K, other=-1)
    block = tl.load(blocks + row * COUNT + place // SIZE, mask=place >= 0, other=0)
    entry = tl.where(place >= 0, block * SIZE + place % SIZE, -1)
    tl.store(entries + row * TOP_K + line, entry, mask=line < TOP_K)


def select_and_rank(
    query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    size: int,
    count: int,
    share_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.select_and_rank`.

    Raises:
        ValueError: the blocks that a row keeps have fewer than `top_k` entries.
    """
    if size * count < top_k:
        raise ValueError(f"{count} blocks of {size} entries hold fewer than the {top_k} that are selected")
    parts = rows.parts()
    if len(parts) > 1:
        found = [
            select_and_rank(
                query[own], share[own], turns, ratio, top_k, part, arena, keys, size, count, share_scale
            )
            for own, part in parts
        ]  # fmt: skip
        entries, kept = (torch.cat(columns) for columns in zip(*found, strict=True))
        return entries, kept
    scores, maxima = indexer.score_entries(query, share, turns, ratio, top_k, rows, arena, keys, share_scale)
    total, capacity = scores.shape
    # Read in rows of 32.
    room = triton.cdiv(triton.cdiv(capacity, size), RANKED) * RANKED
    ranked = torch.empty((total, room), dtype=torch.float32, device=scores.device)
    ends = torch.empty_like(rows.positions)
    if total:
        best = maxima if size == choice.EACH and maxima is not None else scores
        _rank_blocks_kernel[(total, room // RANKED)](
            best, rows.positions, ranked, ends, best.stride(0), room, RATIO=ratio, SIZE=size,
            EACH=size if best is scores else 1, COUNT=count, BLOCK=RANKED, EARLY=not INTERPRETED,
            **launch_options(not INTERPRETED),
        )  # fmt: skip
    blocks = choice.choose_entries(ranked, 1, count, dataclasses.replace(rows, positions=ends), config=LATE)
    return choice.choose_entries(scores, ratio, top_k, rows, maxima), blocks


def select_among(
    query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    blocks: Tensor,
    size: int,
    share_scale: float = 1.0,
) -> Tensor:
    """See `kernels.reference.select_among`; `blocks` must be contiguous."""
    total, heads, width = query.shape
    count = blocks.shape[1]
    turned = prepare_queries(query, rows.positions, turns, None)
    wide = INTERPRETED or query.dtype == torch.float32 or keys.format == "fp32"
    block = 32 if wide else 64
    # A row has no more places than entries, and scores are read in rows of 32.
    capacity = triton.cdiv(min(count * size, rows.tables.shape[1] * keys.rows), 32) * 32
    chunk = max(block, min(PLACES, triton.next_power_of_2(capacity)))
    scores = torch.empty((total, capacity), dtype=torch.float32, device=query.device)
    ends = torch.empty_like(rows.positions)
    if total:
        _score_places_kernel[(total, triton.cdiv(capacity, chunk))](
            turned, share, rows.positions, rows.tables, arena, blocks, scores, ends, share.stride(0),
            rows.tables.stride(0), keys.data, keys.scale, keys.stride, share_scale, RATIO=ratio, TOP_K=top_k,
            SPAN=rows.span, SIZE=size, COUNT=count, CAPACITY=capacity,
            HEADS=heads, HEADS_PADDED=max(16, triton.next_power_of_2(heads)),
            WIDTH=width, WIDTH_PADDED=max(16, triton.next_power_of_2(width)), PAGE=keys.rows,
            DATA_BYTES=keys.data_bytes, SCALE_BYTES=keys.scale_bytes, FORMAT=keys.format, BLOCK=block, CHUNK=chunk,
            WIDE=wide, EARLY=not INTERPRETED, **launch_options(not INTERPRETED),
        )  # fmt: skip
    places = choice.choose_entries(scores, ratio, top_k, dataclasses.replace(rows, positions=ends), config=LATE)
    entries = torch.empty_like(places)
    if total:
        _find_entries_kernel[(total,)](
            places, blocks, entries, SIZE=size, COUNT=count, TOP_K=top_k, EARLY=not INTERPRETED,
            **launch_options(not INTERPRETED),
        )  # fmt: skip
    return entries
