"""PromptStep: a step of a prompt's rows, of which few or none are asked for their logits: those are made afterwards.

PromptSlots: the same where drafts are made of what it leaves.
"""

from __future__ import annotations

import torch

from engine.model.step_ahead import StepAhead
from engine.model.step_forward import Passed, StepForward
from kernels.forms import StepRows


class PromptStep:
    """See the module."""

    def __init__(self, step: StepForward) -> None:
        """Borrows it."""
        self._step = step

    def run(self) -> Passed:
        """Enqueue the step."""
        return self._step.pass_layers()


class PromptSlots:
    """The same, after which the layer that predicts ahead has a window record of each of them.

    Attributes:
        nexts: int32[rows], input: the token after each row, -1 where nobody knows it yet; no record is made there.
    """

    def __init__(self, step: StepForward, ahead: StepAhead) -> None:
        """Borrows both, of the same arena's private block."""
        self._step = step
        self._ahead = ahead
        self.nexts = torch.full_like(step.tokens, -1)

    @torch.inference_mode()
    def run(self) -> Passed:
        """Enqueue the step."""
        passed, rows = self._step.pass_layers(), self._step.rows
        assert passed.streams is not None
        positions = rows.positions.masked_fill(self.nexts < 0, -1)
        self._ahead.enter(passed.streams, self.nexts, StepRows(positions, rows.slabs, rows.tables, rows.span))
        return passed
