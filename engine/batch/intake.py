"""Intake: reads and prepares the input's lines, as fast as they are taken and no faster.

All reading, parsing and tokenising happens in a worker thread, one slice of lines at a time; between two slices the
loop decides whether there is room for more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import trio

from engine.batch.files import InputFile, copy_some, open_spool
from engine.batch.job import Refusal
from engine.batch.lines import LineReader
from engine.batch.prepare import Preparer, Slice

SLICE_LINES = 64
"""Lines that are prepared in one go: some ten milliseconds for ordinary prompts."""
SLICE_BYTES = 1 << 20
_COUNT_LINES = 8192
_COUNT_BYTES = 16 << 20


class Intake:
    """The input of one run.

    Args:
        source: the input.
        make_preparer: gives a fresh Preparer.

    Attributes:
        places: lines prepared so far that get a record.
        all_read: the input is at its end.
    """

    def __init__(self, source: InputFile, make_preparer: Callable[[], Preparer]) -> None:
        self.places = 0
        self.all_read = False
        self._source = source
        self._make_preparer = make_preparer
        self._preparer = make_preparer()
        self._reader = LineReader(source.fd)

    async def read(self, max_lines: int) -> Slice:
        """The next lines, at most `max_lines`; empty only at the end. Cancelled, it leaves a thread behind that may be
        waiting for input, and must not be called again.

        Raises:
            InputChanged: see `Preparer`.
            OSError: the input can not be read.
        """
        slice_ = await trio.to_thread.run_sync(
            lambda: self._preparer.prepare(self._reader.read(min(max_lines, SLICE_LINES), SLICE_BYTES)),
            abandon_on_cancel=True,
        )
        self.places += len(slice_.items)
        self.all_read = self._reader.ended
        return slice_

    def expire(self) -> None:
        """From now on lines are refused as `batch_expired`."""
        self._preparer.expired = True

    @property
    def may_not_end(self) -> bool:
        """Whether the input is a pipe or a terminal."""
        return not self._source.regular

    async def check_all(self, refused: Callable[[Refusal], None]) -> None:
        """Reads the whole input once without keeping it, tells of every refusal, and goes back to its start."""
        if not self._source.regular:
            await self._spool()
        while not self.all_read:
            for item in (await self.read(SLICE_LINES)).items:
                if isinstance(item, Refusal):
                    refused(item)
        self._source.rewind()
        self._reader = LineReader(self._source.fd)
        self._preparer = self._make_preparer()
        self.places = 0
        self.all_read = False

    async def _spool(self) -> None:
        spool = open_spool()  # lives as long as the process: a thread that was left behind may still write to it
        while await trio.to_thread.run_sync(copy_some, self._source.fd, spool, abandon_on_cancel=True):
            pass
        self._source.fd, self._source.regular, self._source.start = spool, True, 0
        self._source.rewind()
        self._reader = LineReader(spool)

    async def count_lines(self) -> int | None:
        """How many lines the input has, blank ones left out; None if that can not be known before its end."""
        if self._source.path is None:
            return None
        with contextlib.ExitStack() as closing:
            fd = os.open(self._source.path, os.O_RDONLY | os.O_CLOEXEC)
            closing.callback(os.close, fd)
            reader = LineReader(fd)
            total = 0
            while not reader.ended:
                total += len(await trio.to_thread.run_sync(reader.read, _COUNT_LINES, _COUNT_BYTES))
        return total
