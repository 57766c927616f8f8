"""ThreadCalls: calls that a thread leaves for trio's loop, made there by whoever waits for what they bring about.

`TrioToken.run_sync_soon` wakes a task of trio's own, which makes the call, which wakes the task that it is about: two
turns of trio's scheduler, where this takes one. After a sleep, when nothing of trio is in a core's caches, that is a
third of what it costs to wake.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable

import trio


class ThreadCalls:
    """See the module. Any thread puts; tasks of one loop wait, and then look whether what they wait for is so."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[Callable[..., object], tuple[object, ...]]] = collections.deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_watched = self._is_closed = False
        self._others = trio.lowlevel.ParkingLot()

    def put(self, call: Callable[..., object], *given: object) -> None:
        """Never waits. Calls are made in order; they must not raise."""
        self._calls.append((call, given))
        os.eventfd_write(self._bell, 1)

    async def wait(self) -> None:
        """Until calls were made, or may have been; or it is closed."""
        if self._is_watched:
            await self._others.park()
            return
        self._is_watched = True
        try:
            await trio.lowlevel.wait_readable(self._bell)
            if not self._is_closed:
                os.eventfd_read(self._bell)
                self._make()
        except trio.ClosedResourceError:
            return
        finally:
            self._is_watched = False
            # One of them watches from now on.
            self._others.unpark_all()

    def close(self) -> None:
        """No thread puts any more. What is left is made."""
        self._make()
        self._is_closed = True
        trio.lowlevel.notify_closing(self._bell)
        os.close(self._bell)

    def _make(self) -> None:
        while self._calls:
            call, given = self._calls.popleft()
            call(*given)
