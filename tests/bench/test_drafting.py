"""Measured steps with their drafts: all of them are judged and made, and their bytes are counted."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.bench.cases import load_model_config, parse_case
from engine.bench.rig import StepBench, StepOptions
from engine.model.ops import reference_ops

TINY = "tests/oracle/v4-tiny-quant"


def open_bench(directory: Path, *cases: str, predicts: bool) -> StepBench:
    config = load_model_config(TINY)
    if predicts:
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        config |= {"num_nextn_predict_layers": 1, "compress_ratios": [*ratios, 0]}
    (directory / "config.json").write_text(json.dumps(config))
    asked = tuple(parse_case(case) for case in cases)
    options = StepOptions(str(directory), asked, records="bf16", ranks=2)
    return StepBench(options, torch.device("cpu"), reference_ops())


def test_a_step_judges_its_drafts_and_makes_as_many(tmp_path: Path) -> None:
    bench = open_bench(tmp_path, "a=3*3@40:2", predicts=True)
    (case,) = bench.options.cases
    step = bench.open(case)
    drafting = bench.drafting
    assert drafting is not None
    outputs = drafting.wrap(case, step).run()
    assert outputs.logits.isfinite().all()
    # Every draft was verified, those made are ids, and each sequence stands where it was told.
    result = outputs.result
    assert result[:, 0].tolist() == [37, 36, 35] and result[:, 2].tolist() == [2, 2, 2]
    assert (result[:, 1] >= 1).all() and (result[:, 6:] >= 0).all()
    touched = drafting.touched(outputs, case)
    assert len(touched) == 2 and all(count >= bench.shape.top_k for count in touched)
    before = bench.count_bytes(case, bench.touched(step, outputs))
    after = drafting.add_bytes(before, touched)
    assert after["total"] - before["total"] == sum(after[name] - before[name] for name in ("dense", "experts"))
    assert after["dense"] - before["dense"] > 2 * bench.weights.head.num_bytes
    assert after["records"] == before["records"]


def test_a_model_without_the_layer_makes_none(tmp_path: Path) -> None:
    assert open_bench(tmp_path, "a=1*2@10:1", predicts=False).drafting is None
