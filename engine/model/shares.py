"""Shares: what members of a mesh say of their shared memory once they have met, and the descriptor that goes along.

A member says it behind its hello, to each other one, and maps what it hears when all are there. Both ends know what
they are to share, so a member that shares something else, or nothing, has another configuration: that is an error.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from engine.errors import RemoteProtocolError
from engine.model.exchange import Link, MeshBroken
from engine.model.peer_memory import PeerMapping, SharedMemory, open_peer

_SHARE = struct.Struct("<8sq16s")
_MAGIC = b"cpshare\x01"


def send_share(sock: socket.socket, share: SharedMemory) -> None:
    """Says it to who is at the other end. Raises OSError if that one has left."""
    socket.send_fds(sock, [_pack(share)], [share.descriptor])


def receive_shares(
    links: Sequence[Link],
    share: SharedMemory,
    *,
    due: float,
    limit_s: float,
    look_s: float,
    is_wanted: Callable[[], bool],
) -> dict[int, PeerMapping]:
    """The memory of the others, by place, mapped for the device of the own one; theirs to close who calls.

    Args:
        links: all others.
        share: the own memory.
        due: by the monotonic clock, until when to wait.
        limit_s: that limit as it was given, for its name.
        look_s: longest time between two calls of `is_wanted`.
        is_wanted: False when there is no use in waiting.

    Raises:
        MeshBroken: one has left, did not say its memory in time (overdue), or it is not wanted any more.
        RemoteProtocolError: one shares something else, or nothing.
        DeviceError: what one shares can not be mapped.
    """
    found: dict[int, PeerMapping] = {}
    poll = select.poll()
    waiting = {link.fd: link for link in links}
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    try:
        while waiting:
            silent = next(iter(waiting.values()))
            left_s = due - time.monotonic()
            if not is_wanted():
                raise MeshBroken(
                    silent.place, "had not said its memory when the membership was given up", overdue=False
                )
            if left_s <= 0:
                raise MeshBroken(silent.place, f"did not say its memory within {limit_s:g} s", overdue=True)
            for fd, _ in poll.poll(1e3 * min(left_s, look_s)):
                found[waiting[fd].place] = _receive(waiting[fd], share)
                poll.unregister(fd)
                del waiting[fd]
    except BaseException:
        for peer in found.values():
            peer.close()
        raise
    return found


def _pack(share: SharedMemory) -> bytes:
    digest = hashlib.blake2b(share.layout.encode(), digest_size=16).digest()
    return _SHARE.pack(_MAGIC, share.num_bytes, digest)


def _receive(link: Link, share: SharedMemory) -> PeerMapping:
    """What one has said: sent at once and shorter than any socket's buffer, so it is there whole or it is none."""
    try:
        said, descriptors, _, _ = socket.recv_fds(link.sock, _SHARE.size, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise MeshBroken(link.place, f"lost its connection: {error}", overdue=False) from None
    try:
        if not said:
            raise MeshBroken(link.place, "closed its connection before it said its memory", overdue=False)
        if len(said) != _SHARE.size or said[:8] != _MAGIC or not descriptors:
            raise RemoteProtocolError(f"rank {link.rank} shares no memory, and should share {share.layout}")
        if said != _pack(share):
            size = _SHARE.unpack(said)[1]
            raise RemoteProtocolError(
                f"rank {link.rank} shares {size} bytes of another layout than {share.num_bytes} of {share.layout}"
            )
        return open_peer(descriptors[0], share.num_bytes, share.device)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
