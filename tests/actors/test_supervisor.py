"""The process table on virtual time: what counts as a death, who is told, when a rank is started again and when not."""

from __future__ import annotations

import itertools
import logging

import msgspec
import pytest
import trio
import trio.testing

from engine.actors.balancer import BalanceLimits, Balancer
from engine.actors.router import Router
from engine.actors.supervisor import EXIT_S, Supervisor, SupervisorLimits
from engine.config import ExpertsConfig
from engine.errors import ConfigError, EngineError, RankLost
from tests.actors.head_rig import make_limits
from transport.messages import (
    HEAD_FROM_RANK,
    PROTOCOL_VERSION,
    RANK_FROM_HEAD,
    Drain,
    Message,
    PeerDown,
    PeerUp,
    RankHello,
    RankReady,
    RankSnapshot,
    RankStarting,
    RequestAborted,
)
from transport.stream import FrameStream, run_link

LIMITS = SupervisorLimits(
    link_out_bytes=1 << 20, link_stall_s=5, start_s=100, snapshot_s=0.25, heartbeat_s=5, restarts=3,
    restart_window_s=60, restart_pause_s=0.1, stop_s=5, progress_s=12,
)  # fmt: skip


class MemoryRank:
    """A rank process in memory: alive until `die`; `kill` needs `kill_takes_s` to work, as it does for a device."""

    def __init__(self, world: World, rank: int, generation: int) -> None:
        self.world, self.rank, self.generation = world, rank, generation
        self.pid = 1000 + 10 * rank + generation
        self.control, far = trio.testing.memory_stream_pair()
        self.link = FrameStream(far, accepts=RANK_FROM_HEAD, out_limit_bytes=1 << 20, stall_s=5, name="head")
        self.dead = trio.Event()
        self.status = 0
        self.got: list[Message] = []
        self.was_killed = False
        self.lines: tuple[str, ...] = ()

    async def run_output(self) -> None:
        await self.dead.wait()

    async def wait(self) -> int:
        await self.dead.wait()
        return self.status

    def kill(self) -> None:
        self.was_killed = True
        if self.world.kill_takes_s:
            self.world.nursery.start_soon(self._die_slowly)
        elif not self.dead.is_set():
            self.status = -9
            self.dead.set()

    async def _die_slowly(self) -> None:
        await trio.sleep(self.world.kill_takes_s)
        await self.die(-9)

    def last_lines(self) -> tuple[str, ...]:
        return self.lines

    async def die(self, status: int) -> None:
        if not self.dead.is_set():
            self.status = status
            self.dead.set()
            await self.link.aclose()

    async def live(self) -> None:
        """Reads what the head says; ends itself when told to drain, or when the head is gone."""
        role = self.world.roles[self.rank]
        try:
            self.link.post(RankHello(PROTOCOL_VERSION, self.rank, self.generation, role, self.pid, "digest"))
            await run_link(self.link, self.take)
        except EngineError:
            if self.world.heeds_the_end:
                await self.die(0)

    async def take(self, frames) -> None:
        self.got += [frame.message for frame in frames]
        if self.world.heeds_the_end and any(isinstance(frame.message, Drain) for frame in frames):
            await self.die(0)

    def ready(self) -> None:
        address = f"at-{self.rank}-{self.generation}" if self.world.roles[self.rank] == "decode" else ""
        self.link.post(RankReady(self.rank, self.generation, address, 64, 16, 1024, 8, 1024, "memory", "fake"))

    async def beat(self) -> None:
        try:
            while not self.dead.is_set():
                self.link.post(RankSnapshot(self.rank, self.generation, *[0] * 21))
                await trio.sleep(0.25)
        except EngineError:
            pass  # its stream is closed


