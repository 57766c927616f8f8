"""The switch of epochs: its tables, and its sequence over stages. Whole groups are in test_experts."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.epochs import RANK, STAGE, Action, RankEvent, RankPhase, StageEvent, StagePhase
from engine.core.epochs import diagram as draw
from engine.core.migrate import Migration, Outcome
from engine.core.moves import order_moves
from engine.core.placement import EMPTY, Placement
from engine.core.tables import Table
from engine.errors import LocalProtocolError, RemoteProtocolError

# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("phase", StagePhase)
@pytest.mark.parametrize("event", StageEvent)
def test_every_stage_pair_moves_or_raises(phase: StagePhase, event: StageEvent) -> None:
    _check_pair(STAGE, phase, event)


@pytest.mark.parametrize("phase", RankPhase)
@pytest.mark.parametrize("event", RankEvent)
def test_every_rank_pair_moves_or_raises(phase: RankPhase, event: RankEvent) -> None:
    _check_pair(RANK, phase, event)


REMOTE = {StageEvent.FLIPPED, RankEvent.PREPARE, RankEvent.WITHDRAW, RankEvent.ADOPT, RankEvent.BURN}
"""What a message of another process causes directly."""


def _check_pair(table: Table, phase: object, event: object) -> None:
    if (phase, event) in table:
        assert table.follow(phase, event, "epoch 7") == table[(phase, event)]
    else:
        kind = RemoteProtocolError if event in REMOTE else LocalProtocolError
        with pytest.raises(kind, match="epoch 7"):
            table.follow(phase, event, "epoch 7")


@pytest.mark.parametrize("table", [STAGE, RANK])
def test_every_state_is_reached_and_all_but_the_ends_are_left(table: Table) -> None:
    kind = type(next(iter(table))[0])
    reached = {to.phase for to in table.values()}
    left = {phase for (phase, _), to in table.items() if to.phase is not phase}
    assert reached == set(kind) - {kind.NEW}
    ends = {StagePhase.BURNED, StagePhase.DONE, RankPhase.BURNED, RankPhase.SETTLED}
    assert left == set(kind) - ends


def test_only_a_receiver_whose_copies_are_complete_becomes_ready() -> None:
    setting = {pair for pair, to in RANK.items() if Action.SET_READY in to.actions}
    assert setting == {(RankPhase.RECEIVING, RankEvent.COMPLETE)}


def test_an_epoch_is_burned_only_after_every_living_rank_has_withdrawn() -> None:
    assert {pair for pair, to in STAGE.items() if Action.BURN in to.actions} == {
        (StagePhase.WITHDRAWING, StageEvent.ALL_WITHDRAWN)
    }


def test_new_slots_are_empty_again_only_when_burned_and_quiet() -> None:
    assert {pair for pair, to in RANK.items() if Action.FREE_NEW in to.actions} == {
        (RankPhase.DRAINING, RankEvent.QUIET)
    }
    assert {pair for pair, to in RANK.items() if Action.FREE_OLD in to.actions} == {(RankPhase.ACTIVE, RankEvent.QUIET)}


def test_a_rank_that_was_never_ready_never_becomes_active() -> None:
    for (phase, _), to in RANK.items():
        if phase in (RankPhase.RECEIVING, RankPhase.DECLINED, RankPhase.DRAINING):
            assert to.phase is not RankPhase.ACTIVE


def test_the_death_of_a_rank_is_allowed_for_until_the_end() -> None:
    phases = {phase for phase, event in STAGE if event is StageEvent.RANK_DOWN}
    assert phases == set(StagePhase) - {StagePhase.BURNED, StagePhase.DONE}
    phases = {phase for phase, event in RANK if event is RankEvent.PEER_LOST}
    assert phases == set(RankPhase) - {RankPhase.NEW, RankPhase.BURNED}


def test_the_diagram_has_every_transition() -> None:
    assert draw().count("-->") == len(STAGE) + len(RANK)


# ---------------------------------------------------------------- sequence


def place(*rows: list[int], experts: int = 4) -> Placement:
    return Placement(1, experts, np.array(rows, dtype=np.int32))


BEFORE = place([0, 1, EMPTY], [2, 3, EMPTY])
AFTER = place([0, 2, EMPTY], [1, 3, EMPTY])


def begin(stage_copies: int | None = None) -> Migration:
    return Migration(order_moves(BEFORE, AFTER, (0, 0), stage_copies=stage_copies), {0: 1, 1: 1}, 5)


def say(migration: Migration, *words: str) -> list[Action]:
    """Both ranks say each word; which actions the head orders."""
    orders = []
    for word in words:
        for rank in (0, 1):
            orders += getattr(migration, f"note_{word}")(rank, 1, migration.epoch)
    return [order.action for order in orders]


def test_a_stage_goes_from_copy_to_ready_to_flip_to_reclaim() -> None:
    migration = begin()
    assert [order.action for order in migration.start()] == [Action.PREPARE] * 2
    phases = [migration.phase]
    for word in ("ready", "flipped", "reclaimed"):
        assert say(migration, word) == []
        phases.append(migration.phase)
    assert phases == [StagePhase.COPY, StagePhase.READY, StagePhase.RECLAIM, StagePhase.DONE]
    assert migration.outcome is Outcome.DONE and migration.next_epoch == 6
    assert np.array_equal(migration.placement.count_per_rank(), AFTER.count_per_rank())


def test_each_stage_has_an_epoch_of_its_own() -> None:
    migration = begin(stage_copies=1)
    assert len(migration.stages) == 2
    migration.start()
    assert say(migration, "ready", "flipped", "reclaimed") == [Action.PREPARE] * 2
    assert migration.epoch == 6 and migration.placement == migration.stages[0].after
    say(migration, "ready", "flipped", "reclaimed")
    assert migration.outcome is Outcome.DONE


def test_pause_holds_copies_and_the_next_stage_and_resume_goes_on() -> None:
    migration = begin(stage_copies=1)
    migration.start()
    assert [order.action for order in migration.pause()] == [Action.HOLD] * 2
    assert migration.pause() == ()
    assert [order.action for order in migration.resume()] == [Action.RELEASE] * 2
    migration.pause()
    assert say(migration, "ready", "flipped", "reclaimed") == []
    assert migration.phase is StagePhase.NEW and migration.outcome is None
    assert [order.action for order in migration.resume()] == [Action.PREPARE] * 2


def test_a_flip_that_is_faster_than_an_abort_counts_and_later_stages_do_not_begin() -> None:
    migration = begin(stage_copies=1)
    migration.start()
    say(migration, "ready")
    assert [order.action for order in migration.abort("enough")] == [Action.WITHDRAW] * 2
    assert [order.action for order in migration.note_flipped(0, 1, 5)] == [Action.ADOPT] * 2
    assert migration.blocks_membership
    say(migration, "flipped", "reclaimed")
    assert migration.outcome is Outcome.ABORTED and migration.reason == "enough"
    assert migration.placement == migration.stages[0].after


def test_a_death_before_the_flip_burns_the_epoch_and_keeps_the_placement() -> None:
    migration = begin()
    migration.start()
    migration.note_ready(1, 1, 5)
    assert [(order.action, order.rank) for order in migration.note_down(1, 1)] == [(Action.WITHDRAW, 0)]
    assert [(order.action, order.rank) for order in migration.note_withdrawn(0, 1, 5)] == [(Action.BURN, 0)]
    migration.note_reclaimed(0, 1, 5)
    assert (migration.outcome, migration.placement, migration.next_epoch) == (Outcome.ABORTED, BEFORE, 6)
    assert migration.reason == "rank 1 died"


def test_words_of_an_earlier_life_and_of_past_epochs_change_nothing() -> None:
    migration = begin()
    migration.start()
    migration.note_ready(0, 1, 5)
    migration.note_ready(1, 0, 5)
    migration.note_ready(1, 1, 4)
    assert migration.phase is StagePhase.COPY
    assert migration.note_down(1, 0) == ()
    with pytest.raises(RemoteProtocolError, match="epoch 6"):
        migration.note_ready(0, 1, 6)
    with pytest.raises(RemoteProtocolError, match="unasked"):
        migration.note_withdrawn(0, 1, 5)


def test_stages_must_follow_from_each_other() -> None:
    first, second = begin(stage_copies=1).stages
    with pytest.raises(ValueError, match="follow"):
        Migration((second, first), {0: 1, 1: 1}, 1)
    with pytest.raises(ValueError, match="3 ranks"):
        Migration((first, second), {0: 1, 1: 1, 2: 1}, 1)
