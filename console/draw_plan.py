"""The plan of a part as a box of the Balance screen: what it saves and costs, how risky it is, how long it is good for.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from console import words
from console.balance_state import RUNNING, BalanceState, aim_of
from console.lines import Line, clip, clip_text, joined, line, pad, width_of, wrap
from console.risks import list_risks
from console.verdict import step_us
from console.view import ClusterView
from transport.messages import PartReport, PlanFigures


def name_aim(part: PartReport) -> str:
    """`decode/0 main`: as questions and events name it."""
    return f"{part.pool}/{part.group} {part.part}"


def since_answer(view: ClusterView, now: float) -> float:
    """Seconds since what is shown was said: ages go on between two answers."""
    return max(0.0, now - view.answered_at) if view.answered_at else 0.0


def plan_age_ms(view: ClusterView, plan: PlanFigures, now: float) -> float:
    return plan.age_ms + 1e3 * since_answer(view, now)


def is_too_old(view: ClusterView, part: PartReport, now: float) -> bool:
    """Whether the head would refuse its last plan for its age."""
    limit = part.plan_age_limit_ms
    return bool(part.plan.plan and limit) and plan_age_ms(view, part.plan, now) > limit


def fate(part: PartReport) -> str:
    """What became of its last plan: `applied`, `rolled_back` (it was the way back), or "" while it may still be
    carried out."""
    found = (past.result for past in part.history if past.plan == part.plan.plan)
    return next((result for result in found if result in ("applied", "rolled_back")), "")


def is_worth_applying(part: PartReport) -> bool:
    """Whether its last plan moves anything that pays, or is a way back."""
    return part.plan.stages > 0 and (part.plan.pays or part.plan.is_rollback)


def plan_box(view: ClusterView, ui: BalanceState, part: PartReport, width: int, now: float) -> list[Line]:
    plan = part.plan
    room = width - 4
    if not plan.plan:
        title, rows = "no plan", [line(("R makes one; that changes nothing.", "dim"))]
    else:
        kind = "way back" if plan.is_rollback else "plan"
        ended = fate(part).replace("_", " ")
        title = f"{kind} {plan.plan}, {ended or words.age(plan_age_ms(view, plan, now) / 1e3) + ' old'}"
        rows = list(_plan_rows(view, part, room, now))
    rows += _answers(ui, part, room, now)
    is_here = ui.row == 0
    return _box(title, rows, width, "chosen" if is_here else "head")


def _plan_rows(view: ClusterView, part: PartReport, room: int, now: float) -> Iterator[Line]:
    plan = part.plan
    before = f"now {plan.before.max_over_mean:.2f}"
    if not is_worth_applying(part):
        yield line(("skew   ", "label"), (f"{before}, costs {words.us(plan.before.lost_us_per_step)} a step", "value"))
        yield from _wrapped("stay", plan.reason, room, "good")
        return
    step = step_us(view, part)
    after = f"{before} → predicted {plan.after.max_over_mean:.2f}"
    yield clip(line(("skew   ", "label"), (after, "value"), (_saving(plan, step), "value")), room)
    yield clip(line(("pays   ", "label"), (_payback(plan, step), "value")), room)
    far = (f", {plan.far_slots:,} between hosts", "warn" if plan.far_slots else "value")
    moves = f"{plan.moved_slots:,} of {part.slots:,} slots, {words.size(plan.moved_bytes)}"
    stages = (f", {words.plural(plan.stages, 'stage')}", "value")
    yield clip(line(("moves  ", "label"), (moves, "value"), far, stages), room)
    if part.state not in RUNNING and not fate(part):
        yield from _risk_rows(view, part, room)
        yield from _age_rows(view, part, room, now)
    yield from _wrapped("why", plan.reason, room, "value", limit=1)


def _saving(plan: PlanFigures, step: float) -> str:
    saved = plan.saved_us_per_step
    of = f" of {words.us(step)}" if math.isfinite(step) else ""
    return f"   saves {words.us(saved)}{of} a step" if saved > 0 else f"   costs {words.us(-saved)} a step more"


def _payback(plan: PlanFigures, step: float) -> str:
    if plan.saved_us_per_step <= 0:
        return "not back: it saves nothing"
    steps = plan.cost_us / plan.saved_us_per_step
    if steps < 1:
        return f"back within a step; costs {words.us(plan.cost_us)} once"
    clock = f" ({words.us(steps * step)})" if math.isfinite(step) else ""
    return f"back after {steps:,.0f} steps{clock}; costs {words.us(plan.cost_us)} once"


def _risk_rows(view: ClusterView, part: PartReport, room: int) -> Iterator[Line]:
    risks = list_risks(view, part)
    if not risks:
        yield clip(
            line(("risk   ", "label"), ("low", "good"), (": ready, all members answer, no limit missed", "value")), room
        )
        return
    yield from _wrapped("risk", "; ".join(risks), room, "warn", limit=2)


def _age_rows(view: ClusterView, part: PartReport, room: int, now: float) -> Iterator[Line]:
    limit = part.plan_age_limit_ms
    if not limit:
        return
    if is_too_old(view, part, now):
        text = f"too old to be applied (good for {words.age(limit / 1e3)}): R makes it anew"
        yield clip(line(("age    ", "label"), (text, "warn")), room)
    else:
        left = words.age((limit - plan_age_ms(view, part.plan, now)) / 1e3)
        yield clip(line(("age    ", "label"), (f"good for {left} more", "value")), room)


def _answers(ui: BalanceState, part: PartReport, room: int, now: float) -> Iterator[Line]:
    """What was asked and is not answered, and what was refused and still stands."""
    aim = aim_of(part)
    if aim in ui.asked:
        action, since = ui.asked[aim]
        doing = "a plan is being made" if action == "plan" else f"{action} was asked"
        yield line(("asked  ", "label"), (f"{doing}, {words.age(now - since)} ago", "info"))
    elif part.state == "planning":
        yield line(("asked  ", "label"), ("a plan is being made", "info"))
    said = ui.said.get(aim)
    # A refusal is about the plan of its time: the next plan makes it old.
    if said is not None and said.is_refused and said.plan == part.plan.plan:
        yield from _wrapped("no", f"{said.action} refused: {said.text}", room, "bad", limit=2)


def _wrapped(label: str, text: str, room: int, style: str, *, limit: int = 3) -> Iterator[Line]:
    parts = wrap(text, room - 7) or [""]
    if len(parts) > limit:
        parts = [*parts[: limit - 1], clip_text(" ".join(parts[limit - 1 :]), room - 7)]
    for n, piece in enumerate(parts):
        yield line(((label if not n else "").ljust(7), "label"), (piece, style))


def _box(title: str, rows: Sequence[Line], width: int, style: str) -> list[Line]:
    inner = width - 4
    head = line((" ┌ ", "rule"), (title, style), (" ", ""))
    top = joined([*head, ("─" * (width - 1 - width_of(head)) + "┐", "rule")])
    body = [joined([(" │ ", "rule"), *pad(row, inner - 1), (" │", "rule")]) for row in rows]
    return [top, *body, ((" └" + "─" * (width - 3) + "┘", "rule"),)]
