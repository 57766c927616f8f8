"""A terminal as a program sees it: what it writes, put on a screen of cells, and the modes that it has left on.

It knows what the console writes and nothing else: a sequence that it does not know is an error, so that a new one is
looked at before it reaches people's terminals. Colours are taken and forgotten.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

_SEQUENCE = re.compile(
    r"\x1b(?:\[(?P<private>[?<>=]?)(?P<numbers>[0-9;:]*)(?P<between>[ -/]*)(?P<final>[@-~])"
    r"|\](?P<text>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|(?P<single>[=>78c]))"
)
_BEGUN = re.compile(r"\x1b(?:\[[?<>=]?[0-9;:]*[ -/]*|\][^\x07\x1b]*\x1b?)?\Z")
"""A sequence whose end has not come yet."""
ALTERNATE, CURSOR = 1049, 25
MOUSE = frozenset({1000, 1002, 1003, 1005, 1006, 1015})
OTHER = frozenset({7, 1004, 2004, 2026, 2048})
"""Wrapping, focus, paste, a picture at once, sizes in-band."""


class UnknownSequence(AssertionError):
    """The program wrote what this terminal does not know."""


class Emulator:
    """A screen of cells.

    Attributes:
        modes: private modes that are on; wrapping and the cursor are so at the start.
        kitty: depth of the stack of keyboard modes.
        titles: operating-system commands, by number: 52 is the clipboard.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.modes = {7, CURSOR}
        self.kitty = 0
        self.titles: dict[str, str] = {}
        self._rows = [[" "] * width for _ in range(height)]
        self._first = self._rows
        self._x = self._y = 0
        self._saved = (0, 0)
        self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self._rest = ""

    @property
    def is_plain(self) -> bool:
        """Nothing is left of a program that took the whole screen."""
        return self.modes == {7, CURSOR} and self.kitty == 0

    def resize(self, width: int, height: int) -> None:
        """As terminals do it: what is there stays, at the top left."""
        self._rows = self._fit(self._rows, width, height)
        self._first = self._rows if ALTERNATE not in self.modes else self._fit(self._first, width, height)
        self.width, self.height = width, height
        self._x, self._y = min(self._x, width - 1), min(self._y, height - 1)
        self._saved = (min(self._saved[0], width - 1), min(self._saved[1], height - 1))

    @staticmethod
    def _fit(rows: list[list[str]], width: int, height: int) -> list[list[str]]:
        rows = [row[:width] + [" "] * (width - len(row)) for row in rows[:height]]
        return rows + [[" "] * width for _ in range(height - len(rows))]

    def lines(self) -> list[str]:
        """The screen as text; a wide character counts once."""
        return ["".join(row) for row in self._rows]

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines())

    def feed(self, data: bytes) -> None:
        """What was written, in pieces of any length."""
        text = self._rest + self._decode(data)
        self._rest = ""
        at = 0
        while at < len(text):
            character = text[at]
            if character == "\x1b":
                found = _SEQUENCE.match(text, at)
                if found is None:
                    if _BEGUN.match(text, at):
                        self._rest = text[at:]
                        return
                    raise UnknownSequence(repr(text[at : at + 24]))
                self._obey(found)
                at = found.end()
                continue
            at += 1
            self._put(character)

    def _put(self, character: str) -> None:
        if character == "\r":
            self._x = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self._x = max(0, self._x - 1)
        elif character == "\x07":
            pass
        elif unicodedata.category(character) == "Cc":
            raise UnknownSequence(repr(character))
        elif unicodedata.combining(character) or character == "\ufe0f":
            pass
        else:
            wide = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if self._x + wide > self.width:
                if 7 in self.modes:
                    self._x = 0
                    self._down()
                else:
                    self._x = self.width - wide
            row = self._rows[self._y]
            row[self._x] = character
            if wide == 2:
                row[self._x + 1] = ""
            # Beyond the last cell: with wrapping the next character goes to the next line, without it stays here.
            self._x += wide

    def _down(self) -> None:
        self._y += 1
        if self._y == self.height:
            self._y -= 1
            del self._rows[0]
            self._rows.append([" "] * self.width)

    def _obey(self, found: re.Match[str]) -> None:
        if found["text"] is not None:
            number, _, rest = found["text"].partition(";")
            self.titles[number] = rest
            return
        if found["single"]:
            return
        numbers = [int(word or 0) for word in re.split("[;:]", found["numbers"])]
        final = found["final"]
        match found["private"], final:
            case "", "H":
                self._y = min(max(1, numbers[0]), self.height) - 1
                self._x = min(max(1, numbers[1] if len(numbers) > 1 else 1), self.width) - 1
            case "", "m":
                pass
            case "", ("A" | "B" | "C" | "D"):
                step = max(1, numbers[0])
                self._y = min(
                    max(0, self._y + (step if final == "B" else -step if final == "A" else 0)), self.height - 1
                )
                self._x = min(
                    max(0, self._x + (step if final == "C" else -step if final == "D" else 0)), self.width - 1
                )
            case "", "G":
                self._x = min(max(1, numbers[0]), self.width) - 1
            case "", "J":
                self._erase(numbers[0], whole=True)
            case "", "K":
                self._erase(numbers[0], whole=False)
            case "?", ("h" | "l"):
                for mode in numbers:
                    self._switch(mode, is_on=final == "h")
            case ("?", "p") | ("?", "u") | ("", "c") | (">", "c") | ("", "t"):
                pass  # questions; this terminal answers none
            case ">", "u":
                self.kitty += 1
            case "<", "u":
                self.kitty = max(0, self.kitty - max(1, numbers[0]))
            case _:
                raise UnknownSequence(repr(found[0]))

    def _switch(self, mode: int, *, is_on: bool) -> None:
        if mode not in MOUSE | OTHER | {ALTERNATE, CURSOR}:
            raise UnknownSequence(f"mode {mode}")
        if mode == ALTERNATE and is_on != (ALTERNATE in self.modes):
            if is_on:
                self._first, self._saved = self._rows, (self._x, self._y)
                self._rows = [[" "] * self.width for _ in range(self.height)]
            else:
                self._rows, (self._x, self._y) = self._first, self._saved
        (self.modes.add if is_on else self.modes.discard)(mode)

    def _erase(self, what: int, *, whole: bool) -> None:
        x, y = min(self._x, self.width - 1), self._y
        row = self._rows[y]
        start, end = {0: (x, self.width), 1: (0, x + 1)}.get(what, (0, self.width))
        row[start:end] = [" "] * (end - start)
        if whole:
            for other in range(self.height):
                if (what == 0 and other > y) or (what == 1 and other < y) or what >= 2:
                    self._rows[other] = [" "] * self.width
