"""StepModel: the target's forward for passes, by the device's step: rows in, logits out.

Rows of one position each are a step of a fixed number of sequences, filled up with padding. Longer ones are a prompt's:
one sequence at a time, so many rows at a time, through the long rings of the arena's private block (`staging.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.fused import Mixture
from engine.model.graph import StepGraph
from engine.model.kv import SPARE_ROWS
from engine.model.ops import Ops
from engine.model.rows import RowBatch
from engine.model.shapes import ModelShape
from engine.model.staging import Staging
from engine.model.step_arena import StepArena
from engine.model.step_forward import StepForward, StepOutputs, StepSize
from engine.model.step_weights import StepWeights

Ints = npt.NDArray[np.int64]


class _Sized:
    """The step of one size; on a CUDA device, its graph."""

    def __init__(self, step: StepForward) -> None:
        """Captures; the step's inputs are all padding then."""
        self.step = step
        self._graph = StepGraph(step) if step.arena.device.type == "cuda" else None
        self._tables: Ints | None = None

    def run(self, tokens: Ints, positions: Ints, slabs: Ints, tables: Ints) -> StepOutputs:
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
        step.tokens.copy_(torch.from_numpy(inputs[0]))
        step.rows.positions.copy_(torch.from_numpy(inputs[1]))
        step.rows.slabs.copy_(torch.from_numpy(used))
        self.set_tables(tables, torch.from_numpy)
        if step.readers is not step.rows:
            step.readers.tables.copy_(step.rows.tables.expand_as(step.readers.tables))
        return self.replay()

    def set_tables(self, tables: Ints, send: Callable[[npt.NDArray[np.int32]], Tensor]) -> None:
        """The pages of the next steps; where they are the same object as before, they are there already. Those past the
        longest sequence are left out."""
        if tables is self._tables:
            return
        size = self.step.size
        table = np.zeros((size.sequences, size.pages), np.int32)
        table[: len(tables), : tables.shape[1]] = tables[:, : size.pages]
        self.step.rows.tables.copy_(send(table))
        self._tables = tables

    def replay(self) -> StepOutputs:
        """The step with the inputs that it has."""
        return self.step.run() if self._graph is None else self._graph.replay()


