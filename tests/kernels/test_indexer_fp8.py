"""Scores on the fp8 matrix unit: exact choices where sums are exact, near scores where they round. On a Hopper."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kernels import candidates, indexer, indexer_fp8, reference
from kernels.indexer_products import group_rows
from tests.kernels.test_indexer import Inputs, draw_large, select, truth

SHAPES = [
    # Positions, heads, entries of a page, ratio: one row and several; padding; few entries; ends within a page.
    ([[9_001], [2_900], [5_200], [-1]], 64, 64, 4),
    ([[6_000, 6_001, 6_002, 6_003], [4_000, 4_001, 4_002, -1], [2_050, 2_051, 2_052, 2_053]], 64, 64, 4),
    ([[2_301, 2_302, 2_303, 2_304, 2_305, 2_306], [1_500, 1_501, -1, -1, -1, -1]], 32, 128, 2),
    ([[1_200, 1_201, 1_202], [700, 701, 702]], 32, 256, 1),
]


def test_rows_of_a_product_are_powers_of_two() -> None:
    for span, heads, most in itertools.product(range(1, 9), (32, 64), (64, 128, 256)):
        groups = group_rows(span, heads, most)
        assert sum(groups) == span
        assert all(rows & (rows - 1) == 0 and rows * heads <= max(most, heads) for rows in groups)


def test_the_compiler_keeps_registers_and_does_not_serialise() -> None:
    """For sm_90, which needs no GPU: nothing on the stack, and no more waits for products than the source has."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.indexer_code", "32x6"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", printed)}
    assert found["stack"] == 0 and found["waits"] == 2 and found["products"] == 16


def with_unit(**config: object) -> indexer.IndexerConfig:
    return dataclasses.replace(indexer.DEFAULT, unit=indexer_fp8.Config(**config))  # type: ignore[arg-type]


def assert_fits(inputs: Inputs) -> None:
    if inputs.query.device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper")
    assert indexer_fp8.fits(inputs.query, inputs.rows.span, inputs.keys, inputs.arena, None)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("split", [True, False])
def test_exact_choices(shape: int, split: bool, device: torch.device) -> None:
    """Whole numbers, most of which tie."""
    positions, heads, page, ratio = SHAPES[shape]
    inputs = draw_large(positions, device, heads=heads, page=page, ratio=ratio)
    assert_fits(inputs)
    assert torch.equal(select(inputs, ratio, 512, with_unit(split=split)), truth(inputs, ratio, 512))


