"""Runs `engine batch` as people do, in a process of its own, against a FakeHead in the test's loop."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import trio

from tests.batch.fake_head import FakeHead
from tests.batch.rig import head_at

COMMAND = [sys.executable, "-c", "from engine.batch_cli import batch; batch()"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def batch_process(
    tmp_path: Path, head: FakeHead, *arguments: str, stdin: int | None = None, stdout: int | None = None
) -> AsyncIterator[trio.Process]:
    """Starts it; its stderr goes to `stderr.txt`, which survives it. It is killed with the block if it still runs."""
    async with head_at(head, tmp_path / "head.sock") as path:
        with (tmp_path / "stderr.txt").open("ab") as stderr:
            process = await trio.lowlevel.open_process(
                [*COMMAND, "--connect", path, *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr.fileno(),
                env=ENVIRONMENT,
                cwd=ROOT,
            )
        try:
            with trio.fail_after(60):
                yield process
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    await trio.aclose_forcefully(stream)


async def wait_until(happened: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    """Polls, since what it waits for is in another process; a test that never sees it fails by name."""
    with trio.move_on_after(within_s) as scope:
        while not happened():  # noqa: ASYNC110
            await trio.sleep(0.005)
    assert not scope.cancelled_caught, f"never happened: {what}"


def said(tmp_path: Path) -> str:
    return (tmp_path / "stderr.txt").read_text()
