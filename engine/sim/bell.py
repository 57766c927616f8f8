"""Bell: one task waits until somebody rings. What a ParkingLot does for many, at half its cost."""

from __future__ import annotations

import trio


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
            trio.lowlevel.reschedule(task)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
