"""Ends: the first and the last of a step: tokens become streams, logits the likeliest tokens. One launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, where none is launched early."""
BLOCK = 1024
"""Channels of a program of `open_streams`."""
TILE = 16384
"""Logits that a program of `likeliest` looks at at a time: 16 of each of its threads."""


@triton.jit
def _open_streams_kernel(
    tokens,  # int32[rows]
    embed,  # A[vocab, HIDDEN]
    streams,  # A[rows, N, HIDDEN], written
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        # In this order: what the kernels in front have written, as tokens, positions and slabs, is there for all that
        # follow then, also for those that read them before they wait (`tests/model/launch_rule.py`).
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    value = tl.load(embed + tl.load(tokens + row).to(tl.int64) * HIDDEN + channel, mask=inside, other=0.0)
    for k in tl.static_range(N):
        tl.store(streams + (row * N + k) * HIDDEN + channel, value, mask=inside)


def open_streams(tokens: Tensor, embed: Tensor, n: int) -> Tensor:
    """See `kernels.reference.open_streams`; `embed` must be contiguous."""
    rows, hidden = len(tokens), embed.shape[1]
    streams = embed.new_empty((rows, n, hidden))
    block = min(BLOCK, triton.next_power_of_2(hidden))
    if rows:
        _open_streams_kernel[(rows, triton.cdiv(hidden, block))](
            tokens, embed, streams, hidden, n, block, EARLY=not INTERPRETED, **_launch_options()
        )
    return streams


@triton.jit
def _likeliest_kernel(
    logits,  # float32[rows, VOCAB]
    tokens,  # int64[rows], written
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    # Order of floats as order of integers (adding zero turns -0 into 0); NaN above all.
    best = tl.full((TILE,), -0x80000000, tl.int32)
    where = tl.zeros((TILE,), tl.int32)
    # Two tiles are on their way at a time.
    for first in tl.range(0, VOCAB, TILE, loop_unroll_factor=2):
        token = first + place
        value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf")) + 0.0
        bits = value.to(tl.int32, bitcast=True)
        order = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        # Only what is larger: the first of equal ones stays.
        is_better = (order > best) & (token < VOCAB)
        best = tl.where(is_better, order, best)
        where = tl.where(is_better, token, where)
    key = (best.to(tl.int64) << 32) | (0x7FFFFFFF - where).to(tl.int64)
    tl.store(tokens + row, 0x7FFFFFFF - (tl.max(key, 0) & 0xFFFFFFFF))


def likeliest(logits: Tensor) -> Tensor:
    """See `kernels.reference.likeliest`; logits must be contiguous."""
    rows, vocab = logits.shape
    tokens = logits.new_empty((rows,), dtype=torch.int64)
    if rows:
        tile = min(TILE, triton.next_power_of_2(vocab))
        _likeliest_kernel[(rows,)](
            logits, tokens, vocab, tile, EARLY=not INTERPRETED, num_warps=max(1, tile // 512), **_launch_options()
        )
    return tokens


def _launch_options() -> dict[str, bool]:
    return {} if INTERPRETED else {"launch_pdl": True}
