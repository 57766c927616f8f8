"""Pairs of many rows in tiles: what `kernels.experts_tiles` does for fewer, bit for bit, in three launches.

1. `count_pairs_kernel`: how many pairs each expert has in each chunk of CHUNK pairs.
2. `place_pairs_kernel`: from these and its own ids each chunk's program knows its pairs' places.
3. `split_rows_kernel`: rows go to the places of their pairs, as sums of two e4m3 numbers.

No program looks at all pairs, which are more than registers hold from some thousands on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts_tiles import split_columns, split_factors

CHUNK = 256
"""Pairs of a program; at least one for each thread: a histogram counts what several threads hold several times."""
BLOCK = 16
"""Chunks whose counts a program adds up at once."""


def group_many(
    x: Tensor, ids: Tensor, expert_to_slot: Tensor, pairs: Tensor, tiles: Tensor, progress: Tensor, split: Tensor,
    split_scale: Tensor, first_item: int, *, tile: int, early: bool,
) -> None:  # fmt: skip
    """Launches the three; outputs are those of `kernels.experts_tiles.group_tiles_kernel`.

    Args:
        x: bf16[R, hidden], hidden a multiple of 32, rows at any stride.
        ids: int32[R, places], contiguous.
        tile: pairs of one expert in a tile.
        early: kernels are launched before the one in front of them has ended.
    """
    rows, hidden = x.shape
    places, experts = ids.shape[1], expert_to_slot.shape[0]
    count = rows * places
    chunks, columns = triton.cdiv(count, CHUNK), triton.next_power_of_2(experts)
    counts = ids.new_empty((chunks, columns), dtype=torch.int16)
    targets = ids.new_empty(count)
    count_pairs_kernel[(chunks,)](
        ids, counts, count, CHUNK=CHUNK, MAX_EXPERTS=columns, EARLY=early, launch_pdl=early, num_warps=4
    )
    place_pairs_kernel[(chunks,)](
        ids, expert_to_slot, counts, pairs, tiles, progress, targets, first_item, count, chunks, experts, CHUNK=CHUNK,
        SIDE=min(CHUNK, 32), BLOCK=BLOCK, TILE=tile, MAX_EXPERTS=columns, EARLY=early, launch_pdl=early, num_warps=8,
    )  # fmt: skip
    split_rows_kernel[(rows,)](
        x, targets, split, split_scale, x.stride(0), HIDDEN=hidden, PART=min(hidden & -hidden, 1024), PLACES=places,
        TILE=tile, EARLY=early, launch_pdl=early, num_warps=4,
    )  # fmt: skip


@triton.jit
def count_pairs_kernel(ids, counts, pair_count, CHUNK: tl.constexpr, MAX_EXPERTS: tl.constexpr, EARLY: tl.constexpr):
    """counts int16[chunks, MAX_EXPERTS], of ids int32[pair_count], of which those below zero count nowhere."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + index, mask=index < pair_count, other=-1)
    found = tl.histogram(tl.maximum(expert, 0), MAX_EXPERTS, mask=expert >= 0)
    tl.store(counts + chunk * MAX_EXPERTS + tl.arange(0, MAX_EXPERTS), found.to(tl.int16))


