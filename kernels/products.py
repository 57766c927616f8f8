"""Products: what one program of a dense product does: a tile of the weight, a slice of its columns, some rows of x.

The weight is the tall operand (rows of the weight on M, dequantised in registers), the rows of the step are the narrow
one (N = 16 .. 256): a decode step is bound by the bytes of the weight, and N is padding when it is not full.

fp8. A step of the loop is bound by its instructions, and turning e4m3 into float16 costs half of one for a value, into
bf16 two. So x is taken as float16 too: exact from 2^-14 to 65504, to within 2^-25 below, and infinite above; what a
norm or a clamp has left fits. A thread of the matrix unit holds pairs of columns that are eight apart; in its own order
a tile would be read from shared memory two bytes at a time. Hence columns are taken in another order, in which a
thread's are 16 bytes side by side, and x likewise. Scales are powers of two, so sums are kept in units of the scale of
the columns that are multiplied next: going from scale to scale rounds nothing, and needs no second set of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _power(exponent):
    """float32 2^(exponent - 127); int32 0 .. 254."""
    # Exponent 0 is the subnormal 2^-127.
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _change(old, new):
    """float32 2^(old - new), held within what float32 has: scales of one row that differ by 2^126 do not occur."""
    return _power(tl.minimum(tl.maximum(old - new + 127, 1), 254))


@triton.jit
def _scales(
    scale_at, lift_at, k, lifts, IN: tl.constexpr, COLUMNS: tl.constexpr, UNIFORM: tl.constexpr, GATED: tl.constexpr
):
    """Exponents at column k of a tile's rows: int32, or int32[BLOCK_M] where one does not stand for all."""
    # Also asked for columns behind the end, by the last step for the next and by slices that are empty: any number will
    # do, but it has to be one.
    column = tl.minimum(k, IN - 1) // COLUMNS
    exponent = tl.load(scale_at + column).to(tl.int32)
    if UNIFORM and GATED:
        exponent = tl.where(lifts == 0, exponent, tl.load(lift_at + column).to(tl.int32))
    return exponent


@triton.jit
def _spread(scale, UNIFORM: tl.constexpr, GATED: tl.constexpr):
    """A factor of rows as a factor of sums."""
    return scale if UNIFORM and not GATED else scale[:, None]


