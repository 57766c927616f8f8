"""A part of the model in training: its float32 masters, their optimisers, and the numbers of a run that rule them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.shapes import ModelShape
from engine.nano.optim import Muon, clip_gradients
from engine.nano.plan import TensorPlan
from engine.nano.rounding import round_weights

# The learning rate by progress: flat, then linear down to this fraction of the peak.
FLAT_UNTIL = 0.30
LAST_LR = 0.02


@dataclass(frozen=True)
class Recipe:
    """Numbers of a run.

    Attributes:
        step_tokens: tokens per step.
        micro_tokens: tokens per forward; gradients add up over the forwards of a step.
        length: tokens per row, and `long_length` at the end.
        index_tokens: tokens of each forward that the indexer learns from.
        muon_lr: of matrices.
        adam_lr: of tables and router; vectors take half of it.
        warm_steps: linear warm-up.
        clip: limit of the gradient norm.
        bias_rate: step of the router bias.
        anchors: drafted blocks per row in the drafter's phase.
        draft_tokens: tokens of target text per drafter step.
        seed: of weights and batches.
    """

    step_tokens: int = 131072
    micro_tokens: int = 65536
    length: int = 1024
    long_length: int = 4096
    index_tokens: int = 16384
    muon_lr: float = 0.015
    adam_lr: float = 3e-3
    warm_steps: int = 100
    clip: float = 1.0
    bias_rate: float = 1e-3
    anchors: int = 48
    draft_tokens: int = 65536
    seed: int = 7


def learning_rate(progress: float, step: int, warm_steps: int) -> float:
    """Factor on the peak rate: linear warm-up by steps, flat, then linear to LAST_LR at progress 1."""
    decay = 1.0 if progress < FLAT_UNTIL else 1 - (1 - LAST_LR) * (progress - FLAT_UNTIL) / (1 - FLAT_UNTIL)
    return min(1.0, (step + 1) / warm_steps) * max(decay, LAST_LR)


class Part:
    """One half of the model (target or drafter): its masters and their optimisers.

    Args:
        masters: name -> float32 on the training device.
        plans: of exactly these tensors.
        recipe: rates.
        shape: the model (groups of heads).
    """

    def __init__(
        self, masters: dict[str, Tensor], plans: Mapping[str, TensorPlan], recipe: Recipe, shape: ModelShape
    ) -> None:
        self.masters, self.plans, self.recipe = masters, dict(plans), recipe
        self.learned = {name: p for name, p in masters.items() if plans[name].kind != "bias"}
        for parameter in self.learned.values():
            parameter.requires_grad_(True)
        splits = {"wo_a.weight": shape.o_groups, "engram.wkv.weight": shape.num_streams + 1}
        matrices = {n: p for n, p in self.learned.items() if plans[n].kind == "matrix"}
        self.muon = Muon(matrices, splits=splits)
        slow = [p for n, p in self.learned.items() if plans[n].kind == "vector"]
        fast = [p for n, p in self.learned.items() if plans[n].kind in ("table", "index")]
        on_gpu = next(iter(masters.values())).is_cuda
        self.adam = torch.optim.AdamW(
            [{"params": fast, "peak": recipe.adam_lr}, {"params": slow, "peak": recipe.adam_lr / 2}],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=on_gpu,
        )

    def leaves(self, rounded: bool) -> dict[str, Tensor]:
        """The tensors a step differentiates: the masters, or leaves with the rounded values."""
        if not rounded:
            return self.masters
        values = round_weights({n: p.detach() for n, p in self.masters.items()}, self.plans)
        return {n: v.requires_grad_(n in self.learned) for n, v in values.items()}

    def step(self, leaves: Mapping[str, Tensor], factor: float) -> float:
        """Move the masters by the gradients of `leaves`; returns the gradient norm (NaN: nothing was moved)."""
        for name, parameter in self.learned.items():
            grad = leaves[name].grad
            parameter.grad = torch.zeros_like(parameter) if grad is None else grad
        norm = clip_gradients(list(self.learned.values()), self.recipe.clip)
        if math.isfinite(norm):
            self.muon.step(self.recipe.muon_lr * factor)
            for group in self.adam.param_groups:
                group["lr"] = group["peak"] * factor
            self.adam.step()
        for parameter in self.learned.values():
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Any]:
        """All that a later call needs."""
        masters = {name: p.detach() for name, p in self.masters.items()}
        return {"masters": masters, "muon": self.muon.state(), "adam": self.adam.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the state of an earlier call."""
        with torch.no_grad():
            for name, parameter in self.masters.items():
                parameter.copy_(state["masters"][name])
        self.muon.load(state["muon"])
        self.adam.load_state_dict(state["adam"])
