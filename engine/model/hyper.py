"""Hyper-connections: how a sublayer reads from and writes to the parallel residual streams.

Owns the coefficients (pre, post, combination), the Sinkhorn normalisation and the two applications. In V4.1 a
sublayer is collapsed with the *previous* sublayer's pre ("shifted"), so the caller carries `pre` from one sublayer to
the next, starting from `first_pre`; in V4 with its own, and the head has coefficients for itself (`head_pre`). All
coefficients are float32, also under autocast.

Source: manifold-constrained hyper-connections; here the norm is applied to the projection instead of to the streams,
which is the same number and lets the projection start early.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.layers import WeightMap, linear32
from engine.model.shapes import ModelShape


@dataclass(frozen=True)
class Coefficients:
    """Mixing coefficients of one sublayer, float32.

    Attributes:
        pre: [..., streams], weights of the collapse (of the next sublayer, in V4.1).
        post: [..., streams], how much of the sublayer's output each stream gets.
        combination: [..., streams, streams], from old stream (row) to new stream (column); columns sum to 1.
    """

    pre: Tensor
    post: Tensor
    combination: Tensor


def first_pre(streams: Tensor) -> Tensor:
    """The pre that the first sublayer of a stack uses: all of stream 0. float32[..., streams]."""
    pre = torch.zeros(streams.shape[:-1], dtype=torch.float32, device=streams.device)
    pre[..., 0] = 1
    return pre


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Turn logits into a matrix with (nearly) unit row and column sums; ends on columns.

    Args:
        logits: float32[..., n, n].
        iterations: column normalisations in total; the first one follows the softmax directly.
        eps: added after the softmax and to every denominator.
    """
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def coefficients(weights: WeightMap, prefix: str, shape: ModelShape, streams: Tensor) -> Coefficients:
    """Predict one sublayer's coefficients from the streams that enter it.

    Args:
        weights: vendor-named tensors; reads `{prefix}_fn`, `_base`, `_scale`.
        prefix: for example `layers.3.hc_attn`.
        shape: the model.
        streams: float[..., streams, hidden].
    """
    n = shape.num_streams
    flat = streams.flatten(-2).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + shape.norm_eps)
    mixed = linear32(flat, weights[f"{prefix}_fn"]) * inverse_rms
    scale = weights[f"{prefix}_scale"].float()
    base = weights[f"{prefix}_base"].float()
    pre = torch.sigmoid(mixed[..., :n] * scale[0] + base[:n]) + shape.hyper_eps
    post = 2 * torch.sigmoid(mixed[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixed[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return Coefficients(pre, post, sinkhorn(logits, shape.sinkhorn_iterations, shape.hyper_eps))


def head_pre(weights: WeightMap, prefix: str, shape: ModelShape, streams: Tensor) -> Tensor:
    """Weights of the collapse before a head that has its own: float32[..., streams].

    Args:
        weights: vendor-named tensors; reads `{prefix}hc_head_fn`, `_base`, `_scale`.
        prefix: empty for the target's, `mtp.0.` for a layer that predicts ahead.
        shape: the model.
        streams: float[..., streams, hidden], after the last layer.
    """
    flat = streams.flatten(-2).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + shape.norm_eps)
    mixed = linear32(flat, weights[f"{prefix}hc_head_fn"]) * inverse_rms
    scale, base = weights[f"{prefix}hc_head_scale"].float(), weights[f"{prefix}hc_head_base"].float()
    return torch.sigmoid(mixed * scale + base) + shape.hyper_eps


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams: float[..., hidden] in the streams' dtype, summed in float32."""
    return (streams.float() * pre.unsqueeze(-1)).sum(-2).to(streams.dtype)


def expand(streams: Tensor, output: Tensor, mixing: Coefficients) -> Tensor:
    """Mix the streams and add the sublayer's output to each.

    Args:
        streams: float[..., streams, hidden], as they entered the sublayer.
        output: float[..., hidden].
        mixing: the sublayer's own coefficients.

    Returns:
        float[..., streams, hidden] in the streams' dtype, formed in float32.
    """
    wide = streams.float()
    written = mixing.post.unsqueeze(-1) * output.float().unsqueeze(-2)
    # Four streams: sixteen multiply-adds per channel, kept elementwise so that autocast cannot round them.
    mixed = (mixing.combination.unsqueeze(-1) * wide.unsqueeze(-2)).sum(-3)
    return (written + mixed).to(streams.dtype)
