"""Attention of the decode step: rows over their windows, their compressed entries and a sink, rotation undone.

One record is key and value of all heads, so a program takes a block of heads of one row and reads each record once.
A row's records, its window first and its entries after, are cut into splits by its own length alone; partial results of
splits are added in order. So the result of a row depends on no other row, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_records import find_entries, find_records, load_keys, prefetch_records
from kernels.attention_splits import (
    LEAST_TILES,
    LOG2_E,
    OWN_ADD_HEADS,
    add,
    add_splits,
    count_splits,
    measure_row,
    place_splits,
    store_half,
    turn_back,
)  # fmt: skip
from kernels.forms import SCALE_CHANNELS, Plane, RecordFormat, StepRows

KEYS = 64
"""Records of a tile."""
SPREAD = 2
"""A row of t tiles has splits of about sqrt(t / SPREAD) tiles: each split costs its partial result's way to memory."""

SINGLE = 8
"""Up to so many tiles of a row each is a split of its own."""
LEAST_FP8_KEYS = 32
"""For fp8 records: with 16 and fewer than 64 heads Triton 3.6 multiplies the wrong channels (measured)."""

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which holds bf16 as integers and can not calculate with it."""
FORMATS = {"fp32": 0, "bf16": 1, "fp8": 2}


@dataclasses.dataclass(frozen=True)
class Config:
    """How programs are cut. `keys`, `spread`, `single` and `partials` change how a row's sums are rounded, and so does
    `heads` below 64, where another matrix instruction is taken (measured): they may not follow the number of rows. The
    others change no bit of the result.

    Attributes:
        heads: of a program, a power of two of at least 16.
        warps: of a program.
        stages: of the pipeline that loads records.
        programs: at most, as long as a row has one for each block of heads; its splits are dealt out to them.
        overlaps: whether both kernels are launched while those before them drain (programmatic dependent launch).
        keys, spread, single: see KEYS, SPREAD and SINGLE.
        partials: type of a split's result. It is a mean of records, so float16 rounds it four times finer than bf16
            rounds the sum, and halves what splits cost.
    """

    heads: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 132
    overlaps: bool = not INTERPRETED
    keys: int = KEYS
    spread: int = SPREAD
    single: int = SINGLE
    partials: torch.dtype = torch.float16


def choose_config(heads: int, dtype: torch.dtype, format: RecordFormat) -> Config:
    """The default. 64 heads are the least that the matrix units take at once; two tiles must be on their way beside it.

    float32 is for tests against an oracle only.
    """
    if dtype == torch.float32 or heads <= 32:
        partials = torch.float32 if dtype == torch.float32 else torch.float16
        return Config(heads=16, warps=4, stages=1, keys=LEAST_FP8_KEYS if format == "fp8" else 16, partials=partials)
    return Config() if format == "fp8" else Config(keys=32)


@triton.jit(
    do_not_specialize=[
        "ring_data", "ring_scale", "entry_data", "entry_scale", "table_pages", "span", "spread", "single",
        "room", "parts",
    ]
)  # fmt: skip
def _attend_kernel(
    query_ptr, sink_ptr, turns_ptr, positions_ptr, slabs_ptr, table_ptr, selected_ptr,
    arena8_ptr, arena16_ptr, arena32_ptr, arena64_ptr, out_ptr, partial_ptr, stats_ptr,
    ring_data, ring_scale, ring_stride, entry_data, entry_scale, entry_stride, table_pages, span, spread, single,
    room, parts,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, RING_ROWS: tl.constexpr, PAGE_ROWS: tl.constexpr, RATIO: tl.constexpr,
    HAS_ENTRIES: tl.constexpr, SELECTS: tl.constexpr, TOP_K: tl.constexpr,
    FORMAT: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
    ROOM: tl.constexpr, PADDED: tl.constexpr, ADD_BLOCK: tl.constexpr, DOT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some splits of one row for BLOCK heads: part z of `parts` as equal as can be.

    Planes' offsets come in units of 16 bytes. There is room for `room` partial results of a row; SPLITS says whether a
    row may have more than one. ROOM is the same where this program, having all of them, adds them up, else 0.
    """
    A: tl.constexpr = query_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DOT else "tf32"
    GROUPS: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    STILL: tl.constexpr = WIDTH - ROPE
    STILL_SLOTS: tl.constexpr = (STILL + 63) // 64 * 64
    CHUNKS: tl.constexpr = PADDED // 64
    TOP_K_PADDED: tl.constexpr = triton.next_power_of_2(TOP_K)
    row = tl.program_id(0) // GROUPS
    first_head = tl.program_id(0) % GROUPS * BLOCK
    # All that does not follow from a position is fetched beside it, though some programs will have nothing to do.
    position = tl.load(positions_ptr + row)
    sequence = row // span
    slab = tl.load(slabs_ptr + sequence).to(tl.int64)
    head = first_head + tl.arange(0, BLOCK)
    head_mask = head < HEADS
    # Channels as chunks lie: those that are not rotated, filled up to whole chunks, then the others.
    slot = tl.arange(0, PADDED)
    channel = tl.where(slot < STILL_SLOTS, slot, slot - (STILL_SLOTS - STILL))
    mask = head_mask[:, None] & ((slot < STILL) | ((slot >= STILL_SLOTS) & (slot < STILL_SLOTS + ROPE)))[None, :]
    place = head[:, None] * WIDTH + channel[None, :]
    sink = tl.load(sink_ptr + head, mask=head_mask, other=0.0) * LOG2_E
    seen, bound = measure_row(position, WINDOW, RATIO, TOP_K, SELECTS, HAS_ENTRIES)
    tiles, splits = place_splits(bound, spread, single, KEYS, LEAST)
    first_split = tl.program_id(1) * splits // parts
    last_split = (tl.program_id(1) + 1) * splits // parts
    if first_split == last_split:
        return
    ring_data += slab * ring_stride
    ring_scale += slab * ring_stride
    table_ptr += sequence.to(tl.int64) * table_pages
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        # Records of the first tile go to the L2 while the kernel before ends. Those of this step may not be there yet:
        # what is written later changes what the L2 holds.
        if not SELECTS or (position + 1) // RATIO <= TOP_K:
            start = first_split * tiles // splits * KEYS
            base, _ = find_records(start, start + tl.arange(0, KEYS) - seen, seen, bound, position, ring_data,
                                   ring_scale, entry_data, entry_scale, entry_stride, table_ptr, HAS_ENTRIES, RING_ROWS,
                                   PAGE_ROWS, DATA_BYTES, SCALE_BYTES, ALIGN, KEYS)  # fmt: skip
            prefetch_records(arena8_ptr, base * ALIGN, DATA_BYTES)
        tl.extra.cuda.gdc_wait()
    query = tl.load(query_ptr + row.to(tl.int64) * (HEADS * WIDTH) + place, mask=mask, other=0.0).to(DOT)
    out_ptr += row.to(tl.int64) * (HEADS * WIDTH)
    if SELECTS:
        selected_ptr += row.to(tl.int64) * TOP_K
        k = tl.arange(0, TOP_K_PADDED)
        chosen = tl.load(selected_ptr + k, mask=k < TOP_K, other=-1)
    length = bound
    if SELECTS:
        length = seen + tl.sum((chosen >= 0).to(tl.int32), 0)

    next_tile = first_split * tiles // splits
    for split in range(first_split, last_split):
        # Less than any logit, but not infinite: where nothing is seen, nothing must become infinity minus infinity.
        top = tl.full((BLOCK,), -1.0e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        acc = tl.zeros((BLOCK, PADDED), tl.float32)
        # Three loads follow from one another: an entry, its page, its record. Each is issued while the records before
        # are worked on, as far ahead as the next one needs.
        start = next_tile * KEYS
        next_tile = (split + 1) * tiles // splits
        end = tl.minimum(next_tile * KEYS, bound)
        entry = find_entries(start, seen, bound, selected_ptr, SELECTS, KEYS)
        next_entry = find_entries(start + KEYS, seen, bound, selected_ptr, SELECTS, KEYS)
        base, scale_at = find_records(start, entry, seen, bound, position, ring_data, ring_scale, entry_data,
                                      entry_scale, entry_stride, table_ptr, HAS_ENTRIES, RING_ROWS, PAGE_ROWS,
                                      DATA_BYTES, SCALE_BYTES, ALIGN, KEYS)  # fmt: skip
        for first in range(start, end, KEYS):
            scales = tl.load(arena64_ptr + scale_at) if FORMAT == 2 else scale_at
            keys = load_keys(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, CHUNKS, STILL, ROPE, FORMAT, ALIGN,
                             KEYS, DOT)  # fmt: skip
            base, scale_at = find_records(first + KEYS, next_entry, seen, bound, position, ring_data, ring_scale,
                                          entry_data, entry_scale, entry_stride, table_ptr, HAS_ENTRIES, RING_ROWS,
                                          PAGE_ROWS, DATA_BYTES, SCALE_BYTES, ALIGN, KEYS)  # fmt: skip
            next_entry = find_entries(first + 2 * KEYS, seen, bound, selected_ptr, SELECTS, KEYS)
            live = first + tl.arange(0, KEYS) < length
            # Always so. Triton gives each warp whole rows of a product that another one follows, and where there are
            # more warps than rows the rest repeat the work; in a branch it does not see what follows.
            if position >= 0:
                logits = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
                logits = tl.where(live[None, :], logits * (SCALE * LOG2_E), float("-inf"))
                new_top = tl.maximum(top, tl.max(logits, 1))
                decay = tl.exp2(top - new_top)
                p = tl.exp2(logits - new_top[:, None])
                total = total * decay + tl.sum(p, 1)
                top = new_top
                weights = p.to(A).to(DOT)
            else:
                decay = tl.full((BLOCK,), 1.0, tl.float32)
                weights = tl.zeros((BLOCK, KEYS), DOT)
            acc = tl.dot(weights, keys, acc * decay[:, None], input_precision=PRECISION)

        if not SPLITS or splits == 1:
            final = tl.maximum(top, sink)
            weight = tl.exp2(top - final)
            total = tl.exp2(sink - final) + weight * total
            acc = acc * weight[:, None] * (1.0 / total)[:, None]
            acc = turn_back(acc, turns_ptr, position, STILL_SLOTS, ROPE, BLOCK, PADDED)
            tl.store(out_ptr + place, acc.to(A), mask=mask)
        elif SPLITS:
            part = row.to(tl.int64) * room + split
            acc = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
            # In halves, every second chunk in each: a whole one would take 128 KiB of shared memory on its way.
            chunks = tl.reshape(acc, (BLOCK, CHUNKS // 2, 2, 64))
            even, odd = tl.split(tl.permute(chunks, (0, 1, 3, 2)))
            part_ptr = partial_ptr + part * (HEADS * WIDTH)
            store_half(part_ptr, even, head, 0, HEADS, WIDTH, ROPE, BLOCK, PADDED)
            store_half(part_ptr, odd, head, 64, HEADS, WIDTH, ROPE, BLOCK, PADDED)
            tl.store(stats_ptr + part * (2 * HEADS) + head, top, mask=head_mask)
            tl.store(stats_ptr + part * (2 * HEADS) + HEADS + head, total, mask=head_mask)

    if ROOM > 0:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if splits > 1:
            tl.debug_barrier()
            for head_block in range(first_head, first_head + BLOCK, ADD_BLOCK):
                add_splits(partial_ptr, stats_ptr, sink_ptr, turns_ptr, out_ptr, row, position, splits, head_block,
                           ROOM, HEADS, ADD_BLOCK, WIDTH, ROPE)  # fmt: skip


def attend(
    query: Tensor,
    sink: Tensor,
    turns: Tensor,
    rows: StepRows,
    arena: Tensor,
    ring: Plane,
    window: int,
    entries: Plane | None = None,
    ratio: int = 0,
    selected: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """See `kernels.reference.attend`.

    Beyond it: `query` and `selected` must be contiguous, entries in the ring's format.

    Args:
        config: how programs are cut; None for the default.

    Raises:
        ValueError: records that it has no tiles for.
    """
    heads, width = query.shape[1:]
    config = config or choose_config(heads, query.dtype, ring.format)
    plane = ring if entries is None else entries
    if (ring.format, ring.width, ring.rope) != (plane.format, plane.width, plane.rope) or width != ring.width:
        raise ValueError(f"ring and entries must hold the same records of {width} channels, found {ring} and {entries}")
    still = width - ring.rope
    if ring.format == "fp8" and (still % SCALE_CHANNELS or still > 8 * SCALE_CHANNELS or ring.scale_bytes % 8):
        raise ValueError(f"fp8 records need at most 8 whole groups of {SCALE_CHANNELS} scaled channels, found {ring}")
    if ring.format == "fp8" and config.keys < LEAST_FP8_KEYS:
        raise ValueError(f"fp8 records need tiles of at least {LEAST_FP8_KEYS} keys, found {config.keys}")
    if _padded(ring) > 512 or ring.rope > 64:
        raise ValueError(f"records have at most 448 channels and 64 rotated ones, found {ring}")
    out = torch.empty_like(query)
    for own, part in rows.parts():
        chosen = None if selected is None else selected[own]
        _launch(query[own], sink, turns, part, arena, ring, plane, window, entries, ratio, chosen, config, out[own])
    return out


def _padded(ring: Plane) -> int:
    """Channels of a record as whole chunks, those that are rotated in one of their own."""
    return 64 * max(2, triton.next_power_of_2(math.ceil((ring.width - ring.rope) / 64) + 1))


def _launch(
    query: Tensor, sink: Tensor, turns: Tensor, rows: StepRows, arena: Tensor, ring: Plane, plane: Plane, window: int,
    entries: Plane | None, ratio: int, selected: Tensor | None, config: Config, out: Tensor,
) -> None:  # fmt: skip
    """Fills `out`."""
    count, heads, width = query.shape
    top_k = selected.shape[1] if selected is not None else 0
    pages = rows.tables.shape[1]
    capacity = window
    if entries is not None:
        capacity += pages * entries.rows if selected is None else min(top_k, pages * entries.rows)
    splits = count_splits(math.ceil(capacity / config.keys), config.spread, config.single)
    block = config.heads
    groups = math.ceil(heads / block)
    parts = max(1, min(splits, config.programs // (count * groups)))
    partial = stats = out
    if splits > 1:
        partial = torch.empty((count, splits, heads, width), dtype=config.partials, device=query.device)
        stats = torch.empty((count, splits, 2, heads), dtype=torch.float32, device=query.device)
    sizes = {
        "HEADS": heads, "WIDTH": width, "ROPE": ring.rope, "WINDOW": window, "RATIO": max(ratio, 1),
        "SELECTS": selected is not None, "TOP_K": top_k, "HAS_ENTRIES": entries is not None, "KEYS": config.keys,
        "LEAST": LEAST_TILES,
    }  # fmt: skip
    padded = _padded(ring)
    whole = arena[: arena.numel() // 8 * 8]
    dot = tl.float32 if INTERPRETED or query.dtype == torch.float32 else tl.bfloat16
    _attend_kernel[(count * groups, parts)](
        query, sink, turns, rows.positions, rows.slabs, rows.tables, selected if selected is not None else rows.tables,
        arena, whole.view(torch.bfloat16), whole.view(torch.float32), whole.view(torch.int64), out, partial, stats,
        ring.data // 16, ring.scale // 16, ring.stride // 16,
        plane.data // 16, plane.scale // 16, plane.stride // 16, pages,
        rows.span, config.spread, config.single, splits, parts,
        SCALE=width**-0.5, RING_ROWS=ring.rows, PAGE_ROWS=plane.rows,
        FORMAT=FORMATS[ring.format], DATA_BYTES=ring.data_bytes, SCALE_BYTES=ring.scale_bytes,
        ALIGN=math.gcd(ring.data_bytes, 16), BLOCK=block,
        SPLITS=splits > 1, ROOM=splits if 1 == parts < splits else 0, PADDED=padded,
        ADD_BLOCK=min(block, OWN_ADD_HEADS), DOT=dot, OVERLAPS=config.overlaps,
        num_warps=config.warps, num_stages=config.stages, **({"launch_pdl": True} if config.overlaps else {}), **sizes,
    )  # fmt: skip
    if parts > 1:
        sizes |= {"spread": config.spread, "single": config.single}
        add(partial, stats, sink, turns, rows.positions, out, overlaps=config.overlaps, sizes=sizes)
