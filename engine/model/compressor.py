"""Compressor: from raw rows to attention entries and index keys in their pages.

Owns pooling, norm, rotation and the write. A row closes an entry when its position is the last of a group of `ratio`;
rows of an open group stay in the slab's ring and contribute nothing. Ratio 1 closes an entry at every row and needs
neither gate nor ring.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.kv import Arena, Plane, Pool
from engine.model.rows import StepTables
from engine.model.tiles import TileLinear, norm_rows, pad_rows


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Makes one row of a plane out of the raw rows of a group of tokens.

    Attributes:
        norm: float32[width], over the pooled row.
        eps: of the norm.
        pool: ring of raw rows; None for ratio 1, where the raw row is the pooled one.
        overlaps: an entry pools the group before its own too, each with a half of its own.
        bias: float32[ratio, gate channels], added to gates by position in the group; None for none.
    """

    norm: Tensor
    eps: float
    pool: Pool | None
    overlaps: bool
    bias: Tensor | None

    def close(self, tables: StepTables, raw: Tensor, first: npt.NDArray[np.int64]) -> Tensor | None:
        """Store the pass's raw rows, and pool those of the entries that it closes.

        Args:
            tables: the pass.
            raw: float32[rows, width] latents for ratio 1, else float32[rows, 2 * width] (latents, then gates), twice as
                wide where entries overlap.
            first: int64[closing], position of each entry's first token.

        Returns:
            float32[closing padded to tiles, width], normed and not rotated; None where nothing closes.
        """
        if self.pool is None:
            return norm_rows(pad_rows(raw), self.eps, self.norm)
        if self.bias is not None:
            raw = raw.clone()
            within = torch.from_numpy(tables.batch.positions % self.pool.ratio)
            raw[:, raw.shape[1] // 2 :] += self.bias.index_select(0, within)
        groups = tables.pool_rows(self.pool, raw)
        if len(groups) == 0:
            return None
        if self.overlaps:
            groups = join_halves(groups, self.pool.ratio, torch.from_numpy(first == 0))
        return norm_rows(pad_rows(pool_groups(groups)), self.eps, self.norm)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """Weights and places of one KV source layer.

    Index keys are projected from the pooled entry (`to_key`, `key_norm`), or pooled from rows of their own
    (`key_pooling`), or there are none: then every visible entry is attended to.

    Attributes:
        ratio: tokens per entry.
        pooling: of entries.
        entry_plane, key_plane: where results go.
        to_key: [index_dim, head_dim], from the unrotated latent.
        key_norm: float32[index_dim].
        key_pooling: of keys.
    """

    ratio: int
    pooling: Pooling
    entry_plane: Plane
    key_plane: Plane | None
    to_key: TileLinear | None = None
    key_norm: Tensor | None = None
    key_pooling: Pooling | None = None

    def write(self, arena: Arena, tables: StepTables, raw: Tensor, key_raw: Tensor, turns: Tensor) -> None:
        """Compute and store what this pass closes.

        Args:
            arena: written into.
            tables: the pass.
            raw: of the entries, see `Pooling.close`.
            key_raw: of the keys; without columns where they are not pooled.
            turns: complex64[positions, rope_dim / 2], the rotary table of compressed layers.
        """
        closing = tables.closing[self.ratio]
        latent = self.pooling.close(tables, raw, closing.first)
        keys = self.key_pooling.close(tables, key_raw, closing.first) if self.key_pooling is not None else None
        count = len(closing)
        if latent is None or count == 0:
            return
        if self.to_key is not None and self.key_norm is not None:
            keys = norm_rows(self.to_key(latent), self.pooling.eps, self.key_norm)
        first = np.zeros(len(latent), np.int64)
        first[:count] = closing.first
        turn = turns.index_select(0, torch.from_numpy(first))
        rotate(latent, turn)
        arena.rows.index_copy_(0, closing.entry_places(arena, self.entry_plane), latent[:count].to(arena.rows.dtype))
        if keys is not None and self.key_plane is not None:
            rotate(keys, turn)
            places = closing.key_places(arena, self.key_plane, keys.shape[1])
            arena.flat.put_(places, keys[:count].to(arena.flat.dtype))


def join_halves(groups: Tensor, ratio: int, is_first: Tensor) -> Tensor:
    """What overlapping entries pool: of the group before the first half of each channel pair, of the own the second.

    Args:
        groups: float32[closing, 2 * ratio, 4 * width]: latents (two halves), gates (two halves).
        ratio: tokens in a group.
        is_first: bool[closing], entries with no group before theirs.

    Returns:
        float32[closing, 2 * ratio, 2 * width], latents and gates; rows that do not exist have latent 0 and gate -inf.
    """
    parts = groups.unflatten(-1, (2, 2, -1))
    before, own = parts[:, :ratio, :, 0].clone(), parts[:, ratio:, :, 1]
    # What stands there may be anything, NaN included.
    before[is_first, :, 0] = 0
    before[is_first, :, 1] = -torch.inf
    return torch.cat((before, own), 1).flatten(-2)


def pool_groups(groups: Tensor) -> Tensor:
    """Softmax-weighted sum per channel: float32[closing, pooled, 2 * width] (latents, gates) to [closing, width]."""
    latent, gate = groups.chunk(2, -1)
    share = gate.softmax(1)
    total = share[:, 0] * latent[:, 0]
    for step in range(1, groups.shape[1]):
        # Two roundings a term: a fused multiply-add would round by where a row stands in the vector loop.
        total += share[:, step] * latent[:, step]
    return total


def rotate(x: Tensor, turn: Tensor) -> None:
    """Rotate the trailing channels of float32[rows, ..., width] in place by complex64[rows, (1,) rope_dim / 2]."""
    pairs = turn.shape[-1]
    tail = x[..., x.shape[-1] - 2 * pairs :].unflatten(-1, (pairs, 2))
    torch.view_as_complex(tail).mul_(turn)
