"""StepWeights: a rank's weights as the device's step reads them: fused matrices, hyper-connections, experts in slots.

Matrices that read the same input are stacked, so that one launch makes all of it; nothing is folded, a vendor's bytes
stay what they are (fp8 with its block scales, MXFP4). Where tensors come from, a `WeightSource` says: a checkpoint
(`weight_sources.py`) or random numbers of its shapes (`dummy.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.layers import rope_table
from engine.model.shapes import LayerRole, ModelShape
from kernels.forms import HyperWeights, SlotWeights, Weight


class WeightSource(Protocol):
    """Gives tensors by the vendor's names, on the device, in the form that kernels take."""

    device: torch.device

    def matrix(self, *names: str) -> Weight:
        """Matrices [out, in], stacked by rows in the order of their names."""
        ...

    def vector(self, name: str) -> Tensor:
        """float32 of any shape."""
        ...

    def embedding(self, name: str) -> Tensor:
        """[vocab, hidden] in the activations' type."""
        ...

    def ids(self, name: str) -> Tensor:
        """int32 of any shape."""
        ...

    def slots(self, owned: Sequence[tuple[int, int]]) -> SlotWeights:
        """Slot i holds expert `owned[i]`, a pair of layer and expert."""
        ...


@dataclasses.dataclass(frozen=True)
class PoolWeights:
    """Of one compressor: norm float32[width], and bias float32[ratio, gate channels] or None."""

    norm: Tensor
    bias: Tensor | None


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer of the target.

    Attributes:
        enter_attention, enter_mixture: hyper-connections around the sublayers; they hold the sublayers' norms.
        project_in: low-rank query, then the window row.
        project_side: latents and gates of the entries' raw rows, then those of the keys', then the index heads'
            weights: what is kept in float32. None for a layer that sees its window only.
        project_query: heads, then index heads.
        query_norm, window_norm: float32.
        sink: float32[heads].
        entry_pool, key_pool: None where the layer pools none.
        out_groups, out: the two steps of the output projection.
        gate: of the router.
        bias: float32[experts]; None where experts are looked up.
        hashed: int32[vocab, k], experts by token; None where they are chosen.
        shared_up: gate and up projection of the shared expert.
        shared_down: its down projection.
        expert_to_slot: int32[experts], -1 for an expert of another rank.
    """

    enter_attention: HyperWeights
    enter_mixture: HyperWeights
    project_in: Weight
    project_side: Weight | None
    project_query: Weight
    query_norm: Tensor
    window_norm: Tensor
    sink: Tensor
    entry_pool: PoolWeights | None
    key_pool: PoolWeights | None
    out_groups: Weight
    out: Weight
    gate: Weight
    bias: Tensor | None
    hashed: Tensor | None
    shared_up: Weight
    shared_down: Weight
    expert_to_slot: Tensor

    @property
    def dense_bytes(self) -> int:
        """Bytes that a step reads of everything but the routed experts and the table of tokens' experts."""
        matrices = (self.project_in, self.project_side, self.project_query, self.out_groups, self.out, self.gate)
        total = sum(matrix.num_bytes for matrix in (*matrices, self.shared_up, self.shared_down) if matrix is not None)
        hypers = (self.enter_attention, self.enter_mixture)
        return total + sum(hyper.fn.nbytes + hyper.norm.nbytes for hyper in hypers)


