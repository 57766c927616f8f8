"""What happened in the last minutes: values by the second, rates from totals, percentiles from counts.

Pure: every time is passed in, seconds of one monotonic clock.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from transport.messages import LATENCY_BOUNDS_US

KEEP_S = 300
"""Seconds of history, one point each."""
RATE_S = 2.0
"""A rate is taken over at least so long, where there is so much: reports of ranks come a few times a second only."""


class Series:
    """The values of something over the last `KEEP_S` seconds; of several in one second the newest is kept."""

    def __init__(self, keep: int = KEEP_S) -> None:
        self._seconds: collections.deque[int] = collections.deque(maxlen=keep)
        self._values: collections.deque[float] = collections.deque(maxlen=keep)

    def add(self, now: float, value: float) -> None:
        second = math.floor(now)
        if self._seconds and self._seconds[-1] >= second:
            self._values[-1] = value
            return
        self._seconds.append(second)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float:
        """The newest value; NaN if there is none."""
        return self._values[-1] if self._values else math.nan

    def window(self, now: float, points: int, step_s: int = 1) -> list[float]:
        """The `points` newest stretches of `step_s` seconds, oldest first: the mean of each; NaN where none was heard.

        The second that has just begun and has no value yet is not among them, so that a line does not flicker.
        """
        end = math.floor(now)
        if not self._seconds or self._seconds[-1] < end:
            end -= 1
        # Whole stretches from a fixed origin: a point does not change when time moves on.
        last = end // step_s
        sums = [0.0] * points
        counts = [0] * points
        for second, value in zip(reversed(self._seconds), reversed(self._values), strict=True):
            at = points - 1 - (last - second // step_s)
            if at < 0:
                break
            if at < points and not math.isnan(value):
                sums[at] += value
                counts[at] += 1
        return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]

    def copy(self) -> Series:
        other = Series()
        other._seconds = self._seconds.copy()
        other._values = self._values.copy()
        return other


class Growth:
    """Totals that only grow, and how fast: over `RATE_S` or the next longer stretch that is known."""

    def __init__(self) -> None:
        self._points: collections.deque[tuple[float, tuple[float, ...]]] = collections.deque()

    def add(self, at: float, totals: tuple[float, ...]) -> None:
        """Totals at a moment; one that is not newer than the last is ignored, smaller totals begin anew."""
        points = self._points
        if points:
            before_at, before = points[-1]
            if at <= before_at + 1e-3:
                return
            if len(totals) != len(before) or any(new < old for new, old in zip(totals, before, strict=True)):
                points.clear()
        points.append((at, totals))
        while len(points) > 2 and points[1][0] <= at - RATE_S:
            points.popleft()

    def rates(self) -> tuple[float, ...] | None:
        """Growth in a second of each total; None before two were heard."""
        if len(self._points) < 2:
            return None
        (then, before), (at, totals) = self._points[0], self._points[-1]
        return tuple((new - old) / (at - then) for new, old in zip(totals, before, strict=True))


def percentile(counts: Sequence[int], share: float) -> float:
    """The value in microseconds that `share` of what is counted in latency buckets does not exceed; NaN if nothing is.

    Within a bucket values are taken as spread evenly, so that it moves smoothly; what is above all bounds counts as
    the last bound.
    """
    total = sum(counts)
    if total == 0:
        return math.nan
    wanted = share * total
    seen = 0
    for n, count in enumerate(counts):
        if count and seen + count >= wanted:
            if n >= len(LATENCY_BOUNDS_US):
                break
            low = LATENCY_BOUNDS_US[n - 1] if n else 0
            return low + (LATENCY_BOUNDS_US[n] - low) * (wanted - seen) / count
        seen += count
    return float(LATENCY_BOUNDS_US[-1])


def minus(new: Sequence[int], old: Sequence[int]) -> list[int]:
    """What was counted between two reports; a total that shrank belongs to another head and counts from zero."""
    if not old:
        return list(new)
    gained = [a - b for a, b in zip(new, old, strict=False)]
    return list(new) if any(n < 0 for n in gained) else gained
