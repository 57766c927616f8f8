"""Faults: what is done to a world, when, and to whom. Drawn from a seed beforehand, so that a run can be told in full.

Swarm style: a run has some kinds of faults and not others, each at its own rate; what hides behind a crash shows in
the runs that have no crashes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Final, TypeVar

import trio

from engine.sim.wires import CableEnd
from engine.sim.workload import Requester
from engine.sim.world import SimProcess, World
from transport.memory_fabric import ExtraFaults, Faults

T = TypeVar("T")

KINDS: Final = {
    "crash": "kill -9 of a rank",
    "device-fails": "a rank's device fails in its next step",
    "device-stuck": "a rank's next step never ends",
    "slow": "a rank's device takes ten times as long",
    "stop": "a rank is stopped and goes on: nothing comes or goes, and what it was about to write lands late",
    "clog-head": "nothing passes between a rank and the head",
    "clog-pair": "nothing passes between a prefill and a decode rank",
    "cut-pair": "the stream between a prefill and a decode rank breaks; both live",
    "push-late": "pushes take longer",
    "push-lost": "pushes fail, with or without landing",
    "push-after": "pushes fail and land all the same, later",
    "push-stuck": "a push never ends",
    "push-twice": "pushes land twice, the second time late, and are over only then",
    "crash-flip": "kill -9 of a rank in the next step of its group that switches experts, or the one after it",
    "corrupt": "a bit of pushed bytes is wrong; for clusters with checksums",
    "hang-up": "a client's connection breaks",
    "leave": "a client goes away for good",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Swarm:
    """How much of what.

    Attributes:
        kinds: of `KINDS`; equally likely.
        per_s: faults per virtual second.
        from_s, until_s: when they begin; all is healed at `until_s`.
        most_s: longest duration of one that has a duration.
    """

    kinds: tuple[str, ...] = ()
    per_s: float = 0.0
    from_s: float = 0.0
    until_s: float = 0.0
    most_s: float = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One of them. `pick` chooses among whoever is there then."""

    at_s: float
    kind: str
    pick: float
    lasts_s: float


def draw_faults(swarm: Swarm, rng: random.Random) -> list[Fault]:
    """The faults of a run, in order."""
    faults: list[Fault] = []
    at_s = swarm.from_s
    while swarm.kinds and swarm.per_s:
        at_s += rng.expovariate(swarm.per_s)
        if at_s >= swarm.until_s:
            break
        lasts_s = min(rng.random() * swarm.most_s, swarm.until_s - at_s)
        faults.append(Fault(at_s, rng.choice(swarm.kinds), rng.random(), lasts_s))
    return faults


async def run_faults(world: World, requesters: list[Requester], swarm: Swarm, faults: list[Fault]) -> None:
    """Carries them out, and heals everything at the end."""
    for fault in faults:
        await trio.sleep_until(fault.at_s)
        hurt(world, requesters, fault)
    await trio.sleep_until(swarm.until_s)
    world.memory.faults, world.memory.extra = Faults(), ExtraFaults()
    for process in world.processes.values():
        if process.device is not None:
            process.device.slow = 1.0


def hurt(world: World, requesters: list[Requester], fault: Fault) -> None:
    """Does one of them; one that finds nobody to hurt does nothing."""
    kind, clock = fault.kind, world.clock
    ends_at = clock.now + fault.lasts_s
    world.trace.add(clock.now, f"fault.{kind}", f"{fault.pick:.6f} {fault.lasts_s:.6f}")
    if kind in ("hang-up", "leave"):
        present = [requester for requester in requesters if not requester.is_gone]
        if present and kind == "hang-up":
            _pick(present, fault).hang_up()
        elif len(present) > 1:
            _pick(present, fault).leave()
        return
    if kind in ("push-twice", "corrupt"):
        _hurt_bytes(world, kind, fault)
        return
    if kind.startswith("push-"):
        _hurt_wire(world, kind, fault)
        return
    alive = [process for process in world.processes.values() if process.is_alive]
    if not alive:
        return
    process = _pick(alive, fault)
    world.disturb(process.life.rank, ends_at)
    if kind == "crash":
        world.num_kills += 1
        process.kill()
    elif kind == "crash-flip":
        _arm(world, process, fault.pick)
    elif kind == "stop":
        process.stopped_until = ends_at
        if process.fabric is not None:
            process.fabric.stopped_until = ends_at
        if process.device is not None:
            process.device.stop_until(ends_at)
        for end in process.ends:
            _hold(end, ends_at)
    elif kind == "clog-head":
        _hold(process.far, ends_at)
    elif kind in ("clog-pair", "cut-pair"):
        pairs = [end for end in process.ends if end is not process.far and not end.is_cut]
        if pairs and kind == "clog-pair":
            _hold(_pick(pairs, fault), ends_at)
        elif pairs:
            _pick(pairs, fault).cut()
    else:
        _hurt_device(world, process, kind, ends_at)


def _arm(world: World, process: SimProcess, pick: float) -> None:
    """The rank dies at the next flip of its group, if it lives then."""

    def strike() -> None:
        if process.is_alive:
            world.num_kills += 1
            world.disturb(process.life.rank, world.clock.now)
            process.kill()

    if world.groups is not None:
        world.groups.arm(process.life.rank, pick, strike)


def _hurt_device(world: World, process: SimProcess, kind: str, ends_at: float) -> None:
    device = process.device
    if device is None:
        return
    if kind == "device-fails":
        device.fail_at_step = device.next_step
    elif kind == "device-stuck":
        device.hang_at_step = device.next_step
    else:
        device.slow = 10.0

        def heal() -> None:
            device.slow = 1.0

        world.clock.at(ends_at, heal)


def _hurt_wire(world: World, kind: str, fault: Fault) -> None:
    share = 0.1 + 0.4 * fault.pick
    faults = {
        "push-late": Faults(delay=share, delay_s=fault.lasts_s),
        "push-lost": Faults(fail=share),
        "push-after": Faults(fail=share, late=1.0, delay_s=fault.lasts_s),
        "push-stuck": Faults(stuck=share / 4),
    }[kind]
    world.memory.faults = faults

    def heal() -> None:
        if world.memory.faults is faults:
            world.memory.faults = Faults()

    world.clock.at(world.clock.now + fault.lasts_s, heal)


def _hurt_bytes(world: World, kind: str, fault: Fault) -> None:
    share = 0.1 + 0.4 * fault.pick
    memory = world.memory
    if kind == "push-twice":
        memory.extra = dataclasses.replace(memory.extra, twice=share, twice_s=fault.lasts_s)
    else:
        memory.extra = dataclasses.replace(memory.extra, corrupt=share)
    extra = memory.extra

    def heal() -> None:
        if memory.extra is extra:
            memory.extra = ExtraFaults()

    world.clock.at(world.clock.now + fault.lasts_s, heal)


def _hold(end: CableEnd, until: float) -> None:
    for direction in (end.out, end.into):
        direction.speed.held_until = max(direction.speed.held_until, until)


def _pick(of: Sequence[T], fault: Fault) -> T:
    return of[int(fault.pick * len(of))]
