"""GreedyStep: a step of one row for each slab, told its rows in one block, whose likeliest ids its slabs keep.

What a row reads is told, or is what its slab sampled last. So a step whose host does not know yet what the one before
has sampled needs one copy in front of its graph and one behind it, and no launch of its own for each input.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.envelope import Envelope, Words
from engine.model.ops import Ops
from engine.model.step_drafts import TOLD
from engine.model.step_forward import StepForward, StepOutputs
from engine.model.step_sized import SizedStep
from kernels.forms import DraftState

Ints = npt.NDArray[np.int64]
TELLING = 3
"""Lines of what is told that differ: tokens, positions and slabs. No row comes to an end or has drafts."""
NEVER = np.iinfo(np.int32).max
"""An end that no row comes to."""
STARTS, BEST = 0, 3
"""Columns of a step's result that have the rows' positions and the likeliest ids, see `kernels.forms.Judged`."""


@dataclasses.dataclass(frozen=True)
class Greedy:
    """What a step gives. In a graph every replay writes the same memory.

    Attributes:
        outputs: of the step itself.
        result: int32[rows, BEST + 1], see `kernels.forms.Judged`.
    """

    outputs: StepOutputs
    result: Tensor


class GreedyStep:
    """See the module. A `DraftStep` without drafts and what keeps their context.

    Attributes:
        step: whose tokens, positions and slabs are written here; its page tables are input.
        told: int32[TOLD, rows], input, see `kernels.reference.open_rows`.
    """

    def __init__(self, step: StepForward, state: DraftState, ops: Ops) -> None:
        """Borrows all of it; `told` is all padding."""
        assert step.size.span == 1
        self.step = step
        self._state = state
        self._ops = ops
        told = np.zeros((TOLD, step.size.rows), np.int32)
        fill_padding(told, 0, len(state.stands) - 1)
        told[3] = NEVER
        self.padding = torch.from_numpy(told).to(step.arena.device)
        self.told = self.padding.clone()

    @property
    def padding_place(self) -> int:
        """Of rows that are none, in the state."""
        return len(self._state.stands) - 1

    @torch.inference_mode()
    def run(self) -> Greedy:
        """Enqueue the step: reads `told` and the tokens of the slabs, writes the arena and these."""
        ops, step = self._ops, self.step
        ops.open_rows(self.told, self._state, step.rows, step.tokens)
        outputs = step.run()
        judged = ops.judge_rows(outputs.greedy, step.tokens, step.rows.positions, self.told, self._state, 0)
        return Greedy(outputs, judged.result)


class SizedGreedy(SizedStep[Greedy]):
    """A `GreedyStep` of one size."""

    def __init__(self, step: GreedyStep) -> None:
        """Captures, see `SizedStep`."""
        super().__init__(step.step, step)
        self._greedy = step
        self._told_at = step.told.data_ptr()
        self._handle = self._result_at = 0
        if self.graph is not None:
            self._handle, self._result_at = self.graph.handle, self.graph.outputs.result.data_ptr()
        # Whose rows are told to go on where their slabs stand, with what these sampled.
        self._going_on: Ints | None = None

    def launch(
        self,
        tokens: Ints,
        positions: Ints,
        slabs: Ints,
        tables: Ints,
        envelope: Envelope,
        *,
        goes_on: bool = False,
    ) -> Words:
        """Enqueues the step with these rows; arguments as of `run`, a token of -1 is what the slab sampled last.

        Args:
            goes_on: each row is behind one of the step that was enqueued before, of the same slabs, and reads what that
                samples. Then the device knows all by itself, and from the second such step on is told nothing.

        Returns:
            int32[n, BEST + 1] of the envelope, once the device has come so far.
        """
        count = len(slabs)
        if not goes_on or self._going_on is not slabs:
            sheet = envelope.sheet("told", TELLING, self.step.size.rows)
            words = sheet.words
            words[2, :count] = slabs
            if goes_on:
                words[:2, :count] = -1
            else:
                words[0, :count], words[1, :count] = tokens, positions
            if count < self.step.size.rows:
                fill_padding(words, count, self._greedy.padding_place)
            self._going_on = slabs if goes_on else None
            if envelope.calls is None:
                self._greedy.told[:TELLING].copy_(sheet.tensor, non_blocking=True)
            else:
                envelope.calls.copy(self._told_at, sheet.address, sheet.num_bytes)
        self.set_tables(tables, envelope.write_table)
        sheet = envelope.sheet("brought", self.step.size.rows, BEST + 1)
        if envelope.calls is None:
            sheet.tensor.copy_(self.replay().result, non_blocking=True)
        else:
            envelope.calls.launch(self._handle)
            envelope.calls.copy(sheet.address, self._result_at, sheet.num_bytes)
        return sheet.words[:count]

    def run(self, tokens: Ints, positions: Ints, slabs: Ints, tables: Ints) -> Greedy:
        """See `SizedStep.run`. The slabs keep the likeliest ids until they are told what was drawn."""
        count, greedy = len(slabs), self._greedy
        words = np.empty((TELLING, self.step.size.rows), np.int32)
        words[0, :count], words[1, :count], words[2, :count] = tokens, positions, slabs
        fill_padding(words, count, greedy.padding_place)
        self._going_on = None
        greedy.told[:TELLING].copy_(self.send(words), non_blocking=True)
        self.set_tables(tables, self.send)
        return self.replay()

    @torch.inference_mode()
    def run_padding(self) -> None:
        """See `SizedStep.run_padding`."""
        self._going_on = None
        self._greedy.told.copy_(self._greedy.padding)
        self.replay()


def fill_padding(told: Words, count: int, place: int) -> None:
    """Behind the first `count` there are no rows."""
    told[:2, count:] = -1
    told[2, count:] = place
