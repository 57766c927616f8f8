"""`engine batch` while its processes are killed and its operator is impatient: every line is answered once, and alike.

Real processes, the bundled model, moments chosen by a seed. What counts is what a user finds in the files at the end.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.batch.rig import read_records, write_lines
from tests.e2e.batch_process import NOTICE_S, BatchRun, batch_run

NUM_PROMPTS = 36
BAD = {5: b'{"prompt": "unfinished', 17: b'{"custom_id": "bad", "prompt": "a", "max_tokens": 0}', 30: b"[]"}
"""Lines that get an error record: their numbers, counted from 1."""
MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8)]


def make_lines() -> list[Any]:
    """Half greedy, half drawn with a seed of their own; some end at a stop string, the others at their limit."""
    rng = random.Random(7)
    lines: list[Any] = []
    for place in range(NUM_PROMPTS):
        body: dict[str, Any] = {
            "custom_id": f"r{place}",
            "prompt": [rng.randrange(66, 2000) for _ in range(rng.randrange(2, 150))],
            "max_tokens": rng.randrange(10, 40),
            "ignore_eos": True,
            "temperature": 0 if place % 2 else 0.8,
            "seed": place,
        }
        if place % 4 == 0:
            body["stop"] = ["e", "."]
        lines.append(body)
    for number, bad in BAD.items():
        lines.insert(number - 1, bad)
    return lines


@dataclasses.dataclass(frozen=True)
class Case:
    """The input, and what an undisturbed run made of it: id to text, with the finish reason."""

    source: Path
    answers: dict[str, tuple[str, str]]


def read_answers(output: Path) -> dict[str, tuple[str, str]]:
    """Id to text and finish reason; every record must tell the way that its request took."""
    found = {}
    records = read_records(output)
    for record in records:
        choice = record["response"]["body"]["choices"][0]
        engine = record["engine"]
        found[record["custom_id"]] = choice["text"], choice["finish_reason"]
        assert (engine["prefill_rank"], engine["decode_rank"]) == (0, 1)
        assert engine["pushed_bytes"] > 0 and engine["pushes"] > 0 and engine["prompt_tokens"] > 0
        # A later attempt goes on from what an earlier one left in the prefix cache.
        assert engine["completion_tokens"] > 0 and 0 <= engine["cached_tokens"] <= engine["prompt_tokens"]
        assert min(engine[name] for name in ("queue_ms", "prefill_ms", "push_ms", "ttft_ms", "total_ms")) > 0
        if choice["finish_reason"] == "length":
            assert engine["handoff_ms"] >= 0  # 0 where the last attempt had only its first token left to produce
    assert len(found) == len(records), "a line was answered twice"
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("calm")
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    write_lines(source, make_lines())

    async def run_undisturbed() -> None:
        async with batch_run(source, output) as run:
            assert await run.wait() == 1, run.said()

    trio.run(run_undisturbed)
    answers = read_answers(output)
    assert len(answers) == NUM_PROMPTS
    assert {reason for _, reason in answers.values()} == {"stop", "length"}
    return Case(source, answers)


def check_whole(case: Case, output: Path) -> None:
    """Every line has its one record in the one file or the other, and the texts are those of the calm run."""
    assert read_answers(output) == case.answers
    errors = read_records(output.with_name("out.errors.jsonl"))
    assert sorted(record["line"] for record in errors) == sorted(BAD)
    assert all(record["error"]["message"] for record in errors)


def draw_moment(rng: random.Random) -> int:
    """Answers to wait for before something happens: the run is under way and far from its end."""
    return rng.randrange(1, NUM_PROMPTS // 2)


async def pause(rng: random.Random) -> None:
    """A little more, so that things do not only happen just after an answer was written."""
    await trio.sleep(rng.uniform(0, 0.1))


@pytest.mark.parametrize("rank", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("seed", [1, *MORE_SEEDS])
async def test_a_killed_rank_changes_no_answer(rank: int, seed: int, case: Case, tmp_path: Path) -> None:
    rng = random.Random(f"{seed} {rank}")
    output = tmp_path / "out.jsonl"
    # Few at once, so that there are always prompts left which need the prefill rank.
    async with batch_run(case.source, output, "--inflight", "8") as run:
        await run.wait_answers(draw_moment(rng))
        await pause(rng)
        victim, killed_at = run.rank_pid(rank), time.time()
        os.kill(victim, signal.SIGKILL)
        assert await run.wait() == 1, run.said()
    [down] = run.events("rank.down", pid=victim)
    assert "SIGKILL" in down["msg"] and 0 <= down["at"] - killed_at < NOTICE_S
    assert len(run.events("rank.ready", rank=rank)) == 2, "it came back"
    attempts = max(record["engine"]["attempts"] for record in read_records(output))
    assert attempts > 1 or rank == 0, "what was being decoded had to begin again"
    check_whole(case, output)


@pytest.mark.parametrize("seed", [1, *MORE_SEEDS])
async def test_a_run_that_is_ended_again_and_again_is_resumed_to_the_end(seed: int, case: Case, tmp_path: Path) -> None:
    """Head killed, batch killed, Ctrl-C once, Ctrl-C twice, in an order drawn by the seed; each time `--resume`."""
    rng = random.Random(seed)
    output = tmp_path / "out.jsonl"
    endings = [kill_head, kill_batch, interrupt_once, interrupt_twice]
    rng.shuffle(endings)
    before: dict[str, tuple[str, str]] = {}
    for place, end in enumerate(endings):
        async with batch_run(case.source, output, *(["--resume"] if place else []), "--inflight", "6") as run:
            await run.wait_answers(len(before) + rng.randrange(1, 6))
            await pause(rng)
            await end(run)
        after = read_answers(output)
        assert before.items() <= after.items() <= case.answers.items()
        assert len(before) < len(after) < NUM_PROMPTS, "each run was cut off under way"
        before = after
    async with batch_run(case.source, output, "--resume") as run:
        assert await run.wait() == 1, run.said()
    check_whole(case, output)


async def kill_head(run: BatchRun) -> None:
    killed_at = time.monotonic()
    os.kill(run.head_pid(), signal.SIGKILL)
    await run.wait_until(lambda: "the engine is lost" in run.said(), "the batch notices")
    assert time.monotonic() - killed_at < NOTICE_S
    assert await run.wait() == 3
    assert "resume with: engine batch" in run.said() and "--resume" in run.said()


async def kill_batch(run: BatchRun) -> None:
    killed_at = time.time()
    run.process.kill()
    assert await run.wait() == -signal.SIGKILL
    with trio.fail_after(20):
        while not run.events("head.gone"):  # noqa: ASYNC110
            await trio.sleep(0.02)
    assert 0 <= run.events("head.orphan")[0]["at"] - killed_at < NOTICE_S


async def interrupt_once(run: BatchRun) -> None:
    run.interrupt()
    assert await run.wait() == 3, run.said()
    said = run.said()
    assert "may finish within 30 s" in said and "resume with: engine batch" in said
    assert not run.events("request.fail"), "what ran was finished"


async def interrupt_twice(run: BatchRun) -> None:
    run.interrupt()
    await run.wait_until(lambda: "once more to drop them" in run.said(), "the first one was heard")
    asked_at = time.monotonic()
    run.interrupt()
    assert await run.wait() == 130, run.said()
    assert time.monotonic() - asked_at < 10
    assert "resume with: engine batch" in run.said()
