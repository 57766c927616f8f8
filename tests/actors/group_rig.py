"""A Balancer with scripted ranks: they speak the real messages, hold real slots, and keep silent where a test says so.

No streams and no processes: what the head tells a rank is in its inbox, and `Rig.pump` lets everybody speak until all
are silent. Virtual time comes from the test's clock.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import trio

from engine.actors.balancer import BalanceLimits, Balancer
from engine.actors.group import Group, Wire
from engine.config import ExpertsConfig, PoolConfig
from engine.core.group import EpochStage, Membership, decode_membership, decode_stage, pack_slots, unpack_slots
from engine.core.pact import PARTS
from engine.core.parts import PartBalance
from engine.core.placement import EMPTY
from engine.core.planning import PlannedMoves, PlanRequest, plan_moves
from engine.errors import EngineError
from transport.messages import (
    AdoptEpoch,
    BurnEpoch,
    EpochFlipped,
    EpochReady,
    EpochReclaimed,
    EpochWithdrawn,
    ExpertLoads,
    GroupJoined,
    GroupPrepared,
    HoldCopies,
    JoinGroup,
    Message,
    NameGroup,
    PartInfo,
    PrepareEpoch,
    RankReady,
    Rebalance,
    RebalanceAnswer,
    Refused,
    ReleaseCopies,
    SlotsCopied,
    WakeGroup,
    WithdrawEpoch,
)
from transport.wire import Frame

LAYERS, EXPERTS, SLOTS, SLOT_BYTES = 2, 6, 8, 1000
TORN = -7


@dataclasses.dataclass(eq=False)
class Epoch:
    """A rank's view of one part."""

    active: int = 0
    stage: EpochStage | None = None
    ready: bool = False
    declined: bool = False
    missing: set[int] = dataclasses.field(default_factory=set)
    held: bool = False


