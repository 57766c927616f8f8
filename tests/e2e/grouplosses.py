"""Losses: a rank of a group is killed or stopped under load; what must hold until all is well, and how long that takes.

Which rows are whose is known from the engine's own accounts; what is measured is what a client sees: the silence of the
requests that no dead rank had, and the moment at which all ranks of the group serve again, as the head logs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Literal

import trio

from engine.actors.supervisor import EXIT_S, FLUSH_S
from engine.config import Limits
from tests.e2e.batch_process import NOTICE_S
from tests.e2e.faults import SLACK_S
from tests.e2e.grouped import GroupedCluster, Pool
from tests.e2e.traffic import Traffic

WARM_TOKENS = 4
"""Each row of the load has so many when the fault comes."""
CALM_S = 120.0
Moment = Literal["load", "move"]


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a loss did; times in seconds from the signal.

    Attributes:
        rank: who got it.
        moment: under load, or also in the middle of a re-placement.
        down_s: its death is confirmed.
        named_s: the first membership without that life is told to the ranks.
        took_over: the others went on without it; else they waited for its next life.
        flow_s: tokens flow again for requests of the other ranks: the end of their longest silence up to the moment
            at which a membership is joined.
        silence_s: that silence.
        whole_s: its next life serves in the group.
        lost: attempts that failed.
        rows: requests that were under way or came later, all with the tokens of an undisturbed run.
    """

    rank: int
    action: str
    moment: Moment
    down_s: float
    named_s: float
    took_over: bool
    flow_s: float
    silence_s: float
    whole_s: float
    lost: int
    rows: int


async def run_loss(
    cluster: GroupedCluster,
    ranks: Sequence[int],
    prompts: Sequence[list[int]],
    rng: random.Random,
    *,
    width: int,
    action: Literal["kill", "stop"] = "kill",
    moment: Moment = "load",
    pool: Pool = "decode",
    spared: Sequence[int] = (),
) -> Loss:
    """Plays one.

    Args:
        ranks: of the group; one of them is hit.
        prompts: what the cluster has learned.
        width: requests at a time.
        pool: of the group.
        spared: ranks of it that are not hit.
    """
    inner, book = cluster.inner, cluster.book
    report = await inner.wait_free({})
    lives = {rank.rank: rank.generation for rank in report.ranks}
    pids = {rank.rank: rank.pid for rank in report.ranks}
    victim = rng.choice([rank for rank in ranks if rank not in spared])
    traffic, first_failure = Traffic(inner, prompts, width), len(book.failures)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traffic.run)
        await inner.wait_until(
            lambda: len(traffic.rows) >= width and all(len(row.generated) >= WARM_TOKENS for row in traffic.rows),
            "a load runs", CALM_S,
        )  # fmt: skip
        if moment == "move":
            await begin_move(cluster)
            await _wait_copies(cluster)
        at_ns = time.monotonic_ns()
        os.kill(pids[victim], signal.SIGKILL if action == "kill" else signal.SIGSTOP)

        def named() -> list[dict[str, object]]:
            return [one for one in inner.events("group.named", since_ns=at_ns) if one["pool"] == pool]

        def whole() -> dict[str, object] | None:
            full = {one["membership"] for one in named() if one["ranks"] == list(ranks)}
            joined = inner.events("group.joined", since_ns=at_ns)
            return next((one for one in joined if one["pool"] == pool and one["membership"] in full), None)

        await inner.wait_until(whole, "the group is whole again", CALM_S)
        await trio.sleep(0.5)
        traffic.stop()
    joined = whole()
    assert joined is not None
    await inner.wait_free({victim: lives[victim] + 1})
    inner.check_texts(traffic.rows)
    down = inner.find_down(pids[victim])
    assert down is not None
    others = [event for event in inner.events("rank.down", since_ns=at_ns) if event is not down]
    assert not others, f"a rank that nobody harmed went down: {others}"
    failures = book.failures[first_failure:]
    strangers = [fact.message for *_, fact in failures if f"rank {victim}" not in fact.message]
    assert not strangers, f"requests failed that rank {victim} had nothing to do with: {strangers}"

    hit = {id(row) for _, row, _ in failures}
    times = sorted(
        at for row in traffic.rows if id(row) not in hit for at in book.news[row]
        if at_ns - 10**9 <= at <= int(joined["at_ns"]) + 2 * 10**9  # type: ignore[call-overload]
    )  # fmt: skip
    # Before anybody meets again, that is: a busy machine makes pauses later, too.
    met_ns = next(one["at_ns"] for one in inner.events("group.joined", since_ns=at_ns) if one["pool"] == pool)
    silences = [(late - early, late) for early, late in itertools.pairwise(times) if late > at_ns and early < met_ns]
    silence_ns, flows_ns = max(silences)
    return Loss(
        rank=victim,
        action=action,
        moment=moment,
        down_s=_since(at_ns, down["at_ns"]),
        named_s=_since(at_ns, named()[0]["at_ns"]),
        took_over=named()[0]["ranks"] != list(ranks),
        flow_s=_since(at_ns, flows_ns),
        silence_s=round(silence_ns / 1e9, 3),
        whole_s=_since(at_ns, joined["at_ns"]),
        lost=len(failures),
        rows=len(traffic.rows),
    )


def check_loss(loss: Loss) -> None:
    """Nobody waited longer to learn of it than the defaults say."""
    if loss.action == "kill":
        assert loss.down_s < NOTICE_S + FLUSH_S, loss
    else:
        noticed_s = Limits().heartbeat_s * 9 / 8 + SLACK_S
        assert loss.down_s < noticed_s + EXIT_S + FLUSH_S, loss
    assert loss.flow_s < loss.whole_s + SLACK_S or loss.took_over, loss


async def begin_move(cluster: GroupedCluster, part: str = "main") -> int:
    """Starts a re-placement that has something to move: a plan, or the way back where no plan has. Slots to copy."""
    answer = await cluster.act("plan", part=part)
    plan = answer.report.plan
    if plan.moved_slots:
        answer = await cluster.act("apply", part=part, plan=plan.plan)
    else:
        answer = await cluster.act("rollback", part=part)
    return answer.report.plan.moved_slots


async def _wait_copies(cluster: GroupedCluster) -> None:
    with trio.fail_after(CALM_S):
        while True:
            report = await cluster.part()
            assert report.state == "moving", f"it ended before the fault: {report.state}, {report.history[-1:]}"
            if report.copied_slots:
                return
            await trio.sleep(0.01)


def _since(at_ns: int, later: object) -> float:
    assert isinstance(later, int)
    return max(0.0, round((later - at_ns) / 1e9, 3))
