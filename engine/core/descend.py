"""Improves placements step by step: a trail from a given one to an even one, each point with its price in moves.

Theory. For a falling level, take every rank whose load is above the level and pair it with a light one; the best swap
of two replicas (or of a replica and an empty slot) brings both towards their middle. The fullest rank may also be
relieved by one more replica of one of its experts elsewhere, in an empty slot or in place of a replica that does
little. Levels fall geometrically, so early points of the trail undo the worst skew with few moves and late ones polish;
whoever pays for moves picks the point where the next moves are not worth their price (`balance`).

Many independent problems run at once (layers, or layers x nodes). Nothing here knows of prices: a trail does not
depend on them, which is why a higher price never leads to more moves.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.core.field import Field

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LEVEL_FACTOR = 0.5
"""Each level is this much nearer to the mean than the one before."""

_TABOO = 1e30
_RETRY_ROUNDS = 3
"""After a round without relief the next tries are these many rounds apart."""
_MAX_RELIEVED = 4
_MAX_SPOTS = 8
_MAX_HEADS = 3
_RELIEF_SHARE = 0.65
"""Least share of a full rank's load above the level that a better replica has to take away per move."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Trail:
    """Points of a descent, the start first.

    Attributes:
        held: per point, as in Field.
        most: float64[points, problems], largest rank load.
        moved: int64[points, problems], replicas on ranks that did not hold the expert.
        far: those of them whose host did not either.
    """

    held: tuple[Ints, ...]
    most: Floats
    moved: Ints
    far: Ints

    def pick(self, point: Ints) -> Ints:
        """Each problem's `held` at its own point of the trail."""
        held = self.held[0].copy()
        for index in range(1, len(self.held)):
            chosen = point == index
            held[chosen] = self.held[index][chosen]
        return held

    def join(self, other: Trail) -> Trail:
        """The points of both. Only for problems that share no slots: a pick may then mix the two."""
        return Trail(
            self.held + other.held,
            np.concatenate([self.most, other.most]),
            np.concatenate([self.moved, other.moved]),
            np.concatenate([self.far, other.far]),
        )


def descend(field: Field, *, rounds: int, floor: float, thrift: float, keep_doubles: bool = False) -> Trail:
    """Runs up to `rounds` rounds; a layer goes to its next level when it has reached one or got stuck above it.

    Args:
        floor: no level is nearer to the mean than this share of it.
        thrift: how much of the best possible improvement may be given up for one move less, below 0.25.
        keep_doubles: leave second replicas on one rank, where the start has them, to be swapped like others.
    """
    state = _State(field)
    trail = [state.copy_point()]
    if not keep_doubles:
        state.drop_doubles()
    nodes = field.shared.shape[0]
    # Nodes of a layer have one level: only its fullest rank of all counts.
    goal = state.rank_load.mean(axis=1).reshape(-1, nodes).max(axis=1)
    over = np.maximum(state.rank_load.max(axis=1).reshape(-1, nodes).max(axis=1) - goal, 0.0)
    least = floor * goal
    over *= LEVEL_FACTOR
    stuck = np.zeros(goal.size, dtype=np.int64)
    for turn in range(rounds):
        most = state.rank_load.max(axis=1).reshape(-1, nodes).max(axis=1) - goal
        while True:
            reached = (most <= np.maximum(over, least)) & (over > least)
            if not reached.any():
                break
            over[reached] *= LEVEL_FACTOR
        level = goal + np.maximum(over, least)
        active = (most > np.maximum(over, least)) & (stuck <= state.ranks)
        if not active.any():
            break
        changed = state.run_round(np.repeat(np.where(active, level, np.inf), nodes), turn, thrift)
        moved = changed.reshape(-1, nodes).any(axis=1)
        over[active & ~moved] *= LEVEL_FACTOR
        stuck = np.where(moved, 0, stuck + 1)
        if moved.any():
            trail.append(state.copy_point())
    held, tops, moves, far = zip(*trail, strict=True)
    return Trail(held, np.array(tops), np.array(moves), np.array(far))


