"""Plays a scenario: cluster, requesters and faults together, until everything is answered and nothing is left over."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import trio

from engine.core.decode import DecodeSide
from engine.core.pages import PageState
from engine.core.prefill import PrefillSide
from engine.sim import seeded
from engine.sim.checks import Auditor
from engine.sim.circle import GroupMeters
from engine.sim.faults import draw_faults, run_faults
from engine.sim.operators import draw_acts, rest, run_operators
from engine.sim.scenario import Scenario
from engine.sim.seeded import EventClock
from engine.sim.talk import talk
from engine.sim.trace import Trace
from engine.sim.violation import Violation
from engine.sim.workload import Answers, Requester, draw_asks
from engine.sim.world import World
from transport.messages import ExpertsReport

COLLECT_OBJECTS = 50_000
"""New objects after which garbage is collected."""
LOOK_S = 0.25
FREE_S = 20.0
"""After the last answer, until all memory must be free, but for what only a writer's death frees."""
PURGE_S = 40.0
"""After that writer was killed."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What came of a run. `violation` is the first broken promise, `crash` any other end than the right one."""

    scenario: Scenario
    trace: Trace
    answers: Answers = dataclasses.field(default_factory=Answers)
    violation: Violation | None = None
    crash: BaseException | None = None
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    busy_s: dict[int, float] = dataclasses.field(default_factory=dict)
    lives: int = 0
    purged: int = 0
    landings: int = 0
    commits: int = 0
    acts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    groups: dict[str, GroupMeters] = dataclasses.field(default_factory=dict)
    experts: ExpertsReport | None = None

    @property
    def is_good(self) -> bool:
        return self.violation is None and self.crash is None


def play(
    scenario: Scenario, *, trace: Trace | None = None, instrument: trio.abc.Instrument | None = None, hook: Any = None
) -> Outcome:
    """Runs it. Broken promises and crashes are in the outcome, not raised.

    Args:
        instrument: watches the loop, for tests that strike at its n-th step.
        hook: called with the World once it is made.
    """
    outcome = Outcome(scenario, trace or Trace())
    began, cpu_began = time.perf_counter(), time.process_time()
    try:
        with _collect_rarely():
            seeded.run(
                functools.partial(_play, scenario, outcome, hook),
                seed=scenario.seed,
                instruments=() if instrument is None else (instrument,),
            )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or _find(error, KeyboardInterrupt):
            raise
        outcome.violation = _find(error, Violation)
        if outcome.violation is None:
            stuck = _find(error, seeded.Deadlock)
            outcome.violation = Violation("liveness", str(stuck)) if stuck is not None else None
        if outcome.violation is None:
            outcome.crash = error
    outcome.wall_s, outcome.cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return outcome


