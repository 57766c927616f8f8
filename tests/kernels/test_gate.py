"""route against the reference: the product, choice, ties, order, weights, load."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.forms import Weight
from kernels.gate import DEFAULT, route

TOP_K = 6
SCALE = 1.5


def _same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    # Both are float32 chains of some ten operations.
    assert (got[1] - want[1]).norm() <= 1e-6 * want[1].norm()


def _draw(rows: int, experts: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, experts, generator=generator) * 4
    return logits.to(device), (torch.randn(experts, generator=generator) * 0.3).to(device)


def _draw_product(rows: int, hidden: int, experts: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x, gate, bias."""
    generator = torch.Generator().manual_seed(rows + hidden)
    x = torch.randn(rows, hidden, generator=generator)
    gate = torch.randn(experts, hidden, generator=generator) * 3 * hidden**-0.5
    bias = torch.randn(experts, generator=generator) * 0.3
    return x.to(dtype).to(device), gate.to(dtype).to(device), bias.to(device)


def _unit(logits: Tensor) -> Weight:
    """A matrix that makes logits of themselves, exactly."""
    return Weight(torch.eye(logits.shape[1], device=logits.device))


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(5, 256, 6), (3, 48, 6), (2, 16, 3), (1, 8, 2), (0, 8, 2)])
def test_chosen(device: torch.device, rows: int, experts: int, top_k: int) -> None:
    logits, bias = _draw(rows, experts, device, rows)
    counts, wanted = (torch.arange(experts, dtype=torch.int32, device=device) for _ in range(2))
    arguments = (logits, _unit(logits), bias, None, top_k, SCALE, None, None)
    got = route(*arguments, counts)
    _same(got, reference.route(*arguments, wanted))
    assert torch.equal(counts, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_slices_and_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """17 rows are two tiles; 88 columns are three slices, the last of them half full; 40 experts two tiles."""
    x, gate, bias = _draw_product(17, 88, 40, dtype, device)
    config = dataclasses.replace(DEFAULT, slices=3, chunk=16)
    out = (torch.empty(17, TOP_K, dtype=torch.int32, device=device), torch.empty(17, TOP_K, device=device))
    got = route(x, Weight(gate), bias, None, TOP_K, SCALE, out=out, config=config)
    assert got[0] is out[0] and got[1] is out[1]
    want = reference.route(x, Weight(gate), bias, None, TOP_K, SCALE)
    assert torch.equal(got[0], want[0])
    # Sums in another order.
    assert (got[1] - want[1]).norm() <= 3e-6 * want[1].norm()
    # The launch before leaves everything as the next ones need it. The interpreter multiplies by NumPy, whose bits of a
    # row depend on its place in a tile on some machines.
    for part in (slice(0, 1), slice(15 if device.type == "cuda" else 16, 17)):
        alone = route(x[part], Weight(gate), bias, None, TOP_K, SCALE, config=config)
        assert torch.equal(alone[0], got[0][part]) and torch.equal(alone[1], got[1][part])


def test_without_bias_in_a_wider_tensor(device: torch.device) -> None:
    wide, _ = _draw(3, 80, device, 7)
    logits = wide[:, 8:72]
    arguments = (logits, _unit(logits), None, None, TOP_K, SCALE)
    _same(route(*arguments), reference.route(*arguments))


def test_ties_go_to_the_lowest_expert(device: torch.device) -> None:
    logits = torch.zeros(3, 48, device=device)
    logits[1, 20:] = 1.0
    logits[2, 40] = -300.0  # its score is 0
    bias = torch.zeros(48, device=device)
    bias[3] = -0.0
    ids, weights = route(logits, _unit(logits), bias, None, TOP_K, SCALE)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [20, 21, 22, 23, 24, 25], [0, 1, 2, 3, 4, 5]]
    assert torch.allclose(weights, torch.full_like(weights, SCALE / TOP_K), rtol=1e-6)


