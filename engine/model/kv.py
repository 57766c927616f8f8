"""KvLayout and Arena: where every byte of a sequence's state lives.

A page holds `page_tokens` tokens of every compressed family (main entries of each KV source layer, and index keys where
entries are selected), one plane after the other, contiguous across layers: one page is one transfer descriptor. A state
slab holds what does not grow: the window ring of every layer and drafter stage, the rings of raw compressor rows, the
trailing token ids, the token that was sampled last, and what penalties have seen of each id. But for the last two, all
in a slab is addressed by position (`position % ring`), and rings have room for `SPARE_ROWS` positions beyond what
attention reads, so a rejected draft is overwritten and never rolled back, and a step of so few positions that is run
again writes the same bytes (for a longer one see passes.py).

The arena is one allocation: the run of pages, the run of slabs, then a private tail that no peer sees (a row of zeros
that masked reads are sent to, and the staging rows of a prefill chunk). It is read and written as a table of equally
wide rows, so offsets of all parts are multiples of their row's bytes, and every plane is a multiple of 128 bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.penalties import add_tokens
from engine.model.shapes import ModelShape
from transport.fabric import BlockRun

FORMAT_VERSION = 1
"""Raised when the meaning of bytes in a page or slab changes."""

PLANE_ALIGN = 128
SPARE_ROWS = 8
"""Positions a step may write beyond the last accepted one: the input row and 7 drafts."""
ID_RING = 16
"""Trailing token ids kept per sequence: the n-gram look-back (3) and SPARE_ROWS, as a power of two."""
POISON = 0xFF
"""A byte that reads as NaN in float32 and bfloat16 and as -1 in int32."""

Ints = npt.NDArray[np.int64]
KvDtype = Literal["float32", "bfloat16"]
_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Plane:
    """One family of one source layer inside every page.

    Entries lie one after the other, [rows, head_dim]: single ones are gathered. Index keys lie channel by channel,
    [index_dim, rows]: a page of them is always read whole, as the right side of a product, and that is the order a
    product reads fastest (measured 2 to 3 times, on a CPU).

    Attributes:
        layer: the layer that writes it.
        kind: `entry` (key and value of the attention) or `key` (index key).
        ratio: tokens per row.
        rows: rows in a page.
        row_bytes: bytes of a row.
        offset: bytes from the page's start.
    """

    layer: int
    kind: Literal["entry", "key"]
    ratio: int
    rows: int
    row_bytes: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Pool:
    """The ring of raw compressor rows (latent, then gate; float32) of one source layer inside every slab.

    Attributes:
        layer: the layer that writes it.
        kind: what they are pooled to.
        ratio: tokens per entry, at least 2.
        pooled: rows that an entry is made of: `ratio`, or twice as many where entries overlap.
        ring: positions kept.
        width: float32 numbers in a row.
        offset: bytes from the slab's start.
    """

    layer: int
    kind: Literal["entry", "key"]
    ratio: int
    pooled: int
    ring: int
    width: int
    offset: int


@dataclasses.dataclass(frozen=True)
class KvLayout:
    """Byte layout of pages and slabs. Two devices exchange state only where `digest` agrees.

    Attributes:
        page_tokens: tokens in a page.
        dtype: number format of entries, keys and window rows.
        planes: parts of a page, in order.
        page_bytes: size of a page.
        ring: positions kept in a window ring.
        window_layers: window rings in a slab: the target's layers, then the drafter's stages.
        window_row_bytes: bytes of a window row; an entry has the same.
        pools: compressor rings in a slab.
        ids_offset: bytes from the slab's start to int32[ID_RING], the trailing ids.
        sampled_offset: bytes to int32[1], the token this slab sampled last.
        counts_offset: bytes to int16[vocab_size], what was seen of each id (see `Arena.counts`).
        streams_offset: bytes to float32[stream_width], see `Arena.streams`.
        stream_width: numbers there; 0 for a model without a layer that predicts ahead.
        vocab_size: ids.
        slab_bytes: size of a slab.
        digest: hex digest over all of it and over the layer roles.
    """

    page_tokens: int
    dtype: KvDtype
    planes: tuple[Plane, ...]
    page_bytes: int
    ring: int
    window_layers: int
    window_row_bytes: int
    pools: tuple[Pool, ...]
    ids_offset: int
    sampled_offset: int
    counts_offset: int
    vocab_size: int
    streams_offset: int
    stream_width: int
    slab_bytes: int
    digest: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch's name of `dtype`."""
        return _DTYPES[self.dtype]


