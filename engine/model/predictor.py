"""The layer that predicts ahead (MTP): one token more from the target's streams, in plain torch, over whole sequences.

Slot p holds the target's streams after its last layer at position p and the token of position p + 1; it predicts the
token of p + 2 at rotary position p. To draft further, the layer is fed its own streams and its own token one slot on.
After a verification the slots of accepted tokens are run again with the target's streams, so what the layer keeps
never depends on which drafts there were.

Embedding and output matrix are the target's. The embedding of slot 0 is used like any other (one engine zeroes it).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.model.experts import feed_forward
from engine.model.hyper import coefficients, collapse, expand, head_pre
from engine.model.layers import (
    WeightMap,
    linear,
    project_output,
    project_query,
    project_window,
    rms_norm,
    rope_table,
)
from engine.model.reference import attend
from engine.model.shapes import ModelShape

PREFIX = "mtp.0"


def enter(weights: WeightMap, shape: ModelShape, streams: Tensor, tokens: Tensor) -> Tensor:
    """The streams that a slot enters the layer with.

    Args:
        weights: vendor-named tensors with `mtp.0.*`.
        shape: the model.
        streams: float[..., streams, hidden], of the slot's position.
        tokens: int64[...], the token after it.

    Returns:
        float[..., streams, hidden].
    """
    if shape.num_predict_layers == 0:
        raise ConfigError("the checkpoint has no layer that predicts ahead")
    before = rms_norm(streams, weights[f"{PREFIX}.hnorm.weight"], shape.norm_eps)
    embedded = F.embedding(tokens, weights["embed.weight"])
    after = rms_norm(embedded, weights[f"{PREFIX}.enorm.weight"], shape.norm_eps)
    first = linear(before, weights[f"{PREFIX}.h_proj.weight"])
    return first + linear(after, weights[f"{PREFIX}.e_proj.weight"]).unsqueeze(-2)


def predict(weights: WeightMap, shape: ModelShape, streams: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Run the layer over slots 0 .. L - 1.

    Args:
        weights: vendor-named tensors with `mtp.0.*`.
        shape: the model.
        streams: float[B, L, streams, hidden], the target's, or the layer's own for slots that draft further.
        tokens: int64[B, L], the token after each slot.

    Returns:
        (logits float32[B, L, vocab], the layer's own streams float[B, L, streams, hidden]).

    Raises:
        ConfigError: the model has no such layer.
    """
    held = enter(weights, shape, streams, tokens)
    rotary = rope_table(shape, torch.arange(tokens.shape[1], device=tokens.device), compressed=False)
    mixing = coefficients(weights, f"{PREFIX}.hc_attn", shape, held)
    x = rms_norm(collapse(held, mixing.pre), weights[f"{PREFIX}.attn_norm.weight"], shape.norm_eps)
    query, _ = project_query(weights, f"{PREFIX}.attn", shape, x, rotary)
    window_kv = project_window(weights, f"{PREFIX}.attn", shape, x, rotary)
    heads, _ = attend(query, window_kv, weights[f"{PREFIX}.attn.attn_sink"], shape.window, None, None)
    held = expand(held, project_output(weights, f"{PREFIX}.attn", shape, heads, rotary), mixing)

    mixing = coefficients(weights, f"{PREFIX}.hc_ffn", shape, held)
    x = rms_norm(collapse(held, mixing.pre), weights[f"{PREFIX}.ffn_norm.weight"], shape.norm_eps)
    output, _ = feed_forward(weights, f"{PREFIX}.ffn", shape, x, shape.top_k)
    held = expand(held, output, mixing)
    hidden = collapse(held, head_pre(weights, f"{PREFIX}.", shape, held))
    hidden = rms_norm(hidden, weights[f"{PREFIX}.norm.weight"], shape.norm_eps)
    return linear(hidden, weights["head.weight"]).float(), held
