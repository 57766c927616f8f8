"""All kernels together: a step of a small quantised model, every operation beside its plain form on the same inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.bench.cases import cut_layers, load_model_config, parse_case
from engine.bench.check import Finding, check_ops, describe_findings
from engine.bench.rig import StepBench, StepOptions
from engine.model.ops import MODULES, OPERATIONS, triton_ops

SINGLE = {"norm_rows", "write_window", "compress", "mix_experts", "select_entries"}
DRAFTING = set(MODULES["drafts"])
SHARING = {name for module in ("latents", "candidates", "memory") for name in MODULES[module]}
"""What a step does in `enter_attention`, in `connect` and in `prepare_and_select`."""


@pytest.mark.parametrize("case", ["verify=2*2@132:1"])
def test_kernels_of_a_step_compute_what_their_plain_forms_do(tmp_path: Path, device: torch.device, case: str) -> None:
    config = cut_layers(load_model_config("tests/oracle/v4-tiny-quant"), 3)
    # Sizes that fp8 records can have: 64 channels that are not rotated.
    config |= {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = StepOptions(str(path), (parse_case(case),), ranks=2)
    bench = StepBench(options, device, triton_ops())
    findings: dict[str, Finding] = {}
    outputs = bench.open(options.cases[0]).run_with(check_ops(bench.ops, bench.arena, findings))
    assert outputs.logits.isfinite().all() and len(outputs.greedy.unique()) > 1
    assert all(finding.is_fine(name) for name, finding in findings.items()), describe_findings(findings)
    assert set(OPERATIONS) - set(findings) == SINGLE | DRAFTING | SHARING