def plan_layout(shape: ModelShape, page_tokens: int, dtype: KvDtype = "float32") -> KvLayout:
    """Lay out the state of one model.

    Args:
        shape: the model.
        page_tokens: tokens in a page.
        dtype: number format of entries, keys and window rows; compressor rows are always float32.

    Raises:
        ConfigError: `page_tokens` is not a multiple of every compression ratio.
    """
    item = _DTYPES[dtype].itemsize
    entry_bytes, key_bytes = shape.head_dim * item, shape.index_dim * item
    rings = _plan_pools(shape)
    unit = math.lcm(PLANE_ALIGN, entry_bytes, key_bytes, *(pool.width * 4 for pool in rings))
    planes: list[Plane] = []
    offset = 0
    for kind, row_bytes, sources in (("entry", entry_bytes, shape.kv_sources), ("key", key_bytes, shape.key_sources)):
        for layer in sources:
            ratio = shape.layer_roles[layer].ratio
            if page_tokens % ratio or page_tokens < ratio:
                raise ConfigError(f"page_tokens must be a multiple of {ratio} (layer {layer}), found {page_tokens}")
            rows = page_tokens // ratio
            offset = _align(offset, math.lcm(PLANE_ALIGN, row_bytes))
            planes.append(Plane(layer, "entry" if kind == "entry" else "key", ratio, rows, row_bytes, offset))
            offset += rows * row_bytes
    page_bytes = _align(max(offset, 1), unit)

    ring = shape.window + SPARE_ROWS
    window_layers = shape.num_layers + shape.num_draft_layers
    offset = window_layers * ring * entry_bytes
    pools: list[Pool] = []
    for pool in rings:
        offset = _align(offset, math.lcm(PLANE_ALIGN, pool.width * 4))
        pools.append(dataclasses.replace(pool, offset=offset))
        offset += pool.ring * pool.width * 4
    ids_offset = _align(offset, PLANE_ALIGN)
    sampled_offset = ids_offset + ID_RING * 4
    counts_offset = _align(sampled_offset + 4, PLANE_ALIGN)
    streams_offset = _align(counts_offset + 2 * shape.vocab_size, PLANE_ALIGN)
    stream_width = shape.stream_width if shape.num_predict_layers else 0
    slab_bytes = _align(streams_offset + 4 * stream_width, unit)

    described = {
        "format": FORMAT_VERSION,
        "keys": "by channel",
        "architecture": shape.architecture,
        "dtype": dtype,
        "page_tokens": page_tokens,
        "page_bytes": page_bytes,
        "slab_bytes": slab_bytes,
        "window": shape.window,
        "ring": ring,
        "ids": [ids_offset, ID_RING, sampled_offset],
        "counts": counts_offset,
        "streams": [streams_offset, stream_width],
        "planes": [dataclasses.astuple(plane) for plane in planes],
        "pools": [dataclasses.astuple(pool) for pool in pools],
        "roles": [dataclasses.astuple(role) for role in shape.layer_roles],
        "widths": [shape.vocab_size, shape.hidden, shape.head_dim, shape.rope_dim, shape.index_dim],
        "drafter": dataclasses.astuple(shape.drafter) if shape.drafter else None,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return KvLayout(
        page_tokens=page_tokens,
        dtype=dtype,
        planes=tuple(planes),
        page_bytes=page_bytes,
        ring=ring,
        window_layers=window_layers,
        window_row_bytes=entry_bytes,
        pools=tuple(pools),
        ids_offset=ids_offset,
        sampled_offset=sampled_offset,
        counts_offset=counts_offset,
        vocab_size=shape.vocab_size,
        streams_offset=streams_offset,
        stream_width=stream_width,
        slab_bytes=slab_bytes,
        digest=digest,
    )


def _plan_pools(shape: ModelShape) -> list[Pool]:
    """The rings of raw rows, not placed yet."""
    pools: list[Pool] = []
    for layer in shape.kv_sources:
        role = shape.layer_roles[layer]
        if role.ratio == 1:
            continue
        ring = _align(role.pooled_tokens + SPARE_ROWS, role.ratio)
        halves = 2 if role.overlaps else 1
        pools.append(Pool(layer, "entry", role.ratio, role.pooled_tokens, ring, 2 * halves * shape.head_dim, 0))
        if shape.pools_keys and not role.attends_to_all:
            pools.append(Pool(layer, "key", role.ratio, role.pooled_tokens, ring, 2 * halves * shape.index_dim, 0))
    return pools


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Arena:
    """The memory of pages and slabs, with the tables of rows through which it is read and written.

    A row number counts rows of one width from the arena's start, so one gather reaches window rings, pages, staging
    rows and the row of zeros alike.

    Attributes:
        layout: the byte layout.
        num_pages, num_slabs: sizes of the two runs.
        staging_rows: rows of the prefill staging area.
        rows: dtype[*, head_dim], entries and window rows.
        flat: dtype[*], the same memory number by number, for index keys.
        raw: by width float32[*, width], compressor rows.
        ints: int32[*], ids.
        counts: int16[num_slabs, vocab_size], for requests with penalties: how often each id was generated, and bit 15
            for ids of the prompt. Other requests neither write nor read theirs.
        streams: float32[num_slabs, stream_width], the target's streams at each sequence's last position, for a layer
            that predicts ahead.
        zero_row: number in `rows` of a row that is always zero.
        staging_row: number in `rows` of the first staging row.
    """

    def __init__(
        self, layout: KvLayout, num_pages: int, num_slabs: int, staging_rows: int, *, poison: bool = False
    ) -> None:
        """Allocates on the CPU.

        Args:
            layout: the byte layout.
            num_pages, num_slabs: sizes of the two runs.
            staging_rows: rows that a prefill chunk may stage, its window look-back included.
            poison: fill pages and slabs with NaN, so that a read of something never written shows.
        """
        self.layout = layout
        self.num_pages = num_pages
        self.num_slabs = num_slabs
        self.staging_rows = staging_rows
        unit = math.gcd(layout.page_bytes, layout.slab_bytes)
        self._slabs_at = num_pages * layout.page_bytes
        tail_at = self._slabs_at + num_slabs * layout.slab_bytes
        staging_at = _align(tail_at + layout.page_bytes, layout.window_row_bytes)
        size = _align(staging_at + staging_rows * layout.window_row_bytes, unit)
        # Transfers and wide loads want the runs on a page boundary of the machine.
        buffer = torch.empty(size + 4096, dtype=torch.uint8)
        skip = -buffer.data_ptr() % 4096
        self._bytes = buffer[skip : skip + size]
        self._shared_bytes = tail_at
        self._bytes.zero_()
        if poison:
            self.poison()
        self.rows = self._table(layout.torch_dtype, layout.window_row_bytes)
        self.flat = self._bytes.view(layout.torch_dtype)
        self.raw = {pool.width: self._table(torch.float32, pool.width * 4) for pool in layout.pools}
        self.ints = self._bytes.view(torch.int32)
        counts_at = (self._slabs_at + layout.counts_offset) // 2
        self.counts = self._bytes.view(torch.int16).as_strided(
            (num_slabs, layout.vocab_size), (layout.slab_bytes // 2, 1), skip // 2 + counts_at
        )
        streams_at = (self._slabs_at + layout.streams_offset) // 4
        self.streams = self._bytes.view(torch.float32).as_strided(
            (num_slabs, layout.stream_width), (layout.slab_bytes // 4, 1), skip // 4 + streams_at
        )
        self.zero_row = tail_at // layout.window_row_bytes
        self.staging_row = staging_at // layout.window_row_bytes

    def poison(self) -> None:
        """Fill pages and slabs with NaN (and -1 in ids)."""
        self._bytes[: self._shared_bytes].fill_(POISON)

    def _table(self, dtype: torch.dtype, row_bytes: int) -> Tensor:
        width = row_bytes // dtype.itemsize
        usable = len(self._bytes) // row_bytes * row_bytes
        return self._bytes[:usable].view(dtype).view(-1, width)

    def entry_row(self, plane: Plane) -> tuple[int, int]:
        """(first, stride): rows `first + page_id * stride` and following of `rows` hold the plane of a page."""
        return plane.offset // plane.row_bytes, self.layout.page_bytes // plane.row_bytes

    def key_cell(self, plane: Plane) -> tuple[int, int]:
        """(first, stride): `flat[first + page_id * stride + channel * plane.rows + row]` belongs to an index key."""
        item = self.flat.element_size()
        return plane.offset // item, self.layout.page_bytes // item

    def read_keys(self, plane: Plane, page_ids: Tensor) -> Tensor:
        """Copy the index keys of int64[pages]: dtype[pages, index_dim, rows]."""
        first, stride = self.key_cell(plane)
        size = plane.rows * plane.row_bytes // self.flat.element_size()
        pages = self.flat[first:].as_strided((self.num_pages, size), (stride, 1))
        return pages.index_select(0, page_ids).view(len(page_ids), -1, plane.rows)

    def window_row(self, layer: int) -> tuple[int, int]:
        """(first, stride): row `first + slab * stride + position % ring` of `rows` is a window row of the layer."""
        row_bytes = self.layout.window_row_bytes
        return self._slabs_at // row_bytes + layer * self.layout.ring, self.layout.slab_bytes // row_bytes

    def pool_row(self, pool: Pool) -> tuple[int, int]:
        """(first, stride): row `first + slab * stride + position % pool.ring` of `raw[pool.width]` is in the ring."""
        row_bytes = pool.width * 4
        return (self._slabs_at + pool.offset) // row_bytes, self.layout.slab_bytes // row_bytes

    def id_cell(self) -> tuple[int, int]:
        """(first, stride): cell `first + slab * stride + position % ID_RING` of `ints` is a trailing id."""
        return (self._slabs_at + self.layout.ids_offset) // 4, self.layout.slab_bytes // 4

    def read_sampled(self, slabs: Ints) -> Ints:
        """int64[n], the token that each slab sampled last."""
        return self.ints.numpy()[self._sampled_cells(slabs)].astype(np.int64)

    def write_sampled(self, slabs: Ints, tokens: Ints) -> None:
        """Keeps int64[n] tokens as those that the slabs sampled last."""
        self.ints.numpy()[self._sampled_cells(slabs)] = tokens

    def _sampled_cells(self, slabs: Ints) -> Ints:
        first, stride = (self._slabs_at + self.layout.sampled_offset) // 4, self.layout.slab_bytes // 4
        return first + slabs * stride

    def read_counts(self, slabs: Ints) -> Tensor:
        """int16[n, vocab], a copy of the slabs' counts."""
        return self.counts[slabs]

    def write_count(self, slab: int, counts: Tensor) -> None:
        """int16[vocab] become a slab's counts."""
        self.counts[slab] = counts

    def add_counts(self, slabs: Ints, tokens: Ints) -> None:
        """Each of these slabs, all different, has one more of its token."""
        add_tokens(self.counts, slabs, tokens)

    def page_bytes_of(self, page_id: int) -> Tensor:
        """uint8[page_bytes], a view of one page."""
        start = page_id * self.layout.page_bytes
        return self._bytes[start : start + self.layout.page_bytes]

    def slab_bytes_of(self, slab: int) -> Tensor:
        """uint8[slab_bytes], a view of one slab."""
        start = self._slabs_at + slab * self.layout.slab_bytes
        return self._bytes[start : start + self.layout.slab_bytes]

    @property
    def slabs(self) -> Tensor:
        """uint8[num_slabs, slab_bytes], a view of all slabs."""
        return self._bytes[self._slabs_at : self._shared_bytes].view(self.num_slabs, self.layout.slab_bytes)

    def block_runs(self) -> tuple[BlockRun, BlockRun]:
        """The run of pages, then the run of slabs. The memory lives as long as this object."""
        address = self._bytes.data_ptr()
        layout = self.layout
        return (
            BlockRun(address, layout.page_bytes, self.num_pages),
            BlockRun(address + self._slabs_at, layout.slab_bytes, self.num_slabs),
        )
