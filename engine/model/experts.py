"""Experts: the router's choice and the feed-forward of the mixture.

Owns the routing rule and a dense evaluation that computes every expert and gives the unchosen ones weight zero: exact,
differentiable, and the truth for anything faster. The paged path follows the same rule in tiles (tiles.py).

Invariants: the bias moves the choice and never a weight; equal scores go to the lowest index; chosen ids ascend. Where
experts are looked up by token (the first layers of V4) the scores give the weights only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.layers import WeightMap, linear, linear32
from engine.model.shapes import ModelShape


@dataclass(frozen=True)
class Routing:
    """One router's decision.

    Attributes:
        ids: int64[..., k], chosen experts, ascending.
        weights: float32[..., k], their weights, already scaled.
        scores: float32[..., experts], before the bias.
        ranked: float32[..., experts], what the choice was made on (scores + bias); None where nothing was chosen.
    """

    ids: Tensor
    weights: Tensor
    scores: Tensor
    ranked: Tensor | None


def route(x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, scale: float) -> Routing:
    """Choose experts by the square root of softplus, in float32.

    Args:
        x: float[..., hidden].
        gate: float[experts, hidden].
        bias: float32[experts], added for the choice only.
        top_k: experts per row.
        scale: factor on the normalised weights.
    """
    scores = F.softplus(linear32(x, gate)).sqrt()
    ranked = scores.detach() + bias.detach().float()
    # A stable sort puts the lower index first among equals; topk promises nothing about ties.
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    return _weigh(scores, order[..., :top_k].sort(-1).values, ranked, scale)


def route_by_token(x: Tensor, gate: Tensor, table: Tensor, tokens: Tensor, *, scale: float) -> Routing:
    """Look experts up by token id; only their weights are scored.

    Args:
        x: float[..., hidden].
        gate: float[experts, hidden].
        table: int64[vocab, k], distinct experts of each token.
        tokens: int64[...], ids of the rows.
        scale: factor on the normalised weights.
    """
    scores = F.softplus(linear32(x, gate)).sqrt()
    return _weigh(scores, table[tokens].sort(-1).values, None, scale)


def _weigh(scores: Tensor, ids: Tensor, ranked: Tensor | None, scale: float) -> Routing:
    chosen = scores.gather(-1, ids)
    return Routing(ids, chosen / chosen.sum(-1, keepdim=True) * scale, scores, ranked)


def gated(gate: Tensor, up: Tensor, clamp: float) -> Tensor:
    """silu of the gate, clamped from above, times the up projection, clamped on both sides."""
    return F.silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp)


def expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, clamp: float) -> Tensor:
    """One expert's feed-forward: x [..., hidden], w1 and w3 [width, hidden], w2 [hidden, width]."""
    return linear(gated(linear(x, w1), linear(x, w3), clamp), w2)


def mix_dense(x: Tensor, routing: Routing, w1: Tensor, w3: Tensor, w2: Tensor, clamp: float) -> Tensor:
    """Weighted sum of the chosen experts, by computing all of them in three matrix products.

    Args:
        x: float[..., hidden].
        routing: the rows' decision.
        w1: float[experts, width, hidden], the gate projection.
        w3: float[experts, width, hidden], the up projection.
        w2: float[experts, hidden, width], the down projection.
        clamp: limit inside the gated unit.

    Returns:
        float[..., hidden]. Costs experts / k times the arithmetic of a grouped evaluation.
    """
    num_experts, width, hidden = w1.shape
    full = torch.zeros_like(routing.scores).scatter(-1, routing.ids, routing.weights)
    inner = gated(linear(x, w1.reshape(-1, hidden)), linear(x, w3.reshape(-1, hidden)), clamp)
    inner = inner.unflatten(-1, (num_experts, width)) * full.unsqueeze(-1).to(inner.dtype)
    return linear(inner.flatten(-2), w2.transpose(0, 1).reshape(hidden, -1))


def feed_forward(
    weights: WeightMap, prefix: str, shape: ModelShape, x: Tensor, top_k: int, tokens: Tensor | None = None
) -> tuple[Tensor, Routing]:
    """One layer's mixture: routed experts plus the shared one, which has weight 1.

    Args:
        weights: vendor-named tensors with stacked experts.
        prefix: for example `layers.3.ffn`.
        shape: the model.
        x: float[..., hidden], normed sublayer input.
        top_k: experts per row (a drafter's differs from the target's).
        tokens: int64[...], ids of the rows; for a layer whose experts are looked up by them, which ignores `top_k`.

    Returns:
        (output float[..., hidden], the routing).
    """
    gate = weights[f"{prefix}.gate.weight"]
    if tokens is None:
        routing = route(x, gate, weights[f"{prefix}.gate.bias"], top_k=top_k, scale=shape.routed_scale)
    else:
        routing = route_by_token(x, gate, weights[f"{prefix}.gate.tid2eid"], tokens, scale=shape.routed_scale)
    w1, w3, w2 = (weights[f"{prefix}.experts.{name}"] for name in ("w1", "w3", "w2"))
    routed = mix_dense(x, routing, w1, w3, w2, shape.clamp)
    s1, s3, s2 = (weights[f"{prefix}.shared_experts.{name}.weight"] for name in ("w1", "w3", "w2"))
    return routed + expert(x, s1, s3, s2, shape.clamp), routing
