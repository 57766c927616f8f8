"""Seat and Circle: one device's place in its group, and those who step together in one membership; what both measure.

State only: what happens to it stands in `group`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.core.group import Membership
from engine.core.pact import Agreement, GroupStep, Words
from engine.core.plan import Roster
from engine.errors import GroupBroken
from engine.sim.device import SimDevice, SimTicket
from engine.sim.meters import LogHistogram
from engine.sim.slots import SimExperts
from transport.fabric import BlockRun
from transport.messages import PartInfo

if TYPE_CHECKING:
    from engine.sim.group import SimGroup


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRules:
    """The limits that bound a group's waits; see `Limits`."""

    exchange_s: float
    group_s: float
    idle_steps: int


@dataclasses.dataclass(slots=True)
class GroupMeters:
    """What the steps of one group came to.

    Attributes:
        step_s: of steps with rows. copying_s: of those of them in which a member began copies.
        lost_us: expert time lost to skew in all of them.
        lost_by_second: virtual second to (steps with rows, microseconds lost).
        idle_steps, breaks, partly: steps without rows; breakages; those after which some had finished the step.
    """

    step_s: LogHistogram = dataclasses.field(default_factory=LogHistogram)
    copying_s: LogHistogram = dataclasses.field(default_factory=LogHistogram)
    num_steps: int = 0
    idle_steps: int = 0
    lost_us: float = 0.0
    lost_by_second: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    breaks: int = 0
    partly: int = 0
    flips: int = 0


class Circle:
    """Who is in one membership, and the step that they are in.

    Attributes:
        seats: by place, those who have entered it.
        arrived: those who wait in the first exchange of the step, or run it.
        lost: why no step of it begins any more.
        finishers: of a step that a death broke off, those who finish it all the same.
        stalled_since: when a running step first waited for a stopped member.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.number = membership.number
        self.living = membership.living
        self.seats: dict[int, Seat] = {}
        self.arrived: list[Seat] = []
        self.step = 0
        self.active = tuple(part.epoch for part in membership.parts)
        self.agreed: Agreement | None = None
        self.is_met = self.is_running = self.has_patience = False
        self.lost: GroupBroken | None = None
        self.finishers: list[Seat] | None = None
        self.stalled_since: float | None = None
        self.ends_at = 0.0
        places = len(membership.members)
        self.pairs = [np.zeros(places) for _ in membership.parts]
        self.expert_us = [np.zeros(places) for _ in membership.parts]
        """By part and place: for the members to take, see `SimExperts.count_in`."""
        self.sound_at = -1.0
        """When all slots were last looked at, under the epochs that are active."""


class Seat:
    """One device in its group: what SimDevice and SimExperts tell the group, and where it is."""

    def __init__(self, group: SimGroup, device: SimDevice, rank: int, generation: int, parts: Sequence[PartInfo]):
        self.group, self.device, self.rank, self.generation = group, device, rank, generation
        self.name = f"{device.info.name}"
        self.place = -1
        self.number = 0
        """Of the membership that it entered last."""
        self.circle: Circle | None = None
        self.is_arrived = self.is_dead = self.is_hung = False
        self.words: Words | None = None
        self.step_rows: np.ndarray | None = None
        """By domain, of the step that it arrived in; None for an empty one."""
        self.counted: tuple[Roster, np.ndarray, int] | None = None
        """The rows of a roster by domain, and all of them."""
        self.since = 0.0
        self.copy_s = 0.0
        """Time of its link for copies that it began since the last step."""
        self.stopped_until = 0.0
        self.stopped: GroupStep | None = None
        self.breaks: collections.deque[tuple[SimTicket | None, GroupBroken]] = collections.deque()
        self.last_step: tuple[int, int] = (0, -1)
        self.experts = SimExperts(
            self, parts, group.shape.domains, group.auditor, group.sleep_for, group.draw_counts,
            group.shape.load_bytes_per_s,
        )  # fmt: skip

    def runs(self) -> tuple[BlockRun, ...]:
        return tuple(memory.run() for memory in self.experts.memory)

    def told_to_join(self) -> None:
        self.group.join(self)

    def submitted(self) -> None:
        if not self.is_arrived or self.stopped is not None:
            self.group.arrive(self)

    def leave(self) -> None:
        self.group.leave(self)

    def stop_until(self, until: float) -> None:
        """Its process is stopped: it says nothing to the others."""
        self.stopped_until = max(self.stopped_until, until)

    def take_break(self, ticket: SimTicket) -> GroupBroken | None:
        """A breakage that the waiter for this step is to be told of now."""
        if self.breaks and self.breaks[0][0] in (None, ticket):
            return self.breaks.popleft()[1]
        return None
