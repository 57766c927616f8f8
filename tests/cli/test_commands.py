"""Commands as people and scripts call them: exit codes, and which stream says what."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.actors.head_process import head_process

MODEL = "tests/oracle/v41-tiny"


def engine(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True, timeout=60, check=False,
        env={**kept, "PYTHONPATH": os.getcwd(), **environ},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--nonsense"], "No such option"),
        (["statsu"], "Did you mean 'status'?"),
        (["status", "--jsn"], "Did you mean '--json'?"),
        (["up", "--timeout", "5s"], "--timeout is for --wait ready"),
        (["down", "--now", "--drain", "5s"], "exclude each other"),
        (["down", "--drain", "soon"], "'soon' is not a duration"),
        (["up", "--set", "limits.restart=1"], "did you mean 'limits.restarts'?"),
        (["config", "check", "--model", "/nowhere"], "/nowhere/config.json does not exist"),
    ],
)
def test_usage_and_configuration_errors_end_with_2(arguments, hint):
    done = engine(*arguments)
    assert done.returncode == 2 and hint in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_daemon_the_command_to_start_one_is_told(tmp_path, command):
    done = engine(command, "--dir", str(tmp_path))
    assert done.returncode == 4 and done.stdout == ""
    assert f"engine up --detach --wait ready --dir {tmp_path}" in done.stderr


def test_config_show_prints_data_and_origins():
    done = engine("config", "show", "--json", "--origin", "--model", MODEL, ENGINE_LIMITS__CLIENTS="7")
    data = json.loads(done.stdout)
    assert done.returncode == 0 and data["schema"] == 1
    assert data["values"]["limits.clients"] == 7
    assert data["origins"]["limits.clients"] == "variable ENGINE_LIMITS__CLIENTS"
    assert data["origins"]["model"] == "flag --model"
    assert set(data["values"]) == set(data["origins"])


def test_what_config_show_prints_is_a_configuration_file(tmp_path):
    shown = engine("config", "show", "--model", MODEL, "--set", "limits.restarts=9")
    file = tmp_path / "engine.toml"
    file.write_text(shown.stdout.replace("[0]", '"0-0"').replace("[1]", '"1-1"'))
    again = engine("config", "show", "-c", str(file))
    assert again.returncode == 0, again.stderr
    assert again.stdout == shown.stdout


async def test_status_and_down_of_a_running_engine(tmp_path):
    with head_process(tmp_path) as head:
        await head.wait_ready()
        directory = head.directory.path
        told = engine("status", "--json", ENGINE_DIR=directory)
        data = json.loads(told.stdout)
        assert told.returncode == 0 and data["schema"] == 1 and data["ready"] is True
        assert [rank["role"] for rank in data["ranks"]] == ["prefill", "decode"]
        assert data["ranks"][0]["snapshot"]["pages_total"] == 64
        table = engine("status", "--dir", directory)
        assert table.returncode == 0 and "ready" in table.stdout
        rows = [line.split()[:2] for line in table.stdout.splitlines() if line[:2] in ("p0", "d1")]
        assert rows == [["p0", "ready"], ["d1", "ready"]]
        down = engine("down", "--dir", directory)
        assert down.returncode == 0 and down.stdout == ""
        assert head.process.wait(5) == 0


async def test_down_now_does_not_wait_for_requests(tmp_path):
    from tests.actors.fake_rank import STUCK_SEED
    from tests.actors.head_process import talking_client, wait_for

    with head_process(tmp_path) as head:
        await head.wait_ready()
        async with talking_client(head) as client:
            client.submit(1, [1], seed=STUCK_SEED)
            await wait_for(lambda: head.named("client.join") or None, 5)
            assert engine("down", "--now", "--dir", head.directory.path).returncode == 0
            assert head.process.wait(5) == 0


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m engine config schema | head -c 10; echo ${{PIPESTATUS[0]}}", shell=True, text=True,
        executable="/bin/bash", capture_output=True, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("\n0\n") or done.stdout.rstrip().endswith("0")
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_daemon_that_can_not_start_reports_why_and_its_code(tmp_path):
    done = engine(
        "up", "--detach", "--wait", "ready", "--timeout", "40s", "--model", MODEL, "--dir", str(tmp_path / "run"),
        "--set", "num_pages=20", "--set", "max_model_tokens=512", "--set", "replay_rows=1",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "replay_rows must be 0 or at least the window" in done.stderr
    assert (tmp_path / "run" / "engine.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("spoil", ["file", "writable"])
def test_an_unsafe_runtime_directory_is_refused(tmp_path, spoil):
    directory = tmp_path / "run"
    if spoil == "file":
        directory.write_text("x")
    else:
        directory.mkdir()
        directory.chmod(0o777)
    done = engine("up", "--model", MODEL, "--dir", str(directory))
    assert done.returncode == 2 and "runtime directory" in done.stderr
