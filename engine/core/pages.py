"""PagePool: who may touch each page (or state slab) of an arena.

A unit is in exactly one state, and only the moves of `ALLOWED` exist, so memory that a peer may still write can not be
handed out by a slip: the move raises. Runs of neighbouring units are preferred, because neighbours that have
neighbouring targets merge into one write on the wire, and because a move costs by the run.

The invariant, checked by `check`: free + owned + in_flight + granted + quarantined + cached = total.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Iterable

from engine.core.runs import Runs
from engine.errors import LocalProtocolError


class PageState(enum.IntEnum):
    """What may happen to a unit of memory.

    FREE: nobody uses it. OWNED: this rank's device may read and write it. IN_FLIGHT: its request is over, but a
    submitted step still names it, or it is handed back. GRANTED: a peer may write it now. QUARANTINED: its request is
    over, but a peer may still write it. CACHED: it belongs to the prefix cache, and is read only.
    """

    FREE = 0
    OWNED = 1
    IN_FLIGHT = 2
    GRANTED = 3
    QUARANTINED = 4
    CACHED = 5


ALLOWED: frozenset[tuple[PageState, PageState]] = frozenset(
    {
        (PageState.FREE, PageState.OWNED),
        (PageState.OWNED, PageState.FREE),
        (PageState.OWNED, PageState.IN_FLIGHT),
        (PageState.OWNED, PageState.GRANTED),
        (PageState.OWNED, PageState.CACHED),
        (PageState.IN_FLIGHT, PageState.FREE),
        (PageState.GRANTED, PageState.OWNED),
        (PageState.GRANTED, PageState.QUARANTINED),
        (PageState.GRANTED, PageState.FREE),
        (PageState.QUARANTINED, PageState.FREE),
        (PageState.CACHED, PageState.FREE),
    }
)
"""GRANTED and QUARANTINED go to FREE only in answer to the end of the writer's epoch or its confirmed death; the tables
of `handoff` see to that."""


_MARKS = tuple(bytes((state,)) for state in PageState)
_STATES = tuple(PageState)


class PagePool:
    """Units 0 .. total - 1 and their states. `what` names the unit in errors (`page`, `slab`)."""

    def __init__(self, what: str, total: int) -> None:
        if total < 1:
            raise LocalProtocolError(f"a pool of {total} {what}s can not hold anything")
        self.what = what
        self.total = total
        self._states = bytearray(total)
        self._counts = [total, 0, 0, 0, 0, 0]
        # Free runs, sorted by first unit; parallel lists because bisect wants plain keys.
        self._run_firsts: list[int] = [0]
        self._run_lengths: list[int] = [total]

    def count(self, state: PageState) -> int:
        return self._counts[state]

    @property
    def num_free(self) -> int:
        return self._counts[PageState.FREE]

    def state_of(self, unit: int) -> PageState:
        return _STATES[self._states[unit]]

    def find(self, units: Iterable[int], state: PageState) -> int | None:
        """The first of `units` in that state."""
        for run in Runs.of(units).ranges:
            at = self._states.find(state, run.start, run.stop)
            if at >= 0:
                return at
        return None

    def find_other(self, units: Iterable[int], state: PageState) -> int | None:
        """The first of `units` in another state."""
        for run in Runs.of(units).ranges:
            if self._states.count(state, run.start, run.stop) != len(run):
                return next(unit for unit in run if self._states[unit] != state)
        return None

    def allocate(self, count: int) -> Runs | None:
        """Takes `count` free units and owns them; None when there are not enough.

        Prefers the smallest run that holds all of them; else the longest runs, so that the fewest pieces come out.
        """
        if count > self.num_free:
            return None
        lengths = self._run_lengths
        ranges: list[range] = []
        while count > 0:
            fitting = [length for length in lengths if length >= count]
            at = lengths.index(min(fitting) if fitting else max(lengths))
            ranges.append(self._cut(at, min(count, lengths[at])))
            count -= len(ranges[-1])
        units = Runs(tuple(ranges))
        self._mark(units, PageState.FREE, PageState.OWNED)
        return units

    def grant(self, units: Iterable[int]) -> None:
        """A peer may write them from now on."""
        self._mark(units, PageState.OWNED, PageState.GRANTED)

    def adopt(self, units: Iterable[int]) -> None:
        """The peer's epoch ended well: they are this rank's own."""
        self._mark(units, PageState.GRANTED, PageState.OWNED)

    def quarantine(self, units: Iterable[int]) -> None:
        """Their request is over, the peer's epoch is not."""
        self._mark(units, PageState.GRANTED, PageState.QUARANTINED)

    def hold(self, units: Iterable[int]) -> None:
        """Their request is over, a submitted step that names them is not."""
        self._mark(units, PageState.OWNED, PageState.IN_FLIGHT)

    def cache(self, units: Iterable[int]) -> None:
        """Their request is over, and what is in them stays."""
        self._mark(units, PageState.OWNED, PageState.CACHED)

    def free(self, units: Iterable[int], source: PageState) -> None:
        """Gives units of state `source` back.

        Raises:
            LocalProtocolError: a unit is in another state, or may not be freed from it.
        """
        units = Runs.of(units)
        self._mark(units, source, PageState.FREE)
        for run in units.ranges:
            self._join(run)

    def check(self) -> None:
        """Recounts everything; raises LocalProtocolError at the first difference. Costs O(total)."""
        for state in PageState:
            seen = self._states.count(int(state))
            if seen != self._counts[state]:
                raise LocalProtocolError(f"{self.what}s: {seen} are {state.name}, {self._counts[state]} were counted")
        if sum(self._counts) != self.total:
            raise LocalProtocolError(f"{self.what}s: {sum(self._counts)} accounted for, {self.total} exist")
        end = -1
        in_runs = 0
        for first, length in zip(self._run_firsts, self._run_lengths, strict=True):
            if first <= end or length < 1 or self._states.count(PageState.FREE, first, first + length) != length:
                raise LocalProtocolError(f"{self.what}s: free run [{first}, {first + length}) is wrong")
            end = first + length
            in_runs += length
        if in_runs != self.num_free:
            raise LocalProtocolError(f"{self.what}s: {in_runs} in free runs, {self.num_free} are free")

    def _mark(self, units: Iterable[int], source: PageState, target: PageState) -> None:
        if (source, target) not in ALLOWED:
            raise LocalProtocolError(f"a {self.what} may not go from {source.name} to {target.name}")
        ranges = Runs.of(units).ranges
        states, old, new = self._states, _MARKS[source], _MARKS[target]
        count = 0
        # Two passes: a refused move must leave nothing half done.
        for run in ranges:
            first, end = run.start, run.stop
            if first < 0 or states[first:end] != old * (end - first):
                unit = next(unit for unit in run if not 0 <= unit < self.total or states[unit] != source)
                is_in = PageState(states[unit]).name if 0 <= unit < self.total else "outside the arena"
                raise LocalProtocolError(f"{self.what} {unit} is {is_in}, not {source.name}")
            count += end - first
        if len(ranges) > 1:
            ordered = sorted(ranges, key=lambda run: run.start)
            if any(after.start < before.stop for before, after in itertools.pairwise(ordered)):
                raise LocalProtocolError(f"a {self.what} is named twice in a move to {target.name}")
        for run in ranges:
            states[run.start : run.stop] = new * (run.stop - run.start)
        self._counts[source] -= count
        self._counts[target] += count

    def _cut(self, index: int, count: int) -> range:
        first, length = self._run_firsts[index], self._run_lengths[index]
        if count == length:
            del self._run_firsts[index], self._run_lengths[index]
        else:
            self._run_firsts[index], self._run_lengths[index] = first + count, length - count
        return range(first, first + count)

    def _join(self, run: range) -> None:
        """Adds it to the free runs, as one with those beside it."""
        firsts, lengths = self._run_firsts, self._run_lengths
        at = bisect.bisect_left(firsts, run.start)
        before = at > 0 and firsts[at - 1] + lengths[at - 1] == run.start
        after = at < len(firsts) and firsts[at] == run.stop
        if before and after:
            lengths[at - 1] += len(run) + lengths[at]
            del firsts[at], lengths[at]
        elif before:
            lengths[at - 1] += len(run)
        elif after:
            firsts[at] = run.start
            lengths[at] += len(run)
        else:
            firsts.insert(at, run.start)
            lengths.insert(at, len(run))
