"""Staging: moves a sequence's rings between its slab and the long rings that a prompt's rows go round (`Records`).

Rows are addressed by position in both, `position % rows`, so a move is a gather by positions. What lies in pages is
shared and not moved.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.model.records import Records


@dataclasses.dataclass(frozen=True)
class _Rings:
    """Rings of one kind in a slab and the same ones in the private block, as tables of bytes.

    Attributes:
        slabs: uint8[slabs, rings, rows, bytes].
        private: uint8[rings, longer rows, bytes].
        lookback: positions that a later row may read.
    """

    slabs: Tensor
    private: Tensor
    lookback: int


class Staging:
    """See the module. Borrows the arena."""

    def __init__(self, records: Records, arena: Tensor, window: int) -> None:
        """`records` with staging rows; `window`: tokens that a row sees."""
        self._device = arena.device
        self._rings: list[_Rings] = []
        near = [*(layer.window for layer in records.layers), *records.stages]
        far = [*(layer.window for layer in records.staging), *records.staging_stages]
        first, longer = near[0], far[0]
        for part, row_bytes in (("data", first.data_bytes), ("scale", first.scale_bytes)):
            if row_bytes:
                starts = [[getattr(plane, part) for plane in planes] for planes in (near, far)]
                self._add(records, arena, starts, (first.rows, longer.rows), row_bytes, window)
        for layer, long in zip(records.layers, records.staging, strict=True):
            for ring, long_ring in ((layer.entry_ring, long.entry_ring), (layer.key_ring, long.key_ring)):
                if ring is not None and long_ring is not None:
                    starts = [[ring.data], [long_ring.data]]
                    self._add(records, arena, starts, (ring.rows, long_ring.rows), ring.width * 4, ring.rows)
        ids, longer_ids = records.ids, records.staging_ids
        if ids is not None and longer_ids is not None:
            self._add(records, arena, [[ids.data], [longer_ids.data]], (ids.rows, longer_ids.rows), 4, ids.rows)

    def _add(
        self,
        records: Records,
        arena: Tensor,
        starts: list[list[int]],
        rows: tuple[int, int],
        row_bytes: int,
        lookback: int,
    ) -> None:
        """Rings that lie evenly apart, by the bytes where each begins: in slab 0, and in the private block."""
        slab_starts, private_starts = starts
        steps = [each[1] - each[0] if len(each) > 1 else 0 for each in starts]
        for each, step in zip(starts, steps, strict=True):
            assert each == [each[0] + step * at for at in range(len(each))], "rings of one kind lie evenly apart"
        count = len(slab_starts)
        slabs = arena.as_strided(
            (records.num_slabs, count, rows[0], row_bytes), (records.slab_bytes, steps[0], row_bytes, 1), slab_starts[0]
        )
        private = arena.as_strided((count, rows[1], row_bytes), (steps[1], row_bytes, 1), private_starts[0])
        self._rings.append(_Rings(slabs, private, lookback))

    def fetch(self, slab: int, position: int) -> None:
        """What rows from `position` on may read of the slab, to the private block."""
        for rings in self._rings:
            places = torch.arange(max(0, position - rings.lookback), position, device=self._device)
            own, longer = places % rings.slabs.shape[2], places % rings.private.shape[1]
            rings.private.index_copy_(1, longer, rings.slabs[slab].index_select(1, own))

    def store(self, slab: int, position: int) -> None:
        """What rows from `position` on may read, from the private block to the slab."""
        for rings in self._rings:
            places = torch.arange(max(0, position - rings.lookback), position, device=self._device)
            own, longer = places % rings.slabs.shape[2], places % rings.private.shape[1]
            rings.slabs[slab].index_copy_(1, own, rings.private.index_select(1, longer))
