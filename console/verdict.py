"""The worst thing about a cluster as one sentence, words before numbers, and the key that leads on from there. Pure.

The order of seriousness is fixed, and the first one that holds is said: no link; not ready or starting; draining; ranks
lost or silent; degraded; a limit missed; the queue nearly full; pushes failing; skew; nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

from console import words
from console.lines import clip_text
from console.risks import missed_limits
from console.view import ClusterView, Heat
from transport.messages import AskHeat, PartReport, StatusReport

Level = Literal["good", "info", "warning", "error"]
"""As `marks.LEVEL_MARKS` has them."""

WIDTH = 76
"""Cells of the longest sentence: a mark and a key stand beside it in 80."""
SKEW_NOTED = 1.10
"""Max / mean over the layers' sums from which skew is worth a word."""
COST_NOTED_US = 1.0
"""Microseconds a step below which no skew is worth a word."""
QUEUE_FULL = 0.9
"""Share of the requests that may wait."""
PUSH_WINDOW_S = 60
"""Failed pushes of so many seconds count as failing."""
HEAT_STEPS = 4096
"""A HeatReport that is so many steps older than what is said now names no expert any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence of at most `WIDTH` cells. `key`: what to press to see or do more, "" if there is nothing."""

    level: Level
    sentence: str
    key: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Worst:
    """Where a part of a group loses most: its worst layer, that layer's fullest rank, and the expert that weighs most
    there (-1: not known). `ratio`: the rank's load in the layer over the layer's mean."""

    part: PartReport
    rank: int
    layer: int
    expert: int
    ratio: float


def judge(view: ClusterView, now: float) -> Verdict:
    """The worst thing that is known at `now`, seconds of the view's clock."""
    found = _judge_link(view, now) or _judge_status(view) or _judge_service(view, now) or _judge_skew(view)
    return dataclasses.replace(found, sentence=clip_text(found.sentence, WIDTH))


def worst_part(view: ClusterView) -> PartReport | None:
    """The part with the skew that matters most: of those worth a word, else of all, the one that loses the largest
    share of its step, since steps of prompts are far longer than others. None without groups."""

    def weigh(part: PartReport) -> tuple[bool, float]:
        if not part.steps:
            return False, -1.0
        skew, step = part.skew, step_us(view, part)
        share = skew.lost_us_per_step / step if math.isfinite(step) else skew.max_over_mean - 1.0
        return is_noted(part), share

    return max(view.experts.parts if view.experts else (), key=weigh, default=None)


def ask_worst(view: ClusterView, beside: AskHeat | None) -> tuple[AskHeat, ...]:
    """What a screen has to ask so that the verdict can name an expert: the heat of the worst part, if it is not that
    part that the screen asks about anyway."""
    worst = worst_part(view)
    if worst is None or not worst.steps:
        return ()
    if beside is not None and (beside.pool, beside.group, beside.part) == (worst.pool, worst.group, worst.part):
        return ()
    return (AskHeat(worst.pool, worst.group, worst.part, worst.skew.layer),)


def step_us(view: ClusterView, part: PartReport) -> float:
    """The median step of the group's slowest rank; NaN if none has told one."""
    found = (view.rank(rank) for rank in part.ranks)
    medians = [rank.snapshot.step_us_p50 for rank in found if rank is not None and rank.snapshot is not None]
    return float(max(medians, default=0)) or math.nan


def is_noted(part: PartReport) -> bool:
    """Whether its skew is worth a word."""
    skew = part.skew
    return skew.max_over_mean >= SKEW_NOTED and not 0 < skew.lost_us_per_step < COST_NOTED_US


def find_worst(view: ClusterView, part: PartReport) -> Worst:
    """Where this part loses most, as the head says it, with what the last HeatReport of the part adds."""
    skew = part.skew
    heat = view.heats.get((part.pool, part.group, part.part))
    return Worst(part, skew.rank, skew.layer, _hottest(heat, part, skew.rank, skew.layer), 1.0 + skew.imbalance)


def name_part(part: PartReport) -> str:
    """`decode`, `decode/1`, `decode draft`: what is not said is group 0 and the main model."""
    group = f"/{part.group}" if part.group else ""
    return f"{part.pool}{group}" + (" draft" if part.part == "draft" else "")


def _hottest(heat: Heat | None, part: PartReport, rank: int, layer: int) -> int:
    if heat is None or rank not in part.ranks or heat.report.steps == 0:
        return -1
    if part.steps - heat.report.steps > HEAT_STEPS:
        return -1
    row = part.ranks.index(rank)
    inside = row < heat.hottest.shape[0] and layer < heat.hottest.shape[1]
    return int(heat.hottest[row, layer]) if inside else -1


# ---------------------------------------------------------------- in the order of seriousness


def _judge_link(view: ClusterView, now: float) -> Verdict | None:
    link = view.link
    why = f": {link.why}" if link.why else ""
    match view.phase(now):
        case "mismatch":
            return Verdict("error", f"the head speaks another version{why}")
        case "never":
            return Verdict("error", f"no engine reached{why}")
        case "lost":
            return Verdict("error", f"connection lost {words.age(now - link.since)} ago{why}")
        case "stale":
            return Verdict("warning", f"no answer for {words.age(now - view.asked_at)}; what is shown is old")
        case "connecting":
            return Verdict("info", f"connecting to {link.address}" if link.address else "connecting")
        case _:
            return None


