"""Products of MXFP4 weights with rows on Hopper's fp8 matrix unit, which takes two thirds of bf16's instructions.

Two launches, in place of the first three of `kernels.experts`, where `fits` says so:

1. `kernels.experts_tiles.group_tiles_kernel`: pairs of each expert in tiles, with x as the sum of two e4m3 numbers.
2. `kernels.experts_products.multiply_tiles_kernel`: the up projections of all tiles, gated and split like x, and then
   the down projections.

Weights are the left operand, from registers (`kernels.e4m3_groups`). Each group's products with the high and the low
numbers of x start from zero, since the unit keeps some 14 bits of a sum, and are multiplied by the group's scale into
float32. So the result differs from bf16's by less than bf16's rounding, and does not depend on a tile's other pairs.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.chips import count_multiprocessors, is_hopper
from kernels.experts_pairs import group_many
from kernels.experts_products import multiply_tiles_kernel
from kernels.experts_tiles import group_tiles_kernel
from kernels.forms import SlotWeights

STAGE = 256
"""Columns of a stage: 128 bytes of each weight row, which is what shared memory swizzles."""
BLOCK = 64
"""Channels of the hidden layer that share a scale of the split."""
MOST_PAIRS_KNOWN = 64
"""Pairs of a step up to which each program of the products finds the tiles itself, where kernels are launched early."""

MOST_PAIRS_COUNTED = 2048
"""Pairs up to which each program of the grouping counts all of them for itself, in one launch."""

MANY_PAIRS_EACH = 40
"""Pairs of an expert from which on one large tile is faster than several, each of which unpacks the weights anew."""
SOME_PAIRS_EACH = 20
"""The same of tiles half as large."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; a row's bits depend on none of them.

    Attributes:
        tile: pairs of one expert that a program multiplies: 8, 16, 32 or 64.
        rows: weight rows of a program, which read x from L2 once: 128 or 256. Of the up projection one half is gates
            and the other their partners.
        stages: of weights and x in shared memory, of which all but one are on their way.
        warps: of a program: one for each 16 of its rows, or 32, which costs fewer instructions.
        programs: on one multiprocessor; they decide about registers, and must fit its shared memory.
    """

    tile: int = 8
    rows: int = 128
    stages: int = 2
    warps: int = 4
    programs: int = 4

    @property
    def registers(self) -> int:
        """Of a thread, so that `programs` fit one multiprocessor."""
        return min(65536 // (32 * self.warps * self.programs) // 8 * 8, 255)


def fits(x: Tensor, slots: SlotWeights) -> bool:
    """Whether these kernels take such rows and slots: Hopper, whole stages of columns, bytes that TMA can copy."""
    hidden, width = x.shape[1], slots.up.shape[1] // 2
    return (
        slots.is_mxfp4
        and x.dtype == torch.bfloat16
        and x.device.type == "cuda"
        and is_hopper(x.device)
        and all(columns % STAGE == 0 and columns >= 4 * STAGE for columns in (hidden, width))
        and all(part.data_ptr() % 16 == 0 and part.stride(0) % 16 == 0 for part in _parts(slots))
    )


def choose_config(rows: int, each: float = 0.0) -> Config:
    """By rows of a step, and its pairs by experts, as measured.

    Few rows: programs that end soon. Many: few instructions. More: larger tiles.
    """
    if each >= MANY_PAIRS_EACH:
        return Config(tile=64, warps=8, stages=3, programs=1)
    if each >= SOME_PAIRS_EACH:
        return Config(tile=32, warps=8, stages=3, programs=2)
    if rows <= 8:
        return Config(warps=8, stages=4, programs=2)
    return Config() if rows <= 256 else Config(tile=16, stages=3, programs=3)


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Sizes of the programs that split x.

    Attributes:
        rows: of x in a program.
        part: columns of these.
        warps: of a program.
        registers: that a thread may have; None for as many as it likes.
    """

    rows: int
    part: int
    warps: int
    registers: int | None = None


def choose_grouping(rows: int, hidden: int) -> Grouping:
    """By rows of a step. Few: programs that end soon. Many: no more counting of pairs than there is room for."""
    if rows <= 16:
        return Grouping(1, math.gcd(hidden, 1024), 4)
    part = math.gcd(hidden, 4096)
    return Grouping(1, part, 8) if rows <= 128 else Grouping(triton.cdiv(rows, 256), part, 8, 80)


