"""TorchExpertSlots: what a rank's loop says of slots, epochs and memberships, and where the worker takes it up.

The loop's thread and the worker's both come here; a lock guards the tables and sums, and what is one word (the greatest
membership joined, what a slot holds) is written whole. The worker reads the words once for a step.

What a slot holds and what the head believes it holds are the same, but for experts that a membership which was never
joined had loaded: those are marked, and are gone when another one is prepared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from engine.core.group import Membership
from engine.core.pact import PARTS
from engine.core.placement import EMPTY, Placement
from engine.errors import ConfigError, DeviceError, LocalProtocolError
from engine.model.dispatch import Load
from engine.model.slots import ExpertPool, ExpertSource, SlotTable
from engine.ports import PartLoads


class Prepared(NamedTuple):
    """A membership whose experts are in this rank's slots. `place`: this rank's."""

    membership: Membership
    place: int
    tables: tuple[SlotTable, ...]


class TorchExpertSlots:
    """`ports.ExpertSlots`; and for the worker, the methods from `take_membership` on."""

    def __init__(
        self, pools: Sequence[ExpertPool], sources: Sequence[ExpertSource], address: str, wake: Callable[[], None]
    ) -> None:
        """Args:
        pools, sources: by part; `pools` stays readable.
        address: where this device meets the others; tells which place of a membership is its own.
        wake: called when a membership was joined, for a worker that has no step.
        """
        self.pools = tuple(pools)
        self._sources = tuple(sources)
        self._address = address
        self._wake = wake
        self._lock = threading.Lock()
        self._preparing = trio.Lock()
        self._prepared: dict[int, Prepared] = {}
        self._present: Prepared | None = None
        self._tables: list[dict[int, SlotTable]] = [{} for _ in pools]
        self._active: tuple[int, ...] = ()
        self._ready = (0,) * len(PARTS)
        self._ready_before = [0] * len(PARTS)
        self._unjoined: list[set[int]] = [set() for _ in pools]
        self._joined = 0
        self._loads = [Load(pool) for pool in pools]
        self._steps = 0

    async def prepare(self, membership: Membership) -> None:
        """See `ports.ExpertSlots.prepare`.

        Raises:
            DeviceError: an expert can not be loaded, or would have to go into a slot that is in use; or the membership
                is not one of this device.
            LocalProtocolError: this membership or a later one was joined already.
        """
        async with self._preparing:
            if membership.number <= self._joined:
                raise LocalProtocolError(f"membership {membership.number} is prepared after {self._joined} was joined")
            place = self._find_place(membership)
            with self._lock:
                self._prepared = {number: kept for number, kept in self._prepared.items() if number <= self._joined}
            missing = []
            for part, named in enumerate(membership.parts):
                row = named.placement.table[place]
                self._forget_unjoined(part, row)
                missing += [(part, slot, int(row[slot])) for slot in self._find_missing(part, row)]
            for part, slot, key in missing:
                # One after another, so that cancelling need not wait for all.
                await trio.to_thread.run_sync(self._load, part, slot, key)
                self._unjoined[part].add(slot)
            tables = await trio.to_thread.run_sync(_build_tables, membership)
            with self._lock:
                self._prepared[membership.number] = Prepared(membership, place, tables)

    def join(self, number: int) -> None:
        """See `ports.ExpertSlots.join`.

        Raises:
            LocalProtocolError: it was not prepared.
        """
        if number <= self._joined:
            return
        if number not in self._prepared:
            raise LocalProtocolError(f"membership {number} is joined and was not prepared")
        for slots in self._unjoined:
            slots.clear()
        self._joined = number
        self._wake()

    def load_table(self, part: int, epoch: int, placement: Placement) -> None:
        """See `ports.ExpertSlots.load_table`.

        Raises:
            DeviceError: the placement does not fit this device's slots.
            LocalProtocolError: the epoch is active.
        """
        self._check_shape(part, placement, f"epoch {epoch}")
        table = SlotTable(placement)
        with self._lock:
            if self._active and epoch <= self._active[part]:
                raise LocalProtocolError(
                    f"the table of epoch {epoch} of part {PARTS[part]} is loaded when {self._active[part]} is active"
                )
            self._tables[part][epoch] = table

    def set_ready(self, part: int, epoch: int) -> None:
        """See `ports.ExpertSlots.set_ready`.

        Raises:
            LocalProtocolError: its table is not loaded, or the ready word is beyond it.
        """
        if epoch not in self._tables[part] or epoch < self._ready[part]:
            raise LocalProtocolError(
                f"ready for epoch {epoch} of part {PARTS[part]}, the word is {self._ready[part]} and the tables are "
                f"{sorted(self._tables[part])}"
            )
        if epoch != self._ready[part]:
            self._ready_before[part] = self._ready[part]
        self._set_word(part, epoch)

    def withdraw(self, part: int, epoch: int) -> None:
        """See `ports.ExpertSlots.withdraw`. A flip that nobody awaited needs no more: the next membership names the
        epochs that it begins with, and nothing is computed before."""
        if self._ready[part] == epoch:
            self._set_word(part, self._ready_before[part])

    def note_copied(self, part: int, slots: Mapping[int, int]) -> None:
        """See `ports.ExpertSlots.note_copied`.

        Raises:
            DeviceError: a slot holds an expert: the peer has written over it.
            LocalProtocolError: there is no such slot or expert.
        """
        pool = self.pools[part]
        keys = pool.info.layers * pool.info.experts
        for slot, key in slots.items():
            if not (0 <= slot < pool.info.slots and 0 <= key < keys):
                raise LocalProtocolError(f"key {key} in slot {slot}: there are {keys} and {pool.info.slots}")
            if pool.held[slot] != EMPTY:
                raise DeviceError(
                    f"{pool.name_key(key)} was copied into slot {slot}, which holds {pool.name_held(slot)}"
                )
        for slot, key in slots.items():
            pool.held[slot] = key

    def free_slots(self, part: int, slots: Sequence[int]) -> None:
        """See `ports.ExpertSlots.free_slots`. Tables that name one of them can not come into force any more: dropped.

        Raises:
            DeviceError: the table in force, or that of a membership that was joined, names one of them.
        """
        with self._lock:
            held = self.pools[part].held
            for slot in slots:
                for kept in self._list_kept(part):
                    if kept[slot] != EMPTY:
                        name = self.pools[part].name_key(int(kept[slot]))
                        raise DeviceError(f"slot {slot} can not be freed: {name} is in force there")
            if self._present is not None:
                place, which = self._present.place, [*slots]
                self._tables[part] = {
                    epoch: table
                    for epoch, table in self._tables[part].items()
                    if epoch == self._active[part] or (table.placement.table[place, which] == EMPTY).all()
                }
            for slot in slots:
                held[slot] = EMPTY
                self._unjoined[part].discard(slot)

    def read_loads(self) -> tuple[PartLoads, ...] | None:
        """See `ports.ExpertSlots.read_loads`. Parts have the same steps: what a drafter's experts cost is spread over
        steps that draft and others."""
        with self._lock:
            if not self._steps:
                return None
            loads, steps = self._loads, self._steps
            self._loads, self._steps = [Load(pool) for pool in self.pools], 0
            return tuple([PartLoads(load.counts, steps, load.pairs, load.expert_ns // 1000) for load in loads])

    # ---------------------------------------------------------------- the worker's

    @property
    def joined(self) -> int:
        """The greatest membership joined, 0 for none."""
        return self._joined

    @property
    def ready(self) -> tuple[int, ...]:
        """The ready words, one for each of `PARTS`."""
        return self._ready

    @property
    def active(self) -> tuple[int, ...]:
        """By part, the epoch in force."""
        return self._active

    def find_prepared(self, number: int) -> Prepared:
        """A membership that was joined."""
        return self._prepared[number]

    def enter(self, number: int) -> None:
        """The membership begins, with the epochs that it names, whatever was in force before."""
        with self._lock:
            present = self._prepared[number]
            self._present = present
            for part, (named, table) in enumerate(zip(present.membership.parts, present.tables, strict=True)):
                later = {epoch: kept for epoch, kept in self._tables[part].items() if epoch > named.epoch}
                self._tables[part] = {named.epoch: table, **later}
            self._active = tuple(named.epoch for named in present.membership.parts)
            self._prepared = {later: kept for later, kept in self._prepared.items() if later >= number}

    def advance(self, active: tuple[int, ...]) -> None:
        """These epochs are in force from the next step on. Tables before them are dropped: steps run one by one.

        Raises:
            DeviceError: one of them has no table here.
        """
        if active == self._active:
            return
        with self._lock:
            for part, epoch in enumerate(active):
                if epoch not in self._tables[part]:
                    raise DeviceError(f"epoch {epoch} of part {PARTS[part]} is in force and has no table here")
                self._tables[part] = {key: kept for key, kept in self._tables[part].items() if key >= epoch}
            self._active = active

    def find_table(self, part: int) -> SlotTable:
        """The table in force."""
        return self._tables[part][self._active[part]]

    def add_loads(self, loads: Sequence[Load], *, steps: int) -> None:
        """What the experts of each part did in some steps; `steps` of them had rows of this rank."""
        with self._lock:
            for total, load in zip(self._loads, loads, strict=True):
                total.add(load)
            self._steps += steps

    # ---------------------------------------------------------------- parts of the above

    def _find_place(self, membership: Membership) -> int:
        if len(membership.parts) != len(self.pools):
            raise DeviceError(
                f"membership {membership.number} has {len(membership.parts)} parts, not {len(self.pools)}"
            )
        for part, named in enumerate(membership.parts):
            self._check_shape(part, named.placement, f"membership {membership.number}")
            if named.placement.ranks != len(membership.members):
                raise DeviceError(
                    f"membership {membership.number} places experts on {named.placement.ranks} of "
                    f"{len(membership.members)} members"
                )
        for place in membership.living:
            if membership.members[place].mesh_address == self._address:
                return place
        raise DeviceError(f"no member of membership {membership.number} is at {self._address}")

    def _check_shape(self, part: int, placement: Placement, what: str) -> None:
        info = self.pools[part].info
        found = (placement.layers, placement.experts, placement.slots)
        if found != (info.layers, info.experts, info.slots):
            raise DeviceError(
                f"{what} places {found[0]} layers x {found[1]} experts in {found[2]} slots of a rank, part {info.name} "
                f"has {info.layers} x {info.experts} in {info.slots}"
            )

    def _forget_unjoined(self, part: int, row: npt.NDArray[np.int32]) -> None:
        """Empties slots that only a membership which was never joined filled, unless this one wants the same there."""
        held = self.pools[part].held
        for slot in [slot for slot in self._unjoined[part] if held[slot] != row[slot]]:
            held[slot] = EMPTY
            self._unjoined[part].remove(slot)

    def _find_missing(self, part: int, row: npt.NDArray[np.int32]) -> list[int]:
        """Slots to load. Raises DeviceError if one is in use, or if copies may be on their way into it."""
        pool = self.pools[part]
        missing: list[int] = np.flatnonzero((row != EMPTY) & (row != pool.held)).tolist()
        with self._lock:
            expected = self._list_expected(part)
        for slot in missing:
            name = pool.name_key(int(row[slot]))
            if pool.held[slot] != EMPTY:
                raise DeviceError(f"{name} would go into slot {slot}, which holds {pool.name_held(slot)}")
            for coming in expected:
                if coming[slot] not in (EMPTY, row[slot]):
                    raise DeviceError(
                        f"{name} would go into slot {slot}, {pool.name_key(int(coming[slot]))} may come there"
                    )
        return missing

    def _load(self, part: int, slot: int, key: int) -> None:
        try:
            self._sources[part].load(slot, key)
        except ConfigError as error:
            raise DeviceError(f"{self.pools[part].name_key(key)} can not be loaded: {error}") from error

    def _set_word(self, part: int, epoch: int) -> None:
        words = list(self._ready)
        words[part] = epoch
        self._ready = tuple(words)

    def _list_kept(self, part: int) -> list[npt.NDArray[np.int32]]:
        """This rank's rows of the tables that are or will be in force whatever the pact says."""
        rows = [
            prepared.membership.parts[part].placement.table[prepared.place]
            for number, prepared in self._prepared.items()
            if number <= self._joined and prepared is not self._present
        ]
        if self._present is not None:
            rows.append(self._tables[part][self._active[part]].placement.table[self._present.place])
        return rows

    def _list_expected(self, part: int) -> list[npt.NDArray[np.int32]]:
        """This rank's rows of the tables that are loaded and not active."""
        if self._present is None:
            return []
        tables = self._tables[part].items()
        return [table.placement.table[self._present.place] for epoch, table in tables if epoch != self._active[part]]


def _build_tables(membership: Membership) -> tuple[SlotTable, ...]:
    return tuple(SlotTable(part.placement) for part in membership.parts)
