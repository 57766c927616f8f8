"""Screen 4, Transfer: what each prefill rank pushes to each decode rank."""

from __future__ import annotations

from collections.abc import Sequence

from console.draw_transfer import build, describe_pair
from console.filters import FilterError
from console.keys import Key
from console.lines import Line
from console.pairmatrix import Matrix, make_matrix
from console.screens.base import LiveScreen
from console.transfer_state import TransferState
from transport.messages import AskLinks, Message


class TransferScreen(LiveScreen):
    """Pushes as a matrix of pairs."""

    NAME = "transfer"
    NUMBER = 4
    TITLE_TEXT = "Transfer"
    FEATURES = frozenset({"move", "filter", "sort", "detail", "copy"})
    KEYS = (
        Key(("n",), "next", "next low", "To the next pair that is worth a look: low, failed or slow"),
        Key(("left", "h"), "across(-1)", "", "The decode rank at the left", face="← h"),
        Key(("right", "l"), "across(1)", "", "The decode rank at the right", face="→ l"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.ui = TransferState()

    def questions(self) -> Sequence[Message]:
        return (AskLinks(),)

    def build(self, width: int, height: int, now: float) -> list[Line]:
        return build(self.view, self.ui, width, height, now)

    def move(self, rows: int) -> None:
        self.ui.move(rows, 0)

    def jump(self, end: int) -> None:
        """The corners: the first pair, the last one."""
        ui = self.ui
        if ui.rows and ui.columns:
            at = 0 if end < 0 else -1
            ui.cursor = (ui.rows[at], ui.columns[at])

    def set_filter(self, text: str) -> str:
        try:
            self.ui.set_filter(text)
        except FilterError as error:
            return str(error)
        return ""

    def get_filter(self) -> str:
        return self.ui.filter.text

    def sort(self, *, reverse: bool) -> None:
        self.ui.sort(reverse=reverse)

    def open_detail(self) -> None:
        if self.ui.cursor is None:
            self.ui.move(0, 0)
        self.ui.is_open = self.ui.cursor is not None

    def close(self) -> bool:
        if self.ui.is_open:
            self.ui.is_open = False
            return True
        return self.ui.leave()

    def cell(self) -> str:
        """The pair in words: a figure alone says nothing about whose it is."""
        matrix, cursor = make_matrix(self.view), self.ui.cursor
        if cursor is None or cursor[0] not in matrix.prefill or cursor[1] not in matrix.decode:
            return ""
        return describe_pair(self.view, matrix, matrix.prefill.index(cursor[0]), matrix.decode.index(cursor[1]))

    def row(self) -> object:
        cursor = self.ui.cursor
        return None if cursor is None else self._records(make_matrix(self.view), cursor)

    def export(self) -> object:
        return self._records(make_matrix(self.view), None)

    def _records(self, matrix: Matrix, only: tuple[int, int] | None) -> object:
        """All pairs that pushed, or one of them."""
        found = []
        for y, prefill in enumerate(matrix.prefill):
            for x, decode in enumerate(matrix.decode):
                if matrix.index[y, x] < 0 or only not in (None, (prefill, decode)):
                    continue
                record = {
                    "prefill": prefill,
                    "decode": decode,
                    "bytes_per_s": float(matrix.rate[y, x]),
                    "bytes": int(matrix.bytes[y, x]),
                    "pushes": int(matrix.pushes[y, x]),
                    "inflight": int(matrix.inflight[y, x]),
                    "failed": int(matrix.failed[y, x]),
                    "p99_us": int(matrix.p99_us[y, x]),
                    "is_low": bool(matrix.is_low[y, x]),
                }
                if only is not None:
                    return record
                found.append(record)
        return found if only is None else None

    def click(self, x: int, y: int) -> None:
        self.ui.point(x, y)

    def action_page(self, pages: int) -> None:
        self.ui.move(pages * max(1, self.ui.height - 1), 0)
        self.paint()

    def action_next(self) -> None:
        """Through the pairs that the screen lists, as far as the filter lets them be seen."""
        ui, matrix = self.ui, make_matrix(self.view)
        cells = [(matrix.prefill[y], matrix.decode[x]) for y, x in matrix.notable()]
        cells = [cell for cell in cells if cell[0] in ui.rows and cell[1] in ui.columns]
        if not cells:
            self.say("no pair is low, slow or has failed")
            return
        at = cells.index(ui.cursor) + 1 if ui.cursor in cells else 0
        ui.cursor = cells[at % len(cells)]
        self.paint()

    def action_across(self, columns: int) -> None:
        self.ui.move(0, columns)
        self.paint()
