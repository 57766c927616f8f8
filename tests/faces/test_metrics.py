"""The metrics' text: names, types and labels that dashboards rely on, and what the values are made of."""

from __future__ import annotations

import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.core.latency import LatencyCounts
from engine.core.stages import StageTimes
from engine.faces.metrics import absence_text, metrics_text
from engine.version import VERSION
from tests.faces.experts_samples import make_part, make_past, make_status, make_traffic
from tests.faces.test_status import make_rank
from transport.messages import (
    LATENCY_BOUNDS_US,
    REBALANCE_BOUNDS_MS,
    DraftCounts,
    ExpertsReport,
    PartReport,
    PrefixCounts,
    RequestEnds,
    TurnCounts,
)

NAMES = {
    "engine:up": ("gauge", ()),
    "engine:ready": ("gauge", ()),
    "engine:degraded": ("gauge", ()),
    "engine:info": ("gauge", ("version", "model", "layout")),
    "engine:ranks": ("gauge", ("pool", "state")),
    "engine:pd_corrupt_pushes": ("counter", ()),
    "vllm:num_requests_running": ("gauge", ("model_name", "engine")),
    "vllm:num_requests_waiting": ("gauge", ("model_name", "engine")),
    "vllm:prompt_tokens": ("counter", ("model_name", "engine")),
    "vllm:prompt_tokens_cached": ("counter", ("model_name", "engine")),
    "vllm:generation_tokens": ("counter", ("model_name", "engine")),
    "engine:tokens": ("counter", ("kind",)),
    "vllm:prefix_cache_queries": ("counter", ("model_name", "engine")),
    "vllm:prefix_cache_hits": ("counter", ("model_name", "engine")),
    "engine:prefix_hit_possible_tokens": ("counter", ()),
    "engine:prefix_cache_pages": ("gauge", ("state",)),
    "engine:prefix_cache_evicted_pages": ("counter", ()),
    "engine:hand_back_turns": ("counter", ("what",)),
    "engine:hand_back_declined": ("counter", ("reason",)),
    "engine:hand_back_pages": ("counter", ()),
    "engine:hand_back_bytes": ("counter", ()),
    "vllm:spec_decode_num_drafts": ("counter", ("model_name", "engine")),
    "vllm:spec_decode_num_draft_tokens": ("counter", ("model_name", "engine")),
    "vllm:spec_decode_num_accepted_tokens": ("counter", ("model_name", "engine")),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", ("model_name", "engine", "position")),
    "vllm:time_to_first_token_seconds": ("histogram", ("model_name", "engine")),
    "vllm:inter_token_latency_seconds": ("histogram", ("model_name", "engine")),
    "vllm:kv_cache_usage_perc": ("gauge", ("model_name", "engine")),
    "engine:kv_pages_used_ratio": ("gauge", ("pool",)),
    "vllm:request_success": ("counter", ("model_name", "engine", "finished_reason")),
    **{
        f"vllm:{name}_seconds": ("histogram", ("model_name", "engine"))
        for name in (
            "e2e_request_latency",
            "request_queue_time",
            "request_inference_time",
            "request_prefill_time",
            "request_decode_time",
            "request_time_per_output_token",
        )
    },
    "engine:pd_handoff_seconds": ("histogram", ()),
    "engine:requests_accepted": ("counter", ()),
    "engine:requests": ("counter", ("result",)),
    "engine:waiting_tokens": ("gauge", ()),
    "engine:progress_age_seconds": ("gauge", ("pool",)),
    "engine:step_p99_seconds": ("gauge", ("pool",)),
    "engine:loop_lag_p99_seconds": ("gauge", ("pool",)),
    "engine:pd_pushes": ("counter", ()),
    "engine:pd_push_bytes": ("counter", ()),
    "engine:pd_push_inflight": ("gauge", ()),
    "engine:pd_failures": ("counter", ()),
    "engine:eplb_balancedness": ("gauge", ("pool", "part")),
    "engine:eplb_imbalance_max_layer": ("gauge", ("pool", "part")),
    "engine:eplb_lost_seconds": ("counter", ("pool", "part")),
    "engine:eplb_rebalancing": ("gauge", ("pool", "part")),
    "engine:eplb_rebalance_events": ("counter", ("pool", "part", "result")),
    "engine:eplb_moved_bytes": ("counter", ("pool", "part")),
    "engine:eplb_moved_slots": ("counter", ("pool", "part")),
    "engine:eplb_rebalance_seconds": ("histogram", ("pool", "part")),
    "engine:eplb_predicted_gain_ratio": ("gauge", ("pool", "part")),
    "engine:eplb_realised_gain_ratio": ("gauge", ("pool", "part")),
    "engine:eplb_last_progress_timestamp_seconds": ("gauge", ("pool", "part")),
}
"""What is frozen: a removal or another label breaks somebody's board."""

