"""TimedQueue: a queue from threads to one that takes, whose `get` comes back in time.

`queue.SimpleQueue.get` of CPython up to 3.12 does not: if the thread loses its core at the wrong moment for longer than
the timeout, what is left of that is negative, which its lock takes for "for ever". With timeouts of 0.1 ms on a busy
machine that happens within minutes.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """See the module. Any thread puts, in order; one takes."""

    __slots__ = ("_bell", "_items")

    def __init__(self) -> None:
        self._items: collections.deque[T] = collections.deque()
        # Open where something was put since it was last waited for.
        self._bell = threading.Lock()
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Never waits."""
        self._items.append(item)
        try:
            self._bell.release()
        except RuntimeError:
            return  # it is open: whoever waits next comes through

    def empty(self) -> bool:
        """Whether there is nothing to take now."""
        return not self._items

    def get_nowait(self) -> T:
        """The first one. Raises queue.Empty."""
        try:
            return self._items.popleft()
        except IndexError:
            raise queue.Empty from None

    def get(self, timeout: float | None = None) -> T:
        """The first one; waits so many seconds, or until there is one. Raises queue.Empty."""
        self.wait(timeout)
        return self.get_nowait()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits so many seconds, or until there is something to take; whether there is."""
        due = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = -1.0 if due is None else due - time.monotonic()
            if (due is not None and left <= 0) or not self._bell.acquire(timeout=left):
                break
        return bool(self._items)
