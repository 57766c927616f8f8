"""A batch in a rank's loop: it generates what the bare model does, and its time and the processor's are told apart."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from engine.bench import served_cuda
from engine.bench.admission import AdmissionCase, describe_admission, measure_admission
from engine.bench.cases import parse_case
from engine.bench.forward import BareModel, StepCase, open_bare_model
from engine.bench.loop import open_loop
from engine.bench.rig import StepBench, StepOptions
from engine.bench.served import PARTS, ServedSample, Spending, describe_sample
from engine.bench.served_cpu import _serve, measure_served
from engine.bench.served_cuda import ServedBench
from engine.bench.served_group import describe_ranks, run_group
from engine.bench.served_rank import GroupCase
from engine.bench.step import describe_run, describe_served, measure_asked
from engine.config import ClusterConfig, ExpertsConfig
from engine.errors import ConfigError, EngineError
from engine.model.device import TorchDevice
from engine.model.ops import reference_ops
from engine.settings import resolve_config
from tests.bench.test_forward import SMALL
from tests.cli.tiny_model import write_tiny_model
from transport.messages import RequestFinished, ReservePages, Sampling

TINY = "tests/oracle/v4-tiny-quant"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return resolve_config(None, flags={"model": str(model)}, sets=SMALL, environ={}).config


@pytest.fixture(scope="module")
def bare(config: ClusterConfig) -> BareModel:
    return open_bare_model(config)


def serve(config: ClusterConfig, bare: BareModel, case: StepCase, *, split: bool = False) -> ServedSample:
    return trio.run(_serve, config.rank_config(config.decode.ranks[0]), bare, case, 7, split)


@pytest.mark.parametrize("split", [False, True])
def test_the_loop_generates_what_the_bare_model_does(config: ClusterConfig, bare: BareModel, split: bool) -> None:
    case = StepCase(rows=3, context=37, steps=5, ahead=4)
    sample = serve(config, bare, case, split=split)
    assert sample.tokens.tolist() == bare.run_steps(case, 7).tokens.tolist()
    assert len(sample.step_us) == len(sample.device_us) == 5 and min(sample.step_us) > 0
    found = describe_sample(sample)
    assert found["step_ms_min"] <= found["step_ms_median"] <= found["step_ms_max"]


def test_parts_are_within_what_the_two_threads_spent(config: ClusterConfig, bare: BareModel) -> None:
    sample = serve(config, bare, StepCase(rows=2, context=20, steps=8, ahead=2), split=True)
    parts = sample.parts_us
    assert tuple(parts) == PARTS and all(us > 0 for us in parts.values())
    on_loop = sum(us for name, us in parts.items() if name != "sample")
    assert on_loop <= sample.loop_us and parts["sample"] <= sample.worker_us
    assert serve(config, bare, StepCase(rows=2, context=20, steps=2)).parts_us == {}


def test_what_was_wrapped_is_as_it_was() -> None:
    class Owner:
        def work(self, until: int) -> int:
            while time.thread_time_ns() < until:
                pass
            return until

    owner, spending = Owner(), Spending()
    with spending.wrap(owner, "work", "plan"):
        until = time.thread_time_ns() + 2_000_000
        assert owner.work(until) == until
    assert "work" not in vars(owner)
    assert spending.parts_ns["plan"] > 1_500_000 and spending.parts_ns["emit"] == 0


def test_what_does_not_fit_a_rank_is_refused_with_the_sizes(config: ClusterConfig, bare: BareModel) -> None:
    with pytest.raises(ConfigError, match=r"5 rows are served together by limits.decode_rows \d+ and num_slabs 4"):
        serve(config, bare, StepCase(rows=5, context=32, steps=1))
    with pytest.raises(
        ConfigError, match="1 rows of 250 ids and 11 tokens need 17 pages and max_model_tokens above 260"
    ):
        serve(config, bare, StepCase(rows=1, context=250, steps=10))


async def test_a_request_that_fails_or_does_not_end_is_named(config: ClusterConfig, bare: BareModel) -> None:
    device: Any = TorchDevice(bare.model, bare.info)
    rank_config = config.rank_config(config.decode.ranks[0])
    try:
        async with open_loop(rank_config, device) as loop:
            with pytest.raises(EngineError, match=r"0 of 1 RequestFinished were told within 0\.05 s"):
                await loop.wait_for(loop.head, RequestFinished, 1, 0.05)
            word = ReservePages(request=7, attempt=1, prefill_rank=0, num_ids=100_000, generated=0, sampling=Sampling())
            loop.say_as_head(word)
            with pytest.raises(EngineError, match="request 7 failed: "):
                await loop.wait_for(loop.head, RequestFinished, 1, 5)
    finally:
        await device.aclose()


def test_runs_of_a_record_have_the_split_once(config: ClusterConfig, bare: BareModel) -> None:
    lines: list[str] = []
    runs = measure_served(config, bare, [StepCase(1, 20, 3)], samples=2, seed=1, tell=lines.append)
    assert len(runs) == len(lines) == 2
    assert [("parts_us_per_step" in run, run["kind"], run["sample"]) for run in runs] == [
        (True, "served", 0),
        (False, "served", 1),
    ]


def test_a_step_on_a_device_is_served_by_the_same_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_cuda, "STEPS", 8)
    monkeypatch.setattr(served_cuda, "AHEAD", 2)
    cases = (parse_case("a=2*1@40"), parse_case("b=2*4@64:3"))
    asked = StepOptions(TINY, cases, records="bf16", served=True)
    served = ServedBench(StepBench(asked, torch.device("cpu"), reference_ops()))
    found = served.measure(cases[0], 1000.0)
    assert found is not None and found["gap_us"] == found["median_us"] - 1000 and len(found["samples"]) == 3
    assert set(found["parts_us"]) == set(PARTS) and found["parts_us"]["submit"] > 0
    # Parts are of one run, whose totals stand beside them. A launch that was under way when the first step of these
    # was noted counts whole, so one of eight may be too much.
    assert sum(found["parts_us"].values()) <= sum(found["split"].values()) * 9 / 8
    assert "gap" in describe_served(found)
    assert served.measure(cases[1], 1000.0) is None, "there is no drafter"
    assert "idle between steps" in describe_served(found) and describe_run({"case": "a", "error": "b"}) == "a: b"


def test_ranks_of_a_group_serve_together(config: ClusterConfig, tmp_path: Path) -> None:
    one = config.rank_config(config.decode.ranks[0])
    rank_config = dataclasses.replace(one, group=2, experts_main=ExpertsConfig(spare_slots=0))
    lines: list[str] = []
    cases = [GroupCase((20, 33), 4, 2, split) for split in (False, True)]
    found = run_group(rank_config, {"a": cases, "b": cases[:1]}, str(tmp_path), lines.append)
    assert lines[0] == "2 ranks step together" and len(lines) == 3
    assert [len(samples) for samples in found["a"]] == [2, 2] and [len(samples) for samples in found["b"]] == [1, 1]
    for samples in found["a"]:
        # What is drawn first differs; the rest follows from it.
        assert samples[0].tokens.shape == (2, 7) and samples[0].tokens[:, 0].tolist() != [0, 0]
        assert len(samples[0].step_us) == 4 and samples[0].parts_us == {} and set(samples[1].parts_us) == set(PARTS)
    figures = describe_ranks(found["a"], 10.0)
    assert figures["median_us"] == max(rank["median_us"] for rank in figures["ranks"])
    assert figures["gap_us"] == figures["median_us"] - 10


def test_a_rank_of_a_group_that_ends_is_named(config: ClusterConfig, tmp_path: Path) -> None:
    one = config.rank_config(config.decode.ranks[0])
    rank_config = dataclasses.replace(one, group=2, model=str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=r"rank [12] of the group has ended"):
        run_group(rank_config, {"a": [GroupCase((20,), 1, 0, False)]}, str(tmp_path), print)


def test_a_share_of_a_rank_is_not_served() -> None:
    with pytest.raises(ConfigError, match="--served runs whole ranks: for --as-rank-of give --dep"):
        measure_asked(StepOptions(TINY, (), ranks=2, served=True), [], print, is_group=False)


def test_admissions_of_long_prompts_cost_more() -> None:
    short, long = (measure_admission(AdmissionCase(ids, rows=3), samples=9) for ids in (1024, 131_072))
    assert 0 < short["prefill_us"] < short["prefill_whole_us"] < long["prefill_whole_us"]
    assert 0 < short["decode_us"] < long["decode_us"]
    assert "admission of 131072 ids" in describe_admission(long)
