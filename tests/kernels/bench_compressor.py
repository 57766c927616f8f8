"""Bench of the compressor and of the entrance of attention at V4-Flash's sizes.

Raw rows come from the product just before and are in the L2, as in a step; rings are not: each call takes another
layer's, of as many as fill the L2 several times over. Steps in which no group closes, and steps in which as many do as
on average: a quarter of the CSA groups (all, with 4 rows a sequence), and one HCA group.

Predictions: 1.0 us before the first load of a dependent kernel, 0.2 us if it is launched early; 0.6 us for positions
and row; for a group 1.0 us for its rings from memory (an HCA group 8 times, 64 KB each: 8 x 0.85 us), then turns
0.6 us, sums over warps and the store 0.5 us. Split over 8 programs it is twice 0.85 us, and 0.8 us for the last of them
to find the shares of all. More than a program for each place of an SM: 1.0 us for each further wave.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from kernels import compressor, entrance, reference
from kernels.compressor import CompressorConfig
from kernels.forms import Plane, Pooling, RawRing, StepRows
from tests.kernels.bench import Case
from tests.kernels.bench_rows import EPS, RANK, RING, ROPE, SETS, WIDTH, close, make_turns

LAYERS = 8
PAGE_TOKENS = 256
LENGTH = 4096
PARTS: dict[str, list[tuple[int, bool, int, int]]] = {
    "window": [],
    "csa": [(4, True, WIDTH, ROPE), (4, True, 128, 0)],
    "hca": [(128, False, WIDTH, ROPE)],
}
"""Ratio, overlap, width and rotated channels of stored records, by kind of layer."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's places and poolings."""

    window: Plane
    poolings: list[Pooling]


@dataclasses.dataclass(frozen=True)
class World:
    """Several layers of one kind in an arena of their own: pages, then slabs."""

    arena: Tensor
    layers: list[Layer]
    tables: Tensor


