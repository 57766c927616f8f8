"""MemoryWorld: virtual time, faults from a seed, and what a life's end leaves."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from transport.errors import FabricError
from transport.fabric import BlockRun, Target
from transport.memory_fabric import ExtraFaults, Faults, MemoryFabric, MemoryWorld

SIZE, COUNT = 256, 32


class Side:
    def __init__(self, fabric: MemoryFabric, value: int) -> None:
        self.fabric = fabric
        self.memory = np.full((COUNT, SIZE), value, np.uint8)


@asynccontextmanager
async def two_sides(world: MemoryWorld) -> AsyncIterator[tuple[Side, Side, Target]]:
    async with world.open_fabric("a") as one, world.open_fabric("b") as two:
        a, b = Side(one, 1), Side(two, 0)
        for side in (a, b):
            await side.fabric.register([BlockRun(side.memory.ctypes.data, SIZE, COUNT)])
        yield a, b, await one.connect(two.describe())


async def test_time_is_trios_and_transfers_share_the_senders_wire(autojump_clock: trio.testing.MockClock) -> None:
    world = MemoryWorld(random.Random(0), latency_s=1.0, bytes_per_s=SIZE / 10)
    async with two_sides(world) as (a, b, target):
        begun = trio.current_time()
        first = a.fabric.push(target, [0], [0])
        second = a.fabric.push(target, [1], [1])
        assert (await a.fabric.wait(first)).transfer_us == 11_000_000
        assert not b.memory[1].any()
        assert (await a.fabric.wait(second)).transfer_us == 21_000_000
        assert trio.current_time() - begun == pytest.approx(21)
        assert b.memory[:2].all() and not b.memory[2:].any()


async def play(seed: int, faults: Faults) -> list[tuple[int, bool, bool, float]]:
    """(block, reported, landed, when) of 24 pushes."""
    world = MemoryWorld(random.Random(seed), latency_s=0.001, faults=faults)
    trace = []
    async with two_sides(world) as (a, b, target):
        begun = trio.current_time()
        for block in range(24):
            transfer = a.fabric.push(target, [block], [block])
            ok = False
            with trio.move_on_after(5):
                try:
                    await a.fabric.wait(transfer)
                    ok = True
                except FabricError:
                    pass
            trace.append((block, ok, bool(b.memory[block].all()), trio.current_time() - begun))
    return trace


async def test_the_same_seed_gives_the_same_faults(autojump_clock: trio.testing.MockClock) -> None:
    faults = Faults(delay=0.5, fail=0.4, late=0.5, stuck=0.1)
    one, two, other = await play(1, faults), await play(1, faults), await play(2, faults)
    assert [row[:3] for row in one] == [row[:3] for row in two]
    assert [row[:3] for row in one] != [row[:3] for row in other]
    assert {(ok, landed) for _, ok, landed, _ in one + other} == {(True, True), (False, True), (False, False)}


async def test_a_perfect_wire_never_fails(autojump_clock: trio.testing.MockClock) -> None:
    assert all(ok and landed for _, ok, landed, _ in await play(3, Faults()))


async def test_a_failed_transfer_may_land_after_the_failure_was_told(autojump_clock: trio.testing.MockClock) -> None:
    world = MemoryWorld(random.Random(0), faults=Faults(fail=1, fail_landed=0, late=1, delay_s=3))
    async with two_sides(world) as (a, b, target):
        with pytest.raises(FabricError, match="push to b#2 failed: the wire failed"):
            await a.fabric.wait(a.fabric.push(target, [4], [4]))
        assert not b.memory.any()
        await trio.sleep(3)
        assert b.memory[4].all() and not b.memory[5].any()


async def test_a_late_write_can_not_land_after_its_writer_died_or_was_severed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for severed in (False, True):
        world = MemoryWorld(random.Random(0), faults=Faults(fail=1, fail_landed=0, late=1, delay_s=3))
        async with two_sides(world) as (a, b, target):
            with pytest.raises(FabricError):
                await a.fabric.wait(a.fabric.push(target, [4], [4]))
            if severed:
                await b.fabric.sever(a.fabric.describe())
            else:
                await a.fabric.aclose()
            await trio.sleep(5)
            assert not b.memory.any()


async def test_a_stuck_transfer_ends_only_when_its_peer_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    world = MemoryWorld(random.Random(0), faults=Faults(stuck=1))
    async with two_sides(world) as (a, b, target):
        transfer = a.fabric.push(target, [4], [4])
        with trio.move_on_after(1000) as scope:
            await a.fabric.wait(transfer)
        assert scope.cancelled_caught
        await a.fabric.forget(target)
        with pytest.raises(FabricError, match="forgotten"):
            await a.fabric.wait(transfer)
        assert not b.memory.any()


async def test_nothing_stops_a_transfer_that_was_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    async with two_sides(MemoryWorld(random.Random(0), latency_s=1)) as (a, b, target):
        transfer = a.fabric.push(target, [4], [4])
        await a.fabric.forget(target)
        with pytest.raises(FabricError, match="forgotten"):
            await a.fabric.wait(transfer)
        await trio.sleep(2)
        assert b.memory[4].all()


async def test_a_description_of_an_earlier_life_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    world = MemoryWorld(random.Random(0))
    async with two_sides(world) as (a, b, target):
        old = b.fabric.describe()
        await b.fabric.aclose()
        await a.fabric.forget(target)
        async with world.open_fabric("b") as again:
            await again.register([BlockRun(b.memory.ctypes.data, SIZE, COUNT)])
            assert again.describe() != old
            with pytest.raises(FabricError, match="gone"):
                await a.fabric.connect(old)


async def test_a_push_that_lands_twice_is_over_after_the_second_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = MemoryWorld(random.Random(0), latency_s=1.0)
    world.extra = ExtraFaults(twice=1.0, twice_s=10.0)
    landings: list[float] = []
    world.on_landing = lambda writer, target, blocks: landings.append(trio.current_time())
    async with two_sides(world) as (a, b, target):
        transfer = a.fabric.push(target, [0], [0])
        await trio.sleep(1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert b.memory[0].all() and len(landings) == 1
        b.memory[0] = 0
        await a.fabric.wait(transfer)
        assert b.memory[0].all() and len(landings) == 2 and landings[1] == trio.current_time() > landings[0]


async def test_a_corrupt_push_differs_in_one_bit_and_says_nothing(autojump_clock: trio.testing.MockClock) -> None:
    world = MemoryWorld(random.Random(0), extra_rng=random.Random(5))
    world.extra = ExtraFaults(corrupt=1.0)
    async with two_sides(world) as (a, b, target):
        for _ in range(20):
            b.memory[:] = 0
            await a.fabric.wait(a.fabric.push(target, [3, 4, 9], [5, 6, 1]))
            wrong = np.bitwise_xor(b.memory[[5, 6, 1]], 1)
            assert np.unpackbits(wrong).sum() == 1 and not b.memory[[0, 2, 3, 4, 7]].any()


async def test_later_kinds_of_faults_do_not_change_what_others_draw(autojump_clock: trio.testing.MockClock) -> None:
    faults = Faults(delay=0.5, fail=0.4, late=0.5)
    plain = MemoryWorld(random.Random(3), faults=faults)
    rich = MemoryWorld(random.Random(3), faults=faults)
    rich.extra = ExtraFaults(twice=0.5, corrupt=0.5)
    drawn = [(plain._draw(), rich._draw()) for _ in range(50)]
    for before, after in drawn:
        assert (before.extra_s, before.fails, before.lands, before.late_s, before.stuck) == (
            after.extra_s, after.fails, after.lands, after.late_s, after.stuck,
        )  # fmt: skip
        assert before.twice_s is None and before.flip_at is None
    assert any(after.twice_s is not None for _, after in drawn) and any(after.flip_at is not None for _, after in drawn)
