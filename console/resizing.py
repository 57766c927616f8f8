"""SteadyScreen: a screen that takes no size but the terminal's present one."""

from __future__ import annotations

from typing import TypeVar

from textual.geometry import Size
from textual.screen import Screen

Result = TypeVar("Result")


class SteadyScreen(Screen[Result]):
    """Textual's screen tells itself each size that it takes. Two sizes under way at a time would follow each other for
    ever, since each is another one than the last; nothing else would be done any more."""

    def _screen_resized(self, size: Size) -> None:
        # Whatever is not up to date any more was followed by what is.
        if size == self.app.size:
            super()._screen_resized(size)
