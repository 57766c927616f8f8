"""Ranks under faults: wires, devices, peers and heads that fail, each with its bounded, named end."""

from __future__ import annotations

import dataclasses
import random
from array import array

import pytest
import trio
import trio.testing

from engine.errors import ConfigError, DeviceError
from engine.sim.device import SimDevice
from tests.actors.rack import LIMITS, Rack, wait_done, wait_free
from transport.memory_fabric import Faults
from transport.messages import (
    DECODE_FROM_PREFILL,
    PREFILL_FROM_DECODE,
    PROTOCOL_VERSION,
    Drain,
    EpochEnded,
    GrantRevoked,
    PagesGranted,
    PagesPushed,
    PeerHello,
    PeerWelcome,
    PrefillCommitted,
    PromptScored,
    Refused,
    RequestFailed,
    ReservePages,
    Sampling,
    StartPrefill,
    Timings,
    TurnDeclined,
)
from transport.stream import FrameStream


@pytest.mark.parametrize("seed", range(8))
async def test_failing_and_late_writes_never_reach_a_client(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, rng, num_prefill=2, num_decode=2)
        await rack.start()
        rack.world.faults = Faults(delay=0.3, delay_s=0.3, fail=0.05, late=0.8)
        requests = [rack.make_request(n, rng.randrange(1, 150), max_tokens=rng.randrange(1, 60)) for n in range(40)]

        async def replace_writers() -> None:
            # What a head does at its cap of quarantined pages.
            while True:
                await trio.sleep(1)
                for decode in [rank for rank in rack.ranks.values() if rank.role == "decode"]:
                    if decode.snapshot is not None and decode.snapshot.pages_quarantined > 20:
                        for writer in [rank for rank in rack.ranks.values() if rank.role == "prefill"]:
                            await rack.kill(writer)
                            await rack.start_rank(writer)
                        break

        nursery.start_soon(replace_writers)
        for request in requests:
            rack.submit(request)
            await trio.sleep(rng.random() * 0.05)
        await wait_done(requests, 300)
        assert all(request.outcome == "finished" for request in requests)
        assert max(request.attempt for request in requests) > 1
        rack.world.faults = Faults()
        for writer in [rank for rank in rack.ranks.values() if rank.role == "prefill"]:
            await rack.kill(writer)
        await wait_free(rack)
        assert not rack.problems
        nursery.cancel_scope.cancel()


async def test_an_overdue_write_fails_its_request_and_its_pages_wait_for_the_end(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1), limits=dataclasses.replace(LIMITS, transfer_s=1.0, link_stall_s=0.5))
        rack.auto_retry = False
        await rack.start()
        rack.world.faults = Faults(stuck=1.0)
        request = rack.make_request(1, 20, max_tokens=5)
        rack.submit(request)
        await wait_done([request], 5)
        assert request.failed is not None and request.failed.code in ("transfer_failed", "rank_lost")
        await trio.sleep(10)
        prefill, decode = rack.ranks[0], rack.ranks[1]
        assert prefill.snapshot is not None and decode.snapshot is not None
        assert prefill.snapshot.pages_owned == 3 and prefill.snapshot.pushes_inflight == 1
        assert decode.snapshot.pages_quarantined == 3
        # As long as the write may land, nothing else goes to that rank: refused at once, and retryable.
        other = rack.make_request(2, 20, max_tokens=5)
        rack.submit(other)
        await wait_done([other], 5)
        assert other.failed is not None and other.failed.code == "rank_lost"
        await rack.kill(prefill)
        await wait_free(rack)
        nursery.cancel_scope.cancel()


