"""What a console costs, itself and its head, as one JSON record:
`python -m tests.console.measure --output docs/measurements/DATE-console.json`.

Not a test. Processor time is told, not time by the clock: the machine may do other things beside it. There are three
measurements: the console before a scripted head whose numbers all change, on each screen; a real head with ranks that
only report, with and without a console; and the way from exec to the first picture.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import platform
import pty
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from console.screens import SCREENS
from tests.console.terminal import ROOT, TAKE_TERMINAL

SIZE = (120, 40)
RATES_HZ = (2.0, 10.0)
SETTLE_S = 3.0
BARE = (sys.executable, "-m", "console")
WHOLE = (sys.executable, "-m", "engine", "console")
STARTS = 5


def read_cpu_s(pid: int) -> float:
    """Processor time of all living threads of a process, to the nanosecond."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # it has just ended
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total / 1e9


class Tap:
    """A terminal that takes all at once and looks at nothing but the rounds' names."""

    def __init__(self, command: Sequence[str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environ.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *command], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT,
            env=environ,
        )  # fmt: skip
        os.close(slave)

    def read(self, seconds: float, until: bytes = b"") -> bytes:
        """What is written for so long, or until something is written."""
        end = time.monotonic() + seconds
        pieces: list[bytes] = []
        tail = b""
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.master], [], [], min(left, 0.1))[0]:
                continue
            data = os.read(self.master, 65536)
            pieces.append(data)
            tail = (tail + data)[-65536 - len(until) :]
            if until and until in tail:
                return b"".join(pieces)
        assert not until, f"{until!r} was not written within {seconds:g} s"
        return b"".join(pieces)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@contextlib.contextmanager
def tap(*command: str) -> Iterator[Tap]:
    opened = Tap(command)
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def serving(module: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """A module of the tests that serves a directory; the directory and the pid."""
    with tempfile.TemporaryDirectory(prefix="measure-", dir="/tmp") as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", module, directory, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == b"serves\n"
            yield directory, process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


# ---------------------------------------------------------------- the console


def measure_screens(directory: str, hz: float, seconds: float) -> list[dict[str, Any]]:
    """Each screen in turn, in one console."""
    found = []
    with tap(*BARE, "--connect", f"unix:{directory}", "--hz", f"{hz:g}") as console:
        console.read(20, b"ADMIN")
        for screen in SCREENS:
            console.press(str(screen.NUMBER))
            console.read(SETTLE_S)
            before, began = read_cpu_s(console.process.pid), time.monotonic()
            written = console.read(seconds)
            cpu_s, took = read_cpu_s(console.process.pid) - before, time.monotonic() - began
            # The stub's name changes with every round, so what is drawn of it counts them.
            rounds = len(set(re.findall(rb"c\d{5}", written)))
            assert rounds > 0.5 * hz * took, f"screen {screen.NAME}: {rounds} rounds in {took:.1f} s"
            found.append(
                {
                    "screen": screen.NAME,
                    "hz": hz,
                    "rounds_per_s": round(rounds / took, 2),
                    "core_percent": round(100 * cpu_s / took, 2),
                    "ms_per_round": round(1e3 * cpu_s / rounds, 2),
                    "bytes_per_round": round(len(written) / rounds),
                    "MB_per_s": round(len(written) / took / 1e6, 3),
                }
            )
    return found


# ---------------------------------------------------------------- the head


def measure_head(seconds: float, *, has_loads: bool) -> list[dict[str, Any]]:
    """A real head: alone, then with a console at 2 Hz on each screen, alone between them."""
    found = []
    with serving("tests.console.stubcluster", *(["--loads"] if has_loads else [])) as (directory, pid):
        time.sleep(2 * SETTLE_S)

        def look(screen: str, console: Tap | None) -> None:
            (console.read if console else time.sleep)(SETTLE_S)
            before, began = read_cpu_s(pid), time.monotonic()
            (console.read if console else time.sleep)(seconds)
            took = time.monotonic() - began
            share = 100 * (read_cpu_s(pid) - before) / took
            found.append({"screen": screen, "loads": has_loads, "core_percent": round(share, 2)})

        look("", None)
        with tap(*BARE, "--connect", f"unix:{directory}", "--hz", "2") as console:
            console.read(20, b"ADMIN")
            for screen in SCREENS:
                console.press(str(screen.NUMBER))
                look(screen.NAME, console)
        look("", None)
    return found


# ---------------------------------------------------------------- the start


def measure_start(directory: str, command: Sequence[str]) -> dict[str, Any]:
    """Processor time and time by the clock from exec to the first picture, and to the one with answers."""
    first, whole, clock = [], [], []
    for _ in range(STARTS):
        began = time.monotonic()
        with tap(*command) as console:
            console.read(30, b"\x1b[1;1H")
            first.append(read_cpu_s(console.process.pid))
            console.read(30, b"ADMIN")
            whole.append(read_cpu_s(console.process.pid))
            clock.append(time.monotonic() - began)
    return {
        "command": " ".join(["python", *command[1:3], *(["console"] if "engine" in command else [])]),
        "first_picture_cpu_s": [round(value, 3) for value in sorted(first)],
        "answers_cpu_s": [round(value, 3) for value in sorted(whole)],
        "answers_clock_s": [round(value, 3) for value in sorted(clock)],
        "median_first_picture_cpu_s": round(statistics.median(first), 3),
        "median_answers_cpu_s": round(statistics.median(whole), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="file for the record; stdout without it")
    parser.add_argument("--parts", default="start,console,head", help="what to measure")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each screen")
    parser.add_argument(
        "--machine", default=f"{len(os.sched_getaffinity(0))}-core {platform.machine().replace('_', '-')} VM, shared"
    )
    given = parser.parse_args()
    parts = given.parts.split(",")
    os.environ["OMP_NUM_THREADS"] = "1"
    commit = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    record: dict[str, Any] = {
        "what": "a console at 120x40 before 72 ranks, 256 experts and 61 layers; its head; its start",
        "date": datetime.date.today().isoformat(),
        "machine": given.machine,
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python -m tests.console.measure", *sys.argv[1:]]),
    }
    with serving("tests.console.bigscene") as (directory, _):
        if "start" in parts:
            urls = (BARE, ("--connect", f"unix:{directory}")), (WHOLE, ("--dir", directory))
            record["start"] = [measure_start(directory, (*words, *where)) for words, where in urls]
        if "console" in parts:
            record["console"] = [row for hz in RATES_HZ for row in measure_screens(directory, hz, given.seconds)]
    if "head" in parts:
        record["head"] = [
            row for has_loads in (False, True) for row in measure_head(given.seconds, has_loads=has_loads)
        ]
    text = render(record)
    if given.output:
        Path(given.output).write_text(text)
    print(text, end="")


def render(record: dict[str, Any]) -> str:
    """JSON for people: one row a line."""
    lines = []
    for name, value in record.items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
