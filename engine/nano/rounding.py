"""Quantisation in the training forward: all tensors of a part through the file's rounding, in a few large operations.

Owns the grouping only; the rules are `engine.model.quantise`'s, and the result equals its `fake_quantise` bit for bit
(a test says so). Gradients pass straight through: the caller makes leaves of the rounded tensors and moves the masters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.model.checkpoint import Store
from engine.model.quantise import fake_quantise_fp8, fake_quantise_mxfp4
from engine.nano.plan import BLOCK, TensorPlan


@torch.no_grad()
def round_weights(weights: Mapping[str, Tensor], plans: Mapping[str, TensorPlan]) -> dict[str, Tensor]:
    """Round tensors as the exported file stores them.

    Args:
        weights: name -> float32, experts stacked. Borrowed.
        plans: storage of each of them.

    Returns:
        name -> float32, new tensors.
    """
    rounded: dict[str, Tensor] = {}
    groups: dict[Store, list[tuple[str, Tensor]]] = {"fp8": [], "rows": [], "fp4": []}
    for name, weight in weights.items():
        store = plans[name].store
        if store == "fp32":
            rounded[name] = weight.clone()
        elif store == "bf16":
            rounded[name] = weight.to(torch.bfloat16).float()
        elif store == "fp8":
            rows, columns = weight.shape
            # One block of 32 x 32 becomes one row, so that all matrices can be rounded together.
            blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
            groups["fp8"].append((name, blocks.reshape(-1, BLOCK * BLOCK)))
        else:
            groups[store].append((name, weight.reshape(-1, BLOCK)))
    for kind, members in groups.items():
        if not members:
            continue
        flat = torch.cat([part for _, part in members])
        flat = fake_quantise_mxfp4(flat) if kind == "fp4" else fake_quantise_fp8(flat, (1, flat.shape[1]))
        for (name, _), part in zip(members, flat.split([len(part) for _, part in members]), strict=True):
            size = weights[name].shape
            if kind == "fp8":
                part = part.view(size[0] // BLOCK, size[1] // BLOCK, BLOCK, BLOCK).transpose(1, 2)
            rounded[name] = part.reshape(size)
    return rounded
