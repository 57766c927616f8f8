"""Latents: raw rows become attention entries, and each entry, before it is rotated, an index key. One launch.

Programs are as in `compressor`, which says why none has to wait for another: one for each group of rows that a step
might close, then one for each row that goes to the ring. A group's program has all channels of its entry, so the key's
projection needs no other program; its matrix is small, and comes from the L2 after the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import KeyProjection, Pooling, StepRows
from kernels.pooling import pool_rows, write_raw_row
from kernels.records import load_turns, norm, store_record, turn
from kernels.rows import INTERPRETED, await_inputs, launch_options

WARPS = 4
ELEMENTS = 4096
"""Numbers of the key's matrix, and of pooled rows, that a program asks for at once."""


# Numbers that follow the batch are compiled once, not anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["programs", "pages"])
def _compress_latents_kernel(
    raw,  # float32[rows, 2 * WIDTH or WIDTH], rows `raw_stride` apart
    weight,  # float32[WIDTH]
    matrix,  # [KEY_WIDTH, WIDTH]
    key_weight,  # float32[KEY_WIDTH]
    products,  # float32[groups, KEY_BLOCK], scratch
    turns,  # float32[positions, TURNED]
    positions,  # int32[rows]
    slabs,  # int32[sequences]
    tables,  # int32[sequences, pages]
    arena,  # uint8[bytes]
    programs,
    raw_stride,
    pages,
    ring_data,
    ring_stride,
    data,
    scale,
    stride,
    key_data,
    key_scale,
    eps,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_ROPE: tl.constexpr,
    KEY_DATA_BYTES: tl.constexpr,
    KEY_SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    ELEMENTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    program = tl.program_id(0)
    if program < programs:
        GROUPS: tl.constexpr = (SPAN + RATIO - 1) // RATIO
        BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
        KEY_BLOCK: tl.constexpr = triton.next_power_of_2(KEY_WIDTH)
        LINES: tl.constexpr = max(1, min(KEY_BLOCK, ELEMENTS // BLOCK))
        sequence = program // GROUPS
        place = tl.arange(0, triton.next_power_of_2(SPAN))
        held = tl.load(positions + sequence * SPAN + place, mask=place < SPAN, other=-1)
        start = tl.load(positions + sequence * SPAN)
        slab = tl.load(slabs + sequence).to(tl.int64)
        entry = start // RATIO + program % GROUPS
        last = entry * RATIO + RATIO - 1
        # Padding has position -1 and comes last in a sequence, so the step holds all positions start .. max(held).
        if (start >= 0) & (last <= tl.max(held, 0)):
            page = tl.load(tables + sequence.to(tl.int64) * pages + entry // ROWS).to(tl.int64)
            channel = tl.arange(0, BLOCK)
            inside = channel < WIDTH
            fresh = raw + (sequence * SPAN).to(tl.int64) * raw_stride
            if RATIO == 1:
                latent = tl.load(fresh + (last - start).to(tl.int64) * raw_stride + channel, mask=inside, other=0.0)
            else:
                latent = pool_rows(
                    fresh, fresh, (arena + (slab * ring_stride + ring_data)).to(tl.pointer_type(tl.float32)),
                    start, last, channel, raw_stride, RATIO, False, False, WIDTH, RING, WIDTH, ELEMENTS, 1,
                )  # fmt: skip
                latent = tl.where(inside, latent, 0.0)
            latent = norm(latent, WIDTH, eps) * tl.load(weight + channel, mask=inside, other=0.0)
            record = turn(latent, load_turns(turns, entry * RATIO, WIDTH, TURNED, BLOCK))
            row = entry % ROWS
            at = page * stride + data + row * DATA_BYTES
            store_record(arena, at, page * stride + scale + row * SCALE_BYTES, record, WIDTH, ROPE, FORMAT)
            target = products + program.to(tl.int64) * KEY_BLOCK
            for first in range(0, KEY_BLOCK, LINES):
                line = first + tl.arange(0, LINES)
                mask = (line < KEY_WIDTH)[:, None] & inside[None, :]
                values = tl.load(matrix + line[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0)
                tl.store(target + line, tl.sum(values.to(tl.float32) * latent[None, :], 1))
            # What one thread has stored another one loads.
            tl.debug_barrier()
            line = tl.arange(0, KEY_BLOCK)
            factor = tl.load(key_weight + line, mask=line < KEY_WIDTH, other=0.0)
            key = norm(tl.load(target + line), KEY_WIDTH, eps) * factor
            key = turn(key, load_turns(turns, entry * RATIO, KEY_WIDTH, TURNED, KEY_BLOCK))
            at = page * stride + key_data + row * KEY_DATA_BYTES
            scale_at = page * stride + key_scale + row * KEY_SCALE_BYTES
            store_record(arena, at, scale_at, key, KEY_WIDTH, KEY_ROPE, FORMAT)
    elif RATIO > 1:
        write_raw_row(
            raw, raw, positions, slabs, arena, program - programs, raw_stride, ring_data, ring_stride,
            SPAN, RATIO, False, WIDTH, RING,
        )  # fmt: skip


def compress_latents(
    raw: Tensor, pooling: Pooling, key: KeyProjection, turns: Tensor, rows: StepRows, arena: Tensor
) -> None:
    """See `kernels.reference.compress_latents`. Entries and keys lie in the same pages, and have one format.

    Raises:
        ValueError: planes that do not go together, or a pooling that it does not know.
    """
    ring, target = pooling.ring, pooling.target
    if pooling.overlaps or pooling.bias is not None:
        raise ValueError("entries whose keys are projected have neither overlap nor bias")
    if (target.stride, target.rows, target.format) != (key.target.stride, key.target.rows, key.target.format):
        raise ValueError(f"entries and keys must lie in the same pages, found {target} and {key.target}")
    if not rows.rows:
        return
    groups = len(rows.slabs) * triton.cdiv(rows.span, pooling.ratio)
    products = torch.empty((groups, triton.next_power_of_2(key.target.width)), dtype=torch.float32, device=arena.device)
    _compress_latents_kernel[(groups + (rows.rows if pooling.ratio > 1 else 0),)](
        raw, pooling.norm, key.matrix, key.norm, products, turns, rows.positions, rows.slabs, rows.tables, arena,
        groups, raw.stride(0), rows.tables.stride(0), ring.data, ring.stride,
        target.data, target.scale, target.stride, key.target.data, key.target.scale, pooling.eps,
        SPAN=rows.span, RATIO=pooling.ratio, RING=max(ring.rows, 1), WIDTH=target.width, ROPE=target.rope,
        TURNED=turns.shape[1] * 2, ROWS=target.rows, DATA_BYTES=target.data_bytes, SCALE_BYTES=target.scale_bytes,
        KEY_WIDTH=key.target.width, KEY_ROPE=key.target.rope, KEY_DATA_BYTES=key.target.data_bytes,
        KEY_SCALE_BYTES=key.target.scale_bytes, FORMAT=target.format, ELEMENTS=ELEMENTS,
        EARLY=not INTERPRETED, num_warps=WARPS, **launch_options(not INTERPRETED),
    )  # fmt: skip
