"""Products of tiles of pairs with the weights of their experts on Hopper's fp8 matrix unit, one persistent kernel.

In Gluon, because of the layouts; Triton's interpreter does not run it. `kernels.experts_fp8` launches it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from kernels.e4m3_groups import add_in_turn, halves, operands, powers, scale_layout, start_sum, word_layout


@gluon.jit
def _wait_for_kernel_before(EARLY: gl.constexpr):
    """See `kernels.experts`."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _tiles_of(ids, expert_to_slot, pair_count, MAX_PAIRS: gl.constexpr):
    """(tile, slot, number of tiles) where no expert has more than one; of pairs that are not an expert's first, slot 0.

    In order of experts, as `kernels.experts_tiles` has them.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SQUARE: gl.constexpr = gl.BlockedLayout([1, MAX_PAIRS // 4], [8, 4], [WARPS, 1], [1, 0])
    DOWN: gl.constexpr = gl.SliceLayout(1, SQUARE)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SQUARE)
    i = gl.arange(0, MAX_PAIRS, DOWN)
    j = gl.arange(0, MAX_PAIRS, ACROSS)
    # Not from L1, which may be older than kernels that have ended since.
    own = gl.load(ids + i, mask=i < pair_count, other=-1, cache_modifier=".cg")
    other = gl.load(ids + j, mask=j < pair_count, other=-1, cache_modifier=".cg")
    slot = gl.load(expert_to_slot + own, mask=own >= 0, other=-1, cache_modifier=".cg")
    earlier = ((other[None, :] == own[:, None]) & (j[None, :] < i[:, None])).to(gl.int32)
    is_first = ((slot >= 0) & (gl.sum(earlier, 1) == 0)).to(gl.int32)
    lower = gl.where(other[None, :] < own[:, None], gl.convert_layout(is_first, ACROSS)[None, :], 0)
    return gl.sum(lower, 1), slot * is_first, gl.sum(is_first, 0)


@gluon.jit
def _fetch_words(
    data, bars, words, stage, slot, block, k, wanted, TILE: gl.constexpr, ROWS: gl.constexpr, UP: gl.constexpr
):
    """Starts the copy of a stage of ROWS weight rows, and says how much will come."""
    bar = bars.index(stage)
    mbarrier.expect(bar, ROWS * 128 + 8 * TILE * 64, wanted)
    at = [slot, 0 if UP else block * 2, block * (ROWS // 2) if UP else 0, k * 128]
    tma.async_copy_global_to_shared(data, at, bar, words.index(stage), wanted)


@gluon.jit
def _fetch_rows(split, bars, rows, stage, tile, k, wanted, K_TILES: gl.constexpr):
    """Starts the copy of the same stage of the tile's rows."""
    tma.async_copy_global_to_shared(
        split, [(tile * K_TILES + k) * 8, 0, 0], bars.index(stage), rows.index(stage), wanted
    )


