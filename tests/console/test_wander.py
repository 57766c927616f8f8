"""Seeded wanderings over screens 3 and 6 while the cluster changes below them: nothing raises, everything fits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from console import balance_acts, draw_balance, draw_experts
from console.balance_state import BalanceState
from console.experts_state import ExpertsState
from console.lines import width_of
from console.verdict import WIDTH, ask_worst, judge
from console.view import ClusterView
from tests.console import expertdata as made
from tests.console.expertdata import NOW
from transport.messages import ExpertsReport

RACKS = (
    made.Rack(prefill=2, decode=4, layers=3, experts=8, spare=2, hot_layer=1, hot_rank=1, hot_expert=5),
    made.Rack(prefill=2, decode=2, layers=1, experts=16, spare=0, hot_layer=0, hot_rank=0, hot_expert=3),
    made.Rack(prefill=2, decode=8, layers=70, experts=32, spare=4, hot_layer=69, hot_rank=7, hot_expert=31),
)
EXPERTS = [made.Experts(rack) for rack in RACKS]
PARTS = ("main", "draft")
SIZES = ((80, 21), (120, 37), (200, 57), (40, 6), (20, 3))


def change(view: ClusterView, draw: np.random.Generator) -> None:
    """Another report: parts come and go, plans, states and histories change, and so does the heat."""
    reports = []
    for group in range(int(draw.integers(0, 4))):
        for name in PARTS[: int(draw.integers(1, 3))]:
            experts = EXPERTS[int(draw.integers(len(EXPERTS)))]
            plan = made.make_plan(experts, int(draw.integers(0, 3)), age_ms=int(draw.integers(0, 90_000)))
            if draw.random() < 0.3:
                plan = msgspec.structs.replace(plan, stages=0, pays=False)
            states = ("forming", "idle", "planning", "moving", "paused", "withdrawing", "incomplete")
            part = made.make_part(
                experts, group=group, part=name, plan=plan, steps=int(draw.choice([0, 9, 40_960])),
                state=str(draw.choice(states)), total_slots=int(draw.integers(0, 9)),
                mode=str(draw.choice(["off", "auto"])),
                history=made.HISTORY[: int(draw.integers(0, 5))],
            )  # fmt: skip
            reports.append(part)
            if draw.random() < 0.7:
                layer = int(draw.integers(experts.rack.layers))
                view.take(*experts.heat(part, layer, has_plan=plan.plan > 0), NOW)
    view.take(ExpertsReport(tuple(reports)), b"", NOW)


@pytest.mark.parametrize("seed", range(25))
def test_experts(seed):
    draw = np.random.default_rng(seed)
    view = made.make_view(experts=EXPERTS[0])
    ui = ExpertsState()

    def press() -> None:
        part = ui.find_part(view)
        by = int(draw.choice([-100_000, -3, -1, 1, 3, 100_000]))
        keys = [ui.turn_order, ui.turn_metric, ui.go_worst, ui.go_worst_part, ui.go_in, ui.go_out, ui.arrive]
        keys += [lambda: ui.turn_part(view), lambda: ui.turn_group(view, by), lambda: setattr(ui, "is_after", by > 0)]
        if part is not None:
            at = int(draw.integers(0, 90)), int(draw.integers(0, 40))
            keys += [lambda: ui.turn_layer(part, by), lambda: ui.move_row(part, by)] * 2
            keys += [lambda: ui.move_column(view, part, by), lambda: ui.put_cursor(view, part, *at)] * 2
        keys[int(draw.integers(len(keys)))]()

    for _ in range(60):
        if draw.random() < 0.3:
            change(view, draw)
        press()
        ui.is_mono = draw.random() < 0.5
        width, height = SIZES[int(draw.integers(len(SIZES)))]
        lines = draw_experts.build(view, ui, width, height, NOW)
        assert all(width_of(line) <= width for line in lines)
        assert len(lines) <= height
        question, part = ui.question(view), ui.find_part(view)
        if part is not None:
            assert question is not None and question.layer < part.layers and ui.find_row(part) < len(part.ranks)
        draw_experts.describe_cursor(view, ui)
        ask_worst(view, question)
        assert len(judge(view, NOW).sentence) <= WIDTH


@pytest.mark.parametrize("seed", range(25))
def test_balance(seed):
    draw = np.random.default_rng(seed)
    view = made.make_view(experts=EXPERTS[0])
    ui = BalanceState()

    def press() -> None:
        part = ui.find_part(view)
        by = int(draw.choice([-100_000, -1, 1, 100_000]))
        keys = [ui.arrive, ui.open, ui.close, lambda: ui.turn_part(view), lambda: ui.turn_group(view, by)]
        if part is not None:
            keys += [lambda: ui.move(part, by), lambda: ui.turn_layer(part, by), lambda: ui.next_mode(part)]
        keys[int(draw.integers(len(keys)))]()

    for _ in range(60):
        if draw.random() < 0.3:
            change(view, draw)
        press()
        width, height = SIZES[int(draw.integers(len(SIZES)))]
        lines = draw_balance.build(view, ui, width, height, NOW)
        assert all(width_of(line) <= width for line in lines) and len(lines) <= height
        part, who = ui.find_part(view), ("ops", "head")
        if part is not None:
            for asked in (
                balance_acts.ask_apply(view, part, who, NOW),
                balance_acts.ask_rollback(view, part, who),
                balance_acts.ask_pause(part, who),
                balance_acts.ask_abort(part, who),
                balance_acts.ask_mode(view, part, "manual", who),
            ):
                if not isinstance(asked, str):
                    message = asked.build("why")
                    assert (message.pool, message.group, message.part) == (part.pool, part.group, part.part)
                    assert message.reason == "why" and asked.text.rstrip(".").endswith(("?", "stays so"))