@triton.jit
def reorder(w, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] with its columns in another order: that of the module's comment."""
    PARTS: tl.constexpr = BLOCK_K // 16 if BLOCK_K < 64 else 4
    parts = tl.reshape(w, (BLOCK_M, BLOCK_K // (16 * PARTS), 4, PARTS, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 4, 2, 5)), (BLOCK_M, BLOCK_K))


@triton.jit
def _prefetch_rows(weight_at, AHEAD: tl.constexpr):
    """Ask for AHEAD bytes of each row; weight_at: pointers [BLOCK_M]."""
    # Sector by sector: whether a request brings in more than 32 bytes of a line is not documented.
    at = weight_at.to(tl.int64)[:, None] + tl.arange(0, AHEAD // 32)[None, :] * 32
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store_tile(
    total, out, out_stride, row, rows, group, tile, clamp,
    GROUP_OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish the sums float32[BLOCK_M, BLOCK_N] of a tile and store them in the rows of out."""
    if GATED:
        TILE: tl.constexpr = BLOCK_M // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_M // 16, 2, 8, BLOCK_N)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (TILE, BLOCK_N)), tl.reshape(up, (TILE, BLOCK_N))
        gate = tl.minimum(gate, clamp, propagate_nan=tl.PropagateNan.ALL)
        result = gate / (1.0 + tl.exp(-gate)) * tl.clamp(up, -clamp, clamp, propagate_nan=tl.PropagateNan.ALL)
    else:
        TILE: tl.constexpr = BLOCK_M
        result = total
    column = tile * TILE + tl.arange(0, TILE)
    at = row.to(tl.int64)[:, None] * out_stride + (group * GROUP_OUT + column)[None, :]
    mask = (row < rows)[:, None] & (column < GROUP_OUT)[None, :]
    tl.store(out + at, tl.trans(result).to(out.dtype.element_ty), mask=mask)


@triton.jit
def multiply_tile(
    x,  # A[rows, groups * IN], rows `x_stride` apart; or float16, with columns in the other order
    weight,  # [groups * outputs, IN]
    scale,  # uint8, or anything
    out,  # [rows, outputs], rows `out_stride` apart
    partials,  # float32[tiles, SLICES, BLOCK_M, BLOCK_N], scratch
    tickets,  # int32[tiles], 0 between launches
    rows, x_stride, out_stride, clamp,
    program,  # which of this product's: its tile, and its slice
    GROUP_OUT: tl.constexpr,  # outputs of a group
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    SLICE: tl.constexpr,  # columns
    SLICES: tl.constexpr,
    SERIAL: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,  # calculates in float32
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
    TRIGGERS: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """One program's part; axis 0 of the grid are tiles of rows."""
    TILE: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    GROUP_TILES: tl.constexpr = (GROUP_OUT + TILE - 1) // TILE
    TILES: tl.constexpr = GROUPS * GROUP_TILES
    STEPS: tl.constexpr = SLICE // BLOCK_K
    EVEN: tl.constexpr = IN % SLICE == 0
    PREPARED: tl.constexpr = x.dtype.element_ty == tl.float16
    group = program % TILES // GROUP_TILES
    tile = program % GROUP_TILES
    part = program // TILES
    first = part * SLICE

    # Weight rows past an edge repeat the last one, and are not stored. Rows of x past it are not read at all: every
    # program on the chip asking for one line of the cache over and over took twice as long at one row (measured).
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if GATED:
        # Eight rows of the gate, then the same of the up projection: one thread of the matrix unit has both sums.
        lifts = m // 8 % 2
        inner = m // 16 * 8 + m % 8
    else:
        lifts = m * 0
        inner = m
    weight_row = group * GROUP_OUT + tl.minimum(tile * TILE + inner, GROUP_OUT - 1) + lifts * GROUP_OUT
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
        unit = _scales(scale_at, lift_at, first, lifts, IN, SCALE_COLUMNS, UNIFORM, GATED)

    if OVERLAPS:
        # Until here weights only. What the kernel before reads and writes is touched behind the wait.
        if AHEAD > 0:
            _prefetch_rows(weight + weight_row.to(tl.int64) * IN + first, AHEAD)
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
        if SCALED:
            # Scales behind these columns; they are on their way during the product.
            after = first + (step + 1) * BLOCK_K
            next_unit = _scales(scale_at, lift_at, after, lifts, IN, SCALE_COLUMNS, UNIFORM, GATED)
        if WIDE:
            w = w.to(tl.float32)
            rows_x = rows_x.to(tl.float32)
        elif SCALED:
            w = w.to(tl.float16)
            rows_x = rows_x.to(tl.float16)
        if SCALED:
            w = reorder(w, BLOCK_M, BLOCK_K)
            if not PREPARED:
                rows_x = reorder(rows_x, BLOCK_N, BLOCK_K)
        sums = tl.dot(w, tl.trans(rows_x), sums, input_precision="ieee")
        if SCALED:
            sums = sums * _spread(_change(unit, next_unit), UNIFORM, GATED)
            unit = next_unit
        # The compiler decides the first condition, the second is asked in every step.
        if SERIAL and SLICES > 1:  # noqa: SIM102
            if step % STEPS == STEPS - 1:
                total += sums * _spread(_power(unit), UNIFORM, GATED) if SCALED else sums
                sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TRIGGERS:
        # Not at the start: programs of kernels behind the next one would take places that the next one's need, and the
        # multiprocessors would have unequal shares of it.
        gdc_launch_dependents()
    if SCALED and (SLICES == 1 or not SERIAL):
        sums = sums * _spread(_power(unit), UNIFORM, GATED)
    if SERIAL:
        total = sums if SLICES == 1 else total
        _store_tile(total, out, out_stride, row, rows, group, tile, clamp, GROUP_OUT, GATED, BLOCK_M, BLOCK_N)
    else:
        place = (program % TILES * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        spot = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part_at = partials + place * (SLICES * BLOCK_M * BLOCK_N) + spot
        tl.store(part_at + part * (BLOCK_M * BLOCK_N), sums)
        # All threads have stored before one of them says so, to the whole device.
        tl.debug_barrier()
        arrived = tl.atomic_add(tickets + place, 1, sem="acq_rel", scope="gpu")
        if arrived == SLICES - 1:
            # As many on their way at once as there are registers for.
            EACH: tl.constexpr = BLOCK_M * BLOCK_N // THREADS
            AT_ONCE: tl.constexpr = SLICES if EACH <= 8 else (2 if EACH <= 32 and SLICES % 2 == 0 else 1)
            for s in range(0, SLICES, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    # .cg: written by other multiprocessors, so never from this one's L1.
                    total += tl.load(part_at + (s + i) * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            _store_tile(total, out, out_stride, row, rows, group, tile, clamp, GROUP_OUT, GATED, BLOCK_M, BLOCK_N)
            tl.store(tickets + place, 0)
