"""Hyper-connections: leave a sublayer, predict the next one's coefficients, collapse the streams and norm them.

Two kernels. `_mix_kernel` runs over (splits of the channels, tiles of rows): it mixes the former sublayer's output into
all streams of its channels, stores them, and forms its share of <fn, streams> and of the sum of squares. It reads fn
once for a tile of 16 rows. `_connect_kernel` runs over rows, twice: one program collapses and norms, the other one
turns predictions into the coefficients of the way out, whose 20 dependent iterations would otherwise delay the
sublayer. The splits depend on the width of the model only and are added in one order, so a row's result is the same
bits in any batch.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.forms import HyperWeights, PairSums

EAGER_ROWS = 16
"""Up to so many rows, pairs are read without asking first whether their experts are here: a wait for memory less."""
TILE = 16
"""Rows that share a read of fn; the least that a matrix instruction takes. Not more for more rows: another shape of
instruction could sum in another order, and a row's bits would depend on the batch."""
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which holds bf16 as integers and can not calculate with it."""


@dataclasses.dataclass(frozen=True)
class HyperConfig:
    """How the two kernels are cut. Results of one config are the same bits for any number of rows.

    Attributes:
        width: channels of a split.
        mix_warps, connect_warps: of the kernels.
        projection: how the product with fn is formed where streams are bf16: "split" writes fn as a sum of three bf16
            numbers, which with bf16 streams is exact up to the float32 sums; or a `tl.dot` input precision.
        overlaps: the kernels are launched while the ones before them drain (programmatic dependent launch).
    """

    width: int = 32
    mix_warps: int = 4
    connect_warps: int = 4
    projection: str = "split"
    overlaps: bool = not INTERPRETED


DEFAULT = HyperConfig()


# Not made anew for one row: that could be other bits.
@triton.jit(do_not_specialize=["rows"])
def _mix_kernel(
    streams,  # A[rows, N, HIDDEN]
    output,  # A[rows, HIDDEN]; None with PLACES and no base
    pairs,  # float32[rows, PLACES, HIDDEN]
    ids,  # int32[rows, PLACES]
    expert_to_slot,  # int32[experts]
    post,  # float32[rows, N]
    combination,  # float32[rows, N, N]
    fn,  # float32[COUNT, N * HIDDEN]
    mixed,  # A[rows, N, HIDDEN], written if MIX
    partials,  # float32[rows, SPLITS, PADDED], written: COUNT products, then the sum of squares
    rows,
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIX: tl.constexpr,
    PLACES: tl.constexpr,  # 0 for an output that is whole
    EAGER: tl.constexpr,
    PROJECTION: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = row < rows
    row = row.to(tl.int64)
    channel = split * WIDTH + tl.arange(0, WIDTH)
    inside = channel < HIDDEN
    place = here[:, None] & inside[None, :]
    line = tl.arange(0, PADDED)
    table_at = line[None, :] * (N * HIDDEN) + channel[:, None]
    table_mask = (line < COUNT)[None, :] & inside[:, None]
    tables = ()
    if OVERLAPS:
        gdc_launch_dependents()
        # Weights do not depend on the kernel before: they are read while it still runs.
        for k in tl.static_range(N):
            tables = tables + (tl.load(fn + table_at + k * HIDDEN, mask=table_mask, other=0.0),)
        gdc_wait()
    parts = ()
    for j in tl.static_range(N):
        at = row[:, None] * (N * HIDDEN) + j * HIDDEN + channel[None, :]
        parts = parts + (tl.load(streams + at, mask=place, other=0.0),)
    if MIX:
        sums = ()
        slots = ()
        for k in tl.static_range(PLACES):
            expert = tl.load(ids + row * PLACES + k, mask=here, other=-1)
            slots = slots + (tl.load(expert_to_slot + expert, mask=expert >= 0, other=-1)[:, None],)
            at = (row[:, None] * PLACES + k) * HIDDEN + channel[None, :]
            mask = place if EAGER else place & (slots[k] >= 0)
            sums = sums + (tl.load(pairs + at, mask=mask, other=0.0),)
        if PLACES == 0 or output is not None:
            written = tl.load(output + row[:, None] * HIDDEN + channel[None, :], mask=place, other=0.0).to(tl.float32)
        posts = ()
        shares = ()
        for k in tl.static_range(N):
            posts = posts + (tl.load(post + row * N + k, mask=here, other=0.0),)
            for j in tl.static_range(N):
                shares = shares + (tl.load(combination + row * (N * N) + j * N + k, mask=here, other=0.0),)
    if not OVERLAPS:
        for k in tl.static_range(N):
            tables = tables + (tl.load(fn + table_at + k * HIDDEN, mask=table_mask, other=0.0),)
    # All loads are under way before the first is waited for: the assembler moves none down across a barrier.
    tl.debug_barrier()
    products = tl.zeros((TILE, PADDED), tl.float32)
    squares = tl.zeros((TILE, WIDTH), tl.float32)
    if PLACES > 0:
        total = tl.zeros((TILE, WIDTH), tl.float32)
        for k in tl.static_range(PLACES):
            # What lies in the place of an expert that is not here is no number, maybe.
            total += tl.where(slots[k] >= 0, sums[k], 0.0)
        written = total + written if output is not None else total
    for k in tl.static_range(N):
        if MIX:
            stream = posts[k][:, None] * written
            for j in tl.static_range(N):
                stream += shares[k * N + j][:, None] * parts[j].to(tl.float32)
            # Predictions see what is stored.
            part = _kept(stream.to(mixed.dtype.element_ty), WIDE)
            tl.store(mixed + row[:, None] * (N * HIDDEN) + k * HIDDEN + channel[None, :], part, mask=place)
        else:
            part = parts[k]
        value = part.to(tl.float32)
        squares += value * value
        table = _kept(tables[k], WIDE)
        if PROJECTION == "split":
            high = table.to(tl.bfloat16)
            rest = table - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            # The smallest first, so that they are not lost in a large sum.
            if WIDE:
                product = tl.dot(value, low.to(tl.float32), input_precision="ieee")
                product = tl.dot(value, middle.to(tl.float32), product, input_precision="ieee")
                products += tl.dot(value, high.to(tl.float32), product, input_precision="ieee")
            else:
                products += tl.dot(part, high, tl.dot(part, middle, tl.dot(part, low)))
        else:
            products = tl.dot(value, table, products, input_precision=PROJECTION)
    products = tl.where((line == COUNT)[None, :], tl.sum(squares, 1)[:, None], products)
    at = (row[:, None] * tl.num_programs(0) + split) * PADDED + line[None, :]
    tl.store(partials + at, products, mask=here[:, None])


@triton.jit
def _kept(x, WIDE: tl.constexpr):
    """x itself, which the compiler takes for something new. Operations before it stay where they are. The compiler
    would otherwise mix a second time, by all warps and in the layout of a product's operand, with each coefficient
    passed on through shared memory behind barriers."""
    if WIDE:
        return x
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def _connect_kernel(
    mixed,  # A[rows, N, HIDDEN]
    partials,  # float32[rows, SPLITS, PADDED]
    base,  # float32[COUNT]
    scale,  # float32[3]; a head's is [1]
    norm,  # float32[HIDDEN]
    given,  # float32[rows, N], read if GIVEN
    x,  # A[rows, HIDDEN], written
    post,  # float32[rows, N], written unless HEAD
    combination,  # float32[rows, N, N], written unless HEAD
    own,  # float32[rows, N], written unless HEAD
    eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    GIVEN: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, PADDED)
    bases = tl.load(base + line, mask=line < COUNT, other=0.0)
    scales = tl.load(scale + tl.minimum(line // N, 2), mask=line < COUNT, other=0.0)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.arange(0, SPLITS_PADDED)
    at = (row * SPLITS + split[:, None]) * PADDED + line[None, :]
    if tl.program_id(1) == 0:
        channel = tl.arange(0, BLOCK)
        inside = channel < HIDDEN
        parts = ()
        for k in tl.static_range(N):
            parts = parts + (tl.load(mixed + (row * N + k) * HIDDEN + channel, mask=inside, other=0.0),)
        if GIVEN:
            pre = tl.load(given + row * N + line, mask=line < N, other=0.0)
        else:
            # All of these loads are under way before one is waited for: the assembler moves none down across a barrier.
            tl.debug_barrier()
            shares = tl.load(partials + at, mask=(split < SPLITS)[:, None], other=0.0)
            tl.debug_barrier()
            pre = tl.sigmoid(_predict(shares, line, bases, scales, norm_eps, N * HIDDEN, COUNT)) + eps
        weight = tl.load(norm + channel, mask=inside, other=0.0)
        value = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(N):
            value += _pick(pre, line, k) * parts[k].to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + norm_eps) * weight
        tl.store(x + row * HIDDEN + channel, value.to(x.dtype.element_ty), mask=inside)
    elif not HEAD:
        shares = tl.load(partials + at, mask=(split < SPLITS)[:, None], other=0.0)
        tl.debug_barrier()
        logits = _predict(shares, line, bases, scales, norm_eps, N * HIDDEN, COUNT)
        opened = tl.sigmoid(logits)
        tl.store(own + row * N + line, opened + eps, mask=line < N)
        tl.store(post + row * N + line - N, 2 * opened, mask=(line >= N) & (line < 2 * N))
        # Cells are single numbers, which every thread has: no exchange between threads in 20 dependent iterations.
        cells = ()
        for j in tl.static_range(N):
            top = _pick(logits, line, 2 * N + j * N)
            for k in tl.static_range(1, N):
                top = tl.maximum(top, _pick(logits, line, 2 * N + j * N + k))
            for k in tl.static_range(N):
                cells = cells + (tl.exp(_pick(logits, line, 2 * N + j * N + k) - top),)
        cells = _divide_rows(cells, N, 0.0, WIDE)
        softened = ()
        for i in tl.static_range(N * N):
            softened = softened + (cells[i] + eps,)
        cells = _divide_columns(softened, N, eps, WIDE)
        for _ in range(ITERATIONS - 1):
            cells = _divide_columns(_divide_rows(cells, N, eps, WIDE), N, eps, WIDE)
        for i in tl.static_range(N * N):
            tl.store(combination + row * (N * N) + i, cells[i])


@triton.jit
def _predict(shares, line, bases, scales, norm_eps, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """float32[PADDED], of float32[SPLITS, PADDED] shares: the COUNT arguments of the sigmoids and of the softmax."""
    sums = tl.sum(shares, 0)
    # The prediction is of streams with mean square 1.
    unit = tl.rsqrt(_pick(sums, line, COUNT) / WIDTH + norm_eps)
    return sums * unit * scales + bases


@triton.jit
def _pick(vector, line, i):
    return tl.sum(tl.where(line == i, vector, 0.0), 0)


@triton.jit
def _divide_rows(cells, N: tl.constexpr, eps, WIDE: tl.constexpr):
    """A matrix of N x N numbers with each row divided by its sum + eps."""
    divided = ()
    for j in tl.static_range(N):
        total = cells[j * N] + eps
        for k in tl.static_range(1, N):
            total += cells[j * N + k]
        share = _reciprocal(total, WIDE)
        for k in tl.static_range(N):
            divided = divided + (cells[j * N + k] * share,)
    return divided


@triton.jit
def _reciprocal(x, WIDE: tl.constexpr):
    """1 / x, to the last bit or so. A division would guard against results that are no normal numbers, in twice the
    instructions; sums here lie between eps and N."""
    if WIDE:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _divide_columns(cells, N: tl.constexpr, eps, WIDE: tl.constexpr):
    """A matrix of N x N numbers with each column divided by its sum + eps."""
    shares = ()
    for k in tl.static_range(N):
        total = cells[k] + eps
        for j in tl.static_range(1, N):
            total += cells[j * N + k]
        shares = shares + (_reciprocal(total, WIDE),)
    divided = ()
    for j in tl.static_range(N):
        for k in tl.static_range(N):
            divided = divided + (cells[j * N + k] * shares[k],)
    return divided


def connect(
    streams: Tensor,
    output: Tensor | PairSums | None,
    post: Tensor | None,
    combination: Tensor | None,
    weights: HyperWeights,
    pre: Tensor | None = None,
    out: Tensor | None = None,
    *,
    config: HyperConfig = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.reference.connect`. Streams and output must be contiguous; without an output streams are returned.

    Args:
        config: how the kernels are cut.
    """
    rows, n, _ = streams.shape
    if out is not None and (out.shape != streams[:, 0].shape or not out.is_contiguous()):
        raise ValueError(f"the sublayer's input must be contiguous [rows, hidden], found {out.shape}")
    mixed, partials = _mix(streams, output, post, combination, weights, config)
    x = torch.empty_like(streams[:, 0]) if out is None else out
    next_post, own = partials.new_empty((rows, n)), partials.new_empty((rows, n))
    matrix = partials.new_empty((rows, n, n))
    _collapse(mixed, partials, weights, config, x, pre, (next_post, matrix, own))
    return mixed, x, next_post, matrix, own


