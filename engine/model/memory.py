"""The n-gram memory of the paged path: table rows of a pass, and their addition to the streams.

Same numbers as engram.py, which holds the constants; the hash is integer work on numpy for all memory layers at once,
because it needs token ids only and a decode step has few of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.engram import EngramTables
from engine.model.layers import WeightMap
from engine.model.rows import RowBatch
from engine.model.shapes import ModelShape
from engine.model.tiles import TileLinear, norm_rows, pad_rows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def hash_rows(tables: EngramTables, batch: RowBatch, earlier: Ints) -> list[Tensor]:
    """Table rows of every row of a pass.

    Args:
        tables: the model's constants.
        batch: the rows.
        earlier: int64[sequences, history], the ids just before, -1 where there is none.

    Returns:
        Per memory layer, int64[rows, rows per token].
    """
    history = tables.history
    ids = np.empty(batch.rows + earlier.size, np.int64)
    # The ids of each sequence behind those before it.
    at = np.arange(batch.rows) + history * (batch.owner + 1)
    ids[at] = batch.ids
    ids[(batch.firsts + history * np.arange(batch.sequences))[:, None] + np.arange(history)] = earlier
    valid = ids >= 0
    folded = tables.token_map.numpy()[np.maximum(ids, 0)]
    reachable = np.ones(batch.rows, bool)
    flat = np.empty((history + 1, batch.rows), np.int64)
    for back in range(history + 1):
        # A missing id hides everything further back.
        reachable &= valid[at - back]
        flat[back] = np.where(reachable, folded[at - back], tables.pad_folded)
    found = []
    for slot in range(len(tables.layers)):
        running = np.bitwise_xor.accumulate(flat * tables.multipliers[slot].numpy()[:, None], 0)[1:]
        primes = tables.primes[slot].numpy().reshape(history, 1, -1)
        offsets = tables.offsets[slot].numpy().reshape(history, 1, -1)
        rows = running[:, :, None] % primes + offsets
        found.append(torch.from_numpy(rows.transpose(1, 0, 2).reshape(batch.rows, -1)))
    return found


class Memory:
    """Weights of one layer's memory."""

    def __init__(self, weights: WeightMap, prefix: str, shape: ModelShape) -> None:
        """Keeps float32 copies, but for the table, which is borrowed."""
        self._table = weights[f"{prefix}.embed.weight"]
        self._project = TileLinear(weights[f"{prefix}.wkv.weight"])
        # The match of query and key only needs the product of their norms' weights.
        both = weights[f"{prefix}.q_weight"].float() * weights[f"{prefix}.k_weight"].float()
        self._weight = both / shape.hidden**0.5
        self._streams = shape.num_streams
        self._eps = shape.norm_eps

    def add(self, lines: Tensor, rows: Tensor, pre: Floats) -> None:
        """Add the memory to the streams, and renew the collapsed input in the last line.

        Args:
            lines: float32[padded rows, streams + 1, hidden], written.
            rows: int64[rows, rows per token].
            pre: float32[padded rows, streams], weights of the collapse.
        """
        read = pad_rows(self._table.index_select(0, rows.flatten()).float().view(rows.shape[0], -1))
        projected = self._project(read).view(len(read), self._streams + 1, -1)
        keys, value = projected[:, :-1], projected[:, -1:]
        streams = lines[:, :-1]
        match = norm_rows(streams, self._eps).mul_(norm_rows(keys, self._eps)).mul_(self._weight).sum(-1, keepdim=True)
        # On numpy: torch's sigmoid rounds the last numbers of a tensor otherwise than those before.
        found = match.numpy()
        found = np.sign(found) * np.sqrt(np.maximum(np.abs(found), np.float32(1e-6)))
        gate = torch.from_numpy(1 / (1 + np.exp(-found)))
        streams += gate * value
        lines[:, -1:] = torch.bmm(torch.from_numpy(pre).unsqueeze(1), streams)
