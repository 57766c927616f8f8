"""PagePool: who may touch each page (or state slab) of an arena.

A unit is in exactly one state, and only the moves of `ALLOWED` exist, so memory that a peer may still write can not be
handed out by a slip: the move raises. Runs of neighbouring units are preferred, because neighbours that have
neighbouring targets merge into one write on the wire.

The invariant, checked by `check`: free + owned + in_flight + granted + quarantined + cached = total.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Sequence

from engine.errors import LocalProtocolError


class PageState(enum.IntEnum):
    """What may happen to a unit of memory.

    FREE: nobody uses it. OWNED: this rank's device may read and write it. IN_FLIGHT: its request is over, but a
    submitted step still names it. GRANTED: a peer may write it now. QUARANTINED: its request is over, but a peer may
    still write it. CACHED: it belongs to the prefix cache, and is read only.
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
        return PageState(self._states[unit])

    def find(self, units: Sequence[int], state: PageState) -> int | None:
        """The first of `units` in that state."""
        at = bytes(map(self._states.__getitem__, units)).find(state)
        return None if at < 0 else units[at]

    def find_other(self, units: Sequence[int], state: PageState) -> int | None:
        """The first of `units` in another state."""
        found = bytes(map(self._states.__getitem__, units))
        if found.count(state) == len(found):
            return None
        return next(unit for unit, value in zip(units, found, strict=True) if value != state)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Takes `count` free units and owns them; None when there are not enough.

        Prefers the smallest run that holds all of them; else the longest runs, so that the fewest pieces come out.
        """
        if count > self.num_free:
            return None
        if count <= 0:
            return ()
        units: list[int] = []
        fitting = [(length, index) for index, length in enumerate(self._run_lengths) if length >= count]
        if fitting:
            self._cut(min(fitting)[1], count, units)
        else:
            while len(units) < count:
                longest = max(range(len(self._run_lengths)), key=self._run_lengths.__getitem__)
                self._cut(longest, min(count - len(units), self._run_lengths[longest]), units)
        self._mark(units, PageState.FREE, PageState.OWNED)
        return tuple(units)

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
        units = tuple(units)
        self._mark(units, source, PageState.FREE)
        first, end = 0, len(units)
        for at in range(1, end + 1):
            if at == end or units[at] != units[at - 1] + 1:
                self._join(units[first], at - first)
                first = at

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
            if first <= end or length < 1 or any(self._states[first : first + length]):
                raise LocalProtocolError(f"{self.what}s: free run [{first}, {first + length}) is wrong")
            end = first + length
            in_runs += length
        if in_runs != self.num_free:
            raise LocalProtocolError(f"{self.what}s: {in_runs} in free runs, {self.num_free} are free")

    def _mark(self, units: Iterable[int], source: PageState, target: PageState) -> None:
        if (source, target) not in ALLOWED:
            raise LocalProtocolError(f"a {self.what} may not go from {source.name} to {target.name}")
        units, states, total = tuple(units), self._states, self.total
        # Two passes: a refused move must leave nothing half done.
        for unit in units:
            if not 0 <= unit < total or states[unit] != source:
                is_in = PageState(states[unit]).name if 0 <= unit < total else "outside the arena"
                raise LocalProtocolError(f"{self.what} {unit} is {is_in}, not {source.name}")
        if len(set(units)) != len(units):
            raise LocalProtocolError(f"a {self.what} is named twice in a move to {target.name}")
        for unit in units:
            states[unit] = target
        self._counts[source] -= len(units)
        self._counts[target] += len(units)

    def _cut(self, index: int, count: int, into: list[int]) -> None:
        first, length = self._run_firsts[index], self._run_lengths[index]
        into.extend(range(first, first + count))
        if count == length:
            del self._run_firsts[index], self._run_lengths[index]
        else:
            self._run_firsts[index], self._run_lengths[index] = first + count, length - count

    def _join(self, first: int, count: int) -> None:
        """Units [first, first + count) are free, and part of the run that they make with those beside them."""
        at = bisect.bisect_left(self._run_firsts, first)
        before = at > 0 and self._run_firsts[at - 1] + self._run_lengths[at - 1] == first
        after = at < len(self._run_firsts) and self._run_firsts[at] == first + count
        if before and after:
            self._run_lengths[at - 1] += count + self._run_lengths[at]
            del self._run_firsts[at], self._run_lengths[at]
        elif before:
            self._run_lengths[at - 1] += count
        elif after:
            self._run_firsts[at] = first
            self._run_lengths[at] += count
        else:
            self._run_firsts.insert(at, first)
            self._run_lengths.insert(at, count)
