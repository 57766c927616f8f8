"""StepWeights: a rank's weights as the device's step reads them: fused matrices, hyper-connections, experts in slots.

Matrices that read the same input are stacked, so that one launch makes all of it; nothing is folded, a vendor's bytes
stay what they are (fp8 with its block scales, MXFP4). Where tensors come from, a `WeightSource` says: a checkpoint
(`weight_sources.py`) or random numbers of its shapes (`dummy.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.engram import EngramTables
from engine.model.layers import rope_table
from engine.model.shapes import LayerRole, ModelShape
from kernels.forms import HyperWeights, MemoryTable, SlotWeights, Weight


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

    def table(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Lines of an n-gram memory and their scales, see `MemoryTable`."""
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
class KeyWeights:
    """Of index keys that are made of entries: matrix A[index width, width], and norm float32[index width]."""

    matrix: Tensor
    norm: Tensor


@dataclasses.dataclass(frozen=True)
class MemoryWeights:
    """Of an n-gram memory.

    Attributes:
        table: its lines, and which ones ids stand for.
        project: to a key for each stream, then a value.
        match: float32[streams, hidden], product of the norms of streams and keys, and of the scale of their match.
    """

    table: MemoryTable
    project: Weight
    match: Tensor


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
        counts: int32[experts], to which a step adds the own rows of each; None where nobody asks.
        key: None where the layer makes no index keys of its entries.
        memory: None where the layer has none.
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
    counts: Tensor | None = None
    key: KeyWeights | None = None
    memory: MemoryWeights | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes that a step reads of everything but the routed experts and the tables that are read by row."""
        matrices = [self.project_in, self.project_side, self.project_query, self.out_groups, self.out, self.gate]
        matrices += [self.shared_up, self.shared_down, self.memory.project if self.memory is not None else None]
        total = sum(matrix.num_bytes for matrix in matrices if matrix is not None)
        hypers = (self.enter_attention, self.enter_mixture)
        return total + sum(hyper.fn.nbytes + hyper.norm.nbytes for hyper in hypers)


class PlacedExperts(NamedTuple):
    """Experts in slots that somebody else fills, and the tables that say where they are.

    Attributes:
        slots: of the rank.
        expert_to_slot: int32[layers, experts], -1 for an expert that is not here.
        counts: int32[layers, experts], to which steps add their own rows.
    """

    slots: SlotWeights
    expert_to_slot: Tensor
    counts: Tensor


@dataclasses.dataclass(frozen=True)
class StepWeights:
    """All of a rank.

    Attributes:
        embed: A[vocab, hidden].
        layers: of the target.
        slots: the rank's experts of all layers.
        collapse: coefficients before the head, and the head's norm. Where the head takes the last sublayer's, those of
            its way in, which nobody reads.
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
    shape: ModelShape,
    source: WeightSource,
    *,
    max_tokens: int,
    experts: range | None = None,
    engram: EngramTables | None = None,
    placed: PlacedExperts | None = None,
) -> StepWeights:
    """Gather a rank's weights.

    Args:
        shape: the model.
        source: where they come from.
        max_tokens: positions that rotary tables are made for.
        experts: those that this rank has of each layer; None for all.
        engram: hash constants of a model with an n-gram memory.
        placed: experts that are in slots already, or will be; then none are read from the source.

    Raises:
        ConfigError: hash constants are missing.
    """
    if shape.engram is not None and engram is None:
        raise ConfigError("the model has an n-gram memory; pass the tables made by engram_tables")
    if placed is None:
        experts = range(shape.num_experts) if experts is None else experts
        owned = [(layer, expert) for layer in range(shape.num_layers) for expert in experts]
        numbers = torch.full((shape.num_layers, shape.num_experts), -1, dtype=torch.int32)
        for slot, (layer, expert) in enumerate(owned):
            numbers[layer, expert] = slot
        expert_to_slot, counts = numbers.to(source.device), None
    else:
        expert_to_slot, counts = placed.expert_to_slot, placed.counts
    layers = tuple(
        dataclasses.replace(
            _layer(shape, role, source, expert_to_slot[role.index], engram),
            counts=None if counts is None else counts[role.index],
        )
        for role in shape.layer_roles
    )
    positions = torch.arange(max_tokens)
    plain, long = (
        torch.stack(rope_table(shape, positions, compressed=compressed), -1).to(source.device).contiguous()
        for compressed in (False, True)
    )
    return StepWeights(
        embed=source.embedding("embed.weight"),
        layers=layers,
        slots=source.slots(owned) if placed is None else placed.slots,
        collapse=_collapse(shape, source, layers[-1]),
        head=source.matrix("head.weight"),
        share_scale=(shape.index_heads * shape.index_dim) ** -0.5,
        plain_turns=plain,
        long_turns=long,
    )


