"""Loop: the step loop of one rank as ranks run it, around a device of this process, which plays its head and its peer.

Sides, inbox, streams, pushes and device are those of a rank. What head and peer say is put into the inbox as if it had
been read; what the rank tells them is packed and written to a socket, whose other end a process of its own throws away,
and noted here. Left out are a rank's reports, and the reading of frames.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import trio

from engine.actors.copies import Members
from engine.actors.intake import HeadFrame, Inbox, LinkUp, PeerFrame, PushDone
from engine.actors.links import Link, Links
from engine.actors.push import Pushing
from engine.actors.rank import open_group, side_sizes
from engine.actors.step import Garbage, StepLoop
from engine.compose import first_of
from engine.config import RankConfig
from engine.core.decode import DecodeSide
from engine.core.effects import ReadBack
from engine.core.prefill import PrefillSide
from engine.core.pushes import PushMeter
from engine.core.telemetry import Meters
from engine.errors import EngineError
from engine.ports import Device, RankIdentity
from transport.background import open_background
from transport.fabric import Fabric, Target, TransferReport
from transport.messages import PROTOCOL_VERSION, Message, PeerHello, PeerWelcome, RequestFailed
from transport.stream import FrameStream
from transport.wire import Buffer

PREFILL, DECODE = 0, 1
"""Numbers of the two ranks; other members of a decode rank's group come behind it."""
LIFE = 1
OUT_BYTES = 64 << 20
STALL_S = 10.0

M = TypeVar("M", bound=Message)


class NotedStream(FrameStream):
    """A stream that keeps what was posted. `passed` and `heard`: called with every message, behind the writing."""

    def __init__(self, stream: trio.abc.Stream, name: str) -> None:
        super().__init__(stream, accepts=frozenset(), out_limit_bytes=OUT_BYTES, stall_s=STALL_S, name=name)
        self.notes: list[tuple[Message, bytes]] = []
        self.passed: Callable[[Message], None] = lambda message: None
        self.heard = self.passed

    def post(self, message: Message, blob: Buffer = b"") -> None:
        super().post(message, blob)
        self.notes.append((message, bytes(blob)))
        self.passed(message)
        self.heard(message)

    def find(self, kind: type[M]) -> list[tuple[M, bytes]]:
        """What was posted of one kind, in order."""
        return [(message, blob) for message, blob in self.notes if isinstance(message, kind)]


class StepNotes(Meters):
    """A rank's meters that keep every step's times. `noted`: called with the number of steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.times_us: list[tuple[int, int]] = []
        self.noted: Callable[[int], None] = lambda count: None

    def add_step(self, step: int, step_us: int, device_us: int) -> None:
        super().add_step(step, step_us, device_us)
        self.times_us.append((step_us, device_us))
        self.noted(len(self.times_us))


class NotedInbox(Inbox):
    """An inbox that keeps the reports of pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[TransferReport] = []

    def add(self, fact: object) -> None:
        if isinstance(fact, PushDone):
            self.reports.append(fact.report)
        super().add(fact)  # type: ignore[arg-type]  # a Fact, whose name is a union


@dataclasses.dataclass(frozen=True)
class RankLoop:
    """A loop that runs.

    Attributes:
        side: decides; a PrefillSide or a DecodeSide.
        link: number of the pair stream to the peer.
        head, peer: what the rank tells them.
        meters: of its steps.
        numbers: of requests.
    """

    side: PrefillSide | DecodeSide
    device: Device
    inbox: NotedInbox
    link: int
    head: NotedStream
    peer: NotedStream
    meters: StepNotes
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def forget(self) -> None:
        """What was noted so far."""
        self.head.notes.clear()
        self.peer.notes.clear()
        self.meters.times_us.clear()

    def say_as_head(self, message: Message, blob: bytes = b"") -> None:
        """A frame of the head."""
        self.inbox.put(HeadFrame(message, memoryview(blob)))

    def say_as_peer(self, message: Message, blob: bytes = b"") -> None:
        """A frame of the peer."""
        self.inbox.put(PeerFrame(self.link, message, memoryview(blob)))

    async def wait_for(self, stream: NotedStream, kind: type[M], count: int, limit_s: float) -> list[tuple[M, bytes]]:
        """The first `count` messages of a kind that were told over `stream`.

        Raises:
            EngineError: they were not within `limit_s`, or a request failed.
        """
        news = trio.Event()

        def hear(message: Message) -> None:
            if isinstance(message, kind | RequestFailed):
                news.set()

        self.head.heard, stream.heard = hear, hear
        with trio.move_on_after(limit_s):
            while len(found := stream.find(kind)) < count:
                failed = self.head.find(RequestFailed)
                if failed:
                    raise EngineError(f"request {failed[0][0].request} failed: {failed[0][0].message}")
                news = trio.Event()
                await news.wait()
            return found[:count]
        raise EngineError(f"{len(stream.find(kind))} of {count} {kind.__name__} were told within {limit_s:g} s")


