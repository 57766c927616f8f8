"""Cluster: both sides of the hand-off under a hostile scheduler, one event at a time, without clock or loop.

Every message waits in the queue of its link until chance delivers it; writes land when chance says so, failed ones as
well, perhaps long after; links break, processes die and come back. After every event each side's books are checked, and
each landing write is checked against the state of the page that it hits: GRANTED or QUARANTINED, or the memory of
somebody else was just overwritten. What pages and slabs of prefill ranks hold is kept as the ids that led to it, so a
prompt that goes on from the state of other ids, or a push that carries it, shows. So are those of decode ranks: a turn
that is handed back carries what its request was made of, or shows.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import zlib
from array import array
from collections.abc import Callable, Sequence

from engine.core.decode import DecodeSide
from engine.core.effects import DropLink, ExpectPush, ReadBack, StartPush, TellCorrupt, ToHead, ToPeer
from engine.core.handback import TakerPhase
from engine.core.handoff import DecodePhase
from engine.core.pages import PageState
from engine.core.plan import DecodeRow, PrefillChunk, StepPlan, StepResult
from engine.core.prefill import PrefillSide
from engine.core.request import RequestKey
from engine.core.schedule import HandBack, SideSizes, StepLimits
from engine.core.tokens import unpack_tokens
from transport.messages import (
    Abort,
    Message,
    PeerDown,
    PeerHello,
    PeerUp,
    PeerWelcome,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ReservePages,
    Sampling,
    StartPrefill,
    TokensEmitted,
)

PAGE_TOKENS, EOS = 4, 1
NOTHING = memoryview(b"")


def sum_blocks(pages: Sequence[int], slab: int) -> int:
    """Stands for the checksum of what was written there: it tells whether the same blocks were named."""
    return zlib.crc32(repr(([*pages], slab)).encode())


def token_at(request: int, position: int) -> int:
    return random.Random(request * 1_000_003 + position).randrange(1, 30)


@dataclasses.dataclass(eq=False)
class Node:
    """A process life."""

    rank: int
    generation: int
    side: PrefillSide | DecodeSide
    steps: collections.deque[StepPlan] = dataclasses.field(default_factory=collections.deque)
    readings: collections.deque[ReadBack] = dataclasses.field(default_factory=collections.deque)
    pages: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    slabs: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """The ids up to where each is filled, as of the steps that are over."""
    expected: dict[RequestKey, StartPush] = dataclasses.field(default_factory=dict)
    is_dead: bool = False
    inbox: collections.deque[tuple[Message, bytes]] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass(eq=False)
class Pair:
    """A pair stream: bytes on the way to each end; an end that is not `up` was lost there already."""

    number: int
    prefill: Node
    decode: Node
    to_prefill: collections.deque[tuple[Message, bytes]] = dataclasses.field(default_factory=collections.deque)
    to_decode: collections.deque[tuple[Message, bytes]] = dataclasses.field(default_factory=collections.deque)
    up_at_prefill: bool = True
    up_at_decode: bool = True
    is_cut: bool = False
    writes: int = 0


@dataclasses.dataclass(eq=False)
class Write:
    """A push: `told` once its waiter heard of its end. `is_turn`: from the decode rank to the prefill rank."""

    push: StartPush
    pair: Pair
    epoch: int
    is_turn: bool = False
    told: bool = False
    failed: bool = False
    overdue: bool = False
    landed: bool = False

    @property
    def writer(self) -> Node:
        return self.pair.decode if self.is_turn else self.pair.prefill

    @property
    def owner(self) -> Node:
        return self.pair.prefill if self.is_turn else self.pair.decode


@dataclasses.dataclass(eq=False)
class Client:
    """A request and what its client saw."""

    number: int
    prompt: list[int]
    sampling: Sampling
    salt: str = ""
    affinity: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    attempt: int = 0
    pair: tuple[int, int] = (-1, -1)
    open_on: set[int] = dataclasses.field(default_factory=set)
    is_aborting: bool = False
    is_given_up: bool = False
    started: int = 0
    """Latest attempt that was told to have started."""
    outcome: str = ""


class Cluster:
    """`faults` False: a world in which nothing fails, for liveness at the end. `checksums`: pushes have them.
    `caches`: prefill ranks keep what prompts leave. `turns`: and what comes back of completions."""

    def __init__(
        self,
        seed: int,
        *,
        num_pages: int,
        num_slabs: int,
        num_prefill: int,
        num_decode: int,
        checksums: bool = False,
        caches: bool = False,
        turns: bool = False,
    ) -> None:
        self.checksums, self.caches, self.turns = checksums, caches, turns
        self.rng = random.Random(seed)
        self.now_us = 0
        self.num_pages, self.num_slabs = num_pages, num_slabs
        self.prefill_pages = num_pages if seed % 2 else num_pages // 2
        self.faults = True
        self.death_weight = 0.01
        self.roles = ["prefill"] * num_prefill + ["decode"] * num_decode
        self.nodes = [self._make(rank, 1) for rank in range(len(self.roles))]
        self.pairs: list[Pair] = []
        self.writes: list[Write] = []
        self.clients: dict[int, Client] = {}
        self.next_link = 1
        self._later: list[Callable[[], None]] = []
        self.seen: collections.Counter[str] = collections.Counter()
        for pair in self._missing_pairs():
            self._connect(*pair)

    def _make(self, rank: int, generation: int) -> Node:
        sizes = SideSizes(
            rank=rank,
            num_pages=self.num_pages if self.roles[rank] == "decode" else self.prefill_pages,
            num_slabs=self.num_slabs,
            vocab_size=30,
            max_model_tokens=1000,
            max_waiting=1000,
            grant_us=10_000_000,
            quarantine_share=1.0,
            cap_us=10**15,  # this cluster kills writers itself
            room_us=10**15,
            step=StepLimits(chunk_tokens=8, page_tokens=PAGE_TOKENS, rows=3, eos_ids=frozenset({EOS}), prompts=3),
            checksums=self.checksums,
            prefix_cache=self.caches,
            hand_back=HandBack(tokens=2, share=0.5, wait_us=50_000) if self.turns else None,
        )
        kind = PrefillSide if self.roles[rank] == "prefill" else DecodeSide
        return Node(rank, generation, kind(sizes))

    # ------------------------------------------------------------ links

    def _missing_pairs(self) -> list[tuple[Node, Node]]:
        have = {(pair.prefill, pair.decode) for pair in self.pairs}
        return [
            (p, d)
            for p in self.nodes
            for d in self.nodes
            if self.roles[p.rank] == "prefill" and self.roles[d.rank] == "decode"
            and not p.is_dead and not d.is_dead and (p, d) not in have
        ]  # fmt: skip

    def _connect(self, prefill: Node, decode: Node) -> None:
        number = self.next_link
        self.next_link += 1
        self.pairs.append(Pair(number, prefill, decode))
        sizes = prefill.side.sizes
        takes = (sizes.num_pages, sizes.num_slabs) if self.turns else (0, 0)
        hello = PeerHello(1, prefill.rank, prefill.generation, "x", *takes)
        welcome = PeerWelcome(1, decode.rank, decode.generation, "x", self.num_pages, self.num_slabs)
        decode.side.on_link_up(number, hello, self.now_us)
        prefill.side.on_link_up(number, welcome, self.now_us)
        self._collect(decode)
        self._collect(prefill)

    def _lose(self, pair: Pair, at_prefill: bool) -> None:
        """An end notices that the stream is gone."""
        node = pair.prefill if at_prefill else pair.decode
        if at_prefill and pair.up_at_prefill:
            pair.up_at_prefill = False
        elif not at_prefill and pair.up_at_decode:
            pair.up_at_decode = False
        else:
            return
        pair.is_cut = True
        (pair.to_prefill if at_prefill else pair.to_decode).clear()
        if not node.is_dead:
            node.side.on_link_lost(pair.number)
            self._collect(node)

    # ------------------------------------------------------------ effects

    def _collect(self, node: Node) -> None:
        if node.is_dead:
            return
        node.side.settle(self.now_us)
        for effect in node.side.take_outbox():
            match effect:
                case ToHead(message, blob):
                    self._on_head(node, message, blob)
                case ToPeer(link, message, blob):
                    for pair in self.pairs:
                        if pair.number == link and not pair.is_cut:
                            at_prefill = pair.prefill is node
                            (pair.to_decode if at_prefill else pair.to_prefill).append((message, blob))
                case ExpectPush(push):
                    node.expected[push.key] = push
                case StartPush():
                    if effect.slabs is not None and isinstance(node.side, PrefillSide):
                        assert effect == node.expected.pop(effect.key), "the last push of a prompt was foreseen"
                    self._start_push(node, effect)
                case ReadBack():
                    node.readings.append(effect)
                case TellCorrupt():
                    self.seen["corrupt"] += 1
                case DropLink(link, _):
                    for pair in [pair for pair in self.pairs if pair.number == link]:
                        self._lose(pair, at_prefill=pair.prefill is node)
        node.side.check()

    def _start_push(self, node: Node, push: StartPush) -> None:
        pair = next((pair for pair in self.pairs if pair.number == push.link), None)
        if isinstance(node.side, DecodeSide):
            offer = node.side.giver._offers[push.key]
            if pair is None or not pair.up_at_decode or (self.faults and self.rng.random() < 0.05):
                self._later.append(lambda: self._void_turn(node, push))
                return
            assert offer.grant is not None
            self.writes.append(Write(push, pair, offer.grant.epoch, is_turn=True))
            return
        if pair is None or not pair.up_at_prefill:
            node.side.on_push_failed(push.key, "link gone", "void")
            return
        grant = node.side.prompts[push.key].grant
        assert grant is not None
        pair.writes += 1
        self.writes.append(Write(push, pair, grant.epoch))

    def _void_turn(self, node: Node, push: StartPush) -> None:
        if not node.is_dead:
            assert isinstance(node.side, DecodeSide)
            node.side.on_push_failed(push.key, "link gone", "void")
            self._collect(node)

    def _land_turn(self, write: Write) -> None:
        """The same of a turn."""
        write.landed = True
        owner, writer = write.owner, write.writer
        if owner.is_dead or writer.is_dead:
            return
        assert isinstance(owner.side, PrefillSide) and write.push.slabs is not None
        gift = owner.side.taker._gifts.get(write.epoch)
        assert gift is not None, f"a write of epoch {write.epoch} landed after its end"
        assert gift.key == write.push.key and gift.writer == (writer.rank, writer.generation)
        states = {TakerPhase.GRANTED: PageState.GRANTED, TakerPhase.QUARANTINED: PageState.QUARANTINED}
        turn, wanted = gift.turn, states[gift.phase]
        assert turn is not None and tuple(turn.pages) == write.push.remote_pages
        arena = owner.side.arena
        assert all(arena.pages.state_of(page) is wanted for page in write.push.remote_pages)
        assert arena.slabs.state_of(write.push.slabs[1]) is wanted
        if gift.phase is TakerPhase.QUARANTINED or write.failed:
            # After a failure its source has another owner; such an epoch is never committed.
            self.seen["turn into quarantine"] += gift.phase is TakerPhase.QUARANTINED
            return
        ids = memoryview(bytes(turn.ids)).cast("i").tolist()
        client = self.clients[gift.key[0]]
        assert ids == self._ids_of(client)[: len(ids)], "a turn of other ids"
        for place, (page, remote) in enumerate(zip(write.push.pages, write.push.remote_pages, strict=True), turn.first):
            own = ids[: (place + 1) * PAGE_TOKENS]
            held = writer.pages[page]
            assert held[: len(own)] == own, "a turn carries what belongs to other ids"
            owner.pages[remote] = own
        held = writer.slabs[write.push.slabs[0]]
        assert held[: len(ids)] == ids and len(held) <= len(ids) + 8
        owner.slabs[write.push.slabs[1]] = ids
        self.seen["turn landed"] += 1

    def _land(self, write: Write) -> None:
        """The bytes arrive; the check that everything here is about."""
        if write.is_turn:
            self._land_turn(write)
            return
        decode = write.pair.decode
        write.landed = True
        if decode.is_dead or write.pair.prefill.is_dead:
            return
        assert isinstance(decode.side, DecodeSide)
        sequence = decode.side._epochs.get(write.epoch)
        assert sequence is not None, f"a write of epoch {write.epoch} landed after its end"
        assert sequence.key == write.push.key
        wanted = {DecodePhase.GRANTED: PageState.GRANTED, DecodePhase.QUARANTINED: PageState.QUARANTINED}
        for first, page in enumerate(write.push.remote_pages, write.push.first):
            assert sequence.pages[first] == page
            if sequence.phase is DecodePhase.GRANTED:
                ids = self._ids_of(self.clients[sequence.key[0]])[: sequence.reserve.num_ids]
                held = write.pair.prefill.pages[write.push.pages[first - write.push.first]]
                assert held == ids[: (first + 1) * PAGE_TOKENS], "a push carries what belongs to other ids"
                decode.pages[page] = held
            assert decode.side.arena.pages.state_of(page) is wanted[sequence.phase]
        if write.push.slabs is not None:
            assert decode.side.arena.slabs.state_of(write.push.slabs[1]) is wanted[sequence.phase]
            decode.slabs[write.push.slabs[1]] = write.pair.prefill.slabs[write.push.slabs[0]]
        if sequence.phase is DecodePhase.QUARANTINED:
            self.seen["write into quarantine"] += 1

    def _end_write(self, write: Write, how: str) -> None:
        """The waiter hears of it."""
        write.told, write.failed = True, how == "failed"
        write.pair.writes -= not write.is_turn
        node = write.writer
        if node.is_dead:
            return
        if how == "done":
            if not write.landed:
                self._land(write)
            push = write.push
            told = sum_blocks(push.remote_pages, -1 if push.slabs is None else push.slabs[1])
            checksum = told if self.checksums else None
            node.side.on_push_done(push.key, push.first, push.count, 64, 1, self.now_us, checksum)
        else:
            self.seen["failed push"] += 1
            node.side.on_push_failed(write.push.key, "failed", "failed")
        self._collect(node)

    def _be_overdue(self, write: Write) -> None:
        """The waiter lost patience; the write goes on."""
        write.overdue = True
        node = write.writer
        if not node.is_dead:
            node.side.on_push_failed(write.push.key, "overdue", "overdue")
            self._collect(node)

    # ------------------------------------------------------------ head and clients

    def submit(self, client: Client) -> None:
        self.clients[client.number] = client
        up = [[n for n in self.nodes if self.roles[n.rank] == role and not n.is_dead] for role in ("prefill", "decode")]
        if not all(up):
            return
        prefill, decode = self.rng.choice(up[0]), self.rng.choice(up[1])
        client.attempt += 1
        client.pair, client.open_on, client.is_aborting = (
            (prefill.rank, decode.rank),
            {prefill.rank, decode.rank},
            False,
        )
        ids, generated = [*client.prompt, *client.tokens], len(client.tokens)
        start = StartPrefill(
            client.number,
            client.attempt,
            decode.rank,
            generated,
            client.sampling,
            0,
            affinity=client.affinity,
            cache_salt=client.salt,
        )
        prefill.inbox.append((start, array("i", ids).tobytes()))
        reserve = ReservePages(client.number, client.attempt, prefill.rank, len(ids), generated, client.sampling)
        decode.inbox.append((reserve, b""))

    def abort(self, client: Client) -> None:
        if not client.outcome and client.open_on and not client.is_aborting:
            client.is_given_up = True
            self._abort_attempt(client)

    def _abort_attempt(self, client: Client) -> None:
        client.is_aborting = True
        for rank in sorted(client.open_on):
            self.nodes[rank].inbox.append((Abort(client.number, client.attempt), b""))
        self._end_attempt(client)

    def _end_attempt(self, client: Client) -> None:
        if client.open_on or not client.is_aborting:
            return
        client.is_aborting = False
        if client.is_given_up and not client.outcome:
            client.outcome = "aborted"

    def _on_head(self, node: Node, message: Message, blob: bytes) -> None:
        match message:
            case TokensEmitted():
                for number, attempt, index, tokens in unpack_tokens(message.num_rows, message.num_tokens, blob):
                    client = self.clients[number]
                    assert attempt == client.attempt and node.rank in client.open_on, "tokens after the end"
                    assert index == len(client.tokens), f"request {number}: gap or repeat"
                    assert client.started == attempt, "tokens before the start"
                    client.tokens += tokens
            case RequestStarted():
                client = self.clients[message.request]
                assert message.attempt == client.attempt > client.started and node.rank in client.open_on
                client.started = message.attempt
                assert message.decode_rank == node.rank and message.pushed_bytes > 0
                assert message.cached_tokens <= message.prompt_tokens == len(client.prompt)
                self.seen["cached"] += message.cached_tokens
            case RequestFinished():
                client = self.clients[message.request]
                assert message.attempt == client.attempt and not client.outcome
                assert (client.tokens, message.reason) == expect(client)
                assert message.completion_tokens == len(client.tokens)
                client.outcome = "finished"
                if not client.is_aborting:
                    client.open_on.clear()
            case RequestFailed():
                client = self.clients[message.request]
                self.seen[message.code] += 1
                assert message.definite
                if message.attempt == client.attempt and not client.is_aborting:
                    assert message.retryable, message
                    client.open_on.discard(node.rank)
                    self._abort_attempt(client)
            case RequestAborted():
                client = self.clients[message.request]
                if message.attempt == client.attempt:
                    assert client.is_aborting, "an answer to an abort that nobody sent"
                    client.open_on.discard(node.rank)
                    self._end_attempt(client)

    # ------------------------------------------------------------ chance

    def step(self) -> bool:
        """One event, by chance; False when nothing can happen by itself."""
        choices = self._choices()
        if not choices:
            return False
        self.now_us += self.rng.randrange(1, 1000)
        for act in self._later:
            act()
        self._later.clear()
        if self.turns:
            for node in self.nodes:
                due_us = None if node.is_dead else node.side.next_deadline_us
                if due_us is not None and due_us <= self.now_us:
                    node.side.expire(self.now_us)
                    self._collect(node)
        if self.faults and self.rng.random() < 0.001:
            # A pause so long that every grant without news is overdue.
            self.now_us += 10_000_000
            for node in self.nodes:
                if not node.is_dead:
                    node.side.expire(self.now_us)
                    self._collect(node)
        weights = [weight for weight, _ in choices]
        self.rng.choices([act for _, act in choices], weights)[0]()
        return True

    def _choices(self) -> list[tuple[float, Callable[[], object]]]:
        choices: list[tuple[float, Callable[[], object]]] = []
        for node in self.nodes:
            if node.is_dead:
                continue
            if node.inbox:
                choices.append((3, lambda node=node: self._hear_head(node)))
            if len(node.steps) < 2 and (node.side.schedule.prompts or _can_plan(node.side)):
                choices.append((3, lambda node=node: self._plan(node)))
            if node.readings:
                choices.append((1, lambda node=node: self._read_back(node)))
            if node.steps:
                choices.append((3, lambda node=node: self._finish_step(node)))
        for pair in self.pairs:
            if pair.to_prefill and pair.up_at_prefill and not pair.prefill.is_dead:
                choices.append((3, lambda pair=pair: self._deliver(pair, True)))
            if pair.to_decode and pair.up_at_decode and not pair.decode.is_dead:
                choices.append((3, lambda pair=pair: self._deliver(pair, False)))
            if pair.is_cut or pair.prefill.is_dead or pair.decode.is_dead:
                # What was sent before the cut may still be read: the end is noticed some time later.
                if pair.up_at_prefill:
                    choices.append((1, lambda pair=pair: self._lose(pair, True)))
                if pair.up_at_decode:
                    choices.append((1, lambda pair=pair: self._lose(pair, False)))
            elif self.faults:
                choices.append((0.02, lambda pair=pair: setattr(pair, "is_cut", True)))
        for pair in [p for p in self.pairs if not (p.up_at_prefill or p.up_at_decode) and p.writes == 0]:
            self.pairs.remove(pair)  # redialled once its target was forgotten, which waits for its writes
        for missing in self._missing_pairs():
            choices.append((1, lambda missing=missing: self._connect(*missing)))
        for write in self.writes:
            if not write.told:
                choices.append((2, lambda write=write: self._end_write(write, "done")))
                if not write.landed:
                    choices.append((0.5, lambda write=write: self._land(write)))
                if self.faults:
                    choices.append((0.05, lambda write=write: self._end_write(write, "failed")))
                    if not write.overdue:
                        choices.append((0.05, lambda write=write: self._be_overdue(write)))
            elif not write.landed:
                choices.append((0.2, lambda write=write: self._land(write)))
        self.writes = [write for write in self.writes if not (write.told and write.landed)]
        for client in self.clients.values():
            if not client.outcome and not client.open_on and not client.is_aborting and not client.is_given_up:
                choices.append((1, lambda client=client: self.submit(client)))
        for rank, node in enumerate(self.nodes):
            if node.is_dead:
                choices.append((0.5, lambda rank=rank: self._restart(rank)))
            elif self.faults:
                choices.append((self.death_weight, lambda node=node: self.kill(node)))
        return choices

    def _hear_head(self, node: Node) -> None:
        message, blob = node.inbox.popleft()
        node.side.on_head(message, memoryview(blob), self.now_us)
        self._collect(node)

    def _plan(self, node: Node) -> None:
        plan = node.side.plan(self.now_us)
        if plan is not None:
            node.steps.append(plan)
        self._collect(node)

    def _read_back(self, node: Node) -> None:
        reading = node.readings.popleft()
        for pages, slab in reading.stretches:
            kept = {node.side.arena.pages.state_of(page) for page in pages} <= {PageState.OWNED, PageState.IN_FLIGHT}
            assert kept and (slab < 0 or node.side.arena.slabs.state_of(slab) is not PageState.FREE)
        found = [sum_blocks(*stretch) for stretch in reading.stretches]
        if self.faults and self.rng.random() < 0.1:
            found[self.rng.randrange(len(found))] ^= 1 << self.rng.randrange(32)
        self.seen["read back"] += 1
        node.side.on_pages_read(reading.key, tuple(found), self.now_us)
        self._collect(node)

    def _finish_step(self, node: Node) -> None:
        plan = node.steps.popleft()
        chunks = tuple(None if c.sample is None else token_at(c.request, c.start + c.num_tokens) for c in plan.chunks)
        rows = tuple(token_at(r.request, r.position + 1) for r in plan.rows)
        pages = node.side.arena.pages
        for row in plan.rows:
            assert all(pages.state_of(page) in (PageState.OWNED, PageState.IN_FLIGHT) for page in row.pages)
            if self.turns:
                self._extend(node, row)
        for chunk in plan.chunks:
            self._compute(node, chunk)
        node.side.apply(StepResult(plan.step, chunks, rows, 10), self.now_us)
        self._collect(node)

    def _ids_of(self, client: Client) -> list[int]:
        return [*client.prompt, *client.tokens]

    def _extend(self, node: Node, row: DecodeRow) -> None:
        """What a device does with the memory of a row, in terms of ids."""
        slab = node.slabs[row.slab]
        assert len(slab) == row.position
        ids = node.slabs[row.slab] = [*slab, token_at(row.request, row.position)]
        node.pages[row.pages[row.position // PAGE_TOKENS]] = ids

    def _compute(self, node: Node, chunk: PrefillChunk) -> None:
        """What a device does with pages and slabs, in terms of ids."""
        states = node.side.arena.pages.state_of, node.side.arena.slabs.state_of
        first, end = chunk.start // PAGE_TOKENS, chunk.start + chunk.num_tokens
        ids = self._ids_of(self.clients[chunk.request])[:end]
        assert memoryview(bytes(chunk.tokens)).cast("i").tolist() == ids[chunk.start :]
        for place, page in enumerate(chunk.pages):
            is_read_only = states[0](page) is PageState.CACHED
            assert states[0](page) is PageState.OWNED or (is_read_only and place < first)
        assert states[1](chunk.slab) is PageState.OWNED
        if chunk.base is not None:
            assert states[1](chunk.base.slab) is PageState.CACHED
            node.slabs[chunk.slab] = node.slabs[chunk.base.slab]
            assert (chunk.base.page >= 0) == (chunk.start % PAGE_TOKENS > 0)
            if chunk.base.page >= 0:
                assert states[0](chunk.base.page) is PageState.CACHED
                node.pages[chunk.pages[first]] = node.pages[chunk.base.page]
        assert not chunk.start or node.slabs[chunk.slab] == ids[: chunk.start], "a chunk goes on from other ids"
        for place in range(-(-chunk.start // PAGE_TOKENS)):
            held = node.pages[chunk.pages[place]]
            assert held == ids[: chunk.start][: (place + 1) * PAGE_TOKENS], "a chunk reads a page of other ids"
        for place in range(first, -(-end // PAGE_TOKENS)):
            node.pages[chunk.pages[place]] = ids[: (place + 1) * PAGE_TOKENS]
        node.slabs[chunk.slab] = ids
        if chunk.keep >= 0:
            assert states[1](chunk.keep) is PageState.OWNED
            node.slabs[chunk.keep] = ids
            self.seen["kept"] += 1

    def _deliver(self, pair: Pair, at_prefill: bool) -> None:
        message, blob = (pair.to_prefill if at_prefill else pair.to_decode).popleft()
        node = pair.prefill if at_prefill else pair.decode
        node.side.on_peer(pair.number, message, memoryview(blob), self.now_us)
        self._collect(node)

    def kill(self, node: Node) -> None:
        self.seen["death"] += 1
        node.is_dead = True
        for write in self.writes:
            if write.pair.prefill is node or write.pair.decode is node:
                # Severed before the others hear of the death: from now on it lands nowhere.
                write.landed = True
                if write.writer is node:
                    write.told = True
        for pair in self.pairs:
            if node in (pair.prefill, pair.decode):
                pair.is_cut = True
                if pair.prefill is node:
                    pair.up_at_prefill, pair.writes = False, 0
                else:
                    pair.up_at_decode = False
        for client in self.clients.values():
            if node.rank in client.open_on:
                client.open_on.discard(node.rank)
                if client.is_aborting:
                    self._end_attempt(client)
                elif not client.outcome:
                    self._abort_attempt(client)
        for other in self.nodes:
            if not other.is_dead:
                other.inbox.append((PeerDown(node.rank, node.generation), b""))

    def _restart(self, rank: int) -> None:
        node = self.nodes[rank] = self._make(rank, self.nodes[rank].generation + 1)
        if self.roles[rank] == "decode":
            for other in self.nodes:
                if not other.is_dead and self.roles[other.rank] == "prefill":
                    other.inbox.append((PeerUp(rank, node.generation, "x"), b""))


def _can_plan(side: PrefillSide | DecodeSide) -> bool:
    return side.schedule.running.can_plan


def expect(client: Client) -> tuple[list[int], str]:
    """The completion, made one token after the other."""
    tokens: list[int] = []
    while len(tokens) < client.sampling.max_tokens:
        tokens.append(token_at(client.number, len(client.prompt) + len(tokens)))
        if tokens[-1] == EOS:
            return tokens, "stop"
    return tokens, "length"
