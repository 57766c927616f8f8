"""Late writes: a writer is stopped between its last check and its posting, and goes on when its request is over."""

from __future__ import annotations

import dataclasses
import os
import random
import signal

from tests.e2e.faulty import FaultyCluster
from tests.e2e.prompts import random_ids
from tests.e2e.requester import make_row

MAX_TOKENS = 32

LATE_SETS = ("num_pages=43", "limits.prefill_chunk_tokens=512", "limits.abort_s=0.5s", "limits.heartbeat_s=30s")
"""Room for what is quarantined and for the others, to the last page; nobody ends the stopped writer."""
CONDEMNED_SETS = ("limits.prefill_chunk_tokens=512", "limits.heartbeat_s=1s")
LATE_PROMPT, LATE_PAGES = 440, 7
OTHERS, OTHER_PROMPT, OTHER_TOKENS = 6, 290, 90
"""Six pages each."""
POST = {"rank": 0, "phase": "post", "event": "", "victim": "self", "action": "stop", "nth": 1}
"""Stops prefill rank 0 between the last check of a write and its posting."""


@dataclasses.dataclass(frozen=True)
class LateWrite:
    """A write that was posted after its request was over.

    Attributes:
        num_bytes: what landed.
        late_s: from the stop to the moment at which it had landed.
        quarantined: pages that were kept from other requests meanwhile; None where nobody looked.
        running: requests that were generated while it landed; None where nobody looked.
    """

    num_bytes: int
    late_s: float
    quarantined: int | None
    running: int | None


async def run_cancelled_write(
    cluster: FaultyCluster, rng: random.Random, *, quarantined: int = LATE_PAGES
) -> LateWrite:
    """The requester cancels while the writer is stopped; others take every page that is free; then the writer goes on.

    For a cluster of two prefill ranks and one decode rank with `LATE_SETS`.

    Args:
        quarantined: pages that have to be kept from the others.

    Raises:
        AssertionError: among others, if any of the others got a wrong token.
    """
    book = cluster.book
    prompts = [random_ids(rng, OTHER_PROMPT) for _ in range(OTHERS)]
    await cluster.learn(prompts, OTHER_TOKENS)
    await cluster.wait_free({})
    [number] = await cluster.arm(POST)
    victim = await book.submit(make_row(random_ids(rng, LATE_PROMPT), 4))
    await cluster.wait_until(lambda: cluster.marks("struck", id=number), "the writer is stopped")
    [mark] = cluster.marks("struck", id=number)
    book.give_up(victim)
    await cluster.finish([victim], within_s=5.0)
    [decode] = [rank for rank in (await cluster.status()).ranks if rank.role == "decode"]
    assert decode.snapshot is not None and decode.snapshot.pages_quarantined == quarantined
    rows = []
    for prompt in prompts:
        # One by one: a second one in the queue of prefill rank 1 could be given to rank 0, which is stopped.
        row = await book.submit(make_row(prompt, OTHER_TOKENS))
        await cluster.wait_until(lambda row=row: row.generated, "it is being generated")  # type: ignore[misc]
        rows.append(row)
    os.kill(mark["pid"], signal.SIGCONT)
    await cluster.wait_until(lambda: cluster.marks("landed") or cluster.marks("failed"), "the late write is over")
    running = sum(row not in book.done for row in rows)
    [landed] = cluster.marks("landed")
    await cluster.finish(rows)
    cluster.check_texts(rows)
    report = await cluster.wait_free({})
    assert all(rank.generation == 1 for rank in report.ranks), "the writer's word was enough; nobody had to die"
    assert not book.failures, "nobody else lost anything"
    return LateWrite(landed["bytes"], round((landed["at_ns"] - mark["at_ns"]) / 1e9, 3), quarantined, running)


async def run_condemned_write(cluster: FaultyCluster, rng: random.Random) -> LateWrite:
    """The head gives the stopped writer up; before it kills it, the writer goes on, and its write lands.

    For a cluster of two prefill ranks and one decode rank with a short `limits.heartbeat_s`, on a transport that writes
    within the posting call: elsewhere the process is gone before anybody could know whether the write landed.
    """
    book = cluster.book
    prompts = [random_ids(rng, LATE_PROMPT) for _ in range(3)]
    await cluster.learn(prompts, MAX_TOKENS)
    await cluster.wait_free({})
    [number] = await cluster.arm(POST)
    rows = [await book.submit(make_row(prompt, MAX_TOKENS)) for prompt in prompts]
    await cluster.wait_until(lambda: cluster.marks("struck", id=number), "the writer is stopped")
    [mark] = cluster.marks("struck", id=number)
    await cluster.wait_until(lambda: book.failures, "the head gives the writer up")
    os.kill(mark["pid"], signal.SIGCONT)
    await cluster.wait_until(lambda: cluster.find_down(mark["pid"]), "the writer is dead")
    down = cluster.find_down(mark["pid"])
    assert down is not None
    await cluster.finish(rows)
    [landed] = cluster.marks("landed")
    assert book.failures[0][0] < landed["at_ns"] < down["at_ns"] + 1_000_000, "between the loss and the death"
    cluster.check_texts(rows)
    await cluster.wait_free({0: 2})
    return LateWrite(landed["bytes"], round((landed["at_ns"] - mark["at_ns"]) / 1e9, 3), None, None)
