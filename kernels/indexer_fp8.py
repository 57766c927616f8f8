"""Index scores of e4m3 keys on Hopper's fp8 matrix unit: launches `kernels.indexer_scores`, where `fits` says so."""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.chips import count_multiprocessors, is_hopper
from kernels.choice import EACH
from kernels.forms import UNIT_INDEX_HEADS, Plane, StepRows
from kernels.indexer_scores import score_keys_kernel

BLOCK, WIDTH = 64, 128


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the kernel is cut. Results do not depend on it.

    Attributes:
        stages: blocks of keys in shared memory, at least 3.
        programs: on one multiprocessor.
        registers: of a thread.
        most: heads of a product, at most.
        loads: keys pass through registers on their way to the matrix unit.
        holds: heads' weights stay in registers.
    """

    stages: int = 4
    programs: int = 4
    registers: int = 128
    most: int = 128
    loads: bool = False
    holds: bool = True


@dataclasses.dataclass(frozen=True)
class Config:
    """Which numbers are multiplied, and how the kernel is cut.

    Attributes:
        split: queries are the sum of two e4m3 numbers; else they are rounded to one.
        cut: None for `choose_cut`.
    """

    split: bool = True
    cut: Cut | None = None


DEFAULT = Config()


def choose_cut(heads: int, split: bool) -> Cut:
    """By heads of all rows of a sequence, as measured."""
    if heads <= 64:
        return Cut()
    return Cut(programs=2, registers=255, loads=True, holds=heads <= 256)


def fits(
    query: Tensor, span: int, keys: Plane, arena: Tensor, attention: tuple[Tensor, float | None, Tensor] | None
) -> bool:
    """Whether this kernel takes such queries, `span` rows of a sequence, and such keys.

    It takes e4m3 keys of 128 channels, whole blocks of them in a page, on a Hopper.
    """
    return (
        query.device.type == "cuda"
        and query.dtype == torch.bfloat16
        and keys.format == "fp8"
        and query.shape[2] == keys.width == keys.data_bytes == WIDTH
        and query.shape[1] in (32, 64)
        # More were not measured yet.
        and query.shape[1] * span <= UNIT_INDEX_HEADS
        and keys.rows % BLOCK == 0
        and keys.scale_bytes == 4
        and (arena.data_ptr() + keys.data) % 16 == keys.stride % 16 == 0
        # Heads that are prepared beside have a power of two of channels.
        and (attention is None or attention[0].shape[2] in (256, 512))
        and is_hopper(query.device)
    )


def score_keys(
    query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    share_scale: float = 1.0,
    attention: tuple[Tensor, float | None, Tensor] | None = None,
    *,
    config: Config = DEFAULT,
    early: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `kernels.indexer.score_entries`."""
    total, heads, _ = query.shape
    cut = config.cut or choose_cut(heads * rows.span, config.split)
    sequences, pages = rows.tables.shape
    # Whole blocks of scores.
    capacity = triton.cdiv(pages * keys.rows, BLOCK) * BLOCK
    scores = torch.empty((total, capacity), dtype=torch.float32, device=query.device)
    maxima = torch.empty((total, triton.cdiv(capacity // EACH, 16) * 16), dtype=torch.float32, device=query.device)
    programs = min(cut.programs * count_multiprocessors(query.device), sequences * capacity // BLOCK)
    own, eps, prepared = attention if attention is not None else (query, None, query)
    tile = 2048 // own.shape[2]
    preparers = total * triton.cdiv(own.shape[1], tile) if attention is not None else 0
    blocks = (arena.numel() - keys.data - keys.rows * WIDTH) // keys.stride + 1
    data = arena[keys.data :].view(torch.float8_e4m3fn)
    box, layout = [1, BLOCK, WIDTH], gl.NVMMASharedLayout(128, 8, 3)
    score_keys_kernel[(preparers + programs,)](
        TensorDescriptor(data, [blocks, keys.rows, WIDTH], [keys.stride, WIDTH, 1], box, layout),
        arena[keys.scale : keys.scale + 16].view(torch.float32), keys.stride // 4, own, prepared, own.stride(0),
        eps or 0.0, preparers, query, share, turns, rows.positions, rows.tables, scores, maxima, query.stride(0),
        share.stride(0), sequences, pages, capacity, maxima.stride(0), share_scale, TURNED=turns.shape[1] * 2,
        RATIO=ratio, TOP_K=top_k, SEQUENCES=triton.next_power_of_2(sequences), SPAN=rows.span, HEADS=heads,
        PAGE=keys.rows, STAGES=cut.stages, MOST=cut.most, SPLIT=config.split, LOADS=cut.loads, HOLDS=cut.holds,
        EARLY=early, PREPARED_HEADS=own.shape[1] if attention is not None else 0, PREPARED_WIDTH=own.shape[2],
        PREPARED_TILE=tile, PREPARED_NORM=eps is not None, launch_pdl=early, num_warps=4, maxnreg=cut.registers,
    )  # fmt: skip
    return scores, maxima
