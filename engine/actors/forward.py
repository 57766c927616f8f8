"""Forwarder: tokens on their way through the head; what ranks say in one turn of its loop leaves as one frame.

All ranks of a group end a step together, so their frames come together. Splitting them by client, and writing and
reading what comes of that, costs once for all of them and not for each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.actors.bell import Bell
from engine.errors import RemoteProtocolError
from transport.messages import TokensEmitted
from transport.wire import BLOB_LIMITS

_ROW_BYTES = 8 + 4 + 4 + 4
_ONE = (1).to_bytes(4, "little")
_BLOB_LIMIT = BLOB_LIMITS[TokensEmitted]

Tokens = tuple[TokensEmitted, bytes | memoryview]


class Forwarder:
    """Gathers frames of tokens while `run` runs; without it each goes on at once.

    Whoever is about to say anything of a request that must not overtake its tokens has it said `behind` them, or calls
    `flush` before.

    Args:
        forward: takes one frame with the rows of several; raises RemoteProtocolError for one that can not be.
        fault: tells that what a rank sent can not be.
    """

    def __init__(self, forward: Callable[[TokensEmitted, bytes | memoryview], None], fault: Callable[[int, str], None]):
        self._forward, self._fault = forward, fault
        self._waiting: dict[int, Tokens] = {}
        self._behind: list[Callable[[], None]] = []
        self._num_bytes = 0
        self._is_running = False
        self._news = Bell()

    def add(self, rank: int, message: TokensEmitted, blob: bytes | memoryview) -> None:
        """A frame of a rank.

        Raises:
            RemoteProtocolError: it can not be. What shows only later is told by `fault`.
        """
        if not self._is_running or not _is_sound(message, blob):
            self.flush()
            self._forward(message, blob)
            return
        # A frame has a request once, and a rank may have said two things of one.
        if rank in self._waiting or self._num_bytes + len(blob) > _BLOB_LIMIT:
            self.flush()
        if not self._waiting:
            self._news.ring()
        self._waiting[rank] = message, blob
        self._num_bytes += len(blob)

    def behind(self, call: Callable[[], None]) -> None:
        """Calls it once all that is here has gone on: at once where nothing is. So what ends with a turn's tokens does
        not cut that turn's frame in two."""
        if self._waiting:
            self._behind.append(call)
        else:
            call()

    def flush(self) -> None:
        """Lets go on what is here."""
        if not self._waiting:
            return
        waiting, self._waiting, self._num_bytes = self._waiting, {}, 0
        behind, self._behind = self._behind, []
        self._let_go(waiting)
        for call in behind:
            call()

    def _let_go(self, waiting: dict[int, Tokens]) -> None:
        frames = list(waiting.values())
        if len(frames) > 1:
            try:
                self._forward(*_join(frames))
                return
            except RemoteProtocolError:
                pass  # one of them is at fault, and the others shall not suffer for it
        for rank, (message, blob) in waiting.items():
            try:
                self._forward(message, blob)
            except RemoteProtocolError as error:
                self._fault(rank, str(error))

    async def run(self) -> None:
        """Flushes once in each turn of the loop that brought something, until cancelled."""
        self._is_running = True
        try:
            while True:
                # Woken by the first frame of a turn, it runs in the next one: all of the turn are here then.
                if not self._waiting:
                    await self._news.wait()
                self.flush()
        finally:
            self._is_running = False
            self.flush()


def _is_sound(message: TokensEmitted, blob: bytes | memoryview) -> bool:
    """Its length and counts are right, so that its columns may be joined with those of others."""
    rows, tokens = message.num_rows, message.num_tokens
    if len(blob) != _ROW_BYTES * rows + 4 * tokens:
        return False
    if rows == tokens:
        return bytes(blob[16 * rows : 20 * rows]) == _ONE * rows  # views are compared item by item
    counts = np.frombuffer(blob, "<i4", rows, 16 * rows)
    return rows > 0 and int(counts.min()) > 0 and int(counts.sum(dtype=np.int64)) == tokens


def _join(frames: list[Tokens]) -> tuple[TokensEmitted, bytes]:
    """One frame with the rows of all, in order."""
    columns: list[list[bytes | memoryview]] = [[], [], [], [], []]
    for message, blob in frames:
        rows, at = message.num_rows, 8 * message.num_rows
        columns[0].append(blob[:at])
        for column in columns[1:4]:
            column.append(blob[at : at + 4 * rows])
            at += 4 * rows
        columns[4].append(blob[at:])
    total = sum([message.num_rows for message, _ in frames])
    tokens = sum([message.num_tokens for message, _ in frames])
    step = max([message.step for message, _ in frames])
    return TokensEmitted(step, total, tokens), b"".join([part for column in columns for part in column])
