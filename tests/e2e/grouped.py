"""GroupedCluster: a FaultyCluster whose ranks form groups, with what its ranks did (`sabotage/groupprobe.py`) and its
operators.

What is asserted here comes from outside: records of the ranks' awaited steps, the bytes of their slots, counts of what
they computed, and what the head tells an operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import trio

from engine.faces.admin import open_operator
from tests.e2e.faulty import FaultyCluster, environment, open_cluster
from transport.messages import PartReport, PastRebalance, Rebalance, RebalanceAnswer, Role

POLL_S = 0.02
ACT_S = 60.0
"""For the head's answer: a plan comes out of a process of its own."""
MOVE_S = 120.0
IDLE_S = 2.0
FRESH_STEPS = 256
"""Steps after which the head says what a re-placement came to."""
STEP = struct.Struct("<7q")
Pool = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True)
class Step:
    """An awaited step of a rank; `active` are the epochs in force in it."""

    membership: int
    step: int
    active: tuple[int, int]
    park: bool
    stop: bool
    at_ns: int


@dataclasses.dataclass(frozen=True)
class Told:
    """What a rank said of itself. `parts` as `groupprobe` writes them; `pairs`: float64[layers], computed so far."""

    parts: dict[str, dict[str, Any]]
    pairs: npt.NDArray[np.float64]

    def experts(self, part: str) -> dict[int, str]:
        """Key of each expert that is held here to the digest of its bytes."""
        held, digests = self.parts[part]["held"], self.parts[part]["digests"]
        return {held[int(slot)]: digest for slot, digest in digests.items()}


class GroupedCluster:
    """Made by `open_grouped`; `inner` is the cluster, whose head is production code with no knowledge of tests."""

    def __init__(self, inner: FaultyCluster) -> None:
        self.inner, self.book = inner, inner.book
        self.directory, self._place = inner.directory, inner.place
        self._questions = itertools.count()

    # ------------------------------------------------------------ the head, as operators know it

    async def part(self, pool: Pool = "decode", part: str = "main", group: int = 0) -> PartReport:
        async with open_operator(str(self.directory / "read.sock")) as head:
            report = await head.ask_experts()
        return next(one for one in report.parts if (one.pool, one.part, one.group) == (pool, part, group))

    async def act(self, action: str, *, part: str = "main", pool: Role = "decode", plan: int = 0) -> RebalanceAnswer:
        """Raises ActRefused if the head refuses."""
        order = Rebalance(action, pool, 0, part, plan, "", "tester", socket.gethostname(), "a test")  # type: ignore[arg-type]
        async with open_operator(str(self.directory / "admin.sock")) as head:
            return await head.ask_rebalance(order, ACT_S)

    async def wait_moved(self, part: str = "main", within_s: float = MOVE_S) -> PastRebalance:
        """Until the running re-placement has ended; the last line of the history."""
        report = None
        with trio.move_on_after(within_s):
            while True:
                report = await self.part(part=part)
                if report.history and report.history[-1].result != "running":
                    return report.history[-1]
                await trio.sleep(POLL_S)
        raise AssertionError(f"the re-placement of {part} has not ended: {report}\n{self.inner.said()[-6000:]}")

    async def wait_measured(self, part: str = "main", within_s: float = MOVE_S) -> PastRebalance:
        """Until the head says what the last re-placement came to."""
        past = None
        with trio.move_on_after(within_s):
            while True:
                past = (await self.part(part=part)).history[-1]
                if past.after > 0:
                    return past
                await trio.sleep(POLL_S)
        raise AssertionError(f"never measured: {past}")

    async def wait_loads(self, steps: int, part: str = "main", within_s: float = MOVE_S) -> PartReport:
        """Until so many more steps were counted."""
        report = await self.part(part=part)
        target = report.steps + steps
        with trio.move_on_after(within_s):
            while report.steps < target:
                await trio.sleep(5 * POLL_S)
                report = await self.part(part=part)
            return report
        raise AssertionError(f"only {report.steps} steps were counted, not {target}")

    async def wait_state(self, state: str, pool: Pool = "decode", within_s: float = 60.0) -> PartReport:
        report = None
        with trio.move_on_after(within_s):
            while True:
                report = await self.part(pool)
                if report.state == state:
                    return report
                await trio.sleep(POLL_S)
        raise AssertionError(f"the group is not {state}: {report}\n{self.inner.said()[-6000:]}")

    async def pids(self) -> dict[int, int]:
        return {one.rank: one.pid for one in (await self.inner.status()).ranks}

    # ------------------------------------------------------------ the ranks, from within

    async def ask_ranks(self, ranks: Sequence[int]) -> list[Told]:
        """What these ranks hold and have computed."""
        lives = {one.rank: one.generation for one in (await self.inner.status()).ranks}
        number = next(self._questions)
        (self._place / f"ask-{number}").touch()
        paths = [self._place / f"told-{number}-{rank}-{lives[rank]}.json" for rank in ranks]
        with trio.fail_after(20):
            while not all(path.exists() for path in paths):  # noqa: ASYNC110
                await trio.sleep(POLL_S)
        told = [json.loads(path.read_text()) for path in paths]
        pairs = [[one["pairs"][layer] for layer in sorted(one["pairs"], key=int)] for one in told]
        return [Told(one["parts"], np.array(layers, float)) for one, layers in zip(told, pairs, strict=True)]

    def steps(self, rank: int, generation: int = 1) -> list[Step]:
        """All that this life has awaited."""
        data = (self._place / f"steps-{rank}-{generation}.bin").read_bytes()
        data = data[: len(data) - len(data) % STEP.size]
        return [
            Step(one[0], one[1], (one[2], one[3]), bool(one[4]), bool(one[5]), one[6]) for one in STEP.iter_unpack(data)
        ]

    def lives(self) -> dict[tuple[int, int], list[Step]]:
        """(rank, generation) to its steps, of all that wrote any."""
        found = {}
        for path in self._place.glob("steps-*.bin"):
            rank, generation = (int(word) for word in path.stem.split("-")[1:])
            found[rank, generation] = self.steps(rank, generation)
        return found

    async def settle(self, ranks: Sequence[int], within_s: float = 60.0) -> None:
        """Until these ranks are parked: they await no more steps."""
        await self.inner.wait_free({})
        lives = {one.rank: one.generation for one in (await self.inner.status()).ranks}
        paths = [self._place / f"steps-{rank}-{lives[rank]}.bin" for rank in ranks]
        before: list[int] = []
        with trio.fail_after(within_s):
            while True:
                sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
                if sizes == before and all(sizes):
                    return
                before = sizes
                await trio.sleep(1.0)