@contextlib.asynccontextmanager
async def open_loop(
    config: RankConfig,
    device: Device,
    *,
    place: int = 0,
    fabric: Fabric | None = None,
    target: Target | None = None,
    remote_pages: int = 0,
    remote_slabs: int = 0,
) -> AsyncIterator[RankLoop]:
    """The loop of a rank with `config.role`, linked to its peer, for as long as the block runs.

    Args:
        config: of the rank. The prefix cache is off, whatever it says: what was computed once must be computed again.
        device: borrowed.
        place: in its group.
        fabric: of a prefill rank, and of one in a group.
        target: of a prefill rank: where it pushes to.
        remote_pages, remote_slabs: of a prefill rank: what its target has.

    Raises:
        ConfigError: limits and device do not fit each other.
        EngineError: what ends a rank, a failed device among it.
    """
    config = dataclasses.replace(config, prefix_cache=False)
    rank = PREFILL if config.role == "prefill" else DECODE + place
    identity = RankIdentity(rank, LIFE, config)
    sizes = side_sizes(identity, device.info)
    side: PrefillSide | DecodeSide
    side = PrefillSide(sizes) if rank == PREFILL else DecodeSide(sizes)
    inbox, links, meters = NotedInbox(), Links(), StepNotes()
    send_reading, readings = trio.open_memory_channel[ReadBack](device.info.num_slabs)
    async with contextlib.AsyncExitStack() as open_things, send_reading, readings:
        head = await open_things.enter_async_context(_open_stream("head"))
        peer = await open_things.enter_async_context(_open_stream("peer"))
        other = DECODE if rank == PREFILL else PREFILL
        link = Link(peer, trio.CancelScope(), target=target, remote_pages=remote_pages, rank=other, generation=LIFE)
        number = links.add(link)
        async with open_tasks() as nursery:
            group = None
            if config.group > 1:
                assert fabric is not None
                members = Members(rank)
                members.fabric = fabric
                group = open_group(identity, head, inbox, members, device, fabric, nursery)
            pushing = None
            if fabric is not None:
                pushing = Pushing(
                    fabric,
                    links,
                    inbox,
                    PushMeter(),
                    nursery,
                    num_pages=device.info.num_pages,
                    transfer_s=config.limits.transfer_s,
                    reader=device if config.checksum_pushes else None,
                )
            garbage = Garbage(is_own=False)
            loop = StepLoop(
                side,
                device,
                head,
                inbox,
                links,
                pushing,
                send_reading,
                meters,
                garbage,
                audit=None,
                group=group,
                expect_push=None if fabric is None else fabric.expect_push,
            )
            for task in (head.run_writer, peer.run_writer, inbox.run_alarm, loop.run_waiter, loop.run):
                nursery.start_soon(task)
            digest = device.info.layout_digest
            greeting: Message = PeerHello(version=PROTOCOL_VERSION, rank=other, generation=LIFE, layout_digest=digest)
            if rank == PREFILL:
                greeting = PeerWelcome(
                    version=PROTOCOL_VERSION,
                    rank=other,
                    generation=LIFE,
                    layout_digest=digest,
                    num_pages=remote_pages,
                    num_slabs=remote_slabs,
                )
            inbox.put(LinkUp(number, greeting))
            yield RankLoop(side, device, inbox, number, head, peer, meters)


@contextlib.asynccontextmanager
async def open_tasks() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks end with its body; what went wrong in them first comes out as it is."""
    try:
        async with open_background() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        first = first_of(group, EngineError)
        if first is None:
            raise  # a bug
        raise first from None


@contextlib.asynccontextmanager
async def _open_stream(name: str) -> AsyncIterator[NotedStream]:
    """A stream whose other end is read by a process of its own: its cost is not this rank's."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader = await trio.lowlevel.open_process(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
    stream = NotedStream(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), name)
    try:
        async with stream:
            yield stream
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(STALL_S):
            await reader.wait()  # it has read the end
        if reader.returncode is None:
            reader.kill()
