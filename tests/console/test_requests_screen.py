"""The Requests screen on a head: every key, what it asks, and what it looks like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from console.linegrid import LineView
from console.marks import Theme
from console.screens.requests import RequestsScreen
from tests.console.picture import check_picture
from tests.console.rackdata import make_request, make_requests
from tests.console.stubhead import Desk, Scene, make_traffic, open_console
from transport.messages import AskRequests, CancelRequests, RequestsReport


def on_requests(body: Callable[[Desk], Awaitable[None]], scene: Scene | None = None, **options: object) -> None:
    """Runs `body` on the open screen."""
    scene = scene or Scene(requests=make_requests(40))

    async def run() -> None:
        async with open_console(scene, screen="requests", **options) as desk:  # type: ignore[arg-type]
            await body(desk)

    asyncio.run(run())


def cursor_of(desk: Desk) -> str:
    return next((line[1:].split()[0] for line in desk.lines() if line.startswith("▸")), "")


def ids(desk: Desk, count: int = 3) -> list[str]:
    return [line[1:].split()[0] for line in desk.lines()[2 : 2 + count]]


def test_it_asks_for_all_and_shows_the_oldest_first() -> None:
    async def body(desk: Desk) -> None:
        assert ids(desk) == ["#1000", "#1001", "#1002"] and "▲ 1 overdue" in desk.lines()[0]
        assert AskRequests(limit=4096, older_ms=0) in desk.head.asked

    on_requests(body)


def test_moving_sorting_and_filtering() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "down", "k", "down", "up", "j")
        assert cursor_of(desk) == "#1001" and "▼ frozen" in desk.lines()[0]
        await desk.press("pagedown")
        assert cursor_of(desk) == "#1019"
        await desk.press("pageup", "G")
        assert cursor_of(desk) == "#1039"
        await desk.press("home", "end", "g")
        assert cursor_of(desk) == "#1000"
        await desk.press("S")
        # The cursor stays on its row, which is the last one now.
        assert "sort age ▲" in desk.lines()[0] and desk.lines()[-1].startswith("▸#1000")
        await desk.press("s")
        assert "sort in state ▼" in desk.lines()[0] and ids(desk) == ["#1002", "#1000", "#1001"]
        await desk.press("escape", "/")
        await desk.type("overdue=yes")
        await desk.press("enter")
        assert ids(desk, 1) == ["#1002"] and "1 of 40" in desk.lines()[0]
        await desk.press("/")
        await desk.type(" age>x")
        assert "`age` is a number, and `x` is none" in desk.text("footer")
        await desk.press("escape", "escape")
        assert "  40" in desk.lines()[0]

    on_requests(body)


def test_requests_come_and_go_and_nothing_moves_under_the_cursor() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "j", "enter")
        scene = desk.head.scene
        rows = scene.requests.rows
        scene.requests = RequestsReport(40, (*rows[:1], *rows[2:], make_request(2000, age_ms=99_000)))
        await desk.rounds(1, seconds=1)
        assert ids(desk) == ["#1000", "#1001", "#1002"] and cursor_of(desk) == "#1001"
        assert "ended: this is what was last heard of it" in desk.text()
        # There is nothing left to cancel.
        assert "cancel" not in desk.text("footer")
        await desk.press("x", "y")
        assert desk.head.acts == []
        await desk.press("escape", "escape")
        assert ids(desk) == ["#2000", "#1000", "#1002"] and cursor_of(desk) == ""

    on_requests(body)


def test_the_detail_and_back() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("enter")
        assert cursor_of(desk) == "#1000" and "── #1000  line-001000  of batch-0" in desk.text()
        assert "█ decode" in desk.text()
        await desk.press("j", "j")
        assert "▲ no token after 42 s, limit 30 s" in desk.text() and "▒ prefill+push 39.0 s" in desk.text()
        await desk.press("backspace")
        assert "── #" not in desk.text() and cursor_of(desk) == "#1002"
        await desk.press("escape")
        assert cursor_of(desk) == ""

    on_requests(body)


def test_canceling_asks_first_and_enter_is_no_answer() -> None:
    async def body(desk: Desk) -> None:
        assert "cancel" not in desk.text("footer")
        await desk.press("j", "x", "enter")
        assert "Cancel #1000 of batch-0, 85 of 4,096 tokens out?" in desk.text("footer")
        await desk.press("escape")
        assert "not done: cancel #1000" in desk.text("footer") and desk.head.acts == []
        assert cursor_of(desk) == "#1000"
        await desk.press("x", "y")
        await desk.until(lambda: bool(desk.head.acts), "the act")
        assert desk.head.acts == [CancelRequests((1000,), desk.app.who()[1], "")]
        await desk.until(lambda: "cancel #1000: 1 request cancelled" in desk.text("footer"), "its end")
        desk.head.scene.refuse = "no such request"
        await desk.press("x", "y")
        await desk.until(lambda: "refused: no such request" in desk.text("footer"), "the refusal")

    scene = Scene(requests=make_requests(40))
    scene.done = "1 request cancelled"
    on_requests(body, scene)


def test_a_link_that_only_reads_cancels_nothing() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j")
        assert "cancel" not in desk.text("footer")
        await desk.press("x", "y")
        assert desk.head.acts == []

    on_requests(body, read_only=True)


def test_copying_cells_and_the_mouse() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("j", "right", "y")
        assert desk.app.clipboard == "decode"
        await desk.press("left", "y")
        assert desk.app.clipboard == "#1000"
        await desk.press("Y")
        record = json.loads(desk.app.clipboard)
        assert record["request"] == 1000 and record["prompt_tokens"] == 300 and record["overdue"] == ""
        screen = desk.app.screen
        assert isinstance(screen, RequestsScreen)
        exported = screen.export()
        assert isinstance(exported, list) and len(exported) == 40
        assert exported[2]["overdue"] == "no token after 42 s, limit 30 s"
        await desk.pilot.click("#body", offset=(3, 4))
        await desk.pilot.pause()
        assert cursor_of(desk) == "#1002"

    on_requests(body)


def test_a_label_that_commands_terminals_is_only_shown() -> None:
    async def body(desk: Desk) -> None:
        await desk.press("enter")
        strips = desk.app.screen.query_one("#body", LineView)
        drawn = "".join(strips.render_line(y).text for y in range(21))
        assert "\x1b" not in drawn and "\ufffd[2Jbad" in drawn

    on_requests(body, Scene(requests=RequestsReport(1, (make_request(1, label="\x1b[2Jbad", client="\x1b]0;x\x07"),))))


def test_nothing_runs() -> None:
    async def body(desk: Desk) -> None:
        assert "no request runs or waits" in desk.text()
        await desk.press("j", "enter", "x", "y", "Y")
        assert cursor_of(desk) == "" and desk.head.acts == [] and "nothing to copy" in desk.text("footer")

    on_requests(body, Scene(requests=RequestsReport(0, ())))


def test_four_thousand() -> None:
    async def body(desk: Desk) -> None:
        assert "4,096  the oldest of 9,000" in desk.lines()[0]
        await desk.press("G")
        assert cursor_of(desk) == "#5095"
        await desk.press("/")
        await desk.type("p=p03 state=queued")
        await desk.press("enter")
        assert "0 of 4,096" in desk.lines()[0]
        check_picture(desk, "requests-4096-80x24-dark")

    report = msgspec.structs.replace(make_requests(4096), total=9000)
    on_requests(body, Scene(requests=report))


def picture_scene() -> Scene:
    scene = Scene(requests=make_requests(40), traffic=make_traffic(ttft_limit_us=25_000_000))
    rows = list(scene.requests.rows)
    rows[4] = make_request(1004, state="stopping", age_ms=40_200, state_ms=6_100, attempt=2, generated=90)
    scene.requests = RequestsReport(2923, tuple(rows))
    return scene


@pytest.mark.parametrize(
    ("size", "theme", "keys"),
    [
        ((80, 24), "dark", ("j", "j", "j", "enter")),
        ((80, 24), "mono", ("j", "j", "enter")),
        ((120, 40), "light", ("j", "j", "j", "j", "j", "enter")),
        ((200, 60), "dark", ()),
    ],
)
def test_pictures(size: tuple[int, int], theme: Theme, keys: tuple[str, ...]) -> None:
    async def body(desk: Desk) -> None:
        if keys:
            await desk.press(*keys)
        check_picture(desk, f"requests-{size[0]}x{size[1]}-{theme}")

    on_requests(body, picture_scene(), size=size, theme=theme)
