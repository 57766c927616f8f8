"""EventRing: the head's last events, numbered, for whoever watches them.

Written by the log, read by the operators' sockets, in one loop and without waiting for anybody: a ring that is full
forgets its oldest event, and who comes later is told how many he missed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Literal

from transport.messages import TEXT_LIMIT, HeadEvent

EVENT_LIMIT = 4096
"""Events that a head keeps."""
NAME_BYTES = 256
_CUT = " ..."

Level = Literal["info", "warning", "error"]


class EventRing:
    """The last `capacity` events.

    Invariant: the held events have consecutive numbers, and the newest has `last_seq`.
    """

    def __init__(self, capacity: int = EVENT_LIMIT) -> None:
        self._events: collections.deque[HeadEvent] = collections.deque(maxlen=capacity)
        self._watchers: list[Callable[[], None]] = []
        self.last_seq = 0
        """Of the newest event; 0 before the first."""

    def add(self, level: Level, name: str, text: str, at_ms: int) -> None:
        """Appends an event and wakes the watchers. What is longer than a message may be is cut, and shows it.

        Args:
            at_ms: since 1970.
        """
        self.last_seq += 1
        name, text = _fit(name, NAME_BYTES), _fit(text, TEXT_LIMIT)
        self._events.append(HeadEvent(seq=self.last_seq, at_ms=at_ms, level=level, name=name, text=text))
        for wake in tuple(self._watchers):
            wake()

    def after(self, seq: int, limit: int | None = None) -> tuple[int, tuple[HeadEvent, ...]]:
        """How many events after `seq` the ring has forgotten, and those that it has, the oldest `limit` of them.

        A number from the future (of a head before this one) is taken for 0.
        """
        if seq > self.last_seq:
            seq = 0
        held = len(self._events)
        first = self.last_seq - held + 1
        skip = max(0, seq + 1 - first)
        stop = held if limit is None else min(held, skip + limit)
        return max(0, first - 1 - seq), tuple(self._events[place] for place in range(skip, stop))

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Has `wake` called after every event; it must neither wait nor add one. The result ends it."""
        self._watchers.append(wake)
        return lambda: self._watchers.remove(wake)


def _fit(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8, so that a full message is within its limit whatever the alphabet. What can not be
    encoded (half a surrogate pair out of a file's name) becomes a question mark."""
    if text.isascii():
        return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len(_CUT)].decode("utf-8", "ignore") + _CUT
