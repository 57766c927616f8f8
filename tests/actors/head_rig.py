"""Memory streams with a reading end that tests can question: what a router's clients and ranks see."""

from __future__ import annotations

import struct

import trio
import trio.testing

from engine.actors.router import Client, Router, RouterLimits
from engine.errors import EngineError
from transport.messages import (
    CLIENT_FROM_HEAD,
    HEAD_FROM_CLIENT,
    HEAD_FROM_RANK,
    RANK_FROM_HEAD,
    Message,
    RankReady,
    RequestFinished,
    RequestStarted,
    Role,
    Sampling,
    Submit,
    Timings,
    TokensEmitted,
)
from transport.stream import FrameStream, run_link
from transport.wire import Frame

VOCAB = 100


def make_limits(**changes: object) -> RouterLimits:
    values: dict = {
        "queue_requests": 8,
        "queue_prompt_tokens": 1000,
        "client_inflight": 50,
        "rank_waiting": 4,
        "abort_s": 5.0,
        "vocab_size": VOCAB,
        "max_model_tokens": 128,
        **changes,
    }
    return RouterLimits(**values)


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def emitted(rows: list[tuple[int, int, int, list[int]]], step: int = 1) -> tuple[TokensEmitted, bytes]:
    """Rows are (request, attempt, index, tokens)."""
    tokens = [token for row in rows for token in row[3]]
    n = len(rows)
    blob = struct.pack(f"<{n}q", *(row[0] for row in rows))
    for column in ([row[1] for row in rows], [row[2] for row in rows], [len(row[3]) for row in rows], tokens):
        blob += struct.pack(f"<{len(column)}i", *column)
    return TokensEmitted(step, n, len(tokens)), blob


def rows_of(frame: Frame) -> list[tuple[int, int, int, list[int]]]:
    message, blob = frame.message, bytes(frame.blob)
    assert isinstance(message, TokensEmitted)
    n = message.num_rows
    requests = struct.unpack_from(f"<{n}q", blob)
    attempts, indexes, counts = (struct.unpack_from(f"<{n}i", blob, at * n) for at in (8, 12, 16))
    tokens = list(struct.unpack_from(f"<{message.num_tokens}i", blob, 20 * n))
    rows = []
    for request, attempt, index, count in zip(requests, attempts, indexes, counts, strict=True):
        rows.append((request, attempt, index, tokens[:count]))
        tokens = tokens[count:]
    assert not tokens
    return rows


class End:
    """The far end of one of the router's links."""

    def __init__(self, near: FrameStream, far: FrameStream) -> None:
        self.near, self.far = near, far
        self.frames: list[Frame] = []
        self.gone: str | None = None

    async def take(self) -> list[Message]:
        """What has come since the last time."""
        await trio.testing.wait_all_tasks_blocked()
        frames, self.frames = self.frames, []
        return [frame.message for frame in frames]

    async def take_frames(self) -> list[Frame]:
        await trio.testing.wait_all_tasks_blocked()
        frames, self.frames = self.frames, []
        return frames


class Rig:
    """A router with ends."""

    def __init__(self, nursery: trio.Nursery, **changes: object) -> None:
        self.nursery = nursery
        self.router = Router(make_limits(**changes))
        self.faults: dict[int, str] = {}
        self.started: set[tuple[int, int]] = set()

    def _end(self, accepts_near: frozenset, accepts_far: frozenset, limit: int = 1 << 20) -> End:
        one, two = trio.testing.memory_stream_pair()
        near = FrameStream(one, accepts=accepts_near, out_limit_bytes=limit, stall_s=5, name="near")
        far = FrameStream(two, accepts=accepts_far, out_limit_bytes=1 << 20, stall_s=5, name="far")
        end = End(near, far)

        async def write() -> None:
            try:
                await near.run_writer()
            except EngineError as error:
                end.gone = str(error)

        async def read() -> None:
            try:
                await run_link(far, lambda frames: end.frames.extend(frames))
            except EngineError as error:
                end.gone = str(error)

        self.nursery.start_soon(write)
        self.nursery.start_soon(read)
        return end

    def client(self, name: str = "test", *, limit: int = 1 << 20) -> tuple[Client, End, list[str]]:
        end = self._end(HEAD_FROM_CLIENT, CLIENT_FROM_HEAD, limit)
        drops: list[str] = []
        return self.router.client_joined(name, end.near, drops.append), end, drops

    def rank(self, rank: int, role: Role, *, num_pages: int = 64, generation: int = 1) -> End:
        end = self._end(HEAD_FROM_RANK, RANK_FROM_HEAD)
        address = "a" if role == "decode" else ""
        ready = RankReady(rank, generation, address, num_pages, 16, 1024, 8, 1024, "memory", "fake")
        self.router.rank_ready(generation, role, end.near, ready, lambda why: self.faults.update({rank: why}))
        return end

    def submit(
        self, client: Client, request: int, ids: list[int] | None = None, *, attempt: int = 1, generated: int = 0,
        priority: int = 0, **sampling: object,
    ) -> None:  # fmt: skip
        values: dict = {"max_tokens": 4, **sampling}
        message = Submit(request, attempt, generated, Sampling(**values), priority, f"r{request}")
        self.router.client_frames(client, [Frame(message, memoryview(pack([1, 2, 3] if ids is None else ids)))])

    def from_client(self, client: Client, message: Message) -> None:
        self.router.client_frames(client, [Frame(message, memoryview(b""))])

    def from_rank(self, rank: int, message: Message, blob: bytes = b"") -> None:
        self.router.rank_frames(rank, [Frame(message, memoryview(blob))])

    def start(self, rank: int, request: int, attempt: int = 1) -> None:
        """RequestStarted, if this attempt had none."""
        if (request, attempt) not in self.started:
            self.started.add((request, attempt))
            self.from_rank(rank, RequestStarted(request, attempt, 3, 0, 0, rank, 100, 1, 1, Timings()))

    def emit(self, rank: int, rows: list[tuple[int, int, int, list[int]]]) -> None:
        for request, attempt, _, _ in rows:
            self.start(rank, request, attempt)
        self.from_rank(rank, *emitted(rows))

    def finish(self, rank: int, request: int, *, attempt: int = 1, tokens: int = 4) -> None:
        self.start(rank, request, attempt)
        self.from_rank(rank, RequestFinished(request, attempt, "length", tokens, 1))
