"""The HTTP fronts as the head's process keeps them: it opens the port, starts them, starts them again, and ends them.

All fronts accept from one listening socket, which is opened here and inherited, and not from one each with
SO_REUSEPORT: a port that is taken is found before anything else begins; what waits to be accepted survives a front that
dies; and a front that hangs takes no connections from the others.

A front can not outlive this process: the kernel sends it a signal when the head dies, and it ends by itself then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
from collections.abc import AsyncIterator

import trio

from engine.config import ClusterConfig
from engine.errors import ConfigError
from engine.front.counts import make_counts_file
from engine.front.guard import read_guard
from engine.log import log_event
from engine.runtime import RuntimeDirectory
from engine.spawn import child_environment, engine_command, give_json

logger = logging.getLogger("engine.fronts")

BACKLOG = 2048
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Before a front is started again; the first one counts again after `STEADY_S` of life."""
STEADY_S = 30.0
STOP_S = 8.0
"""For a front that is told to end, when nothing can be running in it any more."""


def open_listener(address: str) -> socket.socket:
    """Listens at `host:port`.

    Raises:
        ConfigError: the address is none, is taken, or not this machine's.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"http.listen: {address}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"http.listen: {address}: {os.strerror(error.errno or 0)}; choose another with --http"
        ) from error
    return listener


def describe_listener(listener: socket.socket) -> str:
    """The address as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def keep_fronts(config: ClusterConfig, directory: RuntimeDirectory) -> AsyncIterator[None]:
    """Serves HTTP beside the block, if the configuration says where; the fronts end with it.

    Raises:
        ConfigError: the port can not be had, or the clients' keys not be read.
    """
    http = config.http
    if not http.is_on:
        yield
        return
    if http.asks_keys:
        read_guard(http.keys_file)  # fronts read it again; what is wrong with it is said here, once
    with open_listener(http.listen) as listener:
        counts = make_counts_file(http.fronts)
        try:
            url = describe_listener(listener)
            log_event(logger, "info", "http.listen", url=url, fronts=http.fronts, keys=http.asks_keys)
            host = listener.getsockname()[0]
            if not http.asks_keys and not (host.startswith("127.") or host == "::1"):
                log_event(
                    logger, "warning", "http.open", msg=f"whoever reaches {url} may use it: there is no http.keys_file"
                )
            async with trio.open_nursery() as nursery:
                for place in range(http.fronts):
                    nursery.start_soon(_keep_front, place, config, directory, listener, counts)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            os.close(counts)


async def _keep_front(
    place: int, config: ClusterConfig, directory: RuntimeDirectory, listener: socket.socket, counts: int
) -> None:
    """One front, again and again, until cancelled."""
    pause = FIRST_PAUSE_S
    while True:
        began = trio.current_time()
        try:
            process = _start_front(place, config, directory, listener, counts)
        except OSError as error:
            log_event(logger, "error", "front.lost", front=place, msg=f"it could not be started: {error}")
        else:
            log_event(logger, "info", "front.start", front=place, pid=process.pid)
            code = await _wait_end(process)
            log_event(logger, "error", "front.lost", front=place, pid=process.pid, code=code, pause_s=pause)
        if trio.current_time() - began > STEADY_S:
            pause = FIRST_PAUSE_S
        await trio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def _wait_end(process: subprocess.Popen[bytes]) -> int:
    """Until the process is gone; its exit code. Cancelled, it ends the process in good order first."""
    descriptor = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        if process.poll() is None:
            process.terminate()
            with trio.CancelScope(shield=True):
                with trio.move_on_after(STOP_S):
                    await trio.lowlevel.wait_readable(descriptor)
                if process.poll() is None:
                    log_event(logger, "warning", "front.kill", pid=process.pid, msg=f"it did not end in {STOP_S:g} s")
                    process.kill()
        os.close(descriptor)
        process.wait()
    return process.returncode


def _start_front(
    place: int, config: ClusterConfig, directory: RuntimeDirectory, listener: socket.socket, counts: int
) -> subprocess.Popen[bytes]:
    """Call it from the main thread: the death signal follows the thread that forked."""
    given = give_json(
        {
            "place": place,
            "parent": os.getpid(),
            "model": config.model,
            "vocab_size": config.vocab_size,
            "max_model_tokens": config.max_model_tokens,
            "requests_socket": directory.requests_socket,
            "read_socket": directory.read_socket,
            "listener": listener.fileno(),
            "counts": counts,
            "progress_s": config.limits.progress_s,
            "log_format": config.log_format,
            "log_level": config.log_level,
            "http": dataclasses.asdict(config.http),
        }
    )
    try:
        return subprocess.Popen(
            [*engine_command(), "front", "--given", str(given)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a front has no data for stdout
            pass_fds=(listener.fileno(), counts, given),
            start_new_session=True,
            env=child_environment(),
        )
    finally:
        os.close(given)
