"""Accepts clients (fronts, batch runs, consoles' requesters) on the head's request socket and feeds the router.

The request boundary: whatever a client sends, or however it goes, ends this connection and nothing else.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
from collections.abc import Awaitable, Callable

import trio

from engine.actors.router import Router
from engine.actors.seats import Client
from engine.errors import EngineError, RemoteProtocolError
from engine.log import log_event
from transport.messages import HEAD_FROM_CLIENT, PROTOCOL_VERSION, ClientHello, HeadHello, Refused
from transport.stream import FrameStream, run_link
from transport.wire import Frame

logger = logging.getLogger("engine.clients")

HELLO_S = 10.0
"""From connection to ClientHello."""
ACCEPT_PAUSE_S = 0.1
"""Out of descriptors or memory: accept again after this."""
_OUT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLimits:
    """The numbers of `Limits` that connections need."""

    clients: int
    link_out_bytes: int
    link_stall_s: float


async def accept_streams(
    listener: trio.abc.Listener[trio.SocketStream],
    nursery: trio.Nursery,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
) -> None:
    """Accepts for ever and starts `serve(stream)` for each; running out of descriptors only pauses it."""
    while True:
        try:
            stream = await listener.accept()
        except OSError as error:
            if error.errno not in _OUT_OF:
                raise
            log_event(logger, "warning", "socket.accept", msg=str(error))
            await trio.sleep(ACCEPT_PAUSE_S)
        else:
            nursery.start_soon(serve, stream)


async def run_clients(
    listener: trio.abc.Listener[trio.SocketStream], router: Router, hello: HeadHello, limits: ClientLimits
) -> None:
    """Serves the request socket until cancelled; connections then get what is queued for them."""
    count = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal count
        count += 1
        try:
            await _serve_client(stream, router, hello, limits, is_too_many=count > limits.clients)
        finally:
            count -= 1

    async with trio.open_nursery() as nursery:
        await accept_streams(listener, nursery, serve)


async def _serve_client(
    stream: trio.SocketStream, router: Router, hello: HeadHello, limits: ClientLimits, *, is_too_many: bool
) -> None:
    link = FrameStream(
        stream,
        accepts=HEAD_FROM_CLIENT,
        out_limit_bytes=limits.link_out_bytes,
        stall_s=limits.link_stall_s,
        name="client",
    )
    client: Client | None = None
    dropped: list[str] = []

    def drop(why: str) -> None:
        dropped.append(why)
        scope.cancel()

    def take(frames: list[Frame]) -> None:
        nonlocal client
        try:
            if client is None:
                client = _greet(frames[0], link, router, hello, drop)
                greeting.deadline = math.inf
                frames = frames[1:]
            router.client_frames(client, frames)
        except RemoteProtocolError as error:
            refuse(str(error))

    def refuse(why: str) -> None:
        """Last words; they are written before the link ends by itself."""
        log_event(logger, "warning", "client.refuse", client=client.name if client else None, msg=why)
        link.post(Refused(message=why))
        link.close()

    async with link:
        try:
            with trio.CancelScope() as scope, trio.move_on_after(HELLO_S) as greeting:
                if is_too_many:
                    refuse(f"the head has {limits.clients} connections (limits.clients)")
                await run_link(link, take)
        except EngineError as error:
            log_event(logger, "debug", "client.end", client=client.name if client else None, msg=str(error))
        finally:
            if client is not None:
                router.client_left(client)
        if dropped:
            log_event(logger, "warning", "client.drop", client=client.name if client else None, msg=dropped[0])


def _greet(frame: Frame, link: FrameStream, router: Router, hello: HeadHello, drop: Callable[[str], None]) -> Client:
    message = frame.message
    if not isinstance(message, ClientHello):
        raise RemoteProtocolError(f"the first message must be ClientHello, not {type(message).__name__}")
    if message.version != PROTOCOL_VERSION:
        raise RemoteProtocolError(f"client speaks protocol {message.version}, this head speaks {PROTOCOL_VERSION}")
    link.post(hello)
    link.name = f"client {message.name}"
    log_event(logger, "info", "client.join", client=message.name)
    return router.client_joined(message.name, link, drop)
