"""The head's table of requests: every submission is answered once, exactly, whatever its ranks and clients do."""

from __future__ import annotations

import pytest
import trio

from engine.errors import RemoteProtocolError
from tests.actors.head_rig import VOCAB, Rig, emitted, pack, rows_of
from transport.messages import (
    Abort,
    AskRequests,
    CancelRequest,
    RankSnapshot,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ReservePages,
    Sampling,
    StartPrefill,
    Submit,
    TokensEmitted,
)
from transport.wire import Frame


async def placed(rig: Rig, *, num: int = 1):
    """A client with `num` requests on prefill rank 0 and decode rank 1; their numbers in the cluster."""
    client, end, drops = rig.client()
    prefill, decode = rig.rank(0, "prefill"), rig.rank(1, "decode")
    for request in range(1, num + 1):
        rig.submit(client, request)
    numbers = [message.request for message in await decode.take()]
    await prefill.take()
    return client, end, drops, prefill, decode, numbers


async def test_both_ranks_are_told_at_once_and_only_prefill_gets_the_ids(nursery):
    rig = Rig(nursery)
    client, _, _ = rig.client()
    prefill, decode = rig.rank(0, "prefill"), rig.rank(1, "decode")
    rig.submit(client, 7, [5, 6, 7, 8], generated=1, max_tokens=9, seed=3)
    [start], [reserve] = await prefill.take_frames(), await decode.take_frames()
    assert bytes(start.blob) == pack([5, 6, 7, 8]) and bytes(reserve.blob) == b""
    assert isinstance(start.message, StartPrefill) and isinstance(reserve.message, ReservePages)
    assert start.message.request == reserve.message.request
    assert (start.message.decode_rank, reserve.message.prefill_rank) == (1, 0)
    assert (reserve.message.num_ids, reserve.message.generated, reserve.message.sampling.seed) == (4, 1, 3)


async def test_requests_wait_for_both_pools_and_then_go_by_priority_and_arrival(nursery, autojump_clock):
    rig = Rig(nursery, rank_waiting=50)
    client, _, _ = rig.client()
    prefill = rig.rank(0, "prefill")
    for request, priority in [(1, 5), (2, 0), (3, 5), (4, -1), (5, 0)]:
        rig.submit(client, request, [request], priority=priority)
    assert await prefill.take() == [] and rig.router.num_waiting == 5
    await trio.sleep(2)
    rig.rank(1, "decode")
    starts = await prefill.take_frames()
    assert [bytes(start.blob) for start in starts] == [pack([request]) for request in (4, 2, 5, 1, 3)]
    assert all(start.message.queued_us == 2_000_000 for start in starts)
    assert rig.router.num_waiting == 0 and rig.router.num_running == 5


@pytest.mark.parametrize(
    ("ids", "submission", "code", "says"),
    [
        ([], {}, "bad_request", "empty"),
        ([1], {"generated": 1}, "bad_request", "empty"),
        ([1, VOCAB], {}, "bad_request", f"token id {VOCAB} is outside"),
        ([1, -1], {}, "bad_request", "token id -1 is outside"),
        ([1] * 125, {}, "too_long", "maximum context length is 128 tokens, but 125 prompt tokens and max_tokens 4"),
        ([1] * 10, {"generated": 4}, "bad_request", "4 of max_tokens 4 are generated"),
        ([1], {"min_tokens": 5}, "bad_request", "min_tokens 5 is more than max_tokens 4"),
    ],
)
async def test_what_can_not_work_is_refused_with_the_reason(nursery, ids, submission, code, says):
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.submit(client, 1, ids, **submission)
    [failed] = await end.take()
    assert isinstance(failed, RequestFailed)
    assert failed.code == code and says in failed.message and failed.definite and not failed.retryable
    assert rig.router.num_waiting == 0


async def test_the_longest_request_that_the_limit_allows_is_taken(nursery):
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.submit(client, 1, [1] * 124)
    rig.submit(client, 2, [1] * 126, generated=2)
    assert await end.take() == [] and rig.router.num_waiting == 2


