"""Moves whole byte views over a trio TCP socket: all of them sent, or all of them filled, with gather and scatter."""

from __future__ import annotations

import collections
import socket

import trio

GATHER_VIEWS = 64
"""Views in one system call; far below IOV_MAX, enough that 4 KiB blocks do not cost a call each."""


def prepare_socket(sock: trio.socket.SocketType, user_timeout_s: float) -> None:
    """Sets what every connection of the fabric wants; the timeout makes a host that vanished an error."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))


async def send_views(sock: trio.socket.SocketType, views: list[memoryview]) -> None:
    """Sends all bytes of the views. Cancelled, an unknown part is sent: the connection is then good for nothing.

    Raises:
        OSError, trio.ClosedResourceError: the connection broke or was closed here.
    """
    queue = collections.deque(views)
    while queue:
        _advance(queue, await sock.sendmsg([queue[i] for i in range(min(len(queue), GATHER_VIEWS))]))


async def receive_into(sock: trio.socket.SocketType, views: list[memoryview]) -> None:
    """Fills all views.

    Raises:
        EOFError: the peer closed the connection before.
        OSError, trio.ClosedResourceError: it broke or was closed here.
    """
    queue = collections.deque(views)
    while queue:
        parts = [queue[i] for i in range(min(len(queue), GATHER_VIEWS))]
        if len(parts) == 1:
            count = await sock.recv_into(parts[0])
        else:
            count = (await sock.recvmsg_into(parts))[0]
        if count == 0:
            raise EOFError("the peer closed the connection")
        _advance(queue, count)


async def receive_exactly(sock: trio.socket.SocketType, size: int) -> bytearray:
    """`size` bytes; raises like `receive_into`."""
    data = bytearray(size)
    await receive_into(sock, [memoryview(data)])
    return data


def _advance(queue: collections.deque[memoryview], count: int) -> None:
    while count:
        head = queue[0]
        if count < head.nbytes:
            queue[0] = head[count:]
            return
        count -= head.nbytes
        queue.popleft()
