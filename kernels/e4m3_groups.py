"""Groups of MXFP4 weights as operands of Hopper's fp8 matrix unit, in Gluon; `kernels.experts_fp8` says why.

A group is 32 values that share a scale: 16 bytes of a weight row, one matrix instruction of K = 32. E2M1's seeM become
e4m3's s00eeM00, which is 2^-6 times the value, for the subnormal 0.5 too. `ldmatrix` brings a thread of a row its word
q of the group, whose even values are columns 4q .. 4q + 3 of the operand and whose odd ones 16 + 4q ..: so no value
moves between registers, and x has its columns in that order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

UNPACK_ASM = """{
.reg .b32 a, b, c;
shl.b32 a, $2, 2;
and.b32 a, a, 0x1c1c1c1c;
shl.b32 b, $2, 4;
lop3.b32 $0, b, 0x80808080, a, 0xea;
shr.u32 c, $2, 2;
and.b32 c, c, 0x1c1c1c1c;
lop3.b32 $1, $2, 0x80808080, c, 0xea;
}"""
"""Eight nibbles to the four even and the four odd values as e4m3."""

LOWER_POWERS_ASM = """{
.reg .b32 a, b;
shl.b32 a, $2, 23;
and.b32 $0, a, 0x7f800000;
shl.b32 b, $2, 15;
and.b32 $1, b, 0x7f800000;
}"""
"""The lower two of four e8m0 bytes to float32; 0 is 0, 255 an infinity."""
UPPER_POWERS_ASM = """{
.reg .b32 a, b;
shl.b32 a, $2, 7;
and.b32 $0, a, 0x7f800000;
shr.u32 b, $2, 1;
and.b32 $1, b, 0x7f800000;
}"""
_UNPACK = gl.constexpr(UNPACK_ASM)
_LOWER_POWERS, _UPPER_POWERS = gl.constexpr(LOWER_POWERS_ASM), gl.constexpr(UPPER_POWERS_ASM)


@gluon.constexpr_function
def _bits(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def _row_bases(rows, warps):
    """(of registers, of lanes, of warps): which rows a thread has, as a matrix unit wants them."""
    bases = [1 << i for i in range(_bits(rows))]
    count = _bits(warps)
    return [8, *bases[4 + count :]], bases[:3], bases[4 : 4 + count]


@gluon.constexpr_function
def word_layout(rows, warps):
    """uint8[rows, 32]: a thread has its word of both groups of each of its rows."""
    regs, lanes, warp = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [regs[0], 0], [0, 16], *([row, 0] for row in regs[1:])],
        [[0, 4], [0, 8], *([row, 0] for row in lanes)], [[row, 0] for row in warp], [], [rows, 32],
    )  # fmt: skip


@gluon.constexpr_function
def scale_layout(rows, warps):
    """int32[rows, 2]: words of four scales of the same rows, in each of a row's four threads."""
    regs, lanes, warp = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 1], *([row, 0] for row in regs)], [[0, 0], [0, 0], *([row, 0] for row in lanes)],
        [[row, 0] for row in warp], [], [rows, 2],
    )  # fmt: skip


@gluon.jit
def halves(values):
    """Left and right half of the columns; names registers anew."""
    return gl.split(gl.permute(gl.reshape(values, [values.shape[0], 2, values.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def _beside(left, right):
    return gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _operand(bytes, MMA: gl.constexpr):
    """e4m3[128, 64] of uint8[128, 16]: a group's values, twice."""
    even, odd = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,r", [bytes], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )
    values = _beside(even, odd)
    return gl.convert_layout(_beside(values, values), gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def operands(words, TWO: gl.constexpr, LAYOUT: gl.constexpr, MMA: gl.constexpr):
    """Of two groups of a stage's."""
    left, right = halves(words.slice(TWO * 32, 32, dim=1).load(LAYOUT))
    return _operand(left, MMA), _operand(right, MMA)


@gluon.jit
def start_sum(values, x, MMA: gl.constexpr, TILE: gl.constexpr):
    """Starts float32[128, TILE]: the products of one group with the high numbers of x, then with the low ones."""
    zero = gl.zeros([values.shape[0], TILE], gl.float32, MMA)
    return warpgroup_mma(values, x.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def powers(words, UPPER: gl.constexpr, MMA: gl.constexpr):
    """float32[128, 1] of either byte of a half of int32[128]."""
    a, b = gl.inline_asm_elementwise(
        _UPPER_POWERS if UPPER else _LOWER_POWERS, "=r,=r,r", [words], dtype=(gl.float32, gl.float32), is_pure=True,
        pack=1,
    )  # fmt: skip
    row: gl.constexpr = gl.SliceLayout(1, MMA)
    a = gl.convert_layout(a, row, assert_trivial=True)
    b = gl.convert_layout(b, row, assert_trivial=True)
    return a[:, None], b[:, None]


@gluon.jit
def add_in_turn(acc, words, rows, stage, low, high, split_at, TILE: gl.constexpr, ROWS: gl.constexpr, UP: gl.constexpr):
    """acc and a stage's products, each group's on their way while those of the one before are multiplied by its scale.

    words: the stage's. rows: x of all stages. low, high: scales, as `halves` gives them. split_at: scales of x, of
    which there is one for all columns in the up projection, whose caller multiplies by it.
    """
    MMA: gl.constexpr = acc.type.layout
    WORDS: gl.constexpr = word_layout(ROWS, gl.num_warps())
    a0, a1 = operands(words, 0, WORDS, MMA)
    p0 = start_sum(a0, rows.index(stage * 8), MMA, TILE)
    for two in gl.static_range(4):
        p1 = start_sum(a1, rows.index(stage * 8 + two * 2 + 1), MMA, TILE)
        f0, f1 = powers(gl.reshape(low if two < 2 else high, [ROWS]), two % 2 == 1, MMA)
        if two < 3:
            b0, b1 = operands(words, two + 1, WORDS, MMA)
        p0 = warpgroup_mma_wait(1, deps=[p0])
        if UP:
            acc = p0 * f0 + acc
        else:
            part = p0 * f0
        if two < 3:
            p0 = start_sum(b0, rows.index(stage * 8 + two * 2 + 2), MMA, TILE)
            p1 = warpgroup_mma_wait(1, deps=[p1])
        else:
            p1 = warpgroup_mma_wait(0, deps=[p1])
        if UP:
            acc = p1 * f1 + acc
        else:
            acc = (p1 * f1 + part) * gl.load(split_at + two * TILE)[None, :] + acc
        if two < 3:
            a0, a1 = b0, b1
    return acc
