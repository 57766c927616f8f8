"""Experts of groups and plans for them as sentences, tables and JSON. Decides nothing but which plans are risky."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from engine.faces.ranks import describe_ranks
from engine.faces.status import describe_age, describe_bytes, open_console
from transport.messages import ExpertsReport, PartReport, PastRebalance, StatusReport

RUNNING_STATES = ("moving", "paused", "withdrawing")
NO_GROUPS = "every rank has all experts: pools.*.group is 1"


@dataclasses.dataclass(frozen=True, slots=True)
class Aim:
    """One part of one group, as options name it."""

    pool: str
    group: int
    part: str

    def __str__(self) -> str:
        return f"{self.pool} group {self.group}, part {self.part}"

    def find(self, report: ExpertsReport) -> PartReport | None:
        found = (part for part in report.parts if (part.pool, part.group, part.part) == dataclasses.astuple(self))
        return next(found, None)


def newest_first(part: PartReport) -> list[PastRebalance]:
    """Its history; what runs comes before all that has ended."""
    return sorted(part.history, key=lambda past: (past.result != "running", past.ended_ago_ms, -past.plan))


def aim_of(part: PartReport) -> Aim:
    return Aim(part.pool, part.group, part.part)


def describe_us(microseconds: float) -> str:
    """`61 us`, `1.20 ms`, `3.4 s`."""
    if microseconds < 1e3:
        return f"{microseconds:.3g} us"
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"


def step_seconds(part: PartReport, status: StatusReport) -> float:
    """The median step of the group's slowest rank; 0 if none has told one."""
    medians = [
        rank.snapshot.step_us_p50 for rank in status.ranks if rank.rank in part.ranks and rank.snapshot is not None
    ]
    return max(medians, default=0) / 1e6


def is_worth_applying(part: PartReport) -> bool:
    """Whether its last plan moves anything: a plan to stay is refused by the head."""
    return part.plan.stages > 0 and (part.plan.pays or part.plan.is_rollback)


def describe_plan(part: PartReport, step_s: float = 0.0) -> list[str]:
    """The bill of the last plan, in lines for people.

    Args:
        step_s: what a step of the group takes, to say when the plan has paid; 0 says it in steps only.
    """
    plan = part.plan
    if not plan.plan:
        return [f"no plan for {aim_of(part)} yet"]
    kind = "a way back" if plan.is_rollback else "a plan"
    title = f"plan {plan.plan}: {kind} for {aim_of(part)}, {describe_age(plan.age_ms / 1e3)} old"
    if not is_worth_applying(part):
        skew = f"skew   now {plan.before.max_over_mean:.2f}, costs {describe_us(plan.before.lost_us_per_step)} per step"
        return [title, f"stay: {plan.reason}", skew]
    skew = f"skew   now {plan.before.max_over_mean:.2f} -> predicted {plan.after.max_over_mean:.2f}"
    moves = f"moves  {plan.moved_slots:,} of {part.slots:,} slots   {describe_bytes(plan.moved_bytes)}"
    return [
        title,
        f"{skew}   {_describe_saving(plan.saved_us_per_step, plan.cost_us, step_s)}",
        f"{moves} ({plan.far_slots} slots between hosts)   {plan.stages} {'stage' if plan.stages == 1 else 'stages'}",
        f"why    {plan.reason}",
    ]


def _describe_saving(saved_us: float, cost_us: float, step_s: float) -> str:
    if saved_us <= 0:
        return f"costs {describe_us(-saved_us)} per step more"
    steps = cost_us / saved_us
    after = f"{steps:,.0f} steps" if steps >= 1 else "a step"
    clock = f" ({describe_age(steps * step_s)})" if step_s and steps >= 1 else ""
    return f"saves {describe_us(saved_us)} per step   pays back after {after}{clock}"


def list_risks(part: PartReport, status: StatusReport) -> list[str]:
    """Why the last plan wants more than a `y`: one clause each, none if it is an everyday plan."""
    risks = [f"{part.plan.far_slots} slots move between hosts"] if part.plan.far_slots else []
    risks += [f"the cluster is degraded: {sentence}" for sentence in status.degraded]
    risks += [f"the cluster is not ready: {sentence}" for sentence in status.reasons] if not status.ready else []
    lost = [rank.rank for rank in status.ranks if rank.rank in part.ranks and rank.state != "ready"]
    return risks + ([f"rank {describe_ranks(lost)} of the group is not ready"] if lost else [])


