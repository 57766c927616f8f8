"""Screen 7, Events: what happened, as the head told it and as this console noticed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from console.draw_events import FIELDS, LEVELS, EventsState, build
from console.export import message_json
from console.filters import FilterError, compile_filter
from console.keys import Key
from console.lines import Line
from console.screens.base import LiveScreen


class EventsScreen(LiveScreen):
    """What happened."""

    NAME = "events"
    NUMBER = 7
    TITLE_TEXT = "Events"
    FEATURES = frozenset({"move", "filter", "detail", "copy"})
    KEYS = (
        Key(("l",), "level", "level", "Show all, warnings and errors, or errors only"),
        Key(("f",), "follow", "follow", "Keep the newest event in sight, or stay where the cursor is"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.ui = EventsState()

    def build(self, width: int, height: int, now: float) -> list[Line]:
        return build(self.view, self.ui, width, height, now, self.desk.wall_ms())

    def move(self, rows: int) -> None:
        self.ui.go(self.ui.at() + rows)

    def jump(self, end: int) -> None:
        self.ui.go(0 if end < 0 else len(self.ui.rows) - 1)

    def set_filter(self, text: str) -> str:
        try:
            self.ui.filter = compile_filter(text, FIELDS)
        except FilterError as error:
            return str(error)
        return ""

    def get_filter(self) -> str:
        return self.ui.filter.text

    def open_detail(self) -> None:
        self.ui.is_open = not self.ui.is_open

    def close(self) -> bool:
        was_open, self.ui.is_open = self.ui.is_open, False
        return was_open

    def cell(self) -> str:
        event = self.ui.current
        return f"{event.name} {event.text}" if event else ""

    def row(self) -> object:
        return message_json(self.ui.current) if self.ui.current else None

    def export(self) -> object:
        return message_json(self.ui.rows)

    def click(self, x: int, y: int) -> None:
        if y > 0:
            self.ui.go(self.ui.top + y - 1)

    def commands(self) -> Mapping[str, tuple[str, Callable[[str], str]]]:
        return {"level": (f"lowest level: {', '.join(LEVELS)}", self._command_level)}

    def _command_level(self, rest: str) -> str:
        if rest not in LEVELS:
            return f"levels: {', '.join(LEVELS)}"
        self.ui.level = LEVELS.index(rest)
        return ""

    def action_level(self) -> None:
        self.ui.level = (self.ui.level + 1) % len(LEVELS)
        self.paint()

    def action_follow(self) -> None:
        ui = self.ui
        if ui.follows:
            ui.cursor, ui.follows = ui.current, False
        else:
            ui.follows = True
        self.paint()