class World:
    def __init__(
        self, nursery: trio.Nursery, roles: dict, limits: SupervisorLimits = LIMITS, pools: dict | None = None
    ) -> None:
        self.nursery, self.roles = nursery, roles
        self.processes: list[MemoryRank] = []
        self.kill_takes_s = 0.0
        self.heeds_the_end = True
        self.on_spawn = lambda process: None
        self.router = Router(make_limits())
        # Its planner is never asked: nobody counts loads here.
        experts = (ExpertsConfig(), ExpertsConfig())
        self.balancer = Balancer(pools or {}, experts, trio.sleep_forever, BalanceLimits(60, 60))  # type: ignore[arg-type]
        self.supervisor = Supervisor(roles, self.spawn, self.router, limits, "digest", self.balancer)

    def spawn(self, rank: int, generation: int) -> MemoryRank:
        process = MemoryRank(self, rank, generation)
        self.processes.append(process)
        self.nursery.start_soon(process.live)
        self.on_spawn(process)
        return process

    def make_all_healthy(self) -> None:
        def healthy(process: MemoryRank) -> None:
            process.ready()
            self.nursery.start_soon(process.beat)

        self.on_spawn = healthy

    def state(self, rank: int) -> str:
        return next(status.state for status in self.supervisor.rank_statuses() if status.rank == rank)

    def now(self, rank: int) -> MemoryRank:
        return [process for process in self.processes if process.rank == rank][-1]


@pytest.fixture
def roles():
    return {0: "prefill", 1: "decode", 2: "decode"}


async def settle():
    await trio.sleep(0.5)


async def test_ranks_become_ready_and_prefill_learns_of_every_decode_rank(nursery, autojump_clock, roles):
    world = World(nursery, roles)
    nursery.start_soon(world.supervisor.run)
    await settle()
    assert [status.state for status in world.supervisor.rank_statuses()] == ["starting"] * 3
    assert "no prefill rank is ready" in world.supervisor.why_not_ready()[0]
    world.now(1).ready()
    await settle()
    world.now(0).ready()
    await settle()
    assert not world.supervisor.became_ready.is_set()
    world.now(2).ready()
    await settle()
    assert world.supervisor.became_ready.is_set() and world.supervisor.why_not_ready() == ()
    assert world.now(0).got == [PeerUp(1, 1, "at-1-1"), PeerUp(2, 1, "at-2-1")]
    await world.supervisor.stop()


async def test_peers_are_told_of_a_death_only_once_it_is_certain(nursery, autojump_clock, roles):
    world = World(nursery, roles)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    world.kill_takes_s = 3.0
    world.heeds_the_end = False
    first = world.now(1)
    await first.link.aclose()  # the stream ends; the process hangs in its device
    await trio.sleep(EXIT_S + 2.5)
    assert world.state(1) == "lost" and world.now(1).generation == 1
    assert "decode" in world.router.ready_roles() and PeerDown(1, 1) not in world.now(0).got
    await trio.sleep(1.0)
    assert first.was_killed
    assert PeerDown(1, 1) in world.now(0).got and PeerDown(1, 1) in world.now(2).got
    assert world.now(1).generation == 2
    assert world.now(0).got[-1] == PeerUp(1, 2, "at-1-2")
    world.heeds_the_end = True
    await world.supervisor.stop()


async def test_a_silent_rank_is_killed_and_started_again(nursery, autojump_clock, roles):
    world = World(nursery, roles)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    first = world.now(2)
    world.on_spawn = lambda process: process.ready()  # the next life of a rank never beats
    await first.die(-9)
    await trio.sleep(1.0)
    second = world.now(2)
    world.make_all_healthy()
    await trio.sleep(LIMITS.heartbeat_s + 2.5)
    assert second.generation == 2 and second.dead.is_set() and world.now(2).generation == 3
    assert world.state(2) == "ready"
    await world.supervisor.stop()


async def test_a_rank_that_does_not_get_ready_in_time_is_ended(nursery, autojump_clock, roles, caplog):
    world = World(nursery, roles)
    nursery.start_soon(world.supervisor.run)
    await settle()
    world.now(0).link.post(RankStarting("weights", 3, 8, "tensors"))
    with caplog.at_level(logging.WARNING):
        await trio.sleep(LIMITS.start_s + LIMITS.heartbeat_s)
    said = [record.fields["msg"] for record in caplog.records if record.message == "rank.down"]
    assert any("not ready within limits.start_s (100 s), phase weights 3/8 tensors" in line for line in said)
    assert world.now(0).generation == 2
    await world.supervisor.stop()