def test_scores_of_large_logits(device: torch.device) -> None:
    """Far from zero on both sides scores keep their relative precision, and so their order."""
    logits = torch.full((2, 16), -80.0, device=device)
    logits[0, :8] = torch.tensor([-40.0, -41.0, -30.0, -20.5, -60.0, -25.0, -17.0, -70.0])
    logits[1, :8] = torch.tensor([300.0, 1e4, 88.0, 89.0, 0.0, -5.0, 1e30, 20.0])
    got, want = (call(logits, _unit(logits), None, None, TOP_K, SCALE) for call in (route, reference.route))
    _same(got, want)
    # Each row by itself, as the norm above is that of the largest.
    assert torch.allclose(got[1][0], want[1][0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("by_token", [False, True])
def test_looked_up(device: torch.device, by_token: bool) -> None:
    logits, _ = _draw(4, 32, device, 3)
    generator = torch.Generator().manual_seed(5)
    hashed = torch.stack([torch.randperm(32, generator=generator)[:TOP_K] for _ in range(9)]).int().to(device)
    tokens = torch.tensor([8, 0, 8, 5], dtype=torch.int32, device=device) if by_token else None
    counts, wanted = (torch.zeros(32, dtype=torch.int32, device=device) for _ in range(2))
    arguments = (logits, _unit(logits), None, hashed, TOP_K, SCALE, tokens, None)
    got = route(*arguments, counts)
    _same(got, reference.route(*arguments, wanted))
    assert torch.equal(counts, wanted)


@pytest.mark.parametrize("lookup", [False, True])
def test_rows_that_do_not_count(device: torch.device, lookup: bool) -> None:
    logits, bias = _draw(4, 16, device, 11)
    logits[1] = float("nan")  # of a row that does not count: nothing of it may show
    hashed = torch.arange(TOP_K, dtype=torch.int32, device=device).flip(0).repeat(4, 1) if lookup else None
    positions = torch.tensor([7, -1, 0, -1], dtype=torch.int32, device=device)
    counts, wanted = (torch.zeros(16, dtype=torch.int32, device=device) for _ in range(2))
    arguments = (logits, _unit(logits), None if lookup else bias, hashed, TOP_K, SCALE, None, positions)
    got = route(*arguments, counts)
    _same(got, reference.route(*arguments, wanted))
    assert torch.equal(counts, wanted)
    assert got[0][1].tolist() == [-1] * TOP_K and got[1][1].tolist() == [0.0] * TOP_K


def test_what_it_does_not_read_is_refused(device: torch.device) -> None:
    x, gate, bias = _draw_product(2, 32, 16, torch.float32, device)
    for weight in (Weight(gate, torch.zeros(1, 1, dtype=torch.uint8, device=device)), Weight(gate.T)):
        with pytest.raises(ValueError, match="the gate's matrix must be without scales"):
            route(x, weight, bias, None, TOP_K, SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "experts"), [(256, 256), (64, 384), (5, 256), (1, 256)])
def test_real_sizes(device: torch.device, rows: int, experts: int) -> None:
    x, gate, bias = _draw_product(rows, 4096, experts, torch.bfloat16, device)
    counts, wanted = (torch.zeros(experts, dtype=torch.int32, device=device) for _ in range(2))
    arguments = (x, Weight(gate), bias, None, TOP_K, SCALE, None, None)
    want = reference.route(*arguments, wanted)
    got = route(*arguments, counts)
    # Sums in another order may turn a choice between neighbours: at most one row in a hundred.
    same = (got[0] == want[0]).all(1)
    assert (~same).sum() <= 1 + rows // 100
    assert (got[1][same] - want[1][same]).norm() <= 3e-6 * want[1][same].norm()
    assert counts.sum() == rows * TOP_K
    for r in {0, rows // 2, rows - 1}:
        for few in (slice(r, r + 1), slice(max(r - 3, 0), r + 1)):
            alone = route(x[few], *arguments[1:])
            assert torch.equal(alone[0][-1], got[0][r]) and torch.equal(alone[1][-1], got[1][r])
