"""Cells, costs and sentences of a heat report, against sums that are made here another way; rows of cells as runs."""

from __future__ import annotations

import numpy as np
import pytest

from console import expertcells, heatmap
from console.expertcells import Layout
from console.lines import joined, plain, width_of
from console.marks import HEAT_GLYPHS, heat_steps
from tests.console import expertdata as made
from tests.console.expertdata import ROWS_PER_STEP, US_PER_ROW

RACK = made.Rack(layers=6, experts=64, spare=8, hot_layer=3, hot_expert=23)
EXPERTS = made.Experts(RACK)
LAYER = RACK.hot_layer


@pytest.fixture(scope="module")
def heat():
    view = made.make_view(experts=EXPERTS, plan=made.make_plan(EXPERTS))
    return view.heat


@pytest.fixture(params=[False, True], ids=["now", "after"])
def is_after(request) -> bool:
    return request.param


def test_every_slot_of_the_layer_is_there_once_and_nothing_else(heat, is_after):
    layout = expertcells.lay_out(heat, is_after=is_after)
    slots = heat.next_slots if is_after else heat.slots
    for row in range(RACK.decode):
        place = [int(slot) for slot in layout.packed[row] if slot >= 0]
        assert place == [slot for slot in range(slots.shape[1]) if slots[row, slot] >= 0]
        assert [int(expert) for expert in layout.expert[row] if expert >= 0] == [
            int(slots[row, slot]) for slot in place
        ]
    assert layout.replicas.sum() == (slots >= 0).sum()
    assert np.allclose(layout.share * layout.replicas, heat.load)


def test_shares_of_a_rank_add_up_to_its_load_in_the_layer(heat):
    layout = expertcells.lay_out(heat, is_after=False)
    sums = np.where(layout.expert >= 0, layout.share[np.maximum(layout.expert, 0)], 0).sum(axis=1)
    assert np.allclose(sums / sums.mean(), heat.rank_load[:, LAYER], atol=1e-5)


def test_after_the_plan_only_the_chosen_layer_is_another(heat):
    now, then = expertcells.layer_loads(heat, is_after=False), expertcells.layer_loads(heat, is_after=True)
    other = [layer for layer in range(RACK.layers) if layer != LAYER]
    assert np.array_equal(now[:, other], then[:, other])
    assert np.allclose(then[:, LAYER], EXPERTS.rank_loads(EXPERTS.next_table)[:, LAYER], atol=1e-5)
    assert then[:, LAYER].max() < now[:, LAYER].max()


def test_costs_are_what_is_above_the_mean_and_never_negative(heat):
    loads = expertcells.layer_loads(heat, is_after=False)
    costs = expertcells.layer_cells(heat, loads, "cost")
    for row, layer in ((RACK.hot_rank, LAYER), (0, 0), (5, 2)):
        rows = (float(loads[row, layer]) - 1) * ROWS_PER_STEP
        assert costs[row, layer] == pytest.approx(max(0.0, rows * US_PER_ROW))
    # The head's figure for the part is the sum of the fullest ranks' costs.
    assert costs.max(axis=0).sum() == pytest.approx(EXPERTS.skew().lost_us_per_step, rel=1e-4)


@pytest.mark.parametrize("metric", expertcells.METRICS)
def test_rank_by_expert_has_the_figures_of_rank_by_slot(heat, metric, is_after):
    layout = expertcells.lay_out(heat, is_after=is_after)
    by_slot, by_expert = expertcells.slot_cells(heat, layout, metric), expertcells.expert_cells(heat, layout, metric)
    assert np.isnan(by_slot).sum() == (layout.expert < 0).sum()
    assert np.isfinite(by_expert).sum() == (layout.expert >= 0).sum()
    for row, place in np.argwhere(layout.expert >= 0):
        assert by_expert[row, layout.expert[row, place]] == by_slot[row, place]


def test_what_the_plan_puts_somewhere_is_marked(heat):
    layout = expertcells.lay_out(heat, is_after=True)
    fresh = {(int(row), int(layout.expert[row, place])) for row, place in np.argwhere(layout.moved)}
    now = expertcells.lay_out(heat, is_after=False)
    assert fresh and all(expert not in now.expert[row] for row, expert in fresh)
    assert {expert for _, expert in fresh} == {RACK.hot_expert}


def test_the_sentence_of_a_rank_and_layer(heat):
    loads = expertcells.layer_loads(heat, is_after=False)
    ratio = float(loads[RACK.hot_rank, LAYER])
    cost = (ratio - 1) * ROWS_PER_STEP * US_PER_ROW
    said = expertcells.describe_rank_layer(heat, loads, RACK.hot_rank, LAYER, "d17")
    rows = ratio * ROWS_PER_STEP
    assert said == f"d17 layer 3, hottest expert 23: {ratio:.2f}x mean, {rows:,.0f} rows, costs {cost:.0f} us a step"


def test_the_sentence_of_an_expert_names_slot_replicas_and_share(heat):
    names = [f"d{rank:02d}" for rank in RACK.ranks]
    layout = expertcells.lay_out(heat, is_after=True)
    said = expertcells.describe_cell(heat, layout, RACK.hot_rank, RACK.hot_expert, names)
    slot = int(np.flatnonzero(heat.next_slots[RACK.hot_rank] == RACK.hot_expert)[0])
    load = float(heat.load[RACK.hot_expert])
    holders = [names[row] for row in np.flatnonzero((heat.next_slots == RACK.hot_expert).any(axis=1))]
    assert said.startswith(f"d17 slot {slot}: expert 23 (4 replicas: {', '.join(holders)}) {load:.1f}x mean, ")
    assert f"{100 * load / RACK.experts:.1f} % of the layer's rows" in said
    other = expertcells.describe_cell(heat, layout, 0, RACK.hot_expert, names)
    assert other.startswith("not on d08: expert 23")


