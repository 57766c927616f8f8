"""Operators of a simulated cluster: who plans, applies, pauses, gives up and rolls back, and when. Drawn beforehand."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any, Final

import trio

from engine.sim.violation import Violation
from engine.sim.world import World
from transport.messages import ExpertsReport, Rebalance, Refused

ACTS: Final = ("plan", "apply", "apply", "apply", "rollback", "pause", "resume", "abort", "mode")
"""Equally likely; `apply` of a fresh plan counts twice, one of the last plan once."""
THEN: Final[tuple[tuple[str, ...], ...]] = (
    (), (), ("abort",), ("abort", "apply"), ("pause", "resume"), ("pause", "abort", "apply"), ("abort", "rollback"),
    ("kill",), ("kill", "abort"), ("abort", "kill"), ("abort", "kill", "kill"),
)  # fmt: skip
"""What the same user does to what it has begun. `kill`: a rank of the group dies, unless nothing is to go wrong."""
THEN_S: Final = 0.3
"""Longest pause before each of it: within the time that a move of a small world takes."""
ANSWER_S: Final = 20.0
"""An act is answered within so long, whatever happens; planning takes `limits.balance_s` at most."""
REST_S: Final = 90.0
"""After all is healed, until all groups are complete and nothing is moved."""
LOOK_S: Final = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Operators:
    """How much they do: the table `[operators]` of a scenario.

    Attributes:
        users: who act at the same time, each one thing after another.
        per_s: acts per virtual second of all of them.
        from_s, until_s: when.
        acts: in place of ACTS.
        is_mode_kept: nobody changes the mode.
    """

    users: int = 2
    per_s: float = 0.0
    from_s: float = 0.0
    until_s: float = 0.0
    acts: tuple[str, ...] = ()
    is_mode_kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Act:
    """One of them. `pick` chooses the part of a group, and what else is to be chosen."""

    at_s: float
    user: int
    action: str
    pick: float
    patience_s: float
    then: tuple[tuple[str, float], ...] = ()


def draw_acts(operators: Operators, rng: random.Random) -> list[Act]:
    """The acts of a run, in order."""
    acts: list[Act] = []
    kinds = [act for act in operators.acts or ACTS if act != "mode" or not operators.is_mode_kept]
    at_s = operators.from_s
    while operators.per_s:
        at_s += rng.expovariate(operators.per_s)
        if at_s >= operators.until_s:
            break
        # Some go before their plan is made.
        patience_s = ANSWER_S if rng.random() < 0.9 else 0.3 * rng.random()
        then = tuple((action, rng.random() ** 2 * THEN_S) for action in rng.choice(THEN))
        user, action, pick = rng.randrange(operators.users), rng.choice(kinds), rng.random()
        is_begun = action in ("apply", "rollback") and not operators.acts
        acts.append(Act(at_s, user, action, pick, patience_s, then if is_begun else ()))
    return acts


async def run_operators(world: World, operators: Operators, acts: list[Act], said: collections.Counter[str]) -> None:
    """Carries them out; `said` counts what was done and what was refused."""
    async with trio.open_nursery() as nursery:
        for user in range(operators.users):
            nursery.start_soon(_run_user, world, [act for act in acts if act.user == user], said)


async def _run_user(world: World, acts: list[Act], said: collections.Counter[str]) -> None:
    for act in acts:
        await trio.sleep_until(act.at_s)
        if world.is_over.is_set() or world.act is None or world.experts is None:
            continue
        parts = world.experts().parts
        if not parts:
            continue
        for action, pause_s in ((act.action, 0.0), *act.then):
            await trio.sleep(pause_s)
            if world.is_over.is_set():
                return
            part = world.experts().parts[int(act.pick * len(parts))]
            if action == "kill":
                _kill(world, part.ranks[int(act.pick * 7000) % len(part.ranks)])
                continue
            message = Rebalance(
                action=action,  # type: ignore[arg-type]
                pool=part.pool,
                group=part.group,
                part=part.part,
                plan=part.plan.plan if action == "apply" and int(act.pick * 1000) % 3 == 0 else 0,
                mode=("off", "manual", "auto", "auto")[int(act.pick * 4000) % 4] if action == "mode" else "",
                user=f"operator {act.user}",
                host="sim",
                reason="drawn",
            )
            world.trace.add(world.clock.now, f"act.{action}", f"{part.pool} {part.group} {part.part} {act.user}")
            answer = await _ask(world, message, act.patience_s)
            said[f"{action} {answer}"] += 1
            if answer != "done":
                break


def _kill(world: World, rank: int) -> None:
    process = world.processes.get(rank)
    if process is not None and process.is_alive and not world.is_calm:
        world.trace.add(world.clock.now, "act.kill", process.life.name)
        world.num_kills += 1
        world.disturb(rank, world.clock.now)
        process.kill()


async def _ask(world: World, message: Rebalance, patience_s: float) -> str:
    assert world.act is not None
    with trio.move_on_after(patience_s) as patience:
        answer = await world.act(message)
    if patience.cancelled_caught:
        if patience_s >= ANSWER_S and not world.is_over.is_set():
            raise Violation("group-liveness", f"{message.action} was not answered within {ANSWER_S:g} s")
        return "left"
    return "refused" if isinstance(answer, Refused) else "done"


async def rest(world: World) -> None:
    """Nobody acts any more and nothing goes wrong: until all groups are complete and nothing is moved.

    Raises:
        Violation: that does not come.
    """
    if world.is_over.is_set():
        return
    with trio.move_on_after(REST_S):
        while True:
            assert world.experts is not None
            report = world.experts()
            await _calm(world, report)
            if _busy(world, report) is None:
                return
            await trio.sleep(LOOK_S)
    assert world.experts is not None
    raise Violation("group-liveness", f"{_busy(world, world.experts())} {REST_S:g} s after the last fault")


async def _calm(world: World, report: ExpertsReport) -> None:
    """Ends what operators have left open."""
    for part in report.parts:
        wanted: Any = "resume" if part.state == "paused" else "mode" if part.mode == "auto" else ""
        if wanted:
            mode: Any = "manual" if wanted == "mode" else ""
            message = Rebalance(wanted, part.pool, part.group, part.part, 0, mode, "operator", "sim", "rest")
            await _ask(world, message, ANSWER_S)


def _busy(world: World, report: ExpertsReport) -> str | None:
    """What is not at rest, in words."""
    assert world.groups is not None and world.report is not None
    shape = world.groups.shape
    kinds = 1 + bool(shape.draft_layers)
    if len(report.parts) < kinds * len(world.groups.groups):
        return f"{len(report.parts)} parts of {len(world.groups.groups)} groups have formed"
    for part in report.parts:
        if part.state != "idle":
            return f"part {part.part} of {part.pool} group {part.group} is {part.state}"
    for status in world.report().ranks:
        if status.state != "ready":
            return f"rank {status.rank} is {status.state}"
    return None
