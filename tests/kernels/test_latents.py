"""Entries and the keys that are made of them, against their truth: byte for byte where nothing is rounded."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import latents, reference
from kernels.forms import KeyProjection, Pooling, RawRing, RecordFormat, StepRows
from tests.kernels.planes import GAP, blank_records, compare_records, lay_plane

# As in `test_compressor.py`: sums in another order, and a step of the format where that crosses a middle.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp8": 2e-2}
PAGES, SLABS, SPAN_ROOM = 12, 4, 16


@dataclasses.dataclass
class World:
    """Slabs with a raw ring each, pages with entries and keys, and what makes them."""

    arena: Tensor
    pooling: Pooling
    key: KeyProjection
    turns: Tensor

    def copy(self) -> World:
        return dataclasses.replace(self, arena=self.arena.clone())


def make_world(
    device: torch.device, ratio: int, widths: tuple[int, int], form: RecordFormat, dtype: torch.dtype, rows: int = 4
) -> World:
    """Poisoned pages; rings full of rows, as if longer sequences were under way. Half of an entry's channels turn."""
    generator = torch.Generator(device).manual_seed(ratio + sum(widths))
    width, key_width = widths
    rope = 16
    target, end = lay_plane(GAP, rows, width, rope, form)
    keys, page_bytes = lay_plane(end, rows, key_width, 0, form)
    ring_rows = ratio + SPAN_ROOM if ratio > 1 else 0
    row_width = 2 * width if ratio > 1 else width
    ring = RawRing(PAGES * page_bytes + GAP, ring_rows * row_width * 4 + 2 * GAP, ring_rows, row_width)
    arena = torch.full((PAGES * page_bytes + SLABS * ring.stride,), 0xFF, dtype=torch.uint8, device=device)
    for slab in range(SLABS):
        filled = torch.randn(ring_rows * row_width, generator=generator, device=device)
        at = ring.data + slab * ring.stride
        arena[at : at + filled.nbytes] = filled.view(torch.uint8)
    norms = [torch.rand(size, generator=generator, device=device) + 0.5 for size in widths]
    angle = torch.rand(PAGES * rows * ratio, rope // 2, generator=generator, device=device) * 6.28
    matrix = torch.randn(key_width, width, generator=generator, device=device).to(dtype)
    target, keys = (dataclasses.replace(plane, stride=page_bytes) for plane in (target, keys))
    pooling = Pooling(ratio, False, None, norms[0], 1e-20, ring, target)
    return World(arena, pooling, KeyProjection(matrix, norms[1], keys), torch.stack((angle.cos(), angle.sin()), -1))


def make_step(world: World, starts: list[int], lengths: list[int], span: int, seed: int) -> tuple[Tensor, StepRows]:
    """(raw rows inside a wider tensor, rows): `lengths` positions from `starts` on, then padding."""
    device = world.arena.device
    generator = torch.Generator(device).manual_seed(seed)
    positions = [
        start + i if i < length else -1 for start, length in zip(starts, lengths, strict=True) for i in range(span)
    ]
    count = len(starts)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(7))
    rows = StepRows(
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.tensor([3, 0, 2][:count], dtype=torch.int32, device=device),
        order[: PAGES // count * count].view(count, -1).int().to(device),
        span,
    )
    wide = torch.randn(count * span, world.pooling.ring.width + 16, generator=generator, device=device)
    return wide[:, :-16], rows


def check(world: World, truth: World) -> None:
    left, wanted = world.arena, truth.arena
    for plane in (world.pooling.target, world.key.target):
        assert compare_records(world.arena, truth.arena, plane, PAGES) < TOLERANCE[plane.format]
        left, wanted = blank_records(left, plane, PAGES), blank_records(wanted, plane, PAGES)
    # Rings, and all that no one may write.
    assert torch.equal(left, wanted)


@pytest.mark.parametrize("span", [1, 3])
@pytest.mark.parametrize(
    ("ratio", "widths", "form", "dtype"),
    [
        (2, (80, 32), "fp32", torch.float32),
        (1, (80, 32), "fp32", torch.float32),
        (2, (80, 64), "fp8", torch.bfloat16),
        (1, (144, 48), "bf16", torch.bfloat16),
    ],
)
def test_steps(
    ratio: int, widths: tuple[int, int], form: RecordFormat, dtype: torch.dtype, span: int, device: torch.device
) -> None:
    world = make_world(device, ratio, widths, form, dtype)
    truth = world.copy()
    starts = [0, ratio - 1, 2 * ratio + 1]
    for step in range(4):
        # A sequence may bring less than others, and nothing; its next step goes on behind what it brought.
        lengths = [max(span - (step + i) % 3, 1) if step != i + 1 else 0 for i in range(3)]
        raw, rows = make_step(world, starts, lengths, span, step)
        for module, each in ((latents, world), (reference, truth)):
            module.compress_latents(raw, each.pooling, each.key, each.turns, rows, each.arena)  # type: ignore[attr-defined]
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    check(world, truth)


def test_a_prompts_rows(device: torch.device) -> None:
    world = make_world(device, 2, (80, 32), "fp32", torch.float32)
    truth = world.copy()
    raw, rows = make_step(world, [5], [11], SPAN_ROOM, 1)
    latents.compress_latents(raw, world.pooling, world.key, world.turns, rows, world.arena)
    reference.compress_latents(raw, truth.pooling, truth.key, truth.turns, rows, truth.arena)
    check(world, truth)


def test_a_sequence_has_the_same_bytes_alone(device: torch.device) -> None:
    world = make_world(device, 2, (80, 64), "fp8", torch.bfloat16)
    alone = world.copy()
    raw, rows = make_step(world, [4, 9, 2], [3, 2, 1], 3, 5)
    latents.compress_latents(raw, world.pooling, world.key, world.turns, rows, world.arena)
    for b in (2, 0, 1):
        part = slice(3 * b, 3 * b + 3)
        own = StepRows(rows.positions[part].clone(), rows.slabs[b : b + 1].clone(), rows.tables[b : b + 1].clone(), 3)
        latents.compress_latents(raw[part], alone.pooling, alone.key, alone.turns, own, alone.arena)
    assert torch.equal(world.arena, alone.arena)


def test_what_it_does_not_know_is_refused(device: torch.device) -> None:
    world = make_world(device, 2, (80, 32), "fp32", torch.float32)
    raw, rows = make_step(world, [0], [1], 1, 0)
    for pooling in (
        dataclasses.replace(world.pooling, overlaps=True),
        dataclasses.replace(world.pooling, target=dataclasses.replace(world.pooling.target, rows=5)),
    ):
        with pytest.raises(ValueError, match="keys"):
            latents.compress_latents(raw, pooling, world.key, world.turns, rows, world.arena)
