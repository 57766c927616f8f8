"""Rack: prefill and decode ranks in one process on virtual time, under a head that checks every word they say.

Ranks are the production `run_rank` on SimDevice and MemoryFabric; killing one closes its streams, ends its fabric and
tells the others, as a supervisor would. The head here is the test's: it submits, aborts, retries and keeps the books.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from array import array
from collections.abc import Callable
from typing import Any

import trio
import trio.testing

from engine.actors.rank import run_rank
from engine.config import Limits, RankConfig
from engine.core.tokens import unpack_tokens
from engine.ports import Device, RankIdentity, RankPorts
from engine.sim.device import SimDevice
from engine.sim.text import expect_text
from transport.errors import PeerGone
from transport.memory_fabric import MemoryFabric, MemoryWorld
from transport.messages import (
    HEAD_FROM_RANK,
    Abort,
    Drain,
    Message,
    PeerDown,
    PeerUp,
    RankHello,
    RankReady,
    RankSnapshot,
    RankStarting,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ReservePages,
    Sampling,
    StartPrefill,
    TokensEmitted,
)
from transport.stream import FrameStream, run_link
from transport.wire import Frame

LIMITS = Limits(prefill_chunk_tokens=32, prefill_prompts=3, decode_rows=4, link_stall_s=5.0)


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts what `dial` of the rack hands it."""

    def __init__(self) -> None:
        self.put, self._get = trio.open_memory_channel[trio.abc.Stream](64)

    async def accept(self) -> trio.abc.Stream:
        try:
            return await self._get.receive()
        except trio.ClosedResourceError as error:
            raise trio.ClosedResourceError from error

    async def aclose(self) -> None:
        await self._get.aclose()


@dataclasses.dataclass(eq=False)
class Request:
    """A request as its client sees it. `ends`: (rank, message) that ended the running attempt."""

    number: int
    prompt: list[int]
    sampling: Sampling
    expected: list[int]
    reason: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    attempt: int = 0
    pair: tuple[int, int] = (-1, -1)
    open_on: set[int] = dataclasses.field(default_factory=set)
    is_aborting: bool = False
    started: RequestStarted | None = None
    finished: RequestFinished | None = None
    failed: RequestFailed | None = None
    outcome: str = ""
    done: trio.Event = dataclasses.field(default_factory=trio.Event)


@dataclasses.dataclass(eq=False)
class Rank:
    """One rank in its present life."""

    rank: int
    role: str
    generation: int = 0
    frames: FrameStream | None = None
    streams: list[trio.abc.Stream] = dataclasses.field(default_factory=list)
    scope: trio.CancelScope | None = None
    ready: RankReady | None = None
    device: Any = None
    fabric: MemoryFabric | None = None
    snapshot: RankSnapshot | None = None
    error: BaseException | None = None
    ended: trio.Event = dataclasses.field(default_factory=trio.Event)
    is_ready: trio.Event = dataclasses.field(default_factory=trio.Event)
    messages: list[Message] = dataclasses.field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.ready is not None and not self.ended.is_set()


