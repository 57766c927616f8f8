"""`engine bench serve` with the real thing: its own head and ranks, a tiny model, a few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.bench.serve import ServeOptions, check_options
from engine.errors import ConfigError
from engine.settings import resolve_config
from tests.cli.test_commands import engine
from tests.cli.tiny_model import write_tiny_model

SMALL = ("page_tokens=16", "num_pages=60", "num_slabs=4", "max_model_tokens=256", "limits.snapshot_s=50ms")
SETS = [word for one in SMALL for word in ("--set", one)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_a_run_measures_bare_and_served_and_leaves_a_record(model: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    done = engine(
        *("bench", "serve", "--model", model, *SETS, "--sequences", "1,2", "--prompt-tokens", "20"),
        *("--max-tokens", "12", "--repeat", "1", "--output-json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    assert "ratio_step_at_2" in done.stdout and "served    2 rows" in done.stderr
    record = json.loads(file.read_text())
    assert record["schema"] == 1 and record["bench"] == "serve"
    assert record["pools"] == {"prefill": 1, "decode": 1}
    assert [(run["kind"], run["sequences"]) for run in record["runs"]] == [
        ("bare", 1), ("bare", 2), ("served", 1), ("served", 2),
    ]  # fmt: skip
    for run in record["runs"][2:]:
        assert run["pushes"] == run["sequences"] and run["pushed_bytes"] > 0 and run["prompt_tokens_mean"] == 20
        assert run["handoff_us_p50"] >= run["push_us_p50"] > 0
        assert run["steady_tokens"] >= run["sequences"] and run["ttft_ms_min"] > 0
        assert {rank["role"] for rank in run["ranks"]} == {"prefill", "decode"}
        assert set(run["processes"]) == {"client", "head", "prefill0", "decode1"}
        assert run["processes"]["decode1"]["cpu_ms_per_step"] > 0
    ratios = record["summary"]["ratios"]
    assert {"ratio_step_at_1", "ratio_step_at_2", "ratio_cpu_at_1", "ratio_rate_2_to_1"} <= set(ratios)
    assert all(found["min"] > 0 for name, found in ratios.items() if not name.startswith("overhead"))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--sequences", "5"], "5 sequences can not run at once"),
        (["--sequences", "4", "--prompt-tokens", "230", "--max-tokens", "20"], "4 sequences of 230 + 20 tokens"),
        (["--sequences", "1,x"], "'1,x' is not a list of whole numbers above zero"),
        (["--sequences", ""], "--sequences is empty"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_starts(
    model: str, arguments: list[str], hint: str
) -> None:
    done = engine("bench", "serve", "--model", model, *SETS, *arguments)
    assert done.returncode == 2 and hint in done.stderr and done.stdout == ""


def test_more_decode_ranks_hold_more_sequences(model: str) -> None:
    options = ServeOptions(sequences=(8,), prompt_tokens=20, max_tokens=12, repeat=1, seed=1)
    config = resolve_config(None, flags={"model": model}, sets=[*SMALL, "pools.decode.ranks=2"], environ={}).config
    check_options(config, options)
    with pytest.raises(ConfigError, match=r"2 decode ranks .* hold 8"):
        check_options(config, ServeOptions((9,), 20, 12, 1, 1))
