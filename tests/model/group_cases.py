"""Groups of devices in one process, and what they run: seeded schedules of steps, placements, a mesh that breaks.

`ThreadMesh` passes frames between worker threads, and breaks at the exchange that a test names; the meshes of sockets
have tests of their own, and are used here where it does not have to break at a certain point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from engine.config import ExpertsConfig, Limits, RankConfig
from engine.core.group import Membership, PartPlacement
from engine.core.placement import EMPTY, Placement, lay_out
from engine.core.plan import IDLE_STEP, DecodeRow, PrefillChunk, StepPlan, StepResult
from engine.errors import GroupBroken
from engine.model.device import TorchDevice, open_torch_device
from engine.model.exchange import Key, MeshBroken, Piece
from engine.model.expert_slots import TorchExpertSlots
from engine.model.transformer import Probe
from transport.messages import Member, Sampling

PAGES, SLABS, PAGE_TOKENS, PAGES_EACH = 168, 14, 8, 12
"""Twelve pages for each sequence of a slab: 96 ids."""
WAIT_S = 20.0


def group_config(directory: Path, group: int, **limits: Any) -> RankConfig:
    return RankConfig(
        role="decode",
        model=str(directory),
        device="cpu",
        fabric="tcp",
        page_tokens=PAGE_TOKENS,
        max_model_tokens=PAGES_EACH * PAGE_TOKENS,
        num_pages=PAGES,
        num_slabs=SLABS,
        kv_dtype="float32",
        threads=1,
        replay_rows=0,
        config_digest="0",
        limits=dataclasses.replace(Limits(prefill_chunk_tokens=48, decode_rows=SLABS), **limits),
        group=group,
        experts_main=ExpertsConfig(spare_slots=24),
        experts_draft=ExpertsConfig(spare_slots=2),
    )


def ignore(phase: str, done: int, total: int, unit: str) -> None:
    """A start-up nobody watches."""


# ---------------------------------------------------------------- a mesh of threads


class Hub:
    """Meeting place of the members of all memberships of a test.

    Attributes:
        breaks: asked with (membership, key, place) when an exchange begins: whether that place finds another one gone.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.present: dict[int, set[int]] = {}
        self.broken: set[int] = set()
        self.frames: dict[tuple[int, Key, int, int], bytearray] = {}
        self.breaks: Callable[[int, Key, int], bool] = lambda number, key, place: False

    def connect(self, membership: Membership, place: int, is_wanted: Callable[[], bool]) -> ThreadMesh:
        due = time.monotonic() + WAIT_S
        with self.changed:
            present = self.present.setdefault(membership.number, set())
            present.add(place)
            self.changed.notify_all()
            while not present.issuperset(membership.living):
                missing = next(other for other in membership.living if other not in present)
                if not is_wanted() or time.monotonic() > due:
                    raise MeshBroken(missing, "was not met", overdue=is_wanted())
                self.changed.wait(0.02)
        return ThreadMesh(self, membership, place)


class ThreadMesh:
    """One member's end."""

    def __init__(self, hub: Hub, membership: Membership, place: int) -> None:
        self._hub = hub
        self._number = membership.number
        self._place = place
        self.places = membership.living
        self._others = [other for other in self.places if other != place]

    def start(self, key: Key, frames: Mapping[int, Sequence[Piece]]) -> None:
        assert sorted(frames) == self._others
        with self._hub.changed:
            if self._hub.breaks(self._number, key, self._place):
                self._hub.broken.add(self._number)
            if self._number in self._hub.broken:
                self._fail()
            for other, pieces in frames.items():
                joined = bytearray(b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces if len(piece)))
                self._hub.frames[self._number, key, self._place, other] = joined
            self._hub.changed.notify_all()

    def finish(self, key: Key) -> dict[int, memoryview]:
        arrived = {}
        with self._hub.changed:
            for other in self._others:
                name = (self._number, key, other, self._place)
                while name not in self._hub.frames:
                    if self._number in self._hub.broken:
                        self._fail()
                    assert self._hub.changed.wait(WAIT_S), f"place {self._place} waits for {other} in {key}"
                arrived[other] = memoryview(self._hub.frames.pop(name))
        return arrived

    def close(self) -> None:
        with self._hub.changed:
            self._hub.broken.add(self._number)
            self._hub.changed.notify_all()

    def _fail(self) -> None:
        self._hub.changed.notify_all()
        raise MeshBroken(self._others[0], "is gone", overdue=False)