class StepModel:
    """See the module; a `RowModel`. Not thread-safe.

    Attributes:
        shape, arena: as of a `RowModel`.
        replay_rows: 0, nothing is left out.
        mixture: None: all experts are here.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: StepWeights,
        arena: StepArena,
        ops: Ops,
        *,
        max_tokens: int,
        decode_rows: int,
        prompt_rows: Sequence[int],
    ) -> None:
        """Steps of all sizes are made, and on a CUDA device compiled and captured, here.

        Args:
            shape: a V4 model.
            weights: borrowed.
            arena: borrowed; written by every pass.
            ops: implementation of the operations.
            max_tokens: of a sequence.
            decode_rows: most rows of one position each.
            prompt_rows: numbers of rows of a prompt that steps have, ascending, each a multiple of SPARE_ROWS; at most
                the arena's staging rows.
        """
        self.shape = shape
        self.arena = arena
        self.replay_rows = 0
        self.mixture: Mixture | None = None
        records = arena.records
        pages = -(-max_tokens // records.page_tokens)
        branches = arena.bytes.device.type == "cuda"

        def make(size: StepSize, *, staged: bool) -> _Sized:
            layout = records.staged() if staged else records
            return _Sized(StepForward(shape, weights, layout, arena.bytes, ops, size, branches=branches))

        self._decodes = {count: make(StepSize(count, 1, pages), staged=False) for count in _sizes_up_to(decode_rows)}
        self._prompts = {
            count: make(StepSize(1, count, pages, read_span=SPARE_ROWS), staged=True) for count in prompt_rows
        }
        self._staging = Staging(records, arena.bytes, shape.window)

    @torch.inference_mode()
    def forward(self, batch: RowBatch, wanted: Sequence[int] | None = None) -> Tensor:
        """See `RowModel`."""
        asked = np.arange(batch.rows) if wanted is None else np.array(wanted, np.int64)
        if batch.span == 1 and batch.sequences <= max(self._decodes):
            return self._decode(batch, asked)
        logits = torch.empty((len(asked), self.shape.vocab_size), device=self.arena.bytes.device)
        for sequence in range(batch.sequences):
            first, count = int(batch.firsts[sequence]), int(batch.spans[sequence])
            mine = np.flatnonzero((asked >= first) & (asked < first + count))
            self._read_prompt(batch, sequence, asked[mine] - first, logits, mine)
        return logits

    @property
    def most_rows(self) -> int:
        """Of one position each, in a step."""
        return max(self._decodes)

    def step_greedily(self, tokens: Ints, positions: Ints, slabs: Ints, tables: Ints) -> Tensor:
        """Enqueues a step of one row for each slab, and keeps the likeliest ids as what the slabs sampled last.

        Args:
            tokens: int64[n], -1 for what the slab sampled last.
            positions, slabs: int64[n].
            tables: int64[n, pages].

        Returns:
            int64[n] on the host, the likeliest ids, once the device has come so far.
        """
        count = len(slabs)
        sized = self._decodes[next(size for size in sorted(self._decodes) if size >= count)]
        rows = sized.step.size.rows
        columns = np.zeros((4, rows), np.int32)
        columns[0], columns[1], columns[3] = -1, -1, len(self.arena.last_tokens) - 1
        for line, column in zip(columns, (tokens, positions, slabs, slabs), strict=True):
            line[:count] = column
        told, places, used, cells = self._send(columns)
        last = self.arena.last_tokens
        # Rows of padding have some token; nobody looks at what comes of it.
        sized.step.tokens.copy_(torch.where(told >= 0, told, last.index_select(0, cells)))
        sized.step.rows.positions.copy_(places)
        sized.step.rows.slabs.copy_(used)
        sized.set_tables(tables, self._send)
        best = sized.replay().greedy
        last.index_copy_(0, cells.long(), best.int())
        host = torch.empty(rows, dtype=torch.int64, pin_memory=best.device.type == "cuda")
        host.copy_(best, non_blocking=True)
        return host[:count]

    def _send(self, column: npt.NDArray[np.int32]) -> Tensor:
        """To the device without waiting. Torch keeps the host's copy until it has been read."""
        device = self.arena.bytes.device
        host = torch.from_numpy(column)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def forward_prompt(self, batch: RowBatch, *, last: bool, wanted: Sequence[int] | None = None) -> Tensor:
        """See `RowModel`."""
        return self.forward(batch, wanted)

    def forward_nothing(self) -> None:
        """See `RowModel`: nobody asks who has no group."""
        assert self.mixture is not None

    def settle(self) -> None:
        """See `RowModel`."""
        device = self.arena.bytes.device
        if device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(device))
            event.synchronize()

    def _decode(self, batch: RowBatch, asked: Ints) -> Tensor:
        size = next(count for count in sorted(self._decodes) if count >= batch.sequences)
        outputs = self._decodes[size].run(batch.ids, batch.positions, batch.slabs, batch.tables)
        if np.array_equal(asked, np.arange(len(outputs.logits))):
            # Passes that follow write the same memory; whoever wants these logits is done with them before.
            return outputs.logits
        return self._pick(outputs.logits, asked)

    def _read_prompt(self, batch: RowBatch, sequence: int, asked: Ints, logits: Tensor, places: Ints) -> None:
        """The rows of one sequence; logits of its rows `asked` go to `places`."""
        slab, start, count = (int(column[sequence]) for column in (batch.slabs, batch.starts, batch.spans))
        ids, table = batch.tokens[sequence, :count], batch.tables[sequence : sequence + 1]
        self._staging.fetch(slab, start)
        done = 0
        while done < count:
            left = count - done
            size = next((rows for rows in sorted(self._prompts) if rows >= left), max(self._prompts))
            part = min(left, size)
            positions = np.arange(start + done, start + done + part)
            outputs = self._prompts[size].run(ids[done : done + part], positions, np.zeros(1, np.int64), table)
            here = np.flatnonzero((asked >= done) & (asked < done + part))
            if len(here):
                logits[torch.from_numpy(places[here]).to(logits.device)] = self._pick(
                    outputs.logits, asked[here] - done
                )
            done += part
        self._staging.store(slab, start + count)

    def _pick(self, logits: Tensor, rows: Ints) -> Tensor:
        return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _sizes_up_to(rows: int) -> list[int]:
    """Powers of two below, and `rows`."""
    sizes = [1]
    while sizes[-1] < rows:
        sizes.append(min(2 * sizes[-1], rows))
    return sizes
