"""Rows against their truths: norms, query heads, window records; and the bytes of records, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import records, reference, rows
from kernels.forms import Plane, RecordFormat, StepRows
from tests.kernels.planes import GAP, blank_records, compare_records, lay_plane

# float32: sums in another order. bf16: one rounding, which the interpreter makes toward zero, so up to 2^-8 of each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
RECORD_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp8": 2e-2}


def make_turns(device: torch.device, positions: int, rope: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(11)
    angle = torch.rand(positions, rope // 2, generator=generator, device=device) * 6.28
    return torch.stack((angle.cos(), angle.sin()), -1)


def error(out: Tensor, wanted: Tensor) -> float:
    assert out.shape == wanted.shape and out.dtype == wanted.dtype
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width", "dtype"), [(3, 96, torch.float32), (1, 33, torch.bfloat16)])
def test_norm_rows(count: int, width: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(width)
    wide = torch.randn(count, width + 29, generator=generator, device=device).to(dtype)
    x = wide[:, 5 : 5 + width] * torch.logspace(-2, 2, count, device=device).unsqueeze(1).to(dtype)
    weight = torch.randn(width, generator=generator, device=device)
    out = rows.norm_rows(x, weight, 1e-5, out_dtype)
    assert error(out, reference.norm_rows(x, weight, 1e-5, out_dtype)) < TOLERANCE[out_dtype]
    assert torch.equal(out[-1:], rows.norm_rows(x[-1:], weight, 1e-5, out_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "rope", "eps"), [(4, 64, 16, 1e-6), (3, 96, 32, None), (16, 32, 8, 1e-6)])
def test_prepare_queries(
    heads: int, width: int, rope: int, eps: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator(device).manual_seed(heads)
    wide = (torch.randn(3, heads * width + 16, generator=generator, device=device) * 3).to(dtype)
    query = wide[:, 16:].unflatten(1, (heads, width))
    positions = torch.tensor([7, -1, 20], dtype=torch.int32, device=device)
    turns = make_turns(device, 21, rope)
    wanted = reference.prepare_queries(query, positions, turns, eps)
    config = rows.RowsConfig(elements=128)
    out = rows.prepare_queries(query, positions, turns, eps, config)
    assert error(out, wanted) < TOLERANCE[dtype]
    assert torch.equal(out[2:], rows.prepare_queries(query[2:], positions[2:], turns, eps, config))


@dataclasses.dataclass
class Window:
    """Slabs with one window ring each."""

    arena: Tensor
    ring: Plane
    slabs: int = 4


def make_window(device: torch.device, width: int, rope: int, form: RecordFormat, ring_rows: int) -> Window:
    ring, size = lay_plane(GAP, ring_rows, width, rope, form)
    arena = torch.full((4 * size,), 0xFF, dtype=torch.uint8, device=device)
    return Window(arena, dataclasses.replace(ring, stride=size))


@pytest.mark.parametrize(
    ("width", "rope", "form", "dtype"),
    [
        (128, 64, "fp8", torch.float32),
        (96, 32, "fp8", torch.bfloat16),
        (64, 16, "bf16", torch.float32),
        (32, 8, "fp32", torch.float32),
    ],
)
def test_write_window(width: int, rope: int, form: RecordFormat, dtype: torch.dtype, device: torch.device) -> None:
    window = make_window(device, width, rope, form, ring_rows=13 + 8)
    truth = dataclasses.replace(window, arena=window.arena.clone())
    generator = torch.Generator(device).manual_seed(width)
    positions = torch.tensor([19, 20, 21, 0, 1, -1, -1, -1, -1], dtype=torch.int32, device=device)
    slabs = torch.tensor([2, 0, 2], dtype=torch.int32, device=device)
    step = StepRows(positions, slabs, torch.zeros(3, 1, dtype=torch.int32, device=device), 3)
    kv = torch.randn(9, width + 16, generator=generator, device=device).to(dtype)[:, 16:]
    norm = torch.randn(width, generator=generator, device=device)
    turns = make_turns(device, 22, rope)
    rows.write_window(kv, norm, 1e-6, turns, step, window.arena, window.ring)
    reference.write_window(kv, norm, 1e-6, turns, step, truth.arena, truth.ring)
    assert compare_records(window.arena, truth.arena, window.ring, 4) < RECORD_TOLERANCE[form]
    left, wanted = (blank_records(each.arena, window.ring, 4) for each in (window, truth))
    assert torch.equal(left, wanted)


@triton.jit
def _store_kernel(
    given,
    arena,
    data,
    scale,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    record = tl.load(given + row * WIDTH + channel, mask=channel < WIDTH, other=0.0)
    records.store_record(arena, data + row * DATA_BYTES, scale + row * SCALE_BYTES, record, WIDTH, ROPE, FORMAT)


@pytest.mark.parametrize(
    ("width", "rope", "form"), [(192, 64, "fp8"), (128, 0, "fp8"), (64, 16, "bf16"), (64, 16, "fp32")]
)
def test_bytes_of_records(width: int, rope: int, form: RecordFormat, device: torch.device) -> None:
    """Given the same channels, every byte is the truth's: scales at powers of two, halves, the least numbers, zeros."""
    generator = torch.Generator(device).manual_seed(5)
    given = torch.randn(48, width, generator=generator, device=device)
    given *= torch.logspace(-30, 30, 48, device=device).unsqueeze(1)
    # Multiples of half a step of e4m3: ties. The largest is 448 or next to it, where the scale's byte changes.
    given[8:16] = torch.randint(-896, 897, (8, width), generator=generator, device=device) / 2
    for row, largest in zip(range(8, 12), (448.0, 448.00003, 447.99997, 224.0), strict=True):
        given[row, ::64] = largest
    # Sixteenths: those below 2^-6 once divided are not normal.
    given[16:24] = torch.randint(-16, 17, (8, width), generator=generator, device=device) * 2.0**-11
    given[16:20, ::64] = 448.0
    given[24] = 0.0
    given[25] = -0.0
    given[26, 1:] = 0.0
    given[27] *= torch.logspace(-40, 0, width, device=device)
    plane, size = lay_plane(GAP, 48, width, rope, form)
    arena = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    truth = arena.clone()
    _store_kernel[(48,)](
        given, arena, plane.data, plane.scale, width, rope, plane.data_bytes, plane.scale_bytes, form,
        triton.next_power_of_2(width),
    )  # fmt: skip
    for row in range(48):
        reference.store_record(truth, plane, 0, row, given[row])
    assert torch.equal(arena, truth)


@triton.jit
def _scale_kernel(largest, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, records.scale_byte(tl.load(largest + at)))


def test_scale_bytes_of_all_exponents(device: torch.device) -> None:
    """Around 448 * 2^k for each k, and among the numbers that are not normal."""
    middle = torch.arange(9, 255, dtype=torch.int32).unsqueeze(1) << 23 | 0x600000
    near = (middle + torch.arange(-3, 4)).flatten()
    tiny = torch.tensor([0, 1, 224, 225, 226, 0x400000, 0x7FFFFF, 0x800000, 4 << 23, (8 << 23) | 0x600000])
    bits = torch.cat((near, tiny))
    bits = torch.cat((bits, bits[: -len(bits) % 64])).int()
    largest = bits.view(torch.float32)
    out = torch.empty(len(bits), dtype=torch.int32, device=device)
    _scale_kernel[(len(bits) // 64,)](largest.to(device), out, 64)
    assert torch.equal(out.cpu(), reference.scale_byte(largest / reference.E4M3_MAX).int())
