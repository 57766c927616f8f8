"""Entrance: what lies between a layer's first products and its second as one launch, each part in its own programs.

The parts do not depend on each other (`compressor` says why rings are safe), so a program has one of them for one row,
or one group. Groups come first: theirs is the longest way. Launched one by one the parts would cost the step a kernel
each, and each is so short that its launch is most of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.compressor import (
    LONG,
    SHORT,
    CompressorConfig,
    choose_config,
    meeting_place,
    num_programs,
    pooling_arguments,
)
from kernels.forms import Plane, Pooling, StepRows
from kernels.pooling import close_group, write_raw_row
from kernels.rows import await_inputs, launch_options, norm_row, window_arguments, write_window_row


# Numbers that follow the batch are compiled once, not anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "first_programs", "second_programs"])
def _enter_attention_kernel(
    wide,  # float[rows, RANK + WIDTH], rows `wide_stride` apart
    out,  # A[rows, RANK]
    query_norm,  # float32[RANK]
    window_norm,  # float32[WIDTH]
    turns,  # float32[positions, TURNED]
    positions,  # int32[rows]
    slabs,  # int32[sequences]
    tables,  # int32[sequences, pages]
    arena,  # uint8[bytes]
    rows,
    wide_stride,
    pages,
    window_data,
    window_scale,
    window_stride,
    eps,
    first_raw,
    first_bias,
    first_weight,
    first_shares,
    first_tickets,
    first_programs,
    first_raw_stride,
    first_ring_data,
    first_ring_stride,
    first_data,
    first_scale,
    first_stride,
    first_eps,
    second_raw,
    second_bias,
    second_weight,
    second_shares,
    second_tickets,
    second_programs,
    second_raw_stride,
    second_ring_data,
    second_ring_stride,
    second_data,
    second_scale,
    second_stride,
    second_eps,
    POOLINGS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    FIRST_RATIO: tl.constexpr,
    FIRST_OVERLAPS: tl.constexpr,
    FIRST_BIASED: tl.constexpr,
    FIRST_HALF: tl.constexpr,
    FIRST_RING: tl.constexpr,
    FIRST_ROPE: tl.constexpr,
    FIRST_ROWS: tl.constexpr,
    FIRST_DATA_BYTES: tl.constexpr,
    FIRST_SCALE_BYTES: tl.constexpr,
    FIRST_FORMAT: tl.constexpr,
    FIRST_ELEMENTS: tl.constexpr,
    FIRST_SLOTS: tl.constexpr,
    FIRST_SPLITS: tl.constexpr,
    SECOND_RATIO: tl.constexpr,
    SECOND_OVERLAPS: tl.constexpr,
    SECOND_BIASED: tl.constexpr,
    SECOND_HALF: tl.constexpr,
    SECOND_RING: tl.constexpr,
    SECOND_ROPE: tl.constexpr,
    SECOND_ROWS: tl.constexpr,
    SECOND_DATA_BYTES: tl.constexpr,
    SECOND_SCALE_BYTES: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
    SECOND_ELEMENTS: tl.constexpr,
    SECOND_SLOTS: tl.constexpr,
    SECOND_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    program = tl.program_id(0)
    if POOLINGS > 0:
        if program < first_programs:
            close_group(
                first_raw, first_bias, first_weight, turns, positions, slabs, tables, arena,
                first_shares, first_tickets, program, first_raw_stride, pages, first_ring_data,
                first_ring_stride, first_data, first_scale, first_stride,
                first_eps, SPAN, FIRST_RATIO, FIRST_OVERLAPS, FIRST_BIASED, FIRST_HALF, FIRST_RING, TURNED,
                FIRST_ROPE, FIRST_ROWS, FIRST_DATA_BYTES, FIRST_SCALE_BYTES, FIRST_FORMAT, FIRST_ELEMENTS,
                FIRST_SLOTS, FIRST_SPLITS,
            )  # fmt: skip
        program -= first_programs
    if POOLINGS > 1:
        if (program >= 0) & (program < second_programs):
            close_group(
                second_raw, second_bias, second_weight, turns, positions, slabs, tables, arena,
                second_shares, second_tickets, program, second_raw_stride, pages, second_ring_data,
                second_ring_stride, second_data, second_scale,
                second_stride, second_eps, SPAN, SECOND_RATIO, SECOND_OVERLAPS, SECOND_BIASED, SECOND_HALF,
                SECOND_RING, TURNED, SECOND_ROPE, SECOND_ROWS, SECOND_DATA_BYTES, SECOND_SCALE_BYTES, SECOND_FORMAT,
                SECOND_ELEMENTS, SECOND_SLOTS, SECOND_SPLITS,
            )  # fmt: skip
        program -= second_programs
    if (program >= 0) & (program < rows):
        write_window_row(
            wide + RANK, window_norm, turns, positions, slabs, arena, program, wide_stride,
            window_data, window_scale, window_stride, eps,
            SPAN, WIDTH, TURNED, BLOCK, ROPE, ROWS, DATA_BYTES, SCALE_BYTES, FORMAT,
        )  # fmt: skip
    program -= rows
    if (program >= 0) & (program < rows):
        norm_row(wide, query_norm, out, program, wide_stride, eps, RANK, RANK_BLOCK)
    program -= rows
    if POOLINGS > 0:
        if (program >= 0) & (program < rows):
            write_raw_row(
                first_raw, first_bias, positions, slabs, arena, program, first_raw_stride, first_ring_data,
                first_ring_stride, SPAN, FIRST_RATIO, FIRST_BIASED, FIRST_HALF, FIRST_RING,
            )  # fmt: skip
        program -= rows
    if POOLINGS > 1:  # noqa: SIM102 - decided by the compiler; the other one by the device
        if (program >= 0) & (program < rows):
            write_raw_row(
                second_raw, second_bias, positions, slabs, arena, program, second_raw_stride, second_ring_data,
                second_ring_stride, SPAN, SECOND_RATIO, SECOND_BIASED, SECOND_HALF, SECOND_RING,
            )  # fmt: skip


def enter_attention(
    wide: Tensor,
    query_norm: Tensor,
    window_norm: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    turns: Tensor,
    rows: StepRows,
    arena: Tensor,
    ring: Plane,
    compressions: Sequence[tuple[Tensor, Pooling]] = (),
    config: CompressorConfig | None = None,
) -> Tensor:
    """See `kernels.reference.enter_attention`: two poolings at most, whose rings and targets are apart.

    Args:
        config: how to; None to choose, by what the poolings read.
    """
    if len(compressions) > 2:
        raise ValueError(f"a layer has at most two poolings, not {len(compressions)}")
    rank = len(query_norm)
    out = torch.empty((rows.rows, rank), dtype=out_dtype, device=wide.device)
    if not rows.rows:
        return out
    if config is None:
        config = LONG if any(choose_config(pooling) == LONG for _, pooling in compressions) else SHORT
    arguments: dict[str, Tensor | int | float | str | bool | None] = {}
    programs = 2 * rows.rows
    for i, name in enumerate(("first", "second")):
        if i >= len(compressions):
            # Not read; a number where the compiler wants a number.
            arguments |= {f"{name}_{part}": None for part in ("raw", "bias", "weight", "shares", "tickets")}
            arguments |= {f"{name}_{part}": 0 for part in _NUMBERS}
            arguments |= {f"{name.upper()}_{part}": 0 for part in _CONSTANTS}
            continue
        raw, pooling = compressions[i]
        own_programs = num_programs(pooling, rows, config)
        programs += own_programs + rows.rows
        target = pooling.target
        numbers = (
            own_programs, raw.stride(0), pooling.ring.data, pooling.ring.stride, target.data, target.scale,
            target.stride, pooling.eps,
        )  # fmt: skip
        arguments |= {f"{name}_raw": raw, f"{name}_bias": pooling.bias, f"{name}_weight": pooling.norm}
        shares, tickets = meeting_place(pooling, rows, config, arena)
        arguments |= {f"{name}_shares": shares, f"{name}_tickets": tickets}
        arguments |= {f"{name}_{part}": number for part, number in zip(_NUMBERS, numbers, strict=True)}
        constants = pooling_arguments(pooling, config)
        arguments |= {f"{name.upper()}_{part}": constants[part] for part in _CONSTANTS}
    _enter_attention_kernel[(programs,)](
        wide, out, query_norm, window_norm, turns, rows.positions, rows.slabs, rows.tables, arena,
        rows.rows, wide.stride(0), rows.tables.stride(0), ring.data, ring.scale, ring.stride, eps,
        POOLINGS=len(compressions), RANK=rank, RANK_BLOCK=triton.next_power_of_2(rank),
        **window_arguments(ring, turns, rows.span), **arguments,
        EARLY=config.early, num_warps=config.warps, **launch_options(config.early),
    )  # fmt: skip
    return out


_NUMBERS = ("programs", "raw_stride", "ring_data", "ring_stride", "data", "scale", "stride", "eps")
_CONSTANTS = (
    "RATIO", "OVERLAPS", "BIASED", "HALF", "RING", "ROPE", "ROWS", "DATA_BYTES", "SCALE_BYTES", "FORMAT", "ELEMENTS",
    "SLOTS", "SPLITS",
)  # fmt: skip