async def test_a_sequence_that_fits_in_no_arena_is_refused_instead_of_waiting_for_ever(nursery):
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.rank(0, "prefill")
    rig.rank(1, "decode", num_pages=2)
    rig.submit(client, 1, [1] * 29)
    rig.submit(client, 2, [1] * 28)
    [failed] = await end.take()
    assert failed.request == 1 and failed.code == "too_long" and "32" in failed.message
    assert rig.router.num_running == 1


@pytest.mark.parametrize(
    ("changes", "prompts", "says"),
    [
        ({"queue_requests": 2}, [1, 1], "limit 2"),
        ({"queue_prompt_tokens": 20}, [15], "limit 20"),
        ({"client_inflight": 3}, [1, 1, 1], "3 unfinished"),
    ],
)
async def test_every_queue_is_bounded_and_says_its_limit(nursery, changes, prompts, says):
    rig = Rig(nursery, **changes)
    client, end, _ = rig.client()
    for request, num_ids in enumerate(prompts):
        rig.submit(client, request, [1] * num_ids)
    assert await end.take() == []
    rig.submit(client, 99, [1] * 6)
    [failed] = await end.take()
    assert failed.request == 99 and failed.code == "queue_full" and failed.retryable and says in failed.message


async def test_a_number_used_twice_at_a_time_is_a_protocol_error(nursery):
    rig = Rig(nursery)
    client, _, _ = rig.client()
    rig.submit(client, 1)
    with pytest.raises(RemoteProtocolError, match="request number 1"):
        rig.submit(client, 1, attempt=2)


async def test_no_rank_gets_more_than_it_may_hold_and_an_end_makes_room(nursery):
    rig = Rig(nursery, rank_waiting=2)
    _, end, _, prefill, _, numbers = await placed(rig, num=4)
    assert len(numbers) == 2 and rig.router.num_waiting == 2
    rig.emit(1, [(numbers[0], 1, 0, [9])])
    assert len(await prefill.take()) == 0  # the decode rank is as full as before
    rig.finish(1, numbers[0])
    assert len(await prefill.take()) == 1 and rig.router.num_waiting == 1
    assert [type(message) for message in await end.take()] == [RequestStarted, TokensEmitted, RequestFinished]


async def test_tokens_of_one_step_reach_each_client_renumbered_and_in_order(nursery):
    rig = Rig(nursery, rank_waiting=50)
    one, end_one, _ = rig.client("one")
    two, end_two, _ = rig.client("two")
    rig.rank(0, "prefill")
    decode = rig.rank(1, "decode")
    for request in (10, 11):
        rig.submit(one, request)
        rig.submit(two, request, attempt=3)
    a, b, c, d = [message.request for message in await decode.take()]
    rig.emit(1, [(d, 3, 0, [1]), (a, 1, 0, [2, 3]), (b, 3, 0, [4]), (c, 1, 0, [5, 6, 7])])
    [*starts_one, frame_one], [*_, frame_two] = await end_one.take_frames(), await end_two.take_frames()
    assert [(start.message.request, start.message.attempt) for start in starts_one] == [(10, 1), (11, 1)]
    assert rows_of(frame_one) == [(10, 1, 0, [2, 3]), (11, 1, 0, [5, 6, 7])]
    assert rows_of(frame_two) == [(11, 3, 0, [1]), (10, 3, 0, [4])]


async def test_rows_of_ended_requests_and_of_other_attempts_are_dropped(nursery):
    rig = Rig(nursery)
    _, end, _, _, _, (a, b) = await placed(rig, num=2)
    rig.finish(1, a)
    rig.emit(1, [(a, 1, 0, [1]), (b, 2, 0, [2]), (b, 1, 0, [3])])
    _, finished, start, frame = await end.take_frames()
    assert finished.message.request == 1 and start.message.request == 2
    assert rows_of(frame) == [(2, 1, 0, [3])]


