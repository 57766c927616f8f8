"""Dense products against the reference: types of weights, forms, edges, and a row's independence of its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import linear, reference
from kernels.forms import Weight
from kernels.tiling import Tiling, tiling

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

FLOAT_ERROR = 2e-6
"""float32 out: products of bf16 and e4m3 are exact in float32, so only the order of sums differs."""
FLOAT_INPUT_ERROR = 4e-6
"""float32 in: products are rounded as well."""
BF16_ERROR = 8e-3
"""bf16 out: one rounding of up to 2^-8 against another of up to 2^-9 (Triton's interpreter truncates)."""


def between_nan(tensor: Tensor) -> Tensor:
    """The tensor with bytes 0xFF before and behind it: NaN in float types, and infinity as a scale."""
    nbytes = tensor.nbytes
    wide = torch.full((nbytes + 256,), 255, dtype=torch.uint8, device=tensor.device)
    wide[128 : 128 + nbytes] = tensor.contiguous().view(torch.uint8).flatten()
    return wide[128 : 128 + nbytes].view(tensor.dtype).view(tensor.shape)


def make_weight(
    out: int, width: int, dtype: torch.dtype, seed: int, device: torch.device, block: tuple[int, int] = (128, 128)
) -> Weight:
    """Values of about 0.1 with scales that differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(out, width, generator=generator)
    if dtype != FP8:
        return Weight(between_nan((values / 8).to(device, dtype)))
    shape = (-(-out // block[0]), -(-width // block[1]))
    scale = torch.randint(116, 122, shape, generator=generator).to(torch.uint8)
    return Weight(between_nan((values * 8).to(FP8).to(device)), between_nan(scale.to(device)), block)


def make_rows(rows: int, width: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Rows that lie in a wider tensor, with NaN on both sides of them."""
    wide = torch.full((rows, width + 32), float("nan"))
    wide[:, 16 : 16 + width] = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + 1))
    return wide.to(device, dtype)[:, 16 : 16 + width]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(
    ("rows", "out", "width", "dtype", "block"),
    [
        (3, 200, 544, FP8, (128, 128)),  # two slices; the last blocks are cut off on both sides
        (3, 96, 640, FP8, (32, 32)),
        (1, 80, 96, FP8, (48, 16)),
        (18, 64, 64, FP8, (16, 64)),
        (5, 72, 1088, BF16, (128, 128)),
        (2, 24, 96, F32, (128, 128)),
    ],
)
@pytest.mark.parametrize("activation", [BF16, F32])
def test_linear(
    device: torch.device,
    rows: int,
    out: int,
    width: int,
    dtype: torch.dtype,
    block: tuple[int, int],
    activation: torch.dtype,
) -> None:
    weight = make_weight(out, width, dtype, out, device, block)
    x = make_rows(rows, width, activation, rows, device)
    got = linear.linear(x, weight, F32)
    assert got.dtype == F32
    limit = FLOAT_INPUT_ERROR if activation == F32 or dtype == F32 else FLOAT_ERROR
    assert relative_error(got, reference.linear(x, weight, F32)) < limit


def test_type_of_the_activations_is_that_of_the_result(device: torch.device) -> None:
    weight = make_weight(48, 128, FP8, 1, device)
    x = make_rows(3, 128, BF16, 1, device)
    got = linear.linear(x, weight)
    assert got.dtype == BF16
    assert relative_error(got, reference.linear(x, weight)) < BF16_ERROR
    assert linear.linear(x[:0], weight).shape == (0, 48)


@pytest.mark.parametrize(("out", "side", "width"), [(96, 200, 544), (64, 32, 96)])
def test_paired(device: torch.device, out: int, side: int, width: int) -> None:
    """As each by itself."""
    weight, beside = make_weight(out, width, FP8, 3, device), make_weight(side, width, BF16, 4, device)
    for activation in (BF16, F32):
        x = make_rows(3, width, activation, out, device)
        got, kept = linear.paired_linear(x, weight, beside)
        assert got.dtype == activation and kept.dtype == F32
        assert torch.equal(got, linear.linear(x, weight))
        assert torch.equal(kept, linear.linear(x, beside, F32))
        want, _ = reference.paired_linear(x, weight, beside)
        assert relative_error(got, want) < (BF16_ERROR if activation == BF16 else FLOAT_INPUT_ERROR)
    assert [len(part) for part in linear.paired_linear(x[:0], weight, beside)] == [0, 0]


