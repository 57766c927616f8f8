"""Relay: copies bytes between stdin and stdout and the operators' socket. It knows nothing of frames and keeps nothing.

Two threads that block, one for each direction: then a reader that is slow slows the other end of its own direction, and
nothing is held here beyond one read. Whoever waits watches both, and stdout as well: of a pipe that nobody reads any
more one learns otherwise only by writing to it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from engine.errors import PeerGone
from engine.runtime import RuntimeDirectory

CHUNK_BYTES = 64 << 10
LINGER_S = 5.0
"""After the end of stdin, for the head's last answers."""
STDIN, STDOUT = 0, 1


def dial_head(directory: str, *, read_only: bool) -> tuple[socket.socket, str]:
    """A connection to `admin.sock` if this user may open it and wants to, else to `read.sock`; and which one it is.

    Raises:
        PeerGone: no head listens there, or this user may open neither; the cause says which.
    """
    runtime = RuntimeDirectory(directory)
    if not read_only:
        try:
            return _dial(runtime.admin_socket), "admin.sock"
        except PeerGone as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
    return _dial(runtime.read_socket), "read.sock"


def _dial(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise PeerGone(f"{path}: {error.strerror or error}") from error
    return sock


def run_relay(sock: socket.socket, stdin: int = STDIN, stdout: int = STDOUT) -> bool:
    """Copies until either side has ended; what is in a pipe then is lost, but for answers to the last bytes of stdin.

    The threads are left behind: they end with the process, or with what they wait for.

    Returns:
        Whether it was this side that ended, not the head.
    """
    ends, tell = os.pipe()

    def copy(source: int, target: int, mark: bytes) -> None:
        try:
            while data := os.read(source, CHUNK_BYTES):
                view = memoryview(data)
                while view:
                    view = view[os.write(target, view) :]
        except OSError:
            pass  # a side that is gone; which one makes no difference to a copy
        os.write(tell, mark)

    for source, target, mark in ((stdin, sock.fileno(), b"i"), (sock.fileno(), stdout, b"o")):
        threading.Thread(target=copy, args=(source, target, mark), daemon=True).start()
    watch = select.poll()
    watch.register(ends, select.POLLIN)
    watch.register(stdout, 0)  # its end alone
    until = None
    while True:
        wait_ms = None if until is None else max(0.0, 1e3 * (until - time.monotonic()))
        events = dict(watch.poll(wait_ms))
        if stdout in events or not events:
            return True
        if os.read(ends, 1) == b"o":
            return until is not None
        until = time.monotonic() + LINGER_S
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            return True  # the head has ended it at the same time
