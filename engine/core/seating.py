"""Which experts the members of a new membership hold: what they have, what a lost rank had, and its row for a rank that
is back."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from engine.core.placement import EMPTY, Placement

Row = npt.NDArray[np.int32]


class Seating:
    """The rows of one part's lost places, as they were."""

    def __init__(self) -> None:
        self._kept: dict[int, Row] = {}

    def seat(self, current: Placement, living: Collection[int], busy: Collection[tuple[int, int]]) -> Placement | int:
        """See `place_members`."""
        return place_members(current, living, self._kept, busy)

    def note_named(self, current: Placement, living: Collection[int]) -> None:
        """A membership without the other places follows `current`."""
        for place in range(current.ranks):
            if place in living:
                self._kept.pop(place, None)
            elif (current.table[place] != EMPTY).any():
                self._kept[place] = current.table[place].copy()


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
