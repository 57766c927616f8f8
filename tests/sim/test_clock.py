"""RealClock: events at their time, and a time that does not run while its process does not."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.sim.clock import LONGEST_GAP_S, RealClock


def run(body: Callable[[RealClock], Awaitable[None]], clock: RealClock | None = None) -> RealClock:
    """Raises what an event raised."""
    clock = clock or RealClock()
    raised: list[Exception] = []

    async def main() -> None:
        with trio.fail_after(5.0):
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:

                    def fail(error: Exception) -> None:
                        raised.append(error)
                        scope.cancel()

                    nursery.start_soon(clock.run_events, fail)
                    await body(clock)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    if raised:
        raise raised[0]
    return clock


def test_events_come_in_order_of_their_times_and_then_of_their_making() -> None:
    called: list[tuple[str, float]] = []

    async def body(clock: RealClock) -> None:
        for name, when in (("late", 0.06), ("first", 0.03), ("second", 0.03), ("past", -1.0)):
            clock.at(when, lambda name=name: called.append((name, clock.now)))
        await clock.sleep_until(0.08)

    clock = run(body)
    assert [name for name, _ in called] == ["past", "first", "second", "late"]
    assert called[1][1] >= 0.03 and called[3][1] >= 0.06
    assert clock.now >= 0.08


def test_an_event_that_comes_before_the_one_waited_for_is_not_late() -> None:
    async def body(clock: RealClock) -> None:
        clock.at(60.0, lambda: None)
        await trio.sleep(0.02)  # the events' task now waits for that one
        began = time.perf_counter()
        await clock.sleep_until(clock.now + 0.02)
        assert time.perf_counter() - began < 1.0

    run(body)


class SlowLook(RealClock):
    """The loop asks how long it may sleep just before the next event, and that event comes due while it asks."""

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if self._heap and 0 < (left := self._heap[0][0] - self.current_time()) < 0.02:
            time.sleep(left)
        return super().deadline_to_sleep_time(deadline)


def test_an_event_that_comes_due_while_the_loop_asks_how_long_to_sleep_is_not_slept_over() -> None:
    events = 40

    async def body(clock: RealClock) -> None:
        for _ in range(events):
            await clock.sleep_until(trio.current_time() + 0.005)

    clock = run(body, SlowLook())
    # Each that is slept over costs half of a longest gap.
    assert clock.now < events * LONGEST_GAP_S / 4


def test_tasks_that_keep_the_loop_busy_do_not_hold_events_up() -> None:
    async def body(clock: RealClock) -> None:
        done: list[float] = []
        clock.at(0.02, lambda: done.append(clock.now))
        while not done:
            await trio.lowlevel.checkpoint()

    run(body)


def test_a_process_that_stood_still_has_lost_no_time_to_its_limits() -> None:
    async def body(clock: RealClock) -> None:
        before = trio.current_time()
        time.sleep(4 * LONGEST_GAP_S)  # as if it had been stopped  # noqa: ASYNC251
        assert trio.current_time() - before <= LONGEST_GAP_S
        with trio.move_on_after(2 * LONGEST_GAP_S) as patience:
            await clock.sleep_until(trio.current_time() + LONGEST_GAP_S / 2)
        assert not patience.cancelled_caught

    clock = run(body)
    assert clock.lost_s >= 2.9 * LONGEST_GAP_S


def test_an_idle_loop_loses_no_time() -> None:
    async def body(clock: RealClock) -> None:
        began, real = trio.current_time(), time.perf_counter()
        await trio.sleep(3 * LONGEST_GAP_S)
        passed, lost = trio.current_time() - began, clock.lost_s
        assert passed + lost == pytest.approx(time.perf_counter() - real, abs=0.1)
        assert passed >= 3 * LONGEST_GAP_S

    run(body)


def test_a_sleeper_that_was_cancelled_is_left_alone_by_its_event() -> None:
    async def body(clock: RealClock) -> None:
        with trio.move_on_after(0.01) as patience:
            await clock.sleep_until(0.05)
        assert patience.cancelled_caught
        await clock.sleep_until(0.1)

    run(body)


def test_what_an_event_raises_ends_the_run_and_not_the_events() -> None:
    later = trio.Event()

    def fail() -> None:
        raise ValueError("planted")

    async def body(clock: RealClock) -> None:
        clock.at(0.01, fail)
        clock.at(0.02, later.set)
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(2.0, shield=True):
                await later.wait()

    with pytest.raises(ValueError, match="planted"):
        run(body)
    assert later.is_set()
