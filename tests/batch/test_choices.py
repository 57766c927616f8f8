"""Several answers to one prompt, and log-probabilities: what a record holds, also after faults and stop strings."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from engine.faces.body import spread_seeds
from tests.batch.fake_head import FakeHead, Fault, expected, logprob_of
from tests.batch.rig import codec, expected_text, prompt_ids, run
from transport.messages import Sampling

PROMPT = "The sea was"


def choices_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return record["response"]["body"]["choices"]


def text_of(token: int) -> str:
    raw = codec().bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def test_one_record_has_all_answers_to_a_prompt(tmp_path: Path) -> None:
    head = FakeHead()
    lines = [
        {"custom_id": "many", "prompt": PROMPT, "max_tokens": 9, "n": 5, "seed": 3},
        {"custom_id": "one", "prompt": PROMPT, "max_tokens": 9, "seed": 3},
        {
            "custom_id": "chat",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "a"}], "n": 2},
        },
    ]
    outcome = await run(tmp_path, lines, head)
    assert outcome.code == 0 and not head.breaches and len(outcome.records) == 3
    many, one = outcome.answers["many"], outcome.answers["one"]
    text, reason, count = expected_text(prompt_ids(PROMPT), 9)
    assert [choice["index"] for choice in choices_of(many)] == [0, 1, 2, 3, 4]
    assert {(choice["text"], choice["finish_reason"]) for choice in choices_of(many)} == {(text, reason)}
    usage = many["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == 4 and usage["completion_tokens"] == 5 * count
    accounts = many["engine"]["choices"]
    assert [account["completion_tokens"] for account in accounts] == [count] * 5
    # The first answer is the one that a line without `n` gets, and all seeds differ.
    assert many["engine"]["seed"] == accounts[0]["seed"] == one["engine"]["seed"] == 3
    assert len({account["seed"] for account in accounts}) == 5 and "choices" not in one["engine"]
    assert len(choices_of(outcome.answers["chat"])) == 2
    assert "3 ok, 0 errors of 3 lines" in outcome.said


def test_seeds_of_answers_follow_from_the_seed() -> None:
    sampling = Sampling(temperature=1.0, seed=9, prompt_logprobs=2)
    seeds = [each.seed for each in spread_seeds(sampling, 50)]
    assert seeds[0] == 9 and len(set(seeds)) == 50 and max(seeds) < 2**53
    assert seeds[:7] == [each.seed for each in spread_seeds(sampling, 7)]
    assert [each.prompt_logprobs for each in spread_seeds(sampling, 3)] == [2, -1, -1]


@pytest.mark.parametrize("order", ["completion", "input"])
async def test_an_answer_that_fails_takes_its_line_along_and_only_that(tmp_path: Path, order: str) -> None:
    head = FakeHead(slots=3)
    lines = [
        {"custom_id": f"r{place}", "prompt": f"{PROMPT} {place}", "max_tokens": 20, "ignore_eos": True, "n": 4}
        for place in range(6)
    ]
    head.faults["r2"] = [Fault("hang"), Fault("bad_request", after=3, retryable=False)]
    head.faults["r4"] = [Fault("rank_lost", after=2)]
    outcome = await run(tmp_path, lines, head, order=order, stall=5.0)
    assert outcome.code == 1 and not head.breaches
    assert set(outcome.answers) == {"r0", "r1", "r3", "r4", "r5"} and set(outcome.errors) == {"r2"}
    assert outcome.errors["r2"]["error"]["code"] == "bad_request"
    for record in outcome.answers.values():
        assert [len(choices_of(record)), record["response"]["body"]["usage"]["completion_tokens"]] == [4, 80]
    assert max(account["attempts"] for account in outcome.answers["r4"]["engine"]["choices"]) == 2
    if order == "input":
        assert [record["custom_id"] for record in outcome.records] == ["r0", "r1", "r3", "r4", "r5"]


async def test_lines_of_several_answers_are_resumed_as_lines(tmp_path: Path) -> None:
    lines = [{"custom_id": f"r{place}", "prompt": f"{place}", "max_tokens": 5, "n": 3} for place in range(8)]
    head = FakeHead()
    head.faults["r5"] = [Fault("bad_request", retryable=False)]
    first = await run(tmp_path, lines, head)
    assert first.code == 1 and set(first.errors) == {"r5"}
    again = await run(tmp_path, lines, FakeHead(), resume=True)
    assert again.code == 0 and len(again.answers) == 8
    assert all(len(choices_of(record)) == 3 for record in again.answers.values())


async def test_more_answers_than_may_be_in_flight_end_too(tmp_path: Path) -> None:
    head = FakeHead()
    lines = [{"custom_id": f"r{place}", "prompt": f"{place}", "max_tokens": 4, "n": 30} for place in range(4)]
    outcome = await run(tmp_path, lines, head, inflight=7)
    assert outcome.code == 0 and len(outcome.answers) == 4 and head.most_unfinished <= 7


async def test_a_chat_has_log_probabilities_of_what_it_says(tmp_path: Path) -> None:
    head = FakeHead()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    outcome = await run(
        tmp_path,
        [
            {"custom_id": "two", "body": body},
            {"custom_id": "none", "body": {**body, "top_logprobs": 0}},
            {"custom_id": "not", "body": {**body, "logprobs": False, "top_logprobs": 0}},
            {"custom_id": "prompt", "body": {**body, "prompt_logprobs": 1}},
        ],
        head,
    )
    assert outcome.code == 0
    prompt = codec().encode_segments([codec().bos_id])  # only to see that ids are what they are
    assert prompt
    (choice,) = choices_of(outcome.answers["two"])
    content = choice["logprobs"]["content"]
    assert content and choice["logprobs"]["refusal"] is None
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]
    for entry in content:
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert len(entry["top_logprobs"]) == 2 and entry["token"] == entry["top_logprobs"][0]["token"]
    assert all(entry["top_logprobs"] == [] for entry in choices_of(outcome.answers["none"])[0]["logprobs"]["content"])
    assert choices_of(outcome.answers["not"])[0]["logprobs"] is None
    scored = outcome.answers["prompt"]["response"]["body"]["prompt_logprobs"]
    assert scored[0] is None and all(next(iter(entry.values()))["rank"] == 1 for entry in scored[1:])


async def test_a_completion_has_log_probabilities_in_the_older_shape(tmp_path: Path) -> None:
    line = {"custom_id": "a", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    outcome = await run(
        tmp_path, [line, {**line, "custom_id": "b", "echo": True, "prompt_logprobs": 2, "n": 2}], FakeHead()
    )
    ids, _ = expected(prompt_ids(PROMPT), 6, ignore_eos=True)
    (plain,) = choices_of(outcome.answers["a"])
    found = plain["logprobs"]
    assert found["tokens"] == [text_of(token) for token in ids]
    assert found["token_logprobs"] == [logprob_of(token) for token in ids]
    assert found["top_logprobs"] == [{text_of(token): logprob_of(token)} for token in ids]
    assert found["text_offset"][0] == 0 and len(found["text_offset"]) == 6
    assert "prompt_logprobs" not in plain
    for echoed in choices_of(outcome.answers["b"]):
        assert echoed["text"] == PROMPT + plain["text"]
        both = echoed["logprobs"]
        assert both["tokens"][4:] == found["tokens"] and both["tokens"][1:4] == ["The", " sea", " was"]
        assert both["token_logprobs"][0] is None and both["top_logprobs"][0] is None
        assert both["token_logprobs"][4:] == found["token_logprobs"] and len(both["token_logprobs"]) == 10
        assert both["text_offset"] == [0, 0, 3, 7, *(11 + offset for offset in found["text_offset"])]
        assert echoed["prompt_logprobs"][0] is None and len(echoed["prompt_logprobs"]) == 4
        assert len(echoed["prompt_logprobs"][1]) == 2


async def test_a_stop_string_across_tokens_cuts_log_probabilities_too(tmp_path: Path) -> None:
    ids, _ = expected(prompt_ids(PROMPT), 30, ignore_eos=True)
    text = codec().decode(ids)
    # A stop that begins inside one token and ends inside a later one.
    offsets = [len(codec().decode(ids[:at])) for at in range(len(ids) + 1)]
    start, end = next(
        (first + 1, last + 1)
        for at, (first, middle, last, beyond) in enumerate(
            zip(offsets[4:], offsets[5:], offsets[6:], offsets[7:], strict=False)
        )
        if first + 1 < middle < last + 1 < beyond and text.find(text[first + 1 : last + 1]) == first + 1
    )
    line = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "logprobs": 0, "stop": text[start:end]}
    outcome = await run(
        tmp_path,
        [
            {"custom_id": "stopped", **line},
            {"custom_id": "both", **line, "n": 3},
            {"custom_id": "free", **line, "stop": []},
        ],
        FakeHead(),
    )
    assert outcome.code == 0
    whole = choices_of(outcome.answers["free"])[0]["logprobs"]
    for choice in itertools.chain(choices_of(outcome.answers["stopped"]), choices_of(outcome.answers["both"])):
        assert choice["text"] == text[:start] and choice["finish_reason"] == "stop"
        shown = choice["logprobs"]
        assert shown["text_offset"] == [offset for offset in whole["text_offset"] if offset < start]
        assert shown["token_logprobs"] == whole["token_logprobs"][: len(shown["tokens"])]
        assert len(shown["tokens"]) < len(whole["tokens"])


async def test_the_end_of_a_text_has_no_log_probability(tmp_path: Path) -> None:
    line = {"custom_id": "a", "prompt": PROMPT, "max_tokens": 60, "logprobs": 0, "n": 2}
    ids, reason = expected(prompt_ids(PROMPT), 60)
    assert reason == "stop"
    outcome = await run(tmp_path, [line], FakeHead())
    for choice in choices_of(outcome.answers["a"]):
        assert choice["logprobs"]["tokens"] == [text_of(token) for token in ids[:-1]]
        assert choice["finish_reason"] == "stop"
    assert outcome.answers["a"]["response"]["body"]["usage"]["completion_tokens"] == 2 * len(ids)


async def test_a_field_that_asks_for_nothing_changes_no_digest(tmp_path: Path) -> None:
    line = {"custom_id": "a", "prompt": PROMPT, "max_tokens": 3}
    assert (await run(tmp_path, [line], FakeHead())).code == 0
    idle = {"n": 1, "logprobs": False, "echo": False, "min_p": 0, "repetition_penalty": 1.0, "logit_bias": {}}
    again = await run(tmp_path, [{**line, **idle}], FakeHead(), resume=True)
    assert again.code == 0, again.said
    asking = await run(tmp_path, [{**line, "logprobs": 0}], FakeHead(), resume=True)
    assert asking.code != 0 and "input changed" in asking.said


async def test_a_retry_has_all_log_probabilities(tmp_path: Path) -> None:
    head = FakeHead()
    head.faults["b"] = [Fault("rank_lost", after=4), Fault("rank_lost", after=1)]
    head.faults["c"] = [Fault("eof", after=2)]
    line = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, "echo": True}
    outcome = await run(tmp_path, [{"custom_id": name, **line} for name in "abc"], head, shared=True)
    assert outcome.code == 0 and not head.breaches
    (wanted,) = choices_of(outcome.answers["a"])
    assert len(wanted["logprobs"]["tokens"]) == 16
    for name in "bc":
        assert choices_of(outcome.answers[name]) == [wanted] and outcome.answers[name]["engine"]["attempts"] > 1


async def test_what_is_asked_of_sampling_reaches_the_head(tmp_path: Path) -> None:
    head = FakeHead()
    line = {
        "prompt": PROMPT,
        "max_tokens": 2,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2,
        "logit_bias": {"7": -3.5, "4000": 100},
        "logprobs": 0,
        "prompt_logprobs": 4,
    }
    assert (await run(tmp_path, [line], head)).code == 0
    (submit,) = head.submissions
    sampling = submit.sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 2.0)
    assert dict(zip(sampling.bias_ids, sampling.biases, strict=True)) == {7: -3.5, 4000: 100.0}
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 4)
