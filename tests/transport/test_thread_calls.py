"""Calls that threads leave for the loop: made in order, once, whoever of the waiting is there or goes away."""

from __future__ import annotations

import threading

import trio
import trio.testing

from transport.thread_calls import ThreadCalls


async def wait_until(calls: ThreadCalls, made: list[int], count: int) -> None:
    with trio.fail_after(10):
        while len(made) < count:
            await calls.wait()


async def test_calls_of_a_thread_are_made_in_order_and_nobody_misses_his() -> None:
    calls = ThreadCalls()
    made: list[int] = []

    def put_all() -> None:
        for number in range(300):
            calls.put(made.append, number)

    thread = threading.Thread(target=put_all)
    async with trio.open_nursery() as nursery:
        for count in (1, 150, 300):
            nursery.start_soon(wait_until, calls, made, count)
        thread.start()
    thread.join()
    assert made == [*range(300)]
    calls.close()


async def test_who_waits_beside_one_that_is_cancelled_goes_on_for_it() -> None:
    calls = ThreadCalls()
    made: list[int] = []
    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def wait_in_vain() -> None:
            with first:
                await wait_until(calls, made, 1)

        nursery.start_soon(wait_in_vain)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait_until, calls, made, 2)
        await trio.testing.wait_all_tasks_blocked()
        first.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not made
        calls.put(made.append, 1)
        calls.put(made.append, 2)
    assert made == [1, 2]
    calls.close()


async def test_a_call_from_the_loop_itself_is_made_when_somebody_waits() -> None:
    calls = ThreadCalls()
    made: list[int] = []
    calls.put(made.append, 1)
    assert not made
    await wait_until(calls, made, 1)
    calls.close()


async def test_what_is_left_is_made_at_the_end_and_who_waits_comes_back() -> None:
    calls = ThreadCalls()
    made: list[int] = []
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(wait_until, calls, made, 1)
        await trio.testing.wait_all_tasks_blocked()
        calls.put(made.append, 1)
        calls.close()
    assert made == [1]
