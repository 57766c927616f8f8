"""Layers that target and drafter share: norm, linear, rotary tables, and the projections around attention.

Every function is pure and differentiable. Weights are passed as a mapping from vendor names to tensors, so that a
trainer can hand in its Parameters. Precision: norms, rotations and whatever goes through `linear32` are computed in
float32 also under autocast; `linear` follows the weight's dtype (or autocast).

Invariant: only the last `2 * cos.shape[-1]` channels are rotated, as interleaved pairs (2i, 2i + 1).
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.shapes import ModelShape, RopeScaling

Weights = dict[str, Tensor]
WeightMap = Mapping[str, Tensor]
Rotary = tuple[Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32.

    Args:
        x: float[..., width].
        weight: float[width], or any shape that broadcasts against x; None for no scale.
        eps: added to the mean square.

    Returns:
        float[..., width] in x's dtype.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in], in the weight's dtype; autocast decides where it is on."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    return F.linear(x, weight)


def linear32(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] in float32, also inside an autocast region."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float())


def rope_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each channel pair.

    Source: RoPE with the YaRN blend; the attention temperature of the paper is not used by this family.

    Returns:
        float64[rope_dim / 2] on the CPU, radians per token.
    """
    half = torch.arange(rope_dim // 2, dtype=torch.float64)
    frequencies = theta ** (-2.0 * half / rope_dim)
    if scaling is None:
        return frequencies

    def correction(rotations: float) -> float:
        turns = scaling.original_length / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), rope_dim - 1)
    # An empty ramp would divide by zero; a sliver of width keeps the step where it is.
    width = high - low if high != low else 0.001
    ramp = ((half - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def rope_table(shape: ModelShape, positions: Tensor, *, compressed: bool) -> Rotary:
    """Cosines and sines at the given positions.

    Args:
        shape: the model.
        positions: int64[...], any device.
        compressed: the table of layers that own or read compressed entries (long base, YaRN), else the plain one of
            window-only layers and drafter stages.

    Returns:
        (cos, sin), float32[..., rope_dim / 2] each. Angles are formed in float64: at a million tokens float32 angles
        are off by a hundredth of a radian.
    """
    if compressed:
        frequencies = rope_frequencies(shape.rope_dim, shape.compress_theta, shape.rope_scaling)
    else:
        frequencies = rope_frequencies(shape.rope_dim, shape.rope_theta, None)
    angles = positions.double().unsqueeze(-1) * frequencies.to(positions.device)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, rotary: Rotary, *, inverse: bool = False) -> Tensor:
    """Rotate the trailing channels of x.

    Args:
        x: float[..., width].
        rotary: (cos, sin), each broadcastable to x[..., : rope_dim / 2]; add a head dimension where x has one.
        inverse: rotate backwards (used on the attention output, whose values were rotated keys).

    Returns:
        float[..., width] in x's dtype, computed in float32.
    """
    cos, sin = rotary
    if inverse:
        sin = -sin
    still = x.shape[-1] - 2 * cos.shape[-1]
    even = x[..., still::2].float()
    odd = x[..., still + 1 :: 2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :still], turned.to(x.dtype)), -1)


def heads_of(rotary: Rotary) -> Rotary:
    """Add a head dimension before the channels: [..., r] becomes [..., 1, r]."""
    return rotary[0].unsqueeze(-2), rotary[1].unsqueeze(-2)


def project_query(
    weights: WeightMap, prefix: str, shape: ModelShape, x: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """Low-rank query projection of one attention layer.

    Args:
        weights: vendor-named tensors.
        prefix: for example `layers.3.attn`.
        shape: the model.
        x: float[..., hidden], normed sublayer input.
        rotary: tables at the rows' positions, [..., rope_dim / 2].

    Returns:
        (query, low), float[..., heads, head_dim] rotated, and float[..., q_rank] which the indexer reads too.
    """
    low = rms_norm(linear(x, weights[f"{prefix}.wq_a.weight"]), weights[f"{prefix}.q_norm.weight"], shape.norm_eps)
    query = linear(low, weights[f"{prefix}.wq_b.weight"]).unflatten(-1, (shape.num_heads, shape.head_dim))
    if shape.norms_query:
        query = rms_norm(query, None, shape.norm_eps)
    return apply_rope(query, heads_of(rotary)), low


def project_window(weights: WeightMap, prefix: str, shape: ModelShape, x: Tensor, rotary: Rotary) -> Tensor:
    """The window entry of each row: float[..., head_dim], key and value at once, rotated."""
    entry = rms_norm(linear(x, weights[f"{prefix}.wkv.weight"]), weights[f"{prefix}.kv_norm.weight"], shape.norm_eps)
    return apply_rope(entry, rotary)


def project_output(weights: WeightMap, prefix: str, shape: ModelShape, heads: Tensor, rotary: Rotary) -> Tensor:
    """Undo the rotation and project in two steps, groups of heads first.

    Args:
        weights: vendor-named tensors.
        prefix: for example `layers.3.attn`.
        shape: the model.
        heads: float[..., heads, head_dim], attention output in the rotated frame of its keys.
        rotary: tables at the *query* positions, [..., rope_dim / 2].

    Returns:
        float[..., hidden].
    """
    heads = apply_rope(heads, heads_of(rotary), inverse=True)
    grouped = heads.flatten(-2).unflatten(-1, (shape.o_groups, -1))
    first = weights[f"{prefix}.wo_a.weight"].unflatten(0, (shape.o_groups, shape.o_rank))
    if grouped.dtype != first.dtype and not torch.is_autocast_enabled(grouped.device.type):
        grouped = grouped.to(first.dtype)
    low = torch.einsum("...gi,goi->...go", grouped, first).flatten(-2)
    return linear(low, weights[f"{prefix}.wo_b.weight"])
