"""The terminal's driver, which knows whether the terminal has taken all that was written to it.

Textual writes through a thread: `Driver.write` puts text into a queue of 30 places, the thread writes each text to its
file and flushes when the queue is empty. An empty queue is therefore not yet a drained one: the thread may hang in a
write to a slow terminal. What tells is the flush, which comes after the last write and returns when the system has
taken every byte. So the file counts characters that were flushed, the driver those that were queued, and both are equal
when nothing is under way. What the system itself buffers for a terminal is a few KiB.
"""

from __future__ import annotations

import asyncio
import sys
from typing import IO, cast

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver


class _CountedFile:
    """A text file that tells how many characters of it were flushed. `write` and `flush` are the thread's."""

    def __init__(self, file: IO[str], loop: asyncio.AbstractEventLoop, flushed: asyncio.Event) -> None:
        self._file = file
        self._loop = loop
        self._event = flushed
        self._written = 0
        self.flushed = 0

    def write(self, text: str) -> int:
        self._written += len(text)
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()
        self.flushed = self._written
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return True


class ConsoleDriver(LinuxDriver):
    """Textual's driver for a terminal at stdin and stdout, with `drained` and a switch for the mouse."""

    def __init__(
        self, app: App[object], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._flush_seen = asyncio.Event()
        self._counted = _CountedFile(cast(IO[str], sys.__stdout__), asyncio.get_running_loop(), self._flush_seen)
        self._file: IO[str] = cast(IO[str], self._counted)  # type: ignore[assignment]
        self._queued = 0

    def write(self, data: str) -> None:
        # Before the thread starts and after it ended Textual drops what is written.
        if self._writer_thread is not None and self._writer_thread.is_alive():
            self._queued += len(data)
        super().write(data)

    @property
    def is_drained(self) -> bool:
        return self._counted.flushed >= self._queued

    async def drained(self) -> None:
        """Returns when the terminal has taken everything; a stopped terminal (ctrl+s) keeps it waiting."""
        while not self.is_drained:
            self._flush_seen.clear()
            if self.is_drained:
                return
            await self._flush_seen.wait()

    def set_mouse(self, is_on: bool) -> None:
        """With the mouse off, the terminal's own selection and copying work."""
        if is_on:
            self._mouse = True
            self._enable_mouse_support()
        else:
            self._disable_mouse_support()
            self._mouse = False
