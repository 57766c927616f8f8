"""Drafting: a measured step with its drafts: how many hold, and the next ones, by the layer that predicts ahead.

That layer has all of its experts here, also where the target's are spread over ranks: only the own rows draft. Drafts
are random, so none holds; a step takes as long whatever does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.bench.cases import DeviceCase
from engine.model.ahead_weights import make_ahead_weights
from engine.model.dummy import DummySource
from engine.model.ops import Ops
from engine.model.records import Records
from engine.model.shapes import ModelShape
from engine.model.step_ahead import StepAhead
from engine.model.step_drafts import TOLD, Drafted, DraftStep
from engine.model.step_forward import StepForward
from engine.model.step_weights import StepWeights
from kernels.forms import DraftState

END = 1 << 30
"""Where sequences end: later than anything that is measured."""


class DraftBench:
    """The layer with dummy weights, beside the target's."""

    def __init__(
        self, shape: ModelShape, target: StepWeights, records: Records, arena: torch.Tensor, ops: Ops, *, seed: int
    ) -> None:
        """All are borrowed. Raises ConfigError if the model has no such layer."""
        self._target = target
        self._weights = make_ahead_weights(shape, DummySource(shape, arena.device, seed=seed))
        self._layer = StepAhead(shape, target, self._weights, records.stages[0], arena, ops)
        self._records = records
        self._ops = ops
        self._vocab = shape.vocab_size

    def wrap(self, case: DeviceCase, step: StepForward) -> DraftStep:
        """A step with its inputs set, as one that drafts, too: first rows are told, the others are drafts."""
        places = self._records.num_slabs + 1
        last = step.tokens.new_zeros(places)
        state = DraftState(last - 1, last, last.clone(), last.new_zeros((places, case.drafts)))
        assert self._records.streams is not None
        whole = DraftStep(step, self._layer, state, self._records.streams, self._ops, rounds=case.drafts)
        told, rows = whole.told, step.rows
        told[0] = step.tokens.view(-1, case.rows)[:, 0]
        told[1] = rows.positions.view(-1, case.rows)[:, 0]
        told[2], told[3], told[4] = rows.slabs, END, case.drafts
        told[TOLD:] = step.tokens.view(-1, case.rows)[:, 1:].T
        return whole

    def touched(self, outputs: Drafted, case: DeviceCase) -> list[int]:
        """By round, how many of the layer's experts have rows of the latest step."""
        return [len(torch.unique(ids[ids >= 0])) for ids in outputs.ids[-case.drafts :]]

    def add_bytes(self, found: Mapping[str, int], touched: list[int]) -> dict[str, int]:
        """The bytes of the target's rows and those of drafting: each round reads weights, experts and head once."""
        assert self._weights.slots is not None
        dense = len(touched) * (self._weights.dense_bytes + self._target.head.num_bytes)
        experts = sum(touched) * self._weights.slots.slot_bytes
        more = {"dense": dense, "experts": experts, "total": dense + experts}
        return {name: size + more.get(name, 0) for name, size in found.items()}
