"""SharingStep: the step of a model whose layers share entries and selections, V4.1; and which step a model has.

What differs from `StepForward`: index keys are made of the entries of those layers that own some; a selection serves
the layers behind the one that made it, and the blocks that one layer keeps limit later selections; a sublayer is
collapsed by the coefficients of the one before it; and n-gram memories are added to the streams of some layers. Their
lines follow from ids alone, so all of them are read beside the first layers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.model.ops import Ops
from engine.model.records import Records
from engine.model.shapes import ModelShape
from engine.model.step_forward import Passed, Peers, StepForward, StepLayer, StepSize
from engine.model.step_weights import StepWeights
from kernels.forms import IdRing, KeyProjection, PairSums, Pooling, RawRing


class SharingStep(StepForward):
    """See the module, and `StepForward`."""

    def __init__(
        self,
        shape: ModelShape,
        weights: StepWeights,
        records: Records,
        arena: Tensor,
        ops: Ops,
        size: StepSize,
        *,
        fixed_ids: Tensor | None = None,
        peers: Peers | None = None,
        branches: bool = False,
    ) -> None:
        """As `StepForward`, of a V4.1 model."""
        super().__init__(shape, weights, records, arena, ops, size, fixed_ids=fixed_ids, peers=peers, branches=branches)
        self._ids: IdRing | None = records.ids
        # The first sublayer takes the first stream, which is the embedding like all others.
        self._first_pre = torch.zeros((size.rows, shape.num_streams), device=arena.device)
        self._first_pre[:, 0] = 1
        self._latents = {layer.number: _latents(shape, layer, records) for layer in self._layers if layer.weights.key}
        self._selected: Tensor | None = None
        self._blocks: Tensor | None = None

    @torch.inference_mode()
    def pass_layers(self) -> Passed:
        """See `StepForward`."""
        ops, weights, shape = self._ops, self._weights, self.shape
        chosen = []
        self._selected = self._blocks = None
        memories = self._read_memories()
        streams = ops.open_streams(self.tokens, weights.embed, shape.num_streams)
        output: Tensor | PairSums | None = None
        post = combination = None
        pre = self._first_pre
        for layer in self._layers:
            enter = layer.weights.enter_attention
            if layer.number in memories:
                if output is not None:
                    # What the sublayer before has written has to be in the streams first.
                    streams = ops.connect(streams, output, post, combination, enter, pre)[0]
                    output = post = combination = None
                self._branch.join()
                memory = layer.weights.memory
                assert memory is not None
                streams = ops.add_memory(streams, memories[layer.number], memory.match, shape.norm_eps)
            streams, x, post, combination, pre = ops.connect(streams, output, post, combination, enter, pre)
            output = self._attention(layer, x)
            own = (None, None) if self.peers is None else self.peers.own(layer.number, self.size.rows)
            streams, x, post, combination, pre = ops.connect(
                streams, output, post, combination, layer.weights.enter_mixture, pre, out=own[0]
            )
            output, ids = self._mixture(layer, x, own[1])
            chosen.append(ids)
        hidden = ops.connect(streams, output, post, combination, weights.collapse, pre)[1]
        return Passed(hidden, tuple(chosen))

    def _read_memories(self) -> dict[int, Tensor]:
        """By layer A[rows, (streams + 1) * hidden], what its memory says to the step's ids."""
        return {
            layer.number: self._branch.start(partial(self._read_memory, layer))
            for layer in self._layers
            if layer.weights.memory is not None
        }

    def _read_memory(self, layer: StepLayer) -> Tensor:
        memory = layer.weights.memory
        assert memory is not None and self._ids is not None
        dtype = self._weights.embed.dtype
        read = self._ops.read_memory(self.tokens, self.rows, self.arena, self._ids, memory.table, dtype)
        projected: Tensor = self._ops.linear(read, memory.project)
        return projected

    def _split_side(self, layer: StepLayer, side: Tensor | None) -> tuple[list[tuple[Tensor, Pooling]], Tensor | None]:
        """Entries and their keys are written here, so that nothing is left to the entrance."""
        if side is None or layer.number not in self._latents:
            return [], side
        pooling, key = self._latents[layer.number]
        raw, rest = side[:, : pooling.ring.width], side[:, pooling.ring.width :]
        self._ops.compress_latents(raw, pooling, key, self._turns(layer), self.rows, self.arena)
        return [], rest

    def _select(
        self, layer: StepLayer, query: Tensor, index_query: Tensor, share: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ops, shape, role = self._ops, self.shape, layer.role
        is_limited = role.candidate_source is not None
        if role.is_index_source and not is_limited and not role.is_candidate_source:
            query, self._selected = super()._select(layer, query, index_query, share)
            return query, self._selected
        turns = self._turns(layer)
        prepared = ops.prepare_queries(query, self.rows.positions, turns, None)
        if not role.ratio:
            return prepared, None
        if role.is_index_source:
            assert layer.keys is not None and share is not None
            asked = index_query.unflatten(1, (shape.index_heads, shape.index_dim))
            where = (turns, role.ratio, shape.index_topk, self.readers, self.arena, layer.keys)
            size, scale = shape.candidate_block_size, self._weights.share_scale
            if is_limited:
                self._selected = ops.select_among(asked, share, *where, self._blocks, size, scale)
            else:
                self._selected, self._blocks = ops.select_and_rank(
                    asked, share, *where, size, shape.candidate_blocks, scale
                )
        return prepared, self._selected


def _latents(shape: ModelShape, layer: StepLayer, records: Records) -> tuple[Pooling, KeyProjection]:
    """How a layer's raw rows become entries, and these keys."""
    pool, key, here = layer.weights.entry_pool, layer.weights.key, records.layers[layer.number]
    assert pool is not None and key is not None and here.entries is not None and here.keys is not None
    ring = here.entry_ring or RawRing(0, 0, 0, shape.head_dim)
    pooling = Pooling(layer.role.ratio, False, None, pool.norm, shape.norm_eps, ring, here.entries)
    return pooling, KeyProjection(key.matrix, key.norm, here.keys)


def open_step(
    shape: ModelShape,
    weights: StepWeights,
    records: Records,
    arena: Tensor,
    ops: Ops,
    size: StepSize,
    *,
    fixed_ids: Tensor | None = None,
    peers: Peers | None = None,
    branches: bool = False,
) -> StepForward:
    """The step of a model's architecture; arguments as of `StepForward`."""
    kind = SharingStep if shape.shifts_pre else StepForward
    return kind(shape, weights, records, arena, ops, size, fixed_ids=fixed_ids, peers=peers, branches=branches)
