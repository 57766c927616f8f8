"""Choice: the best entries of rows of scores, in order, of equal ones the lowest.

`_choose_entries_kernel` takes the best of a segment of a row's scores: a bound from the maxima of groups leaves some
hundred candidates; as integers that compare like scores they are cut at the k-th largest, by bisection; and one prefix
sum numbers what is above it and, of what equals it, the lowest entries. Longer rows have several segments, whose
choices `_merge_kernel` chooses from. Grids depend on shapes only; lengths are read on the device, and programs beyond
a row's length end at once, as all but one do where a row keeps everything that it sees.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.forms import StepRows

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no dependent launches."""
EACH = 8
"""Neighbours whose largest score is one of the maxima."""
LEAST = tl.constexpr(0x00800000)
"""Of the integers that stand for scores, the least finite one's."""


@dataclasses.dataclass(frozen=True)
class ChoiceConfig:
    """How the kernels are cut. Results do not depend on it.

    Attributes:
        segment: scores of a program, a power of two.
        warps: of a program.
        maxima_warps: of one that goes by maxima.
        overlaps: the kernels are launched while those before them drain (programmatic dependent launch).
    """

    segment: int = 32768
    warps: int = 16
    maxima_warps: int = 8
    overlaps: bool = not INTERPRETED


DEFAULT = ChoiceConfig()


