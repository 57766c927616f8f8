"""Layer: the weights of one layer of the paged path, fused and folded for few and wide products.

Norm weights and constant factors that stand before a product are folded into its matrix, matrices that read the same
input are stacked. The stored checkpoint stays what it is; these are float32 copies made at load. What a layer of the
target and a stage of the drafter compute alike, around their attention and in their mixture, is here too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.compressor import Compressor, Pooling, rotate
from engine.model.kv import KvLayout, Plane
from engine.model.layers import WeightMap
from engine.model.memory import Memory
from engine.model.mixing import HyperConnection
from engine.model.shapes import LayerRole, ModelShape
from engine.model.tiles import (
    Choice,
    ExpertBank,
    Floats,
    TileLinear,
    choose_experts,
    gate_unit,
    norm_rows,
    weigh_experts,
)

Ints = npt.NDArray[np.int64]


class Mixture(Protocol):
    """Where the routed experts are when they are not in this process's layers: `dispatch.Dispatch`."""

    def open_pass(self, positions: Ints, ids: Ints, part: int = 0) -> None:
        """Before the first layer: int64[rows] positions and token ids of the pass, which may have no rows.

        Args:
            part: whose experts it is for, by index into `core.pact.PARTS`.
        """
        ...

    def send(self, layer: int, x: Tensor, choice: Choice) -> None:
        """Each row to its experts: float32[padded rows, hidden], and the choice of the real rows."""
        ...

    def receive(self) -> Tensor:
        """float32[rows, hidden], the weighted sums of what was sent last."""
        ...

    def close_pass(self) -> None:
        """After the last layer."""
        ...


class Projected(NamedTuple):
    """What rows bring to a layer's attention; whole tiles of rows.

    Attributes:
        query: float32[rows, heads, head_dim], scaled and rotated.
        window_kv: float32[rows, head_dim], rotated.
        rest: float32[rows, *], columns of the input product past the window row.
        index_query: float32[rows, *], columns of the query product past the heads.
    """

    query: Tensor
    window_kv: Tensor
    rest: Tensor
    index_query: Tensor


class Routed(NamedTuple):
    """The router's decision for real rows, and float32[rows, experts] that it was made on, if by score."""

    choice: Choice
    ranked: Floats | None


class Layer:
    """Weights of one layer.

    The input product yields, side by side: low-rank query, window row, then (KV source) latent and, for ratio > 1,
    gate, then the same of pooled index keys, then (index source) the heads' weights. The query product yields heads,
    then index heads.

    Attributes that are not weights:
        raw_width, key_raw_width: columns of the raw rows of entries and of pooled keys.
        number: of the layer within its part.
    """

    def __init__(
        self,
        weights: WeightMap,
        shape: ModelShape,
        role: LayerRole,
        layout: KvLayout,
        *,
        with_experts: bool = True,
        stage: int | None = None,
    ) -> None:
        """Keeps float32 copies. Without experts they are in slots elsewhere, and `experts` is None.

        Args:
            stage: for a stage of the drafter, its number; else it is the target's layer `role.index`.
        """
        prefix = f"layers.{role.index}" if stage is None else f"mtp.{stage}"
        attn = f"{prefix}.attn"
        self.role = role
        self.number = role.index if stage is None else stage
        self._shape = shape
        drafter = shape.drafter if stage is not None else None
        self._num_experts = shape.num_experts if drafter is None else drafter.num_experts
        self.top_k = shape.top_k if drafter is None else drafter.top_k
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

    def project_window(self, lines: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """The input product of the last line of every row, and the window row in it, normed and rotated.

        Args:
            lines: float32[rows, streams + 1, hidden]; whole tiles.
            turn: complex64[rows, rope_dim / 2].

        Returns:
            (float32[rows, *], float32[rows, head_dim]).
        """
        shape = self._shape
        wide = self.project_in(norm_rows(lines[:, -1], shape.norm_eps))
        window_kv = norm_rows(wide[:, shape.q_rank : shape.q_rank + shape.head_dim], shape.norm_eps, self.kv_norm)
        rotate(window_kv, turn)
        return wide, window_kv

    def project(self, lines: Tensor, turn: Tensor) -> Projected:
        """All products before the attention; arguments as in `project_window`."""
        shape = self._shape
        wide, window_kv = self.project_window(lines, turn)
        low = norm_rows(wide[:, : shape.q_rank], shape.norm_eps)
        heads = self.project_query(low)
        split = shape.num_heads * shape.head_dim
        query = heads[:, :split].unflatten(1, (shape.num_heads, shape.head_dim))
        if shape.norms_query:
            query = norm_rows(query, shape.norm_eps).mul_(shape.head_dim**-0.5)
        rotate(query, turn.unsqueeze(1))
        return Projected(query, window_kv, wide[:, shape.q_rank + shape.head_dim :], heads[:, split:])

    def project_back(self, mixed: Tensor, turn: Tensor) -> Tensor:
        """The sublayer's output from float32[rows, heads, head_dim], which is rotated back in place."""
        rotate(mixed, turn.conj().resolve_conj().unsqueeze(1))
        groups = mixed.view(len(mixed), self._shape.o_groups, -1)
        joined = torch.cat([project(groups[:, g]) for g, project in enumerate(self.project_groups)], 1)
        return self.project_out(joined)

    def mix_experts(self, lines: Tensor, ids: Ints, mixture: Mixture | None) -> Routed:
        """Mixture sublayer: reads the last line of every row and overwrites it with the output.

        Args:
            lines: float32[rows, streams + 1, hidden]; whole tiles.
            ids: int64[real rows], their tokens.
            mixture: evaluates the routed experts of a layer that has none.
        """
        shape, rows = self._shape, len(ids)
        x = norm_rows(lines[:, -1], shape.norm_eps)
        wide = self.project_ffn(x)
        scores = torch.nn.functional.softplus(wide[:, : self._num_experts]).sqrt_()
        known = scores.numpy()[:rows]
        ranked: Floats | None = None
        if self.experts_by_token is not None:
            choice = weigh_experts(known, self.experts_by_token[ids], shape.routed_scale)
        else:
            assert self.bias is not None
            choice, ranked = choose_experts(known, self.bias, self.top_k, shape.routed_scale)
        if self.experts is not None:
            output = self.shared_out(gate_unit(wide[:, self._num_experts :], shape.clamp))
            output[:rows] += self.experts.mix(x, choice)
        else:
            assert mixture is not None
            mixture.send(self.number, x, choice)
            # While rows are on their way.
            output = self.shared_out(gate_unit(wide[:, self._num_experts :], shape.clamp))
            output[:rows] += mixture.receive()
        lines[:, -1] = output
        return Routed(choice, ranked)

    def mix_nothing(self, mixture: Mixture) -> None:
        """The mixture sublayer of a pass without rows, for a rank of a group whose peers have some."""
        nobody = Choice(np.empty((0, self.top_k), np.int64), np.empty((0, self.top_k), np.float32))
        mixture.send(self.number, torch.empty((0, self._shape.hidden)), nobody)
        mixture.receive()


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
