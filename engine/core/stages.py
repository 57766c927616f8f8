"""StageTimes: how long answered requests took, stage by stage, as a scrape wants it.

Buckets are those that vLLM has for requests, and some below its first, which is 0.3 s; sums are exact. So boards that
were made for vLLM show the same here. A request counts when it is answered whole, and only if its first attempt was: a
later one began elsewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from transport.messages import LATENCY_BOUNDS_US, REQUEST_BOUNDS_MS, RequestTimes, TimeCounts

_REQUEST_BOUNDS_US = tuple(1000 * bound for bound in REQUEST_BOUNDS_MS)


class _Counts:
    """How many fell into each bucket, one more for what is above all, and their exact sum."""

    def __init__(self, bounds_us: Sequence[int]) -> None:
        self._bounds_us = bounds_us
        self._counts = [0] * (len(bounds_us) + 1)
        self._sum_us = 0.0

    def add(self, us: float) -> None:
        self._counts[bisect.bisect_left(self._bounds_us, us)] += 1
        self._sum_us += us

    def told(self) -> TimeCounts:
        return TimeCounts(tuple(self._counts) if any(self._counts) else (), round(self._sum_us))


class StageTimes:
    """See the module. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._whole, self._queue, self._prefill, self._decode, self._run = (
            _Counts(_REQUEST_BOUNDS_US) for _ in range(5)
        )
        self._token = _Counts(LATENCY_BOUNDS_US)

    def note(self, accepted_at: float, queue_us: int, started_at: float, ended_at: float, num_tokens: int) -> None:
        """One request: accepted, in a step `queue_us` later, first token at `started_at`, last at `ended_at`."""
        whole_us, decode_us = 1e6 * (ended_at - accepted_at), 1e6 * (ended_at - started_at)
        # A rank says the queue's part by its own clock.
        queue = min(queue_us, whole_us - decode_us)
        self._whole.add(whole_us)
        self._queue.add(queue)
        self._run.add(whole_us - queue)
        self._prefill.add(whole_us - queue - decode_us)
        self._decode.add(decode_us)
        self._token.add(decode_us / (num_tokens - 1) if num_tokens > 1 else 0.0)

    def told(self) -> RequestTimes:
        """All of it, for a message."""
        return RequestTimes(
            whole=self._whole.told(),
            queue=self._queue.told(),
            run=self._run.told(),
            prefill=self._prefill.told(),
            decode=self._decode.told(),
            token=self._token.told(),
        )
