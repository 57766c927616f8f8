"""Compressor: raw rows go to their rings, and the groups that they close become records. One launch a pooling.

A sequence of `span` rows closes at most ceil(span / ratio) groups: each has a program, which leaves at once if the step
does not close it. Programs of rows write the rings. None waits for another: a group's rows of this step are read from
the step's own tensor, older ones from the ring, which the step does not touch there. Positions p .. p + 7 at most are
written, over positions p + 7 - ring at the latest; the oldest that a group pools is p - pooled + 1. Rings have at least
pooled + 8 rows, so the first is the older one.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import Pooling, StepRows
from kernels.pooling import close_group, write_raw_row
from kernels.rows import INTERPRETED, await_inputs, launch_options
from kernels.tickets import tickets_of


@dataclasses.dataclass(frozen=True)
class CompressorConfig:
    """How groups are cut. Nothing in it depends on the number of rows, so a record's bits do not either.

    Attributes:
        warps: of a program.
        elements: channels of pooled rows that a program asks for at once, of latents and of gates.
        splits: programs of a group, at most, each with a part of the channels. Of more than one the last one to come
            finishes the record, which takes a count that is kept between launches.
        early: kernels are launched while those before them drain (programmatic dependent launch).
    """

    warps: int
    elements: int
    splits: int = 1
    early: bool = not INTERPRETED


SHORT, LONG = CompressorConfig(warps=4, elements=4096), CompressorConfig(warps=4, elements=4096, splits=8)
"""For groups of some rows, of which a quarter closes in a step; and for long ones, of which few do. Half a megabyte is
more than one multiprocessor can ask for at a time: eight of them take half as long (measured)."""
WHOLE = CompressorConfig(warps=8, elements=8192)
"""For long ones too, by one program."""


def choose_config(pooling: Pooling) -> CompressorConfig:
    """By how much a group reads, which depends on the model only."""
    return LONG if pooling.ratio * pooling.ring.width > 32768 else SHORT


# The number of programs follows the batch: compiled once, not anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["programs"])
def _compress_kernel(
    raw,
    bias,
    weight,
    turns,
    positions,
    slabs,
    tables,
    arena,
    shares,
    tickets,
    programs,
    raw_stride,
    pages,
    ring_data,
    ring_stride,
    data,
    scale,
    stride,
    eps,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BIASED: tl.constexpr,
    HALF: tl.constexpr,
    RING: tl.constexpr,
    TURNED: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    ELEMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    # Groups come first: theirs is the longer way.
    program = tl.program_id(0)
    if program < programs:
        close_group(
            raw, bias, weight, turns, positions, slabs, tables, arena, shares, tickets, program,
            raw_stride, pages, ring_data, ring_stride, data, scale, stride, eps,
            SPAN, RATIO, OVERLAPS, BIASED, HALF, RING, TURNED, ROPE, ROWS, DATA_BYTES, SCALE_BYTES, FORMAT,
            ELEMENTS, SLOTS, SPLITS,
        )  # fmt: skip
    else:
        write_raw_row(
            raw, bias, positions, slabs, arena, program - programs, raw_stride, ring_data, ring_stride,
            SPAN, RATIO, BIASED, HALF, RING,
        )  # fmt: skip


def num_splits(pooling: Pooling, config: CompressorConfig) -> int:
    """Programs of a group; a part is no narrower than a line of 32 channels."""
    return min(config.splits, max(triton.next_power_of_2(pooling.target.width) // 32, 1))


def pooling_arguments(pooling: Pooling, config: CompressorConfig) -> dict[str, int | str | bool]:
    """Constants of `write_raw_row` and `close_group` that a pooling sets."""
    target = pooling.target
    splits = num_splits(pooling, config)
    part = triton.next_power_of_2(target.width) // splits
    # As many rows as all threads cover with 16 bytes each: a slot's rows then stay within a thread.
    slots = max(min(config.warps * 128 // part, triton.next_power_of_2(pooling.ratio)), 1)
    return {
        "ELEMENTS": config.elements,
        "SLOTS": slots,
        "SPLITS": splits,
        "RATIO": pooling.ratio,
        "OVERLAPS": pooling.overlaps,
        "BIASED": pooling.bias is not None,
        "HALF": pooling.ring.width // 2,
        "RING": pooling.ring.rows,
        "ROPE": target.rope,
        "ROWS": target.rows,
        "DATA_BYTES": target.data_bytes,
        "SCALE_BYTES": target.scale_bytes,
        "FORMAT": target.format,
    }


def num_programs(pooling: Pooling, rows: StepRows, config: CompressorConfig) -> int:
    """Programs of all groups that a step might close."""
    return len(rows.slabs) * triton.cdiv(rows.span, pooling.ratio) * num_splits(pooling, config)


def meeting_place(
    pooling: Pooling, rows: StepRows, config: CompressorConfig, arena: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(shares, tickets) where the programs of a group meet; None where a group has one."""
    splits = num_splits(pooling, config)
    if splits == 1:
        return None, None
    groups = num_programs(pooling, rows, config) // splits
    shares = torch.empty(
        (groups, triton.next_power_of_2(pooling.target.width)), dtype=torch.float32, device=arena.device
    )
    # No two launches write the same ring at a time.
    return shares, tickets_of(arena, groups, pooling.ring.data)


def compress(
    raw: Tensor,
    pooling: Pooling,
    turns: Tensor,
    rows: StepRows,
    arena: Tensor,
    config: CompressorConfig | None = None,
) -> None:
    """Store the raw rows of a step in their rings; norm, rotate and store the records that they close.

    Args:
        raw: float32[R, ring.width] (rows may lie in a wider tensor): latents, then gates without bias.
        pooling: what and where.
        turns: of layers with compressed entries, contiguous.
        rows: the step.
        arena: uint8[bytes], written into.
        config: how to; None to choose.
    """
    if not rows.rows:
        return
    config = config or choose_config(pooling)
    programs = num_programs(pooling, rows, config)
    ring, target = pooling.ring, pooling.target
    _compress_kernel[(programs + rows.rows,)](
        raw, pooling.bias, pooling.norm, turns, rows.positions, rows.slabs, rows.tables, arena,
        *meeting_place(pooling, rows, config, arena), programs, raw.stride(0), rows.tables.stride(0),
        ring.data, ring.stride, target.data, target.scale, target.stride, pooling.eps,
        SPAN=rows.span, TURNED=turns.shape[1] * 2, **pooling_arguments(pooling, config),
        EARLY=config.early, num_warps=config.warps, **launch_options(config.early),
    )  # fmt: skip
