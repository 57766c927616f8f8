"""Devices of a group that come and go, are closed, wait for nobody, or are told to use a slot that is in use."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import trio

from engine.core.placement import EMPTY, Placement
from engine.core.plan import StepPlan, StepResult
from engine.errors import ConfigError, DeviceError, GroupBroken, LocalProtocolError
from engine.model.checkpoint import load_checkpoint
from engine.model.device import TorchDevice, open_torch_device
from tests.model.group_cases import (
    Hub,
    digest,
    group_config,
    ignore,
    make_schedule,
    open_group,
    run_alone,
    run_group,
    run_schedule,
)
from tests.model.group_process import run_member
from tests.model.paged_cases import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return directory


def without(before: Placement, lost: int) -> Placement:
    """Survivors take over, into empty slots, what only the lost one held."""
    table = before.table.copy()
    stranded = before.find_stranded([lost])
    table[lost] = EMPTY
    for at, (layer, expert) in enumerate(stranded):
        place = [place for place in range(before.ranks) if place != lost][at % (before.ranks - 1)]
        table[place, np.flatnonzero(table[place] == EMPTY)[0]] = layer * before.experts + expert
    return Placement(before.layers, before.experts, table)


async def test_a_lost_rank_is_done_without_and_comes_back(checkpoint: Path) -> None:
    """The survivors break and go on alone; the new life of the lost one joins by the pact, and nobody breaks."""
    size, lost = 3, 1
    schedules = [make_schedule(80 + place, 18) for place in range(size)]
    short = [*schedules]
    short[lost] = schedules[lost][:6]
    wanted = [await run_alone(checkpoint, plans) for plans in short]
    again = await run_alone(checkpoint, schedules[lost][:6])
    told: list[int] = []
    steps: list[list[int]] = [[] for _ in range(size)]
    async with open_group(checkpoint, size, None) as group, trio.open_nursery() as nursery:
        whole = group.lay_out()[0]
        reduced = without(whole, lost)
        table = reduced.table.copy()
        table[lost] = whole.table[lost]
        joined = Placement(whole.layers, whole.experts, table)
        await group.join(group.name(whole))
        found: dict[int, str] = {}

        async def run_lost() -> None:
            device = group.devices[lost]
            outcomes = await run_schedule(device, short[lost], queued=1)
            assert digest(outcomes, device) == again[0]
            await device.aclose()

        async def restart() -> None:
            config = group_config(checkpoint, size)
            address = group.devices[lost].info.mesh_address
            group.devices[lost] = await open_torch_device(config, ignore, poison=True, mesh_address=address)
            await group.join(group.name(joined))
            device = group.devices[lost]
            outcomes = await run_schedule(device, schedules[lost][:6])
            found[lost] = digest(outcomes, device)
            await stop_together(device)

        async def run(place: int) -> None:
            device = group.devices[place]

            def on_broken(broken: GroupBroken) -> None:
                assert (broken.membership, broken.overdue) == (1, False)
                told.append(place)
                if len(told) == size - 1:
                    nursery.start_soon(group.join, group.name(reduced, lost=[lost]))

            def on_result(result: StepResult) -> None:
                assert result.group is not None
                steps[place].append(result.group.membership)
                if steps[0].count(2) == 3 and place == 0 and result.group.membership == 2:
                    nursery.start_soon(restart)

            outcomes = await run_schedule(device, schedules[place], on_broken=on_broken, on_result=on_result)
            found[place] = digest(outcomes, device)
            steps[place] += await stop_together(device)

        async def stop_together(device: TorchDevice) -> list[int]:
            """Steps of nothing until all have run what they had to."""
            seen = []
            while True:
                result = await device.wait(device.submit(StepPlan(0, (), (), stop=len(found) == size)))
                assert result.group is not None
                seen.append(result.group.membership)
                if result.group.stop:
                    return seen

        with trio.fail_after(60):
            async with trio.open_nursery() as running:
                running.start_soon(run_lost)
                for place in (0, 2):
                    running.start_soon(run, place)
    assert sorted(told) == [0, 2]
    assert steps[0][:6] == steps[2][:6] == [1] * 6 and set(steps[0]) == {1, 2, 3} and steps[0] == sorted(steps[0])
    assert found == {place: wanted[place][0] for place in range(size)}


async def test_a_slot_with_another_expert_is_found_before_it_computes(checkpoint: Path) -> None:
    async with open_group(checkpoint, 2, Hub()) as group:
        main = group.lay_out()[0]
        await group.join(group.name(main))
        # What a copy to a wrong slot would leave.
        pool = group.experts[1].pools[0]
        slots = np.flatnonzero(main.table[1] // main.experts == 3)
        pool.held[slots] = np.roll(pool.held[slots], 1)
        with pytest.raises((DeviceError, ExceptionGroup)) as caught:
            await run_group(group, [make_schedule(1, 6), make_schedule(2, 6)], on_broken=lambda place, broken: None)
    assert caught.group_contains(
        DeviceError,
        match=r"slot \d+ of rank 11 holds expert \d+ of layer 3, the table of rank 1[01] says expert \d+ of layer 3",
    )


async def test_slots_in_use_are_not_written(checkpoint: Path) -> None:
    async with open_group(checkpoint, 2, Hub()) as group:
        main, experts = group.lay_out()[0], group.experts[0]
        await group.join(group.name(main))
        await run_group(group, [[StepPlan(0, (), ())]] * 2)
        used, key = 5, int(main.table[0, 5])
        empty = int(np.flatnonzero(main.table[0] == EMPTY)[0])
        with pytest.raises(DeviceError, match=r"expert 0 of layer 7 was copied into slot 5, which holds expert 5 of"):
            experts.note_copied(0, {empty: 0, used: 7 * 16})
        assert experts.pools[0].held[empty] == EMPTY
        with pytest.raises(DeviceError, match="slot 5 can not be freed: expert 5 of layer 0 is in force there"):
            experts.free_slots(0, [used])
        table = main.table.copy()
        table[0, [used, empty]] = [int(main.table[1, 0]), key]
        with pytest.raises(DeviceError, match="would go into slot 5, which holds expert 5 of layer 0"):
            await experts.prepare(group.name(Placement(main.layers, main.experts, table)))
        # A copy that was announced may land any time.
        table = main.table.copy()
        table[0, empty] = int(main.table[1, 0])
        experts.load_table(0, 2, Placement(main.layers, main.experts, table.copy()))
        table[0, empty] = int(main.table[1, 1])
        with pytest.raises(DeviceError, match=rf"would go into slot {empty}, expert \d+ of layer \d+ may come there"):
            await experts.prepare(group.name(Placement(main.layers, main.experts, table)))
        # Given up and freed: now it may be used.
        experts.free_slots(0, [empty])
        await experts.prepare(group.name(Placement(main.layers, main.experts, table)))
        assert experts.pools[0].held[empty] == table[0, empty]
        with pytest.raises(LocalProtocolError, match="ready for epoch 2"):
            experts.set_ready(0, 2)
        with pytest.raises(LocalProtocolError, match="membership 99 is joined and was not prepared"):
            experts.join(99)


async def test_a_membership_that_is_not_joined_leaves_nothing_behind(checkpoint: Path) -> None:
    async with open_group(checkpoint, 2, Hub()) as group:
        main, experts = group.lay_out()[0], group.experts[0]
        swapped = Placement(main.layers, main.experts, np.ascontiguousarray(main.table[::-1]))
        await experts.prepare(group.name(swapped))
        assert np.array_equal(experts.pools[0].held, swapped.table[0])
        await group.join(group.name(main))
        assert np.array_equal(experts.pools[0].held, main.table[0])
        plans = [make_schedule(3, 5), make_schedule(4, 5)]
        assert await run_group(group, plans) == [(await run_alone(checkpoint, each))[0] for each in plans]


async def test_who_waits_for_nobody_fails_and_closes(checkpoint: Path) -> None:
    async with open_group(checkpoint, 2, None, exchange_s=0.3, group_s=0.3) as group:
        await group.join(group.name(group.lay_out()[0]))
        (first, _), plan = group.devices, StepPlan(0, (), ())
        ticket = first.submit(plan)
        with trio.fail_after(5):
            with pytest.raises(GroupBroken, match=r"rank 11 .* within 0.3 s") as caught:
                await first.wait(ticket)
            assert caught.value.overdue and caught.value.step == 0
            with pytest.raises(DeviceError, match=r"no membership after 1 was joined within 0.3 s"):
                await first.wait(ticket)
            with pytest.raises(DeviceError, match="no membership after 1"):
                first.submit(plan)


@pytest.mark.parametrize("where", ["exchange", "between memberships", "before any"])
async def test_closing_does_not_wait_for_a_stalled_group(checkpoint: Path, where: str) -> None:
    async with open_group(checkpoint, 2, None, exchange_s=0.5, group_s=100.0) as group:
        first = group.devices[0]
        if where != "before any":
            await group.join(group.name(group.lay_out()[0]))
        tickets = [first.submit(StepPlan(0, (), ())) for _ in range(2)]
        with trio.fail_after(5):
            if where == "between memberships":
                with pytest.raises(GroupBroken):
                    await first.wait(tickets[0])
            await first.aclose()
            for ticket in tickets:
                while True:
                    try:
                        await first.wait(ticket)
                    except GroupBroken:
                        continue
                    except DeviceError as error:
                        assert "was closed" in str(error)
                        break


async def test_steps_behind_the_last_one_of_a_group_are_answered(checkpoint: Path) -> None:
    """All ranks said stop: whoever has a step in the queue gets it, whoever has none closes."""
    async with open_group(checkpoint, 2, None) as group:
        await group.join(group.name(group.lay_out()[0]))
        first, second = group.devices
        going, stopping = StepPlan(0, (), ()), StepPlan(0, (), (), stop=True)
        tickets = [first.submit(going), first.submit(stopping)]
        others = [second.submit(stopping), second.submit(stopping)]
        shown = [(await first.wait(ticket)).group for ticket in tickets]
        shown += [(await second.wait(ticket)).group for ticket in others]
        assert [entry.stop for entry in shown if entry is not None] == [False, True, False, True]
        await second.aclose()
        late = (await first.wait(first.submit(going))).group
        assert late is not None and late.stop


def test_parts_and_blocks_of_a_group(checkpoint: Path) -> None:
    async def look() -> None:
        async with open_group(checkpoint, 2, Hub()) as group:
            info = group.devices[0].info
            assert [(part.name, part.layers, part.experts, part.slots) for part in info.parts] == [
                ("main", 8, 16, 64 + 24),
                ("draft", 3, 4, 6 + 2),
            ]
            runs = group.devices[0].block_runs()
            for run, part in zip(runs[2:], info.parts, strict=True):
                assert (run.block_bytes, run.count) == (part.slot_bytes, part.slots) and run.address % 4096 == 0
            await group.join(group.name(group.lay_out()[0]))
            _, weights = load_checkpoint(checkpoint)
            for pool, stack in zip(group.experts[1].pools, ("layers", "mtp"), strict=True):
                layer, expert = divmod(int(pool.held[3]), pool.info.experts)
                ffn = f"{stack}.{layer}.ffn"
                w1, w3, w2 = (weights[f"{ffn}.experts.{name}"][expert] for name in ("w1", "w3", "w2"))
                fold = weights[f"{ffn}_norm.weight"]
                wanted = torch.cat([(torch.cat((w1, w3)) * fold).t().flatten(), w2.t().flatten()]).numpy()
                run = pool.run
                stored = ctypes.string_at(run.address + 3 * run.block_bytes, wanted.nbytes)
                assert stored == wanted.tobytes()
            held = [pool.held for pool in group.experts[1].pools]
            assert [np.array_equal(h, p.table[1]) for h, p in zip(held, group.lay_out(), strict=True)] == [True, True]

    trio.run(look)


async def test_a_bounded_replay_is_refused(checkpoint: Path) -> None:
    config = dataclasses.replace(group_config(checkpoint, 2), replay_rows=32)
    with pytest.raises(ConfigError, match="replay_rows must be 0 for ranks of a group"):
        await open_torch_device(config, ignore, mesh_address=str(checkpoint / "none.mesh"))


async def test_two_processes(checkpoint: Path) -> None:
    """The second rank in a process of its own, as in production."""
    wanted = [(await run_alone(checkpoint, make_schedule(120 + place, 12)))[0] for place in range(2)]
    command = [sys.executable, "-m", "tests.model.group_process", str(checkpoint), "1", "2", "121", "12"]
    found = {}

    async def run_other() -> None:
        found[1] = (await trio.run_process(command, capture_stdout=True)).stdout.decode().strip()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_other)
            found[0] = await run_member(checkpoint, 0, 2, 120, 12)
    assert found == dict(enumerate(wanted))
