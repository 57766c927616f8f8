"""Whole ranks on virtual time: exact token streams, nothing leaked, every abort acknowledged, whoever dies."""

from __future__ import annotations

import dataclasses
import random

import pytest
import trio

from engine.sim.device import SimDevice
from tests.actors.rack import LIMITS, Rack, wait_done, wait_free


async def test_one_request_streams_its_tokens_and_leaves_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1))
        await rack.start()
        request = rack.make_request(7, 100, max_tokens=20)
        rack.submit(request)
        await wait_done([request], 10)
        assert request.outcome == "finished" and request.tokens == request.expected
        assert request.started is not None and request.started.pushes == 4
        assert request.started.timings.prefill_us > 0
        assert request.finished is not None and request.finished.handoff_us > 0
        await wait_free(rack)
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(6))
async def test_many_requests_get_exact_streams(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, rng, num_prefill=2, num_decode=2, eos_share=0.02)
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
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(8))
async def test_aborts_at_any_moment_are_acknowledged_by_both_ranks(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, rng, eos_share=0.02)
        await rack.start()
        requests = [rack.make_request(n, rng.randrange(1, 150), max_tokens=rng.randrange(1, 40)) for n in range(30)]
        for request in requests:
            rack.submit(request)

            async def abort_later(request: object = request, after: float = rng.random() * 0.8) -> None:
                await trio.sleep(after)
                rack.abort(request)  # type: ignore[arg-type]

            if rng.random() < 0.7:
                nursery.start_soon(abort_later)
            await trio.sleep(rng.random() * 0.02)
        await wait_done(requests, 60)
        assert {request.outcome for request in requests} == {"aborted", "finished"}
        await wait_free(rack)
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(10))
async def test_requests_survive_the_death_of_any_rank(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, rng, num_prefill=2, num_decode=2, eos_share=0.01)
        await rack.start()
        requests = [rack.make_request(n, rng.randrange(1, 150), max_tokens=rng.randrange(1, 60)) for n in range(40)]

        async def kill_and_restart() -> None:
            for _ in range(4):
                await trio.sleep(rng.random() * 0.4)
                victim = rng.choice([rank for rank in rack.ranks.values() if rank.is_up])
                await rack.kill(victim)
                await trio.sleep(0.1)
                await rack.start_rank(victim)

        nursery.start_soon(kill_and_restart)
        for request in requests:
            rack.submit(request)
            await trio.sleep(rng.random() * 0.02)
        await wait_done(requests, 120)
        assert all(request.outcome == "finished" for request in requests)
        await trio.sleep(5)
        await wait_free(rack)
        await rack.drain()
        assert not rack.problems
        nursery.cancel_scope.cancel()


async def test_memory_of_two_requests_serves_twenty(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery,
            random.Random(3),
            make_device=lambda rank: SimDevice(num_pages=9, num_slabs=8, page_tokens=8),
            limits=dataclasses.replace(LIMITS, prefill_chunk_tokens=8, decode_rows=1),
        )
        await rack.start()
        requests = [rack.make_request(number, 20, max_tokens=10) for number in range(20)]
        for request in requests:
            rack.submit(request)
        await wait_done(requests, 60)
        assert all(request.outcome == "finished" and request.attempt == 1 for request in requests)
        await wait_free(rack)
        nursery.cancel_scope.cancel()


async def test_a_request_that_can_never_fit_is_refused_at_once(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery, random.Random(3), make_device=lambda rank: SimDevice(num_pages=9, num_slabs=8, page_tokens=8)
        )
        await rack.start()
        request = rack.make_request(1, 40, max_tokens=100)
        rack.submit(request)
        await wait_done([request], 5)
        assert request.failed is not None and request.failed.code == "too_long" and not request.failed.retryable
        await wait_free(rack)
        nursery.cancel_scope.cancel()
