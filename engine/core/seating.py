"""Which experts the members of a new membership hold: what they have, what a lost rank had, its row for a rank that is
back. What they took over for a lost rank is a loan: with all ranks back it is given back, so that the spare slots are
there for the next loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from engine.core.placement import EMPTY, Placement

Row = npt.NDArray[np.int32]


class Seating:
    """The rows of one part's lost places, as they were, and what others took over from them."""

    def __init__(self) -> None:
        self._kept: dict[int, Row] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def seat(self, current: Placement, living: Collection[int], busy: Collection[tuple[int, int]]) -> Placement | int:
        """See `place_members`."""
        return place_members(current, living, self._kept, busy)

    def note_named(self, current: Placement, named: Placement, living: Collection[int]) -> None:
        """A membership of these places with the placement `named` follows `current`."""
        for place, slot in np.argwhere((current.table == EMPTY) & (named.table != EMPTY)).tolist():
            if place not in self._kept:
                self._taken[place, slot] = int(named.table[place, slot])
        for place in range(current.ranks):
            if place in living:
                self._kept.pop(place, None)
            elif (current.table[place] != EMPTY).any():
                self._kept[place] = current.table[place].copy()

    def find_loans(self, current: Placement) -> tuple[tuple[int, int], ...]:
        """(place, slot) of experts that were taken over and that another place holds too. Call it with all places
        back; what it does not name, because it was moved meanwhile or is the only one, is no loan any more."""
        counts = current.count_replicas().ravel()
        loans = []
        for (place, slot), key in sorted(self._taken.items()):
            if current.table[place, slot] == key and counts[key] > 1:
                counts[key] -= 1
                loans.append((place, slot))
        self._taken = {loan: self._taken[loan] for loan in loans}
        return tuple(loans)


def place_members(
    current: Placement,
    living: Collection[int],
    kept: Mapping[int, Row],
    busy: Collection[tuple[int, int]],
) -> Placement | int:
    """The placement of a membership: only empty slots of places that go on get another expert.

    Args:
        current: in force so far.
        kept: rows of lost places, as they were; a place that is back gets its own again.
        busy: slots that are empty in `current`, but may still be written or read.

    Returns:
        The placement, or how many experts find no slot.
    """
    table = current.table.copy()
    for place in range(current.ranks):
        if place not in living:
            table[place] = EMPTY
        elif place in kept:
            table[place] = kept[place]
    keys = table[table != EMPTY]
    stranded = np.flatnonzero(np.bincount(keys, minlength=current.layers * current.experts) == 0).tolist()
    free = {
        place: [slot for slot in np.flatnonzero(table[place] == EMPTY).tolist() if (place, slot) not in busy]
        for place in sorted(living)
    }
    for at, key in enumerate(stranded):
        place = max(free, key=lambda one: (len(free[one]), -one), default=-1)
        if place < 0 or not free[place]:
            return len(stranded) - at
        table[place, free[place].pop(0)] = key
    return Placement(current.layers, current.experts, table)
