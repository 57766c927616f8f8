"""Heat: where the load of experts is, rank by rank and layer by layer, as HeatReport's blob; and what was moved last.

What changes rarely is kept: the order of slots while the placement is the same, the picture of all layers while the
load window is too, the whole blob while the question is as well. Arrays and placements that are given here are never
written, so they are told apart by identity.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from engine.core.placement import EMPTY, Placement

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Moved:
    """Experts that a re-placement put into slots.

    Attributes:
        slots: int64, `place * slots of a place + slot`; keys: int64, `layer * experts + expert` that it put there.
    """

    slots: Ints = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    keys: Ints = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))


def find_moved(before: Placement, after: Placement) -> Moved:
    """What is in another slot, or on another rank, than it was."""
    old, new = before.table.ravel(), after.table.ravel()
    slots = np.flatnonzero((new != old) & (new != EMPTY))
    return Moved(slots, new[slots].astype(np.int64))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeatInput:
    """What the picture is drawn from.

    Attributes:
        loads: float64[layers, experts], rows per step that gates send to each expert.
        rank_loads: float64[layers, ranks] of them under `placement`, see `Placement.sum_rank_loads`.
        placement: in force. after: what the last plan makes of it; None if there is none that may be applied.
        moved: by the last re-placement.
        absent: places without a living rank.
    """

    loads: Floats
    rank_loads: Floats
    placement: Placement
    after: Placement | None
    moved: Moved
    absent: frozenset[int]


class Heat:
    """One part's picture."""

    def __init__(self) -> None:
        self._order: _SlotOrder | None = None
        self._grid_of: HeatInput | None = None
        self._grid = b""
        self._blob_of: tuple[int, HeatInput] | None = None
        self._blob = b""

    def pack(self, layer: int, given: HeatInput) -> bytes:
        """HeatReport's blob, with the slots of `layer`, which must be one of the placement's. The mean that rank loads
        are told in is over all places, absent ones included, as skew has it."""
        if self._blob_of is not None and self._blob_of[0] == layer and _is_same(self._blob_of[1], given):
            return self._blob
        self._blob = b"".join([self._draw_grid(given), *_draw_layer(layer, given)])
        self._blob_of = layer, given
        return self._blob

    def _draw_grid(self, given: HeatInput) -> bytes:
        """Rank loads and hottest experts, all layers."""
        if self._grid_of is None or not _is_same_grid(self._grid_of, given):
            placement = given.placement
            if self._order is None or self._order.placement is not placement:
                self._order = _SlotOrder(placement)
            rank_load = _divide(given.rank_loads, given.rank_loads.mean(axis=1, keepdims=True)).T.astype("<f4")
            hottest = self._order.find_hottest(given.loads)
            absent = sorted(given.absent)
            rank_load[absent], hottest[absent] = 0.0, -1
            self._grid = rank_load.tobytes() + hottest.tobytes()
            self._grid_of = given
        return self._grid


class _SlotOrder:
    """The slots in use, ordered by rank, layer and expert."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        table = placement.table.ravel()
        at = np.flatnonzero(table != EMPTY)
        keys = table[at].astype(np.int64)
        cells = at // placement.slots * placement.layers + keys // placement.experts
        order = np.lexsort((keys, cells))
        self.keys, cells = keys[order], cells[order]
        self.starts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
        self.cells = cells[self.starts]
        self.sizes = np.diff(np.r_[self.starts, cells.size])
        self.counts = placement.count_replicas().ravel()

    def find_hottest(self, loads: Floats) -> npt.NDArray[np.int32]:
        """int32[ranks, layers]: expert with the highest load per replica, the first of equals; -1: none is there."""
        placement = self.placement
        share = (loads.ravel() / self.counts)[self.keys]
        most = np.repeat(np.maximum.reduceat(share, self.starts), self.sizes)
        nobody = placement.layers * placement.experts
        first = np.minimum.reduceat(np.where(share == most, self.keys, nobody), self.starts)
        hottest = np.full(placement.ranks * placement.layers, -1, "<i4")
        hottest[self.cells] = first % placement.experts
        return hottest.reshape(placement.ranks, placement.layers)


def _draw_layer(layer: int, given: HeatInput) -> list[bytes]:
    """Slots, next slots, loads and what was moved, of one layer."""
    placement, moved = given.placement, given.moved
    table, low = placement.table, layer * placement.experts
    absent = sorted(given.absent)
    slots = _name_experts(table, low, placement.experts)
    slots[absent] = -1
    told = slots.tobytes()
    after = told
    if given.after is not None and given.after is not placement:
        next_slots = _name_experts(given.after.table, low, placement.experts)
        next_slots[absent] = -1
        after = next_slots.tobytes()
    load = given.loads[layer]
    marks = np.zeros(table.shape, np.uint8)
    # A slot that has another expert by now is not what was moved.
    still = (table.ravel()[moved.slots] == moved.keys) & (moved.keys >= low) & (moved.keys < low + placement.experts)
    marks.ravel()[moved.slots[still]] = 1
    marks[absent] = 0
    return [told, after, _divide(load, load.mean(keepdims=True)).astype("<f4").tobytes(), marks.tobytes()]


def _name_experts(table: npt.NDArray[np.int32], low: int, experts: int) -> npt.NDArray[np.int32]:
    """Experts of the layer whose first key is `low`; -1 for all else."""
    names: npt.NDArray[np.int32] = np.where((table >= low) & (table < low + experts), table - low, -1).astype("<i4")
    return names


def _divide(loads: Floats, mean: Floats) -> Floats:
    """Zeros where nothing was counted."""
    shares: Floats = np.divide(loads, mean, out=np.zeros_like(loads), where=mean > 0)
    return shares


def _is_same_grid(one: HeatInput, other: HeatInput) -> bool:
    return (
        one.loads is other.loads
        and one.rank_loads is other.rank_loads
        and one.placement is other.placement
        and one.absent == other.absent
    )


def _is_same(one: HeatInput, other: HeatInput) -> bool:
    return _is_same_grid(one, other) and one.after is other.after and one.moved is other.moved
