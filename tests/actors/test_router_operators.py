"""What operators see of requests and do to them: the list, cancels in every state, drained ranks, totals."""

from __future__ import annotations

import random

import pytest
import trio

from engine.core.latency import LatencyCounts
from tests.actors.head_rig import Rig, rows_of
from transport.messages import (
    Abort,
    AskRequests,
    CancelRequest,
    ForgetPrompts,
    RequestAborted,
    RequestEnds,
    RequestFailed,
    RequestFinished,
    RequestRow,
    RequestStarted,
    ReservePages,
    StartPrefill,
    Timings,
    TokensEmitted,
)

ALL = AskRequests(100, 0)
PREFILL, DECODE = 0, 1


def rows(rig: Rig, ask: AskRequests = ALL) -> list[RequestRow]:
    return list(rig.router.list_requests(ask).rows)


async def open_rig(nursery: trio.Nursery, **changes: object):
    rig = Rig(nursery, **changes)
    client, end, _ = rig.client("batch")
    return rig, client, end, rig.rank(PREFILL, "prefill"), rig.rank(DECODE, "decode")


async def bring(rig: Rig, client, state: str) -> int:
    """A request in the state; its number."""
    if state == "queued":
        for number in range(20, 20 + 4):  # as many as ranks may have
            rig.submit(client, number)
    rig.submit(client, 1, [4, 5, 6], attempt=2, generated=1, max_tokens=9)
    number = rows(rig)[-1].request
    if state in ("decode", "stopping"):
        rig.from_rank(
            DECODE, RequestStarted(number, 2, 2, 1, PREFILL, DECODE, 100, 1, 1, Timings(7000, 8000, 9000))
        )
        rig.started.add((number, 2))
        rig.emit(DECODE, [(number, 2, 1, [1])])
        rig.emit(DECODE, [(number, 2, 2, [2, 3])])
    if state == "stopping":
        rig.from_client(client, CancelRequest(1))
    return number


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "stopping"])
async def test_a_row_says_what_its_fields_promise(nursery, autojump_clock, state):
    rig, client, *_ = await open_rig(nursery)
    await trio.sleep(1)
    number = await bring(rig, client, state)
    await trio.sleep(2.5)
    row = rows(rig)[-1]
    assert (row.request, row.client, row.label, row.state) == (number, "batch", "r1", state)
    assert (row.age_ms, row.state_ms, row.attempt) == (2500, 2500, 2)
    assert (row.prompt_tokens, row.max_tokens) == (2, 9)
    has_ranks, has_started = state != "queued", state in ("decode", "stopping")
    assert (row.prefill_rank, row.decode_rank) == ((PREFILL, DECODE) if has_ranks else (-1, -1))
    assert row.generated == (4 if has_started else 1) and row.cached_tokens == int(has_started)
    assert (row.queue_us, row.prefill_us, row.push_us) == ((7000, 8000, 9000) if has_started else (0, 0, 0))


async def test_the_time_in_a_state_begins_with_it(nursery, autojump_clock):
    rig = Rig(nursery)
    client, _, _ = rig.client()
    rig.submit(client, 1)
    await trio.sleep(1)
    rig.rank(PREFILL, "prefill"), rig.rank(DECODE, "decode")
    await trio.sleep(2)
    assert (rows(rig)[0].state, rows(rig)[0].state_ms) == ("prefill", 2000)
    rig.emit(DECODE, [(rows(rig)[0].request, 1, 0, [1])])
    await trio.sleep(3)
    assert (rows(rig)[0].state, rows(rig)[0].state_ms) == ("decode", 3000)
    rig.from_client(client, CancelRequest(1))
    await trio.sleep(4)
    assert (rows(rig)[0].state, rows(rig)[0].state_ms, rows(rig)[0].age_ms) == ("stopping", 4000, 10_000)


async def test_the_oldest_come_first_and_the_rest_is_counted(nursery, autojump_clock):
    rig = Rig(nursery, queue_requests=50)
    client, _, _ = rig.client()
    for request in range(10):
        rig.submit(client, request, priority=-request)
        await trio.sleep(1)
    report = rig.router.list_requests(AskRequests(3, 0))
    assert report.total == 10 and [row.label for row in report.rows] == ["r0", "r1", "r2"]
    report = rig.router.list_requests(AskRequests(3, 6000))
    assert report.total == 5 and [row.label for row in report.rows] == ["r0", "r1", "r2"]
    assert rig.router.list_requests(AskRequests(3, 60_000)) .total == 0
    rig.from_client(client, CancelRequest(1))
    assert [row.label for row in rows(rig, AskRequests(2, 0))] == ["r0", "r2"]


