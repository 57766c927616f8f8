"""How the members of a group find one another: the listener of a device's life, and `open_mesh` for each membership.

Connections belong to one membership: a hello names it, and both ends' rank and generation, and whatever does not fit is
dropped. The lower place dials, again and again: the other may not have heard of the membership yet. Members that have
memory for one another swap it behind the hello (`shares.py`).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.core.group import Membership
from engine.errors import EngineError
from engine.model.exchange import Key, Link, Mesh, MeshBroken, Piece

if TYPE_CHECKING:
    from engine.model.peer_memory import SharedMemory

__all__ = ["Key", "Mesh", "MeshBroken", "MeshListener", "Piece", "open_mesh"]

POLL_S = 0.05
"""Longest wait before the membership is asked for again and a failed dial repeated."""
BACKLOG = 128
STRANGERS = 32
"""Accepted connections that have not said their hello; beyond, the oldest is dropped."""
_HELLO = struct.Struct("<8s5q")
_MAGIC = b"cpmesh\x00\x01"


class MeshListener:
    """Where the other members dial this device, at `address`, all its life long.

    Raises:
        EngineError: the path is in use by a live process or by something that is no socket.
        OSError: its directory is missing or not writable, or it is too long for a socket.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            _bind(self.sock, address)
            os.chmod(address, 0o600)
            self.sock.listen(BACKLOG)
        except BaseException:
            self.sock.close()
            raise
        self._identity = _identify(address)

    def close(self) -> None:
        """Also removes the socket file, if it is still this one's. A second time does nothing."""
        if self._identity is not None and _identify(self.address) == self._identity:
            os.unlink(self.address)
        self._identity = None
        self.sock.close()


def open_mesh(
    listener: MeshListener,
    membership: Membership,
    place: int,
    *,
    limit_s: float,
    is_wanted: Callable[[], bool],
    meet_s: float | None = None,
    share: SharedMemory | None = None,
) -> Mesh:
    """Connects `place` with all other living members of `membership`.

    Args:
        limit_s: for each exchange, and for the connections unless `meet_s` is given.
        is_wanted: asked at least every `POLL_S`; False when another membership is to be joined instead.
        meet_s: for the connections. Members that are still in another membership join when their step is over.
        share: memory for the others, which all members then have, each its own of the same layout: the mesh's `peers`
            are the others', mapped for the device of this one.

    Raises:
        MeshBroken: names a place that is missing when the limit has passed (overdue, unless it was there and has left)
            or the membership is not wanted any more (not overdue).
        RemoteProtocolError: a member shares memory of another layout, or none.
        DeviceError: what a member shares can not be mapped.
    """
    meeting = _Meeting(listener, membership, place, share)
    meet_s = limit_s if meet_s is None else meet_s
    due = time.monotonic() + meet_s
    try:
        while meeting.missing:
            if not is_wanted():
                why = f"had not joined membership {membership.number} when it was given up"
                raise MeshBroken(meeting.missing[0], why, overdue=False)
            left_s = due - time.monotonic()
            if left_s <= 0:
                raise meeting.accuse(meet_s)
            meeting.go_on(min(POLL_S, left_s))
        peers = {}
        if share is not None:
            # Loaded here: members that share nothing need not load torch.
            from engine.model.shares import receive_shares

            peers = receive_shares(
                meeting.links, share, due=due, limit_s=meet_s, look_s=POLL_S, is_wanted=is_wanted
            )  # fmt: skip
        return Mesh(place, meeting.take_links(), limit_s, peers)
    finally:
        meeting.close()


