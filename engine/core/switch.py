"""Switch: the epochs of one part on one rank. Follows `epochs.RANK`, and carries out the actions that it lists.

What comes in: the head's words about epochs, awaited steps, copies that came or went, the loss of a member. What it
knows of steps is their number: a word that is set now is in the snapshot of the next step that is *submitted*, at the
latest, so the first such step that was awaited without the epoch being active says that it never will be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from engine.core.effects import (
    ExpertEffect,
    FreeSlots,
    LoadTable,
    NoteCopied,
    SetReady,
    StartCopy,
    ToHead,
    Withdraw,
)
from engine.core.epochs import RANK, Action, RankEvent, RankPhase
from engine.core.group import EpochStage, Membership, pack_slots
from engine.core.moves import Copy, Pacer
from engine.core.pact import PARTS
from engine.core.parking import Point
from engine.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import (
    CopyFailed,
    EpochFlipped,
    EpochReady,
    EpochReclaimed,
    EpochWithdrawn,
    PartInfo,
    SlotsCopied,
)

COPIES_RUNNING = 8
"""Copies of one part that a rank sends at a time: enough to keep a wire busy, few enough to stop soon."""
QUIET_STEPS = 2
"""Awaited steps after which no queued one is of the time before: so many are queued."""
_ENDS = (RankPhase.SETTLED, RankPhase.BURNED)
_SENDS = (RankPhase.RECEIVING, RankPhase.READY)


@dataclasses.dataclass(slots=True, eq=False)
class Epoch:
    """One epoch here.

    Attributes:
        missing: slots of this rank whose weights have not come, with what they will hold.
        pacer: the copies that this rank sends.
        running: orders of those that may still write, with the copy of each.
        awaited: steps since it came into its phase.
        carried_by: while WITHDRAWING: serial of the first step that certainly says so.
    """

    stage: EpochStage
    missing: dict[int, int]
    pacer: Pacer
    phase: RankPhase = RankPhase.NEW
    running: dict[StartCopy, Copy] = dataclasses.field(default_factory=dict)
    is_held: bool = False
    has_failed: bool = False
    awaited: int = 0
    carried_by: int = 0


class Switch:
    """See the module.

    Args:
        part: index into `pact.PARTS`.
        info: of the part on this device.
        outbox: where effects go.

    Attributes:
        active: the epoch in force in the last awaited step.
    """

    def __init__(self, part: int, info: PartInfo, outbox: list[ExpertEffect]) -> None:
        self.active = 0
        self._part = part
        self._info = info
        self._outbox = outbox
        self._last = 0
        self._epoch: Epoch | None = None
        self._at: Point = (0, 0)
        self._place = 0

    @property
    def is_live(self) -> bool:
        """An epoch is at hand that is neither settled nor burned here: steps must go on."""
        return self._epoch is not None and self._epoch.phase not in _ENDS

    def start(self, epoch: int, place: int) -> None:
        """A membership begins with `epoch`; this rank is its member at `place`."""
        self.active = epoch
        self._place = place
        self._last = max(self._last, epoch)

    # ------------------------------------------------------------ the head's words

    def on_prepare(self, stage: EpochStage, *, is_broken: bool) -> None:
        """A new epoch. `is_broken`: no step completes, so this rank becomes ready for nothing.

        Raises:
            RemoteProtocolError: it is not new, the one before is not over, or it does not fit this device.
        """
        name, info = f"epoch {stage.epoch} of part {PARTS[self._part]}", self._info
        if stage.epoch <= self._last or self.is_live:
            raise RemoteProtocolError(f"{name} is prepared after epoch {self._last}, which may not be over")
        shape = (stage.after.layers, stage.after.experts, stage.after.slots)
        if shape != (info.layers, info.experts, info.slots):
            raise RemoteProtocolError(f"{name} places {shape}, the device has {info}")
        if stage.step_bytes < 1:
            raise RemoteProtocolError(f"{name} may move no bytes in a step")
        own = [copy for copy in stage.copies if copy.source[0] == self._place]
        keys = stage.after.experts
        # Whether a copy leaves the host is not known here. Each counts as one that does: that bounds how many run.
        pacer = Pacer(
            [dataclasses.replace(copy, far=True) for copy in own], info.slot_bytes, stage.step_bytes, COPIES_RUNNING
        )
        coming = [copy for copy in stage.copies if copy.target[0] == self._place]
        missing = {copy.target[1]: copy.layer * keys + copy.expert for copy in coming}
        self._last = stage.epoch
        self._epoch = Epoch(stage, missing, pacer)
        self._feed(self._epoch, RankEvent.PREPARE)
        if is_broken:
            self._feed(self._epoch, RankEvent.PEER_LOST)
        if not missing:
            self._feed(self._epoch, RankEvent.COMPLETE)

    def on_hold(self, epoch: int, *, hold: bool) -> None:
        """HoldCopies or ReleaseCopies. One for an epoch that is over here was overtaken."""
        found = self._find(epoch, "held")
        if found is not None:
            found.is_held = hold

    def on_order(self, epoch: int, event: RankEvent, submitted: int) -> None:
        """WITHDRAW, ADOPT or BURN; `submitted`: steps that were submitted so far."""
        found = self._epoch
        if found is None or found.stage.epoch != epoch:
            raise RemoteProtocolError(f"{event.value} for epoch {epoch} of part {PARTS[self._part]}, not at hand")
        self._feed(found, event)
        if found.phase is RankPhase.WITHDRAWING and event is RankEvent.WITHDRAW:
            found.carried_by = submitted + 1
        self._settle(found)

    def on_copied(self, epoch: int, slots: Sequence[int]) -> None:
        """Copies into slots of this rank are complete and visible.

        Raises:
            RemoteProtocolError: a slot that no copy of the epoch goes to, or that was told before.
        """
        found = self._find(epoch, "copied")
        if found is None or found.phase is RankPhase.BURNED:
            return  # it was given up, and the copy ended all the same
        wrong = [slot for slot in slots if slot not in found.missing]
        if wrong or len(set(slots)) != len(slots):
            raise RemoteProtocolError(f"epoch {epoch}: slot {(wrong or [*slots])[0]} has no copy to come")
        landed = {slot: found.missing.pop(slot) for slot in slots}
        if found.phase is RankPhase.RECEIVING:
            self._outbox.append(NoteCopied(self._part, landed))
        if landed and not found.missing:
            self._feed(found, RankEvent.COMPLETE)

    # ------------------------------------------------------------ steps

    def on_result(self, at: Point, active: int, membership: Membership, awaited: int) -> None:
        """Step `at` was awaited, the `awaited`-th of this rank, with epoch `active` in force.

        Raises:
            LocalProtocolError: an epoch is active that this rank was not ready for, or one is not any more.
        """
        if active < self.active:
            raise LocalProtocolError(f"part {PARTS[self._part]} went back from epoch {self.active} to {active}")
        self.active, self._at = active, at
        epoch = self._epoch
        if epoch is None or epoch.phase in _ENDS:
            return
        epoch.awaited += 1
        if active >= epoch.stage.epoch:
            self._feed(epoch, RankEvent.FLIPPED)
        elif epoch.phase is RankPhase.WITHDRAWING and awaited >= epoch.carried_by:
            self._feed(epoch, RankEvent.UNSEEN)
        if epoch.phase in _SENDS and not epoch.is_held and not epoch.has_failed:
            self._start_copies(epoch, membership)
        self._settle(epoch)

    def on_broken(self) -> None:
        """No step completes until the next membership."""
        if self._epoch is not None and self._epoch.phase is not RankPhase.BURNED:
            self._feed(self._epoch, RankEvent.PEER_LOST)

    # ------------------------------------------------------------ copies from here

    def on_copy_done(self, order: StartCopy, num_bytes: int, transfer_us: int) -> None:
        """It has landed. One that was forgotten because its target died changes nothing."""
        epoch = self._end_copy(order)
        if epoch is not None:
            message = SlotsCopied(PARTS[self._part], order.epoch, order.place, 1, num_bytes, transfer_us)
            self._outbox.append(ToHead(message, pack_slots([order.remote_slot])))
            self._settle(epoch)

    def on_copy_failed(self, order: StartCopy, why: str, *, never_ran: bool) -> None:
        """It can not be carried out. Unless it never ran, its bytes may land yet: it counts as running until its end is
        told, or its target's death."""
        epoch = self._find(order.epoch, "failed")
        if epoch is None or order not in epoch.running:
            return
        if not epoch.has_failed:
            epoch.has_failed = True
            self._outbox.append(ToHead(CopyFailed(PARTS[self._part], order.epoch, why)))
        if never_ran:
            self._end_copy(order)
            self._settle(epoch)

    def on_peer_down(self, rank: int, generation: int) -> None:
        """That life is over: nothing lands there any more."""
        epoch = self._epoch
        if epoch is not None:
            for order in [order for order in epoch.running if order.rank == rank and order.generation <= generation]:
                self._end_copy(order)
            self._settle(epoch)

    def _start_copies(self, epoch: Epoch, membership: Membership) -> None:
        for copy in epoch.pacer.choose_copies():
            target, slot = copy.target
            member = membership.members[target]
            order = StartCopy(
                self._part, epoch.stage.epoch, copy.source[1], target, member.rank, member.generation, slot
            )
            epoch.running[order] = copy
            self._outbox.append(order)

    def _end_copy(self, order: StartCopy) -> Epoch | None:
        epoch = self._epoch
        if epoch is None or order not in epoch.running:
            return None
        epoch.pacer.note_done(epoch.running.pop(order))
        return epoch

    # ------------------------------------------------------------ the table

    def _find(self, epoch: int, what: str) -> Epoch | None:
        """None for one that is over. Raises RemoteProtocolError for one that was never prepared."""
        if epoch > self._last:
            raise RemoteProtocolError(f"epoch {epoch} of part {PARTS[self._part]} is {what}, but was not prepared")
        return self._epoch if self._epoch is not None and self._epoch.stage.epoch == epoch else None

    def _settle(self, epoch: Epoch) -> None:
        is_ending = epoch.phase in (RankPhase.ACTIVE, RankPhase.DRAINING)
        if is_ending and epoch.awaited >= QUIET_STEPS and not epoch.running:
            self._feed(epoch, RankEvent.QUIET)

    def _feed(self, epoch: Epoch, event: RankEvent) -> None:
        number, stage = epoch.stage.epoch, epoch.stage
        transition = RANK.follow(epoch.phase, event, f"epoch {number} of part {PARTS[self._part]}")
        if transition.phase is not epoch.phase:
            epoch.phase, epoch.awaited = transition.phase, 0
        for action in transition.actions:
            self._act(action, number, stage)

    def _act(self, action: Action, number: int, stage: EpochStage) -> None:
        part, name, out = self._part, PARTS[self._part], self._outbox
        match action:
            case Action.LOAD_TABLE:
                out.append(LoadTable(part, number, stage.after))
            case Action.SET_READY:
                out.append(SetReady(part, number))
            case Action.SET_WITHDRAW:
                out.append(Withdraw(part, number))
            case Action.SET_ACTIVE:
                pass  # it is, or the next membership begins with it
            case Action.FREE_OLD:
                out.append(FreeSlots(part, tuple(slot for at, slot in stage.released if at == self._place)))
            case Action.FREE_NEW:
                targets = (copy.target for copy in stage.copies)
                out.append(FreeSlots(part, tuple(slot for at, slot in targets if at == self._place)))
            case Action.TELL_READY:
                out.append(ToHead(EpochReady(name, number)))
            case Action.TELL_FLIPPED:
                out.append(ToHead(EpochFlipped(name, number, *self._at)))
            case Action.TELL_WITHDRAWN:
                out.append(ToHead(EpochWithdrawn(name, number)))
            case Action.TELL_RECLAIMED:
                out.append(ToHead(EpochReclaimed(name, number)))
            case _:
                raise AssertionError(f"{action.name} is the head's")
