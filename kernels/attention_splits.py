"""Splits of a row's records: how many there are, and how their partial results become one.

A partial result is the mean of a split's records under their weights, with the largest logit and the sum of weights
below it. Splits are counted from a row's length alone and added in order, so that no row depends on another.
"""

from __future__ import annotations

import functools
import math

import triton
import triton.language as tl
from torch import Tensor

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEAST_TILES = 2
"""Tiles of a split at least: a window of 128 is one."""
ADD_HEADS = 2
"""Heads of a program that does nothing but add splits."""
OWN_ADD_HEADS = 16
"""Heads that a program adds at once when it adds its own splits: it has to wait for each of the loads by itself."""


@functools.cache
def count_splits(tiles: int, spread: int, single: int) -> int:
    """Splits at most of any row of up to so many tiles; see place_splits."""
    most = 1
    for t in range(1, tiles + 1):
        each = 1 if t <= single else LEAST_TILES
        while each * each * spread < t and t > single:
            each += 1
        most = max(most, -(-t // each))
    return most


@triton.jit
def measure_row(
    position, WINDOW: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, SELECTS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
):  # fmt: skip
    """(window records, window records and entries) that a row at `position` may see."""
    seen = tl.minimum(position + 1, WINDOW)
    if not HAS_ENTRIES:
        return seen, seen
    entries = (position + 1) // RATIO
    if SELECTS:
        entries = tl.minimum(entries, TOP_K)
    return seen, seen + entries


@triton.jit
def place_splits(length, spread, single, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """(tiles, splits) of a row of so many records: by its own length, and nothing else.

    Up to `single` tiles each is a split. Split s has tiles s * tiles // splits and following, so that none has two
    tiles more than another.
    """
    tiles = tl.cdiv(length, KEYS)
    each = tl.maximum(tl.ceil(tl.sqrt_rn(tl.cdiv(tiles, spread).to(tl.float32))).to(tl.int32), LEAST)
    each = tl.where(tiles <= single, 1, each)
    return tiles, tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def turn_back(
    values, turns_ptr, position, FIRST: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    """float32[HEADS, SIZE] with channels FIRST .. FIRST + ROPE, pairs of neighbours, turned back by the position."""
    pair = tl.arange(0, SIZE // 2) - FIRST // 2
    at = turns_ptr + tl.maximum(position, 0).to(tl.int64) * ROPE + pair * 2
    rotates = (pair >= 0) & (pair < ROPE // 2)
    cos = tl.load(at, mask=rotates, other=1.0)
    sin = tl.load(at + 1, mask=rotates, other=0.0)
    even, odd = tl.split(tl.reshape(values, (HEADS, SIZE // 2, 2)))
    turned_even = even * cos[None, :] + odd * sin[None, :]
    turned_odd = odd * cos[None, :] - even * sin[None, :]
    return tl.reshape(tl.join(turned_even, turned_odd), (HEADS, SIZE))


@triton.jit
def store_half(
    part_ptr, values, head, FIRST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store float32[BLOCK, PADDED / 128, 64], chunks FIRST / 64, FIRST / 64 + 2, ..., in a partial [HEADS, WIDTH]."""
    STILL: tl.constexpr = WIDTH - ROPE
    STILL_SLOTS: tl.constexpr = (STILL + 63) // 64 * 64
    slot = FIRST + (tl.arange(0, PADDED // 128) * 128)[:, None] + tl.arange(0, 64)[None, :]
    channel = tl.where(slot < STILL_SLOTS, slot, slot - (STILL_SLOTS - STILL))
    mask = (slot < STILL) | ((slot >= STILL_SLOTS) & (slot < STILL_SLOTS + ROPE))
    head_mask = (head < HEADS)[:, None, None]
    tl.store(part_ptr + head[:, None, None] * WIDTH + channel[None, :, :], values, mask=head_mask & mask[None, :, :])


@triton.jit(noinline=True)
def add_splits(
    partial_ptr, stats_ptr, sink_ptr, turns_ptr, out_ptr, row, position, splits, first_head,
    ROOM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Add the partial results of a row's splits for BLOCK heads, in order, and store A[BLOCK, WIDTH] of the row's out.

    A call, not inlined, so that a kernel that ends with it has its registers for what comes before.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(WIDTH)
    head = first_head + tl.arange(0, BLOCK)
    channel = tl.arange(0, PADDED)
    head_mask = head < HEADS
    mask = head_mask[:, None] & (channel < WIDTH)[None, :]
    sink = tl.load(sink_ptr + head, mask=head_mask, other=0.0) * LOG2_E
    stats_ptr += row.to(tl.int64) * (ROOM * 2 * HEADS) + head
    at = partial_ptr + row.to(tl.int64) * (ROOM * HEADS * WIDTH) + head[:, None] * WIDTH + channel[None, :]
    # Unrolled, so that all loads are under way at once.
    top = sink
    for split in tl.static_range(ROOM):
        is_there = head_mask & (split < splits)
        top = tl.maximum(top, tl.load(stats_ptr + split * 2 * HEADS, mask=is_there, other=-1.0e30))
    total = tl.exp2(sink - top)
    values = tl.zeros((BLOCK, PADDED), tl.float32)
    for split in tl.static_range(ROOM):
        is_there = head_mask & (split < splits)
        weight = tl.exp2(tl.load(stats_ptr + split * 2 * HEADS, mask=is_there, other=-1.0e30) - top)
        weight *= tl.load(stats_ptr + split * 2 * HEADS + HEADS, mask=is_there, other=0.0)
        total += weight
        part = tl.load(at + split * HEADS * WIDTH, mask=mask & (split < splits), other=0.0).to(tl.float32)
        values += weight[:, None] * part
    values = values * (1.0 / total)[:, None]
    values = turn_back(values, turns_ptr, position, WIDTH - ROPE, ROPE, BLOCK, PADDED)
    out = out_ptr + head[:, None] * WIDTH + channel[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["spread", "single"])
def _add_kernel(
    partial_ptr, stats_ptr, sink_ptr, turns_ptr, positions_ptr, out_ptr, spread, single,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    SELECTS: tl.constexpr, TOP_K: tl.constexpr, HAS_ENTRIES: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
    ROOM: tl.constexpr, ADD_BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the splits of ADD_BLOCK heads of one row, if it has more than one."""
    row = tl.program_id(0)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions_ptr + row)
    _, length = measure_row(position, WINDOW, RATIO, TOP_K, SELECTS, HAS_ENTRIES)
    _, splits = place_splits(length, spread, single, KEYS, LEAST)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if splits > 1:
        out_ptr += row.to(tl.int64) * (HEADS * WIDTH)
        add_splits(partial_ptr, stats_ptr, sink_ptr, turns_ptr, out_ptr, row, position, splits,
                   tl.program_id(1) * ADD_BLOCK, ROOM, HEADS, ADD_BLOCK, WIDTH, ROPE)  # fmt: skip


def add(
    partial: Tensor,
    stats: Tensor,
    sink: Tensor,
    turns: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    overlaps: bool,
    sizes: dict[str, int],
) -> None:
    """Add up the rows that have more than one split.

    Args:
        partial: float[R, splits, heads, width].
        stats: float32[R, splits, 2, heads]: largest logits in units of ln 2, and sums of weights.
        sink: float32[heads].
        turns: of the layer.
        positions: int32[R].
        out: A[R, heads, width]; other rows are left alone.
        overlaps: whether to be launched before `partial` is complete, and wait.
        sizes: what the kernel has to know of rows beside, as both kernels count splits.
    """
    _add_kernel[(len(positions), math.ceil(sizes["HEADS"] / ADD_HEADS))](
        partial, stats, sink, turns, positions, out, ROOM=partial.shape[1], ADD_BLOCK=ADD_HEADS,
        OVERLAPS=overlaps, num_warps=4, **({"launch_pdl": True} if overlaps else {}), **sizes,
    )  # fmt: skip
