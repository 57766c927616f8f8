"""Who pushes how much to whom: counted by prefill ranks on virtual time, and kept by the head for those that live."""

from __future__ import annotations

import collections
import dataclasses
import random
import struct
from typing import Any

import pytest
import trio

from engine.core.pushes import PushMeter
from tests.actors.rack import LIMITS, Rack, Rank, wait_done, wait_free
from tests.actors.test_supervisor import World, settle
from transport.memory_fabric import Faults
from transport.messages import Message, PairCounts

Row = tuple[int, int, int, int, int]


class CountingRack(Rack):
    """Keeps each rank's newest counts: decode rank to bytes, pushes, in flight, failed, p99."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.pairs: dict[int, dict[int, Row]] = {}

    def _on_message(self, rank: Rank, message: Message, blob: memoryview) -> None:
        super()._on_message(rank, message, blob)
        if isinstance(message, PairCounts):
            assert (message.rank, message.generation, rank.role) == (rank.rank, rank.generation, "prefill")
            assert rank.snapshot is not None, "counts come with a snapshot"
            columns, at, n = [], 0, message.count
            for kind in "iqqiii":
                columns.append(struct.unpack_from(f"<{n}{kind}", blob, at))
                at += n * struct.calcsize(kind)
            assert list(columns[0]) == sorted(set(columns[0]))
            self.pairs[rank.rank] = {row[0]: row[1:] for row in zip(*columns, strict=True)}  # type: ignore[misc]

    def check_sums(self) -> None:
        """Counts and snapshots of prefill ranks say the same."""
        for rank in self.ranks.values():
            if rank.role == "prefill" and rank.is_up:
                rows, snapshot = self.pairs[rank.rank].values(), rank.snapshot
                assert snapshot is not None
                assert sum(row[0] for row in rows) == snapshot.pushed_bytes
                assert sum(row[1] for row in rows) == snapshot.pushes
                assert sum(row[2] for row in rows) == snapshot.pushes_inflight


async def test_each_pair_is_counted_and_a_peers_new_life_goes_on(autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(5)
    async with trio.open_nursery() as nursery:
        rack = CountingRack(nursery, rng, num_prefill=2, num_decode=2)
        rack.world.faults = Faults(delay=0.5, delay_s=0.05)
        await rack.start()
        await trio.sleep(0.3)
        assert rack.pairs == {rank: {2: (0, 0, 0, 0, 0), 3: (0, 0, 0, 0, 0)} for rank in (0, 1)}, "linked, nothing yet"
        told: collections.Counter[tuple[int, int, str]] = collections.Counter()

        async def run(first: int) -> None:
            requests = [rack.make_request(first + n, rng.randrange(1, 150), max_tokens=5) for n in range(30)]
            for request in requests:
                rack.submit(request)
            await wait_done(requests, 60)
            await wait_free(rack)
            for request in requests:
                assert request.attempt == 1 and request.started is not None
                told[*request.pair, "bytes"] += request.started.pushed_bytes
                told[*request.pair, "pushes"] += request.started.pushes

        def check() -> None:
            rack.check_sums()
            for prefill in (0, 1):
                for decode in (2, 3):
                    num_bytes, pushes, inflight, failed, p99_us = rack.pairs[prefill][decode]
                    assert num_bytes == told[prefill, decode, "bytes"] > 0
                    assert pushes == told[prefill, decode, "pushes"] > 0
                    assert (inflight, failed) == (0, 0) and 0 < p99_us <= 50_000 + 1000

        await run(0)
        check()
        decode = rack.ranks[2]
        await rack.kill(decode)
        await trio.sleep(0.5)
        check()  # it was pushed to, so it is still named
        await rack.start_rank(decode)
        assert decode.generation == 2
        await run(100)
        check()
        # A life of the one who counts begins at nothing.
        await rack.kill(rack.ranks[0])
        await rack.start_rank(rack.ranks[0])
        await trio.sleep(0.5)
        assert rack.pairs[0] == {2: (0, 0, 0, 0, 0), 3: (0, 0, 0, 0, 0)}
        rack.check_sums()
        nursery.cancel_scope.cancel()


async def test_a_push_that_fails_is_counted_once_and_none_stays_in_flight(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = CountingRack(nursery, random.Random(2))
        rack.auto_retry = False
        await rack.start()
        rack.world.faults = Faults(fail=1.0)
        request = rack.make_request(1, 20, max_tokens=5)
        rack.submit(request)
        await wait_done([request], 5)
        await trio.sleep(1)
        assert rack.pairs[0][1] == (0, 0, 0, 1, 0)
        rack.check_sums()
        nursery.cancel_scope.cancel()


OVERDUE = {
    "lands": (Faults(delay=1.0, delay_s=100.0), (1, 0, 1)),
    "fails": (Faults(delay=1.0, delay_s=100.0, fail=1.0), (0, 0, 1)),
    "stays": (Faults(stuck=1.0), (0, 1, 1)),
}
"""What becomes of it, and its pushes, in flight and failed then."""


@pytest.mark.parametrize("end", OVERDUE)
async def test_an_overdue_push_is_failed_and_in_flight_until_it_ends(end: str, autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        limits = dataclasses.replace(LIMITS, transfer_s=1.0, link_stall_s=0.5)
        rack = CountingRack(nursery, random.Random(4), limits=limits)
        rack.auto_retry = False
        await rack.start()
        rack.world.faults, wanted = OVERDUE[end]
        request = rack.make_request(1, 20, max_tokens=5)
        rack.submit(request)
        await wait_done([request], 5)
        await trio.sleep(1)
        assert rack.pairs[0][1] == (0, 0, 1, 1, 0)
        rack.check_sums()
        await trio.sleep(120)
        num_bytes, pushes, inflight, failed, p99_us = rack.pairs[0][1]
        assert (pushes, inflight, failed) == wanted
        assert (num_bytes > 0) == (p99_us > 1_000_000) == (end == "lands")
        rack.check_sums()
        await rack.kill(rack.ranks[0])
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- the head


ROLES: Any = {0: "prefill", 1: "prefill", 2: "decode", 3: "decode"}


def count(rank: int, generation: int, *pushed: tuple[int, int]) -> tuple[PairCounts, bytes]:
    """(decode rank, bytes) of each push."""
    meter = PushMeter()
    for peer, num_bytes in pushed:
        meter.land(peer, num_bytes, 5)
    return meter.build(rank, generation, ())


def links(world: World) -> list[tuple[int, int, int, int, int]]:
    """Prefill rank, its generation, decode rank, bytes, pushes."""
    report, blob = world.supervisor.links()
    columns, at = [], 0
    for kind in "iiiqqiii":
        columns.append(struct.unpack_from(f"<{report.count}{kind}", blob, at))
        at += report.count * struct.calcsize(kind)
    assert at == len(blob)
    return [row[:5] for row in zip(*columns, strict=True)]


async def test_the_head_keeps_the_newest_counts_of_those_that_live(nursery, autojump_clock) -> None:
    world = World(nursery, ROLES)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    assert links(world) == []
    world.now(1).link.post(*count(1, 1, (3, 10), (2, 20), (3, 5)))
    world.now(0).link.post(*count(0, 1, (3, 7)))
    await settle()
    assert links(world) == [(0, 1, 3, 7, 1), (1, 1, 2, 20, 1), (1, 1, 3, 15, 2)]
    world.now(0).link.post(*count(0, 1, (3, 7), (3, 1)))
    await settle()
    assert links(world) == [(0, 1, 3, 8, 2), (1, 1, 2, 20, 1), (1, 1, 3, 15, 2)]
    await world.now(1).die(-9)
    await trio.sleep(0.05)
    assert links(world) == [(0, 1, 3, 8, 2)]
    await trio.sleep(2)
    assert world.now(1).generation == 2 and links(world) == [(0, 1, 3, 8, 2)]
    world.now(1).link.post(*count(1, 2, (2, 1)))
    await settle()
    assert links(world) == [(0, 1, 3, 8, 2), (1, 2, 2, 1, 1)]
    await world.supervisor.stop()
    assert links(world) == []


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (0, count(0, 2, (2, 1))),
        (0, count(1, 1, (2, 1))),
        (0, count(0, 1, (1, 1))),
        (0, count(0, 1, (4, 1))),
        (2, count(2, 1, (3, 1))),
    ],
    ids=["another generation", "another rank", "to a prefill rank", "to no rank", "from a decode rank"],
)
async def test_counts_that_can_not_be_end_the_rank(nursery, autojump_clock, who, said) -> None:
    world = World(nursery, ROLES)
    world.make_all_healthy()
    nursery.start_soon(world.supervisor.run)
    await settle()
    first = world.now(who)
    first.link.post(*said)
    await trio.sleep(2)
    assert first.dead.is_set() and world.now(who).generation == 2 and links(world) == []
    assert not any(process.dead.is_set() for process in world.processes if process is not first)
    await world.supervisor.stop()
