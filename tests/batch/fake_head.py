"""FakeHead: answers the head's request protocol over a real unix socket, with tokens that are a pure function.

Token i of a completion depends on the prompt's ids and i alone, so every answer can be checked against `expected`. It
is strict with its client: a resubmission must repeat exactly the ids that were given out, a request number must not
be in use, and ids must be in the vocabulary; a breach is remembered in `breaches`, which tests must find empty.
Faults are told by label: a list per label, one entry for each attempt.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterable

import trio

from engine.core.scores import ScoreBuffer
from transport import messages
from transport.errors import EngineError
from transport.messages import (
    HEAD_FROM_CLIENT,
    PROTOCOL_VERSION,
    HeadHello,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    Timings,
)
from transport.stream import FrameStream, run_link
from transport.unix import open_unix_listener
from transport.wire import Frame

FIRST_TOKEN, LAST_TOKEN, EOS = 300, 8000, 1


def token_at(prompt: bytes, index: int) -> int:
    """The token at `index` of the endless completion of a prompt."""
    raw = hashlib.blake2b(prompt + index.to_bytes(4, "little"), digest_size=4).digest()
    return FIRST_TOKEN + int.from_bytes(raw, "little") % (LAST_TOKEN - FIRST_TOKEN)


def score_of(token: int, tops: int) -> messages.TokenScored:
    """What is told of a token: a number of its own, and the ids that follow it as the likeliest beside it."""
    ids = tuple((token + place) % LAST_TOKEN for place in range(tops))
    return messages.TokenScored(logprob_of(token), 1, ids, tuple(logprob_of(other) for other in ids))


def logprob_of(token: int) -> float:
    """Negative, and the same in single precision."""
    return -token / 1024


def natural_length(prompt: bytes) -> int:
    """Tokens before the end of text, unless a limit is lower: 3 to 42."""
    return 3 + hashlib.blake2b(prompt, digest_size=1).digest()[0] % 40


def expected(prompt: bytes, max_tokens: int, *, ignore_eos: bool = False) -> tuple[list[int], str]:
    """All ids of a completion (an end of text included) and the finish reason."""
    length = natural_length(prompt)
    if ignore_eos or length >= max_tokens:
        return [token_at(prompt, index) for index in range(max_tokens)], "length"
    return [*(token_at(prompt, index) for index in range(length)), EOS], "stop"


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of one attempt after `after` of its tokens, even if the last of them should have ended it.

    `kind`: a FailureCode, or `hang` (no token more), `deaf` (nor an answer to a cancellation), `eof` (the head's
    connection ends), `garbage` (a token that is not the next one).
    """

    kind: str
    after: int = 0
    retryable: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    submit: messages.Submit
    prompt: bytes
    sent: int
    fault: Fault | None
    sent_now: int = 0
    hangs: bool = False


