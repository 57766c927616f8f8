"""Commands on a terminal of their own, with somebody who types."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    return {**kept, "PYTHONPATH": os.getcwd(), "COLUMNS": "120", "TERM": "xterm"}


def talk_at_terminal(*words: str, says: list[tuple[str, str]]) -> tuple[int, str]:
    """Runs a command on a terminal of its own: waits for each text, then types the answer to it.

    Returns:
        exit code, and all that the terminal showed.
    """
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown, rest = "", says
    os.set_blocking(ours, False)
    deadline = time.monotonic() + 20
    seen = 0
    try:
        while time.monotonic() < deadline:
            done = process.poll()
            try:
                shown += os.read(ours, 65536).decode()
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the other end is closed: all was read
                break
            if rest and rest[0][0] in shown[seen:]:
                seen = len(shown)
                os.write(ours, rest[0][1].encode())
                rest = rest[1:]
            if done is not None and process.poll() is not None and not rest and not _has_more(ours):
                break
        assert not rest, f"never asked: {rest[0][0]!r}; the terminal has {shown!r}"
        return process.wait(10), shown
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def _has_more(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
