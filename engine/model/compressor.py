"""Compressor: from raw rows to attention entries and index keys in their pages.

Owns pooling, norm, rotation and the write. A row closes an entry when its position is the last of a group of `ratio`;
rows of an open group stay in the slab's ring and contribute nothing. Ratio 1 closes an entry at every row and needs
neither gate nor ring.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from engine.model.kv import Arena, Plane, Pool
from engine.model.rows import StepTables
from engine.model.tiles import TileLinear, norm_rows, pad_rows


@dataclasses.dataclass(frozen=True)
class Compressor:
    """Weights and places of one KV source layer.

    Attributes:
        ratio: tokens per entry.
        norm: float32[head_dim].
        to_key: [index_dim, head_dim], from the unrotated latent.
        key_norm: float32[index_dim].
        eps: of the norms.
        entry_plane, key_plane: where results go.
        pool: ring of raw rows; None for ratio 1.
    """

    ratio: int
    norm: Tensor
    to_key: TileLinear
    key_norm: Tensor
    eps: float
    entry_plane: Plane
    key_plane: Plane
    pool: Pool | None

    def write(self, arena: Arena, tables: StepTables, raw: Tensor, turns: Tensor) -> None:
        """Compute and store what this pass closes.

        Args:
            arena: written into.
            tables: the pass.
            raw: float32[rows, head_dim] latents for ratio 1, else float32[rows, 2 * head_dim], latents then gates.
            turns: complex64[positions, rope_dim / 2], the rotary table of compressed layers.
        """
        closing = tables.closing[self.ratio]
        if self.pool is None:
            latent = raw
        else:
            groups = tables.pool_rows(self.pool, raw)
            if len(closing) == 0:
                return
            latent = pool_groups(groups)
        latent = norm_rows(pad_rows(latent), self.eps, self.norm)
        keys = norm_rows(self.to_key(latent), self.eps, self.key_norm)
        first = np.zeros(len(latent), np.int64)
        first[: len(closing)] = closing.first
        turn = turns.index_select(0, torch.from_numpy(first))
        rotate(latent, turn)
        rotate(keys, turn)
        count = len(closing)
        arena.rows.index_copy_(0, closing.entry_places(arena, self.entry_plane), latent[:count].to(arena.rows.dtype))
        arena.flat.put_(closing.key_places(arena, self.key_plane, keys.shape[1]), keys[:count].to(arena.flat.dtype))


def pool_groups(groups: Tensor) -> Tensor:
    """Softmax-weighted sum per channel: float32[closing, ratio, 2 * width] (latents, gates) to [closing, width]."""
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
