"""SizedStep: a step of one size with its inputs; on a CUDA device, its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.graph import Outputs, Step, StepGraph, pool_of
from engine.model.step_forward import StepForward

Ints = npt.NDArray[np.int64]


class SizedStep(Generic[Outputs]):
    """See the module."""

    def __init__(self, step: StepForward, whole: Step[Outputs]) -> None:
        """Captures; the step's inputs are all padding then.

        Args:
            step: whose inputs it has.
            whole: what is run: the step, or something around it.
        """
        self.step = step
        self.whole = whole
        self.graph = StepGraph(whole, pool_of(step.arena)) if step.arena.device.type == "cuda" else None
        self._tables: Ints | None = None

    def run(self, tokens: Ints, positions: Ints, slabs: Ints, tables: Ints) -> Outputs:
        """One step.

        Args:
            tokens, positions: int64[n], at most as many as the step has rows; the rest is padding.
            slabs: int64[sequences], at most as many as the step has.
            tables: int64[sequences, pages].
        """
        step = self.step
        inputs = np.zeros((2, step.size.rows), np.int32)
        inputs[1] = -1
        inputs[0, : len(tokens)], inputs[1, : len(positions)] = tokens, positions
        used = np.zeros(step.size.sequences, np.int32)
        used[: len(slabs)] = slabs
        step.tokens.copy_(self.send(inputs[0]))
        step.rows.positions.copy_(self.send(inputs[1]))
        step.rows.slabs.copy_(self.send(used))
        self.set_tables(tables, self.send)
        if step.readers is not step.rows:
            step.readers.tables.copy_(step.rows.tables.expand_as(step.readers.tables))
        return self.replay()

    def set_tables(self, tables: Ints, send: Callable[[Ints], Tensor]) -> None:
        """The pages of the next steps; where they are the same object as before, they are there already. Those past the
        longest sequence are left out, and so as they were: nobody reads them.

        Args:
            tables: int64[sequences, pages], never written again.
            send: int32, the same where the device can read it until it has.
        """
        if tables is self._tables:
            return
        held = self.step.rows.tables
        count, width = len(tables), min(tables.shape[1], held.shape[1])
        with torch.inference_mode():
            held[:count, :width].copy_(send(tables[:, :width]), non_blocking=True)
        self._tables = tables

    def send(self, column: npt.NDArray[np.int32] | Ints) -> Tensor:
        """int32, to the device behind what is enqueued, without waiting for it. Torch keeps the host's copy as long."""
        host, device = torch.from_numpy(np.ascontiguousarray(column, np.int32)), self.step.arena.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    @torch.inference_mode()
    def run_padding(self) -> None:
        """The step with no rows: what it brings is for others."""
        self.step.rows.positions.fill_(-1)
        self.replay()

    def replay(self) -> Outputs:
        """The step with the inputs that it has."""
        return self.whole.run() if self.graph is None else self.graph.replay()


def sizes_up_to(rows: int) -> list[int]:
    """Powers of two below, and `rows`."""
    sizes = [1]
    while sizes[-1] < rows:
        sizes.append(min(2 * sizes[-1], rows))
    return sizes
