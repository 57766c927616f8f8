"""Lockstep: what ties ExpertSide to the step loop of a rank of a group: its facts, its device calls, its copies.

A rank without a group has none, and its loop does nothing for it.
"""

from __future__ import annotations

import collections

import trio

from engine.actors.copies import Members
from engine.actors.intake import CopyDone, CopyFailed, DeviceFailed, Fact, GroupLost, GroupReady, HeadFrame, Inbox
from engine.core.effects import (
    DeviceEffect,
    FreeSlots,
    Join,
    LoadTable,
    NoteCopied,
    Prepare,
    SetReady,
    StartCopy,
    ToHead,
    Withdraw,
)
from engine.core.experts import GROUP_ORDERS, ExpertSide
from engine.core.group import Membership
from engine.core.pact import PARTS
from engine.core.plan import IDLE_STEP, StepPlan, StepResult
from engine.errors import DeviceError
from engine.ports import ExpertSlots
from transport.messages import Drain, ExpertLoads, PeerDown
from transport.stream import FrameStream

INT32_MAX = 2**31 - 1


class Preparing:
    """The membership that the device shall prepare for: the newest that was named replaces one that still waits."""

    def __init__(self) -> None:
        self._wanted: Membership | None = None
        self._news = trio.lowlevel.ParkingLot()

    def ask(self, membership: Membership) -> None:
        self._wanted = membership
        self._news.unpark_all()

    async def take(self) -> Membership:
        """Waits for one."""
        while self._wanted is None:
            await self._news.park()
        wanted, self._wanted = self._wanted, None
        return wanted


async def run_prepare(preparing: Preparing, slots: ExpertSlots, inbox: Inbox, *, prepare_s: float) -> None:
    """Has the device load for memberships, one after the other, until cancelled; a failure ends the rank.

    Args:
        prepare_s: limit for one of them.
    """
    while True:
        membership = await preparing.take()
        try:
            with trio.fail_after(prepare_s):
                await slots.prepare(membership)
        except trio.TooSlowError:
            error = DeviceError(f"membership {membership.number} is not prepared after {prepare_s:g} s (start_s)")
            inbox.put(DeviceFailed(error))
            return
        except DeviceError as error:
            inbox.put(DeviceFailed(error))
            return
        inbox.put(GroupReady(membership.number))


async def run_loads(slots: ExpertSlots, head: FrameStream, *, loads_s: float, unread_bytes: int) -> None:
    """Posts what gates and experts did, every `loads_s`, by part.

    Args:
        unread_bytes: with so much unread by the head nothing is read off the device: the next report has it all.
    """
    while True:
        await trio.sleep(loads_s)
        if head.pending_bytes > unread_bytes:
            continue
        for part, loads in zip(PARTS, slots.read_loads() or (), strict=False):
            layers, experts = loads.counts.shape
            counts = loads.counts.clip(0, INT32_MAX).astype("<i4").tobytes()
            head.post(ExpertLoads(part, loads.steps, loads.pairs, loads.expert_us, layers, experts), counts)


class Lockstep:
    """See the module."""

    def __init__(
        self,
        experts: ExpertSide,
        slots: ExpertSlots,
        members: Members,
        preparing: Preparing,
        copies: trio.MemorySendChannel[StartCopy],
        head: FrameStream,
    ) -> None:
        self.effects = experts.outbox
        """What `carry_out` would do."""
        self._experts = experts
        self._slots = slots
        self._members = members
        self._preparing = preparing
        self._copies = copies
        self._head = head
        self._in_flight: collections.deque[bool] = collections.deque()
        self._num_rows = 0

    @property
    def has_rows(self) -> bool:
        """A submitted step with rows is not awaited."""
        return self._num_rows > 0

    @property
    def is_stalled(self) -> bool:
        """Steps wait for a membership."""
        return self._experts.is_stalled

    def take_result(self, result: StepResult) -> bool:
        """An awaited step. False for an empty one, which is nobody else's business."""
        self._num_rows -= self._in_flight.popleft()
        self._experts.on_result(result.group)
        return result.step != IDLE_STEP

    def take(self, fact: Fact) -> bool:
        """Any other fact; False if the side of the hand-off is to have it (too)."""
        match fact:
            case HeadFrame(message, blob) if isinstance(message, GROUP_ORDERS):
                self._experts.on_head(message, blob)
            case HeadFrame(PeerDown() | Drain() as message, blob):
                self._experts.on_head(message, blob)
                return False
            case GroupLost(error):
                self._experts.on_broken(error)
            case GroupReady(membership):
                self._experts.on_prepared(membership)
            case CopyDone(order, num_bytes, transfer_us):
                self._experts.on_copy_done(order, num_bytes, transfer_us)
            case CopyFailed(order, why, never_ran):
                self._experts.on_copy_failed(order, why, never_ran=never_ran)
            case _:
                return False
        return True

    def settle(self) -> None:
        """Call before steps are planned: what the device is told now is in the next step's snapshot.

        Raises:
            DeviceError: the device refuses, as it does where its slots are not what they are said to be.
        """
        self.carry_out()

    def plan(self, plan: StepPlan | None, *, is_drained: bool) -> StepPlan | None:
        """The step to submit: the side's, an empty one, or none."""
        chosen = self._experts.plan(plan, is_drained=is_drained)
        if chosen is not None:
            has_rows = chosen.step != IDLE_STEP
            self._in_flight.append(has_rows)
            self._num_rows += has_rows
        return chosen

    def is_over(self, *, is_drained: bool) -> bool:
        """A drained rank may end."""
        return self._experts.is_over(is_drained=is_drained)

    def carry_out(self) -> None:
        """Does what ExpertSide asks for, in order. Raises DeviceError as `settle`."""
        for effect in self._experts.take_outbox():
            match effect:
                case ToHead(message, blob):
                    self._head.post(message, blob)
                case Prepare(membership):
                    self._members.learn(membership)
                    self._preparing.ask(membership)
                case StartCopy():
                    self._copies.send_nowait(effect)
                case _:
                    self._call_device(effect)

    def _call_device(self, effect: DeviceEffect) -> None:
        slots = self._slots
        match effect:
            case Join(membership):
                slots.join(membership)
            case LoadTable(part, epoch, placement):
                slots.load_table(part, epoch, placement)
            case SetReady(part, epoch):
                slots.set_ready(part, epoch)
            case Withdraw(part, epoch):
                slots.withdraw(part, epoch)
            case NoteCopied(part, landed):
                slots.note_copied(part, landed)
            case FreeSlots(part, freed):
                slots.free_slots(part, freed)
