"""The Transfer screen as text: the matrix, what is low in it, its sums, and how it scrolls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.draw_transfer import build
from console.filters import FilterError
from console.lines import plain, width_of
from console.marks import THEMES, style_of
from console.pairmatrix import make_matrix, total, worst
from console.transfer_state import CELL, LEFT, TransferState
from console.view import ClusterView
from tests.console.expertdata import NOW, Rack
from tests.console.rackdata import make_busy_view, make_links

SIZES = [(80, 21), (120, 37), (200, 57), (60, 12)]


def draw(view: ClusterView, ui: TransferState, width: int = 80, height: int = 21) -> list[str]:
    """The screen as text, after what must hold of every screen."""
    lines = build(view, ui, width, height, NOW)
    assert len(lines) <= height
    for line in lines:
        assert width_of(line) <= width, plain(line)
        for _, style in line:
            for theme in THEMES:
                style_of(style, theme)
    return [plain(line) for line in lines]


def test_each_pair_has_its_cell_and_the_low_one_its_mark() -> None:
    view, ui = make_busy_view(groups=False), TransferState()
    lines = draw(view, ui, 120, 37)
    assert lines[0].startswith(" Transfer  P → D, GB/s of the last seconds  757 GB/s in all  d08-d21 of 32  ▼ 1 low")
    assert lines[1].split() == [*(f"d{n:02}" for n in range(8, 21)), "d21›", "sum", "p99", "ms", "fail"]
    assert [line.split()[0] for line in lines[2:10]] == [f"p{n:02}" for n in range(8)]
    row = lines[5]
    assert row.split()[10] == "0.4▼" and row.split()[-3:] == ["91.6", "38.0", "0"]
    assert "".join(lines).count("▼") == 4  # title, cell, legend, list
    pairs = view.pairs
    assert pairs is not None
    matrix = make_matrix(view)
    np.testing.assert_allclose(matrix.rate.ravel(), pairs.rates)
    assert float(row.split()[-3]) == pytest.approx(pairs.rates[pairs.prefill == 3].sum() / 1e9, abs=0.05)
    d17 = pairs.decode == 17
    assert lines[10].split()[10] == f"{pairs.rates[d17].sum() / 1e9:.1f}"
    assert lines[11].split()[10] == "38.0" and lines[12].split()[:2] == ["fail", "0"]


def test_an_idle_pair_is_not_low() -> None:
    view = make_busy_view(low=None, groups=False)
    matrix = make_matrix(view)
    assert not matrix.is_low.any()
    # It carries an eighth and is as quick as the others, with nothing in flight: it had little to do.
    view.pairs.rates[5] /= 8  # type: ignore[union-attr]
    view.pairs.p99_us[5] = 1_000  # type: ignore[union-attr]
    assert not make_matrix(view).is_low.any()
    view.pairs.inflight[5] = 1  # type: ignore[union-attr]
    assert list(np.argwhere(make_matrix(view).is_low)[0]) == [0, 5]


def test_pairs_worth_a_look_are_listed_wherever_the_window_is() -> None:
    view, ui = make_busy_view(groups=False, failed={(7, 30): 4}), TransferState()
    view.pairs.p99_us[view.pairs.decode == 39] = 60_000  # type: ignore[union-attr]
    lines = draw(view, ui, 120, 37)
    at = lines.index(" worth a look")
    assert lines[at + 1].startswith(" ▼ p03 → d17  359 MB/s") and lines[at + 2].startswith("   p07 → d38  ")
    assert "4 failed" in lines[at + 2] and [line[3:12] for line in lines[at + 3 : at + 5]] == ["p00 → d39", "p01 → d39"]
    assert len(lines) == at + 11
    # Where there is little room the rest is counted.
    lines = draw(view, ui, 120, 18)
    assert lines[-1] == " and 9 more pairs" and lines[-2].startswith(" ▼ p03 → d17")
    assert "worth a look" not in "\n".join(draw(view, ui, 80, 15))
    assert " all pairs are alike" in draw(make_busy_view(groups=False, low=None), ui, 80, 21)


def test_few_pairs_have_no_median() -> None:
    matrix = make_matrix(make_busy_view(Rack(prefill=1, decode=2), low=(0, 1), requests=0, groups=False))
    assert math.isnan(matrix.busy_median) and not matrix.is_low.any()


def test_failures_are_said_in_rows_columns_and_the_cell() -> None:
    view, ui = make_busy_view(groups=False, failed={(3, 9): 2, (1, 0): 5}), TransferState()
    lines = draw(view, ui, 120, 37)
    assert lines[3].split()[-1] == "5" and lines[5].split()[-1] == "2"
    assert lines[12].split()[1] == "5" and lines[12].split()[10] == "2"
    ui.cursor = (1, 8)
    assert "5 failed" in draw(view, ui, 120, 37)[13]


@pytest.mark.parametrize("size", SIZES)
def test_it_scrolls_both_ways_and_the_cursor_stays_in_sight(size: tuple[int, int]) -> None:
    view, ui = make_busy_view(Rack(prefill=24, decode=48), low=None, groups=False), TransferState()
    draw(view, ui, *size)
    ui.move(0, 0)
    for rows, columns in ((30, 0), (0, 60), (-3, -5), (-40, 0), (0, -60)):
        ui.move(rows, columns)
        lines = draw(view, ui, *size)
        assert ui.cursor is not None
        prefill, decode = (view.name(rank) for rank in ui.cursor)
        assert any(line.startswith(f"▸{prefill} ") for line in lines)
        assert decode in lines[1]
        assert any(line.strip().startswith(f"{prefill} → {decode}  ") for line in lines)


def test_arrows_say_that_there_is_more_at_the_sides() -> None:
    view, ui = make_busy_view(groups=False), TransferState()
    assert "d15›" in draw(view, ui)[1] and "‹" not in draw(view, ui)[1]
    ui.move(0, 0)
    ui.move(0, 12)
    assert "‹ " in draw(view, ui)[1] and "›" in draw(view, ui)[1]
    ui.move(0, 99)
    assert "›" not in draw(view, ui)[1]
    assert "d08-d39" not in draw(view, ui, 300, 40)[0]


def test_rows_can_be_ordered_by_their_figures() -> None:
    view, ui = make_busy_view(groups=False, failed={(5, 1): 9}), TransferState()

    def order() -> list[str]:
        return [line.split()[0] for line in draw(view, ui, 120, 37)[2:10]]

    assert order() == [f"p{n:02}" for n in range(8)]
    ui.sort(reverse=False)
    sums = make_matrix(view).rate.sum(axis=1)
    assert ui.order == "sum" and order() == [f"p{n:02}" for n in np.argsort(-sums)]
    ui.sort(reverse=True)
    assert order() == [f"p{n:02}" for n in np.argsort(sums)] and "sort sum ▲" in draw(view, ui, 120, 37)[0]
    ui.sort(reverse=False)
    assert order()[0] == "p03" and "sort p99 ▼" in draw(view, ui, 120, 37)[0]
    ui.sort(reverse=False)
    assert order()[0] == "p05" and "sort failed ▼" in draw(view, ui, 120, 37)[0]
    ui.sort(reverse=False)
    ui.sort(reverse=True)
    assert order()[0] == "p07" and "sort rank ▼" in draw(view, ui, 120, 37)[0]


def test_rows_stand_still_under_the_cursor() -> None:
    view, ui = make_busy_view(groups=False), TransferState()
    ui.sort(reverse=False)
    draw(view, ui, 120, 37)
    before = ui.rows
    ui.move(0, 0)
    pairs = view.pairs
    assert pairs is not None
    pairs.rates[pairs.prefill == before[-1]] *= 4
    assert "▼ frozen" in draw(view, ui, 120, 37)[0] and ui.rows == before
    assert ui.leave() and not ui.leave()
    draw(view, ui, 120, 37)
    assert ui.rows[0] == before[-1]


def test_filters_keep_rows_and_columns_with_a_pair_that_matches() -> None:
    view, ui = make_busy_view(groups=False), TransferState()
    ui.set_filter("low=yes")
    lines = draw(view, ui)
    assert ui.rows == (3,) and ui.columns == (17,) and "filter low=yes" in lines[0]
    ui.set_filter("p=p01 rate>0")
    draw(view, ui)
    assert ui.rows == (1,) and len(ui.columns) == 32
    ui.set_filter("rate>99")
    assert "no pair matches the filter" in draw(view, ui)[2]
    with pytest.raises(FilterError, match=r"No column `bytes`\. Columns: p, d, rate, p99, failed, inflight, low"):
        ui.set_filter("bytes>1")
    assert ui.filter.text == "rate>99"
    ui.cursor = (0, 8)
    draw(view, ui)
    assert ui.cursor is None


def test_the_detail_of_a_pair() -> None:
    view, ui = make_busy_view(groups=False, failed={(3, 9): 2}), TransferState()
    draw(view, ui)
    ui.cursor, ui.is_open = (3, 17), True
    lines = draw(view, ui)
    (at,) = [n for n, line in enumerate(lines) if line.startswith("── p03 → d17 ─")]
    assert lines[at - 1] == "  p03 → d17  359 MB/s, 0.12 of the median  p99 38.0 ms  3 in flight  2 failed"
    assert lines[at + 1].startswith(" p03 ● ok  life 1") and lines[at + 2].startswith(" d17 ● ok")
    assert "since this life of p03 began: 1.67 GiB in 179 pushes, 9.57 MiB each" in lines[at + 3]
    # What names both comes first.
    assert "link.end" in lines[at + 4] and "rank.ready" in lines[at + 5]


def test_a_pair_that_never_pushed_and_a_rank_that_is_gone() -> None:
    view, ui = make_busy_view(Rack(prefill=2, decode=4), low=None, requests=0, groups=False, links=()), TransferState()
    assert "no data yet" in draw(view, ui)[2]
    report, blob = make_links(Rack(prefill=2, decode=4), 1, low=None, count=4)
    view.take(report, blob, NOW)
    lines = draw(view, ui)
    assert lines[3].split() == ["p01", "·", "·", "·", "·", "·", "–", "–"]
    ui.cursor, ui.is_open = (1, 2), True
    text = "\n".join(draw(view, ui))
    assert "p01 → d02  nothing was pushed" in text and "no event names either of them" in text
    ui.cursor = (77, 2)
    draw(view, ui)
    assert ui.cursor == (0, 2)
    assert "d03 " in draw(view, ui)[1]


def test_without_one_of_the_pools_there_is_no_pair() -> None:
    view = make_busy_view(Rack(prefill=0), low=None, requests=0, groups=False)
    assert "there is no pair" in draw(view, TransferState())[2]


@pytest.mark.parametrize(("scale", "unit", "figure"), [(1, "GB/s", 3.0), (1e3, "MB/s", 3.0), (1e6, "kB/s", 3.0)])
def test_the_unit_fits_the_largest(scale: float, unit: str, figure: float) -> None:
    view, ui = make_busy_view(low=None, groups=False), TransferState()
    view.pairs.rates[:] /= scale  # type: ignore[union-attr]
    lines = draw(view, ui)
    assert f"P → D, {unit}" in lines[0]
    assert float(lines[2].split()[1]) == pytest.approx(figure, rel=0.3)


def test_clicks_choose_a_pair() -> None:
    view, ui = make_busy_view(groups=False), TransferState()
    draw(view, ui)
    assert ui.point(LEFT + 2 * CELL + 1, 3) and ui.cursor == (1, 10)
    for x, y in ((0, 3), (LEFT, 1), (LEFT + 8 * CELL, 3), (LEFT, 12)):
        assert not ui.point(x, y)
    assert ui.cursor == (1, 10)


def test_sums_leave_out_what_is_not_known() -> None:
    assert total(np.array([1.0, math.nan])) == 1 and worst(np.array([1.0, math.nan, 3.0])) == 3
    assert math.isnan(total(np.array([math.nan]))) and math.isnan(worst(np.array([])))


ACTS = st.one_of(
    st.tuples(st.just("move"), st.tuples(st.integers(-9, 9), st.integers(-40, 40))),
    st.tuples(st.just("filter"), st.sampled_from(["", "low=yes", "p=p0*", "d=d1* rate>2.9", "zzz"])),
    st.tuples(st.sampled_from(["sort", "reverse", "leave", "open", "fewer", "more"]), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTS, max_size=10), st.integers(50, 130), st.integers(9, 40))
def test_whatever_happens_the_matrix_fits_and_the_cursor_is_in_it(
    acts: list[tuple[str, Any]], width: int, height: int
) -> None:
    ui = TransferState()
    view = VIEWS[0]
    for kind, value in acts:
        match kind:
            case "move":
                ui.move(*value)
            case "filter":
                ui.set_filter(value)
            case "open":
                ui.is_open = ui.cursor is not None
            case "leave":
                ui.leave()
            case "fewer" | "more":
                view = VIEWS[kind == "fewer"]
            case _:
                ui.sort(reverse=kind == "reverse")
        draw(view, ui, width, height)
        if ui.cursor is not None:
            assert ui.cursor[0] in ui.rows and ui.cursor[1] in ui.columns


VIEWS = (make_busy_view(groups=False), make_busy_view(Rack(prefill=4, decode=12), low=None, groups=False))
