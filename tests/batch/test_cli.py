"""The command line of `engine batch`: what it refuses, what it says, and that help costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from engine.batch_cli import batch, resume_command
from engine.cli import main
from tests.actors.head_process import head_process, talking_client
from tests.batch.fake_head import FakeHead
from tests.batch.process import ENVIRONMENT, ROOT, batch_process, said
from tests.batch.rig import write_lines

EXAMPLES = ROOT / "examples" / "prompts.jsonl"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-errors", "some"], "write a count such as 20"),
        (["--default", "max_token=5"], "did you mean 'max_tokens'"),
        (["--keep-errors"], "goes with --resume"),
        (["--connect", "/x", "--set", "device=cpu"], "do not go with it"),
        (["--stall", "soon"], "is not a duration"),
        (["--order", "random"], "'random' is not one of"),
        (["--inflight", "0"], "--inflight"),
        (["--set", "limits.decode_row=4"], "limits.decode_rows"),
        (["--resume", "--connect", "/nobody"], "--resume needs an output file"),
        (["--connect", "/nobody", "-i", "/nobody.jsonl"], "/nobody.jsonl: can not be read"),
        (["-i", str(EXAMPLES), "-o", str(EXAMPLES)], "prompts.jsonl: is the input too"),
        (["-i", str(EXAMPLES), "-o", "-", "--errors", str(EXAMPLES)], "prompts.jsonl: is the input too"),
    ],
)
def test_what_can_not_be_meant_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code = main(["batch", *arguments])
    said = capsys.readouterr()
    assert code == 2, said.err
    assert words in said.err
    assert said.out == ""


def test_a_daemon_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    place, output = tmp_path / "place", tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "engine", "batch", "--connect", str(place), "-i", str(EXAMPLES), "-o", str(output)]
    result = subprocess.run(command, capture_output=True, env=ENVIRONMENT, cwd=ROOT, timeout=60, check=False)
    assert result.returncode == 4
    first, second, third = result.stderr.decode().splitlines()
    assert first == f"engine batch: no engine answers ({place}/requests.sock: No such file or directory)"
    assert second == f"start one with: engine up --detach --wait ready --dir {place}" and "leave --connect out" in third
    assert not output.exists(), "a run that never began leaves no file behind"


async def test_an_engine_that_wants_no_more_clients_is_busy_and_not_absent(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with head_process(tmp_path, clients=1) as head:
        await head.wait_ready()
        async with talking_client(head):
            command = [sys.executable, "-m", "engine", "batch", "-i", str(EXAMPLES), "-o", str(output)]
            command += ["--connect", head.directory.path]
            result = await trio.run_process(command, capture_stderr=True, env=ENVIRONMENT, cwd=ROOT, check=False)
    assert result.returncode == 5
    assert result.stderr.decode() == (
        "engine batch: the head refused this client: the head has 1 connections (limits.clients)\n"
    )
    assert not output.exists()


def test_help_names_every_option_of_the_surface() -> None:
    text = CliRunner().invoke(batch, ["--help"]).output
    options = (
        "--input --output --errors --resume --keep-errors --order --inflight --window --max-errors --retry --deadline"
        " --stall --grace --retry-for --default --model --seed --strict --progress --summary --connect --config --set"
    )
    for option in options.split():
        assert f"{option} " in text or f"{option}\n" in text, option


def test_help_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys; from engine.batch_cli import batch\n"
        "batch(['--help'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'trio', 'tokenizers', 'nixl', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=ENVIRONMENT, cwd=ROOT, timeout=60, check=True
    )
    assert result.stdout.decode().splitlines()[-1] == "[]"


def test_a_batch_on_a_daemon_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, trio, engine.batch_cli, engine.batch.start\n"
        "assert 'torch' not in sys.modules and 'nixl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=ROOT, timeout=60, check=True)


def test_the_resume_command_can_be_pasted() -> None:
    assert resume_command(["batch", "-o", "my out.jsonl"]) == "engine batch -o 'my out.jsonl' --resume"
    assert resume_command(["batch", "--resume"]) == "engine batch --resume"


async def test_stdout_gets_one_record_for_every_line_in_order(tmp_path: Path) -> None:
    """With `-o -` and no `--errors`, error records stand among the answers."""
    lines = [{"custom_id": f"r{place}", "prompt": f"p {place}", "max_tokens": 3} for place in range(40)]
    write_lines(tmp_path / "in.jsonl", [*lines[:7], b"bad", *lines[7:]])
    out = tmp_path / "stdout.jsonl"
    with out.open("wb") as stdout:
        arguments = ("-i", str(tmp_path / "in.jsonl"), "--order", "input", "--summary", str(tmp_path / "s.json"))
        async with batch_process(tmp_path, FakeHead(), *arguments, stdout=stdout.fileno()) as process:
            assert await process.wait() == 1, said(tmp_path)
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert [record["engine"]["line"] for record in records] == list(range(1, 42))
    assert [record["error"]["type"] for record in records if record["error"]] == ["bad_line"]
    assert json.loads((tmp_path / "s.json").read_text())["ok"] == 40


async def test_strict_reads_a_pipe_twice(tmp_path: Path) -> None:
    head = FakeHead()
    data = b"".join(b'{"prompt":"p %d","max_tokens":2}\n' % place for place in range(2000))
    for tail, code, count in ((b"", 0, 2000), (b"bad\n", 2, 0)):
        out = tmp_path / f"{code}.jsonl"
        arguments = ("--strict", "-o", str(out), "--progress", "none")
        async with batch_process(tmp_path, head, *arguments, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            await process.stdin.send_all(data + tail)
            await process.stdin.aclose()
            assert await process.wait() == code, said(tmp_path)
        assert out.read_bytes().count(b"\n") == count


async def test_requests_on_a_daemon_come_last(tmp_path: Path) -> None:
    head = FakeHead()
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 1}])
    arguments = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "o"), "--default", "temperature=0.5")
    async with batch_process(tmp_path, head, *arguments) as process:
        assert await process.wait() == 0
    assert head.submissions[0].priority == 10 and head.submissions[0].sampling.temperature == 0.5
