"""FrameStream: frames over one `trio.abc.Stream`, safe to cancel at every await.

Who may do what: one task receives, one task runs `run_writer` and is the only one that waits for the stream to take
bytes, any task may `post` or `send`. While the writer has nothing to do, posting gives the stream what it takes at
once, without a wait: then no task need run for a frame. What it does not take is queued for the writer, and so is all
that comes while something is queued. The writer works behind a shield: when it is cancelled no more frames are taken,
and it has a grace period to get out what is queued.
Only if that ends, or the peer does not read for `stall_s`, is a frame torn; then the connection is broken on this side
and the peer sees an end of stream inside a frame.

Invariant: `pending_bytes` is the sum over queued buffers and never exceeds `out_limit_bytes`.
"""

from __future__ import annotations

import collections
import errno
import math
import os
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import trio

from transport.errors import EngineError, Overflow, PeerGone
from transport.messages import Message
from transport.unix import UnixListener as UnixListener
from transport.unix import open_unix_listener as open_unix_listener
from transport.unix import open_unix_stream as open_unix_stream
from transport.wire import Buffer, Frame, FrameReader, encode_frame

GATHER_BUFFERS = 64
"""Buffers in one sendmsg; far below IOV_MAX, enough that small frames cost a fraction of a system call."""
JOIN_BYTES = 64 << 10
"""Without sendmsg, small buffers are joined (one copy) and large ones cut into sends of about this size."""
GRACE_S = 1.0
"""What a cancelled writer has to flush its queue."""


@runtime_checkable
class SendsNow(Protocol):
    """A stream that can take bytes without a wait."""

    def send_now(self, data: bytes) -> int:
        """Takes a first part of `data`; how many bytes. 0 where it takes none, or is closed or broken."""
        ...


