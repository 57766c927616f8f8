"""Screen 5, Requests: what runs and waits, the oldest first; cancels it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from console.confirm import Question
from console.draw_requests import RequestsState, build
from console.keys import Key
from console.lines import Line
from console.requesttable import request_name, why_overdue
from console.screens.table import TableScreen
from transport.messages import AskRequests, CancelRequests, Message, RequestRow

LIMIT = 4096
"""As many as the head tells at once."""


class RequestsScreen(TableScreen):
    """What runs and waits."""

    NAME = "requests"
    NUMBER = 5
    TITLE_TEXT = "Requests"
    FEATURES = frozenset({"move", "filter", "sort", "detail", "copy"})
    KEYS = (
        Key(("x",), "cancel", "cancel…", "Cancel the request under the cursor", changes=True),
        Key(("left",), "column(-1)", "", "The cell at the left, to copy it"),
        Key(("right",), "column(1)", "", "The cell at the right, to copy it"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.ui = RequestsState()

    def questions(self) -> Sequence[Message]:
        return (AskRequests(limit=LIMIT, older_ms=0),)

    def build(self, width: int, height: int, now: float) -> list[Line]:
        return build(self.view, self.ui, width, height, now)

    def can(self, action: str, parameters: tuple[object, ...]) -> bool:
        row = self.ui.table.current
        return action != "cancel" or (row is not None and not self.ui.table.is_gone(row.request))

    def open_detail(self) -> None:
        ui = self.ui
        if ui.table.current is None:
            ui.table.move(1)
        ui.is_open = ui.table.current is not None

    def close(self) -> bool:
        if self.ui.is_open:
            self.ui.is_open = False
            return True
        return self.ui.table.leave()

    def cell(self) -> str:
        return self.ui.table.cell_text(self.body_size[0])

    def row(self) -> object:
        row = self.ui.table.current
        return None if row is None else self._record(row)

    def export(self) -> object:
        table = self.ui.table
        return [self._record(row) for key in table.keys if (row := table.row(key)) is not None]

    def _record(self, row: RequestRow) -> dict[str, object]:
        """All that the head says of it, by the head's names, and what is late about it."""
        return {**msgspec.structs.asdict(row), "overdue": why_overdue(row, self.ui.limit_ms())}

    def click(self, x: int, y: int) -> None:
        self.ui.table.point(y - self.ui.table_y)

    def action_page(self, pages: int) -> None:
        self.ui.table.move_page(pages)
        self.paint()

    def action_column(self, columns: int) -> None:
        self.ui.table.move_column(columns)
        self.paint()

    def action_cancel(self) -> None:
        row = self.ui.table.current
        if row is not None:
            self.ask(cancel_question(row, self.desk.who()[1]))


def cancel_question(row: RequestRow, host: str) -> Question:
    """Ends a request as its client could. Never risky to others: its pages come back."""
    name = request_name(row.request)
    who = f" of {row.client}" if row.client else ""
    return Question(
        f"Cancel {name}{who}, {row.generated:,} of {row.max_tokens:,} tokens out?",
        lambda why: CancelRequests((row.request,), host, why),
        f"cancel {name}",
    )