async def test_tokens_are_counted_for_each_of_several_clients_and_a_reused_slot_begins_anew(nursery):
    rig, one, _, _, decode = await open_rig(nursery, rank_waiting=50)
    two, _, _ = rig.client("other")
    for request in (1, 2):
        rig.submit(one, request)
        rig.submit(two, request)
    a, b, c, d = [message.request for message in await decode.take()]
    rig.emit(DECODE, [(a, 1, 0, [1, 2]), (b, 1, 0, [3]), (d, 1, 0, [5])])
    rig.emit(DECODE, [(a, 1, 2, [1]), (b, 3, 7, [3]), (c, 1, 0, [1]), (d, 1, 1, [6, 7])])
    assert [row.generated for row in rows(rig)] == [3, 1, 1, 3]
    rig.finish(DECODE, a)
    rig.submit(one, 3)
    assert [row.generated for row in rows(rig)] == [1, 1, 3, 0]


async def test_a_request_that_nobody_waits_for_is_listed_until_its_ranks_have_dropped_it(nursery):
    rig, client, _, _, _ = await open_rig(nursery)
    number = await bring(rig, client, "decode")
    rig.router.client_left(client)
    [row] = rows(rig)
    assert (row.state, row.client, row.label) == ("stopping", "batch", "r1")
    for rank in (PREFILL, DECODE):
        rig.from_rank(rank, RequestAborted(number, 2))
    assert rows(rig) == []


# ---------------------------------------------------------------- cancels


async def test_a_waiting_request_is_cancelled_by_an_operator_at_once(nursery):
    rig, client, end, *_ = await open_rig(nursery)
    number = await bring(rig, client, "queued")
    assert rig.router.cancel_requests([number]) == (number,)
    [failed] = await end.take()
    assert isinstance(failed, RequestFailed)
    assert (failed.request, failed.attempt, failed.code, failed.definite, failed.retryable) == (
        1, 2, "cancelled", True, False,
    )  # fmt: skip
    assert failed.message == "an operator of the engine cancelled this request"
    assert rig.router.cancel_requests([number]) == () and await end.take() == []


@pytest.mark.parametrize("state", ["prefill", "decode"])
async def test_a_request_on_ranks_is_cancelled_once_they_have_answered(nursery, state):
    rig, client, end, prefill, decode = await open_rig(nursery)
    number = await bring(rig, client, state)
    for one in (end, prefill, decode):
        await one.take()
    assert rig.router.cancel_requests([number, number, 10**9]) == (number,)
    holders = (PREFILL, DECODE) if state == "prefill" else (DECODE,)
    for rank, other in ((PREFILL, prefill), (DECODE, decode)):
        assert await other.take() == ([Abort(number, 2)] if rank in holders else [])
    assert await end.take() == [] and rows(rig)[0].state == "stopping"
    for rank in holders:
        rig.from_rank(rank, RequestAborted(number, 2))
    [failed] = await end.take()
    assert failed.code == "cancelled" and "operator" in failed.message
    await rig.router.wait_idle()
    assert rig.router.num_cancelled == 1 and rig.router.num_failed == 0


async def test_a_request_that_stops_already_is_left_to_that(nursery):
    rig, client, end, _, decode = await open_rig(nursery)
    number = await bring(rig, client, "stopping")
    await end.take(), await decode.take()
    assert rig.router.cancel_requests([number]) == (number,)
    assert await decode.take() == []
    rig.from_rank(DECODE, RequestAborted(number, 2))
    [failed] = await end.take()
    assert failed.message == "cancelled"


async def test_a_finish_overtakes_an_operator_and_a_clients_own_cancel_changes_nothing(nursery):
    rig, client, end, _, _ = await open_rig(nursery)
    number = await bring(rig, client, "decode")
    rig.router.cancel_requests([number])
    rig.from_client(client, CancelRequest(1))
    rig.from_rank(DECODE, RequestFinished(number, 2, "length", 4, 1))
    rig.from_rank(DECODE, RequestAborted(number, 2))
    assert [type(message) for message in await end.take()] == [
        RequestStarted, TokensEmitted, TokensEmitted, RequestFinished,
    ]  # fmt: skip
    await rig.router.wait_idle()