@functools.cache
def make_world(kind: str, batch: int) -> World:
    pages = LENGTH // PAGE_TOKENS + 1
    parts = PARTS[kind]
    page_end = 0
    targets: list[tuple[int, int]] = []
    for _ in range(LAYERS):
        for ratio, _, width, rope in parts:
            entries = PAGE_TOKENS // ratio
            size, scale_bytes = (576, 8) if rope else (width, 4)
            scale = page_end + -(-entries * size // 128) * 128
            targets.append((page_end, scale))
            page_end = scale + -(-entries * scale_bytes // 128) * 128
    slab_base = page_end * pages * batch
    slab_end = 0
    places: list[int] = []
    for _ in range(LAYERS):
        places.append(slab_end)
        slab_end += -(-RING * 584 // 128) * 128
        for ratio, overlaps, width, _ in parts:
            places.append(slab_end)
            slab_end += (ratio * (1 + overlaps) + 8) * width * (1 + overlaps) * 8
    arena = torch.empty(slab_base + slab_end * batch, dtype=torch.uint8, device="cuda")
    # Half a gigabyte of rings that hold plausible latents and gates.
    arena[: arena.numel() // 4 * 4].view(torch.float32).normal_()
    layers = []
    for i in range(LAYERS):
        here = places[i * (1 + len(parts)) :]
        window = Plane(
            slab_base + here[0], slab_base + here[0] + RING * 576, slab_end, RING, WIDTH, ROPE, "fp8", 576, 8
        )
        poolings = []
        for j, (ratio, overlaps, width, rope) in enumerate(parts):
            data, scale = targets[i * len(parts) + j]
            size, scale_bytes = (576, 8) if rope else (width, 4)
            half = width * (1 + overlaps)
            target = Plane(data, scale, page_end, PAGE_TOKENS // ratio, width, rope, "fp8", size, scale_bytes)
            ring = RawRing(slab_base + here[1 + j], slab_end, ratio * (1 + overlaps) + 8, half * 2)
            bias = torch.randn(ratio, half, device="cuda")
            norm = torch.rand(width, device="cuda") + 0.5
            poolings.append(Pooling(ratio, overlaps, bias, norm, EPS, ring, target))
        layers.append(Layer(window, poolings))
    tables = torch.randperm(pages * batch, device="cuda").view(batch, pages).int()
    return World(arena, layers, tables)


def make_step(world: World, batch: int, span: int, *, closes: bool, ratio: int) -> StepRows:
    """Sequences spread over a group's places, or none of them at its end."""
    start = torch.arange(batch, device="cuda") * 997 % (LENGTH - 600) + 512
    start -= start % ratio
    place = torch.zeros_like(start)
    if closes:
        # One in `ratio` or, of long groups, one in all.
        first = torch.arange(batch, device="cuda") % min(ratio, batch) == 0
        place = torch.where(first, ratio - 1 if span == 1 else max(ratio - span, 0), 0)
        if ratio <= span:
            place = start * 0
    elif span >= ratio:
        # With as many rows as a group has, only padding keeps it open.
        span_rows = torch.arange(span, device="cuda").expand(batch, -1)
        positions = torch.where(span_rows < ratio - 1, start.unsqueeze(1) + span_rows, -1)
        return StepRows(positions.flatten().int(), torch.arange(batch, device="cuda").int(), world.tables, span)
    positions = ((start + place).unsqueeze(1) + torch.arange(span, device="cuda")).flatten().int()
    return StepRows(positions, torch.randperm(batch, device="cuda").int(), world.tables, span)


def compare(world: World, truth: Tensor, layer: Layer, step: StepRows) -> None:
    """All that the truth wrote: rows of rings bit for bit, records closely."""
    for r, position in enumerate(step.positions.tolist()):
        if position < 0:
            continue
        sequence = r // step.span
        slab = int(step.slabs[sequence])
        pairs = [(layer.window, slab, position % RING)]
        for pooling in layer.poolings:
            ring = pooling.ring
            at = ring.data + slab * ring.stride + position % ring.rows * ring.width * 4
            assert torch.equal(world.arena[at : at + ring.width * 4], truth[at : at + ring.width * 4])
            if (position + 1) % pooling.ratio == 0:
                entry, rows = position // pooling.ratio, pooling.target.rows
                pairs.append((pooling.target, int(step.tables[sequence, entry // rows]), entry % rows))
        for plane, block, row in pairs:
            out, wanted = (reference.load_record(each, plane, block, row) for each in (world.arena, truth))
            close(out, wanted, 2e-2)


def entrance_cases(kind: str, batch: int, span: int, *, closes: bool) -> list[Case]:
    count = batch * span
    world = make_world(kind, batch)
    ratio = {"window": 1 << 20, "csa": 4, "hca": 128}[kind]
    step = make_step(world, batch, span, closes=closes, ratio=min(ratio, 128))
    turns = make_turns()
    raw_width = sum(pooling.ring.width for pooling in world.layers[0].poolings)
    wide = [torch.randn(count, RANK + WIDTH, device="cuda") for _ in range(SETS)]
    raws = [torch.randn(count, raw_width + 64, device="cuda") for _ in range(SETS)]
    query_norm, window_norm = torch.rand(RANK, device="cuda") + 0.5, torch.rand(WIDTH, device="cuda") + 0.5

    def compressions(i: int) -> list[tuple[Tensor, Pooling]]:
        at, found = 0, []
        for pooling in world.layers[i % LAYERS].poolings:
            found.append((raws[i % SETS][:, at : at + pooling.ring.width], pooling))
            at += pooling.ring.width
        return found

    def enter(i: int, config: CompressorConfig | None = None) -> object:
        layer = world.layers[i % LAYERS]
        return entrance.enter_attention(
            wide[i % SETS], query_norm, window_norm, EPS, torch.bfloat16, turns, step, world.arena, layer.window,
            compressions(i), config,
        )  # fmt: skip

    def check(out: object) -> None:
        truth = world.arena.clone()
        layer = world.layers[0]
        wanted = reference.enter_attention(
            wide[0], query_norm, window_norm, EPS, torch.bfloat16, turns, step, truth, layer.window, compressions(0)
        )
        assert isinstance(out, Tensor)
        close(out, wanted, 3e-3)
        compare(world, truth, layer, step)

    def compress(i: int, which: int) -> None:
        raw, pooling = compressions(i)[which]
        compressor.compress(raw, pooling, turns, step, world.arena)

    positions = step.positions.tolist()
    closed = sum(position >= 0 and (position + 1) % ratio == 0 for position in positions)
    read = sum(
        p.ratio * (1 + p.overlaps) * (p.target.width * 8) + p.target.data_bytes for p in world.layers[0].poolings
    )
    moved = count * ((RANK + WIDTH) * 4 + RANK * 2 + 584 + raw_width * 8) + closed * read
    name = f"{kind} R={count} closed={closed}"
    predicted = 2.7
    if closed:
        predicted = 9.4 if kind == "hca" else 3.7
    programs = count * (2 + len(world.layers[0].poolings)) + batch * len(world.layers[0].poolings)
    predicted += max(0, -(-programs // (264 if kind == "hca" else 660)) - 1) * 1.0
    variants = {
        "window": [],
        "csa": [CompressorConfig(4, 2048), CompressorConfig(8, 4096)],
        "hca": [CompressorConfig(8, 4096), CompressorConfig(16, 8192), CompressorConfig(4, 4096)],
    }[kind]
    for i in range(LAYERS):
        # Once before the capture, which must not make tickets.
        enter(i)
    cases = [Case(f"enter {name}", enter, moved, predicted_us=predicted, check=check)]
    late = dataclasses.replace(compressor.WHOLE if kind == "hca" else compressor.SHORT, early=False)
    cases.append(Case(f"enter {name} not early", functools.partial(enter, config=late), moved,
                      predicted_us=predicted + 0.8, check=check))  # fmt: skip
    if kind == "hca":
        for splits in (8, 16) if batch == 64 else (8,):
            split = dataclasses.replace(compressor.LONG, splits=splits)
            for i in range(LAYERS):
                # Once before the capture, which must not make tickets.
                enter(i, split)
            waves = -(-(count * 3 + batch * splits) // 528) - 1
            cases.append(Case(f"enter {name} splits={splits}", functools.partial(enter, config=split), moved,
                              predicted_us=(5.2 if closed else 2.7) + waves * 0.8, check=check))  # fmt: skip
    for config in variants if closes and batch == 64 else ():
        cases.append(
            Case(f"enter {name} warps={config.warps} elements={config.elements}",
                 functools.partial(enter, config=config), moved, predicted_us=predicted, check=check)
        )  # fmt: skip
    if closes:
        for which, pooling in enumerate(world.layers[0].poolings):
            label = f"compress {name} width={pooling.target.width}"
            cases.append(Case(label, functools.partial(compress, which=which), moved / 2, predicted_us=predicted))
    return cases


def cases() -> list[Case]:
    found: list[Case] = []
    for batch, span in ((1, 1), (16, 1), (64, 1), (64, 4)):
        found += entrance_cases("window", batch, span, closes=False)
        for kind in ("csa", "hca"):
            for closes in (False, True):
                found += entrance_cases(kind, batch, span, closes=closes)
    return found
