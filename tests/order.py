"""Which files of tests are begun first: the longest, so that none of them is left to the end.

Files in which whole clusters run, whose time is half waiting, alternate with files that compute.
"""

from __future__ import annotations

FIRST = (
    "tests/e2e/test_console_terminal.py",
    "tests/e2e/test_handoff.py",
    "tests/e2e/test_batch_chaos.py",
    "tests/actors/test_groups.py",
    "tests/e2e/test_handoff_chaos.py",
    "tests/model/test_step_drafts.py",
    "tests/front/test_engine.py",
    "tests/sim/test_seeds.py",
    "tests/e2e/test_groups.py",
    "tests/conformance/test_fabric.py",
    "tests/e2e/test_hand_back.py",
    "tests/bench/test_forward.py",
    "tests/e2e/test_batch_whole.py",
    "tests/actors/test_rank_faults.py",
    "tests/e2e/test_prefix_cache.py",
    "tests/e2e/test_decode_rank.py",
    "tests/model/test_gpu_group.py",
    "tests/conformance/test_device.py",
    "tests/e2e/test_drafting.py",
    "tests/sim/test_groups.py",
    "tests/model/test_gpu_group_rules.py",
    "tests/model/test_group.py",
    "tests/actors/test_head_processes.py",
    "tests/model/test_paged_rows.py",
    "tests/cli/test_engine.py",
    "tests/core/test_experts.py",
    "tests/bench/test_serve.py",
    "tests/model/test_paged_oracle.py",
    "tests/e2e/test_checksums.py",
    "tests/sim/test_planted.py",
    "tests/cli/test_operators_live.py",
    "tests/core/test_sides.py",
    "tests/cli/test_commands.py",
    "tests/model/test_paged_drafts.py",
    "tests/batch/test_engine.py",
    "tests/model/test_group_drafts.py",
    "tests/batch/test_signals.py",
    "tests/model/test_nano_rows.py",
    "tests/console/test_terminal.py",
    "tests/console/test_app.py",
    "tests/model/test_group_members.py",
    "tests/bench/test_served.py",
    "tests/model/test_peer_memory.py",
    "tests/model/test_step_shared.py",
    "tests/sim/test_processes.py",
    "tests/model/test_step_forward.py",
    "tests/bench/test_pushing.py",
    "tests/model/test_kept_state.py",
    "tests/batch/test_bounds.py",
    "tests/kernels/test_hyper.py",
    "tests/e2e/test_refusals.py",
    "tests/kernels/test_linear.py",
    "tests/batch/test_cli.py",
    "tests/actors/test_rank.py",
)
"""The others follow in any order."""


def rank(path: str) -> int:
    """Sorts files by when they begin."""
    return FIRST.index(path) if path in FIRST else len(FIRST)
