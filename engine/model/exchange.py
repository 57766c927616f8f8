"""Frames between the ranks of one group, all to all, on connections that are open: `Mesh`.

Blocking, for a device's worker thread. Sending and receiving are interleaved on non-blocking sockets, so frames larger
than the kernel's buffers pass both ways at once. Nothing spins: a group may have more ranks than the host has cores.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from engine.model.peer_memory import PeerMapping

Piece = bytes | bytearray | memoryview | npt.NDArray[Any]
"""What a frame is made of: contiguous bytes in any shape."""
Key = tuple[int, int, int, int]
"""Step, pass, layer and phase of an exchange."""
FRAME_LIMIT = 1 << 30
"""Bytes of one frame."""
LOOK_S = 1e-4
"""How often sockets are looked at, where the time until the caller's next look is too short for a poll."""
GRACE_S = 1.0
"""Longest time beyond the limit before one of several silent places is accused; see `Mesh._check_overdue`."""
_HEADER = struct.Struct("<q4q")
_PIECES_PER_CALL = 512  # the kernel takes at most 1,024 in one call


class MeshBroken(Exception):
    """An exchange, or the making of a mesh, can not be finished; the device turns it into `GroupBroken`.

    Attributes:
        place: who did not answer.
        why: what it did, to be read after its name.
        overdue: True if a limit has passed; False if its connection ended, maybe because it has lost a third one.
    """

    def __init__(self, place: int, why: str, *, overdue: bool) -> None:
        super().__init__(f"place {place} {why}")
        self.place = place
        self.why = why
        self.overdue = overdue