def _judge_status(view: ClusterView) -> Verdict | None:
    status = view.status
    if status is None:
        return Verdict("info", "waiting for the first answer")
    if status.is_stopping:
        left = status.running + status.waiting
        return Verdict("warning", f"draining: {words.plural(left, 'request')} left, then the engine ends", "5")
    if not status.ready:
        return _judge_start(view, status)
    missing = view.missing()
    if missing:
        first = missing[0]
        name = view.name(first.rank)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if first.state in ("lost", "restarting"):
            why = f": {first.reason}" if first.reason else ""
            return Verdict("error", f"{name}{more} {first.state}{why}", "2")
        if first.state in ("starting", "joining"):
            return Verdict("warning", f"{name}{more} {first.state}: {first.phase}".rstrip(": "), "2")
        return Verdict("error", f"{name}{more} silent for {words.age(first.age_ms / 1e3)}", "2")
    if status.degraded:
        more = f" (+{len(status.degraded) - 1} more)" if len(status.degraded) > 1 else ""
        return Verdict("warning", f"degraded{more}: {status.degraded[0]}", "7")
    return None


def _judge_start(view: ClusterView, status: StatusReport) -> Verdict:
    """Not ready: since it has only begun, or for what the head says."""
    coming = [rank for rank in status.ranks if rank.state in ("starting", "joining")]
    gone = [rank for rank in status.ranks if rank.state in ("lost", "restarting")]
    if coming and not gone and all(rank.restarts == 0 for rank in coming):
        # The one that has most before it holds up all others.
        slowest = min(coming, key=lambda rank: rank.phase_done / rank.phase_total if rank.phase_total else 0.0)
        done = f" {100 * slowest.phase_done // slowest.phase_total} %" if slowest.phase_total else ""
        ready = len(status.ranks) - len(coming)
        last = f"{view.name(slowest.rank)} {slowest.phase or slowest.state}{done}"
        return Verdict("info", f"starting: {ready} of {len(status.ranks)} ranks ready, slowest {last}", "2")
    more = f" (+{len(status.reasons) - 1} more)" if len(status.reasons) > 1 else ""
    reason = status.reasons[0] if status.reasons else "the head says no reason"
    return Verdict("error", f"not ready{more}: {reason}", "2")


def _judge_service(view: ClusterView, now: float) -> Verdict | None:
    missed = missed_limits(view)
    if missed:
        return Verdict("error", f"SLO missed: {'; '.join(missed)}", "5")
    status = view.status
    if status is not None and status.waiting_limit and status.waiting >= QUEUE_FULL * status.waiting_limit:
        waiting = f"{status.waiting:,} of {status.waiting_limit:,} wait"
        return Verdict("warning", f"queue nearly full: {waiting}, more will be refused", "5")
    failed = _count_failed_pushes(view, now)
    if failed:
        return Verdict("warning", f"pushes failing: {failed:,} in the last minute", "4")
    return None


def _count_failed_pushes(view: ClusterView, now: float) -> int:
    """How many more failed in the last minute; a total that shrank is that of other lives and counts from there."""
    totals = [total for total in view.window("push_failed", now, PUSH_WINDOW_S) if math.isfinite(total)]
    return int(sum(max(0.0, new - old) for old, new in itertools.pairwise(totals)))


def _judge_skew(view: ClusterView) -> Verdict:
    part = worst_part(view)
    if part is None:
        return Verdict("good", "serving, nothing to do")
    if part.steps == 0:
        return Verdict("good", "serving, skew not known before the first steps")
    skew = part.skew
    if part.state in ("moving", "paused", "withdrawing"):
        share = 100 * part.copied_slots // part.total_slots if part.total_slots else 0
        word = f"{part.state} {part.copied_slots:,} of {part.total_slots:,} slots ({share} %)"
        return Verdict("info", f"{name_part(part)} skew {skew.max_over_mean:.2f}, {word}", "6")
    if not is_noted(part):
        return Verdict("good", f"serving, skew {skew.max_over_mean:.2f}, nothing to do")
    return Verdict("warning", describe_worst(view, find_worst(view, part)), "6")


def describe_worst(view: ClusterView, worst: Worst) -> str:
    """`decode skew 1.83 costs 610 us a step; worst: d17, layer 41, expert 203, 2.4x`. The cost is of all layers."""
    return f"{name_part(worst.part)} {describe_skew(worst.part)}; worst: {describe_place(view, worst)}"


def describe_skew(part: PartReport) -> str:
    """`skew 1.83 costs 610 us a step`."""
    cost = part.skew.lost_us_per_step
    price = f"costs {words.us(cost)} a step" if cost > 0 and math.isfinite(cost) else "(price not measured yet)"
    return f"skew {part.skew.max_over_mean:.2f} {price}"


def describe_place(view: ClusterView, worst: Worst) -> str:
    """`d17, layer 41, expert 203, 2.4x`: what is least needed comes last, where it may be cut off."""
    expert = f", expert {worst.expert}" if worst.expert >= 0 else ""
    return f"{view.name(worst.rank)}, layer {worst.layer}{expert}, {worst.ratio:.1f}x"
