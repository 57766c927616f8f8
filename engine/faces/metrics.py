"""Reports of the head in Prometheus' text format (0.0.4): names, types and help of every metric that is exported.

Names and labels are an interface; a test lists them. There is nothing by layer, expert, rank or request here, so that
the number of series does not grow with the cluster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.faces.rebalance import RUNNING_STATES, newest_first
from engine.version import VERSION
from transport.messages import REBALANCE_BOUNDS_MS, ExpertsReport, PartReport, StatusReport

RESULTS = ("applied", "skipped", "failed", "rolled_back")


def metrics_text(status: StatusReport, experts: ExpertsReport, now_s: float) -> str:
    """All metrics of a cluster.

    Args:
        now_s: seconds since 1970; reports have ages, scrapes want times.
    """
    return _write([*_cluster_metrics(status, experts), *_eplb_metrics(experts.parts, now_s)])


def absence_text() -> str:
    """What a scrape shows when no engine answers."""
    return _write([_up(0)])


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _write(metrics: list[Metric]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(metrics))
    return generate_latest(registry).decode()


def _up(value: int) -> Metric:
    return GaugeMetricFamily("engine:up", "1 if the engine's head answers.", value=value)


def _cluster_metrics(status: StatusReport, experts: ExpertsReport) -> Iterator[Metric]:
    yield _up(1)
    yield GaugeMetricFamily("engine:ready", "1 if requests can be served.", value=int(status.ready))
    yield GaugeMetricFamily(
        "engine:degraded", "Reasons why it serves, but not as it should; engine status says them.",
        value=len(status.degraded),
    )  # fmt: skip
    info = GaugeMetricFamily("engine:info", "Constant 1; what runs is in the labels.", labels=INFO_LABELS)
    info.add_metric([VERSION, status.model, describe_layout(status, experts)], 1)
    yield info


INFO_LABELS = ("version", "model", "layout")


def describe_layout(status: StatusReport, experts: ExpertsReport) -> str:
    """`1xDEP1 prefill, 2xDEP4 decode`: how many groups of how many ranks each pool has."""
    texts = []
    for pool in ("prefill", "decode"):
        ranks = sum(rank.role == pool for rank in status.ranks)
        size = next((len(part.ranks) for part in experts.parts if part.pool == pool), 1)
        texts.append(f"{ranks // size}xDEP{size} {pool}")
    return ", ".join(texts)


def _eplb_metrics(parts: tuple[PartReport, ...], now_s: float) -> Iterator[Metric]:
    """Nothing at all for groups of one rank: they place no experts."""
    if not parts:
        return
    labels = ["pool", "part", "group"] if any(part.group for part in parts) else ["pool", "part"]
    rows = [([str(getattr(part, label)) for label in labels], part) for part in parts]

    def gauge(name: str, text: str, values: Iterable[float | None]) -> Metric:
        family = GaugeMetricFamily(f"engine:eplb_{name}", text, labels=labels)
        for (names, _), value in zip(rows, values, strict=True):
            if value is not None:
                family.add_metric(names, value)
        return family

    def counter(name: str, text: str, values: Iterable[float]) -> Metric:
        family = CounterMetricFamily(f"engine:eplb_{name}", text, labels=labels)
        for (names, _), value in zip(rows, values, strict=True):
            family.add_metric(names, value)
        return family

    yield gauge(
        "balancedness", "Sum over layers of the mean load of ranks / sum over layers of the largest; 1 is even.",
        (1 / part.skew.max_over_mean if part.skew.max_over_mean else None for part in parts),
    )  # fmt: skip
    yield gauge(
        "imbalance_max_layer", "Largest load of a rank / mean load of ranks, in the worst layer; 1 is even.",
        (1 + part.skew.imbalance for part in parts),
    )  # fmt: skip
    yield counter(
        "lost_seconds", "Expert time lost to skew: what an even placement would have saved.",
        (part.lost_us_total / 1e6 for part in parts),
    )  # fmt: skip
    yield gauge("rebalancing", "1 while experts move.", (int(part.state in RUNNING_STATES) for part in parts))
    events = CounterMetricFamily(
        "engine:eplb_rebalance_events", "Re-placements that have ended, by how.", labels=[*labels, "result"]
    )
    for (names, part), result in itertools.product(rows, RESULTS):
        events.add_metric([*names, result], getattr(part, result))
    yield events
    yield counter("moved_bytes", "Weights of experts that were copied to a rank.", (p.moved_bytes_total for p in parts))
    yield counter("moved_slots", "Experts that were copied to a rank.", (part.moved_slots_total for part in parts))
    yield _length_histogram(labels, rows)
    yield gauge(
        "predicted_gain_ratio", "Share of max/mean that the last plan applied was to take away.",
        (_last_gain(part, realised=False) for part in parts),
    )  # fmt: skip
    yield gauge(
        "realised_gain_ratio", "Share of max/mean that it took away; absent until it is known.",
        (_last_gain(part, realised=True) for part in parts),
    )  # fmt: skip
    yield gauge(
        "last_progress_timestamp_seconds", "When the balancer last got somewhere, or had nothing to do.",
        (now_s - part.progress_age_ms / 1e3 for part in parts),
    )  # fmt: skip


def _length_histogram(labels: list[str], rows: list[tuple[list[str], PartReport]]) -> Metric:
    family = HistogramMetricFamily(
        "engine:eplb_rebalance_seconds", "Length of re-placements that moved something.", labels=labels
    )
    bounds = [*(f"{bound / 1e3:g}" for bound in REBALANCE_BOUNDS_MS), "+Inf"]
    for names, part in rows:
        counts = part.took_counts or (0,) * len(bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
        family.add_metric(names, buckets, part.took_ms_total / 1e3)
    return family


def _last_gain(part: PartReport, *, realised: bool) -> float | None:
    """Of the last plan that was applied; None if none was, or if nobody knows yet what it brought."""
    last = next((past for past in newest_first(part) if past.result == "applied"), None)
    if last is None or not last.before or (realised and last.realised == -1):
        return None
    return (last.before - (last.after if realised else last.predicted)) / last.before