class FakeHead:
    """One head; connections come and go. `slots` requests run at once, a token each per step; the rest waits."""

    def __init__(
        self,
        *,
        slots: int = 32,
        step_s: float = 0.0,
        max_model_tokens: int = 2048,
        max_inflight: int = 4096,
        queue: int = 4096,
        vocab_size: int = 8192,
        model: str = "nano",
    ) -> None:
        self.hello = HeadHello(
            version=PROTOCOL_VERSION,
            cluster="fake",
            model=model,
            vocab_size=vocab_size,
            max_model_tokens=max_model_tokens,
            config_digest="fake",
            max_inflight=max_inflight,
        )
        self.faults: dict[str, list[Fault]] = collections.defaultdict(list)
        self.breaches: list[str] = []
        self.submissions: list[messages.Submit] = []
        self.complete = 0
        self.most_unfinished = 0
        self.tokens_sent = 0
        self.connections = 0
        self.paused = False
        """Runs nothing while set."""
        self._slots = slots
        self._step_s = step_s
        self._queue = queue

    async def serve(self, path: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listens at `path` until cancelled."""
        listener = await open_unix_listener(path, 0o600)
        async with listener, trio.open_nursery() as nursery:
            task_status.started()
            while True:
                nursery.start_soon(self._serve_client, await listener.accept())

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        async with FrameStream(
            stream, accepts=HEAD_FROM_CLIENT, out_limit_bytes=64 << 20, stall_s=30.0, name="client"
        ) as link:
            connection = _Connection(self, link)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.run_steps)
                    await run_link(link, connection.handle)
                    nursery.cancel_scope.cancel()
            except* EngineError:
                pass


class _Connection:
    def __init__(self, head: FakeHead, link: FrameStream) -> None:
        self._head = head
        self._link = link
        self._greeted = False
        self._waiting: collections.deque[_Run] = collections.deque()
        self._running: dict[int, _Run] = {}
        self._work = trio.Event()
        self._step = 0
        self._tops: dict[int, int] = {}
        """Likeliest ids that a request asks to be told."""

    def _breach(self, what: str) -> None:
        self._head.breaches.append(what)

    def handle(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            match frame.message:
                case messages.ClientHello():
                    self._link.post(self._head.hello)
                    self._greeted = True
                case messages.Submit() as submit:
                    self._submit(submit, bytes(frame.blob))
                case messages.CancelRequest() as cancel:
                    self._head.complete += cancel.is_complete
                    self._cancel(cancel.request)
        self._work.set()

    def _submit(self, submit: messages.Submit, ids: bytes) -> None:
        head = self._head
        head.submissions.append(submit)
        if not self._greeted:
            self._breach("submitted before the hello")
        if submit.request in self._running or any(run.submit.request == submit.request for run in self._waiting):
            self._breach(f"request number {submit.request} is in use")
        end = len(ids) - 4 * submit.generated
        prompt, generated = ids[:end], array.array("i", ids[end:])
        if not prompt or any(not 0 <= token < head.hello.vocab_size for token in array.array("i", prompt)):
            self._breach(f"{submit.label}: ids outside the vocabulary, or none")
        if generated.tolist() != [token_at(prompt, index) for index in range(len(generated))]:
            self._breach(f"{submit.label}: attempt {submit.attempt} does not repeat what was generated")
        if submit.generated >= submit.sampling.max_tokens:
            self._breach(f"{submit.label}: nothing is left to generate")
        if len(prompt) // 4 + submit.sampling.max_tokens > head.hello.max_model_tokens:
            self._breach(f"{submit.label}: longer than the context")
        faults = head.faults.get(submit.label, [])
        run = _Run(submit, prompt, submit.generated, faults.pop(0) if faults else None)
        unfinished = len(self._running) + len(self._waiting)
        if unfinished >= min(head.hello.max_inflight, head._queue):
            self._fail(run, "queue_full", retryable=True)
            return
        self._waiting.append(run)
        head.most_unfinished = max(head.most_unfinished, unfinished + 1)

    def _cancel(self, request: int) -> None:
        run = self._running.get(request)
        if run is None:
            for waiting in self._waiting:
                if waiting.submit.request == request:
                    self._waiting.remove(waiting)
                    self._fail(waiting, "cancelled", retryable=False)
                    return
        elif not (run.hangs and run.fault is not None and run.fault.kind == "deaf"):
            del self._running[request]
            self._fail(run, "cancelled", retryable=False)

    def _fail(self, run: _Run, code: str, *, retryable: bool) -> None:
        self._link.post(
            RequestFailed(
                request=run.submit.request,
                attempt=run.submit.attempt,
                code=code,
                message=f"fake {code}",
                definite=True,
                retryable=retryable,
            )
        )

    async def run_steps(self) -> None:
        while True:
            while self._waiting and len(self._running) < self._head._slots:
                run = self._waiting.popleft()
                self._running[run.submit.request] = run
            if self._head.paused or all(run.hangs for run in self._running.values()):
                self._work = trio.Event()
                with trio.move_on_after(0.01 if self._head.paused else math.inf):
                    await self._work.wait()
                continue
            self._run_step()
            await trio.sleep(self._head._step_s)

    def _run_step(self) -> None:
        self._step += 1
        rows: list[tuple[int, int, int, int]] = []
        ended: list[tuple[_Run, str]] = []
        for number, run in list(self._running.items()):
            if run.hangs:
                continue
            fault = run.fault
            if fault is not None and run.sent_now >= fault.after:
                if fault.kind in ("hang", "deaf"):
                    run.hangs = True
                elif fault.kind == "eof":
                    self._send(rows)
                    self._link.close()
                    raise _End
                elif fault.kind == "garbage":
                    rows.append((number, run.submit.attempt, run.sent + 1, FIRST_TOKEN))
                    run.hangs = True
                else:
                    del self._running[number]
                    ended.append((run, ""))
                continue
            if run.sent_now == 0:
                self._start(run)
            token = token_at(run.prompt, run.sent)
            is_last = run.sent + 1 >= run.submit.sampling.max_tokens
            if run.sent >= natural_length(run.prompt) and not run.submit.sampling.ignore_eos:
                token, is_last = EOS, True
            rows.append((number, run.submit.attempt, run.sent, token))
            run.sent += 1
            run.sent_now += 1
            if is_last and (fault is None or run.sent_now < fault.after):
                del self._running[number]
                ended.append((run, "stop" if token == EOS else "length"))
        self._send(rows)
        for run, reason in ended:
            if reason:
                self._finish(run, reason)
            else:
                assert run.fault is not None
                self._fail(run, run.fault.kind, retryable=run.fault.retryable)

    def _send(self, rows: list[tuple[int, int, int, int]]) -> None:
        if not rows:
            return
        asking = [row for row in rows if row[0] in self._tops]
        scores = ScoreBuffer()
        for request, attempt, index, token in asking:
            scores.add((request, attempt), index, score_of(token, self._tops[request]))
        frame = scores.take(self._step)
        if frame is not None:
            self._link.post(*frame)
        requests, attempts, indexes, tokens = zip(*rows, strict=True)
        blob = array.array("q", requests).tobytes() + b"".join(
            array.array("i", column).tobytes() for column in (attempts, indexes, [1] * len(rows), tokens)
        )
        self._link.post(messages.TokensEmitted(step=self._step, num_rows=len(rows), num_tokens=len(rows)), blob)
        self._head.tokens_sent += len(rows)

    def _start(self, run: _Run) -> None:
        sampling, number = run.submit.sampling, run.submit.request
        if sampling.logprobs >= 0:
            self._tops[number] = sampling.logprobs
        if sampling.prompt_logprobs >= 0:
            ids = array.array("i", run.prompt)[1:]
            scored = [score_of(token, sampling.prompt_logprobs) for token in ids]
            columns = [array.array("f", [each.logprob for each in scored]), array.array("i", [1] * len(ids))]
            columns += [
                array.array("i", [token for each in scored for token in each.ids]),
                array.array("f", [value for each in scored for value in each.logprobs]),
            ]
            word = messages.PromptScored(number, run.submit.attempt, 0, 1, len(ids), sampling.prompt_logprobs)
            self._link.post(word, b"".join(column.tobytes() for column in columns))
        self._link.post(
            RequestStarted(
                request=run.submit.request,
                attempt=run.submit.attempt,
                prompt_tokens=len(run.prompt) // 4,
                cached_tokens=0,
                prefill_rank=0,
                decode_rank=1,
                pushed_bytes=4096 * (1 + len(run.prompt) // 256),
                pushes=1,
                post_us=7,
                timings=Timings(queue_us=10, prefill_us=20, push_us=30),
            )
        )

    def _finish(self, run: _Run, reason: str) -> None:
        self._link.post(
            RequestFinished(
                request=run.submit.request,
                attempt=run.submit.attempt,
                reason=reason,
                completion_tokens=run.sent,
                handoff_us=40,
            )
        )


class _End(EngineError):
    """The connection ends here, as a fault says."""
