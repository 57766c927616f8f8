"""Reference: what every kernel computes, in plain torch and float32, on any device.

Truth for tests, and a working set of operations for machines without a GPU: same names, arguments and results as the
launchers (each in the module that `__all__` groups it under). It favours plainness: loops over rows, no batching
tricks.

Conventions. `A` is the activations' type, bf16 or float32; sums are formed in float32 whatever A is. Weights of norms
are float32. `turns` is float32[positions, rope / 2, 2], cosine and sine. Where rows compete, the lowest index wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.forms import (
    SCALE_CHANNELS,
    DraftState,
    HyperWeights,
    IdRing,
    Judged,
    KeyProjection,
    MemoryTable,
    PairSums,
    Plane,
    Pooling,
    RawRing,
    SlotWeights,
    StepRows,
    StreamPlace,
    Weight,
)

__all__ = [
    # ends
    "open_streams", "likeliest",
    # linear
    "linear", "paired_linear", "grouped_linear", "gated_linear",
    # hyper
    "connect", "collapse_head",
    # rows
    "norm_rows", "prepare_queries", "write_window",
    # compressor
    "compress",
    # latents
    "compress_latents",
    # entrance
    "enter_attention",
    # indexer
    "select_entries", "prepare_and_select",
    # candidates
    "select_and_rank", "select_among",
    # memory
    "read_memory", "add_memory",
    # attention
    "attend",
    # gate
    "route",
    # experts
    "mix_experts", "multiply_pairs",
    # exchange, combine
    "dispatch_rows", "combine_rows",
    # drafts
    "open_rows", "judge_rows", "keep_drafts", "open_slots", "pick_rows", "keep_streams",
]  # fmt: skip

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0


# Number formats


def power_of_two(scale: Tensor) -> Tensor:
    """float32 values of e8m0 bytes: 2^(byte - 127)."""
    return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)


def scale_byte(ratio: Tensor) -> Tensor:
    """e8m0 bytes of the smallest power of two that is at least `ratio`; 127 (1.0) where that is 0."""
    mantissa, exponent = torch.frexp(ratio.float())
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(ratio > 0, exponent + 127, 127).clamp(0, 254).to(torch.uint8)


def dequantise(weight: Weight) -> Tensor:
    """float32[out, in] of a weight."""
    if weight.scale is None:
        return weight.data.float()
    rows, columns = weight.data.shape
    scale = power_of_two(weight.scale)
    scale = scale.repeat_interleave(weight.block[0], 0)[:rows].repeat_interleave(weight.block[1], 1)[:, :columns]
    return weight.data.float() * scale


def dequantise_mxfp4(data: Tensor, scale: Tensor) -> Tensor:
    """float32[..., columns] of uint8[..., columns / 2] and uint8[..., columns / 32]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=data.device)
    values = torch.stack((table[(data & 15).long()], table[(data >> 4).long()]), -1).flatten(-2)
    return values * power_of_two(scale).repeat_interleave(32, -1)


def slot_matrices(slots: SlotWeights, slot: int) -> tuple[Tensor, Tensor]:
    """(up float32[2 * width, hidden], down float32[hidden, width]) of one slot."""
    if slots.up_scale is None or slots.down_scale is None:
        return slots.up[slot].float(), slots.down[slot].float()
    up = dequantise_mxfp4(slots.up[slot], slots.up_scale[slot])
    return up, dequantise_mxfp4(slots.down[slot], slots.down_scale[slot])


# Ends


def open_streams(tokens: Tensor, embed: Tensor, n: int) -> Tensor:
    """A[R, n, hidden]: the lines of int32[R] tokens in A[vocab, hidden], once in each stream."""
    return embed[tokens.long()].unsqueeze(1).repeat(1, n, 1)


def likeliest(logits: Tensor) -> Tensor:
    """int64[R]: the first of the largest of each row of float32[R, vocab]; NaN counts as largest."""
    largest = logits.amax(-1, keepdim=True)
    return ((logits == largest) | logits.isnan()).int().argmax(-1)


# Linear layers


def linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x times the transposed weight.

    Args:
        x: A[R, in], rows contiguous.
        weight: [out, in].
        out_dtype: A if None.

    Returns:
        out_dtype[R, out].
    """
    return (x.float() @ dequantise(weight).T).to(out_dtype or x.dtype)


def paired_linear(x: Tensor, weight: Weight, side: Weight) -> tuple[Tensor, Tensor]:
    """x times two weights: (A[R, out], float32[R, side out])."""
    return linear(x, weight), linear(x, side, torch.float32)


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Each group of channels times its own part of the weight.

    Args:
        x: A[R, groups * in].
        weight: [groups * out, in], groups one after the other; blocks do not cross groups.
        groups: how many.

    Returns:
        A[R, groups * out].
    """
    parts = dequantise(weight).unflatten(0, (groups, -1))
    return torch.einsum("rgi,goi->rgo", x.float().unflatten(1, (groups, -1)), parts).flatten(1).to(x.dtype)