class FrameStream:
    """Framed messages over a byte stream.

    Args:
        stream: connected; owned from now on. A `trio.SocketStream` is driven by sendmsg and recv_into, anything else
            through `send_all` and `receive_some`, and `send_now` where it has it.
        accepts: message types the peer may send; others are protocol errors.
        out_limit_bytes: bytes queued for sending at most, headers included.
        stall_s: seconds without progress of a write after which the peer is gone.
        name: of the peer, for error messages.
        grace_s: seconds that a cancelled writer has to flush.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        accepts: frozenset[type[Message]],
        out_limit_bytes: int,
        stall_s: float,
        name: str,
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._send_now = stream.send_now if self._socket is None and isinstance(stream, SendsNow) else None
        self._reader = FrameReader(accepts)
        self._out: collections.deque[memoryview] = collections.deque()
        self._out_bytes = 0
        self._out_limit = out_limit_bytes
        self._stall_s = stall_s
        self._grace_s = grace_s
        self._work = trio.lowlevel.ParkingLot()
        self._is_idle = False
        """The writer runs, waits for work, and nothing is queued."""
        self._room = trio.lowlevel.ParkingLot()
        # Whoever waits for room waits in line, so that a large frame is not starved by small ones.
        self._send_turn = trio.StrictFIFOLock()
        self._closing = False
        self._broken: str | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes queued and not yet given to the operating system."""
        return self._out_bytes

    # ------------------------------------------------------------ receiving

    async def receive(self) -> list[Frame]:
        """All complete frames that are there now, at least one. Cancelling loses nothing.

        It waits as long as the peer is silent; whether silence is bad is for a heartbeat to say.

        Raises:
            PeerGone: end of stream (`inside a frame` if it tore one), reset, or closed on this side.
            RemoteProtocolError: after all frames before the violation were returned.
        """
        while True:
            frames = self._reader.take()
            if frames:
                return frames
            try:
                if self._socket is not None:
                    count = await self._socket.recv_into(self._reader.room())
                    if count:
                        self._reader.received(count)
                else:
                    data = await self._stream.receive_some()
                    count = len(data)
                    self._reader.feed(data)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise PeerGone(f"{self.name}: {_why(error)}") from error
            if count == 0:
                where = "end of stream inside a frame" if self._reader.inside_frame else "end of stream"
                raise PeerGone(f"{self.name}: {where}")

    # ------------------------------------------------------------ sending

    def post(self, message: Message, blob: Buffer = b"") -> None:
        """Sends or queues one frame; never blocks, never a checkpoint. The blob must not change until it is sent.

        Raises:
            Overflow: the queue has no room for it.
            PeerGone: the connection is closing or broken.
            LocalProtocolError: see `encode_frame`.
        """
        buffers = encode_frame(message, blob)
        if self._closing or self._broken is not None:
            self._check_open()
        size = len(buffers[0])
        if len(buffers) > 1:
            size += len(buffers[1])
        if self._out_bytes + size > self._out_limit:
            raise self._overflow()
        self._append(buffers, size)

    async def send(self, message: Message, blob: Buffer = b"") -> None:
        """Sends or queues one frame, waiting for room. Cancelled means neither; returned means one of both.

        Senders that wait are served in order; `post` does not stand in their line.

        Raises:
            Overflow: the frame alone is larger than the queue may be.
            PeerGone, LocalProtocolError: as in `post`.
        """
        buffers = encode_frame(message, blob)
        size = sum(buffer.nbytes for buffer in buffers)
        if size > self._out_limit:
            raise self._overflow()
        await self._send_turn.acquire()
        try:
            while self._out_bytes + size > self._out_limit:
                self._check_open()
                await self._room.park()
            self._check_open()
            self._append(buffers, size)  # no checkpoint after this: nothing could tell that it is queued
        finally:
            self._send_turn.release()

    def _append(self, buffers: list[memoryview], size: int) -> None:
        sent = 0
        if self._is_idle:
            # What the stream takes without a wait: nothing is before this frame.
            if self._send_now is not None:
                sent = self._send_now(b"".join(buffers))
            elif self._socket is not None:
                sent = self._write_now(self._socket, buffers)
        if sent == size:
            return
        self._out.extend(buffers)
        self._out_bytes += size
        if sent:
            self._drop_sent(sent)
        self._wake()

    def _write_now(self, socket: trio.socket.SocketType, buffers: list[memoryview]) -> int:
        try:
            return os.writev(socket.fileno(), buffers)
        except OSError:
            return 0  # it takes none now, or is broken: the writer finds out

    def _wake(self) -> None:
        if self._is_idle:
            self._is_idle = False
            self._work.unpark_all()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise PeerGone(f"{self.name}: {self._broken}")
        if self._closing:
            raise PeerGone(f"{self.name}: connection is closing")

    def _overflow(self) -> Overflow:
        return Overflow(f"send queue of {self.name} (bytes)", self._out_limit)

    # ------------------------------------------------------------ the writer

    async def run_writer(self) -> None:
        """Writes what is queued. Returns when `close` was called and the queue is empty.

        Cancelled, it takes no more frames and flushes what is queued for at most the grace period.

        Raises:
            PeerGone: the connection broke, or the peer did not read for `stall_s`.
        """
        async with trio.open_nursery() as nursery:
            shield = trio.CancelScope(shield=True)
            nursery.start_soon(self._close_when_cancelled, shield)
            with shield:
                await self._write()
            if shield.cancelled_caught:
                self._break(f"not flushed within {self._grace_s} s: {self._out_bytes} bytes left")
            nursery.cancel_scope.cancel()
        if self._broken is not None:
            raise PeerGone(f"{self.name}: {self._broken}")

    async def _close_when_cancelled(self, shield: trio.CancelScope) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.close()
            shield.deadline = min(shield.deadline, trio.current_time() + self._grace_s)

    async def _write(self) -> None:
        # One scope for all writes, whose deadline moves: a scope for each would cost more than most writes.
        with trio.CancelScope() as stall:
            await self._write_queued(stall)
        if stall.cancelled_caught:
            self._break(f"does not read: nothing sent for {self._stall_s} s")

    async def _write_queued(self, stall: trio.CancelScope) -> None:
        while self._broken is None:
            if not self._out:
                if self._closing:
                    return
                self._is_idle = True
                try:
                    await self._work.park()
                finally:
                    self._is_idle = False
                continue
            batch = self._gather()
            stall.deadline = trio.current_time() + self._stall_s
            try:
                if self._socket is not None:
                    sent = await self._socket.sendmsg(batch)
                else:
                    data = batch[0] if len(batch) == 1 else b"".join(batch)
                    await self._stream.send_all(data)
                    sent = len(data)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._break(_why(error))
                return
            stall.deadline = math.inf
            if self._broken is not None:
                return  # closed on this side since; what was sent is not in the queue any more
            self._drop_sent(sent)

    def _gather(self) -> list[memoryview]:
        if self._socket is not None:
            return [self._out[i] for i in range(min(len(self._out), GATHER_BUFFERS))]
        batch = [self._out[0][:JOIN_BYTES]]  # in pieces, so that a slow peer's progress is seen
        size = self._out[0].nbytes
        for i in range(1, len(self._out)):
            size += self._out[i].nbytes
            if size > JOIN_BYTES:
                break
            batch.append(self._out[i])
        return batch

    def _drop_sent(self, count: int) -> None:
        self._out_bytes -= count
        while count:
            head = self._out[0]
            if count < head.nbytes:
                self._out[0] = head[count:]
                break
            count -= head.nbytes
            self._out.popleft()
        if self._room:
            self._room.unpark_all()

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
        self._out.clear()
        self._out_bytes = 0
        self._room.unpark_all()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """No more posts; the writer flushes what is queued and returns. The stream itself stays open for receiving."""
        self._closing = True
        self._wake()
        self._room.unpark_all()

    async def aclose(self) -> None:
        """Closes the stream at once; what is still queued is lost (let `run_writer` return first to avoid that)."""
        self.close()
        if self._out:
            self._break("closed on this side")
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


def _why(error: Exception) -> str:
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno not in (None, errno.EBADF):
        return errno.errorcode.get(cause.errno or 0, str(cause))
    broke = isinstance(error, trio.BrokenResourceError)
    return "connection broke" if broke else "closed on this side"


Handler = Callable[[list[Frame]], Awaitable[None] | None]


async def run_link(frames: FrameStream, handle: Handler) -> None:
    """Reads and writes until one of both ends, then ends the other (the writer flushes within its grace).

    `handle` gets every batch of frames in order and may be sync or async; the next batch is read after it is done.
    Returns if `close` was called and the queue is flushed; else the first EngineError of reader, writer or handler
    is raised as it is, not in a group. Anything else a handler raises is a bug and comes in an ExceptionGroup. The
    stream stays open.

    Raises:
        PeerGone: the usual end.
        EngineError: RemoteProtocolError, or what `handle` raised.
    """
    errors: list[EngineError] = []

    async def read() -> None:
        try:
            while True:
                batch = await frames.receive()
                waiting = handle(batch)
                if waiting is not None:
                    await waiting
        except EngineError as error:
            errors.append(error)
        nursery.cancel_scope.cancel()

    async def write() -> None:
        try:
            await frames.run_writer()
        except PeerGone as error:
            errors.append(error)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        nursery.start_soon(read)
    if errors:
        raise errors[0]
