"""A whole cluster's totals and latencies in the head against what its clients count, with acts of operators."""

from __future__ import annotations

import dataclasses
import random

import pytest
import trio

from engine.config import SloConfig
from engine.core.latency import percentile_us
from engine.sim.faults import Swarm
from engine.sim.play import Outcome, play
from engine.sim.scenario import SMALL_LIMITS, Scenario
from engine.sim.workload import Load, Requester
from engine.sim.world import World, WorldShape
from transport.messages import ActDone, AskRequests, CancelRequests, SetDrain, TrafficReport

SHAPE = WorldShape(prefill=2, decode=3, limits=SMALL_LIMITS)


class Operator:
    """Hears a world's answers, and runs `story` beside its load."""

    def __init__(self, world: World, story) -> None:
        self.world, self.story = world, story
        self.answers = self.acts = None
        self._overhear = world._overhear
        world._overhear = self.overhear  # type: ignore[method-assign]

    def overhear(self, answers, acts) -> None:
        self._overhear(answers, acts)
        self.answers = answers
        if acts is not None:
            self.acts = acts
            if self.story is not None:
                self.world._nursery.start_soon(self.story, self)

    def totals(self) -> TrafficReport:
        """As the head's router left them."""
        router = self.answers.traffic.__self__
        return router._traffic.report(0.0, waiting=router.num_waiting, waiting_tokens=0, running=router.num_running)

    def rank(self, rank: int):
        return next(one for one in self.answers.status().ranks if one.rank == rank)

    def rows(self, limit: int = 4096):
        return self.answers.requests(AskRequests(limit, 0)).rows


def run(scenario: Scenario, story=None, slo: SloConfig | None = None) -> tuple[Outcome, TrafficReport]:
    seen: list[Operator] = []

    def hook(world: World) -> None:
        world.config = dataclasses.replace(world.config, slo=slo or world.config.slo)
        seen.append(Operator(world, story))

    outcome = play(scenario, hook=hook)
    if outcome.crash is not None:
        raise outcome.crash
    if outcome.violation is not None:
        raise outcome.violation
    return outcome, seen[0].totals()


def test_a_calm_run_has_the_latencies_that_clients_see():
    load = Load(requests=60, clients=2, arrive_s=6.0, output=(20, 60))
    degraded: set[str] = set()

    async def story(operator: Operator) -> None:
        while True:
            await trio.sleep(0.5)
            status = operator.answers.status()
            degraded.update(status.degraded)
            assert status.ready and not status.is_stopping and status.waiting_limit == SMALL_LIMITS.queue_requests

    outcome, traffic = run(Scenario("calm", 5, SHAPE, load), story, SloConfig(ttft_p90_s=60.0, itl_p99_s=0.0005))
    assert (traffic.ttft_limit_us, traffic.itl_limit_us) == (60_000_000, 500)
    assert degraded
    for why in degraded:
        assert why.startswith("time between tokens, p99, is ") and why.endswith("above slo.itl_p99 (0.5 ms)")
    answers = outcome.answers
    assert (traffic.accepted, traffic.finished, traffic.failed, traffic.cancelled, traffic.refused) == (60, 60, 0, 0, 0)
    assert (traffic.waiting, traffic.running) == (0, 0)
    assert traffic.generated_tokens == answers.num_tokens and traffic.cached_tokens == 0
    assert sum(traffic.ttft) == 60 and sum(traffic.handoff) <= 60
    assert sum(traffic.itl) == answers.between_tokens_s.count
    for counts, clients in ((traffic.ttft, answers.first_token_s), (traffic.itl, answers.between_tokens_s)):
        # The clients' buckets and their way to the head are worth a few percent too.
        assert percentile_us(counts, 0.5) == pytest.approx(1e6 * clients.percentile(0.5), rel=0.25)
        assert percentile_us(counts, 0.9) == pytest.approx(1e6 * clients.percentile(0.9), rel=0.25)


