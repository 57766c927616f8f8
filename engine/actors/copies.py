"""run_copies: carries out the copies of expert slots to members of the group; and Members, who they are to the fabric.

As with pushes, a transfer is never given up, only the waiting for it is: one that is overdue is reported, and waited
for on, because until it ends it reads this rank's slot and writes the member's.
"""

from __future__ import annotations

import itertools

import trio

from engine.actors.intake import CopyDone, CopyFailed, Inbox
from engine.core.effects import StartCopy
from engine.core.group import Membership
from engine.errors import FabricError
from engine.ports import DeviceInfo
from transport.fabric import Fabric, Target, Transfer
from transport.messages import PeerDown

CONNECT_S = 10.0
"""For a member's fabric to answer."""
SEVER_S = 10.0
"""Bound of the fabric's own clean-up after a member."""

Life = tuple[int, int]
"""(rank, generation)."""


class Members:
    """Lives of other ranks of the group: their fabrics' descriptions, and the targets that were connected.

    `fabric` is set once it is open.
    """

    def __init__(self, rank: int) -> None:
        self.fabric: Fabric | None = None
        self._rank = rank
        self._descriptions: dict[Life, bytes] = {}
        self._targets: dict[Life, Target] = {}
        self._rank_to_dead: dict[int, int] = {}
        self._turn = trio.Lock()

    def learn(self, membership: Membership) -> None:
        """Takes note of a membership's members."""
        for member, description in zip(membership.members, membership.descriptions, strict=True):
            life = (member.rank, member.generation)
            if member.rank != self._rank and member.generation and not self._is_dead(life):
                self._descriptions[life] = description

    async def connect(self, life: Life) -> Target:
        """The target for copies to that life, connected when it is first asked for.

        Raises:
            FabricError: it is dead or unknown, or does not answer.
        """
        async with self._turn:
            target = self._targets.get(life)
            if target is None:
                target = await self._connect(life)
            return target

    async def _connect(self, life: Life) -> Target:
        description = self._descriptions.get(life)
        if description is None or self.fabric is None:
            raise FabricError(f"life {life[1]} of rank {life[0]} is no member of the group")
        try:
            with trio.fail_after(CONNECT_S):
                target = await self.fabric.connect(description)
        except trio.TooSlowError:
            raise FabricError(f"rank {life[0]} is not connected within {CONNECT_S:g} s") from None
        if self._is_dead(life):
            await self.fabric.forget(target)
            raise FabricError(f"life {life[1]} of rank {life[0]} is over")
        self._targets[life] = target
        return target

    async def bury(self, down: PeerDown) -> None:
        """Makes sure that nothing of a dead process lands in this rank's slots any more, and ends the waiting for what
        was sent to it.

        Raises:
            FabricError: that can not be made sure: the end of this rank.
        """
        self._rank_to_dead[down.rank] = max(down.generation, self._rank_to_dead.get(down.rank, 0))
        for life in [life for life in self._descriptions if self._is_dead(life)]:
            description, target = self._descriptions.pop(life), self._targets.pop(life, None)
            assert self.fabric is not None, "members are learned from the step loop, which has a fabric"
            try:
                with trio.fail_after(SEVER_S):
                    await self.fabric.sever(description)
                    if target is not None:
                        await self.fabric.forget(target)
            except trio.TooSlowError:
                raise FabricError(f"rank {down.rank} of the group not severed within {SEVER_S:g} s") from None

    def _is_dead(self, life: Life) -> bool:
        return life[1] <= self._rank_to_dead.get(life[0], 0)


async def run_copies(
    orders: trio.MemoryReceiveChannel[StartCopy],
    fabric: Fabric,
    members: Members,
    info: DeviceInfo,
    inbox: Inbox,
    *,
    copy_s: float,
) -> None:
    """Carries out orders, each in a task of its own; `ExpertSide` bounds how many there are at a time.

    Args:
        info: of this device. All ranks of a group have equal block tables: pages, slabs, then each part's slots.
        copy_s: after so long a copy counts as overdue.
    """
    slots = (part.slots for part in info.parts)
    firsts = [*itertools.accumulate(slots, initial=info.num_pages + info.num_slabs)]
    async with trio.open_nursery() as nursery:
        async for order in orders:
            nursery.start_soon(_copy, order, firsts[order.part], fabric, members, inbox, copy_s)


async def _copy(order: StartCopy, first: int, fabric: Fabric, members: Members, inbox: Inbox, copy_s: float) -> None:
    try:
        target = await members.connect((order.rank, order.generation))
        transfer = fabric.push(target, [first + order.slot], [first + order.remote_slot])
    except FabricError as error:
        inbox.put(CopyFailed(order, _name(order, str(error)), never_ran=True))
        return
    await _wait(order, transfer, fabric, inbox, copy_s)


async def _wait(order: StartCopy, transfer: Transfer, fabric: Fabric, inbox: Inbox, copy_s: float) -> None:
    try:
        with trio.move_on_after(copy_s) as overdue:
            report = await fabric.wait(transfer)
        if overdue.cancelled_caught:
            inbox.put(CopyFailed(order, _name(order, f"not done after {copy_s:g} s (copy_s)"), never_ran=False))
            report = await fabric.wait(transfer)
    except FabricError as error:
        # Whether its bytes landed, or land yet, is unknown.
        inbox.put(CopyFailed(order, _name(order, str(error)), never_ran=False))
    else:
        inbox.put(CopyDone(order, report.num_bytes, report.transfer_us))


def _name(order: StartCopy, why: str) -> str:
    return f"copy of slot {order.slot} to slot {order.remote_slot} of rank {order.rank}: {why}"
