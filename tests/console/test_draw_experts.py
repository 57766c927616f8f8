"""The drawings of screens 3 and 6 in every size and state: they fit, and say what they have to say."""

from __future__ import annotations

import itertools
import time

import msgspec
import numpy as np
import pytest

from console import balance_acts, draw_balance, draw_experts, draw_moves, draw_plan
from console.balance_state import BalanceState, newest_first
from console.expertcells import METRICS, ORDERS
from console.experts_state import ExpertsState
from console.lines import plain, width_of
from console.marks import THEMES, style_of
from tests.console import expertdata as made
from tests.console.expertdata import NOW
from transport.messages import ExpertsReport

RACK = made.Rack()
EXPERTS = made.Experts(RACK)
PLAN = made.make_plan(EXPERTS)
SIZES = ((80, 21), (120, 37), (200, 57), (80, 12), (60, 10))


def check(lines, width: int, height: int) -> str:
    """They fit and have looks in every theme; returns their text."""
    assert len(lines) <= height and all(width_of(line) <= width for line in lines)
    for line, theme in itertools.product(lines, THEMES):
        for _, style in line:
            style_of(style, theme)
    return "\n".join(plain(line) for line in lines)


@pytest.fixture(scope="module")
def view():
    return made.make_view(experts=EXPERTS, plan=PLAN)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_experts_fit_in_every_order_and_metric(view, size, order):
    for metric, is_after, is_mono in itertools.product(METRICS, (False, True), (False, True)):
        ui = ExpertsState(order=order, metric=metric, is_after=is_after, is_mono=is_mono)
        text = check(draw_experts.build(view, ui, *size, NOW), *size)
        assert "d17" in text and "layer 41" in text


@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_the_cursor_is_always_to_be_seen(view, size):
    part = view.experts.parts[0]
    for order in ORDERS:
        ui = ExpertsState(order=order)
        for row in (0, 31, 15, 3, 31, 0):
            ui.row = row
            for column in (255, 0, 128, 7):
                ui.layer, ui.expert = (min(column, 60), None) if order == "layers" else (41, column)
                lines = draw_experts.build(view, ui, *size, NOW)
                name = view.name(part.ranks[row])
                assert any("chosen" in style and name[1:] in text for line in lines for text, style in line)
                assert order != "experts" or "▾" in plain(lines[3])


def test_without_colours_glyphs_say_what_colours_said(view):
    size = (80, 30)
    with_glyphs = draw_experts.build(view, ExpertsState(is_mono=True), *size, NOW)
    loads = view.heat.rank_load
    row = next(plain(line) for line in with_glyphs if plain(line).startswith(" d17"))
    assert row[8 + 41] == "▓" and set(row[8:48]) <= set("·░▒▓█")
    assert (loads[9] < 1.1)[[n for n in range(61) if row[8 + n] == "·"]].all()


def test_slots_that_are_still_those_of_another_layer_are_not_given_out_as_the_chosen_ones(view):
    ui = ExpertsState(order="slots", layer=7)
    assert "layer 7 is asked for; shown are the slots of layer 41" in check(
        draw_experts.build(view, ui, 80, 21, NOW), 80, 21
    )


def test_lost_members_and_other_group_sizes_draw_nothing_wrong(view):
    part = view.experts.parts[0]
    other = made.make_view(experts=EXPERTS, plan=PLAN)
    other.take(ExpertsReport((msgspec.structs.replace(part, ranks=part.ranks[:-1]),)), b"", NOW)
    assert "not told yet" in check(draw_experts.build(other, ExpertsState(), 80, 21, NOW), 80, 21)


def test_a_full_redraw_of_a_rack_is_cheap():
    """72 ranks x 256 experts at 120x40. The limit is loose, since other programs share the cores of a test."""
    big = made.make_view(made.Rack(prefill=0, decode=72, experts=288, spare=16, layers=61), layer=41)
    for order in ORDERS:
        ui = ExpertsState(order=order)
        began = time.process_time()
        for _ in range(10):
            draw_experts.build(big, ui, 120, 37, NOW)
        assert (time.process_time() - began) / 10 < 0.025, order


# ---------------------------------------------------------------- balance

STATES = {
    "no plan": {"plan": made.NO_PLAN},
    "plan": {"plan": PLAN},
    "stay": {"plan": msgspec.structs.replace(PLAN, pays=False, stages=0, reason="even enough, " * 30)},
    "way back": {"plan": msgspec.structs.replace(PLAN, pays=False, is_rollback=True, saved_us_per_step=-40.0)},
    "far": {"plan": msgspec.structs.replace(PLAN, far_slots=1)},
    "moving": {
        "plan": PLAN,
        "state": "moving",
        "copied_slots": 4,
        "total_slots": 63,
        "done_text": "plan 18 of a@b runs",
    },
    "stuck": {"plan": PLAN, "state": "moving", "copied_slots": 4, "total_slots": 63, "progress_age_ms": 9000},
    "paused": {"plan": PLAN, "state": "paused", "copied_slots": 4, "total_slots": 63},
    "auto": {"mode": "auto", "next_check_ms": 18_000},
    "planning": {"state": "planning"},
    "empty": {"history": (), "steps": 0},
}
SAYS = {
    "no plan": ["no plan", "R makes one"],
    "plan": ["┌ plan 18, 0.2 s old", "pays   back after 210 steps (1.87 s)", "good for 59 s more", "risk   low"],
    "stay": ["stay   even enough", "…"],
    "way back": ["┌ way back 18", "costs 40 us a step more", "not back"],
    "far": ["1 slot moves between hosts"],
    "moving": ["4 of 63 slots (6 %)", "plan 18 of a@b runs", "token p99"],
    "stuck": ["no progress for 9 s"],
    "paused": ["paused"],
    "auto": ["mode auto, next check in 18 s"],
    "planning": ["a plan is being made"],
    "empty": ["nothing was moved yet", "not known: no steps yet"],
}


