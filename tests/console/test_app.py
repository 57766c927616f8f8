"""Keys that work everywhere, what is absent when only reading, palette, help, commands, themes, copies and exports."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from console.app import APP_KEYS
from console.linegrid import LineView
from console.screens import SCREENS
from tests.console.stubhead import Scene, make_event, open_console, send_key
from transport.messages import AskHeat, AskRequests

CHANGES = {"R", "A", "U", "P", "X", "a", "x"}


def run(body):
    asyncio.run(body())


def test_each_screen_has_its_key_and_asks_for_what_it_shows():
    async def body():
        async with open_console() as desk:
            for screen in SCREENS:
                await desk.press(str(screen.NUMBER))
                await desk.rounds(1)
                assert type(desk.app.live) is screen
                assert f"{screen.NUMBER} {screen.TITLE_TEXT}" in desk.text("footer")
                assert any(desk.lines())
            kinds = {type(message) for message in desk.head.asked}
            assert {AskHeat, AskRequests} <= kinds

    run(body)


def test_the_screen_that_was_left_is_the_one_that_is_found():
    async def body():
        async with open_console(screen="events") as desk:
            await desk.press("l", "1", "7")
            assert "level: warning" in desk.text()

    run(body)


def test_numbers_and_names_are_in_order():
    assert [screen.NUMBER for screen in SCREENS] == list(range(1, 8))
    assert [screen.NAME for screen in SCREENS] == [
        *("over", "ranks", "experts", "transfer", "requests", "balance", "events")
    ]


@pytest.mark.parametrize("kind", SCREENS)
def test_no_key_has_two_meanings_on_a_screen(kind):
    common = [key for entry in APP_KEYS for key in entry.keys] + [str(screen.NUMBER) for screen in SCREENS]
    own = [key for entry in kind.all_keys() for key in entry.keys]
    assert len(own) == len(set(own)) and not set(own) & set(common)


def test_commands_open_screens_and_say_what_is_wrong():
    async def body():
        async with open_console() as desk:
            await desk.press(":")
            assert desk.text("footer").startswith(" :")
            await desk.type("ran")
            await desk.press("tab", "enter")
            await desk.until(lambda: desk.app.live.NAME == "ranks")
            await desk.press(":")
            await desk.type("e")
            await desk.press("enter")
            assert "e may be events, experts, export" in desk.text("footer")
            await desk.press("x", "x", "enter")
            assert "no command exx" in desk.text("footer")
            await desk.press("escape")
            assert "? keys" in desk.text("footer")
            assert desk.app.run_command("hz 99") == "hz 99: from 0.5 to 10"
            assert desk.app.run_command("hz fast") == "hz fast: not a number"
            assert desk.app.run_command("hz 5") == "" and desk.app.hz == 5
            assert desk.app.run_command("theme pink").startswith("themes:")
            assert desk.app.run_command("theme light") == "" and desk.app.look == "light"

    run(body)


def test_why_is_in_the_header_until_it_was_used():
    async def body():
        async with open_console(size=(120, 40)) as desk:
            await desk.press(":")
            await desk.type("why rewired")
            await desk.press("enter")
            assert "why: rewired" in desk.text("header") and "logged with: rewired" in desk.text("footer")
            await desk.press(":")
            await desk.type("why")
            await desk.press("enter")
            assert "why:" not in desk.text("header")

    run(body)


def test_freeze_holds_the_body_and_not_the_header():
    async def body():
        async with open_console() as desk:
            await desk.press("space")
            before, header = desk.text(), desk.text("header")
            assert "frozen" in header
            await desk.rounds(3, seconds=1.0)
            assert desk.text() == before and desk.text("header") != header
            await desk.press("space")
            assert desk.text() != before and "frozen" not in desk.text("header")

    run(body)


def test_rate():
    async def body():
        async with open_console() as desk:
            await desk.press("+")
            assert "4 Hz" in desk.text("header")
            await desk.press(*"++++++")
            assert desk.app.hz == 10
            await desk.press(*"----------")
            assert desk.app.hz == 0.5 and "0.5 Hz" in desk.text("header")

    run(body)


def test_themes_and_mouse():
    async def body():
        async with open_console() as desk:
            looks = []
            for _ in range(4):
                await desk.press("t")
                looks.append(desk.app.look)
            assert looks == ["light", "mono", "ansi", "dark"]
            await desk.press("M")
            assert "mouse off" in desk.text("footer") and not desk.app.has_mouse
            await desk.press("M")
            assert "mouse on" in desk.text("footer")

    run(body)


def test_no_colour_without_colour():
    async def body():
        async with open_console(theme="mono") as desk:
            for screen in SCREENS:
                await desk.press(str(screen.NUMBER))
                await desk.rounds(1)
                for view in desk.app.screen.query(LineView):
                    for y in range(view.size.height):
                        for segment in view.render_line(y):
                            style = segment.style
                            assert style is None or (style.color is None and style.bgcolor is None)

    run(body)


def test_help_lists_every_key_that_works():
    async def body():
        async with open_console(size=(120, 60), screen="events") as desk:
            await desk.press("?")
            text = desk.text("help")
            for key in (*desk.app.live.all_keys(), *APP_KEYS):
                assert key.text in text
            assert "level" in text and "Esc leaves" in text
            await desk.press("escape")
            assert desk.text().startswith(" Events")

    run(body)


def test_help_scrolls_where_it_is_too_long():
    async def body():
        async with open_console(screen="experts") as desk:
            await desk.press("?")
            first = desk.text("help")
            await desk.press("pagedown")
            assert desk.text("help") != first
            await desk.press(*["pageup"] * 9)
            assert desk.text("help") == first
            await desk.press("q")
            assert desk.app.live is desk.app.screen

    run(body)


def test_the_palette_has_everything():
    async def body():
        async with open_console(screen="ranks") as desk:
            titles = [command.title for command in desk.app.get_system_commands(desk.app.screen)]
            assert "2 Ranks" in titles and "Theme mono" in titles
            for key in desk.app.keys_now():
                assert key.text in titles or key.name == "command"
            await desk.press("ctrl+p")
            await desk.type("7 Events")
            await desk.until(lambda: len(desk.app.screen.query("CommandList OptionList, CommandList")) > 0)
            await asyncio.sleep(0.1)  # the palette searches a moment after the last key
            await desk.press("enter")
            await desk.until(lambda: desk.app.live is desk.app.screen and desk.app.live.NAME == "events")

    run(body)


@pytest.mark.parametrize("read_only", [False, True])
def test_keys_that_change_are_absent_when_only_reading(read_only):
    async def body():
        scene = Scene()
        async with open_console(scene, size=(200, 60), read_only=read_only) as desk:
            app = desk.app
            assert ("READ-ONLY" if read_only else "ADMIN") in desk.text("header")
            found = set()
            for screen in SCREENS:
                await desk.press(str(screen.NUMBER))
                await desk.rounds(1)
                keys = [key for key in app.keys_now() if key.changes]
                found |= {face for key in keys for face in key.keys}
                if not read_only:
                    continue
                commands = {command.title for command in app.get_system_commands(app.screen)}
                changing = [key for key in screen.all_keys() if key.changes]
                assert not any(key.text in commands for key in changing)
                await desk.press("?")
                assert not any(key.text in desk.text("help") for key in changing)
                await desk.press("escape")
                for key in changing:
                    await desk.press(key.keys[0])
                    assert not app.live.footer.is_busy
            assert not desk.head.acts
            assert found <= CHANGES and bool(found) != read_only

    run(body)


def test_nothing_can_be_changed_while_the_link_is_down():
    async def body():
        async with open_console(screen="ranks") as desk:
            await desk.press("j")
            assert any(key.changes for key in desk.app.keys_now())
            await desk.head.stop()
            await desk.until(lambda: desk.app.view.link.phase == "lost")
            assert not any(key.changes for key in desk.app.keys_now())

    run(body)


def test_copies_go_to_the_persons_terminal():
    async def body():
        async with open_console(screen="events") as desk:
            await desk.press("y")
            assert desk.app.clipboard.startswith("rebalance.end plan 17") and "copied" in desk.text("footer")
            await desk.press("Y")
            assert json.loads(desk.app.clipboard)["seq"] == 3

    run(body)


def test_export_writes_two_files_and_says_their_names():
    async def body():
        async with open_console(screen="events") as desk:
            await desk.press("e")
            names = ["engine-events-20251129-141233.json", "engine-events-20251129-141233.svg"]
            assert all(name in desk.text("footer") for name in names)
            folder = Path(desk.app.directory)
            data = json.loads((folder / names[0]).read_text(encoding="utf-8"))
            assert data["schema"] == 1 and data["status"]["running"] == 2911
            assert data["rows"][2]["name"] == "rebalance.end"
            assert "</svg>" in (folder / names[1]).read_text(encoding="utf-8")
            await desk.press("e")
            assert "141233-1.json" in desk.text("footer")
            desk.app.directory = "/nowhere"
            await desk.press("e")
            assert "not written" in desk.text("footer")

    run(body)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_leaving(key):
    async def body():
        async with open_console() as desk:
            await desk.press(key)
            await desk.until(lambda: desk.app.return_value is not None)
            assert desk.app.return_value == 0

    run(body)


def test_events_are_drawn_as_they_come():
    async def body():
        async with open_console() as desk:
            desk.head.push(make_event(4, "rank.down", "rank=12 why=signal", "error"))
            await desk.until(lambda: "rank.down" in desk.text())

    run(body)


def test_equal_lines_cost_no_drawing():
    async def body():
        async with open_console() as desk:
            body_view = desk.app.screen.query_one("#body", LineView)
            lines = list(body_view.lines)
            assert body_view.set_lines(lines) == 0
            lines[3] = (("other", ""),)
            lines[4] = (("other", ""),)
            assert body_view.set_lines(lines) == 2

    run(body)


@pytest.mark.parametrize("kind", SCREENS)
def test_no_room_is_no_reason_to_end(kind):
    async def body():
        async with open_console(screen=kind.NAME) as desk:
            for size in ((79, 23), (40, 10), (20, 5), (10, 3), (1, 1), (300, 100), (80, 24)):
                await desk.pilot.resize_terminal(*size)
                await desk.press("j", "enter", "escape")
                desk.app.paint()
                await desk.pilot.pause()
            assert any(desk.lines())

    run(body)


def test_what_is_typed_fast_behind_a_key_belongs_to_what_it_opened():
    """All in one read of the terminal, as over a slow link: an `x` in a filter is a letter, no drain; a `y` behind a
    question answers it."""

    async def body():
        async with open_console(Scene(), screen="ranks") as desk:
            for key in ["/", *"dxy", "enter"]:
                send_key(desk.app, key)
            await desk.until(lambda: desk.app.live.get_filter() == "dxy")
            assert "[y]" not in desk.text("footer") and not desk.head.acts
            for key in ["escape", "6", "a", "y"]:
                send_key(desk.app, key)
            await desk.until(lambda: desk.head.acts)
            assert "dxy" not in desk.text("footer")

    asyncio.run(body())
