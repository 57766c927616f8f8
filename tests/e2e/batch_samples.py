"""Samples: resident memory and processor time of all processes of a batch run, against the lines that are done."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

from tests.e2e.batch_process import BatchRun

SLOPE_FROM = 0.2
"""Slopes are fitted from this share of the lines on: before, buffers grow to their working size."""


class Samples:
    """What was seen of one run.

    Attributes:
        rows: per process, (lines done, resident MiB, processor seconds) of each time it was looked at.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, float, float]]] = collections.defaultdict(list)

    def take(self, run: BatchRun) -> None:
        """Looks at every process of the run."""
        pids = {"batch": run.process.pid}
        for event, name in (("head.start", "head"), ("rank.start", "rank")):
            for found in run.events(event):
                pids[name if name == "head" else f"{found['role']}{found['rank']}"] = found["pid"]
        done = run.num_answers() + run.num_errors()
        for name, pid in pids.items():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            rss = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0)
            cpu_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            self.rows[name].append((done, rss / 1024, cpu_s))

    def thin(self, every: int) -> dict[str, list[tuple[int, float]]]:
        """Per process, (lines done, resident MiB) of some samples."""
        return {name: [(done, round(mib, 1)) for done, mib, _ in rows[::every]] for name, rows in self.rows.items()}

    def figures(self, num_lines: int) -> dict[str, dict[str, Any]]:
        """Per process, its memory while lines were done, its slope, its time on processors."""
        found = {}
        for name, rows in self.rows.items():
            # What is seen after the last line is the end of a process.
            steady = [row for row in rows if SLOPE_FROM * num_lines <= row[0] < rows[-1][0] and row[1]]
            rss_mib_per_line = slope([row[0] for row in steady], [row[1] for row in steady])
            found[name] = {
                "rss_mib_at_20_percent": round(steady[0][1], 2),
                "rss_mib_at_end": round(steady[-1][1], 2),
                "rss_mib_max": round(max(row[1] for row in rows), 2),
                "rss_mib_per_1000_lines": round(1000 * rss_mib_per_line, 3),
                "cpu_s": round(rows[-1][2], 2),
            }
        return found


def slope(x: list[int], y: list[float]) -> float:
    """Least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