def collapse_head(
    streams: Tensor,
    output: Tensor | PairSums,
    post: Tensor,
    combination: Tensor,
    weights: HyperWeights,
    *,
    config: HyperConfig = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Leave the last sublayer: mix its output in, collapse by the head's own coefficients, norm.

    Args as in `connect`, with a head's weights.

    Returns:
        (streams A[R, n, hidden] after the last layer, hidden A[R, hidden], the head's input).
    """
    mixed, partials = _mix(streams, output, post, combination, weights, config)
    x = torch.empty_like(streams[:, 0])
    _collapse(mixed, partials, weights, config, x, None, None)
    return mixed, x


def _mix(
    streams: Tensor,
    output: Tensor | PairSums | None,
    post: Tensor | None,
    combination: Tensor | None,
    weights: HyperWeights,
    config: HyperConfig,
) -> tuple[Tensor, Tensor]:
    """(mixed streams, float32[R, splits, padded count] shares of the predictions and of the squares)."""
    rows, n, hidden = streams.shape
    count = weights.fn.shape[0]
    padded = max(16, triton.next_power_of_2(count + 1))
    splits = triton.cdiv(hidden, config.width)
    mixes = output is not None
    pairs = ids = expert_to_slot = None
    if isinstance(output, PairSums):
        pairs, ids, expert_to_slot, output = output.pairs, output.ids, output.expert_to_slot, output.base
    mixed = torch.empty_like(streams) if mixes else streams
    partials = torch.empty((rows, splits, padded), dtype=torch.float32, device=streams.device)
    _mix_kernel[(splits, triton.cdiv(rows, TILE))](
        streams,
        output,
        pairs,
        ids,
        expert_to_slot,
        post,
        combination,
        weights.fn,
        mixed,
        partials,
        rows,
        HIDDEN=hidden,
        N=n,
        COUNT=count,
        PADDED=padded,
        TILE=TILE,
        WIDTH=config.width,
        MIX=mixes,
        PLACES=0 if ids is None else ids.shape[1],
        EAGER=rows <= EAGER_ROWS,
        PROJECTION=config.projection if streams.dtype == torch.bfloat16 else "ieee",
        WIDE=INTERPRETED,
        OVERLAPS=config.overlaps,
        num_warps=config.mix_warps,
        **_launch_options(config),
    )
    return mixed, partials


def _collapse(
    mixed: Tensor,
    partials: Tensor,
    weights: HyperWeights,
    config: HyperConfig,
    x: Tensor,
    pre: Tensor | None,
    ways_out: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Fill x, and post, combination and pre of the way out; a head has none."""
    rows, n, hidden = mixed.shape
    splits, padded = partials.shape[1:]
    post, combination, own = ways_out if ways_out is not None else (None, None, None)
    _connect_kernel[(rows, 1 if ways_out is None else 2)](
        mixed,
        partials,
        weights.base,
        weights.scale,
        weights.norm,
        pre,
        x,
        post,
        combination,
        own,
        weights.eps,
        weights.norm_eps,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        N=n,
        COUNT=weights.fn.shape[0],
        PADDED=padded,
        SPLITS=splits,
        SPLITS_PADDED=triton.next_power_of_2(splits),
        ITERATIONS=weights.iterations,
        GIVEN=pre is not None,
        HEAD=ways_out is None,
        WIDE=INTERPRETED,
        OVERLAPS=config.overlaps,
        num_warps=config.connect_warps,
        **_launch_options(config),
    )


def _launch_options(config: HyperConfig) -> dict[str, bool]:
    return {"launch_pdl": True} if config.overlaps else {}
