"""Products of blocks of e4m3 keys with queries on Hopper's fp8 matrix unit, added up over heads, in Gluon.

`kernels.indexer_scores` says what for. A block is BLOCK keys, the left operand, as they lie in shared memory. The
queries of a sequence's rows are the right one, in groups of so many rows that a product's heads are a power of two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

BLOCK = gl.constexpr(64)
EACH = gl.constexpr(8)
"""As `choice.EACH`."""
WIDTH = gl.constexpr(128)


@gluon.constexpr_function
def group_rows(span, heads, most):
    """How many rows each product takes: powers of two, of `most` heads in all at most."""
    found = []
    while span:
        rows = 1
        while rows * 2 <= span and rows * 2 * heads <= most:
            rows *= 2
        found.append(rows)
        span -= rows
    return tuple(found)


@gluon.constexpr_function
def item_of(items, i):
    """Of a tuple that the compiler knows."""
    return items[i]


@gluon.constexpr_function
def products_layout(heads):
    """float32[BLOCK, heads] as the matrix unit has it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 32])


@gluon.constexpr_function
def quarters_layout(rows):
    """float32[BLOCK, rows, 4]: four sums in a thread, whose neighbours have other rows, or other keys."""
    spread = [[8, 0, 0]] if rows < 4 else []
    rest = [[0, row, 0] for row in (1, 2, 4) if row < rows]
    spread, rest = (rest[:2] + spread + [[0, 0, 0]])[:2], ([] if rows < 4 else [[8, 0, 0]]) + rest[2:]
    lanes = [*spread, [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    regs = [[0, 0, 1], [0, 0, 2], *rest]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, rows, 4])


