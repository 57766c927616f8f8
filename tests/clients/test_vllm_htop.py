"""vllm-htop finds what it shows in /metrics: who runs and waits, tokens, their rates, times to first tokens."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from tests.clients.running import Client, post, running_engine

pytestmark = pytest.mark.clients
JSON = ("--output", "json", "--no-gpu-detect")


def test_vllm_htop_shows_a_request_while_it_runs_and_the_tokens_after_it(tmp_path):
    client = Client("vllm-htop", tmp_path)
    body = {"prompt": "The sea is", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    seen = tmp_path / "seen.jsonl"
    with running_engine(tmp_path) as engine:
        before = json.loads(client.run("vllm-htop", "--url", engine.url, "--once", *JSON, within_s=20))
        (replica,) = before["replicas"]
        assert (replica["status"], replica["model"], replica["running"]) == ("OK", "nano", 0)
        assert replica["lifetime"]["gen_tokens_total"] == 0
        request = urllib.request.Request(engine.url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            with client.started("vllm-htop", "--url", engine.url, "--interval", "1", *JSON, output=seen):
                deadline = time.monotonic() + 30
                while not any(each["running"] and each["throughput"]["gen_tokens_per_s"] for each in replicas(seen)):
                    assert time.monotonic() < deadline, seen.read_text()
                    time.sleep(0.1)
        whole = post(engine, "/v1/completions", {"prompt": "The sea is", "max_tokens": 8, "ignore_eos": True})
        deadline = time.monotonic() + 30
        while True:
            after = json.loads(client.run("vllm-htop", "--url", engine.url, "--once", *JSON, within_s=20))
            (replica,) = after["replicas"]
            if not replica["running"] and replica["lifetime"]["prompt_tokens_total"] == 8:
                break
            assert time.monotonic() < deadline, after
        assert whole["usage"]["prompt_tokens"] == 4 and replica["lifetime"]["gen_tokens_total"] >= 2 + 8
        latency = replica["latency_seconds"]
        assert all(latency[name]["p95"] > 0 for name in ("ttft", "tpot", "e2e", "queue"))
        assert after["aggregate"]["up"] == 1
        # The first was given up in the middle.
        assert replica["lifetime"]["requests_total"] == 2 and 0 <= replica["kv_pct"] <= 100
        shown = client.run("vllm-htop", "--url", engine.url, "--once", "--no-gpu-detect", within_s=20)
        assert "Prompt tokens (life)" in shown and "error" not in shown.lower()


def replicas(seen):
    """Those of all polls so far. The last line may be half written."""
    return [json.loads(line)["replicas"][0] for line in seen.read_text().splitlines(keepends=True) if line[-1] == "\n"]
