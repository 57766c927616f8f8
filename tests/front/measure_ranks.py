"""What requests cost ranks: processor time of a real decode rank's loop by who asks; of admission by prompt length."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from engine.bench.processor import read_thread_times
from engine.core.decode import DecodeSide
from engine.core.effects import ToPeer
from engine.core.pages import PageState
from engine.core.plan import StepResult
from engine.core.schedule import SideSizes, StepLimits
from engine.front.ask import Ask, Failure
from engine.front.headlink import HeadLink
from tests.front.load_client import ask, completion
from transport.messages import (
    Abort,
    PagesGranted,
    PagesPushed,
    PeerDown,
    PeerHello,
    PrefillCommitted,
    ReservePages,
    Sampling,
    Timings,
)

TOKENS = 16
LENGTHS = (1 << 10, 8 << 10, 32 << 10, 128 << 10)
PAGE_TOKENS = 64
PAGES = max(LENGTHS) // PAGE_TOKENS + 8
NOTHING = memoryview(b"")


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
    """Microseconds that a decode rank's decisions take for one request, by the length of the prompt.

    `us`: from its reservation over the grant until it is given up. `run_us`: of one that is not given up, from the
    commit over its only step until it is finished and all is free again. What pushes cost is neither: there is one for
    each chunk of a prompt.
    """
    side = open_side()
    found: dict[str, float] = {}
    number = 0
    for length in LENGTHS:
        given_up, run = [], []
        for _ in range(repeats):
            number += 2
            given_up.append(give_up(side, number, length))
            run.append(run_one(side, number + 1, length))
        found[f"us_{length >> 10}k"] = round(statistics.median(given_up) / 1e3, 1)
        found[f"run_us_{length >> 10}k"] = round(statistics.median(run) / 1e3, 1)
    assert side.arena.pages.count(PageState.FREE) == PAGES
    return found | {"pages_128k": max(LENGTHS) // PAGE_TOKENS}


def open_side() -> DecodeSide:
    """A decode rank with room for the longest of `LENGTHS`."""
    step = StepLimits(chunk_tokens=512, page_tokens=PAGE_TOKENS, rows=32, eos_ids=frozenset())
    return DecodeSide(
        SideSizes(
            rank=1, num_pages=PAGES, num_slabs=4, vocab_size=8192, max_model_tokens=1 << 20, max_waiting=64,
            grant_us=60_000_000, quarantine_share=0.5, cap_us=60_000_000, room_us=60_000_000, step=step,
        )
    )  # fmt: skip


def _reserve(side: DecodeSide, number: int, length: int) -> PagesGranted:
    """Up to the grant. Request, link and the writer's generation have one number, so that each has its own writer."""
    side.on_head(ReservePages(number, 1, 0, length, 0, Sampling(max_tokens=2, ignore_eos=True)), NOTHING, number)
    side.settle(number)
    words = [effect.message for effect in side.take_outbox() if isinstance(effect, ToPeer)]
    (grant,) = [word for word in words if isinstance(word, PagesGranted)]
    return grant


def give_up(side: DecodeSide, number: int, length: int) -> int:
    """Nanoseconds from a reservation to its abort; `number` is greater each time."""
    side.on_link_up(number, PeerHello(1, 0, number, "x"), number)
    began = time.process_time_ns()
    _reserve(side, number, length)
    side.on_head(Abort(number, 1), NOTHING, number)
    spent = time.process_time_ns() - began
    side.on_link_lost(number)
    # A writer's death is what makes granted pages free at once, without its last word.
    side.on_head(PeerDown(0, number), NOTHING, number)
    side.settle(number)
    side.take_outbox()
    return spent


def run_one(side: DecodeSide, number: int, length: int) -> int:
    """Nanoseconds from the commit of a request to its end; `number` is greater each time."""
    side.on_link_up(number, PeerHello(1, 0, number, "x"), number)
    grant = _reserve(side, number, length)
    side.on_peer(number, PagesPushed(number, grant.epoch, 0, grant.num_pages, 1), NOTHING, number)
    commit = PrefillCommitted(number, grant.epoch, length, grant.num_pages, 7, 1, 1, 1, Timings(1, 1, 1))
    began = time.process_time_ns()
    side.on_peer(number, commit, NOTHING, number)
    side.settle(number)
    plan = side.plan(number)
    assert plan is not None and len(plan.rows) == 1
    side.apply(StepResult(plan.step, (), (7,), 1), number)
    side.take_outbox()
    spent = time.process_time_ns() - began
    side.on_link_lost(number)
    side.on_head(PeerDown(0, number), NOTHING, number)
    side.take_outbox()
    return spent
