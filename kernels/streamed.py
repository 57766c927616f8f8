"""Streamed: which dense products `kernels.streamed_products` takes, how they are cut, and their launches.

Slices are those of `kernels.tiling`, so a row's bits are the same as with `kernels.linear`'s own kernels, which take
all other products, and more rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.chips import count_multiprocessors, is_hopper
from kernels.forms import Weight
from kernels.streamed_products import streamed_kernel, streamed_pair_kernel
from kernels.tickets import tickets_of
from kernels.tiling import tiling

TILE = 128
"""Rows of a weight in a tile, and bytes of a step."""
BLOCK = 64
"""Columns of x in a block."""
LEAST_ROWS, MOST_ROWS = 8, 64
"""Rows of x that a program holds: the least that a matrix instruction takes, and what there is room for."""
LEAST_BYTES = 16 << 20
"""Of a weight. A smaller one has too few programs; and the shared expert's run beside the routed experts' kernel, whose
programs leave them no multiprocessor."""
LEAST_PAIR_BYTES = 8 << 20
"""Of two weights."""
STAGE_BYTES = 2 * TILE * TILE
X_BYTES = {8: 64 << 10, 16: 64 << 10, 32: 64 << 10, 64: 128 << 10}
"""Of shared memory for x at most, by rows: what it lacks is read later, and waited for."""
SHARED_BYTES = 224 << 10
"""What stages and x take of a multiprocessor's 227 KiB at most."""
MOST_STAGES = 4
"""With the x of few rows so much shared memory that a multiprocessor holds one program, while kernels that need little
are still launched beside it."""


def fits(x: Tensor, weight: Weight, groups: int = 1) -> bool:
    """Whether these kernels take such rows and such a weight."""
    return weight.data.nbytes >= LEAST_BYTES and _is_taken(x, weight, groups)


def multiply(x: Tensor, weight: Weight, out: Tensor, groups: int = 1) -> None:
    """Fill out, [R, groups * out], with x times a weight in fp8 that `fits`; see `kernels.linear`."""
    (height, width), rows = weight.data.shape, x.shape[0]
    assert weight.scale is not None
    slices, padded = _slices(weight), _padded(rows)
    tiles = height // TILE
    # As many tiles for each program as for any other.
    places = count_multiprocessors(x.device)
    programs = tiles * slices if slices > 1 else triton.cdiv(tiles, triton.cdiv(tiles, places))
    partials, tickets = _meeting_place(weight, out, slices, padded)
    kept = _kept_blocks(width // slices, padded)
    streamed_kernel[(programs,)](
        _descriptor(weight), x, weight.scale, out, partials, tickets, rows, x.stride(0), out.stride(0),
        HEIGHT=height, WIDTH=width, GROUP_TILES=tiles // groups, SLICES=slices, ROWS=padded,
        STAGES=_stages(kept, padded), KEPT=kept, num_warps=8, maxnreg=_registers(padded), launch_pdl=True,
    )  # fmt: skip


def multiply_pair(x: Tensor, weight: Weight, side: Weight, out: Tensor, side_out: Tensor) -> None:
    """Fill out and side_out with x times a weight in fp8 and another one in bf16, which both fit."""
    (height, width), side_height, rows = weight.data.shape, side.data.shape[0], x.shape[0]
    assert weight.scale is not None
    slices, side_slices, padded = _slices(weight), _slices(side), _padded(rows)
    partials, tickets = _meeting_place(weight, out, slices, padded)
    side_partials, side_tickets = _meeting_place(side, side_out, side_slices, padded)
    kept, side_kept = _kept_blocks(width // slices, padded), _kept_blocks(width // side_slices, padded)
    programs = height // TILE * slices + triton.cdiv(side_height, TILE) * side_slices
    streamed_pair_kernel[(programs,)](
        _descriptor(weight), _descriptor(side), x, weight.scale, out, side_out, partials, side_partials, tickets,
        side_tickets, rows, x.stride(0), out.stride(0), side_out.stride(0), HEIGHT=height, SIDE_HEIGHT=side_height,
        WIDTH=width, SLICES=slices, SIDE_SLICES=side_slices, ROWS=padded, STAGES=_stages(max(kept, side_kept), padded),
        KEPT=kept, SIDE_KEPT=side_kept, num_warps=8, maxnreg=_registers(padded), launch_pdl=True,
    )  # fmt: skip


def fits_pair(x: Tensor, weight: Weight, side: Weight) -> bool:
    """Whether both weights fit, and have slices, so that each has its own programs."""
    return (
        weight.scale is not None
        and side.scale is None
        and weight.data.nbytes + side.data.nbytes >= LEAST_PAIR_BYTES
        and _is_taken(x, weight)
        and _is_taken(x, side)
        and min(_slices(weight), _slices(side)) > 1
    )


def _is_taken(x: Tensor, weight: Weight, groups: int = 1) -> bool:
    """Whether they can."""
    height, width = weight.data.shape
    if not (
        x.device.type == "cuda"
        and 0 < x.shape[0] <= MOST_ROWS
        and x.dtype == torch.bfloat16
        and is_hopper(x.device)
        and _is_aligned(x)
        and weight.data.is_contiguous()
        and weight.data.data_ptr() % 16 == 0
    ):
        return False
    columns = width // _slices(weight)
    if width % _slices(weight) or columns < 4 * BLOCK or columns & (columns - 1):
        return False
    if weight.scale is None:
        return weight.data.dtype == torch.bfloat16 and groups == 1
    # Without slices a program has several tiles, and one x for all.
    return (
        weight.data.dtype == torch.float8_e4m3fn
        and weight.block == (TILE, TILE)
        and height % (TILE * groups) == 0
        and weight.scale.is_contiguous()
        and (groups == 1 or _slices(weight) > 1)
    )


def _is_aligned(x: Tensor) -> bool:
    """Rows can be read 16 bytes at a time."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _slices(weight: Weight) -> int:
    # They follow from the weight alone.
    return tiling(weight, 1).slices


def _padded(rows: int) -> int:
    return max(LEAST_ROWS, triton.next_power_of_2(rows))


def _registers(padded: int) -> int:
    """Of a thread: what few rows need leaves room for other kernels."""
    return 128 if padded < 64 else 168


def _kept_blocks(columns: int, padded: int) -> int:
    """Blocks of x that a program holds at once: those of its slice, or a half of them, and so on."""
    blocks = columns // BLOCK
    while blocks > 4 and blocks * padded * BLOCK * 2 > X_BYTES[padded]:
        blocks //= 2
    return blocks


def _stages(kept: int, padded: int) -> int:
    return min(MOST_STAGES, (SHARED_BYTES - kept * padded * BLOCK * 2) // STAGE_BYTES)


def _meeting_place(weight: Weight, out: Tensor, slices: int, padded: int) -> tuple[Tensor, Tensor]:
    """Where slices of a tile are put, and counted; anything where there are none."""
    if slices == 1:
        return out, out
    tiles = triton.cdiv(weight.data.shape[0], TILE)
    partials = torch.empty((tiles, slices, padded, TILE), dtype=torch.float32, device=out.device)
    return partials, tickets_of(weight.data, tiles)


def _descriptor(weight: Weight) -> TensorDescriptor:
    if weight.scale is None:
        return TensorDescriptor.from_tensor(weight.data, [TILE, BLOCK], gl.NVMMASharedLayout(128, 16, 2))
    return TensorDescriptor.from_tensor(weight.data.view(torch.uint8), [TILE, TILE], gl.NVMMASharedLayout(128, 8, 2))
