"""Expert slots on a device: one allocation in which every slot is an expert's bytes as the products read them.

A slot has the gate and up projection, their scales, the down projection and its scales, one after the other: one block
of the fabric, so a copy to another rank is the bytes and nothing else. `kernels.experts` takes slots at any stride.

A slot is written by two only, and never while a table in force names it: by `DeviceSlotPool.fill`, on a stream of its
own, and by a peer's push, which is complete before it is told. What a slot holds is noted behind that, and a table
comes into force behind the note, so the steps that read a slot are enqueued when its bytes are in the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.placement import EMPTY
from engine.errors import ConfigError, DeviceError
from engine.model.device_tables import DeviceTables
from engine.model.slot_form import SlotForm
from engine.model.slots import name_expert
from kernels.forms import SlotWeights
from transport.fabric import BlockRun
from transport.messages import Part, PartInfo

PutExpert = Callable[[str, int, SlotWeights, int], None]
"""(prefix of the experts' names, expert, slots, slot): writes an expert's weights into a slot; raises ConfigError."""


class DeviceSlotPool:
    """The slots of one part on one rank: an `ExpertPool`.

    Attributes:
        info: the part's name and sizes.
        held: int32[slots], `layer * experts + expert`, or EMPTY. Written after the weights are there.
        weights: what the products take.
    """

    def __init__(self, name: Part, layers: int, experts: int, slots: int, form: SlotForm, device: torch.device) -> None:
        """Allocates; all slots are empty, with anything in them.

        Raises:
            ConfigError: they do not fit the device's memory.
        """
        self.info = PartInfo(name=name, layers=layers, experts=experts, slots=slots, slot_bytes=form.slot_bytes)
        size = slots * form.slot_bytes
        try:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free = torch.cuda.mem_get_info(device)[0] / 2**30
            raise ConfigError(
                f"{slots} expert slots of {form.slot_bytes / 2**20:.1f} MiB ({size / 2**30:.1f} GiB) do not fit"
                f" {device}, which has {free:.1f} GiB left; lower experts.{name}.spare_slots or take a wider group"
            ) from error
        self.held: npt.NDArray[np.int32] = np.full(slots, EMPTY, np.int32)
        self.weights = form.lay_over(self._bytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def run(self) -> BlockRun:
        """The slots as the fabric's blocks. The memory lives as long as this object."""
        return BlockRun(self._bytes.data_ptr(), self.info.slot_bytes, self.info.slots)

    def bytes_of(self, slot: int) -> Tensor:
        """uint8[slot bytes], a view."""
        size = self.info.slot_bytes
        return self._bytes[slot * size : (slot + 1) * size]

    def fill(self, slot: int, key: int, put: Callable[[SlotWeights, int], None]) -> None:
        """Puts an expert into a slot that holds nothing, beside running steps. Waits until its bytes are there.

        Args:
            key: `layer * experts + expert`.
            put: writes its weights into a slot of these.

        Raises:
            DeviceError: the slot holds an expert.
        """
        if self.held[slot] != EMPTY:
            raise DeviceError(
                f"{self.name_key(key)} can not be loaded into slot {slot}: it holds {self.name_held(slot)}"
            )
        if self._stream is None:
            put(self.weights, slot)
        else:
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                put(self.weights, slot)
                # Blocking: the thread beside it has steps to launch.
                ended = torch.cuda.Event(blocking=True)
                ended.record()
            ended.synchronize()
        self.held[slot] = key

    def check_row(self, row: npt.NDArray[np.int32]) -> None:
        """Raises DeviceError unless each slot holds what a table has there: a wrong table, or wrong weights.

        Args:
            row: int32[slots], this rank's row of a placement. What it has EMPTY may hold anything.
        """
        wrong = np.flatnonzero((row != EMPTY) & (row != self.held))
        if len(wrong):
            slot = int(wrong[0])
            raise DeviceError(
                f"slot {slot} holds {self.name_held(slot)}, the table that comes into force says "
                f"{self.name_key(int(row[slot]))}"
            )

    def name_key(self, key: int) -> str:
        """An expert for people; a key may come from a peer."""
        return name_expert(key, self.info)

    def name_held(self, slot: int) -> str:
        """What a slot holds, for people."""
        return self.name_key(int(self.held[slot]))


class DeviceSource(NamedTuple):
    """An `ExpertSource` of a pool on a device. `stack`: prefix of the part's layers in a checkpoint."""

    pool: DeviceSlotPool
    stack: str
    put: PutExpert

    def load(self, slot: int, key: int) -> None:
        """See `ExpertSource`."""
        layer, expert = divmod(key, self.pool.info.experts)
        stem = f"{self.stack}.{layer}.ffn.experts"
        self.pool.fill(slot, key, lambda slots, at: self.put(stem, expert, slots, at))


class DevicePart(NamedTuple):
    """One part's experts on one rank of a group."""

    pool: DeviceSlotPool
    tables: DeviceTables
    source: DeviceSource
