"""FrontCounts: what the fronts count, in one piece of memory that they share, so that a scrape of any shows all.

The head's process makes the memory (a nameless file) and gives it to every front. Each front writes its own stretch of
64-bit numbers and reads all stretches. A front that is started again goes on where the one before it stopped, so
nothing ever counts backwards.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

ROUTES = (
    "chat", "completions", "models", "health", "ready", "metrics", "version", "tokenize", "detokenize",
    "tokenizer_info", "none",
)  # fmt: skip
"""`none`: no route of ours, or no request that could be read."""
CODES = (200, 400, 401, 404, 405, 408, 413, 429, 431, 499, 500, 503)
REASONS = ("queue", "draining", "connections", "unreachable")
STAGES = ("queued", "decode", "flush")
SINGLES = ("frames", "stalled", "open_requests", "open_connections")
NAMES = (
    *(f"{route} {code}" for route in ROUTES for code in CODES),
    *(f"rejected {reason}" for reason in REASONS),
    *(f"gone {stage}" for stage in STAGES),
    *SINGLES,
)
_PLACES = {name: place for place, name in enumerate(NAMES)}
STRETCH_BYTES = 8 * len(NAMES)


def make_counts_file(fronts: int) -> int:
    """A descriptor to the memory for so many fronts, all zeros; inheritable. The caller closes it."""
    descriptor = os.memfd_create("engine-fronts", 0)
    os.ftruncate(descriptor, fronts * STRETCH_BYTES)
    return descriptor


class FrontCounts:
    """The memory as one front has it.

    Args:
        descriptor: of the memory; borrowed.
        place: of this front, from 0.
    """

    def __init__(self, descriptor: int, place: int) -> None:
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._all = memoryview(self._map).cast("Q")
        self._own = self._all[place * len(NAMES) : (place + 1) * len(NAMES)]
        self.put("open_requests", 0)
        self.put("open_connections", 0)

    def add(self, name: str, count: int = 1) -> None:
        """Counts something of `NAMES`."""
        self._own[_PLACES[name]] += count

    def add_answer(self, route: str, code: int) -> None:
        """One request was answered; a code that has no place counts as 500."""
        self.add(f"{route} {code if code in CODES else 500}")

    def put(self, name: str, value: int) -> None:
        """Sets what is no count but a state."""
        self._own[_PLACES[name]] = value

    def total(self, name: str) -> int:
        """Of all fronts."""
        return sum(self._all[_PLACES[name] :: len(NAMES)].tolist())

    def close(self) -> None:
        self._own.release()
        self._all.release()
        self._map.close()

    def metrics_text(self) -> str:
        """All of it in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Given(list(self._metrics())))
        return generate_latest(registry).decode()

    def _metrics(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "engine:http_requests",
            "Requests answered by all fronts; 499: the client hung up.",
            labels=["route", "code"],
        )
        for route in ROUTES:
            for code in CODES:
                count = self.total(f"{route} {code}")
                if count:
                    requests.add_metric([route, str(code)], count)
        yield requests
        rejected = CounterMetricFamily(
            "engine:rejected", "Requests and connections that a front refused by itself.", labels=["reason"]
        )
        for reason in REASONS:
            rejected.add_metric([reason], self.total(f"rejected {reason}"))
        yield rejected
        gone = CounterMetricFamily(
            "engine:client_gone", "Clients that hung up, by what their request was at.", labels=["stage"]
        )
        for stage in STAGES:
            gone.add_metric([stage], self.total(f"gone {stage}"))
        yield gone
        yield CounterMetricFamily(
            "engine:http_frames", "Writes of streams; one may hold several tokens.", value=self.total("frames")
        )
        yield CounterMetricFamily(
            "engine:http_stalled_streams", "Streams dropped because nobody read them.", value=self.total("stalled")
        )
        yield GaugeMetricFamily(
            "engine:http_open_requests", "Generations under way.", value=self.total("open_requests")
        )
        yield GaugeMetricFamily("engine:http_connections", "Open connections.", value=self.total("open_connections"))


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
