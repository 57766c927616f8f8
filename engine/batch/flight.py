"""Flight: jobs from the moment they are prepared until their record is handed to the writer.

It decides when a job is submitted, when it is tried again, when it is given up, and what its record says. Every line
ends in exactly one record, or is still there when the run stops and stays for `--resume`; the jobs of a line with
several answers fly on their own, and when one of them fails for good the others are given up with it. The calls of
`RequestSink` come from the connection's reading task; nothing here waits but `run_submissions`.

A job is in exactly one place: `ready` (never submitted), `again` (waits for its next attempt) or `flying` (at the
head, or just being sent to it).
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import trio

from engine.actors.client import HeadClient, Row
from engine.batch.answer import render_answer, render_refusal
from engine.batch.job import Ending, Job, Refusal
from engine.batch.meter import Meter
from engine.batch.options import BatchOptions
from engine.batch.writer import RecordWriter
from engine.errors import PeerGone
from transport.messages import FailureCode, FinishReason, RequestFailed, RequestFinished

CANCEL_ANSWER_S = 10.0
"""A cancellation that is not answered for so long is given up; late frames of it are dropped."""
BEGUN_BYTES = 512 << 20
"""What begun jobs may keep of their lines, however many `--inflight` allows."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_CODE_TO_KIND: dict[FailureCode, str] = {
    "cancelled": "cancelled",
    "bad_request": "bad_request",
    "too_long": "too_long",
    "timeout": "timeout",
}
"""Failures that have a type of their own; all others mean that the engine lost something: `engine_lost`."""


