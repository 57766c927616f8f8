"""A scripted head with experts to move: it plans, moves, pauses and goes back when a test says so."""

from __future__ import annotations

import msgspec

from tests.console import expertdata as made
from tests.console.stubhead import Scene
from transport.messages import ExpertsReport, Message, PastRebalance, Rebalance, RebalanceAnswer, Refused

SMALL = made.Rack(layers=8, experts=64, spare=8, hot_layer=4, hot_expert=23)
DRAFT = made.Rack(layers=1, experts=64, spare=8, hot_layer=0, hot_expert=5, hot_rank=3, seed=11)


class Mover:
    """One main part and one draft part of a decode group; `scene` is what the head says of them.

    Attributes:
        heard: every Rebalance, in order.
        refusal: acts are refused with it.
    """

    def __init__(self, rack: made.Rack = SMALL, *, has_plan: bool = False, **part: object) -> None:
        self.experts = {"main": made.Experts(rack), "draft": made.Experts(DRAFT)}
        main, draft = self.experts["main"], self.experts["draft"]
        plan = made.make_plan(main) if has_plan else made.NO_PLAN
        # The drafter costs little, so the main model is the worst.
        skew = msgspec.structs.replace(draft.skew(), lost_us_per_step=9.0)
        self.scene = Scene(
            status=made.make_status(rack),
            experts=ExpertsReport(
                (made.make_part(main, plan=plan, **part), made.make_part(draft, part="draft", skew=skew, history=()))
            ),
            heat=lambda ask, part: self.experts[ask.part].heat(part, ask.layer, has_plan=part.plan.plan > 0),
            act=self.act,
        )
        self.heard: list[Rebalance] = []
        self.refusal = ""
        self.plans = 17

    @property
    def part(self):
        return self.scene.part("decode", 0, "main")

    def set(self, **fields: object) -> None:
        self.scene.set_part("decode", 0, "main", **fields)

    def act(self, message: Message) -> Message:
        assert isinstance(message, Rebalance)
        self.heard.append(message)
        if self.refusal:
            return Refused(self.refusal)
        done = getattr(self, f"_{message.action}")(message)
        return RebalanceAnswer(done, self.part)

    def _plan(self, message: Rebalance) -> str:
        self.plans += 1
        self.set(plan=made.make_plan(self.experts["main"], self.plans, age_ms=0))
        return f"plan {self.plans}: it pays"

    def _apply(self, message: Rebalance) -> str:
        plan = self.part.plan
        self._run(plan.plan, plan.moved_slots, message)
        return f"plan {plan.plan} begins: {plan.moved_slots} slots in 2 stages"

    def _rollback(self, message: Rebalance) -> str:
        self.plans += 1
        self._run(self.plans, self.part.plan.moved_slots, message)
        return f"plan {self.plans} begins: the way back"

    def _run(self, plan: int, slots: int, message: Rebalance) -> None:
        by = f"{message.user}@{message.host}"
        running = PastRebalance(plan, 0, "running", message.reason, by, 1.83, 1.09, 0.0, -1.0, 0, 0, 0)
        self.set(
            state="moving", copied_slots=0, total_slots=slots, history=(*self.part.history, running),
            done_text=f"plan {plan} of {by} is being carried out",
        )  # fmt: skip

    def copy(self, slots: int) -> None:
        """The move gets on."""
        self.set(copied_slots=slots)

    def end(self, result: str = "applied") -> None:
        """The move ends; what came of it is measured too."""
        *before, running = self.part.history
        past = msgspec.structs.replace(
            running, result=result, ended_ago_ms=500, after=1.11, realised=0.97, moved_slots=self.part.total_slots,
            moved_bytes=1 << 30, took_ms=700,
        )  # fmt: skip
        self.set(state="idle", copied_slots=0, total_slots=0, done_text="", history=(*before, past), plan=made.NO_PLAN)

    def _pause(self, message: Rebalance) -> str:
        self.set(state="paused")
        return "paused"

    def _resume(self, message: Rebalance) -> str:
        self.set(state="moving")
        return "goes on"

    def _abort(self, message: Rebalance) -> str:
        self.set(state="withdrawing")
        return "given up"

    def _mode(self, message: Rebalance) -> str:
        was = self.part.mode
        self.set(mode=message.mode, next_check_ms=18_000 if message.mode == "auto" else 0)
        return f"mode {message.mode}, was {was}"