def gated_linear(x: Tensor, weight: Weight, clamp: float) -> Tensor:
    """silu of the gate, clamped from above, times the up projection, clamped on both sides.

    Args:
        x: A[R, in].
        weight: [2 * width, in], the gate (w1) and then the up projection (w3).
        clamp: limit.

    Returns:
        A[R, width].
    """
    gate, up = (x.float() @ dequantise(weight).T).chunk(2, -1)
    return _gated(gate, up, clamp).to(x.dtype)


def _gated(gate: Tensor, up: Tensor, clamp: float) -> Tensor:
    return F.silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp)


# Hyper-connections


def connect(
    streams: Tensor,
    output: Tensor | PairSums | None,
    post: Tensor | None,
    combination: Tensor | None,
    weights: HyperWeights,
    pre: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Leave one sublayer and enter the next: mix its output into the streams, predict, collapse, norm.

    Args:
        streams: A[R, n, hidden], as they entered the sublayer before; not written.
        output: A[R, hidden] of it, or what adds up to it; None at the first sublayer, which leaves the streams as they
            are.
        post: float32[R, n], its own; None like `output`.
        combination: float32[R, n, n] (from, to), its own; None like `output`.
        weights: of the sublayer that is entered.
        pre: float32[R, n] to collapse with (V4.1: the one before); None for the sublayer's own.
        out: A[R, hidden], where the input of the sublayer goes; None for new memory.

    Returns:
        (streams A[R, n, hidden], input of the sublayer A[R, hidden], post, combination, pre: its own).
    """
    mixed = streams
    if output is not None and post is not None and combination is not None:
        written = post.unsqueeze(-1) * _whole(output).unsqueeze(1)
        mixed = (written + torch.einsum("rjk,rjd->rkd", combination, streams.float())).to(streams.dtype)
    n = streams.shape[1]
    z = _predict(mixed, weights)
    own = torch.sigmoid(z[:, :n] * weights.scale[0] + weights.base[:n]) + weights.eps
    next_post = 2 * torch.sigmoid(z[:, n : 2 * n] * weights.scale[1] + weights.base[n : 2 * n])
    matrix = (z[:, 2 * n :] * weights.scale[2] + weights.base[2 * n :]).unflatten(1, (n, n)).softmax(-1) + weights.eps
    matrix = matrix / (matrix.sum(1, keepdim=True) + weights.eps)
    for _ in range(weights.iterations - 1):
        matrix = matrix / (matrix.sum(2, keepdim=True) + weights.eps)
        matrix = matrix / (matrix.sum(1, keepdim=True) + weights.eps)
    x = _collapse(mixed, own if pre is None else pre, weights)
    x = x if out is None else out.copy_(x)
    return mixed, x, next_post, matrix, own


def collapse_head(
    streams: Tensor, output: Tensor | PairSums, post: Tensor, combination: Tensor, weights: HyperWeights
) -> tuple[Tensor, Tensor]:
    """Leave the last sublayer: mix its output in, collapse by the head's own coefficients, norm.

    Returns:
        (streams A[R, n, hidden] after the last layer, hidden A[R, hidden], the head's input).
    """
    written = post.unsqueeze(-1) * _whole(output).unsqueeze(1)
    mixed = (written + torch.einsum("rjk,rjd->rkd", combination, streams.float())).to(streams.dtype)
    pre = torch.sigmoid(_predict(mixed, weights) * weights.scale + weights.base) + weights.eps
    return mixed, _collapse(mixed, pre, weights)


def _whole(output: Tensor | PairSums) -> Tensor:
    return add_pairs(output) if isinstance(output, PairSums) else output.float()


def _predict(streams: Tensor, weights: HyperWeights) -> Tensor:
    flat = streams.flatten(1).float()
    return (flat @ weights.fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + weights.norm_eps)


def _collapse(streams: Tensor, pre: Tensor, weights: HyperWeights) -> Tensor:
    # Rounded to A between collapse and norm nowhere: one rounding, at the end.
    x = (streams.float() * pre.unsqueeze(-1)).sum(1)
    return _norm(x, weights.norm, weights.norm_eps).to(streams.dtype)


# Rows


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def _turn(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the trailing channels (pairs of neighbours) of float32[..., width] by float32[..., rope / 2, 2]."""
    rope = turns.shape[-2] * 2
    cos, sin = turns[..., 0], -turns[..., 1] if inverse else turns[..., 1]
    even, odd = x[..., x.shape[-1] - rope :: 2], x[..., x.shape[-1] - rope + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - rope], turned), -1)


