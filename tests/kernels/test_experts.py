"""Routed experts against the reference: formats of slots, tiles, absent experts, scales, a row's independence."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import experts, mxfp4, reference
from kernels.forms import SlotWeights

BF16, F32 = torch.bfloat16, torch.float32
MXFP4 = torch.uint8

FLOAT_ERROR = 2e-6
"""float32: products and sums in another order."""
BF16_ERROR = 6e-3
"""bf16: the hidden layer is rounded once on both sides, on either side of a tie (Triton's interpreter truncates)."""


def make_slots(
    kind: torch.dtype,
    slots: int,
    hidden: int,
    width: int,
    device: torch.device,
    seed: int = 0,
    scales: tuple[int, int] = (118, 124),
) -> SlotWeights:
    """One pool; a slot's four parts lie one after the other in it, as the copies of slots want them."""
    generator = torch.Generator(device).manual_seed(seed)
    if kind != MXFP4:
        up = torch.randn(slots, 2 * width, hidden, generator=generator, device=device) / hidden**0.5
        down = torch.randn(slots, hidden, width, generator=generator, device=device) / width**0.5
        return SlotWeights(up.to(kind), None, down.to(kind), None)
    shapes = ((2 * width, hidden // 2), (2 * width, hidden // 32), (hidden, width // 2), (hidden, width // 32))
    sizes = [rows * columns for rows, columns in shapes]
    stride = -(-sum(-(-size // 16) * 16 for size in sizes) // 256) * 256
    pool = torch.randint(0, 256, (slots, stride), generator=generator, dtype=torch.uint8, device=device)
    parts, start = [], 0
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        part = pool[:, start : start + size].unflatten(1, shape)
        if number % 2:
            part.copy_(torch.randint(*scales, part.shape, generator=generator, device=device))
        parts.append(part)
        start += -(-size // 16) * 16
    return SlotWeights(*parts)


def make_routing(rows: int, places: int, choice: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows' own `places` of experts 0 .. choice - 1, and weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, choice, generator=generator).argsort(-1)[:, :places].sort(-1).values
    weights = torch.rand(rows, places, generator=generator) + 0.1
    return ids.int().to(device), weights.to(device)


def make_rows(rows: int, hidden: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype == F32
    return float((got.double() - want.double()).norm() / want.double().norm())


def table(slots: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_sums_of_the_first_rows_are_added_to_a_base(device: torch.device, dtype: torch.dtype) -> None:
    x, base = make_rows(5, 96, dtype, device, seed=1), make_rows(3, 96, dtype, device, seed=2)
    ids, weights = make_routing(5, 2, 4, device)
    slots, here = make_slots(MXFP4, 3, 96, 64, device), table([2, -1, 0, 1], device)
    got = experts.mix_experts(x, ids, weights, here, slots, 10.0, base)
    want = reference.mix_experts(x, ids, weights, here, slots, 10.0, base)
    assert got.shape == base.shape and got.dtype == dtype
    # One rounding to bf16 of a sum that may lie on the other side of a tie.
    assert relative_error(got.float(), want.float()) < (BF16_ERROR if dtype == BF16 else FLOAT_ERROR)


@pytest.mark.parametrize(
    ("kind", "dtype", "rows", "hidden", "width"),
    [
        (MXFP4, BF16, 3, 128, 96),
        (MXFP4, BF16, 1, 288, 160),  # K tiles that end in the middle, on both sides
        (MXFP4, F32, 3, 96, 64),
        (BF16, BF16, 4, 96, 64),
        (F32, F32, 3, 64, 48),
        (F32, BF16, 2, 64, 32),
    ],
)
def test_formats(
    device: torch.device, kind: torch.dtype, dtype: torch.dtype, rows: int, hidden: int, width: int
) -> None:
    slots = make_slots(kind, 5, hidden, width, device)
    expert_to_slot = table([2, -1, 0, 4, -1, 1, 3], device)
    ids, weights = make_routing(rows, 3, 7, device)
    x = make_rows(rows, hidden, dtype, device)
    # A clamp that bites: gates and lifts have a deviation near 1 in most formats.
    got = experts.mix_experts(x, ids, weights, expert_to_slot, slots, 1.0)
    want = reference.mix_experts(x, ids, weights, expert_to_slot, slots, 1.0)
    assert relative_error(got, want) < (FLOAT_ERROR if dtype == F32 else BF16_ERROR)


def test_experts_of_many_rows_take_several_tiles_and_absent_ones_none(device: torch.device) -> None:
    rows = 37
    slots = make_slots(MXFP4, 2, 32, 32, device)
    expert_to_slot = table([-1, 1, -1, 0, -1], device)
    ids, weights = make_routing(rows, 3, 5, device)
    ids[5] = -1
    weights[5] = 0.0
    ids[9] = table([0, 2, 4], device)
    x = make_rows(rows, 32, F32, device)
    # Rows of padding may hold anything.
    x[5] = float("nan")
    got = experts.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0, config=experts.Config(tile=16))
    want = reference.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0)
    assert (ids == 1).sum() > 16
    assert not got[5].any() and not got[9].any()
    assert relative_error(got, want) < FLOAT_ERROR


def test_no_row_has_an_expert_here(device: torch.device) -> None:
    slots = make_slots(MXFP4, 1, 32, 32, device)
    ids, weights = make_routing(2, 2, 4, device)
    got = experts.mix_experts(make_rows(2, 32, BF16, device), ids, weights, table([-1] * 4, device), slots, 10.0)
    assert got.shape == (2, 32) and not got.any()


def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(device: torch.device) -> None:
    slots = make_slots(MXFP4, 4, 64, 64, device)
    expert_to_slot = table([3, 1, -1, 0, 2], device)
    ids, weights = make_routing(19, 3, 5, device)
    x = make_rows(19, 64, BF16, device)
    batch = experts.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0)
    for row in (0, 18):
        part = slice(row, row + 1)
        alone = experts.mix_experts(x[part], ids[part], weights[part], expert_to_slot, slots, 10.0)
        assert torch.equal(alone[0], batch[row])


@pytest.mark.parametrize(("shift", "lowest", "highest"), [(None, 0, 247), (64, 59, 187)])
def test_scales(device: torch.device, shift: int | None, lowest: int, highest: int) -> None:
    """Each output channel has a scale of its own, from the smallest to one whose sums still fit float32."""
    hidden = 64
    slots = make_slots(MXFP4, 1, hidden, 32, device)
    assert slots.down_scale is not None
    slots.down_scale[0] = torch.linspace(lowest, highest, hidden).round().to(torch.uint8)[:, None].to(device)
    ids, weights = make_routing(1, 1, 1, device)
    x = make_rows(1, hidden, F32, device)
    got = experts.mix_experts(x, ids, weights, table([0], device), slots, 1.0, config=experts.Config(shift=shift))
    want = reference.mix_experts(x, ids, weights, table([0], device), slots, 1.0)
    error = ((got.double() - want.double()) / want.double()).abs()
    # Sums of 32 products of either sign; float32 rounds those near 2^-127 to a multiple of 2^-149.
    assert error.isfinite().all() and error.max() < 1e-4


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_instructions_unpack_every_byte(place: int, shifted: bool) -> None:
    """The PTX of the fast path, instruction by instruction, on all bytes in all places of a word."""
    byte = torch.arange(256)
    rest = (byte * 37 + 11) % 256 * 0x01010101 & ~(0xFF << 8 * place)
    words = (rest | byte << 8 * place, (rest | byte << 8 * place) ^ 0x5A5A5A5A)
    scales = ((byte % 200 + 1) * 0x00800080, ((byte * 7 + 3) % 200 + 1) * 0x00800080)
    pairs = _run(mxfp4.unpack_asm(place, shifted), [*words, *scales])
    values = torch.tensor([*reference.E2M1, *(-value for value in reference.E2M1)], dtype=torch.float64)
    for half in range(2):
        for upper, pair in enumerate(pairs):
            nibble = words[half] >> 4 * (2 * place + upper) & 15
            factor = torch.ldexp(torch.ones(256, dtype=torch.float64), (scales[half] >> 7 & 0xFF) - 127)
            assert torch.equal(pair[half], values[nibble] * factor * (2.0**-126 if shifted else 1.0))


def _bf16(words: Tensor) -> list[Tensor]:
    """float64 of both halves of words in int64, bf16's exponent 0 with its subnormals."""
    halves = (words & 0xFFFF, words >> 16)
    return [half.to(torch.uint16).view(torch.bfloat16).double() for half in halves]


def _run(ptx: str, operands: list[Tensor]) -> list[list[Tensor]]:
    """Both results as halves in float64 (so none is rounded), of operands in int64."""
    products: dict[str, list[Tensor]] = {}
    run_ptx(ptx, {f"${2 + number}": operand for number, operand in enumerate(operands)}, products)
    return [products["$0"], products["$1"]]


def run_ptx(ptx: str, inputs: dict[str, Tensor], products: dict[str, list[Tensor]] | None = None) -> dict[str, Tensor]:
    """Registers, int64, after the instructions; products of bf16 go to `products`, as halves in float64."""
    registers = dict(inputs)
    products = {} if products is None else products

    def read(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in ptx.splitlines():
        name, *arguments = re.findall(r"[^\s,;]+", line)
        if name == "prmt.b32":
            both = [read(arguments[1]) >> 8 * i & 0xFF for i in range(4)]
            both += [read(arguments[2]) >> 8 * i & 0xFF for i in range(4)]
            picks = [int(arguments[3], 0) >> 4 * i & 15 for i in range(4)]
            registers[arguments[0]] = torch.stack([both[pick] << 8 * i for i, pick in enumerate(picks)]).sum(0)
        elif name == "lop3.b32":
            a, b, c, table = (read(argument) for argument in arguments[1:])
            result = torch.zeros_like(a)
            for row in range(8):
                if table >> row & 1:
                    terms = [x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
                    result = result | (terms[0] & terms[1] & terms[2] & 0xFFFFFFFF)
            registers[arguments[0]] = result
        elif name == "and.b32":
            registers[arguments[0]] = read(arguments[1]) & read(arguments[2])
            products.pop(arguments[0], None)
        elif name == "shl.b32":
            registers[arguments[0]] = read(arguments[1]) << read(arguments[2]) & 0xFFFFFFFF
        elif name == "shr.u32":
            registers[arguments[0]] = read(arguments[1]) >> read(arguments[2])
        elif name == "mul.lo.u32":
            registers[arguments[0]] = read(arguments[1]) * read(arguments[2]) & 0xFFFFFFFF
        elif name == "mov.b32":
            registers[arguments[0]] = read(arguments[1])
        elif name == "mul.rn.bf16x2":
            left = products.get(arguments[1]) or _bf16(read(arguments[1]))
            right = _bf16(read(arguments[2]).expand(256))
            products[arguments[0]] = [a * b for a, b in zip(left, right, strict=True)]
        else:
            assert name in ("{", "}", ".reg")
    return registers


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_real_sizes(device: torch.device, rows: int) -> None:
    """Slots past 2^31 bytes, 256 experts of which half are here; and bits that do not depend on the configuration."""
    slots = make_slots(MXFP4, 400, 4096, 2048, device)
    where = torch.full((256,), -1)
    where[torch.randperm(256, generator=torch.Generator().manual_seed(1))[:128]] = torch.arange(200, 328)
    where[where >= 264] += 72
    expert_to_slot = where.int().to(device)
    ids, weights = make_routing(rows, 6, 256, device)
    x = make_rows(rows, 4096, BF16, device)
    few = slice(0, min(rows, 8))
    want = reference.mix_experts(x[few], ids[few], weights[few], expert_to_slot, slots, 10.0)
    for config in (None, experts.Config()):
        got = experts.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0, config=config)
        assert relative_error(got[few], want) < BF16_ERROR
        alone = [experts.mix_experts(x[r : r + 1], ids[r : r + 1], weights[r : r + 1], expert_to_slot, slots, 10.0,
                                     config=config) for r in (0, rows - 1)]  # fmt: skip
        assert torch.equal(alone[0][0], got[0]) and torch.equal(alone[1][0], got[-1])
    for config in (experts.Config(shift=64), experts.Config(early=True), experts.Config(parts=2, warps=8, tile=32)):
        assert torch.equal(experts.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0, config=config), got)


@pytest.mark.gpu
def test_a_captured_graph_reads_routes_and_slots_anew(device: torch.device) -> None:
    slots = make_slots(MXFP4, 12, 256, 256, device)
    x = make_rows(5, 256, BF16, device)
    ids, weights = make_routing(5, 3, 8, device)
    expert_to_slot = table([0, 1, 2, 3, -1, -1, -1, -1], device)
    experts.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0)
    ids.copy_(make_routing(5, 3, 8, device, seed=3)[0])
    expert_to_slot.copy_(table([-1, 11, -1, 10, 4, 5, 6, 7], device))
    graph.replay()
    want = reference.mix_experts(x, ids, weights, expert_to_slot, slots, 10.0)
    assert relative_error(out, want) < BF16_ERROR
