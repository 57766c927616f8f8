"""Indexer: scores the entries that a row sees; `choice` takes the best of them.

`_score_kernel` deals chunks of entries to its programs and reads each key once for all rows of a sequence. Its grid
depends on shapes only; lengths are read on the device, and of a sequence whose rows keep everything that they see
nothing is scored.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import choice
from kernels.forms import Plane, StepRows

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which holds bf16 as integers and can not calculate with it."""


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """How the score kernel is cut. Results do not depend on it.

    Attributes:
        block: keys of a product, a power of two of at least 32; not more than a page has, and 32 of float32.
        chunk: keys that a program scores at a time, at most; a power of two.
        programs: with one row to a sequence, at most; half of them with more, for which a program has twice the
            registers.
        registers: of a thread, at most, with one row to a sequence: as many as let four programs share a processor.
        warps, stages: of a program.
        shifts: e4m3 becomes bf16 by moving bits instead of by conversion.
        choice: of the kernels that choose.
    """

    block: int = 64
    chunk: int = 1024
    programs: int = 528
    registers: int | None = 128
    warps: int = 4
    stages: int = 4
    shifts: bool = True
    choice: choice.ChoiceConfig = choice.DEFAULT


DEFAULT = IndexerConfig()


@triton.jit(do_not_specialize=["sequences", "pages"])
def _score_kernel(
    query,  # A[B * SPAN, HEADS, WIDTH], rows `query_stride` apart
    share,  # float32[B * SPAN, HEADS], rows `share_stride` apart
    positions,  # int32[B * SPAN]
    tables,  # int32[B, pages]
    arena,  # uint8
    scores,  # float32[B * SPAN, capacity], written up to what the sequence sees, and to the end of that block
    query_stride,
    share_stride,
    sequences,
    pages,
    capacity,
    data,
    scale,
    stride,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SPAN: tl.constexpr,
    SPAN_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    SHIFTS: tl.constexpr,
):
    # Chunks of all sequences in a row, dealt to the programs: as many chunks as there are, whatever the tables hold.
    each = tl.arange(0, SEQUENCES)
    at = each[:, None] * SPAN + tl.arange(0, SPAN_PADDED)[None, :]
    mask = (each < sequences)[:, None] & (tl.arange(0, SPAN_PADDED) < SPAN)[None, :]
    seen = (tl.max(tl.load(positions + at, mask=mask, other=-1), 1) + 1) // RATIO
    chunks = tl.where(seen > TOP_K, tl.cdiv(seen, CHUNK), 0)
    ends = tl.cumsum(chunks, 0)
    total = tl.sum(chunks, 0)
    item = tl.program_id(0)
    while item < total:
        sequence = tl.sum((ends <= item).to(tl.int32), 0)
        visible = tl.sum(tl.where(each == sequence, seen, 0), 0)
        first = (item - tl.sum(tl.where(each == sequence, ends - chunks, 0), 0)) * CHUNK
        _score_chunk(
            query,
            share,
            positions,
            tables + sequence.to(tl.int64) * pages,
            arena,
            scores,
            query_stride,
            share_stride,
            sequence.to(tl.int64) * SPAN,
            first,
            visible,
            capacity,
            data,
            scale,
            stride,
            RATIO,
            SPAN,
            HEADS,
            HEADS_PADDED,
            WIDTH,
            WIDTH_PADDED,
            PAGE,
            DATA_BYTES,
            SCALE_BYTES,
            FORMAT,
            BLOCK,
            CHUNK,
            STAGES,
            WIDE,
            SHIFTS,
        )
        item += tl.num_programs(0)


