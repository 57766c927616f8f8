"""What is chosen on the Transfer screen: the pair under the cursor, the order of rows, the window. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from console.filters import Filter, compile_filter
from console.pairmatrix import PAIR_FIELDS, Matrix, Pair, total, worst
from console.view import ClusterView

Order = Literal["rank", "sum", "p99", "failed"]
ORDERS: tuple[Order, ...] = ("rank", "sum", "p99", "failed")
CELL = 6
"""Cells of a pair: five of figures and one for a mark."""
LEFT = 6
RIGHT = 25
"""The names at the left; sum, p99 and failures at the right."""


@dataclass
class TransferState:
    """What is chosen on this screen. The cursor is a pair of ranks; None: it is not in the matrix, and rows are in a
    fresh order each time."""

    cursor: tuple[int, int] | None = None
    order: Order = "rank"
    is_reversed: bool = False
    is_open: bool = False
    filter: Filter[Pair] = field(default_factory=lambda: Filter("", ()))
    top: int = 0
    left: int = 0
    rows: tuple[int, ...] = ()
    """Prefill ranks as they were drawn; frozen while the cursor is in the matrix."""
    columns: tuple[int, ...] = ()
    """Decode ranks as they were drawn."""
    height: int = 1
    width: int = 1
    """Rows and columns of the window."""

    def set_filter(self, text: str) -> None:
        """Raises FilterError."""
        self.filter = compile_filter(text, PAIR_FIELDS)
        self.rows = self.columns = ()

    def move(self, rows: int, columns: int) -> None:
        """The cursor, to the edges at most; the first step enters the matrix."""
        if not self.rows or not self.columns:
            return
        if self.cursor is None:
            self.cursor = (self.rows[min(self.top, len(self.rows) - 1)], self.columns[self.left])
            return
        y, x = self.position()
        y = max(0, min(len(self.rows) - 1, y + rows))
        x = max(0, min(len(self.columns) - 1, x + columns))
        self.cursor = (self.rows[y], self.columns[x])

    def position(self) -> tuple[int, int]:
        """Row and column of the cursor; of a rank that is gone the first."""
        assert self.cursor is not None, "asked for while the cursor is in the matrix"
        prefill, decode = self.cursor
        return (
            self.rows.index(prefill) if prefill in self.rows else 0,
            self.columns.index(decode) if decode in self.columns else 0,
        )

    def leave(self) -> bool:
        """The cursor leaves the matrix; False: it was not in it."""
        was_in, self.cursor = self.cursor is not None, None
        self.is_open = False
        return was_in

    def sort(self, *, reverse: bool) -> None:
        """By the next figure of the rows, or the other way round; also while the cursor is in the matrix."""
        if reverse:
            self.is_reversed = not self.is_reversed
        else:
            self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            self.is_reversed = False
        self.rows = ()

    def point(self, x: int, y: int) -> bool:
        """To the pair at this place of the lines; False: there is none."""
        row, column = self.top + y - 2, self.left + (x - LEFT) // CELL
        if y < 2 or y - 2 >= self.height or x < LEFT or (x - LEFT) // CELL >= self.width:
            return False
        if row >= len(self.rows) or column >= len(self.columns):
            return False
        self.cursor = (self.rows[row], self.columns[column])
        return True


def arrange(view: ClusterView, ui: TransferState, matrix: Matrix) -> None:
    """Which ranks are shown in which order. While the cursor is in the matrix known rows stay and new ones follow."""
    rows, columns = list(matrix.prefill), list(matrix.decode)
    if ui.filter.text:
        found = [
            (y, x) for y in range(len(rows)) for x in range(len(columns)) if ui.filter.matches(matrix.pair(view, y, x))
        ]
        rows = [matrix.prefill[y] for y in sorted({y for y, _ in found})]
        columns = [matrix.decode[x] for x in sorted({x for _, x in found})]
    figures = {"sum": matrix.rate, "p99": matrix.p99_us, "failed": matrix.failed}
    if ui.order != "rank":
        values = figures[ui.order]
        fold = worst if ui.order == "p99" else total
        folded = {rank: fold(values[y]) for y, rank in enumerate(matrix.prefill)}
        # The largest first; what is not known last.
        rows.sort(key=lambda rank: -folded[rank] if math.isfinite(folded[rank]) else math.inf)
    if ui.is_reversed:
        rows.reverse()
    if ui.cursor is not None and ui.rows:
        rows = [rank for rank in ui.rows if rank in rows] + [rank for rank in rows if rank not in ui.rows]
    ui.rows, ui.columns = tuple(rows), tuple(columns)
    if ui.cursor is not None:
        if not rows or not columns:
            ui.cursor, ui.is_open = None, False
        else:
            y, x = ui.position()
            ui.cursor = (ui.rows[y], ui.columns[x])


def keep_in_sight(ui: TransferState) -> None:
    if ui.cursor is not None:
        y, x = ui.position()
        ui.top = max(y - ui.height + 1, min(ui.top, y))
        ui.left = max(x - ui.width + 1, min(ui.left, x))
    ui.top = max(0, min(ui.top, len(ui.rows) - ui.height))
    ui.left = max(0, min(ui.left, len(ui.columns) - ui.width))
