"""Sampling through real processes with the bundled model: the same seed gives the same text, and sums are sums.

A request alone, in a batch of 32, and after its decode rank was killed has the same text and the same
log-probabilities, bit for bit, with penalties too.
"""

from __future__ import annotations

import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.batch.rig import codec, read_records, write_lines
from tests.e2e.batch_process import batch_run

LINES = 32
TOKENS = 24


def make_body(place: int) -> dict[str, Any]:
    """Every kind of sampling; a third of them ask for log-probabilities."""
    rng = random.Random(place)
    body: dict[str, Any] = {
        "prompt": [rng.randrange(66, 4000) for _ in range(rng.randrange(2, 100))],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": rng.choice([0, 0.7, 1.1]),
        "seed": place,
    }
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"presence_penalty": 1.5, "logprobs": 2},
        {"min_p": 0.05, "top_p": 0.9},
        {"frequency_penalty": -0.3, "top_k": 40, "min_tokens": 9},
        {"logit_bias": {"300": 4, "500": -50}, "repetition_penalty": 0.9, "logprobs": 0, "echo": True},
        {"prompt_logprobs": 1},
    ]
    return body | wishes[place % len(wishes)]


def choices_of(output: Path) -> dict[str, list[dict[str, Any]]]:
    return {record["custom_id"]: record["response"]["body"]["choices"] for record in read_records(output)}


async def run_lines(directory: Path, lines: list[dict[str, Any]], *arguments: str) -> dict[str, list[dict[str, Any]]]:
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    write_lines(source, lines)
    async with batch_run(source, output, *arguments) as run:
        assert await run.wait() == 0, run.said()
    return choices_of(output)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All lines at once, undisturbed."""
    directory = tmp_path_factory.mktemp("calm")
    lines = [{"custom_id": f"r{place}", **make_body(place)} for place in range(LINES)]
    return trio.run(run_lines, directory, lines)


async def test_a_request_has_its_text_alone_and_among_others(
    together: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert len(together) == LINES
    lines = [{"custom_id": f"r{place}", **make_body(place)} for place in range(7)]
    alone = await run_lines(tmp_path, lines, "--inflight", "1")
    for name, choices in alone.items():
        assert choices == together[name]


async def test_a_killed_decode_rank_changes_no_text_and_no_number(
    together: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [{"custom_id": f"r{place}", **make_body(place)} for place in range(LINES)])
    async with batch_run(source, output, "--inflight", "8") as run:
        await run.wait_answers(3)
        os.kill(run.rank_pid(1), signal.SIGKILL)
        assert await run.wait() == 0, run.said()
    assert choices_of(output) == together
    resumed = [r["custom_id"] for r in read_records(output) if r["engine"]["attempts"] > 1]
    assert resumed, "something was under way when the rank was killed"
    assert any("penalty" in str(make_body(int(name[1:]))) for name in resumed)


async def test_log_probabilities_add_up(together: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    scored = [choices[0]["logprobs"] for choices in together.values() if choices[0]["logprobs"]]
    assert len(scored) > 8
    for found in scored:
        for logprob, texts in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
            if texts is not None:
                assert logprob <= 0 and sum(map(math.exp, texts.values())) <= 1 + 1e-6
    # What was generated, given as a prompt, has the log-probabilities that it was generated with.
    body = {"prompt": "The sea was", "max_tokens": 20, "ignore_eos": True, "logprobs": 3, "seed": 1}
    places = [tmp_path / name for name in "ab"]
    for place in places:
        place.mkdir()
    (first,) = (await run_lines(places[0], [{"custom_id": "a", **body}]))["a"]
    ids = codec().encode(first["text"])
    assert len(ids) == len(first["logprobs"]["tokens"]), "the text's ids are those that were generated"
    prompt = [codec().bos_id, *codec().encode("The sea was"), *ids]
    line = {"custom_id": "b", **body, "prompt": prompt, "echo": True, "max_tokens": 1}
    (second,) = (await run_lines(places[1], [line]))["b"]
    assert second["logprobs"]["token_logprobs"][4:24] == first["logprobs"]["token_logprobs"]
    assert second["logprobs"]["top_logprobs"][4:24] == first["logprobs"]["top_logprobs"]


async def test_answers_to_one_prompt_differ_and_each_ends_at_its_own_stop(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me something."}], "max_tokens": 16, "seed": 5}
    body |= {"ignore_eos": True, "logprobs": True}
    free, stopped = tmp_path / "free", tmp_path / "stopped"
    for place in (free, stopped):
        place.mkdir()
    found = await run_lines(free, [{"custom_id": "many", "body": {**body, "n": 4}}, {"custom_id": "one", "body": body}])
    texts = [choice["message"]["content"] for choice in found["many"]]
    assert texts[0] == found["one"][0]["message"]["content"] and len(set(texts)) == 4
    # Stop at what one of them says at its fifth token: as an id, and as a string over two tokens.
    content = [choice["logprobs"]["content"] for choice in found["many"]]
    spelled = bytes(content[1][4]["bytes"])
    ids = [token for token in range(codec().vocab_size) if codec().bytes_of(token) == spelled]
    stop = content[1][4]["token"][1:] + content[1][5]["token"][:1]
    lines = [
        {"custom_id": "id", "body": {**body, "n": 4, "stop_token_ids": ids}},
        {"custom_id": "text", "body": {**body, "n": 4, "stop": stop}},
    ]
    found = await run_lines(stopped, lines)
    for choice, whole, text in zip(found["id"], content, texts, strict=True):
        ends = [at for at, entry in enumerate(whole) if bytes(entry["bytes"]) == spelled]
        kept = whole[: ends[0]] if ends else whole
        assert choice["logprobs"]["content"] == kept
        assert choice["message"]["content"] == b"".join(bytes(e["bytes"]) for e in kept).decode("utf-8", "replace")
        assert choice["finish_reason"] == ("stop" if ends else "length") and text.startswith(
            choice["message"]["content"]
        )
    assert found["id"][1]["finish_reason"] == "stop" and len(found["id"][1]["logprobs"]["content"]) <= 4
    for choice, whole, text in zip(found["text"], content, texts, strict=True):
        shown = text.partition(stop)[0]
        assert choice["message"]["content"] == shown
        assert choice["logprobs"]["content"] == whole[: len(choice["logprobs"]["content"])]
        length = sum(len(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert len(shown.encode()) <= length
    assert found["text"][1]["finish_reason"] == "stop"
