"""Two sizes under way at a time: the screen comes to rest at the terminal's."""

from __future__ import annotations

import asyncio

import pytest
from textual.events import Resize
from textual.geometry import Size

from tests.console.stubhead import open_console


@pytest.mark.parametrize("keys", [(), ("?",)], ids=["a live screen", "help"])
def test_sizes_that_cross_come_to_rest(keys: tuple[str, ...]) -> None:
    async def body() -> None:
        async with open_console(screen="ranks") as desk:
            await desk.press(*keys)
            screen, present = desk.app.screen, desk.app.size
            heard: list[Size] = []
            taken = screen._refresh_layout

            def refresh(size: Size | None = None, scroll: bool = False) -> None:
                heard.append(size or present)
                assert len(heard) < 50, "sizes follow each other"  # which would take all of the loop's time
                taken(size, scroll)

            screen._refresh_layout = refresh  # type: ignore[method-assign]
            for size in (Size(40, 12), present, Size(100, 30), present):
                screen.post_message(Resize(size, size))
                screen.call_later(lambda: None)  # of sizes next to each other only the last would be taken
            await asyncio.sleep(0.5)
            assert set(heard) == {present} and screen.size == present

    asyncio.run(body())
