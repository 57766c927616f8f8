"""Attention against the reference: formats, kinds, splits, odd sizes, padding, and rows on their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import forms, reference
from kernels.attention import Config, attend, choose_config
from kernels.attention_splits import count_splits
from kernels.forms import Plane, RecordFormat, StepRows

# Kernel and reference read the same stored records. float32 differs by the order of sums only; in bf16 the weights of
# the values and the result are rounded to 8 bits each, which is 2 to 3e-3 of the norm.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


@dataclasses.dataclass
class Layer:
    """Everything a call of `attend` takes."""

    query: Tensor
    sink: Tensor
    turns: Tensor
    rows: StepRows
    arena: Tensor
    ring: Plane
    window: int
    entries: Plane | None
    ratio: int
    selected: Tensor | None

    def arguments(self) -> tuple:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def _plane(data: int, block_rows: int, width: int, rope: int, format: RecordFormat, stride: int = 0) -> Plane:
    still = width - rope
    data_bytes = {"fp32": 4 * width, "bf16": 2 * width, "fp8": still + 2 * rope}[format]
    scale_bytes = (still // 64 + 7) // 8 * 8 if format == "fp8" else 0
    scale = data + (block_rows * data_bytes + 15) // 16 * 16
    end = scale + (block_rows * scale_bytes + 15) // 16 * 16
    return Plane(data, scale, stride or end - data + 48, block_rows, width, rope, format, data_bytes, scale_bytes)


def make_layer(
    positions: list[int],
    *,
    span: int = 1,
    heads: int = 8,
    width: int = 64,
    rope: int = 16,
    window: int = 13,
    ratio: int = 0,
    top_k: int = 0,
    page_rows: int = 4,
    pages: int = 8,
    format: RecordFormat = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Layer:
    """A layer whose arena is NaN but for the records that some row may see."""
    draw = torch.Generator().manual_seed(seed)
    sequences = len(positions) // span
    ring = _plane(32, window + 8, width, rope, format)
    slabs = torch.randperm(sequences + 2, generator=draw)[:sequences].int()
    after = 32 + (sequences + 2) * ring.stride
    entries = _plane(after, page_rows, width, rope, format) if ratio else None
    tables = torch.randperm(sequences * pages + 3, generator=draw)[: sequences * pages].int().view(sequences, pages)
    size = after + (sequences * pages + 3) * (entries.stride if entries else 0) + 5
    arena = torch.full((size,), 0xFF, dtype=torch.uint8)
    for sequence in range(sequences):
        last = max(positions[sequence * span : (sequence + 1) * span])
        first = min((p for p in positions[sequence * span : (sequence + 1) * span] if p >= 0), default=0)
        for p in range(max(0, first - window + 1), last + 1):
            record = torch.randn(width, generator=draw)
            reference.store_record(arena, ring, int(slabs[sequence]), p % ring.rows, record)
        for w in range((last + 1) // ratio if entries else 0):
            # Scales of several sizes: an entry's magnitude is its own.
            record = torch.randn(width, generator=draw) * 2.0 ** (w % 5 - 2)
            assert entries is not None
            page = int(tables[sequence, w // page_rows])
            reference.store_record(arena, entries, page, w % page_rows, record)
    selected = None
    if top_k:
        selected = torch.full((len(positions), top_k), -1, dtype=torch.int32)
        for r, position in enumerate(positions):
            visible = (position + 1) // ratio
            chosen = torch.randperm(visible, generator=draw)[:top_k].sort().values
            selected[r, : len(chosen)] = chosen.int()
    query = torch.randn(len(positions), heads, width, generator=draw).to(dtype)
    angle = torch.rand(max(positions) + 2, rope // 2, generator=draw) * 6.28
    turns = torch.stack((angle.cos(), angle.sin()), -1)
    sink = torch.randn(heads, generator=draw)
    step = StepRows(
        torch.tensor(positions, dtype=torch.int32, device=device), slabs.to(device), tables.to(device), span
    )
    return Layer(
        query.to(device), sink.to(device), turns.to(device), step, arena.to(device), ring, window, entries, ratio,
        selected.to(device) if selected is not None else None,
    )  # fmt: skip


def check(layer: Layer, config: Config | None = None) -> Tensor:
    before = layer.arena.clone()
    out = attend(*layer.arguments(), config=config)
    expected = reference.attend(*layer.arguments())
    assert out.dtype == layer.query.dtype and out.shape == layer.query.shape
    assert torch.isfinite(out).all()
    # Row by row, so that a wrong row can not hide behind large ones.
    for row, truth in zip(out.float(), expected.float(), strict=True):
        assert (row - truth).norm() <= TOLERANCE[out.dtype] * truth.norm()
    assert torch.equal(layer.arena, before)
    return out


SMALL = Config(heads=16, warps=4, stages=2, keys=16, spread=2, partials=torch.float32)
SMALL_FP8 = dataclasses.replace(SMALL, keys=32)


@pytest.mark.parametrize(("format", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_window_alone_before_and_after_it_is_full(format, dtype, device):
    check(make_layer([3, 0, 57], format=format, dtype=dtype, device=device), SMALL)


def test_fp8_records_with_selected_entries(device):
    # 128 scaled channels in two groups and 32 rotated ones; rows that select all, some and no entries.
    layer = make_layer(
        [2, 70, 33], heads=3, width=160, rope=32, window=16, ratio=4, top_k=9, format="fp8", seed=1, device=device
    )
    check(layer, SMALL_FP8)


def test_partial_results_may_be_rounded_to_half_precision(device):
    layer = make_layer([111], ratio=2, heads=3, format="bf16", pages=16, seed=5, device=device)
    check(layer, dataclasses.replace(SMALL, partials=torch.float16))


def test_short_rows_have_a_split_for_each_tile(device):
    layer = make_layer([5, 27, 111, 40], ratio=4, heads=3, format="bf16", pages=8, seed=7, device=device)
    check(layer, dataclasses.replace(SMALL, single=2))


@pytest.mark.parametrize("programs", [1, 64])
def test_a_window_alone_in_splits(programs, device):
    """Rows of one, some and all splits, where a row with entries of the same position would have others."""
    layer = make_layer([3, 30, 70, -1, 51], window=56, format="bf16", heads=3, seed=8, device=device)
    check(layer, dataclasses.replace(SMALL, single=8, programs=programs))


@pytest.mark.parametrize("programs", [1, 64])
def test_all_visible_entries_in_splits(programs, device):
    """48 still channels are masked; rows of one, two and many splits, added by the programs or by the second kernel."""
    config = dataclasses.replace(SMALL, programs=programs)
    layer = make_layer(
        [5, 27, 111, 62], ratio=2, heads=20, format="fp32", dtype=torch.float32, pages=16, seed=2, device=device
    )
    check(layer, config)


def test_rows_of_a_sequence_see_their_own_sets_and_padding_is_zero(device):
    positions = [62, 63, 64, -1, -1, -1, -1, -1, 30, 31, -1, -1]
    layer = make_layer(
        positions, span=4, width=128, rope=16, window=16, ratio=4, top_k=5, format="bf16", seed=3, device=device
    )
    out = check(layer, dataclasses.replace(SMALL, programs=1))
    assert not out[layer.rows.positions < 0].any()


def test_a_row_does_not_depend_on_the_others(device):
    layer = make_layer([40, 9, 77], ratio=4, width=32, rope=8, format="bf16", pages=6, seed=4, device=device)
    together = attend(*layer.arguments(), config=dataclasses.replace(SMALL, programs=1))
    for r in range(3):
        rows = StepRows(layer.rows.positions[r : r + 1], layer.rows.slabs[r : r + 1], layer.rows.tables[r : r + 1], 1)
        one = dataclasses.replace(layer, query=layer.query[r : r + 1].contiguous(), rows=rows)
        alone = attend(*one.arguments(), config=dataclasses.replace(SMALL, programs=64))
        assert torch.equal(alone[0], together[r])


def test_many_rows_are_read_in_parts(monkeypatch, device):
    layer = make_layer([30, 31, 41, 42, 7, -1, 55, 56, 3, 4], span=2, ratio=4, top_k=5, device=device)
    whole = check(layer)
    monkeypatch.setattr(forms, "READ_ROWS", 5)
    assert torch.equal(attend(*layer.arguments()), whole)


def test_room_for_splits_is_what_the_longest_rows_take():
    assert count_splits(2, 2, 0) == 1
    assert count_splits(10, 2, 0) == 4
    assert count_splits(10, 2, 6) == 6
    assert all(count_splits(t, 1, 5) <= count_splits(t + 1, 1, 5) for t in range(1, 120))


@pytest.mark.gpu
@pytest.mark.parametrize(("ratio", "top_k"), [(0, 0), (4, 512), (128, 0)])
@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_real_sizes_and_rows_on_their_own(ratio, top_k, format, device):
    positions = [2999, 700, 130, -1]
    layer = make_layer(
        positions, heads=64, width=512, rope=64, window=128, ratio=ratio, top_k=top_k, page_rows=256 // (ratio or 256),
        pages=12, format=format, seed=6, device=device,
    )  # fmt: skip
    config = choose_config(64, torch.bfloat16, format)
    together = check(layer, config)
    # Splits of a row in one program, in some, each in its own, and kernels that do not start early.
    for changes in ({"programs": 1}, {"programs": 8}, {"programs": 256}, {"overlaps": False}, {"stages": 2}):
        assert torch.equal(attend(*layer.arguments(), config=dataclasses.replace(config, **changes)), together)
    for r in range(3):
        rows = StepRows(layer.rows.positions[r : r + 1], layer.rows.slabs[r : r + 1], layer.rows.tables[r : r + 1], 1)
        selected = layer.selected[r : r + 1] if layer.selected is not None else None
        one = dataclasses.replace(layer, query=layer.query[r : r + 1], rows=rows, selected=selected)
        assert torch.equal(attend(*one.arguments())[0], together[r])
