"""A line of text that is being typed: a filter, a command. Pure: a small machine of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from console.lines import Line, join, line

LIMIT = 512
"""Characters; a reason for a change is the longest that is typed."""

EntryOutcome = Literal["open", "changed", "done", "left"]


@dataclasses.dataclass(slots=True)
class Entry:
    """What was typed so far.

    Attributes:
        prompt: before the text: `/`, `:`.
        words: what Tab completes to.
        error: said beside it until the text changes.
    """

    prompt: str
    text: str = ""
    words: Sequence[str] = ()
    error: str = ""
    at: int = -1
    """Where the next character goes; -1: the end."""

    def press(self, key: str, character: str | None) -> EntryOutcome:
        """One key: `done` for Enter, `left` for Esc, `changed` if the text is another one now."""
        at = len(self.text) if self.at < 0 else self.at
        before = self.text
        if key == "enter":
            return "done"
        if key in ("escape", "ctrl+c"):
            return "left"
        if key == "backspace":
            if not self.text:
                return "left"
            self.text, at = self.text[: max(0, at - 1)] + self.text[at:], max(0, at - 1)
        elif key == "delete":
            self.text = self.text[:at] + self.text[at + 1 :]
        elif key == "ctrl+u":
            self.text, at = self.text[at:], 0
        elif key == "ctrl+w":
            kept = self.text[:at].rstrip().rpartition(" ")
            start = len(kept[0]) + len(kept[1])
            self.text, at = self.text[:start] + self.text[at:], start
        elif key in ("left", "ctrl+b"):
            at = max(0, at - 1)
        elif key in ("right", "ctrl+f"):
            at = min(len(self.text), at + 1)
        elif key in ("home", "ctrl+a"):
            at = 0
        elif key in ("end", "ctrl+e"):
            at = len(self.text)
        elif key == "tab":
            self.text = complete(self.text, self.words)
            at = len(self.text)
        elif character and character.isprintable():
            self.put(character)
            at += len(character)
        at = min(at, len(self.text))
        self.at = -1 if at == len(self.text) else at
        if self.text == before:
            return "open"
        self.error = ""
        return "changed"

    def put(self, text: str) -> None:
        """Text at the cursor, as a paste brings it: one line of what can be printed."""
        at = len(self.text) if self.at < 0 else self.at
        clean = "".join(c for c in text.split("\n", 1)[0] if c.isprintable())[: LIMIT - len(self.text)]
        self.text = self.text[:at] + clean + self.text[at:]
        self.at = -1 if self.at < 0 else at + len(clean)

    def draw(self, width: int) -> Line:
        """The prompt, the text with its cursor, and at the right what is wrong or what Tab would give."""
        at = len(self.text) if self.at < 0 else self.at
        room = max(8, width - len(self.prompt) - 4)
        start = max(0, at - room + 1)  # the cursor is always to be seen
        shown = self.text[start : start + room]
        here = at - start
        right: Line = ((f" {self.error} ", "bad"),) if self.error else ()
        if not right and self.words and self.text and " " not in self.text:
            fits = [word for word in self.words if word.startswith(self.text)]
            right = ((" " + "  ".join(fits[:8]) + " ", "dim"),) if fits else ()
        cursor = shown[here] if here < len(shown) else " "
        left = line(
            (f" {self.prompt}", "key"),
            (shown[:here], "field"),
            (cursor, "field chosen"),
            (shown[here + 1 :], "field"),
        )
        return join(left, right, width)


def complete(text: str, words: Sequence[str]) -> str:
    """The longest beginning that all words have in common which begin with `text`; with a blank if it is one word."""
    fits = [word for word in words if word.startswith(text)]
    if not fits:
        return text
    if len(fits) == 1:
        return fits[0] + " "
    shortest = min(fits, key=len)
    for n in range(len(text), len(shortest) + 1):
        if any(word[:n] != shortest[:n] for word in fits):
            return shortest[: n - 1]
    return shortest
