"""`engine batch` with the real thing: its own head, ranks, fabric and the bundled model; ranks killed on the way."""

from __future__ import annotations

import collections
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.batch.hostile import make_lines
from tests.batch.process import ENVIRONMENT, ROOT, wait_until
from tests.batch.rig import read_records, write_lines


def make_prompts(count: int, max_tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [
        {
            "custom_id": f"r{place}",
            "prompt": [rng.randrange(66, 2000) for _ in range(rng.randrange(2, 120))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0 if place % 2 else 0.8,
            "seed": place,
        }
        for place in range(count)
    ]


def command(tmp_path: Path, output: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "engine", "batch"),
        *("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / output), *more),
    ]


def texts(path: Path) -> dict[str, str]:
    records = read_records(path)
    found = {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in records}
    assert len(found) == len(records)
    return found


def pids(tmp_path: Path, rank: int) -> list[int]:
    """Processes of a rank in its lives, as the head's log tells."""
    log = (tmp_path / "stderr.txt").read_text()
    return [int(pid) for pid in re.findall(rf"rank\.start rank={rank} .*?pid=(\d+)", log)]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_a_killed_rank_changes_no_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", make_prompts(24, 40))
    with trio.fail_after(120):
        calm = await trio.run_process(
            command(tmp_path, "calm.jsonl"), env=ENVIRONMENT, cwd=ROOT, capture_stderr=True, check=False
        )
    assert calm.returncode == 0, calm.stderr.decode()
    wanted = texts(tmp_path / "calm.jsonl")
    assert len(wanted) == 24
    for record in read_records(tmp_path / "calm.jsonl"):
        engine = record["engine"]
        assert engine["attempts"] == 1 and engine["pushed_bytes"] > 0 and engine["pushes"] > 0
        assert (engine["prefill_rank"], engine["decode_rank"]) == (0, 1)
        assert engine["completion_tokens"] == 40
    with (tmp_path / "stderr.txt").open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            command(tmp_path, "torn.jsonl", "--retry", "5", "-v"),
            env=ENVIRONMENT,
            cwd=ROOT,
            stderr=stderr.fileno(),
        )
    try:
        with trio.fail_after(180):
            for rank, at_least in ((1, 2), (0, 10)):  # the decode rank, then the prefill rank
                out = tmp_path / "torn.jsonl"
                await wait_until(
                    lambda out=out, least=at_least: out.exists() and out.read_bytes().count(b"\n") >= least, "answers"
                )
                os.kill(pids(tmp_path, rank)[-1], signal.SIGKILL)
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert code == 0, (tmp_path / "stderr.txt").read_text()
    assert texts(tmp_path / "torn.jsonl") == wanted
    assert max(record["engine"]["attempts"] for record in read_records(tmp_path / "torn.jsonl")) > 1


async def test_a_killed_head_stops_the_run_and_resume_ends_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", make_prompts(40, 20))
    with (tmp_path / "stderr.txt").open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            command(tmp_path, "out.jsonl", "-v"), env=ENVIRONMENT, cwd=ROOT, stderr=stderr.fileno()
        )
    with trio.fail_after(120):
        out = tmp_path / "out.jsonl"
        await wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, "answers")
        head = int(re.findall(r"head\.start pid=(\d+)", (tmp_path / "stderr.txt").read_text())[0])
        below = pids(tmp_path, 0) + pids(tmp_path, 1)
        os.kill(head, signal.SIGKILL)
        assert await process.wait() == 3
        assert len(below) == 2
        await wait_until(lambda: not any(map(is_running, below)), "the ranks are gone too")
    said = (tmp_path / "stderr.txt").read_text()
    assert "resume with: engine batch" in said and "--resume" in said
    assert not (tmp_path / "out.errors.jsonl").exists()
    before = texts(out)
    assert 0 < len(before) < 40
    with trio.fail_after(120):
        again = await trio.run_process(
            command(tmp_path, "out.jsonl", "--resume"), env=ENVIRONMENT, cwd=ROOT, check=False
        )
    assert again.returncode == 0
    after = texts(out)
    assert len(after) == 40 and before.items() <= after.items()


@pytest.mark.slow
async def test_two_thousand_hostile_lines_meet_their_fate(tmp_path: Path) -> None:
    lines = make_lines(2000, 0.35, 7, max_model_tokens=8192)
    write_lines(tmp_path / "in.jsonl", [line.data for line in lines])
    with trio.fail_after(300):
        done = await trio.run_process(
            command(tmp_path, "out.jsonl", "--default", "max_tokens=8"), env=ENVIRONMENT, cwd=ROOT, check=False
        )
    assert done.returncode == 1
    records = read_records(tmp_path / "out.jsonl") + read_records(tmp_path / "out.errors.jsonl")
    fates = [(record["custom_id"], record["error"]["type"] if record["error"] else "answer") for record in records]
    wanted = [(line.custom_id, line.fate) for line in lines if line.fate != "blank"]
    assert collections.Counter(fates) == collections.Counter(wanted)


async def test_the_example_prompts_are_answered(tmp_path: Path) -> None:
    arguments = [*command(tmp_path, "out.jsonl"), "--default", "max_tokens=16", "--default", "temperature=0"]
    arguments[arguments.index("-i") + 1] = str(ROOT / "examples" / "prompts.jsonl")
    with trio.fail_after(120):
        done = await trio.run_process(arguments, env=ENVIRONMENT, cwd=ROOT, check=False)
    assert done.returncode == 0
    answers = {record["custom_id"]: record for record in read_records(tmp_path / "out.jsonl")}
    assert len(answers) == 12
    for record in answers.values():
        assert record["engine"]["pushed_bytes"] > 0 and record["engine"]["ttft_ms"] > 0
    thought = answers["thinking"]["response"]["body"]["choices"][0]["message"]
    assert thought["reasoning_content"]
