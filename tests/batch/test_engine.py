"""`engine batch` with the real thing: its own head, ranks, fabric and the bundled model."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from tests.batch.process import ENVIRONMENT, ROOT
from tests.batch.rig import read_records


def command(tmp_path: Path, output: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "engine", "batch"),
        *("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / output), *more),
    ]


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
