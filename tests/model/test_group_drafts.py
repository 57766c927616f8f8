"""Ranks of a group that draft, each for its own rows: the texts of single ranks without drafts, whatever breaks."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

from engine.core.plan import IDLE_STEP, StepPlan
from engine.errors import GroupBroken
from engine.model.device import TorchDevice, open_torch_device
from engine.model.dispatch import Dispatch
from engine.model.exchange import Key
from engine.model.expert_slots import TorchExpertSlots
from engine.model.fused import Layer, Mixture, Routed
from tests.model.group_cases import (
    PAGE_TOKENS,
    Group,
    Hub,
    group_config,
    ignore,
    open_group,
    random_placement,
)
from tests.model.paged_cases import random_ids, small_config, write_checkpoint
from tests.model.speculation_cases import Host, Request, run_host
from tests.model.test_paged_drafts import small_ahead_config
from tests.model.test_speculation import SETTINGS

EOS = 1
STEPS = 44


@pytest.fixture(scope="module", params=["v4.1 blocks", "v4 ahead"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, config=small_config() if "v4.1" in request.param else config_of_pages())
    return directory


def config_of_pages() -> dict[str, Any]:
    """Entries that fit the pages of `group_cases`."""
    config = small_ahead_config()
    config["compress_ratios"] = [ratio and 4 if ratio < 8 else 8 for ratio in config["compress_ratios"]]
    return config


def make_requests(place: int) -> list[Request]:
    lengths = [[5, 30, 9, 2], [21, 8], [1], [40, 3, 17]][place]
    requests, used = [], 0
    for slab, length in enumerate(lengths):
        limit = 17 - slab
        count = -(-(length + limit) // PAGE_TOKENS)
        ids = random_ids(length, 320, seed=10 * place + slab)
        pages = tuple(range(used, used + count))
        requests.append(Request(slab, pages, ids, SETTINGS[(slab + 3 * place) % len(SETTINGS)], limit))
        used += count
    return requests


class Rows:
    """Rows of the drafter's layers that chose each expert, by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: TorchDevice, experts: int) -> None:
        shape = device.model.shape
        self.counts = np.zeros((shape.num_draft_layers, experts), np.int64)
        mix = Layer.mix_experts

        def count(layer: Layer, lines: Any, ids: npt.NDArray[np.int64], mixture: Mixture | None) -> Routed:
            routed = mix(layer, lines, ids, mixture)
            if layer.role.index >= shape.num_layers:
                self.counts[layer.number] += np.bincount(routed.choice.ids.ravel(), minlength=experts)
            return routed

        monkeypatch.setattr(Layer, "mix_experts", count)


async def run_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, requests: Sequence[Request], experts: int, drafts: list[int]
) -> tuple[list[Request], npt.NDArray[np.int64]]:
    """A rank without a group and without drafts: what it says; then with drafts: what its drafter chose."""
    plain = [request.again() for request in requests]
    device = await open_torch_device(group_config(directory, 1), ignore, poison=True)
    for request in plain:
        await run_host(device, Host([request], (EOS,), [0], 1), queued=1)
    with monkeypatch.context() as patch:
        rows = Rows(patch, device, experts)
        host = Host([request.again() for request in requests], (EOS,), drafts, 5)
        await run_host(device, host)
    assert [request.text for request in host.requests] == [request.text for request in plain]
    await device.aclose()
    return plain, rows.counts


async def run_member(device: TorchDevice, host: Host, on_broken: Callable[[GroupBroken], None] | None = None) -> None:
    """As many steps as all members run, two in the queue; without rows where nothing is to be done."""
    tickets: collections.deque[tuple[Any, bool]] = collections.deque()
    for at in range(STEPS + 2):
        if at >= 2:
            ticket, has_rows = tickets.popleft()
            while True:
                try:
                    result = await device.wait(ticket)
                except GroupBroken as broken:
                    assert on_broken is not None, broken
                    on_broken(broken)
                    continue
                break
            if has_rows:
                host.apply(result)
        if at < STEPS:
            plan = host.plan()
            tickets.append((device.submit(plan or StepPlan(IDLE_STEP, (), ())), plan is not None))


def drafts_of(place: int) -> list[int]:
    return [[3], [0, 2, 5], [4], [0]][place]


