"""Screen 6, Balance: plans for experts, what they cost and save, and everything that can be done about them."""

from __future__ import annotations

from collections.abc import Sequence

from console.balance_acts import (
    ask_abort,
    ask_apply,
    ask_mode,
    ask_pause,
    ask_rollback,
    describe_plan_asked,
    make_message,
)
from console.balance_state import RUNNING, BalanceState, aim_of, newest_first
from console.confirm import Question
from console.draw_balance import build
from console.export import message_json
from console.keys import Key
from console.lines import Line
from console.screens.base import LiveScreen
from console.verdict import ask_worst
from transport.messages import Message, PartReport, Rebalance, RebalanceAnswer


class BalanceScreen(LiveScreen):
    """Plans for experts, and what became of them."""

    NAME = "balance"
    NUMBER = 6
    TITLE_TEXT = "Balance"
    FEATURES = frozenset({"move", "detail", "copy"})
    KEYS = (
        Key(("R",), "plan", "plan", "Make a plan; that changes nothing"),
        Key(("A",), "apply", "apply", "Carry the plan out", changes=True),
        Key(("U",), "rollback", "back", "Move experts back to where they were before the last move", changes=True),
        Key(("P",), "pause", "pause", "Pause the moves that run, or let them go on", changes=True),
        Key(("X",), "abort", "abort", "Give up the moves that run", changes=True),
        Key(("a",), "mode", "mode", "Who starts moves: off, manual, auto", changes=True),
        Key(("p",), "part", "part", "Main model or drafter"),
        Key((".", "tab"), "group(1)", "", "Next group"),
        Key((",",), "group(-1)", "", "Group before"),
        Key(("]", "right"), "layer(1)", "", "Next layer of the plan's moves"),
        Key(("[", "left"), "layer(-1)", "", "Layer before of the plan's moves"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.ui = BalanceState()

    # ------------------------------------------------------------------ what LiveScreen asks

    def questions(self) -> Sequence[Message]:
        question = self.ui.question(self.view)
        # Its own last: the newest answer is what the screen is about.
        return (*ask_worst(self.view, question), *([question] if question else []))

    def build(self, width: int, height: int, now: float) -> list[Line]:
        return build(self.view, self.ui, width, height, now)

    def can(self, action: str, parameters: tuple[object, ...]) -> bool:
        part = self.ui.find_part(self.view)
        if action in ("plan", "apply", "rollback", "mode") and part is None:
            return False
        if action == "plan":
            link = self.desk.view.link
            return link.is_admin and link.phase == "live"
        if action in ("pause", "abort"):
            return part is not None and part.state in RUNNING
        if action == "layer":
            return self.ui.detail == "moves"
        return True

    def arrive(self) -> None:
        self.ui.arrive()

    def move(self, rows: int) -> None:
        if part := self.ui.find_part(self.view):
            self.ui.move(part, rows)

    def jump(self, end: int) -> None:
        self.move(end * 100_000)

    def open_detail(self) -> None:
        self.ui.open()
        self.desk.hurry()

    def close(self) -> bool:
        return self.ui.close()

    def cell(self) -> str:
        part = self.ui.find_part(self.view)
        if part is None:
            return ""
        if not self.ui.row:
            return f"plan {part.plan.plan}: {part.plan.reason}" if part.plan.plan else ""
        past = newest_first(part)[self.ui.row - 1]
        return f"plan {past.plan} {past.result}: {past.reason}"

    def row(self) -> object:
        part = self.ui.find_part(self.view)
        if part is None:
            return None
        return message_json(newest_first(part)[self.ui.row - 1] if self.ui.row else part.plan)

    def export(self) -> object:
        part = self.ui.find_part(self.view)
        return message_json(part) if part else None

    def click(self, x: int, y: int) -> None:
        part = self.ui.find_part(self.view)
        row = self.ui.row_at(y)
        if part is not None and row is not None and row <= len(part.history):
            self.ui.row = row

    # ------------------------------------------------------------------ what is looked at

    def action_part(self) -> None:
        self.ui.turn_part(self.view)
        self._turned()

    def action_group(self, by: int) -> None:
        self.ui.turn_group(self.view, by)
        self._turned()

    def action_layer(self, by: int) -> None:
        if part := self.ui.find_part(self.view):
            self.ui.turn_layer(part, by)
        self._turned()

    def _turned(self) -> None:
        self.desk.hurry()
        self.paint()

    # ------------------------------------------------------------------ acts

    def action_plan(self) -> None:
        part = self.ui.find_part(self.view)
        if part is None:
            return
        if aim_of(part) in self.ui.asked:
            self.say("an answer is still due")
            return
        message = make_message(part, "plan", self.desk.who(), self.desk.why)
        self._send(part, message, describe_plan_asked(part))

    def action_apply(self) -> None:
        if part := self.ui.find_part(self.view):
            self._ask(part, ask_apply(self.view, part, self.desk.who(), self.desk.now()))

    def action_rollback(self) -> None:
        if part := self.ui.find_part(self.view):
            self._ask(part, ask_rollback(self.view, part, self.desk.who()))

    def action_pause(self) -> None:
        if part := self.ui.find_part(self.view):
            self._ask(part, ask_pause(part, self.desk.who()))

    def action_abort(self) -> None:
        if part := self.ui.find_part(self.view):
            self._ask(part, ask_abort(part, self.desk.who()))

    def action_mode(self) -> None:
        if part := self.ui.find_part(self.view):
            self._ask(part, ask_mode(self.view, part, self.ui.next_mode(part), self.desk.who()))

    def _ask(self, part: PartReport, question: Question | str) -> None:
        """Asks, or says why there is nothing to ask."""
        if isinstance(question, str):
            self.say(question, "warning")
            return

        def answered(question: Question, is_yes: bool) -> None:
            message = question.build(self.desk.why)
            if is_yes and isinstance(message, Rebalance):
                self._send(part, message, question.done)
            else:
                self.desk.answer(question, is_yes)

        self.footer.ask(question, self.desk.why, answered)
        self.paint()

    def _send(self, part: PartReport, message: Rebalance, done: str) -> None:
        """Sends it beside the screen, which goes on: a plan takes seconds."""
        self.ui.note_asked(aim_of(part), message.action, self.desk.now())
        self.say(f"asked for: {done} ...")
        self.run_worker(self._wait(part, message, done), name=f"balance {message.action}", exit_on_error=True)
        self.paint()

    async def _wait(self, part: PartReport, message: Rebalance, done: str) -> None:
        try:
            answer = await self.desk.act(message, done)
        finally:
            self.ui.asked.pop(aim_of(part), None)
        said: RebalanceAnswer | str
        if isinstance(answer, RebalanceAnswer):
            said = answer
        else:
            said = getattr(answer, "message", "no answer came, so it is not known whether it was done")
        self.ui.note_said(aim_of(part), message.action, said, part.plan.plan, self.desk.now())
        self.paint()
