"""The bare forward: it computes what a rank's device computes, and its command leaves a record."""

from __future__ import annotations

import array
import json
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from engine.bench.forward import GREEDY, BareModel, StepCase, measure_forward, open_bare_model
from engine.bench.prompts import make_prompts
from engine.bench_cli import forward
from engine.config import ClusterConfig
from engine.core.plan import DecodeRow, PrefillChunk, StepPlan
from engine.errors import ConfigError
from engine.model.device import open_torch_device
from engine.settings import resolve_config
from tests.cli.test_commands import engine
from tests.cli.tiny_model import write_tiny_model

SMALL = ("page_tokens=16", "num_pages=40", "num_slabs=4", "max_model_tokens=256", "limits.prefill_chunk_tokens=32")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return resolve_config(None, flags={"model": str(model)}, sets=SMALL, environ={}).config


@pytest.fixture(scope="module")
def bare(config: ClusterConfig) -> BareModel:
    return open_bare_model(config)


async def decode(config: ClusterConfig, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """The same by a rank's device and its plans."""
    device = await open_torch_device(config.rank_config(1), lambda *_: None)
    completions: list[list[int]] = []
    per_row = 4
    for slab, prompt in enumerate(prompts):
        pages = tuple(range(slab * per_row, (slab + 1) * per_row))
        for start in range(0, len(prompt), 32):
            ids = memoryview(array.array("i", prompt[start : start + 32]).tobytes())
            sample = GREEDY if start + 32 >= len(prompt) else None
            chunk = PrefillChunk(request=slab, slab=slab, start=start, tokens=ids, pages=pages, sample=sample)
            result = await device.wait(device.submit(StepPlan(slab, (chunk,), ())))
        assert result.chunk_tokens[0] is not None
        completions.append([result.chunk_tokens[0]])
    for step in range(steps):
        rows = tuple(
            DecodeRow(
                request=slab,
                slab=slab,
                position=len(prompt) + step,
                token=None,
                pages=tuple(range(slab * per_row, (slab + 1) * per_row)),
                sampling=GREEDY,
            )
            for slab, prompt in enumerate(prompts)
        )
        result = await device.wait(device.submit(StepPlan(100 + step, (), rows)))
        for completion, token in zip(completions, result.row_tokens, strict=True):
            completion.append(token)
    await device.aclose()
    return completions


def test_the_bare_model_computes_what_a_rank_computes(config: ClusterConfig, bare: BareModel) -> None:
    sample = bare.run_steps(StepCase(rows=3, context=37, steps=4, ahead=5), seed=11)
    prompts = make_prompts(3, 37, config.vocab_size, 11)
    assert sample.tokens.tolist() == trio.run(decode, config, prompts, 9)
    assert len(sample.times_ms) == 4 and min(sample.times_ms) > 0


def test_what_does_not_fit_is_refused_with_the_sizes(bare: BareModel) -> None:
    with pytest.raises(ConfigError, match="5 rows of 33 tokens need 5 slabs and 15 pages; the arena has 4 and 40"):
        bare.run_steps(StepCase(rows=5, context=32, steps=1), seed=1)
    with pytest.raises(ConfigError, match="more than max_model_tokens"):
        bare.run_prefill(bare.info.max_model_tokens, 32, seed=1)


def test_every_sample_is_in_the_record(bare: BareModel) -> None:
    said: list[str] = []
    cases = [StepCase(1, 20, 2), StepCase(2, 20, 2)]
    record = measure_forward(bare, cases, [48], samples=2, chunk=32, seed=1, tell=said.append)
    assert [run["kind"] for run in record["runs"]] == ["decode", "decode", "prefill"] * 2
    assert len(said) == 6
    assert [case["rows"] for case in record["summary"]["decode"]] == [1, 2]
    for case in record["summary"]["decode"]:
        found = [run for run in record["runs"] if run.get("rows") == case["rows"]]
        assert case["step_ms_least"] == min(run["step_ms_min"] for run in found)
        assert case["step_ms"]["min"] <= case["step_ms"]["median"] <= case["step_ms"]["max"]
    (prefill,) = record["summary"]["prefill"]
    assert prefill["tokens"] == 48 and prefill["tokens_per_s"]["min"] > 0


def test_the_command_prints_a_table_and_writes_the_record(config: ClusterConfig, tmp_path: Path) -> None:
    sets = [word for one in SMALL for word in ("--set", one)]
    file = tmp_path / "forward.json"
    done = engine(
        *("bench", "forward", "--model", config.model, *sets, "--rows", "1,2", "--context", "20", "--steps", "2"),
        *("--samples", "1", "--prefill", "32", "--output-json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout and "forward 2 rows at 20" in done.stderr
    record = json.loads(file.read_text())
    assert record["schema"] == 1 and record["bench"] == "forward" and record["config_digest"] == config.digest
    assert record["settings"]["rows"] == [1, 2] and record["command"].startswith("engine bench forward ")
    assert record["machine"]["cores"] >= 1 and record["machine"]["packages"]["torch"]
    assert len(record["runs"]) == 3


def test_the_command_serves_the_same_cases(config: ClusterConfig, tmp_path: Path) -> None:
    sets = [word for one in SMALL for word in ("--set", one)]
    file = tmp_path / "forward.json"
    # In this process: a further one costs as much as all that it measures.
    asked = ["--model", config.model, *sets, "--rows", "2", "--context", "20", "--steps", "3"]
    done = CliRunner().invoke(
        forward, [*asked, "--samples", "2", "--prefill", "", "--served", "--output-json", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "gap ms" in done.stdout and "emit us" in done.stdout and "admission of 131072 ids" in done.stderr
    record = json.loads(file.read_text())
    assert [run["kind"] for run in record["runs"]] == ["decode"] * 2 + ["served"] * 2
    (entry,) = record["summary"]["decode"]
    assert entry["served_ms"]["min"] > 0
    assert entry["gap_ms"] == pytest.approx(entry["served_ms"]["median"] - entry["step_ms"]["median"], abs=1e-3)
    assert [found["ids"] for found in record["admissions"]] == [1024, 131072]


@pytest.mark.parametrize("command", ["forward", "serve"])
def test_ranks_on_gpus_are_not_measured_as_ranks_on_cpus(command: str) -> None:
    done = engine("bench", command, "--model", "tests/oracle/v4-tiny-quant", ENGINE_DEVICE="cuda")
    assert done.returncode == 2 and "the configuration has device cuda" in done.stderr
