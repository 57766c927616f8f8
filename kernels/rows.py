"""Rows: norms of rows, the norm and rotation of query heads, and window records. One program a row, or some heads.

They move little; what counts is that they are few and short. `entrance` joins norms and window records with `compress`
in one launch.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.forms import Plane, StepRows
from kernels.records import load_turns, norm, store_record, turn

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, where none is launched early."""


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """How rows are cut. Nothing in it depends on the number of rows, so a row's bits do not either.

    Attributes:
        warps: of a program.
        elements: channels of all heads of a program of queries.
        early: kernels are launched while those before them drain (programmatic dependent launch).
    """

    warps: int = 4
    elements: int = 2048
    early: bool = not INTERPRETED


DEFAULT = RowsConfig()


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """In a kernel that is launched early: let the next one be, then wait until all before have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def norm_row(x, weight, out, row, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Norm row `row` of float[rows, WIDTH], rows `stride` apart, into `out`, contiguous."""
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    row = row.to(tl.int64)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    value = tl.load(x + row * stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (norm(value, WIDTH, eps) * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def write_window_row(
    kv,  # float[rows, WIDTH], rows `kv_stride` apart
    weight,  # float32[WIDTH]
    turns,  # float32[positions, TURNED]
    positions,  # int32[rows]
    slabs,  # int32[sequences]
    arena,  # uint8[bytes]
    row,
    kv_stride,
    data,
    scale,
    stride,
    eps,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Norm, rotate and store the window record of row `row`."""
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    # Loaded before it is known whether the row counts: one wait for memory less.
    value = tl.load(kv + row.to(tl.int64) * kv_stride + channel, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    position = tl.load(positions + row)
    slab = tl.load(slabs + row // SPAN).to(tl.int64)
    if position >= 0:
        angles = load_turns(turns, position, WIDTH, TURNED, BLOCK)
        record = turn(norm(value, WIDTH, eps) * factor, angles)
        at = slab * stride + data + position % ROWS * DATA_BYTES
        scale_at = slab * stride + scale + position % ROWS * SCALE_BYTES
        store_record(arena, at, scale_at, record, WIDTH, ROPE, FORMAT)


@triton.jit
def prepare_heads(
    query,  # A[rows, ...], rows `stride` apart, this tensor's heads side by side
    out,  # A[rows, HEADS, WIDTH]
    turns,  # float32[positions, TURNED]
    positions,  # int32[rows]
    program,  # of a row, and of TILE heads of it
    stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Norm and rotate TILE heads of a row; with EARLY wait for the query before it is read."""
    PARTS: tl.constexpr = (HEADS + TILE - 1) // TILE
    row = (program // PARTS).to(tl.int64)
    head = program % PARTS * TILE + tl.arange(0, TILE)
    # Neighbours that turn are loaded once more, apart: parting them within the tile would send all of it through shared
    # memory. These come from the L1. [pairs, heads], as the compiler spreads threads over the first axis first.
    STILL: tl.constexpr = WIDTH - TURNED
    pair = tl.arange(0, triton.next_power_of_2(TURNED // 2))
    turned = (pair < TURNED // 2)[:, None] & (head < HEADS)[None, :]
    even_place = STILL + 2 * pair[:, None] + head[None, :] * WIDTH
    position = tl.maximum(tl.load(positions + row), 0)
    angle = turns + position.to(tl.int64) * TURNED + 2 * pair[:, None] + 0 * head[None, :]
    cos, sin = tl.load(angle, mask=turned, other=0.0), tl.load(angle + 1, mask=turned, other=0.0)
    if EARLY:
        gdc_wait()
    channel = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (channel < WIDTH)[None, :]
    place = head[:, None] * WIDTH + channel[None, :]
    x = tl.load(query + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    even = tl.load(query + row * stride + even_place, mask=turned, other=0.0).to(tl.float32)
    odd = tl.load(query + row * stride + even_place + 1, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
        x, even, odd = x * scale[:, None], even * scale[None, :], odd * scale[None, :]
    to = out + row * (HEADS * WIDTH)
    tl.store(to + place, x.to(out.dtype.element_ty), mask=inside & (channel < STILL)[None, :])
    tl.store(to + even_place, (even * cos - odd * sin).to(out.dtype.element_ty), mask=turned)
    tl.store(to + even_place + 1, (even * sin + odd * cos).to(out.dtype.element_ty), mask=turned)


@triton.jit
def _norm_rows_kernel(x, weight, out, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    norm_row(x, weight, out, tl.program_id(0), stride, eps, WIDTH, BLOCK)


@triton.jit
def _write_window_kernel(
    kv,
    weight,
    turns,
    positions,
    slabs,
    arena,
    kv_stride,
    data,
    scale,
    stride,
    eps,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    write_window_row(
        kv, weight, turns, positions, slabs, arena, tl.program_id(0), kv_stride, data, scale, stride, eps,
        SPAN, WIDTH, TURNED, BLOCK, ROPE, ROWS, DATA_BYTES, SCALE_BYTES, FORMAT,
    )  # fmt: skip


@triton.jit
def _prepare_queries_kernel(
    query,
    out,
    turns,
    positions,
    stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TURNED: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    prepare_heads(
        query, out, turns, positions, tl.program_id(0), stride, eps, HEADS, WIDTH, TURNED, BLOCK, TILE, NORM, EARLY
    )


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch that does not wait for the kernel before needs."""
    return {"launch_pdl": True} if early else {}


def norm_rows(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, config: RowsConfig = DEFAULT) -> Tensor:
    """RMS norm of float[R, width] (rows may lie in a wider tensor), times float32[width]: out_dtype[R, width]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=out_dtype, device=x.device)
    if rows:
        _norm_rows_kernel[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            eps,
            width,
            triton.next_power_of_2(width),
            EARLY=config.early,
            num_warps=config.warps,
            **launch_options(config.early),
        )
    return out


def window_arguments(ring: Plane, turns: Tensor, span: int) -> dict[str, int | str]:
    """Constants of `write_window_row`."""
    return {
        "SPAN": span,
        "WIDTH": ring.width,
        "TURNED": turns.shape[1] * 2,
        "BLOCK": triton.next_power_of_2(ring.width),
        "ROPE": ring.rope,
        "ROWS": ring.rows,
        "DATA_BYTES": ring.data_bytes,
        "SCALE_BYTES": ring.scale_bytes,
        "FORMAT": ring.format,
    }


def write_window(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    turns: Tensor,
    rows: StepRows,
    arena: Tensor,
    ring: Plane,
    config: RowsConfig = DEFAULT,
) -> None:
    """Norm, rotate and store the window record of each row at `position % ring.rows` of its sequence's slab.

    Args:
        kv: float[R, width] (rows may lie in a wider tensor).
        norm, eps: of the norm.
        turns: of the layer, contiguous.
        rows: the step.
        arena: uint8[bytes], written into.
        ring: the layer's window ring.
        config: how to.
    """
    if rows.rows:
        _write_window_kernel[(rows.rows,)](
            kv, norm, turns, rows.positions, rows.slabs, arena, kv.stride(0), ring.data, ring.scale, ring.stride, eps,
            **window_arguments(ring, turns, rows.span), EARLY=config.early, num_warps=config.warps,
            **launch_options(config.early),
        )  # fmt: skip


def prepare_queries(
    query: Tensor, positions: Tensor, turns: Tensor, eps: float | None, config: RowsConfig = DEFAULT
) -> Tensor:
    """Norm each head (without weight; not at all if `eps` is None) and rotate it by its row's position.

    Args:
        query: A[R, heads, width], the heads of a row side by side (rows may lie in a wider tensor).
        positions: int32[R]; -1 is taken as 0.
        turns: of the layer, contiguous.
        eps: of the norm.
        config: how to.

    Returns:
        A[R, heads, width].
    """
    rows, heads, width = query.shape
    out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
    if rows:
        constants = head_arguments(query, eps, config)
        _prepare_queries_kernel[(rows * triton.cdiv(heads, constants["TILE"]),)](
            query, out, turns, positions, query.stride(0), eps or 0.0, TURNED=turns.shape[1] * 2, **constants,
            EARLY=config.early, num_warps=config.warps, **launch_options(config.early),
        )  # fmt: skip
    return out


def head_arguments(query: Tensor, eps: float | None, config: RowsConfig) -> dict[str, int]:
    """Constants of `prepare_heads`."""
    _, heads, width = query.shape
    block = triton.next_power_of_2(width)
    tile = max(1, min(config.elements // block, triton.next_power_of_2(heads)))
    return {"HEADS": heads, "WIDTH": width, "BLOCK": block, "TILE": tile, "NORM": eps is not None}
