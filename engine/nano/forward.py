"""The training forward: the same mathematics as `engine.model.reference`, shaped for one large GPU.

Owns what training needs and serving does not: a mixture that computes every expert in two products, the loss of the
indexer on a part of the rows, and the cut of a layer into regions that `torch.compile` handles one by one. Layer
formulas come from `engine.model`; a test holds this forward equal to the reference.

Invariants: sequence length is a multiple of the window. Streams are kept in `stream_dtype`; coefficients, norms,
router and softmax are float32. The indexer sees detached inputs: its loss moves nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.engram import EngramTables, add_memory, folded_context, table_rows
from engine.model.experts import gated
from engine.model.hyper import collapse, first_pre
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
from engine.model.shapes import LayerRole, ModelShape
from engine.nano.sinkhorn import sinkhorn

NEGATIVE = -1e30


@dataclass
class Pass:
    """What one forward gives back.

    Attributes:
        hidden: float[N, hidden], normed, ready for the head.
        features: float[N, targets * hidden], the drafter's context (empty when not asked for).
        index_loss: float32 scalar, sum over index sources; zero when not asked for.
        loads: float32[layers, experts], rows per expert.
        index_gap: index source -> its own loss, detached.
    """

    hidden: Tensor
    features: Tensor | None
    index_loss: Tensor
    loads: Tensor
    index_gap: dict[int, Tensor] = field(default_factory=dict)


class Forward:
    """The forward of one shape on one device.

    Args:
        shape: the model.
        tables: constants of its n-gram memory.
        device: where tokens and weights live.
        compiled: compile the regions; a trainer may switch to plain torch with `set_compiled(False)`.
        stream_dtype: dtype of the residual streams.
    """

    def __init__(
        self,
        shape: ModelShape,
        tables: EngramTables | None,
        device: torch.device,
        *,
        compiled: bool,
        stream_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape
        self.tables = tables
        self.device = device
        self.stream_dtype = stream_dtype
        self._plain = _make_regions(shape)
        self._rope: dict[tuple[int, int, bool], Rotary] = {}
        self.set_compiled(compiled)

    def set_compiled(self, compiled: bool) -> None:
        """Chooses compiled or plain regions."""
        self.compiled = compiled
        self.regions = (
            {name: torch.compile(fn, dynamic=False) for name, fn in self._plain.items()} if compiled else self._plain
        )

    def rope(self, length: int, step: int, compressed: bool) -> Rotary:
        """Tables at positions 0, step, 2 * step ..: [length, rope_dim / 2]."""
        key = (length, step, compressed)
        if key not in self._rope:
            positions = torch.arange(length, device=self.device) * step
            self._rope[key] = rope_table(self.shape, positions, compressed=compressed)
        return self._rope[key]

    def trunk(
        self,
        weights: WeightMap,
        tokens: Tensor,
        *,
        select: bool,
        index_rows: int = 0,
        features: bool = False,
        random_index: bool = False,
    ) -> Pass:
        """All layers and the final norm.

        Args:
            weights: vendor-named tensors with stacked experts.
            tokens: int64[batch, length].
            select: attend to the indexer's choice; otherwise to every visible entry.
            index_rows: sequences of the batch that the indexer learns from.
            features: keep the drafter's context.
            random_index: choose entries by chance (an evaluation of what the indexer is worth).
        """
        shape, run = self.shape, self.regions
        batch, length = tokens.shape
        n, d = shape.num_streams, shape.hidden
        streams = F.embedding(tokens.reshape(-1), weights["embed.weight"]).to(self.stream_dtype)
        streams = streams.unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = first_pre(streams)
        context = folded_context(self.tables, tokens) if self.tables is not None else None
        kept: list[Tensor] = []
        loads: list[Tensor] = []
        group = _Selection()
        losses: dict[int, Tensor] = {}
        entries: Tensor | None = None
        keys: Tensor | None = None
        for role in shape.layer_roles:
            i = role.index
            if role.has_engram:
                assert self.tables is not None and context is not None
                rows = table_rows(self.tables, i, context)
                table = weights[f"layers.{i}.engram.embed.weight"]
                memory = F.embedding(rows, table).flatten(-2).flatten(0, 1)
                streams = run["memory"](streams, memory, *_named(weights, f"layers.{i}.engram", MEMORY))
            if features and shape.drafter is not None and i in shape.drafter.target_layers:
                kept.append(streams.float().mean(1).to(self.stream_dtype).detach())
            prefix = f"layers.{i}.attn"
            x, next_pre, post, logits = run["enter"](
                streams, pre, weights[f"layers.{i}.attn_norm.weight"], *_hyper(weights, f"layers.{i}.hc_attn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            x = x.view(batch, length, d)
            rope = self.rope(length, 1, role.ratio > 0)
            q, low, window = run["project"](x, *rope, *_named(weights, prefix, PROJECT))
            if role.is_kv_source:
                at = self.rope(length // role.ratio, role.ratio, True)
                gate = weights.get(f"{prefix}.compressor.wgate.weight")
                entries, latent = run["compress"](x, *at, gate, *_named(weights, prefix, COMPRESS))
                keys = run["keys"](latent.detach(), *at, *_named(weights, prefix, KEYS))
            if role.is_index_source:
                group.close(losses, self, weights, index_rows)
                group = _Selection(role, x.detach(), low.detach(), keys, group)
                if select:
                    group.choose(self, weights, rope, random_index)
            if role.ratio == 0:
                o = run["attend"](q, window, weights[f"{prefix}.attn_sink"], None, None, 0)
            else:
                o = run["attend"](q, window, weights[f"{prefix}.attn_sink"], entries, group.allowed, role.ratio)
                if index_rows:
                    k = index_rows
                    with torch.no_grad():
                        group.add_mass(
                            run["mass"](q[:k], window[:k], weights[f"{prefix}.attn_sink"], entries[:k], role.ratio)
                        )
            y = run["output"](o, *rope, *_named(weights, prefix, OUTPUT))
            streams = run["leave"](streams, y.reshape(-1, d), post, mix)
            x, final_pre, post, logits = run["enter"](
                streams, next_pre, weights[f"layers.{i}.ffn_norm.weight"], *_hyper(weights, f"layers.{i}.hc_ffn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            y, load = run["mix"](x, shape.top_k, *_named(weights, f"layers.{i}.ffn", MIX))
            loads.append(load)
            streams = run["leave"](streams, y, post, mix)
            pre = final_pre
        group.close(losses, self, weights, index_rows)
        hidden = run["finish"](streams, pre, weights["norm.weight"])
        return Pass(
            hidden=hidden,
            features=torch.cat(kept, -1) if kept else None,
            index_loss=sum(losses.values()) if losses else hidden.new_zeros((), dtype=torch.float32),
            loads=torch.stack(loads),
            index_gap={layer: value.detach() for layer, value in losses.items()},
        )

    def nll(self, weights: WeightMap, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood float32[N] of int64[N] targets."""
        return self.regions["nll"](hidden, weights["head.weight"], targets)

    def draft(self, weights: WeightMap, features: Tensor, tokens: Tensor, anchors: Tensor) -> Draft:
        """Run the drafter over blocks that start at `anchors`; equal to `engine.model.drafter.forward_blocks`.

        Args:
            weights: vendor-named tensors.
            features: float[N, targets * hidden] of `trunk`, detached.
            tokens: int64[batch, length].
            anchors: int64[batch, A], at most length - block - 1.
        """
        # Never compiled: the rows are few, and regions compiled for them would cost more time than they save.
        shape, run = self.shape, self._plain
        drafter = shape.drafter
        assert drafter is not None
        n, d, block, window = shape.num_streams, shape.hidden, drafter.block_size, shape.window
        batch, length = tokens.shape
        count = batch * anchors.shape[1]
        main = run["context"](features, weights["mtp.0.main_proj.weight"], weights["mtp.0.main_norm.weight"])
        main = main.view(batch, length, d)
        reach = anchors.unsqueeze(-1) + torch.arange(-window, 0, device=tokens.device)
        seen = (reach >= 0).view(count, window)
        at = (torch.arange(batch, device=tokens.device).view(-1, 1, 1) * length + reach.clamp(min=0)).view(
            count, window
        )
        positions = (anchors.unsqueeze(-1) + torch.arange(block, device=tokens.device)).view(count, block)
        everywhere = self.rope(length, 1, False)
        own = (everywhere[0][positions], everywhere[1][positions])
        rows = torch.full_like(positions, drafter.noise_token_id)
        rows[:, 0] = tokens.gather(1, anchors).view(-1)
        streams = F.embedding(rows.view(-1), weights["embed.weight"]).to(self.stream_dtype)
        streams = streams.unsqueeze(1).expand(-1, n, -1).contiguous()
        pre = first_pre(streams)
        loads = []
        for stage in range(drafter.num_stages):
            prefix = f"mtp.{stage}.attn"
            entry = run["entry"](
                main, *everywhere, weights[f"{prefix}.wkv.weight"], weights[f"{prefix}.kv_norm.weight"]
            )
            context = entry.reshape(batch * length, -1)[at]
            x, next_pre, post, logits = run["enter"](
                streams, pre, weights[f"mtp.{stage}.attn_norm.weight"], *_hyper(weights, f"mtp.{stage}.hc_attn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            q, _, window_kv = run["project"](x.view(count, block, d), *own, *_named(weights, prefix, PROJECT))
            o = run["attend_block"](q, window_kv, context, seen, weights[f"{prefix}.attn_sink"])
            y = run["output"](o, *own, *_named(weights, prefix, OUTPUT))
            streams = run["leave"](streams, y.reshape(-1, d), post, mix)
            x, pre, post, logits = run["enter"](
                streams, next_pre, weights[f"mtp.{stage}.ffn_norm.weight"], *_hyper(weights, f"mtp.{stage}.hc_ffn")
            )
            mix = sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps)
            y, load = run["mix"](x, drafter.top_k, *_named(weights, f"mtp.{stage}.ffn", MIX))
            loads.append(load)
            streams = run["leave"](streams, y, post, mix)
        last = f"mtp.{drafter.num_stages - 1}"
        batch_row = torch.arange(batch, device=tokens.device).repeat_interleave(anchors.shape[1]).view(-1, 1)
        previous = tokens[batch_row, positions].view(-1)
        logits, confidence = run["speak"](
            streams,
            pre,
            previous,
            weights[f"{last}.norm.weight"],
            weights["head.weight"],
            weights[f"{last}.markov_head.embed.weight"],
            weights[f"{last}.markov_head.head.weight"],
            weights[f"{last}.confidence_head.proj.weight"],
        )
        return Draft(logits, confidence, torch.stack(loads))


@dataclass
class Draft:
    """A teacher-forced drafting pass, rows flattened: R = batch * anchors * block.

    Attributes:
        logits: float[R, vocab], Markov bias included.
        confidence: float32[R], logit of the chance of acceptance.
        loads: float32[stages, experts].
    """

    logits: Tensor
    confidence: Tensor
    loads: Tensor


class _Selection:
    """The choice of one index source, the attention mass of the layers that use it, and its loss."""

    def __init__(
        self,
        role: LayerRole | None = None,
        x: Tensor | None = None,
        low: Tensor | None = None,
        keys: Tensor | None = None,
        earlier: _Selection | None = None,
    ) -> None:
        self.role, self.x, self.low, self.keys = role, x, low, keys
        self.allowed: Tensor | None = None
        self.candidates = (
            earlier.candidates if earlier is not None and role and role.candidate_source is not None else None
        )
        self.mass: Tensor | None = None
        self.users = 0

    def choose(self, forward: Forward, weights: WeightMap, rope: Rotary, random_index: bool) -> None:
        assert self.role is not None
        named = _named(weights, f"layers.{self.role.index}.attn", INDEX)
        with torch.no_grad():
            if random_index:
                scores = torch.rand(*self.x.shape[:2], self.keys.shape[1], device=self.x.device)
            else:
                scores = forward.regions["scores"](self.low, self.x, self.keys, *rope, *named)
            limit = self.candidates if self.role.candidate_source is not None else None
            self.allowed = forward.regions["choose"](scores, limit, self.role.ratio)
            if self.role.is_candidate_source:
                self.candidates = forward.regions["candidates"](scores, self.role.ratio)

    def add_mass(self, mass: Tensor) -> None:
        self.mass = mass if self.mass is None else self.mass + mass
        self.users += 1

    def close(self, losses: dict[int, Tensor], forward: Forward, weights: WeightMap, rows: int) -> None:
        if self.role is None or self.mass is None or not rows:
            return
        rope = forward.rope(self.x.shape[1], 1, True)
        losses[self.role.index] = forward.regions["index_loss"](
            self.low[:rows],
            self.x[:rows],
            self.keys[:rows],
            *rope,
            self.mass / self.users,
            self.role.ratio,
            *_named(weights, f"layers.{self.role.index}.attn", INDEX),
        )


MEMORY = ("wkv.weight", "q_weight", "k_weight")
PROJECT = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
COMPRESS = ("compressor.wkv.weight", "compressor.norm.weight")
KEYS = ("indexer.wk.weight", "indexer.k_norm.weight")
INDEX = ("indexer.wq_b.weight", "indexer.weights_proj.weight")
OUTPUT = ("wo_a.weight", "wo_b.weight")
MIX = (
    "gate.weight",
    "gate.bias",
    "experts.w1",
    "experts.w3",
    "experts.w2",
    "shared_experts.w1.weight",
    "shared_experts.w3.weight",
    "shared_experts.w2.weight",
)


def _named(weights: WeightMap, prefix: str, names: tuple[str, ...]) -> list[Tensor]:
    return [weights[f"{prefix}.{name}"] for name in names]


def _hyper(weights: WeightMap, prefix: str) -> list[Tensor]:
    return [weights[f"{prefix}_{name}"] for name in ("fn", "base", "scale")]


def visible(length: int, entries: int, ratio: int, device: torch.device) -> Tensor:
    """bool[length, entries]: entry w is closed at or before token t."""
    t = torch.arange(length, device=device).unsqueeze(1)
    return (torch.arange(entries, device=device) + 1) * ratio <= t + 1


def _make_regions(shape: ModelShape) -> dict[str, Callable]:
    """Pure functions over tensors; sizes are closed over, so that a compiler sees constants."""
    n, eps, window = shape.num_streams, shape.norm_eps, shape.window
    heads, scale = shape.num_heads, shape.head_dim**-0.5
    index_heads, index_dim = shape.index_heads, shape.index_dim

    def enter(streams, pre, norm, fn, base, gain):
        x = rms_norm(collapse(streams, pre), norm, eps)
        flat = streams.flatten(-2).float()
        mixed = linear32(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
        next_pre = torch.sigmoid(mixed[..., :n] * gain[0] + base[:n]) + shape.hyper_eps
        post = 2 * torch.sigmoid(mixed[..., n : 2 * n] * gain[1] + base[n : 2 * n])
        logits = mixed[..., 2 * n :] * gain[2] + base[2 * n :]
        return x, next_pre, post, logits.unflatten(-1, (n, n))

    def leave(streams, y, post, mix):
        wide = streams.float()
        mixed = (mix.unsqueeze(-1) * wide.unsqueeze(-2)).sum(-3)
        return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(streams.dtype)

    def finish(streams, pre, norm):
        return rms_norm(collapse(streams, pre), norm, eps)

    def memory(streams, rows, wkv, q_weight, k_weight):
        named = {"e.wkv.weight": wkv, "e.q_weight": q_weight, "e.k_weight": k_weight}
        return add_memory(named, "e", shape, streams, rows)

    def project(x, cos, sin, *tensors):
        named = {f"a.{name}": tensor for name, tensor in zip(PROJECT, tensors, strict=True)}
        q, low = project_query(named, "a", shape, x, (cos, sin))
        return q, low, project_window(named, "a", shape, x, (cos, sin))

    def output(o, cos, sin, wo_a, wo_b):
        return project_output({"a.wo_a.weight": wo_a, "a.wo_b.weight": wo_b}, "a", shape, o, (cos, sin))

    def window_scores(q, entry):
        """Scores of two-window chunks, [B, chunks, window, heads, 2 * window], and the keys behind them."""
        batch, length, _, width = q.shape
        chunks = length // window
        own = entry.view(batch, chunks, window, width)
        keys = torch.cat((F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1], own), 2)
        s = torch.matmul(q.reshape(batch, chunks, window * heads, width), keys.transpose(-1, -2))
        s = s.view(batch, chunks, window, heads, 2 * window).float() * scale
        i = torch.arange(window, device=q.device).unsqueeze(1)
        j = torch.arange(2 * window, device=q.device)
        seen = (j > i) & (j <= i + window)
        first = torch.arange(chunks, device=q.device).view(-1, 1, 1) == 0
        seen = seen & ~(first & (j < window))
        return s.masked_fill(~seen.view(1, chunks, window, 1, 2 * window), NEGATIVE), keys

    def entry_scores(q, entries):
        batch, length, _, width = q.shape
        s = torch.matmul(q.reshape(batch, length * heads, width), entries.transpose(-1, -2))
        return s.view(batch, length, heads, -1).float() * scale

    def attend(q, entry, sink, entries, allowed, ratio):
        batch, length, _, width = q.shape
        near, keys = window_scores(q, entry)
        sink = sink.float()
        top = torch.maximum(near.amax(-1), sink)
        if ratio:
            count = entries.shape[1]
            far = entry_scores(q, entries)
            seen = visible(length, count, ratio, q.device).unsqueeze(0)
            if allowed is not None:
                seen = seen & allowed
            far = far.masked_fill(~seen.unsqueeze(2), NEGATIVE)
            top = torch.maximum(top.view(batch, length, heads), far.amax(-1)).view_as(top)
        top = top.detach()
        p = torch.exp(near - top.unsqueeze(-1))
        total = p.sum(-1) + torch.exp(sink - top)
        p = p.to(q.dtype).view(batch, -1, window * heads, 2 * window)
        o = torch.matmul(p, keys).view(batch, length, heads, width).float()
        total = total.view(batch, length, heads)
        if ratio:
            p = torch.exp(far - top.view(batch, length, heads, 1))
            total = total + p.sum(-1)
            p = p.to(q.dtype).view(batch, length * heads, count)
            o = o + torch.matmul(p, entries).view(batch, length, heads, width).float()
        return (o / total.unsqueeze(-1)).to(q.dtype)

    def mass(q, entry, sink, entries, ratio):
        """Attention on each entry without selection, summed over heads: float32[B, L, W], rows sum to 1 (or to 0)."""
        batch, length = q.shape[:2]
        near, _ = window_scores(q, entry)
        near = near.view(batch, length, heads, 2 * window)
        far = entry_scores(q, entries)
        seen = visible(length, entries.shape[1], ratio, q.device)
        far = far.masked_fill(~seen.view(1, length, 1, -1), NEGATIVE)
        top = torch.maximum(torch.maximum(near.amax(-1), far.amax(-1)), sink.float())
        total = torch.exp(near - top.unsqueeze(-1)).sum(-1) + torch.exp(sink.float() - top)
        p = torch.exp(far - top.unsqueeze(-1))
        total = total + p.sum(-1)
        summed = (p / total.unsqueeze(-1)).sum(2)
        return summed / summed.sum(-1, keepdim=True).clamp(min=1e-12)

    def compress(x, cos, sin, wgate, wkv, norm):
        value = linear(x, wkv).float()
        if wgate is not None:
            gate = linear(x, wgate).float()
            value = (value.unflatten(1, (-1, 2)) * gate.unflatten(1, (-1, 2)).softmax(2)).sum(2)
        latent = rms_norm(value, norm, eps)
        latent = latent.to(x.dtype)
        return apply_rope(latent, (cos, sin)), latent

    def keys_of(latent, cos, sin, wk, norm):
        return apply_rope(rms_norm(linear(latent, wk), norm, eps), (cos, sin))

    def scores(low, x, keys, cos, sin, wq_b, weights_proj):
        batch, length = x.shape[:2]
        q = apply_rope(linear(low, wq_b).unflatten(-1, (index_heads, index_dim)), heads_of((cos, sin)))
        v = linear32(x, weights_proj) * (index_heads * index_dim) ** -0.5
        s = torch.matmul(q.reshape(batch, length * index_heads, index_dim), keys.transpose(-1, -2))
        s = s.view(batch, length, index_heads, -1).float().relu()
        return (s * v.unsqueeze(-1)).sum(2)

    def index_loss(low, x, keys, cos, sin, target, ratio, wq_b, weights_proj):
        s = scores(low, x, keys, cos, sin, wq_b, weights_proj)
        seen = visible(s.shape[1], s.shape[2], ratio, s.device)
        logp = s.masked_fill(~seen, NEGATIVE).log_softmax(-1)
        gap = target * (target.clamp(min=1e-9).log() - logp)
        return gap.masked_fill(~seen, 0).sum() / (s.shape[0] * s.shape[1])

    def choose(s, limit, ratio):
        seen = visible(s.shape[1], s.shape[2], ratio, s.device)
        if limit is not None:
            seen = seen & limit
        s = s.masked_fill(~seen, NEGATIVE)
        best = s.topk(min(shape.index_topk, s.shape[2]), -1, sorted=False).indices
        return torch.zeros_like(s, dtype=torch.bool).scatter(-1, best, True) & seen

    def candidates(s, ratio):
        size = shape.candidate_block_size
        seen = visible(s.shape[1], s.shape[2], ratio, s.device)
        s = s.masked_fill(~seen, NEGATIVE)
        s = F.pad(s, (0, -s.shape[-1] % size), value=NEGATIVE)
        blocks = s.unflatten(-1, (-1, size)).amax(-1)
        newest = (
            torch.arange(s.shape[1], device=s.device).add(1).div(ratio, rounding_mode="floor").sub(1).clamp(min=0)
            // size
        )
        number = torch.arange(blocks.shape[-1], device=s.device)
        blocks = blocks.masked_fill(number == newest.unsqueeze(1), -NEGATIVE)
        best = blocks.topk(min(shape.candidate_blocks, blocks.shape[-1]), -1, sorted=False).indices
        kept = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, best, True)
        return kept.repeat_interleave(size, -1)[..., : seen.shape[1]]

    def mix(x, top_k, gate, bias, w1, w3, w2, s1, s3, s2):
        _, width, hidden = w1.shape
        s = F.softplus(linear32(x, gate)).sqrt()
        ranked = s.detach() + bias.float()
        cut = ranked.topk(top_k, -1, sorted=True).values[..., -1:]
        full = torch.where(ranked >= cut, s, 0.0)
        full = full / full.sum(-1, keepdim=True) * shape.routed_scale
        load = (full > 0).float().sum(0)
        a = linear(x, torch.cat((w1.reshape(-1, hidden), s1)))
        b = linear(x, torch.cat((w3.reshape(-1, hidden), s3)))
        inner = gated(a.float(), b.float(), shape.clamp)
        weight = torch.cat((full.repeat_interleave(width, -1), full.new_ones(x.shape[0], s1.shape[0])), -1)
        down = torch.cat((w2.transpose(0, 1).reshape(hidden, -1), s2), 1)
        return linear((inner * weight).to(x.dtype), down), load

    def context(features, main_proj, main_norm):
        return rms_norm(linear(features, main_proj), main_norm, eps)

    def entry(main, cos, sin, wkv, kv_norm):
        return apply_rope(rms_norm(linear(main, wkv), kv_norm, eps), (cos, sin))

    def attend_block(q, own, context_rows, seen, sink):
        rows, block = q.shape[:2]
        keys = torch.cat((context_rows, own), 1)
        s = torch.matmul(q.reshape(rows, block * heads, -1), keys.transpose(-1, -2)).float() * scale
        hidden = F.pad(~seen, (0, block), value=False)
        s = s.masked_fill(hidden.unsqueeze(1), NEGATIVE)
        tail = sink.float().repeat(block).view(1, -1, 1).expand(rows, -1, 1)
        p = torch.cat((s, tail), -1).softmax(-1)[..., :-1]
        return torch.matmul(p.to(q.dtype), keys).view(rows, block, heads, -1)

    def speak(streams, pre, previous, norm, head, markov_embed, markov_head, confidence_proj):
        hidden = collapse(streams, pre)
        embedded = F.embedding(previous, markov_embed)
        logits = linear(rms_norm(hidden, norm, eps), head).float() + linear(embedded, markov_head).float()
        joined = torch.cat((hidden.detach().float(), embedded.detach().float()), -1)
        return logits, linear32(joined, confidence_proj).squeeze(-1)

    def nll(hidden, head, targets):
        logits = linear(hidden, head).float()
        return F.cross_entropy(logits, targets, reduction="none")

    return {
        "enter": enter,
        "leave": leave,
        "finish": finish,
        "memory": memory,
        "project": project,
        "output": output,
        "attend": attend,
        "mass": mass,
        "compress": compress,
        "keys": keys_of,
        "scores": scores,
        "index_loss": index_loss,
        "choose": choose,
        "candidates": candidates,
        "mix": mix,
        "context": context,
        "entry": entry,
        "attend_block": attend_block,
        "speak": speak,
        "nll": nll,
    }
