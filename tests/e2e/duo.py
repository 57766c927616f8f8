"""Duo: one prefill and one decode rank in this process, of production parts, under a head that only passes words on.

Both ranks are `run_rank` on TorchDevice with the bundled model; pages move over a fabric of the caller's choice. What
the decode rank hears is recorded byte by byte, what its device is asked is recorded plan by plan, and the state of a
sequence is copied at the moment its first decode row is submitted, which is after the push and before any decode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch
import trio
import trio.testing

from engine.actors.rank import run_rank
from engine.config import NANO, DraftConfig, Limits, RankConfig
from engine.core.tokens import unpack_tokens
from engine.model.device import open_torch_device
from engine.model.kv import POISON
from engine.model.transformer import Probe
from engine.ports import Audited, Device, HostProcess, RankIdentity, RankPorts
from tests.e2e.watch import SpoilingFabric, TappedStream, WatchedDevice
from transport.errors import PeerGone
from transport.fabric import Fabric
from transport.memory_fabric import MemoryWorld
from transport.messages import (
    HEAD_FROM_RANK,
    Message,
    PeerUp,
    RankReady,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ReservePages,
    Sampling,
    StartPrefill,
    TokensEmitted,
)
from transport.nixl_fabric import open_nixl_fabric
from transport.stream import FrameStream, run_link
from transport.tcp_fabric import open_tcp_fabric
from transport.wire import Frame

PREFILL, DECODE = 0, 1
COMPLETE_S = 120.0
"""From the end of one request to that of the next: if nothing ends for so long, it hangs."""


class OneListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts what is put into it."""

    def __init__(self) -> None:
        self.put, self._get = trio.open_memory_channel[trio.abc.Stream](8)

    async def accept(self) -> trio.abc.Stream:
        return await self._get.receive()

    async def aclose(self) -> None:
        await self._get.aclose()


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what became of it."""

    number: int
    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = dataclasses.field(default_factory=list)
    started: RequestStarted | None = None
    finished: RequestFinished | None = None
    failed: RequestFailed | None = None
    done: trio.Event = dataclasses.field(default_factory=trio.Event)


@dataclasses.dataclass(eq=False)
class Seat:
    """One rank as its head sees it."""

    frames: FrameStream
    heard_from_head: bytearray
    device: WatchedDevice | None = None
    ready: RankReady | None = None
    is_ready: trio.Event = dataclasses.field(default_factory=trio.Event)


class Duo:
    """Made by `open_duo`.

    Attributes:
        heard_from_peer: all bytes of the pair streams that came into the decode rank.
        seats: the ranks.
    """

    def __init__(self, name: str, configs: dict[int, RankConfig]) -> None:
        self.name = name
        self.configs = configs
        self.heard_from_peer = bytearray()
        self.seats: dict[int, Seat] = {}
        self.requests: dict[int, Request] = {}

    @property
    def decode(self) -> WatchedDevice:
        device = self.seats[DECODE].device
        assert device is not None
        return device

    @property
    def prefill(self) -> WatchedDevice:
        device = self.seats[PREFILL].device
        assert device is not None
        return device

    def make_request(self, prompt: Sequence[int], **sampling: Any) -> Request:
        """A request under the next number; submitted by `complete`."""
        request = Request(len(self.requests) + 1, list(prompt), Sampling(**sampling))
        self.requests[request.number] = request
        return request

    async def complete(self, requests: Sequence[Request]) -> None:
        """Submits them all at once and waits until each is answered, well or badly."""
        for request in requests:
            number, sampling = request.number, request.sampling
            start = StartPrefill(number, 1, DECODE, 0, sampling, 0)
            self.seats[PREFILL].frames.post(start, array("i", request.prompt).tobytes())
            self.seats[DECODE].frames.post(ReservePages(number, 1, PREFILL, len(request.prompt), 0, sampling))
        for request in requests:
            with trio.fail_after(COMPLETE_S):
                await request.done.wait()

    def on_message(self, seat: Seat, message: Message, blob: memoryview) -> None:
        match message:
            case RankReady():
                seat.ready = message
                seat.is_ready.set()
            case TokensEmitted():
                for row in unpack_tokens(message.num_rows, message.num_tokens, blob):
                    tokens = self.requests[row.request].tokens
                    assert row.first_index == len(tokens), f"request {row.request}: a gap or a repeat"
                    tokens += row.tokens
            case RequestStarted():
                self.requests[message.request].started = message
            case RequestFinished():
                self.requests[message.request].finished = message
                self.requests[message.request].done.set()
            case RequestFailed():
                self.requests[message.request].failed = message
                self.requests[message.request].done.set()


def nano_config(
    *,
    role: str = "decode",
    page_tokens: int = 64,
    chunk_tokens: int = 128,
    num_pages: int = 240,
    model: str = NANO,
    checksums: bool = False,
) -> RankConfig:
    """A rank of the bundled model; sizes small enough that a test's arenas take megabytes."""
    return RankConfig(
        role=role,  # type: ignore[arg-type]
        model=model,
        device="cpu",
        fabric="auto",
        page_tokens=page_tokens,
        max_model_tokens=2048,
        num_pages=num_pages,
        num_slabs=40,
        kv_dtype="float32",
        threads=1,
        replay_rows=0,
        config_digest="duo",
        limits=Limits(prefill_chunk_tokens=chunk_tokens, decode_rows=32),
        # The drafter's context is kept and goes over, but each step has one row a sequence, which tests here look at.
        draft=DraftConfig(max_rows=0),
        checksum_pushes=checksums,
    )


