"""Indexer against its truth: exact choices where scores are exact and tie, near ones where scores round."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from kernels import forms, indexer, reference
from kernels.choice import ChoiceConfig
from kernels.forms import Plane, RecordFormat, StepRows

PAGE = 4
"""Entries of a page in small cases."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of a call, but for ratio and top_k."""

    query: Tensor
    share: Tensor
    turns: Tensor
    rows: StepRows
    arena: Tensor
    keys: Plane

    def sequence(self, b: int) -> Inputs:
        """That sequence alone."""
        part = slice(b * self.rows.span, (b + 1) * self.rows.span)
        rows = dataclasses.replace(
            self.rows,
            positions=self.rows.positions[part].clone(),
            slabs=self.rows.slabs[b : b + 1].clone(),
            tables=self.rows.tables[b : b + 1].clone(),
        )
        return dataclasses.replace(self, query=self.query[part].clone(), share=self.share[part].clone(), rows=rows)


def plane(width: int, form: RecordFormat, page: int = PAGE) -> Plane:
    size = {"fp8": 1, "bf16": 2, "fp32": 4}[form] * width
    # Other records lie before, between and behind the planes.
    scale = 48 + page * size + 32
    stride = -(-(scale + page * 4 + 16) // 16) * 16
    return Plane(48, scale, stride, page, width, 0, form, size, 4 if form == "fp8" else 0)


def quarter_turns(positions: list[list[int]], rope: int, device: torch.device) -> Tensor:
    """Rotations that turn whole numbers into whole numbers, so that sums are exact behind them, too."""
    generator = torch.Generator().manual_seed(9)
    quarter = torch.randint(0, 4, (max(map(max, positions)) + 1, rope // 2), generator=generator)
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0])
    return torch.stack((cos[quarter], cos[(quarter + 3) % 4]), -1).to(device)


def draw(
    positions: list[list[int]],
    ratio: int,
    dtype: torch.dtype,
    form: RecordFormat,
    device: torch.device,
    *,
    heads: int = 8,
    width: int = 32,
    page: int = PAGE,
    spare_pages: int = 2,
    whole: bool = True,
    seed: int = 0,
) -> Inputs:
    """Inputs for sequences with rows at `positions`. `whole` numbers make all sums exact, and many of them equal."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    sequences, span = len(positions), len(positions[0])
    seen = [max(0, (max(of_one) + 1) // ratio) for of_one in positions]
    pages = -(-max(seen) // page) + spare_pages
    keys = plane(width, form, page)
    # Tables end in pages that hold NaN: an entry that is not visible is not read.
    order = torch.randperm(sequences * pages + 3, generator=generator).int()
    tables = order[: sequences * pages].view(sequences, pages)
    arena = torch.full((len(order) * keys.stride,), 0xFF, dtype=torch.uint8)
    for b, visible in enumerate(seen):
        for w in range(visible):
            # A share of keys is zero, so that whole runs of scores are.
            record = numbers(width) * (w % 3 != 0)
            reference.store_record(arena, keys, int(tables[b, w // page]), w % page, record)
    rows = StepRows(
        positions=torch.tensor(list(itertools.chain(*positions)), dtype=torch.int32).to(device),
        slabs=torch.arange(sequences, dtype=torch.int32).to(device),
        tables=tables.to(device),
        span=span,
    )
    query = numbers(sequences * span, heads, width).to(dtype)
    share = numbers(sequences * span, heads) / 4
    turns = quarter_turns(positions, width // 4, device)
    return Inputs(query.to(device), share.to(device), turns, rows, arena.to(device), keys)


def select(inputs: Inputs, ratio: int, top_k: int, config: indexer.IndexerConfig = indexer.DEFAULT) -> Tensor:
    before = inputs.arena.clone()
    chosen = indexer.select_entries(
        inputs.query, inputs.share, inputs.turns, ratio, top_k, inputs.rows, inputs.arena, inputs.keys, 0.5,
        config=config,
    )  # fmt: skip
    assert torch.equal(inputs.arena, before)
    assert chosen.shape == (inputs.rows.rows, top_k)
    assert chosen.dtype == torch.int32
    return chosen


def truth(inputs: Inputs, ratio: int, top_k: int) -> Tensor:
    return reference.select_entries(
        inputs.query, inputs.share, inputs.turns, ratio, top_k, inputs.rows, inputs.arena, inputs.keys, 0.5
    )


SMALL = indexer.IndexerConfig(block=32, chunk=64, programs=6, choice=ChoiceConfig(segment=128, warps=4))


@pytest.mark.parametrize(
    ("positions", "ratio", "dtype", "form", "top_k"),
    [
        # One row after another in a sequence, an entry closed among them; padding; fewer entries than places.
        ([[159, 160, 161], [120, -1, -1], [-1, -1, -1], [18, 19, 20]], 4, torch.bfloat16, "fp8", 6),
        ([[90], [7], [44]], 2, torch.float32, "fp32", 8),
        ([[75, 76]], 1, torch.bfloat16, "bf16", 7),
        ([[95, 96]], 2, torch.float32, "fp8", 20),
    ],
)
def test_exact_choices(
    positions: list[list[int]],
    ratio: int,
    dtype: torch.dtype,
    form: RecordFormat,
    top_k: int,
    device: torch.device,
) -> None:
    inputs = draw(positions, ratio, dtype, form, device)
    assert torch.equal(select(inputs, ratio, top_k, SMALL), truth(inputs, ratio, top_k))


def test_row_longer_than_a_segment(device: torch.device) -> None:
    """Choices of segments are chosen from, equal ones across segments too; the last segment has less than it could."""
    inputs = draw([[300], [267], [130], [20], [-1]], 1, torch.bfloat16, "fp8", device, page=32, heads=3, seed=1)
    assert torch.equal(select(inputs, 1, 40, SMALL), truth(inputs, 1, 40))


@pytest.mark.parametrize(("top_k", "negative"), [(5, False), (5, True)])
def test_zeros_tie(top_k: int, negative: bool, device: torch.device) -> None:
    """All relus are closed: the lowest entries, whether zeros are negative or not."""
    inputs = draw([[39, 40]], 1, torch.float32, "fp32", device)
    inputs.query.fill_(0)
    inputs.share.fill_(-1 if negative else 1)
    chosen = select(inputs, 1, top_k, SMALL)
    assert chosen.tolist() == [list(range(top_k))] * 2


def test_nearly_equal_scores(device: torch.device) -> None:
    """Real numbers: what is chosen is the best up to the rounding of a sum in float32."""
    inputs = draw([[150, 151]], 1, torch.bfloat16, "fp8", device, whole=False, heads=16, width=64, seed=2)
    chosen = select(inputs, 1, 16, SMALL)
    query = reference.prepare_queries(inputs.query, inputs.rows.positions, inputs.turns, None)
    scores = reference.score_entries(query, inputs.share * 0.5, 1, inputs.rows, inputs.arena, inputs.keys)
    for row, best in zip(scores, chosen, strict=True):
        assert best.tolist() == sorted(set(best.tolist()))
        lowest = row[best.long()].min()
        others = row.clone()
        others[best.long()] = -torch.inf
        # Sums of 16 terms near 10 in float32.
        assert others.max() <= lowest + 1e-4


def test_choice_does_not_depend_on_the_batch(device: torch.device) -> None:
    inputs = draw([[150, 151], [99, 100]], 1, torch.bfloat16, "fp8", device, whole=False, seed=3)
    both = select(inputs, 1, 9, SMALL)
    for b in range(2):
        assert torch.equal(select(inputs.sequence(b), 1, 9, SMALL), both[2 * b : 2 * b + 2])


def test_many_rows_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    inputs = draw([[90, 91], [77, -1], [80, 81]], 4, torch.float32, "fp32", device, whole=False)
    heads = torch.randn(6, 4, 64, device=device)
    rest = (inputs.turns, 4, 5, inputs.rows, inputs.arena, inputs.keys)
    chosen = select(inputs, 4, 5)
    prepared, beside = indexer.prepare_and_select(heads, 1e-6, inputs.query, inputs.share, *rest, 0.5)
    monkeypatch.setattr(forms, "READ_ROWS", 4)
    assert torch.equal(select(inputs, 4, 5), chosen)
    again, found = indexer.prepare_and_select(heads, 1e-6, inputs.query, inputs.share, *rest, 0.5)
    assert torch.equal(again, prepared) and torch.equal(found, beside)


@pytest.mark.parametrize("eps", [1e-6, None])
def test_heads_are_prepared_beside(eps: float | None, device: torch.device) -> None:
    inputs = draw([[90, 91], [7, -1]], 2, torch.bfloat16, "fp8", device)
    generator = torch.Generator().manual_seed(8)
    heads = torch.randn(4, 5 * 48 + 16, generator=generator).bfloat16().to(device)[:, :240].unflatten(1, (5, 48))
    arguments = (heads, eps, inputs.query, inputs.share, inputs.turns, 2, 6, inputs.rows, inputs.arena, inputs.keys, 2)
    prepared, chosen = indexer.prepare_and_select(*arguments, config=SMALL)
    wanted = reference.prepare_and_select(*arguments)
    assert torch.equal(chosen, wanted[1])
    # One rounding to bf16, which the interpreter makes toward zero.
    assert (prepared.float() - wanted[0].float()).norm() <= 6e-3 * wanted[0].float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [indexer.DEFAULT, indexer.IndexerConfig(chunk=2048, choice=ChoiceConfig(segment=8192, warps=32))]
)
def test_real_sizes(config: indexer.IndexerConfig, device: torch.device) -> None:
    """64 heads of 128, 512 of up to 10,000 entries; whole numbers, so that choices are exact."""
    positions = [[40_000, 40_001, 40_002, 40_003], [9_000, 9_001, 9_002, -1], [2_050, 2_051, 2_052, 2_053]]
    inputs = draw_large(positions, device)
    assert torch.equal(select(inputs, 4, 512, config), truth(inputs, 4, 512))


def draw_large(
    positions: list[list[int]], device: torch.device, *, heads: int = 64, page: int = 64, ratio: int = 4
) -> Inputs:
    """As `draw`, with all records of a page written at once."""
    generator = torch.Generator(device).manual_seed(5)
    keys = plane(128, "fp8", page)
    sequences, span = len(positions), len(positions[0])
    pages = -(-(max(map(max, positions)) + 1) // (page * ratio))
    tables = torch.randperm(sequences * pages, generator=generator, device=device).int().view(sequences, pages)
    arena = torch.full((sequences * pages * keys.stride,), 0xFF, dtype=torch.uint8, device=device)
    blocks = arena.view(-1, keys.stride)
    values = torch.randint(-2, 3, (len(blocks), page * 128), generator=generator, device=device).float()
    blocks[:, keys.data : keys.data + page * 128] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.ldexp(torch.ones_like(values[:, :page]), torch.arange(page, device=device) % 4)
    blocks[:, keys.scale : keys.scale + page * 4] = scales.view(torch.uint8)
    rows = StepRows(
        positions=torch.tensor(list(itertools.chain(*positions)), dtype=torch.int32, device=device),
        slabs=torch.arange(sequences, dtype=torch.int32, device=device),
        tables=tables,
        span=span,
    )
    query = torch.randint(-1, 2, (sequences * span, heads, 128), generator=generator, device=device).bfloat16()
    share = torch.randint(-2, 3, (sequences * span, heads), generator=generator, device=device).float() / 4
    return Inputs(query, share, quarter_turns(positions, 64, device), rows, arena, keys)
