"""Ranks of a group on virtual time: they step, park, stop and flip together, and survive each other."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from engine.core.migrate import Outcome
from engine.core.placement import EMPTY, Placement
from engine.errors import ConfigError, DeviceError
from engine.sim.device import SimDevice
from tests.actors.group_rack import GroupRack, wait_until
from tests.actors.rack import LIMITS, Request, wait_done, wait_free
from transport.memory_fabric import Faults


def place(*rows: list[int], experts: int) -> Placement:
    return Placement(1, experts, np.array(rows, np.int32))


MAIN = place([0, 1, EMPTY, EMPTY], [2, 3, EMPTY, EMPTY], [4, 5, EMPTY, EMPTY], experts=6)
MAIN_AFTER = place([0, 3, EMPTY, EMPTY], [2, 5, EMPTY, EMPTY], [4, 1, EMPTY, EMPTY], experts=6)
DRAFT = place([0, EMPTY], [1, EMPTY], [2, EMPTY], experts=3)
DRAFT_AFTER = place([1, EMPTY], [2, EMPTY], [0, EMPTY], experts=3)


@asynccontextmanager
async def open_rack(*decode: Placement, **options: Any) -> AsyncIterator[GroupRack]:
    async with trio.open_nursery() as nursery:
        rack = GroupRack(nursery, 1, list(decode or (MAIN, DRAFT)), **options)
        await rack.start()
        for keeper in rack.keepers:
            await keeper.wait_whole()
        yield rack
        assert not rack.problems
        nursery.cancel_scope.cancel()


def submit(rack: GroupRack, count: int, first: int = 0, **sampling: Any) -> list[Request]:
    requests = [rack.make_request(first + n, 20 + 7 * n, **({"max_tokens": 30} | sampling)) for n in range(count)]
    for request in requests:
        rack.submit(request)
    return requests


def check_steps(rack: GroupRack) -> None:
    """Every step of every membership was run by all its members, under one epoch; none was left out."""
    for keeper in rack.keepers:
        memberships = {number for number, _ in keeper.mesh.ran}
        for number in memberships:
            steps = sorted(step for at, step in keeper.mesh.ran if at == number)
            assert steps == list(range(len(steps)))
        for at, ran in keeper.mesh.ran.items():
            assert len({active for active, _ in ran.values()}) == 1, at


async def test_a_group_forms_serves_parks_at_one_step_and_wakes(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        await rack.decode.wait_parked()
        last = max(rack.decode.mesh.ran)
        # Nobody began a step that another did not: they stopped at the same one.
        assert len(rack.decode.mesh.ran[last]) == 3 and rack.decode.wakes == 0
        for turn in range(3):
            requests = submit(rack, 4, first=10 * turn)
            await wait_done(requests, 20)
            assert all(request.outcome == "finished" and request.attempt == 1 for request in requests)
            await rack.decode.wait_parked()
        assert rack.decode.wakes >= 3
        check_steps(rack)
        assert all(len(ran) == 3 for ran in rack.decode.mesh.ran.values())
        await wait_free(rack)
        await rack.drain_all()


async def test_a_device_is_told_before_it_gets_the_next_step(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        # Both happen in the turn that hears JoinGroup, and what a step says of its rank is what was set before it.
        assert all(rank.device.calls[:3] == ["join", "submit", "submit"] for rank in rack.decode.living())
        await rack.drain_all()


async def test_prefill_ranks_are_a_group_too(autojump_clock: trio.abc.Clock) -> None:
    prefill = [place([0, EMPTY], [1, EMPTY], experts=2)]
    async with open_rack(MAIN, prefill=prefill) as rack:
        requests = submit(rack, 12)
        await wait_done(requests, 30)
        assert all(request.outcome == "finished" and request.attempt == 1 for request in requests)
        await rack.keepers[1].wait_parked()
        assert any(rows for ran in rack.keepers[1].mesh.ran.values() for _, rows in ran.values())
        check_steps(rack)
        await rack.drain_all()


async def test_a_drained_group_ends_together_after_the_last_row(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        requests = submit(rack, 1, max_tokens=60)
        await trio.sleep(0.3)
        assert 0 < len(requests[0].tokens) < 60
        ends = {}

        async def watch(rank: Any) -> None:
            await rank.ended.wait()
            ends[rank.rank] = trio.current_time()

        for rank in rack.decode.living():
            rack.nursery.start_soon(watch, rank)
        await rack.drain_all()
        await trio.lowlevel.checkpoint()
        assert requests[0].outcome == "finished"
        assert len(ends) == 3 and max(ends.values()) - min(ends.values()) < 0.01
        check_steps(rack)


async def test_two_parts_move_at_once_beside_requests(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        requests = submit(rack, 6, max_tokens=60)
        await trio.sleep(0.2)
        rack.decode.migrate(0, MAIN_AFTER)
        rack.decode.migrate(1, DRAFT_AFTER)
        for part, after in ((0, MAIN_AFTER), (1, DRAFT_AFTER)):
            migration = await rack.decode.wait_over(part)
            assert migration.outcome is Outcome.DONE
            assert np.array_equal(migration.placement.count_per_rank(), after.count_per_rank())
        await wait_done(requests, 30)
        assert all(request.outcome == "finished" and request.attempt == 1 for request in requests)
        assert {len({a for a, _ in ran.values()}) for ran in rack.decode.mesh.ran.values()} == {1}
        assert {active for ran in rack.decode.mesh.ran.values() for active, _ in ran.values()} >= {(0, 0)}
        assert max(active for ran in rack.decode.mesh.ran.values() for active, _ in ran.values()) > (1, 0)
        await rack.drain_all()


async def test_a_parked_group_is_woken_for_a_flip_and_parks_again(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        await rack.decode.wait_parked()
        before = len(rack.decode.mesh.ran)
        rack.decode.migrate(0, MAIN_AFTER)
        assert (await rack.decode.wait_over(0)).outcome is Outcome.DONE
        await rack.decode.wait_parked()
        assert len(rack.decode.mesh.ran) > before and rack.decode.wakes == 0
        check_steps(rack)
        await rack.drain_all()


async def test_a_withdrawn_epoch_never_becomes_active_and_the_next_one_does(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        rack.world.faults = Faults(delay=1.0, delay_s=0.3)
        first = rack.decode.migrate(0, MAIN_AFTER)
        await trio.sleep(0.05)
        rack.decode.give(0, first.abort("enough"))
        assert (await rack.decode.wait_over(0)).outcome is Outcome.ABORTED
        rack.decode.migrate(0, MAIN_AFTER)
        assert (await rack.decode.wait_over(0)).outcome is Outcome.DONE
        epochs = {active[0] for ran in rack.decode.mesh.ran.values() for active, _ in ran.values()}
        assert first.epoch not in epochs and first.epoch + 1 in epochs
        await rack.drain_all()


@pytest.mark.parametrize("when", ["running", "parked", "moving"])
async def test_a_lost_member_breaks_the_group_which_goes_on_and_takes_it_back(
    when: str, autojump_clock: trio.abc.Clock
) -> None:
    async with open_rack() as rack:
        requests = submit(rack, 6, max_tokens=60) if when != "parked" else []
        if when == "parked":
            await rack.decode.wait_parked()
        else:
            await trio.sleep(0.3)
        if when == "moving":
            rack.world.faults = Faults(delay=1.0, delay_s=0.5)
            rack.decode.migrate(0, MAIN_AFTER)
            await trio.sleep(0.02)
        victim = rack.ranks[rack.decode.ranks[1]]
        kept = [request for request in requests if request.pair[1] != victim.rank]
        await rack.kill(victim)
        if when == "moving":
            assert (await rack.decode.wait_over(0)).outcome is Outcome.ABORTED
        await wait_until(lambda: len(rack.decode.joined) == 2 and not rack.decode.must_name)
        # The survivors took its experts, and their requests noticed nothing but a pause.
        assert rack.decode.named is not None and rack.decode.named.number == 2
        await rack.start_rank(victim)
        await rack.decode.wait_whole()
        await wait_done(requests, 60)
        assert all(request.outcome == "finished" for request in requests)
        assert all(request.attempt == 1 for request in kept)
        more = submit(rack, 4, first=100)
        await wait_done(more, 30)
        rack.world.faults = Faults()
        rack.decode.migrate(0, MAIN_AFTER)
        assert (await rack.decode.wait_over(0)).outcome is Outcome.DONE
        await rack.decode.wait_parked()
        check_steps(rack)
        assert not rack.decode.accused
        await rack.drain_all()


async def test_a_member_that_hangs_is_accused_by_the_others(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        victim = rack.ranks[rack.decode.ranks[2]]
        victim.device.hangs = True
        requests = submit(rack, 4)
        await wait_until(lambda: bool(rack.decode.accused))
        accused = rack.decode.accused[0]
        assert (accused.rank, accused.generation, accused.membership) == (victim.rank, 1, 1)
        assert accused.why == "did not answer within 10 s"
        await rack.kill(victim)
        await rack.start_rank(victim)
        await rack.decode.wait_whole()
        await wait_done(requests, 60)
        assert all(request.outcome == "finished" for request in requests)
        await rack.drain_all()


async def test_steps_that_wait_for_a_membership_are_no_sign_of_a_stuck_device(autojump_clock: trio.abc.Clock) -> None:
    # No room for what the lost rank had: the others wait for it, longer than a step may take.
    full = place([0, EMPTY], [1, 2], experts=3)
    limits = dataclasses.replace(LIMITS, step_s=2.0, grant_s=200.0)
    async with open_rack(place([0], [1], experts=2), limits=limits) as rack:
        assert full.ranks == 2
        requests = submit(rack, 4, max_tokens=60)
        await trio.sleep(0.3)
        victim = rack.ranks[rack.decode.ranks[1]]
        kept = [request for request in requests if request.pair[1] != victim.rank and request.tokens]
        await rack.kill(victim)
        await trio.sleep(30)
        assert kept and not any(request.outcome for request in kept)
        assert all(rank.snapshot.step_age_ms > 20_000 for rank in rack.decode.living())
        await rack.start_rank(victim)
        await rack.decode.wait_whole()
        await wait_done(requests, 60)
        assert all(request.outcome == "finished" for request in requests)
        assert all(request.attempt == 1 for request in kept)
        await rack.drain_all()


async def test_a_copy_that_is_overdue_gives_the_move_up_and_is_waited_for(autojump_clock: trio.abc.Clock) -> None:
    limits = dataclasses.replace(LIMITS, copy_s=0.1)
    async with open_rack(limits=limits) as rack:
        rack.world.faults = Faults(delay=1.0, delay_s=1.0)
        rack.decode.migrate(0, MAIN_AFTER)
        migration = await rack.decode.wait_over(0)
        assert migration.outcome is Outcome.ABORTED
        assert any("not done after 0.1 s (copy_s)" in failed.why for failed in rack.decode.failed_copies)
        rack.world.faults = Faults()
        rack.decode.migrate(0, MAIN_AFTER)
        assert (await rack.decode.wait_over(0)).outcome is Outcome.DONE
        await rack.drain_all()


async def test_a_copy_that_failed_keeps_its_epoch_until_its_target_is_dead(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack(MAIN) as rack:
        rack.world.faults = Faults(fail=1.0, late=1.0, delay_s=0.3)
        migration = rack.decode.migrate(0, MAIN_AFTER)
        await trio.sleep(1)
        assert rack.decode.failed_copies and migration.outcome is None
        rack.world.faults = Faults()
        targets = {copy.target[0] for copy in migration.stage.copies}
        for target in sorted(targets)[:-1]:
            await rack.kill(rack.ranks[rack.decode.ranks[target]])
            await rack.start_rank(rack.ranks[rack.decode.ranks[target]])
            await rack.decode.wait_whole()
        assert (await rack.decode.wait_over(0)).outcome is Outcome.ABORTED
        rack.decode.migrate(0, MAIN_AFTER)
        assert (await rack.decode.wait_over(0)).outcome is Outcome.DONE
        await rack.drain_all()


async def test_loads_are_told_while_there_are_rows(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        await trio.sleep(5)
        assert not rack.decode.loads
        await wait_done(submit(rack, 4), 20)
        await trio.sleep(2)
        assert {loads.part for loads in rack.decode.loads} == {"main", "draft"}
        rows = sum(loads.pairs for loads in rack.decode.loads if loads.part == "main")
        assert rows == sum(n for ran in rack.decode.mesh.ran.values() for _, n in ran.values())
        await rack.drain_all()


async def test_empty_steps_are_neither_progress_nor_age(autojump_clock: trio.abc.Clock) -> None:
    async with open_rack() as rack:
        await wait_done(submit(rack, 2, max_tokens=20), 20)
        await rack.decode.wait_parked()
        await trio.sleep(1)
        for rank in rack.decode.living():
            assert rank.snapshot is not None and rank.snapshot.step_age_ms == 0
            own = sum(1 for ran in rack.decode.mesh.ran.values() if ran.get(rank.rank, ((), 0))[1])
            assert rank.snapshot.step == own < len(rack.decode.mesh.ran)
        await rack.drain_all()


async def test_a_rank_that_can_not_prepare_ends(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = GroupRack(nursery, 1, [MAIN])
        make: Callable[[int], Any] = rack.make_device

        def broken(rank: int) -> Any:
            device = make(rank)
            device.fails_to_prepare = rank == rack.decode.ranks[0]
            return device

        rack.make_device = broken
        await rack.start()
        victim = rack.ranks[rack.decode.ranks[0]]
        with trio.fail_after(10):
            await victim.ended.wait()
        assert isinstance(victim.error, DeviceError) and "can not be loaded" in str(victim.error)
        nursery.cancel_scope.cancel()


async def test_a_group_on_a_device_without_slots_is_a_wrong_configuration(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        rack = GroupRack(nursery, 1, [MAIN])
        rack.make_device = lambda rank: SimDevice(num_pages=64, num_slabs=8, page_tokens=8)
        rank = rack.ranks[rack.decode.ranks[0]]
        nursery.start_soon(rack.start_rank, rank)
        await trio.sleep(1)
        assert isinstance(rank.error, ConfigError) and "in a group of 3, and device sim has no expert slots" in str(
            rank.error
        )
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(5))
async def test_requests_moves_and_deaths_at_any_moment(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    async with open_rack() as rack:
        decode = rack.decode
        requests: list[Request] = []

        async def disturb() -> None:
            for _ in range(3):
                rack.world.faults = Faults(delay=0.3, delay_s=0.2)
                for part, after in ((0, MAIN_AFTER), (1, DRAFT_AFTER)):
                    before = decode.migrations[part]
                    if rng.random() < 0.7 and decode.is_whole and (before is None or before.outcome is not None):
                        target = after if decode.epochs[part] == 0 else (MAIN, DRAFT)[part]
                        if not np.array_equal(decode.placements[part].count_per_rank(), target.count_per_rank()):
                            decode.migrate(part, target)
                await trio.sleep(rng.random() * 0.1)
                migration = decode.migrations[rng.randrange(2)]
                if migration is not None and migration.outcome is None and rng.random() < 0.3:
                    decode.give(decode.migrations.index(migration), migration.abort("enough"))
                if rng.random() < 0.6:
                    victim = rack.ranks[rng.choice(decode.ranks)]
                    await rack.kill(victim)
                    await trio.sleep(rng.random() * 0.2)
                    await rack.start_rank(victim)
                await trio.sleep(rng.random() * 0.5)
                await decode.wait_whole()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            for burst in range(6):
                requests += submit(rack, rng.randrange(1, 5), first=100 * burst, max_tokens=rng.randrange(1, 50))
                await trio.sleep(rng.random() * 0.4)
        await wait_done(requests, 120)
        assert all(request.outcome == "finished" for request in requests)
        for part in range(2):
            if decode.migrations[part] is not None:
                assert (await decode.wait_over(part)).outcome is not None
        await decode.wait_parked()
        check_steps(rack)
        await wait_free(rack)
        await rack.drain_all()