async def test_a_failed_device_answers_every_request_and_ends_the_rank(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery,
            random.Random(1),
            make_device=lambda rank: SimDevice(
                num_pages=64, num_slabs=8, page_tokens=8, fail_at_step=5 if rank == 1 else 0
            ),
        )
        rack.auto_retry = False
        await rack.start()
        requests = [rack.make_request(number, 20, max_tokens=50) for number in range(12)]
        for request in requests:
            rack.submit(request)
        await rack.ranks[1].ended.wait()
        error = rack.ranks[1].error
        assert isinstance(error, DeviceError) and "step 5 failed" in str(error)
        failed = [m for m in rack.ranks[1].messages if isinstance(m, RequestFailed)]
        assert {m.request for m in failed} == set(range(12))
        assert all(m.code == "device_failed" and m.retryable and m.definite for m in failed)
        nursery.cancel_scope.cancel()


async def test_a_device_that_hangs_is_found_by_the_watchdog(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery,
            random.Random(1),
            limits=dataclasses.replace(LIMITS, step_s=2.0),
            make_device=lambda rank: SimDevice(
                num_pages=64, num_slabs=8, page_tokens=8, hang_at_step=3 if rank == 0 else 0
            ),
        )
        await rack.start()
        rack.submit(rack.make_request(1, 300, max_tokens=5))
        began = trio.current_time()
        await rack.ranks[0].ended.wait()
        assert 2 < trio.current_time() - began < 4
        assert isinstance(rack.ranks[0].error, DeviceError) and "step_s" in str(rack.ranks[0].error)
        nursery.cancel_scope.cancel()


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1))
        rack.auto_retry = False
        await rack.start()
        running = [rack.make_request(number, 20, max_tokens=50) for number in range(3)]
        for request in running:
            rack.submit(request)
        await trio.sleep(0.1)
        rack._post(rack.ranks[1], Drain())
        await trio.sleep(0.001)
        late = rack.make_request(9, 20, max_tokens=5)
        rack.submit(late)
        await wait_done([*running, late], 10)
        assert [request.outcome for request in running] == ["finished"] * 3
        assert late.failed is not None and late.failed.code == "draining" and late.failed.retryable
        await rack.ranks[1].ended.wait()
        assert rack.ranks[1].error is None
        nursery.cancel_scope.cancel()


async def test_a_rank_ends_with_its_head(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1))
        await rack.start()
        rack.submit(rack.make_request(1, 100, max_tokens=50))
        await trio.sleep(0.05)
        for rank in rack.ranks.values():
            assert rank.frames is not None
            await rank.frames.aclose()
        with trio.fail_after(5):
            for rank in rack.ranks.values():
                await rank.ended.wait()
                assert rank.error is None
        nursery.cancel_scope.cancel()


async def test_more_waiting_requests_than_the_limit_are_refused_as_retryable(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1), limits=dataclasses.replace(LIMITS, rank_waiting=3))
        rack.auto_retry = False
        await rack.start()
        requests = [rack.make_request(number, 400, max_tokens=50) for number in range(10)]
        for request in requests:
            rack.submit(request)
        await wait_done(requests, 60)
        refused = [request for request in requests if request.outcome == "failed"]
        assert refused and len(refused) < 10
        assert all(request.failed is not None and request.failed.code == "queue_full" for request in refused)
        await wait_free(rack)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("bad", [[2, 3, -1], [2, 1000, 3], []])
async def test_ids_that_no_embedding_has_are_refused_before_the_device_sees_them(
    bad: list[int], autojump_clock: trio.abc.Clock
) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(1))
        rack.auto_retry = False
        await rack.start()
        request = rack.make_request(1, max(1, len(bad)), max_tokens=5)
        rack.requests[1] = request
        request.attempt, request.open_on, request.pair = 1, {0}, (0, 1)
        rack._post(rack.ranks[0], StartPrefill(1, 1, 1, 0, Sampling(), 0), array("i", bad).tobytes())
        await wait_done([request], 5)
        assert request.failed is not None and request.failed.code == "bad_request"
        nursery.cancel_scope.cancel()


