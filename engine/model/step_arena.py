"""StepArena: the memory of `Records` on a device, as passes and the fabric look into it.

The token that each slab sampled last is private: a peer is told it with the hand-off. It is on the device, where the
next step may want it before the host knows it, and on the host once that knows. Counts for penalties are in slabs,
since they are pushed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.penalties import MOST
from engine.model.records import Records
from transport.fabric import BlockRun

Ints = npt.NDArray[np.int64]
POISON = 0xFF
"""A byte that reads as NaN in every format of records."""


class StepArena:
    """See the module.

    Attributes:
        records: the layout.
        bytes: uint8[records.num_bytes], on the device.
        staging_rows: see `RowArena`. A pass computes one prompt after another, so there is no end to them.
        last_tokens: int32[slabs + 1] on the device, the token that each slab sampled last; the last place is for rows
            of padding.
    """

    def __init__(self, records: Records, device: torch.device, vocab_size: int, *, poison: bool = False) -> None:
        """Allocates. `poison`: fill with NaN, so that a read of something never written shows."""
        self.records = records
        self.bytes = records.make_arena(device)
        self.bytes.zero_()
        self.staging_rows = 1 << 30
        self._sampled = np.zeros(records.num_slabs, np.int64)
        self.last_tokens = torch.zeros(records.num_slabs + 1, dtype=torch.int32, device=device)
        self._counts = self.bytes.view(torch.int16).as_strided(
            (records.num_slabs, vocab_size), (records.slab_bytes // 2, 1), (records.slabs_at + records.counts) // 2
        )
        if poison:
            self.poison()

    def poison(self) -> None:
        """Fill all of it with NaN."""
        self.bytes.fill_(POISON)

    @property
    def slabs(self) -> Tensor:
        """uint8[slabs, slab bytes], a view."""
        records = self.records
        return self.bytes.as_strided((records.num_slabs, records.slab_bytes), (records.slab_bytes, 1), records.slabs_at)

    def read_sampled(self, slabs: Ints) -> Ints:
        """See `RowArena`."""
        return self._sampled[slabs]

    def write_sampled(self, slabs: Ints, tokens: Ints) -> None:
        """See `RowArena`."""
        self._sampled[slabs] = tokens
        at, ids = (torch.from_numpy(np.ascontiguousarray(column)).to(self.bytes.device) for column in (slabs, tokens))
        self.last_tokens[at] = ids.int()

    def note_sampled(self, slabs: Ints, tokens: npt.NDArray[np.integer[Any]]) -> None:
        """The host knows now what the device has had since those were sampled."""
        self._sampled[slabs] = tokens

    def read_counts(self, slabs: Ints) -> Tensor:
        """See `RowArena`."""
        return self._counts[torch.from_numpy(slabs).to(self.bytes.device)].cpu()

    def write_count(self, slab: int, counts: Tensor) -> None:
        """See `RowArena`."""
        self._counts[slab].copy_(counts)

    def add_counts(self, slabs: Ints, tokens: Ints) -> None:
        """See `RowArena`."""
        at, ids = (torch.from_numpy(column).to(self.bytes.device) for column in (slabs, tokens))
        cells = self._counts[at, ids]
        self._counts[at, ids] = cells + ((cells & MOST) < MOST).to(torch.int16)

    def page_bytes_of(self, page_id: int) -> Tensor:
        """uint8[page bytes], a view."""
        size = self.records.page_bytes
        return self.bytes[page_id * size : (page_id + 1) * size]

    def slab_bytes_of(self, slab: int) -> Tensor:
        """uint8[slab bytes], a view."""
        return self.slabs[slab]

    def block_bytes_of(self, block: int) -> Tensor:
        """uint8, a view of a block as the fabric numbers them: pages, then slabs."""
        pages = self.records.num_pages
        return self.page_bytes_of(block) if block < pages else self.slab_bytes_of(block - pages)

    def read_checksums(self, stretches: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Of each stretch, the CRC-32 over the bytes of its blocks in order, as `BlockReader` has it of a host's."""
        found = []
        for blocks in stretches:
            value = 0
            for block in blocks:
                value = zlib.crc32(self.block_bytes_of(block).cpu().numpy().data, value)
            found.append(value)
        return tuple(found)

    def block_runs(self) -> tuple[BlockRun, BlockRun]:
        """The run of pages, then the run of slabs. The memory lives as long as this object."""
        records, address = self.records, self.bytes.data_ptr()
        return (
            BlockRun(address, records.page_bytes, records.num_pages),
            BlockRun(address + records.slabs_at, records.slab_bytes, records.num_slabs),
        )
