"""PrefillSide: all decisions of a prefill rank, without any I/O.

Facts come in through `on_*` methods and step results; what to do about them is left in the outbox as effects. The step
actor is the only caller. States and transitions are `handoff.PREFILL`; this file finds the record, and carries out the
actions that a transition lists.

Order of service: a prompt computes once its ids, its grant and room for it are here; first granted, first served.
"""

from __future__ import annotations

import itertools

import numpy as np

from engine.core.arena import Arena
from engine.core.effects import DropLink, Effect, ExpectPush, PushFailure, StartPush, ToHead, ToPeer
from engine.core.handoff import PREFILL, Action, PrefillEvent, PrefillPhase
from engine.core.links import PeerTable
from engine.core.pages import PageState
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Prompt, RequestKey, build_failure, count_pages, find_misfit
from engine.core.reuse import PrefixCache
from engine.core.runs import Runs
from engine.core.schedule import Schedule, SideSizes, apply_result, plan_step
from engine.core.scores import find_score, split_prompt
from engine.core.taking import Taker
from engine.core.telemetry import Gauges
from engine.errors import LocalProtocolError, RemoteProtocolError
from transport.messages import (
    Abort,
    Drain,
    EpochEnded,
    FailureCode,
    ForgetPrompts,
    GrantRevoked,
    Message,
    PagesGranted,
    PagesPushed,
    PeerDown,
    PeerUp,
    PeerWelcome,
    PrefillCommitted,
    RequestAborted,
    StartPrefill,
)

_OUTLIVING = (PrefillPhase.ORPHANED, PrefillPhase.TAINTED, PrefillPhase.BURNT)
"""Phases in which a prompt stays behind when its decode rank is lost."""
_OVER = (PrefillPhase.ENDING, PrefillPhase.ORPHANED, PrefillPhase.TAINTED)
_WAITING = (PrefillPhase.STARTED, PrefillPhase.QUEUED)

_FAILURE_TO_EVENT: dict[PushFailure, PrefillEvent] = {
    "void": PrefillEvent.PUSH_VOID,
    "overdue": PrefillEvent.PUSH_OVERDUE,
    "failed": PrefillEvent.PUSH_FAILED,
}


