"""SimExperts: the expert slots of a simulated device: tagged memory, tables by epoch, the words of the pact.

It refuses nothing that a real device would refuse with an error: here that is a Violation, since no order of events may
lead to it. What a slot holds is in memory that the fabric writes; what the rank believes that it holds is `held`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.core.group import Membership
from engine.core.pact import PARTS
from engine.core.placement import EMPTY, Placement
from engine.errors import LocalProtocolError
from engine.ports import PartLoads
from engine.sim.violation import Violation
from transport.fabric import BlockRun
from transport.messages import PartInfo

if TYPE_CHECKING:
    from engine.sim.circle import Seat
    from engine.sim.expertchecks import ExpertAuditor

_SLOT = np.dtype([("part", "<i4"), ("key", "<i4"), ("seal", "<u8")])
_NOTHING = -7
"""What a fresh or wiped slot holds: no expert's number, and not what EMPTY says either."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _seal(part: int, keys: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """The rest of a tag, so that half of one tag and half of another is none."""
    return (keys.astype(np.uint64) + np.uint64(1 + (part << 32))) * np.uint64(0x9E3779B97F4A7C15)


class SlotMemory:
    """The slots of one part: 16 bytes each, for the fabric to write."""

    def __init__(self, part: int, info: PartInfo) -> None:
        self.info = info
        self._part = part
        self._buffer = ctypes.create_string_buffer(info.slots * _SLOT.itemsize)
        self._tags = np.frombuffer(memoryview(self._buffer).cast("B"), _SLOT)
        self.proven: Table | None = None
        """All was right by it, and nothing was written since."""
        self.wipe(range(info.slots))

    def run(self) -> BlockRun:
        return BlockRun(ctypes.addressof(self._buffer), _SLOT.itemsize, self.info.slots)

    def note_write(self) -> None:
        """Something is about to be written here: what it holds has to be looked at again."""
        self.proven = None

    def fill(self, slots: Sequence[int], keys: npt.NDArray[np.int32]) -> None:
        self.note_write()
        at = [*slots]
        self._tags["part"][at], self._tags["key"][at] = self._part, keys
        self._tags["seal"][at] = _seal(self._part, keys)

    def wipe(self, slots: Sequence[int]) -> None:
        self.note_write()
        at = [*slots]
        self._tags["part"][at] = self._tags["key"][at] = _NOTHING
        self._tags["seal"][at] = 0

    def find_wrong(self, table: Table) -> str | None:
        """The first slot that does not hold what the table names there, in words."""
        if self.proven is table:
            return None
        tags = self._tags[table.slots]
        wrong = (tags["key"] != table.keys) | (tags["seal"] != table.seals)
        if not wrong.any():
            self.proven = table
            return None
        at = int(wrong.argmax())
        slot, key, experts = int(table.slots[at]), int(table.keys[at]), self.info.experts
        tag = tags[at]
        if tag["part"] != self._part or tag["seal"] != _seal(self._part, tag["key"]):
            what = "no expert's weights"
        else:
            what = f"expert {tag['key'] % experts} of layer {tag['key'] // experts}"
        return (
            f"slot {slot} of part {self.info.name} has {what}, the table names expert {key % experts} of layer"
            f" {key // experts}"
        )


class Table(NamedTuple):
    """A placement as one rank looks at it: its own slots that hold something, and a digest of all of it."""

    placement: Placement
    slots: Ints
    keys: npt.NDArray[np.int32]
    seals: npt.NDArray[np.uint64]
    digest: int


def make_table(part: int, placement: Placement, place: int) -> Table:
    row = placement.table[place]
    slots = np.flatnonzero(row != EMPTY)
    return Table(placement, slots, row[slots], _seal(part, row[slots]), hash(placement))


