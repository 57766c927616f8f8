"""Group: one group of ranks as the head talks to it. Words of its ranks in, orders to them out; no method waits.

What is decided stands in `core.membership` (who steps together), `core.parts` and `core.migrate` (which expert is
where). This file carries it: places to ranks, orders to messages, and the one rule between the two: a membership is
named only when the fate of every epoch is known, and no migration begins while one is being joined.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

import numpy as np
import trio

from engine.core.group import PartPlacement, encode_membership, unpack_slots
from engine.core.load import Loads
from engine.core.membership import Chair, JoinMembers, NameMembers, Roster, RosterOrder, RosterPhase, ServeMembers
from engine.core.migrate import Order
from engine.core.orders import WORDS, encode_orders
from engine.core.parts import MadePlan, MoveRefused, PartBalance, PartRules
from engine.errors import RemoteProtocolError
from engine.log import log_event
from transport.messages import (
    AskWake,
    CopyFailed,
    EpochFlipped,
    EpochReady,
    EpochReclaimed,
    EpochWithdrawn,
    ExpertLoads,
    GroupJoined,
    GroupPrepared,
    JoinGroup,
    Message,
    PeerAccused,
    RankReady,
    Role,
    SlotsCopied,
    WakeGroup,
)
from transport.wire import Frame

logger = logging.getLogger("engine.balancer")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """A living rank of a group, as the supervisor gives it.

    Attributes:
        tell: queues a message with its blob.
        end: ends this life of it, for the reason given.
        serve: requests may go there from now on.
    """

    generation: int
    tell: Callable[[Message, bytes], None]
    end: Callable[[str], None]
    serve: Callable[[], None]


class Group:
    """See the module.

    Args:
        pool, number: which group; ranks: of its places.
        rules, step_bytes: per part, in the order of `pact.PARTS`: see `PartRules`; what a source may send in a step.

    Attributes:
        parts: empty until the first rank is ready.
        named_at: when the last membership was named, or its last news came.
    """

    def __init__(
        self, pool: Role, number: int, ranks: tuple[int, ...], rules: tuple[PartRules, ...], step_bytes: tuple[int, ...]
    ) -> None:
        self.pool, self.number, self.ranks = pool, number, ranks
        self.roster = Roster(ranks)
        self.parts: tuple[PartBalance, ...] = ()
        self.named_at = 0.0
        self.is_stopping = False
        self._rules, self._step_bytes = rules, step_bytes
        self._wires: dict[int, Wire] = {}

    @property
    def name(self) -> str:
        return f"{self.pool} group {self.number}"

    # ------------------------------------------------------------ what happens to its ranks

    def rank_ready(self, ready: RankReady, description: bytes, wire: Wire) -> None:
        """Raises RemoteProtocolError if the rank does not fit the others."""
        place = self.ranks.index(ready.rank)
        self.roster.note_ready(place, Chair(wire.generation, ready.mesh_address, description), ready.parts)
        self._wires[place] = wire
        if not self.parts:
            now = trio.current_time()
            rules = zip(ready.parts, self._rules, strict=False)
            self.parts = tuple(
                PartBalance(index, info, rule, len(self.ranks), now) for index, (info, rule) in enumerate(rules)
            )
        self._settle()

    def rank_down(self, rank: int, generation: int) -> None:
        """Its death is certain. Lives that never were ready change nothing."""
        place = self.ranks.index(rank)
        wire = self._wires.get(place)
        if wire is None or wire.generation != generation:
            return
        del self._wires[place]
        was = self.roster.phase
        self.roster.note_down(place, generation)
        if self.roster.phase is RosterPhase.BROKEN and was is not RosterPhase.BROKEN and not self.is_stopping:
            log_event(
                logger, "warning", "group.broken", pool=self.pool, group=self.number, rank=rank,
                membership=self.roster.number, msg=f"{self.name} lost rank {rank}",
            )  # fmt: skip
        for part in self.parts:
            self._follow(part, lambda part=part: part.note_down(place, generation, trio.current_time()))  # type: ignore[misc]
        self._settle()

    def rank_frames(self, rank: int, frames: Iterable[Frame]) -> None:
        """Applies what a ready rank said; only GROUP_WORDS come here.

        Raises:
            RemoteProtocolError: it broke the protocol; its process should be ended.
        """
        place = self.ranks.index(rank)
        for frame in frames:
            self._take(place, self._wires[place].generation, frame.message, frame.blob)
        self._settle()

    def stop(self) -> None:
        """The head ends: no membership is named any more."""
        self.is_stopping = True

    # ------------------------------------------------------------ words

    def _take(self, place: int, generation: int, message: Message, blob: bytes | memoryview) -> None:
        match message:
            case GroupPrepared(membership=number):
                self._carry(self.roster.note_prepared(place, generation, number))
            case GroupJoined(membership=number):
                self._carry(self.roster.note_joined(place, generation, number))
            case AskWake(membership=number, step=step):
                if number > self.roster.number:
                    raise RemoteProtocolError(f"wants membership {number} woken, the last is {self.roster.number}")
                self._tell_all(WakeGroup(number, step))
            case PeerAccused():
                self._accuse(place, message)
            case ExpertLoads():
                self._count(place, message, blob)
            case SlotsCopied():
                self._pass_copied(place, message, blob)
            case CopyFailed(part=name, epoch=epoch, why=why):
                part = self._find(name)
                if part.migration is not None and part.migration.epoch == epoch:
                    reason = f"rank {self.ranks[place]} can not copy: {why}"
                    self._follow(part, lambda: part.abort(reason, trio.current_time()))
            case EpochReady() | EpochFlipped() | EpochWithdrawn() | EpochReclaimed():
                part, word = self._find(message.part), WORDS[type(message)]
                epoch = message.epoch
                self._follow(part, lambda: part.hear(word, place, generation, epoch, trio.current_time()))
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for the keeper of a group")

    def _find(self, name: str) -> PartBalance:
        for part in self.parts:
            if part.info.name == name:
                return part
        raise RemoteProtocolError(f"speaks of part {name}, which this model does not have")

    def _accuse(self, place: int, message: PeerAccused) -> None:
        accused = self.roster.accuse(message.rank, message.generation, message.membership)
        if accused is not None and not self.is_stopping:
            self._wires[accused].end(
                f"did not answer rank {self.ranks[place]} in step {message.step} of membership {message.membership}: "
                f"{message.why}"
            )

    def _count(self, place: int, message: ExpertLoads, blob: bytes | memoryview) -> None:
        counts = np.frombuffer(blob, "<i4").reshape(message.layers, message.experts).astype(np.int64)
        try:
            members = len(self.roster.running) or 1
            loads = Loads(counts, message.steps)
            self._find(message.part).add_loads(place, loads, message.pairs, message.expert_us, members)
        except ValueError as error:
            raise RemoteProtocolError(f"its loads are none: {error}") from None

    def _pass_copied(self, place: int, message: SlotsCopied, blob: bytes | memoryview) -> None:
        part, now = self._find(message.part), trio.current_time()
        slots = unpack_slots(memoryview(blob))
        if not part.note_copied(place, message.place, slots, message.epoch, message.transfer_us, now):
            return
        target = self._wires.get(message.place)
        if target is not None:
            told = SlotsCopied(message.part, message.epoch, message.place, message.count, message.num_bytes, 0)
            target.tell(told, bytes(blob))

    # ------------------------------------------------------------ acts on a part

    def check_complete(self) -> None:
        """Raises MoveRefused unless all ranks step together."""
        if self.is_stopping:
            raise MoveRefused("the engine is shutting down")
        roster = self.roster
        if roster.phase is not RosterPhase.FORMING and roster.missing:
            who = ", ".join(str(rank) for rank in roster.missing)
            raise MoveRefused(f"rank {who} is missing in {self.name}: nothing is moved meanwhile")
        if not roster.is_complete:
            raise MoveRefused(f"{self.name} is not stepping together yet ({roster.phase.value})")

    def begin(self, part: PartBalance, made: MadePlan, by: str, reason: str) -> None:
        """Begins to carry out a plan that was chosen in this very turn of the loop."""
        self.check_complete()
        generations, now = self.roster.generations, trio.current_time()
        self._follow(part, lambda: part.begin(made, generations, by, reason, now))

    def pause(self, part: PartBalance) -> None:
        self._follow(part, part.pause)

    def resume(self, part: PartBalance) -> None:
        self._follow(part, lambda: part.resume(trio.current_time()))

    def abort(self, part: PartBalance, reason: str) -> None:
        self._follow(part, lambda: part.abort(reason, trio.current_time()))
        self._settle()

    def fence(self, part: PartBalance) -> None:
        """A burned epoch does not get empty: some copy neither ends nor fails. Only the death of its writer makes sure
        that it writes no more, and nothing can be moved before."""
        if part.migration is not None and self.roster.is_complete and not self.is_stopping:
            for place in part.migration.late_to_empty:
                self._wires[place].end(
                    f"its copies of epoch {part.migration.epoch} of part {part.info.name} neither end nor fail"
                )

    # ------------------------------------------------------------ orders

    def _follow(self, part: PartBalance, act: Callable[[], list[Order]]) -> None:
        """Lets something happen to a part's migration, sends what that orders, and says what has changed."""
        migration, epoch, was_planned = part.migration, part.epoch, part.is_planned
        orders = act()
        stage = None if part.migration is None else part.migration.stage
        for said in encode_orders(part.part, orders, stage, self._step_bytes[part.part]):
            self._tell(*said)
        fields = {"pool": self.pool, "group": self.number, "part": part.info.name}
        if part.epoch != epoch:
            log_event(logger, "info", "rebalance.flip", **fields, epoch=part.epoch, by=part.runner)
        if migration is not None and part.migration is None and was_planned:
            entry = part.ledger.last
            assert entry is not None
            event = {"applied": "rebalance.done", "rolled_back": "rebalance.rollback"}.get(entry.result)
            log_event(
                logger, "info" if event else "warning", event or "rebalance.abort", **fields, plan=entry.plan,
                by=entry.by, slots=entry.moved_slots, bytes=entry.moved_bytes,
                took_s=entry.ended_at - entry.started_at, msg=entry.reason,
            )  # fmt: skip

    def _settle(self) -> None:
        """Names the next membership if one is needed and may be. With all ranks back, what was taken over for a lost
        one is given back."""
        blocked = self.is_stopping or any(part.blocks_membership for part in self.parts)
        self._carry(self.roster.advance(self._place, blocked))
        if self.roster.is_complete and not self.is_stopping:
            generations = self.roster.generations
            for part in self.parts:
                self._follow(part, lambda part=part: part.give_back(generations, trio.current_time()))  # type: ignore[misc]

    def _place(self, living: frozenset[int]) -> tuple[PartPlacement, ...] | str:
        seats = []
        for part in self.parts:
            seat = part.seat(living)
            if isinstance(seat, int):
                who = ", ".join(str(rank) for place, rank in enumerate(self.ranks) if place not in living)
                return f"{seat} experts of part {part.info.name} find no empty slot without rank {who}"
            seats.append(seat)
        return tuple(seats)

    def _carry(self, orders: Iterable[RosterOrder]) -> None:
        for order in orders:
            self.named_at = trio.current_time()
            match order:
                case NameMembers(membership=membership):
                    for part, seat in zip(self.parts, membership.parts, strict=True):
                        part.take_seat(seat.placement, frozenset(membership.living))
                    message, blob = encode_membership(membership)
                    for place in membership.living:
                        self._tell(place, message, blob)
                    ranks = [self.ranks[place] for place in membership.living]
                    log_event(
                        logger, "info", "group.named", pool=self.pool, group=self.number,
                        membership=membership.number, ranks=ranks,
                    )  # fmt: skip
                case JoinMembers(number=number, places=places):
                    for place in places:
                        self._tell(place, JoinGroup(number))
                case ServeMembers(number=number, places=places):
                    log_event(
                        logger, "info", "group.joined", pool=self.pool, group=self.number, membership=number
                    )  # fmt: skip
                    for place in places:
                        self._wires[place].serve()

    def _tell(self, place: int, message: Message, blob: bytes = b"") -> None:
        wire = self._wires.get(place)
        if wire is not None:
            wire.tell(message, blob)

    def _tell_all(self, message: Message) -> None:
        for place in sorted(self._wires):
            self._tell(place, message)
