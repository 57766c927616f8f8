"""Candidate blocks against their truth: exact choices where scores are exact, and many of them tie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import candidates, forms, reference
from kernels.forms import Plane, RecordFormat, StepRows
from tests.kernels.test_indexer import Inputs, draw

CASES = [
    # Blocks that are all kept, or not; newest blocks of all lengths; padding; fewer entries than places.
    ([[159, 160, 161], [120, -1, -1], [-1, -1, -1], [18, 19, 20]], 2, torch.bfloat16, "fp8", 6, (4, 7)),
    ([[90], [7], [44]], 1, torch.float32, "fp32", 8, (8, 3)),
    ([[75, 76]], 1, torch.bfloat16, "bf16", 7, (3, 5)),
    ([[64]], 1, torch.float32, "fp32", 12, (8, 2)),
]


def arguments(
    inputs: Inputs, ratio: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor, int, int, StepRows, Tensor, Plane]:
    return (inputs.query, inputs.share, inputs.turns, ratio, top_k, inputs.rows, inputs.arena, inputs.keys)


@pytest.mark.parametrize(("positions", "ratio", "dtype", "form", "top_k", "blocks"), CASES)
def test_exact_choices(
    positions: list[list[int]],
    ratio: int,
    dtype: torch.dtype,
    form: RecordFormat,
    top_k: int,
    blocks: tuple[int, int],
    device: torch.device,
) -> None:
    size, count = blocks
    first, second = (draw(positions, ratio, dtype, form, device, seed=seed) for seed in (1, 2))
    given = arguments(first, ratio, top_k)
    found, kept = candidates.select_and_rank(*given, size, count, 0.5)
    wanted, wanted_kept = reference.select_and_rank(*given, size, count, 0.5)
    assert torch.equal(found, wanted)
    assert torch.equal(kept, wanted_kept)
    # Another layer's keys and queries, among the first one's blocks.
    given = arguments(second, ratio, top_k)
    limited = candidates.select_among(*given, kept, size, 0.5)
    assert torch.equal(limited, reference.select_among(*given, kept, size, 0.5))
    free = reference.select_entries(*given, 0.5)
    assert not torch.equal(limited, free), "the blocks of this case limit nothing"


def test_rows_do_not_meet(device: torch.device) -> None:
    inputs = draw([[90, 91], [77, -1]], 1, torch.float32, "fp32", device, whole=False)
    given = arguments(inputs, 1, 8)
    found, kept = candidates.select_and_rank(*given, 4, 5)
    limited = candidates.select_among(*given, kept, 4)
    for b in range(2):
        part = slice(2 * b, 2 * b + 2)
        alone = arguments(inputs.sequence(b), 1, 8)
        own, own_kept = candidates.select_and_rank(*alone, 4, 5)
        assert torch.equal(own, found[part]) and torch.equal(own_kept, kept[part])
        own = candidates.select_among(*alone, own_kept, 4)
        assert torch.equal(own, limited[part])


def test_many_rows_are_ranked_in_parts(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    inputs = draw([[90, 91], [77, -1], [80, 81]], 1, torch.float32, "fp32", device, whole=False)
    found, kept = candidates.select_and_rank(*arguments(inputs, 1, 8), 4, 5)
    monkeypatch.setattr(forms, "READ_ROWS", 4)
    again, kept_again = candidates.select_and_rank(*arguments(inputs, 1, 8), 4, 5)
    assert torch.equal(found, again) and torch.equal(kept, kept_again)


def test_too_few_blocks_are_refused(device: torch.device) -> None:
    inputs = draw([[20]], 1, torch.float32, "fp32", device)
    with pytest.raises(ValueError, match="2 blocks of 4 entries hold fewer than the 9"):
        candidates.select_and_rank(*arguments(inputs, 1, 9), 4, 2)
