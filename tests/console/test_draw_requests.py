"""The Requests screen as text: what is late, what is where, and the time line of one request."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.draw_requests import RequestsState, build, stages
from console.lines import plain, width_of
from console.marks import THEMES, style_of
from console.requesttable import token_us, why_overdue
from console.view import ClusterView
from tests.console.expertdata import NOW
from tests.console.rackdata import make_busy_view, make_request
from transport.messages import RequestRow, RequestsReport

SIZES = [(80, 21), (120, 37), (200, 57), (60, 12)]


def draw(view: ClusterView, ui: RequestsState, width: int = 80, height: int = 21) -> list[str]:
    """The screen as text, after what must hold of every screen."""
    lines = build(view, ui, width, height, NOW)
    assert len(lines) <= height
    for line in lines:
        assert width_of(line) <= width, plain(line)
        for _, style in line:
            for theme in THEMES:
                style_of(style, theme)
    return [plain(line) for line in lines]


def view_of(*rows: RequestRow, total: int | None = None, **traffic: Any) -> ClusterView:
    view = make_busy_view(requests=0)
    view.requests = RequestsReport(len(rows) if total is None else total, rows)
    if traffic and view.traffic is not None:
        view.traffic = msgspec.structs.replace(view.traffic, **traffic)
    return view


def test_the_oldest_is_first_and_what_is_late_is_marked() -> None:
    lines = draw(make_busy_view(), RequestsState())
    assert lines[0] == " Requests  sort age ▼  40  ▲ 1 overdue"
    assert lines[1].split() == ["id", "state", "age", "in", "state", "in", "out", "P", "D", "label"]
    assert [line.split()[0] for line in lines[2:5]] == ["#1000", "#1001", "#1002"]
    assert lines[4].split()[1:5] == ["prefill", "▲", "42", "s"] and "▲" not in lines[3]
    assert lines[2].split()[-4:] == ["85", "p00", "d08", "line-001000"]


@pytest.mark.parametrize(
    ("changes", "limit_ms", "why"),
    [
        ({"state": "queued", "age_ms": 31_000}, 30_000, "no token after 31 s, limit 30 s"),
        ({"state": "prefill", "age_ms": 31_000, "state_ms": 1}, 30_000, "no token after 31 s, limit 30 s"),
        ({"state": "prefill", "age_ms": 2_000}, 1_500, "no token after 2 s, limit 1 s"),
        ({"state": "queued", "age_ms": 29_000}, 30_000, ""),
        ({"state": "decode", "age_ms": 900_000, "state_ms": 890_000, "generated": 4000}, 30_000, ""),
        ({"state": "decode", "state_ms": 61_000, "generated": 3}, 30_000, "3 tokens in 61 s"),
        ({"state": "decode", "state_ms": 11_000, "generated": 1}, 30_000, "1 token in 11 s"),
        ({"state": "stopping", "state_ms": 6_000}, 30_000, "stopping for 6 s, its ranks have not answered"),
        ({"state": "stopping", "state_ms": 4_000}, 30_000, ""),
    ],
)
def test_what_is_overdue(changes: dict[str, Any], limit_ms: float, why: str) -> None:
    assert why_overdue(make_request(1, **changes), limit_ms) == why


def test_the_operators_limit_counts_where_there_is_one() -> None:
    row = make_request(1, state="prefill", age_ms=3_000)
    assert "overdue" not in draw(view_of(row), RequestsState())[0]
    assert "▲ 1 overdue" in draw(view_of(row, ttft_limit_us=2_000_000), RequestsState())[0]


@pytest.mark.parametrize(
    ("size", "titles"),
    [
        ((80, 21), ["id", "state", "age", "in state", "in", "out", "P", "D", "label"]),
        ((60, 12), ["id", "state", "age", "in", "P", "D"]),
        ((120, 37), ["in state", "queue", "prefill", "push", "ms/token", "label"]),
        ((200, 57), ["cached", "try", "label"]),
    ],
)
def test_columns_give_way_by_their_weight(size: tuple[int, int], titles: list[str]) -> None:
    heading = draw(make_busy_view(), RequestsState(), *size)[1]
    at = 0
    for title in titles:
        at = heading.index(title, at)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut_at_any_size(size: tuple[int, int]) -> None:
    view, ui = make_busy_view(), RequestsState()
    lines = draw(view, ui, *size)
    ui.table.move(1)
    ui.is_open = True
    lines += draw(view, ui, *size)
    assert not [line for line in lines if "…" in line]


def test_what_the_head_does_not_tell_is_said() -> None:
    view = view_of(*(make_request(n) for n in range(5)), total=2923)
    assert draw(view, RequestsState())[0] == " Requests  sort age ▼  5  the oldest of 2,923"


def test_nothing_to_show() -> None:
    assert "no data yet" in draw(ClusterView(), RequestsState())[2]
    assert "no request runs or waits" in draw(view_of(), RequestsState())[2]
    ui = RequestsState()
    ui.table.set_filter("state=stopping")
    assert "no request matches the filter" in draw(make_busy_view(), ui)[2]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("overdue=yes", 1),
        ("age>40s", 3),
        ("p=p03", 5),
        ("state=queued", 4),
        ("client=batch-2", 6),
        ("line-001010", 1),
        ("in>30k", 9),
        ("max=4096 state=decode", 31),
    ],
)
def test_requests_are_found(text: str, count: int) -> None:
    ui = RequestsState()
    ui.table.set_filter(text)
    draw(make_busy_view(), ui)
    assert len(ui.table.keys) == count


def test_four_thousand_requests_scroll_and_cost_little() -> None:
    view, ui = make_busy_view(requests=4096), RequestsState()
    assert "4,096" in draw(view, ui, 120, 37)[0]
    began = time.process_time()
    for _ in range(5):
        build(view, ui, 120, 37, NOW)
    assert (time.process_time() - began) / 5 < 0.1
    ui.table.go_end()
    lines = draw(view, ui, 120, 37)
    assert lines[-1].startswith("▸#5095") and "▼ frozen" in lines[0]


def open_detail(view: ClusterView, number: int, width: int = 80, height: int = 21) -> list[str]:
    ui = RequestsState()
    draw(view, ui, width, height)
    ui.table.cursor, ui.is_open = number, True
    lines = draw(view, ui, width, height)
    return lines[next(n for n, line in enumerate(lines) if line.startswith("── ")) :]


def test_the_time_line_of_a_request_that_generates() -> None:
    lines = open_detail(view_of(make_request(7)), 7)
    assert lines[0].startswith("── #7  line-000007  of batch-7 ───")
    assert lines[1] == " decode for 39 s, accepted 41 s ago, attempt 1"
    assert lines[2] == " prompt on p01, generates on d17"
    assert lines[3] == " in   131,072 tokens, 128,000 of them cached"
    assert lines[4] == " out  1,204 of at most 4,096 tokens, 32.8 ms each"
    assert lines[6] == " ░ queued 410 ms → ▒ prefill 1.00 s → ▓ push 120 ms → █ decode 39.4 s"
    assert set(lines[5]) == {" ", "░", "▒", "▓", "█"} and len(lines[5]) == 79


def test_the_detail_of_a_request_that_waits() -> None:
    row = make_request(7, state="queued", age_ms=41_000, state_ms=41_000, prefill_rank=-1, decode_rank=-1, label="")
    lines = open_detail(view_of(row), 7)
    assert lines[2] == " ▲ no token after 41 s, limit 30 s" and lines[3] == " no ranks yet"
    assert lines[0].startswith("── #7  batch-7 ──") and lines[7] == " ░ queued 41.0 s"


def test_the_detail_names_ranks_that_are_not_well() -> None:
    view = make_busy_view(requests=0, changed={17: {"state": "lost"}})
    view.requests = RequestsReport(1, (make_request(7, state="prefill", decode_rank=17, attempt=2),))
    lines = open_detail(view, 7)
    assert "generates on d17 (lost)" in lines[3] and "attempt 2" in lines[1]


def test_a_request_that_ended_stays_under_the_cursor_as_it_was() -> None:
    view, ui = view_of(make_request(1), make_request(2)), RequestsState()
    draw(view, ui)
    ui.table.cursor, ui.is_open = 1, True
    view.requests = RequestsReport(1, (make_request(2),))
    lines = draw(view, ui)
    assert lines[2].startswith("▸#1") and any("ended: this is what was last heard of it" in line for line in lines)
    assert ui.table.is_gone(1)


ROWS = st.builds(
    make_request,
    st.integers(0, 2**40),
    state=st.sampled_from(["queued", "prefill", "decode", "stopping"]),
    age_ms=st.integers(0, 10**8),
    state_ms=st.integers(0, 10**8),
    generated=st.integers(0, 10**6),
    max_tokens=st.integers(0, 10**6),
    prompt_tokens=st.integers(0, 10**7),
    queue_us=st.integers(0, 10**10),
    prefill_us=st.integers(0, 10**10),
    push_us=st.integers(0, 10**10),
    label=st.text(max_size=80),
    client=st.text(max_size=80),
)


@given(ROWS)
def test_a_time_line_ends_where_the_request_is_now(row: RequestRow) -> None:
    found = stages(row)
    assert [how for _, _, how in found].count("now") == 1 and found[-1][2] == "now"
    assert all(took >= 0 for _, took, _ in found)
    assert token_us(row) != 0 or row.state_ms == 0


@given(st.lists(ROWS, max_size=5, unique_by=lambda row: row.request), st.integers(40, 220), st.integers(4, 40))
def test_whatever_a_request_is_called_its_line_fits(rows: list[RequestRow], width: int, height: int) -> None:
    view, ui = VIEW, RequestsState()
    view.requests = RequestsReport(len(rows), tuple(rows))
    draw(view, ui, width, height)
    ui.table.move(1)
    ui.is_open = True
    draw(view, ui, width, height)


VIEW = make_busy_view(requests=0)
