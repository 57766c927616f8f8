"""SlotBank: experts that lie in slots, evaluated pair by pair in tiles, by the products of a layer's own bank.

Slots of neighbouring numbers go through one product, so a pool whose layers lie together is the faster one (32 pairs of
12 experts of the bundled model: 240 us, and 320 us when they are scattered). Holes between them are not worth a
product: unlike a layer's bank, this does not know whether a slot next door holds anything.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.tiles import TILE, TilePlan, gate_unit, multiply_tiles

Ints = npt.NDArray[np.int64]

FEW_PAIRS = 6
"""Up to so many pairs, a product for each costs less than finding out which share a tile."""


class SlotBank:
    """Experts in slots, evaluated pair by pair in tiles of TILE rows: the same products as those of an ExpertBank."""

    def __init__(self, w_in: Tensor, w_out: Tensor, clamp: float) -> None:
        """Borrows the weights, which may change in slots that are not evaluated.

        Args:
            w_in: float32[slots, hidden, 2 * width], a norm's weight folded in; each slot contiguous.
            w_out: float32[slots, width, hidden].
            clamp: limit inside the gated unit.
        """
        self._in, self._out = w_in, w_out
        self._in_each = [w.unsqueeze(0) for w in w_in]
        self._out_each = [w.unsqueeze(0) for w in w_out]
        self._clamp = clamp

    def evaluate(self, x: Tensor, rows: Ints, slots: Ints) -> Tensor:
        """The output of each pair's expert.

        Args:
            x: float32[whole tiles of rows, hidden].
            rows: int64[pairs], the row of each pair.
            slots: int64[pairs], the slot of its expert.

        Returns:
            float32[pairs, hidden], not weighted.
        """
        pairs = len(slots)
        if pairs == 0:
            return x.new_empty((0, x.shape[1]))
        if pairs <= FEW_PAIRS:
            tiled = x.view(-1, TILE, x.shape[1])
            at, each = (rows // TILE).tolist(), slots.tolist()
            inner = torch.cat(
                [torch.bmm(tiled[t : t + 1], self._in_each[slot]) for t, slot in zip(at, each, strict=True)]
            )
            inner = gate_unit(inner, self._clamp)
            outer = torch.cat([torch.bmm(inner[i : i + 1], self._out_each[slot]) for i, slot in enumerate(each)])
            return outer[torch.arange(pairs), torch.from_numpy(rows % TILE)]
        places, source, plan = _place_slots(rows, slots)
        tiled = x.index_select(0, torch.from_numpy(source)).view(-1, TILE, x.shape[1])
        inner = gate_unit(multiply_tiles(tiled, self._in, self._in_each, plan), self._clamp)
        outer = multiply_tiles(inner, self._out, self._out_each, plan).view(-1, x.shape[1])
        return outer.index_select(0, torch.from_numpy(places))


def _place_slots(rows: Ints, slots: Ints) -> tuple[Ints, Ints, TilePlan]:
    """Give every pair a place in tiles of one slot each. As `_place_pairs`, for slots that may lie anywhere."""
    pairs = len(slots)
    order = slots.argsort(kind="stable")
    ranked = slots[order]
    begins = np.ones(pairs, bool)
    np.not_equal(ranked[1:], ranked[:-1], out=begins[1:])
    starts = begins.nonzero()[0]
    used = ranked[starts]
    counts = np.empty(len(used), np.int64)
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    counts[-1] = pairs - starts[-1]
    number = begins.cumsum() - 1
    within = np.arange(pairs) - starts[number]
    # The first tile of every slot in front, in the order of slots: neighbours go through one product.
    ranked_places = number * TILE + within
    tiles = len(used)
    runs: list[tuple[int, int, int]] = []
    if int(counts.max()) > TILE:
        extra = (counts - 1) // TILE
        firsts = tiles + extra.cumsum() - extra
        tiles += int(extra.sum())
        ranked_places = np.where(within < TILE, ranked_places, (firsts[number] - 1) * TILE + within)
        more = extra.nonzero()[0]
        runs = list(zip(used[more].tolist(), firsts[more].tolist(), extra[more].tolist(), strict=True))
    places = np.empty(pairs, np.int64)
    places[order] = ranked_places
    source = np.zeros(tiles * TILE, np.int64)
    source[ranked_places] = rows[order]
    stretches: list[tuple[int, int, int]] = []
    first, last = -1, -2
    for index, slot in enumerate(used.tolist()):
        if slot == last + 1:
            stretches[-1] = (stretches[-1][0], first, index - first + 1)
        else:
            first = index
            stretches.append((slot, index, 1))
        last = slot
    return places, source, TilePlan(stretches, runs)