class Link:
    """One connection of a mesh: what is still to be sent, and the frame that arrives."""

    def __init__(self, place: int, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.place = place
        self.rank = rank
        self.sock = sock
        self.fd = sock.fileno()
        self.unsent: list[memoryview] = []
        self._header = bytearray(_HEADER.size)
        # Two, used in turn: a frame stays readable while the next one arrives.
        self._buffers = [bytearray(), bytearray()]
        self._turn = 0
        self._got = 0
        self._key: Key | None = None
        self._payload = memoryview(b"")

    def send(self) -> None:
        """Sends what the kernel takes now. Raises OSError if the connection has ended."""
        unsent = self.unsent
        while unsent:
            try:
                sent = self.sock.sendmsg(unsent[:_PIECES_PER_CALL])
            except BlockingIOError:
                return
            done = 0
            while done < len(unsent) and sent >= unsent[done].nbytes:
                sent -= unsent[done].nbytes
                done += 1
            del unsent[:done]
            if sent:
                unsent[0] = unsent[0][sent:]

    def expect(self) -> None:
        """Turns to the next frame; the buffer of the one before the last is used again."""
        self._turn ^= 1
        self._got = 0
        self._key = None

    def receive(self) -> tuple[Key, memoryview] | None:
        """Reads what is there of the expected frame, and nothing behind it; the frame once it is whole.

        Raises:
            OSError: the connection has ended; EOFError: at its end of stream.
            RemoteProtocolError: the frame's length is none.
        """
        try:
            while self._key is None:
                self._got += self._read(memoryview(self._header)[self._got :])
                if self._got == _HEADER.size:
                    size, *key = _HEADER.unpack(self._header)
                    self._key = (key[0], key[1], key[2], key[3])
                    self._payload = self._make_room(size)
                    self._got = 0
            while self._got < len(self._payload):
                self._got += self._read(self._payload[self._got :])
        except BlockingIOError:
            return None
        return self._key, self._payload

    def _read(self, room: memoryview) -> int:
        count = self.sock.recv_into(room)
        if not count:
            raise EOFError
        return count

    def _make_room(self, size: int) -> memoryview:
        if not 0 <= size <= FRAME_LIMIT:
            raise RemoteProtocolError(f"rank {self.rank} announces a frame of {size} bytes (limit {FRAME_LIMIT})")
        if size > len(self._buffers[self._turn]):
            # A new one, not a longer one: views of the old one may be about. Rounded up, so that it seldom grows.
            self._buffers[self._turn] = bytearray(1 << max(12, (size - 1).bit_length()))
        return memoryview(self._buffers[self._turn])[:size]


class Mesh:
    """Connections to all other living members of a membership.

    After any error it is closed, so that the others feel at once that this member will not go on.

    Attributes:
        places: living places, own included, in order.
        peers: by place the others' memory, where members share some. They stay mapped after `close`: whoever has made
            the mesh closes them, when no kernel can touch them any more.
    """

    def __init__(
        self, place: int, links: Sequence[Link], limit_s: float, peers: Mapping[int, PeerMapping] | None = None
    ) -> None:
        self.peers: Mapping[int, PeerMapping] = peers or {}
        self.places = tuple(sorted([place, *(link.place for link in links)]))
        self._links = {link.place: link for link in links}
        self._limit_s = limit_s
        self._begun: tuple[Key, float] | None = None
        self._open = True
        self._ends = select.poll()
        for link in links:
            self._ends.register(link.fd, select.POLLRDHUP)

    def exchange(self, key: Key, frames: Mapping[int, Sequence[Piece]]) -> dict[int, memoryview]:
        """`start` and `finish` in one."""
        self.start(key, frames)
        return self.finish(key)

    def start(self, key: Key, frames: Mapping[int, Sequence[Piece]]) -> None:
        """Begins to send one frame to each other place; what it is made of must not change before `finish` is over.

        Args:
            key: step, pass, layer and phase; the same for all members, at their same exchange.
            frames: for each other living place, what its frame consists of; may be empty.

        Raises:
            MeshBroken: a connection has ended.
            LocalProtocolError: a frame for another place or none for one, one too long, or no `finish` came before.
        """
        if not self._open or self._begun is not None:
            raise LocalProtocolError(f"an exchange of {_name(key)} on a mesh that is {self._state()}")
        if frames.keys() != self._links.keys():
            raise LocalProtocolError(f"frames for places {sorted(frames)} from one of {self.places}")
        # The limit counts from before the first byte is sent: whoever gets this frame starts its next exchange later,
        # so its limit ends later, and of two that wait for a third the one nearer to it finds out first.
        self._begun = key, time.monotonic()
        try:
            for place, link in self._links.items():
                pieces = [view.cast("B") for view in map(_view, frames[place]) if view.nbytes]
                size = sum(piece.nbytes for piece in pieces)
                if size > FRAME_LIMIT:
                    raise LocalProtocolError(f"a frame of {size} bytes for rank {link.rank} (limit {FRAME_LIMIT})")
                link.expect()
                link.unsent = [memoryview(_HEADER.pack(size, *key)), *pieces]
                self._send(link)
        except BaseException:
            self.close()
            raise

    def finish(self, key: Key, look: Callable[[], float] | None = None) -> dict[int, memoryview]:
        """Waits until all frames are sent and all others' have arrived: for each other place its frame's bytes.

        The views are writable and stay as they are until the second `start` after this call.

        Args:
            key: what was started.
            look: called while it waits; in how many seconds it is to be called again.

        Raises:
            MeshBroken: a place did not send, or take, its frame within the limit, or its connection ended.
            RemoteProtocolError: a frame of another key.
            LocalProtocolError: `key` is not what was started.
        """
        if self._begun is None or self._begun[0] != key:
            raise LocalProtocolError(f"the end of an exchange of {_name(key)} on a mesh that is {self._state()}")
        try:
            frames = self._finish(*self._begun, look)
        except BaseException:
            self.close()
            raise
        self._begun = None
        return frames

    def find_gone(self) -> MeshBroken | None:
        """A member whose connection has ended, if there is one; nobody where this one has closed them. Between two
        exchanges, and does not wait."""
        if not self._open:
            # The numbers of its descriptors may be others' by now.
            return None
        for fd, _ in self._ends.poll(0):
            place = next(link.place for link in self._links.values() if link.fd == fd)
            return MeshBroken(place, "closed its connection", overdue=False)
        return None

    def close(self) -> None:
        """Ends all connections. Views that were returned stay readable."""
        self._open = False
        for link in self._links.values():
            link.unsent = []
            link.sock.close()

    def _finish(self, key: Key, begun: float, look: Callable[[], float] | None) -> dict[int, memoryview]:
        frames: dict[int, memoryview] = {}
        poll = select.poll()
        waiting = {link.fd: link for link in self._links.values()}
        for fd, link in waiting.items():
            poll.register(fd, _interest(link, frames))
        while waiting:
            ready = self._poll(poll, begun, look)
            for fd, _ in ready:
                link = waiting[fd]
                self._send(link)
                if link.place not in frames:
                    self._receive(link, key, frames)
                interest = _interest(link, frames)
                if interest:
                    poll.modify(fd, interest)
                else:
                    # Left out altogether: a peer that has ended after its frame is no matter of this exchange.
                    poll.unregister(fd)
                    del waiting[fd]
            if not ready:
                self._check_overdue(key, begun, list(waiting.values()), frames)
        return frames

    def _poll(self, poll: select.poll, begun: float, look: Callable[[], float] | None) -> list[tuple[int, int]]:
        """What can be sent or received; nothing after a while."""
        look_s = math.inf if look is None else look()
        left_s = max(0.0, self._next_check(begun) - time.monotonic())
        if look_s >= left_s:
            return poll.poll(1e3 * left_s)
        # A poll waits for whole milliseconds, and rounds up.
        ready = poll.poll(int(1e3 * look_s))
        if not ready and look_s < 1e-3:
            time.sleep(min(look_s, LOOK_S))
        return ready

    def _next_check(self, begun: float) -> float:
        due = begun + self._limit_s
        return due if time.monotonic() < due else due + self._grace_s

    @property
    def _grace_s(self) -> float:
        return min(GRACE_S, self._limit_s / 4)

    def _check_overdue(self, key: Key, begun: float, silent: list[Link], frames: dict[int, memoryview]) -> None:
        """Accuses a silent place once the limit has passed.

        Of several, some may only be waiting for another. Their own limit ended earlier (see `start`), so their
        connections end within the grace, and only who does nothing at all is left to be accused.
        """
        late = time.monotonic() - begun - self._limit_s
        if late < 0 or (len(silent) > 1 and late < self._grace_s):
            return
        link = silent[0]
        what = "took no whole frame" if link.place in frames else "sent no whole frame"
        raise MeshBroken(link.place, f"{what} of {_name(key)} within {self._limit_s:g} s", overdue=True)

    def _send(self, link: Link) -> None:
        try:
            link.send()
        except OSError as error:
            raise _ended(link, error) from None

    def _receive(self, link: Link, key: Key, frames: dict[int, memoryview]) -> None:
        try:
            frame = link.receive()
        except (OSError, EOFError) as error:
            raise _ended(link, error) from None
        if frame is None:
            return
        if frame[0] != key:
            raise RemoteProtocolError(f"rank {link.rank} sent a frame of {_name(frame[0])} in place of {_name(key)}")
        frames[link.place] = frame[1]

    def _state(self) -> str:
        if not self._open:
            return "closed"
        return f"in the exchange of {_name(self._begun[0])}" if self._begun else "in no exchange"


def _view(piece: Piece) -> memoryview:
    return piece.data if isinstance(piece, np.ndarray) else memoryview(piece)


def _interest(link: Link, frames: Mapping[int, memoryview]) -> int:
    return (0 if link.place in frames else select.POLLIN) | (select.POLLOUT if link.unsent else 0)


def _ended(link: Link, error: Exception) -> MeshBroken:
    why = "closed its connection" if isinstance(error, EOFError) else f"lost its connection: {error}"
    return MeshBroken(link.place, why, overdue=False)


def _name(key: Key) -> str:
    return "step {}, pass {}, layer {}, phase {}".format(*key)
