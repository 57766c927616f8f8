"""The head's Group and real ExpertSides, each message of which may take its time: `tests.core.pact` with another head.

The scheduler, the devices and what is checked are those of `tests/core/pact.py`: one epoch per step on all ranks, the
right weights in every slot that is used, no copy into a slot in use, and rest at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine.actors import group as actors
from engine.core.balance import Prices
from engine.core.membership import JoinMembers, Roster, RosterPhase
from engine.core.migrate import Migration, Outcome
from engine.core.moves import order_moves
from engine.core.orders import encode_orders
from engine.core.parts import MadePlan, PartBalance, PartRules
from engine.core.placement import EMPTY, Placement
from engine.core.planning import PlannedMoves, PlanRequest, plan_moves
from engine.core.topology import Topology
from engine.errors import LocalProtocolError, RemoteProtocolError
from tests.core import pact
from transport import messages as m
from transport.wire import Frame

RULES = PartRules(1, "manual", 1000, 1 << 30)
STEP_BYTES = 15


class HeadedGroup(pact.Group):
    """Everything as there, but for the head."""

    def try_name(self) -> None:
        if hasattr(self, "keeper"):
            return
        self.keeper = actors.Group("decode", 0, tuple(range(self.ranks)), (RULES, RULES), (STEP_BYTES, STEP_BYTES))
        self.must_name = False
        self.plan_numbers = 0
        for rank in range(self.ranks):
            self.welcome(rank)
            if rank == 0:
                for part, placement in zip(self.keeper.parts, self.placements, strict=True):
                    part.placement = placement

    def welcome(self, rank: int) -> None:
        generation = self.hosts[rank].generation
        wire = actors.Wire(
            generation,
            lambda message, blob: self.send(rank, message, blob),
            lambda why: pytest.fail(f"rank {rank} is ended: {why}"),
            lambda: self.joined.add(rank),
        )
        ready = m.RankReady(
            rank, generation, "a", 1, 16, 1, 1, 1, "memory", "sim", f"at {rank}", tuple(self.shapes)
        )
        self.keeper.rank_ready(ready, b"", wire)

    @property
    def is_complete(self) -> bool:
        return self.keeper.roster.is_complete

    def migrate(self, part: int, target: Placement, stage_copies: int | None = None) -> bool:
        kept = self.keeper.parts[part]
        stages = order_moves(kept.placement, target, [0] * self.ranks, stage_copies=stage_copies)
        if not stages or not self.is_complete or kept.migration is not None:
            return False
        loads = np.ones((target.layers, target.experts))
        request = PlanRequest(kept.placement, loads, Topology((0,) * self.ranks), Prices(1, 1, 10, 1, 1), target=target)
        self.plan_numbers += 1
        made = MadePlan(
            self.plan_numbers, PlannedMoves(plan_moves(request).plan, stages), kept.version, 0.0, is_rollback=False
        )
        self.keeper.begin(kept, made, "somebody", "")
        self.migrations[part] = kept.migration
        return True

    def give(self, part: int, orders: tuple) -> None:
        migration = self.migrations[part]
        assert isinstance(migration, Migration)
        for said in encode_orders(part, orders, migration.stage, STEP_BYTES):
            self.send(*said)

    def hear(self, host: pact.Host) -> None:
        message, blob = host.to_head.popleft()
        if (host.rank, host.generation) in self.dead:
            return
        number = self.keeper.roster.number
        was_complete, epochs = self.is_complete, [part.epoch for part in self.keeper.parts]
        self.keeper.rank_frames(host.rank, [Frame(message, memoryview(blob))])
        self.flips += sum(part.epoch != old for part, old in zip(self.keeper.parts, epochs, strict=True))
        self.rejoins += self.is_complete and not was_complete and number > 1

    def tell_death(self) -> None:
        rank = self.deaths_to_tell.popleft()
        generation = self.hosts[rank].generation
        self.missing.add(rank)
        self.joined.discard(rank)
        self.dead.add((rank, generation))
        self.send_all(m.PeerDown(rank, generation))
        self.keeper.rank_down(rank, generation)

    def revive(self, rank: int) -> None:
        self.hosts[rank] = pact.Host(self, rank, self.hosts[rank].generation + 1)
        self.missing.discard(rank)
        self.welcome(rank)

    def disturb(self) -> None:
        chance, rates = self.chance, self.rates
        if chance.random() < rates["operate"]:
            part = chance.choice(self.keeper.parts)
            if part.migration is not None:
                if chance.random() < 0.3:
                    self.keeper.abort(part, "the operator said so")
                elif part.migration.paused:
                    self.keeper.resume(part)
                else:
                    self.keeper.pause(part)
        if chance.random() < rates["kill"] and not self.missing and not self.deaths_to_tell:
            self.kill(chance.randrange(self.ranks))
        if chance.random() < rates["rows"]:
            self.add_rows()

    def check_books(self) -> None:
        """At rest: ranks hold what the head thinks, and are in the epoch that it thinks is in force."""
        for index, part in enumerate(self.keeper.parts):
            assert part.migration is None
            for host in self.hosts:
                assert host.device.slots[index] == part.placement.table[host.rank].tolist()
                assert host.device.active[index] == part.epoch


def draw_placement(chance: np.random.Generator, slots: int, experts: int) -> Placement:
    table = np.full(3 * slots, EMPTY, dtype=np.int32)
    extra = chance.integers(0, experts, int(chance.integers(0, 3 * slots - experts)))
    keys = np.concatenate([np.arange(experts), extra])
    table[chance.permutation(3 * slots)[: keys.size]] = keys
    return Placement(1, experts, table.reshape(3, slots))


SHAPES = ((4, 7), (3, 5))


def run_group(seed: int, shapes: Sequence[tuple[int, int]] = SHAPES) -> tuple[HeadedGroup, list[Migration]]:
    chance = np.random.default_rng(seed)
    group = HeadedGroup([draw_placement(chance, *shape) for shape in shapes], seed)
    group.settle()
    group.check_books()
    begun = []
    for _ in range(3):
        for part, shape in enumerate(shapes):
            target, stage_copies = draw_placement(chance, *shape), int(chance.integers(1, 6))
            if chance.random() < 0.8 and group.migrate(part, target, stage_copies):
                begun.append(group.migrations[part])
        for _ in range(400):
            group.act(True)
        group.settle()
        group.check_books()
    group.drain()
    return group, begun


async def test_whatever_happens_head_and_ranks_agree(autojump_clock) -> None:
    runs = [run_group(seed) for seed in range(40)]
    outcomes = [migration.outcome for _, begun in runs for migration in begun]
    groups = [group for group, _ in runs]
    # The runs are worth their name only if they met the hard cases.
    assert all(outcomes) and outcomes.count(Outcome.DONE) >= 40 and outcomes.count(Outcome.ABORTED) >= 10
    assert sum(group.breaks for group in groups) >= 50
    assert sum(group.rejoins for group in groups) >= 30
    assert sum(group.flips for group in groups) >= 80


# ---------------------------------------------------------------- planted bugs


def _never_open(_: Any) -> property:
    return property(lambda self: False)


def _nothing_busy(_: Any) -> Callable[[PartBalance], frozenset]:
    return lambda self: frozenset()


def _tell_anybody(inner: Any) -> Callable[..., bool]:
    def note_copied(self: PartBalance, *what: Any) -> bool:
        inner(self, *what)
        return True

    return note_copied


def _lose_epochs(inner: Any) -> Callable[..., list]:
    def hear(self: PartBalance, *what: Any) -> list:
        epoch = self.epoch
        orders = inner(self, *what)
        self.epoch = epoch
        return orders

    return hear


def _reuse_epochs(inner: Any) -> Callable[..., None]:
    def finish(self: PartBalance, now: float) -> None:
        first = self._next_epoch
        inner(self, now)
        self._next_epoch = first

    return finish


def _join_early(inner: Any) -> Callable[..., tuple]:
    def note_prepared(self: Roster, place: int, generation: int, number: int) -> tuple:
        orders = inner(self, place, generation, number)
        if self.phase is not RosterPhase.NAMED or len(self._prepared) < len(self._members()) - 1:
            return orders
        self.phase, self._told_number = RosterPhase.JOINING, number
        self._told = {member: self._chairs[member].generation for member in self._members()}
        return (JoinMembers(number, tuple(sorted(self._members()))),)

    return note_prepared


def _ignore_deaths(_: Any) -> Callable[..., list]:
    return lambda self, *what: []


BUGS = {
    "names while an epoch is open": (PartBalance, "blocks_membership", _never_open),
    "loads into slots that a stage may write": (PartBalance, "_busy_slots", _nothing_busy),
    "tells new lives of old copies": (PartBalance, "note_copied", _tell_anybody),
    "names with the epoch before": (PartBalance, "hear", _lose_epochs),
    "gives epochs out twice": (PartBalance, "_finish", _reuse_epochs),
    "has ranks join before all are prepared": (Roster, "note_prepared", _join_early),
    "goes on with a migration after a death": (PartBalance, "note_down", _ignore_deaths),
}


@pytest.mark.parametrize("bug", BUGS)
async def test_planted_bugs_of_the_head_are_caught(autojump_clock, monkeypatch, bug: str) -> None:
    owner, name, make = BUGS[bug]
    monkeypatch.setattr(owner, name, make(owner.__dict__[name]))
    for seed in range(200):
        try:
            run_group(seed)
        except (AssertionError, LocalProtocolError, RemoteProtocolError):
            return
    pytest.fail(f"200 runs did not notice that the head {bug}")
