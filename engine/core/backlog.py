"""Backlog: requests that wait in the head, in order of priority and then of arrival, bounded in requests and ids.

Removal from the middle (a cancelled or vanished client) is as cheap as taking the first, so nothing dead stays behind.
Invariant: `num_requests` and `num_ids` are the sums over what is queued.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    item: T
    num_ids: int


class Backlog(Generic[T]):
    """Queue of items under unique numbers.

    Args:
        max_requests: items at most.
        max_ids: sum of their `num_ids` at most. A single item may be larger than that only when nothing else waits.
    """

    def __init__(self, *, max_requests: int, max_ids: int) -> None:
        self._max_requests = max_requests
        self._max_ids = max_ids
        self._priorities: list[int] = []
        self._priority_to_line: dict[int, dict[int, _Waiting[T]]] = {}
        self._number_to_priority: dict[int, int] = {}
        self.num_ids = 0

    @property
    def num_requests(self) -> int:
        return len(self._number_to_priority)

    def num_before(self, priority: int) -> int:
        """Items that go before one of this priority that comes now."""
        return sum(len(line) for other, line in self._priority_to_line.items() if other <= priority)

    def why_full(self, num_ids: int) -> str | None:
        """What would be exceeded by one more item of `num_ids`, in words; None if there is room."""
        if self.num_requests >= self._max_requests:
            return f"{self.num_requests} requests wait (limit {self._max_requests})"
        if self.num_requests and self.num_ids + num_ids > self._max_ids:
            return f"{self.num_ids} prompt tokens wait (limit {self._max_ids})"
        return None

    def add(self, number: int, item: T, *, priority: int, num_ids: int) -> None:
        """Queues the item; lower priorities go first. The caller has asked `why_full`."""
        assert number not in self._number_to_priority, f"request {number} waits already"
        if priority not in self._priority_to_line:
            bisect.insort(self._priorities, priority)
            self._priority_to_line[priority] = {}
        self._priority_to_line[priority][number] = _Waiting(item, num_ids)
        self._number_to_priority[number] = priority
        self.num_ids += num_ids

    def first(self) -> T | None:
        """The item that is next; it stays."""
        if not self._priorities:
            return None
        line = self._priority_to_line[self._priorities[0]]
        return next(iter(line.values())).item

    def remove(self, number: int) -> bool:
        """Takes an item out, wherever it stands. False if it does not wait."""
        priority = self._number_to_priority.pop(number, None)
        if priority is None:
            return False
        line = self._priority_to_line[priority]
        self.num_ids -= line.pop(number).num_ids
        if not line:
            del self._priority_to_line[priority]
            self._priorities.remove(priority)
        return True
