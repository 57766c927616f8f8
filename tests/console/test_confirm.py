"""Questions and typed lines as machines of keys; then in the console, where Enter never confirms anything."""

from __future__ import annotations

import asyncio

import pytest

from console.confirm import Asking, Question
from console.entry import Entry, complete
from console.lines import plain, width_of
from tests.console.stubhead import Scene, open_console
from transport.messages import Rebalance


def ask(why: str = "") -> Rebalance:
    return Rebalance("apply", "decode", 0, "main", 18, "", "me", "here", why)


PLAIN = Question(text="Apply plan 18 to decode/0?", build=ask, done="apply plan 18")
RISKY = Question(
    text="Apply plan 18 to decode/0?",
    build=ask,
    done="apply plan 18",
    risks=("2 slots move between hosts", "the group is incomplete"),
    typed="decode",
)


def press(asking: Asking, *keys: str) -> str:
    outcome = "open"
    for key in keys:
        outcome = asking.press(key, key if len(key) == 1 else None)
    return outcome


@pytest.mark.parametrize("key", ["enter", "space", "a", "ctrl+y", "down"])
def test_only_y_confirms(key):
    asking = Asking(PLAIN, "")
    assert press(asking, key) == "open"
    assert press(asking, "y") == "yes"


@pytest.mark.parametrize("key", ["n", "N", "escape", "ctrl+c"])
def test_what_declines(key):
    assert press(Asking(PLAIN, ""), key) == "no"


def test_a_risky_one_wants_the_name_first():
    asking = Asking(RISKY, "")
    assert press(asking, "y") == "open" and asking.text == "y"
    assert press(asking, "enter") == "open" and not asking.is_unlocked
    assert press(asking, "backspace", *"decode/1", "enter", "y") == "open"
    assert press(asking, "ctrl+u", *"decode", "enter", "enter", "enter") == "open"
    assert asking.is_unlocked
    assert press(asking, "y") == "yes"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("question", [PLAIN, RISKY])
def test_a_question_fits_and_says_everything(question, width):
    lines = Asking(question, "the rack was rewired").draw(width)
    assert all(width_of(line) <= width for line in lines)
    text = " ".join(" ".join(plain(line) for line in lines).split())
    for part in (*question.risks, "why: the rack was rewired"):
        assert part in text
    if not question.risks or width > 60:
        assert "Apply plan 18 to decode/0?" in text
    assert ("type decode:" in text) == bool(question.risks)
    assert ("[y] yes [n] no" in text) != bool(question.risks)


def test_a_line_is_edited():
    entry = Entry(":")
    for key in "why bad  word":
        entry.press("space" if key == " " else key, key)
    assert entry.press("ctrl+w", None) == "changed" and entry.text == "why bad  "
    entry.press("home", None)
    entry.press("right", None)
    entry.press("delete", None)
    assert entry.text == "wy bad  "
    entry.put("h")
    assert entry.text == "why bad  " and entry.at == 2
    entry.press("end", None)
    entry.put("one\ntwo\x1b[31m")
    assert entry.text == "why bad  one"
    assert entry.press("left", None) == "open"
    assert entry.press("enter", None) == "done"
    assert entry.press("escape", None) == "left"
    assert Entry(":").press("backspace", None) == "left"


def test_completion():
    words = ["theme", "transfer", "transcript", "why"]
    assert complete("w", words) == "why "
    assert complete("tr", words) == "trans"
    assert complete("x", words) == "x"
    assert complete("t", words) == "t"


@pytest.mark.parametrize("width", [20, 80])
def test_the_cursor_of_a_long_line_is_seen(width):
    entry = Entry("/", "0123456789" * 20)
    assert width_of(entry.draw(width)) == width and plain(entry.draw(width)).rstrip().endswith("9")
    entry.press("home", None)
    assert "/01234" in plain(entry.draw(width))


def test_in_the_console():
    async def body():
        async with open_console() as desk:
            live = desk.app.live
            live.ask(PLAIN)
            await desk.pilot.pause()
            assert "[y] yes" in desk.text("footer")
            # Neither Enter nor any key of the screen or the console gets past it.
            await desk.press("enter", "2", "q", "space", "question_mark", "enter")
            assert "[y] yes" in desk.text("footer") and desk.app.live is live and not desk.head.acts
            await desk.press("n")
            assert "not done: apply plan 18" in desk.text("footer")
            desk.app.run_command("why the rack was rewired")
            live.ask(PLAIN)
            desk.head.scene.done = "plan 18 is carried out"
            await desk.press("y")
            await desk.until(lambda: desk.head.acts)
            assert desk.head.acts == [ask("the rack was rewired")]
            await desk.until(lambda: "plan 18 is carried out" in desk.text("footer"))
            assert desk.app.view.events[-1].name == "console.act" and desk.app.why == ""
            # The keys come back with the next key.
            await desk.press("f1")
            assert "freeze" in desk.text("footer")

    asyncio.run(body())


def test_a_risky_one_in_the_console():
    async def body():
        async with open_console(Scene(refuse="a plan of another epoch")) as desk:
            desk.app.live.ask(RISKY)
            await desk.press("y", "enter", "y")
            assert not desk.head.acts
            await desk.press("ctrl+u")
            await desk.type("decode")
            await desk.press("enter", "enter")
            assert not desk.head.acts
            await desk.press("y")
            await desk.until(lambda: desk.head.acts)
            await desk.until(lambda: "refused: a plan of another epoch" in desk.text("footer"))
            assert desk.app.view.events[-1].level == "error"

    asyncio.run(body())


def test_a_link_that_breaks_meanwhile_does_not_lose_the_question():
    async def body():
        async with open_console() as desk:
            desk.app.live.ask(PLAIN)
            await desk.head.stop()
            await desk.until(lambda: desk.app.view.link.phase == "lost")
            assert "[y] yes" in desk.text("footer")
            await desk.press("y")
            await desk.until(lambda: "not known whether it was done" in desk.text("footer"))

    asyncio.run(body())
