"""n-gram memories against their truth: which lines are read, what is kept of the ids, and what comes to the streams."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import memory, reference
from kernels.forms import IdRing, MemoryTable, StepRows

SLABS, PAD = 4, 7
RING = IdRing(32, 256, 16)


def draw_table(device: torch.device, history: int, heads: int, width: int, store: torch.dtype) -> MemoryTable:
    """A vocabulary of 50 ids in 20 classes; multipliers whose products stay below 2^63."""
    generator = torch.Generator().manual_seed(history * 100 + width)
    lines = history * heads
    primes = torch.tensor([101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157][:lines])
    values = torch.randn((int(primes.sum()), width), generator=generator)
    scale = None
    if store == torch.float8_e4m3fn:
        scale = torch.randint(120, 134, (len(values), -(-width // 32)), generator=generator).to(torch.uint8)
    multipliers = torch.randint(2**54, 2**57, (history + 1,), generator=generator) * 2 + 1
    parts = (values.to(store), scale, torch.randint(20, (50,), generator=generator).int())
    data, scale, folded = (None if part is None else part.to(device) for part in parts)
    assert data is not None and folded is not None
    offsets = (primes.cumsum(0) - primes).to(device)
    return MemoryTable(data, scale, folded, PAD, multipliers.to(device), primes.to(device), offsets)


def make_rows(device: torch.device, starts: list[int], lengths: list[int], span: int, seed: int) -> tuple[Tensor, ...]:
    """(tokens, positions, slabs)."""
    generator = torch.Generator().manual_seed(seed)
    positions = [
        start + i if i < length else -1 for start, length in zip(starts, lengths, strict=True) for i in range(span)
    ]
    tokens = torch.randint(50, (len(positions),), generator=generator)
    slabs = torch.tensor([2, 0, 3][: len(starts)])
    return tuple(each.int().to(device) for each in (tokens, torch.tensor(positions), slabs))


def blank_arena(device: torch.device) -> Tensor:
    return torch.full((SLABS * RING.stride,), 0xFF, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize(
    ("history", "heads", "width", "store", "dtype"),
    [
        (3, 2, 32, torch.float8_e4m3fn, torch.bfloat16),
        (3, 4, 40, torch.float8_e4m3fn, torch.float32),
        (1, 3, 24, torch.float32, torch.float32),
        (2, 2, 64, torch.bfloat16, torch.bfloat16),
    ],
)
def test_lines_of_steps(
    history: int, heads: int, width: int, store: torch.dtype, dtype: torch.dtype, span: int, device: torch.device
) -> None:
    table = draw_table(device, history, heads, width, store)
    arena, truth = blank_arena(device), blank_arena(device)
    starts = [0, 1, 14]
    for step in range(4):
        lengths = [max(span - (step + i) % 3, 1) if step != i + 1 else 0 for i in range(3)]
        tokens, positions, slabs = make_rows(device, starts, lengths, span, step)
        if step == 1:
            # An id that nobody knows hides those before it.
            tokens[-1] = -1
        rows = StepRows(positions, slabs, torch.zeros((3, 1), dtype=torch.int32, device=device), span)
        # Values of narrow formats are exact in both types.
        for _ in range(2):
            found = memory.read_memory(tokens, rows, arena, RING, table, dtype)
            assert torch.equal(found, reference.read_memory(tokens, rows, truth, RING, table, dtype)), step
            assert torch.equal(arena, truth)
        assert not found[positions < 0].any() and found[positions >= 0].any()
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]


def test_ids_of_a_prompt_in_one_step_are_as_one_by_one(device: torch.device) -> None:
    table = draw_table(device, 3, 2, 32, torch.float8_e4m3fn)
    ring = dataclasses.replace(RING, rows=32)
    tokens, positions, slabs = make_rows(device, [0], [20], 20, 3)
    tables = torch.zeros((1, 1), dtype=torch.int32, device=device)
    whole = memory.read_memory(
        tokens, StepRows(positions, slabs, tables, 20), blank_arena(device), ring, table, torch.float32
    )
    arena = blank_arena(device)
    single = [
        memory.read_memory(
            tokens[i : i + 1], StepRows(positions[i : i + 1], slabs, tables, 1), arena, RING, table, torch.float32
        )
        for i in range(20)
    ]
    assert torch.equal(whole, torch.cat(single))
    assert len({tuple(line.tolist()) for line in whole}) == 20


def test_a_ring_that_is_too_short_is_refused(device: torch.device) -> None:
    table = draw_table(device, 3, 2, 32, torch.float32)
    tokens, positions, slabs = make_rows(device, [0], [14], 14, 3)
    rows = StepRows(positions, slabs, torch.zeros((1, 1), dtype=torch.int32, device=device), 14)
    with pytest.raises(ValueError, match="needs 17 ids, the ring 16"):
        memory.read_memory(tokens, rows, blank_arena(device), RING, table, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tables_on_the_host_are_read_from_there() -> None:
    device = torch.device("cuda")
    table = draw_table(device, 3, 2, 32, torch.float8_e4m3fn)
    far = dataclasses.replace(table, data=table.data.cpu().pin_memory())
    tokens, positions, slabs = make_rows(device, [3, 5], [2, 1], 2, 3)
    rows = StepRows(positions, slabs, torch.zeros((2, 1), dtype=torch.int32, device=device), 2)
    near, found = (
        memory.read_memory(tokens, rows, blank_arena(device), RING, each, torch.bfloat16) for each in (table, far)
    )
    assert torch.equal(near, found) and near[:2].any()


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden"), [(torch.float32, 3, 72), (torch.bfloat16, 2, 128), (torch.float32, 1, 256)]
)
def test_streams_get_it_through_gates(dtype: torch.dtype, rows: int, hidden: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(rows)
    streams = torch.randn((rows, 4, hidden), generator=generator, device=device).to(dtype)
    projected = torch.randn((rows, 5 * hidden), generator=generator, device=device).to(dtype)
    # One key is its stream, so that a gate opens; a row of padding has none.
    projected[0, :hidden] = streams[0, 0]
    projected[-1, hidden : 2 * hidden] = 0
    weight = torch.rand((4, hidden), generator=generator, device=device)
    found = memory.add_memory(streams, projected, weight, 1e-20)
    wanted = reference.add_memory(streams, projected, weight, 1e-20)
    # Two roundings of 2^-9 in bf16, which the interpreter cuts off; in float32 sums in another order, and exponentials
    # that a device has to the last few bits.
    limit = 1e-5 if dtype == torch.float32 else 8e-3
    assert float((found - wanted).float().norm() / wanted.float().norm()) < limit
    assert float((found[0, 0].float() - streams[0, 0].float()).norm()) > 0.9 * float(
        projected[0, -hidden:].float().norm()
    )
