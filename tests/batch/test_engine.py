"""`engine batch` with the real thing: its own head, ranks, fabric and a tiny checkpoint; ranks killed on the way."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.batch.process import ENVIRONMENT, ROOT, wait_until
from tests.batch.rig import read_records, write_lines

ORACLE = ROOT / "tests" / "oracle" / "v41-tiny"
FOLDED_CLASSES = 259
"""What the bundled tokenizer's first 288 ids fold to; the oracle's own count belongs to another tokenizer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's checkpoint beside the bundled tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("model.safetensors", "engram.safetensors"):
        shutil.copy(ORACLE / name, directory)
    shutil.copy(ROOT / "engine" / "nano" / "tokenizer.json", directory)
    config = json.loads((ORACLE / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] = FOLDED_CLASSES
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_prompts(count: int, max_tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [
        {
            "custom_id": f"r{place}",
            "prompt": [rng.randrange(66, 280) for _ in range(rng.randrange(2, 120))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0 if place % 2 else 0.8,
            "seed": place,
        }
        for place in range(count)
    ]


def command(tmp_path: Path, model: Path, output: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "engine", "batch", "--model", str(model)),
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


async def test_a_killed_rank_changes_no_answer(tmp_path: Path, model: Path) -> None:
    write_lines(tmp_path / "in.jsonl", make_prompts(24, 40))
    with trio.fail_after(120):
        calm = await trio.run_process(
            command(tmp_path, model, "calm.jsonl"), env=ENVIRONMENT, cwd=ROOT, capture_stderr=True, check=False
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
            command(tmp_path, model, "torn.jsonl", "--retry", "5", "-v"),
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


async def test_a_killed_head_stops_the_run_and_resume_ends_it(tmp_path: Path, model: Path) -> None:
    write_lines(tmp_path / "in.jsonl", make_prompts(40, 20))
    with (tmp_path / "stderr.txt").open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            command(tmp_path, model, "out.jsonl", "-v"), env=ENVIRONMENT, cwd=ROOT, stderr=stderr.fileno()
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
            command(tmp_path, model, "out.jsonl", "--resume"), env=ENVIRONMENT, cwd=ROOT, check=False
        )
    assert again.returncode == 0
    after = texts(out)
    assert len(after) == 40 and before.items() <= after.items()
