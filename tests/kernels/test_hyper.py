"""Hyper-connections against their truth: mixed streams, predictions, the collapse; rows that depend on no others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import hyper, reference
from kernels.forms import HyperWeights, PairSums


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of a call."""

    streams: Tensor
    output: Tensor
    post: Tensor
    combination: Tensor
    weights: HyperWeights
    pre: Tensor

    def rows(self, part: slice) -> Inputs:
        names = ("streams", "output", "post", "combination", "pre")
        return dataclasses.replace(self, **{name: getattr(self, name)[part].clone() for name in names})


def draw(
    rows: int, hidden: int, dtype: torch.dtype, device: torch.device, *, head: bool = False, n: int = 4, seed: int = 0
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    count = n if head else n * (2 + n)
    weights = HyperWeights(
        # Predictions of a few units: far from both ends of the sigmoid.
        fn=normal(count, n * hidden) * (n * hidden) ** -0.5 * 2,
        base=normal(count),
        scale=normal(1 if head else 3).abs() + 0.5,
        norm=normal(hidden),
        iterations=20,
        eps=1e-6,
        norm_eps=1e-5,
    )
    # Streams of rows differ in size, so that a row normed by another's squares shows.
    size = torch.logspace(-1, 1, rows, device=device)
    return Inputs(
        streams=(normal(rows, n, hidden) * size[:, None, None]).to(dtype),
        output=normal(rows, hidden).to(dtype),
        post=normal(rows, n).sigmoid() * 2,
        combination=normal(rows, n, n).softmax(-1),
        weights=weights,
        pre=normal(rows, n).sigmoid(),
    )


def error(out: Tensor, truth: Tensor) -> float:
    """Relative error of a whole; NaN fails any comparison with it."""
    assert out.shape == truth.shape
    assert out.dtype == truth.dtype
    return float((out.double() - truth.double()).norm() / truth.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return 2e-6
    # bf16: sums in another order round to a neighbour now and then: 2^-8 of a few of a hundred elements. The
    # interpreter cuts where a device rounds: an error of up to 2^-7, evenly spread, in all of them.
    return 6e-3 if hyper.INTERPRETED else 1e-3


def check(inputs: Inputs, *, first: bool, shifted: bool, config: hyper.HyperConfig = hyper.DEFAULT) -> None:
    left: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if not first:
        left = (inputs.output, inputs.post, inputs.combination)
    before = inputs.streams.clone()
    out = hyper.connect(inputs.streams, *left, inputs.weights, inputs.pre if shifted else None, config=config)
    assert torch.equal(inputs.streams, before)
    # The truth of what follows from the streams takes the streams that the kernel stored, so that its coefficients
    # are not excused by the rounding of the streams.
    mixed = reference.connect(inputs.streams, *left, inputs.weights)[0]
    truth = reference.connect(out[0], None, None, None, inputs.weights, inputs.pre if shifted else None)
    dtype = inputs.streams.dtype
    if first:
        assert torch.equal(out[0], inputs.streams)
    assert error(out[0], mixed) < tolerance(dtype)
    assert error(out[1], truth[1]) < tolerance(dtype)
    # Coefficients are float32 whatever the streams are; Sinkhorn's iterations contract errors.
    for coefficients, expected in zip(out[2:], truth[2:], strict=True):
        assert error(coefficients, expected) < 2e-6
    assert torch.allclose(out[3].sum(1), torch.ones_like(out[2]), atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "first", "shifted"),
    [
        (3, 96, torch.float32, False, False),
        (17, 64, torch.bfloat16, False, True),
        (1, 256, torch.bfloat16, True, False),
        (2, 72, torch.float32, True, True),
    ],
)
def test_connect(rows: int, hidden: int, dtype: torch.dtype, first: bool, shifted: bool, device: torch.device) -> None:
    check(draw(rows, hidden, dtype, device), first=first, shifted=shifted)


@pytest.mark.parametrize("config", [hyper.HyperConfig(width=64, projection="tf32x3"), hyper.HyperConfig(width=16)])
def test_variants(config: hyper.HyperConfig, device: torch.device) -> None:
    check(draw(3, 128, torch.bfloat16, device), first=False, shifted=False, config=config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_collapse_head(dtype: torch.dtype, device: torch.device) -> None:
    inputs = draw(5, 96, dtype, device, head=True, seed=1)
    left = (inputs.output, inputs.post, inputs.combination)
    streams, hidden = hyper.collapse_head(inputs.streams, *left, inputs.weights)
    mixed, expected = reference.collapse_head(inputs.streams, *left, inputs.weights)
    assert error(streams, mixed) < tolerance(dtype)
    assert error(hidden, expected) < 4 * tolerance(dtype)


def draw_pairs(inputs: Inputs, *, has_base: bool) -> PairSums:
    """Sums of twelve experts, every third of them elsewhere: in their places, and in rows that are not wanted, is NaN.
    The first row has no expert at all."""
    rows, hidden = inputs.output.shape
    device = inputs.output.device
    generator = torch.Generator().manual_seed(7)
    ids = torch.rand(rows + 2, 12, generator=generator).argsort(1)[:, :4].sort(1).values.int()
    ids[0] = -1
    slots = torch.where(torch.arange(12) % 3 == 0, -1, torch.arange(12)).int()
    pairs = torch.randn(rows + 2, 4, hidden, generator=generator)
    pairs[(slots[ids.long()] < 0) | (ids < 0)] = torch.nan
    pairs[rows:] = torch.nan
    wanted = rows if not has_base else rows + 2
    base = inputs.output if has_base else None
    return PairSums(pairs[:wanted].to(device), ids[:wanted].to(device), slots.to(device), base)


@pytest.mark.parametrize("eager_rows", [0, 16])
@pytest.mark.parametrize(("dtype", "has_base"), [(torch.bfloat16, True), (torch.float32, False)])
def test_pairs_are_added_up_on_the_way(
    dtype: torch.dtype, has_base: bool, eager_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper, "EAGER_ROWS", eager_rows)
    inputs = draw(3, 96, dtype, device, seed=4)
    pairs = draw_pairs(inputs, has_base=has_base)
    x = torch.full((5, 96), torch.nan, device=device).to(dtype)
    out = hyper.connect(inputs.streams, pairs, inputs.post, inputs.combination, inputs.weights, out=x[1:4])
    mixed = reference.connect(inputs.streams, pairs, inputs.post, inputs.combination, inputs.weights)[0]
    truth = reference.connect(out[0], None, None, None, inputs.weights)
    assert error(out[0], mixed) < tolerance(dtype)
    assert error(x[1:4], truth[1]) < tolerance(dtype) and out[1].data_ptr() == x[1:4].data_ptr()
    assert x[0].isnan().all() and x[4].isnan().all()
    head = draw(3, 96, dtype, device, head=True, seed=5)
    left = (pairs, inputs.post, inputs.combination, head.weights)
    assert error(hyper.collapse_head(inputs.streams, *left)[0], mixed) < tolerance(dtype)
    if not has_base:
        whole = reference.add_pairs(pairs)
        alone = hyper.connect(inputs.streams, whole, inputs.post, inputs.combination, inputs.weights)
        # The compiler may join other products and sums into one instruction.
        for part, expected in zip(out, alone, strict=True):
            assert error(part, expected) < 1e-6
    with pytest.raises(ValueError, match="must be contiguous"):
        hyper.connect(inputs.streams, pairs, inputs.post, inputs.combination, inputs.weights, out=x[:, ::2])


def test_row_is_the_same_bits_in_any_batch(device: torch.device) -> None:
    inputs = draw(18, 96, torch.bfloat16, device, seed=2)
    whole = hyper.connect(inputs.streams, inputs.output, inputs.post, inputs.combination, inputs.weights)
    # The interpreter multiplies by NumPy, whose bits of a row depend on its place in a tile on some machines.
    for part in (slice(0, 1), slice(15 if device.type == "cuda" else 16, 18)):
        few = inputs.rows(part)
        alone = hyper.connect(few.streams, few.output, few.post, few.combination, few.weights)
        for one, all_rows in zip(alone, whole, strict=True):
            assert torch.equal(one, all_rows[part])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_row_of_nan_stays_alone(device: torch.device) -> None:
    """Padding rows carry anything."""
    inputs = draw(3, 64, torch.bfloat16, device, seed=3)
    clean = hyper.connect(inputs.streams, inputs.output, inputs.post, inputs.combination, inputs.weights)
    inputs.streams[1] = float("nan")
    spoilt = hyper.connect(inputs.streams, inputs.output, inputs.post, inputs.combination, inputs.weights)
    for part, expected in zip(spoilt, clean, strict=True):
        assert torch.equal(part[0], expected[0])
        assert torch.equal(part[2], expected[2])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [hyper.DEFAULT, hyper.HyperConfig(width=64, projection="tf32x3", overlaps=True)])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (256, 4096), (40, 5120)])
def test_real_sizes(rows: int, hidden: int, config: hyper.HyperConfig, device: torch.device) -> None:
    inputs = draw(rows, hidden, torch.bfloat16, device, seed=4)
    check(inputs, first=False, shifted=hidden == 5120, config=config)
    whole = hyper.connect(inputs.streams, inputs.output, inputs.post, inputs.combination, inputs.weights, config=config)
    few = inputs.rows(slice(rows - 1, rows))
    alone = hyper.connect(few.streams, few.output, few.post, few.combination, few.weights, config=config)
    for one, all_rows in zip(alone, whole, strict=True):
        assert torch.equal(one, all_rows[-1:])
