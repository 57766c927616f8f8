"""Starts an engine in a process of its own and waits for it: a caller's private cluster, or a daemon's head."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO, Any

import trio

from engine.config import ClusterConfig, HttpConfig
from engine.errors import EngineError, PeerGone
from engine.runtime import RuntimeDirectory
from engine.settings import LONGEST_SOCKET, SOCKET_PATH_BYTES, runtime_directory
from engine.spawn import child_environment, engine_command, give_json

READY_POLL_S = 0.05
"""Between two looks at a head that is starting."""


def default_requests_path(flag: str | None = None) -> str:
    """The request socket of this user's daemon: `flag` (a directory), else ENGINE_DIR, else the default directory."""
    return RuntimeDirectory(runtime_directory(flag, None, os.environ)).requests_socket


class PrivateCluster:
    """A cluster that lives as long as the block that started it.

    Attributes:
        requests_path: its request socket.
        process: its head.
    """

    def __init__(self, directory: RuntimeDirectory, process: subprocess.Popen[bytes]) -> None:
        self.requests_path = directory.requests_socket
        self.process = process
        self._directory = directory
        self._pidfd = os.pidfd_open(process.pid)

    async def wait_ready(self, timeout_s: float) -> None:
        """Until it serves.

        Raises:
            EngineError: its head ended, or it is not ready in time; the message says what is missing.
        """
        await wait_cluster_ready(self._directory, self._poll, timeout_s)

    async def wait(self) -> int:
        """Until its head is gone; the exit code."""
        if self.process.poll() is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        return self.process.wait()

    def _poll(self) -> int | None:
        return self.process.poll()

    def close(self) -> None:
        os.close(self._pidfd)


async def wait_cluster_ready(directory: RuntimeDirectory, poll: Callable[[], int | None], timeout_s: float) -> None:
    """Asks a starting head until it says that it is ready.

    Args:
        poll: exit code of the head's process, None while it runs.

    Raises:
        EngineError: the head ended, or time is up.
    """
    from engine.faces.admin import open_operator

    missing: tuple[str, ...] = ("the head does not answer yet",)
    with trio.move_on_after(timeout_s):
        while True:
            code = poll()
            if code is not None:
                raise EngineError(f"the engine ended with code {code} before it was ready")
            with contextlib.suppress(PeerGone):
                async with open_operator(directory.read_socket) as head:
                    status = await head.ask_status()
                    if status.ready:
                        return
                    missing = status.reasons
            await trio.sleep(READY_POLL_S)
    raise EngineError(f"not ready within {timeout_s:g} s: {'; '.join(missing)}")


@contextlib.asynccontextmanager
async def start_cluster(config: ClusterConfig, *, stderr: int | IO[Any] | None = None) -> AsyncIterator[PrivateCluster]:
    """Starts an engine of the caller's own in a private directory, and ends it with the block.

    The head is tied to this process three times (a lifeline, the death signal, this block), so it is gone with it
    whichever way it ends.

    Args:
        config: its directory is replaced by a temporary one, and it serves no HTTP.
        stderr: where head and ranks log; None is this process's own stderr.
    """
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) + len("/engine-12345678" + LONGEST_SOCKET) > SOCKET_PATH_BYTES:
        place = "/tmp"
    with tempfile.TemporaryDirectory(prefix="engine-", dir=place) as path:
        private = dataclasses.replace(config, admin_dir=path, http=HttpConfig())
        directory = RuntimeDirectory(path)
        reader, writer = os.pipe()
        try:
            process = start_head(private, stderr=stderr, lifeline=reader)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        cluster = PrivateCluster(directory, process)
        try:
            yield cluster
        finally:
            os.close(writer)  # the lifeline: the head stops now
            with trio.CancelScope(shield=True):
                with trio.move_on_after(2 * config.limits.stop_s + 5.0):
                    await cluster.wait()
                if process.poll() is None:
                    process.kill()  # its ranks go with it, by their death signal
                    await cluster.wait()
            cluster.close()


def start_head(
    config: ClusterConfig,
    *,
    stderr: int | IO[Any] | None,
    lifeline: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `engine up` with a resolved configuration, in a session of its own. Call it from the main thread.

    Args:
        lifeline: readable end of a pipe; the head lives while its other end is open. None makes a daemon.
    """
    given = give_json(dataclasses.asdict(config))
    try:
        command = [*engine_command(), "up", "--given", str(given)]
        passed = [given]
        if lifeline is not None:
            command += ["--lifeline", str(lifeline), "--parent", str(os.getpid())]
            passed.append(lifeline)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if stderr is None else stderr,
            stderr=stderr,
            pass_fds=passed,
            start_new_session=True,
            env=child_environment(),
        )
    finally:
        os.close(given)
