"""Bell: one task waits until somebody rings. What a ParkingLot does for many, at half its cost."""

from __future__ import annotations

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

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Until the next ring."""
        assert self._task is None, "two tasks wait for one bell"
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def ring(self) -> None:
        """Wakes who waits."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task, _NOTHING)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