@pytest.mark.parametrize("spoil", ["short", "count", "number"])
async def test_a_rank_whose_columns_do_not_add_up_is_a_protocol_error(nursery, spoil):
    rig = Rig(nursery)
    *_, numbers = await placed(rig)
    message, blob = emitted([(numbers[0], 1, 0, [1, 2])])
    if spoil == "short":
        blob = blob[:-4]
    elif spoil == "count":
        blob = blob[:16] + pack([3]) + blob[20:]
    else:
        blob = (-5).to_bytes(8, "little", signed=True) + blob[8:]
    with pytest.raises(RemoteProtocolError):
        rig.from_rank(1, message, blob)


async def test_a_waiting_request_is_cancelled_without_any_rank(nursery):
    rig = Rig(nursery)
    client, end, _ = rig.client()
    rig.submit(client, 1)
    rig.from_client(client, CancelRequest(1))
    [failed] = await end.take()
    assert failed.code == "cancelled" and failed.definite
    decode = rig.rank(1, "decode")
    rig.rank(0, "prefill")
    assert await decode.take() == []


async def test_a_cancelled_request_ends_when_both_ranks_have_answered(nursery):
    rig = Rig(nursery)
    client, end, _, prefill, decode, (number,) = await placed(rig)
    rig.from_client(client, CancelRequest(1))
    assert await prefill.take() == await decode.take() == [Abort(number, 1)]
    rig.from_rank(1, RequestAborted(number, 1))
    rig.from_client(client, CancelRequest(1))
    assert await end.take() == [] and await prefill.take() == []
    rig.from_rank(0, RequestAborted(number, 1))
    [failed] = await end.take()
    assert failed.code == "cancelled" and failed.request == 1
    await rig.router.wait_idle()


async def test_a_finish_overtakes_the_cancellation_with_all_its_tokens(nursery):
    rig = Rig(nursery)
    client, end, _, _, _, (number,) = await placed(rig)
    rig.from_client(client, CancelRequest(1))
    rig.emit(1, [(number, 1, 0, [1, 2, 3, 4])])
    rig.finish(1, number)
    rig.from_rank(1, RequestAborted(number, 1))
    assert [type(message) for message in await end.take()] == [RequestStarted, TokensEmitted, RequestFinished]
    await rig.router.wait_idle()


async def test_a_cancellation_is_not_left_waiting_for_a_prefill_rank_that_died_after_its_part(nursery):
    rig = Rig(nursery)
    client, end, _, _, _, (number,) = await placed(rig)
    rig.from_client(client, CancelRequest(1))
    rig.emit(1, [(number, 1, 0, [1])])
    rig.router.rank_lost(0, "killed by SIGKILL")
    rig.from_rank(1, RequestAborted(number, 1))
    *_, failed = await end.take()
    assert isinstance(failed, RequestFailed) and failed.code == "cancelled"
    with trio.fail_after(1):
        await rig.router.wait_idle()


async def test_a_finish_without_a_start_is_a_protocol_error(nursery):
    rig = Rig(nursery)
    *_, (number,) = await placed(rig)
    with pytest.raises(RemoteProtocolError, match="without a start"):
        rig.from_rank(1, RequestFinished(number, 1, "length", 4, 1))


async def test_a_rank_that_never_answers_an_abort_keeps_nobody_waiting_but_stays_charged(nursery, autojump_clock):
    rig = Rig(nursery, rank_waiting=1)
    client, end, _, _, _, (number,) = await placed(rig)
    rig.from_client(client, CancelRequest(1))
    await trio.sleep(4.9)
    rig.router.expire()
    assert await end.take() == []
    await trio.sleep(0.2)
    rig.router.expire()
    [failed] = await end.take()
    assert failed.code == "cancelled"
    rig.emit(1, [(number, 1, 0, [1])])
    rig.submit(client, 2)
    assert await end.take() == [] and rig.router.num_waiting == 1
    rig.from_rank(0, RequestAborted(number, 1))
    rig.from_rank(1, RequestAborted(number, 1))
    assert rig.router.num_waiting == 0 and rig.router.num_running == 1


