"""A migration: all stages from one placement to another, epoch by epoch, as the head keeps it. Orders out, words in.

`epochs` owns what may happen to one epoch; this file owns the sequence of them: which ranks have spoken, when the next
stage begins, what pausing, giving up and the death of a rank mean for the rest. A rollback is another migration, to
`previous`, under epochs of its own.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.core.epochs import STAGE, Action, StageEvent, StagePhase
from engine.core.moves import Stage
from engine.core.placement import Placement
from engine.errors import LocalProtocolError, RemoteProtocolError


class Outcome(enum.Enum):
    """How a migration ended; `Migration.placement` is in force in each case."""

    DONE = "done"
    ABORTED = "aborted"


class Order(NamedTuple):
    """One action for one rank, about one epoch."""

    action: Action
    rank: int
    epoch: int


class Migration:
    """All stages of one move from a placement to another, as the head keeps it.

    The head calls one method per message or event and sends the orders that it returns. One migration of a part at a
    time; main model and drafter have separate ones, with separate epochs.

    Args:
        stages: from `order_moves`, at least one.
        generations: rank -> generation of every rank of the group.
        first_epoch: greater than every epoch given out before, whatever became of it.

    Attributes:
        epoch: of the stage at hand.
        phase: of the stage at hand.
        placement: in force, as far as the head knows: the outcome of the last stage that some rank saw active.
        previous: what a rollback goes back to.
        outcome, reason: set at the end.
        next_epoch: what the next migration may start with.
        stages_done: stages whose slots have been reclaimed.
    """

    def __init__(self, stages: Sequence[Stage], generations: Mapping[int, int], first_epoch: int) -> None:
        if not stages:
            raise ValueError("a migration without stages moves nothing")
        if any(earlier.after != later.before for earlier, later in itertools.pairwise(stages)):
            raise ValueError("the stages of a migration do not follow from each other")
        if sorted(generations) != list(range(stages[0].before.ranks)):
            raise ValueError(f"{len(generations)} ranks do not fit a placement over {stages[0].before.ranks}")
        self.stages = tuple(stages)
        self.stages_done = 0
        self.epoch = first_epoch
        self.phase = StagePhase.NEW
        self.placement = self.previous = stages[0].before
        self.outcome: Outcome | None = None
        self.reason = ""
        self.paused = False
        self._generations = dict(generations)
        self._ready: set[int] = set()
        self._flipped: set[int] = set()
        self._withdrawn: set[int] = set()
        self._reclaimed: set[int] = set()

    @property
    def stage(self) -> Stage:
        """The one at hand, or the last one."""
        return self.stages[min(self.stages_done, len(self.stages) - 1)]

    @property
    def next_epoch(self) -> int:
        return self.epoch + 1

    @property
    def target(self) -> Placement:
        return self.stages[-1].after

    @property
    def blocks_membership(self) -> bool:
        """True while it is open whether the epoch at hand became active: no membership may be named without knowing."""
        return self.phase in (StagePhase.WITHDRAWING, StagePhase.FLIP)

    @property
    def late_to_empty(self) -> tuple[int, ...]:
        """Ranks that have to say yet that the slots of a burned epoch are empty."""
        if self.phase is not StagePhase.DRAINING:
            return ()
        return tuple(sorted(self._generations.keys() - self._reclaimed))

    def start(self) -> tuple[Order, ...]:
        """Begins the first stage, unless paused before."""
        if self.phase is not StagePhase.NEW or self.stages_done:
            raise LocalProtocolError(f"epoch {self.epoch}: the migration was started before")
        return () if self.paused else self._advance(StageEvent.START)

    def pause(self) -> tuple[Order, ...]:
        """No copy starts any more, nor the next stage; what is under way ends, and flips if it is complete."""
        if self.paused or self.outcome is not None:
            return ()
        self.paused = True
        return self._advance(StageEvent.PAUSE) if self.phase is StagePhase.COPY else ()

    def resume(self) -> tuple[Order, ...]:
        """The reverse of `pause`."""
        if not self.paused or self.outcome is not None:
            return ()
        self.paused = False
        if self.phase is StagePhase.HELD:
            return self._advance(StageEvent.RESUME)
        return self._advance(StageEvent.START) if self.phase is StagePhase.NEW else ()

    def abort(self, reason: str) -> tuple[Order, ...]:
        """Gives up what is not active yet. Stages that are active stay so: undoing them is a rollback."""
        if self.outcome is not None:
            return ()
        self.reason = self.reason or reason
        if (self.phase, StageEvent.ABORT) not in STAGE:
            return ()  # too late for this stage, or under way already
        return self._advance(StageEvent.ABORT)

    def note_ready(self, rank: int, generation: int, epoch: int) -> tuple[Order, ...]:
        """A rank said EpochReady."""
        if not self._is_current(rank, generation, epoch):
            return ()
        self._ready.add(rank)
        if self._all(self._ready) and self.phase in (StagePhase.COPY, StagePhase.HELD):
            return self._advance(StageEvent.ALL_READY)
        return ()

    def note_flipped(self, rank: int, generation: int, epoch: int) -> tuple[Order, ...]:
        """A rank said EpochFlipped."""
        if not self._is_current(rank, generation, epoch):
            return ()
        self._flipped.add(rank)
        self.placement = self.stage.after
        # In RECLAIM it is the answer of a rank that adopted what it had seen already.
        orders = self._advance(StageEvent.FLIPPED) if self.phase is not StagePhase.RECLAIM else ()
        return orders + self._count()

    def note_withdrawn(self, rank: int, generation: int, epoch: int) -> tuple[Order, ...]:
        """A rank said EpochWithdrawn: it is not ready for it and never will be."""
        if not self._is_current(rank, generation, epoch):
            return ()
        if self.phase not in (StagePhase.WITHDRAWING, StagePhase.FLIP):
            raise RemoteProtocolError(f"rank {rank} withdrew from epoch {epoch} unasked, in state {self.phase.value}")
        self._withdrawn.add(rank)
        return self._count()

    def note_reclaimed(self, rank: int, generation: int, epoch: int) -> tuple[Order, ...]:
        """A rank said EpochReclaimed."""
        if not self._is_current(rank, generation, epoch):
            return ()
        self._reclaimed.add(rank)
        return self._count()

    def note_down(self, rank: int, generation: int) -> tuple[Order, ...]:
        """A rank's process is confirmed dead: it is ready for nothing, and writes nothing any more."""
        if self._generations.get(rank) != generation or self.outcome is not None:
            return ()
        del self._generations[rank]
        self.reason = self.reason or f"rank {rank} died"
        if not self._generations:
            self.outcome = Outcome.ABORTED
            return ()
        return self._advance(StageEvent.RANK_DOWN) + self._count()

    def _is_current(self, rank: int, generation: int, epoch: int) -> bool:
        """False for a word of an earlier life, or about an epoch that is over: it changes nothing.

        Raises:
            RemoteProtocolError: an epoch that was not given out.
        """
        if self._generations.get(rank) != generation or self.outcome is not None:
            return False
        if epoch > self.epoch or (epoch == self.epoch and self.phase is StagePhase.NEW):
            raise RemoteProtocolError(f"rank {rank} speaks of epoch {epoch}, the last one given out is {self.epoch}")
        return epoch == self.epoch

    def _all(self, ranks: set[int]) -> bool:
        return ranks >= self._generations.keys()

    def _count(self) -> tuple[Order, ...]:
        """Follows up what is complete now that somebody spoke or died."""
        orders: tuple[Order, ...] = ()
        if self.phase is StagePhase.WITHDRAWING and self._all(self._withdrawn):
            orders += self._advance(StageEvent.ALL_WITHDRAWN)
        if self.phase is StagePhase.FLIP and self._all(self._flipped):
            orders += self._advance(StageEvent.ALL_FLIPPED)
        if self.phase in (StagePhase.RECLAIM, StagePhase.DRAINING) and self._all(self._reclaimed):
            orders += self._advance(StageEvent.ALL_RECLAIMED)
        return orders

    def _advance(self, event: StageEvent) -> tuple[Order, ...]:
        transition = STAGE.follow(self.phase, event, f"epoch {self.epoch}")
        self.phase = transition.phase
        ranks = sorted(self._generations)
        orders = tuple(Order(action, rank, self.epoch) for action in transition.actions for rank in ranks)
        if self.phase is StagePhase.BURNED:
            self.outcome = Outcome.ABORTED
        elif self.phase is StagePhase.DONE:
            self.stages_done += 1
            if self.stages_done == len(self.stages):
                self.outcome = Outcome.DONE
            elif self.reason:
                self.outcome = Outcome.ABORTED
            else:
                return orders + self._begin_next()
        return orders

    def _begin_next(self) -> tuple[Order, ...]:
        self.epoch += 1
        self.phase = StagePhase.NEW
        for ranks in (self._ready, self._flipped, self._withdrawn, self._reclaimed):
            ranks.clear()
        return () if self.paused else self._advance(StageEvent.START)
