"""Pool: memory of simulated devices in one piece, so that one array operation reaches the rows of all of them."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt


class Pool:
    """Room for the pages and slabs of so many devices. Each gets its share once; nothing is given back.

    Attributes:
        buffer: all pages of all devices, then all slabs.
        page_words, slab_words: int64[units, bytes // 8], the same by unit.
        tables: int64[slabs, pages]: which pages the sequence of each slab has, as its device was told last.
    """

    def __init__(self, devices: int, num_pages: int, page_bytes: int, num_slabs: int, slab_bytes: int) -> None:
        self.sizes = (num_pages, num_slabs)
        self._devices, self._given = devices, 0
        self._page_bytes, self._slab_bytes = page_bytes, slab_bytes
        self._memory = ctypes.create_string_buffer(devices * (num_pages * page_bytes + num_slabs * slab_bytes))
        self.buffer = memoryview(self._memory).cast("B")
        pages = devices * num_pages
        self._slabs_at = pages * page_bytes
        self.page_words = self._view(0, pages, page_bytes)
        self.slab_words = self._view(self._slabs_at, devices * num_slabs, slab_bytes)
        self.tables = np.zeros((devices * num_slabs, 1), np.int64)

    def keep_tables(self, slabs: npt.NDArray[np.int64], tables: npt.NDArray[np.int64]) -> None:
        """int64[rows] and int64[rows, pages], numbers of units here."""
        width = tables.shape[1]
        if width > self.tables.shape[1]:
            self.tables = np.pad(self.tables, ((0, 0), (0, width - self.tables.shape[1])))
        self.tables[slabs, :width] = tables

    def _view(self, at: int, units: int, unit_bytes: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.buffer, np.int64, units * unit_bytes // 8, at).reshape(units, -1)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._memory)

    @property
    def is_used_up(self) -> bool:
        return self._given == self._devices

    def take(self) -> tuple[int, int, int, int]:
        """A device's share: its first page and slab, and the bytes of the buffer at which they begin."""
        assert not self.is_used_up
        number = self._given
        self._given += 1
        page, slab = number * self.sizes[0], number * self.sizes[1]
        return page, slab, page * self._page_bytes, self._slabs_at + slab * self._slab_bytes
