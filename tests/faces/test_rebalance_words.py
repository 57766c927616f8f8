"""Plans, progress and history in words."""

from __future__ import annotations

import pytest

from engine.faces.ranks import describe_ranks
from engine.faces.rebalance import describe_past, describe_plan, describe_progress, describe_us, list_risks
from tests.faces.experts_samples import make_part, make_past, make_plan, make_status
from tests.faces.test_status import make_rank


@pytest.mark.parametrize(
    ("ranks", "text"), [((), ""), ((3,), "3"), ((2, 3, 4), "2-4"), ((0, 2, 4, 5), "0,2,4-5"), ((7, 9), "7,9")]
)
def test_ranks(ranks, text):
    assert describe_ranks(ranks) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 us"), (61.04, "61 us"), (999, "999 us"), (1200, "1.2 ms"), (3.4e6, "3.4 s")]
)
def test_microseconds(value, text):
    assert describe_us(value) == text


def bill(**changes: object) -> str:
    return "\n".join(describe_plan(make_part(plan=make_plan(**changes))))


def test_a_bill_without_a_known_step_speaks_of_steps_only():
    assert "pays back after 20 steps\n" in bill()


def test_a_plan_that_moves_nothing_pays_at_once():
    text = bill(moved_slots=0, moved_bytes=0, cost_us=0.0, stages=1)
    assert "pays back after a step\n" in text and "moves  0 of 256 slots   0B" in text and "1 stage\n" in text


def test_a_way_back_may_cost_time():
    text = bill(is_rollback=True, pays=False, saved_us_per_step=-460.0, reason="back to before plan 17")
    assert "a way back for decode group 0, part main" in text and "costs 460 us per step more" in text


def test_no_plan_yet():
    assert describe_plan(make_part()) == ["no plan for decode group 0, part main yet"]


def test_a_rank_of_the_group_that_is_not_ready_is_a_risk_and_others_are_not():
    ranks = (make_rank(0, "prefill", "lost"), make_rank(1, "decode", "ready"), make_rank(2, "decode", "starting"))
    assert list_risks(make_part(plan=make_plan()), make_status(ranks=ranks)) == ["rank 2 of the group is not ready"]
    assert list_risks(make_part(plan=make_plan()), make_status()) == []


def test_progress():
    assert describe_progress(make_part(state="moving", copied_slots=0, total_slots=0)) == "moving 0 of 0 slots (0 %)"
    paused = make_part(state="paused", copied_slots=1, total_slots=4, progress_age_ms=60_000)
    assert describe_progress(paused) == "paused 1 of 4 slots (25 %)"


def test_what_came_of_a_plan():
    known = make_past(17, "applied", after=1.3125, realised=0.917)
    assert describe_past(known) == (
        "plan 17 applied   skew 2.00 -> 1.31   3 slots, 3.0MiB in 0.74 s   predicted 1.25, 92% of it came"
    )
    assert describe_past(make_past(16, "skipped", reason="no gain")) == "plan 16 skipped: no gain"
    assert describe_past(make_past(18, "running")) == "plan 18 running   skew 2.00 -> predicted 1.25"
    failed = describe_past(make_past(15, "failed", reason="a copy failed"))
    assert failed.startswith("plan 15 failed") and failed.endswith(": a copy failed")
