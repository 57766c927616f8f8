"""The regions of the training forward: pure functions over tensors that `torch.compile` handles one by one.

Owns the arithmetic between two cuts of a layer, and the order in which a region takes its weights. What is not here
(norms, projections, hyper-connections outside the cuts) comes from `engine.model`. The order of the regions is
forward.py's.

Invariants: rows are B sequences of L tokens, L a multiple of the window. Coefficients, norms, router and softmax are
float32, whatever the streams are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.engram import add_memory
from engine.model.experts import gated
from engine.model.hyper import collapse
from engine.model.layers import (
    apply_rope,
    heads_of,
    linear,
    linear32,
    project_output,
    project_query,
    project_window,
    rms_norm,
)
from engine.model.shapes import ModelShape

# A region returns a tensor or a tuple of them; which, its definition says.
Region = Callable[..., Any]

NEGATIVE = -1e30

# The weights that regions take, in order, below a layer's prefix.
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


def visible(length: int, entries: int, ratio: int, device: torch.device) -> Tensor:
    """bool[length, entries]: entry w is closed at or before token t."""
    t = torch.arange(length, device=device).unsqueeze(1)
    return (torch.arange(entries, device=device) + 1) * ratio <= t + 1


def make_regions(shape: ModelShape) -> dict[str, Region]:
    """Pure functions over tensors; sizes are closed over, so that a compiler sees constants."""
    n, eps, window = shape.num_streams, shape.norm_eps, shape.window
    heads, scale = shape.num_heads, shape.head_dim**-0.5
    index_heads, index_dim = shape.index_heads, shape.index_dim

    def enter(
        streams: Tensor, pre: Tensor, norm: Tensor, fn: Tensor, base: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = rms_norm(collapse(streams, pre), norm, eps)
        flat = streams.flatten(-2).float()
        mixed = linear32(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
        next_pre = torch.sigmoid(mixed[..., :n] * gain[0] + base[:n]) + shape.hyper_eps
        post = 2 * torch.sigmoid(mixed[..., n : 2 * n] * gain[1] + base[n : 2 * n])
        logits = mixed[..., 2 * n :] * gain[2] + base[2 * n :]
        return x, next_pre, post, logits.unflatten(-1, (n, n))

    def leave(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        wide = streams.float()
        mixed = (mix.unsqueeze(-1) * wide.unsqueeze(-2)).sum(-3)
        return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(streams.dtype)

    def finish(streams: Tensor, pre: Tensor, norm: Tensor) -> Tensor:
        return rms_norm(collapse(streams, pre), norm, eps)

    def memory(streams: Tensor, rows: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        named = {"e.wkv.weight": wkv, "e.q_weight": q_weight, "e.k_weight": k_weight}
        return add_memory(named, "e", shape, streams, rows)

    def project(x: Tensor, cos: Tensor, sin: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        named = {f"a.{name}": tensor for name, tensor in zip(PROJECT, tensors, strict=True)}
        q, low = project_query(named, "a", shape, x, (cos, sin))
        return q, low, project_window(named, "a", shape, x, (cos, sin))

    def output(o: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
        return project_output({"a.wo_a.weight": wo_a, "a.wo_b.weight": wo_b}, "a", shape, o, (cos, sin))

    def window_scores(q: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
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

    def entry_scores(q: Tensor, entries: Tensor) -> Tensor:
        batch, length, _, width = q.shape
        s = torch.matmul(q.reshape(batch, length * heads, width), entries.transpose(-1, -2))
        return s.view(batch, length, heads, -1).float() * scale

    def attend(
        q: Tensor, entry: Tensor, sink: Tensor, entries: Tensor | None, allowed: Tensor | None, ratio: int
    ) -> Tensor:
        batch, length, _, width = q.shape
        near, keys = window_scores(q, entry)
        sink = sink.float()
        top = torch.maximum(near.amax(-1), sink)
        if entries is not None:
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
        if entries is not None:
            p = torch.exp(far - top.view(batch, length, heads, 1))
            total = total + p.sum(-1)
            p = p.to(q.dtype).view(batch, length * heads, count)
            o = o + torch.matmul(p, entries).view(batch, length, heads, width).float()
        return (o / total.unsqueeze(-1)).to(q.dtype)

    def mass(q: Tensor, entry: Tensor, sink: Tensor, entries: Tensor, ratio: int) -> Tensor:
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

    def compress(
        x: Tensor, cos: Tensor, sin: Tensor, wgate: Tensor | None, wkv: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        value = linear(x, wkv).float()
        if wgate is not None:
            gate = linear(x, wgate).float()
            value = (value.unflatten(1, (-1, 2)) * gate.unflatten(1, (-1, 2)).softmax(2)).sum(2)
        latent = rms_norm(value, norm, eps)
        latent = latent.to(x.dtype)
        return apply_rope(latent, (cos, sin)), latent

    def keys_of(latent: Tensor, cos: Tensor, sin: Tensor, wk: Tensor, norm: Tensor) -> Tensor:
        return apply_rope(rms_norm(linear(latent, wk), norm, eps), (cos, sin))

    def scores(
        low: Tensor, x: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, wq_b: Tensor, weights_proj: Tensor
    ) -> Tensor:
        batch, length = x.shape[:2]
        q = apply_rope(linear(low, wq_b).unflatten(-1, (index_heads, index_dim)), heads_of((cos, sin)))
        v = linear32(x, weights_proj) * (index_heads * index_dim) ** -0.5
        s = torch.matmul(q.reshape(batch, length * index_heads, index_dim), keys.transpose(-1, -2))
        s = s.view(batch, length, index_heads, -1).float().relu()
        return (s * v.unsqueeze(-1)).sum(2)

    def index_loss(
        low: Tensor,
        x: Tensor,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        target: Tensor,
        ratio: int,
        wq_b: Tensor,
        weights_proj: Tensor,
    ) -> Tensor:
        s = scores(low, x, keys, cos, sin, wq_b, weights_proj)
        seen = visible(s.shape[1], s.shape[2], ratio, s.device)
        logp = s.masked_fill(~seen, NEGATIVE).log_softmax(-1)
        gap = target * (target.clamp(min=1e-9).log() - logp)
        return gap.masked_fill(~seen, 0).sum() / (s.shape[0] * s.shape[1])

    def choose(s: Tensor, limit: Tensor | None, ratio: int) -> Tensor:
        seen = visible(s.shape[1], s.shape[2], ratio, s.device)
        if limit is not None:
            seen = seen & limit
        s = s.masked_fill(~seen, NEGATIVE)
        best = s.topk(min(shape.index_topk, s.shape[2]), -1, sorted=False).indices
        return torch.zeros_like(s, dtype=torch.bool).scatter(-1, best, True) & seen

    def candidates(s: Tensor, ratio: int) -> Tensor:
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

    def mix(
        x: Tensor,
        top_k: int,
        gate: Tensor,
        bias: Tensor,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        s1: Tensor,
        s3: Tensor,
        s2: Tensor,
    ) -> tuple[Tensor, Tensor]:
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

    def context(features: Tensor, main_proj: Tensor, main_norm: Tensor) -> Tensor:
        return rms_norm(linear(features, main_proj), main_norm, eps)

    def entry(main: Tensor, cos: Tensor, sin: Tensor, wkv: Tensor, kv_norm: Tensor) -> Tensor:
        return apply_rope(rms_norm(linear(main, wkv), kv_norm, eps), (cos, sin))

    def attend_block(q: Tensor, own: Tensor, context_rows: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
        rows, block = q.shape[:2]
        keys = torch.cat((context_rows, own), 1)
        s = torch.matmul(q.reshape(rows, block * heads, -1), keys.transpose(-1, -2)).float() * scale
        hidden = F.pad(~seen, (0, block), value=False)
        s = s.masked_fill(hidden.unsqueeze(1), NEGATIVE)
        tail = sink.float().repeat(block).view(1, -1, 1).expand(rows, -1, 1)
        p = torch.cat((s, tail), -1).softmax(-1)[..., :-1]
        return torch.matmul(p.to(q.dtype), keys).view(rows, block, heads, -1)

    def speak(
        streams: Tensor,
        pre: Tensor,
        previous: Tensor,
        norm: Tensor,
        head: Tensor,
        markov_embed: Tensor,
        markov_head: Tensor,
        confidence_proj: Tensor,
    ) -> tuple[Tensor, Tensor]:
        hidden = collapse(streams, pre)
        embedded = F.embedding(previous, markov_embed)
        logits = linear(rms_norm(hidden, norm, eps), head).float() + linear(embedded, markov_head).float()
        joined = torch.cat((hidden.detach().float(), embedded.detach().float()), -1)
        return logits, linear32(joined, confidence_proj).squeeze(-1)

    def nll(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
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
