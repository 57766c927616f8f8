"""The checkers of groups: what must hold of experts, epochs and shared steps in every run. They decide nothing.

`ExpertAuditor` is told by the simulated devices and their fabric of each step's begin and end, each word that a rank
sets, each slot that changes hands, and each copy that is posted or lands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from engine.core.pact import PARTS
from engine.core.placement import EMPTY
from engine.core.switch import COPIES_RUNNING
from engine.sim.violation import Violation

if TYPE_CHECKING:
    from engine.sim.circle import Circle, Seat
    from engine.sim.group import SimGroup

Ints = npt.NDArray[np.int64]

EXPERT_CHECKERS: Final = {
    "expert-slot": "a step's table names only slots that hold that expert, on every rank (begin and end of every step)",
    "flip-step": "all ranks of a group run each step, under the same epochs, in order (every step)",
    "slot-live": "no write and no release meets a slot that a running or queued step's table names (every write)",
    "slot-late": "no copy of an earlier epoch lands in a slot that a later one is to fill (every write)",
    "table-epoch": "an epoch is one table on all ranks, and who is ready has what it names (every step and word)",
    "copies": "a rank has at most so many copies of a part under way (every copy)",
    "loads": "reported loads are the rows that were computed, and no others (every report)",
    "group-liveness": "nobody waits for a rank that nothing holds up; in the end groups are complete and moves over",
    "protocol": "no rank ends because of what another or the head said; none is ended where nothing goes wrong",
}


class ExpertAuditor:
    """See the module.

    Args:
        is_disturbed: whether a fault has touched any rank of this group within so many seconds.
    """

    def __init__(self, is_disturbed: Callable[[Seat, float], bool]) -> None:
        self._is_disturbed = is_disturbed
        self._last: dict[tuple[str, int], int] = {}
        self._rows: dict[Seat, int] = {}
        self.num_copies = 0
        self.num_ready = 0

    # ------------------------------------------------------------ steps

    def begin(self, group: SimGroup, circle: Circle, *, is_sound: bool) -> None:
        """All members have arrived in a step. `is_sound`: the step before ended at this instant, under the same epochs,
        and their slots were looked at then."""
        seats = circle.arrived
        key = (group.name, circle.number)
        if circle.step != self._last.get(key, -1) + 1:
            raise Violation("flip-step", f"{group.name}: step {circle.step} follows step {self._last.get(key, -1)}")
        self._last[key] = circle.step
        digests: list[int] = []
        for seat in seats:
            if seat.experts.active != circle.active:
                raise Violation(
                    "flip-step",
                    f"{seat.name} runs step {circle.step} of membership {circle.number} under epochs"
                    f" {seat.experts.active}, others under {circle.active}",
                )
            wanted = (circle.number, circle.step - 1) if circle.step else None
            if wanted is not None and seat.last_step != wanted:
                raise Violation("flip-step", f"{seat.name} runs a step after {wanted}, its last was {seat.last_step}")
            for part, epoch in enumerate(circle.active):
                table = seat.experts.tables[part].get(epoch)
                if table is None:
                    raise Violation("table-epoch", f"{seat.name}: epoch {epoch} of part {PARTS[part]} has no table")
                if len(digests) <= part:
                    digests.append(table.digest)
                if digests[part] != table.digest:
                    raise Violation(
                        "table-epoch", f"{seat.name}: epoch {epoch} of part {PARTS[part]} is another table than others'"
                    )
        if not is_sound:
            self._check_slots(circle, seats)

    def end(self, group: SimGroup, circle: Circle, seats: Sequence[Seat]) -> None:
        """These members end a step."""
        self._check_slots(circle, seats)

    def _check_slots(self, circle: Circle, seats: Sequence[Seat]) -> None:
        for seat in seats:
            experts = seat.experts
            for memory, tables, epoch in zip(experts.memory, experts.tables, experts.active, strict=False):
                table = tables[epoch]
                wrong = None if memory.proven is table else memory.find_wrong(table)
                if wrong is not None:
                    raise Violation(
                        "expert-slot", f"{seat.name}: step {circle.step} of membership {circle.number}: {wrong}"
                    )

    # ------------------------------------------------------------ slots

    def loading(self, seat: Seat, part: int, slots: Sequence[int], row: npt.NDArray[np.int32]) -> None:
        """Experts of the checkpoint are about to be written into these slots."""
        held = seat.experts.held[part]
        for slot in slots:
            if held[slot] != EMPTY:
                raise Violation("slot-live", f"{seat.name}: an expert is loaded into slot {slot}, which holds another")
            self._check_live(seat, part, slot, "is loaded into")
            for epoch, table in seat.experts.tables[part].items():
                coming = table.placement.table[seat.place, slot]
                if epoch != seat.experts.active[part] and coming not in (EMPTY, row[slot]):
                    raise Violation(
                        "slot-live", f"{seat.name}: slot {slot} is loaded, where epoch {epoch} has another expert"
                    )

    def ready(self, seat: Seat, part: int, epoch: int) -> None:
        """A rank says that it is ready for an epoch."""
        self.num_ready += 1
        table = seat.experts.tables[part].get(epoch)
        if table is None:
            raise Violation("table-epoch", f"{seat.name} is ready for epoch {epoch} of {PARTS[part]}, without table")
        wrong = seat.experts.memory[part].find_wrong(table)
        if wrong is not None:
            raise Violation("table-epoch", f"{seat.name} is ready for epoch {epoch}, but {wrong}")

    def copied(self, seat: Seat, part: int, slots: Mapping[int, int]) -> None:
        """A rank was told that copies into these slots are complete."""
        for slot in slots:
            if seat.experts.held[part][slot] != EMPTY:
                raise Violation("slot-live", f"{seat.name}: slot {slot} was copied into, and holds an expert")

    def freed(self, seat: Seat, part: int, slots: Sequence[int]) -> None:
        """A rank declares slots empty."""
        for slot in slots:
            self._check_live(seat, part, slot, "is freed:")

    def landing(self, writer: Seat, target: Seat, part: int, slot: int, epoch: int) -> None:
        """A copy that was begun for this epoch is about to land."""
        self._check_live(target, part, slot, f"is written by {writer.name}:")
        if target.experts.held[part][slot] != EMPTY:
            raise Violation("slot-live", f"{writer.name} writes slot {slot} of {target.name}, which holds an expert")
        if target.experts.assigned[part][slot] > epoch:
            raise Violation(
                "slot-late",
                f"{writer.name} writes slot {slot} of {target.name} for epoch {epoch}, a later one has it",
            )

    def _check_live(self, seat: Seat, part: int, slot: int, what: str) -> None:
        """Not named by the table in force, which queued steps run under, nor by one that is certain to be."""
        experts = seat.experts
        rows = [(f"membership {told.number}", told.parts[part].placement, told) for told in experts.list_joined()]
        if experts.active:
            epoch = experts.active[part]
            rows.append((f"epoch {epoch}", experts.tables[part][epoch].placement, experts.present))  # type: ignore[arg-type]
            circle = seat.circle
            if circle is not None and circle.is_running and circle.agreed is not None:
                coming = circle.agreed.active[part]
                table = experts.tables[part].get(coming)
                if table is not None:
                    rows.append((f"epoch {coming}", table.placement, experts.present))  # type: ignore[arg-type]
        for name, placement, membership in rows:
            key = int(placement.table[membership.place_of(seat.rank), slot])
            if key != EMPTY:
                layer, expert = divmod(key, placement.experts)
                raise Violation(
                    "slot-live",
                    f"{seat.name}: slot {slot} of part {PARTS[part]} {what} {name} has expert {expert} of layer {layer}"
                    " there",
                )

    def posted(self, seat: Seat, part: int, running: int) -> None:
        """A rank has so many copies of a part under way, this one included."""
        self.num_copies += 1
        if running > COPIES_RUNNING:
            raise Violation("copies", f"{seat.name} copies {running} slots of part {PARTS[part]} at a time")

    # ------------------------------------------------------------ loads

    def count_rows(self, seat: Seat, rows: int) -> None:
        self._rows[seat] = self._rows.get(seat, 0) + rows

    def loads(self, seat: Seat, counts: Ints) -> None:
        """What a rank reports of one part."""
        wanted = self._rows.get(seat, 0) * seat.group.shape.chosen
        if (counts.sum(axis=1) != wanted).any():
            raise Violation(
                "loads", f"{seat.name} reports {counts.sum(axis=1).tolist()} pairs by layer, its rows made {wanted}"
            )

    def told_loads(self, seat: Seat) -> None:
        self._rows.pop(seat, None)

    # ------------------------------------------------------------ waits

    def overdue(self, group: SimGroup, circle: Circle, missing: Seat) -> None:
        """A member is about to be accused: something must have kept it, or one of the others, from its step."""
        if missing.is_hung or missing.is_dead:
            return
        since = 2 * group.rules.exchange_s
        if not any(self._is_disturbed(seat, since) for seat in circle.seats.values()):
            raise Violation(
                "group-liveness",
                f"{group.name}: step {circle.step} of membership {circle.number} waits for {missing.name}, which"
                " nothing holds up",
            )
