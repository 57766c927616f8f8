"""Keeper: copies kept state into the slabs and pages of chunks that go on from it, and out of those that leave some.

All of a sequence that does not lie in full pages is in its slab and in the page that it stands in: window rings, rows
of open entries, trailing ids, the drafter's context. So a copy of both, at whatever position, goes on bit by bit as the
sequence itself would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.core.plan import Base
from engine.errors import DeviceError
from engine.model.row_model import RowArena
from engine.ports import DeviceInfo

if TYPE_CHECKING:
    from engine.model.passes import Job

Ints = npt.NDArray[np.int64]


class Keeper:
    """See the module. Belongs to the device's worker thread."""

    def __init__(self, arena: RowArena, info: DeviceInfo, *, replay_rows: int) -> None:
        """Borrows the arena. `replay_rows` as in `PagedTransformer`."""
        self._arena = arena
        self._info = info
        self._replay_rows = replay_rows

    def check(self, job: Job) -> None:
        """Refuses what would read or write the memory of another sequence, or read what this very step writes.

        Raises:
            DeviceError: naming the slab, the page or the position.
        """
        keeps = [chunk.keep for chunk in job.chunks if chunk.keep >= 0]
        bases = [(chunk, chunk.base) for chunk in job.chunks if chunk.base is not None]
        if not keeps and not bases:
            return
        info = self._info
        written = [*(chunk.slab for chunk in job.chunks), *keeps]
        if job.decode is not None:
            written += job.decode.slabs.tolist()
        read = {base.slab for _, base in bases}
        for slab in (*keeps, *read):
            if not 0 <= slab < info.num_slabs:
                raise DeviceError(f"kept state is outside the slabs 0..{info.num_slabs - 1}: {slab}")
        for slab in keeps:
            if written.count(slab) > 1:
                raise DeviceError(f"slab {slab} is to keep state, and something else in the same step")
        for slab in read.intersection(written):
            raise DeviceError(f"slab {slab} is the base of a chunk, and written in the same step")
        for chunk, base in bases:
            self._check_base(chunk.start, base.page, chunk.pages)

    def _check_base(self, start: int, page: int, pages: Ints) -> None:
        info = self._info
        if self._replay_rows:
            raise DeviceError("a chunk can not go on from kept state with replay_rows: that lacks rows before it")
        if start < 1:
            raise DeviceError(f"a chunk that begins at position {start} has nothing to go on from")
        is_inside = start % info.page_tokens > 0
        if is_inside != (page >= 0):
            where = "inside a page" if is_inside else "at a page's start"
            raise DeviceError(f"a chunk begins {where} ({start}) and its base has page {page}")
        if page >= info.num_pages:
            raise DeviceError(f"a base's page is outside 0..{info.num_pages - 1}: {page}")
        if page in pages:
            raise DeviceError(f"page {page} is a base, and the chunk's own")

    def copy_in(self, slab: int, start: int, pages: Ints, base: Base) -> None:
        """Makes a slab, and the page that position `start` lies in, what they are at the base. May be done again."""
        arena = self._arena
        arena.slab_bytes_of(slab).copy_(arena.slab_bytes_of(base.slab))
        if base.page >= 0:
            own = int(pages[start // self._info.page_tokens])
            arena.page_bytes_of(own).copy_(arena.page_bytes_of(base.page))

    def copy_out(self, slab: int, keep: int) -> None:
        """Keeps a slab as it is now."""
        self._arena.slab_bytes_of(keep).copy_(self._arena.slab_bytes_of(slab))
