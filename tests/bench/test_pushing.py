"""Pushes while a prompt is computed, between two real processes: all pages arrive, chunk by chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.bench.pushing import PushingOptions, describe_pushing, measure_pushing
from engine.bench_cli import bench_link
from engine.errors import ConfigError
from tests.cli.test_commands import engine
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
    assert len(lines) == 8 and "exposed" in lines[-1]
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


def test_the_command_has_options_of_its_own(model: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(bench_link, ["--chunk", "64"])
    assert refused.exit_code == 2 and "--chunk needs --while-prefill" in refused.output
    file = tmp_path / "link.json"
    done = engine(
        *("bench", "link", "--while-prefill", "--model", model, "--pages", "1", "--chunk", "64", "--samples", "1"),
        *("--quiet", "--output-json", str(file)),
    )
    assert done.returncode == 0 and file.exists(), done.stderr
