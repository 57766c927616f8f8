"""The operators' sockets, both ends: `read.sock` answers questions, `admin.sock` also takes changes.

What a caller may do is decided by the file permissions of the socket it could open (0660 and 0600), not by what it
says. Operators pull: the head sends nothing that was not asked for, so a slow terminal never sees old data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from engine.errors import EngineError, PeerGone, RemoteProtocolError
from engine.log import log_event
from transport.messages import (
    HEAD_FROM_OPERATOR,
    OPERATOR_FROM_HEAD,
    AskExperts,
    AskStatus,
    ExpertsReport,
    Message,
    Rebalance,
    RebalanceAnswer,
    Refused,
    Shutdown,
    ShutdownAccepted,
    StatusReport,
)
from transport.stream import FrameStream, run_link
from transport.unix import open_unix_stream
from transport.wire import Frame

logger = logging.getLogger("engine.admin")

OUT_LIMIT_BYTES = 16 << 20
"""A report of 4,096 ranks is about 2 MiB."""
STALL_S = 10.0
REPLY_S = 5.0
"""From a question to the head's answer: it answers between two events of its loop."""
OPERATORS = 64
"""Connections to each socket."""


Act = Callable[[Rebalance], Awaitable[RebalanceAnswer | Refused]]

# ---------------------------------------------------------------- the head's end


async def run_operators(
    listener: trio.abc.Listener[trio.SocketStream],
    report: Callable[[], StatusReport],
    experts: Callable[[], ExpertsReport],
    shutdown: Callable[[Shutdown], int] | None,
    act: Act | None,
) -> None:
    """Serves one of the sockets until cancelled.

    Args:
        report, experts: make the answers to AskStatus and AskExperts.
        shutdown: begins a shutdown and returns how many requests run; None on the socket that only reads.
        act: does what Rebalance asks for; None on the socket that only reads. It may wait for a plan, and what else
            comes on that connection waits too.
    """
    count = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal count
        count += 1
        try:
            await _serve_operator(stream, report, experts, shutdown, act, is_too_many=count > OPERATORS)
        finally:
            count -= 1

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(serve, await listener.accept())


async def _serve_operator(
    stream: trio.SocketStream,
    report: Callable[[], StatusReport],
    experts: Callable[[], ExpertsReport],
    shutdown: Callable[[Shutdown], int] | None,
    act: Act | None,
    *,
    is_too_many: bool,
) -> None:
    link = FrameStream(
        stream, accepts=HEAD_FROM_OPERATOR, out_limit_bytes=OUT_LIMIT_BYTES, stall_s=STALL_S, name="operator"
    )

    async def answer(frames: list[Frame]) -> None:
        for frame in frames:
            message = frame.message
            if is_too_many:
                link.post(Refused(message=f"the head has {OPERATORS} operators' connections (the limit)"))
                link.close()
            elif isinstance(message, AskStatus):
                link.post(report())
            elif isinstance(message, AskExperts):
                link.post(experts())
            elif isinstance(message, Shutdown) and shutdown is not None:
                link.post(ShutdownAccepted(running=shutdown(message)))
            elif isinstance(message, Rebalance) and act is not None:
                link.post(await act(message))
            else:
                link.post(Refused(message=f"{type(message).__name__} is for admin.sock; this socket only reads"))

    async with link:
        try:
            await run_link(link, answer)
        except EngineError as error:
            log_event(logger, "debug", "operator.end", msg=str(error))


# ---------------------------------------------------------------- the operator's end


class ActRefused(EngineError):
    """The head does not do what an operator asked for; the message is its reason."""


class Operator:
    """A connection to one of the head's sockets."""

    def __init__(self, link: FrameStream, head_pid: int) -> None:
        self._link = link
        self.head_pid = head_pid
        """As the kernel knows it; the head can not be mistaken about itself here."""

    async def ask(self, question: Message, timeout_s: float = REPLY_S) -> Message:
        """Sends a question and waits for its answer.

        Raises:
            PeerGone: the head went away, or did not answer in time.
        """
        with trio.move_on_after(timeout_s):
            await self._link.send(question)
            frames = await self._link.receive()
            return frames[0].message
        raise PeerGone(f"the head (pid {self.head_pid}) did not answer within {timeout_s:g} s")

    async def ask_status(self) -> StatusReport:
        answer = await self.ask(AskStatus())
        if not isinstance(answer, StatusReport):
            raise RemoteProtocolError(_unexpected(answer))
        return answer

    async def ask_experts(self) -> ExpertsReport:
        answer = await self.ask(AskExperts())
        if not isinstance(answer, ExpertsReport):
            raise RemoteProtocolError(_unexpected(answer))
        return answer

    async def ask_rebalance(self, act: Rebalance, timeout_s: float) -> RebalanceAnswer:
        """Has the head act on one part of a group; `admin.sock` only.

        Raises:
            ActRefused: the head says why not; nothing was changed.
            PeerGone: the head went away, or did not answer in time.
        """
        answer = await self.ask(act, timeout_s)
        if isinstance(answer, Refused):
            raise ActRefused(answer.message)
        if not isinstance(answer, RebalanceAnswer):
            raise RemoteProtocolError(_unexpected(answer))
        return answer

    async def ask_shutdown(self, drain_ms: int, reason: str) -> ShutdownAccepted:
        answer = await self.ask(Shutdown(drain_ms=drain_ms, reason=reason))
        if not isinstance(answer, ShutdownAccepted):
            raise RemoteProtocolError(_unexpected(answer))
        return answer


def _unexpected(answer: Message) -> str:
    return answer.message if isinstance(answer, Refused) else f"the head answered {type(answer).__name__}"


@contextlib.asynccontextmanager
async def open_operator(path: str) -> AsyncIterator[Operator]:
    """Connects to `read.sock` or `admin.sock`.

    Raises:
        PeerGone: nobody listens there, or this user may not ask.
    """
    stream = await open_unix_stream(path)
    link = FrameStream(
        stream, accepts=OPERATOR_FROM_HEAD, out_limit_bytes=OUT_LIMIT_BYTES, stall_s=STALL_S, name="head"
    )
    failure: EngineError | None = None
    async with link:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_write, link)
            try:
                yield Operator(link, _peer_pid(stream))
            except EngineError as error:  # leaves the nursery as it is, not in a group
                failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _write(link: FrameStream) -> None:
    with contextlib.suppress(PeerGone):  # the reader sees the same end, and says it
        await link.run_writer()


def _peer_pid(stream: trio.SocketStream) -> int:
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


async def wait_process_end(pid: int, timeout_s: float) -> bool:
    """Whether the process is gone within the time. Any process of this host; it need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with trio.move_on_after(timeout_s):
            await trio.lowlevel.wait_readable(descriptor)
            return True
        return False
    finally:
        os.close(descriptor)
