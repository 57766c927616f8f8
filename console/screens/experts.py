"""Screen 3, Experts: which rank is too full in which layer, and which expert makes it so."""

from __future__ import annotations

from collections.abc import Sequence

from console.balance_acts import describe_plan_asked, make_message
from console.draw_experts import build, describe_cursor
from console.experts_state import ExpertsState, find_heat
from console.keys import Key
from console.lines import Line
from console.screens.base import LiveScreen
from console.verdict import ask_worst
from transport.messages import Message


class ExpertsScreen(LiveScreen):
    """Loads of experts as a heat map."""

    NAME = "experts"
    NUMBER = 3
    TITLE_TEXT = "Experts"
    FEATURES = frozenset({"move", "detail", "copy"})
    KEYS = (
        Key(("w",), "worst", "worst", "To the worst layer, its fullest rank and the hottest expert there"),
        Key(("W",), "worst_part", "", "To the part of all groups that loses most"),
        Key(("o",), "order", "order", "By rank x layer, rank x slot, rank x expert"),
        Key(("m",), "metric", "metric", "Load/mean, rows a step, us above the mean, replicas, moved last"),
        Key(("b",), "after", "after", "As it is, or as the last plan makes it"),
        Key(("]",), "layer(1)", "layer", "Next layer", face="[ ]"),
        Key(("[",), "layer(-1)", "", "Layer before"),
        Key(("p",), "part", "part", "Main model or drafter"),
        Key((".", "tab"), "group(1)", "", "Next group"),
        Key((",",), "group(-1)", "", "Group before"),
        Key(("right",), "column(1)", "", "One column to the right: layer, slot or expert"),
        Key(("left",), "column(-1)", "", "One column to the left"),
        Key(("R",), "plan", "plan", "Make a plan for this part; that changes nothing"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.ui = ExpertsState()

    # ------------------------------------------------------------------ what LiveScreen asks

    def questions(self) -> Sequence[Message]:
        question = self.ui.question(self.view)
        # Its own last: the newest answer is what the screen is about.
        return (*ask_worst(self.view, question), *([question] if question else []))

    def build(self, width: int, height: int, now: float) -> list[Line]:
        self.ui.is_mono = self.desk.look == "mono"
        return build(self.view, self.ui, width, height, now)

    def can(self, action: str, parameters: tuple[object, ...]) -> bool:
        if action == "plan":
            link = self.desk.view.link
            return link.is_admin and link.phase == "live" and self.ui.find_part(self.view) is not None
        return True

    def arrive(self) -> None:
        self.ui.arrive()

    def move(self, rows: int) -> None:
        if part := self.ui.find_part(self.view):
            self.ui.move_row(part, rows)

    def jump(self, end: int) -> None:
        self.move(end * 100_000)

    def action_page(self, pages: int) -> None:
        self.move(pages * self.ui.shown_rows)
        self.paint()

    def open_detail(self) -> None:
        self.ui.go_in()

    def close(self) -> bool:
        return self.ui.go_out()

    def cell(self) -> str:
        return describe_cursor(self.view, self.ui)

    def row(self) -> object:
        part = self.ui.find_part(self.view)
        heat = find_heat(self.view, part) if part else None
        if part is None or heat is None:
            return None
        row = self.ui.find_row(part)
        return {
            "rank": part.ranks[row],
            "layer": heat.report.layer,
            "slots": heat.slots[row].tolist(),
            "load_of_mean_by_layer": [round(float(load), 4) for load in heat.rank_load[row]],
            "hottest_expert_by_layer": heat.hottest[row].tolist(),
        }

    def export(self) -> object:
        part = self.ui.find_part(self.view)
        heat = find_heat(self.view, part) if part else None
        if part is None or heat is None:
            return None
        return {
            "pool": part.pool,
            "group": part.group,
            "part": part.part,
            "ranks": list(part.ranks),
            "layer": heat.report.layer,
            "steps": heat.report.steps,
            "us_per_row": heat.report.us_per_row,
            "rows_per_step": heat.report.rows_per_step,
            "load_of_mean": [[round(float(load), 4) for load in row] for row in heat.rank_load],
            "hottest_expert": heat.hottest.tolist(),
            "slots": heat.slots.tolist(),
            "next_slots": heat.next_slots.tolist() if heat.report.has_plan else None,
            "expert_load_of_mean": [round(float(load), 4) for load in heat.load],
        }

    def click(self, x: int, y: int) -> None:
        if part := self.ui.find_part(self.view):
            self.ui.put_cursor(self.view, part, x, y)
            self.desk.hurry()

    # ------------------------------------------------------------------ keys

    def action_worst(self) -> None:
        self.ui.go_worst()
        self._turned()

    def action_worst_part(self) -> None:
        self.ui.go_worst_part()
        self._turned()

    def action_order(self) -> None:
        self.ui.turn_order()
        self.paint()

    def action_metric(self) -> None:
        self.ui.turn_metric()
        self.paint()

    def action_after(self) -> None:
        self.ui.is_after = not self.ui.is_after
        self.paint()

    def action_layer(self, by: int) -> None:
        if part := self.ui.find_part(self.view):
            self.ui.turn_layer(part, by)
        self._turned()

    def action_column(self, by: int) -> None:
        if part := self.ui.find_part(self.view):
            self.ui.move_column(self.view, part, by)
        self._turned()

    def action_part(self) -> None:
        self.ui.turn_part(self.view)
        self._turned()

    def action_group(self, by: int) -> None:
        self.ui.turn_group(self.view, by)
        self._turned()

    def action_plan(self) -> None:
        part = self.ui.find_part(self.view)
        if part is not None:
            done = describe_plan_asked(part)
            self.say(f"asked for: {done} ...")
            message = make_message(part, "plan", self.desk.who(), self.desk.why)
            self.run_worker(self.desk.act(message, done), name="plan", exit_on_error=True)

    def _turned(self) -> None:
        """Something else is looked at: its loads are asked for now, not at the next round."""
        self.desk.hurry()
        self.paint()