class Rack:
    """Call `start`, then `submit` and friends from tests. `make_device(rank)` may differ from rank to rank."""

    def __init__(
        self,
        nursery: trio.Nursery,
        rng: random.Random,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        limits: Limits = LIMITS,
        make_device: Callable[[int], Any] | None = None,
        eos_share: float = 0.0,
        checksums: bool = False,
    ) -> None:
        self.checksums = checksums
        self.nursery, self.rng, self.limits = nursery, rng, limits
        self.world = MemoryWorld(random.Random(rng.random()))
        self.eos_share = eos_share
        self.make_device = make_device or (
            lambda rank: SimDevice(num_pages=64, num_slabs=8, page_tokens=8, eos_share=eos_share)
        )
        roles = ["prefill"] * num_prefill + ["decode"] * num_decode
        self.ranks = {rank: Rank(rank, role) for rank, role in enumerate(roles)}
        self.listeners: dict[str, MemoryListener] = {}
        self.requests: dict[int, Request] = {}
        self.late_rows = 0
        self.problems: list[str] = []
        self.auto_retry = True
        self.introduces = True

    # ------------------------------------------------------------ ranks

    async def start(self) -> None:
        for rank in self.ranks.values():
            await self.start_rank(rank)

    async def start_rank(self, rank: Rank) -> None:
        generation = rank.generation + 1
        fresh = Rank(rank.rank, rank.role, generation)
        rank.__dict__.update(fresh.__dict__)
        ours, theirs = trio.testing.memory_stream_pair()
        rank.streams = [ours, theirs]
        rank.frames = FrameStream(
            ours, accepts=HEAD_FROM_RANK, out_limit_bytes=1 << 20, stall_s=10, name=f"rank {rank.rank}"
        )
        rank.scope = trio.CancelScope()
        self.nursery.start_soon(self._live, rank, theirs, rank.scope, rank.ended)
        self.nursery.start_soon(self._listen, rank, rank.frames)
        await rank.is_ready.wait()
        for other in self.ranks.values() if self.introduces else ():
            if other.is_up and other is not rank and other.role != rank.role:
                decode, prefill = (rank, other) if rank.role == "decode" else (other, rank)
                assert decode.ready is not None and prefill.frames is not None
                prefill.frames.post(PeerUp(decode.rank, decode.generation, decode.ready.address))

    async def _live(self, rank: Rank, stream: trio.abc.Stream, scope: trio.CancelScope, ended: trio.Event) -> None:
        generation = rank.generation
        address = f"rank-{rank.rank}-{generation}"
        listener = None
        if rank.role == "decode":
            listener = self.listeners[address] = MemoryListener()
        with scope:
            async with self.world.open_fabric(f"rank{rank.rank}") as fabric:
                rank.fabric = fabric

                async def open_device(report: Callable[[str, int, int, str], None]) -> Device:
                    report("weights", 1, 1, "files")
                    await trio.sleep(0.01)
                    made = self.make_device(rank.rank)
                    if inspect.isawaitable(made):
                        made = await made
                    rank.device = made
                    return made

                async def open_fabric() -> MemoryFabric:
                    await trio.lowlevel.checkpoint()
                    return fabric

                async def dial(address: str) -> trio.abc.Stream:
                    return await self._dial(rank, address)

                ports = RankPorts(stream, open_device, open_fabric, listener, address, dial)
                identity = RankIdentity(rank.rank, generation, self._config(rank))
                try:
                    await run_rank(ports, identity)
                except Exception as error:
                    rank.error = error
                    if not getattr(error, "expected", False):
                        self.problems.append(f"rank {rank.rank}: {error!r}")
        self.listeners.pop(address, None)
        ended.set()

    async def _dial(self, rank: Rank, address: str) -> trio.abc.Stream:
        listener = self.listeners.get(address)
        if listener is None:
            raise OSError(f"nobody listens at {address}")
        ours, theirs = trio.testing.memory_stream_pair()
        rank.streams += [ours, theirs]
        for other in self.ranks.values():
            if other.ready is not None and other.ready.address == address:
                other.streams += [ours, theirs]
        await listener.put.send(theirs)
        return ours

    def _config(self, rank: Rank) -> RankConfig:
        return RankConfig(
            role=rank.role,  # type: ignore[arg-type]
            model="pure",
            device="pure",
            fabric="auto",
            page_tokens=8,
            max_model_tokens=1 << 20,
            num_pages=0,
            num_slabs=0,
            kv_dtype="float32",
            threads=1,
            replay_rows=0,
            config_digest="x",
            limits=self.limits,
            checksum_pushes=self.checksums,
        )

    async def kill(self, rank: Rank) -> None:
        """The process is gone between two instructions; everybody is told once that is certain."""
        assert rank.scope is not None and rank.fabric is not None
        await rank.fabric.aclose()
        for stream in rank.streams:
            await trio.aclose_forcefully(stream)
        rank.scope.cancel()
        await rank.ended.wait()
        await trio.sleep(self.rng.random() * 0.01)
        generation = rank.generation
        for other in self.ranks.values():
            if other.is_up and other is not rank:
                self._post(other, PeerDown(rank.rank, generation))
        for request in self.requests.values():
            if rank.rank in request.open_on:
                request.open_on.discard(rank.rank)
                if not request.is_aborting:
                    self._end_attempt(request)
                else:
                    self._settle(request)

    async def drain(self) -> None:
        """All ranks finish what they have and go."""
        for role in ("prefill", "decode"):
            for rank in self.ranks.values():
                if rank.role == role and rank.is_up:
                    self._post(rank, Drain())
                    await rank.ended.wait()

    def _post(self, rank: Rank, message: Message, blob: bytes = b"") -> None:
        assert rank.frames is not None
        try:
            rank.frames.post(message, blob)
        except PeerGone:
            pass

    # ------------------------------------------------------------ requests

    def make_request(self, number: int, num_prompt: int, **sampling: object) -> Request:
        prompt = [self.rng.randrange(2, 1000) for _ in range(num_prompt)]
        choice = Sampling(**sampling)  # type: ignore[arg-type]
        expected, reason = expect_text(array("i", prompt).tobytes(), choice, 1000, self.eos_share)
        return Request(number, prompt, choice, expected, reason)

    def submit(self, request: Request) -> None:
        """Sends the next attempt to a pair of ranks that are up; waits its turn by itself while there is none."""
        self.requests[request.number] = request
        self.nursery.start_soon(self._submit, request)

    async def _submit(self, request: Request) -> None:
        while True:
            pools = [[r for r in self.ranks.values() if r.role == role and r.is_up] for role in ("prefill", "decode")]
            if pools[0] and pools[1]:
                break
            await trio.sleep(0.05)
        prefill, decode = self.rng.choice(pools[0]), self.rng.choice(pools[1])
        request.attempt += 1
        request.pair = (prefill.rank, decode.rank)
        request.open_on = {prefill.rank, decode.rank}
        request.is_aborting = False
        ids = [*request.prompt, *request.tokens]
        generated = len(request.tokens)
        start = StartPrefill(request.number, request.attempt, decode.rank, generated, request.sampling, 0)
        reserve = ReservePages(request.number, request.attempt, prefill.rank, len(ids), generated, request.sampling)
        self._post(prefill, start, array("i", ids).tobytes())
        self._post(decode, reserve)

    def abort(self, request: Request) -> None:
        """Gives a request up for good."""
        if request.outcome or request.is_aborting or not request.open_on:
            return
        request.outcome = "aborted"
        self._abort_attempt(request)

    def _abort_attempt(self, request: Request) -> None:
        request.is_aborting = True
        for rank in sorted(request.open_on):
            self._post(self.ranks[rank], Abort(request.number, request.attempt))
        self._settle(request)

    def _end_attempt(self, request: Request) -> None:
        """One rank failed it or died: the other is told to give it up, then it is tried again."""
        if request.outcome:
            return
        self._abort_attempt(request)

    def _settle(self, request: Request) -> None:
        if request.open_on or not request.is_aborting:
            return
        request.is_aborting = False
        if request.outcome or not self.auto_retry:
            request.outcome = request.outcome or "failed"
            request.done.set()
        else:
            self.submit(request)

    # ------------------------------------------------------------ what ranks say

    async def _listen(self, rank: Rank, frames: FrameStream) -> None:
        generation = rank.generation

        def handle(batch: list[Frame]) -> None:
            for frame in batch:
                if rank.generation == generation:
                    self._on_message(rank, frame.message, frame.blob)

        try:
            await run_link(frames, handle)
        except PeerGone:
            pass

    def _on_message(self, rank: Rank, message: Message, blob: memoryview) -> None:
        match message:
            case RankSnapshot():
                rank.snapshot = message
                return
            case RankHello() | RankStarting():
                pass
            case RankReady():
                rank.ready = message
                rank.is_ready.set()
            case TokensEmitted():
                for row in unpack_tokens(message.num_rows, message.num_tokens, blob):
                    self._on_row(rank, *row)
            case RequestStarted():
                self._on_started(rank, message)
            case RequestFinished():
                self._on_finished(rank, message)
            case RequestFailed():
                self._on_failed(rank, message)
            case RequestAborted():
                request = self.requests[message.request]
                if request.attempt == message.attempt:
                    assert request.is_aborting, f"{message} from rank {rank.rank}, unasked"
                    request.open_on.discard(rank.rank)
                    self._settle(request)
        rank.messages.append(message)

    def _on_row(self, rank: Rank, number: int, attempt: int, index: int, tokens: list[int]) -> None:
        request = self.requests[number]
        assert attempt == request.attempt and rank.rank == request.pair[1], "row of another attempt"
        assert rank.rank in request.open_on, f"request {number}: tokens after its end"
        assert request.started is not None and request.started.attempt == attempt, "tokens before the start"
        assert index == len(request.tokens), f"request {number}: index {index}, have {len(request.tokens)}"
        request.tokens += tokens
        assert request.tokens == request.expected[: len(request.tokens)], f"request {number}: wrong tokens"

    def _on_started(self, rank: Rank, message: RequestStarted) -> None:
        request = self.requests[message.request]
        assert message.attempt == request.attempt and rank.rank in request.open_on
        assert request.started is None or request.started.attempt < message.attempt, "started twice"
        assert message.prompt_tokens == len(request.prompt)
        assert (message.prefill_rank, message.decode_rank) == request.pair
        assert message.pushed_bytes > 0 and message.pushes > 0
        request.started = message

    def _on_finished(self, rank: Rank, message: RequestFinished) -> None:
        request = self.requests[message.request]
        assert message.attempt == request.attempt and rank.rank in request.open_on
        assert request.tokens == request.expected, f"request {request.number} ended early"
        assert message.reason == request.reason
        assert message.completion_tokens == len(request.tokens)
        request.finished = message
        if request.is_aborting:
            # It overtook the abort, which is still acknowledged by both ranks.
            request.outcome = "finished"
            return
        request.open_on.clear()
        request.outcome = "finished"
        request.done.set()

    def _on_failed(self, rank: Rank, message: RequestFailed) -> None:
        request = self.requests[message.request]
        if message.attempt != request.attempt or request.is_aborting:
            return
        assert rank.rank in request.open_on, f"{message} after its end"
        request.failed = message
        request.open_on.discard(rank.rank)
        if not message.retryable:
            request.outcome = "failed"
        self._abort_attempt(request)


async def wait_free(rack: Rack, seconds: float = 30.0, *, num_slabs: int = 8) -> None:
    """Until every rank that is up has nothing left but what its prefix cache could give up at once."""
    deadline = trio.current_time() + seconds
    while True:
        snapshots = [rank.snapshot for rank in rack.ranks.values() if rank.is_up]
        if all(
            s is not None
            and s.pages_available == s.pages_total
            and s.waiting == s.running == s.pushes_inflight == 0
            and s.slabs_free + s.slabs_cached == num_slabs
            for s in snapshots
        ):
            return
        assert trio.current_time() < deadline, f"memory did not come back: {snapshots}"
        await trio.sleep(0.3)


async def wait_done(requests: list[Request], seconds: float = math.inf) -> None:
    with trio.fail_after(seconds):
        for request in requests:
            await request.done.wait()
