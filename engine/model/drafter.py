"""The block drafter (DSpark): proposes a few tokens at once from features of the target.

Owns its context entries, the non-causal pass over a block, the Markov bias and the confidence head. Embedding and
output head are the target's. A block has the anchor (the last accepted token) in row 0 and noise tokens after it, at
the anchor's position and the ones that follow; every row sees the context entries of the `window` positions before the
anchor and all rows of the block. So the length of a block changes all of its rows.

Source: the DSpark modules of V4.1 checkpoints; the confidence head reads the hidden state *before* its norm.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.model.checkpoint import markov_names
from engine.model.experts import Routing, feed_forward
from engine.model.hyper import coefficients, collapse, expand, first_pre, head_pre
from engine.model.layers import (
    WeightMap,
    linear,
    linear32,
    project_output,
    project_query,
    project_window,
    rms_norm,
    rope_table,
)
from engine.model.shapes import DrafterShape, ModelShape


@dataclass(frozen=True)
class Blocks:
    """A drafting pass over A anchors in each of B rows, b draft rows per anchor.

    Attributes:
        hidden: float[B, A, b, hidden], collapsed, before the norm.
        base_logits: float32[B, A, b, vocab], without the Markov bias.
        logits: float32[B, A, b, vocab], with the bias of the previous token.
        confidence_logit: float32[B, A, b].
        tokens: int64[B, A, b], the token that each row proposes or, teacher-forced, the argmax.
        routings: the router's decision in each stage, leading dimensions [B, A, b].
    """

    hidden: Tensor
    base_logits: Tensor
    logits: Tensor
    confidence_logit: Tensor
    tokens: Tensor
    routings: tuple[Routing, ...]


def drafter_of(shape: ModelShape) -> DrafterShape:
    """The drafter's sizes; raises ConfigError when the model has none."""
    if shape.drafter is None:
        raise ConfigError("text_config.num_nextn_predict_layers is 0: the checkpoint has no drafter")
    return shape.drafter


def project_context(weights: WeightMap, shape: ModelShape, features: Tensor, positions: Tensor) -> Tensor:
    """Context entries of every stage from target features.

    Args:
        weights: vendor-named tensors.
        shape: the model.
        features: float[..., L, targets * hidden].
        positions: int64[L] or [..., L], position of each feature row.

    Returns:
        float[stages, ..., L, head_dim], rotated. Depends on its own row only, so it can be kept and extended.
    """
    drafter = drafter_of(shape)
    main = linear(features, weights["mtp.0.main_proj.weight"])
    main = rms_norm(main, weights["mtp.0.main_norm.weight"], shape.norm_eps)
    rotary = rope_table(shape, positions, compressed=False)
    stages = [project_window(weights, f"mtp.{k}.attn", shape, main, rotary) for k in range(drafter.num_stages)]
    return torch.stack(stages)


def run_block(
    weights: WeightMap, shape: ModelShape, tokens: Tensor, positions: Tensor, context: Tensor, visible: Tensor
) -> tuple[Tensor, tuple[Routing, ...]]:
    """Run the stages over blocks of rows.

    Args:
        weights: vendor-named tensors.
        shape: the model.
        tokens: int64[..., b], anchor then noise.
        positions: int64[..., b].
        context: float[stages, ..., C, head_dim], see `project_context`.
        visible: bool[..., C], which context entries the block may see.

    Returns:
        (hidden float[..., b, hidden] before the norm, routing of each stage).
    """
    drafter = drafter_of(shape)
    rotary = rope_table(shape, positions, compressed=False)
    embedded = F.embedding(tokens, weights["embed.weight"])
    streams = embedded.unsqueeze(-2).expand(*tokens.shape, shape.num_streams, shape.hidden)
    pre = first_pre(streams)
    routings = []
    for stage in range(drafter.num_stages):
        prefix = f"mtp.{stage}"
        mixing = coefficients(weights, f"{prefix}.hc_attn", shape, streams)
        x = collapse(streams, pre if shape.shifts_pre else mixing.pre)
        x = rms_norm(x, weights[f"{prefix}.attn_norm.weight"], shape.norm_eps)
        query, _ = project_query(weights, f"{prefix}.attn", shape, x, rotary)
        own = project_window(weights, f"{prefix}.attn", shape, x, rotary)
        heads = _attend_block(query, own, context[stage], visible, weights[f"{prefix}.attn.attn_sink"])
        streams = expand(streams, project_output(weights, f"{prefix}.attn", shape, heads, rotary), mixing)
        pre = mixing.pre

        mixing = coefficients(weights, f"{prefix}.hc_ffn", shape, streams)
        x = collapse(streams, pre if shape.shifts_pre else mixing.pre)
        x = rms_norm(x, weights[f"{prefix}.ffn_norm.weight"], shape.norm_eps)
        output, routing = feed_forward(weights, f"{prefix}.ffn", shape, x, drafter.top_k)
        streams = expand(streams, output, mixing)
        pre = mixing.pre
        routings.append(routing)
    if not shape.shifts_pre:
        pre = head_pre(weights, f"mtp.{drafter.num_stages - 1}.", shape, streams)
    return collapse(streams, pre), tuple(routings)


