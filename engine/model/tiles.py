"""Fixed-size tiles: matrix products and expert mixtures whose rows do not depend on their neighbours, bit for bit.

A BLAS picks its kernel by the number of rows, and other kernels add in another order: with MKL on AVX-512, rows of a
product of 8 or fewer rows differ in the last bit from the same rows in a product of 16 or more. So every product here
is a batch of products of exactly `TILE` rows against the same weights (stride 0 over the batch): the call that computes
a row has the same sizes whatever else is in the step. What remains to be true of the BLAS is that all rows of a tile
are computed alike; tests/model/test_paged_tiles.py checks it. With MKL on AVX2 that rules out 8 rows (two kernels share
them) and 32, and leaves 1, 2, 3, 4, 6, 12, 16 and 24.

Microseconds for the eight products of a layer of the bundled model's size (torch 2.13, MKL, one core, AVX-512):
rows in the step     tile 4      6      8     12     16
1                        39     45     56     81     98
32                      218    214    189    221    187
512                    3394   2945   2857   3099   2861
One tall product of 512 rows takes 2,900. Weights are kept transposed ([in, out]), which halves the time of few rows.
MKL's own strict reproducibility mode (MKL_CBWR) was 2 to 3 times slower.

Rows are padded to whole tiles once, at the start of a step; padding rows are finite and never written back.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4
"""Rows of one product. It suits experts as well: at 32 rows and 4 of 32 experts, an expert sees 4 rows on average."""
WIDE_COLUMNS = 1024
"""A product is cut into so many columns, to keep a tile's share of the weights in the second-level cache."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def padded(rows: int) -> int:
    """Rows after padding to whole tiles."""
    return -(-rows // TILE) * TILE


def pad_rows(x: Tensor) -> Tensor:
    """Append zero rows to float[rows, ...] up to a whole number of tiles; x itself where it fits."""
    missing = padded(x.shape[0]) - x.shape[0]
    if missing == 0:
        return x
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


class TileLinear:
    """One weight matrix, transposed and cut for tiled products.

    Attributes:
        width: columns of the result.
    """

    def __init__(self, weight: Tensor) -> None:
        """Takes float[out, in]; keeps a float32 copy."""
        self.width = weight.shape[0]
        wide = weight.detach().float().t()
        self._parts = [part.contiguous().unsqueeze(0) for part in wide.split(WIDE_COLUMNS, 1)]

    def __call__(self, x: Tensor) -> Tensor:
        """float[rows, in] times the weight: float32[rows, out]. `rows` is whole tiles; rows may be strided."""
        tiled = x.view(-1, TILE, x.shape[-1])
        tiles = tiled.shape[0]
        if len(self._parts) == 1:
            weight = self._parts[0]
            return torch.bmm(tiled, weight if tiles == 1 else weight.expand(tiles, -1, -1)).view(-1, self.width)
        parts = [torch.bmm(tiled, part.expand(tiles, -1, -1)) for part in self._parts]
        return torch.cat(parts, -1).view(-1, self.width)


def norm_rows(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm of float32[..., width] over the last dimension, by ops of one rounding each."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    scaled = x * scale
    return scaled if weight is None else scaled.mul_(weight)


def gate_unit(both: Tensor, clamp: float) -> Tensor:
    """silu of the left half, clamped from above, times the right half, clamped on both sides. Overwrites its input."""
    half = both.shape[-1] // 2
    gate, up = both[..., :half], both[..., half:]
    return F.silu(gate.clamp_(max=clamp)).mul_(up.clamp_(-clamp, clamp))


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the router chose for each row.

    Attributes:
        ids: int64[rows, k], ascending.
        weights: float32[rows, k], scaled.
    """

    ids: Ints
    weights: Floats


def choose_experts(scores: Floats, bias: Floats, top_k: int, scale: float) -> tuple[Choice, Floats]:
    """Pick experts by score + bias; equal values go to the lowest index, weights ignore the bias.

    Args:
        scores: float32[rows, experts].
        bias: float32[experts].
        top_k: experts per row.
        scale: factor on the normalised weights.

    Returns:
        (the choice, float32[rows, experts] that it was made on).
    """
    ranked = scores + bias
    ids = np.argsort(-ranked, axis=1, kind="stable")[:, :top_k]
    ids.sort(axis=1)
    return weigh_experts(scores, ids, scale), ranked


def weigh_experts(scores: Floats, ids: Ints, scale: float) -> Choice:
    """Weights of experts that are chosen already: float32[rows, experts], int64[rows, k] ascending."""
    chosen = scores[np.arange(len(ids))[:, None], ids]
    chosen *= np.float32(scale) / chosen.sum(1, keepdims=True)
    return Choice(ids, chosen)


class ExpertBank:
    """The routed experts of one layer, evaluated in tiles of TILE rows.

    A row's experts are summed in ascending order of their ids, by one product of fixed size per row.
    """

    def __init__(self, w1: Tensor, w3: Tensor, w2: Tensor, clamp: float, fold: Tensor) -> None:
        """Keeps float32 copies.

        Args:
            w1, w3: float[experts, width, hidden], gate and up projections.
            w2: float[experts, hidden, width], down projection.
            clamp: limit inside the gated unit.
            fold: float[hidden], a norm's weight to fold into the inputs.
        """
        self._in = (torch.cat((w1, w3), 1).float() * fold.float()).transpose(1, 2).contiguous()
        self._out = w2.float().transpose(1, 2).contiguous()
        self._in_each = [w.unsqueeze(0) for w in self._in]
        self._out_each = [w.unsqueeze(0) for w in self._out]
        self._clamp = clamp

    def mix(self, x: Tensor, choice: Choice) -> Tensor:
        """Weighted sum of each row's experts.

        Args:
            x: float32[padded rows, hidden]; only the first `choice` rows are evaluated.
            choice: of the real rows.

        Returns:
            float32[rows, hidden].
        """
        rows, top_k = choice.ids.shape
        share = torch.from_numpy(choice.weights).unsqueeze(1)
        if rows == 1:
            tile = x[:TILE].unsqueeze(0)
            ids = choice.ids[0].tolist()
            inner = torch.cat([torch.bmm(tile, self._in_each[expert]) for expert in ids])
            inner = gate_unit(inner, self._clamp)
            outer = torch.cat([torch.bmm(inner[i : i + 1], self._out_each[expert]) for i, expert in enumerate(ids)])
            return torch.bmm(share, outer[:, 0].unsqueeze(0)).squeeze(1)

        counts = np.bincount(choice.ids.ravel(), minlength=len(self._in_each))
        slots, source, plan = _place_pairs(choice.ids, counts)
        tiled = x.index_select(0, torch.from_numpy(source)).view(-1, TILE, x.shape[-1])
        inner = gate_unit(multiply_tiles(tiled, self._in, self._in_each, plan), self._clamp)
        outer = multiply_tiles(inner, self._out, self._out_each, plan).view(-1, self._out.shape[-1])
        picked = outer.index_select(0, torch.from_numpy(slots)).view(rows, top_k, -1)
        return torch.bmm(share, picked).squeeze(1)


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Which expert each tile is multiplied by.

    `stretches`: (expert, first tile, count): neighbouring experts, a tile each, in one product. `runs`: (expert, first
    tile, tiles): several tiles of one expert.
    """

    stretches: list[tuple[int, int, int]]
    runs: list[tuple[int, int, int]]


def multiply_tiles(tiled: Tensor, bank: Tensor, each: list[Tensor], plan: TilePlan) -> Tensor:
    """Multiply every tile by its expert: float32[tiles, TILE, in] to [tiles, TILE, out]."""
    out = tiled.new_empty((tiled.shape[0], TILE, bank.shape[-1]))
    for expert, first, count in plan.stretches:
        last = first + count
        torch.bmm(tiled[first:last], bank[expert : expert + count], out=out[first:last])
    for expert, first, count in plan.runs:
        weight = each[expert]
        last = first + count
        torch.bmm(tiled[first:last], weight if count == 1 else weight.expand(count, -1, -1), out=out[first:last])
    return out


def _place_pairs(ids: Ints, counts: Ints) -> tuple[Ints, Ints, TilePlan]:
    """Give every (row, expert) pair a place in tiles of one expert each.

    Returns:
        (slots int64[rows * k]: place of each pair, source int64[tiles * TILE]: row of each place, 0 where
        empty, the order of products).
    """
    experts = len(counts)
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    ranked = flat[order]
    # Rank of a pair among its expert's pairs.
    within = np.arange(len(flat)) - (np.cumsum(counts) - counts)[ranked]
    # With most experts hit, one product over all of them beats a call for each; the rows beyond the first tile follow.
    dense = bool(2 * np.count_nonzero(counts) >= experts)
    skipped = 1 if dense else 0
    tiles = np.maximum(-(-counts // TILE) - skipped, 0)
    starts = np.cumsum(tiles) - tiles + (experts if dense else 0)
    places = (starts[ranked] - skipped) * TILE + within
    if dense:
        places = np.where(within < TILE, ranked * TILE + within, places)
    total = int(tiles.sum()) + (experts if dense else 0)
    slots = np.empty(len(flat), np.int64)
    slots[order] = places
    source = np.zeros(total * TILE, np.int64)
    source[places] = order // ids.shape[1]
    hit = np.nonzero(tiles)[0]
    runs = list(zip(hit.tolist(), starts[hit].tolist(), tiles[hit].tolist(), strict=True))
    return slots, source, TilePlan([(0, 0, experts)] if dense else [], runs)
