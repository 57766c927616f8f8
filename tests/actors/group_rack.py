"""GroupRack: a Rack whose decode ranks (or prefill ranks, too) are a group on MeshDevices, under a head for groups.

The head here is the test's, as in Rack: it names memberships, wakes, and drives one Migration of each part.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import trio

from engine.config import Limits, RankConfig
from engine.core.epochs import Action
from engine.core.group import Membership, PartPlacement, encode_membership, encode_stage
from engine.core.migrate import Migration, Order
from engine.core.moves import order_moves
from engine.core.pact import PARTS
from engine.core.placement import EMPTY, Placement
from tests.actors.mesh_device import SLOT_BYTES, Mesh, MeshDevice
from tests.actors.rack import LIMITS, Rack, Rank
from transport import messages as m
from transport.messages import Member, Message, PartInfo

KINDS: dict[Action, type[Message]] = {
    Action.HOLD: m.HoldCopies,
    Action.RELEASE: m.ReleaseCopies,
    Action.WITHDRAW: m.WithdrawEpoch,
    Action.ADOPT: m.AdoptEpoch,
    Action.BURN: m.BurnEpoch,
}


async def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Looks every 10 ms of virtual time."""
    with trio.fail_after(seconds):
        while True:
            if holds():
                return
            await trio.sleep(0.01)


class Keeper:
    """The head's part in one group."""

    def __init__(self, rack: GroupRack, ranks: list[int], placements: list[Placement]) -> None:
        self.rack, self.ranks = rack, ranks
        self.mesh = Mesh()
        self.placements = placements
        self.epochs = [0] * len(placements)
        self.next_epochs = [1] * len(placements)
        self.migrations: list[Migration | None] = [None] * len(placements)
        self.descriptions: dict[int, bytes] = {}
        self.rows_at_loss: dict[tuple[int, int], list[int]] = {}
        self.named: Membership | None = None
        self.prepared: set[int] = set()
        self.joined: set[int] = set()
        self.must_name = True
        self.wakes = 0
        self.accused: list[m.PeerAccused] = []
        self.loads: list[m.ExpertLoads] = []
        self.failed_copies: list[m.CopyFailed] = []

    def infos(self) -> list[PartInfo]:
        parts = enumerate(self.placements)
        return [PartInfo(PARTS[at], part.layers, part.experts, part.slots, SLOT_BYTES) for at, part in parts]

    def living(self) -> list[Rank]:
        return [self.rack.ranks[rank] for rank in self.ranks if self.rack.ranks[rank].is_up]

    def tell(self, message: Message, blob: bytes = b"") -> None:
        for rank in self.living():
            self.rack._post(rank, message, blob)

    @property
    def is_whole(self) -> bool:
        return not self.must_name and self.joined == set(self.ranks)

    async def wait_whole(self, seconds: float = 30.0) -> None:
        await wait_until(lambda: self.is_whole, seconds)

    async def wait_parked(self, seconds: float = 30.0) -> None:
        """Until no device has a step, which all have stopped at."""
        await wait_until(lambda: self.is_whole and not any(rank.device.steps for rank in self.living()), seconds)

    # ------------------------------------------------------------ migrations

    def migrate(self, part: int, target: Placement, step_bytes: int = SLOT_BYTES) -> Migration:
        stages = order_moves(self.placements[part], target, [0] * len(self.ranks))
        generations = {place: self.rack.ranks[rank].generation for place, rank in enumerate(self.ranks)}
        migration = self.migrations[part] = Migration(stages, generations, self.next_epochs[part])
        self.step_bytes = step_bytes
        self.give(part, migration.start())
        return migration

    def give(self, part: int, orders: tuple[Order, ...]) -> None:
        for order in orders:
            rank = self.rack.ranks[self.ranks[order.rank]]
            if order.action is Action.PREPARE:
                stage = self.migrations[part].stage  # type: ignore[union-attr]
                self.rack._post(rank, *encode_stage(part, order.epoch, stage, self.step_bytes))
            else:
                self.rack._post(rank, KINDS[order.action](PARTS[part], order.epoch))

    async def wait_over(self, part: int, seconds: float = 30.0) -> Migration:
        migration = self.migrations[part]
        assert migration is not None
        await wait_until(lambda: migration.outcome is not None, seconds)
        return migration

    # ------------------------------------------------------------ words

    def hear(self, rank: Rank, message: Message, blob: memoryview) -> None:
        place = self.ranks.index(rank.rank)
        match message:
            case m.RankReady():
                assert message.mesh_address and list(message.parts) == self.infos()
                self.descriptions[rank.rank] = bytes(blob)
                self.must_name = True
            case m.GroupPrepared(membership=number):
                if self.named is not None and number == self.named.number and not self.must_name:
                    self.prepared.add(rank.rank)
                    if len(self.prepared) == len(self.named.living):
                        self.tell(m.JoinGroup(number))
            case m.GroupJoined(membership=number):
                if self.named is not None and number == self.named.number:
                    self.joined.add(rank.rank)
            case m.AskWake():
                self.wakes += 1
                self.tell(m.WakeGroup(message.membership, message.step))
            case m.PeerAccused():
                self.accused.append(message)
            case m.ExpertLoads():
                self.loads.append(message)
            case m.SlotsCopied():
                target = self.rack.ranks[self.ranks[message.place]]
                if target.is_up and target.rank in self.joined:
                    self.rack._post(target, m.SlotsCopied(message.part, message.epoch, message.place, 1, 1, 0), blob)
            case m.CopyFailed():
                self.failed_copies.append(message)
                part = PARTS.index(message.part)
                self.give(part, self.migrations[part].abort(message.why))  # type: ignore[union-attr]
            case m.EpochReady() | m.EpochFlipped() | m.EpochWithdrawn() | m.EpochReclaimed():
                self.hear_epoch(message, place, rank.generation)
        self.try_name()

    def hear_epoch(self, message: Any, place: int, generation: int) -> None:
        part, word = PARTS.index(message.part), type(message).__name__.removeprefix("Epoch").lower()
        migration = self.migrations[part]
        assert migration is not None
        if word == "flipped" and migration.epoch == message.epoch and migration.outcome is None:
            self.epochs[part] = message.epoch
            self.placements[part] = migration.stage.after
        self.give(part, getattr(migration, f"note_{word}")(place, generation, message.epoch))
        self.next_epochs[part] = migration.next_epoch

    def on_down(self, rank: Rank) -> None:
        self.descriptions.pop(rank.rank, None)
        self.must_name = True
        for part, migration in enumerate(self.migrations):
            if migration is not None and migration.outcome is None:
                self.give(part, migration.note_down(self.ranks.index(rank.rank), rank.generation))
        self.try_name()

    def try_name(self) -> None:
        up = set(self.descriptions)
        first = self.named is None and len(up) < len(self.ranks)
        if not self.must_name or first or any(x is not None and x.blocks_membership for x in self.migrations):
            return
        parts = []
        for part, base in enumerate(self.placements):
            table = base.table.copy()
            for place, rank in enumerate(self.ranks):
                if rank not in up and (table[place] != EMPTY).any():
                    self.rows_at_loss[part, place] = table[place].tolist()
                    table[place] = EMPTY
                elif rank in up and (part, place) in self.rows_at_loss:
                    table[place] = self.rows_at_loss.pop((part, place))
            migration, busy = self.migrations[part], set()
            if migration is not None and migration.outcome is None:
                busy = {copy.target for copy in migration.stage.copies} | set(migration.stage.released)
            for key in sorted(set(range(base.layers * base.experts)) - set(table.ravel().tolist())):
                room = [at for at in zip(*np.where(table == EMPTY), strict=True) if self.ranks[at[0]] in up]
                room = [at for at in room if at not in busy]
                if not room:
                    return
                table[room[0]] = key
            parts.append(PartPlacement(self.epochs[part], Placement(base.layers, base.experts, table)))
        members, descriptions = [], []
        for rank in self.ranks:
            description = self.descriptions.get(rank, b"")
            life = self.rack.ranks[rank].generation if rank in up else 0
            members.append(Member(rank, life, f"mesh-{rank}-{life}" if life else "", len(description)))
            descriptions.append(description)
        number = 1 if self.named is None else self.named.number + 1
        self.named = Membership(number, tuple(members), tuple(descriptions), tuple(parts))
        self.placements = [part.placement for part in parts]
        self.must_name, self.prepared, self.joined = False, set(), set()
        self.tell(*encode_membership(self.named))


