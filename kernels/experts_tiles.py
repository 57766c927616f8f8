"""Tiles: pairs (row, place) of each expert that this rank has, and their rows as sums of two e4m3 numbers.

A row of bf16 has 8 significant bits and e4m3 has 4, so x / s = high + low holds exactly down to 2^-9 of the row's
largest value, where s is a power of two that brings this one to 128 .. 256. What is smaller is wrong by 2^-10 s at
most, which is 2^-17 of the largest. A row with an infinity or a NaN has a NaN as its s.

A tile is [columns / 32, TILE, 64] bytes: of 32 columns and each pair the high numbers, then the low ones, columns in
the order in which `kernels.e4m3_groups` unpacks weights: 0, 2, 4, 6, 8, ... 30, then 1, 3, 5, ... 31. Places of a tile
that no pair has are not written; they only ever reach columns of products that nobody reads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_tiles_kernel(
    x, ids, expert_to_slot, pairs, tiles, progress, split, split_scale, first_item, pair_count, experts, x_stride,
    HIDDEN: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr,
    MAX_HIDDEN: tl.constexpr, MAX_PLACES: tl.constexpr, MAX_PAIRS: tl.constexpr, MAX_EXPERTS: tl.constexpr,
    MAX_TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e < experts lists expert e's tiles; each program after those splits PART columns of EACH rows.

    x: bf16[R, HIDDEN]. ids: int32[pair_count]. pairs: int32[tiles, TILE]. tiles: int32[tiles, 2], slot and pairs.
    progress: int32[2 + tiles], tiles, `first_item`, zeros. split: uint8, tiles of x. split_scale: float32[tiles, TILE].
    MAX_PAIRS: at least one for each thread: a histogram counts what several threads hold several times.
    Programs count the pairs of all experts for themselves, which costs less than a launch in between; one that has no
    pairs of its expert, or no row with an expert that is here, leaves before.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    index = tl.arange(0, MAX_PAIRS)
    number = tl.arange(0, MAX_EXPERTS)
    # All that does not hang on other loads is asked for at once.
    expert = tl.load(ids + index, mask=index < pair_count, other=-1)
    slots = tl.load(expert_to_slot + number, mask=number < experts, other=-1)
    if program < experts:
        slot = tl.load(expert_to_slot + program)
        is_mine = (expert == program) & (slot >= 0)
        count = tl.sum(is_mine.to(tl.int32), 0)
        if (count > 0) | (program == 0):
            cut = _cut(expert, slots, TILE, MAX_EXPERTS)
            start = tl.sum(tl.where(number < program, cut, 0), 0)
            place = tl.cumsum(is_mine.to(tl.int32), 0) - 1
            tl.store(pairs + start * TILE + place, index, mask=is_mine)
            tile = tl.arange(0, MAX_TILES)
            used = tile * TILE < count
            entry = tiles + (start + tile) * 2
            tl.store(entry, tl.full((MAX_TILES,), 0, tl.int32) + slot, mask=used)
            tl.store(entry + 1, tl.minimum(count - tile * TILE, TILE), mask=used)
            tl.store(progress + 2 + start + tile, tl.full((MAX_TILES,), 0, tl.int32), mask=used)
            if program == 0:
                tl.store(progress, tl.sum(cut, 0))
                tl.store(progress + 1, first_item)
    else:
        parts: tl.constexpr = HIDDEN // PART
        part = (program - experts) % parts
        first = (program - experts) // parts * EACH
        column = tl.arange(0, MAX_HIDDEN)
        first_row = tl.load(x + first * x_stride + column, mask=column < HIDDEN, other=0.0)
        place = first * PLACES + tl.arange(0, MAX_PLACES)
        chosen = tl.load(ids + place, mask=(place < first * PLACES + EACH * PLACES) & (place < pair_count), other=-1)
        is_here = tl.load(expert_to_slot + chosen, mask=chosen >= 0, other=-1) >= 0
        if tl.sum(is_here.to(tl.int32), 0) > 0:
            cut = _cut(expert, slots, TILE, MAX_EXPERTS)
            for i in tl.static_range(EACH):
                row = first + i
                if row * PLACES < pair_count:
                    if i == 0:
                        whole = first_row
                    else:
                        whole = tl.load(x + row * x_stride + column, mask=column < HIDDEN, other=0.0)
                    largest = tl.max(whole.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
                    factor, scale = split_factors(largest)
                    value = tl.load(x + row * x_stride + part * PART + tl.arange(0, PART)).to(tl.float32) * factor
                    high, low, at = split_columns(value, part, PART, TILE)
                    for p in tl.static_range(PLACES):
                        pair = row * PLACES + p
                        own = tl.load(ids + pair)
                        if tl.load(expert_to_slot + own, mask=own >= 0, other=-1) >= 0:
                            before = tl.sum(((expert == own) & (index < pair)).to(tl.int32), 0)
                            tile = tl.sum(tl.where(number < own, cut, 0), 0) + before // TILE
                            target = split + tile.to(tl.int64) * (HIDDEN * 2 * TILE) + before % TILE * 64 + at
                            tl.store(target, high.to(tl.uint8, bitcast=True))
                            tl.store(target + 32, low.to(tl.uint8, bitcast=True))
                            tl.store(split_scale + tile * TILE + before % TILE, scale, mask=part == 0)


@triton.jit
def _cut(expert, slots, TILE: tl.constexpr, MAX_EXPERTS: tl.constexpr):
    """How many tiles each expert has."""
    counts = tl.histogram(tl.maximum(expert, 0), MAX_EXPERTS, mask=expert >= 0)
    return tl.where(slots >= 0, (counts + TILE - 1) // TILE, 0)


@triton.jit
def split_factors(largest):
    """(1 / s, s) of the bits of the largest absolute value; s is at least 2^-119."""
    exponent = tl.maximum((largest >> 23) - 7, 8)
    scale = tl.where(largest >= 0x7F800000, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), scale


@triton.jit
def split_columns(value, part, PART: tl.constexpr, TILE: tl.constexpr):
    """(high, low, where they go in a tile of which this is the first row's place) of part `part` of a row.

    value: float32[PART], times 1 / s. Words of the weights are eight columns: the even ones of a word make one word of
    a tile, the odd ones another.
    """
    value = tl.permute(tl.reshape(value, (PART // 8, 4, 2)), (0, 2, 1))
    high = value.to(tl.float8e4nv)
    low = (value - high.to(tl.float32)).to(tl.float8e4nv)
    word = part * (PART // 8) + tl.arange(0, PART // 8)
    at = (word // 4 * (TILE * 64) + word % 4 * 4)[:, None, None]
    return high, low, at + (tl.arange(0, 2) * 16)[None, :, None] + tl.arange(0, 4)[None, None, :]
