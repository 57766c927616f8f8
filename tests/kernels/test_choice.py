"""Choice of the best entries: against a stable sort, for scores that lead to different ways through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import choice
from kernels.forms import StepRows


def shaped(shape: str, visible: int) -> Tensor:
    """float32[visible] scores that lead to different ways through the selection."""
    generator = torch.Generator().manual_seed(visible)
    scores = torch.randn(visible, generator=generator)
    if shape == "ties":
        # Few above, very many equal to the bound.
        return torch.where(scores > 2.2, scores, 0.0)
    if shape == "hidden":
        # The best all lie where the maxima of few groups are: the same places of each tile.
        place = torch.arange(visible) % 512
        return scores + 100 * ((place % 128 // 32 == 1) & (place % 32 < 12))
    if shape == "rising":
        return torch.arange(visible) - 300.5
    if shape == "negative":
        return -scores.abs() - 1e-30
    if shape == "broken":
        return torch.where(torch.arange(visible) % 3 == 0, torch.nan, scores)
    return scores


@pytest.mark.parametrize(
    ("shape", "visible", "top_k"),
    [
        ("random", 1500, 6),
        ("random", 90, 60),
        ("ties", 1030, 20),
        ("ties", 2500, 40),
        ("hidden", 2040, 6),
        ("rising", 1200, 50),
        ("negative", 777, 16),
        ("broken", 400, 12),
    ],
)
def test_choice(shape: str, visible: int, top_k: int, device: torch.device) -> None:
    configs = [choice.ChoiceConfig(segment=4096, warps=4), choice.ChoiceConfig(segment=1024, warps=4)]
    choose(shape, visible, top_k, configs, device)


@pytest.mark.parametrize(
    ("shape", "visible", "top_k"),
    [("random", 1501, 6), ("random", 90, 60), ("ties", 2500, 40), ("rising", 1200, 50), ("broken", 400, 12)],
)
def test_choice_by_maxima(shape: str, visible: int, top_k: int, device: torch.device) -> None:
    choose(shape, visible, top_k, [choice.ChoiceConfig(segment=64, maxima_warps=4, warps=4)], device, True)


def choose(
    shape: str,
    visible: int,
    top_k: int,
    configs: list[choice.ChoiceConfig],
    device: torch.device,
    by_maxima: bool = False,
) -> None:
    """Checks the choice against that of a stable sort."""
    scores = shaped(shape, visible)
    # To the next multiple of 32 minus infinity; then what another step may have left there.
    row = torch.full((-(-visible // 64) * 64 + 64,), 1e9)
    row[: -(-visible // 32) * 32] = -torch.inf
    row[:visible] = scores
    rows = StepRows(
        positions=torch.tensor([visible - 1], dtype=torch.int32, device=device),
        slabs=torch.zeros(1, dtype=torch.int32, device=device),
        tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        span=1,
    )
    order = torch.sort(torch.where(scores.isnan(), -torch.inf, scores), descending=True, stable=True).indices
    order = order[: min(top_k, int((~scores.isnan()).sum()))].sort().values
    expected = order.tolist() + [-1] * (top_k - len(order))
    maxima = None
    if by_maxima:
        best = row.nan_to_num(-torch.inf, torch.inf, -torch.inf).view(-1, 8).amax(1)
        # To the next multiple of 8 of them.
        maxima = torch.full((1, -(-len(best) // 16) * 16), 1e9, device=device)
        maxima[0, : -(-visible // 64) * 8] = -torch.inf
        maxima[0, : -(-visible // 8)] = best[: -(-visible // 8)]
    for config in configs:
        chosen = choice.choose_entries(row.unsqueeze(0).to(device), 1, top_k, rows, maxima, config=config)
        assert chosen[0].tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["random", "ties", "hidden", "rising", "negative", "broken"])
@pytest.mark.parametrize("visible", [2304, 32768, 213_000])
@pytest.mark.parametrize("config", [choice.DEFAULT, choice.ChoiceConfig(segment=8192, warps=8)])
def test_real_sizes(shape: str, visible: int, config: choice.ChoiceConfig, device: torch.device) -> None:
    choose(shape, visible, 512, [config], device)
    choose(shape, visible, 512, [config], device, by_maxima=True)
