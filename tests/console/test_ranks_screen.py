"""The Ranks screen on a head: every key, what it asks, and what it looks like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from console.linegrid import LineView
from console.marks import Theme
from console.screens.ranks import RanksScreen, drain_question
from tests.console.picture import check_picture
from tests.console.rackdata import EVENTS, make_busy_view
from tests.console.stubhead import Desk, Scene, make_event, make_snapshot, make_status, open_console
from transport.messages import AskHeat, AskLinks, AskRequests, ExpertsReport, SetDrain


def on_ranks(body: Callable[[Desk], Awaitable[None]], scene: Scene | None = None, **options: object) -> None:
    """Runs `body` on the open screen."""

    async def run() -> None:
        async with open_console(scene, screen="ranks", **options) as desk:  # type: ignore[arg-type]
            await body(desk)

    asyncio.run(run())


def screen_of(desk: Desk) -> RanksScreen:
    screen = desk.app.screen
    assert isinstance(screen, RanksScreen)
    return screen


def cursor_of(desk: Desk) -> str:
    return next((line[1:].split()[0] for line in desk.lines() if line.startswith("▸")), "")


def names(desk: Desk, count: int = 5) -> list[str]:
    return [line[1:].split()[0] for line in desk.lines()[2 : 2 + count]]


def test_two_keys_lead_to_the_slow_rank_its_layer_and_its_cost() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("enter")
        text = desk.text()
        assert cursor_of(desk) == "d25" and "L4 e23" in desk.lines()[2] and "HOT" in desk.lines()[2]
        assert "fullest layer 4: 1.83x, expert 23" in text and "[load]" in text

    on_ranks(body)


def test_moving_freezes_and_esc_lets_go() -> None:
    async def body(desk: Desk) -> None:
        assert cursor_of(desk) == "" and "frozen" not in desk.lines()[0]
        await desk.press("j")
        assert cursor_of(desk) == "d25" and "▼ frozen" in desk.lines()[0]
        await desk.press("down", "j", "k")
        assert cursor_of(desk) == names(desk)[1]
        before = names(desk, 18)
        # Another rank is the slow one now: nothing moves under the cursor.
        desk.head.scene.heat = lambda ask, part: _heat_at(3, ask, part)
        await desk.rounds(1, seconds=1)
        assert names(desk, 18) == before
        await desk.press("escape")
        assert cursor_of(desk) == "" and names(desk)[0] == "d11"
        await desk.press("G")
        assert desk.lines()[-1].startswith("▸")
        await desk.press("pageup", "up")
        assert not desk.lines()[-1].startswith("▸")
        await desk.press("pagedown", "end")
        assert desk.lines()[-1].startswith("▸")
        await desk.press("g")
        assert desk.lines()[2].startswith("▸d11")
        await desk.press("end", "home")
        assert desk.lines()[2].startswith("▸d11")

    on_ranks(body)


def _heat_at(place: int, ask: AskHeat, part: object) -> object:
    from tests.console.stubhead import make_heat

    return make_heat(ask, part, hot_place=place)  # type: ignore[arg-type]


def test_sorting() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("s")
        assert "sort hottest ▲" in desk.lines()[0]
        await desk.press("s", "s")
        assert "sort rank ▲" in desk.lines()[0] and names(desk, 3) == ["d08", "d09", "d10"]
        await desk.press("S")
        assert "sort rank ▼" in desk.lines()[0] and names(desk, 3) == ["p07", "p06", "p05"]

    on_ranks(body)


def test_filtering() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("/")
        await desk.type("pool=prefill !p00")
        await desk.press("enter")
        assert "filter pool=prefill !p00  7 of 40" in desk.lines()[0]
        assert {name[0] for name in names(desk, 7)} == {"p"}
        await desk.press("/")
        await desk.type(" skwe>1")
        assert "No column `skwe`. Did you mean `skew`?" in desk.text("footer")
        # The last one that was right stays in force: a word that nothing has.
        assert "filter pool=prefill !p00 skwe  0 of 40" in desk.lines()[0]
        await desk.press("escape")
        assert "filter pool=prefill !p00  7 of 40" in desk.lines()[0]
        await desk.press("escape")
        assert "filter" not in desk.lines()[0]

    on_ranks(body)


def test_the_pages_of_the_detail() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "enter")
        for page, said in (("load", "pages"), ("links", "GB/s"), ("requests", "#17"), ("events", "link.end")):
            text = desk.text()
            assert f"[{page}]" in text and said in text, page
            await desk.press("enter")
            await desk.rounds(1)
        assert "[load]" in desk.text()
        await desk.press("right")
        assert "[links]" in desk.text()
        await desk.press("left", "left")
        assert "[events]" in desk.text()
        await desk.press("backspace")
        assert "[events]" not in desk.text() and cursor_of(desk) == "d25"
        await desk.press("backspace")
        assert cursor_of(desk) == ""

    scene = Scene()
    scene.events.append(make_event(4, "link.end", "rank=25 | pair stream p03 ended"))
    on_ranks(body, scene)


def test_it_asks_for_what_it_shows() -> None:
    async def body(desk: Desk) -> None:
        async def asked() -> list[object]:
            desk.head.asked.clear()
            await desk.rounds(4)
            return list(desk.head.asked)

        plain = await asked()
        heats = [ask for ask in plain if isinstance(ask, AskHeat)]
        # The part that loses most each time, the others in turn.
        assert [ask.pool for ask in heats[::2]] == ["decode"] * 4
        assert sorted(ask.group for ask in heats[1::2]) == [0, 1, 2, 3]
        assert sum(isinstance(ask, AskLinks) for ask in plain) == 4
        assert not any(isinstance(ask, AskRequests) for ask in plain)
        await desk.press("enter")
        assert sum(isinstance(ask, AskRequests) for ask in await asked()) == 4

    on_ranks(body)


def test_draining_asks_first_and_enter_is_no_answer() -> None:
    async def body(desk: Desk) -> None:
        assert "drain" not in desk.text("footer")
        await desk.press("x")
        assert "Drain" not in desk.text("footer")
        await desk.press("j")
        assert "drain…" in desk.text("footer")
        await desk.press("x", "enter")
        assert "Drain d25, which has 90 requests to finish?" in desk.text("footer")
        await desk.press("n")
        assert desk.head.acts == [] and "not done: drain d25" in desk.text("footer")
        await desk.press(":")
        await desk.type("why a fan is broken")
        await desk.press("enter", "x", "y")
        await desk.until(lambda: bool(desk.head.acts), "the act")
        (act,) = desk.head.acts
        assert isinstance(act, SetDrain) and (act.ranks, act.drain, act.reason) == ((25,), True, "a fan is broken")
        await desk.until(lambda: "drain d25: d25 drains" in desk.text("footer"), "its end")

    scene = Scene()
    scene.done = "d25 drains"
    on_ranks(body, scene)


def test_a_drained_rank_is_let_work_again() -> None:
    async def body(desk: Desk) -> None:
        assert "○ 1 drained" in desk.lines()[0]
        await desk.press("/")
        await desk.type("d30")
        await desk.press("enter", "j", "x")
        assert "Let d30 take requests again?" in desk.text("footer")
        await desk.press("y")
        await desk.until(lambda: bool(desk.head.acts), "the act")
        assert desk.head.acts[0] == SetDrain((30,), False, desk.app.who()[1], "")

    scene = Scene()
    scene.set_rank(30, state="draining", phase="drained")
    on_ranks(body, scene)


def test_draining_when_little_is_left_wants_the_pools_name() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("/")
        await desk.type("d02")
        await desk.press("enter", "j", "x", "y")
        # The y went into the name.
        await desk.press("enter", "y", "backspace", "backspace")
        assert desk.head.acts == []
        assert "1 decode rank of 4 would take requests" in desk.text("footer") and "d04 is lost" in desk.text("footer")
        await desk.type("decode")
        await desk.press("enter", "y")
        await desk.until(lambda: bool(desk.head.acts), "the act")
        assert desk.head.acts[0].ranks == (2,)  # type: ignore[attr-defined]

    scene = Scene(status=make_status(2, 4), experts=ExpertsReport(()))
    scene.set_rank(4, state="lost")
    scene.set_rank(3, state="draining")
    on_ranks(body, scene)


def test_a_refusal_is_told() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "x", "y")
        await desk.until(lambda: "refused: the last decode rank" in desk.text("footer"), "the refusal")

    scene = Scene()
    scene.refuse = "the last decode rank that takes requests"
    on_ranks(body, scene)


def test_a_link_that_only_reads_has_no_drain() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j")
        assert "drain" not in desk.text("footer")
        await desk.press("x", "y")
        assert desk.head.acts == [] and "Drain" not in desk.text("footer")

    on_ranks(body, read_only=True)


def test_copying_and_cells() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("y")
        assert "nothing to copy here" in desk.text("footer")
        await desk.press("j", "y")
        assert desk.app.clipboard == "d25"
        await desk.press("right", "y")
        assert desk.app.clipboard == "90"
        await desk.press("left", "Y")
        record = json.loads(desk.app.clipboard)
        assert record["rank"] == "d25" and record["pool"] == "decode" and record["hottest"] == "L4 e23"
        exported = screen_of(desk).export()
        assert isinstance(exported, list) and len(exported) == 40
        assert json.loads(json.dumps(exported))[0]["words"]["fullest layer"] == "4: 1.83x, expert 23"

    on_ranks(body)


def test_the_mouse_chooses_a_rank() -> None:
    async def body(desk: Desk) -> None:
        third = names(desk)[2]
        await desk.pilot.click("#body", offset=(3, 4))
        await desk.pilot.pause()
        assert cursor_of(desk) == third
        await desk.pilot.click("#body", offset=(3, 0))
        await desk.pilot.pause()
        assert cursor_of(desk) == third

    on_ranks(body)


def test_a_rank_that_is_lost_meanwhile() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "enter")
        desk.head.scene.set_rank(25, state="lost", age_ms=2500, reason="killed by signal 9")
        desk.head.push(make_event(4, "rank.down", "rank=25 generation=1 | killed by signal 9", "warning", ago_s=1))
        await desk.rounds(1, seconds=1)
        assert cursor_of(desk) == "d25"
        text = desk.text()
        assert "✖ LOST 14:12:30" in text and "killed by signal 9" in text and "✖ 1 lost" in desk.lines()[0]
        # It comes back in another life.
        desk.head.scene.set_rank(25, state="ready", age_ms=100, generation=2, restarts=1, reason="")
        await desk.rounds(2, seconds=1)
        assert "life 2, 1 restart" in desk.text() and "LOST" not in desk.text()

    on_ranks(body)


def test_a_report_without_the_rank_under_the_cursor_keeps_it_dimmed() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j")
        scene = desk.head.scene
        scene.status = make_status(8, 16)
        await desk.rounds(1)
        assert cursor_of(desk) == "d25" and screen_of(desk).ui.table.is_gone(25)
        assert "drain" not in desk.text("footer")
        await desk.press("x", "y")
        assert desk.head.acts == []
        await desk.press("g")
        assert "d25" not in desk.text()

    on_ranks(body)


def test_a_lost_link_leaves_what_was_last_known_dimmed() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j")
        await desk.head.stop()
        await desk.until(lambda: desk.app.view.link.phase == "lost", "the loss")
        assert cursor_of(desk) == "d25" and "drain" not in desk.text("footer")
        styles = {style for line in desk.app.screen.query_one("#body", LineView).lines for _, style in line}
        assert styles == {"gone"}

    on_ranks(body)


def test_a_frozen_screen_can_be_walked_through() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("space")
        before = desk.lines()
        await desk.rounds(2, seconds=1)
        assert desk.lines() == before
        await desk.press("j", "enter", "enter")
        assert cursor_of(desk) == "d25" and "[links]" in desk.text()
        await desk.press("escape", "escape", "space")
        await desk.rounds(1, seconds=1)
        assert desk.lines() != before

    on_ranks(body)


def test_before_loads_and_without_groups() -> None:
    async def body(desk: Desk) -> None:
        assert "HOT" not in desk.text() and "40" in desk.lines()[0]
        await desk.press("enter")
        assert "fullest layer" not in desk.text() and "tokens" in desk.text()

    on_ranks(body, Scene(experts=ExpertsReport(())))


def test_what_draining_risks() -> None:
    view = make_busy_view(changed={9: {"state": "lost"}})
    from console.ranktable import make_rows

    rows = {row.name: row for row in make_rows(view, 1000.0)}
    question = drain_question(view, rows["d17"], "host")
    assert question.risks == ("d09 is lost",) and question.typed == "decode"
    question = drain_question(view, rows["p03"], "host")
    assert question.risks == () and question.typed == ""
    assert question.build("why") == SetDrain((3,), True, "host", "why")


def picture_scene() -> Scene:
    scene = Scene()
    scene.set_rank(22, state="lost", age_ms=33_000, reason="killed by signal 9", snapshot=None)
    scene.set_rank(30, state="draining", phase="drained")
    scene.set_rank(31, age_ms=4200)
    scene.set_rank(33, snapshot=make_snapshot(33, waiting=7, pages_free=11))
    scene.events += [event for event in EVENTS.events if event.name == "rank.down"]
    return scene


@pytest.mark.parametrize(
    ("size", "theme", "keys"),
    [
        ((80, 24), "dark", ()),
        ((80, 24), "mono", ("j", "enter")),
        ((120, 40), "dark", ("j", "enter")),
        ((120, 40), "light", ()),
        ((200, 60), "light", ("j", "enter")),
    ],
)
def test_pictures(size: tuple[int, int], theme: Theme, keys: tuple[str, ...]) -> None:
    async def body(desk: Desk) -> None:
        if keys:
            await desk.press(*keys)
            await desk.rounds(1)
        check_picture(desk, f"ranks-{size[0]}x{size[1]}-{theme}")

    on_ranks(body, picture_scene(), size=size, theme=theme)


def test_a_rack_of_seventy_two() -> None:
    async def body(desk: Desk) -> None:
        assert "  72" in desk.lines()[0]
        await desk.press("G")
        assert desk.lines()[-1].startswith("▸")
        check_picture(desk, "ranks-72-120x40-dark")

    scene = Scene(status=make_status(8, 64))
    scene.set_part(ranks=tuple(range(8, 72)), slots=64 * 9)
    on_ranks(body, scene, size=(120, 40))
