"""How the end of a step is noticed: ways compared on one GPU: `PYTHONPATH=. python -m tests.model.completion_times`.

A captured graph stands for a step; the next but one is launched when a step's end was noticed, as a rank does. Its last
kernel writes its number and the GPU's clock to pinned memory, so a thread that only spins on that memory says what the
earliest notice is. For each way: time from one end to the next on the GPU, how much later than the spinning thread the
end was noticed, and processor time of the noticing thread for each step. Prints JSON; nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import queue
import statistics
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from engine.model.look_times import LookTimes

STEPS = 100
NAP_S = 1e-4
"""Of `engine.model.look_times.LOOK_S`."""
NEAR_S = 2e-5
EARLY_NS = 60_000
"""Before the expected end a way that expects it begins to look."""


@triton.jit
def _sign_kernel(count, page):
    number = tl.load(count) + 1
    tl.store(count, number)
    tl.store(page + 1, tl.extra.cuda.globaltimer())
    tl.debug_barrier()
    tl.store(page, number)


class Steps:
    """The stand-in for a rank's steps."""

    def __init__(self, products: int) -> None:
        self.page = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.words = (ctypes.c_int64 * 2).from_address(self.page.data_ptr())
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            torch.mm(x, x, out=y)
            _sign_kernel[(1,)](count, self.page)
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for _ in range(products):
                    torch.mm(x, x, out=y)
                _sign_kernel[(1,)](count, self.page)
        self._kept = (count, x, y)
        self._launched = self.words[0]

    def launch(self) -> int:
        """The step's number."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()
        self._launched += 1
        return self._launched

    def offset_ns(self) -> int:
        """What the host's clock is ahead of the GPU's by, at least: the least that a spinning thread sees."""
        least = 1 << 62
        for _ in range(50):
            number = self.launch()
            while self.words[0] < number:
                pass
            least = min(least, time.monotonic_ns() - self.words[1])
        return least


Wait = Callable[[int], None]
"""Returns once the step of that number has ended."""
Way = Callable[[Steps], tuple[Callable[[int], None], Wait]]
"""To what is done behind each launch, and how its end is waited for."""


def spin(steps: Steps) -> tuple[Callable[[int], None], Wait]:
    def wait(number: int) -> None:
        while steps.words[0] < number:
            pass

    return lambda number: None, wait


def query(steps: Steps) -> tuple[Callable[[int], None], Wait]:
    """As the worker of a device did: an event, and naps in its queue of jobs."""
    return _query(steps, lambda _: NAP_S, lambda _: None)


def guess(steps: Steps) -> tuple[Callable[[int], None], Wait]:
    """As the worker of a device does: the same, with longer naps while the end is far."""
    times, since = LookTimes(), time.monotonic()

    def ended(_: int) -> None:
        nonlocal since
        now = time.monotonic()
        times.note(1, now - since)
        since = now

    return _query(steps, lambda _: times.find_wait(1, time.monotonic() - since, 1.0), ended)


def _query(
    steps: Steps, find_nap: Callable[[int], float], ended: Callable[[int], None]
) -> tuple[Callable[[int], None], Wait]:
    events: dict[int, torch.cuda.Event] = {}
    jobs: queue.SimpleQueue[None] = queue.SimpleQueue()

    def launched(number: int) -> None:
        event = events[number] = torch.cuda.Event(blocking=True)
        event.record(steps.stream)

    def wait(number: int) -> None:
        event = events.pop(number)
        while not event.query():
            try:
                jobs.get(timeout=find_nap(number))
            except queue.Empty:
                continue
        ended(number)

    return launched, wait


def block(steps: Steps) -> tuple[Callable[[int], None], Wait]:
    events: dict[int, torch.cuda.Event] = {}

    def launched(number: int) -> None:
        event = events[number] = torch.cuda.Event(blocking=True)
        event.record(steps.stream)

    return launched, lambda number: events.pop(number).synchronize()


def expect(steps: Steps) -> tuple[Callable[[int], None], Wait]:
    """Sleeps until shortly before the end that the last step makes likely, then naps between looks at the flag."""
    ahead = 1 << 62  # of the GPU's clock, as the earliest notices say
    ended = period = 0

    def wait(number: int) -> None:
        nonlocal ahead, ended, period
        left = ended + period + ahead - EARLY_NS - time.monotonic_ns() if period else 0
        if left > 0:
            time.sleep(left / 1e9)
        while steps.words[0] < number:
            time.sleep(NEAR_S)
        now, at = time.monotonic_ns(), steps.words[1]
        ahead = min(ahead, now - at)
        period = at - ended if ended else 0
        ended = at

    return lambda number: None, wait


def call_back(steps: Steps) -> tuple[Callable[[int], None], Wait]:
    """A host function in the stream that raises a semaphore of the C library: no Python runs in it."""
    libc, cudart = ctypes.CDLL(None), ctypes.CDLL("libcudart.so.13")
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p)

    def launched(number: int) -> None:
        code = cudart.cudaLaunchHostFunc(ctypes.c_void_p(steps.stream.cuda_stream), post, semaphore)
        assert code == 0, code

    return launched, lambda number: libc.sem_wait(semaphore)


WAYS: dict[str, Way] = {
    "spinning": spin,
    "event, looked at each 100 us": query,
    "event, looked at as LookTimes says": guess,
    "event, blocking": block,
    "flag in pinned memory, looked at from shortly before": expect,
    "host function": call_back,
}


def measure(steps: Steps, way: Way, offset_ns: int) -> dict[str, float]:
    launched, wait = way(steps)
    ends: list[int] = []
    late: list[int] = []
    pending = []
    for _ in range(2):
        pending.append(steps.launch())
        launched(pending[-1])
    used = time.thread_time_ns()
    for _ in range(STEPS):
        wait(pending[0])
        now = time.monotonic_ns()
        if steps.words[0] == pending[0]:  # else the next one has ended, too, and its time is there
            ends.append(steps.words[1])
            late.append(now - offset_ns - steps.words[1])
        pending = [*pending[1:], steps.launch()]
        launched(pending[-1])
    used = time.thread_time_ns() - used
    for number in pending:
        wait(number)
    torch.cuda.synchronize()
    periods = [(after - before) / 1e3 for before, after in itertools.pairwise(ends)]
    late.sort()
    return {
        "period_us": round(statistics.median(periods), 1),
        "noticed_late_us": round(late[len(late) // 2] / 1e3, 1),
        "noticed_late_p99_us": round(late[len(late) * 99 // 100] / 1e3, 1),
        "processor_us": round(used / STEPS / 1e3, 1),
        "seen": len(ends),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, products in (("short", 15),):
        steps = Steps(products)
        offset_ns = steps.offset_ns()
        results[name] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way, make in WAYS.items():
                results[name][way].append(measure(steps, make, offset_ns))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
