"""HeadClient: the requester's side of the head's request socket.

Requests are rows of a table, never tasks: one task (`run_head_client`) reads frames and hands their columns to the
table of rows. A row keeps the prompt's ids and every id generated so far until it ends, so the requester can submit it
again after a lost rank, a lost head or a stall: prompt and generated ids under the next attempt number. Frames of
earlier attempts are dropped, and a token that is not the next one of its row is a protocol error, so nothing is
repeated and nothing is missing.

The rows belong to the caller and outlive the connection; text, retries and deadlines are the caller's.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import trio

from engine.actors.told import Told, read_scores, take_prompt
from engine.actors.unanswered import Unanswered
from engine.errors import EngineError, Overflow, PeerGone, RemoteProtocolError
from transport import messages
from transport.messages import HeadHello, RequestFailed, RequestFinished, RequestStarted, Sampling
from transport.stream import FrameStream, run_link
from transport.wire import Frame

OUT_LIMIT_BYTES = 64 << 20
"""Queued submissions. A prompt of a million ids is 4 MiB, the largest frame."""
STALL_S = 30.0
"""A head that reads nothing for so long is gone."""
HELLO_S = 30.0
"""From the connection to the head's answer."""


class ClientRefused(PeerGone):
    """The head is there and does not want this connection; it may want another one later."""


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """One request and all that is needed to submit it again.

    Attributes:
        prompt: int32[num_prompt] as bytes.
        sampling: as submitted; `max_tokens` counts the whole completion over all attempts.
        generated: int32 ids of the completion so far.
        request: its number on the connection; a new one is given by each connection's first submission of the row.
        attempt: submissions so far.
        submitted_at, first_token_at, last_token_at: trio times of the latest submission and of tokens; 0.0 before.
        order: place of the latest submission among all submissions of the connection.
        place: in the table of the latest connection, see `Unanswered`; -1 before.
        started: the engine's account of the latest attempt that got so far; there once a token is.
        told, prompt_told: log-probabilities of `generated` and of the prompt, as far as `sampling` asks for them; what
            is told of a token is there before the token.
    """

    prompt: bytes
    sampling: Sampling
    label: str = ""
    priority: int = 0
    cache_salt: str = ""
    generated: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    request: int = 0
    attempt: int = 0
    submitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    order: int = 0
    place: int = -1
    started: RequestStarted | None = None
    told: Told | None = None
    prompt_told: Told | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) // 4

    @property
    def moved_at(self) -> float:
        """When something last happened to it: submitted, or a token."""
        return max(self.submitted_at, self.last_token_at)


