"""StepLoop: the loop at the heart of a rank, and the only writer of its sequences, queues and pages.

One turn: take all that has arrived, without waiting; expire, grant, plan and submit, so that the device has its next
step before anything else is done; then carry out the effects (tokens of the step before, grants, pushes); then wait for
any input. So two steps are in the device's queue, and what the host does for a step is done while the device works on
the next.
"""

from __future__ import annotations

import collections
import gc
import logging
import math
from collections.abc import Callable
from typing import Protocol

import trio

from engine.actors.bell import Bell
from engine.actors.intake import (
    DeviceFailed,
    Fact,
    GroupLost,
    HeadFrame,
    Inbox,
    LinkLost,
    LinkUp,
    PagesRead,
    PeerFrame,
    PushDone,
    PushFailed,
    StepDone,
    Unreachable,
)
from engine.actors.links import Links
from engine.actors.lockstep import Lockstep
from engine.actors.push import Pushing
from engine.core.effects import (
    DropLink,
    Effect,
    ExpectPush,
    PushFailure,
    ReadBack,
    StartPush,
    TellCorrupt,
    ToHead,
    ToPeer,
)
from engine.core.plan import StepPlan, StepResult
from engine.core.prefill import PrefillSide
from engine.core.request import RequestKey
from engine.core.telemetry import Gauges, Meters
from engine.errors import DeviceError, GroupBroken, LocalProtocolError, Overflow, PeerGone, RemoteProtocolError
from engine.log import log_event
from engine.ports import Audited, Device, Ticket
from transport.messages import FailureCode, Message, ReservePages, StartPrefill
from transport.stream import FrameStream

logger = logging.getLogger(__name__)

QUEUED_STEPS = 2
"""Steps in the device's queue: one runs, one waits."""
IDLE_COLLECT_S = 0.5
"""A rank without work for so long collects garbage; while it works nothing is collected, see `Garbage`."""
COLLECT_STEPS = 8192
"""A rank that is never idle collects once in so many steps, behind two queued ones."""


class Side(Protocol):
    """What the loop needs of PrefillSide and DecodeSide."""

    def on_head(self, message: Message, blob: memoryview, now_us: int) -> None: ...
    def on_link_up(self, link: int, greeting: Message, now_us: int, /) -> None: ...
    def on_link_lost(self, link: int) -> None: ...
    def on_peer(self, link: int, message: Message, blob: memoryview, now_us: int) -> None: ...
    def on_push_done(
        self, key: RequestKey, first: int, count: int, num_bytes: int, post_us: int, now_us: int, checksum: int | None
    ) -> None: ...
    def on_push_failed(self, key: RequestKey, why: str, how: PushFailure) -> None: ...
    def on_pages_read(self, key: RequestKey, checksums: tuple[int, ...], now_us: int, /) -> None: ...
    def fail_all(self, code: FailureCode, why: str) -> None: ...
    def settle(self, now_us: int) -> None: ...
    def plan(self, now_us: int) -> StepPlan | None: ...
    def apply(self, result: StepResult, now_us: int) -> None: ...
    def expire(self, now_us: int) -> None: ...
    def take_outbox(self) -> list[Effect]: ...
    def gauges(self) -> Gauges: ...
    def check(self) -> None: ...
    @property
    def next_deadline_us(self) -> int | None: ...
    @property
    def is_drained(self) -> bool: ...


class Garbage:
    """When to collect: at idle, or rarely behind queued steps. A collection in the middle of steps is a stall.

    In a process that is not the rank's own it collects nothing.
    """

    def __init__(self, *, is_own: bool) -> None:
        self.steps = 0
        self._is_own = is_own

    async def wait(self, inbox: Inbox, side: Side, *, is_idle: bool) -> None:
        """Waits for input; at idle it collects, and has the side count its memory, where that costs nothing."""
        if is_idle and self.steps:
            with trio.move_on_after(IDLE_COLLECT_S) as rest:
                await inbox.wait()
            if not rest.cancelled_caught:
                return
            side.check()
            self.collect()
        await inbox.wait()

    def collect(self) -> None:
        """Now; `steps` counts anew."""
        if self._is_own:
            gc.collect()
        self.steps = 0


