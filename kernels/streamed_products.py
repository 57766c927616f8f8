"""Streamed products: dense products whose weights are on their way before the kernel in front has ended, in Gluon.

A multiprocessor holds one program: its shared memory is a ring of the weight's stages, and the rows of x that it will
multiply. So no two programs of a launch share one while another has none, whenever they start. A program lets the next
kernel be launched at once, fills its ring, and only then waits for the kernel in front. Sums are those of
`kernels.products`, bit for bit: the same columns in the same order for the same instructions.

Triton's interpreter does not run it. `kernels.streamed` launches it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.streamed_operands import BLOCK, TILE, WARPS, change, keep_rows, operands, power, rows_of


@gluon.jit
def _fetch(data, bars, ring, stage, tile, column, wanted, COLUMNS: gl.constexpr):
    """Starts the copy of a stage: two steps."""
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * TILE * TILE, wanted)
    tma.async_copy_global_to_shared(data, [tile * TILE, column], bar, ring.index(stage * 2), wanted)
    tma.async_copy_global_to_shared(data, [tile * TILE, column + COLUMNS], bar, ring.index(stage * 2 + 1), wanted)


@gluon.jit
def _start_step(left, right, kept, block, sums):
    """Starts adding a step's products to the sums."""
    whole = warpgroup_mma(left, kept.index(block).permute([1, 0]), sums, is_async=True)
    return warpgroup_mma(right, kept.index(block + 1).permute([1, 0]), whole, is_async=True)


