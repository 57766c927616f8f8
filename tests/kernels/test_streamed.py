"""Streamed products: the bits of `kernels.linear`'s own kernels, for every number of rows that they take."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kernels import linear, reference, streamed
from kernels.forms import Weight
from kernels.tiling import tiling
from tests.kernels.test_linear import BF16_ERROR, make_weight, relative_error

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
MULTIPROCESSOR_BYTES = 227 << 10
"""Of shared memory, for one program."""


def make_rows(rows: int, width: int, device: torch.device) -> Tensor:
    """Rows in a wider tensor, with NaN on both sides of them, at a place from which 16 bytes can be read."""
    wide = torch.full((rows, width + 32), float("nan"))
    wide[:, 16 : 16 + width] = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    return wide.to(device, BF16)[:, 16 : 16 + width]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(
    ("out", "width", "groups"),
    [
        (4096, 8192, 1),  # four slices of the columns
        (8192, 4096, 8),
        (40960, 1024, 1),  # no slices, and several tiles for each program
    ],
)
def test_products_have_the_bits_of_the_other_kernels(rows: int, out: int, width: int, groups: int) -> None:
    device = torch.device("cuda")
    weight = make_weight(out, width, FP8, out, device)
    x = make_rows(rows, width * groups, device)
    assert streamed.fits(x, weight, groups)
    if groups == 1:
        want = linear.linear(x, weight, config=tiling(weight, rows))
        truth = reference.linear(x, weight, F32)
    else:
        want = linear.grouped_linear(x, weight, groups, config=tiling(weight, rows))
        truth = reference.grouped_linear(x.float(), weight, groups)
    for _ in range(3):
        got = torch.full_like(want, float("nan"))
        streamed.multiply(x, weight, got, groups)
        assert relative_error(got, truth) < BF16_ERROR
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("side_out", [2624, 1024])
def test_pairs_have_the_bits_of_the_other_kernels(rows: int, side_out: int) -> None:
    device = torch.device("cuda")
    weight = make_weight(1536, 4096, FP8, 1, device)
    side = make_weight(side_out, 4096, BF16, 2, device)
    x = make_rows(rows, 4096, device)
    assert streamed.fits_pair(x, weight, side)
    want = linear.linear(x, weight, config=tiling(weight, rows))
    want_side = linear.linear(x, side, F32, config=tiling(side, rows))
    assert relative_error(want_side, reference.linear(x, side, F32)) < 1e-5
    for _ in range(3):
        got, got_side = torch.full_like(want, float("nan")), torch.full_like(want_side, float("nan"))
        streamed.multiply_pair(x, weight, side, got, got_side)
        assert torch.equal(got, want)
        assert torch.equal(got_side, want_side)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
@pytest.mark.parametrize("columns", [256, 512, 1024, 2048, 4096])
def test_a_program_has_a_multiprocessor_to_itself(rows: int, columns: int) -> None:
    """And at least two stages beside its x, of which one is on its way."""
    padded = streamed._padded(rows)
    kept = streamed._kept_blocks(columns, padded)
    stages = streamed._stages(kept, padded)
    shared = stages * streamed.STAGE_BYTES + kept * padded * streamed.BLOCK * 2
    assert kept >= 4
    assert columns // streamed.BLOCK % kept == 0
    assert stages >= 3
    assert MULTIPROCESSOR_BYTES // 2 < shared <= MULTIPROCESSOR_BYTES - 1024


def test_other_products_do_not_fit(device: torch.device) -> None:
    x = torch.zeros(3, 2048, dtype=BF16, device=device)
    for weight in (
        make_weight(2048, 2048, FP8, 0, device, (32, 32)),
        make_weight(2080, 2048, FP8, 0, device),
        make_weight(1024, 1088, BF16, 0, device),
        Weight(torch.zeros(2048, 2048, dtype=F32, device=device)),
    ):
        assert not streamed._is_taken(x[:, : weight.data.shape[1]], weight)
        assert not streamed.fits_pair(x[:, : weight.data.shape[1]], weight, weight)


def test_the_compiler_keeps_registers_and_moves_no_values() -> None:
    """For sm_90, which needs no GPU: nothing on the stack, one wait for each of a turn's two steps, and weights come
    from shared memory 16 bytes at a time, those of the first step before the loop; there is no way back."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.device_code", "--streamed", "16"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", printed)}
    assert found["stack"] == 0 and found["waits"] == 2 and found["products"] == 16 and found["loads"] == 12
