"""A group in miniature: real ExpertSides and Migrations, a device of step queues and slots, a head, and a scheduler.

One `Group.act` does one thing that may happen next (a message arrives, a loop takes its turn, a device begins a step or
ends one, a copy lands, a rank dies), drawn by a seeded generator, and checks what must hold at any time: all ranks run
a step under the same epochs, each slot that a step's table names has that expert's weights from the step's begin to its
end, and a copy touches no slot that is in use. `settle` lets things come to rest and checks that they do: nobody waits
for a step that another does not run.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from engine.core.effects import FreeSlots, Join, LoadTable, NoteCopied, Prepare, SetReady, StartCopy, ToHead, Withdraw
from engine.core.epochs import Action, StagePhase
from engine.core.experts import ExpertSide
from engine.core.group import Membership, PartPlacement, encode_membership, encode_stage
from engine.core.migrate import Migration, Order
from engine.core.moves import order_moves
from engine.core.pact import PARTS, Agreement, GroupStep, Words, agree
from engine.core.placement import EMPTY, Placement
from engine.core.plan import DecodeRow, StepPlan
from engine.errors import GroupBroken
from transport import messages as m
from transport.messages import Member, Message, PartInfo, Sampling

TORN = -2
IDLE_LIMIT = 3
ROW = DecodeRow(1, 0, 0, 0, (0,), Sampling())


@dataclasses.dataclass
class Step:
    plan: StepPlan
    at: tuple[int, int] | None = None
    active: tuple[int, ...] = ()
    agreed: Agreement | None = None


class Device:
    """Queue, pact and slots of one rank."""

    def __init__(self, group: Group, rank: int, generation: int, shapes: Sequence[PartInfo]) -> None:
        self.group, self.rank, self.generation = group, rank, generation
        self.slots = [[EMPTY] * info.slots for info in shapes]
        self.queue: deque[Step] = deque()
        self.prepared: dict[int, Membership] = {}
        self.members: Membership | None = None
        self.told = 0
        self.next_step = 0
        self.active = (0,) * len(shapes)
        self.ready = [0] * len(shapes)
        self.tables: list[dict[int, Placement]] = [{} for _ in shapes]
        self.is_broken = False
        self.tells_break = False
        self.is_stopped = False

    def prepare(self, membership: Membership) -> None:
        place = membership.place_of(self.rank)
        for part, named in enumerate(membership.parts):
            for slot, key in enumerate(named.placement.table[place].tolist()):
                if key not in (EMPTY, self.slots[part][slot]):
                    assert self.slots[part][slot] == EMPTY, f"slot {slot} of rank {self.rank} is in use"
                    self.slots[part][slot] = key
        self.prepared[membership.number] = membership

    @property
    def next(self) -> Step | None:
        """The first step that is not over."""
        return next((step for step in self.queue if step.agreed is None), None)

    def can_begin(self) -> bool:
        step = self.next
        if step is None or step.at is not None or self.tells_break or self.is_stopped:
            return False
        return (self.members is not None and not self.is_broken) or self.can_enter()

    def can_enter(self) -> bool:
        return self.told > (0 if self.members is None else self.members.number)

    def begin(self) -> None:
        if self.members is None or self.is_broken:
            self.enter(self.told)
        step = self.next
        step.at, step.active = (self.members.number, self.next_step), self.active
        rows = len(step.plan.rows)
        join = max(self.told, self.members.number)
        words = Words(
            self.generation, rows, rows, step.plan.idle, join, step.plan.stop, step.plan.drafts, tuple(self.ready)
        )
        self.group.note_begin(self, step, words)

    def enter(self, number: int) -> None:
        self.members, self.next_step, self.is_broken = self.prepared[number], 0, False
        self.active = tuple(part.epoch for part in self.members.parts)
        for part, named in enumerate(self.members.parts):
            self.tables[part][named.epoch] = named.placement

    def finish(self, words: list[Words]) -> None:
        step = self.next
        self.group.check_weights(self, step.active)
        step.agreed = agree(words, step.active, self.members.number, IDLE_LIMIT)
        self.active, self.next_step = step.agreed.active, self.next_step + 1
        self.is_stopped = step.agreed.stop
        if step.agreed.leave:
            self.enter(step.agreed.leave)

    def lose(self) -> None:
        """A member does not answer: the step will be run again."""
        self.next.at = None
        self.is_broken = self.tells_break = True


class Host:
    """The step loop of one rank in one life."""

    def __init__(self, group: Group, rank: int, generation: int) -> None:
        self.rank, self.generation = rank, generation
        self.group = group
        self.side = group.make_side(rank, generation, group.shapes)
        self.device = Device(group, rank, generation, group.shapes)
        self.from_head: deque[tuple[Message, bytes]] = deque()
        self.to_head: deque[tuple[Message, bytes]] = deque()
        self.facts: deque[tuple] = deque()
        self.in_flight = 0
        self.rows = 0
        self.ran_rows = 0
        self.step = 0
        self.is_told_to_drain = False
        self.has_ended = False
        self.preparing: deque[Membership] = deque()

    @property
    def is_drained(self) -> bool:
        return self.is_told_to_drain and not self.rows and self.ran_rows == self.step

    def turn(self) -> None:
        while self.facts:
            name, *args = self.facts.popleft()
            if name == "on_result":
                self.in_flight -= 1
            if name == "on_head" and isinstance(args[0], m.Drain):
                self.is_told_to_drain = True
            getattr(self.side, name)(*args[:2], **(args[2] if len(args) > 2 else {}))
        self.carry_out()
        while self.in_flight < 2:
            plan = None
            if self.rows:
                self.step += 1
                plan = StepPlan(self.step, (), (ROW,))
            plan = self.side.plan(plan, is_drained=self.is_drained)
            if plan is None:
                break
            self.rows -= len(plan.rows)
            self.in_flight += 1
            self.device.queue.append(Step(plan))
        self.carry_out()
        if self.side.is_over(is_drained=self.is_drained):
            self.has_ended = True
            self.group.note_end(self)

    def carry_out(self) -> None:
        device = self.device
        for effect in self.side.take_outbox():
            match effect:
                case ToHead(message, blob):
                    self.to_head.append((message, blob))
                case Prepare(membership):
                    self.preparing.append(membership)
                case Join(number):
                    device.told = number
                case LoadTable(part, epoch, placement):
                    device.tables[part][epoch] = placement
                case SetReady(part, epoch):
                    device.ready[part] = epoch
                case Withdraw(part, epoch):
                    device.ready[part] = device.active[part] if device.active[part] < epoch else 0
                case NoteCopied(part, slots):
                    for slot, key in slots.items():
                        assert device.slots[part][slot] == key, f"slot {slot} was said to hold {key}"
                case FreeSlots(part, slots):
                    for slot in slots:
                        device.slots[part][slot] = EMPTY
                case StartCopy():
                    self.group.start_copy(self, effect)

    def await_step(self) -> None:
        device = self.device
        step = device.queue[0] if device.queue else None
        if step is not None and step.agreed is not None:
            device.queue.popleft()
            self.ran_rows += len(step.plan.rows)
            result = GroupStep(*step.at, step.active, step.agreed.park, step.agreed.stop)
            self.facts.append(("on_result", result))
        else:
            device.tells_break = False
            lost = self.group.dead or {(-1, 0)}
            error = GroupBroken(device.members.number, device.next_step, min(lost)[0], "is gone", overdue=False)
            self.facts.append(("on_broken", error))


class Group:
    """A head with its group. `bug` plants one: of the head or device here; those of the rank's side by `make_side`."""

    def __init__(
        self, placements: Sequence[Placement], seed: int, bug: str = "", make_side: type[ExpertSide] = ExpertSide
    ) -> None:
        self.chance = random.Random(seed)
        self.bug, self.make_side = bug, make_side
        self.shapes = [
            PartInfo(PARTS[part], placement.layers, placement.experts, placement.slots, 10)
            for part, placement in enumerate(placements)
        ]
        self.placements = list(placements)
        self.epochs = [0] * len(placements)
        self.next_epochs = [1] * len(placements)
        self.migrations: list[Migration | None] = [None] * len(placements)
        self.stage_epochs: set[tuple[int, int]] = set()
        self.ranks = placements[0].ranks
        self.hosts = [Host(self, rank, 1) for rank in range(self.ranks)]
        self.dead: set[tuple[int, int]] = set()
        self.missing: set[int] = set()
        self.rows_at_loss: dict[tuple[int, int], list[int]] = {}
        self.deaths_to_tell: deque[int] = deque()
        self.words: dict[tuple[int, int], dict[int, Words]] = {}
        self.hidden: set[tuple[tuple[int, int], int, int]] = set()
        self.epochs_of_step: dict[tuple[int, int], tuple[int, ...]] = {}
        self.copies: dict[tuple[int, StartCopy], str] = {}
        self.ends: list[tuple[int, int]] = []
        self.copied = self.parks = self.flips = self.rejoins = self.breaks = 0
        self.overtaken_withdrawals = 0
        self.named: Membership | None = None
        self.prepared: set[int] = set()
        self.joined: set[int] = set()
        self.must_name = True
        self.faults = False
        self.slow = self.chance.choice([None, *range(self.ranks)])
        self.rates = {
            "operate": self.chance.choice([0.0, 0.01, 0.05]),
            "kill": self.chance.choice([0.0, 0.0, 0.003, 0.01]),
            "rows": self.chance.choice([0.0, 0.005, 0.05]),
            "fail": self.chance.choice([0.0, 0.0, 0.1]),
        }
        self.try_name()

    # ------------------------------------------------------------ the head

    def send(self, rank: int, message: Message, blob: bytes = b"") -> None:
        if rank not in self.missing and not self.hosts[rank].has_ended:
            self.hosts[rank].from_head.append((message, blob))

    def send_all(self, message: Message, blob: bytes = b"") -> None:
        for rank in range(self.ranks):
            self.send(rank, message, blob)

    @property
    def is_complete(self) -> bool:
        """All ranks are members and have joined."""
        return not self.missing and not self.must_name and len(self.joined) == self.ranks

    def migrate(self, part: int, target: Placement, stage_copies: int | None = None) -> bool:
        stages = order_moves(self.placements[part], target, [0] * self.ranks, stage_copies=stage_copies)
        if not stages:
            return False
        generations = {host.rank: host.generation for host in self.hosts}
        self.migrations[part] = Migration(stages, generations, self.next_epochs[part])
        self.give(part, self.migrations[part].start())
        return True

    def give(self, part: int, orders: tuple[Order, ...]) -> None:
        migration = self.migrations[part]
        kinds = {
            Action.HOLD: m.HoldCopies,
            Action.RELEASE: m.ReleaseCopies,
            Action.WITHDRAW: m.WithdrawEpoch,
            Action.ADOPT: m.AdoptEpoch,
            Action.BURN: m.BurnEpoch,
        }
        for order in orders:
            if order.action is Action.PREPARE:
                self.send(order.rank, *encode_stage(part, order.epoch, migration.stage, step_bytes=15))
            else:
                self.send(order.rank, kinds[order.action](PARTS[part], order.epoch))

    def hear(self, host: Host) -> None:
        message, blob = host.to_head.popleft()
        rank, generation = host.rank, host.generation
        if (rank, generation) in self.dead:
            return
        match message:
            case m.GroupPrepared(membership=number):
                if self.named.number == number and not self.must_name:
                    self.prepared.add(rank)
                    if len(self.prepared) == len(self.named.living):
                        self.send_all(m.JoinGroup(number))
            case m.GroupJoined(membership=number):
                if self.named.number == number:
                    self.joined.add(rank)
                    self.rejoins += number > 1 and len(self.joined) == len(self.named.living)
            case m.AskWake():
                self.send_all(m.WakeGroup(message.membership, message.step))
            case m.SlotsCopied():
                life = self.named.members[message.place]
                if (life.rank, life.generation) not in self.dead and not self.is_new(life.rank):
                    self.send(message.place, m.SlotsCopied(message.part, message.epoch, message.place, 1, 10, 0), blob)
            case m.CopyFailed():
                part = PARTS.index(message.part)
                if self.migrations[part].epoch == message.epoch:
                    self.give(part, self.migrations[part].abort(message.why))
            case m.EpochReady() | m.EpochFlipped() | m.EpochWithdrawn() | m.EpochReclaimed():
                self.hear_epoch(PARTS.index(message.part), message, rank, generation)
        self.try_name()

    def is_new(self, rank: int) -> bool:
        """The rank has another life than the one that epochs were prepared with."""
        return self.must_name or rank not in self.joined

    def hear_epoch(self, part: int, message: Message, rank: int, generation: int) -> None:
        migration = self.migrations[part]
        word = type(message).__name__.removeprefix("Epoch").lower()
        is_open = migration.phase is not StagePhase.RECLAIM and migration.outcome is None
        is_new = migration.epoch == message.epoch and is_open
        withdrawing = migration.phase is StagePhase.WITHDRAWING
        self.give(part, getattr(migration, f"note_{word}")(rank, generation, message.epoch))
        others = [(host.rank, host.generation) for host in self.hosts if host.rank not in self.missing]
        if word == "flipped" and is_new:
            self.epochs[part] = message.epoch
            self.placements[part] = migration.placement
            self.flips += 1
            self.overtaken_withdrawals += withdrawing
            if self.bug == "goes on at the first flip":
                for said in ("flipped", "reclaimed"):
                    for other in others:
                        self.give(part, getattr(migration, f"note_{said}")(*other, message.epoch))
        if self.bug == "burns at the first word" and word == "withdrawn" and migration.blocks_membership:
            for other in others:
                self.give(part, migration.note_withdrawn(*other, message.epoch))
        self.next_epochs[part] = migration.next_epoch

    def tell_death(self) -> None:
        """The head has proof of a death."""
        rank = self.deaths_to_tell.popleft()
        generation = self.hosts[rank].generation
        self.missing.add(rank)
        self.dead.add((rank, generation))
        self.send_all(m.PeerDown(rank, generation))
        self.must_name = True
        for part, migration in enumerate(self.migrations):
            if migration is not None and migration.outcome is None:
                self.give(part, migration.note_down(rank, generation))
        self.try_name()

    def revive(self, rank: int) -> None:
        self.hosts[rank] = Host(self, rank, self.hosts[rank].generation + 1)
        self.missing.discard(rank)
        self.must_name = True
        self.try_name()

    def try_name(self) -> None:
        """Names the next membership, once nothing is open and every expert has a place."""
        if not self.must_name or any(x is not None and x.blocks_membership for x in self.migrations):
            return
        parts = []
        for part, migration in enumerate(self.migrations):
            running = migration is not None and migration.outcome is None
            base = self.placements[part]
            table = base.table.copy()
            busy: set[tuple[int, int]] = set()
            if running:
                busy = {copy.target for copy in migration.stage.copies} | set(migration.stage.released)
            for rank in range(self.ranks):
                if rank in self.missing and (table[rank] != EMPTY).any():
                    self.rows_at_loss[part, rank] = table[rank].tolist()
                    table[rank] = EMPTY
                elif rank not in self.missing and (part, rank) in self.rows_at_loss:
                    table[rank] = self.rows_at_loss[part, rank]
            for key in set(range(base.layers * base.experts)) - set(table.ravel().tolist()):
                room = [at for at in zip(*np.where(table == EMPTY), strict=True) if at[0] not in self.missing]
                room = [at for at in room if at not in busy]
                if not room:
                    return  # the group waits for the rank that is missing
                table[room[0]] = key
            parts.append(PartPlacement(self.epochs[part], Placement(base.layers, base.experts, table)))
        for (part, rank), _ in list(self.rows_at_loss.items()):
            if rank not in self.missing:
                del self.rows_at_loss[part, rank]
        members = [Member(host.rank, 0 if host.rank in self.missing else host.generation, "", 0) for host in self.hosts]
        number = 1 if self.named is None else self.named.number + 1
        self.named = Membership(number, tuple(members), (b"",) * self.ranks, tuple(parts))
        self.placements = [part.placement for part in parts]
        self.must_name, self.prepared, self.joined = False, set(), set()
        self.send_all(*encode_membership(self.named))

    # ------------------------------------------------------------ what may happen

    def act(self, faults: bool) -> bool:
        """One thing that may happen; False if there is none."""
        self.faults = faults
        if faults:
            self.disturb()
        choices = list(self.list_choices(faults))
        if not choices:
            return False
        # One rank is slow: what it should not do late has time to happen.
        brisk = [
            choice for choice in choices if not (len(choice) > 1 and getattr(choice[1], "rank", None) == self.slow)
        ]
        if brisk and self.chance.random() < 0.9:
            choices = brisk
        kind = self.chance.choice(sorted({name for name, *_ in choices}))
        name, *args = self.chance.choice([choice for choice in choices if choice[0] == kind])
        getattr(self, name)(*args)
        return True

    def list_choices(self, faults: bool) -> Iterator[tuple]:
        if self.deaths_to_tell:
            yield ("tell_death",)
        for host in self.hosts:
            if host.to_head and not host.has_ended:
                yield "hear", host
            if not self.is_up(host):
                continue
            device = host.device
            if host.from_head:
                yield "receive", host
            if host.facts or (host.rows and host.in_flight < 2):
                yield "turn", host
            if host.preparing:
                yield "prepare", host
            if device.can_begin():
                yield "begin", host
            if (device.queue and device.queue[0].agreed is not None) or device.tells_break:
                yield "await_step", host
            step = device.next
            if step is not None and step.at is not None:
                if self.seen_words(device) is not None:
                    yield "finish", host
                elif self.is_cut(device):
                    yield "lose", host
        for (source, order), state in self.copies.items():
            yield ("land", source, order) if state == "runs" else ("land_late", source, order)
        for rank in sorted(self.missing):
            yield "revive", rank

    def is_up(self, host: Host) -> bool:
        return not host.has_ended and host.rank not in self.missing and host.rank not in self.deaths_to_tell

    def disturb(self) -> None:
        chance, rates = self.chance, self.rates
        if chance.random() < rates["operate"]:
            part = chance.randrange(len(self.migrations))
            migration = self.migrations[part]
            if migration is not None and migration.outcome is None:
                roll = chance.random()
                act = migration.resume if migration.paused else migration.pause
                self.give(part, migration.abort("the operator said so") if roll < 0.3 else act())
        if chance.random() < rates["kill"] and not self.missing and not self.deaths_to_tell:
            self.kill(chance.randrange(self.ranks))
        if chance.random() < rates["rows"]:
            self.add_rows()

    def add_rows(self) -> None:
        hosts = [host for host in self.hosts if self.is_up(host) and host.rank in self.joined and not self.must_name]
        if hosts:
            self.chance.choice(hosts).rows += self.chance.randint(1, 5)

    def kill(self, victim: int) -> None:
        host = self.hosts[victim]
        host.to_head.clear()
        step = host.device.next
        if step is not None and step.at is not None:
            # Its last words, and what comes with them, reached some and not others.
            for other in range(self.ranks):
                if self.chance.random() < 0.5:
                    self.hidden.add((step.at, victim, other))
        for source, order in [key for key in self.copies if victim in (key[0], key[1].rank)]:
            if self.copies.pop((source, order)) == "runs" and source != victim:
                self.hosts[source].facts.append(("on_copy_failed", order, "its peer died", {"never_ran": False}))
        self.deaths_to_tell.append(victim)

    # ------------------------------------------------------------ ranks

    def receive(self, host: Host) -> None:
        message, blob = host.from_head.popleft()
        host.facts.append(("on_head", message, memoryview(blob)))

    def turn(self, host: Host) -> None:
        was_parked = host.side._parking.is_parked
        host.turn()
        self.parks += host.side._parking.is_parked and not was_parked

    def prepare(self, host: Host) -> None:
        membership = host.preparing.popleft()
        if not host.preparing:  # a newer one replaces those before
            host.device.prepare(membership)
            host.facts.append(("on_prepared", membership.number))

    def await_step(self, host: Host) -> None:
        host.await_step()

    # ------------------------------------------------------------ steps

    def begin(self, host: Host) -> None:
        host.device.begin()

    def note_begin(self, device: Device, step: Step, words: Words) -> None:
        if self.bug == "flips one rank early" and device.rank == 0:
            step.active = tuple(max(a, r) for a, r in zip(step.active, device.ready, strict=True))
        self.words.setdefault(step.at, {})[device.rank] = words
        agreed = self.epochs_of_step.setdefault(step.at, step.active)
        assert agreed == step.active, f"step {step.at} runs under epochs {agreed} and {step.active}"
        self.check_weights(device, step.active)

    def check_weights(self, device: Device, active: tuple[int, ...]) -> None:
        for part, epoch in enumerate(active):
            table = device.tables[part][epoch].table[device.rank].tolist()
            for slot, key in enumerate(table):
                held = device.slots[part][slot]
                assert key in (EMPTY, held), f"epoch {epoch} wants {key} in {device.rank, slot}, which has {held}"

    def seen_words(self, device: Device) -> list[Words] | None:
        at = device.next.at
        said = self.words.get(at, {})
        members = [device.members.members[place].rank for place in device.members.living]
        if any(rank not in said or (at, rank, device.rank) in self.hidden for rank in members):
            return None
        return [said[rank] for rank in members]

    def is_cut(self, device: Device) -> bool:
        """A member of its group has died, or left for another membership."""
        for place in device.members.living:
            member = device.members.members[place]
            host = self.hosts[member.rank]
            left = host.device.members is not None and host.device.members.number > device.members.number
            if host.generation != member.generation or not self.is_up(host) or left:
                return True
        return False

    def finish(self, host: Host) -> None:
        host.device.finish(self.seen_words(host.device))

    def lose(self, host: Host) -> None:
        self.breaks += 1
        host.device.lose()

    # ------------------------------------------------------------ copies

    def start_copy(self, host: Host, order: StartCopy) -> None:
        source, target = host.device, self.hosts[order.rank].device
        # Bytes to a life that is over go nowhere; its sender will hear so.
        if target.generation != order.generation or not self.is_up(self.hosts[order.rank]):
            host.facts.append(("on_copy_failed", order, "it is gone", {"never_ran": True}))
            return
        steps = {step.active[order.part] for step in target.queue if step.active}
        for epoch in steps | {target.active[order.part]}:
            live = int(target.tables[order.part][epoch].table[order.rank, order.remote_slot])
            assert live == EMPTY, f"a copy into {order.rank, order.remote_slot} while epoch {epoch} has {live} there"
        assert source.slots[order.part][order.slot] >= 0
        to = (order.rank, order.part, order.remote_slot)
        assert to not in [(x.rank, x.part, x.remote_slot) for _, x in self.copies], f"two copies into {to}"
        target.slots[order.part][order.remote_slot] = TORN
        self.copies[host.rank, order] = "runs"

    def land(self, source: int, order: StartCopy) -> None:
        host, target = self.hosts[source], self.hosts[order.rank].device
        is_whole = not self.missing and not self.deaths_to_tell
        if self.faults and is_whole and self.chance.random() < self.rates["fail"]:
            self.rates["fail"] = 0.0
            self.copies[source, order] = "late"
            host.facts.append(("on_copy_failed", order, "the wire failed", {"never_ran": False}))
            return
        del self.copies[source, order]
        self.write(target, order, host.device.slots[order.part][order.slot])
        self.copied += 1
        host.facts.append(("on_copy_done", order, 10, {"transfer_us": 5}))

    def write(self, target: Device, order: StartCopy, key: int) -> None:
        """Into a slot that a copy was begun into. One that was given up meanwhile is empty whatever it has, one that is
        used for something else is spoilt."""
        slots, slot = target.slots[order.part], order.remote_slot
        if slots[slot] != EMPTY:
            slots[slot] = key if slots[slot] == TORN else TORN

    def land_late(self, source: int, order: StartCopy) -> None:
        """Bytes of a copy that failed may land again and again."""
        target = self.hosts[order.rank].device
        self.write(target, order, TORN)
        # Only a death makes sure that there are no more of them: the head ends the target once that is all there is.
        migration = self.migrations[order.part]
        if migration.phase is StagePhase.DRAINING and self.chance.random() < 0.2 and not self.deaths_to_tell:
            self.kill(order.rank)

    # ------------------------------------------------------------ ends

    def note_end(self, host: Host) -> None:
        self.ends.append((host.side.membership.number, host.side._next_step - 1))

    def is_at_rest(self) -> bool:
        """All rows are computed, all migrations over, all ranks in one membership, and parked at one step."""
        sides = [host.side for host in self.hosts]
        over = all(x is None or x.outcome is not None for x in self.migrations)
        parked = all(
            side._parking.is_parked and not host.in_flight for side, host in zip(sides, self.hosts, strict=True)
        )
        return over and parked and self.is_complete and len({side._parking._park for side in sides}) == 1

    def settle(self, acts: int = 30_000) -> None:
        """Without faults, until nothing can happen any more: then everything is done, and all are parked alike."""
        for part, migration in enumerate(self.migrations):
            if migration is not None:
                self.give(part, migration.resume())
        for _ in range(acts):
            if not self.act(faults=False):
                break
        else:
            raise AssertionError("it does not come to rest")
        assert self.is_at_rest(), "it came to rest too early: somebody waits for what never comes"
        for host in self.hosts:
            assert host.rows == 0 and host.ran_rows == host.step

    def drain(self) -> None:
        """All ranks are told to drain, one of them with rows left, and all end after the same step."""
        self.chance.choice(self.hosts).rows = 5
        self.send_all(m.Drain())
        for _ in range(3000):
            if not self.act(faults=False):
                break
        assert len(self.ends) == self.ranks and len(set(self.ends)) == 1, f"ranks end after steps {self.ends}"
