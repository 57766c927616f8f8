"""Random faults, orders and limits, run after run on one output: every line ends in one record, right to the token.

A seed names its world; a failing one is printed by pytest as the parameter.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.batch.fake_head import FakeHead, Fault
from tests.batch.rig import completion_text, expected_text, prompt_ids, run

KINDS = ("rank_lost", "transfer_failed", "hang", "eof", "device_failed")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("several", [False, True], ids=["", "several"])
async def test_no_line_is_lost_doubled_or_wrong(tmp_path: Path, seed: int, several: bool) -> None:
    rng, wishes = random.Random(seed), random.Random(f"{seed} wishes")
    count = rng.randrange(1, 80)
    max_tokens = rng.randrange(1, 30)
    lines: list[dict[str, Any]] = []
    wanted = {}
    for place in range(count):
        text = f"prompt {rng.randrange(10**6)}"
        full, _, _ = expected_text(prompt_ids(text), max_tokens)
        line: dict[str, Any] = {"custom_id": f"r{place}", "prompt": text, "max_tokens": max_tokens}
        if len(full) > 4 and rng.random() < 0.3:
            start = rng.randrange(len(full) - 2)
            line["stop"] = full[start : start + rng.randrange(1, 4)]
            full = full[: full.index(line["stop"])]
        if several:
            line |= {"n": wishes.choice([1, 2, 5]), "logprobs": wishes.choice([False, 0, 3]), "echo": True}
            full = text + full
        lines.append(line)
        wanted[f"r{place}"] = full
    head = FakeHead(
        slots=rng.choice([1, 4, 32]),
        step_s=rng.choice([0.0, 0.001]),
        max_inflight=rng.choice([2, 16, 4096]),
        queue=rng.choice([3, 4096]),
    )
    for place in range(count):
        if rng.random() < 0.25:
            faults = [Fault(rng.choice(KINDS), rng.randrange(6)) for _ in range(rng.randrange(1, 3))]
            head.faults[f"r{place}"] = faults
    records: list[dict[str, Any]] = []
    for attempt in range(60):
        outcome = await run(
            tmp_path,
            rng.sample(lines, count),
            head,
            shared=rng.random() < 0.7,
            resume=attempt > 0,
            order=rng.choice(["completion", "input"]),
            inflight=rng.choice([1, 7, 256]),
            window=rng.choice([0, 5, 4096]),
            retry=rng.randrange(3),
            stall=0.15,
        )
        assert not head.breaches, head.breaches[:3]
        assert outcome.code in (0, 1, 3), outcome.said
        assert len(outcome.answers) == len(outcome.records)
        assert not set(outcome.answers) & set(outcome.errors)
        if outcome.code == 1:
            assert {error["error"]["type"] for error in outcome.failures} <= {"engine_lost", "timeout"}
            assert len(outcome.answers) + len(outcome.errors) == count
        records = outcome.records
        if outcome.code == 0:
            break
    texts = {record["custom_id"]: completion_text(record) for record in records}
    assert texts == wanted
    by_id = {line["custom_id"]: line for line in lines}
    for record in records:
        line, choices = by_id[record["custom_id"]], record["response"]["body"]["choices"]
        assert len(choices) == line.get("n", 1)
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        for choice in choices:
            assert {**choice, "index": 0} == choices[0], "the head gives all the same"
        scores = choices[0]["logprobs"]
        assert (scores is None) == (line.get("logprobs", False) is False)
        if scores is not None:
            assert all(offset <= len(texts[line["custom_id"]]) for offset in scores["text_offset"])
            assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"])
