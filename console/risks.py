"""Why an act on experts wants more than a `y`: clauses for people, none for an everyday act. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from console import words
from console.history import percentile
from console.view import ClusterView, LatencyKind, is_silent
from transport.messages import PartReport

SLO_WINDOW_S = 60.0
"""A limit is held against the percentile of so many seconds."""
SLO_LEAST = 100
"""Fewer values say nothing of a percentile."""


def list_risks(view: ClusterView, part: PartReport, *, is_plan_applied: bool = True) -> list[str]:
    """Why a change to this part's experts is risky, the worst first.

    Args:
        is_plan_applied: the act carries out the last plan, so that what the plan moves counts as well.
    """
    status = view.status
    if status is None:
        return ["nothing is known of the cluster"]
    risks = [] if status.ready else [f"not ready: {reason}" for reason in status.reasons] or ["not ready"]
    if part.state == "incomplete":
        risks.append("the group is incomplete")
    risks += _list_absent(view, part)
    risks += [f"degraded: {sentence}" for sentence in status.degraded]
    risks += missed_limits(view)
    if is_plan_applied and part.plan.far_slots:
        risks.append(f"{words.plural(part.plan.far_slots, 'slot moves', 'slots move')} between hosts")
    return risks


def missed_limits(view: ClusterView) -> list[str]:
    """The limits under `[slo]` that the last minute missed: `inter-token p99 12.4 ms, limit 9.50 ms`."""
    return list(_find_missed(view))


def _find_missed(view: ClusterView) -> Iterator[str]:
    traffic = view.traffic
    if traffic is None:
        return
    told = " ".join(view.status.degraded) if view.status else ""
    figures: tuple[tuple[str, LatencyKind, str, float, int], ...] = (
        ("first token", "ttft", "slo.ttft_p90", 0.9, traffic.ttft_limit_us),
        ("inter-token", "itl", "slo.itl_p99", 0.99, traffic.itl_limit_us),
    )
    for what, kind, key, share, limit_us in figures:
        counts = view.counts(kind, SLO_WINDOW_S)
        # What the head says of it already is not said twice.
        if not limit_us or key in told or sum(counts) < SLO_LEAST:
            continue
        found = percentile(counts, share)
        if found > limit_us:
            yield f"{what} p{100 * share:.0f} {words.us(found)}, limit {words.us(limit_us)}"


def _list_absent(view: ClusterView, part: PartReport) -> Iterator[str]:
    """Members of the group that are not there, or that nothing is heard of."""
    for number in part.ranks:
        rank = view.rank(number)
        if rank is None:
            yield f"{part.pool[0]}{number:02d} is not known to the head"
        elif rank.state not in ("ready", "draining"):
            yield f"{view.name(number)} is {rank.state}"
        elif is_silent(rank):
            yield f"{view.name(number)} was silent for {words.age(rank.age_ms / 1e3)}"