class GroupRack(Rack):
    """The decode ranks are a group with the placements `decode`, one for each part; the prefill ranks if `prefill`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        seed: int,
        decode: list[Placement],
        prefill: list[Placement] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        num_prefill = prefill[0].ranks if prefill else 1
        super().__init__(
            nursery, random.Random(seed), num_prefill=num_prefill, num_decode=decode[0].ranks, limits=limits
        )
        self.decode = Keeper(self, [*range(num_prefill, num_prefill + decode[0].ranks)], decode)
        self.keepers = [self.decode]
        if prefill:
            self.keepers.append(Keeper(self, [*range(num_prefill)], prefill))
        plain = self.make_device

        def make(rank: int) -> Any:
            keeper = self.keeper_of(rank)
            if keeper is None:
                return plain(rank)
            return MeshDevice(keeper.mesh, nursery, rank, self.ranks[rank].generation, keeper.infos())

        self.make_device = make

    def keeper_of(self, rank: int) -> Keeper | None:
        return next((keeper for keeper in self.keepers if rank in keeper.ranks), None)

    def _config(self, rank: Rank) -> RankConfig:
        keeper = self.keeper_of(rank.rank)
        config = super()._config(rank)
        return config if keeper is None else dataclasses.replace(config, group=len(keeper.ranks))

    def _on_message(self, rank: Rank, message: Message, blob: memoryview) -> None:
        super()._on_message(rank, message, blob)
        keeper = self.keeper_of(rank.rank)
        if keeper is not None:
            keeper.hear(rank, message, blob)

    async def kill(self, rank: Rank) -> None:
        keeper = self.keeper_of(rank.rank)
        if keeper is not None:
            keeper.descriptions.pop(rank.rank, None)
        await super().kill(rank)
        if keeper is not None:
            keeper.on_down(rank)

    async def drain_all(self) -> None:
        """Each pool is told at once: ranks of a group end together."""
        for role in ("prefill", "decode"):
            pool = [rank for rank in self.ranks.values() if rank.role == role and rank.is_up]
            for rank in pool:
                self._post(rank, m.Drain())
            for rank in pool:
                with trio.fail_after(30):
                    await rank.ended.wait()