async def test_priorities_go_first_and_ties_by_arrival(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery, random.Random(3), make_device=lambda rank: SimDevice(num_pages=6, num_slabs=8, page_tokens=8)
        )
        await rack.start()
        order: list[int] = []
        for number, priority in enumerate([0, 5, 0, -5]):
            request = rack.make_request(number, 20, max_tokens=20)
            rack.requests[number] = request
            request.attempt, request.open_on, request.pair = 1, {0, 1}, (0, 1)
            ids = array("i", request.prompt).tobytes()
            rack._post(rack.ranks[0], StartPrefill(number, 1, 1, 0, request.sampling, 0, priority), ids)
            rack._post(rack.ranks[1], ReservePages(number, 1, 0, 20, 0, request.sampling, priority))

            async def note(number: int = number) -> None:
                await rack.requests[number].done.wait()
                order.append(number)

            nursery.start_soon(note)
        await wait_done(list(rack.requests.values()), 20)
        await trio.testing.wait_all_tasks_blocked()
        # All four arrive together, so even the first grant goes by priority.
        assert order == [3, 0, 2, 1]
        nursery.cancel_scope.cancel()


async def test_a_chunk_size_that_is_not_whole_pages_is_a_configuration_error(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(nursery, random.Random(3), limits=dataclasses.replace(LIMITS, prefill_chunk_tokens=12))
        nursery.start_soon(rack.start)
        rank = rack.ranks[0]
        await trio.sleep(1)
        assert rank.ended.is_set()
        assert isinstance(rank.error, ConfigError) and "multiple" in str(rank.error)
        nursery.cancel_scope.cancel()


async def test_ranks_with_different_layouts_refuse_each_other(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = Rack(
            nursery,
            random.Random(3),
            make_device=lambda rank: SimDevice(
                num_pages=16, num_slabs=8, page_tokens=8, layout_digest="pq"[rank]
            ),
        )
        rack.auto_retry = False
        await rack.start()
        request = rack.make_request(1, 20, max_tokens=5)
        rack.submit(request)
        await wait_done([request], 90)
        assert request.failed is not None and request.failed.code == "rank_lost"
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- a peer that is not ours


class Peer:
    """A hand-made prefill rank that dials a real decode rank."""

    def __init__(self, rack: Rack, nursery: trio.Nursery) -> None:
        self.rack, self.nursery = rack, nursery

    async def dial(self, generation: int = 1) -> FrameStream:
        decode = self.rack.ranks[1]
        assert decode.ready is not None
        stream = await self.rack._dial(self.rack.ranks[0], decode.ready.address)
        frames = FrameStream(
            stream, accepts=PREFILL_FROM_DECODE, out_limit_bytes=1 << 20, stall_s=5, name="decode rank"
        )
        self.nursery.start_soon(frames.run_writer)
        assert self.rack.ranks[0].fabric is not None
        frames.post(PeerHello(PROTOCOL_VERSION, 0, generation, "sim-8"), self.rack.ranks[0].fabric.describe())
        return frames


async def receive(frames: FrameStream, kind: type) -> object:
    with trio.fail_after(30):
        while True:
            for frame in await frames.receive():
                if isinstance(frame.message, kind):
                    return frame.message


async def start_lone_decode(nursery: trio.Nursery, **limits: float) -> tuple[Rack, FrameStream]:
    """A rack whose prefill rank is up but never told of the decode rank; the returned stream plays its part."""
    rack = Rack(nursery, random.Random(1), limits=dataclasses.replace(LIMITS, **limits))  # type: ignore[arg-type]
    rack.auto_retry = rack.introduces = False
    await rack.start_rank(rack.ranks[0])
    await rack.start_rank(rack.ranks[1])
    frames = await Peer(rack, nursery).dial()
    await receive(frames, PeerWelcome)
    return rack, frames


def reserve(rack: Rack, number: int, num_ids: int) -> object:
    request = rack.make_request(number, num_ids, max_tokens=5)
    rack.requests[number] = request
    request.attempt, request.open_on, request.pair = 1, {1}, (0, 1)
    rack._post(rack.ranks[1], ReservePages(number, 1, 0, num_ids, 0, request.sampling))
    return request


def commit(grant: PagesGranted, num_ids: int, num_pages: int) -> PrefillCommitted:
    return PrefillCommitted(grant.request, grant.epoch, num_ids, num_pages, 5, 1, 1, 1, Timings())


@pytest.mark.parametrize(("num_ids", "num_pages", "pushed"), [(19, 3, 3), (20, 2, 3), (20, 3, 2)])
async def test_a_commit_with_wrong_counts_fails_and_its_pages_stay_until_the_epoch_ends(
    num_ids: int, num_pages: int, pushed: int, autojump_clock: trio.abc.Clock
) -> None:
    async with trio.open_nursery() as nursery:
        rack, frames = await start_lone_decode(nursery)
        request = reserve(rack, 1, 20)
        grant = await receive(frames, PagesGranted)
        assert isinstance(grant, PagesGranted) and grant.num_pages == 3
        frames.post(PagesPushed(1, grant.epoch, 0, pushed, 10))
        frames.post(commit(grant, num_ids, num_pages))
        await receive(frames, GrantRevoked)
        await trio.sleep(1)
        assert request.failed.code == "transfer_failed" and rack.ranks[1].snapshot.pages_quarantined == 3
        frames.post(EpochEnded(1, grant.epoch))
        await trio.sleep(1)
        assert rack.ranks[1].snapshot.pages_quarantined == 0
        nursery.cancel_scope.cancel()


async def test_a_silent_writer_fails_the_request_in_time_and_keeps_the_pages(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack, _frames = await start_lone_decode(nursery, grant_s=3.0)
        began = trio.current_time()
        request = reserve(rack, 1, 20)
        await wait_done([request], 10)
        assert 3 <= trio.current_time() - began < 4
        assert request.failed.code == "timeout" and "grant_s" in request.failed.message
        await trio.sleep(60)
        assert rack.ranks[1].snapshot.pages_quarantined == 3
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "word",
    [
        PagesPushed(1, 1, 2, 5, 10),
        PagesPushed(1, 99, 0, 1, 10),
        PagesPushed(7, 1, 0, 1, 10),
        EpochEnded(1, 99),
        PeerHello(PROTOCOL_VERSION, 0, 1, "sim-8"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_loses_its_link_and_nothing_else(
    word: object, autojump_clock: trio.abc.Clock
) -> None:
    async with trio.open_nursery() as nursery:
        rack, frames = await start_lone_decode(nursery)
        request = reserve(rack, 1, 20)
        await receive(frames, PagesGranted)
        frames.post(word)  # type: ignore[arg-type]
        await wait_done([request], 5)
        assert request.failed.code == "rank_lost"
        await trio.sleep(1)
        assert rack.ranks[1].is_up and rack.ranks[1].snapshot.pages_quarantined == 3
        # The same life may come back and end what it began.
        again = await Peer(rack, nursery).dial()
        revoked = await receive(again, GrantRevoked)
        assert isinstance(revoked, GrantRevoked) and revoked.epoch == 1
        again.post(EpochEnded(1, 1))
        await trio.sleep(1)
        assert rack.ranks[1].snapshot.pages_free == 64
        nursery.cancel_scope.cancel()


async def test_a_greeting_of_a_dead_life_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack, frames = await start_lone_decode(nursery)
        request = reserve(rack, 1, 20)
        await receive(frames, PagesGranted)
        rack.ranks[0].is_ready = trio.Event()
        await rack.kill(rack.ranks[0])
        await trio.sleep(1)
        assert request.failed.code == "rank_lost"
        assert rack.ranks[1].snapshot.pages_free == 64
        refused = await receive(await Peer(rack, nursery).dial(), Refused)
        assert isinstance(refused, Refused) and "life 1 of rank 0 is over" in refused.message
        nursery.cancel_scope.cancel()


def test_the_vocabulary_of_a_pair_stream_is_what_the_sides_handle() -> None:
    handoff = {PeerHello, PagesPushed, PromptScored, PrefillCommitted, EpochEnded}
    assert handoff | {PagesGranted, GrantRevoked, TurnDeclined} == DECODE_FROM_PREFILL
