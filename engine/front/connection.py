"""FrontConnection: one client's connection: uvicorn's protocol, with the bounds that it has not.

It counts connections and turns one too many away with an answer, ends those that never say a whole request, answers
what is no HTTP in the envelope that clients know, and can be cut at once: a reader who reads nothing would otherwise
keep what is buffered for him until he goes.
"""

from __future__ import annotations

import asyncio
import functools
import select
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.config import HttpConfig
from engine.front.counts import FrontCounts
from engine.front.replies import HttpError

REQUEST_S = 30.0
"""From a connection, or from the first byte after an answer, until a request's headers are there."""
KEEP_ALIVE_S = 75
"""An idle connection is kept so long: longer than proxies and clients keep theirs."""
SWEEP_S = 1.0
"""Between two looks at connections that are not being read."""
CONNECTION = "engine.connection"
"""Extension of the scope that names the connection."""
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}


class Door:
    """All connections of a front."""

    def __init__(self, http: HttpConfig, counts: FrontCounts) -> None:
        self.http = http
        self.counts = counts
        self.open: set[FrontConnection] = set()

    def make_protocol(self, **arguments: Any) -> FrontConnection:
        """Given to uvicorn in place of its protocol's class."""
        return FrontConnection(self, **arguments)

    async def sweep(self) -> None:
        """Looks for clients who hung up while their connection is not read, for ever. That is so where a client sent
        the next request before it had the answer: the end of the stream waits behind it."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in list(self.open):
                connection.check_hung_up()

    def abort_all(self) -> None:
        for connection in list(self.open):
            connection.abort()


class FrontConnection(H11Protocol):
    """See the module."""

    def __init__(self, door: Door, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._door = door
        self._refused = False
        self._late: asyncio.TimerHandle | None = None
        self._discarded = 0
        self.app = functools.partial(_with_connection, self.app, self)  # type: ignore[assignment]

    @property
    def is_congested(self) -> bool:
        """Whether the client is behind with reading."""
        return self.flow.write_paused

    def abort(self) -> None:
        """Ends it now, whatever is buffered."""
        self.transport.abort()

    def check_hung_up(self) -> None:
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            self.abort()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        door = self._door
        door.open.add(self)
        door.counts.put("open_connections", len(door.open))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            # What waits for a client who takes nothing is given up by the kernel, too.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * door.http.stall_s))
        if len(door.open) > door.http.connections:
            door.counts.add("rejected connections")
            words = f"this front has {door.http.connections} connections (http.connections)"
            self._say_raw(HttpError(503, "too_many_connections", words, retry_after_s=1))
            return
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            # The rest of a body that was refused. It is read, because a client that is still writing does not look
            # for the answer; but not for ever.
            self._discarded += len(data)
            if self._discarded > self._door.http.body_bytes:
                self.abort()
                return
        super().data_received(data)
        if self.cycle is cycle and (cycle is None or cycle.response_complete):
            self._expect_request()
        else:
            self._discarded = 0
            self._expect_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._unset_keepalive_if_required()
        self._door.open.discard(self)
        self._door.counts.put("open_connections", len(self._door.open))
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_nothing()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too much of it."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            limit = self._door.http.header_bytes
            words = f"the request's line and headers may have {limit} bytes (http.header_bytes)"
            answer = HttpError(431, "headers_too_large", words)
        else:
            answer = HttpError(400, "invalid_http", f"this is no HTTP request: {error}"[:256])
        self._door.counts.add_answer("none", answer.status)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.abort()
                return
        self._say_raw(answer)

    # ------------------------------------------------------------ own

    def _say_raw(self, error: HttpError) -> None:
        """Answers without a request, and closes."""
        self._refused = True
        self._expect_nothing()
        body = error.body()
        lines = [b"HTTP/1.1 %d %s" % (error.status, _REASONS[error.status])]
        headers = [*error.headers(), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()

    def _expect_request(self) -> None:
        if self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(REQUEST_S, self.abort)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _with_connection(app: Any, connection: FrontConnection, scope: Any, receive: Any, send: Any) -> None:
    scope.setdefault("extensions", {})[CONNECTION] = connection
    await app(scope, receive, send)