@triton.jit
def place_pairs_kernel(
    ids, expert_to_slot, counts, pairs, tiles, progress, targets, first_item, pair_count, chunks, experts,
    CHUNK: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Gives each chunk's pairs their places, chunk by chunk; whoever has a tile's first pair lists the tile.

    pairs: int32[tiles, TILE]. tiles: int32[tiles, 2], slot and pairs. progress: int32[2 + tiles], tiles, `first_item`,
    zeros. targets: int32[pair_count], tile * TILE + place, or -1 where the pair's expert is not here.
    Sums over rows of blocks are taken once, at the end: they cross warps.
    """
    program = tl.program_id(0)
    number = tl.arange(0, MAX_EXPERTS)
    i = tl.arange(0, CHUNK)
    first = program * CHUNK
    inside = first + i < pair_count
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slots = tl.load(expert_to_slot + number, mask=number < experts, other=-1)
    expert = tl.load(ids + first + i, mask=inside, other=-1)
    slot = tl.load(expert_to_slot + expert, mask=expert >= 0, other=-1)
    # Own pairs before each one with its expert.
    equal = tl.zeros((SIDE, CHUNK), tl.int32)
    for start in range(0, CHUNK, SIDE):
        j = start + tl.arange(0, SIDE)
        other = tl.load(ids + first + j, mask=first + j < pair_count, other=-1)
        equal += ((other[:, None] == expert[None, :]) & (j[:, None] < i[None, :])).to(tl.int32)
    before = tl.sum(equal, 0)
    block = tl.arange(0, BLOCK)
    all_found = tl.zeros((BLOCK, MAX_EXPERTS), tl.int32)
    found_before = tl.zeros((BLOCK, MAX_EXPERTS), tl.int32)
    for start in range(0, chunks, BLOCK):
        chunk = start + block
        at = counts + chunk[:, None] * MAX_EXPERTS + number[None, :]
        found = tl.load(at, mask=(chunk < chunks)[:, None], other=0).to(tl.int32)
        all_found += found
        found_before += tl.where((chunk < program)[:, None], found, 0)
    total = tl.sum(all_found, 0)
    cut = tl.where(slots >= 0, (total + TILE - 1) // TILE, 0)
    own = tl.maximum(expert, 0)
    place = tl.gather(tl.sum(found_before, 0), own, 0) + before
    left = tl.gather(total, own, 0) - place
    tile = tl.gather(tl.cumsum(cut, 0) - cut, own, 0) + place // TILE
    is_here = slot >= 0
    target = tl.where(is_here, tile * TILE + place % TILE, -1)
    tl.store(targets + first + i, target, mask=inside)
    tl.store(pairs + target, first + i, mask=is_here)
    is_first = is_here & (place % TILE == 0)
    tl.store(tiles + tile * 2, slot, mask=is_first)
    tl.store(tiles + tile * 2 + 1, tl.minimum(left, TILE), mask=is_first)
    tl.store(progress + 2 + tile, tl.zeros((CHUNK,), tl.int32), mask=is_first)
    if program == 0:
        tl.store(progress, tl.sum(cut, 0))
        tl.store(progress + 1, first_item)


@triton.jit
def split_rows_kernel(
    x, targets, split, split_scale, x_stride,
    HIDDEN: tl.constexpr, PART: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each program splits a row that has a target, PART columns at once, and stores it to all of its targets.

    x: bf16[rows, HIDDEN]. targets: int32[rows, PLACES]. split: uint8, tiles of x. split_scale: float32[tiles, TILE].
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    parts: tl.constexpr = HIDDEN // PART
    row = tl.program_id(0)
    here = -1
    for p in tl.static_range(PLACES):
        here = tl.maximum(here, tl.load(targets + row * PLACES + p))
    if here >= 0:
        source = x + row.to(tl.int64) * x_stride + tl.arange(0, PART)
        bits = tl.zeros((PART,), tl.int32)
        for part in tl.static_range(parts):
            value = tl.load(source + part * PART).to(tl.float32)
            bits = tl.maximum(bits, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        factor, scale = split_factors(tl.max(bits, 0))
        for part in tl.static_range(parts):
            value = tl.load(source + part * PART).to(tl.float32) * factor
            high, low, at = split_columns(value, part, PART, TILE)
            for p in tl.static_range(PLACES):
                target = tl.load(targets + row * PLACES + p)
                if target >= 0:
                    to = split + (target // TILE).to(tl.int64) * (HIDDEN * 2 * TILE) + target % TILE * 64 + at
                    tl.store(to, high.to(tl.uint8, bitcast=True))
                    tl.store(to + 32, low.to(tl.uint8, bitcast=True))
                    if part == 0:
                        tl.store(split_scale + target, scale)
