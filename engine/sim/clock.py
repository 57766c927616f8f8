"""The clock of a world: events that are called at their instant. And RealClock, which is one on real time.

The one on virtual time is `seeded.EventClock`. Parts of a world know what stands in `Clock` and no more.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, Final

import trio

LONGEST_GAP_S: Final = 0.25
"""Between two looks at the clock. Longer: the process was stopped, or starved, and the world's time stood still."""
EVENTS_LIMIT: Final = 1_000_000
"""Events that may wait; so many mean that somebody plans faster than time passes."""


class Clock(trio.abc.Clock):
    """What the parts of a world ask of its clock. `now`: seconds since its start, as of the last look at it."""

    now: float

    @abc.abstractmethod
    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` at `when`, in loop context. Events of one instant keep their order.

        `call` must not block; what it raises ends the run.
        """

    async def sleep_until(self, when: float) -> None:
        """Like `trio.sleep_until`, for a third of its cost: no cancel scope."""
        task = trio.lowlevel.current_task()
        waiting = [True]

        def wake() -> None:
            if waiting:
                waiting.clear()
                trio.lowlevel.reschedule(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            waiting.clear()
            return trio.lowlevel.Abort.SUCCEEDED

        if when < math.inf:
            self.at(when, wake)
        await trio.lowlevel.wait_task_rescheduled(abort)


class RealClock(Clock):
    """Real seconds since it was made, for `trio.run(..., clock=...)`; `run_events` has to run in it.

    A process that is stopped, or gets no core, must not find that all its ranks have missed all their limits. So this
    clock goes on by `LONGEST_GAP_S` at most from one look to the next; the rest of a gap did not happen.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.lost_s = 0.0
        """Real time that did not count."""
        self._seen = time.perf_counter()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = itertools.count()
        self._sleeper: trio.lowlevel.Task | None = None

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        real = time.perf_counter()
        gap = real - self._seen
        self._seen = real
        if gap > LONGEST_GAP_S:
            self.lost_s += gap - LONGEST_GAP_S
            gap = LONGEST_GAP_S
        self.now = now = self.now + gap
        # trio looks here in each pass, so no event waits for tasks that keep each other busy.
        if self._sleeper is not None and self._heap and self._heap[0][0] <= now:
            self._wake()
        return now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        sleeper = self._sleeper
        now = self.current_time()
        if sleeper is not None and self._sleeper is None:
            return 0.0  # an event came due in this look: the loop has a task to run and does not know it yet
        if self._heap and sleeper is not None:
            deadline = min(deadline, self._heap[0][0])
        # Never as long as a gap: a sleep would look like one.
        return min(deadline - now, LONGEST_GAP_S / 2)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        if len(self._heap) >= EVENTS_LIMIT:
            raise RuntimeError(f"{len(self._heap)} events wait for their time (limit {EVENTS_LIMIT})")
        heapq.heappush(self._heap, (when, next(self._serial), call, args))

    async def run_events(self, fail: Callable[[Exception], None]) -> None:
        """Calls the events, each at its time or as soon after it as the loop gets there.

        Args:
            fail: told what one of them raised, and has to end all that runs here. Events go on meanwhile: processes
                that end need them for that.
        """
        heap = self._heap
        while True:
            due = self.current_time()
            # Up to this look only: what the called ones plan for now comes in the next pass, after the loop's tasks.
            while heap and heap[0][0] <= due:
                _, _, call, args = heapq.heappop(heap)
                try:
                    call(*args)
                except Exception as error:  # whatever it is, it ends the run
                    fail(error)
            if heap and heap[0][0] <= self.now:
                await trio.lowlevel.checkpoint()
            else:
                self._sleeper = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _wake(self) -> None:
        task, self._sleeper = self._sleeper, None
        assert task is not None
        trio.lowlevel.reschedule(task)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED
