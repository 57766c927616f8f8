"""Expert slots: the memory of a rank's slots, what each of them holds, and the table that finds a row's replica.

All slots of a part have one size, whatever layer's expert they hold: the input weights [hidden, 2 * width] with the
norm folded in, then the output weights [width, hidden], float32, contiguous: one block of the fabric. So a copy to
another rank is the bytes and nothing else.

A slot is written by two only, and never while a table in force names it: by `SlotPool.fill` from the checkpoint, and by
a peer's push, which `note_copied` declares complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.placement import EMPTY, Placement, choose_replicas
from engine.errors import DeviceError
from engine.model.slot_bank import SlotBank
from transport.fabric import BlockRun
from transport.messages import PartInfo

Ints = npt.NDArray[np.int64]
ReadExpert = Callable[[int, int], tuple[Tensor, Tensor, Tensor]]
"""(layer of the part, expert) to gate [width, hidden], up [width, hidden], down projection [hidden, width]."""


class ExpertPool(Protocol):
    """The slots of one part on one rank, wherever they are.

    Attributes:
        held: int32[slots], `layer * experts + expert`, or EMPTY. Written after the weights are there.
    """

    held: npt.NDArray[np.int32]

    @property
    def info(self) -> PartInfo:
        """The part's name and sizes."""
        ...

    @property
    def run(self) -> BlockRun:
        """The slots as the fabric's blocks. The memory lives as long as this object."""
        ...

    def name_key(self, key: int) -> str:
        """An expert for people; a key may come from a peer."""
        ...

    def name_held(self, slot: int) -> str:
        """What a slot holds, for people."""
        ...


class ExpertSource(Protocol):
    """Where the experts of a part come from."""

    def load(self, slot: int, key: int) -> None:
        """Puts an expert into a slot of the part's pool that holds nothing. Blocks until it is there.

        Args:
            key: `layer * experts + expert`.

        Raises:
            ConfigError: it can not be read.
            DeviceError: the slot holds an expert.
        """
        ...


PAGE = 4096
SLOT_ALIGN = 64
"""A slot's bytes are a multiple of a cache line, so that products read each slot alike."""


class SlotPool:
    """The slots of one part on one rank.

    Attributes:
        info: the part's name and sizes.
        held: int32[slots], `layer * experts + expert`, or EMPTY. Written after the weights are there.
        bank: evaluates the experts in them.
    """

    def __init__(self, name: str, layers: int, experts: int, slots: int, hidden: int, width: int, clamp: float) -> None:
        """Allocates on the CPU, at a page boundary; all slots are empty."""
        self._half = hidden * 2 * width
        numbers = self._half + width * hidden
        slot_bytes = -(-numbers * 4 // SLOT_ALIGN) * SLOT_ALIGN
        self.info = PartInfo(
            name="draft" if name == "draft" else "main",
            layers=layers,
            experts=experts,
            slots=slots,
            slot_bytes=slot_bytes,
        )
        buffer = torch.zeros(slots * slot_bytes + PAGE, dtype=torch.uint8)
        skip = -buffer.data_ptr() % PAGE
        self._bytes = buffer[skip : skip + slots * slot_bytes]
        table = self._bytes.view(torch.float32).view(slots, -1)
        self._in = table[:, : self._half].unflatten(1, (hidden, 2 * width))
        self._out = table[:, self._half : numbers].unflatten(1, (width, hidden))
        self.held = np.full(slots, EMPTY, np.int32)
        self.bank = SlotBank(self._in, self._out, clamp)

    @property
    def run(self) -> BlockRun:
        """The slots as the fabric's blocks. The memory lives as long as this object."""
        return BlockRun(self._bytes.data_ptr(), self.info.slot_bytes, self.info.slots)

    def fill(self, slot: int, key: int, weights: tuple[Tensor, Tensor, Tensor], fold: Tensor) -> None:
        """Puts an expert into a slot that holds nothing.

        Args:
            key: `layer * experts + expert`.
            weights: gate, up and down projection, as `ReadExpert` gives them.
            fold: float[hidden], the layer's norm weight.

        Raises:
            DeviceError: the slot holds an expert.
        """
        if self.held[slot] != EMPTY:
            raise DeviceError(
                f"{self.name_key(key)} can not be loaded into slot {slot}: it holds {self.name_held(slot)}"
            )
        w1, w3, w2 = weights
        self._in[slot] = (torch.cat((w1, w3)).float() * fold.float()).t()
        self._out[slot] = w2.float().t()
        self.held[slot] = key

    def name_key(self, key: int) -> str:
        """An expert for people; a key may come from a peer."""
        return name_expert(key, self.info)

    def name_held(self, slot: int) -> str:
        """What a slot holds, for people."""
        return self.name_key(int(self.held[slot]))

    def check_pairs(self, slots: Ints, keys: Ints, rank: int, asked_by: int) -> None:
        """Raises DeviceError unless each slot holds the expert that its pair names: a wrong table, or wrong weights.

        Args:
            rank: this one, `asked_by`: whose rows they are; for the message.
        """
        if not len(slots):
            return
        outside = (slots < 0) | (slots >= self.info.slots)
        if outside.any():
            slot = int(slots[outside][0])
            raise DeviceError(f"rank {asked_by} sent a row for slot {slot} of rank {rank}, it has {self.info.slots}")
        held = self.held[slots]
        wrong = np.flatnonzero(held != keys)
        if len(wrong):
            at = int(wrong[0])
            raise DeviceError(
                f"slot {int(slots[at])} of rank {rank} holds {self.name_key(int(held[at]))}, the table of rank "
                f"{asked_by} says {self.name_key(int(keys[at]))}"
            )


class PartSource(NamedTuple):
    """An `ExpertSource` of a pool: how experts are read, and per layer the norm float[hidden] folded into them."""

    pool: SlotPool
    read: ReadExpert
    folds: Sequence[Tensor]

    def load(self, slot: int, key: int) -> None:
        """See `ExpertSource`."""
        layer, expert = divmod(key, self.pool.info.experts)
        self.pool.fill(slot, key, self.read(layer, expert), self.folds[layer])


def name_expert(key: int, info: PartInfo) -> str:
    """An expert of a part for people; a key may come from a peer."""
    if key == EMPTY:
        return "no expert"
    layer, expert = divmod(key, info.experts)
    return f"expert {expert} of layer {layer}"


class SlotTable:
    """A placement as a device reads it: which place and slot computes a row's expert.

    Attributes:
        placement: what it was made from.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        counts, places = placement.build_tables()
        self._experts = placement.experts
        self._counts = counts
        self._most = counts.max(1).tolist()
        self._places, self._slots = np.divmod(places, placement.slots)

    def find(self, layer: int, ids: Ints, identity: Ints) -> tuple[Ints, Ints, Ints]:
        """Where each row's experts are.

        Args:
            layer: of the part.
            ids: int64[rows, k], experts of the layer.
            identity: int64[rows]; a function of the row alone, so that a row's replica is.

        Returns:
            (keys, places, slots), each int64[rows, k].
        """
        keys = ids + layer * self._experts
        places, slots = self._places[layer], self._slots[layer]
        if self._most[layer] == 1:
            return keys, places[ids, 0], slots[ids, 0]
        which = choose_replicas(identity[:, None], keys, self._counts[layer][ids])
        return keys, places[ids, which], slots[ids, which]


def identify_rows(positions: Ints, ids: Ints) -> Ints:
    """int64[rows]: what a row's replica is chosen by. Position and token, so the same on any rank, in any batch."""
    identity: Ints = (positions * 0x9E3779B1 + ids) & 0xFFFFFFFF
    return identity
