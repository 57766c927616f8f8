"""Bench of rows: norms, query heads and window records at V4-Flash's sizes.

Queries and latents come from the product just before, so they are in the L2 here as they are in a step: two sets, no
more. Predictions: in a graph a dependent kernel costs 1.0 us before its first load; then each dependent trip to the L2
0.6 us (row and position together, then turns), sums over warps 0.2 us, the store and the drain 0.3 us. An early launch
saves 0.8 us of the first. From a few megabytes on, the L2 gives about 5 TB/s, read and write counted.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels import reference, rows
from kernels.forms import Plane, StepRows
from tests.kernels.bench import Case

RANK, HEADS, WIDTH, ROPE, RING = 1024, 64, 512, 64, 136
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

    wider = [torch.randn(count, HEADS * WIDTH + 8192, device="cuda").bfloat16() for _ in range(SETS)]
    heads = [each[:, : HEADS * WIDTH].unflatten(1, (HEADS, WIDTH)) for each in wider]

    def check_heads(out: object) -> None:
        assert isinstance(out, Tensor)
        close(out, reference.prepare_queries(heads[0], step.positions, turns, EPS), 3e-3)

    moved = count * HEADS * WIDTH * 4
    return [
        Case(f"prepare_queries R={count}",
             lambda i: rows.prepare_queries(heads[i % SETS], step.positions, turns, EPS),
             moved, predicted_us=1.9 + moved / 5e6, check=check_heads),
        Case(f"norm_rows R={count}",
             lambda i: rows.norm_rows(wide[i % SETS][:, :RANK], weight, EPS, torch.bfloat16),
             count * RANK * 6, predicted_us=2.1, check=check_norm),
        Case(f"write_window R={count}", write, count * (WIDTH * 4 + 584), predicted_us=2.7, check=check_window),
    ]  # fmt: skip


def cases() -> list[Case]:
    found: list[Case] = []
    for batch, span in ((1, 1), (16, 1), (64, 1), (64, 4)):
        found += row_cases(batch, span)
    return found
