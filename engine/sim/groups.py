"""Groups: all groups of a world with experts: their gates, their auditor, and what a copy of a slot is on the wire."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np

from engine.config import ClusterConfig
from engine.sim.checks import Life
from engine.sim.circle import GroupRules, Seat
from engine.sim.clock import Clock
from engine.sim.device import SimDevice
from engine.sim.expertchecks import ExpertAuditor
from engine.sim.gating import ExpertShape, Gate
from engine.sim.group import SimGroup
from transport.memory_fabric import MemoryFabric, MemoryTransfer


class Groups:
    """See the module.

    Args:
        bytes_per_s: of the fabric's wires, as `MemoryWorld` has it: copies count as so many bytes on them as makes
            them as fast as `ExpertShape.link_bytes_per_s` says.
        is_disturbed: whether a fault has touched this life within so many seconds.

    Attributes:
        groups: by pool and number, those of more than one rank.
    """

    def __init__(
        self,
        clock: Clock,
        shape: ExpertShape,
        config: ClusterConfig,
        bytes_per_s: float,
        is_disturbed: Callable[[int, float], bool],
        seed: int,
    ) -> None:
        self.shape = shape
        self.auditor = ExpertAuditor(lambda seat, since: is_disturbed(seat.rank, since))
        limits = config.limits
        sizes = [(shape.layers, shape.experts), (shape.draft_layers, shape.draft_experts)]
        gates = [Gate(shape, *size, [seed, part]) for part, size in enumerate(sizes) if size[0]]
        rules = GroupRules(limits.exchange_s, limits.group_s, limits.idle_steps)

        async def sleep_for(seconds: float) -> None:
            await clock.sleep_until(clock.now + seconds)

        self.groups: dict[tuple[str, int], SimGroup] = {}
        self._rank_to_group: dict[int, SimGroup] = {}
        for pool in ("prefill", "decode"):
            pool_config = config.prefill if pool == "prefill" else config.decode
            for number, ranks in enumerate(pool_config.groups if pool_config.group > 1 else ()):
                label = f"{pool} group {number}"
                self.groups[pool, number] = group = SimGroup(
                    label, shape, rules, gates, self.auditor, clock.at, lambda: clock.now, sleep_for,
                    random.Random(f"{seed}:{label}"), np.random.default_rng([seed, ranks[0]]),
                )  # fmt: skip
                self._rank_to_group.update(dict.fromkeys(ranks, group))
        self._wire_bytes = shape.slot_bytes * bytes_per_s / shape.link_bytes_per_s
        self._seats: dict[str, Seat] = {}

    def seat(self, life: Life, device: SimDevice) -> None:
        """Gives a new device its place, if its rank is in a group."""
        group = self._rank_to_group.get(life.rank)
        if group is None:
            return
        size = sum(other is group for other in self._rank_to_group.values())
        parts = self.shape.parts(size)
        seat = self._seats[life.name] = Seat(group, device, life.rank, life.generation, parts)
        device.take_place(seat, f"mesh of {life.name}", parts)

    def arm(self, rank: int, pick: float, strike: Callable[[], None]) -> None:
        """`strike` is called in the middle of the next step of this rank's group that agrees on a flip, or of the first
        one after the flip; `pick` says which, and when."""
        if rank in self._rank_to_group:
            self._rank_to_group[rank].armed = (pick, strike)

    def weigh(self, fabric: MemoryFabric, transfer: MemoryTransfer) -> float:
        """`MemoryWorld.weigh`: bytes on the wire; sees each copy begin."""
        writer = self._find(fabric.name)
        part = None if writer is None else _find_part(writer, int(transfer.ours[0]))
        if writer is None or part is None:
            return transfer.num_bytes
        transfer.mark = max(writer.experts.tables[part])  # copies are of the last epoch that it knows
        running = sum(_find_part(writer, int(other.ours[0])) == part for other in fabric.running)
        self.auditor.posted(writer, part, running)
        writer.copy_s += self.shape.slot_bytes / self.shape.link_bytes_per_s
        return self._wire_bytes

    def landing(self, writer: str, target: str, transfer: MemoryTransfer) -> bool:
        """Whether a write that is about to land is a copy of a slot; looks at it then."""
        source, seat = self._find(writer), self._find(target)
        part = None if source is None else _find_part(source, int(transfer.ours[0]))
        if source is None or seat is None or part is None:
            return False
        slot = int(transfer.theirs[0]) - _first_blocks(seat)[part]
        self.auditor.landing(source, seat, part, slot, transfer.mark)
        for memory in seat.experts.memory:
            memory.note_write()
        return True

    def _find(self, fabric_name: str) -> Seat | None:
        return self._seats.get(fabric_name.split("#")[0])


def _first_blocks(seat: Seat) -> list[int]:
    """Number of each part's first block, and of the one behind all."""
    info = seat.device.info
    return [*itertools.accumulate((part.slots for part in info.parts), initial=info.num_pages + info.num_slabs)]


def _find_part(seat: Seat, block: int) -> int | None:
    """The part whose slot a block is; None for a page or a slab."""
    found = None
    for part, first in enumerate(_first_blocks(seat)[:-1]):
        if block >= first:
            found = part
    return found
