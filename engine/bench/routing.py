"""Routing: which experts the rows of a measured step get, and the rows that stand for those of other ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.model.ops import Ops
from engine.model.shapes import ModelShape
from engine.model.step_forward import PeerRows
from engine.model.step_weights import StepWeights

Routing = Literal["real", "balanced", "zipf"]
ROUTINGS: tuple[Routing, ...] = ("real", "balanced", "zipf")
ZIPF_ALPHA = 1.25


def draw_ids(shape: ModelShape, routing: Routing, rows: int, generator: torch.Generator) -> Tensor | None:
    """int32[layers, rows, k], experts ascending; None for those that the routers choose.

    `balanced`: each expert of a layer has the same number of rows, or one more. `zipf`: the i-th most popular expert is
    drawn with weight i^-1.25; which one that is differs by layer.
    """
    if routing == "real":
        return None
    device = generator.device
    experts, chosen = shape.num_experts, shape.top_k
    tables = []
    for _ in range(shape.num_layers):
        order = torch.randperm(experts, generator=generator, device=device)
        if routing == "balanced":
            places = torch.arange(rows * chosen, device=device).view(rows, chosen) % experts
            ids = order[places]
        else:
            popularity = torch.empty(experts, device=device)
            popularity[order] = -ZIPF_ALPHA * torch.arange(1, experts + 1, device=device).log()
            noise = torch.rand((rows, experts), generator=generator, device=device).clamp(min=1e-12)
            # Without replacement: the largest of log-weights with Gumbel noise.
            ids = (popularity - (-noise.log()).log()).topk(chosen, -1).indices
        tables.append(ids.sort(-1).values)
    return torch.stack(tables).int()


def draw_peers(
    shape: ModelShape,
    weights: StepWeights,
    ops: Ops,
    rows: int,
    ranks: int,
    fixed_ids: Tensor | None,
    generator: torch.Generator,
) -> PeerRows | None:
    """Rows of `ranks - 1` other ranks, each with as many as this one; None of a rank that is alone.

    They are random, of the magnitude of a normed input, and the layer's own router gives their weights, and their
    experts where `fixed_ids` (int32[layers, all rows, k], own rows first) does not.
    """
    if ranks == 1:
        return None
    device = generator.device
    total = rows * ranks
    x = torch.randn((total, shape.hidden), generator=generator, device=device).to(weights.embed.dtype)
    ids = torch.full((shape.num_layers, total, shape.top_k), -1, dtype=torch.int32, device=device)
    shares = torch.zeros((shape.num_layers, total, shape.top_k), device=device)
    for number, layer in enumerate(weights.layers):
        hashed = None
        if fixed_ids is not None:
            hashed = fixed_ids[number, rows:]
        elif layer.hashed is not None:
            tokens = torch.randint(shape.vocab_size, (total - rows,), generator=generator, device=device)
            hashed = layer.hashed[tokens]
        where = (ids[number, rows:], shares[number, rows:])
        ops.route(x[rows:], layer.gate, layer.bias, hashed, shape.top_k, shape.routed_scale, out=where)
    return PeerRows(x, ids, shares)
