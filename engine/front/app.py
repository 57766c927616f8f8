"""Front: the ASGI application: every request passes here, gets its id, its verdict and its line in the log.

What a request needs before anybody looks at its body is checked here: limits of its headers, the client's key, whether
there is room. Errors of every route end here, as the envelope that clients know.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from engine.config import HttpConfig
from engine.core.trace import read_parent
from engine.front.bodies import ClientLeft, Served
from engine.front.connection import CONNECTION, FrontConnection
from engine.front.counts import FrontCounts
from engine.front.desk import HeadDesk
from engine.front.generation import Generation
from engine.front.guard import Guard
from engine.front.headlink import HeadLink
from engine.front.replies import HttpError, send_response
from engine.front.spans import SpanExporter, Traced
from engine.log import log_event

logger = logging.getLogger("engine.front")

INLINE_BYTES = 16 << 10
"""Bodies up to this size are prepared in the loop; a hop to a thread and back costs more."""
PREPARING_THREADS = 2
BODIES = 8
"""So many bodies of the largest size may be on their way in or being prepared."""
LONGEST_RETRY_AFTER_S = 60
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_CONVERSATION = re.compile(rb"[\x20-\x7e]{1,256}")
_CONVERSATION_HEADERS = (b"x-session-id", b"x-correlation-id", b"x-session-affinity")
"""Names that clients give to a conversation; the first that is there counts."""
_EXCHANGE = "engine.exchange"
_OPEN_PATHS = frozenset({"/health", "/ready"})
"""Asked by those who have no keys."""
_METRICS_PATH = "/metrics"

T = TypeVar("T")


class Exchange:
    """One request and its answer, for the log.

    Attributes:
        headers: by lower-case name; of several, the last.
        label: what the head and its screens call it: the request's id, and the caller's trace.
        affinity: the caller's name for the conversation; empty for none.
        facts: what is logged when it has ended; None for requests of no interest.
        parent: the caller's trace, see `read_parent`.
        generation: what was computed for it, if anything.
    """

    def __init__(self, scope: Any) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        asked = self.headers.get(b"x-request-id", b"")
        self.request_id = asked.decode() if _REQUEST_ID.fullmatch(asked) else f"req-{secrets.token_hex(12)}"
        parent = self.headers.get(b"traceparent", b"")
        self.parent = read_parent(parent.decode("latin-1"))
        self.trace_id = self.parent[0] if self.parent is not None else None
        self.label = f"{self.request_id} {parent.decode()}" if self.parent is not None else self.request_id
        self.generation: Generation | None = None
        named = next((self.headers[name] for name in _CONVERSATION_HEADERS if name in self.headers), b"")
        self.affinity = named.decode() if _CONVERSATION.fullmatch(named) else ""
        self.connection: FrontConnection = scope["extensions"][CONNECTION]
        self.began_at = time.monotonic()
        self.status = 0
        self.route = "none"
        self.facts: dict[str, Any] | None = None


def exchange_of(scope: Any) -> Exchange:
    exchange: Exchange = scope[_EXCHANGE]
    return exchange


class Front:
    """See the module.

    Attributes:
        is_draining: new generations are refused.
        generations: those under way.
        spans: takes what has ended, where somebody collects traces.
    """

    def __init__(
        self, http: HttpConfig, served: Served, link: HeadLink, desk: HeadDesk, counts: FrontCounts, guard: Guard,
        *, progress_s: float,
    ) -> None:  # fmt: skip
        self.http = http
        self.served = served
        self.link = link
        self.desk = desk
        self.counts = counts
        self.progress_s = progress_s
        self.is_draining = False
        self.spans: SpanExporter | None = None
        self.generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._guard = guard
        self._open_paths = _OPEN_PATHS if http.metrics_need_key else _OPEN_PATHS | {_METRICS_PATH}
        self._router: Router | None = None
        self._waiting = 0
        self._body_bytes = 0
        self._queue_s = 0.0
        self._threads = concurrent.futures.ThreadPoolExecutor(PREPARING_THREADS, "front-prepare")

    def route(self, routes: list[Route]) -> None:
        self._router = Router(routes, redirect_slashes=False)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    # ------------------------------------------------------------ admission

    @property
    def retry_after_s(self) -> int:
        """For a client that is refused for want of room: how long requests have been waiting for their turn."""
        return min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(self._queue_s)))

    def note_queue(self, seconds: float) -> None:
        """A request waited so long for its turn."""
        self._queue_s += (seconds - self._queue_s) / 8

    def check_open(self) -> None:
        """Raises HttpError 503 while nothing can be submitted."""
        if self.is_draining:
            self.counts.add("rejected draining")
            raise HttpError(503, "draining", "this engine ends and takes no more requests", retry_after_s=1)
        if self.link.hello is None:
            self.counts.add("rejected unreachable")
            raise HttpError(503, "engine_lost", "the engine does not answer", retry_after_s=1)

    @contextmanager
    def seat(self) -> Iterator[Callable[[], None]]:
        """A place among the requests without a first token; what it gives ends it early.

        Raises:
            HttpError: 429, there is none.
        """
        if self._waiting >= self.http.queue:
            self.counts.add("rejected queue")
            words = f"{self._waiting} requests wait for their first token (http.queue)"
            raise HttpError(429, "queue_full", words, retry_after_s=self.retry_after_s)
        self._waiting += 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._waiting -= 1

        try:
            yield leave
        finally:
            leave()

    @contextmanager
    def body_room(self, headers: dict[bytes, bytes]) -> Iterator[None]:
        """Room for a body from its first byte until it is prepared; one of unknown length counts as the largest.

        Raises:
            HttpError: 429, there is none.
        """
        announced = headers.get(b"content-length", b"")
        size = min(int(announced), self.http.body_bytes) if announced.isdigit() else self.http.body_bytes
        limit = BODIES * self.http.body_bytes
        if self._body_bytes + size > limit:
            self.counts.add("rejected queue")
            words = f"bodies of {self._body_bytes} bytes are being read (limit {limit}, {BODIES} times http.body_bytes)"
            raise HttpError(429, "queue_full", words, retry_after_s=1)
        self._body_bytes += size
        try:
            yield
        finally:
            self._body_bytes -= size

    async def prepare(self, size: float, work: Callable[[], T]) -> T:
        """Work on a body of so many bytes: here if it is short, else in a thread."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        self.generations.add(generation)
        self._idle.clear()
        self.counts.put("open_requests", len(self.generations))
        try:
            yield
        finally:
            self.generations.discard(generation)
            if not self.generations:
                self._idle.set()
            self.counts.put("open_requests", len(self.generations))

    async def wait_idle(self) -> None:
        """Until no generation is under way."""
        await self._idle.wait()

    # ------------------------------------------------------------ ASGI

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope)
        scope[_EXCHANGE] = exchange
        scope["app"] = self  # the router then raises where nothing fits, instead of answering in its own words
        own = (b"x-request-id", exchange.request_id.encode())

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], own]
            await send(message)

        try:
            try:
                self._check(scope, exchange)
                assert self._router is not None
                await self._router(scope, receive, answer)
            except HTTPException as error:
                raise _of_router(error, scope) from None
        except ClientLeft:
            exchange.status = 499
        except HttpError as error:
            if exchange.facts is not None:
                exchange.facts.setdefault("code", error.code)
            await send_response(answer, error.status, error.body(), error.headers())
        except Exception:
            # The request boundary: a bug costs this request, not the others.
            logger.exception("front.bug", extra={"fields": {"request_id": exchange.request_id}})
            if exchange.status:
                exchange.connection.abort()
            else:
                words = f"a bug of the engine; the log has it ({exchange.request_id})"
                bug = HttpError(500, "internal_error", words)
                await send_response(answer, bug.status, bug.body(), bug.headers())
            exchange.status = 500
        finally:
            self.counts.add_answer(exchange.route, exchange.status or 499)
            if exchange.facts is not None:
                self._log(exchange, exchange.facts)
                if self.spans is not None:
                    self.spans.add(_trace(exchange))

    def _check(self, scope: Any, exchange: Exchange) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope["raw_path"])
        size += len(scope["query_string"])
        if size > self.http.header_bytes:
            words = (
                f"the request's line and headers have {size} bytes (limit {self.http.header_bytes}, http.header_bytes)"
            )
            raise HttpError(431, "headers_too_large", words, closes=True)
        if scope["path"] not in self._open_paths and not self._guard.allows(exchange.headers.get(b"authorization")):
            raise HttpError(401, "invalid_api_key", "no valid key in the header Authorization: Bearer KEY")

    def _log(self, exchange: Exchange, facts: dict[str, Any]) -> None:
        total_ms = 1e3 * (time.monotonic() - exchange.began_at)
        log_event(
            logger, "info", "request.finish",
            route=exchange.route, status=exchange.status, request_id=exchange.request_id, trace_id=exchange.trace_id,
            **facts, total_ms=total_ms,
        )  # fmt: skip


def _trace(exchange: Exchange) -> Traced:
    """The request as a trace has it."""
    generation = exchange.generation
    started = None if generation is None else generation.choices[0].ask.started
    return Traced(
        exchange.route, exchange.request_id, exchange.parent, exchange.status or 499,
        began_at=exchange.began_at, submitted_at=0.0 if generation is None else generation.began_at,
        first_token_at=0.0 if generation is None else generation.first_token_at, ended_at=time.monotonic(),
        started=started,
    )  # fmt: skip


def _of_router(error: HTTPException, scope: Any) -> HttpError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        words = f"{scope['method']} {scope['path'][:128]}: only {allowed}"
        return HttpError(405, "method_not_allowed", words, more=[(b"allow", allowed.encode())])
    return HttpError(404, "not_found", f"there is no {scope['method']} {scope['path'][:128]!r}")
