"""Which files of tests are begun first: the longest, so that none of them is left to the end.

Files in which whole clusters run, whose time is half waiting, alternate with files that compute.
"""

from __future__ import annotations

FIRST = (
    "tests/sim/test_seeds.py",
    "tests/e2e/test_groups.py",
    "tests/model/test_paged_rows.py",
    "tests/e2e/test_drafting.py",
    "tests/model/test_speculation.py",
    "tests/e2e/test_console_terminal.py",
    "tests/e2e/test_handoff.py",
    "tests/front/test_engine.py",
    "tests/model/test_rejection_served.py",
    "tests/e2e/test_grammars.py",
    "tests/model/test_nano_rows.py",
    "tests/e2e/test_batch_whole.py",
    "tests/model/test_kept_state.py",
    "tests/cli/test_operators_live.py",
    "tests/cli/test_engine.py",
    "tests/nano/test_nano.py",
    "tests/e2e/test_batch_chaos.py",
    "tests/model/test_paged_drafts.py",
    "tests/e2e/test_handoff_chaos.py",
    "tests/kernels/test_hyper.py",
    "tests/e2e/test_sampling.py",
    "tests/model/test_grammars.py",
    "tests/e2e/test_prefix_cache.py",
    "tests/e2e/test_hand_back.py",
    "tests/core/test_sides.py",
    "tests/actors/test_head_processes.py",
    "tests/kernels/test_experts.py",
    "tests/bench/test_serve.py",
    "tests/console/test_terminal.py",
    "tests/model/test_group.py",
    "tests/model/test_gpu_group.py",
    "tests/bench/test_served.py",
    "tests/model/test_peer_memory.py",
    "tests/model/test_step_drafts.py",
    "tests/model/test_gpu_group_rules.py",
    "tests/e2e/test_refusals.py",
    "tests/core/test_experts.py",
    "tests/conformance/test_fabric.py",
    "tests/console/test_app.py",
    "tests/sim/test_world.py",
    "tests/e2e/test_checksums.py",
    "tests/e2e/test_decode_rank.py",
    "tests/batch/test_signals.py",
    "tests/batch/test_bounds.py",
)
"""The others follow in any order."""


def rank(path: str) -> int:
    """Sorts files by when they begin."""
    return FIRST.index(path) if path in FIRST else len(FIRST)