def norm_rows(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """RMS norm of float[R, width] (rows may lie in a wider tensor), times float32[width]: out_dtype[R, width]."""
    return _norm(x, weight, eps).to(out_dtype)


def prepare_queries(query: Tensor, positions: Tensor, turns: Tensor, eps: float | None) -> Tensor:
    """Norm each head (without weight; not at all if `eps` is None) and rotate it by its row's position.

    Args:
        query: A[R, heads, width] (rows may lie in a wider tensor).
        positions: int32[R]; -1 is taken as 0.
        turns: of the layer.
        eps: of the norm.

    Returns:
        A[R, heads, width].
    """
    x = query.float() if eps is None else _norm(query, None, eps)
    return _turn(x, turns[positions.long().clamp(min=0)].unsqueeze(1)).to(query.dtype)


def write_window(
    kv: Tensor, norm: Tensor, eps: float, turns: Tensor, rows: StepRows, arena: Tensor, ring: Plane
) -> None:
    """Norm, rotate and store the window record of each row at `position % ring.rows` of its sequence's slab.

    Args:
        kv: float[R, width] (rows may lie in a wider tensor).
        norm, eps: of the norm.
        turns: of the layer.
        rows: the step.
        arena: uint8[bytes], written into.
        ring: the layer's window ring.
    """
    positions = rows.positions.tolist()
    slabs = rows.slabs.tolist()
    for r, position in enumerate(positions):
        if position >= 0:
            record = _turn(_norm(kv[r], norm, eps), turns[position])
            store_record(arena, ring, slabs[r // rows.span], position % ring.rows, record)


# Records


def store_record(arena: Tensor, plane: Plane, block: int, row: int, record: Tensor) -> None:
    """Write float32[width] as the plane's format has it."""
    at = plane.data + block * plane.stride + row * plane.data_bytes
    data = arena[at : at + plane.data_bytes]
    if plane.format == "fp32":
        data.view(torch.float32).copy_(record)
        return
    if plane.format == "bf16":
        data.view(torch.bfloat16).copy_(record)
        return
    at = plane.scale + block * plane.stride + row * plane.scale_bytes
    scales = arena[at : at + plane.scale_bytes]
    still = plane.width - plane.rope
    if plane.rope == 0:
        scale = power_of_two(scale_byte(record.abs().amax() / E4M3_MAX))
        data.view(torch.float8_e4m3fn).copy_((record / scale).clamp(-E4M3_MAX, E4M3_MAX))
        scales.view(torch.float32).copy_(scale)
        return
    groups = record[:still].view(-1, SCALE_CHANNELS)
    byte = scale_byte(groups.abs().amax(1) / E4M3_MAX)
    values = (groups / power_of_two(byte).unsqueeze(1)).clamp(-E4M3_MAX, E4M3_MAX)
    data[:still].view(torch.float8_e4m3fn).copy_(values.flatten())
    data[still:].view(torch.bfloat16).copy_(record[still:])
    scales[: len(byte)].copy_(byte)


def load_record(arena: Tensor, plane: Plane, block: int, row: int) -> Tensor:
    """float32[width] of a stored record."""
    at = plane.data + block * plane.stride + row * plane.data_bytes
    data = arena[at : at + plane.data_bytes]
    if plane.format == "fp32":
        return data.view(torch.float32).clone()
    if plane.format == "bf16":
        return data.view(torch.bfloat16).float()
    at = plane.scale + block * plane.stride + row * plane.scale_bytes
    scales = arena[at : at + plane.scale_bytes]
    if plane.rope == 0:
        return data.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    still = plane.width - plane.rope
    values = data[:still].view(torch.float8_e4m3fn).float().view(-1, SCALE_CHANNELS)
    values = values * power_of_two(scales[: len(values)]).unsqueeze(1)
    return torch.cat((values.flatten(), data[still:].view(torch.bfloat16).float()))


def _raw_row(arena: Tensor, ring: RawRing, slab: int, position: int) -> Tensor:
    at = ring.data + slab * ring.stride + position % ring.rows * ring.width * 4
    return arena[at : at + ring.width * 4].view(torch.float32)


# Compressor


def compress(raw: Tensor, pooling: Pooling, turns: Tensor, rows: StepRows, arena: Tensor) -> None:
    """Store the raw rows of a step in their rings; norm, rotate and store the records that they close.

    A row closes record w when its position is (w + 1) * ratio - 1. It pools the rows of its group (and of the group
    before, where records overlap), whether they came in earlier steps or come in this one: softmax of the gates
    channel by channel over the rows, times the latents. The record is rotated at w * ratio and stored at row `w %
    target.rows` of page `tables[sequence, w // target.rows]`.

    Args:
        raw: float32[R, ring.width] (rows may lie in a wider tensor): latents, then gates without bias.
        pooling: what and where.
        turns: of layers with compressed entries.
        rows: the step.
        arena: uint8[bytes], written into.
    """
    ratio, ring, target = pooling.ratio, pooling.ring, pooling.target
    half = ring.width // 2
    positions, slabs = rows.positions.tolist(), rows.slabs.tolist()
    for r, position in enumerate(positions):
        if position < 0:
            continue
        slab = slabs[r // rows.span]
        row = raw[r].float().clone()
        if pooling.bias is not None:
            row[half:] += pooling.bias[position % ratio]
        _raw_row(arena, ring, slab, position).copy_(row)
        if (position + 1) % ratio:
            continue
        first = position + 1 - ratio
        own = torch.stack([_raw_row(arena, ring, slab, first + j) for j in range(ratio)])
        latent, gate = own[:, :half], own[:, half:]
        if pooling.overlaps:
            latent, gate = latent[:, half // 2 :], gate[:, half // 2 :]
            if first > 0:
                before = torch.stack([_raw_row(arena, ring, slab, first - ratio + j) for j in range(ratio)])
                latent = torch.cat((before[:, : half // 2], latent))
                gate = torch.cat((before[:, half : half + half // 2], gate))
        record = _turn(_norm((gate.softmax(0) * latent).sum(0), pooling.norm, pooling.eps), turns[first])
        entry = position // ratio
        page = int(rows.tables[r // rows.span, entry // target.rows])
        store_record(arena, target, page, entry % target.rows, record)


def compress_latents(
    raw: Tensor, pooling: Pooling, key: KeyProjection, turns: Tensor, rows: StepRows, arena: Tensor
) -> None:
    """`compress`, and beside each record an index key, which is made of the record before it is rotated.

    The key is the projection of the normed record, normed itself (with the pooling's eps), rotated like the record, and
    stored at the same row of the same page.

    Args:
        raw: as in `compress`. Of ratio 1 float32[R, target.width], latents without gates, and no ring.
        pooling: of entries, without overlap and bias.
        key: of index keys.
        turns: of layers with compressed entries.
        rows: the step.
        arena: uint8[bytes], written into.
    """
    ratio, ring, target = pooling.ratio, pooling.ring, pooling.target
    positions, slabs = rows.positions.tolist(), rows.slabs.tolist()
    for r, position in enumerate(positions):
        if position < 0:
            continue
        if ratio > 1:
            _raw_row(arena, ring, slabs[r // rows.span], position).copy_(raw[r])
        if (position + 1) % ratio:
            continue
        first = position + 1 - ratio
        latent = raw[r].float()
        if ratio > 1:
            own = torch.stack([_raw_row(arena, ring, slabs[r // rows.span], first + j) for j in range(ratio)])
            latent = (own[:, ring.width // 2 :].softmax(0) * own[:, : ring.width // 2]).sum(0)
        latent = _norm(latent, pooling.norm, pooling.eps)
        entry = position // ratio
        page = int(rows.tables[r // rows.span, entry // target.rows])
        store_record(arena, target, page, entry % target.rows, _turn(latent, turns[first]))
        record = _turn(_norm(key.matrix.float() @ latent, key.norm, pooling.eps), turns[first])
        store_record(arena, key.target, page, entry % target.rows, record)


def enter_attention(
    wide: Tensor,
    query_norm: Tensor,
    window_norm: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    turns: Tensor,
    rows: StepRows,
    arena: Tensor,
    ring: Plane,
    compressions: Sequence[tuple[Tensor, Pooling]] = (),
) -> Tensor:
    """All that lies between the first products of a layer and the query's second: `norm_rows`, `write_window` and
    `compress`.

    Args:
        wide: float[R, rank + ring.width] (rows may lie in a wider tensor): the query's latent, then the window record.
        query_norm: float32[rank].
        window_norm: float32[ring.width].
        eps: of both norms.
        out_dtype: A.
        turns: of the layer.
        rows: the step.
        arena: uint8[bytes], written into.
        ring: the layer's window ring.
        compressions: raw rows and pooling, as `compress` takes them; two at most, whose rings and targets are apart.

    Returns:
        A[R, rank], the normed latent.
    """
    rank, width = len(query_norm), ring.width
    write_window(wide[:, rank : rank + width], window_norm, eps, turns, rows, arena, ring)
    for raw, pooling in compressions:
        compress(raw, pooling, turns, rows, arena)
    return norm_rows(wide[:, :rank], query_norm, eps, out_dtype)


# Indexer


def score_entries(query: Tensor, share: Tensor, ratio: int, rows: StepRows, arena: Tensor, keys: Plane) -> list[Tensor]:
    """For each row float32[visible entries]: sum over heads of share * relu(<query, key>)."""
    scores = []
    for r, position in enumerate(rows.positions.tolist()):
        visible = (position + 1) // ratio if position >= 0 else 0
        pages = rows.tables[r // rows.span].tolist()
        held = [load_record(arena, keys, pages[w // keys.rows], w % keys.rows) for w in range(visible)]
        table = torch.stack(held) if held else query.new_zeros((0, keys.width), dtype=torch.float32)
        scores.append((share[r].unsqueeze(1) * (query[r].float() @ table.T).relu()).sum(0))
    return scores


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
) -> Tensor:
    """The `top_k` entries with the highest index scores among those a row sees; equal scores go to the lowest entry.

    A row at position t sees entries w with (w + 1) * ratio <= t + 1.

    Args:
        query: A[R, heads, width] (rows may lie in a wider tensor); to be rotated by the rows' positions.
        share: float32[R, heads] (rows may lie in a wider tensor), the heads' weights.
        turns: of the layer.
        ratio: tokens of an entry.
        top_k: places.
        rows: the step.
        arena: uint8[bytes].
        keys: index keys in pages.
        share_scale: factor on all of `share`.

    Returns:
        int32[R, top_k], ascending; -1 in the places that stay empty, which come last.
    """
    query = prepare_queries(query, rows.positions, turns, None)
    chosen = torch.full((rows.rows, top_k), -1, dtype=torch.int32, device=query.device)
    for r, scores in enumerate(score_entries(query, share * share_scale, ratio, rows, arena, keys)):
        order = torch.sort(scores, descending=True, stable=True).indices[:top_k].sort().values
        chosen[r, : len(order)] = order.int()
    return chosen


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
) -> tuple[Tensor, Tensor]:
    """`prepare_queries` of the attention's heads, with `eps`, and beside it `select_entries` with the indexer's."""
    selected = select_entries(index_query, share, turns, ratio, top_k, rows, arena, keys, share_scale)
    return prepare_queries(query, rows.positions, turns, eps), selected


# Candidates


def select_and_rank(
    query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    size: int,
    count: int,
    share_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`select_entries`, and the blocks of entries that layers behind this one may select from.

    Args:
        size: entries of a block.
        count: blocks that a row keeps: those with the highest scores, the newest one always, of equal ones the lowest.
            They hold at least `top_k` entries.

    Returns:
        (int32[R, top_k] entries, int32[R, count] blocks), both ascending, with -1 in places that stay empty.
    """
    selected = select_entries(query, share, turns, ratio, top_k, rows, arena, keys, share_scale)
    query = prepare_queries(query, rows.positions, turns, None)
    kept = torch.full((rows.rows, count), -1, dtype=torch.int32, device=query.device)
    for r, scores in enumerate(score_entries(query, share * share_scale, ratio, rows, arena, keys)):
        ranked = torch.stack([part.amax() for part in scores.split(size)]) if len(scores) else scores
        ranked[-1:] = torch.inf
        order = torch.sort(ranked, descending=True, stable=True).indices[:count].sort().values
        kept[r, : len(order)] = order.int()
    return selected, kept


def select_among(
    query: Tensor,
    share: Tensor,
    turns: Tensor,
    ratio: int,
    top_k: int,
    rows: StepRows,
    arena: Tensor,
    keys: Plane,
    blocks: Tensor,
    size: int,
    share_scale: float = 1.0,
) -> Tensor:
    """`select_entries` among the entries of some blocks: `blocks` and `size` as `select_and_rank` has them."""
    query = prepare_queries(query, rows.positions, turns, None)
    chosen = torch.full((rows.rows, top_k), -1, dtype=torch.int32, device=query.device)
    for r, scores in enumerate(score_entries(query, share * share_scale, ratio, rows, arena, keys)):
        allowed = torch.isin(torch.arange(len(scores), device=scores.device) // size, blocks[r].long())
        ranked = scores.masked_fill(~allowed, -torch.inf)
        order = torch.sort(ranked, descending=True, stable=True).indices[: min(top_k, int(allowed.sum()))].sort().values
        chosen[r, : len(order)] = order.int()
    return chosen


# Memory


def read_memory(
    tokens: Tensor, rows: StepRows, arena: Tensor, ring: IdRing, table: MemoryTable, out_dtype: torch.dtype
) -> Tensor:
    """Keep the step's ids, and read the lines that they and those before them stand for.

    Args:
        tokens: int32[R].
        rows: the step.
        arena: uint8[bytes]; the ring is written.
        ring: of ids.
        table: the layer's.
        out_dtype: A.

    Returns:
        A[R, table.width], the lines one after the other; zeros in rows of padding.
    """
    ids, slabs = tokens.tolist(), rows.slabs.tolist()
    out = torch.zeros((rows.rows, table.width), dtype=out_dtype, device=arena.device)
    per_order = len(table.primes) // table.history
    for r, position in enumerate(rows.positions.tolist()):
        if position < 0:
            continue
        at = ring.data + slabs[r // rows.span] * ring.stride
        kept = arena[at : at + ring.rows * 4].view(torch.int32)
        kept[position % ring.rows] = ids[r]
        running, is_known, lines = 0, True, []
        for back in range(table.history + 1):
            token = int(kept[(position - back) % ring.rows]) if position >= back else -1
            is_known = is_known and token >= 0
            running ^= (int(table.folded[token]) if is_known else table.pad) * int(table.multipliers[back])
            if back:
                part = slice((back - 1) * per_order, back * per_order)
                lines.append(running % table.primes[part] + table.offsets[part])
        found = torch.cat(lines)
        values = table.data[found.to(table.data.device)].to(arena.device).float()
        if table.scale is not None:
            values = values * power_of_two(table.scale[found]).repeat_interleave(32, 1)[:, : values.shape[1]]
        out[r] = values.flatten()
    return out


def add_memory(streams: Tensor, projected: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add a memory to the streams, each through a gate of its own.

    The gate is the sigmoid of the signed root of a match: the sum over channels of weight times the normed stream times
    the normed key; the root is of at least 1e-6.

    Args:
        streams: A[R, n, hidden]; not written.
        projected: A[R, (n + 1) * hidden], a key for each stream, then the value.
        weight: float32[n, hidden].
        eps: of both norms.

    Returns:
        A[R, n, hidden].
    """
    parts = projected.float().unflatten(1, (streams.shape[1] + 1, -1))
    match = (_norm(streams, None, eps) * _norm(parts[:, :-1], None, eps) * weight).sum(-1, keepdim=True)
    gate = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    return (streams.float() + gate * parts[:, -1:]).to(streams.dtype)


# Attention


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
) -> Tensor:
    """Attention of each row over its window, its entries and a sink, with the rotation undone.

    logit = <query, record> / sqrt(width); the sink is a logit with value zero. A row at position t sees window
    records of positions max(0, t - window + 1) .. t of its slab, and entries w with (w + 1) * ratio <= t + 1: all of
    them, or those that are `selected`.

    Args:
        query: A[R, heads, width], rotated.
        sink: float32[heads].
        turns: of the layer; the output is rotated back by its row's position.
        rows: the step. Padding rows give zeros.
        arena: uint8[bytes].
        ring: the layer's window ring.
        window: positions seen.
        entries: entries in pages; None for a layer that has none.
        ratio: tokens of an entry.
        selected: int32[R, k], ascending, -1 last; None for all that are visible.

    Returns:
        A[R, heads, width].
    """
    out = torch.zeros_like(query)
    scale = query.shape[-1] ** -0.5
    for r, position in enumerate(rows.positions.tolist()):
        if position < 0:
            continue
        sequence = r // rows.span
        slab = int(rows.slabs[sequence])
        seen = range(max(0, position - window + 1), position + 1)
        records = [load_record(arena, ring, slab, p % ring.rows) for p in seen]
        if entries is not None:
            visible = (position + 1) // ratio
            chosen = range(visible) if selected is None else [w for w in selected[r].tolist() if w >= 0]
            pages = rows.tables[sequence].tolist()
            records += [load_record(arena, entries, pages[w // entries.rows], w % entries.rows) for w in chosen]
        table = torch.stack(records)
        logits = torch.cat((query[r].float() @ table.T * scale, sink.float().unsqueeze(1)), 1)
        out[r] = _turn(logits.softmax(1)[:, :-1] @ table, turns[position].unsqueeze(0), inverse=True).to(query.dtype)
    return out


# Mixture of experts


def route(
    x: Tensor,
    gate: Weight,
    bias: Tensor | None,
    hashed: Tensor | None,
    top_k: int,
    scale: float,
    tokens: Tensor | None = None,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by the square root of softplus of the logits, plus a bias for the choice only.

    Args:
        x: A[T, hidden] (rows may lie in a wider tensor).
        gate: [experts, hidden], not quantised; times x the logits, in float32.
        bias: float32[experts]; None with `hashed`.
        hashed: int32[any, top_k], experts that are looked up; None where they are chosen.
        top_k: experts of a row.
        scale: factor on the weights, which add up to 1 before it.
        tokens: int32[T], the rows' lines of `hashed`; None where line r is row r's.
        positions: int32[T]; rows with position -1 get expert -1 in all places and weight 0. None if there are none.
        counts: int32[experts], to which the rows of each expert are added, those with position -1 left out.
        out: where results go, both contiguous; None for new memory.

    Returns:
        (ids int32[T, top_k], ascending, weights float32[T, top_k]).
    """
    scores = F.softplus(linear(x, gate, torch.float32)).sqrt()
    if hashed is not None:
        lines = hashed[: len(x)] if tokens is None else hashed[tokens.long()]
        ids = lines.long().sort(-1).values
    else:
        ranked = scores if bias is None else scores + bias
        ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    chosen = scores.gather(-1, ids)
    weights = chosen / chosen.sum(-1, keepdim=True) * scale
    if positions is not None:
        is_used = (positions >= 0).unsqueeze(1)
        ids = torch.where(is_used, ids, -1)
        weights = torch.where(is_used, weights, 0.0)
    if counts is not None:
        flat = ids.flatten()
        counts += torch.bincount(flat[flat >= 0], minlength=len(counts)).int()
    if out is None:
        return ids.int(), weights
    return out[0].copy_(ids), out[1].copy_(weights)


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_to_slot: Tensor,
    slots: SlotWeights,
    clamp: float,
    base: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts that this rank has.

    Args:
        x: A[T, hidden].
        ids: int32[T, k], ascending; -1 for none.
        weights: float32[T, k].
        expert_to_slot: int32[experts], -1 for an expert of another rank.
        slots: the rank's slots.
        clamp: limit inside the gated unit.
        base: A[R, hidden], R <= T, to which the sums of the first R rows are added.

    Returns:
        float32[T, hidden], zero where a row has no expert here; with a base A[R, hidden]. Summed in the order of the
        places, the base last.
    """
    out = add_pairs(multiply_pairs(x, ids, weights, expert_to_slot, slots, clamp, base))
    return out if base is None else out.to(base.dtype)


def multiply_pairs(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_to_slot: Tensor,
    slots: SlotWeights,
    clamp: float,
    base: Tensor | None = None,
) -> PairSums:
    """What `mix_experts` adds up, for `connect`, which can do that, too."""
    pairs = torch.zeros((*ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for row, experts in enumerate(ids.tolist()):
        for place, expert in enumerate(experts):
            slot = int(expert_to_slot[expert]) if expert >= 0 else -1
            if slot < 0:
                continue
            up, down = slot_matrices(slots, slot)
            gate, lift = (up @ x[row].float()).chunk(2)
            # The hidden layer is stored in A between the two products.
            inner = _gated(gate, lift, clamp).to(x.dtype).float()
            pairs[row, place] = weights[row, place] * (down @ inner)
    return PairSums(pairs, ids, expert_to_slot, base)


def add_pairs(sums: PairSums) -> Tensor:
    """float32[R, hidden]: the pairs whose experts are here, in the order of places, and then the base."""
    rows = len(sums.pairs) if sums.base is None else len(sums.base)
    out = torch.zeros_like(sums.pairs[:rows, 0])
    for place in range(sums.ids.shape[1]):
        ids = sums.ids[:rows, place].long()
        is_here = (ids >= 0) & (sums.expert_to_slot[ids.clamp(min=0)] >= 0)
        out += torch.where(is_here.unsqueeze(1), sums.pairs[:rows, place], 0.0)
    return out if sums.base is None else out + sums.base.float()


# Exchange between ranks


def dispatch_rows(
    x: Sequence[Tensor], ids: Sequence[Tensor], weights: Sequence[Tensor], rows: int, *, narrow: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What every rank of a group has after a dispatch. The launcher is one rank's share in it.

    Args:
        x: of each rank A[own, hidden].
        ids: of each rank int32[own, k].
        weights: of each rank float32[own, k].
        rows: places that each rank has, at least its own rows.
        narrow: rows go through e4m3, with a power of two for each 128 columns.

    Returns:
        (A[ranks * rows, hidden], int32[ranks * rows, k], float32[ranks * rows, k]), by rank; 0, -1 and 0 where a rank
        has no row.
    """
    fill = [(0, 0, 0, rows - len(own)) for own in x]
    all_x = torch.cat([F.pad(own, pad) for own, pad in zip(x, fill, strict=True)])
    if narrow:
        groups = all_x.float().unflatten(1, (-1, 128))
        scale = power_of_two(scale_byte(groups.abs().amax(-1, keepdim=True) / E4M3_MAX))
        all_x = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1).to(all_x.dtype)
    all_ids = torch.cat([F.pad(own, pad, value=-1) for own, pad in zip(ids, fill, strict=True)])
    return all_x, all_ids, torch.cat([F.pad(own, pad) for own, pad in zip(weights, fill, strict=True)])


def keep_ids(ids: Tensor, expert_to_place: Tensor, place: int) -> Tensor:
    """int32[rows, k]: the ids whose experts a place computes, by int32[experts]; -1 instead of others."""
    is_here = (ids >= 0) & (expert_to_place[ids.long().clamp(min=0)] == place)
    return torch.where(is_here, ids, -1)


def combine_rows(
    partial: Sequence[Tensor], rank: int, ids: Tensor, base: Tensor | None, dtype: torch.dtype, part_dtype: torch.dtype
) -> Tensor:
    """The sums of a rank's own rows over the parts of all ranks, added in the order of ranks, the base last.

    Args:
        partial: of each rank float32[own, hidden], its part of the sums of this rank's rows.
        rank: this one, whose own part is not rounded to `part_dtype`.
        ids: int32[own, k]; a row whose first one is -1 is padding, whose sum is 0.
        base: A[own, hidden], or None.
        dtype: A.
        part_dtype: in which parts travel.

    Returns:
        A[own, hidden].
    """
    total = torch.zeros_like(partial[rank])
    for source, part in enumerate(partial):
        total += part if source == rank else part.to(part_dtype).float()
    total = torch.where(ids[:, :1] >= 0, total, 0.0)
    return (total if base is None else total + base.float()).to(dtype)


# Drafts


def open_rows(told: Tensor, state: DraftState, rows: StepRows, tokens: Tensor) -> None:
    """The rows of a verify step: of each sequence its token and the drafts behind it, from the host or from the state.

    Drafts of the state are taken only if they follow the very token, at the very place, that the row has. No row stands
    at the sequence's end or behind it.

    Args:
        told: int32[5 + most, B], what the host says of each sequence: its token, and the token's position (-1: as the
            state has them), its place in the state, its end, how many drafts (-1: as the state has them), and these.
        state: only read.
        rows: `span` rows for each sequence; positions and slabs are written. A sequence of padding has slab 0.
        tokens: int32[B * span], written.
    """
    span, padding = rows.span, len(state.stands) - 1
    for b, (token, position, place, end, count, *drafts) in enumerate(told.T.tolist()):
        token = int(state.tokens[place]) if token < 0 else token
        stand = int(state.stands[place])
        position = stand if position < 0 else position
        if count < 0:
            follows = stand == position and int(state.tokens[place]) == token
            count, drafts = int(state.counts[place]) if follows else 0, state.drafts[place].tolist()
        held = max(min(count, end - 1 - position, span - 1), 0)
        is_live = 0 <= position < end
        line = [token, *drafts[:held]] if is_live else []
        first = b * span
        for i in range(span):
            tokens[first + i] = line[i] if i < len(line) else 0
            rows.positions[first + i] = position + i if i < len(line) else -1
        rows.slabs[b] = place if place < padding else 0


def judge_rows(
    greedy: Tensor, tokens: Tensor, positions: Tensor, told: Tensor, state: DraftState, rounds: int
) -> Judged:
    """Which drafts hold: those that are the target's likeliest token of the row before, up to the first that is not.

    The state moves on: to the token behind the last draft that holds, with as many drafts as will be made.

    Args:
        greedy: int64[B * span], the target's likeliest tokens.
        tokens, positions: int32[B * span], the rows as `open_rows` made them.
        told: as given to `open_rows`.
        state: written, for each sequence that has rows.
        rounds: drafts that are made behind each sequence.
    """
    sequences = told.shape[1]
    span = len(tokens) // sequences
    device = greedy.device
    kept = torch.full_like(positions, -1)
    last = torch.zeros(sequences, dtype=torch.int32, device=device)
    slots = torch.full((rounds, sequences), -1, dtype=torch.int32, device=device)
    result = torch.full((sequences, 3 + span + rounds), -1, dtype=torch.int32, device=device)
    result[:, 3 : 3 + span] = greedy.view(sequences, span)
    lines = zip(
        greedy.view(sequences, span).tolist(), tokens.view(sequences, span).tolist(),
        positions.view(sequences, span).tolist(), told[2].tolist(), told[3].tolist(), strict=True,
    )  # fmt: skip
    for b, (best, ids, places, place, end) in enumerate(lines):
        first = b * span
        last[b] = first
        held = sum(position >= 0 for position in places[1:])
        count = 0
        if places[0] >= 0:
            count = 1
            while count <= held and ids[count] == best[count - 1]:
                count += 1
            stand = places[0] + count
            kept[first : first + count] = positions[first : first + count]
            last[b] = first + count - 1
            drafts = max(min(rounds, end - 1 - stand), 0)
            for k in range(drafts):
                slots[k, b] = stand - 1 + k
            state.stands[place], state.tokens[place] = stand, best[count - 1]
            state.counts[place] = drafts
        result[b, :3] = torch.tensor([places[0], count, held], dtype=torch.int32)
    return Judged(greedy.int(), kept, last, slots, result)


def keep_drafts(found: Tensor, told: Tensor, judged: Judged, state: DraftState) -> None:
    """Drafts go to the state and to the result, where a slot was run for them.

    Args:
        found: int64[rounds, B], at least one round.
        told: as given to `open_rows`.
        judged: its result is written.
        state: its drafts are written.
    """
    rounds, sequences = found.shape
    first = judged.result.shape[1] - rounds
    for k in range(rounds):
        for b in range(sequences):
            if int(judged.slots[k, b]) >= 0:
                judged.result[b, first + k] = found[k, b]
                state.drafts[int(told[2, b]), k] = found[k, b]


def open_slots(
    streams: Tensor, tokens: Tensor, embed: Tensor, stream_norm: Tensor, token_norm: Tensor, eps: float
) -> Tensor:
    """What slots of the layer that predicts ahead enter it with, before its projection: for each stream that stream,
    and beside it the line of the slot's token, both normed.

    Args:
        streams: A[R, n, hidden].
        tokens: int[R], the token after each slot; those below 0 are taken as 0.
        embed: A[vocab, hidden].
        stream_norm, token_norm: float32[hidden].
        eps: of both norms.

    Returns:
        A[R * n, 2 * hidden].
    """
    before = _norm(streams, stream_norm, eps)
    after = _norm(embed[tokens.long().clamp(min=0)], token_norm, eps).unsqueeze(1).expand_as(before)
    return torch.cat((before, after), -1).flatten(0, 1).to(streams.dtype)


def pick_rows(rows: Tensor, tables: Sequence[Tensor]) -> list[Tensor]:
    """Of each table, contiguous and at most four of them, the rows that int32[B] names, as new memory."""
    return [table[rows.long()] for table in tables]


def keep_streams(streams: Tensor, judged: Judged, slabs: Tensor, arena: Tensor, place: StreamPlace) -> None:
    """The streams of each sequence's last row that holds go to its slab.

    Args:
        streams: A[R, n, hidden], the target's.
        judged: which row that is; a sequence without rows writes nothing.
        slabs: int32[B].
        arena: uint8[bytes], written into.
        place: where.
    """
    size = 4 * streams[0].numel()
    for row, slab in zip(judged.last.tolist(), slabs.tolist(), strict=True):
        if int(judged.kept[row]) >= 0:
            at = place.data + slab * place.stride
            arena[at : at + size].view(torch.float32).copy_(streams[row].flatten())
