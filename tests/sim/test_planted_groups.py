"""Bugs planted into groups and live re-placement, each a small patch, each found by a named checker within a few seeds.

As in test_planted.py: the seeds are those that `engine simulate groups --seed` draws, and nothing is made for a bug.
Most are planted into production code; what the pact itself does wrong is planted into the simulated device, which calls
`core.pact` as the real one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.core import switch
from engine.core.effects import FreeSlots, SetReady, StartCopy
from engine.core.epochs import RANK, Action, RankEvent, RankPhase
from engine.core.experts import ExpertSide
from engine.core.pact import Agreement, agree
from engine.core.parking import Parking
from engine.core.parts import PartBalance
from engine.core.tables import Transition
from engine.sim.circle import Circle, Seat
from engine.sim.group import SimGroup
from engine.sim.play import play
from engine.sim.scenario import load_scenario
from engine.sim.slots import SimExperts
from tests.sim.test_planted import Bug

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Bug] = {}


def bug(*checkers: str, seeds: int, first: int = 0) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        BUGS[plant.__name__] = Bug(plant, frozenset(checkers), seeds, first)
        return plant

    return add


@bug("flip-step", seeds=20)
def one_rank_flips_a_step_early(patch: pytest.MonkeyPatch) -> None:
    original = SimGroup._begin

    def begin(self: SimGroup, circle: Circle) -> None:
        words = [seat.words for seat in circle.arrived if seat.words is not None]
        agreed = agree(words, circle.active, circle.number, self.rules.idle_steps)
        circle.arrived[0].experts.advance(agreed.active)
        original(self, circle)

    patch.setattr(SimGroup, "_begin", begin)


@bug("flip-step", seeds=20)
def one_rank_flips_a_step_late(patch: pytest.MonkeyPatch) -> None:
    original = SimGroup.latch

    def latch(self: SimGroup, seat: Seat, agreed: Agreement) -> None:
        seat.is_late = seat.place == 0 and agreed.active != seat.experts.active and not seat.is_late
        if not seat.is_late:
            original(self, seat, agreed)

    patch.setattr(Seat, "is_late", False, raising=False)
    patch.setattr(SimGroup, "latch", latch)


@bug("flip-step", seeds=20)
def one_rank_reads_the_words_twice(patch: pytest.MonkeyPatch) -> None:
    """Its agreement has what hosts set in the middle of the step; that of the others has not."""
    original = SimGroup.latch

    def latch(self: SimGroup, seat: Seat, agreed: Agreement) -> None:
        if seat.place == 0 and seat.circle is not None:
            said = [each.experts.ready for each in seat.circle.seats.values()]
            active = (max(now, *(min(ready[p] for ready in said),)) for p, now in enumerate(agreed.active))
            agreed = agreed._replace(active=tuple(active))
        original(self, seat, agreed)

    patch.setattr(SimGroup, "latch", latch)


@bug("slot-live", seeds=20)
def copies_go_over_live_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(switch, "StartCopy", lambda *fields: StartCopy(*fields[:-1], 0))


@bug("table-epoch", seeds=20)
def table_of_another_epoch(patch: pytest.MonkeyPatch) -> None:
    """One rank keeps the table of the epoch before under the new number."""
    original = SimExperts.load_table

    def load(self: SimExperts, part: int, epoch: int, placement: Any) -> None:
        if self._seat.place == 1:
            placement = self.tables[part][self.active[part]].placement
        original(self, part, epoch, placement)

    patch.setattr(SimExperts, "load_table", load)


@bug("table-epoch", seeds=20)
def ready_before_the_copies_landed(patch: pytest.MonkeyPatch) -> None:
    original = switch.Switch.on_prepare

    def prepare(self: switch.Switch, stage: Any, *, is_broken: bool) -> None:
        original(self, stage, is_broken=is_broken)
        if self._epoch is not None and self._epoch.missing:
            self._outbox.append(SetReady(self._part, stage.epoch))

    patch.setattr(switch.Switch, "on_prepare", prepare)


@bug("slot-live", "table-epoch", "expert-slot", "protocol", seeds=20)
def burned_without_withdrawal(patch: pytest.MonkeyPatch) -> None:
    """A rank that is ready says at once that it is not, and its word in the pact stays."""
    said = Transition(RankPhase.WITHDRAWN, (Action.TELL_WITHDRAWN,))
    patch.setitem(RANK, (RankPhase.READY, RankEvent.WITHDRAW), said)
    patch.setitem(RANK, (RankPhase.CUT, RankEvent.WITHDRAW), said)


@bug("group-liveness", seeds=20, first=3)
def ranks_disagree_on_the_park(patch: pytest.MonkeyPatch) -> None:
    """One rank parks as soon as it has been idle for long enough itself."""
    original = SimGroup._finish

    def finish(self: SimGroup, seat: Seat, done: Any, agreed: Agreement, drawn: Any) -> bool:
        assert seat.words is not None
        parks = seat.place == 0 and seat.words.idle >= self.rules.idle_steps
        return original(self, seat, done._replace(park=done.park or parks), agreed, drawn)

    patch.setattr(SimGroup, "_finish", finish)


@bug("slot-live", seeds=20)
def old_slots_are_freed_before_the_flip(patch: pytest.MonkeyPatch) -> None:
    original = switch.Switch._act

    def act(self: switch.Switch, action: Action, number: int, stage: Any) -> None:
        original(self, action, number, stage)
        if action is Action.SET_READY:
            self._outbox.append(FreeSlots(self._part, tuple(s for at, s in stage.released if at == self._place)))

    patch.setattr(switch.Switch, "_act", act)


@bug("slot-live", seeds=60, first=6)
def experts_loaded_where_copies_may_land(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartBalance, "_busy_slots", lambda self: frozenset())


@bug("loads", seeds=10)
def padded_rows_of_idle_ranks_count(patch: pytest.MonkeyPatch) -> None:
    original = SimGroup._finish

    def finish(self: SimGroup, seat: Seat, done: Any, agreed: Agreement, drawn: Any) -> bool:
        if seat.step_rows is None:
            seat.experts.rows += np.ones_like(seat.experts.rows)
        return original(self, seat, done, agreed, drawn)

    patch.setattr(SimGroup, "_finish", finish)


@bug("group-liveness", "liveness", seeds=20, first=5)
def parked_group_is_not_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Parking, "note_rows", lambda self, step: None)


@bug("group-liveness", seeds=20)
def parked_group_is_not_woken_for_a_flip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExpertSide, "_has_reason", lambda self: self._draining or bool(self._joining))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = BUGS[name]
    planted.plant(monkeypatch)
    for seed in range(planted.first, planted.seeds):
        outcome = play(load_scenario("groups", seed))
        if outcome.crash is not None:
            raise outcome.crash
        if outcome.violation is not None:
            print(f"{name}: seed {seed}: {outcome.violation}")
            assert outcome.violation.checker in planted.checkers, outcome.violation
            return
    pytest.fail(f"{planted.seeds} seeds did not find it")