class RequestSink(Protocol):
    """Whoever is told what becomes of rows. Called from the reading task; must not block."""

    def tokens_came(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """The last `counts[i]` ids of `rows[i].generated` are new. What comes together is told together.

        `rows` may be a `Came`: a row in it is up to date only once it was looked at, there or as `unfinished` has it.
        """
        ...

    def row_finished(self, row: Row, fact: RequestFinished) -> None:
        """All ids are there. The row has left the table."""
        ...

    def row_failed(self, row: Row, fact: RequestFailed) -> None:
        """This attempt is over without an answer. The row has left the table and may be submitted again."""
        ...


class HeadClient:
    """An open connection with its table of unfinished rows. Made by `run_head_client`.

    Attributes:
        hello: what the head said of itself.
    """

    def __init__(self, frames: FrameStream, sink: RequestSink) -> None:
        if sys.byteorder != "little":
            raise AssertionError("token columns are little-endian and read in place")
        self.hello: HeadHello
        self._frames = frames
        self._sink = sink
        self._table = Unanswered()
        self._rows = self._table.rows
        self._numbers = 0
        self._cancels: collections.deque[messages.CancelRequest] = collections.deque()
        # Tokens that the sink has not heard of yet: rows, how many for each, and numbers of the rows' requests.
        self._came: list[Row] = []
        self._amounts: list[int] = []
        self._told: set[int] = set()

    @property
    def num_unfinished(self) -> int:
        """Rows that the head has not answered for."""
        return len(self._rows)

    def unfinished(self) -> list[Row]:
        """The rows in the table, in the order in which they were submitted first."""
        rows = list(self._rows.values())
        for row in rows:
            self._table.refresh(row)
        return rows

    def holds(self, row: Row) -> bool:
        """Whether the row is in the table: submitted here and not answered."""
        return self._rows.get(row.request) is row

    async def submit(self, row: Row) -> int:
        """Submits a row's next attempt and puts it into the table; waits while the send queue is full.

        Cancelled means not submitted. The row must not be in the table.

        Returns:
            The request number.

        Raises:
            PeerGone: the connection is over; the row is unchanged.
            Overflow: the prompt alone is larger than a frame may be.
        """
        number = self._numbers + 1
        message = messages.Submit(
            request=number,
            attempt=row.attempt + 1,
            generated=len(row.generated),
            sampling=row.sampling,
            priority=row.priority,
            label=row.label,
            cache_salt=row.cache_salt,
        )
        await self._frames.send(message, row.prompt + row.generated.tobytes())
        self._numbers = number
        row.request, row.attempt, row.order = number, row.attempt + 1, number
        row.submitted_at = trio.current_time()
        self._table.add(row)
        return number

    def cancel(self, row: Row, *, is_complete: bool = False) -> None:
        """Asks the head to stop it. The row stays in the table until the answer: failed(cancelled), or finished.
        `is_complete`: it has come to its end, as at a stop string.

        If the send queue is full of prompts, the word waits until there is room (see `flush`).

        Raises:
            PeerGone: the connection is over.
        """
        self._cancels.append(messages.CancelRequest(row.request, is_complete))
        self.flush()

    def flush(self) -> None:
        """Sends cancellations that found no room. Called with every batch of frames; call it now and then otherwise.

        Raises:
            PeerGone: the connection is over.
        """
        while self._cancels:
            try:
                self._frames.post(self._cancels[0])
            except Overflow:
                return
            self._cancels.popleft()

    def abandon(self, row: Row) -> None:
        """Takes a row out of the table whose cancellation was never answered. What still comes for it is dropped."""
        self._table.remove(row)

    def close(self) -> None:
        """Takes no more submissions; what is queued is flushed, then the connection ends."""
        self._frames.close()

    def handle(self, batch: list[Frame]) -> None:
        """Takes a batch of frames from the head, in order. The sink hears of tokens once for many frames."""
        self.flush()
        tokens: list[Frame] = []
        for frame in batch:
            if isinstance(frame.message, messages.TokensEmitted):
                tokens.append(frame)
                continue
            if tokens:
                self._take_tokens(tokens)
                tokens = []
            self._take(frame)
        if tokens:
            self._take_tokens(tokens)

    def _take(self, frame: Frame) -> None:
        match frame.message:
            case RequestStarted() as fact:
                row = self._find_row(fact.request, fact.attempt)
                if row is not None:
                    row.started = fact
                    self._table.start(row)
            case RequestFinished() as fact:
                row = self._take_row(fact.request, fact.attempt)
                if row is not None:
                    if fact.completion_tokens != len(row.generated):
                        raise RemoteProtocolError(
                            f"request {fact.request} finished with {fact.completion_tokens} tokens,"
                            f" but {len(row.generated)} came"
                        )
                    self._sink.row_finished(row, fact)
            case RequestFailed() as fact:
                row = self._take_row(fact.request, fact.attempt)
                if row is not None:
                    self._sink.row_failed(row, fact)
            case messages.LogprobsEmitted() as fact:
                for scored in read_scores(fact, frame.blob):
                    row = self._find_row(scored.request, scored.attempt)
                    if row is not None:
                        if row.told is None:
                            row.told = Told()
                        row.told.extend(scored.index, *scored.columns)
            case messages.PromptScored() as fact:
                row = self._find_row(fact.request, fact.attempt)
                if row is not None:
                    if row.prompt_told is None:
                        row.prompt_told = Told(missing=1)
                    take_prompt(row.prompt_told, fact, frame.blob)
            case messages.Refused() as fact:
                raise ClientRefused(f"the head refused this client: {fact.message}")
            case other:
                raise RemoteProtocolError(f"the head sent {type(other).__name__} out of turn")

    def _take_row(self, request: int, attempt: int) -> Row | None:
        row = self._find_row(request, attempt)
        if row is not None:
            self._table.remove(row)
        return row

    def _find_row(self, request: int, attempt: int) -> Row | None:
        row = self._rows.get(request)
        if row is None:
            self._check_issued(request)
            return None
        if row.attempt != attempt:
            raise RemoteProtocolError(f"request {request} is at attempt {row.attempt}, the head says {attempt}")
        return row

    def _check_issued(self, request: int) -> None:
        if request > self._numbers:
            raise RemoteProtocolError(
                f"the head speaks of request {request}; the last one submitted is {self._numbers}"
            )

    def _take_tokens(self, frames: list[Frame]) -> None:
        """Takes frames of tokens, as columns where all is as it should be, else row by row."""
        for frame in frames:
            _check_layout(frame)
        came = self._table.take(frames, trio.current_time())
        if came is not None:
            self._sink.tokens_came(came, [1] * len(came))
            return
        try:
            for frame in frames:
                self._take_rows(cast(messages.TokensEmitted, frame.message), frame.blob)
        finally:
            self._tell_tokens()

    def _take_rows(self, fact: messages.TokensEmitted, blob: memoryview) -> None:
        rows, tokens = fact.num_rows, fact.num_tokens
        requests = blob[: 8 * rows].cast("q").tolist()
        attempts, indexes, counts = (blob[at * rows : (at + 4) * rows].cast("i").tolist() for at in (8, 12, 16))
        ids = blob[20 * rows :].cast("i").tolist()
        if sum(counts) != tokens or min(counts, default=0) < 0:
            raise RemoteProtocolError(f"TokensEmitted says {tokens} tokens, its rows say {sum(counts)}")
        if not self._told.isdisjoint(requests):
            self._tell_tokens()  # a row is in one telling once
        self._told.update(requests)
        now, find, came, amounts = trio.current_time(), self._rows.get, self._came, self._amounts
        place = 0
        for request, attempt, index, count in zip(requests, attempts, indexes, counts, strict=True):
            first, place = place, place + count
            row = find(request)
            if row is None:
                self._check_issued(request)
                continue
            self._table.refresh(row)
            generated, started = row.generated, row.started
            if attempt != row.attempt:
                raise RemoteProtocolError(f"request {request} is at attempt {row.attempt}, tokens say {attempt}")
            if started is None or started.attempt != attempt:
                raise RemoteProtocolError(f"request {request}: tokens came before its start")
            if index != len(generated):
                raise RemoteProtocolError(
                    f"request {request}: token {index} came where token {len(generated)} was next"
                )
            if count == 1:
                generated.append(ids[first])
            else:
                generated.extend(ids[first:place])
            self._table.note(row, now)
            came.append(row)
            amounts.append(count)

    def _tell_tokens(self) -> None:
        rows, counts = self._came, self._amounts
        self._came, self._amounts = [], []
        self._told.clear()
        if rows:
            self._sink.tokens_came(rows, counts)


async def run_head_client(
    stream: trio.abc.Stream,
    sink: RequestSink,
    *,
    name: str,
    task_status: trio.TaskStatus[HeadClient] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Speaks with the head over a connected stream until one side ends it; the stream is closed in any case.

    Started with `nursery.start`, it hands over the HeadClient once the head has answered. It returns after
    `HeadClient.close`, and raises when the head went away or broke the protocol; rows that had no answer are then
    still in `HeadClient.unfinished()`.

    Raises:
        PeerGone: end of stream, or no hello within `HELLO_S`.
        ClientRefused: it has too many clients, or found fault with this one.
        RemoteProtocolError: the head sent what it must not.
    """
    frames = FrameStream(
        stream,
        accepts=messages.CLIENT_FROM_HEAD,
        out_limit_bytes=OUT_LIMIT_BYTES,
        stall_s=STALL_S,
        name="head",
    )
    async with frames:
        frames.post(messages.ClientHello(version=messages.PROTOCOL_VERSION, name=name))
        client = HeadClient(frames, sink)
        greeted = False

        def handle(batch: list[Frame]) -> None:
            nonlocal greeted
            if not greeted:
                client.hello = _check_hello(batch[0])
                greeted, batch = True, batch[1:]
                greeting.cancel()
                task_status.started(client)
            client.handle(batch)

        async with trio.open_nursery() as nursery:
            greeting = trio.CancelScope(deadline=trio.current_time() + HELLO_S)
            late: list[EngineError] = []

            async def wait_greeting() -> None:
                with greeting:
                    await trio.sleep_forever()
                if not greeted:
                    late.append(PeerGone(f"the head did not answer within {HELLO_S} s"))
                    nursery.cancel_scope.cancel()

            nursery.start_soon(wait_greeting)
            try:
                await run_link(frames, handle)
            except EngineError as error:
                late.append(error)
            nursery.cancel_scope.cancel()
        if late:
            raise late[0]


def _check_layout(frame: Frame) -> None:
    fact = frame.message
    assert isinstance(fact, messages.TokensEmitted)
    if frame.blob.nbytes != 20 * fact.num_rows + 4 * fact.num_tokens:
        raise RemoteProtocolError(
            f"TokensEmitted of {fact.num_rows} rows and {fact.num_tokens} tokens has {frame.blob.nbytes} bytes of blob"
        )


def _check_hello(frame: Frame) -> HeadHello:
    match frame.message:
        case HeadHello() as hello if hello.version == messages.PROTOCOL_VERSION:
            return hello
        case HeadHello() as hello:
            raise RemoteProtocolError(f"the head speaks version {hello.version}, this is {messages.PROTOCOL_VERSION}")
        case messages.Refused() as refused:
            raise ClientRefused(f"the head refused this client: {refused.message}")
        case other:
            raise RemoteProtocolError(f"the head began with {type(other).__name__} instead of HeadHello")