@triton.jit
def _choose_entries_kernel(
    scores,  # float32[rows, capacity]
    maxima,  # float32[rows, ...], the largest of each EACH scores, rows `maxima_stride` apart; or the scores
    positions,  # int32[rows]
    chosen,  # int32[rows, TOP_K], written: by the first segment's program where it is the only one that a row needs
    choices,  # int32[rows, segments, TOP_K], written by all programs of a row that needs several
    words,  # int32[rows, segments, SEGMENT / 32], scratch
    candidates,  # int32[rows, segments, CANDIDATES], scratch
    capacity,
    maxima_stride,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    EACH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    program = row * tl.num_programs(1) + tl.program_id(1)
    first = tl.program_id(1) * SEGMENT
    visible = (tl.load(positions + row) + 1) // RATIO
    place = tl.arange(0, TOP_K_PADDED)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if visible <= TOP_K:
        if first == 0:
            tl.store(chosen + row * TOP_K + place, tl.where(place < visible, place, -1), mask=place < TOP_K)
        return
    if first * EACH >= visible:
        return
    target = chosen + row * TOP_K
    if visible > SEGMENT * EACH:
        target = choices + program * TOP_K
    # Of scores that are no numbers none is chosen.
    tl.store(target + place, -1, mask=place < TOP_K)
    ROUND: tl.constexpr = 32 if EACH == 1 else 8
    here = tl.cdiv(tl.minimum(tl.cdiv(visible, EACH) - first, SEGMENT), ROUND) * ROUND
    maxima += row * maxima_stride + first
    first *= EACH
    scores += row * capacity + first
    candidates += program * CANDIDATES
    words += program * (SEGMENT // 32)
    # The TOP_K-th largest of the maxima of groups is not above that of all, and not far below it.
    lane = tl.arange(0, GROUPS // 2)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tops = tl.full((GROUPS // 2, 32), float("-inf"), tl.float32)
    start = 0
    while start < here:
        tops = tl.maximum(tops, _tile(maxima, start + lane, here))
        start += GROUPS * 16
    # A group is what a thread has of four rows: four neighbours in each, so that neighbours with high scores, of which
    # there mostly are some, can lie behind one maximum in fours only; and a short segment has as many groups.
    tops = tl.max(tl.max(tl.reshape(tops, (4, GROUPS // 8, 8, 4)), 3), 0)
    tops = tl.reshape(_ordered(tops), (GROUPS,))
    bound = _bound(tops, tl.min(tops, 0), TOP_K, tl.where(here > 8 * TOP_K, TOP_K // 8, 0))
    lowest = _score_of(bound)
    # What is not below it: bits first, of which a thread numbers a word's, and then a list.
    marks = tl.full((1, 32), 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :]
    start = 0
    while start < here:
        word = tl.sum(tl.where(_tile(maxima, start + lane, here) >= lowest, marks, 0), 1)
        at = start // 32 + tl.arange(0, GROUPS // 2)
        tl.store(words + at, word.to(tl.int32, bitcast=True), mask=at < tl.cdiv(here, 32))
        start += GROUPS * 16
    # What one thread has stored another one loads.
    tl.debug_barrier()
    at = tl.arange(0, SEGMENT // 32)
    word = tl.load(words + at, mask=at < tl.cdiv(here, 32), other=0).to(tl.uint32, bitcast=True)
    count = _ones(word)
    place = tl.cumsum(count, 0) - count
    found = tl.sum(count, 0)
    if found <= CANDIDATES:
        most = tl.max(count, 0)
        entry = at * 32
        while most > 0:
            last = word & (0 - word)
            # The exponent of a power of two is the place of its bit.
            bit = (last.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(candidates + place, entry + bit, mask=word != 0)
            word = word ^ last
            place += 1
            most -= 1
        tl.debug_barrier()
        low = tl.where(found >= TOP_K, bound, 0)
        if found <= GROUPS:
            _store_best_of(candidates, found, scores, low, first, target, TOP_K, GROUPS, EACH)
        else:
            _store_best_of(candidates, found, scores, low, first, target, TOP_K, CANDIDATES, EACH)
    else:
        here = tl.cdiv(tl.minimum(visible - first, SEGMENT * EACH), 32) * 32
        above = _count_of_all(scores, lane, here, bound + 1, GROUPS)
        if above >= TOP_K:
            # Scores that hide behind few of the maxima: bisection over all.
            bound = tl.zeros((), tl.uint32)
            bit = tl.full((), 0x80000000, tl.uint32)
            while bit != 0:
                if _count_of_all(scores, lane, here, bound | bit, GROUPS) >= TOP_K:
                    bound = bound | bit
                bit = bit >> 1
            above = _count_of_all(scores, lane, here, bound + 1, GROUPS)
        # Mostly very many are equal to the bound.
        over = 0
        equal = 0
        start = 0
        while start < here:
            keys = _ordered(_tile(scores, start + lane, here))
            over, equal = _store_tile(keys, bound, first + start + lane, target, over, equal, TOP_K - above)
            start += GROUPS * 16


@triton.jit
def _store_best_of(
    candidates, found, scores, low, first, target, TOP_K: tl.constexpr, ROOM: tl.constexpr, EACH: tl.constexpr
):
    at = tl.arange(0, ROOM * EACH // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    entry = tl.load(candidates + at // EACH, mask=at // EACH < found, other=0) * EACH + at % EACH
    score = tl.load(scores + entry, mask=at // EACH < found, other=float("-inf"))
    _store_best(_ordered(score), low, first + entry, target, TOP_K)


@triton.jit
def _ones(word):
    """The bits of a uint32 that are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["segments"])
def _merge_kernel(
    scores,  # float32[rows, capacity]
    positions,  # int32[rows]
    chosen,  # int32[rows, TOP_K], written where a row needed several segments
    choices,  # int32[rows, segments, TOP_K]
    capacity,
    segments,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
    PLACES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + row) + 1) // RATIO
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if visible <= tl.maximum(SEGMENT, TOP_K):
        return
    # The choices of segments, one after the other, are in the order of entries.
    place = tl.arange(0, PLACES // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    used = tl.cdiv(visible, SEGMENT) * TOP_K
    entry = tl.load(choices + row * segments * TOP_K + place, mask=place < used, other=-1)
    score = tl.load(scores + row * capacity + entry, mask=entry >= 0, other=float("-inf"))
    place = tl.arange(0, TOP_K_PADDED)
    tl.store(chosen + row * TOP_K + place, -1, mask=place < TOP_K)
    # All places are filled, and least are those that are not used.
    keys = _ordered(score)
    low = tl.min(tl.reshape(tl.where(keys >= LEAST, keys, 0xFFFFFFFF), (PLACES,)), 0)
    _store_best(keys, low, entry, chosen + row * TOP_K, TOP_K)


# Tiles have rows of 32 or 16 that are consecutive: a prefix sum in a row is short, and one over the rows' sums, too.


@triton.jit
def _tile(scores, entry, here):
    return tl.load(scores + entry, mask=entry < here, other=float("-inf"))


@triton.jit
def _ordered(score):
    """uint32 that compare as scores do; less than LEAST for minus infinity, which stands for nothing, and for NaN."""
    bits = score.to(tl.uint32, bitcast=True)
    key = bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000)
    return tl.where(score == score, key, 0)


@triton.jit
def _score_of(key):
    """The score of an ordered integer; the least finite one if there is none."""
    bits = key ^ tl.where(key >> 31 != 0, 0x80000000, 0xFFFFFFFF)
    return tl.where(key < LEAST, -3.4028234663852886e38, bits.to(tl.float32, bitcast=True))


@triton.jit
def _bound(keys, low, TOP_K: tl.constexpr, spare):
    """A number that at least TOP_K keys are not below, which `low` is: the largest, or one that up to `spare` more are
    not below."""
    high = tl.max(tl.reshape(keys, (keys.numel,)), 0) + 1
    count = TOP_K + spare + 1
    # By thirds: a step is a sum over all threads, which takes as long for two counts in a word as for one.
    while (high - low > 1) & (count > TOP_K + spare):
        third = tl.maximum((high - low) // 3, 1)
        counts = tl.sum((keys >= low + third).to(tl.int32) + ((keys >= low + third + third).to(tl.int32) << 16))
        one, two = counts & 0xFFFF, counts >> 16
        high = tl.where(two >= TOP_K, high, tl.where(one >= TOP_K, low + third + third, low + third))
        low = tl.where(two >= TOP_K, low + third + third, tl.where(one >= TOP_K, low + third, low))
        count = tl.where(two >= TOP_K, two, tl.where(one >= TOP_K, one, count))
    return low


@triton.jit
def _count_of_all(scores, lane, here, bound, GROUPS: tl.constexpr):
    """How many keys are not below the bound."""
    count = 0
    start = 0
    while start < here:
        count += tl.sum((_ordered(_tile(scores, start + lane, here)) >= bound).to(tl.int32))
        start += GROUPS * 16
    return count


@triton.jit
def _before(marks):
    """(for each of int[rows, n] the sum of those before it, row by row; the sum of all)."""
    sums = tl.sum(marks, 1)
    return (tl.cumsum(sums, 0) - sums)[:, None] + tl.cumsum(marks, 1) - marks, tl.sum(sums, 0)


@triton.jit
def _store_best(keys, low, entry, target, TOP_K: tl.constexpr):
    """Store the entries of the TOP_K largest keys in order, of equal ones the first; fewer where there are fewer. `low`
    is a number that at least TOP_K keys are not below."""
    bound = _bound(keys, low, TOP_K, 0)
    above = tl.sum((keys > bound).to(tl.int32))
    _store_tile(keys, bound, entry, target, 0, 0, TOP_K - above)


@triton.jit
def _store_tile(keys, bound, entry, target, over, equal, wanted):
    """Store the entries of keys above the bound, and of those equal to it until `wanted` are stored.

    `over` and `equal` count those in the tiles before; returned with those of this one.
    """
    is_over = (keys > bound) & (keys >= LEAST)
    is_equal = (keys == bound) & (keys >= LEAST)
    # Two counts in one prefix sum, of at most 32767 each.
    before, count = _before(is_over.to(tl.int32) + (is_equal.to(tl.int32) << 16))
    equal_before = equal + (before >> 16)
    place = over + (before & 0xFFFF) + tl.minimum(equal_before, wanted)
    tl.store(target + place, entry, mask=is_over | (is_equal & (equal_before < wanted)))
    return over + (count & 0xFFFF), equal + (count >> 16)


def choose_entries(
    scores: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    maxima: Tensor | None = None,
    *,
    config: ChoiceConfig = DEFAULT,
) -> Tensor:
    """The `top_k` best scores of each row among the entries that it sees; of equal ones the lowest entries.

    Args:
        scores: float32[R, capacity], of entries 0, 1, ...; minus infinity from the end of what a row sees to the next
            multiple of 32. Not read where a row sees no more than `top_k`. NaN and minus infinity are not chosen.
        ratio: tokens of an entry.
        top_k: places.
        rows: the step.
        maxima: float32[R, capacity / EACH and more], rows a multiple of 16 apart: the largest of each EACH scores, as
            far as what a row sees and to the next multiple of 8. With them few of the scores are read.
        config: how the kernels are cut.

    Returns:
        int32[R, top_k], ascending; -1 in the places that stay empty, which come last.
    """
    total, capacity = scores.shape
    # Twice as many groups as places: where scores lie at random, the bound leaves 1.4 times `top_k` candidates.
    groups = max(32, triton.next_power_of_2(2 * top_k))
    if capacity <= config.segment:
        # The maxima leave more candidates, which costs more than so few scores.
        maxima = None
    each = 1 if maxima is None else EACH
    warps = config.warps if maxima is None else config.maxima_warps
    places = triton.cdiv(capacity, each)
    segment = max(groups, min(config.segment, triton.next_power_of_2(places)))
    segments = triton.cdiv(places, segment)
    # Neighbours with high scores can lie behind one maximum in fours.
    room = 4 * groups if maxima is None else 2 * groups
    pdl = {"launch_pdl": True} if config.overlaps else {}
    chosen = torch.empty((total, top_k), dtype=torch.int32, device=scores.device)
    choices = chosen.new_empty((total, segments, top_k)) if segments > 1 else chosen
    _choose_entries_kernel[(total, segments)](
        scores,
        scores if maxima is None else maxima,
        rows.positions,
        chosen,
        choices,
        chosen.new_empty((total, segments, segment // 32)),
        chosen.new_empty((total, segments, room)),
        capacity,
        capacity if maxima is None else maxima.stride(0),
        RATIO=ratio,
        TOP_K=top_k,
        TOP_K_PADDED=triton.next_power_of_2(top_k),
        SEGMENT=segment,
        GROUPS=groups,
        CANDIDATES=room,
        EACH=each,
        OVERLAPS=config.overlaps,
        num_warps=warps,
        **pdl,
    )
    if segments > 1:
        places = max(16, triton.next_power_of_2(segments * top_k))
        _merge_kernel[(total,)](
            scores,
            rows.positions,
            chosen,
            choices,
            capacity,
            segments,
            RATIO=ratio,
            TOP_K=top_k,
            TOP_K_PADDED=triton.next_power_of_2(top_k),
            SEGMENT=segment * each,
            PLACES=places,
            OVERLAPS=config.overlaps,
            num_warps=warps,
            **pdl,
        )
    return chosen
