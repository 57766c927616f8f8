"""route against the reference: choice, ties, order, weights, load."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.gate import route

TOP_K = 6
SCALE = 1.5


def _same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    # Both are float32 chains of some ten operations.
    assert (got[1] - want[1]).norm() <= 1e-6 * want[1].norm()


def _draw(rows: int, experts: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, experts, generator=generator) * 4
    return logits.to(device), (torch.randn(experts, generator=generator) * 0.3).to(device)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(5, 256, 6), (3, 384, 6), (2, 16, 3), (1, 8, 2), (0, 8, 2)])
def test_chosen(device: torch.device, rows: int, experts: int, top_k: int) -> None:
    logits, bias = _draw(rows, experts, device, rows)
    counts, wanted = (torch.arange(experts, dtype=torch.int32, device=device) for _ in range(2))
    got = route(logits, bias, None, top_k, SCALE, None, counts)
    _same(got, reference.route(logits, bias, None, top_k, SCALE, None, wanted))
    assert torch.equal(counts, wanted)


def test_without_bias_in_a_wider_tensor(device: torch.device) -> None:
    wide, _ = _draw(3, 80, device, 7)
    logits = wide[:, 8:72]
    _same(route(logits, None, None, TOP_K, SCALE), reference.route(logits, None, None, TOP_K, SCALE))


def test_ties_go_to_the_lowest_expert(device: torch.device) -> None:
    logits = torch.zeros(3, 48, device=device)
    logits[1, 20:] = 1.0
    logits[2, 40] = -300.0  # its score is 0
    bias = torch.zeros(48, device=device)
    bias[3] = -0.0
    ids, weights = route(logits, bias, None, TOP_K, SCALE)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [20, 21, 22, 23, 24, 25], [0, 1, 2, 3, 4, 5]]
    assert torch.allclose(weights, torch.full_like(weights, SCALE / TOP_K), rtol=1e-6)


def test_scores_of_large_logits(device: torch.device) -> None:
    """Far from zero on both sides scores keep their relative precision, and so their order."""
    logits = torch.full((2, 16), -80.0, device=device)
    logits[0, :8] = torch.tensor([-40.0, -41.0, -30.0, -20.5, -60.0, -25.0, -17.0, -70.0])
    logits[1, :8] = torch.tensor([300.0, 1e4, 88.0, 89.0, 0.0, -5.0, 1e30, 20.0])
    _same(route(logits, None, None, TOP_K, SCALE), reference.route(logits, None, None, TOP_K, SCALE))
    # Each row by itself, as the norm above is that of the largest.
    last = route(logits[:1], None, None, TOP_K, SCALE)[1]
    want = reference.route(logits[:1], None, None, TOP_K, SCALE)[1]
    assert torch.allclose(last, want, rtol=2e-6, atol=0)


def test_looked_up(device: torch.device) -> None:
    logits, _ = _draw(4, 32, device, 3)
    generator = torch.Generator().manual_seed(5)
    hashed = torch.stack([torch.randperm(32, generator=generator)[:TOP_K] for _ in range(4)]).int().to(device)
    counts, wanted = (torch.zeros(32, dtype=torch.int32, device=device) for _ in range(2))
    got = route(logits, None, hashed, TOP_K, SCALE, None, counts)
    _same(got, reference.route(logits, None, hashed, TOP_K, SCALE, None, wanted))
    assert torch.equal(counts, wanted)


@pytest.mark.parametrize("lookup", [False, True])
def test_rows_that_do_not_count(device: torch.device, lookup: bool) -> None:
    logits, bias = _draw(4, 16, device, 11)
    logits[1] = float("nan")  # of a row that does not count: nothing of it may show
    hashed = torch.arange(TOP_K, dtype=torch.int32, device=device).flip(0).repeat(4, 1) if lookup else None
    valid = torch.tensor([True, False, True, False], device=device)
    counts, wanted = (torch.zeros(16, dtype=torch.int32, device=device) for _ in range(2))
    got = route(logits, None if lookup else bias, hashed, TOP_K, SCALE, valid, counts)
    _same(got, reference.route(logits, None if lookup else bias, hashed, TOP_K, SCALE, valid, wanted))
    assert torch.equal(counts, wanted)
    assert got[0][1].tolist() == [-1] * TOP_K and got[1][1].tolist() == [0.0] * TOP_K


def test_a_row_alone(device: torch.device) -> None:
    logits, bias = _draw(6, 64, device, 13)
    ids, weights = route(logits, bias, None, TOP_K, SCALE)
    for r in (0, 5):
        alone = route(logits[r : r + 1], bias, None, TOP_K, SCALE)
        assert torch.equal(alone[0][0], ids[r]) and torch.equal(alone[1][0], weights[r])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "experts"), [(512, 256), (512, 384), (1, 256)])
def test_real_sizes(device: torch.device, rows: int, experts: int) -> None:
    logits, bias = _draw(rows, experts, device, rows)
    counts, wanted = (torch.zeros(experts, dtype=torch.int32, device=device) for _ in range(2))
    got = route(logits, bias, None, TOP_K, SCALE, None, counts)
    want = reference.route(logits, bias, None, TOP_K, SCALE, None, wanted)
    # Two exponentials may differ in the last bit and turn a choice between neighbours: at most one row in 500.
    same = (got[0] == want[0]).all(1)
    assert (~same).sum() <= 1
    _same((got[0][same], got[1][same]), (want[0][same], want[1][same]))
    assert counts.sum() == rows * TOP_K
