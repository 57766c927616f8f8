"""Gate: which experts a row takes and with which weights, from the product with the gate's matrix on.

Programs each multiply a part of the columns with some experts' rows of the matrix. The parts are added in order, and
choices made, by the last program where rows are few, so that there is one launch; else by a second kernel with a
program for each row, since one program would take longer for all of them than everything else together. A program asks
for all of its weights before the kernel in front has ended.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.forms import Weight
from kernels.tickets import tickets_of

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no dependent launches."""
TILE = 16
"""Rows of a program. Not more for more rows: another matrix instruction could sum in another order."""


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """How the product is cut. `slices` and `chunk` decide a row's bits and must not follow the number of rows.

    Attributes:
        experts: of a program.
        slices: parts of the columns, at most.
        chunk: columns of a product; a program has all of its weights on their way before the first.
        warps: of a program.
        together: up to so many rows the last program chooses.
        choosing_warps: of a program that chooses for one row.
        overlaps: the kernel is launched while the one before it drains (programmatic dependent launch).
    """

    experts: int = 32
    slices: int = 8
    chunk: int = 512
    warps: int = 4
    together: int = 2
    choosing_warps: int = 1
    overlaps: bool = not INTERPRETED


DEFAULT = GateConfig()


def route(
    x: Tensor,
    gate: Weight,
    bias: Tensor | None,
    hashed: Tensor | None,
    top_k: int,
    scale: float,
    tokens: Tensor | None = None,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    config: GateConfig = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.route`. Rows of x must be contiguous; `gate` has no scales.

    Args:
        config: how the product is cut.

    Raises:
        ValueError: an argument lies in memory, or is quantised, as the kernel does not read it.
    """
    rows, hidden = x.shape
    experts = len(gate.data)
    if gate.scale is not None or not gate.data.is_contiguous() or x.stride(1) != 1:
        raise ValueError("the gate's matrix must be without scales, it and the rows of x contiguous")
    if out is None:
        ids = torch.empty((rows, top_k), dtype=torch.int32, device=x.device)
        weights = torch.empty((rows, top_k), dtype=torch.float32, device=x.device)
    else:
        ids, weights = out
        if not (ids.is_contiguous() and weights.is_contiguous() and ids.shape == weights.shape == (rows, top_k)):
            raise ValueError(f"results must be contiguous, found {ids.shape} and {weights.shape}")
    if not rows:
        return ids, weights
    chunk = min(config.chunk, max(16, triton.next_power_of_2(hidden)))
    chunks = triton.cdiv(hidden, chunk)
    columns = triton.cdiv(chunks, min(config.slices, chunks)) * chunk
    slices = triton.cdiv(hidden, columns)
    tile_experts = min(config.experts, max(16, triton.next_power_of_2(experts)))
    expert_tiles = triton.cdiv(experts, tile_experts)
    row_tiles = triton.cdiv(rows, TILE)
    block = max(triton.next_power_of_2(experts), tile_experts)
    together = rows <= config.together
    partials = torch.empty((rows, slices, block), dtype=torch.float32, device=x.device)
    choice = (bias, hashed, tokens, positions, counts, ids, weights)
    constants = {
        "EXPERTS": experts, "TOP_K": top_k, "BIASED": bias is not None and hashed is None, "HASHED": hashed is not None,
        "BY_TOKEN": tokens is not None, "MASKED": positions is not None, "COUNTED": counts is not None,
        "SLICES": slices, "BLOCK_E": block, "BLOCK_K": triton.next_power_of_2(top_k), "OVERLAPS": config.overlaps,
        **({"launch_pdl": True} if config.overlaps else {}),
    }  # fmt: skip
    _route_kernel[(expert_tiles * slices, row_tiles)](
        x, gate.data, *choice, partials, tickets_of(gate.data, row_tiles) if together else ids, rows, x.stride(0),
        scale, HIDDEN=hidden, TILE=TILE, TILE_E=tile_experts, CHUNK=chunk, COLUMNS=columns,
        CHOSEN=triton.next_power_of_2(rows) if together else 0,
        WIDE=INTERPRETED or torch.float32 in (x.dtype, gate.data.dtype), num_warps=config.warps, **constants,
    )  # fmt: skip
    if not together:
        _choose_kernel[(rows,)](partials, *choice, rows, scale, num_warps=config.choosing_warps, **constants)
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
def _larger(key, score, other_key, other_score):
    is_larger = key > other_key
    return tl.where(is_larger, key, other_key), tl.where(is_larger, score, other_score)


@triton.jit
def choose(ranked, scores, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    """Indices of the TOP_K largest in each row of float32[rows, BLOCK_E], lowest index first among equals: int32[rows,
    BLOCK_K], and the scores at these.

    NaN counts as largest, so that whatever the input, the indices are distinct and valid.
    """
    expert = tl.arange(0, BLOCK_E)[None, :]
    place = tl.arange(0, BLOCK_K)[None, :]
    # Order of floats as order of integers (adding zero turns -0 into 0), the index below it: one maximum finds both.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(ranked != ranked, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (BLOCK_E - 1 - expert).to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(expert < EXPERTS, key, lowest)
    found = tl.zeros((ranked.shape[0], BLOCK_K), tl.int32)
    chosen = tl.zeros((ranked.shape[0], BLOCK_K), tl.float32)
    for k in tl.static_range(TOP_K):
        best, score = tl.reduce((key, scores), 1, _larger)
        key = tl.where(key == best[:, None], lowest, key)
        found = tl.where(place == k, BLOCK_E - 1 - (best[:, None] & 0xFFFFFFFF).to(tl.int32), found)
        chosen = tl.where(place == k, score[:, None], chosen)
    return found, chosen


@triton.jit
def ascending(ids, scores, TOP_K: tl.constexpr):
    """The first TOP_K of each row of int32[rows, BLOCK_K], sorted, and scores moved with them; 0 behind them."""
    place = tl.arange(0, ids.shape[1])
    column, line = ids[:, :, None], ids[:, None, :]
    before = (column < line) | ((column == line) & (place[:, None] < place[None, :])[None, :, :])
    rank = tl.sum((before & (place < TOP_K)[None, :, None]).to(tl.int32), 1)
    moved = (rank[:, :, None] == place[None, None, :]) & (place < TOP_K)[None, :, None]
    return tl.sum(tl.where(moved, column, 0), 1), tl.sum(tl.where(moved, scores[:, :, None], 0.0), 1)


# Not made anew for one row: that could be other bits.
@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    x,  # A[rows, HIDDEN], rows `x_stride` apart
    gate,  # bf16 or float32[EXPERTS, HIDDEN]
    bias,  # float32[EXPERTS]
    hashed,  # int32[any, TOP_K]
    tokens,  # int32[rows]
    positions,  # int32[rows]
    counts,  # int32[EXPERTS]
    ids,  # int32[rows, TOP_K], written
    weights,  # float32[rows, TOP_K], written
    partials,  # float32[rows, SLICES, BLOCK_E], scratch
    tickets,  # int32[tiles of rows], 0 between launches
    rows,
    x_stride,
    scale,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BIASED: tl.constexpr,
    HASHED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
    TILE: tl.constexpr,
    TILE_E: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    CHOSEN: tl.constexpr,  # rows for which the last program chooses, or 0
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    part = tl.program_id(0) % SLICES
    first_row = tl.program_id(1) * TILE
    column = part * COLUMNS + tl.arange(0, CHUNK)
    expert = tl.program_id(0) // SLICES * TILE_E + tl.arange(0, TILE_E)
    if OVERLAPS:
        gdc_launch_dependents()
    # Weights do not depend on the kernel before: they are read while it still runs.
    tables = ()
    for k in tl.static_range(COLUMNS // CHUNK):
        mask = (expert < EXPERTS)[:, None] & (k * CHUNK + column < HIDDEN)[None, :]
        tables = tables + (tl.load(gate + expert[:, None] * HIDDEN + (k * CHUNK + column)[None, :], mask, other=0.0),)
    if OVERLAPS:
        gdc_wait()
    row = first_row + tl.arange(0, TILE)
    values = ()
    for k in tl.static_range(COLUMNS // CHUNK):
        mask = (row < rows)[:, None] & (k * CHUNK + column < HIDDEN)[None, :]
        at = x + row.to(tl.int64)[:, None] * x_stride + (k * CHUNK + column)[None, :]
        values = values + (tl.load(at, mask, other=0.0),)
    # All loads are under way before the first is waited for: the assembler moves none down across a barrier.
    tl.debug_barrier()
    sums = tl.zeros((TILE, TILE_E), tl.float32)
    for k in tl.static_range(COLUMNS // CHUNK):
        if WIDE:
            table = tl.trans(tables[k].to(tl.float32))
            sums = tl.dot(values[k].to(tl.float32), table, sums, input_precision="ieee")
        else:
            sums = tl.dot(values[k], tl.trans(tables[k]), sums)
    at = (row.to(tl.int64)[:, None] * SLICES + part) * BLOCK_E + expert[None, :]
    tl.store(partials + at, sums, mask=(row < rows)[:, None] & (expert < BLOCK_E)[None, :])
    if CHOSEN > 0:
        # All threads have stored before one of them says so, to the whole device.
        tl.debug_barrier()
        if tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            tl.store(tickets, 0)
            _choose_rows(
                partials, bias, hashed, tokens, positions, counts, ids, weights, tl.arange(0, CHOSEN), rows, scale,
                EXPERTS, TOP_K, BIASED, HASHED, BY_TOKEN, MASKED, COUNTED, SLICES, BLOCK_E, BLOCK_K,
            )  # fmt: skip


# Not made anew for one row: that could be other bits.
@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    partials, bias, hashed, tokens, positions, counts, ids, weights, rows, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BIASED: tl.constexpr, HASHED: tl.constexpr, BY_TOKEN: tl.constexpr,
    MASKED: tl.constexpr, COUNTED: tl.constexpr, SLICES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Chooses for one row."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    _choose_rows(
        partials, bias, hashed, tokens, positions, counts, ids, weights, tl.program_id(0) + tl.arange(0, 1), rows,
        scale, EXPERTS, TOP_K, BIASED, HASHED, BY_TOKEN, MASKED, COUNTED, SLICES, BLOCK_E, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _choose_rows(
    partials, bias, hashed, tokens, positions, counts, ids, weights, row, rows, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BIASED: tl.constexpr, HASHED: tl.constexpr, BY_TOKEN: tl.constexpr,
    MASKED: tl.constexpr, COUNTED: tl.constexpr, SLICES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the parts of the logits of rows int32[CHOSEN], choose, and store."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    place = tl.arange(0, BLOCK_K)[None, :]
    here = (row < rows)[:, None]
    mask = here & (expert < EXPERTS)
    at = partials + row.to(tl.int64)[:, None] * (SLICES * BLOCK_E) + expert
    logits = tl.zeros((row.shape[0], BLOCK_E), tl.float32)
    for part in tl.static_range(SLICES):
        # .cg: written by other multiprocessors, so never from this one's L1.
        logits += tl.load(at + part * BLOCK_E, mask=mask, other=0.0, cache_modifier=".cg")
    scores = root_softplus(logits)
    inside = here & (place < TOP_K)
    if HASHED:
        line = tl.load(tokens + row, mask=row < rows, other=0) if BY_TOKEN else row
        found = tl.load(hashed + line.to(tl.int64)[:, None] * TOP_K + place, mask=inside, other=0)
        chosen = tl.zeros((row.shape[0], BLOCK_K), tl.float32)
        for k in tl.static_range(TOP_K):
            its = tl.sum(tl.where(place == k, found, 0), 1)[:, None]
            chosen = tl.where(place == k, tl.sum(tl.where(expert == its, scores, 0.0), 1)[:, None], chosen)
    else:
        ranked = scores
        if BIASED:
            ranked = scores + tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        found, chosen = choose(ranked, scores, EXPERTS, TOP_K, BLOCK_E, BLOCK_K)
    found, chosen = ascending(found, chosen, TOP_K)
    # The order of these sums is spelled out, so that it is the same for any number of rows.
    total = tl.zeros((row.shape[0], 1), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.sum(tl.where(place == k, chosen, 0.0), 1)[:, None]
    share = chosen / total * scale
    counted = inside
    if MASKED:
        live = (tl.load(positions + row, mask=row < rows, other=-1) >= 0)[:, None]
        found = tl.where(live, found, -1)
        share = tl.where(live, share, 0.0)
        counted = inside & live
    target = row.to(tl.int64)[:, None] * TOP_K + place
    tl.store(ids + target, found, mask=inside)
    tl.store(weights + target, share, mask=inside)
    if COUNTED:
        tl.atomic_add(counts + found, 1, mask=counted, sem="relaxed")
