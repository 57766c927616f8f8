"""Screen 2, Ranks: every rank as a row, and all of one below; drains them."""

from __future__ import annotations

from collections.abc import Sequence

from console import words
from console.confirm import Question
from console.draw_ranks import PAGES, RanksState, build, describe, is_wide
from console.keys import Key
from console.lines import Line
from console.ranktable import RankRow
from console.screens.table import TableScreen
from console.verdict import worst_part
from console.view import NOT_UP, ClusterView
from transport.messages import AskHeat, AskLinks, AskRequests, Message, PartReport, SetDrain

REQUESTS = 4096
"""How many requests are looked through for those of one rank."""


class RanksScreen(TableScreen):
    """Every rank as a row."""

    NAME = "ranks"
    NUMBER = 2
    TITLE_TEXT = "Ranks"
    FEATURES = frozenset({"move", "filter", "sort", "detail", "copy"})
    KEYS = (
        Key(("x",), "drain", "drain…", "Drain the rank under the cursor, or let it take requests again", changes=True),
        Key(("left",), "column(-1)", "", "The cell at the left, to copy it; with a detail its page before"),
        Key(("right",), "column(1)", "", "The cell at the right, to copy it; with a detail its next page"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.ui = RanksState()
        self._turn = 0

    def questions(self) -> Sequence[Message]:
        """Pairs, the loads of the part that loses most, and of one other part in turn; a detail asks for requests."""
        questions: list[Message] = [AskLinks(), *map(_ask_heat, self._parts())]
        if self.ui.is_open:
            questions.append(AskRequests(limit=REQUESTS, older_ms=0))
        return questions

    def _parts(self) -> list[PartReport]:
        view = self.desk.view
        parts = [part for part in (view.experts.parts if view.experts else ()) if part.part == "main"]
        if not parts:
            return []
        first = worst_part(view)
        if first is None or first.part != "main":
            first = parts[0]
        others = [part for part in parts if part is not first]
        if not others:
            return [first]
        self._turn += 1
        return [first, others[self._turn % len(others)]]

    def build(self, width: int, height: int, now: float) -> list[Line]:
        return build(self.view, self.ui, width, height, now)

    def can(self, action: str, parameters: tuple[object, ...]) -> bool:
        row = self.ui.table.current
        return action != "drain" or (row is not None and not self.ui.table.is_gone(row.status.rank))

    def open_detail(self) -> None:
        """Opens it; where there is no room for all pages, goes on to the next one."""
        ui = self.ui
        if ui.table.current is None:
            ui.table.move(1)
        elif ui.is_open:
            ui.page = (ui.page + 1) % len(PAGES)
        if ui.table.current is not None and not ui.is_open:
            ui.is_open = True
            self.desk.hurry()

    def close(self) -> bool:
        if self.ui.is_open:
            self.ui.is_open = False
            return True
        return self.ui.table.leave()

    def cell(self) -> str:
        return self.ui.table.cell_text(self.body_size[0])

    def row(self) -> object:
        row = self.ui.table.current
        return None if row is None else {**self.ui.table.record(row), "pool": row.status.role}

    def export(self) -> object:
        table = self.ui.table
        rows = [row for key in table.keys if (row := table.row(key)) is not None]
        return [{**table.record(row), "pool": row.status.role, "words": dict(describe(row))} for row in rows]

    def click(self, x: int, y: int) -> None:
        self.ui.table.point(y - self.ui.table_y)

    def action_page(self, pages: int) -> None:
        self.ui.table.move_page(pages)
        self.paint()

    def action_column(self, columns: int) -> None:
        """Left and right: through the pages of a detail where one of them is seen, else through the cells of a row."""
        if self.ui.is_open and not is_wide(*self.body_size):
            self.ui.page = (self.ui.page + columns) % len(PAGES)
        else:
            self.ui.table.move_column(columns)
        self.paint()

    def action_drain(self) -> None:
        row = self.ui.table.current
        if row is not None:
            self.ask(drain_question(self.desk.view, row, self.desk.who()[1]))


def drain_question(view: ClusterView, row: RankRow, host: str) -> Question:
    """Drains a rank that takes requests, and undrains one that does not. Risky: what is left of its pool is little."""
    rank, role = row.status.rank, row.status.role
    if row.state in ("draining", "drained") or row.status.phase == "drained":
        return Question(
            f"Let {row.name} take requests again?",
            lambda why: SetDrain((rank,), False, host, why),
            f"undrain {row.name}",
        )
    pool = view.ranks(role)
    left = [other for other in pool if other.rank != rank and other.state == "ready"]
    risks = [
        f"{view.name(other.rank)} is {other.state}" for other in pool if other.rank != rank and other.state in NOT_UP
    ]
    if 2 * len(left) < len(pool):
        risks.insert(0, f"{words.plural(len(left), f'{role} rank')} of {len(pool)} would take requests")
    snapshot = row.status.snapshot
    held = snapshot.running + snapshot.waiting if snapshot is not None else 0
    return Question(
        f"Drain {row.name}, which has {words.plural(held, 'request')} to finish?" if held else f"Drain {row.name}?",
        lambda why: SetDrain((rank,), True, host, why),
        f"drain {row.name}",
        tuple(risks),
        role if risks else "",
    )


def _ask_heat(part: PartReport) -> AskHeat:
    return AskHeat(part.pool, part.group, part.part, part.skew.layer)
