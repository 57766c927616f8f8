"""Copies to members of a group: which blocks they go to, and what the death of a member does to them."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from engine.actors.copies import Members, run_copies
from engine.actors.intake import CopyDone, CopyFailed, Inbox
from engine.core.effects import StartCopy
from engine.core.group import Membership, PartPlacement
from engine.core.placement import Placement
from engine.errors import FabricError
from engine.sim.device import SimDevice
from transport.fabric import BlockRun
from transport.memory_fabric import Faults, MemoryFabric, MemoryWorld
from transport.messages import Member, PartInfo, PeerDown

PARTS = (PartInfo("main", 1, 2, 3, 16), PartInfo("draft", 1, 2, 2, 16))
INFO = dataclasses.replace(SimDevice(num_pages=2, num_slabs=1, page_tokens=8).info, parts=PARTS)
ORDER = StartCopy(part=1, epoch=4, slot=1, place=1, rank=8, generation=2, remote_slot=0)


class Side:
    """One rank's fabric with two pages, a slab, three slots and two slots."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.memory = ctypes.create_string_buffer(8 * 16)

    async def register(self) -> None:
        address, runs = ctypes.addressof(self.memory), []
        for count in (2, 1, 3, 2):
            runs.append(BlockRun(address, 16, count))
            address += 16 * count
        await self.fabric.register(runs)

    def block(self, number: int) -> bytes:
        return self.memory.raw[16 * number : 16 * number + 16]


@asynccontextmanager
async def open_pair(faults: Faults = Faults()) -> AsyncIterator[tuple[Side, Side, Members, Inbox, trio.Nursery]]:
    """Rank 7, whose copies run, and rank 8 in its second life."""
    world = MemoryWorld(random.Random(1), faults=faults)
    async with world.open_fabric("seven") as ours, world.open_fabric("eight") as theirs:
        source, target = Side(ours), Side(theirs)
        await source.register()
        await target.register()
        members, inbox = Members(7), Inbox()
        members.fabric = ours
        placement = PartPlacement(0, Placement(1, 2, np.array([[0], [1]], np.int32)))
        lives = (Member(7, 1, "", 0), Member(8, 2, "", 0))
        members.learn(Membership(1, lives, (b"", theirs.describe()), (placement,)))
        yield_to, orders = trio.open_memory_channel[StartCopy](4)
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                await run_copies(orders, ours, members, INFO, inbox, copy_s=1.0)

            nursery.start_soon(run)
            yield_to.send_nowait(ORDER)
            yield source, target, members, inbox, nursery
            nursery.cancel_scope.cancel()


async def test_slots_come_after_pages_slabs_and_the_parts_before(autojump_clock: trio.abc.Clock) -> None:
    async with open_pair() as (source, target, _, inbox, _):
        source.memory[16 * 7 : 16 * 8] = b"weights of one x"
        await inbox.wait()
        (fact,) = inbox.take()
        assert isinstance(fact, CopyDone) and fact.order == ORDER and fact.num_bytes == 16
        assert target.block(6) == b"weights of one x"
        assert sum(any(target.block(number)) for number in range(8)) == 1


async def test_the_death_of_a_member_ends_a_copy_that_would_never_end(autojump_clock: trio.abc.Clock) -> None:
    async with open_pair(Faults(stuck=1.0)) as (_, _, members, inbox, _):
        await inbox.wait()
        (overdue,) = inbox.take()
        assert isinstance(overdue, CopyFailed) and not overdue.never_ran
        assert overdue.why == "copy of slot 1 to slot 0 of rank 8: not done after 1 s (copy_s)"
        with trio.move_on_after(60) as wait:
            await inbox.wait()
        assert wait.cancelled_caught, "it is waited for on"
        await members.bury(PeerDown(8, 2))
        with trio.fail_after(1):
            await inbox.wait()
        (ended,) = inbox.take()
        assert isinstance(ended, CopyFailed) and "forgotten" in ended.why
        with pytest.raises(FabricError, match="life 2 of rank 8 is no member"):
            await members.connect((8, 2))


async def test_nothing_of_a_dead_member_lands_here_any_more(autojump_clock: trio.abc.Clock) -> None:
    async with open_pair() as (source, target, members, _, _):
        target.memory[0:16] = b"late words of it"
        back = await target.fabric.connect(source.fabric.describe())
        target.fabric.push(back, [0], [5])
        await members.bury(PeerDown(8, 2))
        await trio.sleep(1)
        assert source.block(5) == bytes(16)


async def test_a_later_life_is_not_buried_with_the_one_before(autojump_clock: trio.abc.Clock) -> None:
    async with open_pair() as (_, _, members, inbox, _):
        await members.bury(PeerDown(8, 1))
        await inbox.wait()
        assert isinstance(inbox.take()[0], CopyDone)


async def test_a_member_that_is_unknown_or_dead_gets_no_copy(autojump_clock: trio.abc.Clock) -> None:
    async with open_pair() as (_, _, members, inbox, _):
        await members.bury(PeerDown(8, 2))
        await inbox.wait()
        (fact,) = inbox.take()
        assert isinstance(fact, CopyFailed) and fact.never_ran
        assert fact.why == "copy of slot 1 to slot 0 of rank 8: life 2 of rank 8 is no member of the group"