class ScriptedRank:
    """One life. `holds`: words that it keeps to itself, by name: prepared, joined, copied, ready, flipped, withdrawn,
    reclaimed."""

    def __init__(self, rig: Rig, place: int, generation: int) -> None:
        self.rig, self.place, self.rank, self.generation = rig, place, rig.ranks[place], generation
        self.inbox: collections.deque[tuple[Message, bytes]] = collections.deque()
        self.log: list[Message] = []
        self.holds: set[str] = set()
        self.kept: list[tuple[str, Message, bytes]] = []
        self.slots = [[EMPTY] * info.slots for info in rig.infos]
        self.parts = [Epoch() for _ in rig.infos]
        self.named: Membership | None = None
        self.joined: Membership | None = None
        self.ended: list[str] = []
        self.serves = False
        self.is_alive = True

    def wire(self) -> Wire:
        return Wire(self.generation, lambda m, b: self.inbox.append((m, b)), self.ended.append, self.serve)

    def serve(self) -> None:
        assert not self.serves
        self.serves = True

    def say(self, word: str, message: Message, blob: bytes = b"") -> None:
        if word in self.holds:
            self.kept.append((word, message, blob))
        else:
            self.rig.words.append((self, message, blob))

    def release(self, *words: str) -> None:
        """Says what it kept."""
        self.holds -= set(words)
        kept, self.kept = self.kept, []
        for word, message, blob in kept:
            self.say(word, message, blob)
        for info in self.rig.infos:
            self._become_ready(info.name)

    def lose_peer(self) -> None:
        """The group is broken: whoever is not ready will not be."""
        for state in self.parts:
            state.declined = not state.ready

    def take(self, message: Message, blob: bytes) -> None:
        self.log.append(message)
        match message:
            case NameGroup():
                self.named = decode_membership(message, memoryview(blob))
                for index, part in enumerate(self.named.parts):
                    for slot, key in enumerate(part.placement.table[self.place].tolist()):
                        if key != EMPTY:
                            assert self.slots[index][slot] in (EMPTY, key), "a slot that is in use would be loaded"
                            self.slots[index][slot] = key
                self.say("prepared", GroupPrepared(self.rank, self.generation, self.named.number))
            case JoinGroup(membership=number):
                assert self.named is not None and number == self.named.number
                self.joined = self.named
                for state, part in zip(self.parts, self.named.parts, strict=True):
                    assert state.active in (0, part.epoch), "a membership begins with another epoch than was in force"
                    state.active = part.epoch
                self.say("joined", GroupJoined(self.rank, self.generation, number))
            case PrepareEpoch(part=name):
                stage = decode_stage(message, memoryview(blob))
                state = self.parts[PARTS.index(name)]
                state.stage, state.ready, state.held, state.declined = stage, False, False, False
                state.missing = {copy.target[1] for copy in stage.copies if copy.target[0] == self.place}
                for slot in state.missing:
                    assert self.slots[PARTS.index(name)][slot] == EMPTY, "a copy into a slot that is in use"
                    self.slots[PARTS.index(name)][slot] = TORN
                self._send_copies(name)
                self._become_ready(name)
            case HoldCopies(part=name):
                self.parts[PARTS.index(name)].held = True
            case ReleaseCopies(part=name):
                self.parts[PARTS.index(name)].held = False
            case SlotsCopied(part=name):
                state = self.parts[PARTS.index(name)]
                assert message.place == self.place and state.stage is not None and message.epoch == state.stage.epoch
                for slot in unpack_slots(memoryview(blob)):
                    self.slots[PARTS.index(name)][slot] = int(state.stage.after.table[self.place, slot])
                    state.missing.remove(slot)
                self._become_ready(name)
            case WithdrawEpoch(part=name, epoch=epoch):
                state = self.parts[PARTS.index(name)]
                if state.active < epoch:
                    state.ready, state.declined = False, True
                    self.say("withdrawn", EpochWithdrawn(name, epoch))
            case AdoptEpoch(part=name, epoch=epoch):
                self.flip(name, epoch)
            case BurnEpoch(part=name, epoch=epoch):
                state = self.parts[PARTS.index(name)]
                assert state.stage is not None and state.active < epoch and not state.ready
                for copy in state.stage.copies:
                    if copy.target[0] == self.place:
                        self.slots[PARTS.index(name)][copy.target[1]] = EMPTY
                state.stage = None
                self.say("reclaimed", EpochReclaimed(name, epoch))
            case WakeGroup():
                pass
            case _:
                raise AssertionError(f"the head sent {message}")

    def _send_copies(self, name: str) -> None:
        stage = self.parts[PARTS.index(name)].stage
        assert stage is not None
        for copy in stage.copies:
            if copy.source[0] == self.place:
                key = copy.layer * EXPERTS + copy.expert
                assert self.slots[PARTS.index(name)][copy.source[1]] == key, "the source does not hold what it copies"
                place, slot = copy.target
                self.say("copied", SlotsCopied(name, stage.epoch, place, 1, SLOT_BYTES, 5), pack_slots([slot]))

    def _become_ready(self, name: str) -> None:
        state = self.parts[PARTS.index(name)]
        if "ready" in self.holds or state.declined or state.ready:
            return
        if state.stage is not None and not state.missing:
            state.ready = True
            self.say("ready", EpochReady(name, state.stage.epoch))

    def flip(self, name: str, epoch: int) -> None:
        state = self.parts[PARTS.index(name)]
        if state.active >= epoch:
            return
        assert state.stage is not None and state.stage.epoch == epoch and not state.missing
        state.active = epoch
        self.say("flipped", EpochFlipped(name, epoch, 1, 1))
        for place, slot in state.stage.released:
            if place == self.place:
                self.slots[PARTS.index(name)][slot] = EMPTY
        state.stage, state.ready = None, False
        self.say("reclaimed", EpochReclaimed(name, epoch))


