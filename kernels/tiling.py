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
MOST_SLICES = {1: 4, 2: 8, 4: 16}
"""By bytes of a number: what more slices gain at few rows, they lose in sums at many."""
SHARED_BYTES = 110 * 1024
"""Shared memory that a program's stages may take, as a multiprocessor is to hold two."""
PREPARED_BYTES = 16 << 20
"""fp8 weights from this size on gain more than the kernel that turns x costs, at 64 rows."""
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
        overlaps: the kernel is launched while the one before it drains (programmatic dependent launch).
        ahead: bytes of each row that such a kernel moves to the L2 before the one before it has ended, at most.
        prepared: x is turned into what products with fp8 take by a kernel of its own, and not by each program.
        registers: of a thread, at most.
    """

    block_m: int
    block_n: int
    block_k: int
    slices: int
    serial: bool
    warps: int
    stages: int
    overlaps: bool = False
    ahead: int = 512
    prepared: bool = False
    registers: int | None = None


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
    slices, tiles = 1, triton.cdiv(height, 64)
    # Narrow blocks of scales make steps short; more programs hide what each costs.
    narrow = element == 1 and scale_columns < 128
    while (
        tiles * slices * 2 <= PROGRAMS * (2 if narrow else 1)
        and width >= slices * 2 * SHORTEST_SLICE
        and slices < MOST_SLICES[element] * (2 if narrow else 1)
    ):
        slices *= 2
    block_n = min(128, max(16, triton.next_power_of_2(rows)))
    if element == 4:
        # float32 is not for the matrix units: small tiles, so that the operands fit in registers.
        return Tiling(64, min(block_n, 32), block_k, slices, False, 4, 2)
    # All rows in one tile as far as possible, since each tile dequantises the weight again; and tall tiles where x is
    # large, since each reads all of it.
    block_m = 128 if block_n >= 64 or triton.cdiv(height, 128) >= 3 * PROGRAMS else 64
    warps = 8 if block_n >= 64 else 4
    # Measured at 16 rows: three stages where there are programs enough, four elsewhere; six were slower throughout.
    stages = 3 if triton.cdiv(height, block_m) * slices >= 2 * PROGRAMS else 4
    stages = max(2, min(stages, SHARED_BYTES // (block_k * (block_m * element + block_n * 2))))
    overlaps = not triton.knobs.runtime.interpret and height * width * element <= OVERLAP_BYTES
    prepared = block_n >= 128 or (block_n == 64 and height * width >= PREPARED_BYTES)
    # Two programs on a multiprocessor: one dequantises while the other multiplies.
    registers = 128 if block_n >= 128 else None
    return Tiling(
        block_m, block_n, block_k, slices, False, warps, stages, overlaps, prepared=prepared, registers=registers
    )