def test_without_a_measured_price_no_price_is_said(heat):
    import msgspec

    report = msgspec.structs.replace(heat.report, us_per_row=0.0)
    assert expertcells.say_cost(report, 0.0) == "price not measured yet"
    assert expertcells.say_cost(heat.report, 0.0) == "costs nothing"


def test_an_empty_group_and_an_empty_layer_do_not_fail():
    layout = Layout(
        np.full((2, 0), -1), np.full((2, 0), -1), np.zeros(3, np.int64), np.zeros(3), np.zeros((2, 0), bool)
    )
    assert layout.width == 0
    assert expertcells.layer_skews(np.zeros((0, 4))).tolist() == [0.0] * 4


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cell", [1, 3])
def test_rows_say_the_same_as_cell_by_cell(seed, cell):
    draw = np.random.default_rng(seed)
    steps = draw.integers(0, 8, (draw.integers(1, 9), draw.integers(1, 40))).astype(np.uint8)
    for row, runs in zip(steps, heatmap.single_rows(steps, cell, is_mono=True), strict=True):
        assert plain(tuple(runs)) == "".join(HEAT_GLYPHS[step] * cell for step in row)
    for row, runs in zip(steps, heatmap.single_rows(steps, cell, is_mono=False), strict=True):
        styles = [style for text, style in runs for _ in text]
        assert styles == [f"heat{step}" for step in row for _ in range(cell)]
        assert len(joined(runs)) == len(runs)  # neighbours are joined already
    padded = np.vstack([steps, np.zeros_like(steps[:1])])
    for n, runs in enumerate(heatmap.paired_rows(steps, cell)):
        styles = [style for text, style in runs for _ in text]
        both = zip(padded[2 * n], padded[2 * n + 1], strict=True)
        assert styles == [f"heat{upper}/{lower}" for upper, lower in both for _ in range(cell)]
        assert set(plain(tuple(runs))) == {"▀"}


def test_rows_without_columns_are_empty():
    assert heatmap.single_rows(np.zeros((3, 0), np.uint8), 1, is_mono=False) == [[], [], []]


@pytest.mark.parametrize("at", range(12))
def test_a_cursor_changes_its_cells_only(at):
    runs = [("aaaa", "heat1"), ("bb", "heat2"), ("cccccc", "heat3")]
    put = tuple(heatmap.put_cursor(runs, at, 1, text="◆"))
    assert plain(put) == "aaaabbcccccc"[:at] + "◆" + "aaaabbcccccc"[at + 1 :]
    assert [style for text, style in put for _ in text] == ["heat1"] * 4 + ["heat2"] * 2 + ["heat3"] * 6
    kept = tuple(heatmap.put_cursor(runs, at, 2, style="cursor"))
    assert plain(kept) == "aaaabbcccccc"
    assert [n for n, style in enumerate(style for text, style in kept for _ in text) if "cursor" in style] == [
        n for n in (at, at + 1) if n < 12
    ]


@pytest.mark.parametrize("cursor", [0, 9, 10, 11, 25, 59])
def test_a_ruler_marks_the_cursor_and_cuts_no_number(cursor):
    text = plain(heatmap.ruler(0, 60, 1, cursor))
    assert len(text) == 60 and text[cursor] == "▾"
    assert all(text.index(word) == int(word) for word in text.replace("▾", " ").split())


@pytest.mark.parametrize(
    "first, shown, count, cursor, begin",
    [(0, 5, 20, 7, 3), (10, 5, 20, 7, 7), (18, 5, 20, 19, 15), (3, 9, 4, 2, 0)],
)
def test_a_window_moves_as_little_as_it_must(first, shown, count, cursor, begin):
    assert heatmap.window(first, shown, count, cursor) == begin


def test_scales_rise_and_their_legends_name_where_glyphs_begin():
    for scale in (heatmap.EXPERT_SCALE, heatmap.LAYER_SCALE, heatmap.REPLICA_SCALE, heatmap.MOVED_SCALE):
        assert list(scale.bounds) == sorted(set(scale.bounds)) and len(scale.bounds) == 7
    assert heatmap.EXPERT_SCALE.legend() == "·░▒▓█ 0.5 1 2 4×"
    glyphs, *numbers = heatmap.LAYER_SCALE.legend().removesuffix("×").split()
    for glyph, number in zip(glyphs[1:], numbers, strict=True):
        below, reached = heat_steps([float(number) - 0.01, float(number)], heatmap.LAYER_SCALE.bounds)
        assert HEAT_GLYPHS[reached] == glyph != HEAT_GLYPHS[below]


def test_a_scale_to_values_has_the_largest_in_its_last_step():
    values = np.array([[0.0, 1.0, np.nan, 40.0]])
    assert heatmap.to_steps(values, heatmap.scale_to(values)).tolist() == [[0, 1, 0, 7]]
    assert heatmap.to_steps(np.zeros((1, 2)), heatmap.scale_to(np.zeros((1, 2)))).tolist() == [[0, 0]]


def test_widths_of_rows_are_those_of_their_cells(heat):
    loads = expertcells.layer_loads(heat, is_after=False)
    for runs in heatmap.paired_rows(heatmap.to_steps(loads, heatmap.LAYER_SCALE), 2):
        assert width_of(tuple(runs)) == 2 * RACK.layers

