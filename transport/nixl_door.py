"""Door: how a peer that waits for this process to poll wakes its owner thread: a datagram socket, rung without a word.

NIXL offers nothing of the kind, and polling often enough for any peer that might write costs more than all that they
write. The socket is in the abstract namespace: no file is left behind, and the name is gone with the process. A ring is
a hint. Who can not reach the door (another network namespace, another host) is served by the slow poll; who rings
without reason makes us poll, no more.
"""

from __future__ import annotations

import contextlib
import socket

RINGS_READ = 64
"""At a time; one is as good as many."""


class Door:
    """The door of one process, and its hand for others' doors. Belongs to one thread; nothing here blocks."""

    def __init__(self, name: str) -> None:
        """Opens it.

        Args:
            name: unique on this host; up to 100 characters.

        Raises:
            OSError: the name is taken.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(f"\0{name}")
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> bool:
        """Takes the rings so far; whether there were any."""
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while taken < RINGS_READ:
                self._socket.recv(1)
                taken += 1
        return taken > 0

    def ring(self, name: str) -> None:
        """Rings another's door, if it can be reached and its rings are not piled up already."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", f"\0{name}")

    def close(self) -> None:
        self._socket.close()
