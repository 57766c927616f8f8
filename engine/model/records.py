"""Records: where every byte of a sequence's state lies in an arena on a device, as the kernels read it.

The same parts as in `kv.py` (pages with the entries and index keys of every layer, contiguous across layers; slabs with
window rings and rings of raw compressor rows), but records are fp8 by default and lie in *planes*: the data of all
records of one kind in a block, then their scales, each a multiple of 128 bytes, so that 16-byte loads and bulk copies
work everywhere. The arena is one tensor: the run of pages, then the run of slabs. Every layer's planes are made once,
with offsets from the arena's start, and handed to kernels as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.kv import ID_RING, PLANE_ALIGN, SPARE_ROWS, Pool, plan_layout
from engine.model.shapes import ModelShape
from kernels.forms import SCALE_CHANNELS, IdRing, Plane, RawRing, RecordFormat, StreamPlace


@dataclasses.dataclass(frozen=True)
class LayerRecords:
    """What one layer reads and writes in the arena.

    Attributes:
        window: its window ring, in slabs.
        entries: compressed entries in pages, its own or its source's; None for a layer that sees its window only.
        keys: index keys in pages; None where nothing is selected.
        entry_ring: raw rows that its entries are pooled from; None where it makes none.
        key_ring: raw rows that its index keys are pooled from; None where it makes none, or projects them.
    """

    window: Plane
    entries: Plane | None
    keys: Plane | None
    entry_ring: RawRing | None
    key_ring: RawRing | None


@dataclasses.dataclass(frozen=True)
class Records:
    """The layout of one arena.

    Attributes:
        format: of entries, keys and window records; raw rows are float32.
        page_tokens: tokens in a page.
        page_bytes, slab_bytes: sizes of the blocks.
        num_pages, num_slabs: lengths of the two runs.
        layers: of the target.
        stages: window rings of the layers or stages that draft.
        counts: bytes from a slab's start to int16[vocab], what was seen of each id (see `kv.Arena.counts`).
        staging: where a prompt's rows go while it is computed (see `plan_records`); empty without staging rows.
        staging_bytes: size of the block behind the slabs that holds it.
        streams: where the target's streams at the last position lie; None without a layer that predicts ahead.
        staging_stages: `stages` in that block.
        ids, staging_ids: trailing ids in slabs and in that block; None for a model without an n-gram memory.
    """

    format: RecordFormat
    page_tokens: int
    page_bytes: int
    slab_bytes: int
    num_pages: int
    num_slabs: int
    layers: tuple[LayerRecords, ...]
    stages: tuple[Plane, ...]
    counts: int = 0
    staging: tuple[LayerRecords, ...] = ()
    staging_bytes: int = 0
    streams: StreamPlace | None = None
    staging_stages: tuple[Plane, ...] = ()
    ids: IdRing | None = None
    staging_ids: IdRing | None = None

    @property
    def slabs_at(self) -> int:
        """Bytes from the arena's start to the run of slabs."""
        return self.num_pages * self.page_bytes

    @property
    def num_bytes(self) -> int:
        """Of the arena."""
        return self.slabs_at + self.num_slabs * self.slab_bytes + self.staging_bytes

    def staged(self) -> Records:
        """The same arena as a step with a prompt's rows sees it: slab 0 is the private block."""
        return dataclasses.replace(self, layers=self.staging, stages=self.staging_stages, ids=self.staging_ids)

    def make_arena(self, device: torch.device) -> Tensor:
        """uint8[num_bytes]; what is in it is undefined."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)


@dataclasses.dataclass
class _Cursor:
    """Places parts in a block, one after the other."""

    start: int
    stride: int = 0
    offset: int = 0

    def take(self, num_bytes: int) -> int:
        """Bytes from the arena's start to a part of so many bytes in block 0."""
        at = self.start + self.offset
        self.offset = _align(self.offset + num_bytes)
        return at


