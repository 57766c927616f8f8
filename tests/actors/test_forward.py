"""Tokens on their way through the head: one frame for a turn of its loop, and nothing overtakes them."""

from __future__ import annotations

from array import array

import pytest
import trio
import trio.testing

from engine.actors.forward import Forwarder
from engine.actors.rows import RowTable
from engine.errors import RemoteProtocolError
from tests.actors.head_rig import Rig, emitted, rows_of
from transport.messages import RequestFinished, RequestStarted, Timings, TokensEmitted
from transport.wire import Frame


class Head:
    """A table of rows with one client, and what a forwarder makes of frames."""

    def __init__(self) -> None:
        self.table = RowTable(capacity=8)
        self.numbers = [self.table.open(1, request, 1) for request in range(1, 5)]
        self.told: list[list[tuple[int, int, int, list[int]]]] = []
        self.faults: list[tuple[int, str]] = []
        self.tokens = Forwarder(self._forward, lambda rank, why: self.faults.append((rank, why)))

    def _forward(self, message: TokensEmitted, blob: bytes | memoryview) -> None:
        for _, part, columns in self.table.split(message, blob).parts:
            self.told.append(rows_of(Frame(part, memoryview(columns))))

    def add(self, rank: int, *rows: tuple[int, int, list[int]]) -> None:
        """Rows are (place of the request, index, tokens)."""
        message, blob = emitted([(self.numbers[at], 1, index, tokens) for at, index, tokens in rows])
        self.tokens.add(rank, message, memoryview(blob))


