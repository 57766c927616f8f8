"""DeviceTables: a placement as a captured step reads it: which slot holds an expert, and which place computes it.

The tables are static memory of the device: graphs have its address, a switch writes the contents, and nothing is
captured again. The copy goes into the stream of the steps, so steps that are enqueued keep the table that they were
enqueued with. Tables are functions of the placement and the place, so all ranks of an epoch agree about homes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.core.placement import EMPTY, Placement
from engine.model.slots import SlotTable
from transport.messages import PartInfo

Ints = npt.NDArray[np.int64]
NOWHERE = -1
"""In place of a slot or a place; what kernels take for an expert that is not here."""


def find_homes(placement: Placement, asking: int | None) -> Ints:
    """int64[layers, experts]: the place that computes an expert.

    Args:
        asking: for the rows of this place: the place itself if it has the expert. Those that do not have it take its
            replicas in turn, begun at another one for each expert, so that all replicas get as many. None: for rows of
            any place the same replica, another one for each expert.
    """
    has = find_holders(placement).reshape(placement.ranks, -1)
    keys = np.arange(has.shape[1])
    chosen = keys if asking is None else keys + asking - has[:asking].sum(0)
    # The number of replicas up to each place passes `chosen` where the chosen one is.
    passed = has.cumsum(0, dtype=np.int32)
    homes = (passed <= chosen % passed[-1]).sum(0)
    if asking is not None:
        homes = np.where(has[asking], asking, homes)
    return homes.reshape(placement.layers, placement.experts)


def find_holders(placement: Placement) -> npt.NDArray[np.bool_]:
    """bool[ranks, layers, experts]: who has an expert."""
    has = np.zeros((placement.ranks, placement.layers * placement.experts), np.bool_)
    for line, row in zip(has, placement.table, strict=True):
        line[row[row != EMPTY]] = True
    return has.reshape(placement.ranks, placement.layers, placement.experts)


def find_slots(placement: Placement, place: int) -> Ints:
    """int64[layers, experts]: the slot of a place that holds an expert, the lowest one of several; NOWHERE for none."""
    found = np.full(placement.layers * placement.experts, NOWHERE, np.int64)
    row = placement.table[place]
    used = np.flatnonzero(row != EMPTY)[::-1]
    found[row[used]] = used
    return found.reshape(placement.layers, placement.experts)


class CheckedPool(Protocol):
    """Slots that know what they hold."""

    def check_row(self, row: npt.NDArray[np.int32]) -> None:
        """Raises DeviceError unless each slot holds what a table has there."""
        ...


class DeviceTables:
    """The tables of one part on one rank. Belongs to the thread that enqueues steps.

    Attributes:
        expert_to_slot: int32[layers, experts], the own slot of an expert that this rank computes, or NOWHERE.
        expert_to_place: int32[layers, experts], the place that computes an expert for the own rows.
        counts: int32[layers, experts], to which steps add their own rows; never reset, it wraps around.
        shares: float64[layers, experts] of the host: for each row that a place has of an expert, how many this rank
            computes when all places have as many.
        routed: whether rows go to their experts' homes only. If not, all rows come to all ranks, and an expert is in
            the table of its home only: of several replicas one computes.
    """

    def __init__(self, info: PartInfo, device: torch.device, *, routed: bool) -> None:
        """Allocates; nothing is here, so a step is captured without its experts."""
        self.routed = routed
        size = (info.layers, info.experts)
        self._device = device
        self._both = torch.full((2, *size), NOWHERE, dtype=torch.int32, device=device)
        self.expert_to_slot, self.expert_to_place = self._both[0], self._both[1]
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self.shares = np.zeros(size)
        on_gpu = device.type == "cuda"
        # Two: the table before may still be on its way behind queued steps.
        self._hosts = [torch.empty((2, *size), dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event(blocking=True) if on_gpu else None for _ in range(2)]
        self._turn = 0
        self._there: tuple[SlotTable, int] | None = None

    def put(self, table: SlotTable, place: int, pool: CheckedPool) -> None:
        """The table holds from the next step on that is enqueued on the current stream. Nothing, if it does already.

        Waits only if two tables before it are still on their way.

        Args:
            table: of all places.
            place: the own one.
            pool: whose slots the table names.

        Raises:
            DeviceError: a slot does not hold what the table has there.
        """
        if self._there is not None and self._there[0] is table and self._there[1] == place:
            return
        placement = table.placement
        pool.check_row(placement.table[place])
        slots = find_slots(placement, place)
        homes = find_homes(placement, place if self.routed else None)
        ranks = float(placement.ranks)
        if self.routed:
            self.shares = np.where(slots == NOWHERE, 0.0, ranks / find_holders(placement).sum(0))
        else:
            slots = np.where(homes == place, slots, NOWHERE)
            self.shares = np.where(slots == NOWHERE, 0.0, ranks)
        self._send(slots, homes)
        self._there = (table, place)

    def clear(self) -> None:
        """Nothing is here from the next step on."""
        nothing = np.full(tuple(self.expert_to_slot.shape), NOWHERE, np.int64)
        self._send(nothing, nothing)
        self.shares = np.zeros_like(self.shares)
        self._there = None

    def _send(self, slots: Ints, homes: Ints) -> None:
        host, sent = self._hosts[self._turn], self._sent[self._turn]
        self._turn = 1 - self._turn
        if sent is not None:
            sent.synchronize()
        host[0].copy_(torch.from_numpy(slots))
        host[1].copy_(torch.from_numpy(homes))
        self._both.copy_(host, non_blocking=True)
        if sent is not None:
            sent.record(torch.cuda.current_stream(self._device))
