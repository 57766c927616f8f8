"""Bell: one task waits until somebody rings. What a ParkingLot does for many, at a third of its cost."""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Generator
from typing import Any, Final

import outcome
import trio


class _Nothing(outcome.Outcome[None]):
    """What a wait returns: one for all, where trio makes one for each, which costs as much as the ring itself."""

    def unwrap(self) -> None:
        return None

    def send(self, gen: Generator[Any, None, object]) -> Any:
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[Any, None]) -> Any:
        return await agen.asend(None)


_NOTHING: Final = _Nothing()


class Bell:
    """See the module. A ring that nobody waits for is lost."""

    __slots__ = ("_request", "_task")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._request: Any = None

    @types.coroutine
    def wait(self) -> Generator[Any, Any, None]:
        """Until the next ring."""
        assert self._task is None, "two tasks wait for one bell"
        self._task = trio.lowlevel.current_task()
        told = yield self._request or self._make_request()
        if told is not _NOTHING:
            told.unwrap()

    def ring(self) -> None:
        """Wakes who waits."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task, _NOTHING)

    def _make_request(self) -> Any:
        """What `wait_task_rescheduled` tells trio's loop. It says no more than how to abort, and so is the same for
        each wait here: to make it, and the coroutine around it, would be half of what a wait costs."""
        waiting = trio.lowlevel.wait_task_rescheduled(self._abort)  # noqa: ASYNC105  only looked at
        self._request = waiting.send(None)
        waiting.close()
        return self._request

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
