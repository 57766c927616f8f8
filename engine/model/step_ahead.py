"""StepAhead: the layer that predicts ahead (MTP) over rows of a device's step, composed of the operations of `kernels`.

`predictor.py` is the truth for it. Slot p takes the target's streams at position p and the token of p + 1, and its
window record depends on nothing else. So `enter` writes the records of any rows, and what costs, attention and experts,
is run only where a draft is made: at the last row that holds, and at the layer's own streams behind it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.model.ahead_weights import AheadWeights
from engine.model.ops import Ops
from engine.model.shapes import ModelShape
from engine.model.step_weights import StepWeights
from kernels.forms import PairSums, Plane, StepRows


@dataclasses.dataclass(frozen=True)
class Entered:
    """Rows on their way from the layer's entrance to its attention.

    Attributes:
        streams: A[rows, streams, hidden].
        post: float32[rows, streams].
        combination: float32[rows, streams, streams].
        low: A[rows, q rank], the normed latent of the query.
    """

    streams: Tensor
    post: Tensor
    combination: Tensor
    low: Tensor

    def pick(self, rows: Tensor, ops: Ops) -> Entered:
        """Only these rows; int32[picked]."""
        return Entered(*ops.pick_rows(rows, (self.streams, self.post, self.combination, self.low)))


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What the layer makes of rows.

    Attributes:
        logits: float32[rows, vocab], of the token two behind each slot.
        greedy: int64[rows], the likeliest; the lowest id among equals.
        streams: A[rows, streams, hidden], its own.
        ids: int32[rows, k], the experts that the rows chose.
    """

    logits: Tensor
    greedy: Tensor
    streams: Tensor
    ids: Tensor


class StepAhead:
    """See the module. Keeps nothing between calls."""

    def __init__(
        self,
        shape: ModelShape,
        target: StepWeights,
        weights: AheadWeights,
        window: Plane,
        arena: Tensor,
        ops: Ops,
    ) -> None:
        """All are borrowed.

        Args:
            shape: the model.
            target: embedding, head and rotary tables.
            weights: of the layer.
            window: where its records are.
            arena: uint8, written by every call.
            ops: implementation of the operations.
        """
        self._shape = shape
        self._target = target
        self._weights = weights
        self._window = window
        self._arena = arena
        self._ops = ops

    def enter(self, streams: Tensor, tokens: Tensor, rows: StepRows) -> Entered:
        """Write the window records of slots.

        Args:
            streams: A[rows, streams, hidden].
            tokens: int[rows], the token after each slot.
            rows: positions of the slots, -1 for those that are not to be written.
        """
        ops, weights, shape, layer = self._ops, self._weights, self._shape, self._weights.layer
        x = ops.open_slots(
            streams, tokens, self._target.embed, weights.stream_norm, weights.token_norm, shape.norm_eps
        )  # fmt: skip
        held = ops.linear(x, weights.enter).unflatten(0, (len(tokens), shape.num_streams))
        held, x, post, combination, _ = ops.connect(held, None, None, None, layer.enter_attention)
        low = ops.enter_attention(
            ops.linear(x, layer.project_in), layer.query_norm, layer.window_norm, shape.norm_eps, x.dtype,
            self._target.plain_turns, rows, self._arena, self._window,
        )  # fmt: skip
        return Entered(held, post, combination, low)

    def predict(self, entered: Entered, rows: StepRows) -> Predicted:
        """The rest of the layer, and the head.

        Args:
            entered: of `enter`, one row for each sequence.
            rows: the same slots.

        Raises:
            ValueError: the layer's experts are not on this rank.
        """
        ops, shape, layer, turns = self._ops, self._shape, self._weights.layer, self._target.plain_turns
        query = ops.linear(entered.low, layer.project_query).unflatten(1, (shape.num_heads, shape.head_dim))
        query = ops.prepare_queries(query, rows.positions, turns, shape.norm_eps if shape.norms_query else None)
        mixed = ops.attend(query, layer.sink, turns, rows, self._arena, self._window, shape.window)
        output = ops.linear(ops.grouped_linear(mixed.flatten(1), layer.out_groups, shape.o_groups), layer.out)
        streams, x, post, combination, _ = ops.connect(
            entered.streams, output, entered.post, entered.combination, layer.enter_mixture
        )
        sums, ids = self._mix(x, rows)
        streams, hidden = ops.collapse_head(streams, sums, post, combination, self._weights.collapse)
        logits = ops.linear(hidden, self._target.head, torch.float32)
        return Predicted(logits, ops.likeliest(logits), streams, ids)

    def _mix(self, x: Tensor, rows: StepRows) -> tuple[PairSums, Tensor]:
        """What adds up to the mixture's output, and the choices. All experts are here, in a group, too."""
        ops, shape, layer, slots = self._ops, self._shape, self._weights.layer, self._weights.slots
        if slots is None:
            raise ValueError("a rank without the experts of the layer that predicts ahead can not draft")
        shared = ops.linear(ops.gated_linear(x, layer.shared_up, shape.clamp), layer.shared_down)
        ids, shares = ops.route(
            x, layer.gate, layer.bias, None, shape.top_k, shape.routed_scale, None, rows.positions
        )  # fmt: skip
        sums: PairSums = ops.multiply_pairs(x, ids, shares, layer.expert_to_slot, slots, shape.clamp, shared)
        return sums, ids