@contextlib.contextmanager
def _collect_rarely() -> Iterator[None]:
    """What was there before is not looked at by collections of garbage, which are rare: a world makes little of it, and
    many small objects that live for a while."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _find(error: BaseException, kind: type[Any]) -> Any:
    """The first leaf of that kind."""
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            found = _find(part, kind)
            if found is not None:
                return found
    return None


async def _play(scenario: Scenario, outcome: Outcome, hook: Any, clock: EventClock) -> None:
    rng = random.Random(f"run {scenario.seed}")
    world = World(clock, scenario.shape, random.Random(rng.random()), outcome.trace, scenario.seed)
    swarms = (scenario.swarm, scenario.extra)
    world.is_calm = world.groups is not None and not any(swarm.kinds and swarm.per_s for swarm in swarms)
    if hook is not None:
        hook(world)
    load = scenario.load
    all_asks = draw_asks(load, random.Random(rng.random()), scenario.shape.vocab_size)
    if load.talk_share:
        all_asks = talk(all_asks, load, random.Random(f"{scenario.seed}:begins"), scenario.shape)
    streams = itertools.tee(all_asks, load.clients)
    faults = draw_faults(scenario.swarm, random.Random(rng.random()))
    extra = draw_faults(scenario.extra, random.Random(f"{scenario.seed}:extra faults"))
    faults = sorted(faults + extra, key=lambda fault: fault.at_s)
    acts = draw_acts(scenario.operators, random.Random(f"{scenario.seed}:operators"))
    requesters = [
        Requester(world, number, (ask for ask in stream if ask.client == number), outcome.answers, load)
        for number, stream in enumerate(streams)
    ]
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.run)
            nursery.start_soon(run_faults, world, requesters, scenario.swarm, faults)
            nursery.start_soon(_run_signals, world, scenario)
            if acts:
                nursery.start_soon(run_operators, world, scenario.operators, acts, outcome.acts)
            await _answer_all(scenario, requesters, faults[-1].at_s if faults else 0.0)
            await trio.sleep_until(scenario.swarm.until_s)
            if not scenario.signals:
                if world.groups is not None:
                    await trio.sleep_until(scenario.operators.until_s)
                    await rest(world)
                await _empty(world, outcome)
                world.drained = True
                world.signal()
            limits = scenario.shape.limits
            with trio.move_on_after(limits.drain_s + limits.stop_s + 60.0) as patience:
                await world.is_over.wait()
            if patience.cancelled_caught:
                raise Violation("liveness", "the head was told to stop, and does not")
            nursery.cancel_scope.cancel()
    finally:
        outcome.virtual_s, outcome.lives = clock.now, world.num_lives
        outcome.steps, outcome.busy_s = world.count_steps(), world.measure_busy()
        auditor: Auditor = world.auditor
        outcome.landings, outcome.commits = auditor.num_landings, auditor.num_commits
        if world.groups is not None:
            outcome.groups = {group.name: group.meters for group in world.groups.groups.values()}
            outcome.experts = world.experts() if world.experts is not None else None


async def _run_signals(world: World, scenario: Scenario) -> None:
    for at_s in scenario.signals:
        await trio.sleep_until(at_s)
        if world.is_over.is_set():
            return
        world.drained = True
        world.trace.add(world.clock.now, "fault.signal", "")
        world.signal()


async def _answer_all(scenario: Scenario, requesters: list[Requester], last_fault_s: float) -> None:
    limit_s = max(scenario.swarm.until_s, scenario.load.arrive_s, last_fault_s) + scenario.settle_s
    with trio.move_on_at(limit_s) as patience:
        async with trio.open_nursery() as nursery:
            for requester in requesters:
                nursery.start_soon(requester.run)
    if patience.cancelled_caught:
        open_asks = [name for requester in requesters for name in requester.open_asks()]
        raise Violation("liveness", f"no answer by {limit_s:g} s to {', '.join(open_asks[:5])} ({len(open_asks)} open)")


async def _empty(world: World, outcome: Outcome) -> None:
    """Until nothing is left of any request; kills the writers that alone can end an epoch, once."""
    with trio.move_on_after(FREE_S):
        await _wait_free(world)
        return
    for process in list(world.processes.values()):
        if process.is_alive and world.auditor.num_open_epochs(process.life):
            outcome.purged += 1
            process.kill()
    with trio.move_on_after(PURGE_S):
        await _wait_free(world)
        return
    raise Violation("leftover", "; ".join(_leftovers(world)))


async def _wait_free(world: World) -> None:
    """Looks now and then: nothing tells of the last page that becomes free."""
    while _leftovers(world):
        await world.clock.sleep_until(world.clock.now + LOOK_S)


def _leftovers(world: World) -> list[str]:
    """What is still there of requests, in words."""
    left = []
    assert world.report is not None
    report = world.report()
    if report.waiting or report.running:
        left.append(f"the head has {report.waiting} waiting and {report.running} running")
    ranks = {status.rank: status for status in report.ranks}
    for rank, status in ranks.items():
        process = world.processes.get(rank)
        if process is None or status.state != "ready" or process.side is None:
            left.append(f"rank {rank} is {status.state}")
            continue
        side = process.side
        assert isinstance(side, DecodeSide | PrefillSide)
        records = side.sequences if isinstance(side, DecodeSide) else side.prompts
        if records:
            left.append(f"{process.life.name} has {sorted((key, r.phase.value) for key, r in records.items())[:4]}")
        pools = side.arena.pages, side.arena.slabs
        used = [pool.total - pool.num_free - pool.count(PageState.CACHED) for pool in pools]
        if any(used):
            left.append(f"{process.life.name} has {used[0]} pages and {used[1]} slabs in use")
        elif pinned := side.gauges().pages_pinned:
            left.append(f"{process.life.name} has {pinned} cached pages that somebody uses")
    return left
