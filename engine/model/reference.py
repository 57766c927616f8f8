"""The full-sequence forward in plain torch: truth for tests, forward for training.

Owns the order of a layer and the attention over window and compressed entries. It is functional over `Weights`,
differentiable, batched over equally long rows, and keeps no state; the paged, incremental path must agree with it.
Right padding is harmless (everything is causal); left padding is wrong, because windows are cut from position 0.

Gradient flows through everything but choices (experts, entries, candidate blocks). The indexer reads detached inputs,
so a loss on `Record.index_scores` trains the indexer's own weights and nothing else.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.model import engram as memory
from engine.model.engram import EngramTables
from engine.model.experts import Routing, feed_forward
from engine.model.hyper import coefficients, collapse, expand, first_pre, head_pre
from engine.model.layers import (
    Rotary,
    WeightMap,
    apply_rope,
    heads_of,
    linear,
    linear32,
    project_output,
    project_query,
    project_window,
    rms_norm,
    rope_table,
)
from engine.model.quantise import CacheRounding
from engine.model.shapes import LayerRole, ModelShape

Selection = Literal["topk", "dense"]
NO_CHOICE = 1e9


@dataclass(frozen=True)
class Output:
    """What a forward returns; B rows of L tokens.

    Attributes:
        logits: float32[B, L, vocab], or None when the head was left out.
        hidden: float[B, L, hidden], final and normed: the head's input.
        features: float[B, L, targets * hidden], the drafter's input; None without a drafter. Not detached.
        streams: float[B, L, streams, hidden], after the last layer.
    """

    logits: Tensor | None
    hidden: Tensor
    features: Tensor | None
    streams: Tensor


@dataclass
class Record:
    """What a caller asks to see of a forward. Switch on what is needed, the rest stays empty.

    Attributes:
        choices: fill `experts`, `index_topk`, `candidate_blocks`, `engram_rows` and `min_gap`.
        indexer: fill `index_scores` and `attention_mass`.
        trace: fill the intermediate values.
        experts: per layer int64[B, L, k], ascending.
        router_counts: per layer int64[experts], rows that chose each expert. Always filled.
        router_scores: per layer float32[B, L, experts] before the bias, with gradient. Always filled.
        index_topk: per index source int64[B, L, top-k], ascending, -1 padded.
        candidate_blocks: bool[B, L, blocks] of the candidate source.
        engram_rows: per memory layer int64[B, L, rows].
        min_gap: float32[B, L], smallest distance to a tie over all choices of a position; 1e9 where none was made.
        index_scores: per index source float32[B, L, entries], -inf where not visible or not a candidate. Gradient
            reaches the indexer's weights.
        attention_mass: per layer with entries float32[B, L, entries], probability averaged over heads, detached.
        streams: streams entering each layer (after its memory) and after the last, float[B, L, streams, hidden].
        attn_out: per layer float[B, L, hidden]. `ffn_out` likewise.
        window_kv: per layer float[B, L, head_dim], rotated.
        compressed: per KV source float[B, entries, head_dim], rotated.
        index_keys: per KV source float[B, entries, index_dim], rotated.
    """

    choices: bool = False
    indexer: bool = False
    trace: bool = False
    experts: list[Tensor] = field(default_factory=list)
    router_counts: list[Tensor] = field(default_factory=list)
    router_scores: list[Tensor] = field(default_factory=list)
    index_topk: dict[int, Tensor] = field(default_factory=dict)
    candidate_blocks: Tensor | None = None
    engram_rows: dict[int, Tensor] = field(default_factory=dict)
    min_gap: Tensor | None = None
    index_scores: dict[int, Tensor] = field(default_factory=dict)
    attention_mass: dict[int, Tensor] = field(default_factory=dict)
    streams: list[Tensor] = field(default_factory=list)
    attn_out: list[Tensor] = field(default_factory=list)
    ffn_out: list[Tensor] = field(default_factory=list)
    window_kv: list[Tensor] = field(default_factory=list)
    compressed: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)

    def note_gap(self, ranked: Tensor, top_k: int) -> None:
        """Lower `min_gap` by the distance between the last value taken and the first one left; -inf never competes."""
        if self.min_gap is None or ranked.shape[-1] <= top_k:
            return
        best = ranked.detach().topk(top_k + 1, -1).values
        gap = best[..., -2] - best[..., -1]
        gap = torch.where(best[..., -1].isneginf(), NO_CHOICE, gap)
        self.min_gap = torch.minimum(self.min_gap, gap)

    def note_routing(self, routing: Routing) -> None:
        """Keep one router's decision."""
        self.router_scores.append(routing.scores)
        ids = routing.ids.flatten()
        # Not bincount: it waits for the device to learn how long its result is.
        counts = torch.zeros(routing.scores.shape[-1], dtype=torch.int64, device=ids.device)
        self.router_counts.append(counts.scatter_add_(0, ids, torch.ones_like(ids)))
        if self.choices:
            self.experts.append(routing.ids)
            if routing.ranked is not None:
                self.note_gap(routing.ranked, routing.ids.shape[-1])


