"""A queue from threads to one: in order, nothing lost, and no wait is longer than it was to be."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from transport.timed_queue import TimedQueue


def test_shortest_waits_come_back() -> None:
    for _ in range(2000):
        with pytest.raises(queue.Empty):
            TimedQueue[int]().get(timeout=1e-6)


def test_what_is_put_is_taken_in_order_whoever_waits() -> None:
    jobs: TimedQueue[tuple[int, int]] = TimedQueue()

    def put_all(thread: int) -> None:
        for number in range(500):
            jobs.put((thread, number))

    threads = [threading.Thread(target=put_all, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 1500:
        try:
            taken.append(jobs.get(timeout=(1e-6, 1e-4, None)[len(taken) % 3]))
        except queue.Empty:
            continue
    assert all([number for who, number in taken if who == thread] == [*range(500)] for thread in range(3))
    with pytest.raises(queue.Empty):
        jobs.get_nowait()


def test_a_wait_ends_with_what_is_put_meanwhile() -> None:
    jobs: TimedQueue[str] = TimedQueue()
    timer = threading.Timer(0.05, jobs.put, ("late",))
    timer.start()
    assert jobs.get(timeout=20) == "late"
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        jobs.get(timeout=0.05)
    assert time.monotonic() - began >= 0.05
    timer.join()