def describe_parts(report: ExpertsReport) -> list[str]:
    """Every part's state, a paragraph each."""
    if not report.parts:
        return [NO_GROUPS]
    return [line for part in report.parts for line in _describe_part(part)]


def _describe_part(part: PartReport) -> Iterator[str]:
    yield f"{aim_of(part)}: {part.state}, mode {part.mode}"
    yield (
        f"  ranks {describe_ranks(part.ranks)}   membership {part.membership}   epoch {part.epoch}"
        f"   {part.layers} layers x {part.experts} experts in {part.slots:,} slots ({part.empty_slots:,} empty)"
    )
    skew = part.skew
    if part.steps:
        yield (
            f"  skew {skew.max_over_mean:.2f} over {part.steps:,} steps: costs {describe_us(skew.lost_us_per_step)} per"
            f" step; worst is layer {skew.layer} on rank {skew.rank}"
        )
    else:
        yield "  skew not known: no steps yet"
    if part.state in RUNNING_STATES:
        yield f"  {describe_progress(part)}"
    if part.plan.plan:
        verdict = "pays" if part.plan.pays else "way back" if part.plan.is_rollback else "stay"
        yield f"  last plan {part.plan.plan}, {describe_age(part.plan.age_ms / 1e3)} old: {verdict}: {part.plan.reason}"
    if part.history:
        yield f"  history: {describe_past(newest_first(part)[0])}"


def describe_progress(part: PartReport) -> str:
    """`moving 12 of 40 slots (30 %)`, and how long nothing has come if that is long."""
    share = 100 * part.copied_slots // part.total_slots if part.total_slots else 0
    text = f"{part.state} {part.copied_slots:,} of {part.total_slots:,} slots ({share} %)"
    if part.progress_age_ms >= 5000 and part.state != "paused":
        text += f", no progress for {describe_age(part.progress_age_ms / 1e3)}"
    return text


def describe_past(past: PastRebalance) -> str:
    """One line of the history as a sentence."""
    text = f"plan {past.plan} {past.result.replace('_', ' ')}"
    if past.result == "skipped":
        return f"{text}: {past.reason}"
    is_known = past.result == "applied" and past.realised != -1
    text += f"   skew {past.before:.2f} -> {f'{past.after:.2f}' if is_known else f'predicted {past.predicted:.2f}'}"
    if past.result != "running":
        text += f"   {past.moved_slots:,} slots, {describe_bytes(past.moved_bytes)} in {past.took_ms / 1e3:.2f} s"
    if is_known:
        text += f"   predicted {past.predicted:.2f}, {past.realised:.0%} of it came"
    return f"{text}: {past.reason}" if past.result == "failed" else text


_NUMBERS = ("before", "predicted", "after", "came", "slots", "bytes", "took")
HISTORY_COLUMNS = ("plan", "ended", "result", *_NUMBERS, "by", "why")


def print_history(part: PartReport) -> None:
    """Writes the history to stdout as a table, newest first; as wide as it needs to be when stdout is no terminal."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in HISTORY_COLUMNS:
        is_text = name in ("result", "by", "why")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in _history_rows(part):
        table.add_row(*map(Text, row))
    open_console().print(table)


def _history_rows(part: PartReport) -> list[tuple[str, ...]]:
    return [
        (
            str(past.plan),
            "now" if past.result == "running" else f"{describe_age(past.ended_ago_ms / 1e3)} ago",
            past.result.replace("_", " "),
            f"{past.before:.2f}",
            f"{past.predicted:.2f}",
            "-" if past.realised == -1 else f"{past.after:.2f}",
            "-" if past.realised == -1 else f"{past.realised:.0%}",
            f"{past.moved_slots:,}",
            describe_bytes(past.moved_bytes),
            f"{past.took_ms / 1e3:.2f}s",
            past.by,
            past.reason,
        )
        for past in newest_first(part)
    ]
