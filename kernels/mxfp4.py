"""MXFP4: sums of products of packed weights with rows, dequantised in registers on their way to the matrix units.

Weights are the left operand and rows the right one: few rows meet many output channels, and a matrix instruction has 64
rows on the left but as few as 8 columns on the right. The vendor's bytes are read in words of eight values, and value j
of all words of a K tile is one operand, against columns j, j + 8, ... of x. So the order of summation changes, x has to
lie in that order (`word_at`, `place_of`), and no byte of a weight moves.

Scales: every e8m0 byte whose products with E2M1 values bf16 holds is exact: 0 to 252 (253 and 254 for values below 4
and 2; 255 is the format's NaN and gives infinities). With SHIFT, one multiplication a weight does instead of two, and
the sum is to be multiplied by 2^SHIFT; the exact range is SHIFT - 5 to SHIFT + 128 then: smaller scales lose bits below
2^(SHIFT - 133), larger ones count as SHIFT + 128.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def unpack_asm(byte: int, shifted: bool) -> str:
    """PTX: a byte of words $2 and $3, and their scales $4 and $5, to pairs $0 and $1 of bf16, one half for either word.

    A value's lower three bits, put at bits 8 to 6 of bf16, are 2^-126 times the value, for the subnormal 0.5 too. One
    product with 2^12 + 2^6 (2^8 + 2^2 for the upper nibble of a byte) puts its sign at bit 15 and those bits in place.
    """
    # The byte of the first word in the low half and of the second in the high half; twice each, for want of a zero.
    selector = byte | byte << 4 | (4 + byte) << 8 | (4 + byte) << 12
    lines = ["{", ".reg .b32 f, t, u;", "lop3.b32 f, $4, $5, 0xffff, 0xe4;", f"prmt.b32 t, $2, $3, {selector:#06x};"]
    for value, mask, factor in ((0, 0x000F000F, 0x1040), (1, 0x00F000F0, 0x0104)):
        lines += [f"and.b32 u, t, {mask:#010x};", f"mul.lo.u32 u, u, {factor:#x};", "and.b32 u, u, 0x81c081c0;"]
        if not shifted:
            lines += ["{", ".reg .b32 v;", "mov.b32 v, 0x7e807e80;", "mul.rn.bf16x2 u, u, v;", "}"]
        lines.append(f"mul.rn.bf16x2 ${value}, u, f;")
    return "\n".join([*lines, "}"])


@triton.jit
def _scale_factors(bytes, WIDE: tl.constexpr, SHIFT: tl.constexpr):
    """Powers of two of e8m0 bytes, times 2^126 / 2^SHIFT where there is a SHIFT: float32 (WIDE) or a pair of bf16."""
    exponent = bytes.to(tl.uint32)
    # The maxima make 2^-127, a subnormal, of 0.
    if WIDE:
        if SHIFT is not None:
            exponent = tl.minimum(exponent + (126 - SHIFT), 254)
        factors = tl.maximum(exponent << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        if SHIFT is not None:
            factors = tl.minimum(exponent * 0x00800080 + (126 - SHIFT) * 0x00800080, 254 * 0x00800080)
        else:
            factors = tl.maximum(exponent * 0x00800080, 0x00400040)
    return factors


@triton.jit
def _unpack(words, factors, BYTE: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr):
    """DOT[M, 2 * words]: the lower values of one byte of all words, then the upper ones, scaled."""
    if FAST:
        lower, upper = tl.inline_asm_elementwise(
            asm=unpack_asm(BYTE, SHIFT is not None),
            constraints="=r,=r,r,r,r,r",
            args=[words, factors],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        lower = _value(words, factors, 2 * BYTE, DOT, SHIFT)
        upper = _value(words, factors, 2 * BYTE + 1, DOT, SHIFT)
    return _side_by_side(lower, upper)


@triton.jit
def _value(words, factors, PLACE: tl.constexpr, DOT: tl.constexpr, SHIFT: tl.constexpr):
    nibble = (words >> (4 * PLACE)) & 15
    tiny = (((nibble & 7) << 22) | ((nibble & 8) << 28)).to(tl.float32, bitcast=True)
    if SHIFT is None:
        tiny = tiny * 8.507059173023462e37  # 2^126
    return (tiny * factors).to(DOT)


@triton.jit
def _side_by_side(left, right):
    """[M, 2 * K] of two [M, K]. In the layout of an operand this names registers anew and moves nothing."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _in_places(words):
    """Word w of sixteen goes to place (w / 2 % 2) * 8 + (w / 4) * 2 + w % 2 of [M, words]; only names change.

    A thread holds places 2t, 2t + 1, 2t + 8 and 2t + 9 of an operand: now four words in a row, which it reads at once,
    and which share a scale.
    """
    words = tl.reshape(words, (words.shape[0], words.shape[1] // 16, 4, 2, 2))
    words = tl.permute(words, (0, 1, 3, 2, 4))
    return tl.reshape(words, (words.shape[0], words.shape[1] * 16))


@triton.jit
def word_at(place):
    """The word of its K tile that is at a place."""
    return place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2


@triton.jit
def place_of(word):
    """Where in its K tile a word is."""
    return word // 16 * 16 + word // 2 % 2 * 8 + word // 4 % 4 * 2 + word % 2


@triton.jit
def sum_words(
    acc, data, scale, x, row_valid, pair_valid, K_TILES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to acc float32[BLOCK_M, N] the products of MXFP4 rows with columns of x in word order.

    data: pointers [BLOCK_M] to the rows' words. scale: pointers [BLOCK_M] to their scales. x: pointers [N] to rows.
    """
    BLOCK_WORDS: tl.constexpr = BLOCK_K // 8
    BLOCK_SCALES: tl.constexpr = BLOCK_K // 32
    PART: tl.constexpr = BLOCK_K // PARTS
    word = tl.arange(0, BLOCK_WORDS)
    group = tl.arange(0, BLOCK_SCALES)
    column = tl.arange(0, PART)
    EVEN: tl.constexpr = COLUMNS % BLOCK_K == 0
    for k in tl.range(0, K_TILES, num_stages=STAGES):
        word_valid = row_valid[:, None]
        group_valid = row_valid[:, None]
        if not EVEN:
            word_valid = word_valid & (k * BLOCK_WORDS + word < COLUMNS // 8)[None, :]
            group_valid = group_valid & (k * BLOCK_SCALES + group < COLUMNS // 32)[None, :]
        words = tl.load(data[:, None] + (k * BLOCK_WORDS + word)[None, :], mask=word_valid, other=0)
        bytes = tl.load(scale[:, None] + (k * BLOCK_SCALES + group)[None, :], mask=group_valid, other=0)
        factors = _scale_factors(bytes, not FAST, SHIFT)
        factors = tl.broadcast_to(factors[:, :, None], (BLOCK_M, BLOCK_SCALES, 4))
        factors = tl.reshape(factors, (BLOCK_M, BLOCK_WORDS))
        words = _in_places(words)
        factors = _in_places(factors)
        for part in tl.static_range(PARTS):
            values = _unpack(words, factors, part * 4 // PARTS, DOT, FAST, SHIFT)
            if PARTS <= 2:
                values = _side_by_side(values, _unpack(words, factors, part * 4 // PARTS + 1, DOT, FAST, SHIFT))
            if PARTS == 1:
                upper = _unpack(words, factors, 2, DOT, FAST, SHIFT)
                values = _side_by_side(values, _side_by_side(upper, _unpack(words, factors, 3, DOT, FAST, SHIFT)))
            columns = tl.load(
                x[None, :] + (k * BLOCK_K + part * PART + column)[:, None], mask=pair_valid[None, :], other=0.0
            )
            acc = tl.dot(values, columns.to(DOT), acc, input_precision="ieee")
    return acc
