"""Hundreds of lines through the real engine, some bad in every way that we know of: each is accounted for once."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import trio

from tests.batch.hostile import HostileLine, make_lines
from tests.batch.rig import read_records, write_lines
from tests.e2e.batch_process import CONTEXT, batch_run
from tests.e2e.batch_samples import Samples

MAX_TOKENS = 4
SAMPLE_S = 0.5
GROWTH_MIB = {"batch": 4.0, "head": 4.0, "prefill0": 24.0, "decode1": 24.0}
"""Per process, what may come on top between 20 % of the lines and the end. Ranks: torch keeps buffers for the largest
step so far, and one with longer prompts may come late. Over 20,000 lines: see docs/measurements.
"""


def compare_fates(lines: list[HostileLine], output: Path) -> dict[str, int]:
    """Counts by fate; raises unless every line has the one record that it must have, bad ones with reason and place."""
    answers = read_records(output)
    errors = read_records(output.with_name(f"{output.stem}.errors.jsonl"))
    got = [(record["custom_id"], record["engine"]["line"], "answer") for record in answers]
    got += [(record["custom_id"], record["line"], record["error"]["type"]) for record in errors]
    wanted = [(line.custom_id, place, line.fate) for place, line in enumerate(lines, 1) if line.fate != "blank"]
    assert sorted(got) == sorted(wanted), set(got) ^ set(wanted)
    assert all(record["error"]["message"] and record["engine"]["line"] == record["line"] for record in errors)
    assert all(record["engine"]["pushed_bytes"] > 0 for record in answers)
    fates = collections.Counter(line.fate for line in lines)
    return dict(sorted(fates.items()))


@pytest.mark.parametrize("count", [800, pytest.param(2000, marks=pytest.mark.slow)])
async def test_lines_meet_their_fates_in_flat_memory(count: int, tmp_path: Path) -> None:
    """One per cent bad would be few lines; there are more kinds of bad lines than that, and each is there."""
    lines = make_lines(count, 0.01, 7, max_model_tokens=CONTEXT, max_tokens=MAX_TOKENS)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [line.data for line in lines])
    samples = Samples()
    async with batch_run(source, output, "--default", f"max_tokens={MAX_TOKENS}") as run:
        with trio.fail_after(300):
            while run.process.poll() is None:
                samples.take(run)
                await trio.sleep(SAMPLE_S)
        assert run.process.returncode == 1, run.said()
    fates = compare_fates(lines, output)
    assert fates["answer"] > 0.8 * count and sum(fates.values()) == count
    for name, figures in samples.figures(len(lines)).items():
        grown = figures["rss_mib_at_end"] - figures["rss_mib_at_20_percent"]
        assert grown < GROWTH_MIB[name], (name, figures)
