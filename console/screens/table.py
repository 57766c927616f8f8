"""TableScreen: a screen whose body is one table; what its keys for moving, filtering and sorting do."""

from __future__ import annotations

from typing import Any

from console.filters import FilterError
from console.screens.base import LiveScreen
from console.tablemodel import TableModel


class TableScreen(LiveScreen):
    """See the module. A subclass keeps its table in `ui.table`."""

    @property
    def table(self) -> TableModel[Any]:
        """The table that the keys are for."""
        table: TableModel[Any] = self.ui.table  # type: ignore[attr-defined]
        return table

    def move(self, rows: int) -> None:
        self.table.move(rows)

    def jump(self, end: int) -> None:
        (self.table.go_top if end < 0 else self.table.go_end)()

    def set_filter(self, text: str) -> str:
        try:
            self.table.set_filter(text)
        except FilterError as error:
            return str(error)
        return ""

    def get_filter(self) -> str:
        return self.table.filter.text

    def sort(self, *, reverse: bool) -> None:
        if reverse:
            self.table.reverse()
        else:
            self.table.sort_next(self.body_size[0])
