"""LatencyCounts: how many latencies fell into each bucket of `LATENCY_BOUNDS_US` since the start, and what follows.

Counts only grow, so the latencies of any stretch are the difference of two looks, and those of several sources their
sum. What is lost is where in its bucket a value lay: a percentile is told as the bucket's geometric middle, at most
12 % beside the truth for values between 80 us and 127 s.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from transport.messages import LATENCY_BOUNDS_US

NUM_BUCKETS = len(LATENCY_BOUNDS_US) + 1
"""One for each bound, and one for what is above all."""
_RATIO = 1.25
"""Of a bound to the one before."""
_MIDDLES_US = tuple(bound / math.sqrt(_RATIO) for bound in (*LATENCY_BOUNDS_US, LATENCY_BOUNDS_US[-1] * _RATIO))


class LatencyCounts:
    """See the module. Adding is a binary search."""

    def __init__(self) -> None:
        self.total = 0
        self._counts = [0] * NUM_BUCKETS

    def add(self, us: float, count: int = 1) -> None:
        """`count` latencies of `us` microseconds. A value that is exactly a bound belongs to that bound's bucket."""
        self._counts[bisect.bisect_left(LATENCY_BOUNDS_US, us)] += count
        self.total += count

    def counts(self) -> tuple[int, ...]:
        """For a message: one number for each bucket; empty if there is nothing yet."""
        return tuple(self._counts) if self.total else ()


def counts_since(later: Sequence[int], earlier: Sequence[int]) -> tuple[int, ...]:
    """What came between two looks at the same counts; empty if nothing did."""
    if not later:
        return ()
    since = tuple(after - before for after, before in zip(later, earlier or (0,) * NUM_BUCKETS, strict=True))
    return since if any(since) else ()


def percentile_us(counts: Sequence[int], share: float) -> float:
    """Nearest-rank percentile in microseconds, `share` in (0, 1]; 0 if there is nothing.

    Whatever is above the highest bound is told as a little above it.
    """
    wanted = max(1, math.ceil(share * sum(counts)))
    seen = 0
    for count, middle_us in zip(counts, _MIDDLES_US, strict=False):
        seen += count
        if seen >= wanted:
            return middle_us
    return 0.0


def sum_us(counts: Sequence[int]) -> float:
    """All latencies added up, microseconds, as if each lay in the middle of its bucket: within 12 %, as above."""
    return sum(count * middle_us for count, middle_us in zip(counts, _MIDDLES_US, strict=False))
