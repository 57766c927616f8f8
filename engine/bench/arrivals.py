"""Arrivals: when each token of a set of requests reached the client, and what follows from that.

The steady state is the stretch in which every sequence decodes: from the last sequence's second token (its first one
comes with the hand-off) until the first sequence ends. Rates and gaps between tokens are taken from it alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import trio

from engine.actors.client import Row
from engine.bench.record import percentile
from engine.errors import EngineError
from transport.messages import RequestFailed, RequestFinished, RequestStarted


class Arrivals:
    """A RequestSink that notes times. One set of requests at a time: `begin`, submit, `wait`.

    Attributes:
        times: per label of a row, seconds (trio's clock) of each of its tokens.
        accounts: per label, what the engine said of it when it started and when it ended.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.accounts: dict[str, tuple[RequestStarted, RequestFinished]] = {}
        self._open: set[str] = set()
        self._failure: str | None = None
        self._news = trio.Event()

    def begin(self, labels: Sequence[str]) -> None:
        """Forgets the set before and expects this one."""
        self.times = {label: [] for label in labels}
        self.accounts = {}
        self._open = set(labels)
        self._failure = None
        self._news = trio.Event()

    def is_steady(self) -> bool:
        """Whether every sequence has its second token."""
        return all(len(times) >= 2 for times in self.times.values())

    def has_end(self) -> bool:
        """Whether a sequence has ended."""
        return len(self._open) < len(self.times)

    async def wait(self, done: Callable[[], bool] | None = None) -> None:
        """Until all requests are answered, or `done` says so after some arrival.

        Raises:
            EngineError: a request failed, other than by being cancelled.
        """
        while True:
            if self._failure is not None:
                raise EngineError(self._failure)
            if not self._open or (done is not None and done()):
                return
            self._news = trio.Event()
            await self._news.wait()

    def tokens_came(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        for row, count in zip(rows, counts, strict=True):
            self.times[row.label].extend([row.last_token_at] * count)
        self._news.set()

    def row_finished(self, row: Row, fact: RequestFinished) -> None:
        assert row.started is not None
        self.accounts[row.label] = row.started, fact
        self._end(row)

    def row_failed(self, row: Row, fact: RequestFailed) -> None:
        if fact.code != "cancelled":
            self._failure = f"request {row.label} failed ({fact.code}): {fact.message}"
        self._end(row)

    def _end(self, row: Row) -> None:
        self._open.discard(row.label)
        self._news.set()


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The steady state of a set of requests, seconds of trio's clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def find_window(times: Sequence[Sequence[float]]) -> Window:
    """The steady state.

    Args:
        times: per sequence, when its tokens came.

    Raises:
        EngineError: the first sequence ended before the last one had two tokens.
    """
    start = max(arrived[1] if len(arrived) > 1 else float("inf") for arrived in times)
    end = min(arrived[-1] for arrived in times)
    if not start < end:
        raise EngineError(
            f"{len(times)} sequences were never decoded all at once: ask for more tokens (--max-tokens), or for shorter"
            " prompts (--prompt-tokens)"
        )
    return Window(start, end)


def client_figures(submitted: Sequence[float], times: Sequence[Sequence[float]], window: Window) -> dict[str, Any]:
    """What the client saw: milliseconds, tokens per second.

    Args:
        submitted: per sequence, when it was submitted.
        times: per sequence, when its tokens came.
    """
    inside = sum(window.start < at <= window.end for arrived in times for at in arrived)
    gaps = [
        (late - early) * 1e3
        for arrived in times
        for early, late in itertools.pairwise(arrived)
        if window.start <= early and late <= window.end
    ]
    first = [(arrived[0] - at) * 1e3 for arrived, at in zip(times, submitted, strict=True)]
    second = [(arrived[1] - arrived[0]) * 1e3 for arrived in times]
    return {
        "tokens_per_s": round(inside / window.seconds, 2),
        "step_ms": round(window.seconds * 1e3 * len(times) / inside, 4),
        "steady_s": round(window.seconds, 3),
        "steady_tokens": inside,
        "itl_ms_p50": round(percentile(gaps, 0.5), 4),
        "itl_ms_p99": round(percentile(gaps, 0.99), 4),
        "itl_ms_max": round(max(gaps), 4),
        "ttft_ms_min": round(min(first), 3),
        "ttft_ms_p50": round(percentile(first, 0.5), 3),
        "ttft_ms_max": round(max(first), 3),
        "second_ms_p50": round(percentile(second, 0.5), 3),
        "second_ms_p99": round(percentile(second, 0.99), 3),
    }


def handoff_figures(accounts: Sequence[tuple[RequestStarted, RequestFinished]]) -> dict[str, Any]:
    """What the engine says of the requests' way from prefill to decode rank; microseconds, bytes."""
    started = [start for start, _ in accounts]
    handoff_us = [end.handoff_us for _, end in accounts]
    pushes = sum(start.pushes for start in started)
    spent = [start.timings for start in started]
    return {
        "queue_us_p50": percentile([timings.queue_us for timings in spent], 0.5),
        "prefill_us_p50": percentile([timings.prefill_us for timings in spent], 0.5),
        "push_us_p50": percentile([timings.push_us for timings in spent], 0.5),
        "push_us_p99": percentile([timings.push_us for timings in spent], 0.99),
        "handoff_us_p50": percentile(handoff_us, 0.5),
        "handoff_us_p99": percentile(handoff_us, 0.99),
        "pushes": pushes,
        "pushed_bytes": sum(start.pushed_bytes for start in started),
        "post_us_per_push": round(sum(start.post_us for start in started) / max(1, pushes), 1),
        "prompt_tokens_mean": statistics.fmean(start.prompt_tokens for start in started),
    }
