"""Inbox: everything that happens to a rank, as one bounded queue of facts that the step actor takes without waiting.

`run_head` is the reader of the head's stream; pair streams have their readers in `pair`. Readers wait for room, so a
peer that floods is stopped by its own socket; facts that this process makes itself (results, transfers) never wait,
since each is bounded by what was started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import trio

from engine.core.plan import StepResult
from engine.core.prefill import PushFailure
from engine.core.request import RequestKey
from engine.errors import DeviceError
from transport.fabric import TransferReport
from transport.messages import Message, PeerDown, PeerUp
from transport.stream import FrameStream, run_link
from transport.wire import Frame

INBOX_FACTS = 4096
"""Facts that may wait before readers wait."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadFrame:
    message: Message
    blob: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class PeerFrame:
    link: int
    message: Message
    blob: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class LinkUp:
    """`greeting` is the peer's PeerHello or PeerWelcome."""

    link: int
    greeting: Message


@dataclasses.dataclass(frozen=True, slots=True)
class LinkLost:
    link: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unreachable:
    """Dialling a decode rank was given up; `why` is what ended the last try."""

    rank: int
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class PushDone:
    key: RequestKey
    first: int
    count: int
    report: TransferReport


@dataclasses.dataclass(frozen=True, slots=True)
class PushFailed:
    key: RequestKey
    why: str
    how: PushFailure


@dataclasses.dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFailed:
    error: DeviceError


Fact = HeadFrame | PeerFrame | LinkUp | LinkLost | Unreachable | PushDone | PushFailed | StepDone | DeviceFailed


class Inbox:
    """One taker, many givers, all on one loop."""

    def __init__(self, capacity: int = INBOX_FACTS) -> None:
        self._facts: list[Fact] = []
        self._capacity = capacity
        self._news = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()

    def put(self, fact: Fact) -> None:
        """Adds a fact that this process made itself; never waits."""
        self._facts.append(fact)
        self._news.unpark_all()

    async def put_frame(self, fact: HeadFrame | PeerFrame) -> None:
        """Adds a frame of another process, once there is room."""
        while len(self._facts) >= self._capacity:
            await self._room.park()
        self.put(fact)

    def take(self) -> list[Fact]:
        """All facts, in order of arrival."""
        facts, self._facts = self._facts, []
        self._room.unpark_all()
        return facts

    async def wait(self) -> None:
        """Until there is a fact to take."""
        if not self._facts:
            await self._news.park()


async def run_head(head: FrameStream, inbox: Inbox, tell_pairs: Callable[[PeerUp | PeerDown], Awaitable[None]]) -> None:
    """Reads and writes the head's stream until it ends, which is an EngineError (PeerGone as a rule).

    `tell_pairs` is done with a message before the step actor sees it: memory that a dead peer was granted is free for
    others as soon as the step actor hears of the death.
    """

    async def take_in(frames: list[Frame]) -> None:
        for frame in frames:
            if isinstance(frame.message, PeerUp | PeerDown):
                await tell_pairs(frame.message)
            await inbox.put_frame(HeadFrame(frame.message, frame.blob))

    await run_link(head, take_in)
