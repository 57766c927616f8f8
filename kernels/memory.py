"""Memory: lines of an n-gram table by the latest ids, and their addition to the streams. A launch each.

Which lines a row reads follows from ids alone, so `read_memory` can run before all else of a step. It also keeps the
step's ids in the ring of their slab: rows of this step are read from the step's own tensor, older ones from places of
the ring that the step does not write, so that no program waits for another, and several tables may be read so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import IdRing, MemoryTable, StepRows
from kernels.records import norm, power_of_two
from kernels.rows import INTERPRETED, await_inputs, launch_options

SCALED_COLUMNS = 32
"""Columns of a line that share a scale."""


@triton.jit
def _class_of(folded, token, pad, is_known):
    """int64: the class of an id; that of positions before the first where it is not known."""
    return tl.where(is_known, tl.load(folded + token, mask=is_known, other=0), pad).to(tl.int64)


@triton.jit
def _read_memory_kernel(
    tokens,  # int32[rows]
    positions,  # int32[rows]
    slabs,  # int32[sequences]
    arena,  # uint8[bytes]
    folded,  # int32[vocab]
    multipliers,  # int64[HISTORY + 1]
    primes,  # int64[LINES]
    offsets,  # int64[LINES]
    data,  # [any, WIDTH]
    scale,  # uint8[any, GROUPS], with SCALED
    out,  # A[rows, LINES * WIDTH]
    pad,
    ring_data,
    ring_stride,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
    HISTORY: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Lines program_id(1) * TILE .. of a row."""
    await_inputs(EARLY)
    row = tl.program_id(0)
    position = tl.load(positions + row)
    slab = tl.load(slabs + row // SPAN).to(tl.int64)
    ring = (arena + (slab * ring_stride + ring_data)).to(tl.pointer_type(tl.int32))
    line = tl.program_id(1) * TILE + tl.arange(0, TILE)
    order = line // (LINES // HISTORY)
    token = tl.load(tokens + row)
    is_known = (position >= 0) & (token >= 0)
    running = _class_of(folded, token, pad, is_known) * tl.load(multipliers)
    mixed = tl.zeros((TILE,), tl.int64)
    for back in tl.static_range(1, HISTORY + 1):
        is_new = row % SPAN >= back
        is_kept = (position >= back) & (row % SPAN < back)
        new = tl.load(tokens + row - back, mask=is_new, other=-1)
        kept = tl.load(ring + tl.maximum(position - back, 0) % RING, mask=is_kept, other=-1)
        earlier = tl.where(is_new, new, kept)
        # An id that is missing hides all behind it.
        is_known = is_known & (earlier >= 0)
        running = running ^ (_class_of(folded, earlier, pad, is_known) * tl.load(multipliers + back))
        mixed = tl.where(order == back - 1, running, mixed)
    if position >= 0:
        tl.store(ring + position % RING, token)
    inside = (line < LINES) & (position >= 0)
    found = mixed % tl.load(primes + line, mask=line < LINES, other=1)
    found += tl.load(offsets + line, mask=line < LINES, other=0)
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    mask = inside[:, None] & (channel < WIDTH)[None, :]
    value = tl.load(data + found[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        at = found[:, None] * GROUPS + channel[None, :] // 32
        value *= power_of_two(tl.load(scale + at, mask=mask, other=127).to(tl.int32))
    at = row.to(tl.int64) * (LINES * WIDTH) + line[:, None] * WIDTH + channel[None, :]
    mask = (line < LINES)[:, None] & (channel < WIDTH)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_memory_kernel(
    streams,  # A[rows, N, HIDDEN]
    projected,  # A[rows, (N + 1) * HIDDEN]
    weight,  # float32[N, HIDDEN]
    out,  # A[rows, N, HIDDEN]
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One stream of a row."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    n = tl.num_programs(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    factor = tl.load(weight + stream * HIDDEN + channel, mask=inside, other=0.0)
    await_inputs(EARLY)
    at = (row * n + stream) * HIDDEN + channel
    own = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
    begin = projected + row * (n + 1) * HIDDEN
    key = tl.load(begin + stream * HIDDEN + channel, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(begin + n * HIDDEN + channel, mask=inside, other=0.0).to(tl.float32)
    match = tl.sum(norm(own, HIDDEN, eps) * norm(key, HIDDEN, eps) * factor, 0)
    root = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
    gate = tl.sigmoid(tl.where(match > 0, root, tl.where(match < 0, -root, 0.0)))
    tl.store(out + at, (own + gate * value).to(out.dtype.element_ty), mask=inside)


def read_memory(
    tokens: Tensor, rows: StepRows, arena: Tensor, ring: IdRing, table: MemoryTable, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.reference.read_memory`.

    Raises:
        ValueError: the ring is too short for the step, or scales do not fit the table.
    """
    lines, width = len(table.primes), table.data.shape[1]
    if ring.rows < rows.span + table.history:
        raise ValueError(f"a step of {rows.span} positions needs {rows.span + table.history} ids, the ring {ring.rows}")
    groups = triton.cdiv(width, SCALED_COLUMNS)
    if table.scale is not None and table.scale.shape[1] != groups:
        raise ValueError(f"lines of {width} columns must have {groups} scales, found {table.scale.shape[1]}")
    out = torch.empty((rows.rows, lines * width), dtype=out_dtype, device=arena.device)
    if rows.rows:
        # A few lines a program: they are far apart, and asked for at once.
        tile = min(8, triton.next_power_of_2(lines))
        _read_memory_kernel[(rows.rows, triton.cdiv(lines, tile))](
            tokens, rows.positions, rows.slabs, arena, table.folded, table.multipliers, table.primes, table.offsets,
            table.data, table.scale if table.scale is not None else table.primes, out, table.pad, ring.data,
            ring.stride, SPAN=rows.span, RING=ring.rows, HISTORY=table.history, LINES=lines, WIDTH=width,
            GROUPS=groups, SCALED=table.scale is not None, TILE=tile, EARLY=not INTERPRETED,
            **launch_options(not INTERPRETED),
        )  # fmt: skip
    return out


def add_memory(streams: Tensor, projected: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.reference.add_memory`; all contiguous."""
    rows, n, hidden = streams.shape
    out = torch.empty_like(streams)
    if rows:
        block = triton.next_power_of_2(hidden)
        _add_memory_kernel[(rows, n)](
            streams, projected, weight, out, eps, HIDDEN=hidden, BLOCK=block, EARLY=not INTERPRETED,
            num_warps=8 if block >= 4096 else 4, **launch_options(not INTERPRETED),
        )  # fmt: skip
    return out
