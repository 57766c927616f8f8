"""Pooling: raw rows to their ring and groups of them to a record, as parts of kernels that close groups.

`compressor` says which program does what.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.records import load_turns, norm, store_record, turn


@triton.jit
def write_raw_row(
    raw,  # float32[rows, 2 * HALF], rows `raw_stride` apart
    bias,  # float32[RATIO, HALF]
    positions,  # int32[rows]
    slabs,  # int32[sequences]
    arena,  # uint8[bytes]
    row,
    raw_stride,
    ring_data,
    ring_stride,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    BIASED: tl.constexpr,
    HALF: tl.constexpr,
    RING: tl.constexpr,
):
    """Store a raw row in its ring, its gates with their bias."""
    BLOCK: tl.constexpr = triton.next_power_of_2(2 * HALF)
    channel = tl.arange(0, BLOCK)
    inside = channel < 2 * HALF
    value = tl.load(raw + row.to(tl.int64) * raw_stride + channel, mask=inside, other=0.0)
    position = tl.load(positions + row)
    slab = tl.load(slabs + row // SPAN).to(tl.int64)
    if position >= 0:
        if BIASED:
            at = position % RATIO * HALF + (channel - HALF)
            value += tl.load(bias + at, mask=inside & (channel >= HALF), other=0.0)
        ring = (arena + (slab * ring_stride + ring_data)).to(tl.pointer_type(tl.float32))
        tl.store(ring + position % RING * (2 * HALF) + channel, value, mask=inside)


@triton.jit
def pool_rows(
    raw,  # float32[SPAN, 2 * HALF] of the sequence's rows in this step, `raw_stride` apart
    bias,  # float32[RATIO, HALF]
    ring,  # float32[RING, 2 * HALF] of its slab
    start,  # position of the first of `raw`
    last,  # position that closes the group
    channel,  # int32[PART]
    raw_stride,
    RATIO: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BIASED: tl.constexpr,
    HALF: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """float32[PART]: latents of a group, weighted by the softmax of its gates."""
    PART: tl.constexpr = channel.shape[0]
    POOLED: tl.constexpr = 2 * RATIO if OVERLAPS else RATIO
    DEPTH: tl.constexpr = max(min(triton.next_power_of_2(POOLED), ELEMENTS // PART) // SLOTS, 1)
    first = last + 1 - POOLED
    inside = (channel < WIDTH)[None, None, :]
    top = tl.full((SLOTS, PART), -3e38, tl.float32)
    total = tl.zeros((SLOTS, PART), tl.float32)
    pooled = tl.zeros((SLOTS, PART), tl.float32)
    # Rows [SLOTS, DEPTH]: each slot goes its own way, and no thread waits for another in the loop. The compiler spreads
    # threads over the first axis before the second.
    for begin in range(0, POOLED, DEPTH * SLOTS):
        index = begin + tl.arange(0, SLOTS)[:, None] + tl.arange(0, DEPTH)[None, :] * SLOTS
        position = first + index
        # Before the first group there is none.
        here = (index < POOLED) & (position >= 0)
        new = position >= start
        mask = here[:, :, None] & inside
        # Where records overlap, the group's own rows give their second halves.
        shift = tl.where(index >= RATIO, WIDTH, 0) if OVERLAPS else tl.zeros_like(index)
        fresh = raw + (position - start).to(tl.int64) * raw_stride
        at = tl.where(new, fresh, ring + position % RING * (2 * HALF)) + shift
        at = at[:, :, None] + channel[None, None, :]
        gate = tl.load(at + HALF, mask=mask, other=0.0)
        latent = tl.load(at, mask=mask, other=0.0)
        if BIASED:  # noqa: SIM102 - decided by the compiler; the other one by the device
            # The ring's rows have it in them; all but the last of many tiles are from there.
            if first + begin + DEPTH * SLOTS > start:
                line = position % RATIO * HALF + shift
                mask = mask & new[:, :, None]
                gate += tl.load(bias + line[:, :, None] + channel[None, None, :], mask=mask, other=0.0)
        gate = tl.where(here[:, :, None], gate, -3e38)
        higher = tl.maximum(top, tl.max(gate, 1))
        share = tl.where(here[:, :, None], tl.exp(gate - higher[:, None, :]), 0.0)
        rest = tl.exp(top - higher)
        total = total * rest + tl.sum(share, 1)
        pooled = pooled * rest + tl.sum(share * latent, 1)
        top = higher
    rest = tl.exp(top - tl.max(top, 0)[None, :])
    return tl.sum(pooled * rest, 0) / tl.sum(total * rest, 0)


@triton.jit
def finish_record(
    pooled,  # float32[BLOCK]
    weight,  # float32[WIDTH]
    turns,  # float32[positions, TURNED]
    arena,  # uint8[bytes]
    entry,
    page,  # int64
    data,
    scale,
    stride,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Norm, rotate and store a pooled record."""
    channel = tl.arange(0, pooled.shape[0])
    factor = tl.load(weight + channel, mask=channel < WIDTH, other=0.0)
    angles = load_turns(turns, entry * RATIO, WIDTH, TURNED, pooled.shape[0])
    record = turn(norm(pooled, WIDTH, eps) * factor, angles)
    row = entry % ROWS
    at = page * stride + data + row * DATA_BYTES
    store_record(arena, at, page * stride + scale + row * SCALE_BYTES, record, WIDTH, ROPE, FORMAT)


