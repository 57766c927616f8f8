"""Reporter: what a batch says to people on stderr: a status line, notes, and the summary.

Stdout carries data only. A stderr that nobody reads any more ends the talking and nothing else.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, TextIO

import msgspec
from rich.cells import set_cell_size

LINE_EVERY_S = 10.0
TERMINAL_EVERY_S = 0.5
_CLEAR = "\r\x1b[K"
_NARROWEST = 80
"""Columns of a terminal that does not say."""


class Reporter:
    """Says things. `form` is `terminal` (one line, rewritten), `line` (a line now and then), `json` or `none`."""

    def __init__(self, progress: Literal["auto", "line", "json", "none"], stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.form: str = progress
        if progress == "auto":
            self.form = "terminal" if self._stream.isatty() else "line"
        self.every_s = TERMINAL_EVERY_S if self.form == "terminal" else LINE_EVERY_S
        self._broken = False

    def status(self, line: str, facts: dict[str, Any], *, asked: bool = False) -> None:
        """Shows the status; `asked`: somebody wants to see it now, whatever the form."""
        if self.form == "json":
            self._write(msgspec.json.encode(facts).decode() + "\n")
        elif self.form == "terminal" and not asked:
            # A line that wraps can not be rewritten: every update would leave one behind.
            self._write(_CLEAR + set_cell_size(line, self._width() - 1).rstrip())
        elif self.form == "line" or asked:
            self.note(line)

    def note(self, text: str) -> None:
        """Says a line, whichever form was chosen: notes are few and matter."""
        # On a terminal a status line may stand here, or the ^C that was typed.
        self._write((_CLEAR if self.form == "terminal" else "") + text + "\n")

    def summary(self, text: str, facts: dict[str, Any]) -> None:
        """The last word of a run."""
        if self.form == "json":
            self._write(msgspec.json.encode(facts).decode() + "\n")
        else:
            self.note(text)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _NARROWEST
        except (OSError, ValueError):
            return _NARROWEST

    def _write(self, text: str) -> None:
        if self._broken:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            # A terminal that does not know a character shows a question mark and not nothing.
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._broken = True
