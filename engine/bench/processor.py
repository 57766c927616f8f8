"""ThreadTimes: how long the threads of a process ran, and how long they were ready but had no core.

The second number is what others on the machine cost a measurement, and what a rank's own threads cost each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Nanoseconds so far, per thread id: on a core, and waiting for one. Empty if the kernel does not tell."""

    thread_to_ns: Mapping[int, tuple[int, int]]

    def since(self, before: ThreadTimes, steps: float) -> dict[str, float]:
        """Milliseconds per step since then, as figures of a record.

        Thread by thread: a thread that ended meanwhile takes its past with it, and would make the sum fall.
        """
        busy_ns = ready_ns = 0
        for thread, (busy, ready) in self.thread_to_ns.items():
            busy_before, ready_before = before.thread_to_ns.get(thread, (0, 0))
            busy_ns += busy - busy_before
            ready_ns += ready - ready_before
        return {
            "cpu_ms_per_step": round(busy_ns / 1e6 / steps, 4),
            "ready_ms_per_step": round(ready_ns / 1e6 / steps, 4),
        }


def read_thread_times(pid: int) -> ThreadTimes:
    """Of a process of this host; empty if it is gone."""
    found: dict[int, tuple[int, int]] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            busy, ready, _ = task.read_bytes().split()
        except OSError:
            continue  # a thread that ended meanwhile
        found[int(task.parent.name)] = int(busy), int(ready)
    return ThreadTimes(found)
