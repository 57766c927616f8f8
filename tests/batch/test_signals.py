"""Ctrl-C, SIGTERM, SIGUSR1, kill and broken pipes, on a real process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.batch.fake_head import FakeHead, Fault
from tests.batch.process import ENVIRONMENT, ROOT, batch_process, said, wait_until
from tests.batch.rig import completion_text, expected_text, prompt_ids, read_records, write_lines


def write_prompts(tmp_path: Path, count: int, **body: Any) -> None:
    lines = [{"custom_id": f"r{place}", "prompt": f"prompt number {place}", **body} for place in range(count)]
    write_lines(tmp_path / "in.jsonl", lines)


def files(tmp_path: Path) -> list[str]:
    return ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_whole(tmp_path: Path, count: int, max_tokens: int) -> None:
    texts = {record["custom_id"]: completion_text(record) for record in read_records(tmp_path / "out.jsonl")}
    assert num_lines(tmp_path / "out.jsonl") == len(texts) == count
    for place in range(count):
        assert texts[f"r{place}"] == expected_text(prompt_ids(f"prompt number {place}"), max_tokens)[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_finishes_what_runs_and_resume_does_the_rest(tmp_path: Path, number: int) -> None:
    write_prompts(tmp_path, 300, max_tokens=12)
    head = FakeHead(step_s=0.002, slots=8)
    async with batch_process(tmp_path, head, *files(tmp_path), "--inflight", "8") as process:
        await wait_until(lambda: num_lines(tmp_path / "out.jsonl") > 20, "answers")
        process.send_signal(number)
        assert await process.wait() == 3
        before = num_lines(tmp_path / "out.jsonl")
        assert head.submissions and before == len({submit.label for submit in head.submissions})
        assert before < 300
        hint = said(tmp_path).splitlines()[-1]
        assert hint.startswith("resume with: engine --connect ") and hint.endswith("--inflight 8 --resume")
    async with batch_process(tmp_path, head, *files(tmp_path), "--resume") as process:
        assert await process.wait() == 0, said(tmp_path)
        assert f"{before:,} done before" in said(tmp_path)
    check_whole(tmp_path, 300, 12)
    assert not head.breaches


async def test_the_second_signal_drops_what_runs(tmp_path: Path) -> None:
    write_prompts(tmp_path, 10, max_tokens=12)
    head = FakeHead()
    for place in range(10):
        head.faults[f"r{place}"] = [Fault("hang", 1)]
    async with batch_process(tmp_path, head, *files(tmp_path)) as process:
        await wait_until(lambda: head.tokens_sent >= 10, "tokens")
        process.send_signal(signal.SIGINT)
        await wait_until(lambda: "once more to drop" in said(tmp_path), "the first answer")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    assert "resume with: " in said(tmp_path) and "Traceback" not in said(tmp_path)


async def test_the_grace_ends_the_wait_for_what_does_not_end(tmp_path: Path) -> None:
    write_prompts(tmp_path, 10, max_tokens=12)
    head = FakeHead()
    head.faults["r3"] = [Fault("hang", 1)]
    async with batch_process(tmp_path, head, *files(tmp_path), "--grace", "0.3") as process:
        await wait_until(lambda: num_lines(tmp_path / "out.jsonl") == 9, "nine answers")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 3
    assert not (tmp_path / "out.errors.jsonl").exists(), "what was dropped stays for --resume, without an error record"


async def test_a_signal_that_finds_all_lines_read_and_running_is_no_early_stop(tmp_path: Path) -> None:
    write_prompts(tmp_path, 5, max_tokens=3)
    head = FakeHead()
    head.paused = True
    async with batch_process(tmp_path, head, *files(tmp_path), "--progress", "json") as process:
        await wait_until(lambda: len(head.submissions) == 5, "submissions")
        with trio.fail_after(30):
            while '"all_read":true' not in said(tmp_path):
                process.send_signal(signal.SIGUSR1)
                await trio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "stopping" in said(tmp_path), "the answer to the signal")
        head.paused = False
        assert await process.wait() == 0
    check_whole(tmp_path, 5, 3)


async def test_ctrl_c_while_stdin_is_silent(tmp_path: Path) -> None:
    head = FakeHead()
    arguments = ("-o", str(tmp_path / "out.jsonl"))
    async with batch_process(tmp_path, head, *arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        await process.stdin.send_all(b'{"custom_id": "r0", "prompt": "prompt number 0", "max_tokens": 4}\n')
        await wait_until(lambda: num_lines(tmp_path / "out.jsonl") == 1, "an answer before the input ended")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 3
    assert "same input on stdin" in said(tmp_path)
    check_whole(tmp_path, 1, 4)


async def test_sigusr1_shows_the_status_and_names_the_oldest(tmp_path: Path) -> None:
    write_prompts(tmp_path, 3, max_tokens=3)
    head = FakeHead()
    head.faults["r1"] = [Fault("hang", 1)]
    async with batch_process(tmp_path, head, *files(tmp_path), "--progress", "none") as process:
        await wait_until(lambda: num_lines(tmp_path / "out.jsonl") == 2, "two answers")

        def shows() -> re.Match[str] | None:
            process.send_signal(signal.SIGUSR1)  # again and again: the input's lines are counted beside the answers
            return re.search(r"2/3 66%.*  run 1  .*  oldest 0s r1\n", said(tmp_path))

        await wait_until(shows, "the status line")


async def test_a_killed_run_is_resumed_without_loss_or_repetition(tmp_path: Path) -> None:
    write_prompts(tmp_path, 400, max_tokens=6)
    head = FakeHead(step_s=0.001, slots=16)
    for at_least in (30, 150):
        async with batch_process(tmp_path, head, *files(tmp_path), "--resume") as process:
            await wait_until(lambda least=at_least: num_lines(tmp_path / "out.jsonl") > least, "answers")
            process.kill()
            await process.wait()
        with (tmp_path / "out.jsonl").open("ab") as out:
            out.write(b'{"custom_id": "r399", "torn')  # what a crash of the machine may leave
    async with batch_process(tmp_path, head, *files(tmp_path), "--resume") as process:
        assert await process.wait() == 0, said(tmp_path)
    check_whole(tmp_path, 400, 6)
    assert not head.breaches


async def test_a_second_run_on_the_same_output_is_refused(tmp_path: Path) -> None:
    write_prompts(tmp_path, 4, max_tokens=3)
    head = FakeHead()
    head.paused = True
    async with batch_process(tmp_path, head, *files(tmp_path)) as process:
        await wait_until(lambda: len(head.submissions) == 4, "submissions")
        second = await trio.run_process(process.args, check=False, capture_stderr=True, env=ENVIRONMENT, cwd=ROOT)
        assert second.returncode == 5
        assert b"another engine batch" in second.stderr
        head.paused = False
        assert await process.wait() == 0


@pytest.mark.parametrize(("count", "code"), [(5000, 3), (3, 0)])
async def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path: Path, count: int, code: int) -> None:
    write_prompts(tmp_path, count, max_tokens=3)
    head = FakeHead(slots=64)
    head.paused = True
    reader, writer = os.pipe()
    arguments = ("-i", str(tmp_path / "in.jsonl"), "--progress", "none")
    async with batch_process(tmp_path, head, *arguments, stdout=writer) as process:
        os.close(writer)
        await wait_until(lambda: len(head.submissions) >= 3, "submissions")
        os.close(reader)
        head.paused = False
        assert await process.wait() == code
    assert said(tmp_path) == ""


async def test_a_silent_reader_of_the_output_stops_the_batch_from_asking(tmp_path: Path) -> None:
    """Nobody reads stdout: answers fill the pipe, then no more requests are begun, and Ctrl-C still ends it."""
    write_prompts(tmp_path, 3000, max_tokens=3)
    head = FakeHead(slots=64)
    reader, writer = os.pipe()
    arguments = ("-i", str(tmp_path / "in.jsonl"), "--inflight", "16", "--grace", "0.2")
    async with batch_process(tmp_path, head, *arguments, stdout=writer) as process:
        os.close(writer)
        await wait_until(lambda: len(head.submissions) > 60, "submissions")
        count = -1
        while count != len(head.submissions):
            count = len(head.submissions)
            await trio.sleep(0.3)
        assert count < 300
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 3
        os.close(reader)


async def test_lines_go_through_a_pipe_one_by_one(tmp_path: Path) -> None:
    """An interactive producer gets each answer before it sends the next line."""
    head = FakeHead()
    async with batch_process(tmp_path, head, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for place in range(5):
            line = json.dumps({"custom_id": f"r{place}", "prompt": f"prompt number {place}", "max_tokens": 4})
            await process.stdin.send_all(line.encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                piece = await process.stdout.receive_some()
                assert piece
                answer += piece
            assert json.loads(answer)["custom_id"] == f"r{place}"
        await process.stdin.aclose()
        assert await process.wait() == 0
