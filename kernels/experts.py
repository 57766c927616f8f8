"""Experts: the products of the routed experts of a step, from expert slots, in four launches.

1. `_group_rows_kernel`: the pairs (row, place) of each expert that this rank has, in order of rows, cut into tiles; and
   x with its columns in the order in which values leave the weights' words.
2. `_expert_up_kernel`: gate and up projection of a tile, gated, in A.
3. `_expert_down_kernel`: down projection of a tile, times the routing weight, in float32.
4. `_combine_places_kernel`: sum of a row's pairs in the order of its places.

Weights are the left operand of each product; see `kernels.mxfp4` for how packed ones are read. On a Hopper, with rows
in bf16 and MXFP4, `kernels.experts_fp8` stands for the first three: two thirds of their instructions and of their time.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import experts_fp8
from kernels.forms import LARGEST_SLOT_SCALE, PairSums, SlotWeights
from kernels.mxfp4 import place_of, sum_words, word_at

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which has neither inline assembly nor arithmetic on bf16."""
WORD_VALUES = 8
"""E2M1 values in a 32-bit word."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the products' programs. A row's bits depend on `block_k` and `shift` at most.

    Attributes:
        tile: pairs of one expert that one program multiplies; at least 16. Larger ones read weights once where these
            read them again from L2, and were slower all the same, up to 12 pairs an expert.
        up_block: channels of a program of the up kernel; it computes as many gates.
        down_block: channels of a program of the down kernel.
        block_k: columns of a K tile; at least 128, so that a value's place in the word fills a matrix instruction.
        parts: 1, 2 or 4 products for a K tile, each of the values of 4, 2 or 1 bytes of all words. Between two of them
            a program waits; more of them need fewer registers.
        warps: of a program of either.
        stages: K tiles in flight.
        programs: of either kernel on one multiprocessor.
        registers: that a thread may have, so that so many programs fit; None for as many as it likes.
        early: a kernel is launched before the one in front of it has ended, and waits inside.
        shift: 0 to 126, or None for the full range of scales; see `kernels.mxfp4`.
        fp8: products on the fp8 matrix unit where `kernels.experts_fp8.fits`, whose sizes these are, and which
            multiplies with scales exactly whatever `shift` is; None for none.
    """

    tile: int = 16
    up_block: int = 32
    down_block: int = 64
    block_k: int = 256
    parts: int = 4
    warps: int = 4
    stages: int = 3
    programs: int = 4
    registers: int | None = None
    early: bool = False
    shift: int | None = LARGEST_SLOT_SCALE - 128
    fp8: experts_fp8.Config | None = None


