"""A table that stands still: which rows are shown in which order, and the lines of those that are on the screen.

Rows come anew with every answer. While nobody is in the table they are sorted each time. As soon as the cursor is in
it, the order is frozen: known rows keep their places, new ones go to the end, and rows that are gone stay where they
were, dimmed, until the cursor leaves (`leave`) or goes to the top (`go_top`). Only what is seen is formatted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from console import marks
from console.columns import Column, Placed, Row, fit, place, show
from console.filters import Field, Filter, Value, compile_filter
from console.lines import Line, Run, fit_text, joined, pad


@dataclass
class TableModel(Generic[Row]):
    """`key` names a row over all answers. `sort` is the name of a column."""

    columns: Sequence[Column[Row]]
    key: Callable[[Row], Hashable]
    sort: str
    extra_fields: Sequence[Field[Row]] = ()
    """What filters know beyond the columns."""
    is_descending: bool = field(init=False)
    cursor: Hashable | None = None
    """Key of the row under the cursor; None: the cursor is not in the table."""
    column: int = 0
    """Index of the column whose cell is copied, among those that are shown."""
    top: int = 0
    """Index of the first row on the screen."""
    height: int = 1
    """Rows that the screen had when it was drawn last."""

    def __post_init__(self) -> None:
        self.by_name = {column.name: column for column in self.columns}
        self.is_descending = self.by_name[self.sort].is_descending
        self.fields = [*(Field(column.name, column.kind, column.get) for column in self.columns), *self.extra_fields]
        self.filter: Filter[Row] = Filter("", ())
        self.total = 0
        self._rows: dict[Hashable, Row] = {}
        self._order: list[Hashable] = []
        self._gone: set[Hashable] = set()
        self._placed: tuple[int, list[Placed[Row]]] = (-1, [])

    # ------------------------------------------------------------ what comes in

    def set_rows(self, rows: Sequence[Row]) -> None:
        """The newest answer."""
        fresh = {self.key(row): row for row in rows}
        self.total = len(fresh)
        if self.is_frozen:
            held = self._rows
            self._gone = {key for key in self._order if key not in fresh}
            self._rows = {**{key: held[key] for key in self._gone}, **fresh}
            known = set(self._order)
            matches = self.filter.matches
            self._order.extend(key for key, row in fresh.items() if key not in known and matches(row))
        else:
            self._rows = fresh
            self._arrange()

    def set_filter(self, text: str) -> None:
        """Raises FilterError, and then nothing has changed."""
        self.filter = compile_filter(text, self.fields)
        self._arrange()

    def sort_by(self, name: str) -> None:
        """Sorts once more, also while frozen: whoever asks for it wants it to move."""
        self.is_descending = self.by_name[name].is_descending
        self.sort = name
        self.top = 0
        self._arrange()

    def sort_next(self, width: int) -> None:
        """The next one of the columns that are shown in so many cells."""
        names = [placed.column.name for placed in self.placed(width) if placed.column.can_sort]
        self.sort_by(names[(names.index(self.sort) + 1) % len(names)] if self.sort in names else names[0])

    def reverse(self) -> None:
        """The other way round."""
        self.is_descending = not self.is_descending
        self.top = 0
        self._arrange()

    def _arrange(self) -> None:
        """Forgets what is gone, and sorts what matches. What has no value comes last either way."""
        for key in self._gone:
            self._rows.pop(key, None)
        self._gone = set()
        get, matches = self.by_name[self.sort].get, self.filter.matches
        with_value: list[tuple[float | str, int, Hashable]] = []
        without: list[Hashable] = []
        for n, (key, row) in enumerate(self._rows.items()):
            if not matches(row):
                continue
            value = get(row)
            if value is None or (not isinstance(value, str) and math.isnan(value)):
                without.append(key)
            else:
                with_value.append((value, n, key))
        is_text = any(isinstance(value, str) for value, _, _ in with_value)
        # Ties stay in the order in which they came, either way.
        with_value.sort(key=lambda found: str(found[0]) if is_text else found[0], reverse=self.is_descending)
        self._order = [key for _, _, key in with_value] + without
        # What the filter hides can not hold the cursor.
        if self.cursor is not None and self.cursor not in set(self._order):
            self.cursor = self._order[min(self.top, len(self._order) - 1)] if self._order else None
        self._keep_in_sight()

    # ------------------------------------------------------------ the cursor

    @property
    def is_frozen(self) -> bool:
        """The cursor is in the table."""
        return self.cursor is not None

    @property
    def keys(self) -> Sequence[Hashable]:
        """All rows that are shown, in their order."""
        return self._order

    def is_gone(self, key: Hashable) -> bool:
        """It was there when the order was frozen, and is no more."""
        return key in self._gone

    def row(self, key: Hashable | None) -> Row | None:
        """The row with this key, also one that is gone."""
        return None if key is None else self._rows.get(key)

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self.row(self.cursor)

    def move(self, rows: int) -> None:
        """Down by `rows` (up where negative), to the ends at most. The first step enters the table."""
        if not self._order:
            return
        if self.cursor is None:
            at = self.top if rows > 0 else min(len(self._order), self.top + self.height) - 1
        else:
            at = self._index() + rows
        self.cursor = self._order[max(0, min(len(self._order) - 1, at))]
        self._keep_in_sight()

    def move_page(self, pages: int) -> None:
        """By what the screen shows, less a row."""
        self.move(pages * max(1, self.height - 1))

    def move_column(self, columns: int) -> None:
        """To another cell of the row."""
        shown = self._placed[1]
        self.column = max(0, min(max(0, len(shown) - 1), self.column + columns))

    def go_top(self) -> None:
        """To the first row, in a fresh order."""
        self.cursor = None
        self._arrange()
        self.top = 0
        self.cursor = self._order[0] if self._order else None

    def go_end(self) -> None:
        """To the last row."""
        self.cursor = self._order[-1] if self._order else None
        self._keep_in_sight()

    def point(self, y: int) -> bool:
        """To the row in line `y` of what `lines` gave (0 is the heading), as a click does; False: there is none."""
        at = self.top + y - 1
        if y < 1 or at >= len(self._order):
            return False
        self.cursor = self._order[at]
        return True

    def leave(self) -> bool:
        """The cursor leaves, and rows move again. False: it was not in the table."""
        if self.cursor is None:
            return False
        self.cursor = None
        self._arrange()
        self.top = 0
        return True

    def _index(self) -> int:
        try:
            return self._order.index(self.cursor)  # type: ignore[arg-type]
        except ValueError:
            return 0

    def _keep_in_sight(self) -> None:
        if self.cursor is not None:
            at = self._index()
            self.top = max(at - self.height + 1, min(self.top, at))
        self.top = max(0, min(self.top, len(self._order) - self.height))

    # ------------------------------------------------------------ lines

    def placed(self, width: int) -> list[Placed[Row]]:
        """The columns that are shown in `width` cells."""
        if self._placed[0] != width:
            self._placed = (width, place(self.columns, width))
        return self._placed[1]

    def lines(self, width: int, height: int) -> list[Line]:
        """The heading and the rows of the window, at most `height` lines of exactly `width` cells."""
        self.height = max(1, height - 1)
        self._keep_in_sight()
        placed = self.placed(width)
        result = [self._heading(placed, width)]
        for key in self._order[self.top : self.top + max(0, height - 1)]:
            result.append(self._row_line(key, placed, width))
        return result[: max(0, height)]

    def caption(self) -> Line:
        """`sort skew ▼  filter pool=decode  32 of 48  ▼ frozen`, for a title."""
        arrow = "▼" if self.is_descending else "▲"
        runs: list[Run] = [("sort ", "label"), (f"{self.by_name[self.sort].title.strip()} {arrow}", "value")]
        if self.filter.text:
            runs += [("  filter ", "label"), (self.filter.text, "value")]
        shown = len(self._order) - len(self._gone)
        runs.append((f"  {shown:,} of {self.total:,}" if shown != self.total else f"  {shown:,}", "label"))
        if self.is_frozen:
            runs.append((f"  {marks.FROZEN}", "warn"))
        return joined(runs)

    def record(self, row: Row) -> dict[str, Value]:
        """The whole row by the columns' names, for programs."""
        return {column.name: _plain(column.get(row)) for column in self.columns}

    def cell_text(self, width: int) -> str:
        """What the chosen cell of the row under the cursor shows; empty without a cursor."""
        placed, row = self.placed(width), self.current
        if row is None or not placed:
            return ""
        at = placed[min(self.column, len(placed) - 1)]
        return "".join(text for text, _ in show(at, row)).strip()

    def _heading(self, placed: Sequence[Placed[Row]], width: int) -> Line:
        runs: list[Run] = [(" ", "")]
        for n, at in enumerate(placed):
            runs.append((fit_text(at.column.title, at.width, at.column.align), self._heading_style(at.column)))
            if n < len(placed) - 1:
                runs.append(("  ", ""))
        return pad(joined(runs), width)

    def _heading_style(self, column: Column[Row]) -> str:
        return "sorted" if column.name == self.sort else "head"

    def _row_line(self, key: Hashable, placed: Sequence[Placed[Row]], width: int) -> Line:
        row, is_here, is_gone = self._rows[key], key == self.cursor, key in self._gone
        runs: list[Run] = [("▸" if is_here else " ", "cursor" if is_here else "")]
        for n, at in enumerate(placed):
            cell = fit(show(at, row), at.width, at.column.align)
            if is_gone:
                cell = [(text, "gone") for text, _ in cell]
            if is_here:
                over = "chosen" if n == min(self.column, len(placed) - 1) else "cursor"
                cell = [(text, f"{style} {over}".strip()) for text, style in cell]
            runs.extend(cell)
            if n < len(placed) - 1:
                runs.append(("  ", "cursor" if is_here else ""))
        return pad(joined(runs), width, "cursor" if is_here else "")


def _plain(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value
