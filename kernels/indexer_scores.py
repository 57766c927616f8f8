"""Index scores of e4m3 keys on Hopper's fp8 matrix unit, in Gluon: keys go to the unit as they are stored.

The unit multiplies e4m3 with e4m3. A query of bf16, times a power of two, is the sum of two such numbers, the second
of which is what the first one leaves: exactly, for all but numbers below 2^-9 of the head's largest one. So a key costs
no conversion, and products as much as in bf16. Keys come by TMA, page by page. Each program takes an equal part of the
64-key blocks of all sequences, and prepares the queries anew where a sequence begins.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.indexer_products import (
    BLOCK,
    WIDTH,
    fetch,
    group_rows,
    item_of,
    products_layout,
    score_in_turn,
)
from kernels.indexer_queries import prepare_heads, prepare_queries


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _begin(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _wait_for_kernel_before(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["sequences", "pages", "preparers"])
def score_keys_kernel(
    keys,  # descriptor of e4m3[blocks of the arena, PAGE, WIDTH], in boxes of BLOCK keys
    powers,  # float32, the first key's in the arena
    powers_stride,  # numbers from one block of the arena to the next
    heads, prepared, heads_stride, eps, preparers,  # as in `indexer._score_kernel`
    query,  # bf16[B * SPAN, HEADS, WIDTH], rows `query_stride` apart
    share,  # float32[B * SPAN, HEADS], rows `share_stride` apart
    turns, positions, tables,
    scores,  # float32[B * SPAN, capacity], a whole number of blocks
    maxima,  # float32[B * SPAN, capacity / EACH], rows `maxima_stride` apart
    query_stride, share_stride, sequences, pages, capacity, maxima_stride, share_scale,
    TURNED: gl.constexpr, RATIO: gl.constexpr, TOP_K: gl.constexpr, SEQUENCES: gl.constexpr, SPAN: gl.constexpr,
    HEADS: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, SPLIT: gl.constexpr,
    LOADS: gl.constexpr, HOLDS: gl.constexpr, EARLY: gl.constexpr, PREPARED_HEADS: gl.constexpr,
    PREPARED_WIDTH: gl.constexpr, PREPARED_TILE: gl.constexpr, PREPARED_NORM: gl.constexpr,
):  # fmt: skip
    """See `kernels.indexer`. MOST: heads of a product, at most. LOADS: keys pass through registers.
    HOLDS: heads' weights stay in registers."""
    _begin(EARLY)
    program = gl.program_id(0)
    if PREPARED_HEADS > 0:  # noqa: SIM102 - decided by the compiler; the other one by the device
        if program < preparers:
            _wait_for_kernel_before(EARLY)
            prepare_heads(
                heads, prepared, turns, positions, program, heads_stride, eps, PREPARED_HEADS, TURNED,
                PREPARED_WIDTH, PREPARED_TILE, PREPARED_NORM,
            )  # fmt: skip
            return
    GROUPS: gl.constexpr = group_rows(SPAN, HEADS, MOST)
    LAST: gl.constexpr = len(GROUPS) - 1
    IN_PAGE: gl.constexpr = PAGE // BLOCK
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    KEYS: gl.constexpr = products_layout(GROUPS[0] * HEADS)
    KEY: gl.constexpr = gl.SliceLayout(1, KEYS)
    buffers3 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, BLOCK, WIDTH], gl.NVMMASharedLayout(128, 8, 3))
    buffers = buffers3._reinterpret(gl.float8e4nv, [STAGES, BLOCK, WIDTH], TILES)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    highs = ()
    lows = ()
    weights = ()
    for g in gl.static_range(LAST + 1):
        high = gl.allocate_shared_memory(gl.float8e4nv, [GROUPS[g] * HEADS, WIDTH], TILES)
        highs = highs + (high,)
        if SPLIT:
            lows = lows + (gl.allocate_shared_memory(gl.float8e4nv, [GROUPS[g] * HEADS, WIDTH], TILES),)
        else:
            lows = lows + (high,)
        weights = weights + (gl.allocate_shared_memory(gl.float32, [GROUPS[g] * HEADS], FLAT),)
    each = gl.arange(0, SEQUENCES, LINE)
    seen = gl.full([SEQUENCES], 0, gl.int32, LINE)
    for s in gl.static_range(SPAN):
        held = gl.load(positions + each * SPAN + s, mask=each < sequences, other=-1)
        seen = gl.maximum(seen, (held + 1) // RATIO)
    seen = gl.minimum(seen, capacity)
    blocks = gl.where(seen > TOP_K, (seen + BLOCK - 1) // BLOCK, 0)
    ends = gl.associative_scan(blocks, 0, _add)
    total = gl.sum(blocks, 0)
    programs = gl.num_programs(0) - preparers
    begin = ((program - preparers).to(gl.int64) * total // programs).to(gl.int32)
    end = ((program - preparers + 1).to(gl.int64) * total // programs).to(gl.int32)
    _wait_for_kernel_before(EARLY)
    turn = begin * 0
    while begin < end:
        sequence = gl.sum((ends <= begin).to(gl.int32), 0)
        last = gl.sum(gl.where(each == sequence, ends, 0), 0)
        block = begin - (last - gl.sum(gl.where(each == sequence, blocks, 0), 0))
        count = gl.minimum(end, last) - begin
        final = block + count - 1
        table = tables + sequence.to(gl.int64) * pages
        row = sequence.to(gl.int64) * SPAN
        key = gl.arange(0, BLOCK, KEY)
        # Of the blocks in front: keys in shared memory, their powers in registers.
        ahead = ()
        for s in gl.static_range(STAGES):
            at = gl.minimum(block + s, final)
            page = gl.load(table + at // IN_PAGE)
            fetch(keys, page, at, bars, buffers3, (turn + s) % STAGES, s < count, PAGE)
            if s < 3:
                ahead = ahead + (gl.load(powers + page.to(gl.int64) * powers_stride + at % IN_PAGE * BLOCK + key),)
        power_0, power_1, power_2 = ahead  # type: ignore[misc]
        page = gl.load(table + gl.minimum(block + 3, final) // IN_PAGE)
        page_later = gl.load(table + gl.minimum(block + STAGES, final) // IN_PAGE)
        gl.thread_barrier()
        first = row
        limits = ()
        for g in gl.static_range(LAST + 1):
            prepare_queries(
                query, share, turns, positions, query_stride, share_stride, share_scale, first, highs[g], lows[g],
                weights[g], GROUPS[g], HEADS, TURNED, SPLIT,
            )  # fmt: skip
            own = ()
            for r in gl.static_range(item_of(GROUPS, g)):
                own = own + ((gl.load(positions + first + r) + 1) // RATIO,)
            limits = limits + (own,)
            first += GROUPS[g]
        fence_async_shared()
        gl.thread_barrier()
        factors = ()
        for g in gl.static_range(LAST + 1):
            if HOLDS:
                factors = factors + (weights[g].load(gl.SliceLayout(0, products_layout(GROUPS[g] * HEADS))),)
        turn = score_in_turn(
            keys, bars, buffers, buffers3, highs, lows, weights, factors, limits, powers, powers_stride, power_0,
            power_1, power_2, table, page, page_later, key, block, count, final, turn, row, scores, maxima,
            capacity, maxima_stride, GROUPS, HEADS, PAGE, STAGES, SPLIT, LOADS, HOLDS,
        )  # fmt: skip
        begin += count