def check_steps(lives: dict[tuple[int, int], list[Step]], *, end_even: bool = True) -> int:
    """No rank skipped a step: each counted 0, 1, 2 ... in each membership, and in each step all agreed on the epochs.

    Args:
        lives: of the ranks of one group.
        end_even: the group is parked, so in the last membership all have run the same steps.

    Returns:
        Steps that were compared.
    """
    memberships: dict[int, dict[tuple[int, int], list[Step]]] = {}
    for life, steps in lives.items():
        for step in steps:
            memberships.setdefault(step.membership, {}).setdefault(life, []).append(step)
    compared = 0
    for number, of_life in memberships.items():
        for life, steps in of_life.items():
            assert [step.step for step in steps] == list(range(len(steps))), f"{life} skipped a step of {number}"
        for same in zip(*of_life.values(), strict=False):
            words = {(step.step, step.active, step.park, step.stop) for step in same}
            assert len(words) == 1, f"ranks disagree about a step of membership {number}: {words}"
            compared += 1
        counts = {life: len(steps) for life, steps in of_life.items()}
        # A step that broke off may be over on some ranks: all had sent, and not all had received.
        spread = max(counts.values()) - min(counts.values())
        assert spread <= 1 or (number == max(memberships) and not end_even), f"steps of membership {number}: {counts}"
        if end_even and number == max(memberships):
            assert spread == 0, f"steps of membership {number} of a parked group: {counts}"
    return compared


def find_flips(steps: Sequence[Step], part: int) -> list[tuple[int, int, int]]:
    """(membership, step, epoch) at which a life was first under another epoch, within a membership."""
    pairs = itertools.pairwise(steps)
    return [
        (new.membership, new.step, new.active[part])
        for old, new in pairs
        if new.membership == old.membership and new.active[part] != old.active[part]
    ]


def measure_pairs(before: Sequence[Told], after: Sequence[Told]) -> float:
    """Skew of what ranks computed in between: over layers, the sum of the fullest rank's pairs / of the mean."""
    done = np.array([late.pairs - early.pairs for early, late in zip(before, after, strict=True)])
    return float(done.max(axis=0).sum() / done.mean(axis=0).sum())


async def measure_idle(cluster: GroupedCluster) -> list[float]:
    """Processor time of each rank over `IDLE_S`, seconds."""
    await trio.sleep(1.0)
    pids = list((await cluster.pids()).values())
    before = [_read_cpu_s(pid) for pid in pids]
    await trio.sleep(IDLE_S)
    return [round(_read_cpu_s(pid) - early, 3) for pid, early in zip(pids, before, strict=True)]


def _read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def open_grouped(
    log: Path, *, prefill: int = 1, decode: int = 2, groups: Sequence[Pool] = ("decode",), sets: Sequence[str] = (),
    probe: str = "ask",
) -> AsyncIterator[GroupedCluster]:  # fmt: skip
    """A cluster each of whose named pools is one group of all its ranks.

    Args:
        probe: words for `groupprobe`.
    """
    sizes = {"prefill": prefill, "decode": decode}
    group_sets = [f"pools.{pool}.group={sizes[pool]}" for pool in groups]
    with environment(GROUP_PROBE=probe):
        async with open_cluster(log, prefill=prefill, decode=decode, sets=(*group_sets, *sets)) as inner:
            yield GroupedCluster(inner)