async def test_a_client_that_leaves_takes_its_requests_along(nursery):
    rig = Rig(nursery, rank_waiting=1)
    client, _, _, prefill, decode, (number,) = await placed(rig, num=3)
    other, end, _ = rig.client("other")
    rig.submit(other, 1)
    rig.router.client_left(client)
    assert await prefill.take() == await decode.take() == [Abort(number, 1)]
    assert rig.router.num_waiting == 1  # the other client's
    rig.emit(1, [(number, 1, 0, [1])])
    for rank in (0, 1):
        rig.from_rank(rank, RequestAborted(number, 1))
    [reserve] = await decode.take()
    rig.emit(1, [(reserve.request, 1, 0, [8])])
    assert [rows_of(frame) for frame in (await end.take_frames())[1:]] == [[(1, 1, 0, [8])]]


@pytest.mark.parametrize("lost", [0, 1])
async def test_requests_on_a_lost_rank_fail_retryable_and_are_aborted_on_the_other(nursery, lost):
    rig = Rig(nursery)
    client, end, _, *ends, numbers = await placed(rig, num=2)
    rig.router.rank_lost(lost, "killed by SIGKILL")
    failures = await end.take()
    assert [failed.request for failed in failures] == [1, 2]
    assert all(failed.code == "rank_lost" and failed.definite and failed.retryable for failed in failures)
    assert f"rank {lost} is lost: killed by SIGKILL" in failures[0].message
    assert await ends[1 - lost].take() == [Abort(number, 1) for number in numbers]
    for number in numbers:
        rig.from_rank(1 - lost, RequestAborted(number, 1))
    await rig.router.wait_idle()
    rig.submit(client, 1, attempt=2)
    rig.rank(lost, "prefill" if lost == 0 else "decode", generation=2)
    assert len(await ends[1 - lost].take()) == 1


async def test_a_prefill_rank_may_die_once_the_first_token_is_out(nursery):
    rig = Rig(nursery)
    _, end, _, _, _, (a, _) = await placed(rig, num=2)
    rig.emit(1, [(a, 1, 0, [7])])
    rig.router.rank_lost(0, "gone")
    rig.finish(1, a)
    start, tokens, failed, finished = await end.take()
    assert isinstance(start, RequestStarted) and (start.request, start.prefill_rank, start.pushed_bytes) == (1, 0, 100)
    assert isinstance(tokens, TokensEmitted)
    assert isinstance(failed, RequestFailed) and failed.request == 2
    assert isinstance(finished, RequestFinished) and finished.request == 1


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_request_that_fails_on_one_rank_is_aborted_on_the_other(nursery, failing):
    rig = Rig(nursery)
    _, end, _, *ends, (number,) = await placed(rig)
    rig.from_rank(failing, RequestFailed(number, 1, "transfer_failed", "no route", True, True))
    [failed] = await end.take()
    assert failed.code == "transfer_failed" and failed.retryable and f"rank {failing}: no route" == failed.message
    assert await ends[1 - failing].take() == [Abort(number, 1)]
    assert await ends[failing].take() == []
    rig.from_rank(1 - failing, RequestFailed(number, 1, "transfer_failed", "me too", True, True))
    rig.from_rank(1 - failing, RequestAborted(number, 1))
    assert await end.take() == []
    await rig.router.wait_idle()
    assert rig.router.traffic().push_failures == 1


async def test_a_client_that_does_not_read_is_dropped_whole_and_nobody_else_notices(nursery):
    rig = Rig(nursery, rank_waiting=50)
    slow, slow_end, drops = rig.client("slow", limit=200)
    quick, quick_end, _ = rig.client("quick")
    rig.rank(0, "prefill")
    decode = rig.rank(1, "decode")
    rig.submit(slow, 1)
    rig.submit(quick, 1)
    a, b = [message.request for message in await decode.take()]
    for index in range(8):  # no checkpoint between: nothing is written out meanwhile
        rig.emit(1, [(a, 1, index, [1]), (b, 1, index, [2])])
    assert len(drops) == 1 and "200" in drops[0]
    assert len(await quick_end.take()) == 9
    [_, *frames] = await slow_end.take_frames()
    seen = [row for frame in frames for row in rows_of(frame)]
    assert [row[2] for row in seen] == list(range(len(seen))) and len(seen) < 8
    rig.router.client_left(slow)
    assert await decode.take() == [Abort(a, 1)]


