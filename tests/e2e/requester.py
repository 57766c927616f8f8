"""Requester: rows at a head, submitted again when they are lost, as `engine batch` does; it notes what came when."""

from __future__ import annotations

import collections
import itertools
import time
from array import array
from collections.abc import Sequence

import trio

from engine.actors.client import HeadClient, Row
from transport.messages import RequestFailed, RequestFinished, Sampling
from transport.wire import Frame

RETRY_PAUSE_S = 0.1
"""First pause before a lost request is submitted again; doubles. That of `engine batch`."""
POLL_S = 0.005


class Book:
    """A requester's rows and what it heard of them. Implements RequestSink; `run` submits and submits again."""

    def __init__(self) -> None:
        self.client: HeadClient | None = None
        self.ends: collections.Counter[int] = collections.Counter()
        """Submission to the ends that the head said of it."""
        self.number_to_row: dict[int, Row] = {}
        self.news: dict[Row, list[int]] = {}
        """Row to the times, in ns, at which tokens came."""
        self.failures: list[tuple[int, Row, RequestFailed]] = []
        """Time in ns, row, reason; without those of requests that were given up here."""
        self.done: set[Row] = set()
        self.given_up: dict[Row, float] = {}
        """Row to when it was given up."""
        self.cancel_s = 0.0
        """The longest time from giving a request up to its end."""
        self._again: list[tuple[float, int, Row]] = []
        self._ties = itertools.count()
        self._sending = trio.Lock()
        self._tries: collections.Counter[Row] = collections.Counter()

    def tokens_came(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        for row in rows:
            self.news[row].append(time.monotonic_ns())

    def row_finished(self, row: Row, fact: RequestFinished) -> None:
        assert row not in self.done, "a request was answered twice"
        self._end(row)

    def row_failed(self, row: Row, fact: RequestFailed) -> None:
        if row in self.given_up:
            self._end(row)
            return
        self.failures.append((time.monotonic_ns(), row, fact))
        assert fact.retryable, fact
        due = trio.current_time() + RETRY_PAUSE_S * 2 ** self._tries[row]
        self._tries[row] += 1
        self._again.append((due, next(self._ties), row))

    def attach(self, client: HeadClient) -> None:
        """The connection is there. Ends are counted as the head says them, before the client drops what is too much."""
        self.client, handle = client, client.handle

        def count(batch: list[Frame]) -> None:
            for frame in batch:
                if isinstance(frame.message, RequestFinished | RequestFailed):
                    self.ends[frame.message.request] += 1
            handle(batch)

        client.handle = count  # type: ignore[method-assign]

    async def submit(self, row: Row) -> Row:
        assert self.client is not None
        self.news.setdefault(row, [])
        async with self._sending:  # numbers are given in the order of submissions
            self.number_to_row[await self.client.submit(row)] = row
        return row

    async def run_retries(self) -> None:
        while True:
            now = trio.current_time()
            due = sorted(item for item in self._again if item[0] <= now)
            self._again = [item for item in self._again if item[0] > now]
            for _, _, row in due:
                await self.submit(row)
            await trio.sleep(POLL_S)

    def give_up(self, row: Row) -> None:
        assert self.client is not None
        self.given_up[row] = trio.current_time()
        if self.client.holds(row):
            self.client.cancel(row)
        else:
            self._again = [item for item in self._again if item[2] is not row]
            self.done.add(row)

    def _end(self, row: Row) -> None:
        self.done.add(row)
        if row in self.given_up:
            self.cancel_s = max(self.cancel_s, trio.current_time() - self.given_up[row])


def make_row(prompt: list[int], max_tokens: int) -> Row:
    """A greedy request of so many tokens."""
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Row(array("i", prompt).tobytes(), sampling)
