"""`engine up --device sim`: real processes, sockets and pushes on the real clock, with devices that compute nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def run_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True, timeout=90, check=False,
        env={**environment, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


def test_a_cluster_of_simulated_devices_answers_over_real_processes(tmp_path: Path) -> None:
    lines = [{"custom_id": f"r{n}", "prompt": f"number {n}", "max_tokens": 5 + n} for n in range(6)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with tempfile.TemporaryDirectory(prefix="sim", dir="/tmp") as short:  # a socket's path has few characters
        directory = f"{short}/e"
        up = run_engine(
            "up", "--device", "sim", "--dir", directory, "--detach", "--wait", "ready",
            "--timeout", "60s", "--set", "pools.decode.ranks=2",
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        try:
            batch = run_engine("batch", "--connect", directory, "-i", str(source), "-o", str(target))
            assert batch.returncode == 0, batch.stderr
        finally:
            down = run_engine("down", "--dir", directory, "--now")
    assert down.returncode == 0, down.stderr
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert {record["custom_id"] for record in records} == {f"r{n}" for n in range(6)}
    assert not any(record.get("error") for record in records)
