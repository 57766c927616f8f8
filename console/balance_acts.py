"""What may be done to the experts of a part, as questions: what is asked, how risky it is, and the message. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from console import words
from console.balance_state import RUNNING, Mode
from console.confirm import Question
from console.draw_plan import fate, is_too_old, is_worth_applying, name_aim, plan_age_ms
from console.risks import list_risks
from console.view import ClusterView
from transport.messages import PartReport, Rebalance

Action = Literal["plan", "apply", "rollback", "pause", "resume", "abort", "mode"]
Who = tuple[str, str]
"""User and host, as messages carry them."""


def make_message(
    part: PartReport,
    action: Action,
    who: Who,
    why: str,
    *,
    plan: int = 0,
    mode: Literal["", "off", "manual", "auto"] = "",
) -> Rebalance:
    user, host = who
    return Rebalance(action, part.pool, part.group, part.part, plan, mode, user, host, why)


def describe_plan_asked(part: PartReport) -> str:
    """A plan needs no question: nothing is moved by it."""
    return f"plan for {name_aim(part)}"


def ask_apply(view: ClusterView, part: PartReport, who: Who, now: float) -> Question | str:
    """The last plan carried out; or why that is not asked at all."""
    plan = part.plan
    if not plan.plan:
        return "there is no plan yet: R makes one"
    if part.state in RUNNING:
        return f"{name_aim(part)} is {part.state} already"
    if fate(part):
        return f"plan {plan.plan} was carried out: R makes another"
    if plan.stages == 0:
        return f"plan {plan.plan} moves nothing: {plan.reason}"
    if not is_worth_applying(part):
        return f"plan {plan.plan} does not pay: {plan.reason}"
    if is_too_old(view, part, now):
        age, limit = words.age(plan_age_ms(view, plan, now) / 1e3), words.age(part.plan_age_limit_ms / 1e3)
        return f"plan {plan.plan} is {age} old, plans are good for {limit}: R makes it anew"
    moves = words.plural(plan.moved_slots, "slot")
    return _question(
        part,
        f"Apply plan {plan.plan} to {name_aim(part)} ({moves})?",
        f"apply plan {plan.plan} to {name_aim(part)}",
        lambda why: make_message(part, "apply", who, why, plan=plan.plan),
        list_risks(view, part),
    )


def ask_rollback(view: ClusterView, part: PartReport, who: Who) -> Question | str:
    """Back to the placement before the last move. The head plans the way, so what moves is not known yet."""
    if part.state in RUNNING:
        return f"{name_aim(part)} is {part.state}: X gives that up"
    return _question(
        part,
        f"Move {name_aim(part)} back to the placement before its last move?",
        f"roll back {name_aim(part)}",
        lambda why: make_message(part, "rollback", who, why),
        list_risks(view, part, is_plan_applied=False),
    )


def ask_pause(part: PartReport, who: Who) -> Question | str:
    """Pause what runs, or let go on what is paused."""
    if part.state == "paused":
        return _question(
            part,
            f"Let the moves of {name_aim(part)} go on?",
            f"resume {name_aim(part)}",
            lambda why: make_message(part, "resume", who, why),
        )
    if part.state != "moving":
        return f"nothing is being moved in {name_aim(part)}"
    return _question(
        part,
        f"Pause the moves of {name_aim(part)}?",
        f"pause {name_aim(part)}",
        lambda why: make_message(part, "pause", who, why),
    )


def ask_abort(part: PartReport, who: Who) -> Question | str:
    """Give up what runs; what is in force stays so."""
    if part.state not in ("moving", "paused"):
        return f"nothing is being moved in {name_aim(part)}"
    return _question(
        part,
        f"Give up the moves of {name_aim(part)}? What is in force stays so.",
        f"abort {name_aim(part)}",
        lambda why: make_message(part, "abort", who, why),
    )


_MODE_MEANS = {
    "off": "loads are counted, nothing is moved",
    "manual": "only operators move experts",
    "auto": "the head moves experts when that pays",
}


def ask_mode(view: ClusterView, part: PartReport, mode: Mode, who: Who) -> Question:
    """Who starts moves. Only `auto` can be risky: it may move at once."""
    return _question(
        part,
        f"Mode {mode} for {name_aim(part)} (now {part.mode}): {_MODE_MEANS[mode]}?",
        f"mode {mode} for {name_aim(part)}",
        lambda why: make_message(part, "mode", who, why, mode=mode),
        list_risks(view, part, is_plan_applied=False) if mode == "auto" else (),
    )


def _question(
    part: PartReport,
    text: str,
    done: str,
    build: Callable[[str], Rebalance],
    risks: list[str] | tuple[()] = (),
) -> Question:
    return Question(text=text, build=build, done=done, risks=tuple(risks), typed=part.pool)
