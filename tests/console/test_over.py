"""Screen 1: what it says, in which room, of a cluster that is whole, bare, broken or large."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from console.draw_over import OverState, build
from console.history import KEEP_S
from console.lines import plain, width_of
from console.view import ClusterView
from tests.console.stubhead import (
    Scene,
    make_experts,
    make_heat,
    make_part,
    make_status,
    open_console,
)
from tests.console.test_view import watch
from transport.messages import AskHeat, AskLinks, ExpertsReport

BODIES = [(80, 21), (120, 37), (200, 57), (100, 30), (60, 15)]


def text_of(view: ClusterView, width: int = 80, height: int = 21, now: float = 109.5) -> str:
    lines = build(view, OverState(), width, height, now)
    assert len(lines) <= height and all(width_of(line) <= width for line in lines)
    return "\n".join(plain(line) for line in lines)


@pytest.mark.parametrize(("width", "height"), BODIES)
def test_the_whole_cluster_in_one_look(width, height):
    view, _ = watch(10)
    text = text_of(view, width, height)
    for part in ("traffic 5 min", "latency 1 min", "prefill 4×DEP2", "decode DEP32"):
        assert part in text
    assert "182" in text and "540k" in text and "2,911" in text
    if height >= 21:
        for part in ("transfer", "experts", "d25 L4 e23 1.83×", "610 us/step", "fullest: d25 1.83×"):
            assert part in text


def test_one_bar_for_each_rank():
    view, scene = watch(3)
    rows = [row for row in text_of(view).splitlines() if row.startswith((" p00", " d"))]
    assert sum(sum(row.count(glyph) for glyph in "▁▂▃▄▅▆▇█") for row in rows) == 40
    scene.set_rank(22, state="lost", snapshot=None)
    scene.set_rank(30, age_ms=9000)
    view.take(scene.status, b"", 103.0)
    row = next(row for row in text_of(view).splitlines() if " d18 " in row)
    assert row.split(" d18 ")[1][4] == "✖"
    assert "◷" in text_of(view)


def test_names_where_there_is_room():
    view, _ = watch(3)
    text = text_of(view, 120, 37)
    assert all(view.name(rank.rank) in text for rank in view.ranks())


@pytest.mark.parametrize(("width", "height"), BODIES)
def test_a_rack_of_seventy_two(width, height):
    scene = Scene(status=make_status(16, 56))
    scene.experts = ExpertsReport(
        parts=(
            make_part(ranks=tuple(range(16, 72)), slots=56 * 20),
            *(make_part("prefill", n, ranks=(2 * n, 2 * n + 1), slots=8 * 64 + 16) for n in range(8)),
        )
    )
    view, _ = watch(3, scene)
    text = text_of(view, width, height)
    if height >= 21:
        assert "prefill 8×DEP2" in text and "decode DEP56" in text and " d66 " in text


@pytest.mark.parametrize(("width", "height"), BODIES)
def test_nothing_is_known_yet(width, height):
    view = ClusterView()
    view.take(make_status(), b"", 100.0)
    text = text_of(view, width, height)
    assert "–" in text and "nan" not in text


def test_a_cluster_without_groups():
    scene = Scene(status=make_status(1, 1), experts=make_experts(0))
    scene.experts = ExpertsReport(parts=())
    view, _ = watch(3, scene)
    text = text_of(view)
    assert "no groups: no experts to place" in text and "prefill 1 rank " in text


def test_limits_are_beside_what_is_held_against_them():
    scene = Scene()
    scene.traffic = msgspec.structs.replace(scene.traffic, ttft_limit_us=100_000)
    view, _ = watch(10, scene)
    lines = build(view, OverState(), 80, 21, 109.5)
    row = next(line for line in lines if "TTFT" in plain(line))
    assert "100 ms" in plain(row) and any(style == "bad" for _, style in row)
    row = next(line for line in lines if "ITL" in plain(line))
    assert not any(style == "bad" for _, style in row)


def test_what_is_wrong_has_a_colour():
    scene = Scene()
    view, _ = watch(5, scene)
    scene.traffic = msgspec.structs.replace(scene.traffic, failed=scene.traffic.failed + 50)
    scene.status = msgspec.structs.replace(scene.status, waiting=4000)
    scene.advance(1.0)
    view.take(scene.traffic, b"", 105.0)
    view.take(scene.status, b"", 105.0)
    runs = [run for line in build(view, OverState(), 80, 21, 105.5) for run in line]
    assert ("4,000/4,096", "warn") in runs
    assert any(style == "bad" for text, style in runs if text.strip().replace(",", "").isdigit())


def test_five_minutes_fit_into_a_sparkline():
    view, _ = watch(KEEP_S)
    row = next(row for row in text_of(view, now=399.5).splitlines() if row.startswith(" running"))
    # 2,911 all the time: a full line from the first point on, without a gap.
    assert row[:39].count("█") >= 16


def test_a_running_move_is_told():
    scene = Scene()
    scene.set_part(state="moving", copied_slots=40, total_slots=214)
    view, _ = watch(2, scene)
    assert "moving 40/214" in text_of(view)


def test_events_can_be_scrolled():
    async def body():
        async with open_console() as desk:
            from tests.console.stubhead import make_event

            desk.head.push(*(make_event(n, text=f"number={n}") for n in range(4, 40)))
            await desk.until(lambda: "number=39" in desk.text())
            await desk.press("j", "j", "j")
            assert "number=39" not in desk.text() and "number=36" in desk.text() and "3 newer" in desk.text()
            await desk.press("g")
            assert "number=39" in desk.text()

    asyncio.run(body())


def test_it_asks_for_loads_in_turn_and_not_too_often():
    async def body():
        async with open_console(warm=0) as desk:

            def heats():
                return [(ask.pool, ask.group) for ask in desk.head.asked if isinstance(ask, AskHeat)]

            await desk.rounds(2, seconds=1.0)
            desk.head.asked.clear()
            await desk.rounds(4, seconds=1.0)
            assert heats().count(("decode", 0)) == 4
            assert {group for pool, group in heats() if pool == "prefill"} == {0, 1, 2, 3}
            assert sum(isinstance(ask, AskLinks) for ask in desk.head.asked) == 4
            desk.head.asked.clear()
            await desk.rounds(3)  # within the same second
            assert ("decode", 0) not in heats()

    asyncio.run(body())


def test_what_is_exported():
    async def body():
        async with open_console(warm=6) as desk:
            assert desk.app.live.export()["d25"]["expert"] == 23

    asyncio.run(body())


def test_stub_heat_is_whole():
    """The picture of the fullest rank must come from loads, not from the head's figures alone."""
    report, blob = make_heat(AskHeat("prefill", 0, "main", 0), make_part("prefill", ranks=(0, 1), slots=528))
    assert len(blob) == report.ranks * (8 * report.layers + 9 * report.slots_per_rank) + 4 * report.experts