async def test_a_rank_that_does_not_answer_keeps_the_operators_words(nursery, autojump_clock):
    rig, client, end, _, _ = await open_rig(nursery)
    number = await bring(rig, client, "prefill")
    rig.router.cancel_requests([number])
    await trio.sleep(5.1)
    rig.router.expire()
    [failed] = await end.take()
    assert failed.code == "cancelled" and "operator" in failed.message
    assert rows(rig)[0].state == "stopping"
    assert rig.router.cancel_requests([number]) == (number,) and await end.take() == []
    for rank in (PREFILL, DECODE):
        rig.router.rank_lost(rank, "killed")
    assert await end.take() == []
    await rig.router.wait_idle()


async def test_a_cancelled_request_makes_room_for_the_next(nursery):
    rig, client, _, prefill, _ = await open_rig(nursery, rank_waiting=1)
    rig.submit(client, 1)
    rig.submit(client, 2)
    rig.submit(client, 3)
    first, second, third = (row.request for row in rows(rig))
    rig.router.cancel_requests([second, first])
    await prefill.take()
    for rank in (PREFILL, DECODE):
        rig.from_rank(rank, RequestAborted(first, 1))
    [start] = await prefill.take()
    assert isinstance(start, StartPrefill) and start.request == third


# ---------------------------------------------------------------- drained ranks


async def test_a_drained_rank_gets_nothing_and_finishes_what_it_has(nursery):
    rig, client, end, _, decode = await open_rig(nursery, rank_waiting=8)
    other = rig.rank(2, "decode")
    rig.submit(client, 1)
    [reserve] = await decode.take()
    rig.router.set_drained(DECODE, True)
    for request in range(2, 6):
        rig.submit(client, request)
    assert await decode.take() == [] and len(await other.take()) == 4
    assert rig.router.requests_on(DECODE) == 1
    rig.emit(DECODE, [(reserve.request, 1, 0, [1, 2, 3, 4])])
    rig.finish(DECODE, reserve.request)
    assert rig.router.requests_on(DECODE) == 0 and rig.router.requests_on(2) == 4
    started, frame, finished = await end.take_frames()
    assert isinstance(started.message, RequestStarted) and isinstance(finished.message, RequestFinished)
    assert rows_of(frame) == [(1, 1, 0, [1, 2, 3, 4])]


@pytest.mark.parametrize("rank", [PREFILL, DECODE])
async def test_requests_wait_for_a_rank_that_is_drained_and_go_on_when_it_is_back(nursery, rank):
    """Even the only one: they are not refused as too long for all others."""
    rig, client, end, prefill, decode = await open_rig(nursery)
    rig.router.set_drained(rank, True)
    rig.submit(client, 1)
    assert await prefill.take() == await decode.take() == await end.take() == [] and rig.router.num_waiting == 1
    rig.router.set_drained(rank, False)
    assert [type(message) for message in await decode.take()] == [ReservePages]
    assert [type(message) for message in await prefill.take()] == [StartPrefill]


async def test_a_new_life_of_a_drained_rank_is_drained(nursery):
    rig, client, end, *_ = await open_rig(nursery)
    rig.router.set_drained(DECODE, True)
    rig.router.rank_lost(DECODE, "killed")
    again = rig.rank(DECODE, "decode", generation=2)
    rig.submit(client, 1)
    assert await again.take() == [] and rig.router.num_waiting == 1
    rig.router.rank_lost(DECODE, "killed again")
    rig.router.set_drained(DECODE, False)
    assert await end.take() == []
    third = rig.rank(DECODE, "decode", generation=3)
    assert len(await third.take()) == 1


async def test_prefill_ranks_are_told_to_forget_prompts(nursery):
    rig, _, _, prefill, decode = await open_rig(nursery)
    other = rig.rank(7, "prefill")
    assert rig.router.forget_prompts() == 2
    assert await prefill.take() == await other.take() == [ForgetPrompts()] and await decode.take() == []


# ---------------------------------------------------------------- totals