@dataclass
class _Shared:
    """What layers hand down to later ones: entries and keys by owner, the latest selection, the candidates."""

    visible: dict[int, Tensor]
    rounding: CacheRounding | None
    entries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    selected: Tensor | None = None
    candidates: Tensor | None = None


def topk_mask(scores: Tensor, top_k: int) -> Tensor:
    """Mark the best `top_k` finite scores of each row; equal scores go to the lowest index.

    Args:
        scores: float[..., n], -inf where an index may not be chosen.
        top_k: most marks per row.

    Returns:
        bool[..., n].
    """
    allowed = ~scores.isneginf()
    if scores.shape[-1] <= top_k:
        return allowed
    threshold = scores.topk(top_k, -1).values[..., -1:]
    above = scores > threshold
    level = (scores == threshold) & allowed
    room = top_k - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))


def visible_entries(length: int, ratio: int, device: torch.device) -> Tensor:
    """bool[length, length // ratio]: entry w is visible to token t once its last token is at or before t."""
    last = (torch.arange(length // ratio, device=device) + 1) * ratio
    return last <= torch.arange(length, device=device).unsqueeze(-1) + 1


def pool(weights: WeightMap, prefix: str, shape: ModelShape, role: LayerRole, x: Tensor) -> Tensor:
    """Pool closed groups of tokens into normed latents, not yet rotated.

    Args:
        weights: vendor-named tensors.
        prefix: for example `layers.2.attn.compressor`.
        shape: the model.
        role: the layer's role; gives the ratio, and whether an entry pools the group before its own too.
        x: float[B, L, hidden]; tokens of the open group at the end contribute nothing.

    Returns:
        float32[B, L // ratio, width]. Pooling in float32.
    """
    ratio = role.ratio
    closed = x.shape[1] // ratio
    latent = linear32(x[:, : closed * ratio], weights[f"{prefix}.wkv.weight"])
    if ratio > 1:
        latent = latent.unflatten(1, (closed, ratio))
        score = linear32(x[:, : closed * ratio], weights[f"{prefix}.wgate.weight"]).unflatten(1, (closed, ratio))
        if shape.biases_gates:
            score = score + weights[f"{prefix}.ape"].float()
        if role.overlaps:
            # The first half of a row's channels is for the entry after its own; the first entry has none before it.
            latent, score = _with_group_before(latent, 0.0), _with_group_before(score, -torch.inf)
        latent = (score.softmax(2) * latent).sum(2)
    return rms_norm(latent, weights[f"{prefix}.norm.weight"], shape.norm_eps)


def _with_group_before(groups: Tensor, empty: float) -> Tensor:
    """float[B, groups, ratio, 2 * width] to [B, groups, 2 * ratio, width]: first halves of the group before, then the
    second halves of the own."""
    before, own = groups.chunk(2, -1)
    before = F.pad(before[:, :-1], (0, 0, 0, 0, 1, 0), value=empty) if groups.shape[1] else before
    return torch.cat((before, own), 2)


def compress(
    weights: WeightMap, prefix: str, shape: ModelShape, role: LayerRole, x: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor | None]:
    """Attention entries and index keys of closed groups of tokens.

    Args:
        weights: vendor-named tensors.
        prefix: for example `layers.2.attn`.
        shape: the model.
        role: the layer's role.
        x: float[B, L, hidden].
        rotary: tables of positions 0..L-1, [L, rope_dim / 2].

    Returns:
        (entries float[B, L // ratio, head_dim], keys float[B, L // ratio, index_dim] or None where nothing is
        selected), rotated at each group's first position.
    """
    latent = pool(weights, f"{prefix}.compressor", shape, role, x)
    last = latent.shape[1] * role.ratio
    first = (rotary[0][: last : role.ratio], rotary[1][: last : role.ratio])
    entries = apply_rope(latent, first).to(x.dtype)
    if role.attends_to_all:
        return entries, None
    # The indexer reads detached inputs, see the module docstring.
    if shape.pools_keys:
        return entries, apply_rope(pool(weights, f"{prefix}.indexer.compressor", shape, role, x.detach()), first)
    # The key is projected from the latent before rotation and gets its own.
    key = linear(latent.detach(), weights[f"{prefix}.indexer.wk.weight"])
    key = rms_norm(key, weights[f"{prefix}.indexer.k_norm.weight"], shape.norm_eps)
    return entries, apply_rope(key, first)


def score_entries(
    weights: WeightMap,
    prefix: str,
    shape: ModelShape,
    x: Tensor,
    low: Tensor,
    rotary: Rotary,
    keys: Tensor,
    rounding: CacheRounding | None = None,
) -> Tensor:
    """Index scores of every query against every entry, before visibility.

    Args:
        weights: vendor-named tensors.
        prefix: for example `layers.2.attn.indexer`.
        shape: the model.
        x: float[B, L, hidden], the attention's input.
        low: float[B, L, q_rank], the low-rank query.
        rotary: tables at the query positions.
        keys: float[B, entries, index_dim].
        rounding: applied to the queries; the keys come rounded.

    Returns:
        float32[B, L, entries].
    """
    query = linear(low, weights[f"{prefix}.wq_b.weight"]).unflatten(-1, (shape.index_heads, shape.index_dim))
    query = apply_rope(query, heads_of(rotary))
    if rounding is not None:
        query = rounding.index(query)
    share = linear32(x, weights[f"{prefix}.weights_proj.weight"]) * (shape.index_dim * shape.index_heads) ** -0.5
    match = torch.einsum("blhi,bei->blhe", query, keys.to(query.dtype)).relu()
    return torch.einsum("blh,blhe->ble", share, match.float()).float()


def choose_candidates(scores: Tensor, shape: ModelShape, ratio: int) -> tuple[Tensor, Tensor]:
    """Keep the best blocks of neighbouring entries for each query; the newest visible block always stays.

    Args:
        scores: float32[B, L, entries], -inf where not visible.
        shape: the model.
        ratio: tokens per entry.

    Returns:
        (kept bool[B, L, blocks], ranked float32[B, L, blocks]: what the choice was made on).
    """
    size = shape.candidate_block_size
    length, entries = scores.shape[1:]
    blocks = -(-entries // size)
    ranked = F.pad(scores, (0, blocks * size - entries), value=-torch.inf).unflatten(-1, (blocks, size)).amax(-1)
    newest = (torch.arange(1, length + 1, device=scores.device) // ratio - 1).div(size, rounding_mode="floor")
    is_newest = torch.arange(blocks, device=scores.device) == newest.unsqueeze(-1)
    ranked = ranked.masked_fill(is_newest, torch.inf)
    return topk_mask(ranked, shape.candidate_blocks), ranked


def attend(
    query: Tensor, window_kv: Tensor, sink: Tensor, window: int, entries: Tensor | None, selected: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Attention of each token over its window and its selected entries, with a sink in the denominator.

    The window is evaluated in tiles of `window` queries against two tiles of keys, so its cost is linear in length.

    Args:
        query: float[B, L, heads, head_dim], rotated.
        window_kv: float[B, L, head_dim], key and value.
        sink: float32[heads].
        window: tokens a query sees, itself included.
        entries: float[B, E, head_dim], key and value; None for a window-only layer.
        selected: bool[B or 1, L, E]; given with `entries`.

    Returns:
        (output float[B, L, heads, head_dim] still rotated, float32[B, L, E] probability averaged over heads or None).
    """
    batch, length, heads, width = query.shape
    tiles = -(-length // window)
    pad = tiles * window - length
    query = F.pad(query * width**-0.5, (0, 0, 0, 0, 0, pad)).unflatten(1, (tiles, window))
    near = F.pad(window_kv, (0, 0, window, pad)).unfold(1, 2 * window, window)
    row = torch.arange(window, device=query.device).unsqueeze(-1)
    column = torch.arange(2 * window, device=query.device)
    band = (column > row) & (column <= row + window)
    first_tile = torch.arange(tiles, device=query.device).view(-1, 1, 1) == 0
    band = band & ~(first_tile & (column < window))
    logits = torch.einsum("bnqhc,bnck->bnhqk", query, near.to(query.dtype)).float()
    parts = [logits.masked_fill(~band.unsqueeze(1), -torch.inf)]
    if entries is not None and selected is not None:
        logits = torch.einsum("bnqhc,bec->bnhqe", query, entries.to(query.dtype)).float()
        chosen = F.pad(selected, (0, 0, 0, pad)).unflatten(1, (tiles, window)).unsqueeze(2)
        parts.append(logits.masked_fill(~chosen, -torch.inf))
    parts.append(sink.float().view(heads, 1, 1).expand(batch, tiles, heads, window, 1))
    share = torch.cat(parts, -1).softmax(-1)
    output = torch.einsum("bnhqk,bnck->bnqhc", share[..., : 2 * window].to(near.dtype), near)
    mass = None
    if entries is not None:
        far = share[..., 2 * window : -1]
        output = output + torch.einsum("bnhqe,bec->bnqhc", far.to(entries.dtype), entries)
        mass = far.detach().mean(2).flatten(1, 2)[:, :length]
    return output.flatten(1, 2)[:, :length], mass


def forward(
    weights: WeightMap,
    shape: ModelShape,
    tokens: Tensor,
    *,
    engram: EngramTables | None = None,
    selection: Selection = "topk",
    record: Record | None = None,
    with_logits: bool = True,
    rounding: CacheRounding | None = None,
) -> Output:
    """Run whole sequences from position 0.

    Args:
        weights: vendor-named tensors, experts stacked (see checkpoint.py). Borrowed.
        shape: the model.
        tokens: int64[B, L].
        engram: hash constants; required when the model has an n-gram memory.
        selection: "topk" attends to the entries that the indexer chose, "dense" to all visible ones.
        record: filled in place with what it asks for.
        with_logits: False leaves out the head (a trainer may apply it to a part of the rows).
        rounding: emulates a low-precision cache; `quantise.VENDOR_ROUNDING` is not differentiable.

    Raises:
        ConfigError: the model has an n-gram memory and `engram` is None.
    """
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)
    plain = rope_table(shape, positions, compressed=False)
    long = rope_table(shape, positions, compressed=True)
    ratios = sorted({role.ratio for role in shape.layer_roles if role.ratio})
    visible = {ratio: visible_entries(length, ratio, tokens.device).unsqueeze(0) for ratio in ratios}
    shared = _Shared(visible, rounding)
    context = None
    if shape.engram is not None:
        if engram is None:
            raise ConfigError("the model has an n-gram memory; pass the tables made by engram_tables")
        context = memory.folded_context(engram, tokens)
    if record is not None and record.choices:
        record.min_gap = torch.full(tokens.shape, NO_CHOICE, device=tokens.device)

    embedded = F.embedding(tokens, weights["embed.weight"])
    streams = embedded.unsqueeze(-2).expand(*tokens.shape, shape.num_streams, shape.hidden)
    pre = first_pre(streams)
    targets = shape.drafter.target_layers if shape.drafter else ()
    takes_leaving = shape.drafter is not None and shape.drafter.takes_leaving
    features = []
    for role in shape.layer_roles:
        prefix = f"layers.{role.index}"
        if role.has_engram and engram is not None and context is not None:
            rows = memory.table_rows(engram, role.index, context)
            read = memory.read_memory(weights, f"{prefix}.engram", rows)
            streams = memory.add_memory(weights, f"{prefix}.engram", shape, streams, read)
            if record is not None and record.choices:
                record.engram_rows[role.index] = rows
        if role.index in targets and not takes_leaving:
            features.append(streams.float().mean(-2).to(streams.dtype))
        if record is not None and record.trace:
            record.streams.append(streams)

        mixing = coefficients(weights, f"{prefix}.hc_attn", shape, streams)
        x = collapse(streams, pre if shape.shifts_pre else mixing.pre)
        x = rms_norm(x, weights[f"{prefix}.attn_norm.weight"], shape.norm_eps)
        rotary = long if role.ratio else plain
        attn_out = _attention(weights, f"{prefix}.attn", shape, role, x, rotary, shared, selection, record)
        streams = expand(streams, attn_out, mixing)
        pre = mixing.pre

        mixing = coefficients(weights, f"{prefix}.hc_ffn", shape, streams)
        x = collapse(streams, pre if shape.shifts_pre else mixing.pre)
        x = rms_norm(x, weights[f"{prefix}.ffn_norm.weight"], shape.norm_eps)
        ids = tokens if role.is_hashed else None
        ffn_out, routing = feed_forward(weights, f"{prefix}.ffn", shape, x, shape.top_k, ids)
        streams = expand(streams, ffn_out, mixing)
        pre = mixing.pre
        if role.index in targets and takes_leaving:
            features.append(streams.float().mean(-2).to(streams.dtype))
        if record is not None:
            record.note_routing(routing)
            if record.trace:
                record.attn_out.append(attn_out)
                record.ffn_out.append(ffn_out)

    if record is not None and record.trace:
        record.streams.append(streams)
    if not shape.shifts_pre:
        pre = head_pre(weights, "", shape, streams)
    hidden = rms_norm(collapse(streams, pre), weights["norm.weight"], shape.norm_eps)
    logits = linear(hidden, weights["head.weight"]).float() if with_logits else None
    return Output(logits, hidden, torch.cat(features, -1) if features else None, streams)


def _attention(
    weights: WeightMap,
    prefix: str,
    shape: ModelShape,
    role: LayerRole,
    x: Tensor,
    rotary: Rotary,
    shared: _Shared,
    selection: Selection,
    record: Record | None,
) -> Tensor:
    """One attention sublayer; writes what later layers borrow into `shared`."""
    query, low = project_query(weights, prefix, shape, x, rotary)
    window_kv = project_window(weights, prefix, shape, x, rotary)
    if shared.rounding is not None:
        window_kv = shared.rounding.window(window_kv)
    if role.is_kv_source:
        made, keys = compress(weights, prefix, shape, role, x, rotary)
        if shared.rounding is not None:
            made, keys = shared.rounding.entry(made), None if keys is None else shared.rounding.index(keys)
        shared.entries[role.index] = made
        if keys is not None:
            shared.keys[role.index] = keys
    entries = selected = None
    if role.kv_source is not None:
        entries = shared.entries[role.kv_source]
        visible = shared.visible[role.ratio]
        if role.is_index_source and (selection == "topk" or record is not None):
            keys = shared.keys[role.kv_source]
            shared.selected = _select(weights, prefix, shape, role, x, low, rotary, keys, visible, shared, record)
        selected = visible if selection == "dense" or role.attends_to_all else shared.selected
    heads, mass = attend(query, window_kv, weights[f"{prefix}.attn_sink"], shape.window, entries, selected)
    if record is not None:
        if record.indexer and mass is not None:
            record.attention_mass[role.index] = mass
        if record.trace:
            record.window_kv.append(window_kv)
            if role.is_kv_source:
                record.compressed[role.index] = shared.entries[role.index]
                if role.index in shared.keys:
                    record.index_keys[role.index] = shared.keys[role.index]
    return project_output(weights, prefix, shape, heads, rotary)


def _select(
    weights: WeightMap,
    prefix: str,
    shape: ModelShape,
    role: LayerRole,
    x: Tensor,
    low: Tensor,
    rotary: Rotary,
    keys: Tensor,
    visible: Tensor,
    shared: _Shared,
    record: Record | None,
) -> Tensor:
    """Choose entries for one index source: bool[B, L, entries]."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and record is not None and record.indexer):
        x, low = x.detach(), low.detach()
        scores = score_entries(weights, f"{prefix}.indexer", shape, x, low, rotary, keys, shared.rounding)
        scores = scores.masked_fill(~visible, -torch.inf)
        if role.candidate_source is not None and shared.candidates is not None:
            allowed = shared.candidates.repeat_interleave(shape.candidate_block_size, -1)[..., : scores.shape[-1]]
            scores = scores.masked_fill(~allowed, -torch.inf)
    ranked = scores.detach()
    if role.is_candidate_source:
        shared.candidates, block_scores = choose_candidates(ranked, shape, role.ratio)
        if record is not None and record.choices:
            record.candidate_blocks = shared.candidates
            record.note_gap(block_scores, shape.candidate_blocks)
    selected = topk_mask(ranked, shape.index_topk)
    if record is not None:
        if record.indexer:
            record.index_scores[role.index] = scores
        if record.choices:
            record.index_topk[role.index] = list_selected(selected, shape.index_topk)
            record.note_gap(ranked, shape.index_topk)
    return selected


def list_selected(selected: Tensor, top_k: int) -> Tensor:
    """Turn a selection mask bool[..., n] into indices int64[..., top_k], ascending, -1 padded at the end."""
    n = selected.shape[-1]
    index = torch.arange(n, device=selected.device).expand(selected.shape).masked_fill(~selected, n)
    index = F.pad(index, (0, max(0, top_k - n)), value=n).sort(-1).values[..., :top_k]
    return index.masked_fill(index >= n, -1)