@triton.jit
def close_group(
    raw,  # float32[rows, 2 * HALF], rows `raw_stride` apart
    bias,  # float32[RATIO, HALF]
    weight,  # float32[WIDTH]
    turns,  # float32[positions, TURNED]
    positions,  # int32[rows]
    slabs,  # int32[sequences]
    tables,  # int32[sequences, pages]
    arena,  # uint8[bytes]
    shares,  # float32[groups, WIDTH padded], written; for SPLITS > 1
    tickets,  # int32[groups], 0 between launches; for SPLITS > 1
    program,
    raw_stride,
    pages,
    ring_data,
    ring_stride,
    data,
    scale,
    stride,
    eps,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BIASED: tl.constexpr,
    HALF: tl.constexpr,
    RING: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    ELEMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Pool a group, or some of its channels, if a row of this step closes it; norm, rotate and store what is whole.

    The programs of a group each pool an equal part of the channels. The one that comes last has all of them, whichever
    it is: which one is left to chance, what it computes is not.
    """
    GROUPS: tl.constexpr = (SPAN + RATIO - 1) // RATIO
    WIDTH: tl.constexpr = HALF // 2 if OVERLAPS else HALF
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    PART: tl.constexpr = BLOCK // SPLITS
    group = program // SPLITS
    sequence = group // GROUPS
    place = tl.arange(0, triton.next_power_of_2(SPAN))
    held = tl.load(positions + sequence * SPAN + place, mask=place < SPAN, other=-1)
    start = tl.load(positions + sequence * SPAN)
    slab = tl.load(slabs + sequence).to(tl.int64)
    entry = start // RATIO + group % GROUPS
    last = entry * RATIO + RATIO - 1
    # Padding has position -1 and comes last in a sequence, so the step holds all positions start .. max(held).
    if (start >= 0) & (last <= tl.max(held, 0)):
        page = tl.load(tables + sequence * pages + entry // ROWS).to(tl.int64)
        channel = program % SPLITS * PART + tl.arange(0, PART)
        pooled = pool_rows(
            raw + (sequence * SPAN).to(tl.int64) * raw_stride, bias,
            (arena + (slab * ring_stride + ring_data)).to(tl.pointer_type(tl.float32)),
            start, last, channel, raw_stride, RATIO, OVERLAPS, BIASED, HALF, RING, WIDTH, ELEMENTS, SLOTS,
        )  # fmt: skip
        if SPLITS == 1:
            finish_record(
                pooled, weight, turns, arena, entry, page, data, scale, stride, eps,
                RATIO, WIDTH, TURNED, ROPE, ROWS, DATA_BYTES, SCALE_BYTES, FORMAT,
            )  # fmt: skip
        else:
            tl.store(shares + group * BLOCK + channel, pooled)
            # All threads have stored before one of them says so.
            tl.debug_barrier()
            if tl.atomic_add(tickets + group, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                tl.store(tickets + group, 0)
                # Past the L1, which other programs' stores do not reach.
                whole = tl.load(shares + group * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
                finish_record(
                    whole, weight, turns, arena, entry, page, data, scale, stride, eps,
                    RATIO, WIDTH, TURNED, ROPE, ROWS, DATA_BYTES, SCALE_BYTES, FORMAT,
                )  # fmt: skip
