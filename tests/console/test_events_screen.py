"""Screen 7: filter, level, follow, detail, what was not heard; the cursor stays on its event."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from console.draw_events import EventsState, build, event_fields
from console.lines import plain, width_of
from console.view import ClusterView
from tests.console.picture import check_pictures
from tests.console.stubhead import WALL_MS, Scene, make_event, open_console
from transport.messages import EventsHappened


def view_with(count: int) -> ClusterView:
    view = ClusterView()
    for start in range(1, count + 1, 200):
        events = tuple(
            make_event(n, level=("error" if n % 50 == 0 else "warning" if n % 10 == 0 else "info"), ago_s=count - n)
            for n in range(start, min(count, start + 199) + 1)
        )
        view.take(EventsHappened(lost=0, events=events), b"", 1.0)
    return view


def texts(view: ClusterView, ui: EventsState, width: int = 80, height: int = 21) -> list[str]:
    lines = build(view, ui, width, height, 1.0, WALL_MS)
    assert len(lines) <= height and all(width_of(line) <= width for line in lines)
    return [plain(line) for line in lines]


def test_the_newest_is_at_the_bottom_and_followed():
    view, ui = view_with(100), EventsState()
    assert "rank=100 " in texts(view, ui)[-1] and "follows" in texts(view, ui)[0]
    view.take(EventsHappened(lost=0, events=(make_event(101),)), b"", 1.0)
    assert "rank=101 " in texts(view, ui)[-1]


def test_the_cursor_stays_on_its_event():
    view, ui = view_with(100), EventsState()
    texts(view, ui)
    ui.go(ui.at() - 3)
    assert ui.current is not None and ui.current.seq == 97 and not ui.follows
    view.take(EventsHappened(lost=0, events=tuple(make_event(n) for n in range(101, 140))), b"", 1.0)
    shown = texts(view, ui)
    assert ui.current.seq == 97 and any("rank=97 " in row for row in shown) and "stays" in shown[0]
    ui.go(10**6)
    assert ui.follows and "rank=139 " in texts(view, ui)[-1]


def test_an_event_that_left_the_list_leaves_the_cursor_near():
    view, ui = view_with(100), EventsState()
    texts(view, ui)
    ui.go(54)  # number 55
    ui.level = 1
    texts(view, ui)
    assert ui.current is not None and ui.current.seq == 60


def test_five_thousand_events_cost_nothing_when_nothing_happens():
    view, ui = view_with(5000), EventsState()
    texts(view, ui)
    rows = ui.rows
    texts(view, ui)
    assert ui.rows is rows and len(rows) == 4096


def test_fields_of_a_text():
    event = make_event(1, text='plan 18 done moved=214 why="the rack was rewired" skew=1.83->1.09')
    assert event_fields(event) == [
        ("", "plan 18 done"),
        ("moved", "214"),
        ("why", "the rack was rewired"),
        ("skew", "1.83->1.09"),
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 21), (120, 37), (40, 10)])
def test_a_long_text_is_cut_in_the_list_and_whole_in_the_detail(width, height):
    view, ui = ClusterView(), EventsState()
    view.take(EventsHappened(lost=0, events=(make_event(1, text="words " * 30 + "end=1"),)), b"", 1.0)
    assert texts(view, ui, width, height)[1].endswith("…")
    ui.is_open = True
    if width >= 80:
        assert any(row.split() == ["end", "1"] for row in texts(view, ui, width, height))


def scene() -> Scene:
    return Scene(
        events=[
            make_event(1, "head.ready", "ranks=40", ago_s=3500),
            make_event(2, "link.retry", "p03 to d09, twice, ok", "warning", ago_s=1340),
            make_event(3, "rank.down", 'rank=22 why="signal 9" generation=1', "error", ago_s=300),
            make_event(4, "rebalance.end", "plan 17 applied main skew 1.71→1.08 2.9 GiB 0.71 s", ago_s=240),
        ]
    )


def test_in_the_console():
    async def body():
        async with open_console(scene(), screen="events") as desk:
            await desk.press("l")
            assert "2 events of 4" in desk.text() and "head.ready" not in desk.text()
            await desk.press("l", "l", "slash")
            await desk.type("link")
            assert "1 event of 4" in desk.text()  # while it is typed
            await desk.press("enter")
            assert "filter: link" in desk.text()
            await desk.press("slash")
            await desk.type(" name")
            await desk.press("=", "escape")
            assert "filter: link" in desk.text()  # Esc brings back the one before
            await desk.press("escape")
            assert "4 events" in desk.text()
            await desk.press("k", "enter")
            assert "rank.down" in desk.text() and "signal 9" in desk.text() and "5 min ago" in desk.text()
            await desk.press("backspace")
            assert "5 min ago" not in desk.text()
            await desk.press("f")
            assert "follows" in desk.lines()[0]
            desk.head.push(make_event(12), lost=7)
            await desk.until(lambda: "7 not heard" in desk.text())
            assert "7 events before this were not heard" in desk.text()
            assert desk.app.run_command("level error") == "" and desk.app.run_command("level loud") != ""

    asyncio.run(body())


def test_a_filter_that_is_wrong_says_why_and_stays_open():
    async def body():
        async with open_console(scene(), screen="events") as desk:
            await desk.press("slash")
            await desk.type("colour=red")
            await desk.press("enter")
            assert "colour" in desk.text("footer") and desk.app.live.footer.is_busy
            await desk.press("escape")
            assert "4 events" in desk.text()
            assert not desk.app.live.footer.is_busy

    asyncio.run(body())


def test_the_mouse_points():
    async def body():
        async with open_console(scene(), screen="events") as desk:
            # Two lines of header, one of title.
            await desk.pilot.click("#body", offset=(10, 2))
            await desk.pilot.pause()
            assert desk.app.live.ui.current.seq == 2

    asyncio.run(body())


def test_pictures():
    async def body():
        async with open_console(scene(), screen="events") as desk:
            await desk.press("k", "enter")
            await check_pictures(desk, "events")

    asyncio.run(body())


def test_pictures_without_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def body():
        async with open_console(scene(), screen="events", theme="mono") as desk:
            await desk.press("k", "enter")
            await check_pictures(desk, "events", ((80, 24),))

    asyncio.run(body())


def test_notes_of_the_console_itself_are_events():
    view, ui = view_with(3), EventsState()
    view.note("act", "drain d22: done", WALL_MS)
    rows = texts(view, ui)
    assert "console.act" in rows[-1] or any("console.act" in row for row in rows)
    ui.is_open = True
    assert any("this console's own" in row for row in texts(view, ui))
    assert msgspec.structs.asdict(view.events[-1])["seq"] == 0
