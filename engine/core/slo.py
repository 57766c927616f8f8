"""LatencyWatch: whether latencies of the last minute keep to the limit that an operator has set for them.

Marks of the growing counts are kept every few seconds; the last minute is the difference to the youngest mark that is
a minute old. Pure: times are passed in.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from engine.core.latency import counts_since, percentile_us

WINDOW_S = 60.0
MARK_S = 5.0
"""Between two marks: so much longer than a minute the stretch may be."""
LEAST_VALUES = 100
"""Fewer say nothing of a percentile."""


class LatencyWatch:
    """One figure.

    Args:
        what: for people: `time to the first token, p90`.
        key: the configuration's, for the sentence.
        share: the percentile, in (0, 1].
        limit_us: microseconds; 0 sets no limit, and then nothing is kept.
        look: the counts as they are.
    """

    def __init__(self, what: str, key: str, share: float, limit_us: int, look: Callable[[], tuple[int, ...]]) -> None:
        self._what, self._key, self._share, self._limit_us, self._look = what, key, share, limit_us, look
        self._marks: collections.deque[tuple[float, tuple[int, ...]]] = collections.deque()

    def mark(self, now: float) -> None:
        """Call it about every second; what it misses makes the stretch longer."""
        marks = self._marks
        if not self._limit_us or (marks and now < marks[-1][0] + MARK_S):
            return
        marks.append((now, self._look()))
        while len(marks) > 1 and marks[1][0] <= now - WINDOW_S:
            marks.popleft()

    def why_missed(self, now: float) -> str | None:
        """The sentence with the figure and its limit; None while the limit is kept, or too little came to say so."""
        if not self._limit_us:
            return None
        # The first mark was made before anything came, so without one that is old enough it all is of this minute.
        earlier: tuple[int, ...] = ()
        for at, counts in self._marks:
            if at > now - WINDOW_S:
                break
            earlier = counts
        recent = counts_since(self._look(), earlier)
        if sum(recent) < LEAST_VALUES:
            return None
        found_us = percentile_us(recent, self._share)
        if found_us <= self._limit_us:
            return None
        return (
            f"{self._what} is {found_us / 1e3:.3g} ms over the last minute, above {self._key}"
            f" ({self._limit_us / 1e3:.3g} ms)"
        )