def _attend_block(query: Tensor, own: Tensor, context: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """All rows of a block over the context and each other: query [..., b, heads, c], own [..., b, c]."""
    keys = torch.cat((context.to(own.dtype), own), -2)
    logits = torch.einsum("...qhc,...kc->...hqk", query * query.shape[-1] ** -0.5, keys.to(query.dtype)).float()
    # The block's own columns are always visible; only context columns can be masked.
    hidden = F.pad(~visible, (0, own.shape[-2]), value=False)
    logits = logits.masked_fill(hidden[..., None, None, :], -torch.inf)
    tail = sink.float().view(-1, 1, 1).expand(*logits.shape[:-1], 1)
    share = torch.cat((logits, tail), -1).softmax(-1)[..., :-1]
    return torch.einsum("...hqk,...kc->...qhc", share.to(keys.dtype), keys)


def base_logits(weights: WeightMap, shape: ModelShape, hidden: Tensor) -> Tensor:
    """The target's head over the drafter's norm: float32[..., vocab]."""
    last = drafter_of(shape).num_stages - 1
    return linear(rms_norm(hidden, weights[f"mtp.{last}.norm.weight"], shape.norm_eps), weights["head.weight"]).float()


def markov_embedding(weights: WeightMap, shape: ModelShape, previous: Tensor) -> Tensor:
    """Low-rank embedding of the previous token: int64[...] to float[..., rank]."""
    return F.embedding(previous, weights[markov_names(shape)[0]])


def markov_bias(weights: WeightMap, shape: ModelShape, embedded: Tensor) -> Tensor:
    """Logit bias of the previous token's embedding: float32[..., vocab]."""
    return linear(embedded, weights[markov_names(shape)[1]]).float()


def confidence_logit(weights: WeightMap, shape: ModelShape, hidden: Tensor, embedded: Tensor) -> Tensor:
    """Logit of the chance that a row's draft is accepted, float32[...], from its unnormed hidden state."""
    last = drafter_of(shape).num_stages - 1
    joined = torch.cat((hidden.float(), embedded.float()), -1)
    return linear32(joined, weights[f"mtp.{last}.confidence_head.proj.weight"]).squeeze(-1)


def _prepare(
    weights: WeightMap, shape: ModelShape, features: Tensor, tokens: Tensor, anchors: Tensor, block: int
) -> tuple[Tensor, tuple[Routing, ...]]:
    """Gather each anchor's context window and run the stages: hidden float[B, A, b, hidden]."""
    drafter = drafter_of(shape)
    batch, length = tokens.shape
    window = shape.window
    everywhere = project_context(weights, shape, features, torch.arange(length, device=tokens.device))
    # Window entries at anchor - window .. anchor - 1; positions before the start are masked.
    reach = anchors.unsqueeze(-1) + torch.arange(-window, 0, device=tokens.device)
    row = torch.arange(batch, device=tokens.device).view(-1, 1, 1)
    context = everywhere[:, row, reach.clamp(min=0)]
    positions = anchors.unsqueeze(-1) + torch.arange(block, device=tokens.device)
    rows = torch.full_like(positions, drafter.noise_token_id)
    rows[..., 0] = tokens.gather(1, anchors)
    return run_block(weights, shape, rows, positions, context, reach >= 0)


def forward_blocks(
    weights: WeightMap, shape: ModelShape, features: Tensor, tokens: Tensor, anchors: Tensor, block: int
) -> Blocks:
    """Teacher-forced drafting from many anchors at once, for training and measurement.

    Args:
        weights: vendor-named tensors with `mtp.*`.
        shape: the model.
        features: float[B, L, targets * hidden] of the target's forward; detach them to leave the target alone.
        tokens: int64[B, L]; row i of anchor a predicts `tokens[a + i + 1]`, and its previous token is
            `tokens[a + i]`, so anchors must not exceed L - block.
        anchors: int64[B, A].
        block: rows per anchor, at least 1.
    """
    hidden, routings = _prepare(weights, shape, features, tokens, anchors, block)
    reach = anchors.unsqueeze(-1) + torch.arange(block, device=tokens.device)
    previous = tokens.gather(1, reach.flatten(1)).view_as(reach)
    base = base_logits(weights, shape, hidden)
    embedded = markov_embedding(weights, shape, previous)
    logits = base + markov_bias(weights, shape, embedded)
    confidence = confidence_logit(weights, shape, hidden, embedded)
    return Blocks(hidden, base, logits, confidence, logits.argmax(-1), routings)


def draft_rows(
    weights: WeightMap,
    shape: ModelShape,
    hidden: Tensor,
    anchor_tokens: Tensor,
    pick: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a block's tokens one after the other; each draw biases the next row.

    Args:
        weights: vendor-named tensors.
        shape: the model.
        hidden: float[..., b, hidden] of `run_block`.
        anchor_tokens: int64[...].
        pick: from logits float32[..., vocab] to a token int64[...]; None takes the argmax.

    Returns:
        (base logits [..., b, vocab], logits [..., b, vocab], confidence logit [..., b], tokens int64[..., b]).
    """
    base = base_logits(weights, shape, hidden)
    previous = anchor_tokens
    logits, confidence, tokens = [], [], []
    for row in range(hidden.shape[-2]):
        embedded = markov_embedding(weights, shape, previous)
        logits.append(base[..., row, :] + markov_bias(weights, shape, embedded))
        confidence.append(confidence_logit(weights, shape, hidden[..., row, :], embedded))
        previous = pick(logits[-1]) if pick is not None else logits[-1].argmax(-1)
        tokens.append(previous)
    return base, torch.stack(logits, -2), torch.stack(confidence, -1), torch.stack(tokens, -1)


def draft_blocks(
    weights: WeightMap,
    shape: ModelShape,
    features: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    block: int,
    pick: Callable[[Tensor], Tensor] | None = None,
) -> Blocks:
    """As `forward_blocks`, but each row's previous token is the drafter's own; no limit on anchors below L."""
    hidden, routings = _prepare(weights, shape, features, tokens, anchors, block)
    base, logits, confidence, drawn = draft_rows(weights, shape, hidden, tokens.gather(1, anchors), pick)
    return Blocks(hidden, base, logits, confidence, drawn, routings)
