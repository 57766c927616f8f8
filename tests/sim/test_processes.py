"""`engine up --device sim`: a whole rack in one process on the real clock, asked and changed as a real one is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main

RACK = """
like = "showroom"
[cluster]
start_s = 0.3
start_files = 2
[experts]
loads_s = 1
load_bytes_per_s = 1e12
link_bytes_per_s = 20e9
max_bytes_per_step = 100_000_000
[load]
inflight = 160
prompt = [32, 128]
"""
"""The showroom with shorter waits."""
DEADLY = """
[cluster]
prefill = 1
decode = 2
vocab_size = 8192
num_pages = 256
[load]
requests = 300
arrive_s = 60
prompt = [10, 120]
output = [5, 60]
[swarm]
kinds = ["crash"]
per_s = 1
"""
PATIENCE_S = 30.0
"""For what is asked again and again."""


def run_engine(*arguments: str, script: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    program = ["-c", script] if script else ["-m", "engine"]
    return subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, timeout=90, check=False,
        env={**environment, **variables, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


@contextlib.contextmanager
def open_rack(scenario: str) -> Iterator[str]:
    """The directory of a rack that is ready; its file is `here.toml` in it."""
    with tempfile.TemporaryDirectory(prefix="sim", dir="/tmp") as short:  # a socket's path has few characters
        source = Path(short, "here.toml")
        source.write_text(scenario)
        directory = f"{short}/e"
        up = run_engine(
            "up", "--device", "sim", "--scenario", str(source), "--dir", directory, "--detach", "--wait", "ready",
            "--timeout", "60s",
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        assert up.stderr.startswith("here (simulated): "), up.stderr
        try:
            yield directory
        finally:
            down = run_engine("down", "--dir", directory, "--now")
        assert down.returncode == 0, down.stderr
        log = Path(directory, "engine.log").read_text()
        assert "head.simulated" in log.splitlines()[0] and "Traceback" not in log


def ask_status(directory: str) -> dict[str, Any]:
    asked = run_engine("status", "--json", "--dir", directory)
    assert asked.returncode == 0, asked.stderr
    status: dict[str, Any] = json.loads(asked.stdout)
    return status


def test_a_rack_that_nobody_built_is_looked_at_planned_for_and_cured() -> None:
    with open_rack(RACK) as directory:
        until = time.monotonic() + PATIENCE_S
        while True:
            status = ask_status(directory)
            if [rank["state"] for rank in status["ranks"]] == ["ready"] * 72:
                break
            assert time.monotonic() < until, status  # one rank of each role is enough to serve
        assert status["model"] == "here (simulated)"
        assert {rank["pid"] for rank in status["ranks"]} == {status["head_pid"]}
        parts = {(part["pool"], part["group"]): part for part in status["experts"]}
        assert sorted(parts) == [*(("decode", n) for n in range(2)), *(("prefill", n) for n in range(4))]
        while (plan := run_engine("rebalance", "plan", "--group", "1", "--dir", directory, "--json")).returncode:
            assert time.monotonic() < until, plan.stderr  # no loads were reported yet
        applied = run_engine("rebalance", "apply", "--group", "1", "--yes", "--dir", directory)
        assert applied.returncode == 0, applied.stdout + applied.stderr
        before, after = (
            next(part for part in seen["experts"] if (part["pool"], part["group"]) == ("decode", 1))
            for seen in ({"experts": [json.loads(plan.stdout)["part"]]}, ask_status(directory))
        )
        assert after["skew"]["max_over_mean"] < before["skew"]["max_over_mean"] - 0.3
        assert after["epoch"] > before["epoch"]
        # What operators end breaks no promise: `open_rack` looks for one at the end.
        oldest = json.loads(run_engine("requests", "--limit", "1", "--json", "--dir", directory).stdout)["requests"][0]
        cancelled = run_engine("cancel", str(oldest["request"]), "--yes", "--dir", directory)
        drained = run_engine("drain", "d20", "--yes", "--dir", directory)
        assert cancelled.returncode == drained.returncode == 0, cancelled.stderr + drained.stderr
        metrics = run_engine("metrics", "--dir", directory)
        assert metrics.returncode == 0 and "engine:ready 1.0" in metrics.stdout


def test_simulated_ranks_die_come_back_and_cost_nobody_an_answer(tmp_path: Path) -> None:
    lines = [{"custom_id": f"r{n}", "prompt": f"number {n}", "max_tokens": 5 + n} for n in range(6)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open_rack(DEADLY) as directory:
        batch = run_engine("batch", "--connect", directory, "-i", str(source), "-o", str(target), "--retry", "100")
        assert batch.returncode == 0, batch.stderr
        until = time.monotonic() + PATIENCE_S
        came_back: set[int] = set()
        while not came_back:
            assert time.monotonic() < until, "no rank died and came back"
            ranks = ask_status(directory)["ranks"]
            came_back = {rank["rank"] for rank in ranks if rank["generation"] > 1 and rank["state"] == "ready"}
        log = Path(directory, "engine.log").read_text()
        assert "rank.down" in log and "killed by SIGKILL" in log and "rank.restart" in log
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert {record["custom_id"] for record in records} == {f"r{n}" for n in range(6)}
    assert not any(record.get("error") for record in records)


PLANTED = """
import sys
from engine.cli import main
from engine.sim.device import SimDevice
run_chunk = SimDevice._run_chunk

def wrong(self, chunk, ids):
    sampled = run_chunk(self, chunk, ids)
    return None if sampled is None else sampled + 1

SimDevice._run_chunk = wrong
sys.exit(main(sys.argv[1:]))
"""


def test_a_broken_promise_ends_the_rack_and_says_which() -> None:
    with tempfile.TemporaryDirectory(prefix="sim", dir="/tmp") as short:
        source = Path(short, "here.toml")
        source.write_text(DEADLY.split("[swarm]")[0])
        rack = ("up", "--device", "sim", "--scenario", str(source), "--dir", f"{short}/e")
        up = run_engine(*rack, script=PLANTED, TMPDIR=short)  # where the report of the bug goes
    assert up.returncode == 70, up.stderr
    assert "Violation: [stream] " in up.stderr


def test_two_signals_end_a_rack_in_the_foreground_and_the_first_one_drains_it() -> None:
    with tempfile.TemporaryDirectory(prefix="sim", dir="/tmp") as short:
        source = Path(short, "here.toml")
        long = DEADLY.split("[swarm]")[0].replace("output = [5, 60]", "output = [1500, 1500]\ninflight = 4")
        source.write_text(long)
        rack = ("up", "--device", "sim", "--scenario", str(source), "--dir", f"{short}/e", "--log-format", "json")
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", *rack], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stderr is not None
        events: list[str] = []
        try:
            for line in process.stderr:
                events.append(json.loads(line)["event"])
                if events[-1] in ("head.ready", "head.drain"):
                    process.send_signal(signal.SIGINT)
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.stderr.close()
    assert code == 130 and events[0] == "head.simulated"
    assert events.index("head.ready") < events.index("head.drain") < events.index("head.gone")
    assert events.count("head.signal") == 2


def test_nothing_that_is_pretended_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--device", "sim"]) == 2
    assert "device sim has nothing to measure" in capsys.readouterr().err