@triton.jit
def _sum_plain(
    acc, data, x, row_valid, pair_valid, K_TILES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `sum_words`, for rows in bf16 or float32 and x in its own order."""
    column = tl.arange(0, BLOCK_K)
    for k in tl.range(0, K_TILES, num_stages=STAGES):
        valid = row_valid[:, None] & (k * BLOCK_K + column < COLUMNS)[None, :]
        values = tl.load(data[:, None] + (k * BLOCK_K + column)[None, :], mask=valid, other=0.0)
        columns = tl.load(x[None, :] + (k * BLOCK_K + column)[:, None], mask=pair_valid[None, :], other=0.0)
        acc = tl.dot(values.to(DOT), columns.to(DOT), acc, input_precision="ieee")
    return acc


# Launches


@triton.jit
def _wait_for_kernel_before(EARLY: tl.constexpr):
    """Where a kernel is launched before its predecessor has ended: waits for the end, and lets the successor in.

    A kernel sees what all kernels before it wrote, since each of them waits before it lets the next one in.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _group_rows_kernel(
    x, ids, expert_to_slot, pairs, tiles, total, ordered, pair_count, rows, experts, x_stride,
    HIDDEN: tl.constexpr, K_TILES: tl.constexpr, BLOCK_K: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
    MAX_PAIRS: tl.constexpr, MAX_EXPERTS: tl.constexpr, MAX_TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e < experts lists expert e's pairs and tiles; each program after those orders one K tile of one row.

    Every program counts the pairs of all experts for itself, which costs less than a launch in between.
    """
    _wait_for_kernel_before(EARLY)
    program = tl.program_id(0)
    if program < experts:
        index = tl.arange(0, MAX_PAIRS)
        inside = index < pair_count
        expert = tl.load(ids + index, mask=inside, other=-1)
        number = tl.arange(0, MAX_EXPERTS)
        slots = tl.load(expert_to_slot + number, mask=number < experts, other=-1)
        counts = tl.histogram(tl.maximum(expert, 0), MAX_EXPERTS, mask=expert >= 0)
        cut = tl.where(slots >= 0, (counts + TILE - 1) // TILE, 0)
        start = tl.sum(tl.where(number < program, cut, 0), 0)
        slot = tl.load(expert_to_slot + program)
        mine = (expert == program) & (slot >= 0)
        place = tl.cumsum(mine.to(tl.int32), 0) - 1
        count = tl.sum(mine.to(tl.int32), 0)
        tl.store(pairs + program * rows + place, index, mask=mine)
        tile = tl.arange(0, MAX_TILES)
        used = tile * TILE < count
        entry = tiles + (start + tile) * 4
        tl.store(entry, tl.full((MAX_TILES,), 0, tl.int32) + slot, mask=used)
        tl.store(entry + 1, program * rows + tile * TILE, mask=used)
        tl.store(entry + 2, tl.minimum(count - tile * TILE, TILE), mask=used)
        if program == 0:
            tl.store(total, tl.sum(cut, 0))
    else:
        row = (program - experts) // K_TILES
        k = (program - experts) % K_TILES
        target = tl.arange(0, BLOCK_K)
        source = k * BLOCK_K + target
        if VALUES == 8:
            source = k * BLOCK_K + word_at(target % (BLOCK_K // 8)) * 8 + target // (BLOCK_K // 8)
        value = tl.load(x + row * x_stride + source, mask=source < HIDDEN, other=0.0)
        tl.store(ordered + row * (K_TILES * BLOCK_K) + k * BLOCK_K + target, value)


@triton.jit
def _item(item, count, tiles, pairs, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """(slot, number of pairs, pairs int32[TILE]) of an item; of the last one where there are not so many."""
    entry = tiles + tl.minimum(item, count - 1) // BLOCKS * 4
    slot = tl.load(entry, cache_modifier=".cg").to(tl.int64)
    first = tl.load(entry + 1, cache_modifier=".cg")
    used = tl.load(entry + 2, cache_modifier=".cg")
    n = tl.arange(0, TILE)
    return slot, used, tl.load(pairs + first + n, mask=n < used, other=0, cache_modifier=".cg")


@triton.jit
def _prefetch(addresses, FAST: tl.constexpr):
    """Asks for the cache lines at addresses, so that they are in L2 when the next item's first loads want them."""
    if FAST:
        tl.inline_asm_elementwise(
            asm="prefetch.global.L2 [$1]; // $0",
            constraints="=r,l",
            args=[addresses],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _expert_up_kernel(
    x, data, scale, pairs, tiles, total, inner, data_stride, scale_stride, clamp,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, X_TILES: tl.constexpr,
    INNER_TILES: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """inner[pair, :] of all pairs in tiles, channels in word order, zero from WIDTH on."""
    BLOCKS: tl.constexpr = (INNER_TILES * BLOCK_K) // BLOCK_M
    _wait_for_kernel_before(EARLY)
    count = tl.load(total) * BLOCKS
    item = tl.program_id(0)
    if item < count:
        slot, used, pair = _item(item, count, tiles, pairs, BLOCKS, TILE)
    else:
        slot, used, pair = tl.full((), 0, tl.int64), 0, tl.full((TILE,), 0, tl.int32)
    while item < count:
        # What the next item is comes while this one is computed: a chain of three loads otherwise.
        next_item = item + tl.num_programs(0)
        next_slot, next_used, next_pair = _item(next_item, count, tiles, pairs, BLOCKS, TILE)
        pair_valid = tl.arange(0, TILE) < used
        rows = x + pair // PLACES * (X_TILES * BLOCK_K)
        # Gates in the upper half of the product, up projections in the lower half.
        m = tl.arange(0, 2 * BLOCK_M)
        channel = item % BLOCKS * BLOCK_M + m % BLOCK_M
        weight_row = channel + m // BLOCK_M * WIDTH
        row_valid = channel < WIDTH
        acc = tl.zeros((2 * BLOCK_M, TILE), tl.float32)
        if VALUES == 8:
            acc = sum_words(
                acc, data + slot * data_stride + weight_row * (HIDDEN // 8),
                scale + slot * scale_stride + weight_row * (HIDDEN // 32), rows, row_valid, pair_valid,
                X_TILES, HIDDEN, 2 * BLOCK_M, BLOCK_K, PARTS, DOT, FAST, SHIFT, STAGES,
            )  # fmt: skip
            if SHIFT is not None:
                acc = acc * (2.0**SHIFT)
        else:
            acc = _sum_plain(
                acc, data + slot * data_stride + weight_row * HIDDEN, rows, row_valid, pair_valid,
                X_TILES, HIDDEN, BLOCK_K, DOT, STAGES,
            )  # fmt: skip
        next_channel = next_item % BLOCKS * BLOCK_M + m % BLOCK_M
        next_row = tl.minimum(next_channel, WIDTH - 1) + m // BLOCK_M * WIDTH
        _prefetch(data + next_slot * data_stride + next_row * (HIDDEN // VALUES), FAST)
        gate, lift = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_M, TILE)), (1, 2, 0)))
        gate = tl.minimum(gate, clamp, propagate_nan=tl.PropagateNan.ALL)
        gated = gate / (1.0 + tl.exp(-gate)) * tl.clamp(lift, -clamp, clamp, propagate_nan=tl.PropagateNan.ALL)
        out = item % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
        if VALUES == 8:
            out = out // BLOCK_K * BLOCK_K + out % 8 * (BLOCK_K // 8) + place_of(out % BLOCK_K // 8)
        target = inner + pair[None, :].to(tl.int64) * (INNER_TILES * BLOCK_K) + out[:, None]
        tl.store(target, gated.to(inner.dtype.element_ty), mask=pair_valid[None, :])
        item, slot, used, pair = next_item, next_slot, next_used, next_pair


@triton.jit
def _expert_down_kernel(
    inner, data, scale, weights, pairs, tiles, total, partial, data_stride, scale_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, INNER_TILES: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr,
    SHIFT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """partial[pair, :] of all pairs in tiles, times the pair's routing weight."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK_M - 1) // BLOCK_M
    # Tiles are older than the kernel in front, which has waited for them, and weights than all: fetched while it ends.
    count = tl.load(total, cache_modifier=".cg") * BLOCKS
    item = tl.program_id(0)
    if item < count:
        slot, used, pair = _item(item, count, tiles, pairs, BLOCKS, TILE)
        if EARLY:
            first_row = tl.minimum(item % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M), HIDDEN - 1)
            first_word = data + slot * data_stride + first_row * (WIDTH // VALUES)
            _prefetch(first_word, FAST)
            if WIDTH // VALUES >= 64:
                _prefetch(first_word + 32, FAST)
    else:
        slot, used, pair = tl.full((), 0, tl.int64), 0, tl.full((TILE,), 0, tl.int32)
    _wait_for_kernel_before(EARLY)
    while item < count:
        next_item = item + tl.num_programs(0)
        next_slot, next_used, next_pair = _item(next_item, count, tiles, pairs, BLOCKS, TILE)
        pair_valid = tl.arange(0, TILE) < used
        rows = inner + pair.to(tl.int64) * (INNER_TILES * BLOCK_K)
        channel = item % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
        row_valid = channel < HIDDEN
        acc = tl.zeros((BLOCK_M, TILE), tl.float32)
        if VALUES == 8:
            acc = sum_words(
                acc, data + slot * data_stride + channel * (WIDTH // 8),
                scale + slot * scale_stride + channel * (WIDTH // 32), rows, row_valid, pair_valid,
                INNER_TILES, WIDTH, BLOCK_M, BLOCK_K, PARTS, DOT, FAST, SHIFT, STAGES,
            )  # fmt: skip
            if SHIFT is not None:
                acc = acc * (2.0**SHIFT)
        else:
            acc = _sum_plain(
                acc, data + slot * data_stride + channel * WIDTH, rows, row_valid, pair_valid,
                INNER_TILES, WIDTH, BLOCK_K, DOT, STAGES,
            )  # fmt: skip
        next_row = tl.minimum(next_item % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M), HIDDEN - 1)
        _prefetch(data + next_slot * data_stride + next_row * (WIDTH // VALUES), FAST)
        acc = acc * tl.load(weights + pair, mask=pair_valid, other=0.0)[None, :]
        target = partial + pair[None, :].to(tl.int64) * HIDDEN + channel[:, None]
        tl.store(target, acc, mask=row_valid[:, None] & pair_valid[None, :])
        item, slot, used, pair = next_item, next_slot, next_used, next_pair


@triton.jit
def _combine_places_kernel(
    partial, ids, expert_to_slot, base, out,
    HIDDEN: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, HAS_BASE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[row, :]: the sum of the row's pairs whose experts are here, first place first, and then of its base."""
    _wait_for_kernel_before(EARLY)
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    acc = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PLACES):
        pair = row * PLACES + place
        expert = tl.load(ids + pair)
        slot = tl.load(expert_to_slot + expert, mask=expert >= 0, other=-1)
        acc += tl.load(partial + pair.to(tl.int64) * HIDDEN + channel, mask=inside & (slot >= 0), other=0.0)
    if HAS_BASE:
        acc += tl.load(base + row * HIDDEN + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + channel, acc.to(out.dtype.element_ty), mask=inside)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_to_slot: Tensor,
    slots: SlotWeights,
    clamp: float,
    base: Tensor | None = None,
    *,
    config: Config | None = None,
) -> Tensor:
    """See `kernels.reference.mix_experts`, and `multiply_pairs`."""
    config = config or choose_config(len(x), ids.numel() / len(expert_to_slot))
    sums = multiply_pairs(x, ids, weights, expert_to_slot, slots, clamp, base, config=config)
    hidden, early = x.shape[1], config.early and not INTERPRETED
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device) if base is None else torch.empty_like(base)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_places_kernel[(len(out), triton.cdiv(hidden, block))](
        sums.pairs, ids, expert_to_slot, base, out, HIDDEN=hidden, PLACES=ids.shape[1], BLOCK=block,
        HAS_BASE=base is not None, EARLY=early, launch_pdl=early,
    )  # fmt: skip
    return out


def choose_config(rows: int, each: float = 0.0) -> Config:
    """The default, where there are so many pairs to an expert.

    At few rows launches are a quarter of the time; at many their overlap gains nothing (measured).
    """
    return Config(early=rows <= 8 and not INTERPRETED, fp8=experts_fp8.choose_config(rows, each))


def multiply_pairs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_to_slot: Tensor,
    slots: SlotWeights,
    clamp: float,
    base: Tensor | None = None,
    *,
    config: Config | None = None,
) -> PairSums:
    """See `kernels.reference.multiply_pairs`.

    Beyond it: rows of x must be contiguous, a row must not choose an expert twice, and slots must be contiguous in
    themselves, at any stride from each other that is a multiple of 16 bytes.

    Args:
        config: None for the default.
    """
    rows, hidden = x.shape
    places, experts = ids.shape[1], expert_to_slot.shape[0]
    width = slots.up.shape[1] // 2
    config = config or choose_config(rows, rows * places / experts)
    if config.fp8 is not None and experts_fp8.fits(x, slots):
        pairs = experts_fp8.multiply(
            x, ids, weights, expert_to_slot, slots, clamp, config.fp8, early=config.early and not INTERPRETED
        )
        return PairSums(pairs, ids, expert_to_slot, base)
    packed = slots.is_mxfp4
    values = WORD_VALUES if packed else 1
    wide = INTERPRETED or x.dtype == torch.float32 or slots.up.dtype == torch.float32
    up, down = slots.up, slots.down
    if packed:
        up, down = up.view(torch.int32), down.view(torch.int32)
    block_k, up_block, down_block, stages = config.block_k, config.up_block, config.down_block, config.stages
    if not packed or wide:
        # Four or eight times as many bytes a value, or products outside of the matrix units: made to fit, not to fly.
        block_k, up_block, down_block, stages = 128 if packed else 32, 32, 64, 2
    x_tiles, inner_tiles = triton.cdiv(hidden, block_k), triton.cdiv(width, block_k)
    early = {"EARLY": config.early and not INTERPRETED, "launch_pdl": config.early}
    pair_count = rows * places
    most_tiles = min(pair_count, experts + pair_count // config.tile)
    device = x.device
    pairs = torch.empty(experts * rows, dtype=torch.int32, device=device)
    tiles = torch.empty((most_tiles, 4), dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    ordered = torch.empty((rows, x_tiles * block_k), dtype=x.dtype, device=device)
    inner = torch.empty((pair_count, inner_tiles * block_k), dtype=x.dtype, device=device)
    partial = torch.empty((rows, places, hidden), dtype=torch.float32, device=device)
    _group_rows_kernel[(experts + rows * x_tiles,)](
        x, ids, expert_to_slot, pairs, tiles, total, ordered, pair_count, rows, experts, x.stride(0),
        HIDDEN=hidden, K_TILES=x_tiles, BLOCK_K=block_k, VALUES=values, TILE=config.tile,
        # At least one for each thread: a histogram counts what several threads hold several times.
        MAX_PAIRS=max(128, triton.next_power_of_2(pair_count)), MAX_EXPERTS=max(128, triton.next_power_of_2(experts)),
        MAX_TILES=triton.next_power_of_2(triton.cdiv(rows, config.tile)), **early,
    )  # fmt: skip
    common = {
        "HIDDEN": hidden, "WIDTH": width, "VALUES": values, "TILE": config.tile, "BLOCK_K": block_k,
        "INNER_TILES": inner_tiles, "DOT": tl.float32 if wide else tl.bfloat16, "FAST": packed and not wide,
        "SHIFT": config.shift, "STAGES": stages, "PARTS": config.parts, "num_warps": config.warps,
        "maxnreg": config.registers, **early,
    }  # fmt: skip
    programs = _multiprocessors(device) * config.programs
    _expert_up_kernel[(min(programs, most_tiles * inner_tiles * block_k // up_block),)](
        ordered, up, slots.up_scale, pairs, tiles, total, inner, up.stride(0), _stride(slots.up_scale), clamp,
        PLACES=places, BLOCK_M=up_block, X_TILES=x_tiles, **common,
    )  # fmt: skip
    _expert_down_kernel[(min(programs, most_tiles * triton.cdiv(hidden, down_block)),)](
        inner, down, slots.down_scale, weights, pairs, tiles, total, partial, down.stride(0),
        _stride(slots.down_scale), BLOCK_M=down_block, **common,
    )  # fmt: skip
    return PairSums(partial, ids, expert_to_slot, base)


def _stride(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.stride(0)
