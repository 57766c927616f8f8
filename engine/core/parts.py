"""PartBalance: what the head keeps of one part's experts in one group, and what may be done to them.

A part (main model or drafter) has its own load window, placement, plans, migration and epochs; two parts never wait for
each other. Pure: the caller says the time, has plans made, and carries orders to ranks.

Invariants. Epochs count up and are given out once, whatever becomes of a migration. `version` grows with every change
of the placement, so that a plan knows whether it is out of date. One plan is made at a time, one migration runs at a
time, and none begins while a member is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from engine.core.balance import Prices
from engine.core.epochs import StagePhase
from engine.core.group import PartPlacement
from engine.core.heat import Moved, find_moved
from engine.core.ledger import Entry, Ledger, max_over_mean, measure
from engine.core.load import Floats, Loads, Skew, measure_skew
from engine.core.measured import FAST_STEPS, Measured
from engine.core.migrate import Migration, Order, Outcome
from engine.core.moves import Stage
from engine.core.orders import Word
from engine.core.placement import EMPTY, Placement, lay_out
from engine.core.planning import PlannedMoves, PlanRequest
from engine.core.seating import Seating
from engine.core.topology import Topology
from engine.errors import EngineError, RemoteProtocolError
from transport.messages import PartInfo

FIRST_EPOCH = 1


@dataclasses.dataclass(frozen=True, slots=True)
class PartRules:
    """The numbers of `ExpertsConfig` that balancing needs; see there."""

    spare_slots: int
    mode: Literal["off", "manual", "auto"]
    horizon_steps: int
    link_bytes_per_s: int


class MoveRefused(EngineError):
    """Somebody wants what can not be done to a part now. The message says why, for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan as it was made: for which placement, when, and whether as the way back."""

    number: int
    moves: PlannedMoves
    version: int
    made_at: float
    is_rollback: bool


class PartBalance:
    """See the module.

    Args:
        part: index into `pact.PARTS`.
        info: its shape, as the ranks say it.
        places: ranks of the group.
        now: seconds of the caller's clock, here and in every method.

    Attributes:
        placement, epoch, version: in force.
        previous: what a rollback goes back to.
        last: the last plan.
        planning_for: who a plan is being made for, or empty.
        migration: the running one. runner: who began it. lives: generations of its places that are not dead.
        measured: loads and prices.
        progress_at: when something last got on.
        trouble: why the last plan could not be made; empty after one that could.
        moved: what the last re-placement that changed anything put where.
    """

    def __init__(self, part: int, info: PartInfo, rules: PartRules, places: int, now: float) -> None:
        self.part, self.info, self.rules = part, info, rules
        self.mode: Literal["off", "manual", "auto"] = rules.mode
        self.measured = Measured(info.layers, info.experts, rules.link_bytes_per_s)
        self.placement = lay_out(info.layers, info.experts, places, info.slots)
        self.previous: Placement | None = None
        self.epoch = FIRST_EPOCH
        self.version = 1
        self.last: MadePlan | None = None
        self.planning_for = ""
        self.migration: Migration | None = None
        self.runner = ""
        self.lives: dict[int, int] = {}
        self.ledger = Ledger()
        self.progress_at = now
        self.trouble = ""
        self.moved = Moved()
        self._rank_loads: tuple[Floats, Placement, Floats] | None = None
        self._next_epoch = FIRST_EPOCH + 1
        self._seating = Seating()
        self._entry: Entry | None = None
        self._kind: Literal["plan", "rollback", "give back"] = "plan"
        self._landed: set[tuple[int, int]] = set()

    # ------------------------------------------------------------ loads

    def add_loads(self, place: int, loads: Loads, pairs: int, expert_us: int, num_places: int) -> None:
        """A rank's report; `num_places` step at present.

        Raises:
            ValueError: another shape.
        """
        shape = (self.info.layers, self.info.experts)
        if loads.counts.shape != shape:
            raise ValueError(f"loads of shape {loads.counts.shape} for {shape} layers and experts")
        stretch = self.measured.add_loads(place, loads, pairs, expert_us, num_places)
        if stretch is not None:
            self.measured.add_loss(stretch, self.placement)
            window = self.measured.window
            for entry in self.ledger.due(window.total_steps):
                measure(entry, max_over_mean(self.measured.skew_of(window.fast(), self.placement)))

    def skew(self) -> Skew:
        """Of the placement in force under the loads to plan with."""
        return measure_skew(self.sum_rank_loads(), self.measured.us_per_token)

    def sum_rank_loads(self) -> Floats:
        """float64[layers, places] under the same: read-only, and the same array while neither changes."""
        loads, placement = self.measured.window.expected(), self.placement
        if self._rank_loads is None or self._rank_loads[0] is not loads or self._rank_loads[1] is not placement:
            sums = placement.sum_rank_loads(loads)
            sums.flags.writeable = False
            self._rank_loads = loads, placement, sums
        return self._rank_loads[2]

    # ------------------------------------------------------------ plans

    def begin_plan(self, by: str, *, is_rollback: bool = False) -> PlanRequest:
        """What the planner is to be asked; `end_plan` or `fail_plan` must follow.

        Raises:
            MoveRefused: nothing can be planned now.
        """
        self._check_idle()
        if self.mode == "off":
            raise MoveRefused(f"the mode of part {self.info.name} is off: loads are counted, nothing is moved")
        if is_rollback and self.previous is None:
            raise MoveRefused("nothing was moved yet: there is no placement to go back to")
        if not is_rollback and (self.measured.window.total_steps == 0 or self.measured.us_per_token == 0):
            raise MoveRefused("no loads were measured yet: there is nothing to plan with")
        self.planning_for = by
        measured = self.measured
        # Some slots stay empty, so that the next plan's moves find room; as many as are empty now at most.
        spare = min(self.placement.count_empty())
        why = f"back to the placement before {self.runner or 'the last move'}'s move" if is_rollback else ""
        return PlanRequest(
            current=self.placement,
            loads=measured.window.expected(),
            topology=Topology(
                hosts=(0,) * self.placement.ranks, reserve_slots=min(-(-self.rules.spare_slots // 4), spare)
            ),
            prices=Prices(
                us_per_token=measured.us_per_token,
                horizon_steps=float(self.rules.horizon_steps),
                slot_bytes=self.info.slot_bytes,
                link_bytes_per_us=measured.link_bytes_per_us,
                far_bytes_per_us=measured.link_bytes_per_us,
            ),
            target=self.previous if is_rollback else None,
            why=why,
        )

    def end_plan(self, number: int, request: PlanRequest, moves: PlannedMoves, now: float) -> MadePlan:
        """The planner has answered. The plan is the last one from here on, even if the placement has changed since."""
        self.planning_for = self.trouble = ""
        version = self.version if request.current is self.placement else 0
        self.last = MadePlan(number, moves, version, now, request.target is not None)
        return self.last

    def fail_plan(self, why: str) -> None:
        """The planner has not."""
        self.planning_for, self.trouble = "", why

    def choose_plan(self, number: int, age_s: float, now: float) -> MadePlan:
        """The plan that an operator wants to have applied, if it is still right.

        Raises:
            MoveRefused: it is not, for this reason.
        """
        self._check_idle()
        if self.mode == "off":
            raise MoveRefused(f"the mode of part {self.info.name} is off: loads are counted, nothing is moved")
        made = self.last
        if made is None:
            raise MoveRefused(f"there is no plan {number}: none was made yet")
        if made.number != number:
            raise MoveRefused(f"plan {number} is not the last one, that is plan {made.number}: look at it first")
        if made.version != self.version:
            raise MoveRefused(f"the placement has changed since plan {number} was made: plan anew")
        if now - made.made_at > age_s:
            raise MoveRefused(
                f"plan {number} is {now - made.made_at:.0f} s old (limits.plan_age is {age_s:g} s): plan anew"
            )
        if not made.moves.stages:
            raise MoveRefused(f"plan {number} moves nothing: {made.moves.plan.reason}")
        return made

    def _check_idle(self) -> None:
        if self.migration is not None:
            raise MoveRefused(f"{self.describe_run()}; wait for its end, or abort it")
        if self.planning_for:
            raise MoveRefused(f"a plan for {self.planning_for} is being made")

    # ------------------------------------------------------------ migrations

    def begin(self, made: MadePlan, generations: Mapping[int, int], by: str, reason: str, now: float) -> list[Order]:
        """Begins to carry out what `choose_plan` or `end_plan` gave; `generations` of all places."""
        self.migration = Migration(made.moves.stages, generations, self._next_epoch)
        self.runner, self.lives, self.progress_at = by, dict(generations), now
        self._landed.clear()
        self._kind = "rollback" if made.is_rollback else "plan"
        self._entry = self.ledger.open(made.number, made.moves.plan.bill, by, reason, now)
        return list(self.migration.start())

    def give_back(self, generations: Mapping[int, int], now: float) -> list[Order]:
        """With all ranks back: begins to empty the slots that were filled for a lost one. Nothing is copied for it,
        and it stands in no history; `previous` stays. Nothing if there are none, or if something is under way."""
        if self.migration is not None or self.planning_for:
            return []
        loans = self._seating.find_loans(self.placement)
        if not loans:
            return []
        table = self.placement.table.copy()
        table[tuple(np.array(loans).T)] = EMPTY
        after = Placement(self.placement.layers, self.placement.experts, table)
        self.migration = Migration((Stage(self.placement, (), after, loans),), generations, self._next_epoch)
        self.runner, self.lives, self.progress_at = "the head", dict(generations), now
        self._landed.clear()
        self._kind = "give back"
        return list(self.migration.start())

    def hear(self, word: Word, place: int, generation: int, epoch: int, now: float) -> list[Order]:
        """A rank's word about an epoch; without a migration it comes too late to change anything.

        Raises:
            RemoteProtocolError: an epoch that was not given out, or a word that nobody asked for.
        """
        migration = self.migration
        if migration is None:
            if epoch >= self._next_epoch:
                raise RemoteProtocolError(f"place {place} speaks of epoch {epoch}, which was not given out")
            return []
        before, phase, done = migration.placement, migration.phase, migration.stages_done
        notes = {
            "ready": migration.note_ready,
            "flipped": migration.note_flipped,
            "withdrawn": migration.note_withdrawn,
            "reclaimed": migration.note_reclaimed,
        }
        orders = list(notes[word](place, generation, epoch))
        if migration.placement is not before:
            if self._kind != "give back":
                self.previous = migration.previous
            self.placement, self.epoch = migration.placement, epoch
            self.version += 1
        if (migration.phase, migration.stages_done) != (phase, done):
            self.progress_at = now
        if migration.stages_done != done:
            self._landed.clear()
        self._finish(now)
        return orders

    def note_down(self, place: int, generation: int, now: float) -> list[Order]:
        """A rank's death is certain."""
        self.measured.forget(place)
        if self.lives.get(place) == generation:
            del self.lives[place]
        if self.migration is None:
            return []
        orders = list(self.migration.note_down(place, generation))
        self._finish(now)
        return orders

    def note_copied(
        self, source: int, target: int, slots: Sequence[int], epoch: int, transfer_us: int, now: float
    ) -> bool:
        """SlotsCopied: a source says that these slots of the target have their weights. False if the target's life
        is over, or the epoch.

        Raises:
            RemoteProtocolError: they are not the source's to copy, or were told before.
        """
        migration = self.migration
        if migration is None or epoch < migration.epoch:
            return False
        senders = {copy.target: copy.source[0] for copy in migration.stage.copies}
        for slot in slots:
            if epoch != migration.epoch or senders.get((target, slot)) != source or (target, slot) in self._landed:
                raise RemoteProtocolError(f"slot {slot} of place {target} in epoch {epoch} is not this rank's to copy")
            self._landed.add((target, slot))
        num_bytes = len(slots) * self.info.slot_bytes
        self.progress_at = now
        self.measured.add_copies(num_bytes, transfer_us)
        if self._entry is not None:
            self.ledger.add_copies(self._entry, len(slots), num_bytes)
        return target in self.lives

    def pause(self) -> list[Order]:
        return list(self._running().pause())

    def resume(self, now: float) -> list[Order]:
        self.progress_at = now
        return list(self._running().resume())

    def abort(self, reason: str, now: float) -> list[Order]:
        """Raises MoveRefused if nothing runs."""
        orders = list(self._running().abort(reason))
        self.progress_at = now
        self._finish(now)
        return orders

    def _running(self) -> Migration:
        if self.migration is None:
            raise MoveRefused("nothing is being moved")
        return self.migration

    def _finish(self, now: float) -> None:
        migration, entry = self.migration, self._entry
        if migration is None or migration.outcome is None:
            return
        self.migration, self._entry = None, None
        self._next_epoch = migration.next_epoch
        self.progress_at = now
        if entry is None:
            return  # slots were given back
        entry.ended_at = now
        if migration.outcome is Outcome.DONE:
            entry.result = "rolled_back" if self._kind == "rollback" else "applied"
            entry.measure_at_steps = self.measured.window.total_steps + int(FAST_STEPS)
        else:
            entry.result, entry.reason = "failed", migration.reason
        self.ledger.close(entry)
        before = migration.stages[0].before
        if migration.placement is not before:
            self.moved = find_moved(before, migration.placement)

    @property
    def expected_placement(self) -> Placement | None:
        """What the last plan makes of the placement in force, while it may be applied or is being carried out. A plan
        for a placement that was in force earlier says nothing of this one: None."""
        made = self.last
        if made is None or (made.version != self.version and not self.is_planned):
            return None
        return made.moves.stages[-1].after if made.moves.stages else self.placement

    def describe_run(self) -> str:
        """Who moves what, for people."""
        migration = self._running()
        if self._entry is None:
            return "slots that were filled for a lost rank are being given back"
        what = "the way back" if self._kind == "rollback" else f"plan {self._entry.plan}"
        copied, total = self.count_copies()
        where = f"{migration.phase.value}, {copied} of {total} slots copied"
        return f"{what} of {self.runner} is being carried out ({where})"

    def count_copies(self) -> tuple[int, int]:
        """Copied slots of the running migration, and all of it."""
        if self.migration is None:
            return 0, 0
        sizes = [len(stage.copies) for stage in self.migration.stages]
        return sum(sizes[: self.migration.stages_done]) + len(self._landed), sum(sizes)

    @property
    def is_planned(self) -> bool:
        """The running migration follows a plan, so the history will say how it ended."""
        return self._entry is not None

    @property
    def blocks_membership(self) -> bool:
        return self.migration is not None and self.migration.blocks_membership

    @property
    def is_due(self) -> bool:
        """There is something that ought to get on."""
        return self.migration is not None and not (
            self.migration.paused and self.migration.phase in (StagePhase.NEW, StagePhase.HELD)
        )

    # ------------------------------------------------------------ memberships

    def seat(self, living: frozenset[int]) -> PartPlacement | int:
        """The experts in a membership of these places, or how many find no slot."""
        placed = self._seating.seat(self.placement, living, self._busy_slots())
        return placed if isinstance(placed, int) else PartPlacement(self.epoch, placed)

    def take_seat(self, placement: Placement, living: frozenset[int]) -> None:
        """That membership was named: its placement is in force from here on."""
        self._seating.note_named(self.placement, placement, living)
        if placement != self.placement:
            self.placement = placement
            self.version += 1

    def _busy_slots(self) -> frozenset[tuple[int, int]]:
        """Slots that a stage which is not over may write, or queued steps still read."""
        migration = self.migration
        if migration is None or migration.phase is StagePhase.NEW:
            return frozenset()
        return frozenset(copy.target for copy in migration.stage.copies) | frozenset(migration.stage.released)