async def test_latencies_of_a_request_by_the_clock(nursery, autojump_clock):
    rig, client, _, _, decode = await open_rig(nursery)
    rig.submit(client, 1)
    rig.submit(client, 2, attempt=2)
    a, b = [message.request for message in await decode.take()]
    await trio.sleep(0.5)
    rig.emit(DECODE, [(a, 1, 0, [1])])
    await trio.sleep(0.02)
    rig.emit(DECODE, [(a, 1, 1, [2]), (b, 2, 0, [1])])
    await trio.sleep(0.03)
    rig.emit(DECODE, [(a, 1, 2, [3, 4]), (b, 2, 1, [2])])
    rig.from_rank(DECODE, RequestFinished(a, 1, "length", 4, 4000))
    expected = [LatencyCounts() for _ in range(3)]
    expected[0].add(500_000)  # a later attempt's wait began elsewhere
    expected[1].add(20_000)
    expected[1].add(30_000, 2)
    expected[2].add(4000)
    traffic = rig.router.traffic()
    assert [traffic.ttft, traffic.itl, traffic.handoff] == [counts.counts() for counts in expected]
    assert (traffic.at_ms, traffic.generated_tokens, traffic.prompt_tokens) == (550, 6, 6)
    assert (traffic.accepted, traffic.finished, traffic.running, traffic.waiting) == (2, 1, 1, 0)


async def test_stages_of_requests_by_the_clock_and_how_they_ended(nursery, autojump_clock):
    rig, client, _, prefill, decode = await open_rig(nursery)
    for request, attempt in ((1, 1), (2, 1), (3, 2), (4, 1), (5, 1)):
        rig.submit(client, request, attempt=attempt)
    numbers = [message.request for message in await decode.take()]
    await prefill.take()
    await trio.sleep(0.5)
    for number, attempt in zip(numbers, (1, 1, 2, 1), strict=False):
        started = RequestStarted(number, attempt, 3, 0, 0, DECODE, 100, 1, 1, Timings(queue_us=200_000))
        rig.started.add((number, attempt))
        rig.from_rank(DECODE, started)
    rig.emit(DECODE, [(numbers[0], 1, 0, [1]), (numbers[1], 1, 0, [1]), (numbers[2], 2, 0, [1])])
    await trio.sleep(1.0)
    rig.emit(DECODE, [(numbers[0], 1, 1, [1, 2]), (numbers[1], 1, 1, [2])])
    rig.finish(DECODE, numbers[0], tokens=3)
    rig.finish(DECODE, numbers[2], attempt=2)  # began elsewhere, so its times are not known here
    rig.from_client(client, CancelRequest(2, is_complete=True))
    rig.from_client(client, CancelRequest(4))
    await trio.sleep(0.25)
    for number in (numbers[1], numbers[3]):
        rig.from_rank(PREFILL, RequestAborted(number, 1))
        rig.from_rank(DECODE, RequestAborted(number, 1))
    rig.router.fail_all("it ends")
    traffic = rig.router.traffic()
    assert traffic.ends == RequestEnds(stop=1, length=2, abort=1, error=1)
    assert (traffic.finished, traffic.cancelled, traffic.failed) == (2, 2, 1)
    times = traffic.times
    sums = {name: getattr(times, name).sum_us for name in ("whole", "queue", "run", "prefill", "decode", "token")}
    assert sums == {
        "whole": 3_000_000, "queue": 400_000, "run": 2_600_000, "prefill": 600_000, "decode": 2_000_000,
        # Of three tokens, and of the two that there were when the client had all that it wanted.
        "token": 1_500_000,
    }  # fmt: skip
    assert all(sum(getattr(times, name).counts) == 2 for name in sums)


async def test_a_missed_limit_is_a_sentence(nursery, autojump_clock):
    rig = Rig(nursery, itl_limit_us=10_000, ttft_limit_us=10**7)
    client, _, _ = rig.client()
    rig.rank(PREFILL, "prefill")
    decode = rig.rank(DECODE, "decode")
    rig.submit(client, 1, max_tokens=120)
    [reserve] = await decode.take()
    for index in range(101):
        assert rig.router.missed_limits() == ()
        rig.emit(DECODE, [(reserve.request, 1, index, [1])])
        rig.router.mark_traffic()
        await trio.sleep(0.05)
    [why] = rig.router.missed_limits()
    assert why == "time between tokens, p99, is 46.2 ms over the last minute, above slo.itl_p99 (10 ms)"
    assert (rig.router.traffic().itl_limit_us, rig.router.traffic().ttft_limit_us) == (10_000, 10**7)
    for _ in range(70):
        await trio.sleep(1)
        rig.router.mark_traffic()
    assert rig.router.missed_limits() == ()


