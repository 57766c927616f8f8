"""Screen 6 under keys: every act asks, Enter never confirms, a risky one wants the pool's name.

And a whole re-placement, from its plan to its way back, against a scripted head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tests.console.expertscene import SMALL, Mover
from tests.console.stubhead import Desk, open_console
from transport.messages import AskHeat, ExpertsReport, Rebalance


def on_balance(mover: Mover, body: Callable[[Desk], Awaitable[None]], **options: object) -> None:
    """Runs `body` with the screen open."""

    async def run() -> None:
        async with open_console(mover.scene, screen="balance", **options) as desk:
            await body(desk)

    asyncio.run(run())


async def heard(desk: Desk, mover: Mover, count: int) -> Rebalance:
    """The newest act, once so many were heard and its answer was told."""
    await desk.until(lambda: len(mover.heard) >= count and not desk.app.screen.ui.asked, f"{count} acts")
    await desk.rounds(1)
    return mover.heard[-1]


def test_plan_apply_progress_done_and_back():
    mover = Mover()

    async def body(desk: Desk) -> None:
        assert "no plan" in desk.text()
        await desk.press("R")
        assert "[y]" not in desk.text("footer")
        assert (await heard(desk, mover, 1)).action == "plan"
        assert "plan 18, 0.0 s old" in desk.text()
        assert "skew   now" in desk.text() and "pays   back after" in desk.text() and "risk   low" in desk.text()
        await desk.press("A")
        slots = mover.part.plan.moved_slots
        assert f"Apply plan 18 to decode/0 main ({slots} slots)?" in desk.text("footer")
        await desk.press("enter", "enter")
        assert len(mover.heard) == 1 and "Apply plan 18" in desk.text("footer")
        await desk.press("y")
        apply = await heard(desk, mover, 2)
        assert (apply.action, apply.plan, apply.pool, apply.group, apply.part) == ("apply", 18, "decode", 0, "main")
        assert (apply.user, apply.host) == desk.app.who()
        mover.copy(3)
        await desk.rounds(1, seconds=1.0)
        assert f"3 of {slots} slots" in desk.text() and "token p99" in desk.text()
        assert "is being carried out" in desk.text() and " now running " in desk.text()
        await desk.press("A")
        assert "already" in desk.text("footer") and len(mover.heard) == 2
        mover.end()
        await desk.rounds(1, seconds=1.0)
        assert "97%" in desk.text() and "state idle" in desk.text() and "no plan" in desk.text()
        await desk.press("U", "y")
        assert (await heard(desk, mover, 3)).action == "rollback"
        mover.end("rolled_back")
        await desk.rounds(1, seconds=1.0)
        assert any("19" in text and "rolled back" in text and "97%" in text for text in desk.lines())
        assert any(event.name == "console.act" and "plan 18 begins" in event.text for event in desk.app.view.events)

    on_balance(mover, body)


@pytest.mark.parametrize(
    "key, before, action, words",
    [
        ("A", {}, "apply", "Apply plan 18"),
        ("U", {}, "rollback", "back to the placement"),
        ("P", {"state": "moving", "total_slots": 9}, "pause", "Pause the moves"),
        ("P", {"state": "paused", "total_slots": 9}, "resume", "go on?"),
        ("X", {"state": "moving", "total_slots": 9}, "abort", "Give up the moves"),
        ("a", {}, "mode", "Mode auto for decode/0 main (now manual)"),
    ],
)
def test_an_act_is_done_after_y_and_after_nothing_else(key, before, action, words):
    mover = Mover(has_plan=True, **before)

    async def body(desk: Desk) -> None:
        for leave in ("n", "escape", "N"):
            await desk.press(key)
            asked = desk.text("footer")
            assert words in asked or action == "mode", asked
            await desk.press("enter", "space", "j", key, leave)
            assert "not done" in desk.text("footer")
        assert not mover.heard
        desk.app.screen.ui.offer = 0
        await desk.press(key, "y")
        act = await heard(desk, mover, 1)
        assert act.action == action and act.mode == ("auto" if action == "mode" else "")
        assert len(mover.heard) == 1

    on_balance(mover, body)


def test_a_risky_plan_wants_the_name_of_the_pool():
    mover = Mover(has_plan=True)
    mover.scene.set_rank(20, age_ms=9000)

    async def body(desk: Desk) -> None:
        assert "d20 was silent for 9 s" in desk.text()
        await desk.press("A")
        assert "d20 was silent" in desk.text("footer") and "type decode" in desk.text("footer")
        await desk.press("y", "enter", "y")  # typed into the field, so it is a wrong name
        assert not mover.heard
        await desk.press("ctrl+u")
        await desk.type("prefill")
        await desk.press("enter", "y")
        assert not mover.heard and "type decode" in desk.text("footer")
        await desk.press("ctrl+u")
        await desk.type("decode")
        await desk.press("enter", "enter")
        assert not mover.heard and "[y] yes" in desk.text("footer")
        await desk.press("escape")
        assert not mover.heard
        await desk.press("A")
        await desk.type("decode")
        await desk.press("enter", "y")
        assert (await heard(desk, mover, 1)).action == "apply"

    on_balance(mover, body)


def test_the_reason_goes_along_and_is_used_once():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        await desk.press(":")
        await desk.type("why new domain")
        await desk.press("enter", "A")
        assert "new domain" in desk.text("footer")
        await desk.press("y")
        assert (await heard(desk, mover, 1)).reason == "new domain"
        await desk.press("P", "y")
        assert (await heard(desk, mover, 2)).reason == ""

    on_balance(mover, body)


def test_a_plan_that_is_too_old_is_not_asked_about_and_is_made_anew():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        mover.set(plan=msgspec.structs.replace(mover.part.plan, age_ms=75_000))
        await desk.rounds(1)
        assert "too old to be applied" in desk.text()
        await desk.press("A")
        assert "plans are good for 60 s: R makes it anew" in desk.text("footer")
        await desk.press("y")
        assert not mover.heard
        await desk.press("R")
        await heard(desk, mover, 1)
        assert "plan 18, 0.0 s old" in desk.text() and "good for" in desk.text()

    on_balance(mover, body)


def test_a_refusal_stays_beside_its_plan_until_there_is_another():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        mover.refusal = "the placement has changed since plan 18 was made: plan anew"
        await desk.press("A", "y")
        await heard(desk, mover, 1)
        assert "refused: the placement has changed" in desk.text("footer")
        await desk.press("down")
        assert "apply refused: the placement has changed" in desk.text()
        mover.refusal, mover.plans = "", 18
        await desk.press("R")
        await heard(desk, mover, 2)
        assert "plan 19" in desk.text() and "refused" not in desk.text()

    on_balance(mover, body)


def test_a_plan_that_takes_long_does_not_hold_up_the_screen():
    mover = Mover()
    mover.scene.holds_acts = True

    async def body(desk: Desk) -> None:
        await desk.press("R")
        await desk.until(lambda: bool(desk.head.acts), "asked")
        await desk.rounds(2, seconds=1.5)
        assert "a plan is being made, 3 s ago" in desk.text()
        await desk.press("R")
        assert "still due" in desk.text("footer") and len(desk.head.acts) == 1
        await desk.press("1", "6", "down")
        assert "6 Balance" in desk.text()
        desk.head.release_acts()
        await heard(desk, mover, 1)
        assert "plan 18" in desk.text() and "is being made" not in desk.text()

    on_balance(mover, body)


def test_no_answer_at_all_is_told_as_not_known():
    mover = Mover(has_plan=True)
    mover.scene.holds_acts = True

    async def body(desk: Desk) -> None:
        await desk.press("A", "y")
        await desk.until(lambda: bool(desk.head.acts), "asked")
        await desk.head.stop()
        await desk.until(lambda: not desk.app.screen.ui.asked, "given up")
        said = desk.app.screen.ui.said[("decode", 0, "main")]
        assert said.is_refused and "not known" in said.text

    on_balance(mover, body)


def test_keys_that_only_look():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        ui = desk.app.screen.ui
        assert "worst: d17, layer 4, expert 23" in desk.lines()[2]
        await desk.press("down", "down")
        assert ui.row == 2
        await desk.press("enter")
        assert "plan 16" in desk.text() and "88% of the predicted drop" in desk.text()
        await desk.press("backspace", "g")
        assert ui.row == 0 and "┌ plan 18" in desk.text()
        await desk.press("G")
        assert ui.row == 4
        await desk.press("home", "enter")
        await desk.rounds(1)
        assert "fullest rank" in desk.text() and "→ d17 +" in desk.text()
        asked = [ask.layer for ask in desk.head.asked if isinstance(ask, AskHeat)]
        await desk.press("]", "right", "[")
        await desk.rounds(1)
        assert (
            ui.find_layer(mover.part)
            == SMALL.hot_layer + 1
            == next(ask.layer for ask in reversed(desk.head.asked) if isinstance(ask, AskHeat))
            != asked[-1]
        )
        await desk.press("left", "escape")
        assert "┌ plan 18" in desk.text()
        await desk.press("p")
        assert ui.aim == ("decode", 0, "draft") and "nothing was moved yet" in desk.text()
        await desk.press("p", "tab", ".", ",")
        assert ui.aim == ("decode", 0, "main")  # it is the only group
        await desk.press("y")
        assert "copied cell: plan 18" in desk.text("footer")
        await desk.press("down", "Y")
        assert '"result": "applied"' in desk.text("footer") and not mover.heard

    on_balance(mover, body)


def test_coming_back_finds_the_worst_part_unless_one_was_chosen():
    mover = Mover(has_plan=True)
    part, draft = mover.part, mover.scene.part("decode", 0, "draft")

    async def body(desk: Desk) -> None:
        ui = desk.app.screen.ui
        assert ui.aim == ("decode", 0, "main")
        even = msgspec.structs.replace(part.skew, max_over_mean=1.02)
        mover.scene.experts = ExpertsReport((msgspec.structs.replace(part, skew=even), draft))
        await desk.rounds(1)
        assert ui.aim == ("decode", 0, "main")  # an act must not change its aim under the hand
        await desk.press("1", "6")
        assert ui.aim == ("decode", 0, "draft")
        await desk.press("p", "1", "6")
        assert ui.aim == ("decode", 0, "main")

    on_balance(mover, body)


def test_a_click_chooses_a_line_of_the_history():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        lines = desk.lines()
        y = next(n for n, text in enumerate(lines) if "rolled back" in text)
        await desk.pilot.click("#body", offset=(10, y))
        assert desk.app.screen.ui.row == 3
        await desk.pilot.click("#body", offset=(10, 5))
        assert desk.app.screen.ui.row == 0

    on_balance(mover, body)


def test_mode_offers_another_one_each_time():
    mover = Mover(mode="off")

    async def body(desk: Desk) -> None:
        for mode in ("manual", "auto", "manual"):
            await desk.press("a")
            assert f"Mode {mode} for" in desk.text("footer")
            await desk.press("n")
        await desk.press("a", "y")
        assert (await heard(desk, mover, 1)).mode == "auto"
        assert "mode auto, next check in 18 s" in desk.text()

    on_balance(mover, body)


def test_a_link_that_only_reads_has_no_keys_that_change():
    mover = Mover(has_plan=True, state="moving", total_slots=4)

    async def body(desk: Desk) -> None:
        await desk.press("R", "A", "U", "P", "X", "a", "y", "y")
        assert not desk.head.acts
        for word in ("plan", "apply", "back", "pause", "abort", "mode"):
            assert f" {word} " not in desk.text("footer").partition("│")[2]
        await desk.press("?")
        assert "Carry the plan out" not in desk.text("help") and "Main model or drafter" in desk.text("help")

    on_balance(mover, body, read_only=True)


def test_keys_for_what_runs_are_there_only_while_something_runs():
    mover = Mover(has_plan=True)

    async def body(desk: Desk) -> None:
        assert "abort" not in desk.text("footer")
        await desk.press("X", "P")
        assert "[y]" not in desk.text("footer")
        mover.set(state="moving", total_slots=4)
        await desk.rounds(1)
        assert "P pause" in desk.text("footer")

    on_balance(mover, body)
