"""An engine that runs as a daemon, with a group of two decode ranks, and a batch that keeps some of its experts busier
than others. Synchronous: for tests that look at it through a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.batch_process import MARK, ROOT, processes_of

ENGINE = (sys.executable, "-m", "engine")
SETS = (
    "pools.decode.ranks=2",
    "pools.decode.group=2",
    "num_pages=96",
    "num_slabs=24",
    "max_model_tokens=1024",
    "experts.main.loads=250ms",
    # A slot of the bundled model in three steps, so that moves are seen.
    "experts.main.max_bytes_per_step=64KiB",
)
PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 4,
    "class Node:\n    def __init__(self, value):\n        self.value = value\n        self.next = None\n",
    "import os\nimport sys\n\nfor name in os.listdir('.'):\n    if name.endswith('.py'):\n        print(name)\n",
)
"""Code: what goes on from it uses some experts far more than others."""
WIDTH, TOKENS = 8, 400
START_S, END_S = 90.0, 20.0


class Daemon:
    """Made by `open_daemon`. `directory` is its runtime directory, `place` one for files of the test."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.directory = place / "run"
        self.mark = uuid.uuid4().hex
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark}

    def run(self, *arguments: str, within_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command of the engine about this daemon."""
        return subprocess.run(
            [*ENGINE, *arguments, "--dir", str(self.directory)],
            capture_output=True, text=True, cwd=ROOT, env=self._environ, timeout=within_s, check=False,
        )  # fmt: skip

    def start(self, *sets: str) -> None:
        """Starts it and waits until it serves."""
        words = [word for one in (*SETS, *sets) for word in ("--set", one)]
        done = self.run("up", "--detach", "--wait", "ready", "--timeout", f"{START_S:g}s", *words, within_s=2 * START_S)
        assert done.returncode == 0, done.stderr

    def part(self) -> dict[str, Any]:
        """Its decode group's main part, as `engine rebalance status` tells it."""
        told = json.loads(self.run("rebalance", "status", "--json").stdout)
        return next(part for part in told["parts"] if (part["pool"], part["part"]) == ("decode", "main"))

    def kill(self) -> None:
        """The head, as the kernel's memory killer would do it; its ranks go with it."""
        told = json.loads(self.run("status", "--json").stdout)
        os.kill(told["head_pid"], signal.SIGKILL)
        limit = time.monotonic() + END_S
        while processes_of(self.mark) and time.monotonic() < limit:
            time.sleep(0.02)
        assert not processes_of(self.mark)

    @contextlib.contextmanager
    def traffic(self) -> Iterator[None]:
        """A batch that always has `WIDTH` requests running."""
        source = self.place / "in.jsonl"
        lines = (
            {"custom_id": f"c{n}", "body": {"prompt": PROMPTS[n % len(PROMPTS)], "max_tokens": TOKENS,
                                            "temperature": 0, "ignore_eos": True}}
            for n in range(5000)
        )  # fmt: skip
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with (self.place / "batch.log").open("wb") as log:
            batch = subprocess.Popen(
                [*ENGINE, "batch", "--connect", str(self.directory), "-i", str(source), "--inflight", str(WIDTH),
                 "-o", str(self.place / f"out-{uuid.uuid4().hex}.jsonl")],
                stdout=log, stderr=log, cwd=ROOT, env={**self._environ, MARK: ""},
            )  # fmt: skip
            try:
                yield
                assert batch.poll() is None, (self.place / "batch.log").read_text()
            finally:
                batch.kill()
                batch.wait()

    def close(self) -> None:
        if self.directory.exists():
            self.run("down", "--now")
        for pid in processes_of(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def open_daemon() -> Iterator[Daemon]:
    """A daemon that serves; no process of it is left after the block."""
    with tempfile.TemporaryDirectory(prefix="daemon-", dir="/tmp") as place:  # short: sockets live in it
        daemon = Daemon(Path(place))
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.close()
