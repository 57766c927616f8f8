"""The entrance of attention against its truth: no part of the launch disturbs another."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import compressor, entrance, reference
from kernels.forms import Pooling
from tests.kernels.planes import GAP, blank_records, compare_records, lay_plane
from tests.kernels.test_compressor import TOLERANCE, World, make_step, make_world


def join_worlds(worlds: list[World], width: int, rope: int, device: torch.device) -> tuple[torch.Tensor, list, list]:
    """(one arena with a window ring behind the worlds' parts, its plane, the poolings moved there)."""
    ring, size = lay_plane(GAP, 13 + 8, width, rope, "fp32")
    window = torch.full((5 * size,), 0xFF, dtype=torch.uint8, device=device)
    arena = torch.cat([*(world.arena for world in worlds), window])
    base, poolings = 0, []
    for world in worlds:
        pooling = world.pooling
        moved_ring = dataclasses.replace(pooling.ring, data=pooling.ring.data + base)
        target = pooling.target
        moved = dataclasses.replace(target, data=target.data + base, scale=target.scale + base)
        poolings.append(dataclasses.replace(pooling, ring=moved_ring, target=moved))
        base += len(world.arena)
    plane = dataclasses.replace(ring, data=ring.data + base, scale=ring.scale + base, stride=size)
    return arena, [plane], poolings


LAYERS: dict[str, list[dict[str, object]]] = {
    "window": [],
    "one": [{"ratio": 16, "width": 64, "rope": 16, "form": "fp32", "overlaps": False}],
    "two": [
        {"ratio": 4, "width": 64, "rope": 16, "form": "fp32", "overlaps": True},
        {"ratio": 4, "width": 32, "rope": 16, "form": "fp8", "overlaps": True, "key": True},
    ],
}


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_enter_attention(layer: str, out_dtype: torch.dtype, device: torch.device) -> None:
    worlds = [make_world(device, **arguments) for arguments in LAYERS[layer]]  # type: ignore[arg-type]
    shape = worlds or [make_world(device, 4, 64, 16, "fp32", overlaps=True)]
    turns = shape[0].turns
    arena, (ring,), poolings = join_worlds(worlds, 64, 16, device)
    truth = arena.clone()
    generator = torch.Generator(device).manual_seed(3)
    query_norm, window_norm = torch.randn(96, generator=generator, device=device), torch.randn(64, device=device)
    starts = [2, 14, 45]
    compressions: list[tuple[torch.Tensor, Pooling]] = []
    _, rows = make_step(shape[0], starts, [3, 2, 3], 3, 0)
    for seed, (world, pooling) in enumerate(zip(worlds, poolings, strict=True)):
        compressions.append((make_step(world, starts, [3, 2, 3], 3, seed)[0], pooling))
    wide = torch.randn(9, 96 + 64 + 8, generator=generator, device=device)
    outs = [
        module.enter_attention(wide, query_norm, window_norm, 1e-6, out_dtype, turns, rows, each, ring, compressions)
        for module, each in ((entrance, arena), (reference, truth))
    ]
    assert outs[0].dtype == out_dtype
    error = (outs[0].float() - outs[1].float()).norm() / outs[1].float().norm()
    # bf16: one rounding, which the interpreter makes toward zero.
    assert error < (1e-5 if out_dtype == torch.float32 else 6e-3)
    planes = [(ring, 5, "fp32")] + [
        (pooling.target, world.pages, pooling.target.format) for world, pooling in zip(worlds, poolings, strict=True)
    ]
    for plane, blocks, form in planes:
        assert compare_records(arena, truth, plane, blocks) < TOLERANCE[form]
        arena, truth = blank_records(arena, plane, blocks), blank_records(truth, plane, blocks)
    assert torch.equal(arena, truth)


def test_parts_are_the_launches_own(device: torch.device) -> None:
    """Bit for bit what the separate launches give."""
    world = make_world(device, 4, 64, 16, "fp8", overlaps=True, key=True)
    arena, (ring,), (pooling,) = join_worlds([world], 64, 16, device)
    raw, rows = make_step(world, [2, 7], [3, 3], 3, 0)
    wide = torch.randn(6, 96 + 64, device=device)
    ones = torch.ones(96, device=device)
    apart = arena.clone()
    entrance.enter_attention(
        wide, ones, ones[:64], 1e-6, torch.float32, world.turns, rows, arena, ring, [(raw, pooling)]
    )
    compressor.compress(raw, pooling, world.turns, rows, apart)
    plain = blank_records(apart, ring, 5)
    assert torch.equal(blank_records(arena, ring, 5), plain)
