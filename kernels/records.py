"""Records: how a row of channels is normed, rotated, rounded and put into the arena, as parts of other kernels.

`reference.store_record` and `Plane` say what the bytes are. Rounding is spelled out in integers, so that it is the same
in Triton's interpreter, whose conversions to narrow floats do not round to nearest even, as on a device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.forms import SCALE_CHANNELS


@triton.jit
def norm(x, CHANNELS: tl.constexpr, eps):
    """float32[..., n] over the root of its mean square; channels past CHANNELS are 0 in `x`."""
    square = tl.sum(x * x, len(x.shape) - 1, keep_dims=True)
    return x * tl.rsqrt(square / CHANNELS + eps)


@triton.jit
def load_turns(turns, position, WIDTH: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """float32[BLOCK]: cosines and sines in turn, by channel of a record; of the angle 0 where it is not rotated."""
    channel = tl.arange(0, BLOCK)
    rotated = (channel >= WIDTH - ROPE) & (channel < WIDTH)
    at = turns + position.to(tl.int64) * ROPE + (channel - (WIDTH - ROPE))
    return tl.load(at, mask=rotated, other=tl.where(channel % 2 == 0, 1.0, 0.0))


@triton.jit
def turn(x, turns):
    """Rotate pairs of neighbours of float32[BLOCK] by what `load_turns` gave."""
    HALF: tl.constexpr = x.shape[0] // 2
    even, odd = tl.split(tl.reshape(x, (HALF, 2)))
    cos, sin = tl.split(tl.reshape(turns, (HALF, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (x.shape[0],))


@triton.jit
def nearest_bfloat16(x):
    """bfloat16 of float32, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scale_byte(largest):
    """int32: the e8m0 byte of the least power of two that is at least `largest` / 448; 127 where that is 0.

    448 is 1.75 * 2^8: the exponent is that of `largest`, less 8, and one more where its mantissa is above 1.75. Without
    the division it is exact for all that is normal once divided, and 0, as its lower limit, for what is less.
    """
    bits = largest.to(tl.int32, bitcast=True)
    byte = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)
    # 224 are the bits of the largest number that is 0 once divided.
    return tl.where(bits <= 224, 127, byte)


@triton.jit
def power_of_two(byte):
    """float32 of an e8m0 byte; 2^-127 is not normal, so its bits are not an exponent's."""
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_byte(x):
    """uint8 of float32 of at most 448, to nearest even. What is no number, or too large, becomes NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9, the last place of 2^14: adding that rounds. Its bits are 0x46800000.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7F))
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_record(
    arena,  # uint8[bytes]
    data,  # int64, bytes to the record
    scale,  # int64, bytes to its scales
    record,  # float32[BLOCK]
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr = SCALE_CHANNELS,
):
    """Write a record as the plane's format has it. Channels past WIDTH are 0 in `record`."""
    BLOCK: tl.constexpr = record.shape[0]
    STILL: tl.constexpr = WIDTH - ROPE
    channel = tl.arange(0, BLOCK)
    if FORMAT == "fp32":
        tl.store((arena + data).to(tl.pointer_type(tl.float32)) + channel, record, mask=channel < WIDTH)
    elif FORMAT == "bf16":
        at = (arena + data).to(tl.pointer_type(tl.bfloat16)) + channel
        tl.store(at, nearest_bfloat16(record), mask=channel < WIDTH)
    elif ROPE == 0:
        byte = scale_byte(tl.max(tl.abs(record), 0))
        # A scale is never so large that its inverse were not normal. No clamp: scaled channels are at most 448.
        values = record * ((254 - byte) << 23).to(tl.float32, bitcast=True)
        tl.store(arena + data + channel, e4m3_byte(values), mask=channel < WIDTH)
        tl.store((arena + scale).to(tl.pointer_type(tl.float32)), power_of_two(byte))
    else:
        tl.static_assert(STILL % GROUP == 0, "channels that share a scale are all rotated or all still")
        groups = tl.reshape(tl.abs(record), (BLOCK // GROUP, GROUP))
        byte = scale_byte(tl.max(groups, 1))
        inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
        values = tl.reshape(record, (BLOCK // GROUP, GROUP)) * inverse[:, None]
        tl.store(arena + data + channel, tl.reshape(e4m3_byte(values), (BLOCK,)), mask=channel < STILL)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(arena + scale + group, byte.to(tl.uint8), mask=group < STILL // GROUP)
        at = (arena + data + STILL).to(tl.pointer_type(tl.bfloat16)) + (channel - STILL)
        tl.store(at, nearest_bfloat16(record), mask=(channel >= STILL) & (channel < WIDTH))
