"""Devices of a group against devices without one: the same bits, wherever experts are and whatever breaks."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import trio

from engine.core.placement import EMPTY, Placement
from engine.core.plan import StepResult
from engine.errors import GroupBroken
from engine.model.exchange import Key
from tests.model.group_cases import (
    Group,
    Hub,
    make_schedule,
    open_group,
    random_placement,
    run_alone,
    run_group,
)
from tests.model.paged_cases import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["laid out, sockets", "random, threads"])
async def test_a_group_computes_what_single_ranks_do(checkpoint: Path, size: int, kind: str) -> None:
    """Rows of very different numbers, none included; loads are those of the single ranks, every pair computed once."""
    schedules = [make_schedule(100 * size + place, 14) for place in range(size)]
    wanted = [await run_alone(checkpoint, plans) for plans in schedules]
    async with open_group(checkpoint, size, Hub() if "threads" in kind else None) as group:
        main = group.lay_out()[0]
        if "random" in kind:
            main = random_placement(main, size, replicas=20)
            assert main.count_replicas().max() > 1
        await group.join(group.name(main))
        found = await run_group(group, schedules)
        assert found == [digest for digest, _ in wanted]
        loads = [experts.read_loads() for experts in group.experts]
        assert [experts.read_loads() for experts in group.experts] == [None] * size
    pairs = 0
    for load, (_, counts), plans in zip(loads, wanted, schedules, strict=True):
        assert load is not None
        assert np.array_equal(load[0].counts, counts)
        assert load[0].steps == sum(not plan.is_empty for plan in plans)
        assert not load[1].counts.any() and load[1].pairs == 0
        assert load[0].expert_us > 0
        pairs += load[0].pairs
    assert pairs == sum(counts.sum() for _, counts in wanted)


@pytest.mark.parametrize("size", [2, 3])
async def test_a_step_that_breaks_anywhere_runs_again(checkpoint: Path, size: int) -> None:
    """One membership after another, each broken in another phase, layer and pass, by another place."""
    schedules = [make_schedule(7 * size + place, 30) for place in range(size)]
    wanted = [await run_alone(checkpoint, plans) for plans in schedules]
    hub = Hub()
    told: list[list[GroupBroken]] = [[] for _ in range(size)]
    async with open_group(checkpoint, size, hub) as group:
        main = random_placement(group.lay_out()[0], size, replicas=10)
        ends = [(p, layer, phase) for p in (0, 1) for layer in range(main.layers) for phase in (1, 2)]
        hit: list[tuple[int, ...]] = []

        def breaks(number: int, key: Key, place: int) -> bool:
            if (
                number > len(ends)
                or place != number % size
                or key[0] < (number % 4 == 1)
                or key[1:] != ends[number - 1]
            ):
                return False
            hit.append(key[1:])
            return True

        hub.breaks = breaks
        await group.join(group.name(main))
        async with trio.open_nursery() as nursery:

            def on_broken(place: int, broken: GroupBroken) -> None:
                told[place].append(broken)
                assert broken.membership == group.number and not broken.overdue
                if all(len(list_) == group.number for list_ in told):
                    nursery.start_soon(group.join, group.name(main))

            found = await run_group(group, schedules, on_broken=on_broken)
        assert hit == ends
        assert [len(list_) for list_ in told] == [len(hit)] * size
        assert found == [digest for digest, _ in wanted]
        # What a broken pass had counted is not counted twice.
        for experts, (_, counts) in zip(group.experts, wanted, strict=True):
            loads = experts.read_loads()
            assert loads is not None and np.array_equal(loads[0].counts, counts)


def copy_slots(group: Group, before: Placement, after: Placement) -> list[dict[int, int]]:
    """What pushes do: the bytes of every expert that is new in a slot, from one that has it. Per place, what came."""
    came: list[dict[int, int]] = [{} for _ in group.devices]
    runs = [device.block_runs()[2] for device in group.devices]
    for place, slot in np.argwhere((after.table != before.table) & (after.table != EMPTY)).tolist():
        key = int(after.table[place, slot])
        source, at = before.find_replicas(*divmod(key, before.experts))[0]
        size = runs[place].block_bytes
        ctypes.memmove(runs[place].address + slot * size, runs[source].address + at * size, size)
        came[place][slot] = key
    return came


def gather(before: Placement, place: int) -> Placement:
    """All of layer 0 at one place, in slots that were empty."""
    table = before.table.copy()
    room = iter(np.flatnonzero(table[place] == EMPTY).tolist())
    moved = [key for key in range(before.experts) if key not in table[place]]
    for key in moved:
        table[place, next(room)] = key
    for other in range(before.ranks):
        if other != place:
            row = table[other]
            row[row < before.experts] = EMPTY
    return Placement(before.layers, before.experts, table)


async def test_a_flip_changes_who_computes_and_no_bit(checkpoint: Path) -> None:
    """Ready words come one rank after the other; the step after the one with the last of them uses the new table."""
    size = 2
    schedules = [make_schedule(40 + place, 24) for place in range(size)]
    wanted = [await run_alone(checkpoint, plans) for plans in schedules]
    active: list[list[int]] = [[] for _ in range(size)]
    async with open_group(checkpoint, size, None) as group:
        before = group.lay_out()[0]
        after = gather(before, 1)
        await group.join(group.name(before, epochs=(3, 1)))
        freed: list[list[int]] = [np.flatnonzero(before.table[p] != after.table[p]).tolist() for p in range(size)]
        freed = [[slot for slot in freed[p] if before.table[p, slot] != EMPTY] for p in range(size)]
        assert freed[0] and not freed[1]

        def on_result(place: int, result: StepResult) -> None:
            assert result.group is not None
            active[place].append(result.group.active[0])
            assert result.group.step == len(active[place]) - 1
            experts = group.experts[place]
            if len(active[place]) == 6 + 4 * place:
                if place == 0:
                    copies.extend(copy_slots(group, before, after))
                    for other, came in enumerate(copies):
                        group.experts[other].load_table(0, 5, after)
                        group.experts[other].note_copied(0, came)
                experts.set_ready(0, 5)
            if active[place].count(5) == 3 and freed[place]:
                # Two awaited steps after the one in which it was seen: overwritten, nobody may read them any more.
                experts.free_slots(0, freed[place])
                run = group.devices[place].block_runs()[2]
                for slot in freed[place]:
                    ctypes.memset(run.address + slot * run.block_bytes, 0xFF, run.block_bytes)

        copies: list[dict[int, int]] = []
        found = await run_group(group, schedules, on_result=on_result)
        assert found == [digest for digest, _ in wanted]
        assert active[0] == active[1] and set(active[0]) == {3, 5} and active[0] == sorted(active[0])
        # The word of place 1 was set after its result 9; at most the two steps then queued had taken their words.
        assert 10 <= active[0].index(5) <= 13


async def test_each_step_uses_the_table_that_was_in_force(checkpoint: Path) -> None:
    """Who computed how many pairs, step by step, is what the table of the step's epoch says."""
    size = 2
    schedules = [make_schedule(60 + place, 16) for place in range(size)]
    async with open_group(checkpoint, size, None) as group:
        before = group.lay_out()[0]
        after = gather(before, 1)
        await group.join(group.name(before, epochs=(1, 1)))
        seen = []
        due = np.zeros(size, int)
        for step in range(16):
            results: list[StepResult | None] = [None] * size

            async def run(place: int, step: int, results: list[StepResult | None]) -> None:
                device = group.devices[place]
                results[place] = await device.wait(device.submit(schedules[place][step]))

            async with trio.open_nursery() as nursery:
                for place in range(size):
                    nursery.start_soon(run, place, step, results)
            loads = [experts.read_loads() for experts in group.experts]
            shown = {result.group.active for result in results if result is not None and result.group is not None}
            ((epoch, _),) = shown
            seen.append(epoch)
            counts = np.sum([load[0].counts for load in loads if load is not None], axis=0)
            if np.ndim(counts):
                table = after if epoch == 2 else before
                owner = np.zeros(counts.size, int)
                places, slots = np.nonzero(table.table != EMPTY)
                owner[table.table[places, slots]] = places
                due += np.bincount(owner, weights=counts.ravel(), minlength=size).astype(int)
            for place, load in enumerate(loads):
                # A rank without rows of its own says what it did for others when it has some again.
                if load is not None:
                    assert load[0].pairs == due[place]
                    due[place] = 0
            if step == 5:
                for place, came in enumerate(copy_slots(group, before, after)):
                    group.experts[place].load_table(0, 2, after)
                    group.experts[place].note_copied(0, came)
                    group.experts[place].set_ready(0, 2)
            if step == 9:
                # Nobody can take back what is active; the word alone goes back.
                group.experts[0].withdraw(0, 2)
        assert seen == [1] * 7 + [2] * 9
