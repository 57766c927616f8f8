"""Starts an engine as a daemon: a session of its own, no terminal, log in its directory, and reports how that went."""

from __future__ import annotations

import contextlib
import os

import trio

from engine.cluster import start_head, wait_cluster_ready
from engine.config import ClusterConfig
from engine.errors import EngineError
from engine.runtime import RuntimeDirectory

ANSWER_S = 15.0
"""From the daemon's start until its sockets answer."""
LOG_TAIL_BYTES = 4096


def start_daemon(config: ClusterConfig, ready_within_s: float | None) -> int:
    """Starts it and returns an exit code: 0, 4 when it is not ready in time, or the daemon's own if it ended.

    A daemon that is not ready in time goes on starting; `engine status` and `engine down` find it.

    Args:
        ready_within_s: time to become ready; None waits only until the head answers.
    """
    import sys

    from engine.faces.admin import open_operator

    directory = RuntimeDirectory(config.admin_dir)
    directory.prepare()
    log = os.open(directory.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(log, "ab") as stream:
        began = stream.tell()
        process = start_head(config, stderr=stream)

    async def wait_answer() -> None:
        with trio.move_on_after(ANSWER_S):
            while process.poll() is None:
                with contextlib.suppress(EngineError):
                    async with open_operator(directory.read_socket) as head:
                        await head.ask_status()
                        if head.head_pid == process.pid:
                            return
                await trio.sleep(0.02)
            raise EngineError(f"the engine ended with code {process.returncode} as it started")
        raise EngineError(f"the head does not answer within {ANSWER_S:g} s")

    try:
        trio.run(wait_answer)
        if ready_within_s is not None:
            trio.run(wait_cluster_ready, directory, process.poll, ready_within_s)
    except EngineError as error:
        code = process.poll()
        print(_tail(directory.log_file, began), end="", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 4 if code is None else code or 4
    where = f"directory {directory.path}, log {directory.log_file}"
    where += f", http://{config.http.listen}" if config.http.is_on else ""
    print(f"engine runs: pid {process.pid}, {where}", file=sys.stderr)
    process.returncode = 0  # it is a daemon now; nobody here waits for it, and Popen need not warn
    return 0


def _tail(path: str, began: int) -> str:
    """What this start wrote to the log, the end of it."""
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(began, size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace")
