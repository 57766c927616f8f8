"""aiperf counts as the engine counts, in plain chats and in its AgentX scenario, and knows a context overflow."""

from __future__ import annotations

import json
import urllib.error

import pytest

from tests.clients.agent_traces import write_traces
from tests.clients.running import CHAT_TOKENS, TOKENIZER, Client, post, running_engine, word_biases

pytestmark = pytest.mark.clients
WARNINGS = ("Token Count Discrepancy", "Output Sequence Length Mismatch", "OSL mismatch")
OWN = ("--ui-type", "none", "--no-gpu-telemetry", "--workers-max", "1", "--record-processor-service-count", "1")


def profile(client, engine, place, *arguments):
    """What a run reported, its records, and the server's metrics as it read them. Its warnings are ours."""
    said = client.run(
        "aiperf", "profile", "--model", "nano", "--url", engine.url, "--endpoint-type", "chat",
        "--tokenizer", TOKENIZER, "--random-seed", "1", "--concurrency", "3", "--output-artifact-dir", place,
        "--extra-inputs", json.dumps({"logit_bias": word_biases(engine)}), *OWN, *arguments, within_s=240,
    )  # fmt: skip
    assert not any(words in said for words in WARNINGS), said
    assert (place / "profile_export_aiperf.json").exists(), said  # it ends with 0 also where it did not even start
    report = json.loads((place / "profile_export_aiperf.json").read_text())
    records = [json.loads(line) for line in (place / "profile_export.jsonl").read_text().splitlines()]
    server = json.loads((place / "server_metrics_export.json").read_text())["metrics"]
    assert report["error_summary"] == [] and not report["was_cancelled"] and report["is_complete"]
    assert report["usage_discrepancy_count"]["avg"] == report["osl_mismatch_count"]["avg"] == 0
    assert report["request_error_rate"]["avg"] == 0
    values = [{name: metric["value"] for name, metric in record["metrics"].items()} for record in records]
    for record, value in zip(records, values, strict=True):
        assert "error" not in record or record["error"] is None
        if record["metadata"]["benchmark_phase"] == "profiling":
            assert value["usage_completion_tokens"] == value["output_sequence_length"]
    return report, records, values, server


def test_aiperf_counts_the_tokens_of_chats_as_the_engine_does(tmp_path):
    client = Client("aiperf", tmp_path)
    with running_engine(tmp_path) as engine:
        report, _, values, server = profile(
            client, engine, tmp_path / "chat", "--streaming", "--isl", "128", "--osl", "24", "--request-count", "12",
            "--extra-inputs", "ignore_eos:true",
        )  # fmt: skip
    assert len(values) == report["completed_request_count"]["avg"] == 12
    for value in values:
        assert value["input_sequence_length"] == 128 and value["usage_prompt_tokens"] == 128 + CHAT_TOKENS
        assert value["usage_completion_tokens"] == 24 and value["usage_prompt_cache_read_tokens"] == 0
        assert 0 < value["time_to_first_token"] < value["request_latency"]
    assert total(server, "vllm:generation_tokens") == 12 * 24
    assert total(server, "vllm:prompt_tokens") == 12 * (128 + CHAT_TOKENS)
    assert 1 <= server["vllm:num_requests_running"]["series"][0]["stats"]["max"] <= 3
    assert server["vllm:time_to_first_token_seconds"]["series"][0]["stats"]["count"] == 12
    kinds = {metric["type"] for metric in server.values()}
    assert kinds == {"counter", "gauge", "histogram"}  # what it can not read is "unknown"


def test_the_agentx_scenario_runs_on_made_traces(tmp_path):
    client = Client("aiperf", tmp_path)
    write_traces(tmp_path / "traces")
    with running_engine(tmp_path) as engine:
        report, records, values, _ = profile(
            client, engine, tmp_path / "agentx", "--scenario", "inferencex-agentx-mvp", "--unsafe-override",
            "--input-file", tmp_path / "traces", "--custom-dataset-type", "weka_trace", "--benchmark-duration", "15",
        )  # fmt: skip
        refused = {"messages": [{"role": "user", "content": "far too long " * 9000}], "ignore_eos": True}
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(engine, "/v1/chat/completions", refused)
        with refusal.value as answer:
            error = answer.read().decode()
        assert refusal.value.code == 400
    # A run that counts has 900 s and a public set of traces. Only these two rules are broken here, both by the
    # client's own choice; errors or overflows would be a reason of their own.
    metadata = report["metadata"]
    assert metadata["scenario"] == "inferencex-agentx-mvp"
    assert metadata["submission_invalid_reasons"] == ["unsafe_override"]
    log = (tmp_path / "agentx" / "logs" / "aiperf.log").read_text()
    broken = [line for line in log.splitlines() if "Scenario violation" in line]
    assert len(broken) == 2
    assert any("--benchmark-duration" in line for line in broken) and any("weka_trace" in line for line in broken)
    phases = {record["metadata"]["benchmark_phase"] for record in records}
    assert phases == {"warmup", "profiling"}
    assert {record["metadata"]["agent_depth"] for record in records} == {0, 1}  # agents and their subagents
    assert any(value["usage_prompt_cache_read_tokens"] for value in values)
    assert all(0 < value["usage_prompt_tokens"] - value["input_sequence_length"] <= 16 for value in values)
    # The rule by which the scenario counts overflows, on what this engine says of one.
    code = "import sys; from aiperf.common.scenario.context_overflow import is_context_overflow_response as rule; " \
           "print(rule(body=sys.argv[1]))"  # fmt: skip
    assert client.run("python", "-c", code, error, within_s=60).splitlines()[-1] == "True"


def total(server, name):
    """What a counter rose by."""
    (series,) = server[name]["series"]
    return series["stats"]["total"]
