"""Seeded reports of a cluster with experts, for tests and pictures: loads, slots, plans, histories."""

from __future__ import annotations

import dataclasses

import numpy as np

from console.view import ClusterView, LinkState
from transport.messages import (
    LATENCY_BOUNDS_US,
    ExpertsReport,
    HeatReport,
    PartReport,
    PastRebalance,
    PlanFigures,
    RankSnapshot,
    RankStatus,
    SkewFigures,
    StatusReport,
    TrafficReport,
)

US_PER_ROW = 0.25
ROWS_PER_STEP = 180.0
NO_SKEW = SkewFigures(1.0, 0.0, 0.0, 0, 0)
NO_PLAN = PlanFigures(0, 0, False, "", NO_SKEW, NO_SKEW, 0, 0, 0, 0.0, 0.0, 0.0, 0)


@dataclasses.dataclass(frozen=True)
class Rack:
    """What is so of a made-up cluster: `prefill` ranks alone, `decode` ranks in one group; and where it is slow."""

    prefill: int = 8
    decode: int = 32
    layers: int = 61
    experts: int = 256
    spare: int = 32
    seed: int = 7
    hot_layer: int = 41
    hot_rank: int = 9
    """A place in the group."""
    hot_expert: int = 203

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.prefill, self.prefill + self.decode))


