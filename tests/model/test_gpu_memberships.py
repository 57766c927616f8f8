"""Two ranks with steps of a GPU in one process: what a breakage leaves to be told, what memberships leave mapped."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch
import trio

from engine.core.group import Membership, PartPlacement
from engine.core.placement import lay_out
from engine.core.plan import IDLE_STEP, StepPlan
from engine.errors import ConfigError, GroupBroken
from engine.model.device import StepTicket, TorchDevice
from engine.model.exchange import Key, Mesh, MeshBroken
from engine.model.expert_slots import TorchExpertSlots
from engine.model.gpu_rank import GpuGroup, load_gpu_group
from engine.model.ops import reference_ops
from engine.model.pipeline import Pipeline
from kernels.mailbox import FAILED, MOST_ROWS
from tests.model.gpu_rank_cases import rank_config
from tests.model.paged_cases import small_v4_config, write_checkpoint
from tests.model.plain_rows import PlainRows
from transport.messages import Member

NOTHING = StepPlan(IDLE_STEP, (), (), idle=1)


def open_rank(directory: Path, place: int) -> TorchDevice:
    model, info, group = load_gpu_group(
        rank_config(directory, 2), lambda *_: None, torch.device("cpu"), place=place,
        mesh_address=str(directory / f"{place}.mesh"), ops=reference_ops(), prompt_rows=(16,), peers=PlainRows,
    )  # fmt: skip
    return TorchDevice(model, info, grouping=group, read_checksums=model.arena.read_checksums)


async def join(device: TorchDevice, directory: Path, number: int, lives: tuple[int, int]) -> None:
    part, slots = device.info.parts[0], device.experts
    assert isinstance(slots, TorchExpertSlots)
    placement = lay_out(part.layers, part.experts, 2, part.slots)
    members = tuple(Member(10 + at, life, str(directory / f"{at}.mesh"), 0) for at, life in enumerate(lives))
    await slots.prepare(Membership(number, members, (b"",) * 2, (PartPlacement(10 * number, placement),)))
    slots.join(number)


async def join_both(devices: Sequence[TorchDevice], directory: Path, number: int) -> None:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for each in devices:
                nursery.start_soon(join, each, directory, number, (1, 1))


async def run_both(devices: Sequence[TorchDevice]) -> list[tuple[int, ...]]:
    """A step without rows; membership and step of each."""
    found = []
    with trio.fail_after(30):
        for device, ticket in [(each, each.submit(NOTHING)) for each in devices]:
            result = await device.wait(ticket)
            assert result.group is not None
            found.append(result.group[:2])
    return found


async def wait_until(is_so: threading.Event) -> None:
    with trio.fail_after(20):
        assert await trio.to_thread.run_sync(is_so.wait, 20)


@pytest.mark.parametrize("is_void", [False, True])
async def test_a_step_that_ends_while_words_are_waited_for_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_void: bool
) -> None:
    """The other rank says nothing of the next step until the first one was told. `is_void`: that is told, too."""
    torch.set_num_threads(1)
    write_checkpoint(tmp_path, config=small_v4_config())
    device, other = open_rank(tmp_path, 0), open_rank(tmp_path, 1)
    may_end, waits = threading.Event(), threading.Event()
    late = device._pipeline
    assert late is not None
    finish = Mesh.finish

    def watched(mesh: Mesh, key: Key, *look: object) -> dict[int, memoryview]:
        if key[0] == 1:
            waits.set()
        return finish(mesh, key, *look)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "has_ended", property(lambda found: found is not late or may_end.is_set()))
    monkeypatch.setattr(Mesh, "finish", watched)
    with trio.fail_after(30):
        await join_both((device, other), tmp_path, 1)
        first, theirs = (each.submit(NOTHING) for each in (device, other))
        await other.wait(theirs)
        second = device.submit(NOTHING)
        await wait_until(waits)
        if is_void:
            failure = late.first.failure
            assert failure is not None
            failure[0] = FAILED | 1 << 52
        may_end.set()
        # Well below `limits.exchange_s`, after which the wait for words would end.
        with trio.fail_after(5):
            if is_void:
                with pytest.raises(GroupBroken, match="sent no rows in the dispatch of layer 0"):
                    await device.wait(first)
            else:
                result = await device.wait(first)
                assert result.group is not None and result.group[:2] == (1, 0) and not second.is_done
        if not is_void:
            for each, ticket in ((other, other.submit(NOTHING)), (device, second)):
                result = await each.wait(ticket)
                assert result.group is not None and result.group[:2] == (1, 1)
        for each in (device, other):
            await each.aclose()


def test_more_rows_than_a_mailbox_takes_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config=small_v4_config())
    with pytest.raises(ConfigError, match=rf"limits\.decode_rows {MOST_ROWS + 1} .*\({MOST_ROWS}\)"):
        load_gpu_group(
            rank_config(tmp_path, 2, decode_rows=MOST_ROWS + 1), lambda *_: None, torch.device("cpu"), place=0,
            mesh_address=str(tmp_path / "mesh"),
        )  # fmt: skip


@pytest.mark.parametrize("is_missed", [False, True])
async def test_the_latest_breakage_is_told_before_a_step_of_the_next_membership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_missed: bool
) -> None:
    """It is found while a step is under way which ends all the same. `is_missed`: nobody comes to the next one."""
    torch.set_num_threads(1)
    write_checkpoint(tmp_path, config=small_v4_config())
    device, other = open_rank(tmp_path, 0), open_rank(tmp_path, 1)
    may_end, broken, met = threading.Event(), threading.Event(), threading.Event()
    late, group = device._pipeline, device._group
    assert late is not None and group is not None
    note_broken, connect = group.note_broken, group._connect

    def note(error: object) -> None:
        note_broken(error)  # type: ignore[arg-type]
        broken.set()

    def meet(membership: Membership, *rest: object) -> object:
        if membership.number == 2:
            met.set()
            if is_missed:
                raise MeshBroken(1, "did not come", overdue=True)
        return connect(membership, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "has_ended", property(lambda found: found is not late or may_end.is_set()))
    monkeypatch.setattr(group, "note_broken", note)
    monkeypatch.setattr(group, "_connect", meet)
    with trio.fail_after(30):
        await join_both((device, other), tmp_path, 1)
        tickets: list[StepTicket] = [each.submit(NOTHING) for each in (device, other)]
        await other.wait(tickets[1])
        await other.aclose()
        await wait_until(broken)
        may_end.set()
        result = await device.wait(tickets[0])
        assert result.group is not None and result.group[:2] == (1, 0)
        await join(device, tmp_path, 2, (1, 0))
        await wait_until(met)
        ticket = device.submit(NOTHING)
        with pytest.raises(GroupBroken) as found:
            await device.wait(ticket)
        assert (found.value.membership, found.value.rank, found.value.overdue) == (1 + is_missed, 11, is_missed)
        if is_missed:
            await join(device, tmp_path, 3, (1, 0))
        for step, expected in enumerate((ticket, device.submit(NOTHING))):
            result = await device.wait(expected)
            assert result.group is not None and result.group[:2] == (2 + is_missed, step)
        await device.aclose()


def count_shared(inodes: Collection[int]) -> tuple[int, int]:
    """Open descriptors, and mappings of mailboxes with these inodes."""
    with open("/proc/self/maps") as lines:
        mapped = sum("memfd:mailbox" in line and int(line.split()[4]) in inodes for line in lines)
    return len(os.listdir("/proc/self/fd")), mapped


async def test_memberships_one_after_another_leave_nothing_open_or_mapped(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_checkpoint(tmp_path, config=small_v4_config())
    gc.collect()
    devices = [open_rank(tmp_path, place) for place in range(2)]
    groups = [each._grouping for each in devices]
    inodes = {os.fstat(each.share.descriptor).st_ino for each in groups if isinstance(each, GpuGroup)}
    assert len(inodes) == 2
    counts = []
    for number in (1, 2, 3):
        await join_both(devices, tmp_path, number)
        if number > 1:
            # In it all agree to leave.
            assert await run_both(devices) == [(number - 1, 1)] * 2
        assert await run_both(devices) == [(number, 0)] * 2
        counts.append(count_shared(inodes))
    assert counts[0][1] == 4, "each has its own mailbox and the other's"
    assert counts[1:] == counts[:1] * 2
    for device in devices:
        await device.aclose()
    # Their own ones are there as long as views of them are.
    assert count_shared(inodes)[1] == 2
