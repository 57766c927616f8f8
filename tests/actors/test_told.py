"""Log-probabilities on the way to clients: the head sorts their columns, a client keeps them with its rows."""

from __future__ import annotations

import array

import numpy as np
import pytest
import trio
import trio.testing

from engine.actors.client import HeadClient, Row
from engine.actors.rows import RowTable
from engine.actors.told import Told, read_scores, take_prompt
from engine.core.scores import ScoreBuffer, split_prompt
from engine.errors import RemoteProtocolError
from tests.actors.head_rig import VOCAB, Rig
from tests.core.test_scores import make_scores, rows_of
from transport.messages import CLIENT_FROM_HEAD, LogprobsEmitted, PromptScored, RequestFailed, Sampling, TokenScored
from transport.stream import FrameStream
from transport.wire import Frame


def frame_of(rows: list[tuple[int, int, int, TokenScored]]) -> tuple[LogprobsEmitted, bytes]:
    """(request, attempt, index, what is told)."""
    buffer = ScoreBuffer()
    for request, attempt, index, scored in rows:
        buffer.add((request, attempt), index, scored)
    frame = buffer.take(1)
    assert frame is not None
    return frame


def scored(value: int, tops: int) -> TokenScored:
    ids = tuple(10 * value + at for at in range(tops))
    return TokenScored(-float(value), value, ids, tuple(-float(token) for token in ids))


def test_the_head_gives_each_client_its_own() -> None:
    table = RowTable(4)
    numbers = [table.open(client, request, 1) for client, request in ((1, 11), (2, 12), (1, 13))]
    rows = [(numbers[0], 1, 0, scored(1, 2)), (numbers[1], 1, 5, scored(2, 0)), (numbers[2], 1, 9, scored(3, 1))]
    rows += [(numbers[0], 1, 1, scored(4, 1)), (numbers[1], 2, 0, scored(5, 3))]  # the last: an attempt that is over
    parts = table.split_scores(*frame_of(rows))
    assert [(client, part.num_rows, part.num_tops) for client, part, _ in parts] == [(1, 3, 4), (2, 1, 0)]
    assert rows_of(parts[0][2], 3, 4) == [(11, 1, 0, -1, 1, [10, 11]), (13, 1, 9, -3, 3, [30]), (11, 1, 1, -4, 4, [40])]
    assert rows_of(parts[1][2], 1, 0) == [(12, 1, 5, -2, 2, [])]
    table.mute(numbers[1])
    assert [client for client, _, _ in table.split_scores(*frame_of(rows))] == [1]
    assert table.split_scores(LogprobsEmitted(1, 0, 0), b"") == []


def test_the_head_refuses_columns_that_do_not_fit() -> None:
    table = RowTable(4)
    number = table.open(1, 11, 1)
    message, blob = frame_of([(number, 1, 0, scored(1, 2))])
    with pytest.raises(RemoteProtocolError, match="has 43 bytes"):
        table.split_scores(message, blob[:-1])
    with pytest.raises(RemoteProtocolError, match="do not add up to 3"):
        table.split_scores(LogprobsEmitted(1, 1, 3), blob + bytes(8))
    with pytest.raises(RemoteProtocolError, match="never numbered"):
        table.split_scores(*frame_of([(number + 9, 1, 0, scored(1, 0))]))


def test_a_later_attempt_takes_the_place_of_what_was_told_before() -> None:
    told = Told()
    for index, value in enumerate((1, 2, 3)):
        (entry,) = read_scores(*as_view(frame_of([(5, 1, index, scored(value, value))])))
        told.extend(entry.index, *entry.columns)
    assert len(told) == 3 and told.top_ids.tolist() == [10, 20, 21, 30, 31, 32]
    (entry,) = read_scores(*as_view(frame_of([(5, 2, 1, scored(7, 1))])))
    told.extend(entry.index, *entry.columns)
    assert told.logprobs.tolist() == [-1, -7] and told.counts.tolist() == [1, 1] and told.top_ids.tolist() == [10, 70]
    with pytest.raises(RemoteProtocolError, match="from 4 on came where 2 was next"):
        told.extend(4, *entry.columns)


def as_view(frame: tuple[LogprobsEmitted, bytes]) -> tuple[LogprobsEmitted, memoryview]:
    return frame[0], memoryview(frame[1])