async def test_what_ranks_say_in_one_turn_is_one_frame(nursery):
    head = Head()
    nursery.start_soon(head.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    head.add(7, (0, 5, [50]), (1, 3, [30]))
    head.add(8, (3, 9, [90]))
    assert head.told == []
    await trio.testing.wait_all_tasks_blocked()
    assert head.told == [[(1, 1, 5, [50]), (2, 1, 3, [30]), (4, 1, 9, [90])]]
    head.add(8, (3, 10, [91]))
    await trio.testing.wait_all_tasks_blocked()
    assert head.told[1:] == [[(4, 1, 10, [91])]]


async def test_two_frames_of_a_rank_stay_two(nursery):
    head = Head()
    nursery.start_soon(head.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    head.add(7, (0, 5, [50]))
    head.add(7, (0, 6, [51]))
    await trio.testing.wait_all_tasks_blocked()
    assert head.told == [[(1, 1, 5, [50])], [(1, 1, 6, [51])]]


async def test_rows_with_several_tokens_are_joined_like_others(nursery):
    head = Head()
    nursery.start_soon(head.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    head.add(7, (0, 5, [50]), (2, 1, [20, 21]))
    head.add(8, (1, 0, [1, 2, 3]))
    head.add(9, (3, 7, [70]))
    await trio.testing.wait_all_tasks_blocked()
    assert head.told == [[(1, 1, 5, [50]), (3, 1, 1, [20, 21]), (2, 1, 0, [1, 2, 3]), (4, 1, 7, [70])]]


@pytest.mark.parametrize("counts", [(3, 1), (0, 3), (-1, 4)])
async def test_counts_that_do_not_add_up_are_their_own_ranks_fault(nursery, counts):
    """Two wrong frames could add up to a right one."""
    head = Head()
    nursery.start_soon(head.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    head.add(7, (0, 5, [50, 51]))
    message, blob = emitted([(head.numbers[1], 1, 0, [1, 2]), (head.numbers[2], 1, 0, [3])])
    columns = bytearray(blob)
    columns[32:40] = array("i", counts).tobytes()
    with pytest.raises(RemoteProtocolError, match="do not add up"):
        head.tokens.add(8, message, memoryview(bytes(columns)))
    await trio.testing.wait_all_tasks_blocked()
    assert head.told == [[(1, 1, 5, [50, 51])]]


async def test_a_rank_at_fault_costs_the_others_nothing(nursery):
    head = Head()
    nursery.start_soon(head.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    head.add(7, (0, 5, [50]))
    wrong, blob = emitted([(999, 1, 0, [1])])
    head.tokens.add(8, wrong, blob)
    head.add(9, (1, 3, [30]))
    await trio.testing.wait_all_tasks_blocked()
    assert head.told == [[(1, 1, 5, [50])], [(2, 1, 3, [30])]]
    assert [rank for rank, _ in head.faults] == [8] and "never numbered" in head.faults[0][1]


def test_while_nobody_runs_it_frames_go_on_at_once_and_errors_are_raised():
    head = Head()
    head.add(7, (0, 5, [50]))
    assert head.told == [[(1, 1, 5, [50])]]
    wrong, blob = emitted([(999, 1, 0, [1])])
    with pytest.raises(RemoteProtocolError, match="never numbered"):
        head.tokens.add(8, wrong, blob)


async def test_what_is_there_when_it_is_cancelled_goes_on():
    head = Head()
    async with trio.open_nursery() as inner:
        inner.start_soon(head.tokens.run)
        await trio.testing.wait_all_tasks_blocked()
        head.add(7, (0, 5, [50]))
        inner.cancel_scope.cancel()
    assert head.told == [[(1, 1, 5, [50])]]


async def test_an_end_does_not_overtake_tokens(nursery):
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.rank(0, "prefill")
    decode = rig.rank(1, "decode")
    rig.submit(client, 1)
    rig.submit(client, 2)
    one, two = [message.request for message in await decode.take()]
    nursery.start_soon(rig.router.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    words = []
    for number in (one, two):
        words.append(Frame(RequestStarted(number, 1, 2, 0, 0, 1, 0, 0, 0, Timings()), memoryview(b"")))
    message, blob = emitted([(one, 1, 0, [5]), (two, 1, 0, [6])])
    words += [Frame(message, memoryview(blob)), Frame(RequestFinished(one, 1, "stop", 1, 0), memoryview(b""))]
    rig.router.rank_frames(1, words)
    told = await end.take()
    assert [type(each) for each in told] == [RequestStarted, RequestStarted, TokensEmitted, RequestFinished]


async def test_an_end_does_not_cut_a_turns_frame_in_two(nursery):
    """Of two ranks that speak in one turn, the first tells of an end: its word waits for the tokens of both."""
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.rank(0, "prefill")
    ranks = [rig.rank(1, "decode"), rig.rank(2, "decode")]
    rig.submit(client, 1)
    rig.submit(client, 2)
    numbers = [(await rank.take())[0].request for rank in ranks]
    nursery.start_soon(rig.router.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    for rank, number in enumerate(numbers, 1):
        started = RequestStarted(number, 1, 2, 0, 0, rank, 0, 0, 0, Timings())
        message, blob = emitted([(number, 1, 0, [5])])
        words = [Frame(started, memoryview(b"")), Frame(message, memoryview(blob))]
        if rank == 1:
            words.append(Frame(RequestFinished(number, 1, "stop", 1, 0), memoryview(b"")))
        rig.router.rank_frames(rank, words)
    rig.submit(client, 3)  # the place of the one that ended is not its own before the tokens are through
    told = await end.take()
    assert [type(each) for each in told] == [RequestStarted, RequestStarted, TokensEmitted, RequestFinished]
    assert told[2].num_rows == 2 and told[3].request == 1


async def test_whoever_waits_for_the_last_request_finds_its_end_told(nursery):
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.rank(0, "prefill")
    decode = rig.rank(1, "decode")
    rig.submit(client, 1)
    (number,) = [message.request for message in await decode.take()]
    nursery.start_soon(rig.router.tokens.run)
    await trio.testing.wait_all_tasks_blocked()
    message, blob = emitted([(number, 1, 0, [5])])
    words = [Frame(RequestStarted(number, 1, 2, 0, 0, 1, 0, 0, 0, Timings()), memoryview(b""))]
    words += [Frame(message, memoryview(blob)), Frame(RequestFinished(number, 1, "stop", 1, 0), memoryview(b""))]
    rig.router.rank_frames(1, words)
    await rig.router.wait_idle()
    client.dropped = True  # as one whose connection is closed now
    assert [type(each) for each in await end.take()] == [RequestStarted, TokensEmitted, RequestFinished]
