"""The compressor against its truth, byte for byte where nothing is rounded; groups that steps cut in all ways."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import compressor, reference
from kernels.forms import Pooling, RawRing, RecordFormat, StepRows
from tests.kernels.planes import GAP, blank_records, compare_records, lay_plane

# A record's sums are formed in another order, 1e-6; where that moves a channel over the middle between two values, it
# differs by a step: a sixteenth in e4m3 and 2^-8 in bf16, of single channels.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp8": 2e-2}


@dataclasses.dataclass
class World:
    """Slabs with a raw ring each, pages with records, and what pools the one into the other."""

    arena: Tensor
    pooling: Pooling
    turns: Tensor
    pages: int
    slabs: int

    def copy(self) -> World:
        return dataclasses.replace(self, arena=self.arena.clone())


def make_world(
    device: torch.device,
    ratio: int,
    width: int,
    rope: int,
    form: RecordFormat,
    *,
    overlaps: bool,
    biased: bool = True,
    key: bool = False,
    pages: int = 12,
    rows_in_page: int = 3,
) -> World:
    """Poisoned pages; rings full of rows, as if longer sequences were under way."""
    generator = torch.Generator(device).manual_seed(ratio + width)
    slabs, half, ring_rows = 5, width * (1 + overlaps), ratio * (1 + overlaps) + 8
    target, page_bytes = lay_plane(GAP, rows_in_page, width, 0 if key and form == "fp8" else rope, form)
    ring_bytes = ring_rows * half * 8
    ring = RawRing(pages * page_bytes + GAP, ring_bytes + 2 * GAP, ring_rows, half * 2)
    arena = torch.full((pages * page_bytes + slabs * ring.stride,), 0xFF, dtype=torch.uint8, device=device)
    for slab in range(slabs):
        filled = torch.randn(ring_rows * half * 2, generator=generator, device=device)
        at = ring.data + slab * ring.stride
        arena[at : at + ring_bytes] = filled.view(torch.uint8)
    bias = torch.randn(ratio, half, generator=generator, device=device) if biased else None
    norm = torch.rand(width, generator=generator, device=device) + 0.5
    angle = torch.rand(pages * rows_in_page * ratio, rope // 2, generator=generator, device=device) * 6.28
    pooling = Pooling(ratio, overlaps, bias, norm, 1e-6, ring, dataclasses.replace(target, stride=page_bytes))
    return World(arena, pooling, torch.stack((angle.cos(), angle.sin()), -1), pages, slabs)


def make_step(world: World, starts: list[int], lengths: list[int], span: int, seed: int) -> tuple[Tensor, StepRows]:
    """(raw rows inside a wider tensor, rows): `lengths` positions from `starts` on, then padding."""
    device = world.arena.device
    generator = torch.Generator(device).manual_seed(seed)
    positions = [
        start + i if i < length else -1 for start, length in zip(starts, lengths, strict=True) for i in range(span)
    ]
    count = len(starts)
    order = torch.Generator().manual_seed(7)
    tables = torch.randperm(world.pages, generator=order)[: world.pages // count * count].view(count, -1)
    rows = StepRows(
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.tensor([3, 0, 2, 4][:count], dtype=torch.int32, device=device),
        tables.int().to(device),
        span,
    )
    wide = torch.randn(count * span, world.pooling.ring.width + 32, generator=generator, device=device)
    return wide[:, 16:-16], rows


def check(world: World, truth: World, form: RecordFormat) -> None:
    target = world.pooling.target
    assert compare_records(world.arena, truth.arena, target, world.pages) < TOLERANCE[form]
    # Rings, and all that no one may write.
    left, wanted = (blank_records(each.arena, target, world.pages) for each in (world, truth))
    assert torch.equal(left, wanted)


@pytest.mark.parametrize("span", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"ratio": 4, "width": 128, "rope": 64, "form": "fp8", "overlaps": True},
        {"ratio": 4, "width": 32, "rope": 8, "form": "fp8", "overlaps": True, "key": True},
        {"ratio": 4, "width": 96, "rope": 32, "form": "fp32", "overlaps": True},
        {"ratio": 16, "width": 64, "rope": 16, "form": "bf16", "overlaps": False},
        {"ratio": 3, "width": 32, "rope": 8, "form": "fp32", "overlaps": False, "biased": False},
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()),
)
def test_steps(arguments: dict[str, object], span: int, device: torch.device) -> None:
    world = make_world(device, **arguments)  # type: ignore[arg-type]
    truth = world.copy()
    ratio = world.pooling.ratio
    starts = [0, ratio - 1, 2 * ratio - 2]
    for step in range(6):
        # A sequence may bring less than others, and nothing; its next step goes on behind what it brought.
        lengths = [max(span - (step + i) % 3, 1) if step != i + 1 else 0 for i in range(3)]
        raw, rows = make_step(world, starts, lengths, span, step)
        compressor.compress(raw, world.pooling, world.turns, rows, world.arena)
        reference.compress(raw, truth.pooling, truth.turns, rows, truth.arena)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    check(world, truth, arguments["form"])  # type: ignore[arg-type]


def test_long_span_closes_two_groups(device: torch.device) -> None:
    world = make_world(device, 4, 32, 8, "fp32", overlaps=True)
    truth = world.copy()
    raw, rows = make_step(world, [0, 3], [8, 7], 8, 0)
    compressor.compress(raw, world.pooling, world.turns, rows, world.arena)
    reference.compress(raw, truth.pooling, truth.turns, rows, truth.arena)
    check(world, truth, "fp32")


def test_group_larger_than_tile(device: torch.device) -> None:
    world = make_world(device, 16, 32, 8, "fp32", overlaps=False)
    truth = world.copy()
    raw, rows = make_step(world, [13, 31], [3, 1], 3, 0)
    config = compressor.CompressorConfig(warps=1, elements=128)
    compressor.compress(raw, world.pooling, world.turns, rows, world.arena, config)
    reference.compress(raw, truth.pooling, truth.turns, rows, truth.arena)
    check(world, truth, "fp32")


def test_split_group(device: torch.device) -> None:
    """Several programs a group, one of which finishes it, launch after launch."""
    config = compressor.CompressorConfig(warps=1, elements=1024, splits=4)
    world = make_world(device, 16, 128, 64, "fp8", overlaps=False)
    truth = world.copy()
    for step, starts in enumerate(([13, 31], [15, 45], [18, 47])):
        raw, rows = make_step(world, starts, [3, 1], 3, step)
        compressor.compress(raw, world.pooling, world.turns, rows, world.arena, config)
        reference.compress(raw, truth.pooling, truth.turns, rows, truth.arena)
    check(world, truth, "fp8")


@pytest.mark.gpu
def test_split_group_again_and_again(device: torch.device) -> None:
    """Whichever program of a group comes last, the bits are the same."""
    world = make_world(device, 128, 512, 64, "fp8", overlaps=False)
    truth = world.copy()
    raw, rows = make_step(world, [124, 381, 255, 511], [4, 4, 1, 3], 4, 0)
    reference.compress(raw, truth.pooling, truth.turns, rows, truth.arena)
    config = dataclasses.replace(compressor.LONG, splits=16)
    first: Tensor | None = None
    for _ in range(50):
        again = world.copy()
        # Other places in memory, other tickets.
        for _ in range(4):
            compressor.compress(raw, again.pooling, again.turns, rows, again.arena, config)
        first = again.arena if first is None else first
        assert torch.equal(again.arena, first)
    check(again, truth, "fp8")


def test_rejected_rows_are_overwritten(device: torch.device) -> None:
    """Rows of drafts that were rejected leave nothing behind: the step that goes on from before them writes anew."""
    world = make_world(device, 4, 32, 8, "fp32", overlaps=True)
    plain = world.copy()
    raw, rows = make_step(world, [6, 4], [4, 4], 4, 0)
    compressor.compress(raw, world.pooling, world.turns, rows, world.arena)
    raw, rows = make_step(world, [6, 4], [4, 4], 4, 1)
    for each in (world, plain):
        compressor.compress(raw, each.pooling, each.turns, rows, each.arena)
    assert torch.equal(world.arena, plain.arena)


def test_rows_alone_give_the_same_bits(device: torch.device) -> None:
    """Any batch and any span: what a row closes depends on its sequence only."""
    world = make_world(device, 4, 64, 16, "fp32", overlaps=True)
    alone = world.copy()
    raw, rows = make_step(world, [5, 1, 14], [3, 3, 2], 3, 0)
    compressor.compress(raw, world.pooling, world.turns, rows, world.arena)
    for r, position in enumerate(rows.positions.tolist()):
        if position >= 0:
            b = r // 3
            single = StepRows(rows.positions[r : r + 1], rows.slabs[b : b + 1], rows.tables[b : b + 1], 1)
            compressor.compress(raw[r : r + 1], alone.pooling, alone.turns, single, alone.arena)
    assert torch.equal(world.arena, alone.arena)


def test_padding_only(device: torch.device) -> None:
    world = make_world(device, 4, 32, 8, "fp8", overlaps=True, key=True)
    before = world.arena.clone()
    raw, rows = make_step(world, [0, 0], [0, 0], 4, 0)
    compressor.compress(raw, world.pooling, world.turns, rows, world.arena)
    assert torch.equal(world.arena, before)