class _Spots(NamedTuple):
    """Places for another replica, all of one shape: slot of a rank, what it holds, its load, whether it may be used."""

    rank: Ints
    slot: Ints
    code: Ints
    weight: Floats
    usable: Bools

    def deal(self, shape: tuple[int, int, int]) -> _Spots:
        """From [problems, spots x ranks to relieve] to [problems, ranks to relieve, spots]; `shape` is the middle."""
        return _Spots(
            self.rank.reshape(shape).transpose(0, 2, 1),
            self.slot.reshape(shape).transpose(0, 2, 1),
            self.code.reshape(shape).transpose(0, 2, 1),
            self.weight.reshape(shape).transpose(0, 2, 1),
            self.usable.reshape(shape).transpose(0, 2, 1),
        )


class _State:
    """The arrays of a running descent.

    Experts are named by a code, `problem * (experts + 1) + expert`; the extra expert of each problem is "empty". It
    has no load, counts as present and at home everywhere, and is never counted: masks need no special case for it.
    """

    def __init__(self, field: Field) -> None:
        self.problems, self.ranks, self.width = field.held.shape
        self.experts = field.loads.shape[1]
        size = self.experts + 1
        self.start = np.arange(self.problems) * size
        self.empty = self.start + self.experts
        self.loads = np.zeros((self.problems, size))
        self.loads[:, :-1] = field.loads
        self.loads = self.loads.ravel()
        self.held = field.held + self.start[:, None, None]
        self.rows = self.held.reshape(-1, self.width)
        self.home = np.ones((self.problems, size, self.ranks), dtype=np.bool_)
        self.home[:, :-1] = field.home
        self.home = self.home.reshape(-1)
        self.near, self.host = field.near, field.host
        self.room = field.room.reshape(-1).copy()
        self.shared = field.shared.reshape(-1).copy()
        self.node = np.arange(self.problems) % field.shared.shape[0]
        self.present = np.zeros(self.problems * size * self.ranks, dtype=np.int8)
        rank = np.arange(self.ranks)[None, :, None]
        cells = (self.held * self.ranks + rank).ravel()
        self.present[cells] = 1
        self.counts = np.bincount(self.held.ravel(), minlength=self.problems * size)
        self.counts[self.empty] = 1
        self.doubled = np.zeros(0, dtype=np.int64)
        real = np.sort(cells[(self.held != self.empty[:, None, None]).ravel()])
        twice = real[1:] == real[:-1]
        if twice.any():
            self.doubled = real[1:][twice]
            np.add.at(self.present, self.doubled, 1)
        self.by_code = self.present.reshape(-1, self.ranks)
        self.by_code[self.empty] = 1
        self.moved = np.zeros(self.problems, dtype=np.int64)
        self.far = np.zeros(self.problems, dtype=np.int64)
        cells = np.concatenate([real[:1], real[1:][~twice]])
        self._tally(cells // (size * self.ranks), cells // self.ranks, cells % self.ranks, 1)
        self.relieving = np.ones(self.problems, dtype=np.bool_)
        self.vacant = (self.rows == np.repeat(self.empty, self.ranks)[:, None]).sum(axis=1)
        # Reused by every round: a fresh array of this size costs more in page faults than in arithmetic.
        pairs = self.problems * (self.ranks // 2)
        self.buffer = np.empty((pairs, self.width, self.width), dtype=np.float32)
        self.share = np.zeros(self.loads.size)
        self.weight = np.zeros(self.held.shape)
        self.rank_load = np.zeros((self.problems, self.ranks))
        self.weigh(np.arange(self.problems))

    def weigh(self, problem: Ints) -> None:
        """Replica weights and rank loads of these problems anew from the counts, so that errors do not add up."""
        loads, counts = self.loads.reshape(self.problems, -1), self.counts.reshape(self.problems, -1)
        self.share.reshape(self.problems, -1)[problem] = loads[problem] / np.maximum(counts[problem], 1)
        weight = self.share[self.held[problem]]
        self.weight[problem] = weight
        self.rank_load[problem] = np.add.reduce(weight, axis=2)

    def copy_point(self) -> tuple[Ints, Floats, Ints, Ints]:
        held = self.held - self.start[:, None, None]
        return held, self.rank_load.max(axis=1), self.moved.copy(), self.far.copy()

    def drop_doubles(self) -> None:
        """A second replica on one rank does nothing that a better one could not: its slot is free from now on."""
        if self.doubled.size == 0:
            return
        for code, rank in zip(*np.divmod(self.doubled, self.ranks), strict=True):
            problem = code // (self.experts + 1)
            row = problem * self.ranks + rank
            slot = int(np.flatnonzero(self.rows[row] == code)[-1])
            self.rows[row, slot] = self.empty[problem]
            self.room[row] += 1
            self.vacant[row] += 1
            self.by_code[code, rank] -= 1
            self.counts[code] -= 1
        self.weigh(np.arange(self.problems))

    def run_round(self, level: Floats, turn: int, thrift: float) -> Bools:
        """Swaps for every rank above its problem's level, or one better replica for the fullest.

        Returns:
            bool[problems]: which problems changed.
        """
        changed = np.zeros(self.problems, dtype=np.bool_)
        top = np.flatnonzero(self.rank_load.max(axis=1) > level)
        order = np.argsort(-self.rank_load[top], axis=1, kind="stable")
        tried = np.flatnonzero(self.relieving[top] | (turn % _RETRY_ROUNDS == 0))
        relieved = self._relieve(top[tried], order[tried], level[top[tried]])
        changed[relieved] = True
        self.relieving[top[tried]] = changed[top[tried]]
        if relieved.size:
            self.weigh(np.flatnonzero(changed))
            keep = ~changed[top]
            top, order = top[keep], order[keep]
        heavy = self.ranks // 2
        above = np.take_along_axis(self.rank_load[top], order[:, :heavy], axis=1) > level[top][:, None]
        row, index = np.nonzero(above)
        # Partners turn, so that a pair without a good swap is not tried again and again.
        light = order[row, self.ranks - 1 - (index + turn) % (self.ranks - heavy)]
        swapped = self._swap(top[row], order[row, index], light, thrift)
        if swapped.size:
            shifted = np.zeros(self.problems, dtype=np.bool_)
            shifted[swapped] = True
            self.weigh(np.flatnonzero(shifted))
            changed |= shifted
        return changed

    def _swap(self, problem: Ints, high: Ints, low: Ints, thrift: float) -> Ints:
        """The best swap of each (high, low) pair of ranks; pairs of one problem share no rank. Returns the problems."""
        if problem.size == 0:
            return problem
        high_row, low_row = problem * self.ranks + high, problem * self.ranks + low
        giving, taking = self.rows[high_row], self.rows[low_row]
        weight = self.weight.reshape(-1, self.width)
        gap = 0.5 * (self.rank_load.ravel()[high_row] - self.rank_load.ravel()[low_row])
        may_fill = (self.room[low_row] > 0) | (self.shared[self.node[problem] * self.ranks + low] > 0)
        empty = taking == self.empty[problem][:, None]
        to_low, to_high = giving * self.ranks + low[:, None], taking * self.ranks + high[:, None]
        barred = np.where(empty, ~may_fill[:, None], self.present[to_high] > 0)
        out = np.where(self.present[to_low] > 0, -_TABOO, weight[high_row] - gap[:, None])
        back = np.where(barred, _TABOO, weight[low_row])
        # Single precision is enough to choose, and halves the bytes of the one large array.
        out, back = out.astype(np.float32), back.astype(np.float32)
        miss = self.buffer[: problem.size]
        np.subtract(out[:, :, None], back[:, None, :], out=miss)
        np.abs(miss, out=miss)
        flat = miss.reshape(problem.size, -1)
        if thrift > 0:
            # At most four moves apart, so with thrift below a quarter whatever is chosen still improves the pair.
            price = (thrift * np.maximum(gap - flat.min(axis=1), 0.0)).astype(np.float32)[:, None]
            saved = self.home[giving * self.ranks + high[:, None]].astype(np.int8) - self.home[to_low]
            miss += (price * saved)[:, :, None]
            saved = self.home[taking * self.ranks + low[:, None]].astype(np.int8) - self.home[to_high]
            miss += (price * saved)[:, None, :]
        give, take = np.divmod(flat.argmin(axis=1), self.width)
        each = np.arange(problem.size)
        good = np.abs(out[each, give] - back[each, take]) < 0.999 * gap
        good &= self._claim(problem, low, good & empty[each, take])
        pick = np.flatnonzero(good)
        problem, high, low, high_row, low_row = (a[pick] for a in (problem, high, low, high_row, low_row))
        give, take = give[pick], take[pick]
        first, second = self.rows[high_row, give], self.rows[low_row, take]
        self.rows[high_row, give], self.rows[low_row, take] = second, first
        freed = second == self.empty[problem]
        self.room[high_row] += freed
        self.vacant[high_row] += freed
        self.vacant[low_row] -= freed
        self._shift(problem, first, high, -1)
        self._shift(problem, first, low, 1)
        self._shift(problem, second, low, -1)
        self._shift(problem, second, high, 1)
        return problem

    def _claim(self, problem: Ints, rank: Ints, wanted: Bools) -> Bools:
        """Takes an empty slot for each wanted pair: own room first, then shared slots. False: none was left."""
        granted = np.ones(problem.size, dtype=np.bool_)
        want = np.flatnonzero(wanted)
        if want.size == 0:
            return granted
        row = problem[want] * self.ranks + rank[want]
        own = self.room[row] > 0
        self.room[row[own]] -= 1
        rest = want[~own]
        place = self.node[problem[rest]] * self.ranks + rank[rest]
        order = np.argsort(place, kind="stable")
        ordered = place[order]
        served = np.arange(ordered.size) - np.searchsorted(ordered, ordered) < self.shared[ordered]
        granted[rest[order[~served]]] = False
        np.subtract.at(self.shared, ordered[served], 1)
        return granted

    def _shift(self, problem: Ints, code: Ints, rank: Ints, sign: int) -> None:
        """One replica fewer (-1) or more (+1) of each code on its rank; all cells differ."""
        real = np.flatnonzero(code != self.empty[problem])
        problem, code, rank = problem[real], code[real], rank[real]
        cell = code * self.ranks + rank
        self.present[cell] += sign
        first = np.flatnonzero(self.present[cell] == (1 if sign > 0 else 0))
        self._tally(problem[first], code[first], rank[first], sign)

    def _tally(self, problem: Ints, code: Ints, rank: Ints, sign: int) -> None:
        away = np.flatnonzero(~self.home[code * self.ranks + rank])
        problem, code, rank = problem[away], code[away], rank[away]
        near = self.near[problem, code - self.start[problem], self.host[self.node[problem], rank]]
        self.moved += sign * np.bincount(problem, minlength=self.problems)
        self.far += sign * np.bincount(problem[~near], minlength=self.problems)

    def _relieve(self, problem: Ints, order: Ints, level: Floats) -> Ints:
        """One more replica elsewhere for an expert of the fullest ranks, where that beats a swap. Returns the problems.

        Candidates: spots on light ranks, dealt out to the fullest ranks, times the heaviest experts (heads) of the
        fullest rank and "nothing", which gives the spot's replica up. What counts is the load above the level, summed
        over ranks; that a spot's expert and a head may share a rank that is not the full one is neglected.
        """
        if problem.size == 0:
            return problem
        number, full = problem.size, min(_MAX_RELIEVED, self.ranks // 2)
        num_spots, num_heads = min(_MAX_SPOTS, self.ranks) // full, min(_MAX_HEADS, self.width)
        spots = self._find_spots(problem, num_spots * full)
        each, turn = np.arange(number)[:, None], np.arange(num_spots * full)
        top = order[:, :full]
        over = self.rank_load[problem] - level[:, None]
        before = np.maximum(over, 0.0).sum(axis=1)[:, None]
        # Without the spot's replica: the others of that expert get its share.
        raised = spots.weight / np.maximum(self.counts[spots.code] - 1, 1)
        gone = over[:, None, :] + raised[:, :, None] * self.by_code[spots.code]
        gone[each, turn, spots.rank] -= spots.weight + raised
        there = gone[each, turn, spots.rank]
        at_top = gone[each[:, :, None], turn.reshape(num_spots, full).T, top[:, :, None]]
        worse = np.maximum(gone, 0.0).sum(axis=2) - before - np.maximum(there, 0.0)
        # With one more replica of a head: its others get less. The last head is "nothing".
        heads = self.rows[problem[:, None] * self.ranks + top]
        heads = np.take_along_axis(heads, np.argsort(-self.share[heads], axis=2)[:, :, :num_heads], axis=2)
        lowered = np.zeros((number, full, num_heads + 1))
        lowered[:, :, :-1] = self.share[heads] / (self.counts[heads] + 1)
        flat = heads.reshape(number, -1)
        eased = over[:, None, :] - lowered[:, :, :-1].reshape(number, -1, 1) * self.by_code[flat]
        better = np.zeros((number, full, 1, num_heads + 1))
        better[:, :, 0, :-1] = (before - np.maximum(eased, 0.0).sum(axis=2)).reshape(number, full, num_heads)
        blank = np.broadcast_to(self.empty[problem][:, None, None], (number, full, 1))
        heads = np.concatenate([heads, blank], axis=2)
        # From here on [problems, full ranks, spots, heads].
        shape = (number, num_spots, full)
        spots = spots.deal(shape)
        there, worse = (array.reshape(shape).transpose(0, 2, 1) for array in (there, worse))
        added = there[:, :, :, None] + (lowered * self.counts[heads])[:, :, None, :]
        gain = better - worse[:, :, :, None] - np.maximum(added, 0.0)
        # Both effects meet on the full rank itself: there their sum counts, not the sum of what each does alone.
        excess = np.take_along_axis(over, top, axis=1)
        alone = np.maximum(excess, 0.0)[:, :, None] - np.maximum(excess[:, :, None] - lowered, 0.0)
        both = np.maximum(at_top, 0.0)[:, :, :, None] - np.maximum(at_top[:, :, :, None] - lowered[:, :, None, :], 0.0)
        gain += both - alone[:, :, None, :]
        cells = heads[:, :, None, :] * self.ranks + spots.rank[:, :, :, None]
        barred = self.present[cells] > 0
        barred[:, :, :, -1] = spots.code == blank  # nothing in place of nothing
        barred |= ~spots.usable[:, :, :, None]
        worth = np.where(barred, -_TABOO, gain / (1.25 - self.home[cells])).reshape(number, full, -1)
        best = worth.argmax(axis=2)
        # A swap brings a full rank down to the level at best, for two moves.
        least = np.where(excess > 0, _RELIEF_SHARE * excess, np.inf)
        row, which = np.nonzero(np.take_along_axis(worth, best[:, :, None], axis=2)[:, :, 0] > least)
        spot, head = np.divmod(best[row, which], num_heads + 1)
        return self._exchange(
            problem[row],
            spots.rank[row, which, spot],
            spots.slot[row, which, spot],
            spots.code[row, which, spot],
            heads[row, which, head],
        )

    def _find_spots(self, problem: Ints, number: int) -> _Spots:
        """The lightest ranks' spots, `number` for each problem, lightest rank first.

        The spot of a rank is an empty slot, which weighs nothing, else its lightest replica that has others.
        """
        each = np.arange(problem.size)[:, None]
        row = problem[:, None] * self.ranks + np.arange(self.ranks)
        fills = (self.room[row] > 0) | (self.shared.reshape(-1, self.ranks)[self.node[problem]] > 0)
        fills &= self.vacant[row] > 0
        spare = np.where(self.counts > 1, self.share, _TABOO)
        weights = spare[self.held[problem]]
        slot = weights.argmin(axis=2)
        weight = np.where(fills, 0.0, weights[each, np.arange(self.ranks), slot])
        rank = np.argsort(self.rank_load[problem] + weight, axis=1, kind="stable")[:, :number]
        weight, fills, row = weight[each, rank], fills[each, rank], row[each, rank]
        vacant = (self.rows[row] == self.empty[problem][:, None, None]).argmax(axis=2)
        slot = np.where(fills, vacant, slot[each, rank])
        usable = weight < _TABOO
        return _Spots(rank, slot, self.rows[row, slot], np.where(usable, weight, 0.0), usable)

    def _exchange(self, problem: Ints, rank: Ints, slot: Ints, old: Ints, new: Ints) -> Ints:
        """Puts `new` where `old` is; both may be "empty". Returns the problems in which that was possible."""
        empty = self.empty[problem]
        # Of exchanges that name the same expert only the first: two might give up its last two replicas.
        names = np.stack([old, new], axis=1).ravel()
        order = np.argsort(names, kind="stable")
        repeated = np.zeros(names.size, dtype=np.bool_)
        repeated[order[1:]] = names[order[1:]] == names[order[:-1]]
        repeated &= names != np.repeat(empty, 2)
        good = ~repeated.reshape(-1, 2).any(axis=1)
        good &= self._claim(problem, rank, good & (old == empty) & (new != empty))
        pick = np.flatnonzero(good)
        problem, rank, slot, old, new, empty = (a[pick] for a in (problem, rank, slot, old, new, empty))
        row = problem * self.ranks + rank
        self.rows[row, slot] = new
        self._shift(problem, old, rank, -1)
        self._shift(problem, new, rank, 1)
        self.counts[old] -= old != empty
        self.counts[new] += new != empty
        freed = (new == empty).astype(np.int64) - (old == empty)
        self.vacant[row] += freed
        self.room[row] += freed > 0
        return problem
