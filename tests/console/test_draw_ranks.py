"""The Ranks screen as text: what it says of each rank, which columns fit, and the detail."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from console import words
from console.draw_ranks import PAGES, RanksState, build, describe, is_wide
from console.lines import Line, plain, width_of
from console.marks import THEMES, style_of
from console.ranktable import find_waits, make_rows, mention_of, sum_pushes
from console.view import ClusterView
from tests.console.expertdata import NOW, Rack
from tests.console.rackdata import make_busy_view, make_request, make_snapshot
from transport.messages import PrefixCounts, RequestsReport

SIZES = [(80, 21), (120, 37), (200, 57)]
LOST = {"state": "lost", "age_ms": 33_000, "reason": "killed by signal 9"}
STARTING = {
    "state": "starting", "phase": "weights", "phase_done": 43 << 30, "phase_total": 100 << 30, "phase_unit": "bytes",
    "phase_ms": 12_000, "snapshot": None, "restarts": 1,
}  # fmt: skip


def draw(view: ClusterView, ui: RanksState, width: int = 80, height: int = 21) -> list[str]:
    """The screen as text, after what must hold of every screen."""
    lines = build(view, ui, width, height, NOW)
    check(lines, width, height)
    return [plain(line) for line in lines]


def check(lines: list[Line], width: int, height: int) -> None:
    assert len(lines) <= height
    for line in lines:
        assert width_of(line) <= width, plain(line)
        for _, style in line:
            for theme in THEMES:
                style_of(style, theme)


def row_of(lines: list[str], name: str) -> str:
    (found,) = [line for line in lines if line[1:].startswith(f"{name} ")]
    return found


def test_the_slow_rank_is_at_the_top_with_its_layer_and_its_expert() -> None:
    lines = draw(make_busy_view(), RanksState())
    assert lines[0].startswith(" Ranks  sort skew ▼  40")
    assert lines[1].split() == ["rank", "run", "wait", "kv%", "tok/s", "step", "ms", "skew", "hottest", "state"]
    first = lines[2].split()
    assert first[0] == "d17" and first[-1] == "HOT" and first[-4:-2] == ["L41", "e203"]
    assert sum("HOT" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "● ok"),
        (LOST, "✖ LOST 33 s"),
        (STARTING, "◔ starting 43% weights"),
        ({"state": "joining", "snapshot": None}, "◑ joining"),
        ({"state": "restarting", "age_ms": 2500}, "↻ restarting 2 s"),
        ({"state": "ready", "age_ms": 4200}, "◷ stale 4 s"),
        ({"state": "draining", "snapshot": make_snapshot(20, running=3, waiting=2)}, "◌ draining 5"),
        ({"state": "draining", "phase": "drained"}, "○ drained"),
        ({"state": "hibernating"}, "? hibernating"),
    ],
)
def test_states_are_said_in_words(changed: dict[str, Any], said: str) -> None:
    lines = draw(make_busy_view(changed={20: changed}), RanksState(), 200, 57)
    assert said in row_of(lines, "d20")


def test_a_lost_rank_says_when_if_an_event_does() -> None:
    lines = draw(make_busy_view(changed={22: LOST}), RanksState(), 120, 45)
    assert "✖ LOST 14:02:31" in row_of(lines, "d22")
    # What it did before is no news, and is not shown as if it were.
    assert row_of(lines, "d22").split()[:4] == ["d22", "–", "–", "–"]
    assert "✖ 1 lost" in lines[0]


def test_troubles_are_counted_in_the_title_for_whoever_does_not_see_the_end() -> None:
    changed = {22: LOST, 25: {"age_ms": 4200}, 30: STARTING, 31: {"state": "draining", "phase": "drained"}}
    assert "✖ 1 lost  ◷ 1 stale  ◔ 1 starting  ○ 1 drained" in draw(make_busy_view(changed=changed), RanksState())[0]


@pytest.mark.parametrize(
    ("size", "first", "last"),
    [
        ((80, 21), ["rank", "run", "wait", "kv%", "tok/s", "step ms", "skew", "hottest"], "state"),
        ((60, 15), ["rank", "tok/s", "step ms", "skew", "hottest"], "state"),
        ((40, 15), ["rank", "skew", "hottest"], "state"),
        ((120, 37), ["wait ms", "push GB/s", "lag ms", "tok/s 60 s"], "state"),
        ((200, 57), ["mean", "step p99", "device ms", "slabs free", "memory", "life"], "state"),
    ],
)
def test_columns_give_way_by_their_weight(size: tuple[int, int], first: list[str], last: str) -> None:
    heading = draw(make_busy_view(), RanksState(), *size)[1]
    at = 0
    for title in [*first, last]:
        at = heading.index(title, at)


@pytest.mark.parametrize("size", [*SIZES, (40, 10), (60, 16), (119, 33), (160, 50)])
@pytest.mark.parametrize("page", range(len(PAGES)))
def test_nothing_is_cut_at_any_size(size: tuple[int, int], page: int) -> None:
    rack = Rack(prefill=8, decode=64, layers=20, hot_layer=4)
    view = make_busy_view(rack, changed={22: LOST, 30: STARTING})
    ui = RanksState()
    draw(view, ui, *size)
    ui.table.move(1)
    ui.is_open, ui.page = True, page
    lines = draw(view, ui, *size)
    if size[0] >= 80:
        assert not [line for line in lines if "…" in line]


def test_ranks_that_fill_a_rack_scroll() -> None:
    view = make_busy_view(Rack(prefill=8, decode=64, layers=8, hot_layer=4))
    ui = RanksState()
    assert "72" in draw(view, ui)[0]
    ui.table.go_end()
    lines = draw(view, ui)
    assert lines[-1].startswith("▸") and len(lines) == 21


def test_waiting_is_what_the_loads_cost() -> None:
    view = make_busy_view()
    heat = view.heat
    assert heat is not None
    waits = find_waits(view)
    price = heat.report.us_per_row * heat.report.rows_per_step
    for place, rank in enumerate(view.experts.parts[0].ranks if view.experts else ()):
        layers = [float(heat.rank_load[:, layer].max() - heat.rank_load[place, layer]) for layer in range(61)]
        assert waits[rank] == pytest.approx(sum(layers) * price, rel=1e-4)
    # The rank that nobody waits for longer than it waits for others has the least.
    rows = make_rows(view, NOW)
    assert min(waits.values()) >= 0
    assert all(math.isnan(row.wait_us) == (row.status.role == "prefill") for row in rows)


def test_pushes_are_counted_at_both_ends() -> None:
    view = make_busy_view(low=None)
    sums = sum_pushes(view)
    prefill = sum(rate for rank, rate in sums.items() if rank < 8)
    decode = sum(rate for rank, rate in sums.items() if rank >= 8)
    assert prefill == pytest.approx(decode) == pytest.approx(float(view.pairs.rates.sum()) if view.pairs else 0)
    assert sum_pushes(ClusterView()) == {}


def test_without_groups_there_is_no_skew_and_the_rest_is_there() -> None:
    lines = draw(make_busy_view(groups=False), RanksState(), 120, 45)
    assert "HOT" not in "".join(lines)
    row = row_of(lines, "d17")
    assert row.split()[6:8] == ["–", "–"] and "10.1" in row and "● ok" in row


def test_before_the_first_answer_it_says_so() -> None:
    assert any("no data yet" in line for line in draw(ClusterView(), RanksState()))


def test_a_filter_that_hides_everything_says_so() -> None:
    ui = RanksState()
    ui.table.set_filter("pool=decode skew>99")
    lines = draw(make_busy_view(), ui)
    assert "filter pool=decode skew>99  0 of 40" in lines[0]
    assert "no rank matches the filter" in lines[2]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pool=prefill", {"p00", "p01", "p02", "p03", "p04", "p05", "p06", "p07"}),
        ("lost", {"d22"}),
        ("state=hot", {"d17"}),
        ("step_ms>9.5", {"d17"}),
        ("!d !p0", set()),
        ("rank=d1* run>=94", {"d13"}),
    ],
)
def test_ranks_are_found_by_what_they_are(text: str, names: set[str]) -> None:
    ui = RanksState()
    ui.table.set_filter(text)
    lines = draw(make_busy_view(changed={22: LOST}), ui, 120, 60)
    assert {line.split()[0] for line in lines[2:] if line.strip() and "matches" not in line} == names


def open_detail(view: ClusterView, name: str, page: int = 0, width: int = 80, height: int = 21) -> list[str]:
    ui = RanksState()
    draw(view, ui, width, height)
    ui.table.cursor = next(row.status.rank for row in make_rows(view, NOW) if row.name == name)
    ui.is_open, ui.page = True, page
    lines = draw(view, ui, width, height)
    start = next(n for n, line in enumerate(lines) if line.startswith("── "))
    # The rank is in sight above its detail.
    assert any(line.startswith(f"▸{name}") for line in lines[:start])
    return lines[start:]


def test_the_detail_says_everything_of_a_rank() -> None:
    view = make_busy_view()
    text = "\n".join(open_detail(view, "d17"))
    for said in (
        "d17 decode  life 1  pid 4017", "fullest layer 41: ", "expert 203", "requests      91 run, 2 wait",
        "step          10.1 ms", "for fuller ranks", "1,030 of 4,096 free", "21.4 GB/s in",
    ):  # fmt: skip
        assert said in text, said
    assert "[load]  links   requests   events" in text
    row = next(row for row in make_rows(view, NOW) if row.name == "d17")
    assert all(len(label) <= 13 and len(said) <= 24 for label, said in describe(row))


def test_the_detail_of_a_rank_that_starts_and_of_one_that_is_lost() -> None:
    view = make_busy_view(changed={22: LOST, 30: STARTING})
    text = "\n".join(open_detail(view, "d30"))
    assert "life 1, 1 restart" in text and "43.0 GiB of 100 GiB" in text and "12 s" in text
    text = "\n".join(open_detail(view, "d22"))
    assert "killed by signal 9" in text and "tokens" not in text


def test_the_detail_of_a_stuck_and_corrupt_rank() -> None:
    snapshot = make_snapshot(20, step_age_ms=12_400, corrupt_pushes=3, pages_quarantined=17)
    text = "\n".join(open_detail(make_busy_view(changed={20: {"snapshot": snapshot}}), "d20"))
    assert "no step for   12 s" in text and "3 corrupt" in text and "17 pages" in text


def test_the_detail_lists_pairs_requests_and_events() -> None:
    view = make_busy_view(failed={(3, 9): 2})
    links = open_detail(view, "d17", 1)
    assert links[0].count("[links]") == 1
    assert links[1].split()[0] == "p06" and links[8].split()[:3] == ["p03", "359", "MB/s"]
    assert "2 failed" in links[8]
    assert len([line for line in open_detail(view, "p03", 1) if line.startswith(" d")]) == 10
    assert "and 22 more pairs" in "\n".join(open_detail(view, "p03", 1))
    view.requests = RequestsReport(1, (make_request(4),))
    assert "#4       decode      41 s   131k in  1,204 of 4,096 out  line-000004" in open_detail(view, "d17", 2)[1]
    events = open_detail(view, "d17", 3)
    assert events[1] == " 14:02:29 ▲ link.end rank=17 prefill_rank=3 | pair stream p03 ended: reset"
    assert "took_s=12.1" in events[2] and not events[3].strip()


def test_the_detail_says_what_there_is_nothing_of() -> None:
    view = make_busy_view(requests=0)
    assert "it has no requests" in open_detail(view, "d17", 2)[1]
    assert "none that name it" in open_detail(view, "d18", 3)[1]
    view.requests = view.pairs = None
    assert "not asked yet" in open_detail(view, "d17", 1)[1] and "not asked yet" in open_detail(view, "d17", 2)[1]
    view = make_busy_view(Rack(prefill=0), low=None, requests=0)
    assert "nothing was pushed yet" in open_detail(view, "d09", 1)[1]


@pytest.mark.parametrize("size", [(120, 37), (200, 57)])
def test_where_there_is_room_all_pages_are_seen_at_once(size: tuple[int, int]) -> None:
    assert is_wide(*size) and not is_wide(80, 21)
    text = "\n".join(open_detail(make_busy_view(), "d17", 0, *size))
    for said in ("fullest layer", "p06   3.17 GB/s", "#1009", "link.end", " links", " requests", " events"):
        assert said in text, said
    assert "[load]" not in text


def test_the_whole_row_is_told_to_programs() -> None:
    ui = RanksState()
    draw(make_busy_view(), ui)
    ui.table.move(1)
    row = ui.table.current
    assert row is not None
    record = ui.table.record(row)
    assert record["rank"] == "d17" and record["hottest"] == "L41 e203" and record["run"] == 91
    assert record["skew"] == pytest.approx(row.hot.load if row.hot else 0) and record["60s"] is None


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("rank=17 role=decode", True),
        ("decode_rank=17", True),
        ("ranks=[3, 17]", True),
        ('ranks="[17]"', True),
        ("p03 to d17, twice, ok", True),
        ("p03 to d170", False),
        ("rank=170", False),
        ("rank=1", False),
        ("took_s=17", False),
        ("ranks=[171]", False),
    ],
)
def test_events_name_ranks(text: str, is_named: bool) -> None:
    assert bool(mention_of(17, "d17").search(text)) == is_named


def test_seventy_two_ranks_are_drawn_in_milliseconds() -> None:
    import time

    view = make_busy_view(Rack(prefill=8, decode=64))
    ui = RanksState()
    build(view, ui, 120, 37, NOW)
    began = time.process_time()
    for _ in range(20):
        build(view, ui, 120, 37, NOW)
    assert (time.process_time() - began) / 20 < 0.02, words.us(1e6 * (time.process_time() - began) / 20)


def test_cached_pages_that_nobody_uses_are_there_for_others() -> None:
    view = make_busy_view()
    (row,) = [row for row in make_rows(view, NOW) if row.name == "p00"]
    snapshot = msgspec.structs.replace(
        row.status.snapshot, pages_free=100, pages_owned=200, pages_total=1000, pages_cached=700, pages_pinned=50,
        prefix=PrefixCounts(10_000, 9_340, 9_500, 12_000),
    )  # fmt: skip
    row = dataclasses.replace(row, status=msgspec.structs.replace(row.status, snapshot=snapshot))
    assert row.pages_share == pytest.approx(25)
    said = dict(describe(row))
    assert said["cached"] == f"{words.short(700)} pages, {words.short(50)} used"
    assert said["prompts hit"] == f"93.4%, {words.short(12_000)} evicted"
    most = 2**31 - 1
    snapshot = msgspec.structs.replace(
        snapshot, pages_cached=most, pages_pinned=most, prefix=PrefixCounts(1, 1, 1, most)
    )
    row = dataclasses.replace(row, status=msgspec.structs.replace(row.status, snapshot=snapshot))
    assert all(len(label) <= 13 and len(said) <= 24 for label, said in describe(row))