@pytest.mark.parametrize(
    ("groups", "out", "width", "dtype", "block"),
    [
        (2, 64, 128, FP8, (64, 64)),
        (4, 128, 64, FP8, (128, 128)),
        (3, 80, 96, BF16, (128, 128)),
        (2, 32, 544, F32, (1, 1)),
    ],
)
def test_grouped(
    device: torch.device, groups: int, out: int, width: int, dtype: torch.dtype, block: tuple[int, int]
) -> None:
    weight = make_weight(groups * out, width, dtype, groups, device, block)
    for activation, limit in ((BF16, BF16_ERROR), (F32, FLOAT_INPUT_ERROR)):
        x = make_rows(3, groups * width, activation, out, device)
        got = linear.grouped_linear(x, weight, groups)
        assert got.dtype == activation
        assert relative_error(got, reference.grouped_linear(x, weight, groups)) < limit


@pytest.mark.parametrize(
    ("half", "width", "dtype", "block", "clamp"),
    [
        (128, 256, FP8, (128, 128), 0.5),
        (96, 544, FP8, (32, 32), 10.0),
        (80, 96, BF16, (128, 128), 10.0),
        (48, 64, FP8, (32, 32), 0.5),
    ],
)
def test_gated(
    device: torch.device, half: int, width: int, dtype: torch.dtype, block: tuple[int, int], clamp: float
) -> None:
    weight = make_weight(2 * half, width, dtype, half, device, block)
    for activation, limit in ((BF16, BF16_ERROR), (F32, FLOAT_INPUT_ERROR)):
        x = make_rows(3, width, activation, half, device)
        got = linear.gated_linear(x, weight, clamp)
        want = reference.gated_linear(x, weight, clamp)
        assert clamp > 1 or not torch.equal(want, reference.gated_linear(x, weight, 10.0)), "the clamps are to bite"
        assert got.dtype == activation
        assert relative_error(got, want) < limit


def test_all_scale_bytes(device: torch.device) -> None:
    """Each byte means a power of two, the lowest a subnormal one."""
    data = torch.full((16 * 254, 16), 2.0, dtype=FP8, device=device)
    weight = Weight(data, torch.arange(254, dtype=torch.uint8, device=device).unsqueeze(1), (16, 16))
    x = torch.zeros(1, 16, dtype=F32, device=device)
    x[0, 3] = 0.75
    want = reference.power_of_two(torch.arange(254, dtype=torch.uint8)).repeat_interleave(16) * 1.5
    assert torch.equal(linear.linear(x, weight)[0].cpu(), want)


Product = Callable[[Tensor, Weight, Tiling | None], Tensor]
PRODUCTS: dict[str, Product] = {
    "linear": lambda x, weight, config: linear.linear(x, weight, F32, config=config),
    "grouped": lambda x, weight, config: linear.grouped_linear(x.repeat(1, 2), weight, 2, config=config),
    "gated": lambda x, weight, config: linear.gated_linear(x, weight, 10.0, config=config),
}


