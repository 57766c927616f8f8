"""The walk at 80x24, within three keys from the start; and pictures of screens 3 and 6.

Which rank is slow, in which layer, by which expert, and what that costs in a step: `docs/console.md` shows them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.console import expertdata as made
from tests.console.expertscene import Mover
from tests.console.picture import check_picture
from tests.console.stubhead import Desk, open_console


def run(mover: Mover, body: Callable[[Desk], Awaitable[None]], **options: object) -> None:
    async def steps() -> None:
        async with open_console(mover.scene, **options) as desk:
            await body(desk)

    asyncio.run(steps())


def test_the_walk():
    rack = made.Rack()
    mover = Mover(rack)
    skew = mover.experts["main"].skew()

    async def body(desk: Desk) -> None:
        # No key: the verdict stands over every screen.
        verdict = desk.lines("header")[1]
        assert f"decode skew {skew.max_over_mean:.2f} costs {skew.lost_us_per_step:.0f} us a step" in verdict
        assert "d17, layer 41, expert 203" in verdict
        check_picture(desk, "walk-0-start-80x24")
        # First key: where it is, with the cost of this one cell.
        await desk.press("3")
        await desk.rounds(1)
        said = " ".join(desk.lines()[-2:])
        cost = skew.imbalance * made.ROWS_PER_STEP * made.US_PER_ROW
        assert "d17 layer 41, hottest expert 203: " in said and f"costs {cost:.0f} us a step" in said
        check_picture(desk, "walk-1-experts-80x24")
        # Second key: the expert itself, its slot, its replicas.
        await desk.press("enter")
        assert "expert 203 (1 replica: d17)" in " ".join(desk.lines()[-2:])
        check_picture(desk, "walk-2-slots-80x24")
        # Third key: what can be done about it.
        await desk.press("6")
        await desk.rounds(1)
        assert "d17, layer 41, expert 203" in desk.lines()[2]
        await desk.press("R")
        await desk.until(lambda: bool(mover.heard) and not desk.app.screen.ui.asked, "a plan")
        await desk.rounds(1)
        assert "plan 18" in desk.text() and "saves" in desk.text()
        check_picture(desk, "walk-3-plan-80x24")

    run(mover, body)


PICTURES = {
    "experts-120x40-dark": ("experts", (120, 40), "dark", ()),
    "experts-120x40-light": ("experts", (120, 40), "light", ()),
    "experts-80x24-mono": ("experts", (80, 24), "mono", ()),
    "experts-200x60-dark": ("experts", (200, 60), "dark", ("o", "o")),
    "experts-slots-120x40-dark": ("experts", (120, 40), "dark", ("o", "b")),
    "balance-120x40-dark": ("balance", (120, 40), "dark", ()),
    "balance-80x24-light": ("balance", (80, 24), "light", ()),
    "balance-80x24-mono": ("balance", (80, 24), "mono", ("down",)),
    "balance-200x60-dark": ("balance", (200, 60), "dark", ("enter",)),
    "balance-apply-80x24-dark": ("balance", (80, 24), "dark", ("A",)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    screen, size, theme, keys = PICTURES[name]

    async def body(desk: Desk) -> None:
        await desk.press(*keys)
        check_picture(desk, name)

    run(Mover(made.Rack(), has_plan=True), body, screen=screen, size=size, theme=theme)


def test_pictures_of_a_move_and_of_a_risky_plan():
    mover = Mover(made.Rack(), has_plan=True)

    async def body(desk: Desk) -> None:
        mover.set(
            state="moving", copied_slots=25, total_slots=63, done_text="plan 18 of ops@head is being carried out",
            mode="auto", next_check_ms=18_000,
        )  # fmt: skip
        await desk.rounds(1)
        check_picture(desk, "balance-moving-80x24-dark")
        mover.set(state="idle", copied_slots=0, total_slots=0)
        mover.scene.set_rank(20, age_ms=9000)
        await desk.rounds(1)
        await desk.press("A")
        await desk.type("deco")
        check_picture(desk, "balance-risky-80x24-dark")

    run(mover, body, screen="balance")
