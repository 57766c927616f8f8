"""Moves in stages: every expert live at every moment, no slot used twice, bytes as the difference says; the pacer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.moves import Copy, Pacer, Stage, order_moves
from engine.core.placement import EMPTY, Placement, diff, lay_out
from engine.errors import LocalProtocolError


def draw_placement(chance: np.random.Generator, shape: tuple[int, int, int, int], spare: int) -> Placement:
    """Any placement with at least `spare` empty slots on every rank, replicas and doubles included."""
    layers, experts, ranks, slots = shape
    keys = np.arange(layers * experts)
    room = ranks * (slots - spare) - keys.size
    keys = np.concatenate([keys, chance.integers(0, keys.size, int(chance.integers(0, room + 1)))])
    cells = chance.permutation(ranks * (slots - spare))[: keys.size]
    table = np.full((ranks, slots), EMPTY, dtype=np.int32)
    table[cells % ranks, cells // ranks] = keys
    return Placement(layers, experts, np.stack([chance.permutation(row) for row in table]))


@st.composite
def changes(draw: st.DrawFn, *, spare: int) -> tuple[Placement, Placement, tuple[int, ...], int | None]:
    layers, experts, ranks = draw(st.integers(1, 2)), draw(st.integers(2, 6)), draw(st.integers(2, 5))
    slots = -(-layers * experts // ranks) + spare + draw(st.integers(0, 2))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (layers, experts, ranks, slots)
    hosts = tuple(int(host) for host in chance.integers(0, 2, ranks))
    stage_copies = draw(st.none() | st.integers(1, 4))
    return draw_placement(chance, shape, spare), draw_placement(chance, shape, spare), hosts, stage_copies


def check_stages(stages: tuple[Stage, ...], current: Placement, target: Placement, hosts: tuple[int, ...]) -> int:
    """Plays the stages against a table of weights. Returns the number of copies."""
    weights = current.table.tolist()
    placement = current
    num_copies = 0
    for stage in stages:
        assert stage.before == placement
        targets = [copy.target for copy in stage.copies]
        assert len(set(targets)) == len(targets), "a slot is filled twice"
        for copy in stage.copies:
            key = copy.layer * current.experts + copy.expert
            assert stage.before.table[copy.target] == EMPTY, "a copy goes over a live slot"
            assert weights[copy.source[0]][copy.source[1]] == key and stage.before.table[copy.source] == key
            near = [
                r for r, _ in stage.before.find_replicas(copy.layer, copy.expert) if hosts[r] == hosts[copy.target[0]]
            ]
            assert copy.far == (not near)
            assert copy.far or copy.source[0] in near
        for copy in stage.copies:
            weights[copy.target[0]][copy.target[1]] = copy.layer * current.experts + copy.expert
            num_copies += 1
        # Under either table, before and after the flip, each live slot has its expert's weights.
        for table in (stage.before.table, stage.after.table):
            for (rank, slot), key in np.ndenumerate(table):
                assert key in (EMPTY, weights[rank][slot])
        changed = {(int(r), int(s)) for r, s in np.argwhere(stage.before.table != stage.after.table)}
        assert changed == set(targets) | set(stage.released)
        placement = stage.after
    np.testing.assert_array_equal(placement.count_per_rank(), target.count_per_rank())
    return num_copies


@settings(max_examples=150, deadline=None)
@given(changes(spare=1))
def test_with_a_spare_slot_on_each_rank_the_copies_are_the_difference(change: tuple) -> None:
    current, target, hosts, stage_copies = change
    stages = order_moves(current, target, hosts, stage_copies=stage_copies)
    assert check_stages(stages, current, target, hosts) == len(diff(current, target).arrivals)
    assert all(len(stage.copies) <= (stage_copies or 1000) for stage in stages)
    assert stages == order_moves(current, target, hosts, stage_copies=stage_copies)


@settings(max_examples=150, deadline=None)
@given(changes(spare=0))
def test_with_fewer_spare_slots_a_way_is_found_unless_there_is_none_at_all(change: tuple) -> None:
    current, target, hosts, stage_copies = change
    try:
        stages = order_moves(current, target, hosts, stage_copies=stage_copies)
    except ValueError as error:
        assert "no rank has a spare slot" in str(error)
        assert 0 in (sum(current.count_empty()), sum(target.count_empty()))
        return
    assert check_stages(stages, current, target, hosts) >= len(diff(current, target).arrivals)


@settings(max_examples=60, deadline=None)
@given(changes(spare=1))
def test_a_rollback_restores_which_rank_holds_what_and_all_weights(change: tuple) -> None:
    current, target, hosts, stage_copies = change
    there = order_moves(current, target, hosts, stage_copies=stage_copies)
    reached = there[-1].after if there else current
    back = order_moves(reached, current, hosts, stage_copies=stage_copies)
    check_stages(back, reached, current, hosts)


def place(*rows: list[int], experts: int) -> Placement:
    return Placement(1, experts, np.array(rows, dtype=np.int32))


def test_two_experts_change_places_through_spare_slots_in_one_stage() -> None:
    (stage,) = order_moves(place([0, -1], [1, -1], experts=2), place([1, -1], [0, -1], experts=2), (0, 0))
    assert stage.copies == (Copy(0, 1, (1, 0), (0, 1), False), Copy(0, 0, (0, 0), (1, 1), False))
    assert stage.released == ((0, 0), (1, 0))


def test_a_ring_turns_through_one_spare_slot_with_one_detour() -> None:
    current = place([0, 3], [1, 4], [2, -1], experts=5)
    target = place([1, 3], [0, 4], [2, -1], experts=5)
    stages = order_moves(current, target, (0, 0, 0))
    assert check_stages(stages, current, target, (0, 0, 0)) == 3
    assert [stage.copies[0].target for stage in stages] == [(2, 1), (0, 0), (1, 0)]


def test_without_any_spare_slot_experts_can_not_change_places() -> None:
    with pytest.raises(ValueError, match="no rank has a spare slot"):
        order_moves(place([0], [1], experts=2), place([1], [0], experts=2), (0, 0))


def test_a_replica_that_another_takes_the_place_of_goes_first() -> None:
    current = place([0, 1], [1, 2], experts=3)
    target = place([0, 2], [1, 2], experts=3)
    first, second = order_moves(current, target, (0, 0))
    assert first.copies == () and first.released == ((0, 1),)
    assert second.copies == (Copy(0, 2, (1, 1), (0, 1), False),)


def test_nothing_to_move_is_no_stage() -> None:
    placement = lay_out(2, 4, 2, 5)
    assert order_moves(placement, placement, (0, 0)) == ()
    with pytest.raises(ValueError, match="1 hosts for 2 ranks"):
        order_moves(placement, placement, (0,))
    with pytest.raises(ValueError, match="gets nowhere"):
        order_moves(placement, placement, (0, 0), stage_copies=0)


def test_sources_on_one_host_share_the_work() -> None:
    current = place([0, -1], [0, -1], [1, -1], [1, 2], experts=3)
    target = place([0, 1], [0, 1], [1, 0], [1, 2], experts=3)
    (stage,) = order_moves(current, target, (0, 0, 0, 0))
    assert sorted(copy.source[0] for copy in stage.copies) == [0, 2, 3]


# ---------------------------------------------------------------- pacing


def draw_copies(num_copies: int, far: int) -> list[Copy]:
    return [Copy(0, expert, (0, expert), (1, expert), expert < far) for expert in range(num_copies)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 50), st.integers(1, 120), st.integers(1, 3), st.data())
def test_the_pacer_keeps_its_budget_and_its_limit_and_starts_everything(
    number: int, far: int, slot_bytes: int, step_bytes: int, far_copies: int, data: st.DataObject
) -> None:
    pacer = Pacer(draw_copies(number, far), slot_bytes, step_bytes, far_copies)
    started: list[Copy] = []
    for step in range(1, 5000):
        chosen = pacer.choose_copies()
        started += chosen
        # Never more than the budget of all steps so far, nor than one step's (or one slot's) at once.
        assert len(started) * slot_bytes <= step * step_bytes + max(0, slot_bytes - step_bytes)
        assert len(chosen) * slot_bytes <= max(slot_bytes, step_bytes)
        assert sum(copy.far for copy in pacer.running) <= far_copies
        for copy in sorted(pacer.running, key=lambda copy: copy.expert):
            if step % 50 == 0 or data.draw(st.booleans()):  # every copy ends some time
                pacer.note_done(copy)
        if pacer.is_done:
            break
        if len(started) == number:
            for copy in pacer.running:
                pacer.note_done(copy)
    assert pacer.is_done and len(started) == len(set(started)) == number


def test_a_far_copy_that_waits_does_not_hold_up_near_ones() -> None:
    copies = draw_copies(4, far=2)
    pacer = Pacer(copies, 10, 100, 1)
    assert pacer.choose_copies() == (copies[0], copies[2], copies[3])
    assert pacer.choose_copies() == ()
    pacer.note_done(copies[0])
    assert pacer.choose_copies() == (copies[1],)


def test_a_slot_larger_than_the_budget_takes_several_steps_and_idle_steps_save_no_more() -> None:
    copies = draw_copies(3, far=0)
    pacer = Pacer(copies, 100, 40, 1)
    assert [len(pacer.choose_copies()) for _ in range(6)] == [0, 0, 1, 0, 0, 1]


def test_the_pacer_refuses_what_can_not_work() -> None:
    with pytest.raises(ValueError, match="move nothing"):
        Pacer([], 10, 0, 1)
    with pytest.raises(ValueError, match="far_copies is 0"):
        Pacer(draw_copies(1, far=1), 10, 10, 0)
    with pytest.raises(LocalProtocolError, match="without having been started"):
        Pacer(draw_copies(1, far=0), 10, 10, 1).note_done(draw_copies(1, far=0)[0])