def plan_records(
    shape: ModelShape,
    *,
    page_tokens: int,
    num_pages: int,
    num_slabs: int,
    format: RecordFormat = "fp8",
    staging_rows: int = 0,
) -> Records:
    """Lay out an arena.

    Rings have room for SPARE_ROWS positions beyond what is read, so for the rows of a decode or verify step. A prompt's
    rows come many at a time: they go round the longer rings of a private block, and the slab gets its part afterwards.

    Args:
        shape: the model.
        page_tokens: tokens in a page.
        num_pages, num_slabs: sizes of the two runs.
        format: of entries, keys and window records.
        staging_rows: positions of a prompt that a step may compute at a time; 0 for no private block.

    Raises:
        ConfigError: `page_tokens` is not a multiple of every compression ratio, or a record can not have the format.
    """
    layout = plan_layout(shape, page_tokens)
    pools = {(pool.layer, pool.kind): pool for pool in layout.pools}
    entry = _record(shape.head_dim, shape.rope_dim, format)
    key = _record(shape.index_dim, 0, format)
    # Twice: strides are known once all parts of a block are placed.
    strides = (0, 0)
    for _ in range(2):
        pages, slabs = _Cursor(0, strides[0]), _Cursor(num_pages * strides[0], strides[1])
        planes: dict[tuple[int, str], Plane] = {}
        for kind, record, sources in (("entry", entry, shape.kv_sources), ("key", key, shape.key_sources)):
            for layer in sources:
                rows = page_tokens // shape.layer_roles[layer].ratio
                planes[layer, kind] = _place(record, rows, pages)
        num_windows = shape.num_layers + shape.num_draft_layers
        windows = [_place(entry, shape.window + SPARE_ROWS, slabs) for _ in range(num_windows)]
        rings = {name: _place_ring(pool, pool.ring, slabs) for name, pool in pools.items()}
        ids = _place_ids(shape, ID_RING, slabs)
        counts = slabs.take(2 * shape.vocab_size) - slabs.start
        streams = None
        if shape.num_predict_layers:
            streams = StreamPlace(slabs.take(4 * shape.stream_width), slabs.stride)
        strides = (max(pages.offset, PLANE_ALIGN), slabs.offset)
    layers = _layers(shape, planes, windows, rings)
    private = _Cursor(num_pages * strides[0] + num_slabs * strides[1])
    staging: tuple[LayerRecords, ...] = ()
    staging_stages: tuple[Plane, ...] = ()
    staging_ids: IdRing | None = None
    if staging_rows:
        # One block: what is a stride between blocks is never used.
        longer = [_place(entry, shape.window + staging_rows, private) for _ in range(num_windows)]
        long_rings = {
            name: _place_ring(pool, _align(pool.pooled + staging_rows, pool.ratio), private)
            for name, pool in pools.items()
        }
        staging = _layers(shape, planes, longer, long_rings)
        staging_stages = tuple(longer[shape.num_layers :])
        staging_ids = _place_ids(shape, staging_rows + ID_RING, private)
    return Records(
        format=format,
        page_tokens=page_tokens,
        page_bytes=strides[0],
        slab_bytes=strides[1],
        num_pages=num_pages,
        num_slabs=num_slabs,
        layers=layers,
        stages=tuple(windows[shape.num_layers :]),
        counts=counts,
        staging=staging,
        staging_bytes=private.offset,
        streams=streams,
        staging_stages=staging_stages,
        ids=ids,
        staging_ids=staging_ids,
    )


def _layers(
    shape: ModelShape,
    planes: dict[tuple[int, str], Plane],
    windows: list[Plane],
    rings: Mapping[tuple[int, Literal["entry", "key"]], RawRing],
) -> tuple[LayerRecords, ...]:
    layers = []
    for role in shape.layer_roles:
        source = role.index if role.kv_source is None else role.kv_source
        selects = role.ratio > 0 and not role.attends_to_all
        layers.append(
            LayerRecords(
                window=windows[role.index],
                entries=planes[source, "entry"] if role.ratio else None,
                keys=planes[source, "key"] if selects else None,
                entry_ring=rings.get((role.index, "entry")),
                key_ring=rings.get((role.index, "key")),
            )
        )
    return tuple(layers)


def _record(width: int, rope: int, format: RecordFormat) -> Plane:
    """A record, not placed."""
    if format != "fp8":
        data_bytes, scale_bytes = width * (4 if format == "fp32" else 2), 0
    elif rope == 0:
        data_bytes, scale_bytes = width, 4
    else:
        still = width - rope
        if still % SCALE_CHANNELS:
            raise ConfigError(
                f"fp8 records need a multiple of {SCALE_CHANNELS} channels that are not rotated, found {still}; use "
                "bf16 records"
            )
        data_bytes, scale_bytes = still + 2 * rope, _align(still // SCALE_CHANNELS, 8)
    if data_bytes % 16:
        raise ConfigError(f"{format} records of {width} channels must be a multiple of 16 bytes, found {data_bytes}")
    return Plane(0, 0, 0, 0, width, rope, format, data_bytes, scale_bytes)


def _place_ring(pool: Pool, rows: int, cursor: _Cursor) -> RawRing:
    return RawRing(cursor.take(rows * pool.width * 4), cursor.stride, rows, pool.width)


def _place_ids(shape: ModelShape, rows: int, cursor: _Cursor) -> IdRing | None:
    if shape.engram is None:
        return None
    if shape.engram.max_ngram - 1 + SPARE_ROWS > ID_RING:
        raise ConfigError(
            f"an n-gram memory may look at {ID_RING - SPARE_ROWS} earlier ids, found {shape.engram.max_ngram - 1}"
        )
    return IdRing(cursor.take(rows * 4), cursor.stride, rows)


def _place(record: Plane, rows: int, cursor: _Cursor) -> Plane:
    data = cursor.take(rows * record.data_bytes)
    scale = cursor.take(rows * record.scale_bytes)
    return dataclasses.replace(record, data=data, scale=scale, stride=cursor.stride, rows=rows)


def _align(value: int, unit: int = PLANE_ALIGN) -> int:
    return -(-value // unit) * unit
