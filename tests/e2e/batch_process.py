"""Runs `engine batch` with an engine of its own in processes that can be found again: who they are, what they log."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import trio

ROOT = Path(__file__).parents[2]
MARK = "CHAOS_MARK"
"""Environment variable with a value of its own for each run; all processes of a run inherit it."""
NOTICE_S = 1.0
"""From a death to the moment at which those who depend on it know, as the log tells it."""
POLL_S = 0.005

CONTEXT = 1024
"""max_model_tokens of these engines."""

_SMALL = ("log.format=json", "num_pages=256", "num_slabs=40", f"max_model_tokens={CONTEXT}")


class Growing:
    """A file that another process appends to; read once, however often somebody looks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0

    def new_lines(self) -> list[bytes]:
        """Whole lines since the last look."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        lines = data.splitlines()
        self._num_lines += len(lines)
        return lines

    def count_lines(self) -> int:
        self.new_lines()
        return self._num_lines


class BatchRun:
    """One `engine batch` process and all that it started. Made by `batch_run`."""

    def __init__(self, process: trio.Process, mark: str, stderr: Path, output: Path) -> None:
        self.process = process
        self.mark = mark
        self._stderr = Growing(stderr)
        self._output = Growing(output)
        self._errors = Growing(output.with_name(f"{output.stem}.errors.jsonl"))
        self._events: list[dict[str, Any]] = []

    def said(self) -> str:
        """All that was said on stderr so far."""
        return self._stderr.path.read_text()

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """The log's events of that name whose fields have these values; `at` is their time as seconds."""
        for line in self._stderr.new_lines():
            if line.startswith(b"{"):
                event = json.loads(line)
                self._events.append({**event, "at": datetime.datetime.fromisoformat(event["ts"]).timestamp()})
        wanted = {"event": name, **fields}
        return [event for event in self._events if wanted.items() <= event.items()]

    def num_answers(self) -> int:
        """Records in the output so far."""
        return self._output.count_lines()

    def num_errors(self) -> int:
        """Records in the errors file so far."""
        return self._errors.count_lines()

    async def wait_until(self, happened: Callable[[], Any], what: str, within_s: float = 90.0) -> None:
        """Polls for something that other processes do."""
        with trio.move_on_after(within_s) as scope:
            while not happened():
                assert self.process.poll() is None or happened(), f"ended before {what}: {self.said()}"
                await trio.sleep(POLL_S)
        assert not scope.cancelled_caught, f"never happened: {what}: {self.said()}"

    async def wait_answers(self, least: int) -> None:
        await self.wait_until(lambda: self.num_answers() >= least, f"{least} answers")

    def head_pid(self) -> int:
        return int(self.events("head.start")[-1]["pid"])

    def rank_pid(self, rank: int) -> int:
        return int(self.events("rank.start", rank=rank)[-1]["pid"])

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: the signal goes to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    async def wait(self) -> int:
        with trio.fail_after(120):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def batch_run(source: Path, output: Path, *arguments: str) -> AsyncIterator[BatchRun]:
    """Starts it in a session of its own; afterwards checks that no process and no directory of it is left.

    Args:
        source: input file.
        output: output file; stderr is appended to a file beside it.
        arguments: further options.
    """
    mark = uuid.uuid4().hex
    stderr = output.with_suffix(f".{mark[:6]}.stderr")
    place = tempfile.mkdtemp(prefix="chaos-", dir="/tmp")  # short: sockets live in it
    sets = [word for value in _SMALL for word in ("--set", value)]
    command = [sys.executable, "-m", "engine", "batch", "-i", str(source), "-o", str(output), "-v", *sets, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, "TMPDIR": place}
    with stderr.open("ab") as log:
        process = await trio.lowlevel.open_process(
            command, env=environment, cwd=ROOT, stderr=log.fileno(), start_new_session=True
        )
    run = BatchRun(process, mark, stderr, output)
    try:
        yield run
        assert process.returncode is not None, "the block waits for the end of the run"
        left = await find_left(mark)
        assert not left, f"processes left behind: {left}\n{run.said()}"
        assert not os.listdir(place), f"files left behind: {os.listdir(place)}"
    finally:
        for pid in processes_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()
        shutil.rmtree(place, ignore_errors=True)


def processes_of(mark: str) -> dict[int, str]:
    """Pid to command line of every living process of a run, whoever its parent is now."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended while it was looked at
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:  # a zombie has none
                    found[int(entry)] = command
    return found


async def find_left(mark: str, within_s: float = 10.0) -> dict[int, str]:
    """What still lives of a run after a while: a rank frees its device before it goes."""
    give_up_at = time.monotonic() + within_s
    while (left := processes_of(mark)) and time.monotonic() < give_up_at:  # noqa: ASYNC110
        await trio.sleep(0.02)
    return left
