"""Attention at V4-Flash's sizes: 64 heads of 512, window 128 in rings of 136, 512 selected or all compressed entries.

Pages of 987,904 bytes lie at random in a pool of 8 GB, eight layers of entries in each, and calls rotate through the
layers. What one row reads (0.4 MB) stays in the L2 over the replays of a graph all the same, so a real step's single
rows are slower by what a few reads from memory take beside reads from L2, about 1 us.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.attention import Config, attend
from kernels.forms import Plane, RecordFormat, StepRows
from tests.kernels.bench import Case

HEADS, WIDTH, ROPE, WINDOW, RING, TOP_K = 64, 512, 64, 128, 136, 512
PAGE_BYTES, PAGE_TOKENS, PAGES, LAYERS = 987_904, 256, 8192, 8
SLABS, SLAB_BYTES = 64, 1 << 21
RATIO = {"window": 0, "csa": 4, "hca": 128}
ROWS = ((1, 1), (16, 1), (64, 1), (64, 4))
"""(sequences, span)."""


def _planes(kind: str, format: RecordFormat, layer: int) -> tuple[Plane, Plane | None]:
    data, scale = (576, 8) if format == "fp8" else (1024, 0)

    def plane(at: int, stride: int, rows: int) -> Plane:
        at += layer * (rows * (data + scale) + 15) // 16 * 16
        return Plane(at, at + rows * data, stride, rows, WIDTH, ROPE, format, data, scale)

    ring = plane(PAGES * PAGE_BYTES, SLAB_BYTES, RING)
    return ring, plane(4096, PAGE_BYTES, PAGE_TOKENS // RATIO[kind]) if RATIO[kind] else None


def _fill(arena: Tensor, plane: Plane, blocks: int, draw: torch.Generator) -> None:
    """Random records in a plane of all blocks; every 64th block has the same."""
    some = min(64, blocks)
    count = some * plane.rows
    records = torch.randn(count, WIDTH, generator=draw, device=arena.device)
    if plane.format == "bf16":
        data = records.bfloat16().view(torch.uint8)
    else:
        still = (records[:, : WIDTH - ROPE] * 64).to(torch.float8_e4m3fn).view(torch.uint8)
        data = torch.cat((still, records[:, WIDTH - ROPE :].bfloat16().view(torch.uint8)), 1)
    # Scales of 2^-8 .. 2^-5: records of different size, as queries of different heads see them.
    scales = torch.randint(119, 123, (count, 8), generator=draw, device=arena.device, dtype=torch.uint8)
    for first in range(0, blocks, some):
        number = min(some, blocks - first)
        for at, rows, row_bytes in ((plane.data, data, plane.data_bytes), (plane.scale, scales, plane.scale_bytes)):
            size = plane.rows * row_bytes
            target = arena.as_strided((number, size), (plane.stride, 1), at + first * plane.stride)
            target.copy_(rows[: number * plane.rows].reshape(number, size)[:, :size])


@functools.cache
def _arena() -> Tensor:
    return torch.empty(PAGES * PAGE_BYTES + SLABS * SLAB_BYTES, dtype=torch.uint8, device="cuda")


_held: list[tuple[str, str]] = []
"""What the arena is filled for; one kind and format at a time."""


def _hold(kind: str, format: RecordFormat) -> None:
    if _held != [(kind, format)]:
        draw = torch.Generator("cuda").manual_seed(7)
        for layer in range(LAYERS):
            ring, entries = _planes(kind, format, layer)
            _fill(_arena(), ring, SLABS, draw)
            if entries is not None:
                _fill(_arena(), entries, PAGES, draw)
        _held[:] = [(kind, format)]


class Inputs:
    """Arguments of the calls of one case, made at its first call."""

    def __init__(self, kind: str, format: RecordFormat, sequences: int, span: int, context: int) -> None:
        self.kind, self.format, self.rows, self.span, self.context = kind, format, sequences * span, span, context
        self.visible = (context // RATIO[kind]) if RATIO[kind] else 0
        self.records = WINDOW + (min(self.visible, TOP_K) if kind == "csa" else self.visible)

    @functools.cached_property
    def arguments(self) -> list[tuple]:
        draw = torch.Generator("cuda").manual_seed(self.context + self.rows)
        device = torch.device("cuda")
        sequences = self.rows // self.span
        # Positions of the last row of a sequence; contexts of a batch differ a little.
        last = self.context - 1 - torch.arange(sequences, device=device) % 4 * self.span
        positions = (last.unsqueeze(1) - torch.arange(self.span - 1, -1, -1, device=device)).flatten().int()
        slabs = torch.randperm(SLABS, generator=draw, device=device)[:sequences].int()
        count = self.context // PAGE_TOKENS
        tables = torch.randint(0, PAGES, (sequences, count), generator=draw, device=device, dtype=torch.int32)
        rows = StepRows(positions, slabs, tables, self.span)
        turns = torch.rand(self.context, ROPE // 2, generator=draw, device=device) * 6.28
        turns = torch.stack((turns.cos(), turns.sin()), -1)
        sink = torch.randn(HEADS, generator=draw, device=device)
        made = []
        for layer in range(LAYERS):
            query = torch.randn(self.rows, HEADS, WIDTH, generator=draw, device=device).bfloat16()
            ring, entries = _planes(self.kind, self.format, layer)
            selected = None
            if self.kind == "csa":
                scores = torch.rand(self.rows, self.visible, generator=draw, device=device)
                entry = torch.arange(self.visible, device=device)
                scores = scores.masked_fill(entry >= (positions.unsqueeze(1) + 1) // 4, -1.0)
                best = scores.topk(min(TOP_K, self.visible), 1)
                chosen = best.indices.masked_fill(best.values < 0, 1 << 30).sort(1).values.int()
                chosen = chosen.masked_fill(chosen == 1 << 30, -1)
                selected = torch.nn.functional.pad(chosen, (0, TOP_K - chosen.shape[1]), value=-1).contiguous()
            made.append((query, sink, turns, rows, _arena(), ring, WINDOW, entries, RATIO[self.kind], selected))
        return made

    def run(self, number: int, config: Config | None) -> Tensor:
        _hold(self.kind, self.format)
        return attend(*self.arguments[number % LAYERS], config=config)

    def check(self, out: object) -> None:
        """Three rows against the reference, and those rows again on their own, bit for bit."""
        assert isinstance(out, Tensor)
        query, sink, turns, rows, *others, selected = self.arguments[0]
        for r in sorted({0, self.rows // 2, self.rows - 1}):
            s = r // self.span
            one = StepRows(rows.positions[r : r + 1], rows.slabs[s : s + 1], rows.tables[s : s + 1], 1)
            alone = (query[r : r + 1], sink, turns, one, *others, selected[r : r + 1] if selected is not None else None)
            truth = reference.attend(*alone).float()
            error = float((out[r : r + 1].float() - truth).norm() / truth.norm())
            # p and the result are rounded to bf16, see test_attention.
            assert error <= 6e-3, f"row {r}: relative error {error}"
            if self.records < 4096:
                assert torch.equal(attend(*alone), out[r : r + 1]), f"row {r} depends on the others"


def _predict(rows: int, records: int, config: Config) -> float:
    """Microseconds. Start, first addresses and queries: 4. A tile of 64: 1,700 cycles of issue, 1,500 of the first and
    1,000 of the second product, 400 of softmax and barriers that hardly overlap: 2.5. A partial result: 1.2 to leave a
    multiprocessor, and its way to the L2 and back at 5 TB/s beside the others. Adding up: a dependent kernel, 3.
    """
    tiles = -(-records // 64)
    each = 1 if tiles <= config.single else 2
    while each * each * config.spread < tiles and tiles > config.single:
        each += 1
    splits = -(-tiles // each)
    if splits == 1:
        return (4 + 2.5 * tiles) * -(-rows // 132)
    programs = max(1, min(splits, config.programs // rows))
    shares = [(z + 1) * splits // programs * tiles // splits - z * splits // programs * tiles // splits
              for z in range(programs)]  # fmt: skip
    busy = 4 + max(shares) * 2.5 + -(-splits // programs) * 1.2
    moved = rows * splits * HEADS * WIDTH * config.partials.itemsize * 2 / 5e6
    return busy * -(-rows * programs // 132) + moved + (0 if programs == 1 else 1.5 if config.overlaps else 3)


def cases() -> list[Case]:
    made = []

    def add(kind: str, format: RecordFormat, sequences: int, span: int, context: int, **changes: Any) -> None:
        inputs = Inputs(kind, format, sequences, span, context)
        config = dataclasses.replace(Config() if format == "fp8" else Config(keys=32), **changes)
        record_bytes = 584 if format == "fp8" else 1024
        variant = "".join(f" {name}={value}".replace("torch.", "") for name, value in changes.items())

        def run(number: int, inputs: Inputs = inputs, config: Config = config) -> Tensor:
            return inputs.run(number, config)

        # Only defaults repeat a row bit for bit: keys and spread change the order of sums.
        check: Callable[[object], None] | None = inputs.check if not changes and context <= 131_072 else None
        made.append(
            Case(
                f"{kind} {format} {sequences}x{span} {context // 1024}K{variant}",
                run,
                inputs.rows * (inputs.records * record_bytes + HEADS * WIDTH * 4),
                inputs.rows * inputs.records * HEADS * WIDTH * 4.0,
                _predict(inputs.rows, inputs.records, config),
                check,
            )
        )

    for sequences, span in ROWS:
        add("window", "fp8", sequences, span, 8192)
    for kind in ("csa", "hca"):
        for context in (1024, 8192, 131_072):
            for sequences, span in ROWS:
                add(kind, "fp8", sequences, span, context)
        for sequences, span in ROWS:
            for changes in (
                {"spread": 1}, {"spread": 3}, {"spread": 5}, {"partials": torch.float32},
                {"overlaps": False}, {"single": 0}, {"stages": 2}, {"keys": 32}, {"programs": 264}, {"programs": 1},
            ):  # fmt: skip
                add(kind, "fp8", sequences, span, 131_072, **changes)
        for sequences, span in ((1, 1), (16, 1)):
            for changes in ({"heads": 16}, {"heads": 16, "keys": 32, "warps": 4}):
                add(kind, "fp8", sequences, span, 131_072, **changes)
        add(kind, "fp8", 16, 1, 855 * 1024)
    for kind in ("csa", "hca"):
        for sequences, span in ROWS:
            add(kind, "bf16", sequences, span, 131_072)
    return made
