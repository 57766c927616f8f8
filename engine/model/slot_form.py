"""SlotForm: how an expert lies in a slot on a device: slots one after the other, or an array for each part of them."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from kernels.forms import SlotWeights

PART_ALIGN = 128
"""Bytes at which the parts of a slot, and slots, begin: cache lines, and more than the copy engines ask for."""


@dataclasses.dataclass(frozen=True)
class SlotForm:
    """How an expert lies in a slot.

    Attributes:
        hidden, width: of the expert.
        dtype: uint8 for MXFP4, with scales; bf16 or float32 for plain weights.
    """

    hidden: int
    width: int
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and numbers of a row, in the order of `SlotWeights`' attributes; of scales only for MXFP4."""
        up, down = (2 * self.width, self.hidden), (self.hidden, self.width)
        if self.dtype != torch.uint8:
            return up, down
        return tuple((rows, columns // packed) for rows, columns in (up, down) for packed in (2, 32))

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return sum(self._part_bytes(size) for size in self.sizes)

    def allocate(self, slots: int, device: torch.device) -> SlotWeights:
        """Slots of a rank that holds what it holds: an array for each part. Not initialised."""
        return self._weights([torch.empty((slots, *size), dtype=self.dtype, device=device) for size in self.sizes])

    def lay_over(self, memory: Tensor) -> SlotWeights:
        """Slots one after the other in uint8[slots * slot_bytes]."""
        table = memory.view(-1, self.slot_bytes)
        parts, at = [], 0
        for size in self.sizes:
            numbers = table[:, at : at + math.prod(size) * self.dtype.itemsize].view(self.dtype)
            parts.append(numbers.unflatten(1, size))
            at += self._part_bytes(size)
        return self._weights(parts)

    def _part_bytes(self, size: tuple[int, int]) -> int:
        return -(-math.prod(size) * self.dtype.itemsize // PART_ALIGN) * PART_ALIGN

    def _weights(self, parts: list[Tensor]) -> SlotWeights:
        return SlotWeights(*parts) if len(parts) == 4 else SlotWeights(parts[0], None, parts[1], None)