def make_stage_weights(
    shape: ModelShape, role: LayerRole, source: WeightSource, expert_to_slot: Tensor
) -> tuple[LayerWeights, HyperWeights]:
    """The layer that predicts ahead, and the coefficients before its head; `role` of a layer past the target's."""
    layer = _layer(shape, role, source, expert_to_slot, None, prefix="mtp.0")
    return layer, _hyper(shape, source, "mtp.0.hc_head", "mtp.0.norm.weight")


def _collapse(shape: ModelShape, source: WeightSource, last: LayerWeights) -> HyperWeights:
    if not shape.shifts_pre:
        return _hyper(shape, source, "hc_head", "norm.weight")
    return dataclasses.replace(last.enter_mixture, norm=source.vector("norm.weight"))


def _layer(
    shape: ModelShape,
    role: LayerRole,
    source: WeightSource,
    expert_to_slot: Tensor,
    engram: EngramTables | None,
    prefix: str = "",
) -> LayerWeights:
    prefix = prefix or f"layers.{role.index}"
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    side: list[str] = []
    query = [f"{attn}.wq_b.weight"]
    entry_pool = key_pool = key = None
    if role.is_kv_source:
        entry_pool = _pool(shape, role, source, f"{attn}.compressor", side)
        if role.is_index_source and not shape.pools_keys:
            matrix = source.embedding(f"{attn}.indexer.wk.weight")
            key = KeyWeights(matrix, source.vector(f"{attn}.indexer.k_norm.weight"))
    if role.is_index_source:
        if shape.pools_keys:
            key_pool = _pool(shape, role, source, f"{attn}.indexer.compressor", side)
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
        key=key,
        memory=_memory(shape, role, source, engram) if engram is not None and role.has_engram else None,
    )


def _memory(shape: ModelShape, role: LayerRole, source: WeightSource, engram: EngramTables) -> MemoryWeights:
    prefix, at = f"layers.{role.index}.engram", engram.layers.index(role.index)
    data, scale = source.table(f"{prefix}.embed.weight")
    device = source.device
    table = MemoryTable(
        data=data,
        scale=scale,
        folded=engram.token_map.to(device, torch.int32),
        pad=engram.pad_folded,
        multipliers=engram.multipliers[at].to(device),
        primes=engram.primes[at].to(device),
        offsets=engram.offsets[at].to(device),
    )
    match = source.vector(f"{prefix}.q_weight") * source.vector(f"{prefix}.k_weight") / shape.hidden**0.5
    return MemoryWeights(table, source.matrix(f"{prefix}.wkv.weight"), match)


def _pool(shape: ModelShape, role: LayerRole, source: WeightSource, prefix: str, side: list[str]) -> PoolWeights:
    """One compressor; its matrices join those that are stacked."""
    side.append(f"{prefix}.wkv.weight")
    if role.ratio > 1:
        side.append(f"{prefix}.wgate.weight")
    bias = source.vector(f"{prefix}.ape") if shape.biases_gates else None
    return PoolWeights(source.vector(f"{prefix}.norm.weight"), bias)


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
