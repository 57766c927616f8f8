"""Ranks that operators drain, in the process table: what is refused, what is told, and what outlives a life."""

from __future__ import annotations

import pytest
import trio

from tests.actors.test_supervisor import World, settle
from tests.actors.test_supervisor_groups import make_world
from transport.messages import (
    CLIENT_FROM_HEAD,
    RankStarting,
    RankStatus,
    RequestFinished,
    RequestStarted,
    ReservePages,
    Sampling,
    Submit,
    Timings,
)
from transport.stream import FrameStream
from transport.wire import Frame

ROLES = {0: "prefill", 1: "decode", 2: "decode", 3: "decode"}
WHY = "drained by alice (fans)"


async def open_world(nursery: trio.Nursery) -> World:
    world = World(nursery, ROLES)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    return world


def status(world: World, rank: int) -> RankStatus:
    return next(one for one in world.supervisor.rank_statuses() if one.rank == rank)


def told(world: World, rank: int) -> list[ReservePages]:
    return [message for message in world.now(rank).got if isinstance(message, ReservePages)]


class Submitter:
    """A client of the world's router that never reads."""

    def __init__(self, world: World) -> None:
        near, _ = trio.testing.memory_stream_pair()
        link = FrameStream(near, accepts=CLIENT_FROM_HEAD, out_limit_bytes=1 << 20, stall_s=5, name="client")
        self.router = world.router
        self.client = self.router.client_joined("batch", link, print)
        self.count = 0

    async def submit(self, count: int) -> None:
        for _ in range(count):
            self.count += 1
            message = Submit(self.count, 1, 0, Sampling(max_tokens=4))
            self.router.client_frames(self.client, [Frame(message, memoryview(b"\1\0\0\0"))])
        await settle()


def finish(world: World, rank: int, request: int) -> None:
    link = world.now(rank).link
    link.post(RequestStarted(request, 1, 1, 0, 0, rank, 0, 0, 0, Timings()))
    link.post(RequestFinished(request, 1, "length", 4, 1))


async def test_a_drained_rank_finishes_what_it_has_and_says_when_it_has_nothing(nursery, autojump_clock):
    world = await open_world(nursery)
    submitter = Submitter(world)
    await submitter.submit(3)
    assert [len(told(world, rank)) for rank in (1, 2, 3)] == [1, 1, 1]
    assert world.supervisor.set_drain((2,), True, WHY) == "rank 2 takes no new requests from now on"
    await submitter.submit(1)
    assert [len(told(world, rank)) for rank in (1, 2, 3)] == [2, 1, 1]
    assert (status(world, 2).state, status(world, 2).phase, status(world, 2).reason) == ("draining", "", WHY)
    assert world.supervisor.degraded() == (f"rank 2 takes no new requests: {WHY}",)
    assert world.supervisor.why_not_ready() == () and status(world, 1).state == "ready"
    finish(world, 2, told(world, 2)[0].request)
    await settle()
    assert (status(world, 2).state, status(world, 2).phase) == ("draining", "drained")
    assert status(world, 2).generation == 1 and not world.now(2).dead.is_set(), "it stays up"
    assert world.supervisor.set_drain((2,), False, "") == "rank 2 takes new requests again"
    assert (status(world, 2).state, status(world, 2).phase, status(world, 2).reason) == ("ready", "", "")
    await submitter.submit(1)
    assert len(told(world, 2)) == 2 and world.supervisor.degraded() == ()
    await world.supervisor.stop()


async def test_a_rank_stays_drained_through_its_next_lives(nursery, autojump_clock):
    world = await open_world(nursery)
    submitter = Submitter(world)
    world.supervisor.set_drain((1, 2), True, WHY)
    await world.now(1).die(-11)
    await trio.sleep(0.05)
    assert status(world, 1).state == "restarting" and "SIGSEGV" in status(world, 1).reason
    assert world.supervisor.why_not_ready() == ()
    await settle()
    assert (status(world, 1).generation, status(world, 1).phase, status(world, 1).reason) == (2, "drained", WHY)
    await submitter.submit(3)
    assert [len(told(world, rank)) for rank in (1, 2, 3)] == [0, 0, 3]
    world.supervisor.set_drain((1,), False, "")
    await submitter.submit(1)
    assert len(told(world, 1)) == 1
    await world.supervisor.stop()


