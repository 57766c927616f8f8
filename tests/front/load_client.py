"""Light HTTP clients for load: one asyncio protocol for each stream; it parses as little as can be."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of one request. Times are `time.monotonic`.

    Attributes:
        status: of HTTP; 0 if none came.
        end: `whole`, `error` (in the stream), `hung_up` (by us), `cut` (by the other side), `refused` (a status).
        news: when bytes with a chunk came.
        last_words: what came last, as far as it is kept.
    """

    sent_at: float = 0.0
    status: int = 0
    end: str = "cut"
    news: list[float] = dataclasses.field(default_factory=list)
    ended_at: float = 0.0
    last_words: str = ""

    @property
    def ttft_s(self) -> float:
        return self.news[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.news, self.news[1:], strict=False)]


def completion(length: int, max_tokens: int, rng: random.Random, *, counted: bool = False) -> bytes:
    """A request for a stream: random ids, so that no two share a beginning; its end is its length. `counted`: tokens
    without text, about half of them here, have a chunk as well, so that gaps are those between tokens."""
    body = json.dumps({
        "prompt": [rng.randrange(16, 8000) for _ in range(length)], "max_tokens": max_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
        **({"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if counted else {}),
    }).encode()  # fmt: skip
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, outcome: Outcome, done: asyncio.Future[None]) -> None:
        self._request, self._outcome, self._done = request, outcome, done
        self._tail = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._outcome.sent_at = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if not outcome.status:
            outcome.status = int(data[9:12])
            outcome.ended_at = time.monotonic()
        if b"data: {" in data:
            outcome.news.append(time.monotonic())
            if b'data: {"error"' in data:
                outcome.end = "error"
        self._tail = (self._tail + data)[-256:]
        if b"data: [DONE]" in self._tail:
            outcome.end, outcome.ended_at = "whole", time.monotonic()

    def connection_lost(self, error: Exception | None) -> None:
        if self._outcome.status not in (0, 200):
            self._outcome.end = "refused"
        self._outcome.last_words = self._tail.decode(errors="replace")
        if not self._done.done():
            self._done.set_result(None)


async def ask(port: int, request: bytes, *, leave_after_s: float | None = None) -> Outcome:
    """One request on a connection of its own, until it ends or is left."""
    loop = asyncio.get_running_loop()
    outcome, done = Outcome(), loop.create_future()
    _, stream = await loop.create_connection(lambda: _Stream(request, outcome, done), "127.0.0.1", port)
    if leave_after_s is not None:
        await asyncio.wait((done,), timeout=leave_after_s)
        if not done.done():
            outcome.end = "hung_up"
            assert stream.transport is not None
            stream.transport.abort()
    await done
    return outcome


async def arrive(port: int, per_s: float, for_s: float, rng: random.Random, make: object) -> list[Outcome]:
    """Requests that come at random at a rate; returns when all have ended.

    Args:
        make: called for the bytes of each request.
    """
    assert callable(make)
    tasks: list[asyncio.Task[Outcome]] = []
    began = due = time.monotonic()
    while due - began < for_s:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(port, make())))
        due += rng.expovariate(per_s)
    return list(await asyncio.gather(*tasks))
