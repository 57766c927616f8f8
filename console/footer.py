"""The bottom of a screen: the keys that work now, or what is being typed or asked, or what became of the last act."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from textual import events
from textual.message import Message as TextualMessage

from console.confirm import Asking, Question
from console.entry import Entry
from console.keys import Key
from console.linegrid import LineView
from console.lines import Line, Run, join, joined, line, text_width, width_of, wrap
from console.marks import Theme, level_mark


@dataclasses.dataclass(frozen=True, slots=True)
class Tab:
    """One screen in the list of screens."""

    number: int
    title: str
    is_shown: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A sentence that stands in the footer until the next key: the end of an act, a copied cell."""

    text: str
    level: str = "info"


WIDE = 120
"""From here on all screens are named."""


def draw_footer(tabs: Sequence[Tab], keys: Sequence[Key], width: int) -> Line:
    """Screens, then as many keys as fit, the first ones first; `? keys` is always there."""
    runs: list[Run] = [(" ", "")]
    if width >= WIDE:
        for tab in tabs:
            style = "chosen" if tab.is_shown else "dim"
            runs += [(f"{tab.number}", "key"), (f" {tab.title}", style), (" ", "")]
    else:
        here = next((tab for tab in tabs if tab.is_shown), None)
        if tabs:
            runs += [(f"{tabs[0].number}-{tabs[-1].number}", "key"), (" screens ", "dim")]
        if here:
            runs += [(f"{here.number} {here.title}", "chosen"), (" ", "")]
    runs.append(("│", "rule"))
    more: Line = (("?", "key"), (" keys ", "dim"))
    room = width - width_of(tuple(runs)) - width_of(more) - 1
    for key in keys:
        if not key.word or "?" in key.keys:
            continue
        size = text_width(key.shown_as) + text_width(key.word) + 2
        if size + 1 > room:
            continue
        room -= size + 1
        runs += [(" ", ""), (key.shown_as, "warn" if key.changes else "key"), (f" {key.word} ", "dim")]
    return join(joined(runs), more, width)


def draw_note(note: Note, width: int) -> list[Line]:
    """At most three lines: what a head says about an act may be long."""
    mark = level_mark(note.level)
    parts = wrap(note.text, max(10, width - 4))[:3]
    return [line((f" {mark.glyph} " if not n else "   ", mark.style), (part, "")) for n, part in enumerate(parts)]


class Footer(LineView):
    """The bottom line, or lines. While something is typed or asked, every key is its own (`ConsoleApp.on_event`)."""

    can_focus = False

    def __init__(self, theme: Theme) -> None:
        super().__init__(id="footer", theme=theme)
        self.asking: Asking | None = None
        self.entry: Entry | None = None
        self._on_answer: Callable[[Question, bool], None] | None = None
        self._on_entry: Callable[[Entry, str], None] | None = None
        self._rows = 1
        self.note: Note | None = None

    @property
    def is_busy(self) -> bool:
        """Something is typed or asked."""
        return self.asking is not None or self.entry is not None

    def ask(self, question: Question, why: str, on_answer: Callable[[Question, bool], None]) -> None:
        """Asks; `on_answer` gets True for yes."""
        self.asking, self.entry, self._on_answer = Asking(question, why), None, on_answer
        self._grab()

    def open_entry(self, entry: Entry, on_entry: Callable[[Entry, str], None]) -> None:
        """Lets a line be typed; `on_entry` hears of every change, of the end and of Esc (`changed`, `done`, `left`).
        It stays open after `done` if the entry then has an error."""
        self.asking, self.entry, self._on_entry = None, entry, on_entry
        self._grab()

    def leave(self) -> None:
        """Ends what is typed or asked, without an answer."""
        self.asking = self.entry = None
        self.can_focus = False
        if self.has_focus:
            self.screen.set_focus(None)

    def show(self, idle: Line) -> None:
        """Draws: a question, an entry, a note, or `idle`."""
        width = self.size.width or self.app.size.width
        if self.asking is not None:
            lines = self.asking.draw(width)
        elif self.entry is not None:
            lines = [self.entry.draw(width)]
        elif self.note is not None:
            lines = draw_note(self.note, width)
        else:
            lines = [idle]
        if len(lines) != self._rows:
            self._rows = len(lines)
            self.styles.height = self._rows
        self.set_lines(lines)

    def _grab(self) -> None:
        self.note = None
        self.can_focus = True
        self.focus()

    def take(self, event: events.Key) -> None:
        """A key, while something is typed or asked."""
        if self.asking is not None:
            outcome = self.asking.press(event.key, event.character)
            if outcome != "open" and self._on_answer is not None:
                question = self.asking.question
                self.leave()
                self._on_answer(question, outcome == "yes")
        elif self.entry is not None:
            entry = self.entry
            said = entry.press(event.key, event.character)
            if said != "open" and self._on_entry is not None:
                self._on_entry(entry, said)
                # The entry may have led to something else that is asked by now.
                if self.entry is entry and (said == "left" or (said == "done" and not entry.error)):
                    self.leave()
        self.post_message(Typed())

    def on_paste(self, event: events.Paste) -> None:
        if self.entry is None:
            return
        event.stop()
        self.entry.put(event.text)
        if self._on_entry is not None:
            self._on_entry(self.entry, "changed")
        self.post_message(Typed())


class Typed(TextualMessage):
    """A key went into the footer: it has to be drawn again."""