class Tickets:
    """Submitted steps on their way from a turn to the waiter, at most `QUEUED_STEPS`.

    No channel: that yields to the scheduler at each `receive`, though the device's `wait` is about to do so anyway.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._news = Bell()

    def put(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._news.ring()

    async def wait(self) -> Ticket:
        """The oldest; a checkpoint only where there is none yet."""
        while not self._waiting:
            await self._news.wait()
        return self._waiting.popleft()


class StepLoop:
    """The loop and the waiter of its steps: two tasks, `run` and `run_waiter`, that take the same turns.

    A turn has no checkpoint, so there is never more than one. Whoever is awake takes it: the waiter the turn that a
    result asks for, who has waited for a push that of its end, `run` all others. So a step wakes one task of the rank,
    and not one that wakes another.
    """

    def __init__(
        self,
        side: Side,
        device: Device,
        head: FrameStream,
        inbox: Inbox,
        links: Links,
        pushing: Pushing | None,
        readings: trio.MemorySendChannel[ReadBack],
        meters: Meters,
        garbage: Garbage,
        audit: Callable[[Audited], None] | None,
        group: Lockstep | None = None,
        expect_push: Callable[[], None] | None = None,
    ) -> None:
        """All are borrowed.

        Args:
            pushing: None on a rank that pushes nothing.
            expect_push: of the fabric; called first when a step has ended that read a part of a prompt.
        """
        self._side, self._device, self._head, self._inbox, self._links = side, device, head, inbox, links
        self._pushing, self._readings, self._meters, self._garbage = pushing, readings, meters, garbage
        self._audit, self._group, self._expect_push = audit, group, expect_push
        if pushing is not None:
            pushing.tell = self.tell
        self._tickets = Tickets()
        self._submitted_us: collections.deque[int] = collections.deque()
        self._is_over = False
        self._due = math.inf
        """When the alarm rings, microseconds: the side's next deadline as of the end of the last turn."""

    async def run(self) -> None:
        """Takes turns until it was told to drain, everything is answered, and its group has agreed to stop.

        Raises:
            DeviceError: the device failed; every request was answered with `device_failed` before.
            RemoteProtocolError: the head broke the protocol.
            PeerGone, Overflow: the head's stream takes no more.
        """
        while not self._is_over:
            self._turn()
            if not self._is_over:
                self._set_alarm()
                is_idle = not self._submitted_us and self._due == math.inf
                await self._garbage.wait(self._inbox, self._side, is_idle=is_idle)

    async def run_waiter(self) -> None:
        """Awaits submitted steps in order, and takes a turn with each result; ends with the device. Raises as `run`."""
        ticket: Ticket | None = None
        while not self._is_over:
            if ticket is None:
                ticket = await self._tickets.wait()
            try:
                result = await self._device.wait(ticket)
            except GroupBroken as error:
                # It runs again in the next membership; the device bounds the wait for that.
                self._inbox.put(GroupLost(error))
                continue
            except DeviceError as error:
                self._inbox.put(DeviceFailed(error))
                return
            ticket = None
            if result.chunk_tokens and self._expect_push is not None:
                self._expect_push()
            self.tell(StepDone(result))

    def tell(self, fact: Fact) -> None:
        """A fact by a task that takes the turn which it asks for: no other has to wake."""
        self._inbox.add(fact)
        if not self._is_over:
            self._turn()
        if self._is_over or not self._submitted_us:
            self._inbox.ring()  # to end, or to rest as idle
        else:
            self._set_alarm()

    def _turn(self) -> None:
        side, group, meters, submitted_us = self._side, self._group, self._meters, self._submitted_us
        now_us = _now_us()
        for fact in self._inbox.take():
            if type(fact) is StepDone:
                if group is None or group.take_result(fact.result):
                    _measure(meters, fact.result, submitted_us, now_us)
                    side.apply(fact.result, now_us)
                else:
                    submitted_us.popleft()
                    # No progress, but the step behind it, if it has rows, could not begin before.
                    meters.last_step_us = now_us
            elif isinstance(fact, DeviceFailed):
                _give_up(side, fact.error, self._head)
            elif group is None or not group.take(fact):
                if isinstance(fact, HeadFrame):
                    _foresee(self._device, fact.message)
                _handle(side, fact, self._links, now_us)
        if self._due <= now_us:
            side.expire(now_us)
        side.settle(now_us)
        if group is not None and group.effects:
            _settle_group(group, side, self._head)
        while len(submitted_us) < QUEUED_STEPS:
            plan = side.plan(now_us)
            if group is not None:
                plan = group.plan(plan, is_drained=side.is_drained)
            if plan is None:
                break
            try:
                ticket = self._device.submit(plan)
            except DeviceError as error:
                _give_up(side, error, self._head)
            submitted_us.append(_now_us())
            self._garbage.steps += 1
            self._tickets.put(ticket)
            if meters.last_step_us is None:
                meters.last_step_us = submitted_us[-1]
        _carry_out(side.take_outbox(), self._head, self._links, self._pushing, self._readings)
        if self._audit is not None:
            self._audit(side)
        if group is not None:
            if group.effects:
                group.carry_out()
            if not group.has_rows:
                meters.last_step_us = None
            self._is_over = side.is_drained and group.is_over(is_drained=True)
        elif not submitted_us:
            meters.last_step_us = None
            self._is_over = side.is_drained
        if submitted_us and self._garbage.steps >= COLLECT_STEPS:
            self._garbage.collect()

    def _set_alarm(self) -> None:
        deadline_us = self._side.next_deadline_us
        self._due = due = math.inf if deadline_us is None else deadline_us
        self._inbox.set_alarm(due / 1e6 + 1e-6)


