"""Bench of rows: norms, query heads and window records at V4-Flash's sizes.

Queries and latents come from the product just before, so they are in the L2 here as they are in a step: two sets, no
more. Predictions: in a graph a dependent kernel costs 1.0 us before its first load; then each dependent trip to the L2
0.6 us (row and position together, then turns), sums over warps 0.2 us, the store and the drain 0.3 us. An early launch
saves 0.8 us of the first. From a few megabytes on, the L2 gives about 5 TB/s, read and write counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import reference, rows
from kernels.forms import Plane, StepRows
from tests.kernels.bench import Case

RANK, HEADS, WIDTH, INDEX_WIDTH, ROPE, RING = 1024, 64, 512, 128, 64, 136
EPS = 1e-6
SETS = 2


@functools.cache
def make_turns() -> Tensor:
    angle = torch.rand(131072, ROPE // 2, device="cuda") * 6.28
    return torch.stack((angle.cos(), angle.sin()), -1)


def make_step(batch: int, span: int) -> StepRows:
    start = torch.arange(batch, device="cuda") * 1013 % 100000 + 1000
    positions = (start.unsqueeze(1) + torch.arange(span, device="cuda")).flatten().int()
    slabs = torch.randperm(batch, device="cuda").int()
    return StepRows(positions, slabs, torch.zeros(batch, 1, dtype=torch.int32, device="cuda"), span)


def close(out: Tensor, wanted: Tensor, limit: float) -> None:
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    assert error < limit, f"error {error:.2e} is not below {limit:.0e}"


def query_cases(batch: int, span: int) -> list[Case]:
    count = batch * span
    width = HEADS * WIDTH
    both = HEADS * (WIDTH + INDEX_WIDTH)
    step, turns = make_step(batch, span), make_turns()
    sets = [torch.randn(count, both, device="cuda").bfloat16() for _ in range(SETS)]
    moved = count * both * 4

    def run_both(config: rows.RowsConfig) -> Callable[[int], object]:
        shapes = (HEADS, WIDTH), (HEADS, INDEX_WIDTH)
        return lambda i: rows.prepare_both(sets[i % SETS], *shapes, step.positions, turns, EPS, config)

    def check(out: object) -> None:
        wanted = reference.prepare_both(sets[0], (HEADS, WIDTH), (HEADS, INDEX_WIDTH), step.positions, turns, EPS)
        for each, want in zip(out, wanted, strict=True):  # type: ignore[call-overload]
            close(each, want, 3e-3)

    predicted = 2.7 + moved / 5e6
    cases = [
        Case(f"prepare_both R={count} elements={elements} warps={warps}",
             run_both(rows.RowsConfig(elements=elements, query_warps=warps)),
             moved, predicted_us=predicted, check=check)
        for elements, warps in ((2048, 4), (2048, 2), (2048, 1), (1024, 1), (4096, 4), (4096, 8))
    ]  # fmt: skip
    cases.append(
        Case(f"prepare_both R={count} early", run_both(rows.RowsConfig(early=True)), moved,
             predicted_us=predicted - 0.8, check=check)
    )  # fmt: skip
    heads = [each[:, :width].unflatten(1, (HEADS, WIDTH)) for each in sets]
    index_heads = [each[:, width:].unflatten(1, (HEADS, INDEX_WIDTH)) for each in sets]
    cases += [
        Case(f"prepare_queries attention R={count}",
             lambda i: rows.prepare_queries(heads[i % SETS], step.positions, turns, EPS),
             count * width * 4, predicted_us=2.6 + count * width * 4 / 5e6),
        Case(f"prepare_queries index R={count}",
             lambda i: rows.prepare_queries(index_heads[i % SETS], step.positions, turns, None),
             count * (both - width) * 4, predicted_us=2.4 + count * (both - width) * 4 / 5e6),
    ]  # fmt: skip
    return cases


def row_cases(batch: int, span: int) -> list[Case]:
    count = batch * span
    step, turns = make_step(batch, span), make_turns()
    wide = [torch.randn(count, RANK + WIDTH, device="cuda") for _ in range(SETS)]
    weight = torch.rand(RANK, device="cuda") + 0.5
    # Slabs are 18 MB apart in a step; here far enough to share no line.
    stride = 1 << 17
    ring = Plane(0, RING * 576, stride, RING, WIDTH, ROPE, "fp8", 576, 8)
    arena = torch.zeros(batch * stride, dtype=torch.uint8, device="cuda")

    def write(i: int) -> None:
        rows.write_window(wide[i % SETS][:, RANK:], weight[:WIDTH], EPS, turns, step, arena, ring)

    def check_window(_: object) -> None:
        truth = torch.zeros_like(arena)
        reference.write_window(wide[0][:, RANK:], weight[:WIDTH], EPS, turns, step, truth, ring)
        for r, position in enumerate(step.positions.tolist()):
            block, row = int(step.slabs[r // span]), position % RING
            out, wanted = (reference.load_record(each, ring, block, row) for each in (arena, truth))
            close(out, wanted, 2e-2)

    def check_norm(out: object) -> None:
        assert isinstance(out, Tensor)
        close(out, reference.norm_rows(wide[0][:, :RANK], weight, EPS, torch.bfloat16), 3e-3)

    return [
        Case(f"norm_rows R={count}",
             lambda i: rows.norm_rows(wide[i % SETS][:, :RANK], weight, EPS, torch.bfloat16),
             count * RANK * 6, predicted_us=2.1, check=check_norm),
        Case(f"write_window R={count}", write, count * (WIDTH * 4 + 584), predicted_us=2.7, check=check_window),
    ]  # fmt: skip


def cases() -> list[Case]:
    found: list[Case] = []
    for batch, span in ((1, 1), (16, 1), (64, 1), (64, 4)):
        found += row_cases(batch, span) + query_cases(batch, span)
    return found
