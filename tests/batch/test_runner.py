"""The batch from input to output: every line ends in exactly one record, and answers are right to the token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.batch.options import parse_error_budget
from tests.batch.fake_head import FakeHead, Fault, expected
from tests.batch.rig import codec, completion_text, expected_text, prompt_ids, run


def prompts(count: int, **body: object) -> list[dict[str, object]]:
    return [{"custom_id": f"r{place}", "prompt": f"prompt number {place}", **body} for place in range(count)]


async def test_every_line_is_answered_right(tmp_path: Path) -> None:
    head = FakeHead()
    outcome = await run(tmp_path, prompts(200, max_tokens=20), head)
    assert outcome.code == 0, outcome.said
    assert not head.breaches
    assert len(outcome.records) == 200 and not outcome.failures
    for place in range(200):
        record = outcome.answers[f"r{place}"]
        text, reason, count = expected_text(prompt_ids(f"prompt number {place}"), 20)
        body = record["response"]["body"]
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["finish_reason"] == reason
        assert body["usage"]["completion_tokens"] == count == record["engine"]["completion_tokens"]
        assert record["engine"]["line"] == place + 1
    assert not (tmp_path / "out.errors.jsonl").exists()


@pytest.mark.parametrize("after", [0, 1, 7])
async def test_a_lost_rank_costs_no_token_and_repeats_none(tmp_path: Path, after: int) -> None:
    head = FakeHead()
    for place in range(0, 40, 3):
        head.faults[f"r{place}"] = [Fault("rank_lost", after), Fault("transfer_failed", 1)]
    outcome = await run(tmp_path, prompts(40, max_tokens=20), head)
    assert outcome.code == 0, outcome.said
    assert not head.breaches
    for place in range(40):
        text, _, _ = expected_text(prompt_ids(f"prompt number {place}"), 20)
        record = outcome.answers[f"r{place}"]
        assert completion_text(record) == text
        assert record["engine"]["attempts"] >= 1
    assert max(record["engine"]["attempts"] for record in outcome.records) == 3


async def test_records_have_the_openai_shape_and_the_engines_account(tmp_path: Path) -> None:
    head = FakeHead()
    chat = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "future": 1, "seed": -1},
        "topic": "greeting",
        "meta": {"a": 1},
    }
    outcome = await run(tmp_path, [chat, "hello"], head, defaults={"max_tokens": b"3", "temperature": b"0"})
    assert outcome.code == 0
    record = outcome.answers["c"]
    assert set(record) == {"id", "custom_id", "response", "error", "meta", "engine"}
    assert record["meta"] == {"a": 1, "topic": "greeting"}
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "nano" and body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"]["role"] == "assistant"
    usage = body["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    engine = record["engine"]
    assert engine["ignored_fields"] == ["future"]
    assert (engine["attempts"], engine["prefill_rank"], engine["decode_rank"], engine["pushes"]) == (1, 0, 1, 1)
    assert engine["pushed_bytes"] == 4096 and engine["post_us"] == 7 and engine["handoff_ms"] == 0.04
    assert engine["queue_ms"] == 0.01 and 0 < engine["ttft_ms"] <= engine["total_ms"]
    assert engine["seed"] == 2**53 - 1 == head.submissions[0].sampling.seed
    text = outcome.answers["line-000002"]
    assert text["response"]["body"]["object"] == "text_completion"
    sampling = {submit.label: submit.sampling for submit in head.submissions}["line-000002"]
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.0)
    assert head.submissions[0].sampling.temperature == 0.0, "defaults hold for every form"


async def test_openai_defaults_without_defaults(tmp_path: Path) -> None:
    head = FakeHead(max_model_tokens=100)
    await run(tmp_path, [{"prompt": "a"}, {"prompt": "a", "max_completion_tokens": 7, "max_tokens": 1}], head)
    first = head.submissions[0].sampling
    prompt = len(prompt_ids("a")) // 4
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (1.0, 1.0, 0, 100 - prompt)


async def test_max_completion_tokens_wins_in_a_chat(tmp_path: Path) -> None:
    head = FakeHead()
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 7}
    await run(tmp_path, [body], head, defaults={"max_tokens": b"3"})
    assert head.submissions[0].sampling.max_tokens == 7


async def test_seeds_are_fresh_or_derived_from_the_id(tmp_path: Path) -> None:
    async def seeds(name: str, **options: object) -> dict[str, int]:
        head = FakeHead()
        (tmp_path / name).mkdir()
        await run(tmp_path / name, prompts(6, max_tokens=1), head, **options)
        return {submit.label: submit.sampling.seed for submit in head.submissions}

    free = await seeds("a")
    assert free != await seeds("b") and len(set(free.values())) == 6
    fixed = await seeds("c", seed=5, inflight=1)
    assert fixed == await seeds("d", seed=5) and len(set(fixed.values())) == 6
    assert fixed != await seeds("e", seed=6)


async def test_a_stop_string_ends_a_text_before_it(tmp_path: Path) -> None:
    """The stop string is cut across two tokens of the answer that will come."""
    full, _, _ = expected_text(prompt_ids("prompt number 3"), 40)
    pieces = [codec().decode([token]) for token in expected(prompt_ids("prompt number 3"), 40)[0]]
    place = next(place for place in range(2, len(pieces) - 1) if len(pieces[place]) > 1 and len(pieces[place + 1]) > 1)
    stop = pieces[place][-1] + pieces[place + 1][0]
    wanted = full[: full.index(stop)]
    head = FakeHead(step_s=0.001)
    outcome = await run(tmp_path, [{"prompt": "prompt number 3", "max_tokens": 40, "stop": [stop, "\x00never"]}], head)
    record = outcome.answers["line-000001"]
    choice = record["response"]["body"]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
    engine = outcome.answers["line-000001"]["engine"]
    assert (engine["prefill_rank"], engine["decode_rank"], engine["pushed_bytes"]) == (0, 1, 4096)
    assert (engine["queue_ms"], engine["prefill_ms"], engine["push_ms"]) == (0.01, 0.02, 0.03)
    assert engine["handoff_ms"] is None, "the engine tells it with an end of its own"
    assert head.complete == 1, "the head is not told that it is complete"
    needed = next(n for n in range(1, len(pieces) + 1) if stop in "".join(pieces[:n]))
    assert record["response"]["body"]["usage"]["completion_tokens"] == needed <= place + 2


async def test_stop_strings_survive_a_lost_rank(tmp_path: Path) -> None:
    full, _, _ = expected_text(prompt_ids("prompt number 3"), 40)
    stop = full[len(full) // 2 :][:3]
    for after in range(6):
        (tmp_path / str(after)).mkdir()
        head = FakeHead()
        head.faults["x"] = [Fault("rank_lost", after), Fault("rank_lost", 1)]
        line = {"custom_id": "x", "prompt": "prompt number 3", "max_tokens": 40, "stop": stop}
        outcome = await run(tmp_path / str(after), [line], head)
        assert completion_text(outcome.answers["x"]) == full[: full.index(stop)]
        assert not head.breaches


async def test_thinking_asks_for_it_and_splits_the_answer(tmp_path: Path) -> None:
    head = FakeHead()
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"thinking": True},
        "max_tokens": 4,
        "ignore_eos": True,
    }
    outcome = await run(tmp_path, [body], head)
    message = outcome.answers["line-000001"]["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"]


async def test_only_some_errors_are_borne(tmp_path: Path) -> None:
    head = FakeHead(step_s=0.001, slots=4)
    lines: list[object] = [*prompts(400, max_tokens=4)]
    for place in (0, 10, 20, 30):
        lines[place] = b"bad"
    outcome = await run(tmp_path, lines, head, max_errors=parse_error_budget("2"), inflight=4)
    assert outcome.code == 1
    assert len(outcome.failures) >= 3 and len(outcome.records) < 396
    assert "--max-errors" in outcome.said and "resume with" in outcome.said


async def test_strict_runs_nothing_if_one_line_is_bad(tmp_path: Path) -> None:
    head = FakeHead()
    lines: list[object] = [*prompts(300, max_tokens=4), b"bad", {"prompt": [10**6]}]
    outcome = await run(tmp_path, lines, head, strict=True)
    assert outcome.code == 2
    assert not head.submissions and not outcome.records
    assert {record["line"] for record in outcome.failures} == {301, 302}
    (tmp_path / "good").mkdir()
    good = await run(tmp_path / "good", prompts(300, max_tokens=4), head, strict=True, order="input")
    assert good.code == 0
    assert [record["engine"]["line"] for record in good.records] == list(range(1, 301))


async def test_the_deadline_records_what_is_left(tmp_path: Path) -> None:
    head = FakeHead(slots=2, step_s=0.01)
    outcome = await run(tmp_path, prompts(500, max_tokens=10, ignore_eos=True), head, deadline=0.6, inflight=4)
    assert outcome.code == 1
    assert 0 < len(outcome.records) < 500
    assert len(outcome.records) + len(outcome.failures) == 500
    assert {record["error"]["type"] for record in outcome.failures} == {"batch_expired"}


async def test_the_summary_adds_up(tmp_path: Path) -> None:
    head = FakeHead()
    lines: list[object] = [*prompts(10, max_tokens=4), b"bad", {"prompt": []}]
    outcome = await run(tmp_path, lines, head, summary=str(tmp_path / "summary.json"), progress="json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(outcome.said.splitlines()[-1])
    assert (summary["lines_read"], summary["ok"], summary["errors"]) == (12, 10, 2)
    assert summary["errors_by_type"] == {"bad_line": 1, "bad_request": 1}
    used = [record["response"]["body"]["usage"] for record in outcome.records]
    assert summary["tokens"]["output"] == sum(usage["completion_tokens"] for usage in used)
    assert summary["tokens"]["new"] == sum(usage["prompt_tokens"] for usage in used)
    assert summary["exit_code"] == outcome.code == 1 and summary["stopped"] is None and summary["ranks"] == 2


async def test_an_empty_input_is_done_at_once(tmp_path: Path) -> None:
    for name, data in (("a", b""), ("b", b"\n \n\r\n"), ("c", b"\xef\xbb\xbf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "in.jsonl").write_bytes(data)
        assert (await run(tmp_path / name, None, FakeHead())).code == 0
