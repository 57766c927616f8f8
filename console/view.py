"""ClusterView: all that the console knows of a cluster, from what the head said.

Pure: messages and times (seconds of one monotonic clock) come in, values for screens go out. Messages are kept as they
came, blobs become arrays once. Screens only read.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Literal

from console.history import RATE_S, Growth, Series, minus, percentile
from console.reports import Heat as Heat
from console.reports import Hot as Hot
from console.reports import Pairs as Pairs
from console.reports import find_hots, pair_rates, read_pairs
from console.reports import read_heat as read_heat
from transport.messages import (
    PROTOCOL_VERSION,
    EventsHappened,
    ExpertsReport,
    HeadEvent,
    HeatReport,
    LinksReport,
    Message,
    PartReport,
    RankSnapshot,
    RankStatus,
    RequestsReport,
    Role,
    StatusReport,
    TrafficReport,
)

STALE_S = 2.0
"""An answer that is due for longer makes what is shown stale."""
RANK_STALE_MS = 3000
"""The same for what the head heard of a rank; they report a few times a second."""
EVENTS_KEPT = 4096

Phase = Literal["connecting", "never", "live", "stale", "lost", "mismatch"]
"""Of the link to the head. `never`: it was never reached. `lost`: it was, and is gone. `mismatch`: it speaks another
protocol version. `stale` is never stored: `ClusterView.phase` finds it from the time."""
Stage = Literal["unknown", "starting", "serving", "partial", "draining"]
"""Of the cluster. `partial`: it serves while ranks are missing or silent."""
LatencyKind = Literal["ttft", "itl", "handoff"]


@dataclasses.dataclass(frozen=True, slots=True)
class LinkState:
    """How the link is, as a screen draws it.

    Attributes:
        why: one sentence for people: what went wrong, or "".
        since: when this phase began.
        retry_at: when it is dialled again; 0 while it is not waiting for that.
        address: as a person would write it (`unix:/run/...`, `ssh://host`).
        is_admin: changes are allowed on it.
        directory: the runtime directory behind it, or "" (for the command that starts an engine).
        their_version: of a mismatch.
    """

    phase: Phase = "connecting"
    why: str = ""
    since: float = 0.0
    retry_at: float = 0.0
    address: str = ""
    is_admin: bool = False
    directory: str = ""
    their_version: int = 0


HeatKey = tuple[str, int, str]
"""Pool, group, part."""


class ClusterView:
    """What is known, newest first. Made once; `take` and the link keep it up to date.

    Attributes:
        status, experts, traffic, requests, heat, pairs: the newest of each, or None. `heats`: by part of a group.
        events: newest last, the console's own (`seq` 0, names `console.*`) among them. `lost_events`: never heard.
        answered_at: when the last full set of answers was there; 0: never. `asked_at`: since when answers are due; 0:
            none are. `drawn_at`: when a screen last went to the terminal.
        series: by name, see `docs/console.md`: `req_s`, `running`, `step_us:decode`, `tok_s:17`...
        heads: how many head processes were met; a second one means that it was restarted.
    """

    def __init__(self) -> None:
        self.link = LinkState()
        self.status: StatusReport | None = None
        self.experts: ExpertsReport | None = None
        self.traffic: TrafficReport | None = None
        self.requests: RequestsReport | None = None
        self.heat: Heat | None = None
        self.heats: dict[HeatKey, Heat] = {}
        self._hots: dict[HeatKey, dict[int, Hot]] = {}
        self.pairs: Pairs | None = None
        self.events: collections.deque[HeadEvent] = collections.deque(maxlen=EVENTS_KEPT)
        self.lost_events = 0
        self.last_seq = 0
        self.answered_at = 0.0
        self.asked_at = 0.0
        self.drawn_at = 0.0
        self.status_at = 0.0
        self.heads = 0
        self.series: dict[str, Series] = {}
        self._growth: dict[str, Growth] = {}
        self._traffic: collections.deque[tuple[float, TrafficReport]] = collections.deque(maxlen=301)
        self._pair_past: collections.deque[Pairs] = collections.deque()
        self._ranks: dict[int, RankStatus] = {}
        self._lives: dict[int, int] = {}
        self._rates: dict[str, tuple[float, ...]] = {}

    # ------------------------------------------------------------------ taking

    def take(self, message: Message, blob: memoryview | bytes, now: float) -> None:
        """Takes one message of the head; such as are nobody's business here are ignored (answers to acts)."""
        if isinstance(message, StatusReport):
            self._take_status(message, now)
        elif isinstance(message, TrafficReport):
            self._take_traffic(message, now)
        elif isinstance(message, ExpertsReport):
            self._take_experts(message, now)
        elif isinstance(message, RequestsReport):
            self.requests = message
        elif isinstance(message, HeatReport):
            self._take_heat(message, blob, now)
        elif isinstance(message, LinksReport):
            self._take_links(message, blob, now)
        elif isinstance(message, EventsHappened):
            self._take_events(message)

    def begin_round(self, now: float) -> None:
        """Questions went out."""
        self.asked_at = now

    def end_round(self, now: float) -> None:
        """All of them were answered."""
        self.asked_at = 0.0
        self.answered_at = now

    def note(self, name: str, text: str, at_ms: int, level: Literal["info", "warning", "error"] = "info") -> None:
        """An event of the console's own, such as what became of an act. `at_ms` since 1970."""
        self.events.append(HeadEvent(seq=0, at_ms=at_ms, level=level, name=f"console.{name}", text=text[:4096]))

    def forget(self) -> None:
        """Another head answers now: nothing that the old one said holds. Events stay, they have happened."""
        self.experts = self.traffic = self.requests = self.heat = self.pairs = None
        self.heats.clear()
        self._hots.clear()
        self.series.clear()
        self._growth.clear()
        self._traffic.clear()
        self._pair_past.clear()
        self._rates.clear()
        self.last_seq = 0

    def copy(self) -> ClusterView:
        """The same at this moment, which stays as it is while this one goes on: what a frozen screen shows."""
        other = ClusterView()
        other.__dict__.update(self.__dict__)
        other.heats = dict(self.heats)
        other._hots = dict(self._hots)
        other.events = self.events.copy()
        other.series = {name: series.copy() for name, series in self.series.items()}
        other._traffic = self._traffic.copy()
        other._ranks = dict(self._ranks)
        other._rates = dict(self._rates)
        return other

    # ------------------------------------------------------------------ asking

    def phase(self, now: float) -> Phase:
        """The link's phase at this moment, which may be `stale`."""
        if self.link.phase == "live" and self.asked_at and now - self.asked_at > STALE_S:
            return "stale"
        return self.link.phase

    def age(self, now: float) -> float:
        """Seconds since the last full set of answers; infinite before the first."""
        return now - self.answered_at if self.answered_at else math.inf

    def is_current(self, now: float) -> bool:
        """Whether what is shown is what is; if not, screens draw it dimmed."""
        return self.phase(now) == "live" and self.status is not None

    def stage(self) -> Stage:
        """How the cluster is."""
        status = self.status
        if status is None:
            return "unknown"
        if status.is_stopping:
            return "draining"
        if not status.ready:
            return "starting"
        return "partial" if self.missing() else "serving"

    def missing(self) -> tuple[RankStatus, ...]:
        """Ranks that are not up, and such as are silent although they should report."""
        return tuple(rank for rank in self.ranks() if rank.state in NOT_UP or is_silent(rank))

    def ranks(self, role: Role | None = None) -> tuple[RankStatus, ...]:
        """All ranks (of a role) in the order of the report."""
        if self.status is None:
            return ()
        return tuple(rank for rank in self.status.ranks if role is None or rank.role == role)

    def rank(self, rank: int) -> RankStatus | None:
        return self._ranks.get(rank)

    def name(self, rank: int) -> str:
        """`d17`, `p00`; `r17` for a rank that no report names."""
        found = self._ranks.get(rank)
        return f"{found.role[0] if found else 'r'}{rank:02d}"

    def part(self, pool: str, group: int, part: str) -> PartReport | None:
        for report in self.experts.parts if self.experts else ():
            if (report.pool, report.group, report.part) == (pool, group, part):
                return report
        return None

    def hot(self, rank: int) -> Hot | None:
        """The fullest layer of a rank in any part whose loads are known."""
        found = [hots[rank] for hots in self._hots.values() if rank in hots]
        return max(found, key=lambda hot: hot.load, default=None)

    def rate(self, name: str) -> float:
        """The newest value of a series; NaN if there is none."""
        series = self.series.get(name)
        return series.last if series else math.nan

    def window(self, name: str, now: float, points: int, step_s: int = 1) -> list[float]:
        """`Series.window` of a series; all NaN if there is none."""
        series = self.series.get(name)
        return series.window(now, points, step_s) if series else [math.nan] * points

    def counts(self, kind: LatencyKind, seconds: float) -> list[int]:
        """What was counted in the latency buckets within about the last `seconds`."""
        if not self._traffic:
            return []
        at, newest = self._traffic[-1]
        base: TrafficReport | None = None
        for then, report in reversed(self._traffic):
            base = report
            if then <= at - seconds:
                break
        new, old = getattr(newest, kind), getattr(base, kind)
        return minus(new, old) if base is not newest else []

    def percentiles(self, kind: LatencyKind, seconds: float = 60.0) -> tuple[float, float, float]:
        """p50, p90 and p99 in microseconds over about the last `seconds`; NaN if nothing was counted."""
        counts = self.counts(kind, seconds)
        return percentile(counts, 0.5), percentile(counts, 0.9), percentile(counts, 0.99)

    # ------------------------------------------------------------------ details

    def _point(self, name: str, now: float, value: float) -> None:
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = Series()
        series.add(now, value)

    def _grow(self, name: str, at: float, *totals: float) -> tuple[float, ...] | None:
        growth = self._growth.get(name)
        if growth is None:
            growth = self._growth[name] = Growth()
        growth.add(at, totals)
        return growth.rates()

    def _take_status(self, report: StatusReport, now: float) -> None:
        before = self.status
        if before is None:
            self.heads = 1
        elif (before.head_pid, before.version) != (report.head_pid, report.version) or (
            report.uptime_ms < before.uptime_ms
        ):
            self.heads += 1
            self.forget()
        self.status = report
        self.status_at = now
        self._ranks = {rank.rank: rank for rank in report.ranks}
        self._point("waiting", now, report.waiting)
        self._point("running", now, report.running)
        steps: dict[str, list[float]] = {"prefill": [], "decode": []}
        busy: dict[str, list[float]] = {"prefill": [], "decode": []}
        pages: dict[str, list[int]] = {"prefill": [0, 0], "decode": [0, 0]}
        pushed = 0.0
        for rank in report.ranks:
            snapshot = rank.snapshot
            if snapshot is None or rank.state in NOT_UP:
                continue
            pages[rank.role][0] += snapshot.pages_total - snapshot.pages_available
            pages[rank.role][1] += snapshot.pages_total
            rates = self._take_snapshot(rank, snapshot, now)
            if rates is None:
                continue
            tokens, steps_s, step_us_s, device_us_s, pushed_s = rates
            pushed += pushed_s
            busy[rank.role].append(min(1.0, device_us_s / 1e6))
            if steps_s > 0:
                steps[rank.role].append(step_us_s / steps_s)
                self._point(f"step:{rank.rank}", now, step_us_s / steps_s)
            self._point(f"tok_s:{rank.rank}", now, tokens)
        for role in ("prefill", "decode"):
            if steps[role]:
                self._point(f"step_us:{role}", now, sum(steps[role]) / len(steps[role]))
            if busy[role]:
                self._point(f"busy:{role}", now, sum(busy[role]) / len(busy[role]))
            if pages[role][1]:
                self._point(f"kv:{role}", now, pages[role][0] / pages[role][1])
        if any(rank.snapshot for rank in report.ranks):
            self._point("push_bytes_s", now, pushed)

    def _take_snapshot(self, rank: RankStatus, snapshot: RankSnapshot, now: float) -> tuple[float, ...] | None:
        """Rates since earlier snapshots of the same life: tokens, steps, step us, device us, pushed bytes."""
        tokens = snapshot.generated_tokens if rank.role == "decode" else snapshot.prompt_tokens
        name = f"rank {rank.rank}"
        if self._lives.get(rank.rank) != rank.generation:
            self._lives[rank.rank] = rank.generation
            self._growth.pop(name, None)
        return self._grow(
            name,
            now - rank.age_ms / 1000,
            *(tokens, snapshot.step, snapshot.step_us_sum, snapshot.device_us_sum, snapshot.pushed_bytes),
        )

    def _take_traffic(self, report: TrafficReport, now: float) -> None:
        if self.traffic is not None and report.at_ms < self.traffic.at_ms:
            self._traffic.clear()
        self.traffic = report
        # One a second is enough for every stretch that is shown; the newest is always the last.
        if len(self._traffic) > 1 and math.floor(self._traffic[-2][0]) == math.floor(now):
            self._traffic.pop()
        self._traffic.append((now, report))
        names = (
            *("accepted", "finished", "refused", "failed", "cancelled"),
            *("prompt_tokens", "cached_tokens", "generated_tokens"),
        )
        rates = self._grow("traffic", report.at_ms / 1000, *(getattr(report, name) for name in names))
        if rates is not None:
            series = (
                *("req_s", "finished_s", "refused_s", "failed_s", "cancelled_s"),
                *("prompt_s", "cached_s", "tok_s"),
            )
            for name, rate in zip(series, rates, strict=True):
                self._point(name, now, rate)

    def _take_experts(self, report: ExpertsReport, now: float) -> None:
        self.experts = report
        there = {(part.pool, part.group, part.part) for part in report.parts}
        for gone in self.heats.keys() - there:
            del self.heats[gone]
            self._hots.pop(gone, None)
        for part in report.parts:
            key = f"{part.pool}/{part.group}/{part.part}"
            self._point(f"lost_us:{key}", now, part.skew.lost_us_per_step)
            self._point(f"max_over_mean:{key}", now, part.skew.max_over_mean)

    def _take_heat(self, report: HeatReport, blob: memoryview | bytes, now: float) -> None:
        heat = read_heat(report, blob, now)
        self.heat = heat
        key = (report.pool, report.group, report.part)
        self.heats[key] = heat
        self._hots.pop(key, None)
        part = self.part(*key)
        if part is None or report.steps == 0 or report.layers == 0:
            return
        self._hots[key] = find_hots(heat, part.ranks)
        if report.part != "main":
            return
        for rank, load in zip(part.ranks, heat.rank_load.mean(axis=1).tolist(), strict=False):
            self._point(f"skew:{rank}", now, load)

    def _take_links(self, report: LinksReport, blob: memoryview | bytes, now: float) -> None:
        pairs = read_pairs(report, blob, now)
        past = self._pair_past
        rates = pair_rates(pairs, past[0]) if past else None
        if rates is not None:
            pairs = dataclasses.replace(pairs, rates=rates)
        self.pairs = pairs
        self._point("push_failed", now, float(pairs.failed.sum()))
        past.append(pairs)
        while len(past) > 1 and past[1].at <= now - RATE_S:
            past.popleft()

    def _take_events(self, report: EventsHappened) -> None:
        gap = report.lost
        for event in report.events:
            if event.seq <= self.last_seq:
                continue  # heard before a new link asked again
            if not gap and self.last_seq and event.seq > self.last_seq + 1:
                gap = event.seq - self.last_seq - 1
            if gap:
                self.lost_events += gap
                self.note("gap", f"{gap} events before this were not heard", event.at_ms, "warning")
                gap = 0
            self.last_seq = event.seq
            self.events.append(event)


NOT_UP = frozenset({"starting", "joining", "lost", "restarting"})
"""States of a rank that takes no work."""


def is_silent(rank: RankStatus) -> bool:
    """Whether a rank that is up has not reported for `RANK_STALE_MS`."""
    return rank.state not in NOT_UP and rank.age_ms > RANK_STALE_MS


def mismatch_of(report: StatusReport) -> int:
    """The protocol version of a head that speaks another one than this program; 0 if they agree."""
    return report.version if report.version != PROTOCOL_VERSION else 0