@dataclasses.dataclass(frozen=True)
class StepWeights:
    """All of a rank.

    Attributes:
        embed: A[vocab, hidden].
        layers: of the target.
        slots: the rank's experts of all layers.
        collapse: coefficients before the head, and the head's norm.
        head: [vocab, hidden].
        share_scale: constant factor of the index heads' weights.
        plain_turns, long_turns: float32[positions, rope_dim / 2, 2], cosines and sines for layers that see their window
            only, and for the others.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    slots: SlotWeights
    collapse: HyperWeights
    head: Weight
    share_scale: float
    plain_turns: Tensor
    long_turns: Tensor

    @property
    def dense_bytes(self) -> int:
        """Bytes that every step reads whatever its rows are; tables that are read by row left out."""
        layers = sum(layer.dense_bytes for layer in self.layers)
        return layers + self.head.num_bytes + self.collapse.fn.nbytes


def local_experts(num_experts: int, ranks: int, rank: int) -> range:
    """The contiguous share of one rank.

    Raises:
        ConfigError: the experts can not be shared out evenly.
    """
    if ranks < 1 or num_experts % ranks:
        raise ConfigError(f"as-rank-of must divide the {num_experts} experts, found {ranks}")
    share = num_experts // ranks
    return range(rank * share, (rank + 1) * share)


def make_step_weights(
    shape: ModelShape, source: WeightSource, *, max_tokens: int, experts: range | None = None
) -> StepWeights:
    """Gather a rank's weights.

    Args:
        shape: a V4 model.
        source: where they come from.
        max_tokens: positions that rotary tables are made for.
        experts: those that this rank has of each layer; None for all.

    Raises:
        ConfigError: the model is of another architecture.
    """
    if shape.shifts_pre or not shape.pools_keys or shape.engram is not None:
        raise ConfigError(f"the step on a device runs V4 models, found {shape.architecture}")
    experts = range(shape.num_experts) if experts is None else experts
    owned = [(layer, expert) for layer in range(shape.num_layers) for expert in experts]
    expert_to_slot = torch.full((shape.num_layers, shape.num_experts), -1, dtype=torch.int32)
    for slot, (layer, expert) in enumerate(owned):
        expert_to_slot[layer, expert] = slot
    expert_to_slot = expert_to_slot.to(source.device)
    layers = tuple(_layer(shape, role, source, expert_to_slot[role.index]) for role in shape.layer_roles)
    positions = torch.arange(max_tokens)
    plain, long = (
        torch.stack(rope_table(shape, positions, compressed=compressed), -1).to(source.device).contiguous()
        for compressed in (False, True)
    )
    return StepWeights(
        embed=source.embedding("embed.weight"),
        layers=layers,
        slots=source.slots(owned),
        collapse=_hyper(shape, source, "hc_head", "norm.weight"),
        head=source.matrix("head.weight"),
        share_scale=(shape.index_heads * shape.index_dim) ** -0.5,
        plain_turns=plain,
        long_turns=long,
    )


def _layer(shape: ModelShape, role: LayerRole, source: WeightSource, expert_to_slot: Tensor) -> LayerWeights:
    prefix = f"layers.{role.index}"
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    side: list[str] = []
    query = [f"{attn}.wq_b.weight"]
    entry_pool = key_pool = None
    if role.is_kv_source:
        entry_pool = _pool(source, f"{attn}.compressor", side)
    if role.is_index_source:
        key_pool = _pool(source, f"{attn}.indexer.compressor", side)
        side.append(f"{attn}.indexer.weights_proj.weight")
        query.append(f"{attn}.indexer.wq_b.weight")
    return LayerWeights(
        enter_attention=_hyper(shape, source, f"{prefix}.hc_attn", f"{prefix}.attn_norm.weight"),
        enter_mixture=_hyper(shape, source, f"{prefix}.hc_ffn", f"{prefix}.ffn_norm.weight"),
        project_in=source.matrix(f"{attn}.wq_a.weight", f"{attn}.wkv.weight"),
        project_side=source.matrix(*side) if side else None,
        project_query=source.matrix(*query),
        query_norm=source.vector(f"{attn}.q_norm.weight"),
        window_norm=source.vector(f"{attn}.kv_norm.weight"),
        sink=source.vector(f"{attn}.attn_sink"),
        entry_pool=entry_pool,
        key_pool=key_pool,
        out_groups=source.matrix(f"{attn}.wo_a.weight"),
        out=source.matrix(f"{attn}.wo_b.weight"),
        gate=source.matrix(f"{ffn}.gate.weight"),
        bias=None if role.is_hashed else source.vector(f"{ffn}.gate.bias"),
        hashed=source.ids(f"{ffn}.gate.tid2eid") if role.is_hashed else None,
        shared_up=source.matrix(f"{ffn}.shared_experts.w1.weight", f"{ffn}.shared_experts.w3.weight"),
        shared_down=source.matrix(f"{ffn}.shared_experts.w2.weight"),
        expert_to_slot=expert_to_slot,
    )


def _pool(source: WeightSource, prefix: str, side: list[str]) -> PoolWeights:
    """One compressor; its matrices join those that are stacked."""
    side += [f"{prefix}.wkv.weight", f"{prefix}.wgate.weight"]
    return PoolWeights(source.vector(f"{prefix}.norm.weight"), source.vector(f"{prefix}.ape"))


def _hyper(shape: ModelShape, source: WeightSource, prefix: str, norm: str) -> HyperWeights:
    return HyperWeights(
        fn=source.vector(f"{prefix}_fn"),
        base=source.vector(f"{prefix}_base"),
        scale=source.vector(f"{prefix}_scale"),
        norm=source.vector(norm),
        iterations=shape.sinkhorn_iterations,
        eps=shape.hyper_eps,
        norm_eps=shape.norm_eps,
    )
