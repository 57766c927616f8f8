"""Ranks whose pushes have checksums, on wires that flip bits and say nothing."""

from __future__ import annotations

import logging
import random

import pytest
import trio
import trio.testing

from engine.sim.device import SimDevice
from tests.actors.rack import LIMITS, Rack, wait_done, wait_free
from transport.memory_fabric import ExtraFaults
from transport.messages import RequestStarted


async def test_flipped_bits_cost_attempts_and_no_token(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(4)
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, rng, num_prefill=2, num_decode=2, checksums=True)
        await rack.start()
        rack.world.extra = ExtraFaults(corrupt=0.15)
        requests = [rack.make_request(n, rng.randrange(1, 150), max_tokens=rng.randrange(1, 40)) for n in range(40)]
        for request in requests:
            rack.submit(request)
        await wait_done(requests, 300)
        # The head of the rack compares each token with the text that the prompt has.
        assert all(request.outcome == "finished" for request in requests)
        tries = [request.attempt for request in requests]
        assert sum(tries) > len(tries)
        assert {request.failed.code for request in requests if request.failed is not None} == {"kv_corrupt"}
        await wait_free(rack)
        found = sum(rank.snapshot.corrupt_pushes for rank in rack.ranks.values() if rank.snapshot is not None)
        lost = sum(tries) - len(tries)
        assert found >= lost > 0
        told = [record for record in caplog.records if record.getMessage() == "handoff.corrupt"]
        assert len(told) == found and all(record.levelno == logging.ERROR for record in told)
        assert not rack.problems
        nursery.cancel_scope.cancel()


async def test_a_failure_names_origin_request_and_pages(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1), checksums=True)
        rack.auto_retry = False
        await rack.start()
        rack.world.extra = ExtraFaults(corrupt=1.0)
        request = rack.make_request(7, 60, max_tokens=5)
        rack.submit(request)
        await wait_done([request], 30)
        assert request.failed is not None and request.failed.code == "kv_corrupt" and request.failed.retryable
        assert "pages [0, +4) that prefill rank 0 pushed for request 7" in request.failed.message
        assert "(2 of 2 pushes are corrupt)" in request.failed.message
        assert not request.tokens and request.started is None
        await wait_free(rack)
        nursery.cancel_scope.cancel()


async def test_reading_back_delays_one_request_and_nothing_else(autojump_clock: trio.abc.Clock) -> None:
    """A device that reads slowly: who runs already goes on, and who waits is let go in time."""
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery,
            random.Random(1),
            checksums=True,
            make_device=lambda rank: SimDevice(
                num_pages=64, num_slabs=8, page_tokens=8, checksum_s=20.0 if rank == 1 else 0.0
            ),
        )
        rack.auto_retry = False
        await rack.start()
        slow = rack.make_request(1, 16, max_tokens=4)
        rack.submit(slow)
        began = trio.current_time()
        await wait_done([slow], 100)
        assert slow.failed is not None and slow.failed.code == "timeout" and "transfer_s" in slow.failed.message
        assert LIMITS.transfer_s <= trio.current_time() - began < LIMITS.transfer_s + 1
        snapshot = rack.ranks[1].snapshot
        assert snapshot is not None and snapshot.pages_free < 64, "what is read has an owner"
        await trio.sleep(60)
        await wait_free(rack)
        assert not any(isinstance(message, RequestStarted) for message in rack.ranks[1].messages)
        nursery.cancel_scope.cancel()
