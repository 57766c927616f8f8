"""What the engine may do to a batch, and what the batch makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import trio

from engine.actors.client import HeadClient, Row
from engine.batch import connection, flight
from engine.batch.flight import Flight
from engine.batch.job import Job, Source
from engine.batch.meter import Meter
from engine.batch.options import BatchOptions
from engine.batch.output import open_output
from engine.batch.writer import RecordWriter
from tests.batch.fake_head import FakeHead, Fault, natural_length
from tests.batch.process import wait_until
from tests.batch.rig import (
    RUN_S,
    codec,
    completion_text,
    expected_text,
    head_at,
    prompt_ids,
    read_records,
    run,
    run_at,
    write_lines,
)
from transport.messages import RequestFailed, Sampling
from transport.unix import open_unix_listener


def prompts(count: int, **body: Any) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{place}", "prompt": f"prompt number {place}", **body} for place in range(count)]


def check_answers(records: list[dict[str, Any]], count: int, max_tokens: int) -> None:
    texts = {record["custom_id"]: completion_text(record) for record in records}
    assert len(records) == len(texts) == count
    for place in range(count):
        assert texts[f"r{place}"] == expected_text(prompt_ids(f"prompt number {place}"), max_tokens)[0]


async def test_retries_are_counted_and_end_in_engine_lost(tmp_path: Path) -> None:
    head = FakeHead()
    head.faults["r1"] = [Fault("rank_lost", 1)] * 9
    outcome = await run(tmp_path, prompts(3, max_tokens=8, ignore_eos=True), head, retry=2)
    assert outcome.code == 1
    error = outcome.errors["r1"]
    assert error["error"] == {
        "type": "engine_lost",
        "code": "rank_lost",
        "message": "fake rank_lost",
        "retryable": True,
    }
    assert error["engine"]["attempts"] == 3
    assert error["raw"].startswith('{"custom_id": "r1"') and error["line"] == 2 and error["offset"] > 0
    assert not head.breaches


async def test_what_can_not_succeed_is_not_tried_again(tmp_path: Path) -> None:
    head = FakeHead()
    for place, code in enumerate(("bad_request", "too_long", "timeout", "device_failed", "cancelled")):
        head.faults[f"r{place}"] = [Fault(code, 0, retryable=False)]
    outcome = await run(tmp_path, prompts(5), head)
    types = [outcome.errors[f"r{place}"]["error"]["type"] for place in range(5)]
    assert types == ["bad_request", "too_long", "timeout", "engine_lost", "cancelled"]
    assert [submit.attempt for submit in head.submissions] == [1] * 5


async def test_a_full_engine_is_waited_for_and_costs_no_retry(tmp_path: Path) -> None:
    head = FakeHead(queue=4, slots=4)
    outcome = await run(tmp_path, prompts(60, max_tokens=4), head, retry=0, inflight=16)
    assert outcome.code == 0, outcome.said
    check_answers(outcome.records, 60, 4)
    assert not head.breaches


async def test_the_heads_own_limit_is_kept(tmp_path: Path) -> None:
    head = FakeHead(max_inflight=5, slots=2)
    outcome = await run(tmp_path, prompts(30, max_tokens=4), head, inflight=100)
    assert outcome.code == 0
    assert head.most_unfinished <= 5
    assert len(head.submissions) == 30


async def test_a_request_that_stands_still_is_tried_once_more_and_then_fails(tmp_path: Path) -> None:
    head = FakeHead(step_s=0.002)
    head.faults["r1"] = [Fault("hang", 2)]
    head.faults["r2"] = [Fault("hang", 2), Fault("hang", 1)]
    outcome = await run(tmp_path, prompts(4, max_tokens=10, ignore_eos=True), head, stall=0.3)
    assert outcome.code == 1
    assert set(outcome.errors) == {"r2"}
    assert outcome.errors["r2"]["error"]["type"] == "timeout"
    assert outcome.errors["r2"]["error"]["code"] == "stalled"
    assert outcome.answers["r1"]["engine"]["attempts"] == 2
    assert outcome.answers["r1"]["engine"]["completion_tokens"] == 10
    assert not head.breaches


async def test_waiting_in_a_queue_is_not_standing_still(tmp_path: Path) -> None:
    """One slot, ten requests, and a stall limit that is shorter than the time the last one waits."""
    head = FakeHead(slots=1, step_s=0.01)
    outcome = await run(tmp_path, prompts(10, max_tokens=12, ignore_eos=True), head, stall=0.4)
    assert outcome.code == 0, outcome.errors
    assert all(record["engine"]["attempts"] == 1 for record in outcome.records)


async def test_a_cancellation_that_nobody_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "CANCEL_ANSWER_S", 0.3)
    head = FakeHead(step_s=0.002)
    head.faults["r0"] = [Fault("deaf", 1)]
    outcome = await run(tmp_path, prompts(2, max_tokens=6), head, stall=0.3)
    assert outcome.code == 0
    check_answers(outcome.records, 2, 6)


async def test_a_private_engine_that_dies_stops_the_run_and_resume_ends_it(tmp_path: Path) -> None:
    head = FakeHead(step_s=0.001)
    head.faults["r30"] = [Fault("eof", 2)]
    first = await run(
        tmp_path, prompts(60, max_tokens=12), head, inflight=8, resume_command="engine batch -o x --resume"
    )
    assert first.code == 3
    assert "resume with: engine batch -o x --resume" in first.said
    assert not first.failures, "what is left has no error record"
    assert 0 < len(first.records) < 60
    second = await run(tmp_path, None, head, resume=True)
    assert second.code == 0
    check_answers(second.records, 60, 12)
    assert not head.breaches


async def test_a_daemon_that_comes_back_is_gone_on_with(tmp_path: Path) -> None:
    head = FakeHead(step_s=0.001)
    head.faults["r5"] = [Fault("eof", 2)]
    head.faults["r25"] = [Fault("eof", 3)]
    outcome = await run(tmp_path, prompts(40, max_tokens=12), head, shared=True, inflight=8)
    assert outcome.code == 0, outcome.said
    assert head.connections == 3
    check_answers(outcome.records, 40, 12)
    assert not head.breaches
    assert max(record["engine"]["attempts"] for record in outcome.records) >= 2


async def test_a_daemon_that_stays_away_ends_the_run_after_retry_for(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", prompts(20, max_tokens=5))
    head = FakeHead(slots=1, step_s=0.001)
    head.faults["r3"] = [Fault("eof", 1)]
    with trio.fail_after(RUN_S):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def serve_until_first_end() -> None:
                with scope:
                    async with head_at(head, tmp_path / "head.sock"):
                        await trio.sleep_forever()

            async def end_when_lost() -> None:
                await wait_until(lambda: any(submit.label == "r3" for submit in head.submissions), "r3")
                scope.cancel()

            nursery.start_soon(serve_until_first_end)
            nursery.start_soon(end_when_lost)
            await wait_until((tmp_path / "head.sock").exists, "a socket")
            outcome = await run_at(tmp_path, str(tmp_path / "head.sock"), shared=True, retry_for=0.5)
    assert outcome.code == 3
    assert "waiting for it up to 0.5 s" in outcome.said and "lost" in outcome.said


async def test_no_daemon_at_all_is_exit_code_4(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", prompts(1))
    outcome = await run_at(tmp_path, str(tmp_path / "nobody.sock"), shared=True)
    assert outcome.code == 4
    assert "nobody.sock" in outcome.said


async def test_a_head_that_repeats_a_place_is_refused(tmp_path: Path) -> None:
    head = FakeHead()
    head.faults["r0"] = [Fault("garbage", 1)]
    outcome = await run(tmp_path, prompts(1, max_tokens=5, ignore_eos=True), head, shared=True)
    assert outcome.code == 3
    assert "was next" in outcome.said
    assert not outcome.records


async def test_a_head_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.client.HELLO_S", 0.2)
    write_lines(tmp_path / "in.jsonl", prompts(1))
    with trio.fail_after(RUN_S):
        async with await open_unix_listener(str(tmp_path / "mute.sock"), 0o600):
            outcome = await run_at(tmp_path, str(tmp_path / "mute.sock"))
    assert outcome.code == 4
    assert "did not answer" in outcome.said


async def test_another_model_is_refused(tmp_path: Path) -> None:
    head = FakeHead(model="/models/other")
    outcome = await run(tmp_path, prompts(1), head, model="nano")
    assert outcome.code == 5
    assert "serves other" in outcome.said
    assert not head.submissions


async def test_a_daemon_that_comes_back_with_another_model_is_not_used(tmp_path: Path) -> None:
    head = FakeHead(slots=2, step_s=0.002)
    head.faults["r3"] = [Fault("eof", 2)]

    async def change_model() -> None:
        await wait_until(lambda: bool(head.submissions), "a submission")
        head.hello = FakeHead(model="/models/other").hello

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change_model)
        outcome = await run(tmp_path, prompts(10, max_tokens=5), head, shared=True, inflight=2)
    assert outcome.code == 3
    assert "/models/other" in outcome.said


async def test_the_end_of_text_counts_even_if_the_head_dies_before_saying_so(tmp_path: Path) -> None:
    """The last token came, the word that it was the last did not: nothing is left to submit."""
    head = FakeHead()
    head.faults["r0"] = [Fault("rank_lost", 5)]
    head.faults["r1"] = [Fault("rank_lost", natural_length(prompt_ids("prompt number 1")) + 1)]
    lines = prompts(2, max_tokens=5, ignore_eos=True)
    lines[1] = {"custom_id": "r1", "prompt": "prompt number 1", "max_tokens": 60}
    outcome = await run(tmp_path, lines, head, shared=True)
    assert outcome.code == 0, outcome.said
    assert not head.breaches
    assert [submit.label for submit in head.submissions].count("r1") == 1
    assert outcome.answers["r0"]["engine"]["completion_tokens"] == 5
    engine = outcome.answers["r0"]["engine"]
    assert (engine["prefill_rank"], engine["pushed_bytes"], engine["handoff_ms"]) == (0, 4096, None)
    text, reason, _ = expected_text(prompt_ids("prompt number 1"), 60)
    assert reason == "stop"
    assert completion_text(outcome.answers["r1"]) == text


async def test_the_last_token_before_the_connection_ends_is_an_answer(tmp_path: Path) -> None:
    head = FakeHead()
    head.faults["r0"] = [Fault("eof", 5)]
    outcome = await run(tmp_path, prompts(1, max_tokens=5, ignore_eos=True), head)
    assert len(head.submissions) == 1 and not head.breaches
    assert outcome.code == 0, outcome.said
    assert outcome.answers["r0"]["engine"]["completion_tokens"] == 5


async def test_redial_pauses_are_bounded() -> None:
    assert connection.FIRST_REDIAL_S < connection.LONGEST_REDIAL_S <= 5


async def test_records_of_a_stopped_run_are_whole(tmp_path: Path) -> None:
    head = FakeHead(step_s=0.001)
    head.faults["r10"] = [Fault("eof", 1)]
    await run(tmp_path, prompts(20, max_tokens=12), head, order="input", inflight=8)
    for record in read_records(tmp_path / "out.jsonl"):
        assert record["custom_id"].startswith("r")


class HaltingClock(trio.abc.Clock):
    """Every look at it finds that much time gone, as on a machine that stops the process between two instructions."""

    def __init__(self, gone_s: float) -> None:
        self._now = 0.0
        self._gone_s = gone_s

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        self._now += self._gone_s
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return 0.0 if deadline <= self._now else 0.001


class InstantClient:
    """What Flight needs of a connection, without one."""

    def __init__(self) -> None:
        self.hello = FakeHead().hello
        self.num_unfinished = 0
        self.submitted = trio.Event()

    async def submit(self, row: Row) -> int:
        row.attempt += 1
        self.submitted.set()
        return 1


@pytest.mark.parametrize("gone_s", [0.01 * step for step in range(1, 40)])
def test_a_retry_that_falls_due_between_two_looks_at_the_clock_is_not_forgotten(tmp_path: Path, gone_s: float) -> None:
    def nothing() -> None:
        pass

    async def main() -> None:
        with open_output(str(tmp_path / "out.jsonl"), resume=False) as file:
            writer = RecordWriter(file, None, ordered=False, written=nothing)
            jobs = Flight(BatchOptions(retry=9), Meter(), writer, nothing)
            client = InstantClient()
            jobs.attach(cast(HeadClient, client))
            row = Row(b"\0\0\0\0", Sampling(), label="r0")
            source = Source("r0", 1, 0, "0", b"{}", b"")
            jobs.add(Job(source, 0, "completion", row, codec().detokenizer(), None, False, ()))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(jobs.run_submissions)
                with trio.fail_after(1000):
                    for attempt in range(1, 6):
                        await client.submitted.wait()
                        client.submitted = trio.Event()
                        jobs.row_failed(row, RequestFailed(1, attempt, "rank_lost", "", True, True))
                nursery.cancel_scope.cancel()

    trio.run(main, clock=HaltingClock(gone_s))