# ---------------------------------------------------------------- placements


def random_placement(base: Placement, seed: int, *, replicas: int) -> Placement:
    """Every expert somewhere at random, `replicas` of them twice or more often, in slots at random."""
    rng = np.random.default_rng(seed)
    keys = base.layers * base.experts
    table = np.full(base.table.shape, EMPTY, np.int32)
    room = [list(rng.permutation(base.slots)) for _ in range(base.ranks)]
    wanted = [*rng.permutation(keys), *rng.integers(0, keys, replicas)]
    for at, key in enumerate(wanted):
        open_to = [rank for rank in range(base.ranks) if room[rank] and key not in table[rank]]
        if open_to:
            # Uneven, but so that the rest still fits.
            rank = int(rng.choice(open_to)) if at >= keys else max(open_to, key=lambda r: (len(room[r]), r))
            table[rank, room[rank].pop()] = key
    return Placement(base.layers, base.experts, table)


# ---------------------------------------------------------------- what ranks run


def make_schedule(seed: int, steps: int) -> list[StepPlan]:
    """Prompts of up to 80 ids in chunks, decode rows of a few or many of them, steps of both and of nothing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 80, SLABS)
    lengths[0] = 80
    ids = [rng.integers(3, 310, length).astype("<i4") for length in lengths]
    done = np.zeros(SLABS, int)
    plans = []
    for step in range(1, steps + 1):
        chunks, rows = [], []
        kind = rng.choice(["idle", "prefill", "decode", "both"], p=[0.15, 0.3, 0.3, 0.25])
        if kind in ("prefill", "both"):
            budget = 48
            for slab in rng.permutation(np.flatnonzero(done < lengths))[:4]:
                left = lengths[slab] - done[slab]
                size = min(left, budget // PAGE_TOKENS * PAGE_TOKENS if left > budget else budget)
                if slab and size > 8 and rng.random() < 0.5:
                    size = 8
                if size <= 0:
                    break
                budget -= size
                start, end = done[slab], done[slab] + size
                last = end == lengths[slab]
                chunks.append(
                    PrefillChunk(
                        int(slab) + 1, int(slab), int(start), memoryview(ids[slab][start:end].tobytes()),
                        _pages(slab), _sampling(rng) if last else None,
                    )
                )  # fmt: skip
        if kind in ("decode", "both"):
            # Not those whose prompt ends in this very step: their positions are counted below.
            able = np.flatnonzero((done >= lengths) & (done < PAGES_EACH * PAGE_TOKENS - 1))
            for slab in rng.permutation(able)[: rng.integers(1, SLABS + 1)]:
                rows.append(DecodeRow(int(slab) + 1, int(slab), int(done[slab]), None, _pages(slab), _sampling(rng)))
                done[slab] += 1
        for chunk in chunks:
            done[chunk.slab] += chunk.num_tokens
        number = step if chunks or rows else IDLE_STEP
        plans.append(StepPlan(number, tuple(chunks), tuple(rows)))
    return plans


def _pages(slab: int) -> tuple[int, ...]:
    return tuple(int(slab) + SLABS * page for page in range(PAGES_EACH))


def _sampling(rng: np.random.Generator) -> Sampling:
    return Sampling() if rng.random() < 0.5 else Sampling(temperature=0.9, seed=int(rng.integers(1 << 30)))


Outcome = tuple[tuple[int | None, ...], tuple[int, ...]]


async def run_schedule(
    device: TorchDevice,
    plans: Sequence[StepPlan],
    *,
    on_result: Callable[[StepResult], None] | None = None,
    on_broken: Callable[[GroupBroken], None] | None = None,
    queued: int = 2,
) -> list[Outcome]:
    """Submits with `queued` steps in the queue, as the step loop does; all tokens, step by step."""
    outcomes: list[Outcome] = []
    tickets = []
    for at in range(len(plans) + queued):
        if at >= queued:
            ticket = tickets.pop(0)
            while True:
                try:
                    result = await device.wait(ticket)
                except GroupBroken as broken:
                    assert on_broken is not None, broken
                    on_broken(broken)
                    continue
                break
            assert result.step == ticket.step
            outcomes.append((result.chunk_tokens, result.row_tokens))
            if on_result is not None:
                on_result(result)
        if at < len(plans):
            tickets.append(device.submit(plans[at]))
    return outcomes


def digest(outcomes: Sequence[Outcome], device: TorchDevice) -> str:
    """Of all tokens and of all pages and slabs."""
    arena = device.model.arena
    pages = np.concatenate([arena.page_bytes_of(page).numpy() for page in range(arena.num_pages)])
    seen = hashlib.sha256(repr(list(outcomes)).encode())
    seen.update(pages.tobytes())
    seen.update(arena.slabs.numpy().tobytes())
    return seen.hexdigest()


class Counts(dict[int, npt.NDArray[np.int64]]):
    """In place of a probe's `experts`: adds up how many rows chose each expert of each layer."""

    def __init__(self, layers: int, experts: int) -> None:
        self.sums = np.zeros((layers, experts), np.int64)

    def __setitem__(self, layer: int, ids: npt.NDArray[np.int64]) -> None:
        self.sums[layer] += np.bincount(ids.ravel(), minlength=self.sums.shape[1])


