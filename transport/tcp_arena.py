"""TcpArena: the receiving side of the TCP fabric. Accepts pushers and writes what they send into the arena.

A connection starts with a handshake: magic, the secret of this life, which only the holder of our description knows,
and the digest of the pusher's name. So nobody else can write, and nothing meant for an earlier life lands in this one.
Then transfers, one after the other:

    <IIQ  sequence, count, num_bytes | int32 block[count] | the blocks' bytes in that order

Blocks are looked up in our *own* table; what does not add up ends the connection before a byte lands. The bytes are
read straight into the arena, and the transfer is answered with its sequence number (uint32) when the last one is there.

A pusher that died leaves bytes in the socket's buffer, which would still be written: hence `sever`.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import secrets
import struct

import numpy as np
import trio

from transport.blocks import BlockTable, view_runs
from transport.errors import FabricError
from transport.tcp_bytes import prepare_socket, receive_exactly, receive_into, send_views

MAGIC = b"CPFB\x01"
WELCOME = b"ok\x01\n"
HEADER = struct.Struct("<IIQ")
ANSWER = struct.Struct("<I")
SECRET_BYTES = 32
DIGEST_BYTES = 32

CONNECTIONS_LIMIT = 256
HANDSHAKE_S = 5.0
SEVERED_LIMIT = 1024
"""Names of dead pushers that are remembered; a connection of theirs can not be older than the listener's queue."""


def digest_name(name: str) -> bytes:
    """How a pusher calls itself in the handshake."""
    return hashlib.sha256(name.encode()).digest()


class TcpArena:
    """An arena that pushers may write to; `run` serves them.

    Args:
        listener: bound and listening; closed by the owner.
        table: the arena's blocks. The memory must outlive `run`.
        user_timeout_s: see `tcp_bytes.prepare_socket`.
    """

    def __init__(self, listener: trio.socket.SocketType, table: BlockTable, user_timeout_s: float) -> None:
        self.table = table
        self.views = view_runs(table)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = listener
        self._user_timeout_s = user_timeout_s
        self._connections = trio.Semaphore(CONNECTIONS_LIMIT)
        self._pusher_to_sockets: dict[bytes, set[trio.socket.SocketType]] = {}
        self._severed: collections.deque[bytes] = collections.deque(maxlen=SEVERED_LIMIT)

    def sever(self, name: str) -> None:
        """Closes all connections of that pusher and refuses new ones; nothing of it is written after this."""
        pusher = digest_name(name)
        self._severed.append(pusher)
        for sock in self._pusher_to_sockets.pop(pusher, ()):
            sock.close()

    async def run(self) -> None:
        """Accepts and serves until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._connections.acquire()
                try:
                    sock, _ = await self._listener.accept()
                    prepare_socket(sock, self._user_timeout_s)
                except OSError:
                    # Out of descriptors, or a connection that died in the queue: neither ends the fabric.
                    self._connections.release()
                    await trio.sleep(0.05)
                    continue
                nursery.start_soon(self._serve, sock)

    async def _serve(self, sock: trio.socket.SocketType) -> None:
        pusher = None
        try:
            with trio.move_on_after(HANDSHAKE_S):
                pusher = await self._shake_hands(sock)
            # It may have been severed while we answered.
            if pusher is not None and pusher not in self._severed:
                self._pusher_to_sockets.setdefault(pusher, set()).add(sock)
                while True:
                    await self._receive_transfer(sock)
        except (OSError, EOFError, trio.ClosedResourceError):
            pass  # the pusher went away or broke the protocol; it learns by the end of the connection
        finally:
            sock.close()
            self._connections.release()
            if pusher is not None and pusher in self._pusher_to_sockets:
                self._pusher_to_sockets[pusher].discard(sock)
                if not self._pusher_to_sockets[pusher]:
                    del self._pusher_to_sockets[pusher]

    async def _shake_hands(self, sock: trio.socket.SocketType) -> bytes | None:
        """The pusher's digest, or None for a stranger, who learns nothing."""
        known = MAGIC + self.secret
        hello = bytes(await receive_exactly(sock, len(known) + DIGEST_BYTES))
        pusher = hello[len(known) :]
        if not hmac.compare_digest(hello[: len(known)], known) or pusher in self._severed:
            return None
        await send_views(sock, [memoryview(WELCOME)])
        return pusher

    async def _receive_transfer(self, sock: trio.socket.SocketType) -> None:
        sequence, count, num_bytes = HEADER.unpack(await receive_exactly(sock, HEADER.size))
        if not 0 < count <= self.table.num_blocks:
            raise EOFError(f"{count} blocks announced")
        numbers = np.frombuffer(await receive_exactly(sock, 4 * count), np.int32)
        try:
            indices = self.table.indices(numbers, "remote")
        except FabricError as error:
            raise EOFError(str(error)) from None
        if np.unique(indices).size != count or int(self.table.sizes(indices).sum()) != num_bytes:
            raise EOFError("sizes do not add up")
        await receive_into(sock, [self.views[run][at : at + length] for run, at, length in self.table.ranges(indices)])
        await send_views(sock, [memoryview(ANSWER.pack(sequence))])
