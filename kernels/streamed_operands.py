"""Streamed operands: what a program of a streamed product multiplies: its weights in registers, its x in shared memory.

In Gluon; `kernels.streamed_products` says what for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

TILE = gl.constexpr(128)
"""Rows of a weight that a program multiplies at once, and bytes of each in a box: a step's. Of fp8 weights these are
what a scale is for, so that it is one number."""
BLOCK = gl.constexpr(64)
"""Columns of x side by side in shared memory: 128 bytes, which is what it swizzles."""
WARPS = gl.constexpr(8)


@gluon.constexpr_function
def _byte_layout():
    """uint8[TILE, BLOCK] in registers: 16 bytes side by side of two rows, which are what a thread has of an operand of
    four instructions. Four lanes read bytes of one row, the next four those of the row four further: these lie in the
    other half of a swizzled line."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    lanes = [[0, 16], [0, 32], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [128, 64])


@gluon.jit
def power(exponent):
    """float32 2^(exponent - 127); int32 0 .. 254."""
    return gl.where(exponent == 0, 1 << 22, exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def change(old, new):
    """float32 2^(old - new)."""
    return power(gl.minimum(gl.maximum(old - new + 127, 1), 254))


@gluon.jit
def keep_rows(x, filled, parts, rows, x_stride, ROWS: gl.constexpr, TURNED: gl.constexpr):
    """Puts the first columns of x into shared memory, 16 bits [parts or more, LINES, BLOCK]; each block of columns
    has ROWS lines, one after the other. As float16 and in the order of `kernels.products`, if TURNED."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    LINES: gl.constexpr = filled.shape[1]
    line = gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    row = line % ROWS
    at = x + (row.to(gl.int64) * x_stride + line // ROWS * BLOCK)[:, None] + column[None, :]
    there = (row < rows)[:, None] & (column >= 0)[None, :]
    for part in range(parts):
        value = gl.load(at + part * (LINES // ROWS * BLOCK), mask=there, other=0.0)
        if TURNED:
            turned = gl.reshape(value.to(gl.float32).to(gl.float16), [LINES, 4, 4, 2, 2])
            value = gl.reshape(gl.permute(turned, [0, 2, 3, 1, 4]), [LINES, BLOCK])
        filled.index(part).store(value)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _operand(bytes, MMA: gl.constexpr):
    """float16[TILE, BLOCK] of e4m3 in shared memory, columns in the order of `kernels.products`. Rows of each eight are
    in another order, too: `rows_of`."""
    values = bytes.load(_byte_layout()).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    parts = gl.reshape(values, [16, 2, 4, 4, 4, 2, 2])
    values = gl.reshape(gl.permute(parts, [0, 2, 1, 4, 5, 3, 6]), [TILE, BLOCK])
    return gl.convert_layout(values, gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def rows_of(MMA: gl.constexpr, SCALED: gl.constexpr):
    """int32[TILE]: which row of a tile a row of the sums belongs to."""
    m = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    return m // 8 * 8 + m % 2 * 4 + m % 8 // 2 if SCALED else m


@gluon.jit
def operands(box, MMA: gl.constexpr):
    """Both halves of a step's weights."""
    return _operand(box.slice(0, BLOCK, dim=1), MMA), _operand(box.slice(BLOCK, BLOCK, dim=1), MMA)
