"""Gate: which experts a row takes and with which weights, from the logits of the gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no dependent launches."""


def route(
    logits: Tensor,
    bias: Tensor | None,
    hashed: Tensor | None,
    top_k: int,
    scale: float,
    valid: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    overlaps: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.route`. Rows of the logits must be contiguous; they may lie in a wider tensor.

    Args:
        overlaps: the kernel is launched while the one before it drains (programmatic dependent launch).
    """
    rows, experts = logits.shape
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    overlaps = overlaps and not INTERPRETED
    if rows:
        # Arguments that are not there are never read; a pointer has to be something.
        _route_kernel[(rows,)](
            logits,
            logits if bias is None else bias,
            ids if hashed is None else hashed,
            ids if valid is None else valid,
            ids if counts is None else counts,
            ids,
            weights,
            logits.stride(0),
            scale,
            EXPERTS=experts,
            TOP_K=top_k,
            BIASED=bias is not None and hashed is None,
            HASHED=hashed is not None,
            MASKED=valid is not None,
            COUNTED=counts is not None,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            OVERLAPS=overlaps,
            **({"launch_pdl": True} if overlaps else {}),
            num_warps=1,
        )
    return ids, weights


@triton.jit
def root_softplus(x):
    """sqrt(log(1 + exp(x))) in float32, exact to some ulps for x of any size."""
    # softplus(x) = max(x, 0) + log1p(t), t = exp(-|x|) <= 1. log1p by its atanh series: z <= 1/3, and the first term
    # that is left out is z^17 / 17 < 1e-9 z. A logarithm of 1 + t would lose a small t, so that the order of all
    # experts with very negative logits would be chance.
    t = tl.exp(-tl.abs(x))
    z = t / (2.0 + t)
    y = z * z
    series = 1.0 / 13 + y * (1.0 / 15)
    series = 1.0 / 9 + y * (1.0 / 11 + y * series)
    series = 1.0 / 5 + y * (1.0 / 7 + y * series)
    series = 1.0 + y * (1.0 / 3 + y * series)
    return tl.sqrt(tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def choose(ranked, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """Indices of the TOP_K largest of float32[BLOCK_E], lowest index first among equals: int32[BLOCK_K].

    NaN counts as largest, so that whatever the input, the indices are distinct and valid.
    """
    expert = tl.arange(0, BLOCK_E)
    place = tl.arange(0, BLOCK_K)
    # Order of floats as order of integers (adding zero turns -0 into 0), the index below it: one maximum finds both.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(ranked != ranked, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (BLOCK_E - 1 - expert).to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(expert < EXPERTS, key, lowest)
    found = tl.zeros((BLOCK_K,), tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        key = tl.where(key == best, lowest, key)
        found = tl.where(place == k, BLOCK_E - 1 - (best & 0xFFFFFFFF).to(tl.int32), found)
    return found


@triton.jit
def ascending(ids, BLOCK_K: tl.constexpr, TOP_K: tl.constexpr):
    """The first TOP_K of int32[BLOCK_K], sorted; what stands behind them is 0."""
    place = tl.arange(0, BLOCK_K)
    # ids as a column: the sum over a diagonal moves them without going through memory.
    column = tl.sum(tl.where(place[:, None] == place[None, :], ids[None, :], 0), 1)
    before = (column[:, None] < ids[None, :]) | ((column[:, None] == ids[None, :]) & (place[:, None] < place[None, :]))
    rank = tl.sum((before & (place[:, None] < TOP_K)).to(tl.int32), 0)
    moved = (rank[None, :] == place[:, None]) & (place[None, :] < TOP_K)
    return tl.sum(tl.where(moved, ids[None, :], 0), 1)


@triton.jit
def _route_kernel(
    logits,
    bias,
    hashed,
    valid,
    counts,
    ids,
    weights,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BIASED: tl.constexpr,
    HASHED: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    inside = place < TOP_K
    expert = tl.arange(0, BLOCK_E)
    if HASHED:
        found = tl.load(hashed + row * TOP_K + place, mask=inside, other=0)
    else:
        scores = root_softplus(tl.load(logits + row * stride + expert, mask=expert < EXPERTS, other=0.0))
        if BIASED:
            scores += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        found = choose(scores, BLOCK_E, BLOCK_K, EXPERTS, TOP_K)
    found = ascending(found, BLOCK_K, TOP_K)
    # Read once more: cheaper than to search the scores for each expert, and right for looked-up ones too.
    chosen = root_softplus(tl.load(logits + row * stride + found, mask=inside, other=0.0))
    chosen = tl.where(inside, chosen, 0.0)
    share = chosen / tl.sum(chosen, 0) * scale
    counted = inside
    if MASKED:
        live = tl.load(valid + row) != 0
        found = tl.where(live, found, -1)
        share = tl.where(live, share, 0.0)
        counted = inside & live
    tl.store(ids + row * TOP_K + place, found, mask=inside)
    tl.store(weights + row * TOP_K + place, share, mask=inside)
    if COUNTED:
        tl.atomic_add(counts + found, 1, mask=counted, sem="relaxed")
