"""DecodeSide: all decisions of a decode rank, without any I/O.

Facts come in through `on_*` methods and step results; what to do about them is left in the outbox as effects. The step
actor is the only caller. States and transitions are `handoff.DECODE`; this file finds the record, and carries out the
actions that a transition lists.

A request reserves all it can ever need (prompt, the rest of `max_tokens`, one slab) before its prompt is computed, so
whatever runs can run to its end: nothing is preempted and nothing waits for memory while it holds some. What does not
fit waits, by priority and then by arrival; a large request at the front is not overtaken by small ones.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools

from engine.core.arena import Arena, Holding
from engine.core.effects import Effect, PushFailure, ReadBack, TellCorrupt, ToHead, ToPeer
from engine.core.fence import Fence
from engine.core.giving import Giver
from engine.core.handoff import DECODE, Action, DecodeEvent, DecodePhase
from engine.core.links import PeerTable
from engine.core.pages import PageState
from engine.core.plan import StepPlan, StepResult
from engine.core.request import (
    RequestKey,
    Sequence,
    build_failure,
    completion_limit,
    count_pages,
    find_misfit,
    judge_token,
    num_history,
)
from engine.core.running import Running
from engine.core.schedule import Schedule, SideSizes, apply_result, plan_step
from engine.core.scores import ScoreBuffer
from engine.core.telemetry import Gauges
from engine.core.tokens import TokenBuffer
from engine.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import (
    Abort,
    Drain,
    EpochEnded,
    FailureCode,
    GrantRevoked,
    Message,
    PagesGranted,
    PagesPushed,
    PeerDown,
    PeerHello,
    PrefillCommitted,
    PromptScored,
    RequestAborted,
    RequestFinished,
    RequestStarted,
    ReservePages,
    WriterOverdue,
)

_WRITTEN = (DecodePhase.GRANTED, DecodePhase.QUARANTINED)
"""Phases with an epoch that is not over."""


@dataclasses.dataclass(slots=True, eq=False)
class PrefillLink:
    """A pair stream to a prefill rank. `news_us`: when it last told of a push or a commit."""

    rank: int
    generation: int
    news_us: int
    hello: PeerHello


class DecodeSide:
    """See the module. Times are microseconds of one monotonic clock."""

    def __init__(self, sizes: SideSizes) -> None:
        self.sizes = sizes
        self.arena = Arena(sizes.num_pages, sizes.num_slabs)
        remembers = sizes.hand_back is not None
        self.schedule = Schedule(running=Running(sizes.step.drafts, sizes.step.draft_rows, remembers=remembers))
        self.draining = False
        self._fence = Fence(share=sizes.quarantine_share, cap_us=sizes.cap_us, room_us=sizes.room_us)
        self.sequences: dict[RequestKey, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._epochs: dict[int, Sequence] = {}
        self._held: dict[RequestKey, Sequence] = {}
        self._reading: dict[RequestKey, Sequence] = {}
        self._peers: PeerTable[PrefillLink] = PeerTable()
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._serial = itertools.count()
        self._next_epoch = 1
        self._next_order = 0
        self._started: list[Effect] = []
        self._emitted = TokenBuffer()
        self._scored = ScoreBuffer()
        self._prompts: list[Effect] = []
        self._step = 0
        self._outbox: list[Effect] = []
        self.giver = Giver(sizes, self.arena, lambda effect: self._outbox.append(effect))
        # Finished turns that no step names any more.
        self._finished: list[Sequence] = []
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._corrupt_pushes = 0

    # ------------------------------------------------------------ facts

    def on_head(self, message: Message, blob: memoryview, now_us: int) -> None:
        """A frame of the head. Raises RemoteProtocolError for one that a decode rank can not get."""
        match message:
            case ReservePages():
                self._on_reserve(message, bytes(blob), now_us)
            case Abort():
                sequence = self.sequences.get((message.request, message.attempt))
                if sequence is None:
                    self._outbox.append(ToHead(RequestAborted(message.request, message.attempt)))
                else:
                    self._move(sequence, DecodeEvent.ABORT)
            case PeerDown():
                self._on_peer_down(message)
            case Drain():
                self.draining = True
                self.giver.withdraw_all()
            case _:
                raise RemoteProtocolError(f"head sent {type(message).__name__} to a decode rank")

    def on_link_up(self, link: int, hello: Message, now_us: int) -> None:
        """A prefill rank was welcomed. A link to the same rank that we still had is lost."""
        assert isinstance(hello, PeerHello)
        rank, generation = hello.rank, hello.generation
        old = self._peers.link_to(rank)
        if old is not None:
            self.on_link_lost(old)
        self._peers.add(link, PrefillLink(rank, generation, now_us, hello))
        for sequence in list(self._epochs.values()):
            if sequence.reserve.prefill_rank == rank and sequence.prefill_generation == generation:
                sequence.link = link
                self._move(sequence, DecodeEvent.LINK_UP)

    def on_link_lost(self, link: int) -> None:
        """The pair stream ended; whether the writer's process lives is unknown. Unknown links were replaced before."""
        peer = self._peers.pop(link)
        if peer is None:
            return
        self.giver.on_link_lost(link)
        why = f"decode rank {self.sizes.rank} lost its link to prefill rank {peer.rank}"
        for sequence in list(self._epochs.values()):
            if sequence.link == link:
                self._move(sequence, DecodeEvent.LINK_LOST, code="rank_lost", why=why)
        for sequence in [s for s in self._waiting if s.reserve.prefill_rank == peer.rank]:
            self._move(sequence, DecodeEvent.LINK_LOST, code="rank_lost", why=why)

    def on_peer(self, link: int, message: Message, blob: memoryview, now_us: int) -> None:
        """A frame of a prefill rank. Raises RemoteProtocolError when the link must be dropped."""
        peer = self._peers.find(link)
        if peer is None:
            return
        peer.news_us = now_us
        match message:
            case PagesPushed():
                self._on_pushed(link, message)
            case PromptScored():
                sequence = self._find_epoch(link, message.epoch, message.request)
                if sequence.phase is DecodePhase.GRANTED and sequence.key[1] == message.attempt:
                    self._prompts.append(ToHead(message, bytes(blob)))
            case PrefillCommitted():
                self._on_commit(link, message, now_us)
            case EpochEnded():
                if message.epoch >= self._next_epoch:
                    raise RemoteProtocolError(f"epoch {message.epoch} ended, which was never granted")
                if message.epoch in self._epochs:
                    sequence = self._find_epoch(link, message.epoch, message.request)
                    why = f"prefill rank {peer.rank} ended epoch {message.epoch} before it committed"
                    self._move(sequence, DecodeEvent.EPOCH_ENDED, code="transfer_failed", why=why)
            case _ if self.giver.on_peer(link, peer.hello, message, blob):
                pass
            case _:
                raise RemoteProtocolError(f"prefill rank {peer.rank} sent {type(message).__name__}")

    def on_push_done(
        self,
        key: RequestKey,
        first: int,
        count: int,
        num_bytes: int,
        post_us: int,
        now_us: int,
        checksum: int | None = None,
    ) -> None:
        """A turn is written to its prefill rank."""
        self.giver.on_push_done(key, num_bytes, checksum)

    def on_push_failed(self, key: RequestKey, why: str, how: PushFailure) -> None:
        """The write of a turn went wrong."""
        self.giver.on_push_failed(key, how, is_dead=self._peers.is_dead)

    def on_pages_read(self, key: RequestKey, checksums: tuple[int, ...], now_us: int = 0) -> None:
        """What was written for a request was read back; `checksums` pair up with what its pushes told."""
        sequence = self._reading.pop(key)
        if sequence.phase is not DecodePhase.CHECKING:
            self._release(sequence)
            return
        rank, generation = sequence.reserve.prefill_rank, sequence.prefill_generation
        bad = [(*push, found) for push, found in zip(sequence.told, checksums, strict=True) if push[2] != found]
        for first, count, told, found in bad:
            self._outbox.append(TellCorrupt(key, rank, generation, first, count, told, found))
        self._corrupt_pushes += len(bad)
        if bad:
            first, count, told, found = bad[0]
            why = (
                f"pages [{first}, +{count}) that prefill rank {rank} pushed for request {key[0]} arrived with checksum"
                f" {found:08x}, sent with {told:08x} ({len(bad)} of {len(sequence.told)} pushes are corrupt)"
            )
            self._move(sequence, DecodeEvent.CORRUPT, code="kv_corrupt", why=why)
        else:
            self._move(sequence, DecodeEvent.SOUND)

    def fail_all(self, code: FailureCode, why: str) -> None:
        """The rank gives up: every request that was not answered fails. Nothing may be called after this."""
        for sequence in self.sequences.values():
            if sequence.phase is not DecodePhase.QUARANTINED:
                self._outbox.append(ToHead(build_failure(sequence.key, code, why)))

    # ------------------------------------------------------------ steps

    def settle(self, now_us: int) -> None:
        """Grants pages to the requests that wait for them, in order, as far as they go. Call before planning."""
        for sequence in self._finished:
            self._offer(sequence, now_us)
        self._finished.clear()
        is_short = bool(self._waiting) and self._grant_waiting(now_us)
        if not self.arena.slabs.count(PageState.QUARANTINED):  # each quarantine has a slab
            if self._fence.is_on_guard:
                self._fence.rest()
            return
        for writer, num_pages in self._fence.look(
            self.arena,
            self._epochs.values(),
            is_short=is_short,
            is_linked=lambda rank: self._peers.link_to(rank) is not None,
            now_us=now_us,
        ):
            self._outbox.append(ToHead(WriterOverdue(*writer, pages=num_pages)))

    def _grant_waiting(self, now_us: int) -> bool:
        """Grants as far as pages go; whether they did not go far enough."""
        granted: list[Sequence] = []
        is_short = False
        for sequence in self._waiting:
            link = self._peers.link_to(sequence.reserve.prefill_rank)
            peer = self._peers.find(link) if link is not None else None
            if link is None or peer is None:
                continue
            num_pages = self._num_pages(sequence)
            while not (has_room := self.arena.has_room(num_pages)) and self.giver.withdraw_oldest():
                pass
            if not has_room:
                is_short = True
                self.giver.accuse()
                break
            sequence.pages, sequence.slab = self.arena.allocate(num_pages)
            sequence.link, sequence.prefill_generation = link, peer.generation
            sequence.granted_us = now_us
            granted.append(sequence)
        for sequence in granted:
            self._move(sequence, DecodeEvent.ROOM)
        return is_short

    def plan(self, now_us: int) -> StepPlan | None:
        """The next step, or None when no sequence can be moved on."""
        return plan_step(self.schedule, self.sizes.step)

    def apply(self, result: StepResult, now_us: int) -> None:
        """What an awaited step means."""
        self._step = result.step
        applied = apply_result(self.schedule, result, self.sizes.step)
        rows = applied.rows
        if rows is None:
            return
        for sequence in rows.fresh:
            assert sequence.commit is not None
            sequence.handoff_us = max(1, sequence.commit.timings.push_us + now_us - sequence.committed_us)
        self._generated_tokens += len(rows.tokens)
        self._emitted.extend(rows.requests, rows.attempts, rows.indices, rows.tokens, rows.counts)
        if rows.scores is not None:
            self._scored.extend(rows.requests, rows.attempts, rows.indices, rows.scores, rows.counts)
        for sequence, reason in rows.ended:
            sequence.reason = reason
            self._move(sequence, DecodeEvent.FINISH)
        for sequence in rows.released:
            self._release(sequence)

    # ------------------------------------------------------------ what others ask

    def take_outbox(self) -> list[Effect]:
        """All effects since the last call, in order; new requests and then new tokens, in one frame, go first. What is
        told of prompts and of tokens goes before them: so whoever has a token has all that belongs to it."""
        outbox, self._outbox = self._outbox, []
        frame = self._emitted.take(self._step)
        if frame is not None:
            scores = self._scored.take(self._step)
            if outbox or self._started or scores is not None:
                outbox[:0] = *self._started, *(() if scores is None else (ToHead(*scores),)), ToHead(*frame)
                self._started.clear()
            else:
                outbox.append(ToHead(*frame))
        if self._prompts:
            outbox[:0] = self._prompts
            self._prompts = []
        return outbox

    @property
    def next_deadline_us(self) -> int | None:
        """When to take a turn, if nothing happens before: `expire`, then `settle`."""
        while self._deadlines and self._due_us(self._deadlines[0][2]) is None:
            heapq.heappop(self._deadlines)
        expiry_us, fence_us = self._deadlines[0][0] if self._deadlines else None, self._fence.next_us
        due_us = min(expiry_us, fence_us) if expiry_us and fence_us else expiry_us or fence_us
        offer_us = self.giver.next_us
        return min(due_us, offer_us) if due_us and offer_us else due_us or offer_us

    def expire(self, now_us: int) -> None:
        """Fails what waited too long. What it was granted stays in quarantine."""
        self.giver.expire(now_us)
        while self._deadlines and self._deadlines[0][0] <= now_us:
            sequence = heapq.heappop(self._deadlines)[2]
            due_us = self._due_us(sequence)
            if due_us is None:
                continue
            if due_us > now_us:
                heapq.heappush(self._deadlines, (due_us, next(self._serial), sequence))
                continue
            if sequence.phase is DecodePhase.CHECKING:
                why = f"decode rank {self.sizes.rank}: pages not read back ({self.sizes.room_us / 1e6:g} s, transfer_s)"
                self._move(sequence, DecodeEvent.READ_LATE, code="timeout", why=why)
                continue
            limit = f"{self.sizes.grant_us / 1e6:g} s, grant_s"
            what = "no link to" if sequence.phase is DecodePhase.WAITING else "no news of a grant from"
            why = f"decode rank {self.sizes.rank}: {what} prefill rank {sequence.reserve.prefill_rank} ({limit})"
            self._move(sequence, DecodeEvent.OVERDUE, code="timeout", why=why)

    @property
    def is_drained(self) -> bool:
        """Every request is answered and no step names memory; what is in quarantine ends with this process."""
        if not self.draining or self._held or not self.giver.is_quiet:
            return False
        return all(sequence.phase is DecodePhase.QUARANTINED for sequence in self.sequences.values())

    def gauges(self) -> Gauges:
        pages = self.arena.pages
        granted, quarantined = pages.count(PageState.GRANTED), pages.count(PageState.QUARANTINED)
        return Gauges(
            running=len(self.schedule.running.sequences),
            waiting=len(self._waiting),
            pages_free=pages.num_free,
            pages_owned=pages.total - pages.num_free - granted - quarantined,
            pages_granted=granted,
            pages_quarantined=quarantined,
            pages_total=pages.total,
            slabs_free=self.arena.slabs.num_free,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            pushed_bytes=0,
            pushes=0,
            pushes_inflight=0,
            corrupt_pushes=self._corrupt_pushes,
            drafted=self.schedule.running.drafted,
            turns=self.giver.counts(),
        )

    def check(self) -> None:
        """Raises LocalProtocolError unless all memory is accounted for, in the states that phases ask for."""
        requests = [*self.sequences.values(), *self._held.values()]
        self.arena.check(itertools.chain(map(_holding, requests), self.giver.holdings()))

    # ------------------------------------------------------------ inside

    def _num_pages(self, sequence: Sequence) -> int:
        reserve = sequence.reserve
        history = num_history(reserve.num_ids, reserve.generated, sequence.limit)
        return count_pages(history, self.sizes.step.page_tokens)

    def _on_reserve(self, message: ReservePages, said: bytes, now_us: int) -> None:
        key = (message.request, message.attempt)
        if key in self.sequences:
            raise RemoteProtocolError(f"request {key}: ReservePages twice")
        if len(said) != (4 * message.generated if message.sampling.grammar else 0):
            raise RemoteProtocolError(
                f"request {key}: {len(said)} bytes of ids for {message.generated} generated tokens"
            )
        sizes = self.sizes
        limit = completion_limit(
            message.num_ids, message.generated, message.sampling.max_tokens, sizes.max_model_tokens
        )
        sequence = Sequence(key, message, limit, now_us, self._next_order, sampling=message.sampling, said=said)
        self._next_order += 1
        self.sequences[key] = sequence
        refusal = find_misfit(
            message.num_ids, message.generated, message.sampling, sizes.max_model_tokens, sizes.vocab_size
        )
        if self.draining:
            refusal = "draining", f"rank {sizes.rank} is draining"
        elif len(self._waiting) >= sizes.max_waiting:
            refusal = "queue_full", f"requests waiting on rank {sizes.rank} (limit {sizes.max_waiting})"
        elif refusal is None and self._num_pages(sequence) > sizes.num_pages:
            need = num_history(message.num_ids, message.generated, limit)
            refusal = "too_long", f"{need} tokens do not fit on rank {sizes.rank} ({sizes.num_pages} pages)"
        if refusal is not None:
            self._move(sequence, DecodeEvent.REFUSE, code=refusal[0], why=refusal[1])
            return
        self._move(sequence, DecodeEvent.RESERVE)
        bisect.insort(self._waiting, sequence, key=lambda waiting: waiting.sort_key)
        self._watch(sequence)

    def _on_pushed(self, link: int, message: PagesPushed) -> None:
        sequence = self._find_epoch(link, message.epoch, message.request)
        first, count = message.first, message.count
        end = first + count
        if end > sequence.prompt_pages or (bits := (1 << end) - (1 << first)) & sequence.pushed_mask:
            raise RemoteProtocolError(
                f"epoch {message.epoch}: pages [{first}, +{count}) of {sequence.prompt_pages}"
                " pushed twice or out of range"
            )
        if self.sizes.checksums:
            if message.checksum is None:
                raise RemoteProtocolError(f"epoch {message.epoch}: a push without its checksum")
            sequence.told += ((first, count, message.checksum),)
        sequence.pushed_mask |= bits
        # The table says whether it may come. What it asks for is done, so a push costs no more than this: a prompt has
        # one for each of its chunks.
        sequence.phase = DECODE.follow(sequence.phase, DecodeEvent.PUSHED, "request", sequence.key).phase

    def _on_commit(self, link: int, message: PrefillCommitted, now_us: int) -> None:
        sequence = self._find_epoch(link, message.epoch, message.request)
        pushed = sequence.pushed_mask.bit_count()
        if (
            message.num_ids != sequence.reserve.num_ids
            or message.num_pages != sequence.prompt_pages
            or pushed != sequence.prompt_pages
            or message.first_token >= self.sizes.vocab_size
        ):
            why = (
                f"prefill rank {sequence.reserve.prefill_rank} committed {message.num_ids} ids and"
                f" {message.num_pages} pages, token {message.first_token}; reserved {sequence.reserve.num_ids} and"
                f" {sequence.prompt_pages}, {pushed} pages were pushed"
            )
            self._move(sequence, DecodeEvent.BAD_COMMIT, code="transfer_failed", why=why)
            return
        is_unread = self.sizes.checksums and sequence.phase is DecodePhase.GRANTED
        if sequence.phase is DecodePhase.GRANTED:
            sequence.committed_us, sequence.commit, sequence.next_token = now_us, message, message.first_token
            if sequence.sampling.grammar:
                sequence.said += message.first_token.to_bytes(4, "little")
        self._move(sequence, DecodeEvent.COMMIT_UNREAD if is_unread else DecodeEvent.COMMIT)

    def _find_epoch(self, link: int, epoch: int, request: int) -> Sequence:
        """That of the peer at this link: its epochs follow it to each new link of the same process."""
        sequence = self._epochs.get(epoch)
        if sequence is None or sequence.link != link or sequence.key[0] != request:
            peer = self._peers.find(link)
            assert peer is not None
            raise RemoteProtocolError(f"epoch {epoch} of request {request} is not granted to prefill rank {peer.rank}")
        return sequence

    def _on_peer_down(self, message: PeerDown) -> None:
        why = f"prefill rank {message.rank} died"
        link = self._peers.bury(message.rank, message.generation)
        if link is not None:
            # Nothing that this process said may be read any more, so its link is forgotten before its epochs end.
            self._peers.pop(link)
        for sequence in list(self._epochs.values()):
            if sequence.reserve.prefill_rank == message.rank and sequence.prefill_generation <= message.generation:
                self._move(sequence, DecodeEvent.PEER_DOWN, code="rank_lost", why=why)
        self.giver.on_peer_down(message.rank, message.generation)
        if self._peers.link_to(message.rank) is None:
            for sequence in [s for s in self._waiting if s.reserve.prefill_rank == message.rank]:
                self._move(sequence, DecodeEvent.PEER_DOWN, code="rank_lost", why=why)

    def _due_us(self, sequence: Sequence) -> int | None:
        """When a sequence has waited too long; None when nothing it waits for has a deadline."""
        if sequence.phase is DecodePhase.WAITING and self._peers.link_to(sequence.reserve.prefill_rank) is None:
            return sequence.arrived_us + self.sizes.grant_us
        if sequence.phase is DecodePhase.CHECKING:
            return sequence.committed_us + self.sizes.room_us
        peer = self._peers.find(sequence.link)
        if sequence.phase is DecodePhase.GRANTED and not sequence.pushed_mask and peer is not None:
            # News of any push counts: a prefill rank serves in order, so work on others is progress for this one.
            return max(sequence.granted_us, peer.news_us) + self.sizes.grant_us
        return None

    def _watch(self, sequence: Sequence) -> None:
        due_us = self._due_us(sequence)
        if due_us is not None:
            heapq.heappush(self._deadlines, (due_us, next(self._serial), sequence))

    def _move(
        self, sequence: Sequence, event: DecodeEvent, *, code: FailureCode = "transfer_failed", why: str = ""
    ) -> None:
        before = sequence.phase
        transition = DECODE.follow(before, event, "request", sequence.key)
        after = sequence.phase = transition.phase
        if before is not after:
            if before is DecodePhase.WAITING:
                self._waiting.remove(sequence)
            elif before is DecodePhase.RUNNING:
                if event is DecodeEvent.FINISH and self.sizes.hand_back is not None:
                    sequence.history = self.schedule.running.history_of(sequence)
                self.schedule.running.leave(sequence)
                sequence.is_offered = not self.draining and self.giver.is_worth(sequence)
            elif before in _WRITTEN and after is not DecodePhase.QUARANTINED:
                del self._epochs[sequence.epoch]
            if after is DecodePhase.CLOSED:
                del self.sequences[sequence.key]
        for action in transition.actions:
            match action:
                case Action.FAIL:
                    self._outbox.append(ToHead(build_failure(sequence.key, code, why)))
                case Action.ACK:
                    self._outbox.append(ToHead(RequestAborted(*sequence.key)))
                case Action.GRANT:
                    self._grant(sequence)
                case Action.OWN:
                    self.arena.adopt(sequence.granted, sequence.slab)
                case Action.READ_BACK:
                    self._read_back(sequence)
                case Action.RUN:
                    self._run(sequence)
                case Action.QUARANTINE:
                    self._quarantine(sequence)
                case Action.REVOKE:
                    self._outbox.append(ToPeer(sequence.link, GrantRevoked(sequence.key[0], sequence.epoch)))
                case Action.FINISH:
                    self._finish(sequence)
                case Action.FREE:
                    self._free(sequence, before)
                case _:
                    raise LocalProtocolError(f"{action.name} is not an action of {event.value}")

    def _grant(self, sequence: Sequence) -> None:
        sequence.epoch = self._next_epoch
        self._next_epoch += 1
        self._epochs[sequence.epoch] = sequence
        sequence.prompt_pages = count_pages(sequence.reserve.num_ids, self.sizes.step.page_tokens)
        sequence.granted = sequence.pages[: sequence.prompt_pages]
        self.arena.grant(sequence.granted, sequence.slab)
        word = PagesGranted(*sequence.key, epoch=sequence.epoch, slab=sequence.slab, num_pages=sequence.prompt_pages)
        self._outbox.append(ToPeer(sequence.link, word, sequence.granted.to_bytes()))
        self._watch(sequence)

    def _read_back(self, sequence: Sequence) -> None:
        # The slab came with the prompt's last pages.
        stretches = tuple(
            (sequence.pages[first : first + count], sequence.slab if first + count == sequence.prompt_pages else -1)
            for first, count, _ in sequence.told
        )
        self._reading[sequence.key] = sequence
        self._outbox.append(ReadBack(sequence.key, stretches))
        self._watch(sequence)

    def _run(self, sequence: Sequence) -> None:
        reserve, commit = sequence.reserve, sequence.commit
        assert commit is not None
        self._prompt_tokens += reserve.num_ids
        sequence.count = reserve.generated + 1
        self.schedule.running.join(sequence)
        word = RequestStarted(
            *sequence.key,
            prompt_tokens=sequence.prompt_tokens,
            # What earlier attempts had generated may be cached too.
            cached_tokens=min(commit.cached_tokens, sequence.prompt_tokens),
            prefill_rank=reserve.prefill_rank,
            decode_rank=self.sizes.rank,
            pushed_bytes=commit.pushed_bytes,
            pushes=commit.pushes,
            post_us=commit.post_us,
            timings=commit.timings,
        )
        self._started.append(ToHead(word))
        token = sequence.next_token
        self._generated_tokens += 1
        self._emitted.add(sequence.key, sequence.count - 1, token)
        if commit.first_scored is not None:
            self._scored.add(sequence.key, sequence.count - 1, commit.first_scored)
        sequence.reason = judge_token(token, sequence.count, sequence.limit, reserve.sampling, self.sizes.step.eos_ids)
        if sequence.reason is not None:
            self._move(sequence, DecodeEvent.FINISH)

    def _finish(self, sequence: Sequence) -> None:
        assert sequence.reason is not None
        word = RequestFinished(
            *sequence.key,
            reason=sequence.reason,
            completion_tokens=sequence.count,
            handoff_us=sequence.handoff_us,
        )
        self._outbox.append(ToHead(word))

    def _quarantine(self, sequence: Sequence) -> None:
        self.arena.quarantine(sequence.granted, sequence.slab)
        self.arena.pages.free(sequence.pages[sequence.prompt_pages :], PageState.OWNED)
        sequence.pages = sequence.granted

    def _free(self, sequence: Sequence, before: DecodePhase) -> None:
        """Gives back all memory of a closed request; what submitted steps or a reading name, only after their end."""
        match before:
            case DecodePhase.RUNNING | DecodePhase.CHECKING:
                self.arena.hold(sequence.pages, sequence.slab)
                self._held[sequence.key] = sequence
                if sequence.steps == 0 and sequence.key not in self._reading:
                    self._release(sequence)
            case DecodePhase.GRANTED:
                self.arena.free(sequence.granted, sequence.slab, PageState.GRANTED)
                self.arena.pages.free(sequence.pages[sequence.prompt_pages :], PageState.OWNED)
            case DecodePhase.QUARANTINED:
                self.arena.free(sequence.pages, sequence.slab, PageState.QUARANTINED)
            case _:
                raise LocalProtocolError(f"request {sequence.key}: nothing to free in state {before.value}")

    def _release(self, sequence: Sequence) -> None:
        """No step and no reading names its memory any more."""
        if sequence.is_offered:
            self._finished.append(sequence)
            return
        del self._held[sequence.key]
        self.arena.free(sequence.pages, sequence.slab, PageState.IN_FLIGHT)

    def _offer(self, sequence: Sequence, now_us: int) -> None:
        """Offers a finished turn to its prefill rank, if nothing here needs its memory; else gives that back."""
        link = self._peers.link_to(sequence.reserve.prefill_rank)
        peer = None if link is None else self._peers.find(link)
        is_taken = False
        if link is not None and peer is not None and not self._waiting and not self.draining:
            is_taken = self.giver.offer(sequence, link, peer.hello, now_us)
        if is_taken:
            del self._held[sequence.key]
        else:
            sequence.is_offered = False
            self._release(sequence)


_PHASE_TO_STATE = {
    DecodePhase.WAITING: PageState.FREE,
    DecodePhase.GRANTED: PageState.GRANTED,
    DecodePhase.QUARANTINED: PageState.QUARANTINED,
    DecodePhase.CHECKING: PageState.OWNED,
    DecodePhase.RUNNING: PageState.OWNED,
    DecodePhase.CLOSED: PageState.IN_FLIGHT,
}


def _holding(sequence: Sequence) -> Holding:
    state = _PHASE_TO_STATE[sequence.phase]
    if sequence.phase is not DecodePhase.GRANTED:
        return sequence.pages, sequence.slab, state, (), state
    return sequence.granted, sequence.slab, state, sequence.pages[sequence.prompt_pages :], PageState.OWNED
