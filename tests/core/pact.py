"""A group of ranks in miniature: step queues, the pact, slots with weights, and the tables of `engine.core.epochs`.

One `Group.act` does one thing that may happen next (a step begins, an exchange ends, a message arrives, a copy lands,
a rank dies), drawn by a seeded generator, and checks what must hold at any time: all ranks run a step under one epoch,
and each slot that a step's table names has that expert's weights, from the step's start until it was awaited.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Iterator

from engine.core.epochs import RANK, Action, RankEvent, RankPhase, advance
from engine.core.migrate import Migration, Order
from engine.core.moves import Copy, Stage
from engine.core.placement import EMPTY, Placement

TORN = "torn"
ENDS = (RankPhase.SETTLED, RankPhase.BURNED)


@dataclasses.dataclass
class Step:
    number: int
    epoch: int
    ready: int
    withdrawn: frozenset[int]
    finished: bool = False


@dataclasses.dataclass
class Rank:
    rank: int
    weights: list[object]
    inbox: deque[Order] = dataclasses.field(default_factory=deque)
    phases: dict[int, RankPhase] = dataclasses.field(default_factory=dict)
    missing: dict[int, int] = dataclasses.field(default_factory=dict)
    awaited_since: dict[int, int] = dataclasses.field(default_factory=dict)
    held: set[int] = dataclasses.field(default_factory=set)
    steps: deque[Step] = dataclasses.field(default_factory=deque)
    next_step: int = 0
    ready: int = 0
    withdraw: set[int] = dataclasses.field(default_factory=set)
    next_epoch: int = 0
    host_epoch: int = 0
    alive: bool = True
    cut: bool = False


class Group:
    """`bug` plants one: see the tests."""

    def __init__(self, placement: Placement, seed: int, bug: str = "") -> None:
        self.chance = random.Random(seed)
        self.bug = bug
        self.placements = {0: placement}
        self.stages: dict[int, Stage] = {}
        self.ranks = [Rank(r, list(row)) for r, row in enumerate(placement.table.tolist())]
        self.members = set(range(placement.ranks))
        self.words: deque[tuple[str, int, int]] = deque()
        self.copies: dict[Copy, int] = {}
        self.waiting: dict[Copy, int] = {}
        self.migration: Migration | None = None
        self.epoch_of_step: dict[int, int] = {}
        self.history: dict[tuple[int, int], Step] = {}
        self.copied = 0
        self.dead: int | None = None
        self.fenced = False
        self.overtaken_withdrawals = 0
        self.slow = self.chance.choice([None, 0, 1, 2])
        # How often, per act, the operator does something and a rank dies; half of the runs go without a death.
        self.rates = (self.chance.choice([0.0, 0.02, 0.1]), self.chance.choice([0.0, 0.0, 0.005, 0.02]))

    # ------------------------------------------------------------ the head

    def begin(self, migration: Migration) -> None:
        self.migration = migration
        self.send(migration.start())

    def send(self, orders: tuple[Order, ...]) -> None:
        for order in orders:
            if order.action is Action.PREPARE and order.epoch not in self.stages:
                stage = self.migration.stages[self.migration.stages_done]
                self.stages[order.epoch], self.placements[order.epoch] = stage, stage.after
                self.waiting.update((copy, order.epoch) for copy in stage.copies)
            self.ranks[order.rank].inbox.append(order)

    def hear(self) -> None:
        word, rank, epoch = self.words.popleft()
        if word == "down":
            self.send(self.migration.note_down(rank, 1))
            self.fenced = True
        else:
            self.send(getattr(self.migration, f"note_{word}")(rank, 1, epoch))
            if self.bug == "burns at the first word" and word == "withdrawn" and self.migration.blocks_membership:
                for living in sorted(self.members):
                    self.send(self.migration.note_withdrawn(living, 1, epoch))
            if self.bug == "goes on at the first flip" and word == "flipped":
                for living in sorted(self.members):
                    self.send(self.migration.note_flipped(living, 1, epoch))
                for living in sorted(self.members):
                    self.send(self.migration.note_reclaimed(living, 1, epoch))

    # ------------------------------------------------------------ what may happen

    def act(self, faults: bool) -> None:
        if faults and self.migration.outcome is None:
            if self.chance.random() < self.rates[0]:
                self.operate()
            if self.chance.random() < self.rates[1] and self.dead is None:
                self.kill()
        choices = list(self.list_choices())
        # One rank hears the head late: what it should not do meanwhile has time to happen.
        brisk = [choice for choice in choices if choice[0] != "receive" or choice[1].rank != self.slow]
        if brisk and self.chance.random() < 0.95:
            choices = brisk
        kind = self.chance.choice(sorted({name for name, *_ in choices}))
        name, *args = self.chance.choice([choice for choice in choices if choice[0] == kind])
        getattr(self, name)(*args)

    def list_choices(self) -> Iterator[tuple]:
        migration = self.migration
        if self.words:
            yield ("hear",)
        for rank in self.ranks:
            if not rank.alive:
                continue
            if rank.inbox:
                yield "receive", rank
            if rank.cut:
                continue
            if len(rank.steps) < 2 and all(step.finished for step in rank.steps):
                yield "begin_step", rank
            if any(not step.finished and self.can_finish(step) for step in rank.steps):
                yield "finish_step", rank
            if rank.steps and rank.steps[0].finished:
                yield "await_step", rank
            if self.dead is not None and self.dead in self.members:
                yield "lose_peer", rank
        for copy, epoch in self.waiting.items():
            source, target = self.ranks[copy.source[0]], self.ranks[copy.target[0]]
            sends = source.phases.get(epoch) in (RankPhase.RECEIVING, RankPhase.READY) and epoch not in source.held
            if source.alive and target.alive and sends and epoch in target.phases:
                yield "start_copy", copy
        for copy in self.copies:
            yield "land", copy
        living = [rank for rank in self.ranks if rank.alive]
        cut = self.dead in self.members and self.fenced and all(rank.cut for rank in living)
        if cut and not migration.blocks_membership:
            yield ("name_members",)

    def operate(self) -> None:
        roll = self.chance.random()
        if roll < 0.3:
            self.send(self.migration.abort("the operator said so"))
        else:
            self.send(self.migration.resume() if self.migration.paused else self.migration.pause())

    def kill(self) -> None:
        victim = self.chance.choice(sorted(self.members))
        self.dead = victim
        self.ranks[victim].alive = False
        for copy in [c for c in self.copies if victim in (c.source[0], c.target[0])]:
            del self.copies[copy]
            if self.ranks[copy.target[0]].alive:
                self.settle(self.ranks[copy.target[0]])
        self.words.append(("down", victim, 0))

    # ------------------------------------------------------------ steps

    def can_finish(self, step: Step) -> bool:
        return all((member, step.number) in self.history for member in self.members)

    def begin_step(self, rank: Rank) -> None:
        epoch = rank.next_epoch
        if self.bug == "flips one rank early" and rank.rank == 0:
            epoch = max(epoch, rank.ready)
        step = Step(rank.next_step, epoch, rank.ready, frozenset(rank.withdraw))
        rank.next_step += 1
        rank.steps.append(step)
        self.history[rank.rank, step.number] = step
        agreed = self.epoch_of_step.setdefault(step.number, epoch)
        assert agreed == epoch, f"step {step.number} runs under epochs {agreed} and {epoch}"
        self.check_weights(rank, epoch)

    def check_weights(self, rank: Rank, epoch: int) -> None:
        for slot, key in enumerate(self.placements[epoch].table[rank.rank].tolist()):
            held = rank.weights[slot]
            assert key == EMPTY or held == key, f"epoch {epoch} wants {key} in {rank.rank, slot}, which has {held}"

    def finish_step(self, rank: Rank) -> None:
        step = next(step for step in rank.steps if not step.finished)
        words = [self.history[member, step.number] for member in sorted(self.members)]
        least = min(word.ready for word in words)
        if not any(least in word.withdrawn for word in words):
            rank.next_epoch = max(step.epoch, least)
        step.finished = True

    def await_step(self, rank: Rank) -> None:
        step = rank.steps.popleft()
        rank.host_epoch = max(rank.host_epoch, step.epoch)
        for epoch, phase in list(rank.phases.items()):
            rank.awaited_since[epoch] = rank.awaited_since.get(epoch, 0) + 1
            if phase in (RankPhase.READY, RankPhase.WITHDRAWING):
                if step.epoch >= epoch:
                    self.feed(rank, epoch, RankEvent.FLIPPED)
                elif phase is RankPhase.WITHDRAWING and epoch in step.withdrawn:
                    self.feed(rank, epoch, RankEvent.UNSEEN)
        self.settle(rank)

    def settle(self, rank: Rank) -> None:
        for epoch, phase in list(rank.phases.items()):
            runs = any(copy.target[0] == rank.rank and at == epoch for copy, at in self.copies.items())
            if phase in (RankPhase.ACTIVE, RankPhase.DRAINING) and rank.awaited_since[epoch] >= 2 and not runs:
                self.feed(rank, epoch, RankEvent.QUIET)

    # ------------------------------------------------------------ copies

    def start_copy(self, copy: Copy) -> None:
        epoch = self.waiting.pop(copy)
        source, target = self.ranks[copy.source[0]], self.ranks[copy.target[0]]
        in_use = {step.epoch for step in target.steps} | {target.next_epoch, target.host_epoch}
        for used in in_use:
            live = int(self.placements[used].table[copy.target])
            assert live == EMPTY, f"a copy into {copy.target} while epoch {used} has {live} there"
        key = copy.layer * self.placements[0].experts + copy.expert
        assert source.weights[copy.source[1]] == key
        target.weights[copy.target[1]] = TORN
        self.copies[copy] = epoch

    def land(self, copy: Copy) -> None:
        epoch = self.copies.pop(copy)
        source, target = self.ranks[copy.source[0]], self.ranks[copy.target[0]]
        assert target.weights[copy.target[1]] is TORN, "two copies into one slot"
        target.weights[copy.target[1]] = source.weights[copy.source[1]]
        self.copied += 1
        target.missing[epoch] -= 1
        if target.missing[epoch] == 0 and target.phases[epoch] not in ENDS:
            self.feed(target, epoch, RankEvent.COMPLETE)
        self.settle(target)

    # ------------------------------------------------------------ ranks

    def receive(self, rank: Rank) -> None:
        order = rank.inbox.popleft()
        epoch, action = order.epoch, order.action
        if action in (Action.HOLD, Action.RELEASE):
            (rank.held.add if action is Action.HOLD else rank.held.discard)(epoch)
            return
        event = {
            Action.PREPARE: RankEvent.PREPARE,
            Action.WITHDRAW: RankEvent.WITHDRAW,
            Action.ADOPT: RankEvent.ADOPT,
            Action.BURN: RankEvent.BURN,
        }[action]
        self.feed(rank, epoch, event)
        if action is Action.PREPARE:
            rank.missing[epoch] = sum(copy.target[0] == rank.rank for copy in self.stages[epoch].copies)
            if rank.cut:
                self.feed(rank, epoch, RankEvent.PEER_LOST)
            if rank.missing[epoch] == 0:
                self.feed(rank, epoch, RankEvent.COMPLETE)

    def feed(self, rank: Rank, epoch: int, event: RankEvent) -> None:
        before = rank.phases.get(epoch, RankPhase.NEW)
        transition = advance(RANK, before, event, f"rank {rank.rank}, epoch {epoch}")
        if self.bug == "ready after declining" and before is RankPhase.DECLINED and event is RankEvent.COMPLETE:
            rank.ready = epoch
        rank.phases[epoch] = transition.phase
        if transition.phase is not before:
            rank.awaited_since[epoch] = 0
        for action in transition.actions:
            if action is Action.SET_READY:
                rank.ready = epoch
            elif action is Action.SET_WITHDRAW:
                rank.withdraw.add(epoch)
                rank.ready = rank.host_epoch
                if rank.cut:
                    rank.next_epoch = rank.host_epoch
            elif action is Action.SET_ACTIVE:
                rank.next_epoch = rank.host_epoch = rank.ready = max(rank.host_epoch, epoch)
                rank.withdraw.discard(epoch)
            elif action in (Action.TELL_READY, Action.TELL_FLIPPED, Action.TELL_WITHDRAWN, Action.TELL_RECLAIMED):
                self.overtaken_withdrawals += before is RankPhase.WITHDRAWING and event is RankEvent.FLIPPED
                self.words.append((action.name.removeprefix("TELL_").lower(), rank.rank, epoch))

    def lose_peer(self, rank: Rank) -> None:
        """Its exchange timed out: the host forgets what it did not await."""
        rank.cut = True
        rank.steps.clear()
        for epoch, phase in list(rank.phases.items()):
            if phase is not RankPhase.BURNED:
                self.feed(rank, epoch, RankEvent.PEER_LOST)

    def name_members(self) -> None:
        self.members.discard(self.dead)
        living = [rank for rank in self.ranks if rank.alive]
        number = max(rank.next_step for rank in living)
        epochs = {rank.host_epoch for rank in living}
        assert len(epochs) == 1, f"the new membership would run epochs {sorted(epochs)}"
        for rank in living:
            rank.cut, rank.next_step, rank.next_epoch = False, number, rank.host_epoch
        for step in [step for step in self.epoch_of_step if step >= number]:
            del self.epoch_of_step[step]

    # ------------------------------------------------------------ ends

    @property
    def is_over(self) -> bool:
        living = [rank for rank in self.ranks if rank.alive]
        settled = all(phase in ENDS for rank in living for phase in rank.phases.values())
        joined = self.dead is None or self.dead not in self.members
        return self.migration.outcome is not None and settled and joined and not self.copies and not self.words
