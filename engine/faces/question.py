"""Questions that a person answers at a terminal, and progress on one line of it. All on stderr: stdout is data."""

from __future__ import annotations

import sys
import time

import click

PROGRESS_S = 5.0
"""Between two lines of progress where stderr is no terminal."""


def can_ask() -> bool:
    """Whether somebody sees a question and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_yes(question: str) -> bool:
    """Until y or n is typed; Enter alone does nothing, the end of input is a no."""
    while True:
        click.echo(f"{question}  [y] yes  [n] no: ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or line.strip().lower() in ("n", "no"):
            return False
        if line.strip().lower() in ("y", "yes"):
            return True


def ask_name(question: str, name: str) -> bool:
    """Until the name is typed, or n; Enter alone does nothing, the end of input is a no."""
    while True:
        click.echo(f"{question}  Type {name} to do it, n to leave: ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or line.strip().lower() in ("n", "no"):
            return False
        if line.strip() == name:
            return True


class Progress:
    """One line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._next = 0.0
        self._width = 0

    def tell(self, words: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{words:<{self._width}}", nl=False, err=True)
            self._width = len(words)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            click.echo(words, err=True)

    def end(self) -> None:
        if self._width:
            click.echo(err=True)
