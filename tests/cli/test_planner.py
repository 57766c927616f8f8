"""The planner as a process: its answers are those of the function, and whatever goes wrong in it ends in time."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
import trio

from engine.core.balance import Prices
from engine.core.placement import lay_out
from engine.core.planning import PlanRequest, plan_moves
from engine.core.topology import Topology
from engine.planner import PlannerFailed, call_planner, decode_moves, decode_request, encode_moves, encode_request

PRICES = Prices(1.0, 10_000.0, 10 << 20, 1000.0, 1000.0)


def make_request(layers: int, experts: int, ranks: int, slots: int, **values: object) -> PlanRequest:
    loads = np.random.default_rng(1).gamma(0.7, 10, (layers, experts))
    current = lay_out(layers, experts, ranks, slots)
    return PlanRequest(current, loads, Topology((0,) * ranks, reserve_slots=1), PRICES, **values)  # type: ignore[arg-type]


SMALL = make_request(2, 12, 3, 12)


def test_requests_and_answers_survive_the_wire() -> None:
    moves = plan_moves(SMALL)
    assert moves.stages and decode_moves(encode_moves(moves), SMALL.current) == moves
    back = make_request(2, 12, 3, 12, target=moves.plan.target, why="back")
    read = decode_request(encode_request(back))
    assert read.target == back.target and np.array_equal(read.loads, back.loads)
    assert (read.current, read.topology, read.prices, read.why) == (back.current, back.topology, PRICES, "back")


def test_the_way_back_is_billed_as_a_move_in_the_other_direction() -> None:
    there = plan_moves(SMALL)
    back = plan_moves(
        PlanRequest(there.stages[-1].after, SMALL.loads, SMALL.topology, PRICES, target=SMALL.current, why="back")
    )
    assert np.array_equal(back.stages[-1].after.count_per_rank(), SMALL.current.count_per_rank())
    assert back.plan.bill.saved_us_per_step == pytest.approx(-there.plan.bill.saved_us_per_step)
    assert back.plan.reason == "back" and back.plan.pays
    assert back.plan.bill.moved_slots == sum(len(stage.copies) for stage in back.stages)
    nothing = plan_moves(PlanRequest(SMALL.current, SMALL.loads, SMALL.topology, PRICES, target=SMALL.current))
    assert not nothing.stages and not nothing.plan.pays


async def test_a_real_process_plans_a_large_group() -> None:
    request = make_request(60, 384, 32, 736)
    begun = time.monotonic()
    moves = plan_moves(request)
    inside = time.monotonic() - begun
    begun = time.monotonic()
    answer = await call_planner(60.0)(request)
    total = time.monotonic() - begun
    assert answer == moves and sum(len(stage.copies) for stage in answer.stages) > 500
    # Starting a process and both ways of the bytes; generous, for a busy machine.
    assert total < 30, f"{1e3 * inside:.0f} ms inside, {1e3 * total:.0f} ms in all"


async def test_a_request_that_can_not_be_answered_ends_with_its_reason() -> None:
    with pytest.raises(PlannerFailed, match=r"status 2.*2 hosts for 3 ranks"):
        await call_planner(60.0)(PlanRequest(SMALL.current, SMALL.loads, Topology((0, 0)), PRICES))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "status -9: it said nothing"),
        ("import sys; sys.exit('no numpy here')", "status 1: no numpy here"),
        ("print('hello')", "answer of 6 bytes is none"),
        ("pass", "answer of 0 bytes is none"),
    ],
)
async def test_a_planner_that_fails_says_how(code: str, why: str) -> None:
    with pytest.raises(PlannerFailed, match=why):
        await call_planner(60.0, [sys.executable, "-c", code])(SMALL)


async def test_a_planner_that_hangs_is_killed() -> None:
    begun = time.monotonic()
    with trio.fail_after(30), pytest.raises(PlannerFailed, match=r"limits.balance_s \(0.2 s\)"):
        await call_planner(0.2, [sys.executable, "-c", "import time; time.sleep(600)"])(SMALL)
    assert time.monotonic() - begun < 20


async def test_a_planner_that_is_not_there_is_a_failed_plan() -> None:
    with pytest.raises(PlannerFailed, match="could not be started"):
        await call_planner(5.0, ["/nowhere/python"])(SMALL)