@gluon.jit
def _fence_proxies():
    """Orders what threads wrote or saw written before what the copy engine reads afterwards."""
    gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await_tile(ready, wanted, data, slot, data_stride, block, ROW_BYTES: gl.constexpr, ROWS: gl.constexpr):
    """Waits until so many blocks of a tile's hidden layer are stored; its next weights come to L2 meanwhile."""
    seen = gl.atomic_add(ready, 0, sem="acquire", scope="gpu")
    if seen < wanted:
        row = block * ROWS + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        gl.inline_asm_elementwise(
            f"cp.async.bulk.prefetch.L2.global [$1], {ROW_BYTES}; // $0", "=r,l",
            [data + slot.to(gl.int64) * data_stride + row * ROW_BYTES], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    while seen < wanted:
        seen = gl.atomic_add(ready, 0, sem="acquire", scope="gpu")
    _fence_proxies()


@gluon.jit
def _multiply_items(
    item, stage, phase, start, count, next_one, bars, words4, rows3, data, data_bytes, data_stride, split, scale,
    scale_stride, split_scale, weights, pairs, tiles, ready, out, out_scale, clamp, head_slot,
    COLUMNS: gl.constexpr, OUT: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    CHAIN: gl.constexpr, UP: gl.constexpr, HEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Takes items as long as they are of this projection: number start and on are blocks of ROWS weight rows of tiles.

    Returns the first item that is not, and where in the ring of stages the program is. HEAD: the first item is of slot
    `head_slot`, and its weights are asked for before the kernel in front has ended.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TILE, 32])
    WORDS: gl.constexpr = word_layout(ROWS, gl.num_warps())
    SCALES: gl.constexpr = scale_layout(ROWS, gl.num_warps())
    K_TILES: gl.constexpr = COLUMNS // 256
    STEP: gl.constexpr = ROWS // 2 if UP else ROWS
    READY: gl.constexpr = COLUMNS // (ROWS // 2)
    BLOCKS: gl.constexpr = OUT // STEP
    words = words4._reinterpret(gl.uint8, [STAGES, ROWS, 128], gl.NVMMASharedLayout(128, 8, 2))
    rows = rows3._reinterpret(gl.float8e4nv, [STAGES * 8, TILE, 64], gl.NVMMASharedLayout(64, 8, 2))
    end = start + count * BLOCKS
    tile = gl.minimum(item - start, count * BLOCKS - 1) // BLOCKS
    slot = gl.to_tensor(0)
    if item < end:
        if HEAD:
            slot = head_slot
        else:
            slot = gl.load(tiles + tile * 2)
        for k in gl.static_range(STAGES - 1):
            _fetch_words(
                data, bars, words4, (stage + k) % STAGES, slot, (item - start) % BLOCKS, k, True, TILE, ROWS, UP
            )
    if HEAD:
        _wait_for_kernel_before(EARLY)
    if item < end:
        if not UP:
            _await_tile(ready + tile, READY, data_bytes, slot, data_stride, (item - start) % BLOCKS, COLUMNS // 2, ROWS)
        for k in gl.static_range(STAGES - 1):
            _fetch_rows(split, bars, rows3, (stage + k) % STAGES, tile, k, True, K_TILES)
    while item < end:
        used = gl.load(tiles + tile * 2 + 1)
        block = (item - start) % BLOCKS
        m = gl.arange(0, ROWS, gl.SliceLayout(1, SCALES))
        row = block * STEP + m % (ROWS // 2) + m // (ROWS // 2) * (OUT if UP else ROWS // 2)
        at = (row * (COLUMNS // 128))[:, None] + gl.arange(0, 2, gl.SliceLayout(0, SCALES))[None, :]
        scales = scale + slot.to(gl.int64) * scale_stride + at
        n = gl.arange(0, TILE, gl.SliceLayout(0, MMA))
        split_at = split_scale + tile * (TILE if UP else TILE * (COLUMNS // 64)) + n
        exponents = gl.load(scales)
        acc = gl.zeros([ROWS, TILE], gl.float32, MMA)
        next_item, next_tile, next_slot = item, tile, slot
        for k in range(K_TILES):
            if k == K_TILES - STAGES:
                # Late, so that no program takes an item long before it begins with it, while another has none.
                next_item = gl.atomic_add(next_one, 1, sem="relaxed", scope="gpu")
                next_tile = gl.minimum(next_item - start, count * BLOCKS - 1) // BLOCKS
                next_slot = gl.load(tiles + next_tile * 2)
                if not UP:
                    _await_tile(ready + next_tile, gl.where(next_item < end, READY, 0), data_bytes, next_slot,
                                data_stride, (next_item - start) % BLOCKS, COLUMNS // 2, ROWS)  # fmt: skip
            # The compiler has all warps wait here, so that they have used what the next copy overwrites.
            ahead = k + (STAGES - 1)
            later = ahead >= K_TILES
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            ahead_k = gl.where(later, ahead - K_TILES, ahead)
            wanted = (next_item < end) | (ahead < K_TILES)
            ahead_block = (gl.where(later, next_item, item) - start) % BLOCKS
            _fetch_words(
                data, bars, words4, free, gl.where(later, next_slot, slot), ahead_block, ahead_k, wanted, TILE, ROWS, UP
            )
            _fetch_rows(split, bars, rows3, free, gl.where(later, next_tile, tile), ahead_k, wanted, K_TILES)
            low, high = halves(exponents)
            exponents = gl.load(scales + gl.minimum(k + 1, K_TILES - 1) * 2)
            mbarrier.wait(bars.index(stage), phase)
            stage_words = words.index(stage)
            if CHAIN:
                acc = add_in_turn(acc, stage_words, rows, stage, low, high, split_at + k * 4 * TILE, TILE, ROWS, UP)
            else:
                a0, a1 = operands(stage_words, 0, WORDS, MMA)
                for two in gl.static_range(4):
                    p0 = start_sum(a0, rows.index(stage * 8 + two * 2), MMA, TILE)
                    p1 = start_sum(a1, rows.index(stage * 8 + two * 2 + 1), MMA, TILE)
                    f0, f1 = powers(gl.reshape(low if two < 2 else high, [ROWS]), two % 2 == 1, MMA)
                    if two < 3:
                        # The next ones are unpacked while the matrix unit works.
                        a0, a1 = operands(stage_words, two + 1, WORDS, MMA)
                    p0, p1 = warpgroup_mma_wait(0, deps=[p0, p1])
                    if UP:
                        acc = p1 * f1 + (p0 * f0 + acc)
                    else:
                        acc = (p1 * f1 + p0 * f0) * gl.load(split_at + (k * 4 + two) * TILE)[None, :] + acc
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        # E4M3 had 2^-6 of the weights.
        if UP:
            acc = acc * (gl.load(split_at) * 64.0)[None, :]
            _store_gated(acc, out, out_scale, tile, block, used, clamp, OUT, TILE, ROWS)
            _fence_proxies()
            gl.thread_barrier()
            gl.atomic_add(ready + tile, 1, sem="release", scope="gpu")
        else:
            channel = block * STEP + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
            valid = n < used
            pair = gl.load(pairs + tile * TILE + n, mask=valid, other=0)
            acc = acc * (gl.load(weights + pair, mask=valid, other=0.0) * 64.0)[None, :]
            target = out + (pair.to(gl.int64) * OUT)[None, :] + channel[:, None]
            gl.store(target, acc, mask=valid[None, :] & (channel < OUT)[:, None])
        item, slot, tile = next_item, next_slot, next_tile
    return item, stage, phase


@gluon.jit
def multiply_tiles_kernel(
    up, split, up_scale, split_scale, down, down_bytes, inner, inner_bytes, down_scale, inner_scale, weights, ids,
    expert_to_slot, pairs, tiles, progress, out, up_scale_stride, down_stride, down_scale_stride, clamp, pair_count,
    own_items,
    HIDDEN: gl.constexpr, WIDTH: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    CHAIN: gl.constexpr, MAX_PAIRS: gl.constexpr, HEAD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Products of all tiles with their experts' up projections, gated and split, and then with their down projections.

    Programs take items in order, ROWS weight rows of a tile each; those of the down projections wait for their tile,
    whose items others have taken before them, and so will end.

    up: descriptor of uint8[slots, 2, WIDTH, HIDDEN / 2]; down: of uint8[slots, HIDDEN / H, H, WIDTH / 2], and its
    bytes; both in boxes of twice H = ROWS / 2 rows. Scales: int32 words of e8m0 bytes. split, inner: descriptors of
    tiles' groups, and inner's bytes. split_scale: float32[tiles, TILE]. inner_scale: float32[tiles, WIDTH / 64, TILE].
    progress: int32[2 + tiles], tiles, the next item, and of each tile how many items of its up projection are done.
    out: float32[pairs, HIDDEN], times the pair's weight.
    CHAIN: one group's products are on their way while those of the group before are multiplied by their scales, which
    helps where no other program of the multiprocessor fills the gap.
    HEAD: no expert has more than one tile, and programs know which there are from `ids`, which the kernel in front does
    not write, but one before it. The first `own_items` programs take the item of their own number, and ask for its
    weights before that kernel has ended. They are as many as multiprocessors at most: one that has no room yet leaves a
    multiprocessor without any other, so those that wait for its item wait for other kernels' ends only.
    """
    words4 = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, 2, ROWS // 2, 128], gl.NVMMASharedLayout(128, 8, 4))
    rows3 = gl.allocate_shared_memory(gl.uint8, [STAGES, 8, TILE, 64], gl.NVMMASharedLayout(64, 8, 3))
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    slot = gl.to_tensor(0)
    if HEAD:
        numbers, slots, count = _tiles_of(ids, expert_to_slot, pair_count, MAX_PAIRS)
        item = gl.program_id(0)
        if item >= own_items:
            _wait_for_kernel_before(EARLY)
            item = gl.atomic_add(progress + 1, 1, sem="relaxed", scope="gpu")
        slot = gl.sum(gl.where(numbers == item // (WIDTH // (ROWS // 2)), slots, 0), 0)
    else:
        _wait_for_kernel_before(EARLY)
        count = gl.load(progress)
        item = gl.atomic_add(progress + 1, 1, sem="relaxed", scope="gpu")
    zero = gl.to_tensor(0)
    item, stage, phase = _multiply_items(
        item, zero, zero, zero, count, progress + 1, bars, words4, rows3, up, down_bytes, down_stride, split, up_scale,
        up_scale_stride, split_scale, weights, pairs, tiles, progress + 2, inner_bytes, inner_scale, clamp, slot,
        HIDDEN, WIDTH, TILE, ROWS, STAGES, CHAIN, True, HEAD, EARLY,
    )  # fmt: skip
    _multiply_items(
        item, stage, phase, count * (WIDTH // (ROWS // 2)), count, progress + 1, bars, words4, rows3, down, down_bytes,
        down_stride, inner, down_scale, down_scale_stride, inner_scale, weights, pairs, tiles, progress + 2, out,
        inner_scale, clamp, slot, WIDTH, HIDDEN, TILE, ROWS, STAGES, CHAIN, False, False, False,
    )  # fmt: skip


@gluon.jit
def _store_gated(
    acc, out, out_scale, tile, block, used, clamp, OUT: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr
):
    """Gates are in the upper half of acc, up projections in the lower half; stores ROWS / 2 channels of a tile's pairs.

    As `kernels.experts_tiles` says, with a scale for each 64 channels.
    """
    HALF: gl.constexpr = ROWS // 2
    WARPS: gl.constexpr = gl.num_warps()
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [2, WARPS // 2, 1], [2, 1, 0])
    RESULT: gl.constexpr = gl.SliceLayout(2, PAIRS)
    both = gl.permute(gl.reshape(acc, [2, HALF, TILE]), [1, 2, 0])
    gate, lift = gl.split(gl.convert_layout(both, PAIRS))
    # Comparisons with a NaN are false, which keeps it.
    gate = gl.where(gate > clamp, clamp, gate)
    lift = gl.where(lift > clamp, clamp, gl.where(lift < -clamp, -clamp, lift))
    # Stored in bf16 between the two products, as the reference has it.
    value = (gate / (1.0 + gl.exp(-gate)) * lift).to(gl.bfloat16).to(gl.float32)
    bits = gl.reshape(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, [HALF // 64, 64, TILE])
    largest = gl.max(bits, 1)
    exponent = gl.maximum((largest >> 23) - 7, 8)
    scale = gl.where(largest >= 0x7F800000, 0x7FC00000, exponent << 23).to(gl.float32, bitcast=True)
    factor = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    factor, _ = gl.broadcast(gl.expand_dims(factor, 1), bits)
    value = value * gl.convert_layout(gl.reshape(factor, [HALF, TILE]), RESULT)
    high = value.to(gl.float8e4nv)
    low = (value - high.to(gl.float32)).to(gl.float8e4nv)
    channel = block * HALF + gl.arange(0, HALF, gl.SliceLayout(1, RESULT))
    n = gl.arange(0, TILE, gl.SliceLayout(0, RESULT))
    at = channel // 32 * (TILE * 64) + channel % 2 * 16 + channel // 8 % 4 * 4 + channel // 2 % 4
    target = out + tile.to(gl.int64) * (OUT * 2 * TILE) + at[:, None] + (n * 64)[None, :]
    valid = (n < used)[None, :]
    gl.store(target, high.to(gl.uint8, bitcast=True), mask=valid)
    gl.store(target + 32, low.to(gl.uint8, bitcast=True), mask=valid)
    SCALES: gl.constexpr = scale.type.layout
    n = gl.arange(0, TILE, gl.SliceLayout(0, SCALES))
    part = block * (HALF // 64) + gl.arange(0, HALF // 64, gl.SliceLayout(1, SCALES))
    target = out_scale + ((tile * (OUT // 64) + part) * TILE)[:, None] + n[None, :]
    gl.store(target, scale, mask=(n < used)[None, :])