class PrefillSide:
    """See the module. Times are microseconds of one monotonic clock."""

    def __init__(self, sizes: SideSizes) -> None:
        self.sizes = sizes
        self.arena = Arena(sizes.num_pages, sizes.num_slabs)
        self.cache = PrefixCache(
            self.arena,
            sizes.step.page_tokens,
            is_on=sizes.prefix_cache,
            takes_turns=sizes.hand_back is not None,
        )
        self.schedule = Schedule()
        self.draining = False
        self.prompts: dict[RequestKey, Prompt] = {}
        self._queue: dict[RequestKey, Prompt] = {}
        self._epochs: dict[tuple[int, int, int], Prompt] = {}
        self._peers: PeerTable[PeerWelcome] = PeerTable()
        self._unreachable: dict[int, str] = {}
        self._num_waiting = 0
        self._outbox: list[Effect] = []
        self.taker = Taker(sizes, self.arena, self.cache, lambda effect: self._outbox.append(effect))
        self._prompt_tokens = 0
        self._pushed_bytes = 0
        self._pushes = 0
        self._pushes_inflight = 0

    # ------------------------------------------------------------ facts

    def on_head(self, message: Message, blob: memoryview, now_us: int) -> None:
        """A frame of the head. Raises RemoteProtocolError for one that a prefill rank can not get."""
        match message:
            case StartPrefill():
                self._on_start(message, blob, now_us)
            case Abort():
                prompt = self.prompts.get((message.request, message.attempt))
                if prompt is None:
                    self._outbox.append(ToHead(RequestAborted(message.request, message.attempt)))
                else:
                    self._move(prompt, PrefillEvent.ABORT)
                    self._end_if_quiet(prompt)
            case PeerUp():
                self._unreachable.pop(message.rank, None)
            case PeerDown():
                self._on_peer_down(message)
            case ForgetPrompts():
                self.taker.give_way()
                self.cache.give_up_all()
            case Drain():
                self.draining = True
            case _:
                raise RemoteProtocolError(f"head sent {type(message).__name__} to a prefill rank")

    def on_link_up(self, link: int, welcome: Message, now_us: int) -> None:
        """A decode rank welcomed us. A link to the same rank that we still had is lost."""
        assert isinstance(welcome, PeerWelcome)
        old = self._peers.link_to(welcome.rank)
        if old is not None:
            self.on_link_lost(old)
        self._unreachable.pop(welcome.rank, None)
        self._peers.add(link, welcome)
        self.taker.on_link_up(link, welcome)

    def on_link_lost(self, link: int) -> None:
        """The pair stream ended. Unknown links were replaced or given up before."""
        peer = self._peers.pop(link)
        if peer is None:
            return
        self.taker.on_link_lost(link)
        for prompt in list(self.prompts.values()):
            if prompt.link == link or (prompt.phase is PrefillPhase.STARTED and prompt.decode_rank == peer.rank):
                self._lose(prompt)

    def on_unreachable(self, rank: int, why: str) -> None:
        """Dialling a decode rank was given up: nothing that needs it can start, until the next PeerUp."""
        if self._peers.link_to(rank) is None:
            self._unreachable[rank] = f"decode rank {rank} can not be reached from rank {self.sizes.rank}: {why}"
            self._lose_started(rank)

    def on_peer(self, link: int, message: Message, blob: memoryview, now_us: int) -> None:
        """A frame of a decode rank. Raises RemoteProtocolError when the link must be dropped."""
        peer = self._peers.find(link)
        if peer is None:
            return
        match message:
            case PagesGranted():
                self._on_grant(link, peer, message, blob)
            case GrantRevoked():
                prompt = self._epochs.get((peer.rank, peer.generation, message.epoch))
                if prompt is None:
                    # Ended before, and the word of it crossed the revoke or was lost with an older link.
                    self._outbox.append(ToPeer(link, EpochEnded(message.request, message.epoch)))
                    return
                if prompt.phase is PrefillPhase.ORPHANED:
                    prompt.link = link
                self._move(prompt, PrefillEvent.REVOKE)
                self._end_if_quiet(prompt)
            case _ if self.taker.on_peer(
                link, peer, message, blob, now_us, is_busy=bool(self._queue), is_draining=self.draining
            ):
                pass
            case _:
                raise RemoteProtocolError(f"decode rank {peer.rank} sent {type(message).__name__}")

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
        """Pages [first, first + count) of a prompt's grant are written."""
        prompt = self.prompts[key]
        self._count_push_end(prompt)
        prompt.arrived += count
        prompt.pushed_bytes += num_bytes
        prompt.num_pushes += 1
        prompt.post_us += post_us
        self._pushed_bytes += num_bytes
        self._pushes += 1
        for action in self._advance(prompt, PrefillEvent.PUSHED):
            assert action is Action.TELL
            assert prompt.grant is not None
            word = PagesPushed(prompt.key[0], prompt.grant.epoch, first, count, num_bytes, checksum)
            self._outbox.append(ToPeer(prompt.link, word))
        if prompt.phase is PrefillPhase.WORKING:
            if prompt.arrived == len(prompt.pages) and prompt.computed == prompt.num_ids and prompt.is_quiet:
                self._move(prompt, PrefillEvent.COMPLETE, now_us=now_us)
        else:
            self._end_if_quiet(prompt)

    def on_push_failed(self, key: RequestKey, why: str, how: PushFailure) -> None:
        """A push went wrong. The link is dropped: what carries bytes to that peer has to be made anew."""
        prompt = self.prompts[key]
        if how != "overdue":
            self._count_push_end(prompt)
        if how == "failed" and self._peers.is_dead(prompt.decode_rank, prompt.decode_generation):
            how = "void"
        self._move(prompt, _FAILURE_TO_EVENT[how], code="transfer_failed", why=why)
        if self._peers.find(prompt.link) is not None:
            self._outbox.append(DropLink(prompt.link, why))
        self._end_if_quiet(prompt)

    def on_pages_read(self, key: RequestKey, checksums: tuple[int, ...], now_us: int) -> None:
        """What was written for a turn was read back."""
        self.taker.on_pages_read(key, checksums, now_us)

    def fail_all(self, code: FailureCode, why: str) -> None:
        """The rank gives up: every request that was not answered fails. Nothing may be called after this."""
        for prompt in self.prompts.values():
            if prompt.phase in (*_WAITING, PrefillPhase.WORKING):
                self._outbox.append(ToHead(build_failure(prompt.key, code, why)))

    # ------------------------------------------------------------ steps

    def settle(self, now_us: int) -> None:
        """Gives memory to the prompts that wait for it, in order. Call before planning."""
        while self._queue:
            prompt = next(iter(self._queue.values()))
            if not self.cache.admit(prompt, now_us):
                self.taker.give_way()
                break
            del self._queue[prompt.key]
            self._move(prompt, PrefillEvent.ADMIT)
            self.schedule.prompts.append(prompt)
        # While others compute, their memory comes by itself.
        is_stuck = bool(self._queue) and all(p.phase is not PrefillPhase.WORKING for p in self.prompts.values())
        self.taker.look(is_short=is_stuck, now_us=now_us)

    def plan(self, now_us: int) -> StepPlan | None:
        """The next step, or None when no prompt has ids left to plan."""
        limits = self.sizes.step
        self.cache.reserve(self.schedule.prompts[: limits.prompts], limits.chunk_tokens)
        plan = plan_step(self.schedule, limits)
        if plan is not None:
            for prompt, num_ids, is_last in self.schedule.flights[-1].chunks:
                is_first = prompt.planned == prompt.cached + num_ids
                if is_first:
                    prompt.submitted_us = now_us
                if is_last:
                    # Nobody waits for the pushes before it.
                    begin = 0 if is_first else (prompt.planned - num_ids) // limits.page_tokens
                    self._outbox.append(ExpectPush(self._build_push(prompt, begin, is_last=True)))
        return plan

    def apply(self, result: StepResult, now_us: int) -> None:
        """What an awaited step means."""
        applied = apply_result(self.schedule, result, self.sizes.step)
        for prompt, scores in applied.target_scores:
            if prompt.phase is PrefillPhase.WORKING:
                assert prompt.grant is not None
                for word, blob in split_prompt(prompt.key, prompt.grant.epoch, scores):
                    self._outbox.append(ToPeer(prompt.link, word, blob))
        for place, (prompt, token, num_ids, is_last) in enumerate(applied.chunks):
            self._prompt_tokens += num_ids
            if is_last:
                assert token is not None
                prompt.first_token, prompt.computed_us = token, now_us
                prompt.first_scored = find_score(applied.chunk_scores, place)
            for action in self._advance(prompt, PrefillEvent.CHUNK):
                assert action is Action.PUSH
                self._push(prompt, is_last)
            self._end_if_quiet(prompt)

    # ------------------------------------------------------------ what others ask

    def take_outbox(self) -> list[Effect]:
        """All effects since the last call, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    @property
    def next_deadline_us(self) -> int | None:
        """Of turns only: a prompt's waits end by messages, transfers and links, each bounded where it is made."""
        return self.taker.next_us

    def expire(self, now_us: int) -> None:
        """Gives turns up that do not come."""
        self.taker.expire(now_us)

    @property
    def is_drained(self) -> bool:
        """Nothing is left to do; grants whose prompts will not come, and burnt epochs, end with this process."""
        done = (PrefillPhase.GRANTED, PrefillPhase.BURNT)
        return self.draining and all(prompt.phase in done for prompt in self.prompts.values())

    def gauges(self) -> Gauges:
        pages = self.arena.pages
        cached, granted = pages.count(PageState.CACHED), pages.count(PageState.GRANTED)
        quarantined = pages.count(PageState.QUARANTINED)
        return Gauges(
            running=sum(p.phase is PrefillPhase.WORKING for p in self.prompts.values()),
            waiting=self._num_waiting,
            pages_free=pages.num_free,
            pages_owned=pages.total - pages.num_free - cached - granted - quarantined,
            pages_granted=granted,
            pages_quarantined=quarantined,
            pages_total=pages.total,
            slabs_free=self.arena.slabs.num_free,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=0,
            pushed_bytes=self._pushed_bytes,
            pushes=self._pushes,
            pushes_inflight=self._pushes_inflight,
            corrupt_pushes=self.taker.num_corrupt,
            pages_cached=cached,
            pages_pinned=self.cache.count_pinned_pages(),
            slabs_cached=self.cache.num_cuts,
            prefix=self.cache.counts(),
            turns=self.taker.counts(),
        )

    def check(self) -> None:
        """Raises LocalProtocolError unless all memory is accounted for. Costs O(pages)."""
        prompts = list(self.prompts.values())
        self.arena.check(itertools.chain(self.cache.holdings(prompts), self.taker.holdings()))
        self.cache.check(prompts)

    # ------------------------------------------------------------ inside

    def _on_start(self, message: StartPrefill, blob: memoryview, now_us: int) -> None:
        key = (message.request, message.attempt)
        prompt = self.prompts.get(key)
        if prompt is None:
            prompt = self.prompts[key] = Prompt(key, message.decode_rank)
        elif prompt.start is not None:
            raise RemoteProtocolError(f"request {key}: StartPrefill twice")
        prompt.start, prompt.ids, prompt.started_us = message, blob, now_us
        refusal = self._refusal(message, blob)
        if refusal is not None:
            self._move(prompt, PrefillEvent.REFUSE, code=refusal[0], why=refusal[1])
        else:
            self._move(prompt, PrefillEvent.START)

    def _refusal(self, message: StartPrefill, blob: memoryview) -> tuple[FailureCode, str] | None:
        sizes = self.sizes
        if self.draining:
            return "draining", f"rank {sizes.rank} is draining"
        if message.decode_rank in self._unreachable:
            return "rank_lost", self._unreachable[message.decode_rank]
        if self._num_waiting >= sizes.max_waiting:
            return "queue_full", f"requests waiting on rank {sizes.rank} (limit {sizes.max_waiting})"
        num_ids = len(blob) // 4
        misfit = find_misfit(num_ids, message.generated, message.sampling, sizes.max_model_tokens, sizes.vocab_size)
        if misfit is not None:
            return misfit
        if message.sampling.grammar and sizes.why_no_grammar:
            return "bad_request", f"no text can follow a grammar here: {sizes.why_no_grammar}"
        if count_pages(num_ids, sizes.step.page_tokens) > sizes.num_pages:
            return "too_long", f"{num_ids} ids do not fit on rank {sizes.rank} ({sizes.num_pages} pages)"
        # Unsigned, so that one comparison finds negative ids too: an id outside the table would take the device down.
        most = int(np.frombuffer(blob, "<u4").max())
        if most >= sizes.vocab_size:
            return "bad_request", f"token id {most} is outside the vocabulary ({sizes.vocab_size} ids)"
        return None

    def _on_grant(self, link: int, peer: PeerWelcome, message: PagesGranted, blob: memoryview) -> None:
        if len(blob) != 4 * message.num_pages:
            raise RemoteProtocolError(f"epoch {message.epoch}: {len(blob)} bytes name {message.num_pages} pages")
        pages = Runs.from_bytes(bytes(blob))
        if not pages or not pages.is_within(peer.num_pages):
            raise RemoteProtocolError(f"epoch {message.epoch}: page ids outside the peer's {peer.num_pages} pages")
        if message.slab >= peer.num_slabs:
            raise RemoteProtocolError(f"epoch {message.epoch}: slab {message.slab} of {peer.num_slabs}")
        epoch_key = (peer.rank, peer.generation, message.epoch)
        key = (message.request, message.attempt)
        prompt = self.prompts.get(key)
        if prompt is None:
            prompt = self.prompts[key] = Prompt(key, peer.rank)
        if prompt.decode_rank != peer.rank or prompt.grant is not None or epoch_key in self._epochs:
            raise RemoteProtocolError(f"epoch {message.epoch} of decode rank {peer.rank}: not for request {key}")
        prompt.grant, prompt.link, prompt.decode_generation = message, link, peer.generation
        prompt.remote_pages = pages
        self._epochs[epoch_key] = prompt
        self._move(prompt, PrefillEvent.GRANT)

    def _on_peer_down(self, message: PeerDown) -> None:
        link = self._peers.bury(message.rank, message.generation)
        if link is not None:
            self.on_link_lost(link)
        elif self._peers.link_to(message.rank) is None:
            self._lose_started(message.rank)
        for prompt in list(self._epochs.values()):
            is_dead = prompt.decode_rank == message.rank and prompt.decode_generation <= message.generation
            if is_dead and prompt.phase in _OUTLIVING:
                self._move(prompt, PrefillEvent.PEER_DOWN)
        self.taker.on_peer_down(message.rank, message.generation)

    def _lose_started(self, rank: int) -> None:
        for prompt in list(self.prompts.values()):
            if prompt.phase is PrefillPhase.STARTED and prompt.decode_rank == rank:
                self._lose(prompt)

    def _lose(self, prompt: Prompt) -> None:
        lost = f"prefill rank {self.sizes.rank} lost its link to decode rank {prompt.decode_rank}"
        why = self._unreachable.get(prompt.decode_rank, lost)
        self._move(prompt, PrefillEvent.LINK_LOST, code="rank_lost", why=why)
        self._end_if_quiet(prompt)

    def _count_push_end(self, prompt: Prompt) -> None:
        prompt.pushes -= 1
        self._pushes_inflight -= 1

    def _end_if_quiet(self, prompt: Prompt) -> None:
        if prompt.phase in _OVER and prompt.is_quiet:
            self._move(prompt, PrefillEvent.QUIET)

    def _advance(self, prompt: Prompt, event: PrefillEvent) -> tuple[Action, ...]:
        transition = PREFILL.follow(prompt.phase, event, "request", prompt.key)
        self._num_waiting += (transition.phase in _WAITING) - (prompt.phase in _WAITING)
        was_working = prompt.phase is PrefillPhase.WORKING
        prompt.phase = transition.phase
        if was_working and transition.phase is not PrefillPhase.WORKING and prompt in self.schedule.prompts:
            self.schedule.prompts.remove(prompt)
        if transition.phase is not PrefillPhase.QUEUED:
            self._queue.pop(prompt.key, None)
        if transition.phase is PrefillPhase.CLOSED:
            del self.prompts[prompt.key]
            if prompt.grant is not None:
                del self._epochs[(prompt.decode_rank, prompt.decode_generation, prompt.grant.epoch)]
        return transition.actions

    def _move(
        self,
        prompt: Prompt,
        event: PrefillEvent,
        *,
        code: FailureCode = "transfer_failed",
        why: str = "",
        now_us: int = 0,
    ) -> None:
        for action in self._advance(prompt, event):
            match action:
                case Action.FAIL:
                    self._outbox.append(ToHead(build_failure(prompt.key, code, why)))
                case Action.ACK:
                    self._outbox.append(ToHead(RequestAborted(*prompt.key)))
                case Action.ENQUEUE:
                    self._enqueue(prompt)
                case Action.END_EPOCH:
                    assert prompt.grant is not None
                    self._outbox.append(ToPeer(prompt.link, EpochEnded(prompt.key[0], prompt.grant.epoch)))
                case Action.COMMIT:
                    self._commit(prompt, now_us)
                case Action.FREE if event is PrefillEvent.COMPLETE:
                    self.cache.donate(prompt, now_us)
                case Action.FREE:
                    self.cache.give_back(prompt)
                case _:
                    raise LocalProtocolError(f"{action.name} is not an action of {event.value}")

    def _enqueue(self, prompt: Prompt) -> None:
        assert prompt.start is not None and prompt.grant is not None
        granted = len(prompt.remote_pages)
        if granted != count_pages(prompt.num_ids, self.sizes.step.page_tokens):
            why = f"{prompt.num_ids} ids do not fill the {granted} pages that decode rank {prompt.decode_rank} granted"
            self._move(prompt, PrefillEvent.BAD_GRANT, code="transfer_failed", why=why)
        else:
            self._queue[prompt.key] = prompt

    def _push(self, prompt: Prompt, is_last: bool) -> None:
        push = self._build_push(prompt, prompt.pushed, is_last)
        assert push.count > 0
        prompt.pushed += push.count
        prompt.pushes += 1
        self._pushes_inflight += 1
        self._outbox.append(push)

    def _build_push(self, prompt: Prompt, first: int, is_last: bool) -> StartPush:
        """Of the pages from `first` on that are full; the last one takes all of them."""
        end = len(prompt.pages) if is_last else prompt.computed // self.sizes.step.page_tokens
        assert prompt.grant is not None
        slabs = (prompt.slab, prompt.grant.slab) if is_last else None
        pages, remote = prompt.pages[first:end], prompt.remote_pages[first:end]
        return StartPush(prompt.key, prompt.link, first, end - first, pages, remote, slabs)

    def _commit(self, prompt: Prompt, now_us: int) -> None:
        assert prompt.grant is not None
        word = PrefillCommitted(
            request=prompt.key[0],
            epoch=prompt.grant.epoch,
            num_ids=prompt.num_ids,
            num_pages=len(prompt.pages),
            first_token=prompt.first_token,
            pushed_bytes=prompt.pushed_bytes,
            pushes=prompt.num_pushes,
            post_us=prompt.post_us,
            timings=prompt.timings(now_us),
            first_scored=prompt.first_scored,
            cached_tokens=prompt.cached,
        )
        self._outbox.append(ToPeer(prompt.link, word))
