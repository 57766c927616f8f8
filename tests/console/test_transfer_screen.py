"""The Transfer screen on a head: every key, what it asks, and what it looks like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from console.marks import Theme
from console.screens.transfer import TransferScreen
from tests.console.picture import check_picture
from tests.console.stubhead import Desk, Scene, make_event, make_links, make_status, open_console
from transport.messages import AskLinks, LinksReport


def on_transfer(body: Callable[[Desk], Awaitable[None]], scene: Scene | None = None, **options: object) -> None:
    """Runs `body` on the open screen, after two reports with traffic between them."""

    async def run() -> None:
        async with open_console(scene, screen="transfer", **options) as desk:  # type: ignore[arg-type]
            await desk.rounds(2, seconds=1.0)
            await body(desk)

    asyncio.run(run())


def cursor_of(desk: Desk) -> tuple[int, int] | None:
    screen = desk.app.screen
    assert isinstance(screen, TransferScreen)
    return screen.ui.cursor


def test_it_asks_for_pairs_and_marks_the_low_one() -> None:
    async def body(desk: Desk) -> None:
        assert AskLinks() in desk.head.asked
        lines = desk.lines()
        assert lines[0].startswith(" Transfer  P → D, GB/s  766 GB/s in all  d08-d15 of 32  ▼ 1 low")
        assert lines[5].split()[:3] == ["p03", "2.9", "0.4▼"] and lines[5].split()[-1] == "2"

    on_transfer(body)


def test_arrows_go_both_ways_and_scroll() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j")
        assert cursor_of(desk) == (0, 8)
        await desk.press("j", "down", "k", "up", "down")
        assert cursor_of(desk) == (1, 8)
        await desk.press("right", "l", "h", "left", "l")
        assert cursor_of(desk) == (1, 9)
        await desk.press(*["l"] * 9)
        assert cursor_of(desk) == (1, 18) and "‹" in desk.lines()[1] and "d18" in desk.lines()[1]
        await desk.press("G")
        assert cursor_of(desk) == (7, 39) and "›" not in desk.lines()[1]
        await desk.press("pageup")
        assert cursor_of(desk) == (0, 39)
        await desk.press("pagedown", "g")
        assert cursor_of(desk) == (0, 8)
        await desk.press("end", "home")
        assert cursor_of(desk) == (0, 8)
        await desk.press("escape")
        assert cursor_of(desk) is None

    on_transfer(body)


def test_the_detail_of_the_low_pair() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("/")
        await desk.type("low=yes")
        await desk.press("enter", "enter")
        text = desk.text()
        assert cursor_of(desk) == (3, 9) and "── p03 → d09 ─" in text
        assert "0.13 of the median  p99 38.0 ms" in text and "2 failed" in text
        assert "link.retry p03 to d09, twice, ok" in text
        await desk.press("backspace")
        assert "──" not in desk.text() and cursor_of(desk) == (3, 9)
        await desk.press("backspace", "backspace")
        assert cursor_of(desk) is None and "filter" not in desk.lines()[0]

    on_transfer(body)


def test_to_the_next_pair_worth_a_look() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("n")
        assert cursor_of(desk) == (3, 9)
        await desk.press("n")
        assert cursor_of(desk) == (3, 9)
        await desk.press("/")
        await desk.type("p=p00")
        await desk.press("enter", "n")
        assert "no pair is low, slow or has failed" in desk.text("footer")

    on_transfer(body)


def test_a_filter_that_is_wrong() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("/")
        await desk.type("bytes>3")
        assert "No column `bytes`" in desk.text("footer")
        await desk.press("escape")
        assert "filter" not in desk.lines()[0] and "d08-d15 of 32" in desk.lines()[0]

    on_transfer(body)


def test_sorting_rows() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("s", "s", "s")
        assert "sort failed ▼" in desk.lines()[0] and desk.lines()[2].split()[0] == "p03"
        await desk.press("S")
        assert "sort failed ▲" in desk.lines()[0] and desk.lines()[9].split()[0] == "p03"

    on_transfer(body)


def test_copying_and_the_mouse() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("y")
        assert "nothing to copy" in desk.text("footer")
        await desk.pilot.click("#body", offset=(14, 5))
        await desk.pilot.pause()
        assert cursor_of(desk) == (3, 9)
        await desk.press("y")
        assert desk.app.clipboard.startswith("p03 → d09  400 MB/s, 0.13 of the median")
        await desk.press("Y")
        record = json.loads(desk.app.clipboard)
        assert (record["prefill"], record["decode"], record["failed"], record["is_low"]) == (3, 9, 2, True)
        screen = desk.app.screen
        assert isinstance(screen, TransferScreen)
        exported = screen.export()
        assert isinstance(exported, list) and len(exported) == 256 and json.dumps(exported)
        await desk.pilot.click("#body", offset=(2, 5))
        await desk.pilot.pause()
        assert cursor_of(desk) == (3, 9)

    on_transfer(body)


def test_before_anything_was_pushed_and_without_a_pool() -> None:
    async def body(desk: Desk) -> None:
        assert "0 B/s in all" not in desk.lines()[0]
        await desk.press("j", "enter")
        assert "p00 → d08  nothing was pushed" in desk.text()

    async def alone(desk: Desk) -> None:
        assert "there is no pair of a prefill and a decode rank" in desk.text()
        await desk.press("j", "l", "enter", "G", "s", "y", "Y")
        assert cursor_of(desk) is None

    scene = Scene()
    scene.advance = lambda seconds: None  # type: ignore[method-assign]
    scene.links = (LinksReport(0), b"")
    on_transfer(body, scene)
    scene = Scene(status=make_status(0, 4))
    scene.advance = lambda seconds: None  # type: ignore[method-assign]
    scene.links = (LinksReport(0), b"")
    on_transfer(alone, scene)


def test_a_rank_that_is_lost_meanwhile() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "enter")
        scene = desk.head.scene
        scene.set_rank(0, state="lost", snapshot=None)
        desk.head.push(make_event(4, "rank.down", "rank=0 generation=1 | killed by signal 9", "warning"))
        await desk.rounds(1, seconds=1)
        text = desk.text()
        assert cursor_of(desk) == (0, 8) and " p00 ✖ LOST" in text and "rank.down rank=0" in text

    on_transfer(body)


@pytest.mark.parametrize(
    ("size", "theme", "keys"),
    [
        ((80, 24), "dark", ("j", "l", "j", "j", "j", "enter")),
        ((80, 24), "mono", ("j", "l", "j", "j", "j")),
        ((120, 40), "light", ()),
        ((200, 60), "dark", ("j", "l", "j", "j", "j", "enter")),
    ],
)
def test_pictures(size: tuple[int, int], theme: Theme, keys: tuple[str, ...]) -> None:
    async def body(desk: Desk) -> None:
        if keys:
            await desk.press(*keys)
        check_picture(desk, f"transfer-{size[0]}x{size[1]}-{theme}")

    on_transfer(body, size=size, theme=theme)


def test_a_rack_of_seventy_two() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "G")
        assert cursor_of(desk) == (23, 71)
        check_picture(desk, "transfer-72-120x40-dark")

    scene = Scene(status=make_status(24, 48))
    scene.links = make_links(24, 48)
    on_transfer(body, scene, size=(120, 40))
