"""Reports of the head in Prometheus' text format (0.0.4): names, types and help of every metric that is exported.

Names and labels are an interface; a test lists them. There is nothing by layer, expert, rank or request here, so that
the number of series does not grow with the cluster. What vLLM has a name for has that name and its labels, because
boards and benchmarks know it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.core.latency import NUM_BUCKETS, sum_us
from engine.faces.rebalance import RUNNING_STATES, newest_first
from engine.version import VERSION
from transport.messages import (
    LATENCY_BOUNDS_US,
    MOST_DRAFTS,
    REBALANCE_BOUNDS_MS,
    REQUEST_BOUNDS_MS,
    Counts,
    DraftCounts,
    ExpertsReport,
    PartReport,
    RankStatus,
    StatusReport,
    TimeCounts,
    TrafficReport,
    TurnCounts,
)

RESULTS = ("applied", "skipped", "failed", "rolled_back")
ANSWERS = ("finished", "failed", "cancelled", "refused")
STATES = ("starting", "joining", "ready", "draining", "drained", "lost", "restarting", "stopped")
"""Of ranks. `drained`: an operator has drained it and nothing is left there; `draining`: something is, or it ends."""


def metrics_text(status: StatusReport, experts: ExpertsReport, traffic: TrafficReport, now_s: float) -> str:
    """All metrics of a cluster.

    Args:
        now_s: seconds since 1970; reports have ages, scrapes want times.
    """
    metrics = (
        _cluster_metrics(status, experts),
        _rank_metrics(status.ranks),
        _memory_metrics(status),
        _prefix_metrics(status),
        _turn_metrics(status.turns),
        _traffic_metrics(traffic, status.model),
        _request_metrics(traffic, status.model),
        _draft_metrics(status.drafted, status.model),
        _eplb_metrics(experts.parts, now_s),
    )
    return _write(list(itertools.chain(*metrics)))


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


def _rank_metrics(ranks: tuple[RankStatus, ...]) -> Iterator[Metric]:
    counts: collections.Counter[tuple[str, str]] = collections.Counter(
        (rank.role, "drained" if rank.phase == "drained" else rank.state) for rank in ranks
    )
    family = GaugeMetricFamily("engine:ranks", "Ranks of a pool in a state.", labels=["pool", "state"])
    for pool, state in itertools.product(("prefill", "decode"), STATES):
        family.add_metric([pool, state], counts[pool, state])
    yield family
    corrupt = sum(rank.snapshot.corrupt_pushes for rank in ranks if rank.snapshot is not None)
    yield CounterMetricFamily(
        "engine:pd_corrupt_pushes",
        "Pushes that arrived with another checksum than they were sent with, of all decode ranks' present lives.",
        value=corrupt,
    )
    yield from _pool_metrics(ranks)


def _pool_metrics(ranks: tuple[RankStatus, ...]) -> Iterator[Metric]:
    """The worst of each pool, by the ranks' last words; a pool without any is absent. Ranks one by one are for
    `engine ranks`."""
    pools = {
        pool: [rank.snapshot for rank in ranks if rank.role == pool and rank.snapshot is not None]
        for pool in ("prefill", "decode")
    }
    for name, text, field, units in (
        ("progress_age_seconds", "Longest time since a rank with work finished a step.", "step_age_ms", 1e3),
        ("step_p99_seconds", "99th percentile of the last 1,024 steps of the slowest rank.", "step_us_p99", 1e6),
        ("loop_lag_p99_seconds", "How late a rank's loop wakes, 99th percentile, worst rank.", "loop_lag_us_p99", 1e6),
    ):
        family = GaugeMetricFamily(f"engine:{name}", text, labels=["pool"])
        for pool, snapshots in pools.items():
            if snapshots:
                family.add_metric([pool], max(getattr(snapshot, field) for snapshot in snapshots) / units)
        yield family
    pushing = pools["prefill"]
    for name, text, field in (
        ("pd_pushes", "Writes of pages and slabs, of all prefill ranks' present lives.", "pushes"),
        ("pd_push_bytes", "Bytes of these.", "pushed_bytes"),
    ):
        value = sum(getattr(snapshot, field) for snapshot in pushing)
        yield CounterMetricFamily(f"engine:{name}", text, value=value)
    yield GaugeMetricFamily(
        "engine:pd_push_inflight", "Writes under way.", value=sum(snapshot.pushes_inflight for snapshot in pushing)
    )


def _memory_metrics(status: StatusReport) -> Iterator[Metric]:
    """Of ranks that have said so. Cached pages that nobody uses are there for others, so they count as free."""
    shares = {}
    for pool in ("prefill", "decode"):
        snapshots = [rank.snapshot for rank in status.ranks if rank.role == pool and rank.snapshot is not None]
        total = sum(snapshot.pages_total for snapshot in snapshots)
        if total:
            shares[pool] = 1 - sum(snapshot.pages_available for snapshot in snapshots) / total
    known = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of the decode ranks' pages that is in use, 0 to 1.",
        labels=["model_name", "engine"],
    )  # fmt: skip
    if "decode" in shares:
        known.add_metric([status.model, "0"], shares["decode"])
    yield known
    family = GaugeMetricFamily("engine:kv_pages_used_ratio", "The same of each pool.", labels=["pool"])
    for pool, share in shares.items():
        family.add_metric([pool], share)
    yield family


def _prefix_metrics(status: StatusReport) -> Iterator[Metric]:
    """Of prefill ranks, in ids of prompts; nothing here is reckoned."""
    names, labels = ["model_name", "engine"], [status.model, "0"]
    counts = status.prefix
    for name, text, value in (
        ("queries", "Ids of prompts that were looked up.", counts.queried),
        ("hits", "Of these, ids that were not computed again.", counts.hit),
    ):
        family = CounterMetricFamily(f"vllm:prefix_cache_{name}", text, labels=names)
        family.add_metric(labels, value)
        yield family
    yield CounterMetricFamily(
        "engine:prefix_hit_possible_tokens",
        "Of these, ids that a cache of any size would not have computed again: an earlier prompt of the same rank"
        " had the whole pages.",
        value=counts.possible,
    )
    yield CounterMetricFamily(
        "engine:prefix_cache_evicted_pages", "Pages that were given up for others.", value=counts.evicted_pages
    )
    snapshots = [rank.snapshot for rank in status.ranks if rank.snapshot is not None]
    pinned = sum(snapshot.pages_pinned for snapshot in snapshots)
    pages = GaugeMetricFamily(
        "engine:prefix_cache_pages", "Pages that hold past prompts; unpinned ones are there for others.",
        labels=["state"],
    )  # fmt: skip
    pages.add_metric(["pinned"], pinned)
    pages.add_metric(["unpinned"], sum(snapshot.pages_cached for snapshot in snapshots) - pinned)
    yield pages


def _turn_metrics(counts: TurnCounts) -> Iterator[Metric]:
    """Finished turns on their way back to prefill ranks."""
    family = CounterMetricFamily(
        "engine:hand_back_turns", "Finished turns, by what became of them; each that was offered counts as that, too.",
        labels=["what"],
    )  # fmt: skip
    for what in ("offered", "withdrawn", "declined", "granted", "failed", "kept"):
        family.add_metric([what], getattr(counts, what))
    yield family
    family = CounterMetricFamily("engine:hand_back_declined", "Declined turns, by reason.", labels=["reason"])
    for reason in ("gone", "known", "full", "draining"):
        family.add_metric([reason], getattr(counts, reason))
    yield family
    yield CounterMetricFamily(
        "engine:hand_back_pages", "Pages of turns that prefix caches took.", value=counts.kept_pages
    )
    yield CounterMetricFamily("engine:hand_back_bytes", "Bytes pushed for them.", value=counts.kept_bytes)


def _traffic_metrics(traffic: TrafficReport, model: str) -> Iterator[Metric]:
    """All of the head: there is one, whatever the number of ranks."""
    names, labels = ["model_name", "engine"], [model, "0"]

    def known(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, value: int) -> Metric:
        family = kind(f"vllm:{name}", text, labels=names)
        family.add_metric(labels, value)
        return family

    yield known(GaugeMetricFamily, "num_requests_running", "Requests on ranks.", traffic.running)
    yield known(GaugeMetricFamily, "num_requests_waiting", "Requests that no rank has yet.", traffic.waiting)
    yield known(CounterMetricFamily, "prompt_tokens", "Of started attempts, cached ones too.", traffic.prompt_tokens)
    yield known(CounterMetricFamily, "prompt_tokens_cached", "Of these, the cached ones.", traffic.cached_tokens)
    yield known(CounterMetricFamily, "generation_tokens", "Sent to clients.", traffic.generated_tokens)
    tokens = CounterMetricFamily(
        "engine:tokens", "By what they cost: ids of prompts that were cached, or computed; ids sent to clients.",
        labels=["kind"],
    )  # fmt: skip
    tokens.add_metric(["cached"], traffic.cached_tokens)
    tokens.add_metric(["new"], traffic.prompt_tokens - traffic.cached_tokens)
    tokens.add_metric(["output"], traffic.generated_tokens)
    yield tokens
    family = HistogramMetricFamily(
        "vllm:time_to_first_token_seconds",
        f"From a request's acceptance to its first token, in the head. {_SUM_TEXT}",
        labels=names,
    )
    family.add_metric(labels, *_seconds(traffic.ttft))
    yield family
    family = HistogramMetricFamily(
        "vllm:inter_token_latency_seconds",
        f"Between two turns of a decode rank, once for each request that got tokens in both. {_SUM_TEXT}",
        labels=names,
    )
    family.add_metric(labels, *_seconds(traffic.itl))
    yield family
    family = HistogramMetricFamily(
        "engine:pd_handoff_seconds",
        f"From the last step of a request's prompt to its first step on the decode rank. {_SUM_TEXT}",
        labels=[],
    )
    family.add_metric([], *_seconds(traffic.handoff))
    yield family
    yield CounterMetricFamily("engine:requests_accepted", "Submissions taken.", value=traffic.accepted)
    answers = CounterMetricFamily(
        "engine:requests", "Submissions answered, by how; refused ones were never accepted.", labels=["result"]
    )
    for result in ANSWERS:
        answers.add_metric([result], getattr(traffic, result))
    yield answers
    yield CounterMetricFamily(
        "engine:pd_failures", "Attempts lost between prefill and decode rank; each may be repeated.",
        value=traffic.push_failures,
    )  # fmt: skip
    yield GaugeMetricFamily("engine:waiting_tokens", "Prompt tokens that wait.", value=traffic.waiting_tokens)


def _request_metrics(traffic: TrafficReport, model: str) -> Iterator[Metric]:
    """Of requests when they have ended: by reason, and how long they took."""
    names, labels = ["model_name", "engine"], [model, "0"]
    ended = CounterMetricFamily(
        "vllm:request_success", "Submissions that ended; `abort`: given up by clients or operators.",
        labels=[*names, "finished_reason"],
    )  # fmt: skip
    for reason in ("stop", "length", "abort", "error"):
        ended.add_metric([*labels, reason], getattr(traffic.ends, reason))
    yield ended
    requests = [f"{bound / 1e3:g}" for bound in REQUEST_BOUNDS_MS]
    tokens = [f"{bound / 1e6:g}" for bound in LATENCY_BOUNDS_US]
    for name, text, field, bounds in (
        ("e2e_request_latency", "From acceptance to the last token", "whole", requests),
        ("request_queue_time", "From acceptance to the first step", "queue", requests),
        ("request_inference_time", "From the first step to the last token", "run", requests),
        ("request_prefill_time", "From the first step to the first token, pushes included", "prefill", requests),
        ("request_decode_time", "From the first token to the last", "decode", requests),
        ("request_time_per_output_token", "Decode time / tokens behind the first", "token", tokens),
    ):
        family = HistogramMetricFamily(f"vllm:{name}_seconds", f"{text}. {_WHOLE_TEXT}", labels=names)
        family.add_metric(labels, *_exact_seconds(getattr(traffic.times, field), bounds))
        yield family


def _draft_metrics(drafted: DraftCounts, model: str) -> Iterator[Metric]:
    names, labels = ["model_name", "engine"], [model, "0"]
    for name, text, value in (
        ("num_drafts", "Rows with drafts that a decode step verified.", drafted.rows),
        ("num_draft_tokens", "Drafted tokens that were verified.", drafted.proposed),
        ("num_accepted_tokens", "Of these, the accepted ones.", drafted.accepted),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=names)
        family.add_metric(labels, value)
        yield family
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Rows of which the draft at this place, from 0, and all before it were accepted.",
        labels=[*names, "position"],
    )
    for place in range(MOST_DRAFTS):
        count = drafted.accepted_at[place] if place < len(drafted.accepted_at) else 0
        family.add_metric([*labels, str(place)], count)
    yield family


_WHOLE_TEXT = "In the head, of requests that were answered whole by their first attempt."
_SUM_TEXT = "The sum is reckoned from the buckets, within 12 %."


def _seconds(counts: Counts) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum of a histogram of the head's."""
    bounds = [*(f"{bound / 1e6:g}" for bound in LATENCY_BOUNDS_US), "+Inf"]
    sums = itertools.accumulate(counts or (0,) * NUM_BUCKETS)
    return list(zip(bounds, map(float, sums), strict=True)), sum_us(counts) / 1e6


def _exact_seconds(times: TimeCounts, bounds: list[str]) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum of a histogram whose sum is known."""
    sums = itertools.accumulate(times.counts or (0,) * (len(bounds) + 1))
    return list(zip((*bounds, "+Inf"), map(float, sums), strict=True)), times.sum_us / 1e6


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