async def test_the_last_rank_that_takes_requests_is_not_drained(nursery, autojump_clock):
    world = await open_world(nursery)
    with pytest.raises(ValueError, match="rank 0 is the last prefill rank that takes requests"):
        world.supervisor.set_drain((0, 1), True, WHY)
    with pytest.raises(ValueError, match="there is no rank 9; this cluster has ranks 0-3"):
        world.supervisor.set_drain((1, 9), True, WHY)
    assert world.supervisor.degraded() == ()
    world.supervisor.set_drain((1,), True, WHY)
    world.on_spawn = lambda process: None  # the next life of rank 2 starts, and does not get ready
    await world.now(2).die(-9)
    await trio.sleep(1.0)
    with pytest.raises(ValueError, match="rank 3 is the last decode rank that takes requests; wait until rank 2 is"):
        world.supervisor.set_drain((3,), True, WHY)
    await world.now(3).die(-9)
    await trio.sleep(1.0)
    [why] = world.supervisor.why_not_ready()
    assert why == f"no decode rank is ready: rank 1 is {WHY}, rank 2 is starting, rank 3 is starting"
    await world.supervisor.stop()


async def test_a_cluster_gets_ready_with_a_drained_rank(nursery, autojump_clock):
    world = World(nursery, ROLES)
    nursery.start_soon(world.supervisor.run)
    await settle()
    world.supervisor.set_drain((1,), True, WHY)
    assert (status(world, 1).state, status(world, 1).reason) == ("starting", WHY)
    for rank in ROLES:
        world.now(rank).ready()
        nursery.start_soon(world.now(rank).beat)
    await settle()
    assert world.supervisor.became_ready.is_set() and status(world, 1).phase == "drained"
    await world.supervisor.stop()


async def test_a_drained_rank_of_a_group_steps_with_it_and_joins_again_after_its_death(nursery, autojump_clock):
    world, ranks = make_world(nursery)
    await settle()
    for rank in (1, 2):
        ranks[rank].ready()
    await settle()
    submitter = Submitter(world)
    await submitter.submit(2)
    assert [len(told(world, rank)) for rank in (1, 2)] == [1, 1]
    world.supervisor.set_drain((2,), True, WHY)
    await submitter.submit(2)
    assert [len(told(world, rank)) for rank in (1, 2)] == [3, 1]
    assert status(world, 2).state == "draining" and status(world, 2).phase == ""
    assert world.balancer.degraded() == () and world.balancer.groups[0].roster.is_complete
    finish(world, 2, told(world, 2)[0].request)
    await settle()
    assert status(world, 2).phase == "drained" and world.balancer.groups[0].roster.is_complete
    await world.now(2).die(-9)
    await trio.sleep(1.0)
    ranks[2].ready()
    await settle()
    assert world.balancer.groups[0].roster.is_complete and world.balancer.degraded() == ()
    assert (status(world, 2).generation, status(world, 2).phase) == (2, "drained")
    await submitter.submit(1)
    assert told(world, 2) == []
    await world.supervisor.stop()


async def test_a_starting_rank_tells_its_phase_in_numbers(nursery, autojump_clock):
    world = World(nursery, ROLES)
    nursery.start_soon(world.supervisor.run)
    await settle()
    first = world.now(1)
    first.link.post(RankStarting("weights", 3, 8, "tensors"))
    await trio.sleep(2.0)
    first.link.post(RankStarting("weights", 5, 8, "tensors"))
    await trio.sleep(1.0)
    seen = status(world, 1)
    assert (seen.phase, seen.phase_done, seen.phase_total, seen.phase_unit) == ("weights 5/8 tensors", 5, 8, "tensors")
    assert seen.phase_ms == 3000
    first.link.post(RankStarting("arena", 1 << 20, 1 << 22, "bytes"))
    await trio.sleep(0.5)
    seen = status(world, 1)
    assert (seen.phase_done, seen.phase_total, seen.phase_unit, seen.phase_ms) == (1 << 20, 1 << 22, "bytes", 500)
    first.ready()
    await settle()
    seen = status(world, 1)
    assert (seen.state, seen.phase_done, seen.phase_total, seen.phase_unit, seen.phase_ms) == ("ready", 0, 0, "", 0)
    await first.die(-11)
    await trio.sleep(0.05)
    assert status(world, 1).state == "restarting" and "SIGSEGV" in status(world, 1).reason
    await trio.sleep(0.2)
    assert status(world, 1).state == "starting" and status(world, 1).reason == ""
    await world.supervisor.stop()
