"""Reports of groups as a head could send them."""

from __future__ import annotations

from tests.faces.test_status import make_rank
from transport.messages import (
    PROTOCOL_VERSION,
    PartReport,
    PastRebalance,
    PlanFigures,
    RankStatus,
    SkewFigures,
    StatusReport,
    TrafficReport,
)

EVEN = SkewFigures(max_over_mean=1.25, imbalance=0.5, lost_us_per_step=150.0, layer=1, rank=3)
SKEWED = SkewFigures(max_over_mean=2.0, imbalance=1.5, lost_us_per_step=610.0, layer=4, rank=2)


def make_plan(plan: int = 18, **changes: object) -> PlanFigures:
    fields: dict = {
        "plan": plan, "age_ms": 240, "pays": True, "reason": "moving 3 slots saves 460.0 us per step",
        "before": SKEWED, "after": EVEN, "moved_slots": 3, "moved_bytes": 3 << 20, "far_slots": 0,
        "saved_us_per_step": 460.0, "gain_us": 4.6e6, "cost_us": 9200.0, "stages": 2, **changes,
    }  # fmt: skip
    return PlanFigures(**fields)


NO_PLAN = PlanFigures(0, 0, False, "", SKEWED, SKEWED, 0, 0, 0, 0.0, 0.0, 0.0, 0)


def make_past(plan: int, result: str, **changes: object) -> PastRebalance:
    fields: dict = {
        "plan": plan, "ended_ago_ms": 0 if result == "running" else 4000, "result": result, "reason": "", "by": "auto",
        "before": 2.0, "predicted": 1.25, "after": 0.0, "realised": -1.0, "moved_slots": 3, "moved_bytes": 3 << 20,
        "took_ms": 740, **changes,
    }  # fmt: skip
    return PastRebalance(**fields)


def make_part(**changes: object) -> PartReport:
    fields: dict = {
        "pool": "decode", "group": 0, "part": "main", "ranks": (1, 2, 3, 4), "layers": 6, "experts": 32, "slots": 256,
        "empty_slots": 64, "slot_bytes": 1 << 20, "mode": "manual", "state": "idle", "membership": 2, "epoch": 7,
        "steps": 3210, "skew": SKEWED, "plan": NO_PLAN, "copied_slots": 0, "total_slots": 0, "progress_age_ms": 0,
        "lost_us_total": 2.5e6, "history": (), **changes,
    }  # fmt: skip
    return PartReport(**fields)


def make_status(**changes: object) -> StatusReport:
    ranks: tuple[RankStatus, ...] = (
        make_rank(0, "prefill", "ready"),
        *(make_rank(n, "decode", "ready") for n in (1, 2, 3, 4)),
    )
    fields: dict = {
        "version": PROTOCOL_VERSION, "cluster": "prod-a", "model": "nano", "head_pid": 4240, "uptime_ms": 61_000,
        "ready": True, "reasons": (), "waiting": 7, "running": 512, "finished": 20_000, "failed": 3, "ranks": ranks,
        **changes,
    }  # fmt: skip
    return StatusReport(**fields)


def make_traffic(**changes: object) -> TrafficReport:
    fields: dict = {
        "at_ms": 60_000, "accepted": 1000, "refused": 7, "finished": 900, "failed": 20, "cancelled": 30,
        "prompt_tokens": 500_000, "cached_tokens": 100_000, "generated_tokens": 80_000, "waiting": 40,
        "waiting_tokens": 12_000, "running": 10, "ttft": (), "itl": (), "handoff": (), **changes,
    }  # fmt: skip
    return TrafficReport(**fields)