NOW = 1_795_983_569.5
LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{([a-zA-Z_]\w*="([^"\\\n]|\\.)*",?)*\})? (\S+)')


def text_of(*parts: PartReport, **status: object) -> str:
    return metrics_text(make_status(**status), ExpertsReport(parts), make_traffic(), NOW)


ORDER = (
    "version", "model", "layout", "model_name", "engine", "pool", "part", "group", "state", "result", "position",
    "kind", "finished_reason", "what", "reason", "le",
)  # fmt: skip


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of ORDER) -> value."""
    return {
        (sample.name, *(sample.labels[label] for label in ORDER if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


FULL = make_part(
    history=(
        make_past(3, "applied", after=1.9, realised=0.1, ended_ago_ms=9000),
        make_past(18, "applied", after=1.4, realised=0.8),
        make_past(19, "failed", ended_ago_ms=3000),
    ),
    applied=5, skipped=4, failed=2, rolled_back=1, moved_slots_total=70, moved_bytes_total=70 << 20, took_ms_total=4500,
    took_counts=(1, 0, 2, *(0 for _ in REBALANCE_BOUNDS_MS[3:]), 1), progress_age_ms=2500, state="moving",
)  # fmt: skip


def test_names_types_and_labels_are_those_that_are_frozen() -> None:
    found = {}
    for family in text_string_to_metric_families(text_of(FULL)):
        labels = {tuple(sorted(one.labels, key=ORDER.index)) for one in family.samples if "le" not in one.labels}
        assert len(labels) == 1, family.name
        found[family.name] = (family.type, labels.pop())
        assert family.documentation
    assert found == NAMES


def test_the_text_keeps_to_the_format() -> None:
    """As promtool does: help and type once before the samples, counters end in _total, histograms add up."""
    told: dict[str, str] = {}
    helped: set[str] = set()
    text = text_of(FULL, make_part(part="draft"))
    assert text.endswith("\n")
    seen: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name in helped and name not in told
            assert kind != "counter" or name.endswith("_total")
            told[name] = kind
        else:
            match = LINE.fullmatch(line)
            assert match is not None, line
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            name = match[1] if match[1] in told else family
            assert name in told and (told[name] == "histogram" or name == match[1]), line
            float(match[5])
            assert line.rsplit(" ", 1)[0] not in seen, "a series twice"
            seen.add(line.rsplit(" ", 1)[0])
    name = "engine:eplb_rebalance_seconds"
    histogram = {key: value for key, value in samples(text).items() if key[0].startswith(name)}
    buckets = [value for key, value in histogram.items() if key[0].endswith("_bucket") and key[2] == "main"]
    assert buckets == sorted(buckets) and len(buckets) == len(REBALANCE_BOUNDS_MS) + 1
    assert buckets[-1] == histogram[f"{name}_count", "decode", "main"] == 4


def test_values_are_in_the_units_that_the_names_say() -> None:
    found = samples(text_of(FULL, degraded=("a", "b")))
    eplb = {key[0].removeprefix("engine:eplb_"): value for key, value in found.items() if key[1:] == ("decode", "main")}
    assert eplb["balancedness"] == 0.5 and eplb["imbalance_max_layer"] == 2.5
    assert eplb["lost_seconds_total"] == 2.5 and eplb["rebalancing"] == 1
    assert eplb["moved_slots_total"] == 70 and eplb["moved_bytes_total"] == 70 << 20
    assert eplb["rebalance_seconds_sum"] == 4.5
    assert eplb["predicted_gain_ratio"] == pytest.approx(0.375) and eplb["realised_gain_ratio"] == pytest.approx(0.3)
    assert eplb["last_progress_timestamp_seconds"] == NOW - 2.5
    events = {key[3]: value for key, value in found.items() if key[0] == "engine:eplb_rebalance_events_total"}
    assert events == {"applied": 5, "skipped": 4, "failed": 2, "rolled_back": 1}
    bucket = "engine:eplb_rebalance_seconds_bucket"
    assert [found[bucket, "decode", "main", le] for le in ("0.1", "0.5", "300", "+Inf")] == [1, 3, 3, 4]
    assert found["engine:requests_total", "finished"] == 900 and found["engine:requests_total", "refused"] == 7
    assert found["engine:requests_accepted_total",] == 1000 and found["engine:waiting_tokens",] == 12_000
    assert found["vllm:num_requests_running", "nano", "0"] == 10
    assert found["vllm:prompt_tokens_cached_total", "nano", "0"] == 100_000
    assert found["engine:degraded",] == 2 and found["engine:ready",] == 1
    assert found["engine:info", VERSION, "nano", "1xDEP1 prefill, 1xDEP4 decode"] == 1


def test_latencies_are_histograms_in_seconds() -> None:
    counts = LatencyCounts()
    counts.add(20_000, 30)
    counts.add(3e8, 2)
    traffic = make_traffic(itl=counts.counts())
    found = samples(metrics_text(make_status(), ExpertsReport(()), traffic, NOW))
    name, labels = "vllm:inter_token_latency_seconds", ("nano", "0")
    buckets = {key[3]: value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert len(buckets) == len(LATENCY_BOUNDS_US) + 1 and list(buckets.values()) == sorted(buckets.values())
    assert {value for bound, value in buckets.items() if float(bound) < 0.02} == {0}
    assert {value for bound, value in buckets.items() if 0.025 < float(bound) < 300} == {30}
    assert buckets["+Inf"] == found[f"{name}_count", *labels] == 32
    assert found[f"{name}_sum", *labels] == pytest.approx(30 * 0.02 + 2 * LATENCY_BOUNDS_US[-1] / 1e6, rel=0.12)
    assert found["vllm:time_to_first_token_seconds_count", *labels] == found["engine:pd_handoff_seconds_sum",] == 0


VLLM_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0, float("inf"),
)  # fmt: skip


def test_requests_have_all_of_vllms_buckets_and_exact_sums() -> None:
    stages, labels = StageTimes(), ("nano", "0")
    stages.note(10.0, 250_000, 11.25, 13.25, 5)
    stages.note(10.0, 50_000, 10.1, 200.1, 1)
    traffic = make_traffic(times=stages.told(), ends=RequestEnds(stop=4, length=3, abort=2, error=1))
    found = samples(metrics_text(make_status(), ExpertsReport(()), traffic, NOW))
    for name, seconds in {
        "e2e_request_latency": (3.25, 190.1), "request_queue_time": (0.25, 0.05),
        "request_inference_time": (3.0, 190.05), "request_prefill_time": (1.0, 0.05),
        "request_decode_time": (2.0, 190.0),
    }.items():  # fmt: skip
        buckets = {float(key[3]): value for key, value in found.items() if key[0] == f"vllm:{name}_seconds_bucket"}
        assert buckets == {bound: sum(value <= bound for value in seconds) for bound in buckets}, name
        assert buckets.keys() > set(VLLM_BOUNDS)
        assert found[f"vllm:{name}_seconds_sum", *labels] == pytest.approx(sum(seconds), abs=2e-6)
        assert found[f"vllm:{name}_seconds_count", *labels] == 2
    assert found["vllm:request_time_per_output_token_seconds_sum", *labels] == pytest.approx(0.5)
    assert found["vllm:request_time_per_output_token_seconds_count", *labels] == 2
    reasons = [found["vllm:request_success_total", *labels, reason] for reason in ("stop", "length", "abort", "error")]
    assert reasons == [4, 3, 2, 1]


def test_the_cache_in_use_is_that_of_the_decode_ranks_and_spare_pages_are_free() -> None:
    ranks = [make_rank(0, "prefill", "ready"), make_rank(1, "decode", "ready"), make_rank(2, "decode", "ready")]
    for at, total, free, cached, pinned in ((0, 100, 20, 60, 10), (1, 100, 40, 0, 0), (2, 300, 260, 0, 0)):
        pages = {"pages_total": total, "pages_free": free, "pages_cached": cached, "pages_pinned": pinned}
        ranks[at] = msgspec.structs.replace(ranks[at], snapshot=msgspec.structs.replace(ranks[at].snapshot, **pages))
    found = samples(text_of(ranks=tuple(ranks)))
    assert found["vllm:kv_cache_usage_perc", "nano", "0"] == found["engine:kv_pages_used_ratio", "decode"] == 0.25
    assert found["engine:kv_pages_used_ratio", "prefill"] == pytest.approx(0.3)


def test_drafts_are_counted_over_all_ranks_and_by_place() -> None:
    labels = ("nano", "0")
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    nothing = samples(text_of())
    assert [nothing[name, *labels, str(place)] for place in range(7)] == [0] * 7
    found = samples(text_of(drafted=DraftCounts(10, 30, 12, (6, 4, 2))))
    assert [found[name, *labels, str(place)] for place in range(7)] == [6, 4, 2, 0, 0, 0, 0]
    assert found["vllm:spec_decode_num_drafts_total", *labels] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total", *labels] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_total", *labels] == 12


def test_ranks_are_counted_by_state_and_corrupt_pushes_over_all() -> None:
    states = (("draining", "drained"), ("draining", ""), ("starting", "weights 1/2"), ("ready", ""), ("ready", ""))
    ranks = [make_rank(0, "prefill", "ready"), *(make_rank(n, "decode", *one) for n, one in enumerate(states, 1))]
    for at, corrupt in ((0, 0), (4, 3), (5, 4)):
        snapshot = msgspec.structs.replace(ranks[at].snapshot, corrupt_pushes=corrupt)
        ranks[at] = msgspec.structs.replace(ranks[at], snapshot=snapshot)
    found = samples(text_of(ranks=tuple(ranks)))
    counts = {key[1:]: value for key, value in found.items() if key[0] == "engine:ranks" and value}
    assert counts == {
        ("prefill", "ready"): 1, ("decode", "drained"): 1, ("decode", "draining"): 1, ("decode", "starting"): 1,
        ("decode", "ready"): 2,
    }  # fmt: skip
    assert found["engine:pd_corrupt_pushes_total",] == 7


def test_of_each_pool_the_worst_rank_is_told_and_pushes_are_summed() -> None:
    ranks = [make_rank(0, "prefill", "ready"), make_rank(1, "prefill", "ready"), make_rank(2, "decode", "starting")]
    for at, age, pushes in ((0, 2500, 3), (1, 100, 4)):
        changes = {"step_age_ms": age, "pushes": pushes, "pushes_inflight": at}
        ranks[at] = msgspec.structs.replace(ranks[at], snapshot=msgspec.structs.replace(ranks[at].snapshot, **changes))
    status = make_status(ranks=tuple(ranks))
    found = samples(metrics_text(status, ExpertsReport(()), make_traffic(push_failures=9), NOW))
    assert found["engine:progress_age_seconds", "prefill"] == 2.5
    assert ("engine:progress_age_seconds", "decode") not in found, "nobody knows"
    assert found["engine:loop_lag_p99_seconds", "prefill"] == pytest.approx(0.0975)
    assert found["engine:pd_pushes_total",] == 7 and found["engine:pd_push_inflight",] == 1
    assert found["engine:pd_push_bytes_total",] == 2 * (900 << 20) and found["engine:pd_failures_total",] == 9


def test_the_prefix_cache_is_summed_over_ranks() -> None:
    ranks = [make_rank(0, "prefill", "ready"), make_rank(1, "prefill", "ready"), make_rank(2, "decode", "starting")]
    for at, cached, pinned in ((0, 40, 10), (1, 5, 5)):
        snapshot = msgspec.structs.replace(ranks[at].snapshot, pages_cached=cached, pages_pinned=pinned)
        ranks[at] = msgspec.structs.replace(ranks[at], snapshot=snapshot)
    found = samples(text_of(ranks=tuple(ranks), prefix=PrefixCounts(1000, 700, 720, 3)))
    assert found["vllm:prefix_cache_queries_total", "nano", "0"] == 1000
    assert found["vllm:prefix_cache_hits_total", "nano", "0"] == 700
    assert found["engine:prefix_hit_possible_tokens_total",] == 720
    assert found["engine:prefix_cache_evicted_pages_total",] == 3
    assert found["engine:prefix_cache_pages", "pinned"] == 15 and found["engine:prefix_cache_pages", "unpinned"] == 30
    turns = TurnCounts(
        offered=9, withdrawn=1, declined=3, failed=1, granted=5, gone=1, full=2, kept=4, kept_pages=12, kept_bytes=99
    )
    told = samples(text_of(ranks=tuple(ranks), turns=turns))
    assert told["engine:hand_back_turns_total", "offered"] == 9 and told["engine:hand_back_turns_total", "kept"] == 4
    assert told["engine:hand_back_declined_total", "full"] == 2
    assert told["engine:hand_back_pages_total",] == 12 and told["engine:hand_back_bytes_total",] == 99
    traffic = make_traffic()
    kinds = [found["engine:tokens_total", kind] for kind in ("cached", "new", "output")]
    assert kinds == [
        traffic.cached_tokens, traffic.prompt_tokens - traffic.cached_tokens, traffic.generated_tokens
    ]  # fmt: skip


def test_what_nobody_knows_yet_is_absent() -> None:
    fresh = samples(text_of(make_part(history=(make_past(1, "applied"),))))
    assert ("engine:eplb_realised_gain_ratio", "decode", "main") not in fresh
    assert fresh["engine:eplb_predicted_gain_ratio", "decode", "main"] == pytest.approx(0.375)
    never = samples(text_of(make_part()))
    assert ("engine:eplb_predicted_gain_ratio", "decode", "main") not in never
    assert never["engine:eplb_rebalance_seconds_count", "decode", "main"] == 0


def test_groups_are_told_apart_only_where_there_are_several() -> None:
    one = samples(text_of(FULL, make_part(part="draft")))
    assert {key[1:] for key in one if key[0] == "engine:eplb_rebalancing"} == {("decode", "main"), ("decode", "draft")}
    two = samples(text_of(FULL, make_part(group=1, ranks=(5, 6, 7, 8))))
    assert {key[1:] for key in two if key[0] == "engine:eplb_rebalancing"} == {
        ("decode", "main", "0"),
        ("decode", "main", "1"),
    }


def test_groups_of_one_have_no_eplb_metrics() -> None:
    text = text_of(ready=False, reasons=("starting",))
    assert "eplb" not in text and samples(text)["engine:ready",] == 0
    assert 'layout="1xDEP1 prefill, 4xDEP1 decode"' in text


def test_an_absent_engine_is_down_and_nothing_else() -> None:
    assert samples(absence_text()) == {("engine:up",): 0}


def test_the_number_of_series_does_not_grow_with_the_group() -> None:
    small, large = text_of(make_part()), text_of(make_part(ranks=tuple(range(1, 5)), layers=61, experts=256))
    assert small.count("\n") == large.count("\n")


def test_labels_are_escaped() -> None:
    assert 'model="/models/\\"odd\\"\\\\name"' in text_of(model='/models/"odd"\\name')
