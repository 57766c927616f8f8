"""Layer: the weights of one layer of the paged path, fused and folded for few and wide products.

Norm weights and constant factors that stand before a product are folded into its matrix, matrices that read the same
input are stacked. The stored checkpoint stays what it is; these are float32 copies made at load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.compressor import Compressor, Pooling
from engine.model.kv import KvLayout, Plane
from engine.model.layers import WeightMap
from engine.model.memory import Memory
from engine.model.mixing import HyperConnection
from engine.model.shapes import LayerRole, ModelShape
from engine.model.tiles import ExpertBank, TileLinear


class Layer:
    """Weights of one layer.

    The input product yields, side by side: low-rank query, window row, then (KV source) latent and, for ratio > 1,
    gate, then the same of pooled index keys, then (index source) the heads' weights. The query product yields heads,
    then index heads.

    Attributes that are not weights:
        raw_width, key_raw_width: columns of the raw rows of entries and of pooled keys.
    """

    def __init__(
        self, weights: WeightMap, shape: ModelShape, role: LayerRole, layout: KvLayout, *, with_experts: bool = True
    ) -> None:
        """Keeps float32 copies. Without experts they are in slots elsewhere, and `experts` is None."""
        prefix = f"layers.{role.index}"
        attn = f"{prefix}.attn"
        self.role = role
        norm = weights[f"{prefix}.attn_norm.weight"].float()
        parts = [weights[f"{attn}.wq_a.weight"], weights[f"{attn}.wkv.weight"]]
        self.compressor: Compressor | None = None
        self.raw_width = self.key_raw_width = 0
        if role.is_kv_source:
            selects = not role.attends_to_all
            pooling, columns = _pooling(weights, f"{attn}.compressor", shape, role, layout, "entry")
            parts += columns
            self.raw_width = sum(len(part) for part in columns)
            key_plane = find_plane(layout, role.index, "key") if selects else None
            entry_plane = find_plane(layout, role.index, "entry")
            if selects and shape.pools_keys:
                keys, columns = _pooling(weights, f"{attn}.indexer.compressor", shape, role, layout, "key")
                parts += columns
                self.key_raw_width = sum(len(part) for part in columns)
                self.compressor = Compressor(role.ratio, pooling, entry_plane, key_plane, key_pooling=keys)
            elif selects:
                to_key = TileLinear(weights[f"{attn}.indexer.wk.weight"])
                key_norm = weights[f"{attn}.indexer.k_norm.weight"].float()
                self.compressor = Compressor(role.ratio, pooling, entry_plane, key_plane, to_key, key_norm)
            else:
                self.compressor = Compressor(role.ratio, pooling, entry_plane, None)
        # A query whose heads are normed afterwards takes its scale there.
        query = [weights[f"{attn}.wq_b.weight"].float() * (1.0 if shape.norms_query else shape.head_dim**-0.5)]
        if role.is_index_source:
            scale = (shape.index_dim * shape.index_heads) ** -0.5
            parts.append(weights[f"{attn}.indexer.weights_proj.weight"].float() * scale)
            query.append(weights[f"{attn}.indexer.wq_b.weight"].float())
        self.project_in = TileLinear(torch.cat([part.float() for part in parts]) * norm)
        self.project_query = TileLinear(torch.cat(query) * weights[f"{attn}.q_norm.weight"].float())
        self.kv_norm = weights[f"{attn}.kv_norm.weight"].float()
        self.sink = weights[f"{attn}.attn_sink"].float()
        self.project_groups = [TileLinear(part) for part in weights[f"{attn}.wo_a.weight"].chunk(shape.o_groups)]
        self.project_out = TileLinear(weights[f"{attn}.wo_b.weight"])
        if role.ratio and role.kv_source is not None:
            self.entry_plane = find_plane(layout, role.kv_source, "entry")
            if not role.attends_to_all:
                self.key_plane = find_plane(layout, role.kv_source, "key")

        ffn = f"{prefix}.ffn"
        norm = weights[f"{prefix}.ffn_norm.weight"].float()
        wide = [weights[f"{ffn}.{name}.weight"] for name in ("gate", "shared_experts.w1", "shared_experts.w3")]
        self.project_ffn = TileLinear(torch.cat([part.float() for part in wide]) * norm)
        self.shared_out = TileLinear(weights[f"{ffn}.shared_experts.w2.weight"])
        self.bias = None if role.is_hashed else weights[f"{ffn}.gate.bias"].float().numpy()
        self.experts_by_token = weights[f"{ffn}.gate.tid2eid"].sort(-1).values.numpy() if role.is_hashed else None
        self.experts: ExpertBank | None = None
        if with_experts:
            w1, w3, w2 = (weights[f"{ffn}.experts.{name}"] for name in ("w1", "w3", "w2"))
            self.experts = ExpertBank(w1, w3, w2, shape.clamp, norm)
        self.mix_attn = HyperConnection(weights, f"{prefix}.hc_attn", shape)
        self.mix_ffn = HyperConnection(weights, f"{prefix}.hc_ffn", shape)
        self.memory = Memory(weights, f"{prefix}.engram", shape) if role.has_engram else None


def _pooling(
    weights: WeightMap, prefix: str, shape: ModelShape, role: LayerRole, layout: KvLayout, kind: str
) -> tuple[Pooling, list[Tensor]]:
    """One compressor, and its columns of the input product."""
    columns = [weights[f"{prefix}.wkv.weight"]]
    if role.ratio > 1:
        columns.append(weights[f"{prefix}.wgate.weight"])
    pool = next((pool for pool in layout.pools if pool.layer == role.index and pool.kind == kind), None)
    bias = weights[f"{prefix}.ape"].float() if shape.biases_gates else None
    return Pooling(weights[f"{prefix}.norm.weight"].float(), shape.norm_eps, pool, role.overlaps, bias), columns


def find_plane(layout: KvLayout, layer: int, kind: str) -> Plane:
    """The plane that a source layer writes."""
    return next(plane for plane in layout.planes if plane.layer == layer and plane.kind == kind)
