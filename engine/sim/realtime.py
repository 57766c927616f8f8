"""A scenario on the real clock: its cluster behind real sockets, its requests and faults for as long as the head runs.

What is simulated is what `engine simulate` simulates, and all of it is in this process; what is real is the head, its
sockets, operators, clients that connect, the planner's process, and time. Nothing of it can be repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio

from engine.actors.head import HeadPorts
from engine.config import SIMULATED, ClusterConfig
from engine.errors import ConfigError
from engine.sim.clock import RealClock
from engine.sim.faults import Fault, Swarm, hurt
from engine.sim.scenario import Scenario, load_scenario
from engine.sim.trace import Trace
from engine.sim.workload import Answers, Ask, Load, Requester, draw_ask
from engine.sim.world import Outside, World

SEED: Final = 0
"""Of all chance but the order of tasks: the same rack has the same experts in demand each time."""
OPEN_LIMIT: Final = 1024
"""Requests of one simulated client without an answer; those that come then do not come at all."""
NAME_CHARACTERS: Final = 200
"""Of a scenario in reports."""
TIDY_S: Final = 60.0
"""Between two moments at which meters that only `engine simulate` reads are emptied."""


class NoTrace(Trace):
    """Nobody compares this run with another."""

    def add(self, now: float, kind: str, what: str, detail: int = 0) -> None:
        pass


def simulated_name(scenario: str) -> str:
    """What reports call the model of a scenario, by its name or path, so that nobody takes it for a real one."""
    return f"{Path(scenario).stem[:NAME_CHARACTERS]}{SIMULATED}"


def resolve_rack(name: str) -> ClusterConfig:
    """The configuration that a scenario asks for; its directory and log are the caller's to fill in.

    Raises:
        ConfigError: there is no such scenario, or it can not run on the real clock.
    """
    scenario = load_scenario(name, SEED)
    if scenario.signals or scenario.operators.per_s:
        raise ConfigError(f"scenario {name}: signals and [operators] are for engine simulate; here people act")
    if not scenario.load.inflight and not scenario.load.arrive_s:
        raise ConfigError(f"scenario {name}: [load] needs arrive_s, for a rate, or inflight")
    config = scenario.shape.cluster_config()
    return dataclasses.replace(config, model=simulated_name(name), device="sim", scenario=name)


def describe_rack(config: ClusterConfig) -> str:
    """What of it is pretended, in a sentence."""
    return (
        f"{config.model}: {len(config.roles)} ranks, their devices, links, experts and requests are pretended in one"
        " process on the real clock; no model runs, and no figure of it is a measurement"
    )


async def run_rack(ports: HeadPorts, config: ClusterConfig, ready_within_s: float) -> int:
    """A head and all that it serves, until it is told to stop; how many signals ended it. Runs on a RealClock only.

    Args:
        ports: of the head; `spawn` is not used.
        config: of `resolve_rack`.

    Raises (in groups):
        Violation: a promise of the engine was broken.
        RankLost, ConfigError, NotReady: see `run_head`.
    """
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, RealClock)
    scenario = load_scenario(config.scenario, SEED)
    world = World(
        clock, scenario.shape, random.Random(f"world {SEED}"), NoTrace(), SEED, Outside(ports, config, ready_within_s)
    )
    answers, load = Answers(), scenario.load
    requesters = [
        Requester(world, number, _draw_kept(scenario, number, clock) if load.inflight else (), answers, load)
        for number in range(load.clients)
    ]
    broken: list[Exception] = []
    signals = 0
    # Events go on until all else has ended: no simulated process dies without them.
    async with trio.open_nursery() as clockwork:
        async with trio.open_nursery() as nursery:

            def fail(error: Exception) -> None:
                broken.append(error)
                nursery.cancel_scope.cancel()

            clockwork.start_soon(clock.run_events, fail)
            nursery.start_soon(_tidy, world)
            for requester in requesters:
                nursery.start_soon(requester.run)
            if not load.inflight:
                nursery.start_soon(_arrive, world, requesters, load)
            for number, swarm in enumerate((scenario.swarm, scenario.extra)):
                if swarm.kinds and swarm.per_s:
                    nursery.start_soon(_hurt_on, world, requesters, swarm, random.Random(f"faults {number}"))
            signals = await world.run()
            nursery.cancel_scope.cancel()
        clockwork.cancel_scope.cancel()
    if broken:
        raise broken[0]
    return signals


def _draw_kept(scenario: Scenario, client: int, clock: RealClock) -> Iterator[Ask]:
    """Requests of a load that keeps so many in flight: each is drawn when it is asked for."""
    load, rng = scenario.load, random.Random(f"asks {client}")
    for number in itertools.count(client, load.clients):
        yield draw_ask(load, rng, scenario.shape.vocab_size, number, clock.now)


async def _arrive(world: World, requesters: list[Requester], load: Load) -> None:
    """Requests of a load that comes at random: at its rate, for ever."""
    rng = random.Random("arrivals")
    per_s = load.requests / load.arrive_s
    for number in itertools.count():
        await trio.sleep(rng.expovariate(per_s))
        requester = requesters[number % load.clients]
        if not requester.is_gone and requester.num_open < OPEN_LIMIT:
            requester.take(draw_ask(load, rng, world.shape.vocab_size, number, world.clock.now))


async def _hurt_on(world: World, requesters: list[Requester], swarm: Swarm, rng: random.Random) -> None:
    """Faults at their rate, for ever; `until_s` is for runs that end."""
    await trio.sleep(swarm.from_s)
    while True:
        await trio.sleep(rng.expovariate(swarm.per_s))
        fault = Fault(world.clock.now, rng.choice(swarm.kinds), rng.random(), rng.random() * swarm.most_s)
        hurt(world, requesters, fault)


async def _tidy(world: World) -> None:
    while True:
        await trio.sleep(TIDY_S)
        for group in world.groups.groups.values() if world.groups is not None else ():
            group.meters.lost_by_second.clear()
