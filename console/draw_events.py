"""Screen 7: what the head has told, newest at the bottom, and one event in full. Pure."""

from __future__ import annotations

import dataclasses
import re

from console.filters import Field, Filter, compile_filter
from console.lines import Line, clip, fit_text, join, joined, line, pad, text_width, wrap
from console.marks import level_mark
from console.view import ClusterView
from console.words import age, clock, plural
from transport.messages import HeadEvent

LEVELS = ("info", "warning", "error")
PANE_ROWS = 10
"""Lines of the detail at most."""
FIELDS: tuple[Field[HeadEvent], ...] = (
    Field("name", "text", lambda event: event.name),
    Field("text", "text", lambda event: event.text),
    Field("level", "text", lambda event: event.level),
    Field("seq", "number", lambda event: float(event.seq)),
)


@dataclasses.dataclass(slots=True)
class EventsState:
    """What is chosen on this screen.

    Attributes:
        filter: in force.
        level: the lowest that is shown, as its place in LEVELS.
        follows: the newest event is under the cursor, whatever comes.
        cursor: the event under the cursor when it does not follow.
        is_open: that event is shown in full.
        rows: what passes the filter, oldest first; `rows_of` says what it was made from.
    """

    filter: Filter[HeadEvent] = dataclasses.field(default_factory=lambda: compile_filter("", FIELDS))
    level: int = 0
    follows: bool = True
    cursor: HeadEvent | None = None
    is_open: bool = False
    top: int = 0
    rows: list[HeadEvent] = dataclasses.field(default_factory=list)
    rows_of: tuple[object, ...] = ()

    def refresh(self, view: ClusterView) -> None:
        """Brings `rows` up to date; nothing is done while nothing has happened."""
        events = view.events
        ends = (events[0], events[-1]) if events else ()
        made_of = (*ends, len(events), self.filter, self.level)
        if made_of == self.rows_of:
            return
        self.rows_of = made_of
        allowed = LEVELS[self.level :]
        self.rows = [event for event in view.events if event.level in allowed and self.filter.matches(event)]

    def at(self) -> int:
        """The row under the cursor; the newest one if its event is no longer there. -1 without rows."""
        if not self.follows and self.cursor is not None:
            for n in range(len(self.rows) - 1, -1, -1):
                if self.rows[n] is self.cursor:
                    return n
            # What is under the cursor has left the list (a filter, or too many since): the nearest in time.
            for n, event in enumerate(self.rows):
                if event.at_ms >= self.cursor.at_ms:
                    return n
        return len(self.rows) - 1

    def go(self, row: int) -> None:
        """Puts the cursor on a row; on the last one it follows again."""
        if not self.rows:
            return
        row = max(0, min(row, len(self.rows) - 1))
        self.cursor = self.rows[row]
        self.follows = row == len(self.rows) - 1

    @property
    def current(self) -> HeadEvent | None:
        at = self.at()
        return self.rows[at] if at >= 0 else None


def build(view: ClusterView, ui: EventsState, width: int, height: int, now: float, wall_ms: int) -> list[Line]:
    """At most `height` lines. `wall_ms`: the time of day, for how long ago something was."""
    ui.refresh(view)
    current = ui.current
    pane = _detail(current, width, wall_ms)[: min(PANE_ROWS, height // 2)] if ui.is_open and current else []
    room = height - 1 - len(pane)
    lines = [_title(view, ui, width)]
    at = ui.at()
    ui.top = max(0, min(max(min(ui.top, at), at - room + 1), len(ui.rows) - room))
    for n, event in enumerate(ui.rows[ui.top : ui.top + room], ui.top):
        lines.append(_event(event, width, is_current=n == at))
    if not ui.rows:
        said = "no event passes the filter" if view.events else "nothing has happened yet"
        lines.append(line((f" {said}", "dim")))
    lines += [()] * (height - len(pane) - len(lines))
    return [*lines, *pane][:height]


def _title(view: ClusterView, ui: EventsState, width: int) -> Line:
    runs = [(" Events  ", "title"), (plural(len(ui.rows), "event"), "value")]
    if len(ui.rows) != len(view.events):
        runs.append((f" of {len(view.events):,}", "dim"))
    if ui.filter.text:
        runs += [("  filter: ", "dim"), (ui.filter.text, "match")]
    if ui.level:
        runs += [("  level: ", "dim"), (f"{LEVELS[ui.level]} up", "warn")]
    if view.lost_events:
        runs.append((f"  {view.lost_events:,} not heard", "warn"))
    state = "follows" if ui.follows else "stays"
    return join(joined(runs), ((f"{state} ", "good" if ui.follows else "dim"),), width)


def _event(event: HeadEvent, width: int, *, is_current: bool) -> Line:
    mark = level_mark(event.level)
    quiet = event.level == "info"
    name = 26 if width >= 120 else 18
    runs = line(
        (f" {clock(event.at_ms)} ", "dim"),
        (f"{mark.glyph} ", mark.style),
        (fit_text(event.name, name) + " ", "value"),
        (event.text, "" if quiet else mark.style),
    )
    runs = clip(runs, width)
    if not is_current:
        return runs
    return joined((text, f"{style} cursor".strip()) for text, style in pad(runs, width))


_PAIR = re.compile(r'([\w.]+)=("(?:[^"\\]|\\.)*"|\S+)')


def event_fields(event: HeadEvent) -> list[tuple[str, str]]:
    """The `name=value` pairs of an event's text, and under "" what is none of them."""
    pairs = [(found[1], found[2].strip('"')) for found in _PAIR.finditer(event.text)]
    rest = " ".join(_PAIR.sub("", event.text).split())
    return [("", rest), *pairs] if rest else pairs


def _detail(event: HeadEvent, width: int, wall_ms: int) -> list[Line]:
    mark = level_mark(event.level)
    number = f"  number {event.seq}" if event.seq else "  this console's own"
    ago = age((wall_ms - event.at_ms) / 1000)
    lines: list[Line] = [
        line((f"── {event.name} ", "head"), ("─" * max(0, width - text_width(event.name) - 4), "rule")),
        clip(
            line((f" {mark.glyph} {event.level}", mark.style), f"  {clock(event.at_ms)}, {ago} ago", (number, "dim")),
            width,
        ),
    ]
    for name, value in event_fields(event):
        parts = wrap(value, max(10, width - 18))
        for n, part in enumerate(parts):
            label = name if not n else ""
            lines.append(line((f" {label:<14} ", "label"), part) if name else line(" ", part))
    return lines
