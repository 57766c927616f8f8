"""Starts a rank as a process of its own and watches it: RankProcess over subprocess, socketpair and pidfd.

A rank must never outlive its head. Three ties hold it, each enough alone: the death signal that it asks the kernel for
(it then compares its parent, which closes the race with a head that died before), the end of its control stream, and
the supervisor's kill. The death signal follows the *thread* that forked, so `spawn_rank` must run in the main thread;
trio's own process API forks in a worker and is not used here.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from engine.errors import ConfigError

LINE_BYTES = 4096
"""Longer lines of a rank's stderr are cut into pieces."""
TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1


class SpawnedRank:
    """A running rank process; implements `engine.actors.processes.RankProcess`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: trio.SocketStream,
        output: trio.lowlevel.FdStream,
        say: Callable[[str], None],
    ) -> None:
        self.pid = process.pid
        self.control = control
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._output = output
        self._say = say
        self._torn = b""
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    async def run_output(self) -> None:
        """Until the end of its stderr; may be cancelled and called again."""
        while True:
            try:
                data = await self._output.receive_some(1 << 16)
            except trio.ClosedResourceError:
                return
            *lines, self._torn = (self._torn + data).split(b"\n")
            if len(self._torn) > LINE_BYTES or not data:
                lines.append(self._torn)
                self._torn = b""
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._tail.append(text[:LINE_BYTES])
                    self._say(text[:LINE_BYTES])
            if not data:
                await self._output.aclose()
                return

    async def wait(self) -> int:
        if self._process.returncode is None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self.kill()  # what it left behind in its group; its number is its own until it is waited for
            self._process.wait()  # returns at once: the pidfd fired
            os.close(self._pidfd)
        return self._process.returncode

    def kill(self) -> None:
        # The process group: a rank may have started helpers, and they hold its memory too.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._tail)


def spawn_rank(
    command: Sequence[str], passed: dict[str, object], *, threads: int, say: Callable[[str], None]
) -> SpawnedRank:
    """Starts `<command> --control FD --given FD`.

    Args:
        command: program and arguments of a rank; `rank_command()` is the real one.
        passed: what the child is given, as JSON in a file of its own.
        threads: intra-op threads; set in the environment, because libraries read it when they are loaded.
        say: gets each line of its stderr.

    Raises:
        OSError: no process could be made.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    read_end, write_end = os.pipe()
    given = give_json(passed)
    try:
        process = subprocess.Popen(
            [*command, "--control", str(theirs.fileno()), "--given", str(given)],
            stdin=subprocess.DEVNULL,
            stdout=write_end,  # ranks have no data for stdout; whatever prints there is talking to people
            stderr=write_end,
            pass_fds=(theirs.fileno(), given),
            start_new_session=True,
            env=child_environment(threads),
        )
    except OSError:
        ours.close()
        os.close(read_end)
        raise
    finally:
        theirs.close()
        os.close(write_end)
        os.close(given)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    return SpawnedRank(process, stream, trio.lowlevel.FdStream(read_end), say)


def engine_command() -> list[str]:
    """How to start this engine again, wherever it was found."""
    return [sys.executable, "-m", "engine"]


def rank_command() -> list[str]:
    """The real rank."""
    return [*engine_command(), "rank"]


def child_environment(threads: int | None = None) -> dict[str, str]:
    """This environment, with the engine importable from any directory and libraries limited to their threads."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    if root not in known and "site-packages" not in root:
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, known)])
    # The configuration is resolved once, here; a child must not resolve it again from what it inherits.
    for name in [name for name in environment if name.startswith("ENGINE_")]:
        del environment[name]
    if threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
            environment[name] = str(threads)
    return environment


def give_json(value: object) -> int:
    """A descriptor to a nameless file that holds `value` as JSON, to be passed to a child. The caller closes it."""
    descriptor = os.memfd_create("engine-given", os.MFD_CLOEXEC)
    os.write(descriptor, json.dumps(value).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take_bytes(descriptor: int) -> bytes:
    """The child's end of `give_json`; closes the descriptor."""
    try:
        with open(descriptor, "rb") as given:
            return given.read()
    except OSError as error:
        raise ConfigError(
            f"descriptor {descriptor} holds nothing to read; this command is for the engine's own use"
        ) from error


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Asks the kernel for `signum` when the thread that started this process ends; ends now if it is gone already.

    Raises:
        SystemExit: the parent is not `parent` any more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit(f"the parent {parent} is gone")
