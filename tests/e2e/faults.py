"""Faults: what is done to whom in which state of a hand-off, and what must hold and is measured until it is over."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from typing import Any

import trio

from engine.actors.client import Row
from engine.actors.rows import SLOT_BITS
from engine.actors.supervisor import EXIT_S, FLUSH_S
from engine.config import Limits
from tests.e2e.batch_process import NOTICE_S
from tests.e2e.faulty import FaultyCluster
from tests.e2e.prompts import random_ids
from tests.e2e.requester import POLL_S, make_row

MAX_TOKENS = 32
LOSS_EVENTS = ("link.end", "link.drop", "rank.down")
"""Events by which somebody who lost a rank says so."""
BURSTS = 60
"""Loads after which a state that was never entered counts as unreachable."""
WARM_EVERY = 4
"""So many loads, one of which finds its prompts in the prefix caches, where states of work last no time at all."""
CALM_S = 5.0
HOLD_S = 0.2
"""For head and decode rank to have said what they have to say."""
SLACK_S = 1.0
"""Of a busy machine."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A moment of a hand-off: `side` went into `phase` by `event`, names as in the tables; an empty event is any.

    `cancels`: only a request that is given up passes it, so half of the load is cancelled under way. `holds`: only a
    rank that hears its peer before its head passes it, so it is stopped while both speak, and hears them in any order.
    """

    side: str
    phase: str
    event: str
    cancels: bool = False
    holds: bool = False

    @property
    def name(self) -> str:
        return f"{self.side} {self.phase}" + (f" ({self.event})" if self.event else "")


POINTS = (
    Point("prefill", "started", "START"),
    Point("prefill", "granted", "GRANT", holds=True),
    Point("prefill", "queued", ""),
    Point("prefill", "working", "ADMIT"),
    Point("prefill", "working", "CHUNK"),
    Point("prefill", "working", "PUSHED"),
    Point("prefill", "closed", "COMPLETE"),
    Point("prefill", "ending", "ABORT", cancels=True),
    Point("decode", "waiting", "RESERVE"),
    Point("decode", "granted", "ROOM"),
    Point("decode", "granted", "PUSHED"),
    Point("decode", "running", ""),
    Point("decode", "closed", "FINISH"),
    Point("decode", "quarantined", "ABORT", cancels=True),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """`action` ("kill", "stop") to the `victim`: "self" is the rank that is at the point, "peer" the hand-off's other.

    `nth`: when the state is entered so often, so that other requests are under way. `then`: another fault, later.
    """

    point: Point
    victim: str = "self"
    action: str = "kill"
    nth: int = 3
    then: Fault | None = None

    def orders(self, side_to_rank: dict[str, int]) -> list[dict[str, object]]:
        """For `FaultyCluster.arm`."""
        point = self.point
        order = {
            "rank": side_to_rank[point.side], "phase": point.phase, "event": point.event, "victim": self.victim,
            "action": self.action, "nth": self.nth,
        }  # fmt: skip
        return [order, *(self.then.orders(side_to_rank) if self.then is not None else [])]


KILLS = tuple(
    Fault(point, victim) for point in POINTS for victim in ("self", "peer") if victim == "self" or not point.holds
)
"""Each state and either side. A rank that has heard its peer only does not say which one it was."""
STOPS = tuple(dataclasses.replace(fault, action="stop") for fault in KILLS)
DOUBLES = (
    Fault(Point("prefill", "working", "PUSHED"), "peer", then=Fault(Point("prefill", "orphaned", "LINK_LOST"), nth=1)),
    Fault(Point("prefill", "working", "CHUNK"), "peer", then=Fault(Point("prefill", "tainted", "PUSH_FAILED"), nth=1)),
    Fault(Point("prefill", "working", "CHUNK"), "peer", then=Fault(Point("prefill", "burnt", "QUIET"), nth=1)),
    Fault(Point("decode", "granted", "PUSHED"), "peer", then=Fault(Point("decode", "quarantined", "LINK_LOST"), nth=1)),
)
"""States that are entered only when the other side is lost; then the rank that is in it is lost too."""


CHECKING_SETS = ("checksum_pushes=true",)
CHECKING = tuple(Fault(Point("decode", "checking", "COMMIT_UNREAD"), victim) for victim in ("self", "peer"))
"""A state that only a cluster with `CHECKING_SETS` knows."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a fault did; times in seconds from the (last) signal.

    Attributes:
        point: of the last signal.
        victim: role of the process that got it.
        noticed_s: a living process names the loss: the first event of a log, or failure that the requester gets.
        failed_s: the requester hears that the request which was at the point failed; None if it did not.
        again_s: the next token of that request after its loss; None if it was not lost, or was cancelled.
        down_s: the victim's death is confirmed.
        ready_s: its next life serves.
        lost: attempts that failed, of all requests; every one of them needed a victim.
    """

    point: str
    victim: str
    action: str
    noticed_s: float
    failed_s: float | None
    again_s: float | None
    down_s: float
    ready_s: float
    lost: int


def make_prompts(rng: random.Random, count: int = 6, longest: int = 320) -> list[list[int]]:
    """Prompts of one to five pages."""
    return [random_ids(rng, rng.randrange(20, longest)) for _ in range(count)]


async def run_fault(
    cluster: FaultyCluster, fault: Fault, prompts: list[list[int]], rng: random.Random, *, tries: int = 30
) -> Outcome:
    """Plays loads until the fault struck, and on to the end: answers right, memory free, all ranks back.

    Args:
        prompts: what the cluster learned before.
        tries: for a second fault in a state that the first one leads to only where it wins a race.
    """
    book = cluster.book
    report = await cluster.wait_free({})
    lives = {rank.rank: rank.generation for rank in report.ranks}
    side_to_rank: dict[str, int] = {rank.role: rank.rank for rank in reversed(report.ranks)}
    held = next(rank.pid for rank in report.ranks if rank.rank == side_to_rank[fault.point.side])
    numbers = await cluster.arm(*fault.orders(side_to_rank))
    first_failure = len(book.failures)
    rows: list[Row] = []

    def struck() -> bool:
        return all(cluster.marks("struck", id=number) for number in numbers)

    for burst in range(BURSTS):
        if burst % WARM_EVERY != WARM_EVERY - 1:
            await cluster.forget()
        rows += await _play_load(cluster, fault.point, held, prompts, rng)
        with trio.move_on_after(CALM_S):
            while not struck() and not book.done.issuperset(rows):  # noqa: ASYNC110
                await trio.sleep(POLL_S)
        if cluster.marks("struck", id=numbers[0]):
            break
    await cluster.finish(rows)
    cluster.check_texts(rows)
    abort_s = Limits().abort_s
    assert book.cancel_s < abort_s * 9 / 8 + SLACK_S, f"a cancellation took {book.cancel_s:.1f} s (abort_s {abort_s:g})"
    if not struck() and tries > 1 and cluster.marks("struck", id=numbers[0]):
        return await run_fault(cluster, fault, prompts, rng, tries=tries - 1)
    assert struck(), f"{fault.point.name}: the state was never entered"
    marks: list[dict[str, Any]] = [cluster.marks("struck", id=number)[0] for number in numbers]
    pids = [mark["pid"] for mark in marks]
    await cluster.wait_until(lambda: all(cluster.find_down(pid) for pid in pids), "the death is confirmed")
    downs = [down for pid in pids if (down := cluster.find_down(pid)) is not None]
    await cluster.wait_free({down["rank"]: lives[down["rank"]] + 1 for down in downs})

    first_ns, at_ns = int(marks[0]["at_ns"]), int(marks[-1]["at_ns"])
    others = [event for event in cluster.events("rank.down", since_ns=first_ns) if event not in downs]
    assert not others, f"a rank that nobody harmed went down: {others}"
    failures = book.failures[first_failure:]
    dead = [down["rank"] for down in downs]
    strangers = [fact.message for *_, fact in failures if not any(_names(fact.message, rank) for rank in dead)]
    assert not strangers, f"requests failed that needed none of the ranks {dead}: {strangers}"

    row = book.number_to_row[marks[-1]["request"] >> SLOT_BITS]
    failed = [at for at, hit, _ in failures if hit is row and at >= at_ns]
    news = [at for at in book.news[row] if failed and at > failed[-1]]
    ready = [event for event in cluster.events("rank.ready", since_ns=at_ns) if event["rank"] == dead[-1]]
    losses = [at for at, _, fact in failures if at >= at_ns and _names(fact.message, dead[-1])]
    for event in cluster.events(*LOSS_EVENTS, since_ns=at_ns):
        if event.get("rank") == dead[-1] or _names(f"{event.get('peer')} {event['msg']}", dead[-1]):
            losses.append(event["at_ns"])

    def since(at: int) -> float:
        return max(0.0, round((at - at_ns) / 1e9, 3))

    return Outcome(
        point=fault.then.point.name if fault.then is not None else fault.point.name,
        victim=downs[-1]["role"],
        action=fault.action,
        noticed_s=since(min(losses)),
        failed_s=since(failed[0]) if failed else None,
        again_s=since(news[0]) if news and row not in book.given_up else None,
        down_s=since(downs[-1]["at_ns"]),
        ready_s=since(ready[0]["at_ns"]),
        lost=len(failures),
    )


def _names(text: str, rank: int) -> bool:
    """Whether it speaks of that rank, or of its NIXL agent."""
    return f"rank {rank}" in text or f"rank{rank}-" in text


def check_times(outcome: Outcome) -> None:
    """No wait was longer than what bounds it by default: nothing but the box's own load is added."""
    if outcome.action == "kill":
        assert outcome.noticed_s < NOTICE_S and outcome.down_s < NOTICE_S + FLUSH_S, outcome
    else:
        # Silence is looked for eight times in each heartbeat_s; then the rank may go by itself before it is killed.
        # Where no request was lost by it, its death is the first thing that anybody says.
        found_s = Limits().heartbeat_s * 9 / 8 + SLACK_S
        down_s = found_s + EXIT_S + FLUSH_S
        assert outcome.noticed_s < (found_s if outcome.lost else down_s) and outcome.down_s < down_s, outcome


async def _play_load(
    cluster: FaultyCluster, point: Point, held: int, prompts: list[list[int]], rng: random.Random
) -> list[Row]:
    """Submits a load so that requests pass the point. `held`: the process to stop for it, where that is needed."""
    rows = [make_row(prompt, rng.randrange(12, MAX_TOKENS)) for prompt in prompts]
    if point.holds:
        os.kill(held, signal.SIGSTOP)
    for row in rows:
        await cluster.book.submit(row)
    if point.holds:
        await trio.sleep(HOLD_S)
        os.kill(held, signal.SIGCONT)
    if point.cancels:
        for row in rows[::2]:
            await trio.sleep(rng.uniform(0, 0.02))
            if row not in cluster.book.done:
                cluster.book.give_up(row)
    return rows