@pytest.mark.parametrize("seed", range(12))
async def test_totals_add_up_and_every_submission_is_answered_once(nursery, autojump_clock, seed):
    """Clients, operators and ranks do whatever they may, in any order."""
    rng = random.Random(seed)
    rig = Rig(nursery, queue_requests=6, rank_waiting=3)
    ends = {rank: rig.rank(rank, "prefill" if rank < 2 else "decode") for rank in range(4)}
    clients = [(client, end) for client, end, _ in (rig.client(f"c{n}") for n in range(3))]
    answers: dict[tuple[int, int], list[str]] = {}
    submitted = 0
    held: dict[int, dict[int, tuple[int, int]]] = {rank: {} for rank in ends}  # number -> attempt, tokens so far
    lives = dict.fromkeys(ends, 1)
    for _ in range(400):
        await trio.sleep(rng.random() / 50)
        for rank, end in ends.items():
            for message in await end.take():
                if isinstance(message, ReservePages | StartPrefill):
                    held[rank][message.request] = (message.attempt, 0)
                elif isinstance(message, Abort) and message.request in held[rank]:
                    held[rank][message.request] = (message.attempt, -1)
        client, end = rng.choice(clients)
        listed = rows(rig)
        match rng.choice(("submit", "submit", "emit", "emit", "emit", "cancel", "operator", "fail", "lose", "drain")):
            case "submit":
                submitted += 1
                answers[client.key, submitted] = []
                rig.submit(client, submitted, [1] * rng.choice((1, 3, 200)), attempt=rng.choice((1, 1, 2)))
            case "emit":
                rank = rng.choice((2, 3))
                for number, (attempt, tokens) in list(held[rank].items()):
                    if tokens < 0:
                        rig.from_rank(rank, RequestAborted(number, attempt))
                        del held[rank][number]
                        continue
                    rig.emit(rank, [(number, attempt, tokens, [1])])
                    held[rank][number] = (attempt, tokens + 1)
                    if tokens + 1 == 4:
                        rig.finish(rank, number, attempt=attempt)
                        del held[rank][number]
                for number, (attempt, tokens) in list(held[rank - 2].items()):
                    if tokens < 0:
                        rig.from_rank(rank - 2, RequestAborted(number, attempt))
                        del held[rank - 2][number]
            case "cancel" if listed:
                rig.from_client(client, CancelRequest(rng.randrange(1, submitted + 1), rng.random() < 0.5))
            case "operator" if listed:
                picked = [row.request for row in rng.sample(listed, min(2, len(listed)))]
                assert rig.router.cancel_requests([*picked, 5]) == tuple(picked)
            case "fail":
                rank = rng.choice(list(held))
                for number, (attempt, tokens) in list(held[rank].items())[:1]:
                    if tokens >= 0:
                        rig.from_rank(rank, RequestFailed(number, attempt, "transfer_failed", "x", True, True))
                        del held[rank][number]
            case "lose":
                rank = rng.choice(list(held))
                rig.router.rank_lost(rank, "killed")
                held[rank].clear()
                lives[rank] += 1
                ends[rank] = rig.rank(rank, "prefill" if rank < 2 else "decode", generation=lives[rank])
            case "drain":
                rig.router.set_drained(rng.choice((1, 3)), rng.random() < 0.5)
        rig.router.expire()
        traffic = rig.router.traffic()
        assert traffic.accepted + traffic.refused == submitted
        ended = traffic.finished + traffic.failed + traffic.cancelled
        assert traffic.accepted == ended + traffic.waiting + traffic.running
        by = traffic.ends
        assert by.stop + by.length + by.abort + by.error == ended and by.error == traffic.failed
    received = 0
    for client, end in clients:
        for frame in await end.take_frames():
            message = frame.message
            if isinstance(message, RequestFinished | RequestFailed):
                answers[client.key, message.request].append(getattr(message, "code", "finished"))
            elif isinstance(message, TokensEmitted):
                received += message.num_tokens
    said = [answer for each in answers.values() for answer in each]
    assert all(len(each) <= 1 for each in answers.values())
    assert len(said) == traffic.refused + ended and said.count("finished") == traffic.finished
    assert said.count("cancelled") == traffic.cancelled and traffic.cancelled and traffic.failed and traffic.refused
    assert by.length == traffic.finished and by.abort
    assert traffic.generated_tokens == received
    assert sum(traffic.handoff) == traffic.finished
    assert traffic.waiting + traffic.running == sum(not each for each in answers.values())
