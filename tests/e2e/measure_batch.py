"""Runs a long `engine batch` over partly hostile lines and writes what it took, memory of every process included:
`PYTHONPATH=. python tests/e2e/measure_batch.py --lines 20000 --json FILE`.

Not a test: its numbers are worth something only on a quiet machine, and they belong in a dated report. Lines and fates
are those of the test of hundreds of lines (tests/e2e/test_batch_whole.py).
"""

from __future__ import annotations

import argparse
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
from tests.batch.rig import write_lines
from tests.e2e.batch_process import CONTEXT, ROOT, batch_run
from tests.e2e.batch_samples import Samples
from tests.e2e.test_batch_whole import MAX_TOKENS, compare_fates

SAMPLE_S = 1.0


async def measure(lines: list[HostileLine], directory: Path, arguments: list[str]) -> dict[str, Any]:
    source, output, summary = (directory / name for name in ("in.jsonl", "out.jsonl", "summary.json"))
    write_lines(source, [line.data for line in lines])
    samples = Samples()
    began = time.monotonic()
    async with batch_run(source, output, *arguments, "--summary", str(summary)) as run:
        while run.process.poll() is None:
            samples.take(run)
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
        "samples": samples.thin(10),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--bad", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--machine", default=f"{len(os.sched_getaffinity(0))}-core {platform.machine().replace('_', '-')} VM"
    )
    parser.add_argument("--json")
    parser.add_argument("rest", nargs="*", help="after --: options of engine batch")
    given = parser.parse_args()
    lines = make_lines(given.lines, given.bad, given.seed, max_model_tokens=CONTEXT, max_tokens=MAX_TOKENS)
    arguments = ["--default", f"max_tokens={MAX_TOKENS}", *given.rest]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        figures = trio.run(measure, lines, Path(directory), arguments)
    commit = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    record = {
        "date": datetime.date.today().isoformat(),
        "machine": given.machine,
        "load_before": round(load, 1),
        "commit": commit.stdout.strip(),
        "command": " ".join(["PYTHONPATH=. python tests/e2e/measure_batch.py", *sys.argv[1:]]),
        **figures,
    }
    if given.json:
        Path(given.json).write_text(render(record))
    print(render({**record, "samples": {}}), end="")


def render(record: dict[str, Any]) -> str:
    """JSON for people, with the samples of a process on one line."""
    head = json.dumps({name: value for name, value in record.items() if name != "samples"}, indent=1)
    samples = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in record["samples"].items())
    return head.removesuffix("\n}") + ',\n "samples": {\n' + samples + "\n }\n}\n"


main()