async def run_alone(directory: Path, plans: Sequence[StepPlan]) -> tuple[str, npt.NDArray[np.int64]]:
    """(digest, counts) of a rank without a group that runs a schedule."""
    device = await open_torch_device(group_config(directory, 1), ignore, poison=True)
    assert device.experts is None
    shape = device.model.shape
    counts = Counts(shape.num_layers, shape.num_experts)
    device.model.probe = Probe([0] * shape.num_layers, choices=True, experts=counts)
    outcomes = await run_schedule(device, plans)
    found = digest(outcomes, device)
    await device.aclose()
    return found, counts.sums


# ---------------------------------------------------------------- groups


@dataclasses.dataclass
class Group:
    """Devices of one group, in order of place; rank numbers are 10, 11, ..."""

    devices: list[TorchDevice]
    number: int = 0

    @property
    def experts(self) -> list[TorchExpertSlots]:
        found = [device.experts for device in self.devices]
        return [entry for entry in found if isinstance(entry, TorchExpertSlots)]

    def lay_out(self) -> tuple[Placement, ...]:
        parts = self.devices[0].info.parts
        return tuple(lay_out(part.layers, part.experts, len(self.devices), part.slots) for part in parts)

    def name(self, main: Placement, epochs: tuple[int, ...] = (1, 1), *, lost: Sequence[int] = ()) -> Membership:
        """The next membership."""
        self.number += 1
        draft = self.lay_out()[1:]
        return Membership(
            self.number,
            tuple(
                Member(10 + place, 0, "", 0) if place in lost else Member(10 + place, 1, device.info.mesh_address, 0)
                for place, device in enumerate(self.devices)
            ),
            tuple(b"" for _ in self.devices),
            tuple(PartPlacement(epoch, part) for epoch, part in zip(epochs, (main, *draft), strict=False)),
        )

    async def join(self, membership: Membership) -> None:
        async with trio.open_nursery() as nursery:
            for place in membership.living:
                nursery.start_soon(self.experts[place].prepare, membership)
        for place in membership.living:
            self.experts[place].join(membership.number)


@contextlib.asynccontextmanager
async def open_group(directory: Path, size: int, hub: Hub | None, **limits: Any) -> AsyncIterator[Group]:
    """Devices with a mesh of threads, or of sockets beside the checkpoint."""
    devices: list[TorchDevice] = []
    try:
        for place in range(size):
            address = str(directory / f"{size}-{place}.mesh")
            devices.append(
                await open_torch_device(
                    group_config(directory, size, **limits),
                    ignore,
                    poison=True,
                    mesh_address=address,
                    connect=hub.connect if hub is not None else None,
                )
            )
        yield Group(devices)
    finally:
        with trio.CancelScope(shield=True), trio.fail_after(WAIT_S):
            async with trio.open_nursery() as nursery:
                for device in devices:
                    nursery.start_soon(device.aclose)


async def run_group(
    group: Group,
    schedules: Sequence[Sequence[StepPlan]],
    *,
    on_result: Callable[[int, StepResult], None] | None = None,
    on_broken: Callable[[int, GroupBroken], None] | None = None,
) -> list[str]:
    """Each device's schedule, at once; the digests."""
    found = [""] * len(group.devices)

    async def run(place: int) -> None:
        device = group.devices[place]
        outcomes = await run_schedule(
            device,
            schedules[place],
            on_result=None if on_result is None else lambda result: on_result(place, result),
            on_broken=None if on_broken is None else lambda broken: on_broken(place, broken),
        )
        found[place] = digest(outcomes, device)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for place in range(len(group.devices)):
                nursery.start_soon(run, place)
    return found