@contextlib.asynccontextmanager
async def open_duo(
    fabric: str,
    *,
    page_tokens: int = 64,
    chunk_tokens: int = 128,
    prefill_page_tokens: int | None = None,
    spoil: Callable[[Duo, Sequence[int]], None] | None = None,
    checksums: bool = False,
) -> AsyncIterator[Duo]:
    """Both ranks, introduced to each other, on poisoned arenas.

    Args:
        fabric: `nixl`, `tcp` or `memory`.
        page_tokens, chunk_tokens: of both ranks.
        prefill_page_tokens: of the prefill rank, where it is to differ.
        spoil: called with the decode rank's blocks that a push has just written.
        checksums: pushes have them.
    """
    configs = {
        PREFILL: nano_config(
            role="prefill",
            page_tokens=prefill_page_tokens or page_tokens,
            chunk_tokens=chunk_tokens,
            checksums=checksums,
        ),
        DECODE: nano_config(page_tokens=page_tokens, chunk_tokens=chunk_tokens, checksums=checksums),
    }
    duo = Duo(fabric, configs)
    world = MemoryWorld(random.Random(0))
    listener = OneListener()

    async def dial(address: str) -> trio.abc.Stream:
        assert address == "decode"
        ours, theirs = trio.testing.memory_stream_pair()
        await listener.put.send(TappedStream(theirs, duo.heard_from_peer))
        return ours

    async def live(rank: int, stream: trio.abc.Stream) -> None:
        seat, is_decode = duo.seats[rank], rank == DECODE
        async with _open_fabric(fabric, f"duo{rank}", world, receives=is_decode) as opened:

            async def open_device(report: Callable[[str, int, int, str], None]) -> Device:
                device = await open_torch_device(configs[rank], report, poison=True)
                device.model.probe = Probe([0] * device.model.shape.num_layers)
                seat.device = WatchedDevice(device, copies=is_decode)
                return seat.device  # type: ignore[return-value]

            async def open_fabric() -> Fabric:
                await trio.lowlevel.checkpoint()
                if spoil is not None and not is_decode:
                    return SpoilingFabric(opened, lambda blocks: spoil(duo, blocks))  # type: ignore[return-value]
                return opened

            ports = RankPorts(
                head=stream,
                open_device=open_device,
                open_fabric=open_fabric,
                peer_listener=listener if is_decode else None,
                peer_address="decode" if is_decode else "",
                dial=dial,
                process=HostProcess(is_own=False),
                audit=_check_memory,
            )
            await run_rank(ports, RankIdentity(rank, 1, configs[rank]))

    async def listen(seat: Seat) -> None:
        def handle(batch: list[Frame]) -> None:
            for frame in batch:
                duo.on_message(seat, frame.message, frame.blob)

        with contextlib.suppress(PeerGone):
            await run_link(seat.frames, handle)

    async with trio.open_nursery() as nursery:
        for rank in (DECODE, PREFILL):
            ours, theirs = trio.testing.memory_stream_pair()
            frames = FrameStream(ours, accepts=HEAD_FROM_RANK, out_limit_bytes=8 << 20, stall_s=10, name=f"rank {rank}")
            seat = duo.seats[rank] = Seat(frames, bytearray())
            nursery.start_soon(live, rank, TappedStream(theirs, seat.heard_from_head))
            nursery.start_soon(listen, seat)
        with trio.fail_after(30):
            for seat in duo.seats.values():
                await seat.is_ready.wait()
        for shared in (run for seat in duo.seats.values() for run in _views(seat)):
            assert bool((shared == POISON).all()), "the arenas start poisoned"
        duo.seats[PREFILL].frames.post(PeerUp(DECODE, 1, "decode"))
        try:
            yield duo
        finally:
            nursery.cancel_scope.cancel()


def _check_memory(side: Audited) -> None:
    side.check()


def _views(seat: Seat) -> list[torch.Tensor]:
    assert seat.device is not None
    arena = seat.device.device.model.arena
    pages = [arena.page_bytes_of(page) for page in range(arena.num_pages)]
    return pages + [arena.slab_bytes_of(slab) for slab in range(arena.num_slabs)]


def _open_fabric(engine: str, name: str, world: MemoryWorld, *, receives: bool) -> AbstractAsyncContextManager[Fabric]:
    if engine == "nixl":
        return open_nixl_fabric(name, receives=receives)
    if engine == "tcp":
        return open_tcp_fabric(name)
    assert engine == "memory"
    return world.open_fabric(name)
