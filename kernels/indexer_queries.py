"""Heads of queries, rotated: the indexer's as e4m3 numbers, the attention's beside them. For `indexer_scores`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.indexer_products import WIDTH

PART = gl.constexpr(16)
"""Heads whose queries are prepared at once."""


@gluon.jit
def prepare_queries(
    query, share, turns, positions, query_stride, share_stride, share_scale, row, high, low, factors,
    ROWS: gl.constexpr, HEADS: gl.constexpr, TURNED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Rotates the queries of ROWS rows and splits them into shared memory; factors: of the heads' weights."""
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STILL: gl.constexpr = (WIDTH - TURNED) // 2
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, SQUARE))
    line = gl.arange(0, PART, gl.SliceLayout(1, SQUARE))
    pair = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, PAIRS))
    for r in gl.static_range(ROWS):
        position = gl.load(positions + row + r)
        angle = turns + gl.maximum(position, 0).to(gl.int64) * TURNED + (pair - STILL) * 2
        cos = gl.load(angle, mask=pair >= STILL, other=1.0)[None, :]
        sin = gl.load(angle + 1, mask=pair >= STILL, other=0.0)[None, :]
        for part in gl.static_range(HEADS // PART):
            head = part * PART + line
            x = gl.load(query + (row + r) * query_stride + (head * WIDTH)[:, None] + channel[None, :]).to(gl.float32)
            even, odd = gl.split(gl.reshape(x, [PART, WIDTH // 2, 2]))
            even = gl.convert_layout(even, PAIRS, assert_trivial=True)
            odd = gl.convert_layout(odd, PAIRS, assert_trivial=True)
            x = gl.reshape(gl.join(even * cos - odd * sin, even * sin + odd * cos), [PART, WIDTH])
            x = gl.convert_layout(x, SQUARE, assert_trivial=True).to(gl.bfloat16).to(gl.float32)
            largest = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
            exponent = gl.maximum(largest >> 23, 8)
            x = x * ((261 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
            first = x.to(gl.float8e4nv)
            high.slice(r * HEADS + part * PART, PART, dim=0).store(first)
            if SPLIT:
                low.slice(r * HEADS + part * PART, PART, dim=0).store((x - first.to(gl.float32)).to(gl.float8e4nv))
            factor = gl.load(share + (row + r) * share_stride + head) * share_scale
            factor = factor * ((exponent - 7) << 23).to(gl.float32, bitcast=True)
            factors.slice(r * HEADS + part * PART, PART, dim=0).store(factor)


@gluon.jit
def prepare_heads(
    heads, prepared, turns, positions, program, stride, eps, HEADS: gl.constexpr, TURNED: gl.constexpr,
    HEAD_WIDTH: gl.constexpr, TILE: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """As `kernels.rows.prepare_heads`, for heads of a power of two of channels."""
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    PARTS: gl.constexpr = (HEADS + TILE - 1) // TILE
    STILL: gl.constexpr = HEAD_WIDTH - TURNED
    row = (program // PARTS).to(gl.int64)
    head = program % PARTS * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SQUARE))
    channel = gl.arange(0, HEAD_WIDTH, gl.SliceLayout(0, SQUARE))
    position = gl.maximum(gl.load(positions + row), 0)
    is_turned = channel >= STILL
    angle = turns + position.to(gl.int64) * TURNED + (channel - STILL) // 2 * 2
    cos = gl.load(angle, mask=is_turned, other=1.0)
    sin = gl.load(angle + 1, mask=is_turned, other=0.0)
    sin = gl.where(channel % 2 == 0, -sin, sin)
    inside = (head < HEADS)[:, None] & (channel >= 0)[None, :]
    at = heads + row * stride + (head * HEAD_WIDTH)[:, None]
    x = gl.load(at + channel[None, :], mask=inside, other=0.0).to(gl.float32)
    turning = (head < HEADS)[:, None] & is_turned[None, :]
    other = gl.load(at + (channel ^ 1)[None, :], mask=turning, other=0.0).to(gl.float32)
    if NORM:
        scale = gl.rsqrt(gl.sum(x * x, 1) / HEAD_WIDTH + eps)
        x, other = x * scale[:, None], other * scale[:, None]
    x = x * cos[None, :] + other * sin[None, :]
    to = prepared + row * (HEADS * HEAD_WIDTH) + (head * HEAD_WIDTH)[:, None] + channel[None, :]
    gl.store(to, x.to(prepared.dtype.element_ty), mask=inside)
