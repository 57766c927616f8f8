"""Inbox: everything that happens to a rank, as one bounded queue of facts that the step actor takes without waiting.

`run_head` is the reader of the head's stream; pair streams have their readers in `pair`. Readers wait for room, so a
peer that floods is stopped by its own socket; facts that this process makes itself (results, transfers) never wait,
since each is bounded by what was started.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from engine.actors.bell import Bell
from engine.core.effects import PushFailure, StartCopy
from engine.core.plan import StepResult
from engine.core.request import RequestKey
from engine.errors import DeviceError, GroupBroken
from transport.fabric import TransferReport
from transport.messages import Message, PeerDown, PeerUp
from transport.stream import FrameStream, run_link
from transport.wire import Frame

INBOX_FACTS = 4096
"""Facts that may wait before readers wait."""


class HeadFrame(NamedTuple):
    message: Message
    blob: memoryview


class PeerFrame(NamedTuple):
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
    """`checksum`: of the blocks that it read; None where nobody asks for it."""

    key: RequestKey
    first: int
    count: int
    report: TransferReport
    checksum: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PushFailed:
    key: RequestKey
    why: str
    how: PushFailure


@dataclasses.dataclass(frozen=True, slots=True)
class PagesRead:
    """The checksums that a ReadBack asked for, in its order."""

    key: RequestKey
    checksums: tuple[int, ...]


class StepDone(NamedTuple):
    result: StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFailed:
    error: DeviceError


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLost:
    """The device lost a member of the group; the step in which it did will be run again."""

    error: GroupBroken


@dataclasses.dataclass(frozen=True, slots=True)
class GroupReady:
    """The device holds what the membership with that number asks for."""

    membership: int


@dataclasses.dataclass(frozen=True, slots=True)
class CopyDone:
    """The slot's weights are in the member's slot."""

    order: StartCopy
    num_bytes: int
    transfer_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class CopyFailed:
    """`never_ran`: no byte of it was or will be written."""

    order: StartCopy
    why: str
    never_ran: bool


Fact = (
    HeadFrame
    | PeerFrame
    | LinkUp
    | LinkLost
    | Unreachable
    | PushDone
    | PushFailed
    | PagesRead
    | StepDone
    | DeviceFailed
    | GroupLost
    | GroupReady
    | CopyDone
    | CopyFailed
)


class Inbox:
    """One taker, many givers, all on one loop."""

    def __init__(self, capacity: int = INBOX_FACTS) -> None:
        self._facts: list[Fact] = []
        self._capacity = capacity
        self._news = Bell()
        self._room = trio.lowlevel.ParkingLot()
        self._alarm = trio.CancelScope()
        self._due = math.inf

    def put(self, fact: Fact) -> None:
        """Adds a fact that this process made itself; never waits."""
        self._facts.append(fact)
        self.ring()

    def add(self, fact: Fact) -> None:
        """The same by somebody who takes it himself: nobody is woken."""
        self._facts.append(fact)

    def ring(self) -> None:
        """Wakes the taker, whether there is a fact or not."""
        self._news.ring()

    async def put_frame(self, fact: HeadFrame | PeerFrame) -> None:
        """Adds a frame of another process, once there is room."""
        while len(self._facts) >= self._capacity:
            await self._room.park()
        self.put(fact)

    def take(self) -> list[Fact]:
        """All facts, in order of arrival."""
        facts, self._facts = self._facts, []
        if len(facts) >= self._capacity:  # else nobody waits for room
            self._room.unpark_all()
        return facts

    def set_alarm(self, due: float) -> None:
        """When the taker is woken at the latest, a trio time."""
        if self._due != due:
            self._due = self._alarm.deadline = due

    async def wait(self) -> None:
        """Until there is a fact to take, or somebody rings, as the alarm does."""
        if not self._facts:
            await self._news.wait()

    async def run_alarm(self) -> None:
        """Rings when it is time. A task of its own: a cancel scope for each `wait` would cost more than the wait."""
        while True:
            with self._alarm:
                await trio.sleep_forever()
            self._alarm, self._due = trio.CancelScope(), math.inf
            self._news.ring()


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
