"""Runs a long `engine batch` over partly hostile lines and writes what it took, memory of every process included:
`PYTHONPATH=. python tests/e2e/measure_batch.py --lines 20000 --json FILE`.

Not a test: its numbers are worth something only on a quiet machine, and they belong in a dated report. Lines and fates
are those of the test of 2,000 lines (tests/e2e/test_batch_whole.py).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from tests.batch.hostile import HostileLine, make_lines
from tests.batch.rig import read_records, write_lines
from tests.e2e.batch_process import ROOT, BatchRun, batch_run

SAMPLE_S = 1.0
MAX_TOKENS = 4
CONTEXT = 1024
SLOPE_FROM = 0.2
"""The slope is fitted from this share of the lines on: before, buffers grow to their working size."""


class Samples:
    """Resident memory and processor time of a run's processes, once a second."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[float, int, float, float]]] = collections.defaultdict(list)

    def take(self, run: BatchRun, at: float) -> None:
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
            self.rows[name].append((at, done, rss / 1024, cpu_s))

    def figures(self, num_lines: int) -> dict[str, Any]:
        found = {}
        for name, rows in self.rows.items():
            steady = [row for row in rows if SLOPE_FROM * num_lines <= row[1] < num_lines]
            found[name] = {
                "rss_mib_at_20_percent": round(steady[0][2], 2),
                "rss_mib_at_end": round(steady[-1][2], 2),
                "rss_mib_max": round(max(row[2] for row in rows), 2),
                "rss_mib_per_1000_lines": round(1000 * slope([row[1] for row in steady], [row[2] for row in steady]), 4),
                "cpu_s": round(rows[-1][3], 2),
            }
        return found


def slope(x: list[int], y: list[float]) -> float:
    """Least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def compare_fates(lines: list[HostileLine], output: Path) -> dict[str, int]:
    """Counts by fate; raises unless every line has the one record that it must have, bad ones with reason and place."""
    answers = read_records(output)
    errors = read_records(output.with_name(f"{output.stem}.errors.jsonl"))
    got = [(record["custom_id"], record["engine"]["line"], "answer") for record in answers]
    got += [(record["custom_id"], record["line"], record["error"]["type"]) for record in errors]
    wanted = [(line.custom_id, place, line.fate) for place, line in enumerate(lines, 1) if line.fate != "blank"]
    assert sorted(got) == sorted(wanted), set(got) ^ set(wanted)
    assert all(record["error"]["message"] and record["engine"]["line"] == record["line"] for record in errors)
    assert all(record["engine"]["pushed_bytes"] > 0 for record in answers)
    fates = collections.Counter(line.fate for line in lines)
    return dict(sorted(fates.items()))


async def measure(lines: list[HostileLine], directory: Path, arguments: list[str]) -> dict[str, Any]:
    source, output, summary = (directory / name for name in ("in.jsonl", "out.jsonl", "summary.json"))
    write_lines(source, [line.data for line in lines])
    samples = Samples()
    began = time.monotonic()
    async with batch_run(source, output, *arguments, "--summary", str(summary)) as run:
        while run.process.poll() is None:
            samples.take(run, round(time.monotonic() - began, 2))
            await trio.sleep(SAMPLE_S)
        wall_s = time.monotonic() - began
        assert run.process.returncode == 1, run.said()[-4000:]
    said = json.loads(summary.read_text())
    return {
        "lines": len(lines),
        "fates": compare_fates(lines, output),
        "wall_s": round(wall_s, 1),
        "run_s": said["wall_s"],
        "lines_per_s": round(len(lines) / said["wall_s"], 1),
        "tokens": said["tokens"],
        "processes": samples.figures(len(lines)),
        "samples": {name: [row[:3] for row in rows[::10]] for name, rows in samples.rows.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--bad", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--machine", default=f"{len(os.sched_getaffinity(0))}-core {platform.machine()} VM")
    parser.add_argument("--json")
    parser.add_argument("rest", nargs="*", help="after --: options of engine batch")
    given = parser.parse_args()
    lines = make_lines(given.lines, given.bad, given.seed, max_model_tokens=CONTEXT, max_tokens=MAX_TOKENS)
    arguments = ["--default", f"max_tokens={MAX_TOKENS}", *given.rest]
    with tempfile.TemporaryDirectory() as directory:
        figures = trio.run(measure, lines, Path(directory), arguments)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": given.machine,
        "commit": commit.stdout.strip(),
        "command": " ".join(["PYTHONPATH=. python tests/e2e/measure_batch.py", *sys.argv[1:]]),
        **figures,
    }
    text = json.dumps(record, indent=1)
    if given.json:
        Path(given.json).write_text(text + "\n")
    shown = {name: value for name, value in record.items() if name != "samples"}
    print(json.dumps(shown, indent=1))


main()
