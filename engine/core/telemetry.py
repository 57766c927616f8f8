"""Counters and bounded histograms of a rank, and the RankSnapshot that is made of them. Pure: times are passed in."""

from __future__ import annotations

import dataclasses
import math
from array import array

import numpy as np

from engine.core.drafted import DraftMeter
from transport.messages import DraftCounts, PrefixCounts, RankSnapshot, TurnCounts


class Histogram:
    """The last `capacity` values of something, microseconds by convention. Adding is O(1), a percentile sorts."""

    def __init__(self, capacity: int = 1024) -> None:
        if capacity < 1:
            raise ValueError(f"a histogram of {capacity} values holds nothing")
        self._values = array("q")
        self._capacity = capacity
        self._at = 0

    def add(self, value: int) -> None:
        if len(self._values) < self._capacity:
            self._values.append(value)
        else:
            self._values[self._at] = value
            self._at = (self._at + 1) % self._capacity

    def __len__(self) -> int:
        return len(self._values)

    def percentiles(self, *shares: float) -> tuple[int, ...]:
        """Nearest-rank percentiles, one per share in (0, 1]; zeros while empty."""
        if not self._values:
            return (0,) * len(shares)
        ordered = np.sort(np.frombuffer(self._values, np.int64))
        return tuple(int(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) for share in shares)


@dataclasses.dataclass(slots=True)
class Meters:
    """What the actors of a rank measure about themselves.

    Attributes:
        step_us: per step, from when the device could start it (submitted, and the step before awaited) until awaited.
        device_us: per step, the device's own measure.
        loop_lag_us: how much later than asked a sleeping task was woken.
        last_step_us: when the last step was awaited, or work came to an idle rank; None while idle.
        step_us_sum, device_us_sum: of all steps so far.
    """

    step_us: Histogram = dataclasses.field(default_factory=Histogram)
    device_us: Histogram = dataclasses.field(default_factory=Histogram)
    loop_lag_us: Histogram = dataclasses.field(default_factory=Histogram)
    step: int = 0
    last_step_us: int | None = None
    step_us_sum: int = 0
    device_us_sum: int = 0

    def add_step(self, step: int, step_us: int, device_us: int) -> None:
        """Notes a finished step."""
        self.step = step
        self.step_us.add(step_us)
        self.device_us.add(device_us)
        self.step_us_sum += step_us
        self.device_us_sum += device_us


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """What a side of the hand-off says of itself. Page counts, but for `pages_pinned`, sum up to `pages_total`.
    `drafted`: borrowed, of a side that may draft."""

    running: int
    waiting: int
    pages_free: int
    pages_owned: int
    pages_granted: int
    pages_quarantined: int
    pages_total: int
    slabs_free: int
    prompt_tokens: int
    generated_tokens: int
    pushed_bytes: int
    pushes: int
    pushes_inflight: int
    corrupt_pushes: int
    drafted: DraftMeter | None = None
    pages_cached: int = 0
    pages_pinned: int = 0
    slabs_cached: int = 0
    prefix: PrefixCounts = dataclasses.field(default_factory=PrefixCounts)
    turns: TurnCounts = dataclasses.field(default_factory=TurnCounts)


def build_snapshot(
    rank: int, generation: int, gauges: Gauges, meters: Meters, *, now_us: int, rss_bytes: int
) -> RankSnapshot:
    """The rank's state as of `now_us` (same clock as the meters)."""
    step_p50, step_p99 = meters.step_us.percentiles(0.5, 0.99)
    device_p50, device_p99 = meters.device_us.percentiles(0.5, 0.99)
    lag_p50, lag_p99 = meters.loop_lag_us.percentiles(0.5, 0.99)
    age_us = 0 if meters.last_step_us is None else max(0, now_us - meters.last_step_us)
    return RankSnapshot(
        rank=rank,
        generation=generation,
        step=meters.step,
        step_age_ms=age_us // 1000,
        running=gauges.running,
        waiting=gauges.waiting,
        pages_free=gauges.pages_free,
        pages_owned=gauges.pages_owned,
        pages_granted=gauges.pages_granted,
        pages_quarantined=gauges.pages_quarantined,
        pages_total=gauges.pages_total,
        slabs_free=gauges.slabs_free,
        prompt_tokens=gauges.prompt_tokens,
        generated_tokens=gauges.generated_tokens,
        pushed_bytes=gauges.pushed_bytes,
        pushes=gauges.pushes,
        pushes_inflight=gauges.pushes_inflight,
        step_us_p50=step_p50,
        step_us_p99=step_p99,
        device_us_p50=device_p50,
        loop_lag_us_p50=lag_p50,
        loop_lag_us_p99=lag_p99,
        rss_bytes=rss_bytes,
        device_us_p99=device_p99,
        step_us_sum=meters.step_us_sum,
        device_us_sum=meters.device_us_sum,
        corrupt_pushes=gauges.corrupt_pushes,
        drafted=DraftCounts() if gauges.drafted is None else gauges.drafted.counts(),
        draft_origins=() if gauges.drafted is None else gauges.drafted.origins(),
        pages_cached=gauges.pages_cached,
        pages_pinned=gauges.pages_pinned,
        slabs_cached=gauges.slabs_cached,
        prefix=gauges.prefix,
        turns=gauges.turns,
    )
