"""Pushes while a prompt is computed, between two real processes: all pages arrive, chunk by chunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.bench import pushing
from engine.bench.pushing import PushingOptions, describe_pushing, measure_pushing
from engine.bench_cli import bench_link
from engine.errors import ConfigError
from tests.cli.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_pages_of_each_chunk_arrive(model: str) -> None:
    lines: list[str] = []
    asked = PushingOptions(model=model, pages=(2, 5), chunk=128, samples=2)
    record: dict[str, Any] = measure_pushing(asked, ["engine", "bench", "link"], lines.append)
    assert record["bench"] == "link" and record["settings"]["chunk"] == 128
    short, long = record["runs"]
    assert short["arrived"] and long["arrived"], "checksums of both processes are the same"
    assert (short["tokens"], long["tokens"]) == (128, 320)
    assert (short["pushes"], long["pushes"]) == (1, 3), "two pages at a time"
    for run in (short, long):
        whole = run["pages"] * run["page_bytes"] + run["slab_bytes"]
        assert run["bytes"] == run["after"]["bytes"] == whole
        assert 0.8 * whole < run["by_layer"]["bytes"] <= whole
        assert run["exposed_us"] > 0 and len(run["samples"]) == 2
        assert run["by_layer"]["descriptors"] > run["after"]["descriptors"]
    assert len(lines) == 9 and "exposed" in lines[-1]
    assert [line for line in lines if "first prompt" in line] == [
        f"{pages} pages: those of a first prompt have arrived" for pages in (2, 5)
    ]
    assert "WRONG" not in lines[-1] and "WRONG" in describe_pushing(long | {"arrived": False})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (PushingOptions(chunk=100), "--chunk 100 must be a multiple of a page's 64 tokens"),
        (PushingOptions(layers=3), "--layers cuts a model of dummy weights"),
        (PushingOptions(pages=(1 << 20,)), "--pages 1048576 are 67108864 tokens; the model takes"),
    ],
)
def test_what_can_not_be_measured_is_refused(asked: PushingOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure_pushing(asked, [], print)


def test_the_command_says_of_what_arrived_elsewhere(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = CliRunner().invoke(bench_link, ["--chunk", "64"])
    assert refused.exit_code == 2 and "--chunk needs --while-prefill" in refused.output
    run_prompt = pushing._run_prompt

    async def mistake(bench: Any, loop: Any, number: int, pages: int) -> list[int]:
        return (await run_prompt(bench, loop, number, pages))[::-1]

    monkeypatch.setattr(pushing, "_run_prompt", mistake)
    file = tmp_path / "link.json"
    # In this process: a further one costs as much as all else here.
    asked = f"--while-prefill --model {model} --pages 2 --chunk 64 --samples 1 --output-json {file}"
    done = CliRunner().invoke(bench_link, asked.split(), standalone_mode=False)
    assert done.return_value == 1 and "WRONG: other bytes arrived" in done.stdout, done.output
    record = json.loads(file.read_text())
    assert record["kind"] == "while a prompt is computed" and record["settings"]["chunk"] == 64
    assert [(run["pages"], run["arrived"]) for run in record["runs"]] == [(2, False)]
