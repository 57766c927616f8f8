"""Grammars through real processes: every text that ends is valid, also where its decode rank was killed under way, and
a text that a limit cut is a beginning of a valid one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

import engine.nano
from tests.batch.rig import codec, read_records, write_lines
from tests.e2e.batch_process import batch_run

LINES = 16
TOKENS, PLAIN_TOKENS = 160, 60
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,9}$"}, "minItems": 6,
                  "maxItems": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 255},
    },
    "required": ["words", "size"],
    "additionalProperties": False,
}  # fmt: skip
REGEX = r"[a-z]{4,8}(, [a-z]{4,8}){9,14}\."


def make_line(place: int) -> dict[str, Any]:
    """Texts of some forty tokens, chats and completions, among lines without a grammar."""
    rng = random.Random(place)
    line: dict[str, Any] = {"custom_id": f"r{place}", "temperature": 1, "seed": place, "max_tokens": TOKENS}
    match place % 4:
        case 0:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            return line | {"messages": [{"role": "user", "content": "Tell me of the sea."}], "response_format": form}
        case 1:
            return line | {"prompt": "Some words: ", "structured_outputs": {"regex": REGEX}}
        case 2:
            # Cut short: what is there has to be a beginning.
            line["max_tokens"] = rng.randrange(4, 20)
            return line | {"prompt": "The sea was", "structured_outputs": {"json": SCHEMA}}
        case _:
            line["max_tokens"] = PLAIN_TOKENS
            return line | {"prompt": [rng.randrange(66, 4000) for _ in range(40)], "ignore_eos": True}


def check_answer(record: dict[str, Any]) -> None:
    place = int(record["custom_id"][1:])
    (choice,) = record["response"]["body"]["choices"]
    text, reason = choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"]
    if reason == "length" and place % 4 != 3:
        check_beginning(text, place)
        return
    match place % 4:
        case 0:
            said = json.loads(text)
            assert set(said) == {"words", "size"} and 0 <= said["size"] <= 255 and 6 <= len(said["words"]) <= 12
            assert all(re.fullmatch("[a-z]{3,9}", word) for word in said["words"])
        case 1:
            assert re.fullmatch(REGEX, text)
        case 2:
            raise AssertionError(f"a text of {TOKENS} tokens in {text!r}")


def check_beginning(text: str, place: int) -> None:
    """Which tokens it is made of does not matter to a grammar."""
    tokenizer = LLTokenizer(str(Path(engine.nano.__file__).with_name("tokenizer.json")))
    options = {"whitespace_pattern": r"[ \n\t]{0,16}"}
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides=options)
    if place % 4 == 1:
        grammar = LLMatcher.grammar_from_regex(REGEX)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    ids = codec().encode(text)
    assert matcher.validate_tokens(ids) == len(ids), text


def write_input(directory: Path) -> tuple[Path, Path]:
    directory.mkdir()
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    write_lines(source, [make_line(place) for place in range(LINES)])
    return source, output


async def run_lines(directory: Path, *arguments: str, kill: bool) -> list[dict[str, Any]]:
    source, output = write_input(directory)
    async with batch_run(source, output, *arguments) as run:
        if kill:
            await run.wait_answers(2)
            os.kill(run.rank_pid(1), signal.SIGKILL)
        assert await run.wait() == 0, run.said()
    records: list[dict[str, Any]] = read_records(output)
    return sorted(records, key=lambda record: int(record["custom_id"][1:]))


async def test_texts_are_valid_and_the_same_after_a_killed_decode_rank(tmp_path: Path) -> None:
    calm = await run_lines(tmp_path / "calm", kill=False)
    shaken = await run_lines(tmp_path / "shaken", "--inflight", "8", kill=True)
    for records in (calm, shaken):
        assert len(records) == LINES
        for record in records:
            check_answer(record)
        reasons = [record["response"]["body"]["choices"][0]["finish_reason"] for record in records]
        assert reasons[0::4].count("stop") > LINES // 8 and set(reasons[1::4]) == {"stop"}
        assert set(reasons[2::4]) == {"length"}
    texts = [[record["response"]["body"]["choices"] for record in records] for records in (calm, shaken)]
    assert texts[0] == texts[1]
    resumed = [record["custom_id"] for record in shaken if record["engine"]["attempts"] > 1]
    assert any(int(name[1:]) % 4 != 3 for name in resumed), "a text with a grammar was under way when the rank died"