async def test_pauses_grow_and_the_budget_ends_the_cluster(autojump_clock, roles):
    times: list[float] = []
    with pytest.RaisesGroup(pytest.RaisesGroup(RankLost)) as caught:
        async with trio.open_nursery() as nursery:
            world = World(nursery, roles)

            def doomed(process: MemoryRank) -> None:
                if process.rank == 1:
                    times.append(trio.current_time())
                    process.lines = ("loading", "Killed: out of memory")
                    nursery.start_soon(process.die, -9)

            world.on_spawn = doomed
            await world.supervisor.run()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == LIMITS.restarts + 1
    assert gaps == sorted(gaps) and gaps[1] - gaps[0] == pytest.approx(0.1) and gaps[2] - gaps[1] == pytest.approx(0.2)
    [error] = caught.value.exceptions[0].exceptions
    assert "rank 1" in str(error) and "SIGKILL" in str(error) and "out of memory" in str(error)
    assert all(process.dead.is_set() for process in world.processes)


async def test_deaths_far_apart_do_not_add_up(nursery, autojump_clock, roles):
    world = World(nursery, roles)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    for _ in range(2 * LIMITS.restarts):
        await trio.sleep(LIMITS.restart_window_s / 2)
        await world.now(1).die(1)
    await settle()
    assert world.state(1) == "ready" and world.now(1).generation == 2 * LIMITS.restarts + 1
    await world.supervisor.stop()


async def test_a_wrong_configuration_is_not_tried_again(autojump_clock, roles):
    with pytest.RaisesGroup(pytest.RaisesGroup(ConfigError)) as caught:
        async with trio.open_nursery() as nursery:
            world = World(nursery, roles)

            def refuse(process: MemoryRank) -> None:
                if process.rank == 0:
                    process.lines = ("no weights in /models/x",)
                    nursery.start_soon(process.die, 2)

            world.on_spawn = refuse
            await world.supervisor.run()
    [error] = caught.value.exceptions[0].exceptions
    assert str(error) == "rank 0 can not start: no weights in /models/x"
    assert len(world.processes) == 3


@pytest.mark.parametrize("spoil", ["generation", "digest", "version", "early"])
async def test_a_rank_that_is_not_what_was_started_is_ended(nursery, autojump_clock, roles, spoil):
    world = World(nursery, roles)
    nursery.start_soon(world.supervisor.run)
    await settle()
    hello = RankHello(PROTOCOL_VERSION, 0, 1, "prefill", 5, "digest")
    wrong: dict[str, Message] = {
        "generation": changed(hello, generation=2),
        "digest": changed(hello, config_digest="other"),
        "version": changed(hello, version=PROTOCOL_VERSION + 1),
        "early": RequestAborted(1, 1),
    }
    first = world.now(0)
    assert type(wrong[spoil]) in HEAD_FROM_RANK
    first.link.post(wrong[spoil])
    await trio.sleep(2)
    assert first.dead.is_set() and world.now(0).generation == 2
    await world.supervisor.stop()


def changed(message: RankHello, **changes: object) -> RankHello:
    return msgspec.structs.replace(message, **changes)


async def test_stop_drains_and_then_kills_what_does_not_go(nursery, autojump_clock, roles):
    world = World(nursery, roles)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    world.heeds_the_end = False
    started = trio.current_time()
    await world.supervisor.stop()
    assert all(Drain() in process.got and process.was_killed for process in world.processes)
    assert len(world.processes) == 3
    assert LIMITS.stop_s <= trio.current_time() - started <= LIMITS.stop_s + 2 * EXIT_S


async def test_cancelling_the_supervisor_leaves_no_process(autojump_clock, roles):
    async with trio.open_nursery() as nursery:
        world = World(nursery, roles)
        world.make_all_healthy()
        world.heeds_the_end = False
        with trio.move_on_after(3):
            await world.supervisor.run()
        assert len(world.processes) == 3 and all(process.dead.is_set() for process in world.processes)


async def test_a_rank_that_has_work_and_makes_no_progress_is_named(nursery, autojump_clock, roles):
    world = World(nursery, roles)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    await trio.sleep(0.1)  # between two beats, which would be news too
    snapshot = RankSnapshot(1, 1, 7, 12_500, *[0] * 19)
    assert world.supervisor.why_not_ready() == ()
    world.now(1).link.post(snapshot)
    await trio.testing.wait_all_tasks_blocked()
    assert world.supervisor.why_not_ready() == ("decode rank 1 has work and finished no step for 12.5 s",)
    await world.supervisor.stop()