class Flight:
    """See the module. `settled` is called after each record; must not block.

    Attributes:
        client: the connection, None while there is none.
        model, eos_id: what is served; set before the first job.
        ready, ready_bytes: jobs that were never submitted, and what they keep of their lines.
        flying: jobs at the head.
    """

    def __init__(self, options: BatchOptions, meter: Meter, writer: RecordWriter, settled: Callable[[], None]) -> None:
        self.client: HeadClient | None = None
        self.model = ""
        self.eos_id = -1
        self.ready: collections.deque[Job] = collections.deque()
        self.ready_bytes = 0
        self.flying: dict[Row, Job] = {}
        self._again: list[tuple[float, int, Job]] = []
        self._ties = itertools.count()
        self._options = options
        self._meter = meter
        self._writer = writer
        self._settled = settled
        self._wake = trio.Event()
        self._begun_bytes = 0
        self._closed = False  # no job is begun any more
        self._expired = False
        self._full_until = 0.0
        self._full_pause = FIRST_PAUSE_S
        self._front_order = 0  # latest submission that has had a token
        self._moved_at = 0.0  # when any token came last

    # ------------------------------------------------------------ in

    @property
    def num_begun(self) -> int:
        """Jobs that were submitted at least once and have no record yet."""
        return len(self.flying) + len(self._again)

    @property
    def num_pending(self) -> int:
        """Jobs that have no record yet."""
        return self.num_begun + len(self.ready)

    def add(self, item: Job | Refusal) -> None:
        """Takes a prepared line."""
        if isinstance(item, Refusal):
            self._refuse(item)
        elif self._expired:
            self._fail_expired(item)
        elif not self._closed:
            self.ready.extend(item.line_jobs)
            self.ready_bytes += sum(job.num_bytes for job in item.line_jobs)
            self.nudge()

    def nudge(self) -> None:
        """Something changed that may allow a submission."""
        self._wake.set()

    def close(self) -> None:
        """Begins no further job. Those that were begun go on."""
        self._closed = True
        self.ready.clear()
        self.ready_bytes = 0

    def drop(self) -> None:
        """Forgets every job; they stay for `--resume`."""
        self.close()
        self._again.clear()
        self.flying.clear()

    def oldest(self, now: float) -> tuple[float, str] | None:
        """Age and id of the job that was begun first."""
        jobs = itertools.chain(self.flying.values(), (job for _, _, job in self._again))
        job = min(jobs, key=lambda job: job.started_at, default=None)
        return None if job is None else (now - job.started_at, job.source.custom_id)

    # ------------------------------------------------------------ the connection

    def attach(self, client: HeadClient) -> None:
        """A connection is there."""
        self.client = client
        self._front_order = 0
        self.nudge()

    def detach(self, client: HeadClient) -> None:
        """The connection is gone. Its jobs wait for the next one, in their old order; those that need none end now."""
        if self.client is client:
            self.client = None
        for row in client.unfinished():
            job = self.flying.pop(row, None)
            if job is not None and not self._end_here(job):
                job.cancelled_at = 0.0
                self._retry_at(0.0, job)

    async def run_submissions(self) -> None:
        """Submits what may be submitted, until cancelled."""
        while True:
            client, now = self.client, trio.current_time()
            job = self._take_next(client, now) if client is not None else None
            if job is None or client is None:
                self._wake = trio.Event()
                with trio.move_on_at(self._next_due(now)):
                    await self._wake.wait()
                continue
            job.started_at = job.started_at or now
            job.overtaken_at = 0.0
            self._meter.attempts += job.row.attempt > 0
            self.flying[job.row] = job  # before the send, so that no answer can come for an unknown row
            try:
                await client.submit(job.row)
            except PeerGone:
                self._meter.attempts -= job.row.attempt > 0
                if self.flying.pop(job.row, None) is not None:
                    self._retry_at(0.0, job)
                if self.client is client:
                    self.client = None

    def _take_next(self, client: HeadClient, now: float) -> Job | None:
        limit = min(self._options.inflight, client.hello.max_inflight)
        if now < self._full_until or client.num_unfinished + self._writer.backlog >= limit:
            return None
        if self._again and self._again[0][0] <= now:
            return heapq.heappop(self._again)[2]
        if not self.ready or self._closed or self.num_begun >= limit:
            return None
        if self._options.order == "input" and self.ready[0].place - self._writer.next_place > self._options.window:
            return None
        if self.num_begun and self._begun_bytes + self.ready[0].num_bytes > BEGUN_BYTES:
            return None
        job = self.ready.popleft()
        self.ready_bytes -= job.num_bytes
        self._begun_bytes += job.num_bytes
        return job

    def _next_due(self, now: float) -> float:
        """When a submission may become possible without anybody calling `nudge`. `now` is what `_take_next` went by:
        with a later one, what fell due in between would be waited for by nobody."""
        due = [self._full_until, self._again[0][0]] if self._again else [self._full_until]
        return min((time for time in due if time > now), default=math.inf)

    # ------------------------------------------------------------ RequestSink

    def tokens_came(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        for row, count in zip(rows, counts, strict=True):
            self._take_tokens(row, count)

    def _take_tokens(self, row: Row, count: int) -> None:
        job = self.flying.get(row)
        if job is None:
            return
        self._meter.output_tokens += count
        self._moved_at = row.last_token_at
        self._front_order = max(self._front_order, row.order)
        self._full_pause = FIRST_PAUSE_S
        job.full_since = 0.0
        job.answered_at = job.answered_at or row.last_token_at
        if job.stops is not None and not job.cancelled_at and job.search_stops() and self.client is not None:
            job.cancelled_at = trio.current_time()
            self.client.cancel(row, is_complete=True)

    def row_finished(self, row: Row, fact: RequestFinished) -> None:
        self.nudge()
        job = self.flying.pop(row, None)
        if job is not None:
            self._answer(job, fact.reason, drop_last=fact.reason == "stop", handoff_us=fact.handoff_us)

    def row_failed(self, row: Row, fact: RequestFailed) -> None:
        self.nudge()
        job = self.flying.pop(row, None)
        if job is None or self._end_here(job):
            return
        now = trio.current_time()
        if job.cancelled_at:
            self._try_stalled(job)
        elif fact.code in ("queue_full", "draining"):
            # Not the job's fault, so it costs no retry; nobody submits for a while.
            job.full_since = job.full_since or now
            if now - job.full_since > self._options.retry_for:
                self._fail(job, "engine_lost", fact.code, fact.message, retryable=True)
                return
            if now >= self._full_until:
                self._full_until = now + self._full_pause
                self._full_pause = min(2 * self._full_pause, LONGEST_PAUSE_S)
            self._retry_at(self._full_until, job)
        elif fact.retryable and job.retries < self._options.retry:
            self._retry_at(now + FIRST_PAUSE_S * 2**job.retries, job)
            job.retries += 1
        else:
            kind = _CODE_TO_KIND.get(fact.code, "engine_lost")
            self._fail(job, kind, fact.code, fact.message, retryable=fact.retryable)

    # ------------------------------------------------------------ time

    def check_stalls(self, now: float) -> None:
        """Cancels jobs that have stood still for too long, and gives up on cancellations that nobody answers."""
        client = self.client
        if client is None:
            return
        client.flush()
        for row, job in list(self.flying.items()):
            if not client.holds(row):
                continue  # just being sent
            if job.cancelled_at:
                if now - job.cancelled_at > CANCEL_ANSWER_S:
                    del self.flying[row]
                    client.abandon(row)
                    if not self._end_here(job):
                        self._try_stalled(job)
            elif now - self._moving_since(job, now) > self._options.stall:
                job.cancelled_at = now
                client.cancel(row)

    def expire(self) -> None:
        """The deadline is over: everything that has no answer gets `batch_expired`."""
        client = self.client
        for job in [*self.flying.values(), *(job for _, _, job in sorted(self._again)), *self.ready]:
            if client is not None and client.holds(job.row) and not job.cancelled_at:
                client.cancel(job.row)
            self._fail_expired(job)
        self._expired = True
        self.drop()

    def _moving_since(self, job: Job, now: float) -> float:
        """When the job last gave a sign. A job without a token may just wait for its turn, so it counts as stuck only
        from when a later one had a token, or when nothing moves at all."""
        row = job.row
        if row.last_token_at >= row.submitted_at:
            return row.last_token_at
        if not job.overtaken_at and row.order < self._front_order:
            job.overtaken_at = now
        return max(row.submitted_at, job.overtaken_at or self._moved_at)

    # ------------------------------------------------------------ out

    def _retry_at(self, due: float, job: Job) -> None:
        heapq.heappush(self._again, (due, next(self._ties), job))
        self.nudge()

    def _try_stalled(self, job: Job) -> None:
        job.cancelled_at = 0.0
        job.stalls += 1
        if job.stalls > 1:
            message = f"no token for {self._options.stall:g} s, twice"
            self._fail(job, "timeout", "stalled", message, retryable=True)
        else:
            self._retry_at(0.0, job)

    def _end_here(self, job: Job) -> bool:
        """Ends a job that has all its tokens although the head did not say so."""
        ended = job.ended(self.eos_id)
        if ended is None:
            return False
        reason, drop_last = ended
        self._answer(job, reason, drop_last=drop_last, handoff_us=None)
        return True

    def _answer(self, job: Job, reason: FinishReason, *, drop_last: bool, handoff_us: int | None) -> None:
        job.ending = Ending(reason, drop_last, handoff_us, trio.current_time())
        self._begun_bytes -= job.num_bytes
        jobs = job.line_jobs
        if any(each.ending is None for each in jobs):
            return
        record, completion = render_answer(jobs, model=self.model)
        self._meter.count_answer([each.row for each in jobs], completion)
        self._writer.put_answer(job.place, record)
        self._settled()

    def _fail(self, job: Job, kind: str, code: str, message: str, *, retryable: bool) -> None:
        if job.choices is not None and job.choices.failed:
            return  # with another job of its line
        if job.row.attempt:
            self._begun_bytes -= job.num_bytes
        if job.choices is not None:
            job.choices.failed = True
            for other in job.choices.jobs:
                if other is not job and other.ending is None:
                    self._withdraw(other)
        self._refuse(Refusal(job.source, job.place, kind, code, message, retryable=retryable, attempts=job.row.attempt))

    def _withdraw(self, job: Job) -> None:
        """Gives up a job, wherever it is, because its line has failed."""
        if job in self.ready:
            self.ready.remove(job)
            self.ready_bytes -= job.num_bytes
            return
        self._begun_bytes -= job.num_bytes
        if self.flying.pop(job.row, None) is None:
            self._again = [each for each in self._again if each[2] is not job]
            heapq.heapify(self._again)
        elif self.client is not None and self.client.holds(job.row) and not job.cancelled_at:
            with contextlib.suppress(PeerGone):
                self.client.cancel(job.row)

    def _fail_expired(self, job: Job) -> None:
        self._fail(job, "batch_expired", "batch_expired", "the batch's deadline is over", retryable=True)

    def _refuse(self, refusal: Refusal) -> None:
        self._meter.errors[refusal.kind] += 1
        self._writer.put_error(refusal.place, render_refusal(refusal))
        self._settled()
