"""All kernels of a V4.1 model's step, every operation beside its plain form on the same inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.bench.cases import cut_layers, load_model_config, parse_case
from engine.bench.check import Finding, check_ops, describe_findings
from engine.bench.rig import StepBench, StepOptions
from engine.model.ops import MODULES, triton_ops

SHARING = {name for module in ("latents", "candidates", "memory") for name in MODULES[module]}


@pytest.mark.parametrize("case", ["verify=1*2@60:1"])
def test_kernels_of_a_step_compute_what_their_plain_forms_do(tmp_path: Path, device: torch.device, case: str) -> None:
    config = cut_layers(load_model_config("tests/oracle/v41-tiny-quant"), 3)
    # A layer of each kind that selects, and sizes that fp8 records can have: 64 channels that are not rotated.
    config["text_config"] |= {
        "compress_ratios": [2, 1, 1], "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1, 2],
        "candidate_source_layer_id": 1, "head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = StepOptions(str(path), (parse_case(case),))
    bench = StepBench(options, device, triton_ops())
    assert bench.shape.candidate_blocks * bench.shape.candidate_block_size < options.cases[0].length
    findings: dict[str, Finding] = {}
    outputs = bench.open(options.cases[0]).run_with(check_ops(bench.ops, bench.arena, findings))
    assert outputs.logits.isfinite().all() and len(outputs.greedy.unique()) > 1
    assert all(finding.is_fine(name) for name, finding in findings.items()), describe_findings(findings)
    assert set(findings) >= SHARING
