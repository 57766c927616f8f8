"""The engine as a whole: real head, real ranks, a real (tiny) model, started the ways people start it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from engine.cli import main
from engine.compose import PrivateCluster, start_cluster
from engine.runtime import RuntimeDirectory
from engine.settings import resolve_config
from tests.actors.head_process import is_gone, talking_client, wait_for
from tests.cli.test_commands import engine
from tests.cli.tiny_model import write_tiny_model
from transport.messages import RequestFailed, RequestFinished

SMALL = ("page_tokens=16", "num_pages=600", "num_slabs=8")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


async def complete(requests_path: str, prompts: list[list[int]], *, count: int = 6) -> list[list[int]]:
    head = SimpleNamespace(directory=SimpleNamespace(requests_socket=requests_path))
    async with talking_client(head) as client:
        for request, prompt in enumerate(prompts):
            client.submit(request, prompt, max_tokens=count, ignore_eos=True)
        for request in range(len(prompts)):
            end = await client.end_of(request, 30)
            assert isinstance(end, RequestFinished) and end.completion_tokens == count
            assert client.starts[request].pushed_bytes > 0
        return [client.tokens[request] for request in range(len(prompts))]


async def refused_grammar(requests_path: str) -> RequestFailed:
    head = SimpleNamespace(directory=SimpleNamespace(requests_socket=requests_path))
    async with talking_client(head) as client:
        client.submit(1, [5, 6, 7], grammar='start: "a"')
        end = await client.end_of(1, 30)
        assert isinstance(end, RequestFailed), end
        return end


PROMPTS = [[5 + request, 6, 7, 8] * 9 for request in range(5)]


def test_a_daemon_starts_answers_refuses_a_twin_and_goes(model, tmp_path):
    directory = str(tmp_path / "run")
    sets = [word for one in SMALL for word in ("--set", one)]
    command = ["up", "--detach", "--model", str(model), "--dir", directory, *sets]
    up = engine(*command, "--wait", "ready", "--timeout", "50s")
    try:
        assert up.returncode == 0, up.stderr
        assert up.stdout == "" and "engine runs: pid" in up.stderr
        twin = engine(*command)
        assert twin.returncode == 5 and "an engine is running" in twin.stderr
        first = trio.run(complete, RuntimeDirectory(directory).requests_socket, PROMPTS)
        again = trio.run(complete, RuntimeDirectory(directory).requests_socket, PROMPTS[::-1])
        assert again[::-1] == first, "greedy answers do not depend on the order of requests"
        time.sleep(0.5)  # two snapshots
        data = json.loads(engine("status", "--json", "--dir", directory).stdout)
        assert data["finished"] == 10 and data["failed"] == 0
        decode = next(rank["snapshot"] for rank in data["ranks"] if rank["role"] == "decode")
        assert decode["running"] == 0 and decode["pages_free"] == decode["pages_total"] == 600
    finally:
        down = engine("down", "--dir", directory)
    assert down.returncode == 0, down.stderr
    assert set(os.listdir(directory)) == {"head.lock", "engine.log"}
    log = Path(directory, "engine.log").read_text()
    assert log.count("request.finish") == 10 and "phase=weights" in log


async def test_a_private_cluster_serves_survives_a_rank_and_leaves_nothing(model, tmp_path):
    config = resolve_config(None, flags={"model": str(model)}, sets=SMALL, environ={}).config
    with open(tmp_path / "log", "wb") as log:  # noqa: ASYNC230
        async with start_cluster(config, stderr=log) as cluster:
            assert isinstance(cluster, PrivateCluster)
            await cluster.wait_ready(50)
            # Its tokenizer is of a kind that grammars can not use: said to who asks, and no step dies of it.
            refusal = await refused_grammar(cluster.requests_path)
            assert refusal.code == "bad_request" and not refusal.retryable
            assert "grammars need the model's tokenizer" in refusal.message and str(model) in refusal.message
            first = await complete(cluster.requests_path, PROMPTS)
            pids = _pids(tmp_path / "log")
            os.kill(pids[0], signal.SIGKILL)
            await wait_for(lambda: is_gone(pids[0]), 5)
            await trio.sleep(0.5)
            await cluster.wait_ready(50)
            assert await complete(cluster.requests_path, PROMPTS) == first
            private = Path(cluster.requests_path).parent
            head_pid = cluster.process.pid
    for pid in [head_pid, *_pids(tmp_path / "log")]:
        await wait_for(lambda pid=pid: is_gone(pid), 5)
    assert private.name not in os.listdir(private.parent)


def _pids(log: Path) -> list[int]:
    lines = [line for line in log.read_text().splitlines() if " rank.start " in line]
    return [int(line.rsplit("pid=", 1)[1]) for line in lines]


def test_doctor_names_what_is_missing_and_what_is_there(model, tmp_path, capsys):
    healthy = engine("doctor", "--json", "--model", str(model), "--dir", str(tmp_path / "run"))
    data = json.loads(healthy.stdout)
    assert healthy.returncode == 0 and data["healthy"] is True and data["schema"] == 1
    levels = {finding["subject"]: finding["level"] for finding in data["findings"]}
    assert {"python", "torch", "nixl", "cpus", "memory", "model", "directory"} <= set(levels)
    assert data["facts"]["model"]["weight_bytes"] > 1 << 20 and data["facts"]["machine"]["cpus"] == len(
        os.sched_getaffinity(0)
    )
    os.mkdir(tmp_path / "open")
    os.chmod(tmp_path / "open", 0o777)
    assert main(["doctor", "--model", str(tmp_path), "--dir", str(tmp_path / "open")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fail model") for line in lines) and any(
        line.startswith("fail directory") for line in lines
    )
    assert any("-> name a folder with config.json" in line for line in lines)