@pytest.mark.parametrize("seed", (1, 2))
def test_totals_add_up_through_losses_and_cancels_of_clients_and_operators(seed, monkeypatch):
    told: list[str] = []
    requesters: list[Requester] = []

    class Kept(Requester):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            requesters.append(self)

    monkeypatch.setattr("engine.sim.play.Requester", Kept)

    def expect_cancel(label: str) -> None:
        """A client counts it as a broken promise if one that it did not cancel is cancelled."""
        for requester in requesters:
            for attempt in requester._tries.values():
                attempt.cancel_asked |= attempt.ask.name == label

    async def story(operator: Operator) -> None:
        rng = random.Random(seed)
        while True:
            await trio.sleep(0.3)
            traffic, status = operator.answers.traffic(), operator.answers.status()
            ended = traffic.finished + traffic.failed + traffic.cancelled
            assert traffic.accepted == ended + traffic.waiting + traffic.running
            assert (status.finished, status.failed) == (traffic.finished, traffic.failed + traffic.refused)
            rows = operator.rows()
            assert [-row.age_ms for row in rows] == sorted(-row.age_ms for row in rows)
            assert len([row for row in rows if row.state == "queued"]) == traffic.waiting
            assert all(row.generated <= row.max_tokens for row in rows)
            if rows and len(told) < 8:
                picked = rng.choice(rows)
                told.append(picked.state)
                expect_cancel(picked.label)
                operator.acts.cancel(CancelRequests((picked.request,), "here", "too old"), "alice")

    swarm = Swarm(kinds=("crash",), per_s=0.7, until_s=8.0)
    load = Load(requests=60, clients=3, arrive_s=8.0, output=(20, 60), cancel_share=0.15)
    scenario = Scenario("hurt", seed, SHAPE, load, swarm)
    outcome, traffic = run(scenario, story)
    assert traffic.accepted == traffic.finished + traffic.failed + traffic.cancelled
    assert traffic.cancelled and traffic.failed and len(told) == 8
    assert traffic.generated_tokens == outcome.answers.num_tokens


def test_a_drained_rank_gets_nothing_while_the_others_go_on_and_its_restart_keeps_it():
    seen: dict[str, object] = {}

    async def story(operator: Operator) -> None:
        await trio.sleep(2.0)
        rank = operator.world.shape.prefill  # the first decode rank
        done = operator.acts.drain(SetDrain((rank,), True, "here", "fans"), "alice")
        assert isinstance(done, ActDone)
        while operator.rank(rank).phase != "drained":
            assert operator.rank(rank).state == "draining"
            await trio.sleep(0.1)
        await trio.sleep(0.5)  # its last steps, and a snapshot after them
        steps = operator.rank(rank).snapshot.step
        await trio.sleep(1.5)
        assert operator.rank(rank).snapshot.step == steps and operator.rank(rank).snapshot.running == 0
        assert all(row.decode_rank != rank for row in operator.rows())
        seen["ready"] = operator.answers.status().ready
        seen["degraded"] = operator.answers.status().degraded
        operator.world.processes[rank].kill()
        await trio.sleep(2.0)
        assert operator.rank(rank).generation == 2 and operator.rank(rank).phase == "drained"
        assert all(row.decode_rank != rank for row in operator.rows())
        operator.acts.drain(SetDrain((rank,), False, "here", ""), "alice")
        await trio.sleep(1.0)
        seen["again"] = operator.rank(rank).snapshot.generated_tokens

    load = Load(requests=80, clients=2, arrive_s=10.0, output=(20, 60))
    outcome, traffic = run(Scenario("drained", 3, SHAPE, load), story)
    assert outcome.answers.outcomes == {"finished": 80} and outcome.answers.most_attempts == 1
    assert traffic.finished == 80 and seen["ready"] is True
    assert seen["degraded"] == ("rank 2 takes no new requests: drained by alice (fans)",)
    assert seen["again"] > 0, "it computes again"
