"""Linear: activations times dense weights (plain, grouped, gated) for the few rows of a decode step.

The weight is the tall operand of the product (rows of the weight on M, dequantised in registers), the rows of the step
are the narrow one (N = 16 .. 128): a decode step is bound by the bytes of the weight, and N is padding when it is not
full. Where a weight has few tiles, its columns are cut into slices, one program each; the last program of a tile adds
the slices' sums in ascending order.

A row's bits do not depend on R or on the other rows: columns are added up in steps of `block_k` inside slices of a
length that both follow from the weight alone, and slices are added in order. Whether slices are programs of their own
or a loop in one program (`serial`) does not change the order, and so may depend on R, as may the tile's shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.forms import Weight
from kernels.tiling import Tiling, tiling

AHEAD_BYTES = 512
"""Bytes of each row that go to the L2 before the kernel before has ended; 264 programs of 64 rows ask for 8.6 MB."""
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which holds bf16 as integers and can not calculate with it."""

_counters: dict[tuple[torch.device, int, int], Tensor] = {}


def linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None, *, config: Tiling | None = None) -> Tensor:
    """x times the transposed weight.

    Args:
        x: A[R, in], rows contiguous (they may lie in a wider tensor).
        weight: [out, in].
        out_dtype: A if None.
        config: another tiling.

    Returns:
        out_dtype[R, out].
    """
    out = torch.empty((x.shape[0], weight.data.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, weight, out, groups=1, gated=False, clamp=0.0, config=config)
    return out


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
    _launch(x, weight, out, groups=groups, gated=False, clamp=0.0, config=config)
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
    _launch(x, weight, out, groups=1, gated=True, clamp=clamp, config=config)
    return out


def _launch(
    x: Tensor, weight: Weight, out: Tensor, *, groups: int, gated: bool, clamp: float, config: Tiling | None
) -> None:
    rows, (height, width) = x.shape[0], weight.data.shape
    if rows == 0:
        return
    if x.stride(1) != 1 or not weight.data.is_contiguous():
        raise ValueError("rows of x and the weight must be contiguous")
    chosen = config or tiling(weight, rows, x.dtype)
    slice_columns = triton.cdiv(triton.cdiv(width, chosen.block_k), chosen.slices) * chosen.block_k
    # Outputs of a group, and of a tile.
    group_out = height // groups // (2 if gated else 1)
    tile_out = chosen.block_m // (2 if gated else 1)
    tiles = groups * triton.cdiv(group_out, tile_out)
    row_tiles = triton.cdiv(rows, chosen.block_n)
    split = chosen.slices if not chosen.serial else 1
    partials, counters = out, out
    if split > 1:
        partials = torch.empty(
            (tiles * row_tiles, split, chosen.block_m * chosen.block_n), dtype=torch.float32, device=x.device
        )
        counters = _counters_of(weight.data, tiles * row_tiles)
    scaled = weight.scale is not None
    overlaps = chosen.overlaps and not INTERPRETED
    row_bytes = slice_columns * (chosen.slices // split) * weight.data.element_size()
    _linear_kernel[(row_tiles, tiles, split)](
        x,
        weight.data,
        weight.scale if scaled else weight.data,
        out,
        partials,
        counters,
        rows,
        x.stride(0),
        out.stride(0),
        clamp,
        GROUP_OUT=group_out,
        GROUPS=groups,
        IN=width,
        SLICE=slice_columns,
        SLICES=chosen.slices,
        SERIAL=chosen.serial or chosen.slices == 1,
        SCALED=scaled,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=weight.block[1],
        SCALE_STRIDE=weight.scale.shape[1] if weight.scale is not None else 0,
        GATED=gated,
        WIDE=INTERPRETED or x.dtype == torch.float32 or weight.data.dtype == torch.float32,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        OVERLAPS=overlaps,
        SCALE_WEIGHTS=chosen.scale_weights,
        # A power of two, and nothing behind the end.
        AHEAD=min(AHEAD_BYTES, row_bytes & -row_bytes) // 32 * 32 if width % slice_columns == 0 else 0,
        **({"launch_pdl": True} if overlaps else {}),
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )


def _counters_of(data: Tensor, count: int) -> Tensor:
    """int32[count] zeros that belong to a weight: launches on one weight must not overlap in time.

    Each launch leaves zeros behind, so a graph can replay. They are never freed, since a graph may hold them, and made
    outside of graphs: memory of a graph would be cleared in the replays of the graph that made it, and in no other.
    """
    key = (data.device, data.data_ptr(), count)
    held = _counters.get(key)
    if held is None:
        if data.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a product with slices must run once before it is captured")
        held = torch.zeros(count, dtype=torch.int32, device=data.device)
        _counters[key] = held
    return held


@triton.jit
def _power(byte):
    """float32 2^(byte - 127)."""
    # Exponent 0 is the subnormal 2^-127.
    return tl.where(byte == 0, 1 << 22, byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_bytes(
    scale_at, lift_at, k, IN: tl.constexpr, COLUMNS: tl.constexpr, UNIFORM: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Scales at column k of a tile's rows (and of the up projection's, where one stands for all): uint8[BLOCK_M]."""
    # Also asked for columns behind the end, by the last step for the next and by slices that are empty: any number will
    # do, but it has to be one.
    column = tl.minimum(k, IN - 1) // COLUMNS
    byte = tl.load(scale_at + column)
    lift = byte
    if UNIFORM:
        byte = tl.full((BLOCK_M,), byte, tl.uint8)
        if GATED:
            lift = tl.full((BLOCK_M,), tl.load(lift_at + column), tl.uint8)
    return byte, lift


@triton.jit
def _prefetch(weight_at, AHEAD: tl.constexpr):
    """Ask for AHEAD bytes of each row; weight_at: pointers [BLOCK_M]."""
    # Sector by sector: whether a request brings in more than 32 bytes of a line is not documented.
    at = weight_at.to(tl.int64)[:, None] + tl.arange(0, AHEAD // 32)[None, :] * 32
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store_tile(
    total,
    out,
    out_stride,
    row,
    rows,
    group,
    tile,
    clamp,
    GROUP_OUT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Finish the sums float32[BLOCK_M, BLOCK_N] of a tile and store them in the rows of out."""
    if GATED:
        TILE: tl.constexpr = BLOCK_M // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, TILE, BLOCK_N)), (1, 2, 0)))
        gate = tl.minimum(gate, clamp, propagate_nan=tl.PropagateNan.ALL)
        result = gate / (1.0 + tl.exp(-gate)) * tl.clamp(up, -clamp, clamp, propagate_nan=tl.PropagateNan.ALL)
    else:
        TILE: tl.constexpr = BLOCK_M
        result = total
    column = tile * TILE + tl.arange(0, TILE)
    at = row.to(tl.int64)[:, None] * out_stride + (group * GROUP_OUT + column)[None, :]
    mask = (row < rows)[:, None] & (column < GROUP_OUT)[None, :]
    tl.store(out + at, tl.trans(result).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    scale,
    out,
    partials,
    counters,
    rows,
    x_stride,
    out_stride,
    clamp,
    GROUP_OUT: tl.constexpr,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    SERIAL: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
):
    # Tiles of rows are neighbours, so that a weight comes from memory once and from the cache afterwards.
    TILE: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    GROUP_TILES: tl.constexpr = (GROUP_OUT + TILE - 1) // TILE
    STEPS: tl.constexpr = SLICE // BLOCK_K
    EVEN: tl.constexpr = IN % SLICE == 0
    group = tl.program_id(1) // GROUP_TILES
    tile = tl.program_id(1) % GROUP_TILES
    first = 0 if SERIAL else tl.program_id(2) * SLICE

    # Weight rows past an edge repeat the last one, and are not stored. Rows of x past it are not read at all: every
    # program on the chip asking for one line of the cache over and over took twice as long at one row (measured).
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    weight_row = group * GROUP_OUT + tl.minimum(tile * TILE + m % TILE, GROUP_OUT - 1) + (m // TILE) * GROUP_OUT
    k = first + tl.arange(0, BLOCK_K)
    there = (row < rows)[:, None]
    x_at = x + group * IN + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight + weight_row.to(tl.int64)[:, None] * IN + k[None, :]
    if SCALED:
        # Where a tile lies in one block (each half of a gated one), its scale is a number, else a vector.
        UNIFORM: tl.constexpr = SCALE_ROWS % TILE == 0 and (GROUP_OUT % TILE == 0 or (GROUPS == 1 and not GATED))
        scale_row = group * GROUP_OUT + tile * TILE if UNIFORM else weight_row
        scale_at = scale + scale_row // SCALE_ROWS * SCALE_STRIDE
        lift_at = scale + (scale_row + GROUP_OUT) // SCALE_ROWS * SCALE_STRIDE
        byte, lift = _scale_bytes(scale_at, lift_at, first, IN, SCALE_COLUMNS, UNIFORM, GATED, BLOCK_M)

    if OVERLAPS:
        # Until here weights only. What the kernel before reads and writes is touched behind the wait.
        gdc_launch_dependents()
        if AHEAD > 0:
            _prefetch(weight + weight_row.to(tl.int64) * IN + first, AHEAD)
        gdc_wait()

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STEPS * SLICES if SERIAL else STEPS):
        if EVEN:
            w = tl.load(weight_at + step * BLOCK_K)
            rows_x = tl.load(x_at + step * BLOCK_K, mask=there, other=0.0)
        else:
            inside = (step * BLOCK_K + k < IN)[None, :]
            w = tl.load(weight_at + step * BLOCK_K, mask=inside, other=0.0)
            rows_x = tl.load(x_at + step * BLOCK_K, mask=there & inside, other=0.0)
        if WIDE:
            w = w.to(tl.float32)
            rows_x = rows_x.to(tl.float32)
        elif SCALED:
            # By way of float16 and float32. The direct way is one F2F for each element, of which a multiprocessor does
            # 16 in a cycle: less than its share of what memory delivers.
            w = w.to(tl.float16).to(tl.float32).to(tl.bfloat16)
        if SCALED:
            factor = _power(tl.where(m < TILE, byte, lift) if UNIFORM and GATED else byte)[:, None]
            if not WIDE and SCALE_WEIGHTS:
                sums = tl.dot(w * factor.to(tl.bfloat16), tl.trans(rows_x), sums)
            else:
                # The step's own sum takes the scale, which is a power of two, so nothing is rounded once more.
                sums += tl.dot(w, tl.trans(rows_x), input_precision="ieee") * factor
            # The next step's scales are on their way during this step's product.
            at = first + (step + 1) * BLOCK_K
            byte, lift = _scale_bytes(scale_at, lift_at, at, IN, SCALE_COLUMNS, UNIFORM, GATED, BLOCK_M)
        else:
            sums = tl.dot(w, tl.trans(rows_x), sums, input_precision="ieee")
        # The compiler decides the first condition, the second is asked in every step.
        if SERIAL and SLICES > 1:  # noqa: SIM102
            if step % STEPS == STEPS - 1:
                total += sums
                sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SERIAL:
        total = total + sums if SLICES == 1 else total
        _store_tile(total, out, out_stride, row, rows, group, tile, clamp, GROUP_OUT, GATED, BLOCK_M, BLOCK_N)
    else:
        place = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        inner = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part = partials + place * (SLICES * BLOCK_M * BLOCK_N) + inner
        tl.store(part + tl.program_id(2) * (BLOCK_M * BLOCK_N), sums)
        # All threads have stored before one of them says so, to the whole device.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu")
        if arrived == SLICES - 1:
            for s in tl.static_range(SLICES):
                # .cg: written by other multiprocessors, so never from this one's L1.
                total += tl.load(part + s * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            _store_tile(total, out, out_stride, row, rows, group, tile, clamp, GROUP_OUT, GATED, BLOCK_M, BLOCK_N)
            tl.store(counters + place, 0)
