"""StepForward: one decode or verify step of the target on a device, composed of the operations of `kernels`.

All inputs are static buffers that the host fills before a step; what a step reads of the arena, and how far, its
kernels find by these buffers alone. So the same sequence of launches serves every step of a size, and a graph can hold
it (`graph.py`). In each layer rows first write what later rows may read, then attend: drafts of a sequence see each
other as the decode steps would have.

With peers (expert parallelism measured on one rank), the mixture computes its local experts for the own rows and for
static rows that stand for those of the other ranks; only the own rows' results go on. They are a part of the sum, as
before an exchange brings the peers' parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.model.ops import Ops
from engine.model.records import Records
from engine.model.shapes import LayerRole, ModelShape
from engine.model.step_weights import LayerWeights, StepWeights
from kernels.forms import PairSums, Pooling, StepRows

GATE_FIRST_ROWS = 8
"""Up to so many rows of a step the shared expert starts behind the gate: 1.4 % of a step of one row."""


@dataclasses.dataclass(frozen=True)
class StepSize:
    """How many rows a step has: `sequences` times `span`, and pages in a row of the page table.

    `read_span`, which divides `span`, cuts a long span into sequences of so many rows for what reads the arena, whose
    programs take a sequence at a time; 0 for `span`.
    """

    sequences: int
    span: int
    pages: int
    read_span: int = 0

    @property
    def rows(self) -> int:
        """All rows."""
        return self.sequences * self.span


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What a step gives. In a graph every replay writes the same memory.

    Attributes:
        logits: float32[rows, vocab].
        greedy: int64[rows], the likeliest tokens; the lowest id among equals.
        ids: per layer int32[rows, k], the experts that the rows chose; -1 in rows of padding.
        streams: A[rows, streams, hidden] after the last layer; None of a model whose drafter reads others.
    """

    logits: Tensor
    greedy: Tensor
    ids: tuple[Tensor, ...]
    streams: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Passed:
    """What a step's layers leave; in a graph as `StepOutputs` has it.

    Attributes:
        hidden: A[rows, hidden], what the head multiplies.
        ids, streams: see `StepOutputs`.
    """

    hidden: Tensor
    ids: tuple[Tensor, ...]
    streams: Tensor | None = None


class Peers(Protocol):
    """The other ranks of a step: their rows go through this rank's experts, and its rows through theirs."""

    @property
    def ids(self) -> Sequence[Tensor] | Tensor:
        """By layer int32[all rows, k], what the latest step's rows chose; -1 for none."""
        ...

    def own(self, layer: int, rows: int) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Where the own rows of a layer may be put so that `join` need not copy them: x, and ids with weights."""
        ...

    def join(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A[all rows, hidden], int32[all rows, k] and float32[all rows, k] of all ranks."""
        ...

    def give_back(self, layer: int, sums: PairSums) -> PairSums | Tensor:
        """What the own rows get of all ranks' experts, A[own rows, hidden] or what adds up to it, from what the joined
        rows got of this rank's."""
        ...