def test_a_prompt_is_told_from_its_second_id_on_and_again_from_there() -> None:
    told = Told(missing=1)
    for _ in range(2):
        for rows in ([1, 2, 3], [4, 5]):
            ((word, blob),) = split_prompt((5, 1), 9, make_scores(rows, [2] * len(rows)))
            take_prompt(told, word, memoryview(blob))
        assert len(told) == 6 and told.logprobs.tolist() == [-1, -2, -3, -4, -5]
        assert told.top_ids.tolist() == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    with pytest.raises(RemoteProtocolError, match="from 0 on"):
        take_prompt(told, PromptScored(5, 1, 9, 0, 1, 0), memoryview(bytes(8)))


class Silence:
    """A sink that hears nothing in these tests."""

    def tokens_came(self, rows: object, counts: object) -> None:
        raise AssertionError("no tokens were sent")

    row_finished = row_failed = tokens_came


async def test_a_client_keeps_what_it_is_told_with_the_row() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    stream = FrameStream(ours, accepts=CLIENT_FROM_HEAD, out_limit_bytes=1 << 20, stall_s=5.0, name="head")
    async with stream, theirs:
        client = HeadClient(stream, Silence())
        rows = [Row(array.array("i", [1, 2, 3]).tobytes(), Sampling(logprobs=1, prompt_logprobs=0)) for _ in range(2)]
        for row in rows:
            await client.submit(row)
        message, blob = frame_of([(2, 1, 0, scored(1, 1)), (1, 1, 0, scored(2, 2)), (2, 1, 1, scored(3, 0))])
        prompt = PromptScored(1, 1, 4, 1, 2, 0), np.array([-1, -2], "<f4").tobytes() + np.array([1, 2], "<i4").tobytes()
        client.handle([Frame(message, memoryview(blob)), Frame(prompt[0], memoryview(prompt[1]))])
        assert rows[0].told is not None and rows[0].told.top_ids.tolist() == [20, 21]
        assert rows[1].told is not None and rows[1].told.logprobs.tolist() == [-1, -3]
        assert rows[0].prompt_told is not None and rows[0].prompt_told.logprobs.tolist() == [-1, -2]
        assert rows[1].prompt_told is None
        client.abandon(rows[0])
        late, late_blob = frame_of([(1, 1, 1, scored(2, 0))])
        client.handle([Frame(late, memoryview(late_blob))])
        with pytest.raises(RemoteProtocolError, match="request 9; the last one submitted is 2"):
            strange, strange_blob = frame_of([(9, 1, 0, scored(2, 0))])
            client.handle([Frame(strange, memoryview(strange_blob))])
        with pytest.raises(RemoteProtocolError, match="from 5 on came where 2 was next"):
            gap, gap_blob = frame_of([(2, 1, 5, scored(2, 0))])
            client.handle([Frame(gap, memoryview(gap_blob))])


async def test_the_head_passes_scores_on_under_the_clients_own_numbers(nursery: trio.Nursery) -> None:
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.rank(0, "prefill")
    decode = rig.rank(1, "decode")
    for request in (7, 8):
        rig.submit(client, request, logprobs=1, prompt_logprobs=0)
    first, second = [message.request for message in await decode.take()]
    rig.from_rank(1, PromptScored(first, 1, 5, 1, 2, 0), b"x" * 16)
    rig.start(1, first)
    rig.start(1, second)
    rig.from_rank(1, *frame_of([(first, 1, 0, scored(1, 1)), (second, 1, 0, scored(2, 0))]))
    prompt, *_, told = await end.take_frames()
    assert prompt.message == PromptScored(7, 1, 5, 1, 2, 0) and bytes(prompt.blob) == b"x" * 16
    assert isinstance(told.message, LogprobsEmitted)
    assert rows_of(bytes(told.blob), 2, 1) == [(7, 1, 0, -1, 1, [10]), (8, 1, 0, -2, 2, [])]
    # Of a request that the client hears no more of, nothing goes on.
    rig.router.client_left(client)
    rig.from_rank(1, PromptScored(first, 1, 5, 1, 2, 0), b"x" * 16)
    rig.from_rank(1, *frame_of([(second, 1, 1, scored(2, 0))]))
    assert await end.take() == []


async def test_the_head_refuses_what_no_rank_could_bias(nursery: trio.Nursery) -> None:
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.submit(client, 1, bias_ids=(VOCAB,), biases=(1.0,))
    rig.submit(client, 2, bias_ids=(1, 1), biases=(1.0, 2.0))
    words = await end.take()
    assert [word.code for word in words if isinstance(word, RequestFailed)] == ["bad_request"] * 2
    assert f"id {VOCAB} is outside the vocabulary" in words[0].message and "there twice" in words[1].message
