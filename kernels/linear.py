"""Linear: activations times dense weights (plain, in pairs, grouped, gated) for the few rows of a decode step.

Where a weight has few tiles, its columns are cut into slices, one program each; the last program of a tile adds the
slices' sums in ascending order.

A row's bits do not depend on R or on the other rows: columns are added up in steps of `block_k` inside slices of a
length that both follow from the weight alone, and slices are added in order. Whether slices are programs of their own
or a loop in one program (`serial`) does not change the order, and so may depend on R, as may the tile's shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import streamed
from kernels.forms import Weight
from kernels.products import multiply_tile, reorder
from kernels.tickets import tickets_of
from kernels.tiling import Tiling, tiling

PREPARED_COLUMNS = 1024
"""Of a program that turns x."""
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which holds bf16 as integers and can not calculate with it."""


def linear(
    x: Tensor,
    weight: Weight,
    out_dtype: torch.dtype | None = None,
    *,
    config: Tiling | None = None,
) -> Tensor:
    """x times the transposed weight.

    Args:
        x: A[R, in], rows contiguous (they may lie in a wider tensor). bf16 with a weight in fp8: below 65504, here and
            in the other products; what is larger gives infinities.
        weight: [out, in].
        out_dtype: A if None.
        config: another tiling.

    Returns:
        out_dtype[R, out].
    """
    out = torch.empty((x.shape[0], weight.data.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    if config is None and weight.scale is not None and streamed.fits(x, weight):
        streamed.multiply(x, weight, out)
    else:
        _launch(_Product(x, weight, out, config))
    return out


def paired_linear(
    x: Tensor,
    weight: Weight,
    side: Weight,
    *,
    config: tuple[Tiling, Tiling] | None = None,
) -> tuple[Tensor, Tensor]:
    """x times two weights, in one launch.

    Args:
        x: A[R, in], rows contiguous (they may lie in a wider tensor).
        weight: [out, in].
        side: [side out, in]; what it gives is kept in float32.
        config: other tilings, with the same `block_n`, `warps` and `stages`.

    Returns:
        (A[R, out], float32[R, side out]).
    """
    out = torch.empty((x.shape[0], weight.data.shape[0]), dtype=x.dtype, device=x.device)
    side_out = torch.empty((x.shape[0], side.data.shape[0]), dtype=torch.float32, device=x.device)
    if x.shape[0] == 0:
        return out, side_out
    if config is None and streamed.fits_pair(x, weight, side):
        streamed.multiply_pair(x, weight, side, out, side_out)
        return out, side_out
    if config is None:
        own = tiling(weight, x.shape[0], x.dtype)
        other = tiling(side, x.shape[0], x.dtype)
        taller = own if own.block_n * own.block_m >= other.block_n * other.block_m else other
        shared = {name: getattr(taller, name) for name in ("block_n", "block_m", "warps", "registers", "overlaps")}
        stages = min(own.stages, other.stages)
        own, other = (dataclasses.replace(each, **shared, stages=stages) for each in (own, other))
    else:
        own, other = config
    first, second = _Product(x, weight, out, own), _Product(x, side, side_out, other)
    overlaps = own.overlaps and not INTERPRETED
    if not first.rows_contiguous or not second.rows_contiguous:
        raise ValueError("rows of x and the weights must be contiguous")
    _paired_kernel[(first.row_tiles, first.programs + second.programs)](
        *first.tensors, *second.tensors, x.shape[0], first.x.stride(0), x.stride(0), out.stride(0), side_out.stride(0),
        IN=x.shape[1], BLOCK_N=own.block_n, OVERLAPS=overlaps, TRIGGERS=not INTERPRETED, THREADS=own.warps * 32,
        **{f"{name}_0": value for name, value in first.constants.items()},
        **{f"{name}_1": value for name, value in second.constants.items()},
        **({"launch_pdl": True} if overlaps else {}),
        num_warps=own.warps, num_stages=own.stages, maxnreg=own.registers,
    )  # fmt: skip
    return out, side_out


def grouped_linear(x: Tensor, weight: Weight, groups: int, *, config: Tiling | None = None) -> Tensor:
    """Each group of channels times its own part of the weight.

    Args:
        x: A[R, groups * in].
        weight: [groups * out, in], groups one after the other; blocks do not cross groups.
        groups: how many.
        config: another tiling.

    Returns:
        A[R, groups * out].
    """
    out = torch.empty((x.shape[0], weight.data.shape[0]), dtype=x.dtype, device=x.device)
    if config is None and weight.scale is not None and streamed.fits(x, weight, groups):
        streamed.multiply(x, weight, out, groups)
    else:
        _launch(_Product(x, weight, out, config, groups=groups))
    return out


def gated_linear(x: Tensor, weight: Weight, clamp: float, *, config: Tiling | None = None) -> Tensor:
    """silu of the gate, clamped from above, times the up projection, clamped on both sides.

    Args:
        x: A[R, in].
        weight: [2 * width, in], the gate (w1) and then the up projection (w3).
        clamp: limit.
        config: another tiling.

    Returns:
        A[R, width].
    """
    out = torch.empty((x.shape[0], weight.data.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(_Product(x, weight, out, config, gated=True), clamp)
    return out


class _Product:
    """A product as its kernel is told: tensors, constants, and how many programs it has."""

    def __init__(
        self, x: Tensor, weight: Weight, out: Tensor, config: Tiling | None, *, groups: int = 1, gated: bool = False
    ) -> None:
        rows, (height, width) = x.shape[0], weight.data.shape
        self.rows_contiguous = x.stride(1) == 1 and weight.data.is_contiguous()
        self.tiling = chosen = config or tiling(weight, rows, x.dtype)
        scaled = weight.scale is not None
        wide = INTERPRETED or torch.float32 in (x.dtype, weight.data.dtype)
        if chosen.prepared and scaled and not wide and self.rows_contiguous and width % chosen.block_k == 0:
            x = _prepare(x, chosen.block_k)
        self.x, self.out, self.width = x, out, width
        slice_columns = triton.cdiv(triton.cdiv(width, chosen.block_k), chosen.slices) * chosen.block_k
        # Outputs of a group.
        group_out = height // groups // (2 if gated else 1)
        tiles = groups * triton.cdiv(group_out, chosen.block_m // (2 if gated else 1))
        split = chosen.slices if not chosen.serial else 1
        self.row_tiles = triton.cdiv(rows, chosen.block_n)
        self.programs = tiles * split
        partials, tickets = out, out
        if split > 1 and rows:
            count = tiles * self.row_tiles
            partials = torch.empty(
                (count, split, chosen.block_m * chosen.block_n), dtype=torch.float32, device=x.device
            )
            tickets = tickets_of(weight.data, count)
        row_bytes = slice_columns * (chosen.slices // split) * weight.data.element_size()
        # A power of two, and nothing behind the end.
        ahead = min(chosen.ahead, row_bytes & -row_bytes) // 32 * 32 if width % slice_columns == 0 else 0
        self.tensors = (x, weight.data, weight.scale if scaled else weight.data, out, partials, tickets)
        self.constants: dict[str, Any] = {
            "GROUP_OUT": group_out,
            "SLICE": slice_columns,
            "SLICES": chosen.slices,
            "SERIAL": chosen.serial or chosen.slices == 1,
            "SCALED": scaled,
            "SCALE_ROWS": weight.block[0],
            "SCALE_COLUMNS": weight.block[1],
            "SCALE_STRIDE": weight.scale.shape[1] if weight.scale is not None else 0,
            "WIDE": wide,
            "BLOCK_M": chosen.block_m,
            "BLOCK_K": chosen.block_k,
            "AHEAD": ahead,
        }
        self.groups, self.gated = groups, gated


def _launch(product: _Product, clamp: float = 0.0) -> None:
    chosen, x, out = product.tiling, product.x, product.out
    if x.shape[0] == 0:
        return
    if not product.rows_contiguous:
        raise ValueError("rows of x and the weight must be contiguous")
    overlaps = chosen.overlaps and not INTERPRETED
    _linear_kernel[(product.row_tiles, product.programs)](
        *product.tensors, x.shape[0], x.stride(0), out.stride(0), clamp, IN=product.width, GROUPS=product.groups,
        GATED=product.gated, **product.constants, BLOCK_N=chosen.block_n, OVERLAPS=overlaps,
        TRIGGERS=not INTERPRETED,
        THREADS=chosen.warps * 32, **({"launch_pdl": True} if overlaps else {}),
        num_warps=chosen.warps, num_stages=chosen.stages, maxnreg=chosen.registers,
    )  # fmt: skip


def _prepare(x: Tensor, block_k: int) -> Tensor:
    """x as the products with fp8 weights turn it, once for all tiles: float16, columns in the other order."""
    rows, width = x.shape
    out = torch.empty((rows, triton.cdiv(width, block_k) * block_k), dtype=torch.float16, device=x.device)
    columns = max(block_k, PREPARED_COLUMNS)
    _prepare_kernel[(rows, triton.cdiv(width, columns))](
        x, out, x.stride(0), out.stride(0), IN=width, OUT=out.shape[1], BLOCK_K=block_k, COLUMNS=columns,
        launch_pdl=True, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _prepare_kernel(
    x, out, x_stride, out_stride, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr
):
    gdc_launch_dependents()
    gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x + row * x_stride + column, mask=column < IN, other=0.0).to(tl.float16)
    value = tl.reshape(
        reorder(tl.reshape(value, (COLUMNS // BLOCK_K, BLOCK_K)), COLUMNS // BLOCK_K, BLOCK_K), (COLUMNS,)
    )
    tl.store(out + row * out_stride + column, value, mask=column < OUT)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, scale, out, partials, tickets, rows, x_stride, out_stride, clamp,
    IN: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr, GROUP_OUT: tl.constexpr,
    SLICE: tl.constexpr, SLICES: tl.constexpr, SERIAL: tl.constexpr, SCALED: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, SCALE_STRIDE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr, TRIGGERS: tl.constexpr, AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    multiply_tile(
        x, weight, scale, out, partials, tickets, rows, x_stride, out_stride, clamp, tl.program_id(1),
        GROUP_OUT, GROUPS, IN, SLICE, SLICES, SERIAL, SCALED, SCALE_ROWS, SCALE_COLUMNS,
        SCALE_STRIDE, GATED, WIDE, BLOCK_M, BLOCK_N, BLOCK_K, OVERLAPS, TRIGGERS, AHEAD, THREADS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _paired_kernel(
    x_0, weight_0, scale_0, out_0, partials_0, tickets_0, x_1, weight_1, scale_1, out_1, partials_1, tickets_1,
    rows, x_stride_0, x_stride_1, out_stride_0, out_stride_1,
    IN: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr, TRIGGERS: tl.constexpr,
    THREADS: tl.constexpr,
    GROUP_OUT_0: tl.constexpr, SLICE_0: tl.constexpr, SLICES_0: tl.constexpr, SERIAL_0: tl.constexpr,
    SCALED_0: tl.constexpr, SCALE_ROWS_0: tl.constexpr, SCALE_COLUMNS_0: tl.constexpr, SCALE_STRIDE_0: tl.constexpr,
    WIDE_0: tl.constexpr, BLOCK_M_0: tl.constexpr, BLOCK_K_0: tl.constexpr, AHEAD_0: tl.constexpr,
    GROUP_OUT_1: tl.constexpr, SLICE_1: tl.constexpr, SLICES_1: tl.constexpr, SERIAL_1: tl.constexpr,
    SCALED_1: tl.constexpr, SCALE_ROWS_1: tl.constexpr, SCALE_COLUMNS_1: tl.constexpr, SCALE_STRIDE_1: tl.constexpr,
    WIDE_1: tl.constexpr, BLOCK_M_1: tl.constexpr, BLOCK_K_1: tl.constexpr, AHEAD_1: tl.constexpr,
):  # fmt: skip
    # The side weight's programs come first: they have more to do.
    PROGRAMS: tl.constexpr = (GROUP_OUT_1 + BLOCK_M_1 - 1) // BLOCK_M_1 * (1 if SERIAL_1 else SLICES_1)
    if tl.program_id(1) < PROGRAMS:
        multiply_tile(
            x_1, weight_1, scale_1, out_1, partials_1, tickets_1, rows, x_stride_1, out_stride_1, 0.0,
            tl.program_id(1), GROUP_OUT_1, 1, IN, SLICE_1, SLICES_1, SERIAL_1, SCALED_1,
            SCALE_ROWS_1, SCALE_COLUMNS_1, SCALE_STRIDE_1, False, WIDE_1, BLOCK_M_1, BLOCK_N, BLOCK_K_1, OVERLAPS,
            TRIGGERS, AHEAD_1, THREADS,
        )  # fmt: skip
    else:
        multiply_tile(
            x_0, weight_0, scale_0, out_0, partials_0, tickets_0, rows, x_stride_0, out_stride_0, 0.0,
            tl.program_id(1) - PROGRAMS, GROUP_OUT_0, 1, IN, SLICE_0, SLICES_0, SERIAL_0,
            SCALED_0, SCALE_ROWS_0, SCALE_COLUMNS_0, SCALE_STRIDE_0, False, WIDE_0, BLOCK_M_0, BLOCK_N, BLOCK_K_0,
            OVERLAPS, TRIGGERS, AHEAD_0, THREADS,
        )  # fmt: skip