def _parts(slots: SlotWeights) -> list[Tensor]:
    return [part for part in (slots.up, slots.up_scale, slots.down, slots.down_scale) if part is not None]


def multiply(
    x: Tensor, ids: Tensor, weights: Tensor, expert_to_slot: Tensor, slots: SlotWeights, clamp: float,
    config: Config, *, early: bool,
) -> Tensor:  # fmt: skip
    """float32[rows, places, hidden]: see `kernels.experts.multiply_pairs`, and `Config` there for `early`."""
    tile, half = config.tile, config.rows // 2
    rows, hidden = x.shape
    places, experts = ids.shape[1], expert_to_slot.shape[0]
    width, device = slots.up.shape[1] // 2, x.device
    assert slots.up_scale is not None and slots.down_scale is not None
    count = rows * places
    most = min(count, experts + count // tile)
    pairs = torch.empty((most, tile), dtype=torch.int32, device=device)
    tiles = torch.empty((most, 2), dtype=torch.int32, device=device)
    progress = torch.empty(2 + most, dtype=torch.int32, device=device)
    split = torch.empty((most * hidden // 32, tile, 64), dtype=torch.uint8, device=device)
    split_scale = torch.empty((most, tile), dtype=torch.float32, device=device)
    inner = torch.empty((most * width // 32, tile, 64), dtype=torch.uint8, device=device)
    inner_scale = torch.empty((most, width // BLOCK, tile), dtype=torch.float32, device=device)
    partial = torch.empty((rows, places, hidden), dtype=torch.float32, device=device)
    programs = min(most * (width // half), count_multiprocessors(device) * config.programs)
    knows = early and rows <= tile and count <= MOST_PAIRS_KNOWN
    own_items = min(programs, count_multiprocessors(device)) if knows else 0
    if count > MOST_PAIRS_COUNTED:
        group_many(
            x, ids, expert_to_slot, pairs, tiles, progress, split, split_scale, own_items, tile=tile, early=early
        )
    else:
        grouping = choose_grouping(rows, hidden)
        group_tiles_kernel[(experts + triton.cdiv(rows, grouping.rows) * hidden // grouping.part,)](
            x, ids, expert_to_slot, pairs, tiles, progress, split, split_scale, own_items, count, experts, x.stride(0),
            HIDDEN=hidden, PART=grouping.part, EACH=grouping.rows, PLACES=places, TILE=tile,
            MAX_HIDDEN=triton.next_power_of_2(hidden), MAX_PLACES=triton.next_power_of_2(places * grouping.rows),
            MAX_PAIRS=max(triton.next_power_of_2(count), 32 * grouping.warps),
            MAX_EXPERTS=triton.next_power_of_2(experts), MAX_TILES=triton.next_power_of_2(triton.cdiv(rows, tile)),
            EARLY=early, launch_pdl=early, num_warps=grouping.warps, maxnreg=grouping.registers,
        )  # fmt: skip
    split_layout, word_layout = gl.NVMMASharedLayout(64, 8, 3), gl.NVMMASharedLayout(128, 8, 4)
    box = [1, 2, half, STAGE // 2]
    multiply_tiles_kernel[(programs,)](
        TensorDescriptor.from_tensor(slots.up.unflatten(1, (2, width)), box, word_layout),
        TensorDescriptor.from_tensor(split, [8, tile, 64], split_layout), slots.up_scale.view(torch.int32), split_scale,
        TensorDescriptor.from_tensor(slots.down.unflatten(1, (-1, half)), box, word_layout), slots.down,
        TensorDescriptor.from_tensor(inner, [8, tile, 64], split_layout), inner, slots.down_scale.view(torch.int32),
        inner_scale, weights, ids, expert_to_slot, pairs, tiles, progress, partial, slots.up_scale.stride(0) // 4,
        slots.down.stride(0), slots.down_scale.stride(0) // 4, clamp, count if knows else 0, own_items, HIDDEN=hidden,
        WIDTH=width, TILE=tile, ROWS=config.rows, STAGES=config.stages, CHAIN=tile == 64, MAX_PAIRS=MOST_PAIRS_KNOWN,
        HEAD=knows, EARLY=early, launch_pdl=early, num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
    return partial
