"""Runs trio as a function of a seed: a virtual clock with a heap of events, and a scheduler that chance alone orders.

The only file that touches names which trio keeps to itself. They are looked for at import, all of them: a trio that
moved one must not turn runs silently into something that no seed repeats.

How the clock works: trio asks `deadline_to_sleep_time` exactly when no task is runnable. There the clock takes events
off its heap, moves `now` to them and calls them, until one of them woke a task or a deadline of trio's is due first. So
a delivery or the end of a device step costs a call, not a task. Every instant is a multiple of 2**-30 s, rounded up,
which floats hold exactly for a month: sums that mean the same instant are the same instant.

Only for code without real input or output and without threads.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator, MutableSequence
from typing import Any, Final, TypeVar

import trio
import trio._core._run as _run

from engine.sim.clock import Clock

T = TypeVar("T")

TICKS_PER_S: Final = float(1 << 30)
PASSES_LIMIT: Final = 100_000
"""Passes of the loop at one instant after which a run counts as stuck in it."""

PRIVATE_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "module": ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r", "GLOBAL_RUN_CONTEXT", "Runner", "Deadlines"),
    "Runner": ("runq", "waiting_for_idle", "deadlines", "clock", "instruments"),
    "Deadlines": ("next_deadline",),
}
"""Everything of trio that this file uses and that trio does not promise to keep."""


class SchedulerChanged(RuntimeError):
    """This trio does not have what the seeded scheduler needs."""


def check_private_names(module: Any, version: str) -> None:
    """Looks for every private name.

    Raises:
        SchedulerChanged: one is gone; runs would not be repeatable.
    """
    missing = [name for name in PRIVATE_NAMES["module"] if not hasattr(module, name)]
    for owner in ("Runner", "Deadlines"):
        kind = getattr(module, owner, None)
        fields = {field.name for field in getattr(kind, "__attrs_attrs__", ())}
        missing += [
            f"{owner}.{name}" for name in PRIVATE_NAMES[owner] if name not in fields and not hasattr(kind, name)
        ]
    if missing:
        raise SchedulerChanged(
            f"trio {version} has no {', '.join(missing)} in trio._core._run: the simulator was written for trio 0.35;"
            " install that, or port engine/sim/seeded.py"
        )


check_private_names(_run, trio.__version__)


class Deadlock(Exception):
    """No task can run, and nothing will ever happen. The text shows where each task waits."""


class EventClock(Clock):
    """Virtual time. `at` and `sleep_until` may be used by whoever runs on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = itertools.count()
        self._runner: Any = None
        self._on_deadlock: Callable[[], None] | None = None
        self._on_error: Callable[[BaseException], None] | None = None

    def start_clock(self) -> None:
        self._runner = _run.GLOBAL_RUN_CONTEXT.runner
        if not self._runner.instruments["_all"]:
            # Looked at several times for each task that runs, in Python: a dict takes a tenth of the time.
            self._runner.instruments = {}

    def current_time(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` at `when`, in loop context, while no task runs. Events of one instant keep their order.

        `call` must not block; what it raises ends the run.
        """
        if when < math.inf:
            when = math.ceil(when * TICKS_PER_S) / TICKS_PER_S
        heapq.heappush(self._heap, (when, next(self._serial), call, args))

    def deadline_to_sleep_time(self, deadline: float) -> float:
        runner, heap = self._runner, self._heap
        if runner.waiting_for_idle:
            return math.inf  # wait_all_tasks_blocked goes first, at this instant
        deadline = ceil_tick(deadline)
        try:
            while heap and heap[0][0] <= deadline:
                when = heap[0][0]
                if when > self.now:
                    if runner.runq:
                        return 0.0  # somebody is awake: let him run before time passes
                    self.now = when
                _, _, call, args = heapq.heappop(heap)
                self.num_events += 1
                call(*args)
                due = runner.deadlines.next_deadline()
                if due < deadline:
                    deadline = ceil_tick(due)
        except BaseException as error:
            # Raised here it would be an internal error of trio; the main task raises it instead.
            heap.clear()
            assert self._on_error is not None
            self._on_error(error)
            return 0.0
        if runner.runq:
            return 0.0
        if deadline == math.inf:
            if self._on_deadlock is not None:
                self._on_deadlock()
            return math.inf
        self.now = max(self.now, deadline)
        return 0.0


def ceil_tick(seconds: float) -> float:
    """The first instant that is not before `seconds`."""
    return math.ceil(seconds * TICKS_PER_S) / TICKS_PER_S if seconds < math.inf else seconds


def run(
    main: Callable[[EventClock], Awaitable[T]], *, seed: int, instruments: tuple[trio.abc.Instrument, ...] = ()
) -> T:
    """`trio.run(main, clock)` on virtual time; the order of tasks that are runnable together is drawn from `seed`.

    Raises:
        Deadlock: nothing can happen any more.
    """
    clock = EventClock()
    results: list[T] = []
    stacks: list[str] = []
    errors: list[BaseException] = []

    async def body() -> None:
        token = trio.lowlevel.current_trio_token()
        root = trio.lowlevel.current_root_task()
        with trio.CancelScope() as scope:

            def deadlock() -> None:
                if not stacks:
                    assert root is not None
                    stacks.append("\n".join(_describe(root)))
                    token.run_sync_soon(scope.cancel)

            def fail(error: BaseException) -> None:
                errors.append(error)
                token.run_sync_soon(scope.cancel)

            clock._on_deadlock, clock._on_error = deadlock, fail
            try:
                results.append(await main(clock))
            finally:
                clock._on_deadlock = None
        if errors:
            raise errors[0]
        if stacks:
            raise Deadlock(f"at {clock.now:.6f} s nothing can happen any more; tasks wait in\n{stacks[0]}")

    saved = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r
    setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)  # noqa: B010  trio calls it Final
    _run._r = order = _Order(seed)
    order.clock = clock
    try:
        trio.run(body, clock=clock, instruments=instruments)
    finally:
        setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", saved[0])  # noqa: B010
        _run._r = saved[1]
    return results[0]


class _Order(random.Random):
    """The order of tasks that are runnable together: asked for once in each pass of the loop.

    So it sees who keeps whom awake: it ends a run in which time stands still. Its order is that of its parent, whose
    `shuffle` costs twice as much.
    """

    clock: EventClock
    _instant = -1.0
    _passes = 0

    def shuffle(self, x: MutableSequence[Any]) -> None:
        now = self.clock.now
        if now != self._instant:
            self._instant, self._passes = now, 0
        else:
            self._passes += 1
            if self._passes == PASSES_LIMIT and self.clock._on_error is not None:
                self.clock._on_error(
                    Deadlock(f"time stands still at {now:.6f} s: tasks ran {PASSES_LIMIT} times without a wait")
                )
        draw = self.getrandbits
        for last in range(len(x) - 1, 0, -1):
            bits = (last + 1).bit_length()
            at = draw(bits)
            while at > last:
                at = draw(bits)
            x[last], x[at] = x[at], x[last]


def _describe(task: trio.lowlevel.Task, depth: int = 0) -> Iterator[str]:
    frames: list[str] = []
    frame: Any = task.coro
    while frame is not None and getattr(frame, "cr_frame", None) is not None:
        frames.append(f"{frame.cr_code.co_name}:{frame.cr_frame.f_lineno}")
        frame = frame.cr_await
    yield f"{'  ' * depth}{task.name.rsplit('.', 1)[-1]} at {' > '.join(frames[-3:])}"
    for nursery in task.child_nurseries:
        yield from sorted("\n".join(_describe(child, depth + 1)) for child in nursery.child_tasks)