@gluon.jit
def fetch(keys, page, block, bars, buffers, slot, wanted, PAGE: gl.constexpr):
    """Starts the copy of a block of keys."""
    bar = bars.index(slot)
    mbarrier.expect(bar, BLOCK * WIDTH, wanted)
    row = block % (PAGE // BLOCK) * BLOCK
    tma.async_copy_global_to_shared(keys, [page, row, 0], bar, buffers.index(slot), wanted)


@gluon.jit
def _take(buffers, slot, LOADS: gl.constexpr, KEYS: gl.constexpr):
    """A block of keys as the matrix unit's left operand."""
    block = buffers.index(slot)
    if LOADS:
        block = block.load(gl.DotOperandLayout(0, KEYS, 4))
    return block


@gluon.jit
def _zeros(N: gl.constexpr):
    return gl.zeros([BLOCK, N], gl.float32, products_layout(N))


@gluon.jit
def _start(a, high, low, acc, N: gl.constexpr, SPLIT: gl.constexpr, LOADS: gl.constexpr):
    """Starts float32[BLOCK, N], the products of a block of keys, in the registers of `acc`."""
    MMA: gl.constexpr = products_layout(N)
    if LOADS:
        a = gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
    acc = warpgroup_mma(a, high.permute([1, 0]), acc, use_acc=False, is_async=True)
    if SPLIT:
        acc = warpgroup_mma(a, low.permute([1, 0]), acc, is_async=True)
    return acc


@gluon.jit
def _store(
    acc, factors, powers, scores, maxima, row, limits, block, capacity, maxima_stride, ROWS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Adds up heads and stores the scores of ROWS rows, and the largest of each EACH."""
    products = gl.maximum(acc, 0.0) * factors[None, :]
    # First what a thread has, and then what the four threads of a key have, each of which ends with a part of the rows;
    # in an order that does not depend on the number of rows.
    parts = gl.sum(gl.sum(gl.reshape(products, [BLOCK, ROWS, HEADS // 8, 4, 2]), 2), 3)
    score = gl.sum(gl.convert_layout(parts, quarters_layout(ROWS)), 2)
    LAYOUT: gl.constexpr = score.type.layout
    entry = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    line = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    # Powers of two: they can be applied to the sum. Plus zero, so that negative zero has zero's bits.
    score = score * gl.convert_layout(powers, gl.SliceLayout(1, LAYOUT))[:, None] + 0.0
    limit = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(0, LAYOUT))
    for r in gl.static_range(ROWS):
        limit = gl.where(line == r, limits[r], limit)
    score = gl.where(entry[:, None] < limit[None, :], score, float("-inf"))
    at = scores + row * capacity + line[None, :] * capacity.to(gl.int64) + entry[:, None]
    gl.store(at, score)
    best = gl.max(gl.reshape(score, [BLOCK // EACH, EACH, ROWS]), 1)
    place = block * (BLOCK // EACH) + gl.arange(0, BLOCK // EACH, gl.SliceLayout(1, best.type.layout))
    line = gl.arange(0, ROWS, gl.SliceLayout(0, best.type.layout))
    gl.store(maxima + row * maxima_stride + line[None, :] * maxima_stride.to(gl.int64) + place[:, None], best)


@gluon.jit
def score_in_turn(
    keys, bars, buffers, buffers3, highs, lows, weights, factors, limits, powers, powers_stride, power_0, power_1,
    power_2, table, page, page_later, key, block, count, final, turn, row, scores, maxima, capacity, maxima_stride,
    GROUPS: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    LOADS: gl.constexpr, HOLDS: gl.constexpr,
):  # fmt: skip
    """Scores `count` blocks, the first of which is `block`, for the rows of a sequence; returns `turn` behind them.

    turn: number of the program's next block, which tells its place in shared memory. power_0 ..: of the next blocks'
    keys. page: of the block whose powers are asked for next; page_later: of that whose keys are.
    """
    IN_PAGE: gl.constexpr = PAGE // BLOCK
    KEYS: gl.constexpr = products_layout(GROUPS[0] * HEADS)
    LAST: gl.constexpr = len(GROUPS) - 1
    for i in range(count):
        slot = turn % STAGES
        mbarrier.wait(bars.index(slot), turn // STAGES % 2)
        a = _take(buffers, slot, LOADS, KEYS)
        acc = _start(a, highs[0], lows[0], _zeros(GROUPS[0] * HEADS), GROUPS[0] * HEADS, SPLIT, LOADS)
        later = block + i + STAGES
        if LOADS:
            # Once all warps have the keys, the next ones may come.
            gl.thread_barrier()
            fetch(keys, page_later, later, bars, buffers3, slot, i + STAGES < count, PAGE)
        at = gl.minimum(block + i + 3, final)
        power_3 = gl.load(powers + page.to(gl.int64) * powers_stride + at % IN_PAGE * BLOCK + key)
        page = gl.load(table + gl.minimum(block + i + 4, final) // IN_PAGE)
        first = row
        for g in gl.static_range(LAST + 1):
            if g < LAST:
                zero = _zeros(GROUPS[g + 1] * HEADS)
                acc_next = _start(a, highs[g + 1], lows[g + 1], zero, GROUPS[g + 1] * HEADS, SPLIT, LOADS)
                done = warpgroup_mma_wait(2 if SPLIT else 1, deps=[acc])
            else:
                done = warpgroup_mma_wait(0, deps=[acc])
                if not LOADS:
                    gl.thread_barrier()
                    fetch(keys, page_later, later, bars, buffers3, slot, i + STAGES < count, PAGE)
            if HOLDS:
                factor = factors[g]
            else:
                factor = weights[g].load(gl.SliceLayout(0, products_layout(GROUPS[g] * HEADS)))
            _store(
                done, factor, power_0, scores, maxima, first, limits[g], block + i, capacity, maxima_stride,
                GROUPS[g], HEADS,
            )  # fmt: skip
            first += GROUPS[g]
            if g < LAST:
                acc = acc_next
        page_later = gl.load(table + gl.minimum(later + 1, final) // IN_PAGE)
        power_0, power_1, power_2 = power_1, power_2, power_3
        turn += 1
    return turn