@triton.jit
def _score_chunk(
    query,
    share,
    positions,
    table,
    arena,
    scores,
    query_stride,
    share_stride,
    row,
    first,
    visible,
    capacity,
    data,
    scale,
    stride,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    SHIFTS: tl.constexpr,
):
    """Score entries first .. first + CHUNK of one sequence for its rows, the first of which is `row`."""
    head = tl.arange(0, HEADS_PADDED)
    channel = tl.arange(0, WIDTH_PADDED)
    queries = ()
    shares = ()
    limits = ()
    for s in tl.static_range(SPAN):
        limits = limits + ((tl.load(positions + row + s) + 1) // RATIO,)
        q_at = (row + s) * query_stride + head[:, None] * WIDTH + channel[None, :]
        q = tl.load(query + q_at, mask=(head < HEADS)[:, None] & (channel < WIDTH)[None, :], other=0.0)
        factors = tl.load(share + (row + s) * share_stride + head, mask=head < HEADS, other=0.0)
        if SHIFTS:
            # Keys come out 2^120 too small; the rest is made up for behind the sum.
            q = (q.to(tl.float32) * 5.192296858534828e33).to(tl.bfloat16)
            even, odd = tl.split(tl.reshape(q, (HEADS_PADDED, WIDTH_PADDED // 4, 2, 2)))
            channels_0, channels_2 = tl.split(even)
            channels_1, channels_3 = tl.split(odd)
            queries = queries + ((channels_0.T, channels_1.T, channels_2.T, channels_3.T),)
            factors *= 256.0
        else:
            queries = queries + (q.to(tl.float32 if WIDE else tl.bfloat16).T,)
        shares = shares + (factors,)
    line = tl.arange(0, BLOCK)
    last_page = (visible - 1) // PAGE
    page = tl.load(table + first // PAGE)
    # Of the last chunk a part is computed in vain: a bound that is known beforehand suits the pipeline, and there is no
    # mask in it. What lies behind the last entry in its page is read, and its score is not stored.
    for start in tl.range(0, CHUNK, BLOCK, num_stages=STAGES):
        entry = first + start + line
        if PAGE % BLOCK == 0:
            at = page.to(tl.int64) * stride
            # Loaded an iteration ahead: to the pipeline it is no load that the keys' load waits for.
            page = tl.load(table + tl.minimum((first + start + BLOCK) // PAGE, last_page))
        else:
            at = tl.load(table + tl.minimum(entry // PAGE, last_page)).to(tl.int64) * stride
        keys_at = arena + (data + at) + entry % PAGE * DATA_BYTES
        if FORMAT == "fp8":
            power_at = arena + (scale + at) + entry % PAGE * SCALE_BYTES
            powers = tl.load(power_at.to(tl.pointer_type(tl.float32)))
        if SHIFTS:
            word = tl.arange(0, WIDTH_PADDED // 4)
            keys = _shift(tl.load(keys_at.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]))
        else:
            keys = _load_keys(keys_at, channel, WIDTH, WIDTH_PADDED, FORMAT, WIDE)
        for s in tl.static_range(SPAN):
            if SHIFTS:
                products = tl.dot(keys[0], queries[s][0])
                for part in tl.static_range(1, 4):
                    products = tl.dot(keys[part], queries[s][part], products)
            else:
                products = tl.dot(keys, queries[s], input_precision="ieee")
            score = tl.sum(tl.maximum(products, 0.0) * shares[s][None, :], 1)
            if FORMAT == "fp8":
                # Powers of two: they can be applied to the sum, and to what passed the relu.
                score *= powers
            # Plus zero, so that negative zero, which equals zero, has its bits too. Behind what the row sees, minus
            # infinity to the end of the block: who reads scores then reads whole vectors.
            score = tl.where(entry < limits[s], score + 0.0, float("-inf"))
            tl.store(scores + (row + s) * capacity + entry, score, mask=(entry < capacity) & (first + start < visible))


@triton.jit
def _load_keys(at, channel, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr):
    """bf16 or float32[BLOCK, WIDTH_PADDED]."""
    if FORMAT == "fp8":
        at = at.to(tl.pointer_type(tl.float8e4nv))
    elif FORMAT == "bf16":
        at = at.to(tl.pointer_type(tl.bfloat16))
    else:
        at = at.to(tl.pointer_type(tl.float32))
    at = at[:, None] + channel[None, :]
    if WIDTH == WIDTH_PADDED:
        keys = tl.load(at)
    else:
        keys = tl.load(at, mask=(channel < WIDTH)[None, :], other=0.0)
    return keys.to(tl.float32 if WIDE else tl.bfloat16)


@triton.jit
def _shift(words):
    """e4m3 to bf16 by moving bits: four tensors, of bytes 0 to 3 of each word.

    A bf16 with the exponent and the mantissa of an e4m3 is 2^-120 of it, exactly, subnormal numbers too. Conversion
    takes a unit that has a quarter of the rate that is needed; and of whole words a thread holds what it needs for
    pairs of bf16, one byte of each of two neighbours, after a wide read.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 pair, sign;
        prmt.b32 pair, $4, $5, 0x4808;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 $0, pair, 0x07f007f0, sign, 0xEA;
        prmt.b32 pair, $4, $5, 0x5818;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 $1, pair, 0x07f007f0, sign, 0xEA;
        prmt.b32 pair, $4, $5, 0x6828;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 $2, pair, 0x07f007f0, sign, 0xEA;
        prmt.b32 pair, $4, $5, 0x7838;
        and.b32 sign, pair, 0x80008000;
        shr.b32 pair, pair, 4;
        lop3.b32 $3, pair, 0x07f007f0, sign, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


def select_entries(
    query: Tensor,
    share: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    *,
    config: IndexerConfig = DEFAULT,
) -> Tensor:
    """The `top_k` entries with the highest index scores among those a row sees; equal scores go to the lowest entry.

    A row at position t sees entries w with (w + 1) * ratio <= t + 1.

    Args:
        query: A[R, heads, width], rotated (rows may lie in a wider tensor).
        share: float32[R, heads], the heads' weights, factors included (likewise).
        ratio: tokens of an entry.
        top_k: places.
        rows: the step.
        arena: uint8[bytes].
        keys: index keys in pages.
        config: how the kernels are cut.

    Returns:
        int32[R, top_k], ascending; -1 in the places that stay empty, which come last.
    """
    scores = score_entries(query, share, ratio, top_k, rows, arena, keys, config=config)
    return choice.choose_entries(scores, ratio, top_k, rows, config=config.choice)


def score_entries(
    query: Tensor,
    share: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    *,
    config: IndexerConfig = DEFAULT,
) -> Tensor:
    """float32[R, entries of a table and a few more]: the index scores of what a row sees, and minus infinity to the end
    of the block; nothing for sequences that see no more than `top_k`."""
    total, heads, width = query.shape
    sequences, pages = rows.tables.shape
    # To the end of a block at least.
    capacity = triton.cdiv(pages * keys.rows, 64) * 64
    scores = torch.empty((total, capacity), dtype=torch.float32, device=query.device)
    wide = INTERPRETED or query.dtype == torch.float32 or keys.format == "fp32"
    # 32 at least: scores are read in rows of 32. Not more without matrix instructions: operands lie in registers then.
    block = 32 if wide or keys.rows < 32 else min(config.block, keys.rows)
    # Few sequences are cut finer, so that all programs have some; long chunks read the queries less often.
    programs = config.programs if rows.span == 1 else config.programs // 2
    chunk = triton.next_power_of_2(triton.cdiv(sequences * capacity, programs))
    chunk = max(block, min(config.chunk, max(256, chunk)))
    programs = min(programs, sequences * triton.cdiv(capacity, chunk))
    _score_kernel[(programs,)](
        query,
        share,
        rows.positions,
        rows.tables,
        arena,
        scores,
        query.stride(0),
        share.stride(0),
        sequences,
        pages,
        capacity,
        keys.data,
        keys.scale,
        keys.stride,
        RATIO=ratio,
        TOP_K=top_k,
        SEQUENCES=triton.next_power_of_2(sequences),
        SPAN=rows.span,
        SPAN_PADDED=triton.next_power_of_2(rows.span),
        HEADS=heads,
        HEADS_PADDED=max(16, triton.next_power_of_2(heads)),
        WIDTH=width,
        WIDTH_PADDED=max(16, triton.next_power_of_2(width)),
        PAGE=keys.rows,
        DATA_BYTES=keys.data_bytes,
        SCALE_BYTES=keys.scale_bytes,
        FORMAT=keys.format,
        BLOCK=block,
        CHUNK=chunk,
        STAGES=2 if wide else config.stages,
        WIDE=wide,
        SHIFTS=config.shifts and keys.format == "fp8" and not wide and width in (64, 128, 256),
        num_warps=config.warps,
        maxnreg=config.registers if rows.span == 1 and not wide else None,
    )
    return scores