def near_inputs(shape: int, device: torch.device) -> Inputs:
    """Real numbers, heads of very different sizes, and channels below 2^-9 of the largest."""
    positions, heads, page, ratio = SHAPES[shape]
    inputs = draw_large(positions, device, heads=heads, page=page, ratio=ratio)
    generator = torch.Generator(device).manual_seed(6)
    query = torch.randn(inputs.query.shape, generator=generator, device=device)
    query *= torch.tensor([1.0, 1e-12, 3e12, 7.0], device=device).repeat(heads // 4)[:, None]
    query[:, :, ::7] *= 1e-3
    share = torch.randn(inputs.share.shape, generator=generator, device=device)
    share *= torch.tensor([1.0, 1e12, 3e-13, 0.1], device=device).repeat(heads // 4)
    return dataclasses.replace(inputs, query=query.bfloat16(), share=share)


def scores_of(inputs: Inputs, ratio: int, config: indexer.IndexerConfig) -> Tensor:
    scores, maxima = indexer.score_entries(
        inputs.query, inputs.share, inputs.turns, ratio, 512, inputs.rows, inputs.arena, inputs.keys, config=config
    )
    assert maxima is not None
    for r in range(inputs.rows.rows):
        visible = (int(inputs.rows.positions[r // inputs.rows.span * inputs.rows.span]) + 1) // ratio
        if visible > 512:
            end = -(-visible // 64) * 64
            assert torch.equal(maxima[r, : end // 8], scores[r, :end].view(-1, 8).amax(1))
    return scores


def float_scores(inputs: Inputs, ratio: int, split: bool) -> list[Tensor]:
    """Of rows that see more than 512 entries, scores in float32; without `split` of queries rounded to e4m3."""
    rows, keys = inputs.rows, inputs.keys
    query = reference.prepare_queries(inputs.query, rows.positions, inputs.turns, None).float()
    if not split:
        exponent = torch.frexp(query.abs().amax(-1, keepdim=True)).exponent
        query = torch.ldexp(torch.ldexp(query, 8 - exponent).to(torch.float8_e4m3fn).float(), exponent - 8)
    found = []
    for r, position in enumerate(rows.positions.tolist()):
        visible = (position + 1) // ratio
        pages = inputs.arena.view(-1, keys.stride)[rows.tables[r // rows.span].long()]
        data = pages[:, keys.data : keys.data + keys.rows * keys.width].contiguous().view(torch.float8_e4m3fn)
        powers = pages[:, keys.scale : keys.scale + keys.rows * 4].contiguous().view(torch.float32)
        table = data.float().view(-1, keys.width)[:visible] * powers.view(-1, 1)[:visible]
        found.append((inputs.share[r].double().unsqueeze(1) * (query[r].double() @ table.double().T).relu()).sum(0))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("split", [True, False])
def test_near_scores(shape: int, split: bool, device: torch.device) -> None:
    inputs = near_inputs(shape, device)
    ratio = SHAPES[shape][3]
    assert_fits(inputs)
    got = scores_of(inputs, ratio, with_unit(split=split))
    checked = 0
    for r, want in enumerate(float_scores(inputs, ratio, split)):
        if len(want) <= 512:
            continue
        checked += 1
        assert bool((got[r, len(want) : -(-len(want) // 64) * 64] == -torch.inf).all())
        # The unit keeps some 14 bits of a product, of which a score adds up as many as there are heads.
        assert float((got[r, : len(want)] - want).abs().max() / want.square().mean().sqrt()) < 4e-3
    assert checked


@pytest.mark.gpu
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_bits_depend_on_no_cut(shape: int, device: torch.device) -> None:
    inputs = near_inputs(shape, device)
    positions, _, _, ratio = SHAPES[shape]
    assert_fits(inputs)
    cuts = [
        None,
        indexer_fp8.Cut(programs=1, registers=255),
        indexer_fp8.Cut(programs=2, registers=255, stages=3, loads=True),
        indexer_fp8.Cut(programs=2, registers=255, most=64, holds=False),
    ]
    first, *others = (scores_of(inputs, ratio, with_unit(cut=cut)) for cut in cuts)
    for r, position in enumerate(itertools.chain(*positions)):
        sees = max(positions[r // inputs.rows.span]) + 1
        if sees // ratio > 512 and position >= 0:
            end = (position + 1) // ratio
            assert all(torch.equal(first[r, :end], other[r, :end]) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [1e-6, None])
def test_heads_are_prepared_beside(eps: float | None, device: torch.device) -> None:
    positions, heads, page, ratio = SHAPES[1]
    inputs = draw_large(positions, device, heads=heads, page=page, ratio=ratio)
    generator = torch.Generator(device).manual_seed(8)
    wide = torch.randn(12, 6 * 512 + 16, generator=generator, device=device).bfloat16()
    own = wide[:, : 6 * 512].unflatten(1, (6, 512))
    arguments = (own, eps, inputs.query, inputs.share, inputs.turns, ratio, 512, inputs.rows, inputs.arena, inputs.keys)
    assert indexer_fp8.fits(inputs.query, inputs.rows.span, inputs.keys, inputs.arena, (own, eps, own))
    prepared, chosen = indexer.prepare_and_select(*arguments, config=with_unit())
    wanted = reference.prepare_and_select(*arguments)
    assert torch.equal(chosen, wanted[1])
    assert (prepared.float() - wanted[0].float()).norm() <= 3e-3 * wanted[0].float().norm()


@pytest.mark.gpu
def test_blocks_are_ranked_by_the_maxima(device: torch.device) -> None:
    inputs = draw_large([[1_200, 1_201, 1_202], [700, 701, 702]], device, heads=32, page=256, ratio=1)
    assert_fits(inputs)
    arguments = (inputs.query, inputs.share, inputs.turns, 1, 512, inputs.rows, inputs.arena, inputs.keys, 8, 100)
    found, kept = candidates.select_and_rank(*arguments)
    wanted, wanted_kept = reference.select_and_rank(*arguments)
    assert torch.equal(found, wanted)
    assert torch.equal(kept, wanted_kept)
