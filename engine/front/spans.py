"""SpanExporter: requests and their stages as spans, sent to a collector by OTLP over HTTP, in its JSON form.

No request ever waits for it. What is to be sent waits in a bounded queue; what finds no room there, and what a
collector does not take in time, is dropped and counted. The collector is asked from a thread, a batch at a time.

The stages are those of the engine's own account, laid back from the first token, which is when the front heard of them:
of an answer with several choices those of the first one, of one that was tried again those of the last attempt.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import http.client
import logging
import secrets
import time
import urllib.error
import urllib.request
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.log import log_event
from engine.version import VERSION
from transport.messages import RequestStarted

logger = logging.getLogger("engine.front")

QUEUE_REQUESTS = 2048
BATCH_REQUESTS = 256
PERIOD_S = 1.0
"""Between two batches."""
POST_S = 5.0
"""A collector that does not answer within it has not taken the batch."""
_SERVER, _INTERNAL, _ERROR = 2, 1, 2
"""Numbers of OTLP: kinds of a span, code of a status."""

Span = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """One request that has ended. Times are `time.monotonic`.

    Attributes:
        parent: trace id, the caller's span and whether he keeps the trace; None: nobody has one yet.
        started: the engine's account of its first choice; None if it never got so far.
        first_token_at: 0.0 if none came.
    """

    name: str
    request_id: str
    parent: tuple[str, str, bool] | None
    status: int
    began_at: float
    submitted_at: float
    first_token_at: float
    ended_at: float
    started: RequestStarted | None


class SpanExporter:
    """See the module.

    Args:
        url: of the collector, as http://127.0.0.1:4318/v1/traces.

    Attributes:
        dropped: requests that were not sent.

    Raises:
        ConfigError: the URL is none of HTTP.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"http.otlp: {url!r} is not a URL; write http://127.0.0.1:4318/v1/traces")
        self.dropped = 0
        self._url = url
        self._queue: collections.deque[Traced] = collections.deque()

    def add(self, traced: Traced) -> None:
        """Queues a request, unless its caller does not keep its trace."""
        if traced.parent is not None and not traced.parent[2]:
            return
        if len(self._queue) >= QUEUE_REQUESTS:
            self.dropped += 1
            return
        self._queue.append(traced)

    async def run(self) -> None:
        """Sends what comes, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            while self._queue:
                await self.flush()

    async def flush(self) -> None:
        """Sends one batch."""
        batch = [self._queue.popleft() for _ in range(min(BATCH_REQUESTS, len(self._queue)))]
        if not batch:
            return
        data = encode_spans([span for traced in batch for span in build_spans(traced)])
        try:
            await asyncio.to_thread(_post, self._url, data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.dropped += len(batch)
            log_event(logger, "warning", "trace.dropped", msg=f"the collector at {self._url} takes nothing: {error}")


def build_spans(traced: Traced) -> list[Span]:
    """The request, and what is known of its stages."""
    trace_id, caller = traced.parent[:2] if traced.parent is not None else (secrets.token_hex(16), "")
    clock_ns = time.time_ns() - time.monotonic_ns()
    own = secrets.token_hex(8)

    def span(name: str, start: float, end: float, **facts: str | int) -> Span:
        return {
            "traceId": trace_id, "spanId": secrets.token_hex(8), "parentSpanId": own, "name": name, "kind": _INTERNAL,
            "startTimeUnixNano": str(clock_ns + int(1e9 * start)),
            "endTimeUnixNano": str(clock_ns + int(1e9 * max(start, end))),
            "attributes": [{"key": f"engine.{key}", "value": _value(value)} for key, value in facts.items()],
        }  # fmt: skip

    request = span(
        f"POST {traced.name}", traced.began_at, traced.ended_at, request_id=traced.request_id, status=traced.status
    )
    request |= {"spanId": own, "parentSpanId": caller, "kind": _SERVER}
    if traced.status >= 500:
        request["status"] = {"code": _ERROR}
    spans = [request]
    started = traced.started
    if started is not None and traced.first_token_at:
        at, stages = traced.first_token_at, started.timings
        pushed_from = max(traced.submitted_at, at - stages.push_us / 1e6)
        computed_from = max(traced.submitted_at, pushed_from - stages.prefill_us / 1e6)
        queued_from = max(traced.submitted_at, computed_from - stages.queue_us / 1e6)
        spans += [
            span("queue", queued_from, computed_from),
            span(
                "prefill", computed_from, pushed_from, rank=started.prefill_rank, tokens=started.prompt_tokens,
                cached_tokens=started.cached_tokens,
            ),
            span("push", pushed_from, at, bytes=started.pushed_bytes, pushes=started.pushes),
            span("decode", at, traced.ended_at, rank=started.decode_rank),
        ]  # fmt: skip
    elif traced.submitted_at:
        spans.append(span("queue", traced.submitted_at, traced.ended_at))
    return spans


def _value(value: str | int) -> dict[str, str]:
    return {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}


def encode_spans(spans: list[Span]) -> bytes:
    """As the body of an export."""
    named = {"service.name": "engine", "service.version": VERSION}
    resource = {"attributes": [{"key": key, "value": _value(value)} for key, value in named.items()]}
    scoped = {"scope": {"name": "engine.front"}, "spans": spans}
    return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": [scoped]}]})


def _post(url: str, data: bytes) -> None:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=POST_S):
        pass
