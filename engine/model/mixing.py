"""Hyper-connections of the paged path: coefficients on numpy, and one small product that writes and reads the streams.

The streams of a row are kept with a fifth line, float32[rows, streams + 1, hidden]: lines 0..3 are the streams, the
last one is the input of the next sublayer, later overwritten by that sublayer's output. With the shifted form (see
hyper.py) the next input is a weighted sum of the *new* streams by coefficients that are known before, so writing the
output and collapsing for the next sublayer is one product per row with a 5 x 5 matrix. Without the shift a sublayer
collapses with its own coefficients, which are known only then: `Mixing.collapse` before it, and the last line of that
product is nobody's.

Sinkhorn is some 80 tiny operations; on numpy, with rows in the last dimension, they cost a third of torch's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.layers import WeightMap
from engine.model.shapes import ModelShape
from engine.model.tiles import TileLinear

Floats = npt.NDArray[np.float32]

# Positional arguments save a third of a small call's time; numpy's stubs only know them by keyword.
_add_up: Any = np.add.reduce


def sinkhorn_rows(matrix: Floats, iterations: int, eps: float) -> None:
    """Turn logits float32[old stream, new stream, rows] into nearly doubly stochastic matrices, in place.

    Same steps as `hyper.sinkhorn`; sums start from eps instead of adding it last, which saves a pass.
    """
    matrix -= matrix.max(1, keepdims=True)
    np.exp(matrix, out=matrix)
    matrix /= matrix.sum(1, keepdims=True)
    matrix += np.float32(eps)
    size, _, rows = matrix.shape
    by_column, by_row = np.empty((1, size, rows), np.float32), np.empty((size, 1, rows), np.float32)
    divide = np.divide
    _add_up(matrix, 0, None, by_column, True, eps)
    divide(matrix, by_column, matrix)
    for _ in range(iterations - 1):
        _add_up(matrix, 1, None, by_row, True, eps)
        divide(matrix, by_row, matrix)
        _add_up(matrix, 0, None, by_column, True, eps)
        divide(matrix, by_column, matrix)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Coefficients of one sublayer for every row.

    Attributes:
        matrix: float32[rows, streams + 1, streams + 1]; from (streams, output) to (new streams, next input).
        pre: float32[rows, streams], weights of the next input over the new streams.
    """

    matrix: Tensor
    pre: Floats

    def collapse(self, lines: Tensor) -> None:
        """Overwrite the last line of float32[rows, streams + 1, hidden] by the sublayer's own input."""
        lines[:, -1:] = torch.bmm(torch.from_numpy(self.pre).unsqueeze(1), lines[:, :-1])

    def apply(self, lines: Tensor) -> Tensor:
        """New lines from float32[rows, streams + 1, hidden], the last of which is the sublayer's output."""
        return torch.bmm(self.matrix, lines)


class HeadCollapse:
    """Collapses the streams for a head that has coefficients of its own."""

    def __init__(self, weights: WeightMap, prefix: str, shape: ModelShape) -> None:
        """Keeps float32 copies of `{prefix}hc_head_fn`, `_base` and `_scale`."""
        scale = weights[f"{prefix}hc_head_scale"].float()
        self._project = TileLinear(weights[f"{prefix}hc_head_fn"].float() * scale)
        self._base = weights[f"{prefix}hc_head_base"].float().numpy()
        self._shape = shape

    def __call__(self, streams: Tensor) -> Tensor:
        """float32[rows, hidden] of float32[rows, streams, hidden]; whole tiles."""
        shape = self._shape
        flat = streams.reshape(len(streams), -1)
        mixed = self._project(flat).numpy()
        mixed /= _stream_rms(flat, shape)
        mixed += self._base
        pre = 1 / (1 + np.exp(-mixed)) + np.float32(shape.hyper_eps)
        return torch.bmm(torch.from_numpy(pre).unsqueeze(1), streams).squeeze(1)


def _stream_rms(flat: Tensor, shape: ModelShape) -> Floats:
    """Root mean square of float32[rows, streams * hidden]: float32[rows, 1]."""
    size = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).numpy()
    root: Floats = np.sqrt(size * size * np.float32(1 / shape.stream_width) + np.float32(shape.norm_eps))
    return root


class HyperConnection:
    """Predicts one sublayer's coefficients from the streams that enter it."""

    def __init__(self, weights: WeightMap, prefix: str, shape: ModelShape) -> None:
        """Keeps float32 copies of `{prefix}_fn`, `_base` and `_scale`."""
        n = shape.num_streams
        spread = weights[f"{prefix}_scale"].float().repeat_interleave(torch.tensor([n, n, n * n]))
        self._project = TileLinear(weights[f"{prefix}_fn"].float() * spread.unsqueeze(1))
        self._base = weights[f"{prefix}_base"].float().numpy()
        self._shape = shape

    def predict(self, lines: Tensor) -> Mixing:
        """Coefficients from float32[rows, streams + 1, hidden]; the last line is not read."""
        shape = self._shape
        n, rows = shape.num_streams, lines.shape[0]
        streams = lines.view(rows, -1)[:, : shape.stream_width]
        mixed = self._project(streams).numpy()
        mixed /= _stream_rms(streams, shape)
        mixed += self._base
        gates = np.exp(-mixed[:, : 2 * n])
        gates += 1
        np.divide(1, gates, out=gates)
        pre = gates[:, :n] + np.float32(shape.hyper_eps)
        combination = np.ascontiguousarray(mixed[:, 2 * n :].T).reshape(n, n, rows)
        sinkhorn_rows(combination, shape.sinkhorn_iterations, shape.hyper_eps)
        matrix = np.empty((rows, n + 1, n + 1), np.float32)
        matrix[:, :n, :n] = combination.transpose(2, 1, 0)
        np.multiply(gates[:, n:], 2, out=matrix[:, :n, n])
        _add_up(pre[:, :, None] * matrix[:, :n], 1, None, matrix[:, n])
        return Mixing(torch.from_numpy(matrix), pre)
