"""Columns of a table: what a cell is, which columns fit a width, and how wide they become. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from console.filters import Kind, Value
from console.lines import Run, fit_text, pad, text_width

Row = TypeVar("Row")

Cell = str | Run | tuple[Run, ...]
"""What a formatter gives: text, text with the name of a style, or several of these."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column. `get` is what is sorted, filtered and copied; `show` is what is seen, in `width` cells."""

    name: str
    """For filters and for programs; unique."""
    title: str
    width: int
    get: Callable[[Row], Value]
    show: Callable[[Row], Cell]
    align: Literal["<", ">"] = ">"
    priority: int = 0
    """Columns with the highest one are left out first where the terminal is narrow; 0: never left out."""
    kind: Kind = "number"
    grow: int = 0
    """Up to so many cells more where there is room."""
    is_descending: bool = True
    """Which way it is sorted at first."""
    can_sort: bool = True
    fits: Callable[[Row, int], Cell] | None = None
    """Like `show`, told the width that the column got; for columns that grow."""


@dataclass(frozen=True)
class Placed(Generic[Row]):
    """A column at its place in a line."""

    column: Column[Row]
    x: int
    width: int


def place(columns: Sequence[Column[Row]], width: int) -> list[Placed[Row]]:
    """The columns that are shown in `width` cells, two blanks between them; what is left over lets some grow."""
    shown = list(columns)
    while _needed(shown) > width and any(column.priority for column in shown):
        worst = max(column.priority for column in shown)
        # Of equals the one at the right goes first.
        shown.pop(max(n for n, column in enumerate(shown) if column.priority == worst))
    spare = max(0, width - _needed(shown))
    result, x = [], 1
    for column in shown:
        more = min(spare, column.grow)
        spare -= more
        result.append(Placed(column, x, column.width + more))
        x += column.width + more + 2
    return result


def _needed(columns: Sequence[Column[Row]]) -> int:
    return 1 + sum(column.width for column in columns) + 2 * max(0, len(columns) - 1)


def show(at: Placed[Row], row: Row) -> list[Run]:
    """What a cell shows, as runs."""
    return _runs(at.column.fits(row, at.width) if at.column.fits is not None else at.column.show(row))


def _runs(cell: Cell) -> list[Run]:
    if isinstance(cell, str):
        return [(cell, "")]
    if len(cell) == 2 and isinstance(cell[0], str):
        return [cell]  # type: ignore[list-item]
    return list(cell)  # type: ignore[arg-type]


def fit(runs: list[Run], width: int, align: str) -> list[Run]:
    """The same in exactly `width` cells."""
    if len(runs) == 1:
        text, style = runs[0]
        return [(fit_text(text, width, align), style)]
    gap = width - sum(text_width(text) for text, _ in runs)
    if gap < 0:
        return list(pad(tuple(runs), width))
    return [(" " * gap, ""), *runs] if align == ">" else [*runs, (" " * gap, "")]
