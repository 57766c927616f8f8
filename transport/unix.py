"""Unix sockets: dial one, listen on one, and take over the file of a listener that died.

A socket file outlives its process. Whether it is stale can only be found out by dialling it, and between finding out
and replacing it another starter may have bound its own; hence all of that happens under a lock on the directory, which
leaves no lock file behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import trio

from transport.errors import EngineError, PeerGone

PATH_LIMIT = 107
"""Bytes of a path in `sockaddr_un`, without its terminating zero."""
LOCK_S = 5.0
"""How long to wait for another process that is just binding in the same directory."""
BACKLOG = 128


def _check_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    size = len(os.fsencode(text))
    if size > PATH_LIMIT:
        raise EngineError(f"socket path of {size} bytes (limit {PATH_LIMIT}): {text}")
    return text


async def open_unix_stream(path: str | os.PathLike[str]) -> trio.SocketStream:
    """Dials the listener at `path`.

    Raises:
        PeerGone: nothing listens there, or it may not be reached; the message says which.
        EngineError: the path is too long for a socket.
    """
    text = _check_path(path)
    try:
        return await trio.open_unix_socket(text)
    except OSError as error:
        raise PeerGone(f"{text}: {os.strerror(error.errno or 0)}") from error


class Credentials(NamedTuple):
    """Of the process at the other end, as the kernel noted them when the connection was made."""

    pid: int
    uid: int
    gid: int


def peer_credentials(stream: trio.SocketStream) -> Credentials:
    """Who is at the other end of a unix socket; nothing that he says can change it."""
    form = "3i"
    data = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    return Credentials(*struct.unpack(form, data))


class UnixListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts streams at a path; closing it removes the socket file, if it is still ours."""

    def __init__(self, path: str, sock: socket.socket) -> None:
        self.path = path
        self._identity = _identify(path)
        self._listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))

    async def accept(self) -> trio.SocketStream:
        """The next connection.

        Raises:
            trio.ClosedResourceError: the listener was closed.
        """
        return await self._listener.accept()

    async def aclose(self) -> None:
        # Unlink before closing: afterwards the path may already be somebody else's.
        if self._identity is not None and _identify(self.path) == self._identity:
            os.unlink(self.path)
        self._identity = None
        await self._listener.aclose()


async def open_unix_listener(path: str | os.PathLike[str], mode: int = 0o600) -> UnixListener:
    """Listens at `path`; a socket file that nobody listens on any more is replaced.

    Args:
        path: in an existing directory.
        mode: permissions of the socket file, in force before the first connection can be made.

    Raises:
        EngineError: address in use by a live process, by something that is no socket, or the path is too long; or
            another process held the directory's lock for too long.
        OSError: the directory is missing or not writable.
    """
    text = _check_path(path)
    directory = os.open(os.path.dirname(text) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        await _lock(directory, text)
        sock = _bind(text)
        try:
            os.chmod(text, mode)
            sock.listen(BACKLOG)
            return UnixListener(text, sock)
        except BaseException:
            sock.close()
            os.unlink(text)
            raise
    finally:
        os.close(directory)  # and with it the lock


async def _lock(directory: int, path: str) -> None:
    with trio.move_on_after(LOCK_S):
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                await trio.sleep(0.01)
    raise EngineError(f"{path}: another process is binding in this directory for more than {LOCK_S} s")


def _bind(path: str) -> socket.socket:
    with _closing_on_error(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)) as sock:
        sock.setblocking(False)
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            sock.bind(path)
        return sock


@contextmanager
def _closing_on_error(sock: socket.socket) -> Iterator[socket.socket]:
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise EngineError(f"{path}: address in use by a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(path)
    # EAGAIN: its backlog is full, so somebody listens.
    if result != errno.ECONNREFUSED:
        raise EngineError(f"{path}: address in use by a live process")
    os.unlink(path)


def _identify(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
