"""HeadClient alone: what a head may say, what it may not, and what is left when it goes."""

from __future__ import annotations

import array
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from engine.actors import client as client_module
from engine.actors.client import HeadClient, Row, run_head_client
from engine.errors import EngineError, PeerGone, RemoteProtocolError
from transport import messages
from transport.messages import (
    HEAD_FROM_CLIENT,
    HeadHello,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    Sampling,
    Timings,
)
from transport.stream import FrameStream

HELLO = HeadHello(
    version=messages.PROTOCOL_VERSION,
    cluster="c",
    model="nano",
    vocab_size=8192,
    max_model_tokens=512,
    config_digest="d",
    max_inflight=8,
)


class Heard:
    """A RequestSink that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def tokens_came(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        for row, count in zip(rows, counts, strict=True):
            self.events.append(("tokens", row.request, row.generated[-count:].tolist()))

    def row_finished(self, row: Row, fact: RequestFinished) -> None:
        self.events.append(("finished", row.request, fact.reason))

    def row_failed(self, row: Row, fact: RequestFailed) -> None:
        self.events.append(("failed", row.request, fact.code))


class Link:
    """A client on one end of a stream, the test on the other."""

    def __init__(self, client: HeadClient, head: FrameStream, heard: Heard, ended: list[EngineError]) -> None:
        self.client = client
        self.head = head
        self.heard = heard
        self.ended = ended
        self._got: list[Any] = []
        self._started: set[tuple[int, int]] = set()

    async def next(self) -> Any:
        """The next frame from the client."""
        while not self._got:
            self._got += await self.head.receive()
        return self._got.pop(0)

    def tokens(self, *rows: tuple[int, int, int, list[int]], starts: bool = True) -> None:
        """Sends TokensEmitted of rows (request, attempt, index, ids), and RequestStarted before the first of each."""
        for request, attempt, _, _ in rows if starts else ():
            if (request, attempt) not in self._started:
                self._started.add((request, attempt))
                self.head.post(RequestStarted(request, attempt, 1, 0, 3, 4, 5, 6, 7, Timings(queue_us=8)))
        numbers = array.array("q", [row[0] for row in rows]).tobytes()
        columns = [[row[1] for row in rows], [row[2] for row in rows], [len(row[3]) for row in rows]]
        ids = [token for row in rows for token in row[3]]
        blob = numbers + b"".join(array.array("i", column).tobytes() for column in [*columns, ids])
        self.head.post(messages.TokensEmitted(step=1, num_rows=len(rows), num_tokens=len(ids)), blob)

    def finished(self, request: int, completion_tokens: int, attempt: int = 1) -> None:
        self.head.post(
            RequestFinished(
                request=request,
                attempt=attempt,
                reason="length",
                completion_tokens=completion_tokens,
                handoff_us=1,
            )
        )

    def failed(self, request: int, attempt: int = 1) -> None:
        self.head.post(
            RequestFailed(
                request=request, attempt=attempt, code="rank_lost", message="m", definite=True, retryable=True
            )
        )

    async def wait_end(self) -> EngineError:
        with trio.fail_after(5):
            while not self.ended:  # noqa: ASYNC110
                await trio.sleep(0.001)
        return self.ended[0]


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[Link]:
    ours, theirs = trio.testing.memory_stream_pair()
    heard = Heard()
    ended: list[EngineError] = []

    async def run(task_status: trio.TaskStatus[HeadClient]) -> None:
        try:
            await run_head_client(ours, heard, name="test", task_status=task_status)
        except EngineError as error:
            ended.append(error)

    head = FrameStream(theirs, accepts=HEAD_FROM_CLIENT, out_limit_bytes=1 << 20, stall_s=5, name="client")
    async with head, trio.open_nursery() as nursery:
        nursery.start_soon(head.run_writer)
        head.post(HELLO)
        with trio.fail_after(5):
            client: HeadClient = await nursery.start(run)
            link = Link(client, head, heard, ended)
            hello = await link.next()
            assert hello.message == messages.ClientHello(version=messages.PROTOCOL_VERSION, name="test")
        yield link
        nursery.cancel_scope.cancel()


def row(*ids: int, **more: Any) -> Row:
    return Row(array.array("i", ids).tobytes(), Sampling(max_tokens=10), **more)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_columns_go_to_rows_and_an_answer_takes_a_row_out() -> None:
    async with linked() as link:
        first, second = row(5, 6, label="a", priority=3), row(7)
        assert [await link.client.submit(first), await link.client.submit(second)] == [1, 2]
        sent = await link.next()
        assert sent.message == messages.Submit(
            request=1, attempt=1, generated=0, sampling=Sampling(max_tokens=10), priority=3, label="a"
        )
        assert bytes(sent.blob) == first.prompt
        link.tokens((2, 1, 0, [70, 71]), (1, 1, 0, [80]))
        link.tokens((2, 1, 2, [72]))
        link.finished(2, 3)
        await settle()
        assert link.heard.events == [
            ("tokens", 2, [70, 71]),
            ("tokens", 1, [80]),
            ("tokens", 2, [72]),
            ("finished", 2, "length"),
        ]
        assert link.client.unfinished() == [first]
        assert link.client.holds(first) and not link.client.holds(second)
        assert second.started == RequestStarted(2, 1, 1, 0, 3, 4, 5, 6, 7, Timings(queue_us=8))


async def test_a_failed_row_is_submitted_again_with_what_it_has() -> None:
    async with linked() as link:
        again = row(5, 6)
        await link.client.submit(again)
        link.tokens((1, 1, 0, [80, 81]))
        link.failed(1)
        await settle()
        assert await link.client.submit(again) == 2
        await link.next()
        sent = await link.next()
        assert (sent.message.request, sent.message.attempt, sent.message.generated) == (2, 2, 2)
        assert array.array("i", bytes(sent.blob)).tolist() == [5, 6, 80, 81]
        link.tokens((1, 1, 2, [99]))  # late, of the attempt before: dropped
        link.tokens((2, 2, 2, [82]))
        await settle()
        assert again.generated.tolist() == [80, 81, 82]
        assert not link.ended


async def test_what_was_cancelled_and_abandoned_is_not_heard_of_again() -> None:
    async with linked() as link:
        gone = row(5)
        await link.client.submit(gone)
        link.client.cancel(gone)
        await link.next()
        assert (await link.next()).message == messages.CancelRequest(request=1)
        link.client.abandon(gone)
        link.tokens((1, 1, 0, [80]))
        link.failed(1)
        await settle()
        assert link.heard.events == [] and not link.ended


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda link: link.tokens((1, 1, 1, [80])), "token 1 came where token 0 was next"),
        (lambda link: link.tokens((9, 1, 0, [80])), "speaks of request 9"),
        (lambda link: link.tokens((1, 2, 0, [80]), starts=False), "attempt 1, tokens say 2"),
        (lambda link: link.tokens((1, 2, 0, [80])), "is at attempt 1, the head says 2"),
        (lambda link: link.tokens((1, 1, 0, [80]), starts=False), "tokens came before its start"),
        (lambda link: link.finished(1, 1), "finished with 1 tokens, but 0 came"),
        (lambda link: link.finished(1, 0, attempt=2), "is at attempt 1, the head says 2"),
        (lambda link: link.failed(4), "speaks of request 4"),
        (lambda link: link.head.post(HELLO), "HeadHello out of turn"),
    ],
)
async def test_a_head_that_breaks_the_protocol_is_left(say: Any, words: str) -> None:
    async with linked() as link:
        mine = row(5)
        await link.client.submit(mine)
        say(link)
        error = await link.wait_end()
        assert isinstance(error, RemoteProtocolError) and words in str(error)


async def test_the_end_of_the_stream_leaves_the_rows_to_the_caller() -> None:
    async with linked() as link:
        mine = row(5)
        await link.client.submit(mine)
        link.tokens((1, 1, 0, [80]))
        await settle()
        await link.head.aclose()
        assert isinstance(await link.wait_end(), PeerGone)
        assert link.client.unfinished() == [mine] and mine.generated.tolist() == [80]
        with pytest.raises(PeerGone):
            await link.client.submit(row(6))
        assert mine.attempt == 1


async def test_a_refusal_says_why() -> None:
    async with linked() as link:
        link.head.post(messages.Refused(message="too many clients"))
        assert "too many clients" in str(await link.wait_end())


async def test_cancellations_wait_for_room_behind_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "OUT_LIMIT_BYTES", 4096)
    async with linked() as link:
        rows = [row(*range(1000)) for _ in range(2)]
        for big in rows:
            await link.client.submit(big)  # the second waits for the first to be on its way
        for big in rows:
            link.client.cancel(big)
        await settle()
        link.client.flush()
        kinds = [type((await link.next()).message).__name__ for _ in range(2)]
        await settle()
        link.client.flush()
        kinds += [type((await link.next()).message).__name__ for _ in range(2)]
        assert kinds == ["Submit", "Submit", "CancelRequest", "CancelRequest"]
        assert not link.ended
