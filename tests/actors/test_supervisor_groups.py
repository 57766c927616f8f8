"""Ranks of a group in the process table: when requests may go there, and what their deaths bring about."""

from __future__ import annotations

import pytest
import trio

from engine.config import PoolConfig
from tests.actors.test_supervisor import MemoryRank, World, settle
from transport import messages as m
from transport.messages import PartInfo

PARTS = (PartInfo("main", 1, 6, 6, 100),)
ROLES = {0: "prefill", 1: "decode", 2: "decode"}


class GroupRank:
    """What a rank of the group says by itself: it prepares and joins whatever it is told to."""

    def __init__(self, process: MemoryRank) -> None:
        self.process = process
        self.joins = True
        process.take_plain, process.take = process.take, self.take  # type: ignore[attr-defined,method-assign]

    def ready(self) -> None:
        life = self.process
        address = f"at-{life.rank}-{life.generation}"
        life.link.post(
            m.RankReady(
                life.rank, life.generation, address, 64, 16, 1024, 8, 1024, "memory", "fake", f"mesh {life.rank}", PARTS
            ),
            b"fabric %d" % life.rank,
        )

    async def take(self, frames) -> None:
        life = self.process
        for frame in frames:
            message = frame.message
            if isinstance(message, m.NameGroup):
                living = [member.rank for member in message.members if member.generation]
                assert bytes(frame.blob).endswith(b"".join(b"fabric %d" % rank for rank in living))
                life.link.post(m.GroupPrepared(life.rank, life.generation, message.membership))
            elif isinstance(message, m.JoinGroup) and self.joins:
                life.link.post(m.GroupJoined(life.rank, life.generation, message.membership))
        await life.take_plain(frames)  # type: ignore[attr-defined]


def make_world(nursery: trio.Nursery) -> tuple[World, dict[int, GroupRank]]:
    world = World(nursery, ROLES, pools={"prefill": PoolConfig((0,)), "decode": PoolConfig((1, 2), 2)})
    ranks: dict[int, GroupRank] = {}

    def spawned(process: MemoryRank) -> None:
        nursery.start_soon(process.beat)
        if process.rank:
            ranks[process.rank] = GroupRank(process)
        else:
            process.ready()

    world.on_spawn = spawned
    nursery.start_soon(world.supervisor.run)
    return world, ranks


async def test_a_rank_of_a_group_serves_once_its_group_steps(nursery, autojump_clock):
    world, ranks = make_world(nursery)
    await settle()
    ranks[2].joins = False
    ranks[1].ready()
    await settle()
    assert world.state(1) == "joining" and world.state(0) == "ready"
    assert world.supervisor.why_not_ready() == ("no decode rank is ready: rank 1 is joining, rank 2 is starting",)
    ranks[2].ready()
    await settle()
    assert world.state(1) == world.state(2) == "joining" and "decode" not in world.router.ready_roles()
    assert world.now(0).got == [m.PeerUp(1, 1, "at-1-1"), m.PeerUp(2, 1, "at-2-1")]
    world.now(2).link.post(m.GroupJoined(2, 1, 1))
    await settle()
    assert world.state(1) == world.state(2) == "ready" and "decode" in world.router.ready_roles()
    assert world.supervisor.became_ready.is_set() and world.supervisor.why_not_ready() == ()
    await world.supervisor.stop()


async def test_a_rank_that_waits_for_its_group_longer_than_a_start_is_left_alone(nursery, autojump_clock):
    world, ranks = make_world(nursery)
    await settle()
    ranks[1].ready()
    await trio.sleep(99)
    ranks[2].joins = False
    ranks[2].ready()
    await trio.sleep(200)
    assert world.now(1).generation == world.now(2).generation == 1
    await world.supervisor.stop()


async def test_a_death_is_told_to_the_group_before_the_next_life_begins(nursery, autojump_clock):
    world, ranks = make_world(nursery)
    await settle()
    for rank in (1, 2):
        ranks[rank].ready()
    await settle()
    first = world.now(2)
    await first.die(-11)
    await settle()
    told = [type(message) for message in world.now(1).got]
    assert told[-3:] == [m.PeerDown, m.NameGroup, m.JoinGroup]
    assert world.balancer.degraded() == ("decode group 0 goes on without rank 2",)
    assert world.now(2).generation == 2 and world.state(1) == "ready"
    ranks[2].ready()
    await settle()
    assert world.state(2) == "ready" and world.balancer.degraded() == ()
    assert [message.membership for message in world.now(2).got if isinstance(message, m.JoinGroup)] == [3]
    await world.supervisor.stop()


async def test_an_accused_rank_is_ended_and_started_again(nursery, autojump_clock):
    world, ranks = make_world(nursery)
    await settle()
    for rank in (1, 2):
        ranks[rank].ready()
    await settle()
    world.now(1).link.post(m.PeerAccused(2, 1, 1, 5, "sent nothing for 10 s"))
    await settle()
    assert world.now(2).generation == 2 and world.now(1).generation == 1
    await world.supervisor.stop()


@pytest.mark.parametrize(
    "message",
    [
        m.GroupPrepared(1, 1, 7),
        m.GroupJoined(1, 1, 2),
        m.EpochReady("main", 9),
        m.EpochReady("draft", 1),
        m.PeerAccused(0, 1, 1, 1, "it is of another pool"),
    ],
    ids=lambda message: type(message).__name__ + str(getattr(message, "part", "")),
)
async def test_words_that_can_not_be_true_end_their_rank(nursery, autojump_clock, message):
    world, ranks = make_world(nursery)
    await settle()
    for rank in (1, 2):
        ranks[rank].ready()
    await settle()
    world.now(1).link.post(message)
    await settle()
    assert world.now(1).generation == 2 and world.now(2).generation == 1
    await world.supervisor.stop()


async def test_words_about_groups_from_a_rank_without_one_end_it(nursery, autojump_clock):
    world, _ = make_world(nursery)
    await settle()
    world.now(0).link.post(m.GroupPrepared(0, 1, 1))
    await settle()
    assert world.now(0).generation == 2
    await world.supervisor.stop()


async def test_the_end_of_the_head_drains_a_group_without_naming_it_anew(nursery, autojump_clock):
    world, ranks = make_world(nursery)
    await settle()
    for rank in (1, 2):
        ranks[rank].ready()
    await settle()
    await world.supervisor.stop()
    assert all(isinstance(world.now(rank).got[-1], m.Drain | m.PeerDown) for rank in (1, 2))
    assert len([message for message in world.now(1).got if isinstance(message, m.NameGroup)]) == 1
