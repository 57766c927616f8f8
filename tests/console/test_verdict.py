"""The verdict says the worst thing first, within 80 columns; risks are what the command line calls so."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from console.lines import text_width
from console.risks import list_risks
from console.verdict import WIDTH, Verdict, ask_worst, judge, worst_part
from console.view import LinkState
from engine.faces import rebalance
from tests.console import expertdata as made
from tests.console.expertdata import NOW
from transport.messages import AskHeat, ExpertsReport, LinksReport

RACK = made.Rack(layers=8, experts=64, spare=8, hot_layer=4, hot_expert=23)
EXPERTS = made.Experts(RACK)
EVEN = made.Experts(RACK, is_even=True)


def view_with(ranks: dict[int, dict[str, object]] | None = None, *, experts=EXPERTS, part=None, **status):
    """A view of the rack with some ranks, and some of the status, otherwise."""
    report = made.make_status(RACK)
    changed = tuple(msgspec.structs.replace(rank, **(ranks or {}).get(rank.rank, {})) for rank in report.ranks)
    report = msgspec.structs.replace(report, ranks=changed, **status)
    return made.make_view(experts=experts, status=report, **(part or {}))


def say(view) -> Verdict:
    verdict = judge(view, NOW)
    assert text_width(verdict.sentence) <= WIDTH
    return verdict


def test_skew_names_rank_layer_expert_and_price():
    verdict = say(view_with())
    skew = EXPERTS.skew()
    assert verdict.level == "warning"
    assert f"decode skew {skew.max_over_mean:.2f} costs {skew.lost_us_per_step:.0f} us a step" in verdict.sentence
    assert "d17, layer 4, expert 23" in verdict.sentence


def test_the_expert_is_left_out_while_no_heat_of_the_part_was_told():
    view = view_with()
    view.heats.clear()
    assert "expert" not in say(view).sentence
    assert "d17, layer 4" in say(view).sentence


@pytest.mark.parametrize("later, is_named", [(4096, True), (4097, False)])
def test_an_old_heat_names_no_expert(later, is_named):
    view = view_with()
    view.take(ExpertsReport((made.make_part(EXPERTS, steps=40_960 + later),)), b"", NOW)
    assert ("expert 23" in say(view).sentence) is is_named


def test_even_loads_are_nothing_to_do():
    assert say(view_with(experts=EVEN)).level == "good"
    assert say(view_with(experts=EVEN)).sentence == "serving, skew 1.00, nothing to do"


def test_a_cluster_without_groups_or_without_steps_is_well():
    view = view_with()
    view.take(ExpertsReport(()), b"", NOW)
    assert say(view).sentence == "serving, nothing to do"
    assert "before the first steps" in say(view_with(part={"steps": 0})).sentence


def test_skew_without_a_price_is_told_without_one():
    skew = msgspec.structs.replace(EXPERTS.skew(), lost_us_per_step=0.0)
    assert "price not measured yet" in say(view_with(part={"skew": skew})).sentence


def other_part(part, **skew: float):
    """The same experts in a group of prefill ranks, whose steps take 400 ms."""
    figures = msgspec.structs.replace(part.skew, rank=1, **skew)
    return msgspec.structs.replace(part, pool="prefill", ranks=(0, 1), skew=figures)


def prefill_steps(us: int) -> dict[int, dict[str, object]]:
    return {rank: {"snapshot": made.make_snapshot(rank, step_us_p50=us)} for rank in range(8)}


def test_the_part_that_loses_the_largest_share_of_its_step_is_the_worst():
    view = view_with(prefill_steps(400_000))
    decode = view.experts.parts[0]
    prefill = other_part(decode, lost_us_per_step=5000.0)
    view.take(ExpertsReport((prefill, decode)), b"", NOW)
    assert worst_part(view).pool == "decode"  # 6 % of 8.9 ms against 1 % of 400 ms
    view.take(ExpertsReport((other_part(decode, lost_us_per_step=90_000.0), decode)), b"", NOW)
    assert worst_part(view).pool == "prefill"


def test_an_even_part_that_loses_much_hides_no_uneven_one():
    view = view_with(prefill_steps(10_000))
    decode = view.experts.parts[0]
    prefill = other_part(decode, lost_us_per_step=5000.0, max_over_mean=1.06)
    view.take(ExpertsReport((prefill, decode)), b"", NOW)
    assert say(view).sentence.startswith("decode skew")


def test_screens_ask_for_the_heat_that_names_the_expert():
    view = view_with()
    part = view.experts.parts[0]
    asked = AskHeat(part.pool, part.group, part.part, part.skew.layer)
    assert ask_worst(view, None) == (asked,)
    assert ask_worst(view, AskHeat("prefill", 0, "main", 1)) == (asked,)
    assert ask_worst(view, msgspec.structs.replace(asked, layer=0)) == ()  # any layer's heat tells all layers' hottest
    view.take(ExpertsReport(()), b"", NOW)
    assert ask_worst(view, None) == ()


def test_parts_without_a_step_time_or_without_steps_can_be_weighed():
    view = view_with({rank: {"snapshot": None} for rank in range(40)})
    decode = view.experts.parts[0]
    idle = msgspec.structs.replace(other_part(decode, max_over_mean=99.0), steps=0)
    view.take(ExpertsReport((idle, other_part(decode, max_over_mean=1.2), decode)), b"", NOW)
    assert worst_part(view) is view.experts.parts[2]


def test_what_runs_is_told_in_place_of_the_skew_that_it_is_about():
    view = view_with(part={"state": "moving", "copied_slots": 12, "total_slots": 40})
    assert "moving 12 of 40 slots (30 %)" in say(view).sentence


LOST = {20: {"state": "lost", "reason": "killed by signal 9"}}
TROUBLES = {
    # In the fixed order of seriousness, each with the words that say it.
    "stopping": ({"is_stopping": True, "running": 7, "waiting": 2}, {}, "draining: 9 requests left"),
    "not ready": (
        {"ready": False, "reasons": ("no rank of pool decode is ready",)},
        LOST,
        "not ready: no rank of pool",
    ),
    "lost": ({}, LOST, "d20 lost: killed by signal 9"),
    "silent": ({}, {21: {"age_ms": 4100}}, "d21 silent for 4 s"),
    "degraded": ({"degraded": ("decode/0 goes on without rank 22",)}, {}, "degraded: decode/0 goes on"),
    "queue": ({"waiting": 4000}, {}, "queue nearly full: 4,000 of 4,096 wait"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_comes_before_skew(name):
    status, ranks, words = TROUBLES[name]
    verdict = say(view_with(ranks, **status))
    assert words in verdict.sentence
    assert verdict.level in ("warning", "error")


@pytest.mark.parametrize(
    "first, second", [("stopping", "lost"), ("not ready", "degraded"), ("lost", "degraded"), ("degraded", "queue")]
)
def test_of_two_troubles_the_worse_one_is_said(first, second):
    status = {**TROUBLES[second][0], **TROUBLES[first][0]}
    ranks = {**TROUBLES[second][1], **TROUBLES[first][1]}
    assert TROUBLES[first][2] in say(view_with(ranks, **status)).sentence


def test_starting_says_how_many_are_ready_and_which_is_slowest():
    ranks = {
        rank: {"state": "starting", "phase": "weights", "phase_done": rank, "phase_total": 40} for rank in range(4, 40)
    }
    verdict = say(view_with(ranks, ready=False, reasons=("36 ranks are starting",)))
    assert verdict.sentence == "starting: 4 of 40 ranks ready, slowest p04 weights 10 %"
    assert verdict.level == "info"


def test_a_life_after_the_first_is_not_a_start():
    ranks = {9: {"state": "starting", "restarts": 1}}
    assert say(view_with(ranks, ready=False, reasons=("d09 is away",))).sentence == "not ready: d09 is away"


def test_more_lost_ranks_are_counted():
    ranks = {rank: {"state": "lost"} for rank in (9, 10, 11)}
    assert say(view_with(ranks)).sentence == "d09 and 2 more lost"


@pytest.mark.parametrize("itl_us, missed", [(8000.0, False), (40_000.0, True)])
def test_a_missed_limit_is_an_error(itl_us, missed):
    view = view_with()
    view.take(made.make_traffic(int(NOW * 1e3) + 1000, 1_000_000, itl_us, itl_limit_us=9500), b"", NOW + 1)
    verdict = judge(view, NOW + 1)
    assert ("SLO missed: inter-token p99" in verdict.sentence) is missed
    assert (verdict.level == "error") is missed


def links(failed: int) -> tuple[LinksReport, bytes]:
    import numpy as np

    columns = [("<i4", 0), ("<i4", 1), ("<i4", 9), ("<i8", 10), ("<i8", 10), ("<i4", 0), ("<i4", failed), ("<i4", 5)]
    return LinksReport(1), b"".join(np.array([value], dtype=kind).tobytes() for kind, value in columns)


def test_pushes_that_fail_are_told_for_a_minute():
    view = view_with()
    view.take(*links(2), NOW)
    assert "failing" not in judge(view, NOW).sentence  # what failed before this console began is long over
    view.take(*links(5), NOW + 1)
    assert judge(view, NOW + 1).sentence == "pushes failing: 3 in the last minute"
    view.take(*links(5), NOW + 63)
    assert "failing" not in judge(view, NOW + 63).sentence


@pytest.mark.parametrize(
    "phase, words",
    [
        ("mismatch", "another version"),
        ("never", "no engine reached"),
        ("lost", "lost 60 s ago"),
        ("connecting", "connecting"),
    ],
)
def test_without_a_link_nothing_else_is_said(phase, words):
    view = view_with(LOST)
    view.link = dataclasses.replace(view.link, phase=phase, why="the socket is gone")
    assert words in say(view).sentence


def test_an_answer_that_is_due_makes_it_stale():
    view = view_with()
    view.asked_at = NOW - 5
    assert say(view).sentence.startswith("no answer for 5 s")
    view.link = LinkState()
    view.status = None
    view.link = dataclasses.replace(view.link, phase="live")
    assert judge(view, NOW).sentence == "no answer for 5 s; what is shown is old"
    view.asked_at = 0.0
    assert judge(view, NOW).sentence == "waiting for the first answer"


@pytest.mark.parametrize("length", [10, 80, 4000])
def test_long_words_of_the_head_are_cut_to_the_width(length):
    assert text_width(say(view_with(degraded=("x" * length,))).sentence) <= WIDTH
    assert text_width(say(view_with({20: {"state": "lost", "reason": "ü" * length}})).sentence) <= WIDTH


# ---------------------------------------------------------------- risks


def risks(view) -> list[str]:
    return list_risks(view, view.experts.parts[0])


def test_an_everyday_plan_has_no_risk():
    assert risks(view_with(part={"plan": made.make_plan(EXPERTS)})) == []


RISKS = {
    "far": ({"plan": made.make_plan(EXPERTS, far_slots=3)}, {}, {}, "3 slots move between hosts"),
    "degraded": ({}, {}, {"degraded": ("a balancer gets nowhere",)}, "degraded: a balancer gets nowhere"),
    "not ready": ({}, {}, {"ready": False, "reasons": ("no prefill rank",)}, "not ready: no prefill rank"),
    "lost": ({}, LOST, {}, "d20 is lost"),
    "silent": ({}, {21: {"age_ms": 9000}}, {}, "d21 was silent for 9 s"),
    "incomplete": ({"state": "incomplete"}, {}, {}, "the group is incomplete"),
    "unknown": ({"ranks": (*RACK.ranks[:-1], 99)}, {}, {}, "d99 is not known to the head"),
}


@pytest.mark.parametrize("name", RISKS)
def test_each_risk_is_named(name):
    part, ranks, status, words = RISKS[name]
    assert words in risks(view_with(ranks, part=part, **status))


@pytest.mark.parametrize("name", ["far", "degraded", "not ready", "lost"])
def test_what_the_command_line_calls_risky_is_risky_here(name):
    part, ranks, status, _ = RISKS[name]
    view = view_with(ranks, part=part, **status)
    assert rebalance.list_risks(view.experts.parts[0], view.status)
    assert risks(view)


def test_a_limit_that_the_head_says_was_missed_is_not_said_twice():
    told = "inter-token latency, p99 is 40 ms over the last minute, above slo.itl_p99 (9.5 ms)"
    view = view_with(degraded=(told,))
    view.take(made.make_traffic(int(NOW * 1e3) + 1000, 1_000_000, 40_000.0, itl_limit_us=9500), b"", NOW)
    assert risks(view) == [f"degraded: {told}"]


@pytest.mark.parametrize("more, is_missed", [(99, False), (100, True)])
def test_few_values_say_nothing_of_a_limit(more, is_missed):
    view = view_with()
    view.take(made.make_traffic(int(NOW * 1e3) + 61_000, 10_000 + more, itl_limit_us=5000), b"", NOW + 61)
    assert bool(risks(view)) is is_missed


def test_ranks_of_other_groups_are_no_risk_to_this_one():
    assert risks(view_with({2: {"state": "ready", "age_ms": 90_000}})) == []


def test_a_missed_limit_is_a_risk():
    view = view_with()
    view.take(
        made.make_traffic(int(NOW * 1e3) + 1000, 1_000_000, 40_000.0, itl_limit_us=9500, ttft_limit_us=9500), b"", NOW
    )
    assert [risk.split(" p9")[0] for risk in risks(view)] == ["first token", "inter-token"]


def test_a_way_back_does_not_count_what_the_last_plan_would_move():
    view = view_with(part={"plan": made.make_plan(EXPERTS, far_slots=3)})
    assert list_risks(view, view.experts.parts[0], is_plan_applied=False) == []
