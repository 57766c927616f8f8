"""Router: the table of requests in the head. It decides who computes what, and tells both ranks at once.

The Router is a table with methods, not a task: clients' connections and ranks' links call it with what they received,
it answers by posting frames, and no method waits. So every event is applied whole, in the order in which it came. Only
tokens, and the word of an end that comes with them, stay for a turn of the loop (see `forward`), and nothing that is
said of their request overtakes them.

A request's life here:

    submit -> waiting -> placed -> ended             (finished, or failed by a rank)
                 |          `----> aborting -> gone  (cancelled, client gone, or its other rank lost)
                 `-> ended                           (cancelled or refused while it waited)

Invariants: a client hears exactly one RequestFinished or RequestFailed per submission, and nothing of the request after
it (rows of ended requests are dropped here, which is what makes every failure *definite*). An aborting request counts
on its ranks until each has answered or is dead: the head never believes a rank to be emptier than it is. Prompt ids
are dropped once they were sent; the requester keeps them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgspec
import trio

from engine.actors.admission import check_submission
from engine.actors.forward import Forwarder
from engine.actors.listing import list_requests
from engine.actors.rows import RowTable
from engine.actors.seats import Client, Entry, Part, Seat
from engine.core.affinity import Affinities, affinity_key
from engine.core.backlog import Backlog
from engine.core.pace import Pace
from engine.core.routing import BrokenPairs, Pair, can_ever_hold, choose_pair
from engine.core.trace import trace_of
from engine.core.traffic import Traffic
from engine.errors import RemoteProtocolError, RequestRefused
from engine.log import log_event
from transport.messages import (
    TEXT_LIMIT,
    Abort,
    AskRequests,
    CancelRequest,
    FailureCode,
    ForgetPrompts,
    LogprobsEmitted,
    PromptScored,
    RankReady,
    RankSnapshot,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestsReport,
    RequestStarted,
    ReservePages,
    Role,
    StartPrefill,
    Submit,
    TokensEmitted,
    TrafficReport,
)
from transport.stream import FrameStream
from transport.wire import Frame

logger = logging.getLogger("engine.router")

_PAIR_LOST = ("rank_lost", "transfer_failed", "kv_corrupt")
"""Failures that may lie between the two ranks: another pair is tried first for a while."""
_PUSH_FAILED = ("transfer_failed", "kv_corrupt")
"""Of these, the ones of pushes."""
_CANCELLED_BY_OPERATOR = "an operator of the engine cancelled this request"


@dataclasses.dataclass(frozen=True, slots=True)
class RouterLimits:
    """The numbers of `Limits` and of the model that routing needs."""

    queue_requests: int
    queue_prompt_tokens: int
    client_inflight: int
    rank_waiting: int
    abort_s: float
    vocab_size: int
    max_model_tokens: int
    ttft_limit_us: int = 0
    itl_limit_us: int = 0
    queue_wait_s: float = 0.0
    prefix_cache: bool = True
    """Whether prefill ranks keep prompts: then a prompt goes where its beginning is."""


class Router:
    """See the module. All methods are synchronous and are called from one trio loop."""

    def __init__(self, limits: RouterLimits) -> None:
        self._limits = limits
        self._rows = RowTable()
        self.tokens = Forwarder(self._forward, self._blame)
        """Tokens of ranks on their way to clients; the head runs it."""
        self._entries: dict[int, Entry] = {}
        self._clients: dict[int, Client] = {}
        self._seats: dict[int, Seat] = {}
        self._next_client = 1
        self._broken = BrokenPairs()
        self._affinities = Affinities()
        self._backlog: Backlog[Entry] = Backlog(max_requests=limits.queue_requests, max_ids=limits.queue_prompt_tokens)
        self._pace = Pace()
        self._idle = trio.Event()
        self._idle.set()
        self._drained: set[int] = set()
        self._traffic = Traffic(ttft_limit_us=limits.ttft_limit_us, itl_limit_us=limits.itl_limit_us)
        self.is_draining = False

    # ------------------------------------------------------------ what others may know

    @property
    def num_waiting(self) -> int:
        return self._backlog.num_requests

    @property
    def num_finished(self) -> int:
        return self._traffic.finished

    @property
    def num_failed(self) -> int:
        """Refused ones are among them."""
        return self._traffic.failed + self._traffic.refused

    @property
    def num_cancelled(self) -> int:
        return self._traffic.cancelled

    @property
    def num_running(self) -> int:
        """Requests that are on ranks and that somebody still waits for."""
        return sum(1 for entry in self._entries.values() if entry.prefill is not None and entry.client is not None)

    def ready_roles(self) -> frozenset[Role]:
        return frozenset(seat.role for seat in self._seats.values())

    def requests_on(self, rank: int) -> int:
        """Requests that a rank has, as far as the head knows; 0 while it is not ready."""
        seat = self._seats.get(rank)
        return 0 if seat is None else len(seat.parts)

    def traffic(self) -> TrafficReport:
        """Totals and latencies since the start."""
        return self._traffic.report(
            trio.current_time(),
            waiting=self._backlog.num_requests,
            waiting_tokens=self._backlog.num_ids,
            running=self.num_running,
        )

    def missed_limits(self) -> tuple[str, ...]:
        """One sentence for each latency limit of the operator that was missed over the last minute."""
        return self._traffic.missed_limits(trio.current_time())

    def list_requests(self, ask: AskRequests) -> RequestsReport:
        """What has not ended, the oldest first."""
        return list_requests(self._entries.values(), ask, self._rows.generated, trio.current_time())

    async def wait_idle(self) -> None:
        """Until no request is left, neither waiting nor on a rank, and all that was said of them is told."""
        while self._entries:
            await self._idle.wait()
        self.tokens.flush()

    # ------------------------------------------------------------ clients

    def client_joined(self, name: str, link: FrameStream, drop: Callable[[str], None]) -> Client:
        client = Client(self._next_client, name, link, drop)
        self._next_client += 1
        self._clients[client.key] = client
        return client

    def client_left(self, client: Client) -> None:
        """Its requests are aborted wherever they are; nobody waits for them any more."""
        self.tokens.flush()
        del self._clients[client.key]
        client.dropped = True
        for number in list(client.request_to_number.values()):
            entry = self._entries[number]
            self._traffic.cancelled += 1
            self._forget_client(entry)
            self._give_up(entry, "client gone")
        self._dispatch()

    def client_frames(self, client: Client, frames: Iterable[Frame]) -> None:
        """Applies what a client sent.

        Raises:
            RemoteProtocolError: the client uses a number for two requests at a time.
        """
        for frame in frames:
            message = frame.message
            if isinstance(message, Submit):
                self._submit(client, message, frame.blob)
            elif isinstance(message, CancelRequest):
                self._cancel(client, message)
            else:
                raise RemoteProtocolError(f"{type(message).__name__} is not allowed after the hello")
        self._dispatch()

    def _submit(self, client: Client, message: Submit, blob: bytes | memoryview) -> None:
        if message.request in client.request_to_number:
            # A RequestFailed would be taken for the end of the request that has the number.
            raise RemoteProtocolError(f"request number {message.request} is in use on this connection")
        try:
            self._check(client, message, blob)
        except RequestRefused as refusal:
            self._traffic.refused += 1
            log_event(
                logger, "info", "request.refuse", code=refusal.code, label=message.label or None,
                trace_id=trace_of(message.label), msg=str(refusal),
            )
            client.tell(
                RequestFailed(
                    request=message.request,
                    attempt=message.attempt,
                    code=cast(FailureCode, refusal.code),
                    message=str(refusal),
                    definite=True,
                    retryable=refusal.retryable,
                )
            )
            return
        number = self._rows.open(client.key, message.request, message.attempt, message.generated)
        num_ids = len(blob) // 4
        now = trio.current_time()
        entry = Entry(number, client, message, num_ids, blob, now, client_name=client.name, state_at=now)
        if self._limits.prefix_cache:
            entry.affinity = affinity_key(message.affinity, message.cache_salt, blob)
        self._traffic.accepted += 1
        self._entries[number] = entry
        client.request_to_number[message.request] = number
        self._backlog.add(number, entry, priority=message.priority, num_ids=num_ids)
        if self._idle.is_set():
            self._idle = trio.Event()

    def _check(self, client: Client, message: Submit, blob: bytes | memoryview) -> None:
        limits = self._limits
        if self.is_draining:
            raise RequestRefused("draining", "the engine is shutting down", retryable=True)
        check_submission(message, blob, vocab_size=limits.vocab_size, max_model_tokens=limits.max_model_tokens)
        if len(client.request_to_number) >= limits.client_inflight:
            raise RequestRefused(
                "queue_full",
                f"this client has {limits.client_inflight} unfinished requests (the limit)",
                retryable=True,
            )
        full = self._backlog.why_full(len(blob) // 4)
        if full is None and limits.queue_wait_s:
            before = self._backlog.num_before(message.priority)
            wait_s = self._pace.predict_s(before, trio.current_time())
            if wait_s > limits.queue_wait_s:
                full = f"{before} requests are before this one, some {wait_s:.1f} s (limits.queue_wait_s)"
        if full is not None:
            raise RequestRefused("queue_full", f"the engine is full: {full}", retryable=True)

    def _cancel(self, client: Client, message: CancelRequest) -> None:
        number = client.request_to_number.get(message.request)
        if number is None:
            return  # it ended while the cancellation was on its way: its end was told
        entry = self._entries[number]
        if message.is_complete and entry.complete_at is None:
            self.tokens.flush()
            entry.complete_at = trio.current_time(), self._rows.generated(number)
        self._cancel_entry(entry, "cancelled while it waited", "cancelled")

    def _cancel_entry(self, entry: Entry, words_waiting: str, words: str) -> None:
        """What is being given up already is left to that."""
        if entry.prefill is None:
            self._fail(entry, "cancelled", words_waiting, retryable=False)
        elif not entry.is_aborting:
            entry.cancel_words = words
            # Rows pass until the ranks have answered, so that a RequestFinished may overtake with nothing missing.
            entry.abort_deadline = trio.current_time() + self._limits.abort_s
            self._abort_parts(entry)
            self._settle(entry)

    # ------------------------------------------------------------ ranks

    def rank_ready(
        self, generation: int, role: Role, link: FrameStream, ready: RankReady, fault: Callable[[str], None]
    ) -> None:
        """The rank takes requests from now on, unless it is drained. PeerUp was posted to ranks that need it before."""
        self._seats[ready.rank] = Seat(generation, role, link, ready, fault, is_drained=ready.rank in self._drained)
        self._dispatch()

    def rank_snapshot(self, snapshot: RankSnapshot) -> None:
        seat = self._seats.get(snapshot.rank)
        if seat is not None:
            seat.note_quarantine(snapshot.pages_quarantined)

    def rank_frames(self, rank: int, frames: Iterable[Frame]) -> None:
        """Applies what a ready rank sent about requests.

        Raises:
            RemoteProtocolError: the rank broke the protocol; its process should be ended.
        """
        for frame in frames:
            message = frame.message
            if isinstance(message, TokensEmitted):
                self._hear_tokens(rank, message, frame.blob)
            elif isinstance(message, LogprobsEmitted):
                self.tokens.flush()
                for key, part, columns in self._rows.split_scores(message, frame.blob):
                    self._clients[key].tell(part, columns)
            elif isinstance(message, PromptScored):
                entry = self._lookup(rank, message.request, message.attempt)
                if entry is not None and entry.client is not None:
                    word = msgspec.structs.replace(message, request=entry.submit.request)
                    entry.client.tell(word, bytes(frame.blob))
            elif isinstance(message, RequestStarted):
                self._started(rank, message)
            elif isinstance(message, RequestFinished):
                self._finished(rank, message)
            elif isinstance(message, RequestFailed):
                self._failed(rank, message)
            elif isinstance(message, RequestAborted):
                self._aborted(rank, message)
            else:
                raise RemoteProtocolError(f"{type(message).__name__} is not allowed once a rank is ready")
        self._dispatch()

    def rank_lost(self, rank: int, why: str) -> None:
        """The rank takes no more; requests that needed it fail, and may be tried again at once."""
        seat = self._seats.pop(rank, None)
        if seat is None:
            return
        self._broken.forget(rank)
        self._affinities.forget(rank)
        for number in list(seat.parts):
            entry = self._entries[number]
            seat.release(number)
            if entry.is_aborting:
                entry.awaited.discard(rank)
                self._settle(entry)
            else:
                self._fail(entry, "rank_lost", f"{seat.role} rank {rank} is lost: {why}", retryable=True)
        self._dispatch()

    def _hear_tokens(self, rank: int, message: TokensEmitted, blob: bytes | memoryview) -> None:
        seat = self._seats.get(rank)
        if seat is not None:
            self._traffic.note_turn(seat.turns, message.num_rows, trio.current_time())
        self.tokens.add(rank, message, blob)

    def _forward(self, message: TokensEmitted, blob: bytes | memoryview) -> None:
        for key, part, columns in self._rows.split(message, blob).parts:
            self._traffic.generated_tokens += part.num_tokens
            self._clients[key].tell(part, columns)

    def _blame(self, rank: int, why: str) -> None:
        seat = self._seats.get(rank)
        if seat is not None:
            seat.fault(why)

    def _started(self, rank: int, message: RequestStarted) -> None:
        entry = self._lookup(rank, message.request, message.attempt)
        if entry is None:
            return
        entry.started = message
        entry.started_at = trio.current_time()
        if not entry.is_aborting:
            entry.state_at = entry.started_at
        seat = self._seats.get(rank)
        if seat is not None:
            is_first = message.attempt == 1 and entry.client is not None
            self._traffic.note_start(seat.turns, entry.number, message, entry.queued_at if is_first else None)
        if entry.prefill is not None and entry.prefill not in entry.awaited:
            self._note_computed(entry, entry.prefill, message.cached_tokens)
            self._release(entry, entry.prefill)  # it has done its part
        if entry.client is not None:
            entry.client.tell(msgspec.structs.replace(message, request=entry.submit.request))

    def _note_computed(self, entry: Entry, rank: int, cached: int) -> None:
        seat = self._seats.get(rank)
        if entry.affinity and seat is not None and entry.number in seat.parts and not seat.is_drained:
            num_ids, guessed = entry.num_ids, entry.guessed
            self._affinities.note(entry.affinity, rank, num_ids=num_ids, guessed=guessed, cached=cached)

    def _finished(self, rank: int, message: RequestFinished) -> None:
        entry = self._lookup(rank, message.request, message.attempt)
        if entry is None:
            return
        started = entry.started
        if started is None:
            raise RemoteProtocolError(f"request {message.request} finished without a start")
        client, request = entry.client, entry.submit.request
        if client is not None:
            self._traffic.note_finish(message)
            self._note_stages(entry, trio.current_time(), message.completion_tokens)
            self._log_finish(entry, started, message)
            del client.request_to_number[request]
            entry.client = None
            word = msgspec.structs.replace(message, request=request)
            self.tokens.behind(functools.partial(client.tell, word))
        self._remove(entry)

    def _note_stages(self, entry: Entry, ended_at: float, num_tokens: int) -> None:
        started = entry.started
        if started is not None and entry.submit.attempt == 1:
            queue_us = started.timings.queue_us
            self._traffic.stages.note(entry.queued_at, queue_us, entry.started_at, ended_at, num_tokens)

    def _failed(self, rank: int, message: RequestFailed) -> None:
        entry = self._lookup(rank, message.request, message.attempt)
        if entry is None or entry.is_aborting:
            return  # an aborting request ends by RequestAborted, which always comes
        self._traffic.push_failures += message.code in _PUSH_FAILED
        if message.code in _PAIR_LOST and entry.prefill is not None and entry.decode is not None:
            self._broken.mark(entry.prefill, entry.decode, trio.current_time())
        self._release(entry, rank)
        self._fail(entry, message.code, f"rank {rank}: {message.message}", retryable=message.retryable)

    def _aborted(self, rank: int, message: RequestAborted) -> None:
        entry = self._entries.get(message.request)
        if entry is not None and rank in entry.awaited:
            entry.awaited.discard(rank)
            self._release(entry, rank)
            self._settle(entry)

    def _lookup(self, rank: int, number: int, attempt: int) -> Entry | None:
        """The request, if this rank has to do with it and means this attempt."""
        entry = self._entries.get(number)
        if entry is None or entry.submit.attempt != attempt or rank not in (entry.prefill, entry.decode):
            return None
        return entry

    # ------------------------------------------------------------ operators

    def cancel_requests(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Ends requests, by the numbers of `list_requests`, as their clients could: one that finishes meanwhile has
        finished, and one that ends already is left alone.

        Returns:
            Those that had not ended, in the order given, each once.
        """
        known = tuple(number for number in dict.fromkeys(numbers) if number in self._entries)
        for number in known:
            self._cancel_entry(self._entries[number], _CANCELLED_BY_OPERATOR, _CANCELLED_BY_OPERATOR)
        self._dispatch()
        return known

    def set_drained(self, rank: int, drained: bool) -> None:
        """From now on, through all lives of the rank, no new requests go there; or they do again."""
        (self._drained.add if drained else self._drained.discard)(rank)
        seat = self._seats.get(rank)
        if seat is not None:
            seat.set_drained(drained)
        if drained:
            self._affinities.forget(rank)
        else:
            self._dispatch()

    def forget_prompts(self) -> int:
        """Has prefill ranks give up what their prefix caches keep, and forgets who has what; how many ranks."""
        seats = [(rank, seat) for rank, seat in self._seats.items() if seat.role == "prefill"]
        for rank, seat in seats:
            seat.tell(ForgetPrompts())
            self._affinities.forget(rank)
        return len(seats)

    # ------------------------------------------------------------ the head

    def drain(self) -> None:
        """New submissions are refused; what is here goes on."""
        self.is_draining = True

    def fail_all(self, message: str) -> None:
        """Ends every request for its client, because the ranks are going away."""
        for entry in list(self._entries.values()):
            self._fail(entry, "draining", message, retryable=True)

    def expire(self) -> None:
        """Ends the waiting for ranks that have not answered an Abort in time. The ranks still count as busy with it."""
        now = trio.current_time()
        for entry in list(self._entries.values()):
            if entry.abort_deadline is not None and entry.abort_deadline <= now:
                entry.abort_deadline = None
                log_event(
                    logger,
                    "warning",
                    "request.abort_late",
                    request=entry.number,
                    ranks=sorted(entry.awaited),
                    msg=f"no RequestAborted within limits.abort_s ({self._limits.abort_s:g} s)",
                )
                self._tell_failed(entry, "cancelled", entry.cancel_words, retryable=False)

    def mark_traffic(self) -> None:
        """Lets the minute of the latency limits go on; call it about every second."""
        self._traffic.mark(trio.current_time())

    # ------------------------------------------------------------ inner moves

    def _dispatch(self) -> None:
        """Places waiting requests, strictly in their order, as long as ranks may take more."""
        if self._backlog.first() is not None:
            self._place_all()
        is_empty = self._backlog.first() is None
        # When a line is empty does not matter, and to ask for the time costs more than all else here.
        self._pace.note_line(0.0 if is_empty else trio.current_time(), is_empty=is_empty)

    def _place_all(self) -> None:
        while True:
            entry = self._backlog.first()
            if entry is None:
                return
            prefill = [seat.load() for seat in self._seats.values() if seat.role == "prefill"]
            decode = [seat.load() for seat in self._seats.values() if seat.role == "decode"]
            if not prefill or not decode:
                return
            if not can_ever_hold(prefill, entry.num_ids) or not can_ever_hold(decode, entry.max_length):
                most = max(load.num_pages * load.page_tokens for load in decode)
                self._fail(
                    entry,
                    "too_long",
                    f"{entry.max_length} tokens fit on no rank (the largest arena holds {most})",
                    retryable=False,
                )
                continue
            guesses, trust = self._guess(entry)
            spared = {rank: int(guess * trust) for rank, guess in guesses.items()}
            pair = choose_pair(
                prefill,
                decode,
                num_ids=entry.num_ids,
                max_tokens_total=entry.max_length,
                rank_waiting=self._limits.rank_waiting,
                broken=self._broken.current(trio.current_time()),
                spared=spared,
            )
            if pair is None:
                return
            entry.guessed = guesses.get(pair.prefill, 0)
            self._place(entry, pair, spared.get(pair.prefill, 0))

    def _guess(self, entry: Entry) -> tuple[dict[int, int], float]:
        """By rank, ids of the request's prompt that its cache may spare; how far such guesses are to be trusted."""
        if not entry.affinity or entry.submit.sampling.prompt_logprobs >= 0:
            return {}, 1.0  # a prompt whose log-probabilities are asked for is computed whole
        held, trust = self._affinities.find(entry.affinity)
        return {rank: min(ids, entry.num_ids - 1) for rank, ids in held.items()}, trust

    def _place(self, entry: Entry, pair: Pair, spared: int) -> None:
        """`spared`: ids of its prompt that need not be computed, probably."""
        self._backlog.remove(entry.number)
        self._pace.note_taken(trio.current_time())
        source, sink = self._seats[pair.prefill], self._seats[pair.decode]
        entry.prefill, entry.decode = pair.prefill, pair.decode
        entry.state_at = trio.current_time()
        source.take(entry.number, Part(entry.num_ids - spared, -(-entry.num_ids // source.ready.page_tokens)))
        sink.take(entry.number, Part(entry.max_length, -(-entry.max_length // sink.ready.page_tokens)))
        submit = entry.submit
        sink.tell(
            ReservePages(
                request=entry.number,
                attempt=submit.attempt,
                prefill_rank=pair.prefill,
                num_ids=entry.num_ids,
                generated=submit.generated,
                sampling=submit.sampling,
                priority=submit.priority,
            ),
            entry.ids[len(entry.ids) - 4 * submit.generated :] if submit.sampling.grammar else b"",
        )
        source.tell(
            StartPrefill(
                request=entry.number,
                attempt=submit.attempt,
                decode_rank=pair.decode,
                generated=submit.generated,
                sampling=submit.sampling,
                queued_us=int((entry.state_at - entry.queued_at) * 1e6),
                priority=submit.priority,
                affinity=submit.affinity,
                cache_salt=submit.cache_salt,
            ),
            entry.ids,
        )
        entry.ids = b""

    def _fail(self, entry: Entry, code: FailureCode, message: str, *, retryable: bool) -> None:
        """Tells the client now, and clears up on the ranks."""
        self._tell_failed(entry, code, message, retryable=retryable)
        self._give_up(entry, code)

    def _tell_failed(self, entry: Entry, code: FailureCode, message: str, *, retryable: bool) -> None:
        client = entry.client
        if client is None:
            return
        self._forget_client(entry)
        is_cancelled = code == "cancelled"  # which somebody asked for, so it is no failure
        self._traffic.cancelled += is_cancelled
        self._traffic.failed += not is_cancelled
        if is_cancelled and entry.complete_at is not None:
            self._traffic.note_complete()
            self._note_stages(entry, *entry.complete_at)
        submit = entry.submit
        client.tell(
            RequestFailed(
                request=submit.request,
                attempt=submit.attempt,
                code=code,
                message=message[:TEXT_LIMIT],
                definite=True,
                retryable=retryable,
            )
        )
        log_event(
            logger,
            "info",
            "request.cancel" if is_cancelled else "request.fail",
            request=entry.number,
            label=submit.label or None,
            trace_id=trace_of(submit.label),
            code=None if is_cancelled else code,
            msg=message,
            prefill_rank=entry.prefill,
            decode_rank=entry.decode,
        )

    def _forget_client(self, entry: Entry) -> None:
        """From here on nothing of the request reaches a client."""
        if entry.client is not None:
            self.tokens.flush()
            del entry.client.request_to_number[entry.submit.request]
            entry.client = None
            self._rows.mute(entry.number)

    def _give_up(self, entry: Entry, why: str) -> None:
        """Makes the ranks drop it; it is gone when they have answered."""
        if entry.prefill is None:
            self._remove(entry)
            return
        if not entry.is_aborting:
            log_event(logger, "debug", "request.abort", request=entry.number, msg=why)
            self._abort_parts(entry)
        self._settle(entry)

    def _abort_parts(self, entry: Entry) -> None:
        for rank in (entry.decode, entry.prefill):
            seat = self._seats.get(rank) if rank is not None else None
            if rank is not None and seat is not None and entry.number in seat.parts:
                entry.awaited.add(rank)
                entry.state_at = trio.current_time()
                seat.tell(Abort(request=entry.number, attempt=entry.submit.attempt))

    def _settle(self, entry: Entry) -> None:
        """Ends an aborted request once no rank holds it."""
        if not entry.awaited:
            self._tell_failed(entry, "cancelled", entry.cancel_words, retryable=False)
            self._remove(entry)

    def _release(self, entry: Entry, rank: int) -> None:
        seat = self._seats.get(rank)
        if seat is not None:
            seat.release(entry.number)

    def _remove(self, entry: Entry) -> None:
        self._forget_client(entry)
        self._backlog.remove(entry.number)
        for rank in (entry.prefill, entry.decode):
            if rank is not None:
                self._release(entry, rank)
        del self._entries[entry.number]
        self.tokens.behind(functools.partial(self._rows.close, entry.number))  # its last ones pass, where it finished
        if not self._entries:
            self._idle.set()

    def _log_finish(self, entry: Entry, started: RequestStarted, message: RequestFinished) -> None:
        timings = started.timings
        log_event(
            logger,
            "info",
            "request.finish",
            request=entry.number,
            label=entry.submit.label or None,
            trace_id=trace_of(entry.submit.label),
            reason=message.reason,
            prompt=started.prompt_tokens,
            cached=started.cached_tokens,
            out=message.completion_tokens,
            total_ms=(trio.current_time() - entry.queued_at) * 1e3,
            queue_ms=timings.queue_us / 1e3,
            prefill_ms=timings.prefill_us / 1e3,
            push_ms=timings.push_us / 1e3,
            handoff_ms=message.handoff_us / 1e3,
            prefill_rank=started.prefill_rank,
            decode_rank=started.decode_rank,
            pushed_bytes=started.pushed_bytes,
        )


async def run_deadlines(router: Router, period_s: float) -> None:
    """Looks after overdue aborts and the minute of the latency limits, for ever."""
    while True:
        await trio.sleep(period_s)
        router.expire()
        router.mark_traffic()
