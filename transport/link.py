"""FrameLink: the same frames for asyncio and uvloop, for processes that do not run trio (fronts, the console).

Smaller than `stream.FrameStream` because asyncio's transport owns the sending: a write is never half done by whoever
called it, and goes on while nobody waits. What is the same: bounded queue, cancel-safe receive, errors and their words.
"""

from __future__ import annotations

import asyncio
import os

from transport.errors import Overflow, PeerGone
from transport.messages import Message
from transport.wire import Buffer, Frame, FrameReader, encode_frame

READ_BYTES = 128 << 10
JOIN_BYTES = 64 << 10
"""A frame up to this size is copied together, which is cheaper than a second system call."""


class FrameLink:
    """Framed messages over an asyncio connection.

    Args:
        reader, writer: of the connection; owned from now on.
        accepts: message types the peer may send.
        out_limit_bytes: bytes that may wait for sending, headers included.
        stall_s: seconds that `send` waits for a peer that does not read.
        name: of the peer, for error messages.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        accepts: frozenset[type[Message]],
        out_limit_bytes: int,
        stall_s: float,
        name: str,
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader(accepts)
        self._out_limit = out_limit_bytes
        self._stall_s = stall_s
        self._broken: str | None = None
        # `drain` waits for the low mark: half the limit leaves room for whoever waited.
        # A connection that has ended already (a process that refused at once) is told by the first use.
        if not writer.transport.is_closing():
            writer.transport.set_write_buffer_limits(high=out_limit_bytes // 2)

    @property
    def pending_bytes(self) -> int:
        """Bytes queued and not yet given to the operating system."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self) -> list[Frame]:
        """All complete frames that are there now, at least one. Cancelling loses nothing.

        Raises:
            PeerGone: end of stream (`inside a frame` if it tore one), reset, or closed on this side.
            RemoteProtocolError: after all frames before the violation were returned.
        """
        while True:
            frames = self._frames.take()
            if frames:
                return frames
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError as error:
                raise self._gone(os.strerror(error.errno or 0)) from error
            if not data:
                inside = " inside a frame" if self._frames.inside_frame else ""
                raise self._gone(f"end of stream{inside}")
            self._frames.feed(data)

    def post(self, message: Message, blob: Buffer = b"") -> None:
        """Queues one frame; never blocks. The blob must not change until it is sent.

        Raises:
            Overflow: the queue has no room for it.
            PeerGone: the connection is closing or broken.
            LocalProtocolError: see `wire.encode_frame`.
        """
        buffers = encode_frame(message, blob)
        size = sum(buffer.nbytes for buffer in buffers)
        if self._broken is not None or self._writer.is_closing():
            raise self._gone(self._broken or "connection is closing")
        if self.pending_bytes + size > self._out_limit:
            raise Overflow(f"send queue of {self.name} (bytes)", self._out_limit)
        # Not writelines: CPython 3.12's forgets to pause writers at the high mark in its first releases.
        if size <= JOIN_BYTES:
            self._writer.write(b"".join(buffers))
        else:
            for buffer in buffers:
                self._writer.write(buffer)

    async def send(self, message: Message, blob: Buffer = b"") -> None:
        """Waits until half the queue is free, then queues one frame. Cancelled means not queued.

        Raises:
            Overflow: the frame does not fit beside half a queue.
            PeerGone: as in `post`, or the peer did not read for `stall_s`.
        """
        try:
            async with asyncio.timeout(self._stall_s):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise self._gone(f"does not read: queue still full after {self._stall_s} s") from None
        except OSError as error:
            raise self._gone(os.strerror(error.errno or 0)) from error
        self.post(message, blob)

    async def aclose(self) -> None:
        """Flushes for at most `stall_s`, then closes."""
        self._writer.close()
        try:
            async with asyncio.timeout(self._stall_s):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass  # it was broken already, and whoever used it was told

    def _gone(self, why: str) -> PeerGone:
        if self._broken is None:
            self._broken = why
        return PeerGone(f"{self.name}: {why}")


async def open_unix_link(
    path: str | os.PathLike[str],
    *,
    accepts: frozenset[type[Message]],
    out_limit_bytes: int,
    stall_s: float,
    name: str,
) -> FrameLink:
    """Dials the listener at `path`.

    Raises:
        PeerGone: nothing listens there, or it may not be reached.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(os.fspath(path))
    except OSError as error:
        raise PeerGone(f"{path}: {os.strerror(error.errno or 0)}") from error
    return FrameLink(reader, writer, accepts=accepts, out_limit_bytes=out_limit_bytes, stall_s=stall_s, name=name)
