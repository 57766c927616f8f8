"""Unanswered: the rows of a client that have no answer yet, as columns, for the tokens that come with every step.

A row has a *place* from its submission to its answer. New ids are kept in a line of the place, and go to the row's
`generated` when somebody looks at the row: whoever can work on columns pays nothing for a token of a row. What is not
as it should be is not handled here: `take` refuses it all, and the client goes through it row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from transport.wire import Frame

if TYPE_CHECKING:
    from engine.actors.client import Row

LINE_IDS = 256
"""Ids that wait for a look at their row; then they go to it anyway."""

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]


class Unanswered:
    """See the module. Request numbers ascend, so that their low bits find a row: all that are here differ in them."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        """By request number, in the order in which they were submitted first."""
        self._row_at: list[Row | None] = []
        self._free: list[int] = []
        self._order = np.arange(0)
        self._num_new = 0
        """Rows that no token came for."""
        self._place_of = np.zeros(64, np.int64)
        self._number = np.zeros(0, np.int64)
        self._attempt = np.zeros(0, np.int32)
        self._is_started = np.zeros(0, np.bool_)
        self._count = np.zeros(0, np.int64)
        self._waiting = np.zeros(0, np.int64)
        self._mark = np.zeros(0, np.int64)
        self._first_at = np.zeros(0)
        self._last_at = np.zeros(0)
        self._ids = np.zeros((0, LINE_IDS), np.int32)
        self._grow()

    def add(self, row: Row) -> None:
        """A row that was just submitted, under its number."""
        if not self._free:
            self._grow()
        place = row.place = self._free.pop()
        self.rows[row.request] = row
        self._row_at[place] = row
        self._number[place], self._attempt[place], self._is_started[place] = row.request, row.attempt, False
        self._count[place], self._waiting[place] = len(row.generated), 0
        self._first_at[place], self._last_at[place] = row.first_token_at, row.last_token_at
        self._num_new += row.first_token_at == 0.0
        cells = len(self._place_of) - 1
        other = int(self._number[self._place_of[row.request & cells]])
        if other and other != row.request and not (other ^ row.request) & cells:
            self._spread()
        else:
            self._place_of[row.request & cells] = place

    def remove(self, row: Row) -> None:
        """It is answered or given up; it has all its ids. Its place may be another row's from the next `add` on."""
        self.refresh(row)
        self._num_new -= self._first_at[row.place] == 0.0
        del self.rows[row.request]
        self._number[row.place], self._is_started[row.place] = 0, False
        self._row_at[row.place] = None
        self._free.append(row.place)

    def start(self, row: Row) -> None:
        """Tokens of its present attempt may come."""
        self._is_started[row.place] = True

    def take(self, frames: Sequence[Frame], now: float) -> Came | None:
        """Tokens of one or more frames (TokensEmitted, their lengths are right), one for each of different rows.

        Returns:
            None, and nothing was done, where any row has not exactly one token, is not here, is at another attempt,
            did not start, has another token next, or is there twice.
        """
        longs, ints = [], []
        for frame in frames:
            message: Any = frame.message
            if message.num_rows != message.num_tokens:
                return None
            longs.append(np.frombuffer(frame.blob, "<i8", message.num_rows))
            ints.append(np.frombuffer(frame.blob, "<i4", offset=8 * message.num_rows).reshape(4, message.num_rows))
        requests, columns = (longs[0], ints[0]) if len(longs) == 1 else (np.concatenate(longs), np.hstack(ints))
        attempts, indices, counts, ids = columns
        places = self._place_of[requests & (len(self._place_of) - 1)]
        if len(places) > len(self._order):
            return None  # more rows than there are: some are there twice
        order = self._order[: len(places)]
        self._mark[places] = order
        is_right = (
            (self._number[places] == requests)
            & (self._attempt[places] == attempts)
            & self._is_started[places]
            & (self._count[places] == indices)
            & (counts == 1)
            & (self._mark[places] == order)
        )
        # Bytes are searched in a fraction of the time that `all` and `any` take.
        if b"\x00" in is_right.tobytes() or not len(places):
            return None
        waiting = self._waiting[places]
        full = waiting == LINE_IDS
        if b"\x01" in full.tobytes():
            for place in places[full].tolist():
                self._refresh_at(place)
            waiting[full] = 0
        self._ids.reshape(-1)[places * LINE_IDS + waiting] = ids  # a third of what two indices cost
        self._waiting[places] = waiting + 1
        self._count[places] = indices + 1
        if self._num_new:
            fresh = places[self._first_at[places] == 0.0]
            self._first_at[fresh] = now
            self._num_new -= len(fresh) if now else 0
        self._last_at[places] = now
        return Came(self, places, ids)

    def note(self, row: Row, now: float) -> None:
        """Ids were added to the row itself."""
        row.first_token_at, row.last_token_at = row.first_token_at or now, now
        self._num_new -= self._first_at[row.place] == 0.0 and row.first_token_at != 0.0
        self._count[row.place] = len(row.generated)
        self._first_at[row.place], self._last_at[row.place] = row.first_token_at, now

    def refresh(self, row: Row) -> None:
        """Brings a row that is here up to date."""
        self._refresh_at(row.place)

    def row_at(self, place: int) -> Row:
        """The row there, up to date."""
        self._refresh_at(place)
        row = self._row_at[place]
        assert row is not None
        return row

    def _refresh_at(self, place: int) -> None:
        waiting = self._waiting[place]
        if waiting:
            row = self._row_at[place]
            assert row is not None
            row.generated.frombytes(self._ids[place, :waiting].tobytes())
            row.first_token_at, row.last_token_at = float(self._first_at[place]), float(self._last_at[place])
            self._waiting[place] = 0

    def _spread(self) -> None:
        """Two numbers here share their low bits: more bits. A cell for each number from the oldest here is enough."""
        size = len(self._place_of)
        numbers = np.array(list(self.rows), np.int64)
        while len(np.unique(numbers & (size - 1))) < len(numbers):
            size *= 2
        self._place_of = np.zeros(size, np.int64)
        self._place_of[numbers & (size - 1)] = [row.place for row in self.rows.values()]

    def _grow(self) -> None:
        old = len(self._row_at)
        more = max(64, old)
        for name in ("number", "attempt", "is_started", "count", "waiting", "mark", "first_at", "last_at"):
            setattr(self, f"_{name}", np.pad(getattr(self, f"_{name}"), (0, more)))
        self._ids = np.pad(self._ids, ((0, more), (0, 0)))
        self._row_at += [None] * more
        self._order = np.arange(old + more)
        self._free.extend(range(old + more - 1, old - 1, -1))


class Came(Sequence["Row"]):
    """Rows that a token came for, one for each; a row is brought up to date when it is looked at.

    Attributes:
        places: int64, the rows' places.
        ids: int32, the tokens.
    """

    def __init__(self, table: Unanswered, places: Longs, ids: Ints) -> None:
        self.places, self.ids = places, ids
        self._table = table

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [self._table.row_at(place) for place in self.places[at].tolist()]
        return self._table.row_at(int(self.places[at]))

    def __iter__(self) -> Iterator[Row]:
        for place in self.places.tolist():
            yield self._table.row_at(place)
