"""Tiling: how a product of a few rows and a weight is cut into programs and steps, by shapes and types alone."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton

from kernels.forms import Weight

PROGRAMS = 264
"""Programs that are resident at once on an H200: two on each of 132 multiprocessors."""
SHORTEST_SLICE = 256
"""Columns below which a slice costs more in sums than it gains in memory requests."""
SHARED_BYTES = 110 * 1024
"""Shared memory that a program's stages may take where a multiprocessor is to hold two, and nearly twice that where the
sums leave registers for one only."""


OVERLAP_BYTES = 2 << 20
"""Weights up to this size are loaded while the kernel before drains, which gains a microsecond of six. Larger ones
lose up to half of their time by it (measured)."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut. `block_k` and `slices` decide a row's bits and follow from the weight alone.

    Attributes:
        block_m: rows of the weight in a tile; both halves together for a gated product.
        block_n: rows of the step in a tile.
        block_k: columns of a step of the loop.
        slices: parts of the columns, each summed on its own.
        serial: one program sums all slices of its tile.
        warps, stages: of a program.
        overlaps: the kernel is launched while the one before it drains (programmatic dependent launch), and moves its
            first columns to the L2 meanwhile.
        scale_weights: scales go to the weights and not to the sums of a step: fewer registers, other bits.
    """

    block_m: int
    block_n: int
    block_k: int
    slices: int
    serial: bool
    warps: int
    stages: int
    overlaps: bool = False
    scale_weights: bool = False


def tiling(weight: Weight, rows: int, activation: torch.dtype = torch.bfloat16) -> Tiling:
    """The tiling that is used when none is given: a plain function of shapes and types."""
    height, width = weight.data.shape
    columns = weight.block[1] if weight.scale is not None else 128
    wide = torch.float32 in (activation, weight.data.dtype)
    return _tiling(height, width, 4 if wide else weight.data.element_size(), columns, rows)


@functools.cache
def _tiling(height: int, width: int, element: int, scale_columns: int, rows: int) -> Tiling:
    # A line of the cache in each row; and a step of the loop never leaves a block of the scales.
    block_k = min(128 // element, scale_columns & -scale_columns, max(16, triton.next_power_of_2(width)))
    slices = 1
    while triton.cdiv(height, 64) * slices * 2 <= PROGRAMS and width >= slices * 2 * SHORTEST_SLICE:
        slices *= 2
    block_n = min(128, max(16, triton.next_power_of_2(rows)))
    if element == 4:
        # float32 is not for the matrix units: small tiles, so that the operands fit in registers.
        return Tiling(64, min(block_n, 32), block_k, slices, False, 4, 2)
    # Tall tiles read x less often; low ones are more programs, and shorter sums where there are many slices.
    block_m = 128 if (rows > 64 and slices < 8) or triton.cdiv(height, 128) >= 3 * PROGRAMS else 64
    if block_m == 64:
        # One warp group's sums: two would both dequantise the whole tile.
        block_n = min(block_n, 64)
    programs = triton.cdiv(height, block_m) * slices
    while slices >= 8 and block_n > 16 and triton.cdiv(rows, block_n // 2) * programs <= PROGRAMS:
        block_n //= 2
    shared = SHARED_BYTES if block_n <= 64 else SHARED_BYTES * 9 // 5
    # Measured at 16 rows: three stages where there are programs enough, four elsewhere; six were slower throughout.
    stages = 3 if triton.cdiv(height, block_m) * slices >= 2 * PROGRAMS else 4
    stages = max(2, min(stages, shared // (block_k * (block_m * element + block_n * 2))))
    overlaps = not triton.knobs.runtime.interpret and height * width * element <= OVERLAP_BYTES
    return Tiling(block_m, block_n, block_k, slices, False, 8 if block_n > 64 else 4, stages, overlaps)
