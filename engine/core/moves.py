"""Orders the moves from one placement to another into stages, and paces their copies.

A stage is what one epoch switches: copies into slots that are empty in the placement in force, then one flip, after
which replaced replicas are gone and their slots are empty. So no copy ever touches a live slot, and since every
stage's outcome is a Placement, every expert has a replica at every moment. Where experts have to change places and
spare slots are few, it takes several stages; where even that is stuck, an expert waits in a spare slot of a third
rank (a detour, which costs one copy more than the difference of the two placements).

The target's slots are not binding: what counts is which rank holds what. The last stage's outcome says the slots.
"""

from __future__ import annotations

import collections
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

from engine.core.placement import EMPTY, Placement, Replica, diff
from engine.errors import LocalProtocolError

Place = tuple[int, int]
"""(rank, slot)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One expert's weights from a live slot to an empty one. `far`: the two ranks are on different hosts."""

    layer: int
    expert: int
    source: Place
    target: Place
    far: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """What one epoch switches.

    Attributes:
        before: the placement in force while the copies run.
        copies: all targets are empty in `before`, all sources live in it.
        after: the placement in force once the epoch is active.
        released: slots that are live in `before` and empty in `after`: reusable when no queued step is of the epoch
            before any more.
    """

    before: Placement
    copies: tuple[Copy, ...]
    after: Placement
    released: tuple[Place, ...]


def order_moves(
    current: Placement, target: Placement, hosts: Sequence[int], *, stage_copies: int | None = None
) -> tuple[Stage, ...]:
    """Stages from `current` to a placement with the same experts on each rank as `target`; none if they agree already.

    Args:
        hosts: host of each rank; a copy comes from the same host if any rank there holds the expert.
        stage_copies: at most so many copies in a stage, so that the first of them take effect early.

    Raises:
        ValueError: the two do not belong together, or no slot at all is spare where one is needed.
    """
    if len(hosts) != current.ranks:
        raise ValueError(f"{len(hosts)} hosts for {current.ranks} ranks")
    if stage_copies is not None and stage_copies < 1:
        raise ValueError(f"a stage of {stage_copies} copies gets nowhere")
    return tuple(_Ordering(current, target, hosts).run(stage_copies))


