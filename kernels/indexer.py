"""Indexer: scores the entries that a row sees; `choice` takes the best of them.

`_score_kernel` deals chunks of entries to its programs, rotates queries and reads each key once for all rows of a
sequence. Its grid depends on shapes only; lengths are read on the device, and of a sequence whose rows keep everything
that they see nothing is scored.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import choice, indexer_fp8
from kernels.forms import Plane, StepRows
from kernels.rows import DEFAULT as ROWS
from kernels.rows import head_arguments, prepare_heads

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
        overlaps: the score kernel is launched while the one before it drains (programmatic dependent launch).
        unit: e4m3 keys go to Hopper's fp8 matrix unit as they are, where `indexer_fp8.fits` says so, and of all above
            only `overlaps` counts; None for never.
        choice: of the kernels that choose.
    """

    block: int = 64
    chunk: int = 1024
    programs: int = 528
    registers: int | None = 128
    warps: int = 4
    stages: int = 4
    shifts: bool = True
    overlaps: bool = not INTERPRETED
    unit: indexer_fp8.Config | None = indexer_fp8.DEFAULT
    choice: choice.ChoiceConfig = choice.DEFAULT


DEFAULT = IndexerConfig()


@triton.jit(do_not_specialize=["sequences", "pages", "preparers"])
def _score_kernel(
    heads,  # A[B * SPAN, heads, width] of the attention, rows `heads_stride` apart
    prepared,  # A[B * SPAN, heads, width], written
    heads_stride,
    eps,
    preparers,  # programs that prepare some of these heads; those after them score
    query,  # A[B * SPAN, HEADS, WIDTH], rows `query_stride` apart
    share,  # float32[B * SPAN, HEADS], rows `share_stride` apart
    turns,  # float32[positions, TURNED]
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
    share_scale,
    TURNED: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
    PREPARED_HEADS: tl.constexpr,  # 0 where there are none
    PREPARED_WIDTH: tl.constexpr,
    PREPARED_BLOCK: tl.constexpr,
    PREPARED_TILE: tl.constexpr,
    PREPARED_NORM: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if PREPARED_HEADS > 0:  # noqa: SIM102 - decided by the compiler; the other one by the device
        if program < preparers:
            prepare_heads(
                heads, prepared, turns, positions, program, heads_stride, eps, PREPARED_HEADS, PREPARED_WIDTH, TURNED,
                PREPARED_BLOCK, PREPARED_TILE, PREPARED_NORM, OVERLAPS,
            )  # fmt: skip
            return
    # Chunks of all sequences in a row, dealt to the programs: as many chunks as there are, whatever the tables hold.
    each = tl.arange(0, SEQUENCES)
    at = each[:, None] * SPAN + tl.arange(0, SPAN_PADDED)[None, :]
    mask = (each < sequences)[:, None] & (tl.arange(0, SPAN_PADDED) < SPAN)[None, :]
    seen = (tl.max(tl.load(positions + at, mask=mask, other=-1), 1) + 1) // RATIO
    chunks = tl.where(seen > TOP_K, tl.cdiv(seen, CHUNK), 0)
    ends = tl.cumsum(chunks, 0)
    total = tl.sum(chunks, 0)
    if OVERLAPS:
        gdc_wait()
    item = program - preparers
    while item < total:
        sequence = tl.sum((ends <= item).to(tl.int32), 0)
        visible = tl.sum(tl.where(each == sequence, seen, 0), 0)
        first = (item - tl.sum(tl.where(each == sequence, ends - chunks, 0), 0)) * CHUNK
        _score_chunk(
            query,
            share,
            turns,
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
            share_scale,
            TURNED,
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
        item += tl.num_programs(0) - preparers


@triton.jit
def _score_chunk(
    query,
    share,
    turns,
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
    share_scale,
    TURNED: tl.constexpr,
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
        position = tl.load(positions + row + s)
        limits = limits + ((position + 1) // RATIO,)
        q_at = (row + s) * query_stride + head[:, None] * WIDTH + channel[None, :]
        q = tl.load(query + q_at, mask=(head < HEADS)[:, None] & (channel < WIDTH)[None, :], other=0.0)
        factors = tl.load(share + (row + s) * share_stride + head, mask=head < HEADS, other=0.0) * share_scale
        even, odd = tl.split(tl.reshape(q.to(tl.float32), (HEADS_PADDED, WIDTH_PADDED // 2, 2)))
        pair = tl.arange(0, WIDTH_PADDED // 2)
        angle = turns + tl.maximum(position, 0).to(tl.int64) * TURNED + 2 * pair - (WIDTH - TURNED)
        turned = (2 * pair >= WIDTH - TURNED) & (2 * pair < WIDTH)
        cos = tl.load(angle, mask=turned, other=1.0)[None, :]
        sin = tl.load(angle + 1, mask=turned, other=0.0)[None, :]
        turned_even = (even * cos - odd * sin).to(query.dtype.element_ty)
        turned_odd = (even * sin + odd * cos).to(query.dtype.element_ty)
        if SHIFTS:
            # Keys come out 2^120 too small; the rest is made up for behind the sum.
            even = (turned_even.to(tl.float32) * 5.192296858534828e33).to(tl.bfloat16)
            odd = (turned_odd.to(tl.float32) * 5.192296858534828e33).to(tl.bfloat16)
            channels_0, channels_2 = tl.split(tl.reshape(even, (HEADS_PADDED, WIDTH_PADDED // 4, 2)))
            channels_1, channels_3 = tl.split(tl.reshape(odd, (HEADS_PADDED, WIDTH_PADDED // 4, 2)))
            queries = queries + ((channels_0.T, channels_1.T, channels_2.T, channels_3.T),)
            factors *= 256.0
        else:
            q = tl.reshape(tl.join(turned_even, turned_odd), (HEADS_PADDED, WIDTH_PADDED))
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
            keys = load_keys(keys_at, channel, WIDTH, WIDTH_PADDED, FORMAT, WIDE)
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
def load_keys(at, channel, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr):
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
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    share_scale: float = 1.0,
    *,
    config: IndexerConfig = DEFAULT,
) -> Tensor:
    """The `top_k` entries with the highest index scores among those a row sees; equal scores go to the lowest entry.

    A row at position t sees entries w with (w + 1) * ratio <= t + 1.

    Args:
        query: A[R, heads, width], to be rotated (rows may lie in a wider tensor).
        share: float32[R, heads], the heads' weights (likewise).
        turns: of the layer, contiguous.
        ratio: tokens of an entry.
        top_k: places.
        rows: the step.
        arena: uint8[bytes].
        keys: index keys in pages.
        share_scale: factor on all of `share`.
        config: how the kernels are cut.

    Returns:
        int32[R, top_k], ascending; -1 in the places that stay empty, which come last.
    """
    found = []
    for own, part in rows.parts():
        scores, maxima = score_entries(
            query[own], share[own], turns, ratio, top_k, part, arena, keys, share_scale, config=config
        )
        found.append(choice.choose_entries(scores, ratio, top_k, part, maxima, config=config.choice))
    return found[0] if len(found) == 1 else torch.cat(found)


def prepare_and_select(
    query: Tensor,
    eps: float | None,
    index_query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    share_scale: float = 1.0,
    *,
    config: IndexerConfig = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.prepare_and_select`: the attention's heads are prepared beside the scoring."""
    prepared = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    found = []
    for own, part in rows.parts():
        scores, maxima = score_entries(
            index_query[own], share[own], turns, ratio, top_k, part, arena, keys, share_scale,
            (query[own], eps, prepared[own]), config=config,
        )  # fmt: skip
        found.append(choice.choose_entries(scores, ratio, top_k, part, maxima, config=config.choice))
    return prepared, found[0] if len(found) == 1 else torch.cat(found)


def score_entries(
    query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    share_scale: float = 1.0,
    attention: tuple[Tensor, float | None, Tensor] | None = None,
    *,
    config: IndexerConfig = DEFAULT,
) -> tuple[Tensor, Tensor | None]:
    """float32[R, entries of a table and a few more]: the index scores of what a row sees, and minus infinity to the end
    of the block; nothing for sequences that see no more than `top_k`. And perhaps the maxima that `choice` likes.

    With `attention` - A[R, heads, width], the eps of their norm, and where they go - `prepare_queries` beside it.
    """
    if config.unit is not None and indexer_fp8.fits(query, rows.span, keys, arena, attention):
        return indexer_fp8.score_keys(
            query, share, turns, ratio, top_k, rows, arena, keys, share_scale, attention,
            config=config.unit, early=config.overlaps,
        )  # fmt: skip
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
    own, eps, prepared = attention if attention is not None else (query, None, query)
    constants = head_arguments(own, eps, ROWS)
    preparers = total * triton.cdiv(own.shape[1], constants["TILE"]) if attention is not None else 0
    _score_kernel[(preparers + programs,)](
        own,
        prepared,
        own.stride(0),
        eps or 0.0,
        preparers,
        query,
        share,
        turns,
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
        share_scale,
        TURNED=turns.shape[1] * 2,
        OVERLAPS=config.overlaps,
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
        PREPARED_HEADS=own.shape[1] if attention is not None else 0,
        **{f"PREPARED_{name}": constants[name] for name in ("WIDTH", "BLOCK", "TILE", "NORM")},
        num_warps=config.warps,
        **({"launch_pdl": True} if config.overlaps else {}),
        maxnreg=config.registers if rows.span == 1 and not wide else None,
    )
    return scores, None