class Rig:
    """A balancer, one group of decode ranks, and time."""

    def __init__(
        self, *, ranks: int = 3, drafter: bool = False, slots: int = SLOTS, limits: BalanceLimits | None = None,
        **experts: object,
    ) -> None:  # fmt: skip
        self.ranks = tuple(range(1, ranks + 1))
        self.infos = (PartInfo("main", LAYERS, EXPERTS, slots, SLOT_BYTES),)
        if drafter:
            self.infos += (PartInfo("draft", LAYERS, EXPERTS, slots, SLOT_BYTES),)
        values: dict = {"spare_slots": 2, "link_bytes_per_s": 1 << 30, **experts}
        self.config = ExpertsConfig(**values)
        self.limits = limits or BalanceLimits(balance_s=60.0, plan_age_s=60.0)
        self.plan_takes_s = 0.1
        self.plan_error = ""
        self.plans: list[PlanRequest] = []
        self.balancer = Balancer(
            {"prefill": PoolConfig((0,)), "decode": PoolConfig(self.ranks, ranks)},
            (self.config, self.config),
            self.plan,
            self.limits,
        )
        self.words: collections.deque[tuple[ScriptedRank, Message, bytes]] = collections.deque()
        self.lives: dict[int, ScriptedRank] = {}
        self.flip_only: set[int] | None = None
        """Places that see a flip; None: all."""

    @property
    def group(self) -> Group:
        (group,) = self.balancer.groups
        return group

    @property
    def part(self) -> PartBalance:
        return self.group.parts[0]

    async def plan(self, request: PlanRequest) -> PlannedMoves:
        self.plans.append(request)
        await trio.sleep(self.plan_takes_s)
        if self.plan_error:
            raise EngineError(self.plan_error)
        return plan_moves(request)

    # ------------------------------------------------------------ ranks

    def start(self, place: int) -> ScriptedRank:
        generation = self.lives[place].generation + 1 if place in self.lives else 1
        life = self.lives[place] = ScriptedRank(self, place, generation)
        ready = RankReady(
            life.rank, generation, "a", 64, 16, 1024, 8, 1024, "memory", "fake", f"mesh {life.rank}", self.infos
        )
        self.balancer.rank_ready(ready, b"fabric", life.wire())
        return life

    def start_all(self) -> None:
        for place in range(len(self.ranks)):
            self.start(place)
        self.pump()
        assert self.group.roster.is_complete

    def kill(self, place: int) -> None:
        """Dead, and the head has the proof."""
        life = self.lives[place]
        life.is_alive = False
        self.words = collections.deque(word for word in self.words if word[0] is not life)
        for other in self.alive:
            other.lose_peer()
        self.balancer.rank_down(life.rank, life.generation)

    @property
    def alive(self) -> list[ScriptedRank]:
        return [life for _, life in sorted(self.lives.items()) if life.is_alive]

    def pump(self) -> None:
        """Until nobody has anything to say."""
        for _ in range(10_000):
            busy = False
            for life in self.alive:
                while life.inbox:
                    life.take(*life.inbox.popleft())
                    busy = True
            while self.words:
                life, message, blob = self.words.popleft()
                self.balancer.rank_frames(life.rank, [Frame(message, memoryview(blob))])
                busy = True
            busy = self._agree() or busy
            if not busy:
                return
        raise AssertionError("the group never falls silent")

    def _agree(self) -> bool:
        """The pact: an epoch for which all members are ready becomes active, if none of them is lost."""
        flipped = False
        for index in range(len(self.infos)):
            joined = [life for life in self.alive if life.joined is not None]
            if not joined or any(len(life.joined.living) != len(joined) for life in joined if life.joined):
                continue
            states = [life.parts[index] for life in joined]
            if all(state.stage is not None and state.ready for state in states):
                epoch = states[0].stage.epoch  # type: ignore[union-attr]
                for life in joined:
                    if self.flip_only is None or life.place in self.flip_only:
                        life.flip(PARTS[index], epoch)
                        flipped = True
                if self.flip_only is not None:
                    self.flip_only = set()
        return flipped

    def load(self, loads: list[list[int]], *, steps: int = 64, rounds: int = 1, part: str = "main") -> None:
        """Every rank's gates send this many rows to each expert in each step."""
        counts = np.array(loads) * steps
        for _ in range(rounds):
            for life in self.alive:
                message = ExpertLoads(part, steps, int(counts.sum()), int(counts.sum()) * 10, LAYERS, EXPERTS)  # type: ignore[arg-type]
                self.balancer.rank_frames(life.rank, [Frame(message, memoryview(counts.astype("<i4").tobytes()))])

    # ------------------------------------------------------------ operators and checks

    async def act(
        self, action: str, *, plan: int = 0, mode: str = "", user: str = "ann", part: str = "main", reason: str = ""
    ) -> RebalanceAnswer | Refused:
        message = Rebalance(action, "decode", 0, part, plan, mode, user, "host", reason)  # type: ignore[arg-type]
        return await self.balancer.act(message)

    async def done(self, action: str, **values: object) -> RebalanceAnswer:
        answer = await self.act(action, **values)  # type: ignore[arg-type]
        assert isinstance(answer, RebalanceAnswer), answer
        return answer

    async def refused(self, action: str, **values: object) -> str:
        answer = await self.act(action, **values)  # type: ignore[arg-type]
        assert isinstance(answer, Refused), answer
        return answer.message

    def check_slots(self) -> None:
        """Every living member holds exactly what the head thinks is there, and nothing is left of a migration."""
        for index, part in enumerate(self.group.parts):
            assert part.migration is None
            for life in self.alive:
                assert life.slots[index] == part.placement.table[life.place].tolist(), f"place {life.place}"
                assert life.parts[index].active == part.epoch and life.parts[index].stage is None