class _Ordering:
    """The placement as it changes from stage to stage, and what is still to do on each rank."""

    def __init__(self, current: Placement, target: Placement, hosts: Sequence[int]) -> None:
        change = diff(current, target)
        self.placement = current
        self.hosts = hosts
        self.experts = current.experts
        self.arrivals: list[deque[int]] = [deque() for _ in range(current.ranks)]
        self.departures: list[list[int]] = [[] for _ in range(current.ranks)]
        self.open: dict[int, int] = {}
        for replica in change.arrivals:
            self.arrivals[replica.rank].append(self._key(replica))
            self.open[self._key(replica)] = self.open.get(self._key(replica), 0) + 1
        for replica in change.departures:
            self.departures[replica.rank].append(self._key(replica))
        leaving = {key for keys in self.departures for key in keys}
        # Those whose arrival lets another slot go come first: a plain extra replica must not take their place.
        self.arrivals = [deque(sorted(keys, key=lambda key: (key not in leaving, key))) for keys in self.arrivals]
        self.places: dict[int, list[Place]] = {}
        self.empty: list[deque[int]] = [deque() for _ in range(current.ranks)]
        for rank, row in enumerate(current.table.tolist()):
            for slot, key in enumerate(row):
                if key == EMPTY:
                    self.empty[rank].append(slot)
                else:
                    self.places.setdefault(key, []).append((rank, slot))

    def _key(self, replica: Replica) -> int:
        return replica.layer * self.experts + replica.expert

    def run(self, stage_copies: int | None) -> Iterator[Stage]:
        left = sum(map(len, self.arrivals))
        most = left
        while left or any(self.departures):
            landed = self._land(stage_copies)
            released = self._release(landed, early=False)
            if not landed and not released:
                released = self._release(landed, early=True)
            if not landed and not released:
                # The slot that a detour frees takes an arrival in the next stage, so there are not more of them.
                most -= 1
                if most < 0:
                    raise LocalProtocolError("ordering moves took more detours than there are moves")
                landed, released = self._detour()
            yield self._close(landed, released)
            left = sum(map(len, self.arrivals))

    def _land(self, stage_copies: int | None) -> list[tuple[int, Place]]:
        """Gives waiting arrivals empty slots of their ranks, in turns over the ranks: (key, place)."""
        landed: list[tuple[int, Place]] = []
        limit = sum(map(len, self.arrivals)) if stage_copies is None else stage_copies
        progress = True
        while progress and len(landed) < limit:
            progress = False
            for rank, keys in enumerate(self.arrivals):
                if keys and self.empty[rank] and len(landed) < limit:
                    key = keys.popleft()
                    self.open[key] -= 1
                    landed.append((key, (rank, self.empty[rank].popleft())))
                    progress = True
        return landed

    def _release(self, landed: list[tuple[int, Place]], *, early: bool) -> list[tuple[int, Place]]:
        """Departures that this stage's flip carries out, always leaving a live replica: (key, place).

        Usually only when all replicas that the expert is to get have landed, so that load does not pile up on the ones
        that stay; `early` where a waiting arrival needs the slot.
        """
        copies = collections.Counter(key for key, _ in landed)
        released: list[tuple[int, Place]] = []
        for rank, keys in enumerate(self.departures):
            room = len(self.arrivals[rank]) if early else len(keys)
            kept = []
            for key in keys:
                if room and len(self.places[key]) + copies[key] > 1 and (early or not self.open.get(key)):
                    released.append((key, self._vacate(key, rank)))
                    room -= 1
                else:
                    kept.append(key)
            self.departures[rank] = kept
        return released

    def _vacate(self, key: int, rank: int) -> Place:
        place = next(place for place in reversed(self.places[key]) if place[0] == rank)
        self.places[key].remove(place)
        return place

    def _detour(self) -> tuple[list[tuple[int, Place]], list[tuple[int, Place]]]:
        """Lets one expert that blocks a full rank wait on a rank with an empty slot."""
        for rank, keys in enumerate(self.arrivals):
            for key in self.departures[rank] if keys else ():
                holders = {place[0] for place in self.places[key]}
                near = [other for other in range(len(self.empty)) if self.hosts[other] == self.hosts[rank]]
                for other in [*near, *(other for other in range(len(self.empty)) if other not in near)]:
                    if self.empty[other] and other not in holders:
                        landed = [(key, (other, self.empty[other].popleft()))]
                        # It leaves the blocked rank now, and the other one when its real arrival has landed.
                        self.departures[rank].remove(key)
                        self.departures[other].append(key)
                        return landed, [(key, self._vacate(key, rank))]
        raise ValueError("experts have to change places, and no rank has a spare slot for one to wait in")

    def _close(self, landed: list[tuple[int, Place]], released: list[tuple[int, Place]]) -> Stage:
        """The stage, and the state after its flip."""
        before = self.placement
        used: collections.Counter[int] = collections.Counter()
        table = before.table.copy()
        leaving = collections.defaultdict(list)
        for key, place in released:
            leaving[key].append(place)
            table[place] = EMPTY
        copies = []
        for key, place in landed:
            # Live in `before`: what this flip releases is still there while the copies run.
            _, _, source = min(
                (self.hosts[live[0]] != self.hosts[place[0]], used[live[0]], live)
                for live in self.places[key] + leaving[key]
            )
            used[source[0]] += 1
            layer, expert = divmod(key, self.experts)
            copies.append(Copy(layer, expert, source, place, self.hosts[source[0]] != self.hosts[place[0]]))
            table[place] = key
        for key, place in landed:
            self.places[key].append(place)
        for _, place in released:
            self.empty[place[0]].append(place[1])
        self.placement = Placement(before.layers, before.experts, table)
        return Stage(before, tuple(copies), self.placement, tuple(place for _, place in released))


class Pacer:
    """Says which copies of a stage may start before each step.

    Args:
        copies: of one stage, those of the whole group or those that one rank sends.
        slot_bytes: size of one expert's weights.
        step_bytes: budget. A slot that is larger saves up over several steps; unused budget is not kept beyond that.
        far_copies: at most so many copies between hosts run at a time.
    """

    def __init__(self, copies: Sequence[Copy], slot_bytes: int, step_bytes: int, far_copies: int) -> None:
        if slot_bytes < 1 or step_bytes < 1:
            raise ValueError(f"slots of {slot_bytes} bytes and a budget of {step_bytes} bytes per step move nothing")
        if far_copies < 1 and any(copy.far for copy in copies):
            raise ValueError("far_copies is 0, and copies between hosts are planned")
        self._waiting = list(copies)
        self._running: set[Copy] = set()
        self._slot_bytes = slot_bytes
        self._step_bytes = step_bytes
        self._far_copies = far_copies
        self._credit = 0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._running

    @property
    def running(self) -> frozenset[Copy]:
        return frozenset(self._running)

    def choose_copies(self) -> tuple[Copy, ...]:
        """Call once per step: what to start now. Not called while paused, so that nothing saves up meanwhile."""
        self._credit = min(self._credit + self._step_bytes, max(self._step_bytes, self._slot_bytes))
        chosen, kept = [], []
        far = sum(copy.far for copy in self._running)
        for copy in self._waiting:
            if self._credit >= self._slot_bytes and not (copy.far and far >= self._far_copies):
                self._credit -= self._slot_bytes
                far += copy.far
                chosen.append(copy)
            else:
                kept.append(copy)
        self._waiting = kept
        self._running.update(chosen)
        return tuple(chosen)

    def note_done(self, copy: Copy) -> None:
        """The copy has landed.

        Raises:
            LocalProtocolError: it was not running.
        """
        if copy not in self._running:
            raise LocalProtocolError(f"expert {copy.expert} of layer {copy.layer} landed without having been started")
        self._running.remove(copy)