class PeerRows:
    """Rows of the mixture that came from other ranks, and room for the own ones before them: `Peers` of one rank.

    Attributes:
        x: A[all rows, hidden], own rows first.
        ids: int32[layers, all rows, k].
        weights: float32[layers, all rows, k].
    """

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Takes the tensors; own rows have anything in them."""
        self.x = x
        self.ids = ids
        self.weights = weights

    def own(self, layer: int, rows: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Where the own rows of a layer go: x, and ids with weights."""
        return self.x[:rows], (self.ids[layer, :rows], self.weights[layer, :rows])

    def join(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of all ranks; the own ones are where `own` said."""
        return self.x, self.ids[layer], self.weights[layer]

    def give_back(self, layer: int, sums: PairSums) -> PairSums:
        """What this rank has of the own rows' sums: nobody else computes any."""
        return sums


class _Branch:
    """Work beside the main line of a step, on a stream of its own, from `start` to `join`; where it is off, in line.

    What is allocated on the branch is used again only there, after a later `start`, which waits for the main line; so
    no memory changes hands too early.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._stream = torch.cuda.Stream(device) if is_on else None
        self._has_work = False

    def start(self, call: Callable[[], Tensor]) -> Tensor:
        """The result may be read after `join`; what `call` reads must be kept until then."""
        if self._stream is None:
            return call()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._has_work = True
        with torch.cuda.stream(self._stream):
            return call()

    def join(self) -> None:
        """The main line waits for the branch, if anything was started there: a graph knows no other work of it."""
        if self._stream is not None and self._has_work:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._has_work = False


class StepForward:
    """The target's step of one size. Not thread-safe; owns its input buffers.

    Attributes:
        tokens: int32[rows], input.
        rows: positions, slabs and page tables, input.
        readers: the same rows as what reads the arena takes them, see `StepSize`; input, where it is not `rows`.
        arena: the state of sequences, written by every step.
        peers: rows of other ranks, or None.
    """

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
        """Allocates the buffers.

        Args:
            shape: a V4 model; `step_shared.py` has V4.1's step.
            weights: borrowed.
            records: layout of the arena.
            arena: uint8[records.num_bytes], borrowed; written by every step.
            ops: implementation of the operations.
            size: of the step.
            fixed_ids: int32[layers, rows, k], experts that the rows get instead of those that the router would choose,
                with the router's weights.
            peers: rows of other ranks.
            branches: run what does not depend on each other side by side; on a CUDA device only.
        """
        device = arena.device
        self.shape = shape
        self.size = size
        self._ops = ops
        self._weights = weights
        self.arena = arena
        self._fixed_ids = fixed_ids
        self._branch = _Branch(device, is_on=branches)
        self.peers = peers
        self.tokens = torch.zeros(size.rows, dtype=torch.int32, device=device)
        self.rows = StepRows(
            positions=torch.full((size.rows,), -1, dtype=torch.int32, device=device),
            slabs=torch.zeros(size.sequences, dtype=torch.int32, device=device),
            tables=torch.zeros((size.sequences, size.pages), dtype=torch.int32, device=device),
            span=size.span,
        )
        self.readers = self.rows
        if size.read_span:
            count = size.rows // size.read_span
            self.readers = StepRows(
                positions=self.rows.positions,
                slabs=torch.zeros(count, dtype=torch.int32, device=device),
                tables=torch.zeros((count, size.pages), dtype=torch.int32, device=device),
                span=size.read_span,
            )
        self._layers = [
            StepLayer(shape, role, weight, records, index)
            for index, (role, weight) in enumerate(zip(shape.layer_roles, weights.layers, strict=True))
        ]

    @torch.inference_mode()
    def run(self) -> StepOutputs:
        """Enqueue a step: reads the inputs, writes the arena."""
        passed = self.pass_layers()
        logits = self.judge(passed.hidden)
        return StepOutputs(logits, self._ops.likeliest(logits), passed.ids, passed.streams)

    @torch.inference_mode()
    def judge(self, hidden: Tensor) -> Tensor:
        """float32[rows, vocab] of A[rows, hidden]: a row's logits."""
        logits: Tensor = self._ops.linear(hidden, self._weights.head, torch.float32)
        return logits

    @torch.inference_mode()
    def pass_layers(self) -> Passed:
        """Enqueue a step without its head."""
        ops, weights = self._ops, self._weights
        chosen = []
        streams = ops.open_streams(self.tokens, weights.embed, self.shape.num_streams)
        output: Tensor | PairSums | None = None
        post = combination = None
        for layer in self._layers:
            streams, x, post, combination, _ = ops.connect(
                streams, output, post, combination, layer.weights.enter_attention
            )
            output = self._attention(layer, x)
            own = (None, None) if self.peers is None else self.peers.own(layer.number, self.size.rows)
            streams, x, post, combination, _ = ops.connect(
                streams, output, post, combination, layer.weights.enter_mixture, out=own[0]
            )
            output, ids = self._mixture(layer, x, own[1])
            chosen.append(ids)
        streams, hidden = ops.collapse_head(streams, output, post, combination, weights.collapse)
        return Passed(hidden, tuple(chosen), streams)

    def run_with(self, ops: Ops) -> StepOutputs:
        """`run`, once, with other operations: such as compare or count."""
        own, self._ops = self._ops, ops
        try:
            return self.run()
        finally:
            self._ops = own

    def _attention(self, layer: StepLayer, x: Tensor) -> Tensor:
        """A[rows, hidden] from the normed input."""
        ops, weights, shape, rows, arena = self._ops, layer.weights, self.shape, self.rows, self.arena
        turns = self._turns(layer)
        if weights.project_side is None:
            wide, side = ops.linear(x, weights.project_in), None
        else:
            wide, side = ops.paired_linear(x, weights.project_in, weights.project_side)
        compressions, side = self._split_side(layer, side)
        low = ops.enter_attention(
            wide, weights.query_norm, weights.window_norm, shape.norm_eps, x.dtype,
            turns, rows, arena, layer.window, compressions,
        )  # fmt: skip
        heads = ops.linear(low, weights.project_query)
        count = shape.num_heads * shape.head_dim
        query = heads[:, :count].unflatten(1, (shape.num_heads, shape.head_dim))
        query, selected = self._select(layer, query, heads[:, count:], side)
        mixed = ops.attend(
            query, weights.sink, turns, self.readers, arena, layer.window, shape.window,
            layer.entries, layer.role.ratio, selected,
        )  # fmt: skip
        return ops.linear(ops.grouped_linear(mixed.flatten(1), weights.out_groups, shape.o_groups), weights.out)

    def _turns(self, layer: StepLayer) -> Tensor:
        return self._weights.long_turns if layer.role.ratio else self._weights.plain_turns

    def _split_side(self, layer: StepLayer, side: Tensor | None) -> tuple[list[tuple[Tensor, Pooling]], Tensor | None]:
        """What the entrance has to compress, and what is left of the side columns: the index heads' weights."""
        compressions = []
        end = 0
        for pooling in layer.poolings:
            assert side is not None
            compressions.append((side[:, end : end + pooling.ring.width], pooling))
            end += pooling.ring.width
        return compressions, None if side is None else side[:, end:]

    def _select(
        self, layer: StepLayer, query: Tensor, index_query: Tensor, share: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The heads, rotated, and the entries that they attend to; None for all."""
        ops, shape = self._ops, self.shape
        turns, eps = self._turns(layer), shape.norm_eps if shape.norms_query else None
        if layer.keys is None:
            return ops.prepare_queries(query, self.rows.positions, turns, eps), None
        assert share is not None
        asked = index_query.unflatten(1, (shape.index_heads, shape.index_dim))
        prepared, selected = ops.prepare_and_select(
            query, eps, asked, share, turns, layer.role.ratio, shape.index_topk, self.readers, self.arena,
            layer.keys, self._weights.share_scale,
        )  # fmt: skip
        return prepared, selected

    def _mixture(
        self, layer: StepLayer, x: Tensor, out: tuple[Tensor, Tensor] | None
    ) -> tuple[PairSums | Tensor, Tensor]:
        """What adds up to the output for the normed input: the shared expert and those experts that are here. And all
        choices, which are put into `out`."""
        ops, weights, shape, peers = self._ops, layer.weights, self.shape, self.peers
        start_shared = partial(self._branch.start, partial(self._shared_expert, layer, x))
        # The gate is a chain of waits for memory. At few rows it decides, and the shared expert would be in its way.
        is_gate_first = self.size.rows <= GATE_FIRST_ROWS
        shared = None if is_gate_first else start_shared()
        hashed, tokens = self._hashed(layer)
        ids, shares = ops.route(
            x, weights.gate, weights.bias, hashed, shape.top_k, shape.routed_scale, tokens, self.rows.positions,
            weights.counts, out,
        )  # fmt: skip
        shared = start_shared() if shared is None else shared
        rows = (x, ids, shares) if peers is None else peers.join(layer.number, x, ids, shares)
        sums = ops.multiply_pairs(*rows, weights.expert_to_slot, self._weights.slots, shape.clamp, shared)
        self._branch.join()
        return sums if peers is None else peers.give_back(layer.number, sums), ids

    def _shared_expert(self, layer: StepLayer, x: Tensor) -> Tensor:
        inner = self._ops.gated_linear(x, layer.weights.shared_up, self.shape.clamp)
        output: Tensor = self._ops.linear(inner, layer.weights.shared_down)
        return output

    def _hashed(self, layer: StepLayer) -> tuple[Tensor | None, Tensor | None]:
        """Experts that are looked up, and the lines of the rows; one line for each row without."""
        if self._fixed_ids is not None:
            return self._fixed_ids[layer.number], None
        return layer.weights.hashed, self.tokens


class StepLayer:
    """A layer's weights, and its places in the arena."""

    def __init__(self, shape: ModelShape, role: LayerRole, weights: LayerWeights, records: Records, number: int):
        here = records.layers[number]
        self.number = number
        self.role = role
        self.weights = weights
        self.window = here.window
        self.entries = here.entries
        self.keys = here.keys
        self.poolings = [
            Pooling(role.ratio, role.overlaps, pool.bias, pool.norm, shape.norm_eps, ring, target)
            for pool, ring, target in (
                (weights.entry_pool, here.entry_ring, here.entries),
                (weights.key_pool, here.key_ring, here.keys),
            )
            if pool is not None and ring is not None and target is not None
        ]
