"""Records as operands of attention: where those that a row sees lie, and their channels, ready to be multiplied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_entries(
    start, seen, bound, selected_ptr, SELECTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """int32[KEYS]: entries in places start .. of a row's records. Places past the last have some entry of the row."""
    index = tl.minimum(start + tl.arange(0, KEYS), bound - 1)
    if not SELECTS:
        return index - seen
    return tl.load(selected_ptr + index - seen, mask=index >= seen, other=0)


@triton.jit
def find_records(
    start, entry, seen, bound, position, ring_data, ring_scale, entry_data, entry_scale, entry_stride, table_ptr,
    HAS_ENTRIES: tl.constexpr, RING_ROWS: tl.constexpr, PAGE_ROWS: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, ALIGN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """int64[KEYS] twice: where the data of records start .. lie, in units of ALIGN bytes, and their words of scales."""
    index = tl.maximum(tl.minimum(start + tl.arange(0, KEYS), bound - 1), 0)
    slot = ((tl.maximum(position - seen + 1, 0) + index) % RING_ROWS).to(tl.int64)
    base = ring_data * (16 // ALIGN) + slot * (DATA_BYTES // ALIGN)
    scale = ring_scale * 2 + slot * (SCALE_BYTES // 8)
    if HAS_ENTRIES:
        is_entry = index >= seen
        # A place that selects nothing reads entry 0, which exists where there are places, and gets no weight.
        entry = tl.maximum(entry, 0)
        page = tl.load(table_ptr + entry // PAGE_ROWS, mask=is_entry, other=0).to(tl.int64)
        slot = (entry % PAGE_ROWS).to(tl.int64)
        at = (entry_data + page * entry_stride) * (16 // ALIGN) + slot * (DATA_BYTES // ALIGN)
        base = tl.where(is_entry, at, base)
        at = (entry_scale + page * entry_stride) * 2 + slot * (SCALE_BYTES // 8)
        scale = tl.where(is_entry, at, scale)
    return base, scale


@triton.jit
def prefetch_records(arena8_ptr, at, DATA_BYTES: tl.constexpr):
    """Ask for the lines of records int64[KEYS], bytes from the arena's start."""
    LINES: tl.constexpr = triton.next_power_of_2((DATA_BYTES + 127) // 128)
    line = tl.minimum(tl.arange(0, LINES) * 128, DATA_BYTES - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(arena8_ptr + at)[:, None] + line[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_chunk(
    arena8_ptr, arena16_ptr, arena32_ptr, base, scales, CHUNK: tl.constexpr, STILL: tl.constexpr, ROPE: tl.constexpr,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """DOT[KEYS, 64]: chunk number CHUNK of the records at `base` units of ALIGN bytes, with their words of scales.

    Chunks hold 64 channels that are not rotated, the last of them maybe fewer; then one holds all that are.
    """
    STILL_CHUNKS: tl.constexpr = (STILL + 63) // 64
    channel = tl.arange(0, 64)
    if CHUNK < STILL_CHUNKS:
        FIRST: tl.constexpr = CHUNK * 64
        COUNT: tl.constexpr = min(64, STILL - CHUNK * 64)
    else:
        FIRST: tl.constexpr = STILL
        COUNT: tl.constexpr = ROPE if CHUNK == STILL_CHUNKS else 0
    if FORMAT == 0:
        at = arena32_ptr + (base * (ALIGN // 4))[:, None] + (FIRST + channel)[None, :]
    elif FORMAT == 1:
        at = arena16_ptr + (base * (ALIGN // 2))[:, None] + (FIRST + channel)[None, :]
    elif CHUNK < STILL_CHUNKS:
        at = arena8_ptr + (base * ALIGN)[:, None] + (FIRST + channel)[None, :]
    else:
        at = arena16_ptr + (base * (ALIGN // 2))[:, None] + (FIRST // 2 + channel)[None, :]
    if COUNT == 64:
        raw = tl.load(at)
    else:
        raw = tl.load(at, mask=(channel < COUNT)[None, :], other=0)
    if raw.dtype != tl.uint8:
        values = raw.to(DOT)
    else:
        values = raw.to(tl.float8e4nv, bitcast=True)
        byte = (scales >> (8 * CHUNK)).to(tl.int32) & 255
        # A power of two is its exponent's bits. Byte 0, 2^-127, becomes 0, which is as near as sums can tell.
        if tl.float32 == DOT:
            values = values.to(tl.float32) * (byte << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            # By way of float16 and float32: the direct way is one F2F for each element, of which a multiprocessor does
            # 16 in a cycle.
            values = values.to(tl.float16).to(tl.float32).to(tl.bfloat16)
            values = values * (byte << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    return values


@triton.jit
def _beside(left, right, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """[KEYS, 2 * SIZE] of two [KEYS, SIZE]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (KEYS, 2 * SIZE))


@triton.jit
def load_keys(
    arena8_ptr, arena16_ptr, arena32_ptr, base, scales, CHUNKS: tl.constexpr, STILL: tl.constexpr, ROPE: tl.constexpr,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """DOT[KEYS, 64 * CHUNKS]: the chunks of records side by side."""
    k0 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 0, STILL, ROPE, FORMAT, ALIGN, DOT)
    k1 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 1, STILL, ROPE, FORMAT, ALIGN, DOT)
    keys = _beside(k0, k1, KEYS, 64)
    if CHUNKS > 2:
        k2 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 2, STILL, ROPE, FORMAT, ALIGN, DOT)
        k3 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 3, STILL, ROPE, FORMAT, ALIGN, DOT)
        keys = _beside(keys, _beside(k2, k3, KEYS, 64), KEYS, 128)
    if CHUNKS > 4:
        k4 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 4, STILL, ROPE, FORMAT, ALIGN, DOT)
        k5 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 5, STILL, ROPE, FORMAT, ALIGN, DOT)
        k6 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 6, STILL, ROPE, FORMAT, ALIGN, DOT)
        k7 = _load_chunk(arena8_ptr, arena16_ptr, arena32_ptr, base, scales, 7, STILL, ROPE, FORMAT, ALIGN, DOT)
        right = _beside(_beside(k4, k5, KEYS, 64), _beside(k6, k7, KEYS, 64), KEYS, 128)
        keys = _beside(keys, right, KEYS, 256)
    return keys
