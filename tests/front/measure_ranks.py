"""What requests cost ranks: processor time of a real decode rank's loop by who asks; of admission by prompt length."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from engine.bench.processor import read_thread_times
from engine.core.decode import DecodeSide
from engine.core.pages import PageState
from engine.core.schedule import SideSizes, StepLimits
from engine.front.ask import Ask, Failure
from engine.front.headlink import HeadLink
from tests.front.load_client import ask, completion
from transport.messages import Abort, PeerDown, PeerHello, ReservePages, Sampling

TOKENS = 16
LENGTHS = (1 << 10, 8 << 10, 32 << 10, 128 << 10)


class _Owner:
    """Waits for one ask."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens_came(self, ask: Ask, count: int) -> None:
        pass

    def ask_finished(self, ask: Ask, reason: str) -> None:
        self.done.set_result(None)

    def ask_failed(self, ask: Ask, failure: Failure) -> None:
        self.done.set_exception(RuntimeError(f"{failure.code}: {failure.message}"))

    def batch_over(self) -> None:
        pass


async def _through_fronts(rack: Any, count: int, rng: random.Random) -> None:
    outcomes = await asyncio.gather(*(ask(rack.port, completion(16, TOKENS, rng)) for _ in range(count)))
    assert all(outcome.end == "whole" for outcome in outcomes), {outcome.end for outcome in outcomes}


async def _through_one_client(rack: Any, count: int, rng: random.Random) -> None:
    """As a batch does: one connection to the head, ids in and out."""
    link = HeadLink(f"{rack.directory}/requests.sock", "measure")
    running = asyncio.create_task(link.run())
    try:
        while link.hello is None:  # noqa: ASYNC110 - the link has no word for it
            await asyncio.sleep(0.01)
        owners = [_Owner() for _ in range(count)]
        for owner in owners:
            prompt = b"".join(rng.randrange(16, 8000).to_bytes(4, "little") for _ in range(16))
            await link.submit(Ask(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True), "measure", owner))
        await asyncio.gather(*(owner.done for owner in owners))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def measure_ranks(rack: Any, streams: int, repeats: int) -> dict[str, Any]:
    """Microseconds of the decode rank's loop (its main thread) for each step, with the same requests either way. The
    device computes in a thread of its own and is not in it."""
    ways = {"fronts": _through_fronts, "one_client": _through_one_client}
    await _through_one_client(rack, min(streams, 16), random.Random(0))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name, way in ways.items():
            before, steps = await _look(rack)
            await way(rack, streams, random.Random(repeat))
            await asyncio.sleep(0.6)
            after, ended = await _look(rack)
            found[name].append((after - before) / 1e3 / max(1, ended - steps))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "streams": streams, **{f"{name}_us_per_step": [round(value, 1) for value in values]
                               for name, values in found.items()},
        "ratio": round(medians["fronts"] / medians["one_client"], 3),
    }  # fmt: skip


async def _look(rack: Any) -> tuple[int, int]:
    """Nanoseconds of the decode rank's main thread, and its steps."""
    status = await asyncio.to_thread(rack.say, "status")
    rank = next(rank for rank in status["ranks"] if rank["role"] == "decode")
    return read_thread_times(rank["pid"]).thread_to_ns[rank["pid"]][0], rank["snapshot"]["step"]


def measure_admission(repeats: int) -> dict[str, Any]:
    """Microseconds that a decode rank's decisions take for one request, from its reservation over the grant until it is
    given up and all is free again, by the length of the prompt."""
    pages = max(LENGTHS) // 64 + 8
    step = StepLimits(chunk_tokens=512, page_tokens=64, rows=32, eos_ids=frozenset())
    side = DecodeSide(
        SideSizes(
            rank=1, num_pages=pages, num_slabs=4, vocab_size=8192, max_model_tokens=1 << 20, max_waiting=64,
            grant_us=60_000_000, quarantine_share=0.5, cap_us=60_000_000, room_us=60_000_000, step=step,
        )
    )  # fmt: skip
    empty = memoryview(b"")
    number = 0
    found: dict[str, float] = {}
    for length in LENGTHS:
        spent = []
        for _ in range(repeats):
            number += 1
            # A link of its own: a writer's death is what makes granted pages free at once, without its last word.
            side.on_link_up(number, PeerHello(1, 0, number, "x"), number)
            sampling = Sampling(max_tokens=16, ignore_eos=True)
            began = time.process_time_ns()
            side.on_head(ReservePages(number, 1, 0, length, 0, sampling), empty, number)
            side.settle(number)
            side.take_outbox()
            side.on_head(Abort(number, 1), empty, number)
            spent.append(time.process_time_ns() - began)
            side.on_link_lost(number)
            side.on_head(PeerDown(0, number), empty, number)
            side.settle(number)
            side.take_outbox()
        found[f"us_{length >> 10}k"] = round(statistics.median(spent) / 1e3, 1)
    assert side.arena.pages.count(PageState.FREE) == pages
    return found | {"pages_128k": max(LENGTHS) // 64}
