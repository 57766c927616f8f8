"""Watch: what the drafter wants to see of a pass, kept while its rows go through the layers.

A ring of `ring` positions is all that the drafter keeps of a sequence, so of a long chunk only its last rows are looked
at. What a pass showed is taken once, when it is known which of its rows hold; a pass that breaks off leaves it to be
replaced by its repetition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.rows import RowBatch

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Seen:
    """Rows that hold, and what was seen of them.

    Attributes:
        batch: the pass.
        rows: int64[n], numbers of rows that hold, as far as a ring reaches back.
        ends: int64[sequences], number of each sequence's last row that holds.
        values: float32[n, *], what was seen of `rows`.
    """

    batch: RowBatch
    rows: Ints
    ends: Ints
    values: Tensor


class Watch:
    """See the module. Belongs to the thread that runs the passes."""

    def __init__(self, layers: Sequence[int], *, leaving: bool, averages: bool, ring: int) -> None:
        """Args:
        layers: which ones, ascending.
        leaving: the streams are taken after these layers; before them otherwise.
        averages: the mean of a row's streams is taken; all of them otherwise.
        ring: positions of a sequence that are of use.
        """
        self.layers = tuple(layers)
        self.leaving = leaving
        self._averages = averages
        self._ring = ring
        self._batch: RowBatch | None = None
        self._rows = np.empty(0, np.int64)
        self._values: list[Tensor] = []

    def open_pass(self, batch: RowBatch) -> None:
        """A pass of these rows begins."""
        self._batch = batch
        self._rows = batch.last_rows(self._ring)
        self._values = []

    def see(self, layer: int, lines: Tensor, *, leaving: bool) -> None:
        """Rows enter or leave a layer: float32[padded rows, streams + 1, hidden], the last line being no stream."""
        if self._batch is None or leaving != self.leaving or layer not in self.layers:
            return
        streams = lines[: self._batch.rows, :-1]
        if len(self._rows) < self._batch.rows:
            streams = streams.index_select(0, torch.from_numpy(self._rows))
        self._values.append(average(streams) if self._averages else streams)

    def take(self, counts: Ints | None = None) -> Seen | None:
        """What the last pass showed; None if it was taken already, or if there was nothing to see.

        Args:
            counts: int64[sequences], rows of each that hold, at least 1; None for all.
        """
        batch, values = self._batch, self._values
        self._batch, self._values = None, []
        if batch is None:
            return None
        assert len(values) == len(self.layers), f"{len(values)} of layers {self.layers} were seen"
        seen = values[0] if len(values) == 1 else torch.cat(values, -1)
        if counts is None:
            return Seen(batch, self._rows, batch.firsts + batch.spans - 1, seen)
        ends = batch.firsts + counts - 1
        holds = self._rows <= ends[batch.owner[self._rows]]
        return Seen(batch, self._rows[holds], ends, seen[torch.from_numpy(holds)])


def average(streams: Tensor) -> Tensor:
    """Mean over float32[rows, streams, hidden], added one after the other: each row has the same bits in any pass."""
    total = streams[:, 0].clone()
    for stream in range(1, streams.shape[1]):
        total += streams[:, stream]
    return total.mul_(1.0 / streams.shape[1])
