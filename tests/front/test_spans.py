"""Traces: the caller's trace through the label, spans as a collector gets them, a collector that is not there."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.core.trace import read_parent, trace_of
from engine.errors import ConfigError
from engine.front.spans import QUEUE_REQUESTS, SpanExporter, Traced, build_spans
from tests.front.rig import ids_of, run, running_front
from transport.messages import RequestStarted, Timings

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CALLER}-01"
BODY = {"prompt": "the question", "max_tokens": 3, "stream": True}


@contextmanager
def collecting() -> Iterator[tuple[str, list[Any]]]:
    """A collector on a port of its own: its URL, and the spans that it got."""
    spans: list[Any] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.headers["content-type"] == "application/json"
            spans.extend(body["resourceSpans"][0]["scopeSpans"][0]["spans"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def make_traced(**changes: Any) -> Traced:
    started = RequestStarted(1, 1, 90, 64, 3, 17, 4096, 2, 10, Timings(200_000, 300_000, 100_000))
    fields: dict[str, Any] = {
        "name": "chat", "request_id": "abc", "parent": read_parent(PARENT), "status": 200, "began_at": 10.0,
        "submitted_at": 10.1, "first_token_at": 11.0, "ended_at": 15.0, "started": started, **changes,
    }  # fmt: skip
    return Traced(**fields)


def lengths(spans: list[Any]) -> dict[str, float]:
    return {
        span["name"]: round((int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9, 3) for span in spans
    }


def test_a_label_tells_its_trace() -> None:
    assert trace_of(f"bench-1 {PARENT}") == TRACE
    assert trace_of("bench-1") is None and trace_of("") is None and trace_of(f"x {PARENT}0") is None
    assert read_parent(PARENT) == (TRACE, CALLER, True) and read_parent(PARENT[:-1] + "0") == (TRACE, CALLER, False)
    assert read_parent(f"00-{'0' * 32}-{CALLER}-01") is None


def test_stages_are_laid_back_from_the_first_token() -> None:
    spans = build_spans(make_traced())
    assert lengths(spans) == {"POST chat": 5.0, "queue": 0.2, "prefill": 0.3, "push": 0.1, "decode": 4.0}
    request, *stages = spans
    assert request["parentSpanId"] == CALLER and {span["traceId"] for span in spans} == {TRACE}
    assert {stage["parentSpanId"] for stage in stages} == {request["spanId"]}
    assert all(one["endTimeUnixNano"] == two["startTimeUnixNano"] for one, two in itertools.pairwise(stages))
    facts = {fact["key"]: fact["value"] for stage in stages for fact in stage["attributes"]}
    assert facts["engine.cached_tokens"] == {"intValue": "64"} and facts["engine.rank"] == {"intValue": "17"}


def test_a_stage_never_begins_before_its_request_was_submitted() -> None:
    assert lengths(build_spans(make_traced(submitted_at=10.7)))["queue"] == 0.0


def test_what_never_started_has_waited_and_an_error_is_one() -> None:
    spans = build_spans(make_traced(started=None, first_token_at=0.0, status=503, parent=None))
    assert lengths(spans) == {"POST chat": 5.0, "queue": 4.9}
    assert spans[0]["status"] == {"code": 2} and spans[0]["parentSpanId"] == "" and len(spans[0]["traceId"]) == 32
    refused = build_spans(make_traced(started=None, first_token_at=0.0, submitted_at=0.0, status=400))
    assert lengths(refused) == {"POST chat": 5.0} and "status" not in refused[0]


def test_the_collector_gets_what_clients_asked() -> None:
    async def main() -> None:
        with collecting() as (url, spans):
            async with running_front() as rig:
                rig.front.spans = SpanExporter(url)
                rig.head.auto = ids_of("the answer")
                await rig.post("/v1/completions", BODY, traceparent=PARENT)
                await rig.post("/v1/completions", BODY, traceparent=PARENT[:-1] + "0")
                await rig.post("/v1/completions", {"prompt": 3.5})
                await rig.get("/health")
                await rig.front.spans.flush()
            assert [(span["name"], span["traceId"] == TRACE) for span in spans] == [
                *((name, True) for name in ("POST completions", "queue", "prefill", "push", "decode")),
                ("POST completions", False),
            ]
            assert rig.front.spans.dropped == 0

    run(main)


def test_a_collector_that_is_not_there_costs_requests_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        exporter = SpanExporter("http://127.0.0.1:9/v1/traces")
        for _ in range(QUEUE_REQUESTS + 5):
            exporter.add(make_traced())
        assert exporter.dropped == 5
        await exporter.flush()
        assert exporter.dropped > 5

    run(main)
    assert [record.message for record in caplog.records if record.name == "engine.front"] == ["trace.dropped"]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"http\.otlp: 'collector:4318' is not a URL"):
        SpanExporter("collector:4318")
