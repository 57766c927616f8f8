"""Control streams between simulated processes: bytes that take time, may be held up, and end when a process dies.

A Cable is a connection with two ends; each direction has latency, bandwidth and a window of unread bytes, delivers in
order, and costs one clock event per delivery, or a share of one where wires deliver at ticks (see `Post`). What a
process wrote before it died still arrives, then the end of the stream: as a kernel does it. Only for the clocks of
`engine.sim`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable

import trio

from engine.actors.bell import Bell
from engine.sim.clock import Clock

WINDOW_BYTES = 256 << 10
"""Unread bytes after which a sender waits."""


@dataclasses.dataclass(slots=True)
class WireSpeed:
    """Of one direction. `tick_s`: readers hear of arrivals only at its multiples. `held_until`: not before that."""

    latency_s: float
    bytes_per_s: float
    tick_s: float = 0.0
    held_until: float = 0.0


class Post:
    """Deliveries of many wires that are due at one tick: a single event of the clock for all of them, in order.

    It comes at the place of the first of them among what the clock has planned for that instant.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: dict[float, list[Callable[[], None]]] = {}

    def at(self, when: float, deliver: Callable[[], None]) -> None:
        """As `Clock.at`."""
        due = self._due.get(when)
        if due is not None:
            due.append(deliver)
        else:
            self._due[when] = [deliver]
            self._clock.at(when, self._deliver, when)

    def _deliver(self, when: float) -> None:
        for deliver in self._due.pop(when):
            deliver()


class _Direction:
    """Bytes on their way from one end to the other."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        speed: WireSpeed,
        tap: Callable[[str, bytes], None],
        is_coy: Callable[[], bool] | None,
        post: Post | None,
    ) -> None:
        self.name = name
        self.speed = speed
        self._clock = clock
        self._at = clock.at if post is None else post.at
        self._tap = tap
        self._is_coy = is_coy
        self._flying: collections.deque[tuple[float, bytes]] = collections.deque()
        self._arrived: collections.deque[bytes] = collections.deque()
        self._num_bytes = 0
        self._free_at = 0.0
        self._last_arrival = 0.0
        self._is_scheduled = False
        self._reader = Bell()
        self._writers = trio.lowlevel.ParkingLot()
        self.is_closed_by_writer = False
        self.is_closed_by_reader = False
        self.sent_at = 0.0

    def send_now(self, data: bytes) -> int:
        """All of it, or nothing: where the sender would wait, where this end is closed, or where it so pleases."""
        if (
            self.is_closed_by_writer
            or self.is_closed_by_reader
            or self._num_bytes > WINDOW_BYTES
            or (self._is_coy is not None and self._is_coy())
        ):
            return 0
        self._begin(data)
        return len(data)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.is_closed_by_writer:
            raise trio.ClosedResourceError
        while self._num_bytes > WINDOW_BYTES and not self.is_closed_by_reader:
            await self._writers.park()
            if self.is_closed_by_writer:
                raise trio.ClosedResourceError
        if self.is_closed_by_reader:
            raise trio.BrokenResourceError
        self._begin(data)

    def _begin(self, data: bytes) -> None:
        now, speed = self._clock.now, self.speed
        self.sent_at = now
        self._tap(self.name, data)
        free_at = self._free_at
        self._free_at = free_at = (free_at if free_at > now else now) + len(data) / speed.bytes_per_s
        self._put(free_at + speed.latency_s, data)

    def _put(self, arrival: float, data: bytes) -> None:
        tick_s = self.speed.tick_s
        if tick_s:
            arrival = math.ceil(arrival / tick_s) * tick_s
        if arrival < self._last_arrival:
            arrival = self._last_arrival
        self._last_arrival = arrival
        self._flying.append((arrival, data))
        self._num_bytes += len(data)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        arrival, held_until = self._flying[0][0], self.speed.held_until
        self._at(arrival if arrival > held_until else held_until, self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        now, flying = self._clock.now, self._flying
        if self.speed.held_until <= now:
            while flying and flying[0][0] <= now:
                self._arrived.append(flying.popleft()[1])
            self._reader.ring()
        if flying:
            self._schedule()

    async def receive(self, max_bytes: int | None = None) -> bytes:
        """The oldest that has arrived, once something has; nothing at the end."""
        arrived = self._arrived
        if arrived:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not arrived:
            if self.is_closed_by_reader:
                await trio.lowlevel.checkpoint_if_cancelled()
                raise trio.ClosedResourceError
            await self._reader.wait()
        data = arrived[0]
        if not data:
            return b""  # the end stays
        arrived.popleft()
        if self._num_bytes > WINDOW_BYTES:  # else no writer waits
            self._writers.unpark_all()
        self._num_bytes -= len(data)
        return data

    def close_writer(self) -> None:
        if not self.is_closed_by_writer:
            self.is_closed_by_writer = True
            self._put(self._clock.now + self.speed.latency_s, b"")
            self._writers.unpark_all()

    def close_reader(self) -> None:
        if not self.is_closed_by_reader:
            self.is_closed_by_reader = True
            self._arrived.clear()
            self._reader.ring()
            self._writers.unpark_all()

    @property
    def is_over(self) -> bool:
        return self.is_closed_by_writer and self.is_closed_by_reader


class CableEnd(trio.abc.Stream):
    """One end of a cable: a `trio.abc.Stream`."""

    def __init__(self, out: _Direction, into: _Direction) -> None:
        self.out, self.into = out, into
        # Called for each frame: without a call between.
        self.send_now, self.receive_some = out.send_now, into.receive  # type: ignore[method-assign]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.out.send(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self.into.receive(max_bytes)

    async def aclose(self) -> None:
        self.cut()
        await trio.lowlevel.checkpoint()

    def cut(self) -> None:
        """Closes this end in no time."""
        self.out.close_writer()
        self.into.close_reader()

    @property
    def is_cut(self) -> bool:
        return self.out.is_closed_by_writer


def make_cable(
    clock: Clock,
    one: str,
    other: str,
    speeds: tuple[WireSpeed, WireSpeed],
    tap: Callable[[str, bytes], None],
    is_coy: Callable[[], bool] | None = None,
    post: Post | None = None,
) -> tuple[CableEnd, CableEnd]:
    """Two connected ends, of the processes `one` and `other`.

    Args:
        tap: sees all bytes as they are sent.
        is_coy: whether an end takes nothing without a wait this time, as a kernel's buffer may be full at any time;
            None: never.
        post: calls their deliveries; the clock itself without one.
    """
    forth = _Direction(clock, f"{one}>{other}", speeds[0], tap, is_coy, post)
    back = _Direction(clock, f"{other}>{one}", speeds[1], tap, is_coy, post)
    return CableEnd(forth, back), CableEnd(back, forth)


class CableListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts what `offer` hands it."""

    def __init__(self, backlog: int = 64) -> None:
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](backlog)
        self.is_closed = False

    def offer(self, stream: trio.abc.Stream) -> None:
        """Raises OSError when the backlog is full or nobody listens any more."""
        try:
            self._send.send_nowait(stream)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionRefusedError("nobody accepts here") from None

    async def accept(self) -> trio.abc.Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self.is_closed = True
        self._receive.close()
        self._send.close()
