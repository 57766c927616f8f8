"""Pairs of many rows in tiles: what the kernel for fewer rows gives, bit for bit, and a plain listing of them."""

from __future__ import annotations

import math

import pytest
import torch
import triton
from torch import Tensor

from kernels import experts_pairs
from kernels.experts_tiles import group_tiles_kernel
from tests.kernels.test_experts import BF16, table

Grouped = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_x(rows: int, hidden: int, device: torch.device, exact: bool) -> Tensor:
    """exact: numbers that are rounded towards zero; Triton's interpreter rounds others up."""
    generator = torch.Generator().manual_seed(rows)
    if not exact:
        return torch.randn(rows, hidden, generator=generator).to(device, BF16)
    parts = [torch.randint(0, 8, (rows, hidden), generator=generator) for _ in range(3)]
    return ((128 + 16 * parts[0] + parts[1]) * (1 - 2 * (parts[2] % 2)) * 2.0**-9).to(device, BF16)


def make_case(rows: int, places: int, experts: int, local: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, expert_to_slot): distinct experts of a row, some places with none, some experts that none chose."""
    generator = torch.Generator().manual_seed(rows + experts)
    ids = torch.rand(rows, experts, generator=generator)
    ids[:, experts // 2] = 2.0
    ids = ids.argsort(-1)[:, :places].int()
    ids[torch.rand(rows, places, generator=generator) < 0.05] = -1
    here = torch.full((experts,), -1)
    here[torch.randperm(experts, generator=generator)[:local]] = torch.randperm(local, generator=generator)
    return ids.to(device), table(here.tolist(), device)


def outputs(rows: int, places: int, experts: int, hidden: int, tile: int, device: torch.device) -> Grouped:
    """(pairs, tiles, progress, split, scales), as nobody would write them."""
    most = min(rows * places, experts + rows * places // tile)
    pairs, tiles, progress = (
        torch.full((n,), -7, dtype=torch.int32, device=device) for n in (most * tile, most * 2, most + 2)
    )
    split = torch.full((most, hidden // 32, tile, 64), 77, dtype=torch.uint8, device=device)
    return pairs, tiles, progress, split, torch.full((most, tile), -7.0, device=device)


def group_few(x: Tensor, ids: Tensor, here: Tensor, out: Grouped, first_item: int, tile: int) -> None:
    """By the kernel whose programs each count all pairs."""
    (rows, hidden), places, experts = x.shape, ids.shape[1], len(here)
    part = min(hidden & -hidden, 1024)
    group_tiles_kernel[(experts + rows * hidden // part,)](
        x, ids, here, *out, first_item, ids.numel(), experts, x.stride(0), HIDDEN=hidden, PART=part, EACH=1,
        PLACES=places, TILE=tile, MAX_HIDDEN=triton.next_power_of_2(hidden),
        MAX_PLACES=triton.next_power_of_2(places), MAX_PAIRS=max(triton.next_power_of_2(ids.numel()), 256),
        MAX_EXPERTS=triton.next_power_of_2(experts), MAX_TILES=triton.next_power_of_2(triton.cdiv(rows, tile)),
        EARLY=False, num_warps=8,
    )  # fmt: skip


def group_plainly(ids: Tensor, here: Tensor, tile: int) -> list[tuple[int, list[int]]]:
    """(slot, pairs) of each tile."""
    listed = []
    for expert, slot in enumerate(here.tolist()):
        mine = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if chosen == expert and slot >= 0]
        listed += [(slot, mine[at : at + tile]) for at in range(0, len(mine), tile)]
    return listed


def check(x: Tensor, ids: Tensor, here: Tensor, tile: int) -> int:
    """Number of tiles."""
    sized = (*ids.shape, len(here), x.shape[1], tile, x.device)
    got, want = outputs(*sized), outputs(*sized)
    experts_pairs.group_many(x, ids, here, *got, 5, tile=tile, early=False)
    group_few(x, ids, here, want, 5, tile)
    for one, other in zip(got, want, strict=True):
        # Untouched places too: neither writes what the other does not. A row with an infinity has a NaN.
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    listed = group_plainly(ids, here, tile)
    assert got[2][: 2 + len(listed)].tolist() == [len(listed), 5, *[0] * len(listed)]
    assert got[1].view(-1, 2)[: len(listed)].tolist() == [[slot, len(mine)] for slot, mine in listed]
    for number, (_, mine) in enumerate(listed):
        assert got[0].view(-1, tile)[number, : len(mine)].tolist() == mine
    return len(listed)


@pytest.mark.parametrize(
    ("rows", "places", "experts", "local", "tile", "hidden"), [(37, 3, 6, 4, 8, 96), (19, 2, 5, 5, 16, 2048)]
)
def test_tiles_are_those_of_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int, places: int, experts: int, local: int, tile: int,
    hidden: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(experts_pairs, "CHUNK", 32)
    monkeypatch.setattr(experts_pairs, "BLOCK", 2)
    ids, here = make_case(rows, places, experts, local, device)
    x = make_x(rows, hidden, device, exact=True)
    x[7, 5], x[8, 1] = math.inf, math.nan
    assert check(x, ids, here, tile) >= local - 1


def test_no_expert_is_here(device: torch.device) -> None:
    ids, here = make_case(5, 2, 4, 0, device)
    assert check(make_x(5, 32, device, exact=True), ids, here, 8) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [8, 16, 64])
@pytest.mark.parametrize(
    ("rows", "hidden", "experts", "local"),
    [(3072, 5120, 384, 12), (512, 4096, 256, 128), (512, 4096, 256, 8), (301, 1024, 256, 256), (700, 7168, 384, 0)],
)
def test_real_sizes(device: torch.device, rows: int, hidden: int, experts: int, local: int, tile: int) -> None:
    ids, here = make_case(rows, 6, experts, local, device)
    check(make_x(rows, hidden, device, exact=False), ids, here, tile)