@gluon.jit
def _store_tile(
    sums, out, out_stride, tile, rows, HEIGHT: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    column = tile * TILE + rows_of(MMA, SCALED)
    n = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    at = out + n.to(gl.int64)[None, :] * out_stride + column[:, None]
    gl.store(at, sums.to(out.dtype.element_ty), mask=(n < rows)[None, :] & (column < HEIGHT)[:, None])


@gluon.jit
def _add_slices(at, there, SLICES: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr):
    """float32[TILE, ROWS]: sums of a tile's slices, in order."""
    AT_ONCE: gl.constexpr = SLICES if ROWS <= 16 else 2
    result = gl.zeros([TILE, ROWS], gl.float32, MMA)
    for first in gl.static_range(0, SLICES, AT_ONCE):
        parts = ()
        for i in gl.static_range(AT_ONCE):
            # .cg: written by other multiprocessors, so never from this one's L1.
            part_at = at + (first + i) * (ROWS * TILE)
            parts = parts + (gl.load(part_at, mask=there, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(AT_ONCE):
            result += parts[i]
    return result


@gluon.jit
def _multiply(
    program, programs, data, bars, words, kept3, x, scale, out, partials, tickets, rows, x_stride, out_stride,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, GROUP_TILES: gl.constexpr, SLICES: gl.constexpr,
    SCALED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, KEPT: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One program's part of a product: a slice of the columns of a tile; without slices, each `programs`-th tile.

    data: descriptor of [HEIGHT, WIDTH] in boxes of a step. words: uint8[STAGES * 2, TILE, TILE], the ring. kept3: 16
    bits [HELD, ROWS, BLOCK], of which KEPT are used at once. partials: float32[tiles, SLICES, ROWS, TILE]. tickets:
    int32[tiles], 0 between launches.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COLUMNS: gl.constexpr = TILE if SCALED else BLOCK
    BLOCKS: gl.constexpr = COLUMNS // BLOCK
    # Turns of the loop, of two steps each: of a tile, and those whose x is there.
    TURNS: gl.constexpr = WIDTH // SLICES // (2 * COLUMNS)
    THERE: gl.constexpr = KEPT // (2 * BLOCKS)
    TILES: gl.constexpr = (HEIGHT + TILE - 1) // TILE
    # Of x, on their way at once, each 128 bytes.
    LINES: gl.constexpr = min(KEPT * ROWS, 512 if ROWS < 64 else 256)
    if SCALED:
        ring = words._reinterpret(gl.uint8, [STAGES * 2, TILE, TILE], gl.NVMMASharedLayout(128, 8, 2))
        kept = kept3._reinterpret(gl.float16, [HELD, ROWS, BLOCK], SHARED)
        filled = kept3._reinterpret(gl.float16, [HELD * ROWS // LINES, LINES, BLOCK], SHARED)
    else:
        ring = words._reinterpret(gl.bfloat16, [STAGES * 2, TILE, BLOCK], SHARED)
        kept = kept3._reinterpret(gl.bfloat16, [HELD, ROWS, BLOCK], SHARED)
        filled = kept3._reinterpret(gl.bfloat16, [HELD * ROWS // LINES, LINES, BLOCK], SHARED)
    part = program % SLICES
    tile = program // SLICES
    first = part * (TURNS * 2 * COLUMNS)
    total = TURNS if SLICES > 1 else (TILES - tile + programs - 1) // programs * TURNS
    for i in gl.static_range(STAGES):
        its = tile + i // TURNS * programs
        _fetch(data, bars, ring, i, its, first + i % TURNS * (2 * COLUMNS), total > i, COLUMNS)
    unit = gl.to_tensor(0)
    if SCALED:
        scale += first // TILE
        unit = gl.load(scale + tile * (WIDTH // TILE)).to(gl.int32)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    x += tile // GROUP_TILES * WIDTH + first
    sums = gl.zeros([TILE, ROWS], gl.float32, MMA)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    left, right = sums, sums
    if SCALED:
        mbarrier.wait(bars.index(0), 0)
        left, right = operands(ring.index(0), MMA)
    for i in range(total):
        if i == 0 or (THERE < TURNS and i % THERE == 0):
            # What it overwrites has been used.
            gl.thread_barrier()
            keep_rows(x + i % TURNS * (2 * COLUMNS), filled, KEPT * ROWS // LINES, rows, x_stride, ROWS, SCALED)
        block = i % THERE * (2 * BLOCKS)
        next_stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        next_phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        middle_unit, next_unit = unit, unit
        if SCALED:
            # What is asked for, waited for, and turned from here on lies beside what the matrix unit does.
            whole = _start_step(left, right, kept, block, sums)
            its_scales = scale + (tile + i // TURNS * programs) * (WIDTH // TILE)
            middle_unit = gl.load(its_scales + i % TURNS * 2 + 1).to(gl.int32)
            after = gl.minimum(i + 1, total - 1)
            its_scales = scale + (tile + after // TURNS * programs) * (WIDTH // TILE)
            next_unit = gl.load(its_scales + after % TURNS * 2).to(gl.int32)
            left, right = operands(ring.index(stage * 2 + 1), MMA)
            sums = warpgroup_mma_wait(0, deps=[whole])
            sums = sums * change(unit, middle_unit)
            whole = _start_step(left, right, kept, block + BLOCKS, sums)
        else:
            mbarrier.wait(bars.index(stage), phase)
            whole = warpgroup_mma(ring.index(stage * 2), kept.index(block).permute([1, 0]), sums, is_async=True)
            rows_x = kept.index(block + BLOCKS).permute([1, 0])
            whole = warpgroup_mma(ring.index(stage * 2 + 1), rows_x, whole, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[whole])
        # All warps have used the stage, or have it in their registers.
        gl.thread_barrier()
        ahead = i + STAGES
        its = tile + ahead // TURNS * programs
        _fetch(data, bars, ring, stage, its, first + ahead % TURNS * (2 * COLUMNS), ahead < total, COLUMNS)
        is_last = i % TURNS == TURNS - 1
        if SCALED:
            # Behind the last turn: what is in the ring, for nothing.
            mbarrier.wait(bars.index(next_stage), next_phase, i + 1 < total)
            left, right = operands(ring.index(next_stage * 2), MMA)
            sums = warpgroup_mma_wait(0, deps=[whole])
            sums = sums * gl.where(is_last, power(middle_unit), change(middle_unit, next_unit))
            unit = next_unit
        if SLICES == 1:  # noqa: SIM102
            if is_last:
                its = tile + i // TURNS * programs
                _store_tile(sums, out, out_stride, its, rows, HEIGHT, ROWS, MMA, SCALED)
                sums = gl.zeros([TILE, ROWS], gl.float32, MMA)
        stage, phase = next_stage, next_phase
    if SLICES > 1:
        m = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
        n = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
        there = (n < rows)[None, :] & (m >= 0)[:, None]
        place = partials + tile * (SLICES * ROWS * TILE) + n[None, :] * TILE + rows_of(MMA, SCALED)[:, None]
        gl.store(place + part * (ROWS * TILE), sums, mask=there)
        # All threads have stored before one of them says so, to the whole device.
        gl.thread_barrier()
        arrived = gl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SLICES - 1:
            gl.store(tickets + tile, 0)
            result = _add_slices(place, there, SLICES, ROWS, MMA)
            _store_tile(result, out, out_stride, tile, rows, HEIGHT, ROWS, MMA, SCALED)


@gluon.jit
def _open_memory(STAGES: gl.constexpr, HELD: gl.constexpr, ROWS: gl.constexpr):
    """(barriers, the ring, room for x)."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    words = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, TILE, TILE], gl.NVMMASharedLayout(128, 8, 3))
    kept = gl.allocate_shared_memory(gl.float16, [HELD, ROWS, BLOCK], gl.NVMMASharedLayout(128, 16, 3))
    return bars, words, kept


@gluon.jit(do_not_specialize=["rows"])
def streamed_kernel(
    data, x, scale, out, partials, tickets, rows, x_stride, out_stride,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, GROUP_TILES: gl.constexpr, SLICES: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """A product with fp8 weights, `_multiply` says how."""
    bars, words, kept = _open_memory(STAGES, KEPT, ROWS)
    _multiply(
        gl.program_id(0), gl.num_programs(0), data, bars, words, kept, x, scale, out, partials, tickets, rows, x_stride,
        out_stride, HEIGHT, WIDTH, GROUP_TILES, SLICES, True, ROWS, STAGES, KEPT, KEPT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def streamed_pair_kernel(
    data, side_data, x, scale, out, side_out, partials, side_partials, tickets, side_tickets, rows, x_stride,
    out_stride, side_out_stride,
    HEIGHT: gl.constexpr, SIDE_HEIGHT: gl.constexpr, WIDTH: gl.constexpr, SLICES: gl.constexpr,
    SIDE_SLICES: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, KEPT: gl.constexpr,
    SIDE_KEPT: gl.constexpr,
):  # fmt: skip
    """Products of the same rows with fp8 weights and with bf16 ones, the side's."""
    HELD: gl.constexpr = max(KEPT, SIDE_KEPT)
    bars, words, kept = _open_memory(STAGES, HELD, ROWS)
    # The side's programs come first: they have more to do.
    SIDE_PROGRAMS: gl.constexpr = (SIDE_HEIGHT + TILE - 1) // TILE * SIDE_SLICES
    ONE_GROUP: gl.constexpr = 1 << 30
    program = gl.program_id(0)
    if program < SIDE_PROGRAMS:
        _multiply(
            program, SIDE_PROGRAMS, side_data, bars, words, kept, x, scale, side_out, side_partials, side_tickets, rows,
            x_stride, side_out_stride, SIDE_HEIGHT, WIDTH, ONE_GROUP, SIDE_SLICES, False, ROWS, STAGES,
            SIDE_KEPT, HELD,
        )  # fmt: skip
    else:
        _multiply(
            program - SIDE_PROGRAMS, gl.num_programs(0) - SIDE_PROGRAMS, data, bars, words, kept, x, scale, out,
            partials, tickets, rows, x_stride, out_stride, HEIGHT, WIDTH, ONE_GROUP, SLICES, True, ROWS, STAGES, KEPT,
            HELD,
        )  # fmt: skip