@pytest.mark.parametrize("size", SIZES[:4], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_balance_fits_in_every_state(state, size):
    view = made.make_view(experts=EXPERTS, **STATES[state])
    text = check(draw_balance.build(view, BalanceState(), *size, NOW), *size)
    if size[1] > 20:
        for words in SAYS[state]:
            assert words in text, words
    for detail in ("moves", "past"):
        check(draw_balance.build(view, BalanceState(detail=detail, row=1), *size, NOW), *size)


def test_ages_go_on_between_two_answers():
    view = made.make_view(experts=EXPERTS, plan=PLAN, mode="auto", next_check_ms=18_000)
    text = check(draw_balance.build(view, BalanceState(), 80, 21, NOW + 7), 80, 21)
    assert "plan 18, 7 s old" in text and "next check in 11 s" in text and "good for 52 s more" in text


def test_the_inter_token_p99_stands_beside_its_limit():
    view = made.make_view(experts=EXPERTS, plan=PLAN, state="moving", total_slots=9)
    view.take(made.make_traffic(int(NOW * 1e3) + 1000, 900_000, 40_000.0, itl_limit_us=9500), b"", NOW + 1)
    lines = draw_balance.build(view, BalanceState(), 80, 21, NOW + 1)
    text = check(lines, 80, 21)
    assert "(limit 9.50 ms)" in text
    assert any(style == "bad" and text.endswith("ms") for line in lines for text, style in line)


def test_history_is_newest_first_and_the_running_one_before_all():
    running = msgspec.structs.replace(made.HISTORY[0], plan=18, result="running", ended_ago_ms=0)
    part = made.make_part(EXPERTS, history=(*made.HISTORY, running))
    assert [past.plan for past in newest_first(part)] == [18, 17, 16, 15, 14]


@pytest.mark.parametrize("row", range(65))
def test_a_long_history_keeps_the_cursor_in_sight(row):
    history = tuple(msgspec.structs.replace(made.HISTORY[2], plan=n, ended_ago_ms=1000 * (64 - n)) for n in range(64))
    view = made.make_view(experts=EXPERTS, history=history)
    ui = BalanceState(row=row)
    lines = draw_balance.build(view, ui, 80, 21, NOW)
    check(lines, 80, 21)
    marked = [n for n, line in enumerate(lines) if any("cursor" in style for _, style in line)]
    assert len(marked) == (1 if row else 0)
    if row:
        assert f"{64 - row:>4} " in plain(lines[marked[0]])
        assert ui.row_at(marked[0]) == row


def test_moves_of_a_layer_are_what_the_tables_say():
    view = made.make_view(experts=EXPERTS, plan=PLAN)
    heat = view.heat
    said = list(draw_moves.describe_moves(heat, [view.name(rank) for rank in view.experts.parts[0].ranks]))
    changed = {
        int(expert)
        for row in range(heat.slots.shape[0])
        for expert in np.setxor1d(heat.slots[row], heat.next_slots[row])
        if expert >= 0
    }
    assert {int(text.split()[0]) for text in said} == changed == {203}
    assert said[0].split("→")[0].split()[2:] == ["d17"] and said[0].count("+d") == 3


def test_moves_of_a_layer_that_was_not_told_yet_are_not_made_up():
    view = made.make_view(experts=EXPERTS, plan=PLAN)
    text = check(draw_balance.build(view, BalanceState(detail="moves", layer=3), 80, 21, NOW), 80, 21)
    assert "not told this layer's slots yet" in text


def test_a_plan_that_was_carried_out_is_not_offered_again():
    past = msgspec.structs.replace(made.HISTORY[3], plan=PLAN.plan)
    view = made.make_view(experts=EXPERTS, plan=PLAN, history=(past,))
    text = check(draw_balance.build(view, BalanceState(), 80, 21, NOW), 80, 21)
    assert "┌ plan 18, applied" in text and "good for" not in text
    assert "was carried out" in str(balance_acts.ask_apply(view, view.experts.parts[0], ("ops", "head"), NOW))
    failed = made.make_part(EXPERTS, plan=PLAN, history=(msgspec.structs.replace(past, result="failed"),))
    assert draw_plan.fate(failed) == ""  # the head decides whether it still fits


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("group", range(9))
def test_of_many_groups_the_chosen_one_is_always_named(width, group):
    part = made.make_part(EXPERTS)
    view = made.make_view(experts=EXPERTS)
    view.take(ExpertsReport(tuple(msgspec.structs.replace(part, group=n) for n in range(9))), b"", NOW)
    title = draw_balance.build(view, BalanceState(aim=("decode", group, "main")), width, 21, NOW)[0]
    assert width_of(title) <= width
    assert [text.strip() for text, style in title if style == "chosen"] == [f"decode/{group} main 1.34"]