class Experts:
    """The experts of one part of a rack: loads of all layers, slots, and a plan's slots."""

    def __init__(self, rack: Rack, *, is_even: bool = False) -> None:
        self.rack = rack
        self._loads: dict[bytes, np.ndarray] = {}
        draw = np.random.default_rng(rack.seed)
        # Most layers are nearly even; every other one has an expert that many want, one of them more than all others.
        self.loads = draw.lognormal(0.0, 0.0 if is_even else 0.08, (rack.layers, rack.experts))
        if not is_even:
            warm = np.arange(rack.hot_layer % 2, rack.layers, 2)
            self.loads[warm, draw.integers(0, rack.experts, warm.size)] = draw.uniform(4.0, 9.0, warm.size)
            self.loads[rack.hot_layer, rack.hot_expert] = 14.0
        self.loads /= self.loads.mean(axis=1, keepdims=True)
        share = rack.experts // rack.decode
        slots = rack.layers * share + rack.spare
        self.table = np.full((rack.decode, slots), -1, dtype=np.int64)
        for layer in range(rack.layers):
            order = draw.permutation(rack.experts)
            if layer == rack.hot_layer:
                at = int(np.flatnonzero(order == rack.hot_expert)[0])
                to = rack.hot_rank * share
                order[at], order[to] = order[to], order[at]
            self.table[:, layer * share : (layer + 1) * share] = layer * rack.experts + order.reshape(
                rack.decode, share
            )
        self.next_table = self.table.copy()
        # The plan gives the hottest expert of each layer a second replica, that of the hot layer two more.
        wanted = [(layer, 1 + 2 * (layer == rack.hot_layer)) for layer in range(rack.layers)]
        free = np.full(rack.decode, rack.layers * share)
        for layer, more in wanted:
            for rank in np.argsort(self.rank_loads(self.table)[:, layer], kind="stable")[:more]:
                if free[rank] < slots:
                    self.next_table[rank, free[rank]] = layer * rack.experts + int(self.loads[layer].argmax())
                    free[rank] += 1

    def rank_loads(self, table: np.ndarray) -> np.ndarray:
        """float[ranks, layers] of the layer's mean over ranks."""
        key = table.tobytes()
        if key not in self._loads:
            self._loads[key] = self._sum_loads(table)
        return self._loads[key]

    def _sum_loads(self, table: np.ndarray) -> np.ndarray:
        rack = self.rack
        keys = rack.layers * rack.experts
        replicas = np.bincount(table[table >= 0], minlength=keys).reshape(rack.layers, rack.experts)
        share = self.loads / np.maximum(replicas, 1)
        sums = np.zeros((rack.decode, rack.layers))
        rank, slot = np.nonzero(table >= 0)
        held = table[rank, slot]
        np.add.at(sums, (rank, held // rack.experts), share.ravel()[held])
        return sums / sums.mean(axis=0)

    def skew(self, table: np.ndarray | None = None) -> SkewFigures:
        loads = self.rank_loads(self.table if table is None else table)
        most = loads.max(axis=0)
        layer = int(most.argmax())
        lost = float((most - 1).sum()) * ROWS_PER_STEP * US_PER_ROW
        rank = self.rack.ranks[int(loads[:, layer].argmax())]
        return SkewFigures(float(most.mean()), float(most[layer] - 1), lost, layer, rank)

    def heat(self, part: PartReport, layer: int, *, has_plan: bool = True) -> tuple[HeatReport, bytes]:
        rack = self.rack
        loads = self.rank_loads(self.table)
        hottest = np.full((rack.decode, rack.layers), -1, dtype=np.int32)
        share = rack.experts // rack.decode
        for n in range(rack.layers):
            held = self.table[:, n * share : (n + 1) * share] - n * rack.experts
            hottest[:, n] = held[np.arange(rack.decode), self.loads[n][held].argmax(axis=1)]

        def of_layer(table: np.ndarray) -> np.ndarray:
            inside = (table >= layer * rack.experts) & (table < (layer + 1) * rack.experts)
            return np.where(inside, table - layer * rack.experts, -1).astype("<i4")

        now = of_layer(self.table)
        after = of_layer(self.next_table) if has_plan else now
        moved = np.zeros(now.shape, dtype="u1")
        moved[1, np.flatnonzero(now[1] >= 0)[:1]] = 1
        report = HeatReport(
            pool=part.pool, group=part.group, part=part.part, layer=layer, layers=rack.layers, experts=rack.experts,
            ranks=rack.decode, slots_per_rank=now.shape[1], has_plan=has_plan, steps=part.steps,
            us_per_row=US_PER_ROW, rows_per_step=ROWS_PER_STEP,
        )  # fmt: skip
        arrays = (loads.astype("<f4"), hottest.astype("<i4"), now, after, self.loads[layer].astype("<f4"), moved)
        return report, b"".join(array.tobytes() for array in arrays)


def make_plan(experts: Experts, number: int = 18, **changes: object) -> PlanFigures:
    """A plan that pays, from the two tables."""
    before, after = experts.skew(), experts.skew(experts.next_table)
    moved = int((experts.table != experts.next_table).sum())
    saved = before.lost_us_per_step - after.lost_us_per_step
    plan = PlanFigures(
        plan=number, age_ms=240, pays=True, reason=f"saves {saved:.0f} us per step", before=before, after=after,
        moved_slots=moved, moved_bytes=moved * 13_369_344, far_slots=0, saved_us_per_step=saved,
        gain_us=saved * 20_000, cost_us=saved * 210, stages=2,
    )  # fmt: skip
    return dataclasses_replace(plan, changes)


def dataclasses_replace(message, changes: dict[str, object]):
    """A message with some fields changed."""
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**(values | changes))


HISTORY = (
    PastRebalance(15, 5_400_000, "rolled_back", "it was slower", "ops@head", 1.52, 1.10, 1.49, -1.0, 96, 1 << 30, 610),
    PastRebalance(14, 7_200_000, "skipped", "no gain: saves 3 us per step", "auto", 1.12, 1.10, 0.0, -1.0, 0, 0, 0),
    PastRebalance(16, 1_800_000, "applied", "domain changed", "auto", 1.44, 1.10, 1.14, 0.88, 120, 3 << 29, 540),
    PastRebalance(17, 240_000, "applied", "by hand", "ops@head", 1.71, 1.08, 1.11, 0.95, 214, 3 << 30, 740),
)  # fmt: skip


def make_part(experts: Experts, **changes: object) -> PartReport:
    rack = experts.rack
    part = PartReport(
        pool="decode", group=0, part="main", ranks=rack.ranks, layers=rack.layers, experts=rack.experts,
        slots=experts.table.size, empty_slots=int((experts.table < 0).sum()), slot_bytes=13_369_344, mode="manual",
        state="idle", membership=3, epoch=9, steps=40_960, skew=experts.skew(), plan=NO_PLAN, copied_slots=0,
        total_slots=0, progress_age_ms=0, lost_us_total=4.1e9, history=HISTORY, applied=2, skipped=1, failed=0,
        rolled_back=1, moved_slots_total=430, moved_bytes_total=11 << 29, took_ms_total=1890, plan_age_limit_ms=60_000,
    )  # fmt: skip
    return dataclasses_replace(part, changes)


def make_snapshot(rank: int, **changes: object) -> RankSnapshot:
    snapshot = RankSnapshot(
        rank=rank, generation=1, step=51_000, step_age_ms=0, running=91, waiting=0, pages_free=1200, pages_owned=2896,
        pages_granted=0, pages_quarantined=0, pages_total=4096, slabs_free=30, prompt_tokens=10_000,
        generated_tokens=4_000_000, pushed_bytes=0, pushes=0, pushes_inflight=0, step_us_p50=8900, step_us_p99=9600,
        device_us_p50=8700, loop_lag_us_p50=40, loop_lag_us_p99=400, rss_bytes=1 << 32,
    )  # fmt: skip
    return dataclasses_replace(snapshot, changes)


def make_status(rack: Rack, **changes: object) -> StatusReport:
    ranks = tuple(
        RankStatus(
            rank=rank, role="prefill" if rank < rack.prefill else "decode", generation=1, pid=4000 + rank,
            state="ready", phase="", age_ms=200, restarts=0, snapshot=make_snapshot(rank),
        )
        for rank in range(rack.prefill + rack.decode)
    )  # fmt: skip
    status = StatusReport(
        version=1, cluster="prod-a", model="V4.1-Flash", head_pid=4711, uptime_ms=3_600_000, ready=True, reasons=(),
        waiting=12, running=2911, finished=100_000, failed=0, ranks=ranks, waiting_limit=4096,
    )  # fmt: skip
    return dataclasses_replace(status, changes)


def bucket_of(us: float) -> int:
    return next(n for n, bound in enumerate(LATENCY_BOUNDS_US) if us <= bound)


def make_traffic(at_ms: int, count: int = 0, itl_us: float = 8000.0, **changes: object) -> TrafficReport:
    """Totals with `count` tokens that took `itl_us` each."""
    itl = [0] * 65
    itl[bucket_of(itl_us)] = count
    traffic = TrafficReport(
        at_ms=at_ms, accepted=count, refused=0, finished=count, failed=0, cancelled=0, prompt_tokens=count,
        cached_tokens=0, generated_tokens=count, waiting=12, waiting_tokens=4000, running=2911, ttft=tuple(itl),
        itl=tuple(itl), handoff=(),
    )  # fmt: skip
    return dataclasses_replace(traffic, changes)


NOW = 1000.0


def make_view(
    rack: Rack | None = None, *, experts: Experts | None = None, layer: int | None = None, now: float = NOW,
    status: StatusReport | None = None, **part: object,
) -> ClusterView:  # fmt: skip
    """A live view that has heard everything of a rack."""
    experts = experts or Experts(rack or Rack())
    report = make_part(experts, **part)
    view = ClusterView()
    view.link = LinkState(phase="live", since=now - 60, address="unix:/run/engine", is_admin=True)
    view.take(status or make_status(experts.rack), b"", now)
    view.take(ExpertsReport((report,)), b"", now)
    view.take(make_traffic(int(now * 1e3) - 20_000), b"", now - 20)
    view.take(make_traffic(int(now * 1e3), 10_000), b"", now)
    view.take(*experts.heat(report, report.skew.layer if layer is None else layer, has_plan=report.plan.plan > 0), now)
    view.answered_at = now
    return view