class SimExperts:
    """`ports.ExpertSlots`; the group's clockwork uses the rest. See the module.

    Args:
        seat: of this device in its group; told of joins.
        sleep_for: waits so many virtual seconds.
        draw_counts: (part, rows by domain) to int64[layers, experts] of where they went.

    Attributes:
        joined: the greatest membership that was told.
        active: by part, the epoch in force; empty before the first membership.
        ready: the ready words.
        assigned: by part and slot, the last epoch here that is to fill it: what was copied for an earlier one is late.
        rows: by domain, rows of steps since the last report, but those that `add_rows` has yet to add.
        pairs, expert_us: by part, computed here since then, but what is in the sums of its circle.
    """

    def __init__(
        self,
        seat: Seat,
        parts: Sequence[PartInfo],
        domains: int,
        auditor: ExpertAuditor,
        sleep_for: Callable[[float], Awaitable[None]],
        draw_counts: Callable[[int, Ints], Ints],
        load_bytes_per_s: float,
    ) -> None:
        self.memory = tuple(SlotMemory(part, info) for part, info in enumerate(parts))
        self.held = [np.full(info.slots, EMPTY, np.int32) for info in parts]
        self.assigned = [np.zeros(info.slots, np.int64) for info in parts]
        self.tables: list[dict[int, Table]] = [{} for _ in parts]
        self.active: tuple[int, ...] = ()
        self.ready = (0,) * len(PARTS)
        self.joined = 0
        self.present: Membership | None = None
        self.rows = np.zeros(domains, np.int64)
        self.steps = 0
        self._step_rows, self._num_alike = self.rows, 0
        self._sums: tuple[list[Floats], list[Floats], int] = [], [], 0
        self.pairs = [0.0] * len(parts)
        self.expert_us = [0.0] * len(parts)
        self._seat = seat
        self._auditor = auditor
        self._sleep_for = sleep_for
        self._draw_counts = draw_counts
        self._load_bytes_per_s = load_bytes_per_s
        self._prepared: dict[int, Membership] = {}
        self._ready_before = [0] * len(parts)
        self._unjoined: list[set[int]] = [set() for _ in parts]

    # ------------------------------------------------------------ ports.ExpertSlots

    async def prepare(self, membership: Membership) -> None:
        if membership.number <= self.joined:
            raise LocalProtocolError(f"membership {membership.number} is prepared after {self.joined} was joined")
        place = membership.place_of(self._seat.rank)
        self._prepared = {number: kept for number, kept in self._prepared.items() if number <= self.joined}
        for part, named in enumerate(membership.parts):
            row, held = named.placement.table[place], self.held[part]
            for slot in [slot for slot in sorted(self._unjoined[part]) if held[slot] != row[slot]]:
                self._unjoined[part].remove(slot)
                held[slot] = EMPTY
            missing = np.flatnonzero((row != EMPTY) & (row != held)).tolist()
            self._auditor.loading(self._seat, part, missing, row)
            await self._sleep_for(len(missing) * self.memory[part].info.slot_bytes / self._load_bytes_per_s)
            self._auditor.loading(self._seat, part, missing, row)
            self.memory[part].fill(missing, row[missing])
            held[missing] = row[missing]
            self._unjoined[part].update(missing)
        self._prepared[membership.number] = membership

    def join(self, number: int) -> None:
        if number <= self.joined:
            return
        if number not in self._prepared:
            raise LocalProtocolError(f"membership {number} is joined and was not prepared")
        for slots in self._unjoined:
            slots.clear()
        self.joined = number
        self._seat.told_to_join()

    def load_table(self, part: int, epoch: int, placement: Placement) -> None:
        if self.active and epoch <= self.active[part]:
            raise LocalProtocolError(f"the table of epoch {epoch} is loaded when {self.active[part]} is active")
        assert self.present is not None
        table = self.tables[part][epoch] = make_table(part, placement, self.present.place_of(self._seat.rank))
        self.assigned[part][table.slots[self.held[part][table.slots] == EMPTY]] = epoch

    def set_ready(self, part: int, epoch: int) -> None:
        if epoch < self.ready[part]:
            raise LocalProtocolError(f"ready for epoch {epoch} of part {PARTS[part]} after {self.ready[part]}")
        self._auditor.ready(self._seat, part, epoch)
        if epoch != self.ready[part]:
            self._ready_before[part] = self.ready[part]
        self._set_word(part, epoch)

    def withdraw(self, part: int, epoch: int) -> None:
        if self.ready[part] == epoch:
            self._set_word(part, self._ready_before[part])

    def note_copied(self, part: int, slots: Mapping[int, int]) -> None:
        self._auditor.copied(self._seat, part, slots)
        for slot, key in slots.items():
            self.held[part][slot] = key

    def free_slots(self, part: int, slots: Sequence[int]) -> None:
        self._auditor.freed(self._seat, part, slots)
        if self.present is not None:
            place, which = self.present.place_of(self._seat.rank), [*slots]
            self.tables[part] = {
                epoch: table
                for epoch, table in self.tables[part].items()
                if epoch == self.active[part] or (table.placement.table[place, which] == EMPTY).all()
            }
        self.memory[part].wipe(slots)
        self.held[part][[*slots]] = EMPTY
        self._unjoined[part].difference_update(slots)

    def read_loads(self) -> tuple[PartLoads, ...] | None:
        if not self.steps:
            return None
        self.add_rows(None)
        self._take_sums()
        told = []
        for part, memory in enumerate(self.memory):
            counts = self._draw_counts(part, self.rows)
            self._auditor.loads(self._seat, counts)
            told.append(PartLoads(counts, self.steps, round(self.pairs[part]), round(self.expert_us[part])))
            assert counts.shape == (memory.info.layers, memory.info.experts)
        self._auditor.told_loads(self._seat)
        self.rows = np.zeros_like(self.rows)
        self.steps = 0
        self.pairs, self.expert_us = [0.0] * len(self.pairs), [0.0] * len(self.pairs)
        return tuple(told)

    # ------------------------------------------------------------ the group's clockwork

    def count_in(self, pairs: list[Floats], expert_us: list[Floats], place: int) -> None:
        """From now on its group counts for it there: by part, float64[places]."""
        self._take_sums()
        self._sums = pairs, expert_us, place

    def _take_sums(self) -> None:
        *sums, place = self._sums
        for mine, theirs in zip((self.pairs, self.expert_us), sums, strict=True):
            for part, column in enumerate(theirs):
                mine[part] += float(column[place])
                column[place] = 0.0

    def add_rows(self, step_rows: Ints | None) -> None:
        """Those of a step, by domain. While the same sequences take part they are one array, which is only counted."""
        if step_rows is not self._step_rows:
            self.rows += self._num_alike * self._step_rows
            self._num_alike = 0
            if step_rows is None:
                return
            self._step_rows = step_rows
        self._num_alike += 1

    def find_prepared(self, number: int) -> Membership:
        return self._prepared[number]

    def list_joined(self) -> list[Membership]:
        """Memberships that were told and not begun."""
        begun = 0 if self.present is None else self.present.number
        return [kept for number, kept in self._prepared.items() if begun < number <= self.joined]

    def enter(self, number: int) -> None:
        """The membership begins, with the epochs that it names, whatever was in force before."""
        self.present = present = self._prepared[number]
        place = present.place_of(self._seat.rank)
        for part, named in enumerate(present.parts):
            later = {epoch: kept for epoch, kept in self.tables[part].items() if epoch > named.epoch}
            self.tables[part] = {named.epoch: make_table(part, named.placement, place), **later}
        self.active = tuple(named.epoch for named in present.parts)
        self._prepared = {later: kept for later, kept in self._prepared.items() if later >= number}

    def advance(self, active: tuple[int, ...]) -> None:
        """These epochs are in force from the next step on."""
        if active == self.active:
            return
        for part, epoch in enumerate(active):
            if epoch not in self.tables[part]:
                raise Violation(
                    "table-epoch", f"{self._seat.name}: epoch {epoch} of part {PARTS[part]} is in force without a table"
                )
            self.tables[part] = {key: kept for key, kept in self.tables[part].items() if key >= epoch}
        self.active = active

    def _set_word(self, part: int, epoch: int) -> None:
        words = [*self.ready]
        words[part] = epoch
        self.ready = tuple(words)
