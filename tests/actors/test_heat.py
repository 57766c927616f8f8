"""Heat from the head's side: before and after a plan, a move, a loss; while the group forms; what is asked wrongly."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import trio

from engine.core.placement import EMPTY
from tests.actors.group_rig import EXPERTS, LAYERS, SLOTS, Rig
from transport.messages import AskHeat, HeatReport, PartReport, Refused

SKEWED = [[40, 30, 1, 1, 1, 1], [1, 1, 1, 1, 30, 40]]


def ready_rig(**values: Any) -> Rig:
    rig = Rig(**values)
    rig.start_all()
    rig.load(SKEWED)
    return rig


class Seen:
    """An answer, its blob cut into columns."""

    def __init__(self, rig: Rig, layer: int = 0) -> None:
        answer = rig.balancer.heat(AskHeat("decode", 0, "main", layer))
        assert not isinstance(answer, Refused), answer
        self.report, blob = answer
        at = 0

        def cut(kind: str, rows: int, width: int) -> list[list[Any]]:
            nonlocal at
            flat = struct.unpack_from(f"<{rows * width}{kind}", blob, at)
            at += rows * width * struct.calcsize(kind)
            return [list(flat[row * width : (row + 1) * width]) for row in range(rows)]

        n, s = self.report.ranks, self.report.slots_per_rank
        self.rank_load, self.hottest = cut("f", n, self.report.layers), cut("i", n, self.report.layers)
        self.slots, self.next_slots = cut("i", n, s), cut("i", n, s)
        (self.load,) = cut("f", 1, self.report.experts)
        self.moved = cut("B", n, s)
        assert at == len(blob)


def slots_of(rig: Rig, layer: int) -> list[list[int]]:
    """From the table in force."""
    rows = rig.part.placement.table.tolist()
    return [[key % EXPERTS if key != EMPTY and key // EXPERTS == layer else -1 for key in row] for row in rows]


def part_of(rig: Rig) -> PartReport:
    return rig.balancer.report().parts[0]


async def test_heat_before_and_after_a_plan_and_a_move(autojump_clock) -> None:
    rig = ready_rig()
    seen = Seen(rig)
    wanted = HeatReport("decode", 0, "main", 0, LAYERS, EXPERTS, 3, SLOTS, False, 64, 10.0, 3 * 74 / 3)
    assert seen.report == wanted
    # Two experts of each layer are on each rank, in order; the first rank has 70 of 74 rows of layer 0.
    assert seen.rank_load[0] == pytest.approx([70 * 3 / 74, 2 * 3 / 74], rel=1e-6)
    assert seen.rank_load[2] == pytest.approx([2 * 3 / 74, 70 * 3 / 74], rel=1e-6)
    assert seen.hottest == [[0, 0], [2, 2], [4, 5]]
    assert seen.load == pytest.approx([row * EXPERTS / 74 for row in SKEWED[0]], rel=1e-6)
    assert seen.slots == seen.next_slots == slots_of(rig, 0) and not any(map(any, seen.moved))
    skew = part_of(rig).skew
    assert max(row[skew.layer] for row in seen.rank_load) == pytest.approx(1 + skew.imbalance, rel=1e-6)

    plan = (await rig.done("plan")).report.plan
    before, planned = slots_of(rig, 0), Seen(rig)
    assert planned.report.has_plan and planned.slots == before and planned.next_slots != before
    rig.lives[0].holds = {"ready"}
    await rig.done("apply", plan=plan.plan)
    rig.pump()
    assert part_of(rig).state == "moving" and Seen(rig).next_slots == planned.next_slots
    # Switched, and old slots are still being emptied: it is the plan's placement already, and the plan still runs.
    rig.lives[1].holds = {"reclaimed"}
    rig.lives[0].release("ready")
    rig.pump()
    flipped = Seen(rig)
    assert part_of(rig).state == "moving" and flipped.report.has_plan
    assert flipped.slots == flipped.next_slots == planned.next_slots and not any(map(any, flipped.moved))
    rig.lives[1].release("reclaimed")
    rig.pump()

    for layer in range(LAYERS):
        after = Seen(rig, layer)
        assert after.slots == after.next_slots == slots_of(rig, layer) and not after.report.has_plan
        if layer == 0:
            assert after.slots == planned.next_slots, "the plan said where"
            moved = {(at, s) for at, row in enumerate(after.moved) for s, is_moved in enumerate(row) if is_moved}
            fresh = {
                (at, s)
                for at, row in enumerate(after.slots)
                for s, name in enumerate(row)
                if name not in (-1, before[at][s])
            }
            assert moved == fresh != set()
    assert sum(sum(map(sum, Seen(rig, layer).moved)) for layer in range(LAYERS)) == plan.moved_slots
    most = max(max(row) for row in Seen(rig).rank_load)
    assert most < 70 * 3 / 74 and part_of(rig).skew.max_over_mean == pytest.approx(plan.after.max_over_mean)
    # The window moves, and the picture with it.
    rig.load(SKEWED[::-1], rounds=100)
    turned = Seen(rig)
    assert turned.report.steps == 101 * 64 and turned.load[5] > turned.load[0] and part_of(rig).skew.imbalance > 0.5
    assert max(row[0] for row in turned.rank_load) > most


async def test_the_marks_are_of_the_last_move_that_changed_anything(autojump_clock) -> None:
    rig = ready_rig()
    await rig.done("apply")
    rig.pump()
    marks = [Seen(rig, layer).moved for layer in range(LAYERS)]
    assert any(any(row) for layer in marks for row in layer)
    # Given up before anything was switched: the marks stay.
    for life in rig.alive:
        life.holds = {"ready"}
    await rig.done("rollback")
    rig.pump()
    await rig.done("abort")
    rig.pump()
    assert part_of(rig).history[-1].result == "failed"
    assert [Seen(rig, layer).moved for layer in range(LAYERS)] == marks
    for life in rig.alive:
        life.release("ready")
    rig.pump()
    await rig.done("rollback")
    rig.pump()
    assert part_of(rig).history[-1].result == "rolled_back"
    assert [Seen(rig, layer).moved for layer in range(LAYERS)] != marks


async def test_a_plan_for_another_placement_is_no_plan(autojump_clock) -> None:
    rig = ready_rig()
    await rig.done("plan")
    assert Seen(rig).report.has_plan
    rig.kill(1)
    rig.pump()
    assert not Seen(rig).report.has_plan
    rig.start(1)
    rig.pump()
    seen = Seen(rig)
    assert not seen.report.has_plan and seen.slots == seen.next_slots


async def test_a_plan_that_moves_nothing_leaves_the_slots(autojump_clock) -> None:
    rig = Rig()
    rig.start_all()
    rig.load([[5] * EXPERTS] * LAYERS)
    await rig.done("plan")
    seen = Seen(rig)
    assert seen.report.has_plan and seen.next_slots == seen.slots


async def test_a_group_that_forms_and_a_rank_that_is_missing(autojump_clock) -> None:
    rig = Rig()
    refused = rig.balancer.heat(AskHeat("decode", 0, "main", 0))
    assert refused == Refused("no rank of decode group 0 is ready yet")
    rig.start(2)
    seen = Seen(rig)
    assert (seen.report.steps, seen.report.us_per_row, seen.report.rows_per_step) == (0, 0.0, 0.0)
    assert seen.slots[0] == seen.slots[1] == [-1] * SLOTS and sorted(seen.slots[2])[-2:] == [4, 5]
    assert not any(map(any, seen.rank_load)) and not any(seen.load) and seen.hottest[:2] == [[-1, -1]] * 2
    rig.start(0)
    rig.start(1)
    rig.pump()
    rig.load(SKEWED)
    assert Seen(rig).slots == slots_of(rig, 0)
    # Dead, and nothing is named yet: the others still have their rows, under the old placement.
    rig.kill(0)
    lost = Seen(rig)
    assert lost.rank_load[0] == [0.0, 0.0] and lost.hottest[0] == [-1, -1]
    assert lost.slots[0] == lost.next_slots[0] == [-1] * SLOTS
    rig.pump()
    seated = Seen(rig)
    assert seated.slots == slots_of(rig, 0) and seated.slots[0] == [-1] * SLOTS
    assert {name for row in seated.slots for name in row} == {-1, *range(EXPERTS)}
    assert sum(row[0] for row in seated.rank_load) == pytest.approx(3.0, rel=1e-6)


async def test_what_there_is_not_is_refused_with_what_there_is(autojump_clock) -> None:
    rig = ready_rig()

    def ask(pool: Any = "decode", group: int = 0, part: Any = "main", layer: int = 0) -> str:
        answer = rig.balancer.heat(AskHeat(pool, group, part, layer))
        assert isinstance(answer, Refused)
        return answer.message

    nowhere = "that shares experts between ranks; there is decode group 0"
    assert ask(group=1) == f"there is no decode group 1 {nowhere}"
    assert ask(pool="prefill") == f"there is no prefill group 0 {nowhere}"
    assert ask(part="draft") == "the model has no part draft, it has main"
    assert ask(layer=LAYERS) == f"part main has layers 0 to {LAYERS - 1}, there is no layer {LAYERS}"
    assert Seen(rig, LAYERS - 1).report.layer == LAYERS - 1


async def test_the_report_says_how_long_plans_live_when_auto_looks_and_what_runs(autojump_clock) -> None:
    rig = ready_rig(mode="manual", interval_s=30.0)
    assert (part_of(rig).plan_age_limit_ms, part_of(rig).next_check_ms, part_of(rig).done_text) == (60_000, 0, "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.balancer.run)
        await trio.sleep(10)
        assert part_of(rig).next_check_ms == 0, "it is not auto's to look"
        await rig.done("mode", mode="auto")
        assert part_of(rig).next_check_ms == 20_000
        rig.plan_takes_s = 5.0
        await trio.sleep(22)
        report = part_of(rig)
        assert (report.state, report.next_check_ms) == ("planning", 1)
        assert report.done_text == "a plan for auto is being made"
        for life in rig.alive:
            life.holds = {"ready"}
        await trio.sleep(4)
        rig.pump()
        report = part_of(rig)
        slots = report.total_slots
        assert report.done_text == f"plan 1 of auto is being carried out (copy, {slots} of {slots} slots copied)"
        assert report.next_check_ms == 29_000
        for life in rig.alive:
            life.release("ready")
        rig.pump()
        assert part_of(rig).done_text == "" and part_of(rig).history[-1].by == "auto"
        nursery.cancel_scope.cancel()