async def run_group(group: Group, told: Callable[[int, GroupBroken], None] | None = None) -> list[Host]:
    hosts = [
        Host([request.again() for request in make_requests(place)], (EOS,), drafts_of(place), 5)
        for place in range(len(group.devices))
    ]
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for place, (device, host) in enumerate(zip(group.devices, hosts, strict=True)):
                on_broken = None if told is None else lambda broken, place=place: told(place, broken)
                nursery.start_soon(run_member, device, host, on_broken)
    return hosts


def check(group: Group, hosts: list[Host], wanted: list[tuple[list[Request], npt.NDArray[np.int64]]]) -> None:
    """Texts, log-probabilities, and every row of the drafter counted once and computed once."""
    pairs = 0
    for host, experts, (plain, counts) in zip(hosts, group.experts, wanted, strict=True):
        assert host.is_done
        for found, request in zip(host.requests, plain, strict=True):
            assert found.text == request.text
            assert found.scored == request.scored
        loads = experts.read_loads()
        assert loads is not None and np.array_equal(loads[1].counts, counts)
        pairs += loads[1].pairs
        assert loads[1].expert_us > 0 and loads[1].steps == loads[0].steps
    assert pairs == sum(int(counts.sum()) for _, counts in wanted) > 0


@pytest.mark.parametrize(("size", "kind"), [(2, "sockets"), (2, "threads"), (4, "threads")])
async def test_members_draft_each_for_its_own_rows(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, size: int, kind: str
) -> None:
    """Members that draft far, less far and not at all; some have nothing to do while others go on."""
    async with open_group(checkpoint, size, Hub() if kind == "threads" else None) as group:
        experts = group.devices[0].info.parts[1].experts
        wanted = [
            await run_alone(checkpoint, monkeypatch, make_requests(place), experts, drafts_of(place))
            for place in range(size)
        ]
        main = random_placement(group.lay_out()[0], size, replicas=10)
        await group.join(group.name(main))
        hosts = await run_group(group)
        check(group, hosts, wanted)
        tried = [any(proposed for proposed, _ in host.figures.accepted) for host in hosts]
        assert tried == [any(drafts_of(place)) for place in range(size)]


async def test_a_step_that_breaks_anywhere_finds_the_same_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of the target and of the drafter, in each phase, found by either member."""
    size, hub = 2, Hub()
    told: list[int] = [0] * size
    async with open_group(checkpoint, size, hub) as group:
        parts = group.devices[0].info.parts
        wanted = [
            await run_alone(checkpoint, monkeypatch, make_requests(place), parts[1].experts, drafts_of(place))
            for place in range(size)
        ]
        main = group.lay_out()[0]
        ends = [(part, layer, phase) for part in (1, 0, 1) for layer in (0, parts[part].layers - 1) for phase in (1, 2)]
        hit: list[tuple[int, ...]] = []

        def breaks(number: int, key: Key, place: int) -> bool:
            dispatch = group.devices[place].model.mixture
            if number > len(ends) or place != number % size or key[0] < number % 3:
                return False
            assert isinstance(dispatch, Dispatch)
            part = dispatch._part
            # The first round of the layer that predicts ahead, and a later one.
            if (part, *key[2:]) != ends[number - 1] or (part and number % 2 and key[1] < 2 and parts[1].layers == 1):
                return False
            hit.append((part, *key[2:]))
            return True

        hub.breaks = breaks
        await group.join(group.name(main))
        async with trio.open_nursery() as nursery:

            def on_broken(place: int, broken: GroupBroken) -> None:
                told[place] += 1
                assert broken.membership == group.number
                if told == [group.number] * size:
                    nursery.start_soon(group.join, group.name(main))

            hosts = await run_group(group, on_broken)
        assert hit == ends
        check(group, hosts, wanted)


def test_a_part_for_the_drafter_has_slots_in_both_forms(checkpoint: Path) -> None:
    async def look() -> None:
        async with open_group(checkpoint, 2, Hub()) as group:
            shape = group.devices[0].model.shape
            names = [(part.name, part.layers) for part in group.devices[0].info.parts]
            assert names == [("main", shape.num_layers), ("draft", shape.num_draft_layers)]
            assert all(isinstance(experts, TorchExpertSlots) for experts in group.experts)
            assert {device.info.max_drafts for device in group.devices} == {5 if shape.drafter else 7}

    trio.run(look)
