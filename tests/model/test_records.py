"""The arena of a device: sizes of its blocks, and that no two records share a byte."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch

from engine.errors import ConfigError
from engine.model.kv import PLANE_ALIGN, SPARE_ROWS, plan_layout
from engine.model.records import Records, plan_records
from engine.model.shapes import ModelShape, shape_from_config
from kernels.forms import RecordFormat
from kernels.reference import load_record, store_record
from tests.model.conftest import ORACLE
from tests.model.paged_cases import smallest_page
from tests.model.step_cases import flash_shape


def parts(records: Records, *, in_pages: bool) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each part of block 0, counted from the arena's start."""
    planes = {plane for layer in records.layers for plane in (layer.entries, layer.keys) if plane is not None}
    if not in_pages:
        planes = {layer.window for layer in records.layers} | set(records.stages)
        rings = {ring for layer in records.layers for ring in (layer.entry_ring, layer.key_ring) if ring is not None}
        for ring in rings:
            assert ring.stride == records.slab_bytes
            yield ring.data, ring.rows * ring.width * 4
        shape = flash_shape()
        yield records.slabs_at + records.counts, 2 * shape.vocab_size
        assert records.streams is not None and records.streams.stride == records.slab_bytes
        yield records.streams.data, 4 * shape.stream_width
    for plane in planes:
        assert plane.stride == (records.page_bytes if in_pages else records.slab_bytes)
        yield plane.data, plane.rows * plane.data_bytes
        yield plane.scale, plane.rows * plane.scale_bytes


def test_a_private_block_has_no_byte_twice_and_ends_with_the_arena() -> None:
    shape = flash_shape()
    records = plan_records(shape, page_tokens=256, num_pages=3, num_slabs=2, staging_rows=256)
    found = []
    for role, near, far in zip(shape.layer_roles, records.layers, records.staging, strict=True):
        assert (far.entries, far.keys) == (near.entries, near.keys)
        assert far.window.rows == shape.window + 256
        found += [
            (far.window.data, far.window.rows * far.window.data_bytes),
            (far.window.scale, far.window.rows * far.window.scale_bytes),
        ]
        for ring, long in ((near.entry_ring, far.entry_ring), (near.key_ring, far.key_ring)):
            assert (ring is None) == (long is None)
            if ring is not None and long is not None:
                assert long.width == ring.width and long.rows >= role.pooled_tokens + 256
                found.append((long.data, long.rows * long.width * 4))
    for far in records.staging_stages:
        assert far.rows == shape.window + 256
        found += [(far.data, far.rows * far.data_bytes), (far.scale, far.rows * far.scale_bytes)]
    end = records.slabs_at + records.num_slabs * records.slab_bytes
    for first, num_bytes in sorted(found):
        assert first % PLANE_ALIGN == 0 and first >= end
        end = first + num_bytes
    assert end <= records.num_bytes


def tiny_shape(name: str) -> ModelShape:
    return shape_from_config(json.loads((ORACLE / name / "config.json").read_text()))


def test_a_page_of_v4_flash_has_the_bytes_that_were_planned() -> None:
    shape = flash_shape()
    records = plan_records(shape, page_tokens=256, num_pages=3, num_slabs=2)
    assert records.page_bytes == 987_904 == 21 * (37_376 + 8_448) + 20 * 1_280
    first, second = records.layers[2], records.layers[3]
    assert first.entries is not None and first.keys is not None and second.entries is not None
    assert (first.entries.data_bytes, first.entries.scale_bytes, first.entries.rows) == (576, 8, 64)
    assert (first.keys.data_bytes, first.keys.scale_bytes, first.keys.rows) == (128, 4, 64)
    assert (second.entries.rows, second.keys) == (2, None)
    assert records.layers[0].entries is None and records.layers[0].entry_ring is None
    assert first.window.rows == 128 + SPARE_ROWS
    assert len(records.layers) == 43 and len(records.stages) == 1
    assert records.num_bytes == 3 * records.page_bytes + 2 * records.slab_bytes


@pytest.mark.parametrize("format", ["fp8", "bf16", "fp32"])
def test_parts_of_a_block_lie_apart_and_on_whole_lines(format: RecordFormat) -> None:
    records = plan_records(flash_shape(), page_tokens=256, num_pages=5, num_slabs=3, format=format)
    for in_pages, start, size in ((True, 0, records.page_bytes), (False, 5 * records.page_bytes, records.slab_bytes)):
        end = start
        for first, num_bytes in sorted(part for part in parts(records, in_pages=in_pages) if part[1]):
            assert first % PLANE_ALIGN == 0 and first >= end
            end = first + num_bytes
        assert end <= start + size
        # Nothing but the padding of the parts.
        assert sum(-(-n // PLANE_ALIGN) * PLANE_ALIGN for _, n in parts(records, in_pages=in_pages)) == size


@pytest.mark.parametrize("name", ["v4-tiny", "v4-tiny-fast", "v41-tiny"])
def test_rings_of_raw_rows_are_those_of_the_cpu_arena(name: str) -> None:
    shape = tiny_shape(name)
    page_tokens = smallest_page(shape)
    records = plan_records(shape, page_tokens=page_tokens, num_pages=4, num_slabs=2, format="bf16")
    pools = {(pool.layer, pool.kind): (pool.ring, pool.width) for pool in plan_layout(shape, page_tokens).pools}
    found = {}
    for number, layer in enumerate(records.layers):
        for kind, ring in (("entry", layer.entry_ring), ("key", layer.key_ring)):
            if ring is not None:
                found[number, kind] = (ring.rows, ring.width)
    assert found == pools
    for role, layer in zip(shape.layer_roles, records.layers, strict=True):
        source = records.layers[role.index if role.kv_source is None else role.kv_source]
        assert layer.entries == source.entries
        assert (layer.keys is None) == (role.ratio == 0 or role.attends_to_all)


def test_every_record_can_be_written_and_read_back_beside_all_others() -> None:
    shape = dataclasses.replace(flash_shape(), num_layers=4, layer_roles=flash_shape().layer_roles[:4])
    records = plan_records(shape, page_tokens=128, num_pages=2, num_slabs=2)
    arena = records.make_arena(torch.device("cpu")).fill_(0xFF)
    generator = torch.Generator().manual_seed(1)
    written = []
    for layer in records.layers:
        for plane in (layer.window, layer.entries, layer.keys):
            for block in range(2 if plane is not None else 0):
                assert plane is not None
                for row in {0, plane.rows - 1}:
                    record = torch.randn(plane.width, generator=generator)
                    store_record(arena, plane, block, row, record)
                    written.append((plane, block, row, record))
    for plane, block, row, record in written:
        # e4m3 keeps three bits behind the point: at most a sixteenth off, on top of a power of two as scale.
        assert ((load_record(arena, plane, block, row) - record).norm() / record.norm()) < 0.04


def test_what_can_not_be_laid_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 64 channels that are not rotated, found 48; use bf16"):
        plan_records(tiny_shape("v4-tiny"), page_tokens=128, num_pages=1, num_slabs=1)
    with pytest.raises(ConfigError, match="page_tokens must be a multiple of 128"):
        plan_records(flash_shape(), page_tokens=64, num_pages=1, num_slabs=1)
