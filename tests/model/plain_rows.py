"""PlainRows: the exchanges of `kernels.exchange` and `kernels.combine` by numpy, between mailboxes of processes.

The same memory, flags, halves and sticky failure, in the place of `NvlinkRows`; all rows go to all ranks. Interpreted
kernels take a second for a layer of a few rows, too long for tests of what is around them. Those of the kernels
themselves are elsewhere (`tests/kernels`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import reference
from kernels.forms import PairSums
from kernels.mailbox import COMBINE, COUNTER_BITS, DISPATCH, FAILED, FAILURE, HALVES, LIMIT, MOST_PARTS, Mailbox

PAUSE_S = 2e-4
Words = npt.NDArray[np.int64]


class PlainRows:
    """See the module; `Peers` of a step of up to `count` rows on each rank.

    Attributes:
        before: called with (phase, layer) before each exchange: a test lets a rank stop there.
    """

    before: Callable[[int, int], None] = staticmethod(lambda phase, layer: None)

    def __init__(self, mailbox: Mailbox, count: int) -> None:
        self._mailbox = mailbox
        self._count = count
        self.ids = [mailbox.ids(layer, count) for layer in range(mailbox.layout.layers)]

    def own(self, layer: int, rows: int) -> tuple[None, None]:
        return None, None

    def join(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.before(DISPATCH, layer)
        box, count, layout = self._mailbox, self._count, self._mailbox.layout
        own = len(x)
        if self._is_fine():
            padded = torch.full((count, layout.top_k), -1, dtype=torch.int32)
            padded[:own] = ids
            for place in range(layout.ranks):
                if self._address(place):
                    for start, line in (
                        (layout.rows_at(layer), x), (layout.ids_at(layer), padded), (layout.weights_at(layer), weights),
                    ):  # fmt: skip
                        width = line.shape[1] * line.itemsize
                        self._write(place, start + box.rank * count * width, line)
                else:
                    box.ids(layer, count)[place * count : (place + 1) * count] = -1
        self._meet(DISPATCH, layer)
        return box.rows(layer, count), box.ids(layer, count), box.weights(layer, count)

    def give_back(self, layer: int, sums: PairSums) -> Tensor:
        box, count, layout = self._mailbox, self._count, self._mailbox.layout
        self.before(COMBINE, layer)
        assert sums.base is not None
        parts = reference.add_pairs(PairSums(sums.pairs, sums.ids, sums.expert_to_slot))
        shape = (layout.ranks, count, layout.hidden)
        parts = parts.view(shape)
        size = count * layout.hidden * layout.part_type.itemsize
        if self._is_fine():
            for place in range(layout.ranks):
                if place != box.rank and self._address(place):
                    self._write(place, layout.parts_at(layer) + box.rank * size, parts[place].to(layout.part_type))
        self._meet(COMBINE, layer)
        start = layout.parts_at(layer)
        came = box.memory[start : start + layout.ranks * size].view(layout.part_type).view(shape)
        own = len(sums.base)
        ids = sums.ids.view(layout.ranks, count, -1)[box.rank, :own]
        partial = [
            (parts if place == box.rank else came)[place, :own].float() if self._address(place)
            else torch.zeros((own, layout.hidden))
            for place in range(layout.ranks)
        ]  # fmt: skip
        return reference.combine_rows(partial, box.rank, ids, sums.base, layout.dtype, layout.part_type)

    def _address(self, place: int) -> int:
        return int(self._mailbox.addresses[place])

    def _is_fine(self) -> bool:
        return int(self._mailbox.state[FAILURE]) == 0

    def _write(self, place: int, start: int, line: Tensor) -> None:
        data = line.contiguous()
        ctypes.memmove(self._address(place) + start, data.data_ptr(), data.nbytes)

    def _flags(self, place: int, phase: int, layer: int, source: int) -> Words:
        layout = self._mailbox.layout
        start = self._address(place) + layout.flags_at(phase, layer) + source * 8 * layout.capacity * MOST_PARTS
        memory: Any = (ctypes.c_int64 * self._count).from_address(start)
        return np.frombuffer(memory, np.int64)

    def _meet(self, phase: int, layer: int) -> None:
        """Flags to all peers, and theirs; the next exchange gets the next number."""
        box, layout = self._mailbox, self._mailbox.layout
        half, next_half = layout.half(layer), layout.half((layer + 1) % layout.layers)
        word = int(box.state[phase * HALVES + half])
        flag = word | self._count << COUNTER_BITS
        peers = [place for place in range(layout.ranks) if place != box.rank and self._address(place)]
        if self._is_fine():
            for place in peers:
                self._flags(place, phase, layer, box.rank)[:] = flag
        due = time.monotonic_ns() + int(box.state[LIMIT])
        for place in peers:
            while self._is_fine() and not (self._flags(box.rank, phase, layer, place) == flag).all():
                if time.monotonic_ns() > due:
                    number = word & (1 << COUNTER_BITS) - 1
                    box.state[FAILURE] = FAILED | phase << 60 | place << 52 | number
                time.sleep(PAUSE_S)
        box.state[phase * HALVES + next_half] = word + 1
