"""Verification of drafts: the golden tables, exactly, and what must hold of every draft whatever the drafter does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model.sampling import LANE_ACCEPT, LANE_RESIDUAL, LANE_SAMPLE, draw_uniform, process_logits
from engine.model.verification import Uniforms, Verdict, draw_uniforms, verify_drawn, verify_greedy, verify_point
from transport.messages import Sampling

TABLES = load_file(str(Path(__file__).parents[1] / "oracle" / "spec" / "tables.safetensors"))


def table(k: int, name: str) -> Tensor:
    return TABLES[f"k{k}.{name}"]


def golden_uniforms(k: int) -> Uniforms:
    """The tables have one number for the last token, wherever that is."""
    return Uniforms(table(k, "u"), table(k, "u_final").unsqueeze(1).expand(-1, k + 1))


def check(k: int, kind: str, verdict: Verdict) -> None:
    assert torch.equal(verdict.accepted, table(k, f"{kind}.accepted").long())
    assert torch.equal(verdict.tokens, table(k, f"{kind}.tokens").long())


@pytest.mark.parametrize("k", range(1, 6))
def test_drawn_drafts_are_judged_as_in_the_tables(k: int) -> None:
    p, q, drafts = table(k, "p"), table(k, "q"), table(k, "draft").long()
    verdict = verify_drawn(p, q, drafts, golden_uniforms(k))
    check(k, "sampled", verdict)
    torch.testing.assert_close(verdict.source, table(k, "sampled.residual"), atol=1e-15, rtol=0)
    torch.testing.assert_close(
        torch.minimum(p[:, :-1], q).sum(2), table(k, "sampled.accept_probability"), atol=1e-15, rtol=0
    )


@pytest.mark.parametrize("k", range(1, 6))
def test_points_are_judged_as_in_the_tables(k: int) -> None:
    verdict = verify_point(table(k, "p"), table(k, "draft").long(), golden_uniforms(k))
    check(k, "point", verdict)
    torch.testing.assert_close(verdict.source, table(k, "point.residual"), atol=1e-15, rtol=0)


@pytest.mark.parametrize("k", range(1, 6))
def test_greedy_drafts_are_judged_as_in_the_tables(k: int) -> None:
    check(k, "greedy", verify_greedy(table(k, "greedy.logits"), table(k, "greedy.draft").long()))


def test_single_precision_judges_alike() -> None:
    for k in range(1, 6):
        p, q, drafts = table(k, "p").float(), table(k, "q").float(), table(k, "draft").long()
        check(k, "sampled", verify_drawn(p, q, drafts, golden_uniforms(k)))


def test_a_drafter_that_is_the_target_is_never_refused() -> None:
    p = table(4, "p")
    drafts = p[:, :-1].argmax(2)
    ones = Uniforms(torch.full((40, 4), 1 - 2.0**-53, dtype=torch.float64), table(4, "u_final")[:, None].expand(-1, 5))
    verdict = verify_drawn(p, p[:, :-1], drafts, ones)
    assert (verdict.accepted == 4).all()
    torch.testing.assert_close(verdict.source, p[:, 4], atol=1e-15, rtol=0)


def test_a_draft_that_the_target_forbids_never_holds_and_never_comes_back() -> None:
    p = torch.tensor([[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]], dtype=torch.float64).expand(100, -1, -1)
    drafts = torch.zeros((100, 1), dtype=torch.int64)
    uniforms = Uniforms(
        torch.full((100, 1), 1e-300, dtype=torch.float64),
        torch.linspace(0, 1 - 1e-9, 100).double()[:, None].expand(-1, 2),
    )
    verdict = verify_point(p, drafts, uniforms)
    assert (verdict.accepted == 0).all()
    assert set(verdict.tokens[:, 0].tolist()) == {1, 2}
    assert (verdict.tokens[:, 1] == -1).all()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    target = torch.zeros((2, 2, 5))
    target[:, :, 1] = target[:, :, 3] = 1.0
    verdict = verify_greedy(target, torch.tensor([[1], [3]]))
    assert verdict.accepted.tolist() == [1, 0]
    assert verdict.tokens.tolist() == [[1, 1], [1, -1]]


def test_no_drafts_leave_the_bonus() -> None:
    p = table(1, "p")[:, :1]
    none = torch.zeros((40, 0), dtype=torch.int64)
    uniforms = draw_uniforms(range(40), [7] * 40, 0)
    verdict = verify_drawn(p, p[:, :0], none, uniforms)
    assert (verdict.accepted == 0).all()
    wanted = (p[:, 0].cumsum(1) <= uniforms.final).sum(1)
    assert torch.equal(verdict.tokens[:, 0], wanted)
    # With nothing drafted, the number is the one that plain sampling draws with.
    np.testing.assert_array_equal(uniforms.final[:, 0].numpy(), draw_uniform(range(40), [7] * 40, LANE_SAMPLE))


def test_uniforms_are_by_seed_position_and_purpose() -> None:
    seeds, positions = [3, 9], [100, 5]
    uniforms = draw_uniforms(seeds, positions, 3)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        at = range(position, position + 4)
        np.testing.assert_array_equal(uniforms.accept[row].numpy(), draw_uniform([seed] * 4, at, LANE_ACCEPT)[:3])
        np.testing.assert_array_equal(uniforms.final[row, :3].numpy(), draw_uniform([seed] * 4, at, LANE_RESIDUAL)[:3])
        assert uniforms.final[row, 3] == draw_uniform([seed], [position + 3], LANE_SAMPLE)[0]
    alone = draw_uniforms(seeds[1:], positions[1:], 3)
    assert torch.equal(alone.accept, uniforms.accept[1:]) and torch.equal(alone.final, uniforms.final[1:])


def test_a_greedy_row_is_a_point_so_that_one_call_serves_all_rows() -> None:
    logits = table(3, "greedy.logits").float()
    drafts = table(3, "greedy.draft").long()
    processed = process_logits(logits.reshape(-1, 12), [Sampling()] * (40 * 4)).reshape(40, 4, 12)
    verdict = verify_point(processed, drafts, draw_uniforms(range(40), range(40), 3))
    wanted = verify_greedy(logits, drafts)
    assert torch.equal(verdict.tokens, wanted.tokens) and torch.equal(verdict.accepted, wanted.accepted)
