"""A part of a group as PartReport, for operators; and what is not as it should be in a group, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import trio

from engine.actors.group import Group
from engine.core.epochs import StagePhase
from engine.core.ledger import max_over_mean
from engine.core.load import Skew
from engine.core.membership import RosterPhase
from engine.core.parts import MadePlan, PartBalance
from transport.messages import TEXT_LIMIT, PartReport, PlanFigures, SkewFigures

State = Literal["forming", "idle", "planning", "moving", "paused", "withdrawing", "incomplete"]


def report_part(group: Group, part: PartBalance, *, plan_age_s: float, check_at: float | None) -> PartReport:
    """All of it, as it is now.

    Args:
        plan_age_s: a plan older than this is not applied.
        check_at: when `auto` wakes up next; None if it does not.
    """
    now = trio.current_time()
    copied, total = part.count_copies()
    info, placement, window = part.info, part.placement, part.measured.window
    totals = part.ledger.totals
    return PartReport(
        pool=group.pool,
        group=group.number,
        part=info.name,
        ranks=group.ranks,
        layers=info.layers,
        experts=info.experts,
        slots=info.slots * len(group.ranks),
        empty_slots=sum(placement.count_empty()),
        slot_bytes=info.slot_bytes,
        mode=part.mode,
        state=_state(group, part),
        membership=group.roster.number,
        epoch=part.epoch,
        steps=window.total_steps,
        skew=_figures(group, part.skew()),
        plan=_plan(group, part.last, now),
        copied_slots=copied,
        total_slots=total,
        progress_age_ms=int(1e3 * max(0.0, now - part.progress_at)) if part.is_due else 0,
        lost_us_total=part.measured.lost_us_total,
        history=part.ledger.report(now),
        applied=totals.ended["applied"],
        skipped=totals.ended["skipped"],
        failed=totals.ended["failed"],
        rolled_back=totals.ended["rolled_back"],
        moved_slots_total=totals.moved_slots,
        moved_bytes_total=totals.moved_bytes,
        took_ms_total=totals.took_ms,
        took_counts=tuple(totals.took_counts),
        plan_age_limit_ms=int(1e3 * plan_age_s),
        next_check_ms=_next_check(group, part, check_at, now),
        done_text=_describe_doing(part)[:TEXT_LIMIT],
    )


def _next_check(group: Group, part: PartBalance, check_at: float | None, now: float) -> int:
    """Milliseconds, at least 1 where there is a next one: while `auto` looks, it looks now."""
    if check_at is None or part.mode != "auto" or group.is_stopping:
        return 0
    return max(1, int(1e3 * (check_at - now)))


def _describe_doing(part: PartBalance) -> str:
    if part.migration is not None:
        return part.describe_run()
    return f"a plan for {part.planning_for} is being made" if part.planning_for else ""


def _state(group: Group, part: PartBalance) -> State:
    roster, migration = group.roster, part.migration
    if roster.phase is RosterPhase.FORMING:
        return "forming"
    if roster.missing:
        return "incomplete"
    if roster.phase is not RosterPhase.JOINED:
        return "forming"
    if migration is not None:
        if migration.phase in (StagePhase.WITHDRAWING, StagePhase.DRAINING):
            return "withdrawing"
        return "paused" if migration.paused else "moving"
    return "planning" if part.planning_for else "idle"


def _figures(group: Group, skew: Skew) -> SkewFigures:
    return SkewFigures(max_over_mean(skew), skew.imbalance, skew.lost_us_per_step, skew.layer, group.ranks[skew.rank])


def _plan(group: Group, made: MadePlan | None, now: float) -> PlanFigures:
    if made is None:
        even = SkewFigures(1.0, 0.0, 0.0, 0, group.ranks[0])
        return PlanFigures(0, 0, False, "", even, even, 0, 0, 0, 0.0, 0.0, 0.0, 0)
    plan, bill = made.moves.plan, made.moves.plan.bill
    return PlanFigures(
        plan=made.number,
        age_ms=int(1e3 * max(0.0, now - made.made_at)),
        pays=plan.pays,
        reason=plan.reason[:4096],
        before=_figures(group, bill.before),
        after=_figures(group, bill.after),
        moved_slots=bill.moved_slots,
        moved_bytes=bill.moved_bytes,
        far_slots=bill.far_slots,
        saved_us_per_step=bill.saved_us_per_step,
        gain_us=bill.gain_us,
        cost_us=bill.cost_us,
        stages=len(made.moves.stages),
        is_rollback=made.is_rollback,
    )


# ---------------------------------------------------------------- troubles


def list_troubles(group: Group, balance_s: float) -> Iterator[str]:
    """One sentence for each, as for StatusReport.degraded. `balance_s`: what gets nowhere for so long is one."""
    roster, now = group.roster, trio.current_time()
    if group.is_stopping or roster.phase is RosterPhase.FORMING:
        return
    missing = ", ".join(str(rank) for rank in roster.missing)
    if roster.lack:
        yield f"{group.name} stands still until rank {missing} is back: {roster.lack}"
    elif missing:
        yield f"{group.name} goes on without rank {missing}"
    if roster.phase is not RosterPhase.JOINED and not roster.lack and now - group.named_at > balance_s:
        yield f"membership {roster.number} of {group.name} is {roster.phase.value} for {now - group.named_at:.0f} s"
    for part in group.parts:
        if part.trouble:
            yield f"no plan for part {part.info.name} of {group.name}: {part.trouble}"
        if is_stuck(part, balance_s):
            stuck_s = now - part.progress_at
            yield f"part {part.info.name} of {group.name}: {part.describe_run()}, no progress for {stuck_s:.0f} s"


def is_stuck(part: PartBalance, balance_s: float) -> bool:
    """Something ought to get on, and has not for so long."""
    return part.is_due and trio.current_time() - part.progress_at > balance_s
