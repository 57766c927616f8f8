"""ExpertSide: a rank's part in its group, without any I/O: memberships, parking, and the epochs of each part.

The step loop drives it like a side of the hand-off: the head's messages and awaited steps come in, what to do about
them is left in the outbox. Effects must be carried out before the next step is submitted: what a step says of this
rank is what was set before it.

A membership is named, prepared (the device loads), told to be joined, and joined with the first step awaited in it. A
group that lost a member is broken until the next membership is joined: no step completes, so no epoch gets anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.effects import ExpertEffect, Join, Prepare, StartCopy, ToHead
from engine.core.epochs import RankEvent
from engine.core.group import Membership, decode_membership, decode_stage, unpack_slots
from engine.core.pact import PARTS, GroupStep
from engine.core.parking import Parking
from engine.core.plan import StepPlan
from engine.core.switch import Switch
from engine.errors import GroupBroken, LocalProtocolError, RemoteProtocolError
from transport.messages import (
    AdoptEpoch,
    BurnEpoch,
    Drain,
    GroupJoined,
    GroupPrepared,
    HoldCopies,
    JoinGroup,
    Message,
    NameGroup,
    Part,
    PartInfo,
    PeerAccused,
    PeerDown,
    PrepareEpoch,
    ReleaseCopies,
    SlotsCopied,
    WakeGroup,
    WithdrawEpoch,
)

GROUP_ORDERS: tuple[type[Message], ...] = (
    *(NameGroup, JoinGroup, WakeGroup, SlotsCopied),
    *(PrepareEpoch, HoldCopies, ReleaseCopies, WithdrawEpoch, AdoptEpoch, BurnEpoch),
)
"""What the head says to a rank of a group only; PeerDown and Drain are for its side of the hand-off, too."""
_ORDER_TO_EVENT = {
    WithdrawEpoch: RankEvent.WITHDRAW,
    AdoptEpoch: RankEvent.ADOPT,
    BurnEpoch: RankEvent.BURN,
}


class ExpertSide:
    """See the module.

    Args:
        rank, generation: this process.
        parts: of its device, in the order of `pact.PARTS`.

    Attributes:
        membership: whose steps are awaited; None before the first.
        is_broken: a member of it is lost, and the next one is not joined.
        is_stopped: all ranks of the group said that nothing is left to do.
        outbox: what `take_outbox` would return; the same list for ever.
    """

    def __init__(self, rank: int, generation: int, parts: Sequence[PartInfo]) -> None:
        self.membership: Membership | None = None
        self.is_broken = False
        self.is_stopped = False
        self._rank, self._generation = rank, generation
        self._parts = tuple(parts)
        self.outbox: list[ExpertEffect] = []
        self._switches = [Switch(part, info, self.outbox) for part, info in enumerate(parts)]
        self._parking = Parking()
        self._named: Membership | None = None
        self._prepared = 0
        self._joining: dict[int, Membership] = {}
        self._draining = False
        self._submitted = self._awaited = 0
        self._next_step = 0

    # ------------------------------------------------------------ the head

    def on_head(self, message: Message, blob: memoryview) -> None:
        """A message to a rank of a group. Raises RemoteProtocolError for one that can not come now."""
        match message:
            case NameGroup():
                self._on_name(decode_membership(message, blob))
            case JoinGroup():
                self._on_join(message.membership)
            case WakeGroup():
                self._parking.on_wake(message.membership, message.step)
            case PeerDown():
                # Whether a step can still be finished is the device's to say: its last words may have come.
                for switch in self._switches:
                    switch.on_peer_down(message.rank, message.generation)
            case Drain():
                self._draining = True
            case PrepareEpoch():
                self._on_prepare(message, blob)
            case HoldCopies() | ReleaseCopies():
                self._switch(message.part).on_hold(message.epoch, hold=isinstance(message, HoldCopies))
            case WithdrawEpoch() | AdoptEpoch() | BurnEpoch():
                event = _ORDER_TO_EVENT[type(message)]
                self._switch(message.part).on_order(message.epoch, event, self._submitted)
            case SlotsCopied():
                if self.membership is None or message.place != self.membership.place_of(self._rank):
                    raise RemoteProtocolError(f"slots of place {message.place} were copied, which is not this rank's")
                self._switch(message.part).on_copied(message.epoch, unpack_slots(blob))
            case _:
                raise RemoteProtocolError(f"head sent {type(message).__name__} to a rank of a group")

    def _on_name(self, membership: Membership) -> None:
        number = membership.number
        if self._named is not None and number <= self._named.number:
            raise RemoteProtocolError(f"membership {number} is named after membership {self._named.number}")
        if len(membership.parts) != len(self._parts):
            raise RemoteProtocolError(f"membership {number} has {len(membership.parts)} parts, not {len(self._parts)}")
        for part, info in zip(membership.parts, self._parts, strict=True):
            placement = part.placement
            shape = (placement.layers, placement.experts, placement.slots)
            if shape != (info.layers, info.experts, info.slots) or placement.ranks != len(membership.members):
                raise RemoteProtocolError(f"membership {number} places {shape} experts of a part, here it is {info}")
        if (self._rank, self._generation) not in [(member.rank, member.generation) for member in membership.members]:
            raise RemoteProtocolError(f"membership {number} is named without life {self._generation} of {self._rank}")
        self._named = membership
        self.outbox.append(Prepare(membership))

    def on_prepared(self, number: int) -> None:
        """The device has what a membership asks for; it counts unless another one was named meanwhile."""
        if self._named is not None and number == self._named.number:
            self._prepared = number
            self.outbox.append(ToHead(GroupPrepared(self._rank, self._generation, number)))

    def _on_join(self, number: int) -> None:
        if number != self._prepared or self._named is None or number != self._named.number:
            raise RemoteProtocolError(f"membership {number} is to be joined, prepared is {self._prepared}")
        self._joining[number] = self._named
        self.outbox.append(Join(number))

    def _on_prepare(self, message: PrepareEpoch, blob: memoryview) -> None:
        if self.membership is None:
            raise RemoteProtocolError(f"epoch {message.epoch} before the rank is in a group")
        stage = decode_stage(message, blob)
        if stage.after.ranks != len(self.membership.members):
            raise RemoteProtocolError(f"epoch {message.epoch} is for {stage.after.ranks} places")
        self._switch(message.part).on_prepare(stage, is_broken=self.is_broken)

    def _switch(self, part: Part) -> Switch:
        index = PARTS.index(part)
        if index >= len(self._switches):
            raise RemoteProtocolError(f"the head speaks of experts of part {part}, this model has none")
        return self._switches[index]

    # ------------------------------------------------------------ steps

    def plan(self, plan: StepPlan | None, *, is_drained: bool) -> StepPlan | None:
        """What to submit next: the side's plan, or an empty step, or nothing. Whatever it is counts as submitted.

        Args:
            plan: of the side of the hand-off; None if it has no rows.
            is_drained: the side was told to drain and has nothing left.
        """
        step = self._next_step + self._submitted - self._awaited
        if plan is not None:
            question = self._parking.note_rows(step)
            if question is not None:
                self.outbox.append(ToHead(question))
        elif not self.is_stopped and (self.membership is not None or self._joining):
            plan = self._parking.plan_idle(step, has_reason=self._has_reason(), stop=is_drained)
        self._submitted += plan is not None
        return plan

    def _has_reason(self) -> bool:
        """Something that all ranks of the group were told is not over here."""
        if self._draining or any(switch.is_live for switch in self._switches):
            return True
        return bool(self._joining)

    def is_over(self, *, is_drained: bool) -> bool:
        """A drained rank may end: the group has agreed on it, or there never was one."""
        return is_drained and (self.is_stopped or (self.membership is None and not self._joining))

    @property
    def is_stalled(self) -> bool:
        """Steps wait for a membership: how long they take says nothing of the device."""
        return self.is_broken or self.membership is None

    def on_result(self, group: GroupStep | None) -> None:
        """A step was awaited.

        Raises:
            LocalProtocolError: the device missed a step, or is in another membership than it was told.
        """
        if group is None:
            raise LocalProtocolError("a result that does not say in which step of the group it was computed")
        self._awaited += 1
        if self.is_stopped:
            return  # submitted before that was known, and no step of the group any more
        number, step, actives, park, stop = group
        if self.membership is None or number != self.membership.number:
            self._start(number)
        elif self.is_broken:
            raise LocalProtocolError(f"step {step} of membership {number} is after its end")
        assert self.membership is not None
        if step != self._next_step:
            raise LocalProtocolError(
                f"step {step} of membership {number} follows step {self._next_step - 1}: one was missed"
            )
        self._next_step += 1
        if park:
            self._parking.on_result(group)
        self.is_stopped = stop
        at = (number, step)
        for switch, active in zip(self._switches, actives, strict=True):
            switch.on_result(at, active, self.membership, self._awaited)

    def _start(self, number: int) -> None:
        joined = self._joining.get(number)
        if joined is None:
            raise LocalProtocolError(f"a step of membership {number}, told to be joined are {sorted(self._joining)}")
        # A greater one may have been told meanwhile: the pact leads to the least that all were told.
        self._joining = {told: later for told, later in self._joining.items() if told > number}
        self.membership, self.is_broken, self._next_step = joined, False, 0
        self._parking.start()
        for switch, part in zip(self._switches, joined.parts, strict=True):
            switch.start(part.epoch, joined.place_of(self._rank))
        self.outbox.append(ToHead(GroupJoined(self._rank, self._generation, number)))

    # ------------------------------------------------------------ losses

    def on_broken(self, error: GroupBroken) -> None:
        """The device lost a member. Who did not answer in time is accused; an ended stream accuses nobody."""
        for membership in (self.membership, *self._joining.values()):
            if error.overdue and membership is not None and membership.number == error.membership:
                for member in membership.members:
                    if member.rank == error.rank:
                        accused = PeerAccused(error.rank, member.generation, error.membership, error.step, error.why)
                        self.outbox.append(ToHead(accused))
        if not self.is_broken:
            self.is_broken = True
            for switch in self._switches:
                switch.on_broken()

    # ------------------------------------------------------------ copies from here

    def on_copy_done(self, order: StartCopy, num_bytes: int, transfer_us: int) -> None:
        """A copy has landed."""
        self._switches[order.part].on_copy_done(order, num_bytes, transfer_us)

    def on_copy_failed(self, order: StartCopy, why: str, *, never_ran: bool) -> None:
        """A copy failed, or is overdue: its bytes may land yet, unless it never ran."""
        self._switches[order.part].on_copy_failed(order, why, never_ran=never_ran)

    def take_outbox(self) -> list[ExpertEffect]:
        """All effects since the last call, in order."""
        taken = self.outbox.copy()
        self.outbox.clear()
        return taken
