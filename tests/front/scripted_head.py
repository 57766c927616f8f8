"""ScriptedHead: the head's two sockets on asyncio, saying exactly what a test tells it to.

It is strict with its client: a number that is in use, or a resubmission whose ids are not those that were given out,
is remembered in `breaches`, which `running_front` finds empty at the end.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import struct
from collections.abc import AsyncIterator, Sequence

from transport import messages
from transport.messages import (
    ExpertsReport,
    HeadHello,
    Message,
    RankSnapshot,
    RankStatus,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    StatusReport,
    Timings,
    TrafficReport,
)
from transport.wire import FrameReader, encode_frame

WAIT_S = 10.0
"""No wait of these tests is longer; one that is hangs."""


@dataclasses.dataclass(eq=False)
class Run:
    """A submission, and what the head has said of it."""

    submit: messages.Submit
    prompt: list[int]
    said: list[int]
    writer: asyncio.StreamWriter
    cancelled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    is_complete: bool = False
    is_over: bool = False


class ScriptedHead:
    """See the module. `auto`: ids with which every submission is answered at once; None leaves that to the test."""

    def __init__(self, *, max_model_tokens: int = 2048) -> None:
        self.hello = HeadHello(
            version=messages.PROTOCOL_VERSION,
            cluster="scripted",
            model="nano",
            vocab_size=8192,
            max_model_tokens=max_model_tokens,
            config_digest="scripted",
            max_inflight=4096,
        )
        self.auto: Sequence[int] | None = None
        self.runs: asyncio.Queue[Run] = asyncio.Queue()
        self.seen: list[Run] = []
        self.breaches: list[str] = []
        self.status = status_report()
        self.asked = 0
        self.answers_questions = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._open: dict[tuple[asyncio.StreamWriter, int], Run] = {}

    @contextlib.asynccontextmanager
    async def serve(self, requests: str, read: str) -> AsyncIterator[None]:
        """Listens at both paths within the block."""
        servers = [
            await asyncio.start_unix_server(self._client, requests),
            await asyncio.start_unix_server(self._operator, read),
        ]
        try:
            yield
        finally:
            for server in servers:
                server.close()
            self.drop()
            for server in servers:
                await server.wait_closed()

    def drop(self) -> None:
        """Ends every connection."""
        for writer in list(self._writers):
            writer.close()

    async def next(self) -> Run:
        """The next submission."""
        async with asyncio.timeout(WAIT_S):
            return await self.runs.get()

    # ------------------------------------------------------------ what it says

    def start(self, run: Run, *, cached: int = 0) -> None:
        self.post(
            run.writer,
            RequestStarted(
                request=run.submit.request, attempt=run.submit.attempt, prompt_tokens=len(run.prompt),
                cached_tokens=cached, prefill_rank=0, decode_rank=1, pushed_bytes=1, pushes=1, post_us=1,
                timings=Timings(queue_us=2000, prefill_us=1000, push_us=500),
            ),
        )  # fmt: skip

    def say(self, *turns: tuple[Run, Sequence[int]]) -> None:
        """One frame with new tokens of some runs."""
        self.post(turns[0][0].writer, *tokens_frame(turns))
        for run, ids in turns:
            run.said += ids

    def score(self, run: Run, index: int, token: int, logprob: float, tops: Sequence[tuple[int, float]]) -> None:
        """The log-probabilities of the token at `index`, which comes next."""
        request, attempt = run.submit.request, run.submit.attempt
        place = 1 + next((at for at, (each, _) in enumerate(tops) if each == token), len(tops))
        blob = struct.pack("<qiiifi", request, attempt, index, len(tops), logprob, place)
        blob += b"".join(struct.pack("<i", each) for each, _ in tops)
        blob += b"".join(struct.pack("<f", value) for _, value in tops)
        self.post(run.writer, messages.LogprobsEmitted(step=1, num_rows=1, num_tops=len(tops)), blob)

    def score_prompt(self, run: Run, first: int, logprobs: Sequence[float]) -> None:
        """Those of the prompt's ids from `first` on, without likeliest ones."""
        count = len(logprobs)
        blob = struct.pack(f"<{count}f{count}i", *logprobs, *[1] * count)
        request, attempt = run.submit.request, run.submit.attempt
        told = messages.PromptScored(request=request, attempt=attempt, epoch=1, first=first, count=count, tops=0)
        self.post(run.writer, told, blob)

    def finish(self, run: Run, reason: messages.FinishReason = "length") -> None:
        self._end(run)
        self.post(
            run.writer,
            RequestFinished(
                request=run.submit.request, attempt=run.submit.attempt, reason=reason,
                completion_tokens=len(run.said), handoff_us=10,
            ),
        )  # fmt: skip

    def fail(self, run: Run, code: messages.FailureCode, *, retryable: bool = True, words: str = "scripted") -> None:
        self._end(run)
        self.post(
            run.writer,
            RequestFailed(
                request=run.submit.request, attempt=run.submit.attempt, code=code, message=words, definite=True,
                retryable=retryable,
            ),
        )  # fmt: skip

    def complete(self, run: Run, ids: Sequence[int], reason: messages.FinishReason = "length") -> None:
        """All of it at once."""
        self.start(run)
        self.say((run, ids))
        self.finish(run, reason)

    def post(self, writer: asyncio.StreamWriter, message: Message, blob: bytes = b"") -> None:
        if not writer.is_closing():
            writer.write(b"".join(encode_frame(message, blob)))

    # ------------------------------------------------------------ connections

    def _end(self, run: Run) -> None:
        run.is_over = True
        self._open.pop((run.writer, run.submit.request), None)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(messages.HEAD_FROM_CLIENT)
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                frames.feed(data)
                for frame in frames.take():
                    self._hear(frame.message, frame.blob, writer)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _hear(self, message: Message, blob: memoryview, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, messages.ClientHello):
            self.post(writer, self.hello)
        elif isinstance(message, messages.CancelRequest):
            run = self._open.get((writer, message.request))
            if run is not None:
                run.is_complete = message.is_complete
                run.cancelled.set()
                self.fail(run, "cancelled", retryable=False)
        elif isinstance(message, messages.Submit):
            ids = blob.cast("i").tolist()
            cut = len(ids) - message.generated
            run = Run(message, ids[:cut], ids[cut:], writer)
            if (writer, message.request) in self._open:
                self.breaches.append(f"request {message.request} is in use")
            self._open[writer, message.request] = run
            self.seen.append(run)
            if self.auto is None:
                self.runs.put_nowait(run)
            else:
                self.complete(run, list(self.auto)[: message.sampling.max_tokens])

    async def _operator(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(messages.HEAD_FROM_OPERATOR)
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                frames.feed(data)
                for frame in frames.take():
                    self.asked += 1
                    if not self.answers_questions:
                        continue
                    match frame.message:
                        case messages.AskStatus():
                            self.post(writer, self.status)
                        case messages.AskExperts():
                            self.post(writer, ExpertsReport(parts=()))
                        case messages.AskTraffic():
                            self.post(writer, traffic_report())
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


def tokens_frame(turns: Sequence[tuple[Run, Sequence[int]]], step: int = 1) -> tuple[Message, bytes]:
    """TokensEmitted with its blob."""
    tokens = [token for _, ids in turns for token in ids]
    requests = array.array("q", [run.submit.request for run, _ in turns])
    columns = [
        array.array("i", [run.submit.attempt for run, _ in turns]),
        array.array("i", [len(run.said) for run, _ in turns]),
        array.array("i", [len(ids) for _, ids in turns]),
        array.array("i", tokens),
    ]
    blob = requests.tobytes() + b"".join(column.tobytes() for column in columns)
    return messages.TokensEmitted(step=step, num_rows=len(turns), num_tokens=len(tokens)), blob


def snapshot(rank: int, step_age_ms: int = 0) -> RankSnapshot:
    numbers = dict.fromkeys(_needed(RankSnapshot), 0)
    return RankSnapshot(**{**numbers, "rank": rank, "generation": 1, "step_age_ms": step_age_ms})


def rank_status(rank: int, role: messages.Role, *, state: str = "ready", step_age_ms: int = 0) -> RankStatus:
    return RankStatus(
        rank=rank, role=role, generation=1, pid=1, state=state, phase="", age_ms=1, restarts=0,
        snapshot=snapshot(rank, step_age_ms),
    )  # fmt: skip


def status_report(*ranks: RankStatus, is_stopping: bool = False, degraded: tuple[str, ...] = ()) -> StatusReport:
    ranks = ranks or (rank_status(0, "prefill"), rank_status(1, "decode"))
    is_ready = not is_stopping and all(rank.state == "ready" for rank in ranks)
    return StatusReport(
        version=messages.PROTOCOL_VERSION, cluster="scripted", model="nano", head_pid=1, uptime_ms=1,
        ready=is_ready, reasons=() if is_ready else ("scripted",), waiting=0, running=0, finished=0, failed=0,
        ranks=ranks, is_stopping=is_stopping, degraded=degraded,
    )  # fmt: skip


def traffic_report() -> TrafficReport:
    numbers = dict.fromkeys(_needed(TrafficReport), 0)
    return TrafficReport(**{**numbers, "accepted": 3, "ttft": (), "itl": (), "handoff": ()})


def _needed(kind: type[Message]) -> tuple[str, ...]:
    """The fields that have no default."""
    fields = kind.__struct_fields__
    return fields[: len(fields) - len(kind.__struct_defaults__)]