def _settle_group(group: Lockstep, side: Side, head: FrameStream) -> None:
    try:
        group.settle()
    except DeviceError as error:
        _give_up(side, error, head)


def _now_us() -> int:
    return int(trio.current_time() * 1e6)


def _measure(meters: Meters, result: StepResult, submitted_us: collections.deque[int], now_us: int) -> None:
    """A step's time counts from when the device could start it: its submission, or the end of the step before."""
    began_us = submitted_us.popleft()
    if meters.last_step_us is not None:
        began_us = max(began_us, meters.last_step_us)
    meters.add_step(result.step, now_us - began_us, result.device_us)
    meters.last_step_us = now_us


def _foresee(device: Device, message: Message) -> None:
    """A request waits for pages or its prompt: time enough for a grammar to be compiled before its first token."""
    if isinstance(message, StartPrefill | ReservePages) and message.sampling.grammar:
        device.foresee(message.sampling.grammar)


def _handle(side: Side, fact: Fact, links: Links, now_us: int) -> None:
    match fact:
        case PushDone(key, first, count, report, checksum):
            side.on_push_done(key, first, count, report.num_bytes, report.post_us, now_us, checksum)
        case PushFailed(key, why, how):
            side.on_push_failed(key, why, how)
        case PagesRead(key, checksums):
            side.on_pages_read(key, checksums, now_us)
        case Unreachable(rank, why):
            assert isinstance(side, PrefillSide), "Unreachable on a rank that dials nobody"
            side.on_unreachable(rank, why)
        case HeadFrame(message, blob):
            side.on_head(message, blob, now_us)
        case PeerFrame(link, message, blob):
            try:
                side.on_peer(link, message, blob, now_us)
            except RemoteProtocolError as error:
                # A peer that breaks the protocol costs its link and the requests on it, never this rank.
                links.drop(link, str(error))
                side.on_link_lost(link)
        case LinkUp(link, greeting):
            side.on_link_up(link, greeting, now_us)
        case LinkLost(link):
            side.on_link_lost(link)
        case _:
            raise LocalProtocolError(f"{type(fact).__name__} is not for a side")


def _carry_out(
    effects: list[Effect],
    head: FrameStream,
    links: Links,
    pushing: Pushing | None,
    readings: trio.MemorySendChannel[ReadBack],
) -> None:
    for effect in effects:
        if type(effect) is ToHead:  # as a rule
            message, blob = effect
            head.post(message, blob)
            continue
        match effect:
            case ToPeer(link, message, blob):
                links.post(link, message, blob)
            case StartPush():
                assert pushing is not None
                pushing.start(effect)
            case ExpectPush(push):
                assert pushing is not None
                pushing.expect(push)
            case ReadBack():
                readings.send_nowait(effect)
            case TellCorrupt():
                _log_corrupt(effect)
            case DropLink(link, why):
                links.drop(link, why)


def _log_corrupt(corrupt: TellCorrupt) -> None:
    request, attempt = corrupt.key
    log_event(
        logger,
        "error",
        "handoff.corrupt",
        request=request,
        attempt=attempt,
        origin=corrupt.rank,
        generation=corrupt.generation,
        first=corrupt.first,
        pages=corrupt.count,
        sent=f"{corrupt.told:08x}",
        arrived=f"{corrupt.found:08x}",
        msg="pushed pages are not what was sent; their request is tried again",
    )


def _give_up(side: Side, error: DeviceError, head: FrameStream) -> None:
    side.fail_all("device_failed", str(error))
    try:
        for effect in side.take_outbox():
            if isinstance(effect, ToHead):
                head.post(effect.message, effect.blob)
    except (PeerGone, Overflow):
        pass  # a head that is gone needs no answers; what ends this rank is still its device
    raise error
