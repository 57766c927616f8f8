"""Ranks that draft, on virtual time: the texts are those without drafts, and fewer steps bring them."""

from __future__ import annotations

import dataclasses
import random

import pytest
import trio

from engine.config import DraftConfig, RankConfig
from engine.sim.device import SimDevice
from tests.actors.rack import Rack, Rank, wait_done, wait_free
from transport.messages import DraftCounts


class DraftingRack(Rack):
    """Devices whose drafts hold at seven of ten places."""

    max_rows = 4

    def _config(self, rank: Rank) -> RankConfig:
        return dataclasses.replace(super()._config(rank), draft=DraftConfig(3, self.max_rows))


def open_rack(
    nursery: trio.Nursery, rng: random.Random, *, most: int = 7, eos: float = 0.02, **shape: int
) -> DraftingRack:
    def make_device(rank: int) -> SimDevice:
        return SimDevice(num_pages=64, num_slabs=8, page_tokens=8, eos_share=eos, max_drafts=most, draft_share=0.7)

    return DraftingRack(nursery, rng, make_device=make_device, eos_share=eos, **shape)


def drafted(rack: Rack) -> DraftCounts:
    snapshot = rack.ranks[max(rack.ranks)].snapshot
    assert snapshot is not None
    return snapshot.drafted


@pytest.mark.parametrize("seed", range(6))
async def test_texts_are_those_without_drafts(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        rack = open_rack(nursery, rng, num_prefill=2, num_decode=2)
        await rack.start()
        requests = [
            rack.make_request(
                number,
                rng.randrange(1, 150),
                max_tokens=rng.randrange(1, 40),
                min_tokens=rng.choice((0, 0, 3)),
                ignore_eos=rng.random() < 0.2,
                stop_ids=(rng.randrange(2, 1000),),
            )
            for number in range(40)
        ]
        for request in requests:
            rack.submit(request)
            await trio.sleep(rng.random() * 0.02)
        await wait_done(requests, 60)
        assert all(request.outcome == "finished" and request.attempt == 1 for request in requests)
        await wait_free(rack)
        assert drafted(rack).accepted > 20
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()


async def test_what_drafts_came_to_is_in_the_snapshot_and_fewer_steps_are_made(autojump_clock: trio.abc.Clock) -> None:
    steps = {}
    for most in (0, 7):
        async with trio.open_nursery() as nursery:
            rack = open_rack(nursery, random.Random(1), most=most, eos=0.0)
            await rack.start()
            request = rack.make_request(7, 100, max_tokens=200)
            rack.submit(request)
            await wait_done([request], 30)
            assert request.tokens == request.expected and len(request.tokens) == 200
            await trio.sleep(1)
            steps[most] = rack.ranks[1].device.num_steps
            snapshot = rack.ranks[1].snapshot
            assert snapshot is not None and snapshot.generated_tokens == 200
            counts = snapshot.drafted
            if most:
                assert 0 < counts.accepted < counts.proposed <= 3 * counts.rows
                assert sum(counts.accepted_at) == counts.accepted and counts.accepted_at[3:] == (0, 0, 0, 0)
                (origin,) = snapshot.draft_origins
                assert (origin.rank, origin.generation, origin.requests) == (0, 1, 1)
                assert (origin.proposed, origin.accepted) == (counts.proposed, counts.accepted)
            else:
                assert counts == DraftCounts() and snapshot.draft_origins == ()
            nursery.cancel_scope.cancel()
    assert steps[0] >= 199 and steps[7] < 0.6 * steps[0]


async def test_a_step_with_more_rows_than_the_limit_has_no_drafts(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = open_rack(nursery, random.Random(1), eos=0.0)
        rack.max_rows = 1
        await rack.start()
        requests = [rack.make_request(number, 20, max_tokens=60) for number in (1, 2)]
        for request in requests:
            rack.submit(request)
        await wait_done(requests, 30)
        before = rack.ranks[1].device.num_steps
        assert before > 55  # side by side, a token a step but at the seams
        alone = rack.make_request(3, 20, max_tokens=60)
        rack.submit(alone)
        await wait_done([alone], 30)
        assert rack.ranks[1].device.num_steps - before < 45
        assert not rack.problems
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(8))
async def test_aborts_and_deaths_at_any_moment(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        rack = open_rack(nursery, rng, num_prefill=2, num_decode=2)
        await rack.start()
        requests = [rack.make_request(n, rng.randrange(1, 150), max_tokens=rng.randrange(1, 60)) for n in range(40)]

        async def kill_and_restart() -> None:
            for _ in range(4):
                await trio.sleep(rng.random() * 0.3)
                victim = rng.choice([rank for rank in rack.ranks.values() if rank.is_up])
                await rack.kill(victim)
                await trio.sleep(0.1)
                await rack.start_rank(victim)

        nursery.start_soon(kill_and_restart)
        for request in requests:
            rack.submit(request)

            async def abort_later(request: object = request, after: float = rng.random() * 0.8) -> None:
                await trio.sleep(after)
                rack.abort(request)  # type: ignore[arg-type]

            if rng.random() < 0.3:
                nursery.start_soon(abort_later)
            await trio.sleep(rng.random() * 0.02)
        await wait_done(requests, 120)
        assert {request.outcome for request in requests} <= {"aborted", "finished"}
        assert sum(request.outcome == "finished" for request in requests) > 10
        await trio.sleep(5)
        await wait_free(rack)
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()