def same_bits(got: Tensor, want: Tensor) -> bool:
    """On the device. The interpreter's products are numpy's, which adds in an order of its own for each shape."""
    return torch.equal(got, want) if got.is_cuda else relative_error(got, want) < FLOAT_ERROR


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_a_row_alone(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Bit for bit, across all widths of a tile that a batch chooses, and in the presence of NaN in another row."""
    weight = make_weight(256, 512, dtype, 5, device)
    assert tiling(weight, 64).slices > 1
    x = make_rows(64, 512, BF16, 7, device).clone()
    x[40] = float("nan")
    together = PRODUCTS[name](x, weight, None)
    assert together[40].isnan().all()
    for first, count in ((17, 1), (0, 3), (41, 20)):
        got = PRODUCTS[name](x[first : first + count], weight, None)
        assert same_bits(got, together[first : first + count])


@pytest.mark.parametrize("name", PRODUCTS)
def test_slices_in_one_program(device: torch.device, name: str) -> None:
    """Bit for bit what slices in programs of their own give; and a second launch gives it again."""
    weight = make_weight(128, 1088, FP8, 5, device)
    x = make_rows(3, 1088, BF16, 7, device)
    apart = dataclasses.replace(tiling(weight, 3), serial=False)
    assert apart.slices == 4
    first = PRODUCTS[name](x, weight, apart)
    assert torch.equal(PRODUCTS[name](x, weight, apart), first)
    assert torch.equal(PRODUCTS[name](x, weight, dataclasses.replace(apart, serial=True)), first)
    taller = dataclasses.replace(apart, block_m=128, block_n=32, warps=8)
    assert same_bits(PRODUCTS[name](x, weight, taller), first)


def test_rows_have_to_be_contiguous(device: torch.device) -> None:
    weight = make_weight(32, 64, BF16, 1, device)
    with pytest.raises(ValueError, match="contiguous"):
        linear.linear(torch.zeros(64, 3, dtype=BF16, device=device).T, weight)


REAL = {
    "wq_a|wkv": ("linear", 1536, 4096, FP8),
    "csa": ("linear", 2624, 4096, BF16),
    "hca": ("linear", 1024, 4096, BF16),
    "wq_b": ("linear", 40960, 1024, FP8),
    "wo_a": ("grouped", 8192, 4096, FP8),
    "wo_b": ("linear", 4096, 8192, FP8),
    "shared up": ("gated", 4096, 4096, FP8),
    "shared down": ("linear", 4096, 2048, FP8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_real_sizes(device: torch.device, name: str, block: tuple[int, int]) -> None:
    form, out, width, dtype = REAL[name]
    if dtype != FP8 and block != (128, 128):
        pytest.skip("no scales")
    weight = make_weight(out, width, dtype, out, device, block)
    groups = 8 if form == "grouped" else 1
    x = make_rows(256, groups * width, BF16, width, device)

    def product(x: Tensor) -> Tensor:
        if form == "grouped":
            return linear.grouped_linear(x, weight, groups)
        return linear.gated_linear(x, weight, 10.0) if form == "gated" else linear.linear(x, weight, F32)

    if form == "grouped":
        want = reference.grouped_linear(x.float(), weight, groups)
    else:
        want = reference.gated_linear(x.float(), weight, 10.0) if form == "gated" else reference.linear(x, weight, F32)
    together = product(x)
    # The device rounds to nearest: half of what the interpreter does.
    assert relative_error(together, want) < (FLOAT_ERROR if form == "linear" else BF16_ERROR / 2)
    for first, count in ((0, 1), (7, 1), (100, 16), (3, 31), (60, 64), (128, 128)):
        assert torch.equal(product(x[first : first + count]), together[first : first + count]), (first, count)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [544, 640])
@pytest.mark.parametrize("name", PRODUCTS)
def test_many_rows_of_odd_sizes(device: torch.device, name: str, width: int) -> None:
    """Where x is turned once for all tiles, and where its columns do not end with a step."""
    weight = make_weight(256, width, FP8, 6, device)
    x = make_rows(130, width, BF16, 8, device)
    together = PRODUCTS[name](x, weight, None)
    assert tiling(weight, 130).prepared
    assert together.isfinite().all()
    for first, count in ((0, 1), (127, 3), (60, 64)):
        assert torch.equal(PRODUCTS[name](x[first : first + count], weight, None), together[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize("overlaps", [False, True])
def test_replays(device: torch.device, overlaps: bool) -> None:
    """A captured chain of products with slices gives the same in every replay, and follows its input."""
    weights = [make_weight(1536, 4096, FP8, 3, device), make_weight(2048, 1536, FP8, 4, device)]
    rows = make_rows(16, 4096, BF16, 1, device).contiguous()
    x = rows.clone()

    def chain() -> Tensor:
        between = x
        for weight in weights:
            config = dataclasses.replace(tiling(weight, 16), overlaps=overlaps)
            between = linear.linear(between, weight, config=config)
        return between

    want = linear.linear(linear.linear(x, weights[0]), weights[1])
    assert torch.equal(chain(), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(50):
        x.copy_(rows)
        graph.replay()
        assert torch.equal(got, want)
        x.zero_()
        graph.replay()
        assert not got.any()
