"""The operators' sockets, an operator's end: dials one, asks, has the head act, watches events."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import TypeVar

import trio

from engine.errors import EngineError, PeerGone, RemoteProtocolError
from transport.messages import (
    OPERATOR_FROM_HEAD,
    ActDone,
    AskExperts,
    AskHeat,
    AskRequests,
    AskStatus,
    AskTraffic,
    CancelRequests,
    EventsHappened,
    ExpertsReport,
    HeatReport,
    Message,
    Rebalance,
    RebalanceAnswer,
    Refused,
    RequestsReport,
    ResetCache,
    SetDrain,
    Shutdown,
    ShutdownAccepted,
    StatusReport,
    TrafficReport,
    WatchEvents,
)
from transport.stream import FrameStream
from transport.unix import open_unix_stream, peer_credentials
from transport.wire import Frame

OUT_LIMIT_BYTES = 1 << 20
"""A question of an operator is 40 KiB at most."""
STALL_S = 10.0
REPLY_S = 5.0
"""From a question to the head's answer: it answers between two events of its loop."""

M = TypeVar("M", bound=Message)


class ActRefused(EngineError):
    """The head does not do what an operator asked for; the message is its reason."""


class Operator:
    """A connection to one of the head's sockets."""

    def __init__(self, link: FrameStream, head_pid: int) -> None:
        self._link = link
        self.head_pid = head_pid
        """As the kernel knows it; the head can not be mistaken about itself here."""

    async def ask_frame(self, question: Message, timeout_s: float = REPLY_S) -> Frame:
        """Sends a question and waits for its answer, which may have a blob.

        Raises:
            PeerGone: the head went away, or did not answer in time.
        """
        with trio.move_on_after(timeout_s):
            await self._link.send(question)
            frames = await self._link.receive()
            return frames[0]
        raise PeerGone(f"the head (pid {self.head_pid}) did not answer within {timeout_s:g} s")

    async def ask(self, question: Message, timeout_s: float = REPLY_S) -> Message:
        """As `ask_frame`, for answers without a blob."""
        return (await self.ask_frame(question, timeout_s)).message

    async def ask_status(self) -> StatusReport:
        return _expect(StatusReport, await self.ask(AskStatus()))

    async def ask_experts(self) -> ExpertsReport:
        return _expect(ExpertsReport, await self.ask(AskExperts()))

    async def ask_traffic(self) -> TrafficReport:
        return _expect(TrafficReport, await self.ask(AskTraffic()))

    async def ask_requests(self, limit: int, older_ms: int) -> RequestsReport:
        return _expect(RequestsReport, await self.ask(AskRequests(limit=limit, older_ms=older_ms)))

    async def ask_heat(self, question: AskHeat) -> tuple[HeatReport, memoryview] | None:
        """A part's loads with the report's blob; None if the head has no such part (any more)."""
        frame = await self.ask_frame(question)
        if isinstance(frame.message, Refused):
            return None
        return _expect(HeatReport, frame.message), frame.blob

    async def ask_rebalance(self, act: Rebalance, timeout_s: float) -> RebalanceAnswer:
        """Has the head act on one part of a group; `admin.sock` only.

        Raises:
            ActRefused: the head says why not; nothing was changed.
            PeerGone: the head went away, or did not answer in time.
        """
        return _expect_act(RebalanceAnswer, await self.ask(act, timeout_s))

    async def ask_act(self, act: SetDrain | CancelRequests | ResetCache) -> str:
        """Has the head do it and returns what was done, in words; raises as `ask_rebalance`."""
        return _expect_act(ActDone, await self.ask(act)).done

    async def ask_shutdown(self, drain_ms: int, reason: str) -> ShutdownAccepted:
        return _expect(ShutdownAccepted, await self.ask(Shutdown(drain_ms=drain_ms, reason=reason)))

    async def watch_events(self, after: int) -> None:
        """Has the head send its events after this number, which `wait_events` returns. Nothing else can be asked on
        this connection from now on."""
        await self._link.send(WatchEvents(after=after))

    async def wait_events(self) -> list[EventsHappened]:
        """What the head has sent, at least one message. One with fewer events than a message holds has the newest.

        Raises:
            PeerGone: the head went away.
            ActRefused: it lets nobody watch here.
        """
        return [_expect_act(EventsHappened, frame.message) for frame in await self._link.receive()]


def _expect(kind: type[M], answer: Message) -> M:
    if isinstance(answer, kind):
        return answer
    raise RemoteProtocolError(
        answer.message if isinstance(answer, Refused) else f"the head answered {type(answer).__name__}"
    )


def _expect_act(kind: type[M], answer: Message) -> M:
    if isinstance(answer, Refused):
        raise ActRefused(answer.message)
    return _expect(kind, answer)


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
                yield Operator(link, peer_credentials(stream).pid)
            except EngineError as error:  # leaves the nursery as it is, not in a group
                failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _write(link: FrameStream) -> None:
    with contextlib.suppress(PeerGone):  # the reader sees the same end, and says it
        await link.run_writer()


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
