"""What is said of a group's steps, as far as a machine without GPUs can tell."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from engine.bench import group
from engine.bench.cases import parse_case
from engine.bench.group import _join, measure_group
from engine.bench.rig import StepOptions
from engine.errors import ConfigError


def run_of(**changes: Any) -> dict[str, Any]:
    return {
        "case": "b16",
        "median_us": 2000.0,
        "samples_us": [1990.0, 2000.0, 2010.0],
        "bound_us": 1000.0,
        "bytes": {"total": 4300, "experts": 4000, "dense": 200, "records": 100},
        "experts_touched": {"mean": 60.0, "per_layer": [50, 70]},
        "share_of_bound": 0.5,
        "finite": True,
        "graph_equals_eager": True,
    } | changes


def test_a_groups_step_is_measured_against_the_rank_with_most_to_read() -> None:
    more = {"bound_us": 1200.0, "experts_touched": {"mean": 75.0, "per_layer": [70, 80]}}
    joined = _join([run_of(), run_of(median_us=2001.0, **more)])
    assert (joined["median_us"], joined["bound_us"], joined["share_of_bound"]) == (2000.0, 1200.0, 0.6)
    assert joined["experts_touched"]["mean"] == 75.0
    assert [rank["experts_touched"] for rank in joined["ranks"]] == [60.0, 75.0]
    assert joined["finite"] and joined["graph_equals_eager"]


@pytest.mark.parametrize("key", ["finite", "graph_equals_eager"])
def test_what_is_wrong_on_one_rank_is_wrong(key: str) -> None:
    assert not _join([run_of(), run_of(**{key: False})])[key]


def test_a_rank_that_fails_fails_the_case() -> None:
    failed = {"case": "b16", "error": "place 1 was silent in the dispatch of layer 3 in step 7"}
    assert _join([run_of(), failed]) == failed


def test_a_group_needs_a_gpu_for_each_rank() -> None:
    count = torch.cuda.device_count()
    options = StepOptions("v4-flash", (parse_case("b1=1@1k"),), ranks=count + 2)
    with pytest.raises(ConfigError, match=f"a group of {count + 2} needs as many GPUs, found {count}"):
        measure_group(options, [], lambda _: None)


def test_a_rank_that_ends_or_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(run_of())
    assert group._receive(ours, 1) == run_of()
    monkeypatch.setattr(group, "CASE_S", 0.01)
    with pytest.raises(ConfigError, match=r"rank 1 of the group has said nothing for 0\.01 s"):
        group._receive(ours, 1)
    theirs.close()
    with pytest.raises(ConfigError, match="rank 1 of the group has ended"):
        group._receive(ours, 1)
    ours.close()