async def test_a_rank_that_does_not_take_commands_is_reported_to_the_supervisor(nursery):
    rig = Rig(nursery)
    client, _, _ = rig.client()
    prefill = rig.rank(0, "prefill")
    rig.rank(1, "decode")
    prefill.near.close()
    rig.submit(client, 1)
    assert "does not take commands" in rig.faults[0]


async def test_draining_refuses_the_new_and_finishes_the_old(nursery):
    rig = Rig(nursery, rank_waiting=1)
    client, end, _, _, decode, (number,) = await placed(rig, num=2)
    rig.router.drain()
    rig.submit(client, 3)
    [failed] = await end.take()
    assert failed.request == 3 and failed.code == "draining" and failed.retryable
    rig.finish(1, number)
    [reserve] = await decode.take()
    rig.finish(1, reserve.request)
    ends = [message for message in await end.take() if isinstance(message, RequestFinished)]
    assert [message.request for message in ends] == [1, 2]
    await rig.router.wait_idle()


async def test_stopping_answers_every_request(nursery):
    rig = Rig(nursery, rank_waiting=1)
    _, end, _, _, decode, (number,) = await placed(rig, num=3)
    rig.router.fail_all("the engine is shutting down")
    failures = await end.take()
    assert sorted(failed.request for failed in failures) == [1, 2, 3]
    assert {failed.code for failed in failures} == {"draining"}
    assert await decode.take() == [Abort(number, 1)]
    assert rig.router.num_waiting == 0


async def test_quarantined_pages_of_a_snapshot_steer_the_choice(nursery):
    rig = Rig(nursery)
    client, _, _ = rig.client()
    rig.rank(0, "prefill")
    one, two = rig.rank(1, "decode"), rig.rank(2, "decode")
    rig.router.rank_snapshot(RankSnapshot(1, 1, 0, 0, 0, 0, 0, 0, 0, 64, 64, 8, *[0] * 11))
    rig.submit(client, 1)
    assert await one.take() == [] and len(await two.take()) == 1


async def test_lines_about_a_request_have_its_callers_trace(nursery, caplog):
    caplog.set_level("INFO", "engine.router")
    rig = Rig(nursery)
    client, *_ = rig.client()
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    label = f"bench-1 00-{trace}-00f067aa0ba902b7-01"
    ids = memoryview(pack([1, 2, 3]))
    for request, allowed in ((1, 4), (2, 1 << 20)):
        submit = Submit(request, 1, 0, Sampling(max_tokens=allowed), 0, label)
        rig.router.client_frames(client, [Frame(submit, ids)])
    rig.rank(0, "prefill")
    rig.rank(1, "decode")
    number = rig.router.list_requests(AskRequests(10, 0)).rows[0].request
    rig.start(1, number)
    rig.emit(1, [(number, 1, 0, [7])])
    rig.finish(1, number)
    lines = {record.message: record.fields.get("trace_id") for record in caplog.records}
    assert lines == {"request.refuse": trace, "request.finish": trace}


async def test_a_wait_that_would_be_too_long_is_refused_at_once(nursery, autojump_clock):
    rig = Rig(nursery, rank_waiting=1, queue_wait_s=1.5)
    client, end, *_ = rig.client()
    rig.rank(0, "prefill")
    rig.rank(1, "decode")
    rig.submit(client, 1)
    rig.submit(client, 2)
    assert await end.take() == [] and rig.router.num_waiting == 1
    number = rig.router.list_requests(AskRequests(10, 0)).rows[0].request
    await trio.sleep(1)
    rig.submit(client, 3)  # it has one before it, and none was taken for a second
    [refused] = await end.take()
    assert isinstance(refused, RequestFailed) and refused.code == "queue_full" and refused.retryable
    assert refused.message == "the engine is full: 1 requests are before this one, some 2.0 s (limits.queue_wait_s)"
    rig.submit(client, 4, priority=-1)  # nobody is before it
    assert rig.router.num_waiting == 2
    rig.emit(1, [(number, 1, 0, [7])])
    rig.finish(1, number)
    assert rig.router.num_waiting == 1
    rig.submit(client, 5)
    assert isinstance((await end.take())[-1], RequestFailed), "a place a second, and one before it"
