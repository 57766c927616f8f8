"""RecordWriter: finished records on their way to the files, in the order that was asked for.

One task writes, in a thread, since a pipe may block; it also syncs once a second. What is not written yet is
`backlog` and what waits for its turn is `held`; whoever starts requests looks at both, so a slow reader of the output
slows the batch down instead of filling memory.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import trio

from engine.batch.output import RecordFile

SYNC_S = 1.0
_BATCH_RECORDS = 256
_BATCH_BYTES = 8 << 20


class RecordWriter:
    """Takes records by the place of their line.

    Args:
        output: for answers.
        errors: for error records, or None: they go into the output.
        ordered: the output has its records by place; places must be 0, 1, 2, ... without a gap in the end.
        written: called after each batch that was written; must not block.

    Attributes:
        next_place: the first place whose record has not come; stays 0 if the output is not ordered.
    """

    def __init__(
        self, output: RecordFile, errors: RecordFile | None, *, ordered: bool, written: Callable[[], None]
    ) -> None:
        self._output = output
        self._errors = errors
        self._ordered = ordered
        self._written = written
        self._queue: collections.deque[tuple[RecordFile, bytes]] = collections.deque()
        self._writing = 0
        self._held: dict[int, bytes] = {}
        self.next_place = 0
        self._work = trio.Event()

    @property
    def backlog(self) -> int:
        """Records that can be written and are not."""
        return len(self._queue) + self._writing

    @property
    def held(self) -> int:
        """Records that wait for one before them."""
        return len(self._held)

    def put_answer(self, place: int, record: bytes) -> None:
        """Takes the record of an answered line."""
        self._put(self._output, place, record)

    def put_error(self, place: int, record: bytes) -> None:
        """Takes an error record. In a file of its own it does not wait for its turn."""
        if self._errors is None:
            self._put(self._output, place, record)
        else:
            self._enqueue(self._errors, record)
            if self._ordered:
                self._put(self._output, place, b"")

    def release(self) -> None:
        """No record that is missing will come: what was held is written in its order, gaps left out."""
        for place in sorted(self._held):
            self._enqueue(self._output, self._held.pop(place))

    def _put(self, file: RecordFile, place: int, record: bytes) -> None:
        if not self._ordered:
            self._enqueue(file, record)
            return
        self._held[place] = record
        while self.next_place in self._held:
            self._enqueue(file, self._held.pop(self.next_place))
            self.next_place += 1

    def _enqueue(self, file: RecordFile, record: bytes) -> None:
        if record:
            self._queue.append((file, record))
            self._work.set()

    async def run(self) -> None:
        """Writes until cancelled. A write that blocks in its thread is left behind then.

        Raises:
            BrokenPipeError, OSError: see `RecordFile.write`.
        """
        synced_at = trio.current_time()
        while True:
            if self._queue:
                batch = self._take_batch()
                await trio.to_thread.run_sync(_write_batch, batch, abandon_on_cancel=True)
                self._writing = 0
                self._written()
            else:
                self._work = trio.Event()
                with trio.move_on_at(synced_at + SYNC_S):
                    await self._work.wait()
            if trio.current_time() >= synced_at + SYNC_S:
                await trio.to_thread.run_sync(self.sync, abandon_on_cancel=True)
                synced_at = trio.current_time()

    def sync(self) -> None:
        """Makes both files survive a crash of the machine. Blocks."""
        self._output.sync()
        if self._errors is not None:
            self._errors.sync()

    def _take_batch(self) -> list[tuple[RecordFile, bytes]]:
        batch: list[tuple[RecordFile, bytes]] = []
        size = 0
        while self._queue and len(batch) < _BATCH_RECORDS and size < _BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += len(batch[-1][1])
        self._writing = len(batch)
        return batch


def _write_batch(batch: list[tuple[RecordFile, bytes]]) -> None:
    for file, record in batch:
        file.write(record)