class _Meeting:
    """Connections in the making. Places above the own one are dialled, those below are waited for."""

    def __init__(self, listener: MeshListener, membership: Membership, place: int, share: SharedMemory | None) -> None:
        self._listener = listener
        self._membership = membership
        self._place = place
        self._share = share
        self._others = [other for other in membership.living if other != place]
        self._links: dict[int, socket.socket] = {}
        self._dialled: dict[int, socket.socket] = {}
        self._dial_after = dict.fromkeys(self._others, 0.0)
        self._strangers: list[socket.socket] = []
        self._gone: set[int] = set()

    @property
    def missing(self) -> list[int]:
        return [other for other in self._others if other not in self._links]

    def accuse(self, limit_s: float) -> MeshBroken:
        """Whom to name at the limit: one that never came before one that came, and left since its own limit ended."""
        for other in self.missing:
            if other not in self._gone:
                why = f"did not join membership {self._membership.number} within {limit_s:g} s"
                return MeshBroken(other, why, overdue=True)
        return MeshBroken(self.missing[0], f"joined membership {self._membership.number} and left", overdue=False)

    @property
    def links(self) -> list[Link]:
        """All connections, once none is missing."""
        members = self._membership.members
        return [Link(other, members[other].rank, self._links[other]) for other in self._others]

    def take_links(self) -> list[Link]:
        """The same, which are the caller's from now on."""
        links, self._links = self.links, {}
        return links

    def close(self) -> None:
        for sock in [*self._links.values(), *self._dialled.values(), *self._strangers]:
            sock.close()

    def go_on(self, wait_s: float) -> None:
        """Dials who is to be dialled, then takes what comes within `wait_s`."""
        for other in self.missing:
            # Not more often: a member that is still in another membership refuses at once.
            if other > self._place and other not in self._dialled and time.monotonic() >= self._dial_after[other]:
                self._dial_after[other] = time.monotonic() + POLL_S
                self._dial(other)
        poll = select.poll()
        for sock in [self._listener.sock, *self._dialled.values(), *self._strangers]:
            poll.register(sock, select.POLLIN)
        for sock in self._links.values():
            poll.register(sock, select.POLLRDHUP)
        ready = {fd for fd, _ in poll.poll(1e3 * wait_s)}
        for other, sock in list(self._links.items()):
            if sock.fileno() in ready:
                # It gave up, and is met again or missed; a mesh with its dead connection would leave it waiting.
                self._links.pop(other).close()
                self._gone.add(other)
        for other, sock in list(self._dialled.items()):
            if sock.fileno() in ready:
                self._hear_answer(other, sock)
        for sock in list(self._strangers):
            if sock.fileno() in ready:
                self._strangers.remove(sock)
                self._hear_stranger(sock)
        if self._listener.sock.fileno() in ready:
            self._accept()

    def _dial(self, other: int) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._membership.members[other].mesh_address)
            sock.send(self._hello(self._place, other))
        except OSError:
            # Not there yet, gone, or its backlog is full: the next turn tries again.
            sock.close()
        else:
            self._dialled[other] = sock

    def _hear_answer(self, other: int, sock: socket.socket) -> None:
        del self._dialled[other]
        if _read_hello(sock) == self._hello(other, self._place):
            self._keep(other, sock)
        else:
            sock.close()

    def _keep(self, other: int, sock: socket.socket) -> None:
        """A member that has said its hello, and heard the own one, hears of the own memory."""
        if self._share is not None:
            from engine.model.shares import send_share

            try:
                send_share(sock, self._share)
            except OSError:
                sock.close()
                return
        self._links[other] = sock

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.sock.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            self._strangers.append(sock)
            if len(self._strangers) > STRANGERS:
                self._strangers.pop(0).close()

    def _hear_stranger(self, sock: socket.socket) -> None:
        heard = _read_hello(sock)
        for other in self._others:
            if other < self._place and heard == self._hello(other, self._place):
                try:
                    sock.send(self._hello(self._place, other))
                except OSError:
                    break
                # A second call of the same member: it has given the first one up.
                if other in self._links:
                    self._links.pop(other).close()
                self._keep(other, sock)
                return
        sock.close()

    def _hello(self, sender: int, receiver: int) -> bytes:
        source, target = self._membership.members[sender], self._membership.members[receiver]
        return _HELLO.pack(
            _MAGIC, self._membership.number, source.rank, source.generation, target.rank, target.generation
        )


def _read_hello(sock: socket.socket) -> bytes:
    """A hello is sent at once and shorter than any socket's buffer, so it is there whole or it is none."""
    try:
        return sock.recv(_HELLO.size)
    except OSError:
        return b""


def _bind(sock: socket.socket, address: str) -> None:
    """Replaces the file of an earlier life of this rank: only that one and this one ever bind there."""
    try:
        sock.bind(address)
        return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    if not stat.S_ISSOCK(os.lstat(address).st_mode):
        raise EngineError(f"{address}: address in use by a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # EAGAIN: its backlog is full, so somebody listens.
        if probe.connect_ex(address) != errno.ECONNREFUSED:
            raise EngineError(f"{address}: address in use by a live process")
    os.unlink(address)
    sock.bind(address)


def _identify(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
