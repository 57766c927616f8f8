"""StepDrafter: drafting on a device: the context that passes leave, and a `Proposer` for steps that the host judges.

Where all rows take the likeliest id, a step verifies and drafts by itself (`draft_sizes.py`). For any other step the
host draws and says what holds, and drafts are made by a graph of their own, or where they are drawn by launches of the
same layer, one round at a time. Either way the same slabs hold the same things after a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import DeviceError
from engine.model.ahead_weights import AheadWeights
from engine.model.draft_sizes import DraftSizes
from engine.model.drafting import Pick, Proposal
from engine.model.graph import StepGraph, pool_of
from engine.model.kv import SPARE_ROWS
from engine.model.ops import Ops
from engine.model.rows import RowBatch
from engine.model.shapes import ModelShape
from engine.model.step_ahead import Entered, StepAhead
from engine.model.step_arena import StepArena
from engine.model.step_drafts import ProposeStep
from engine.model.step_forward import Peers, StepForward
from engine.model.step_prompt import PromptSlots
from engine.model.step_sized import sizes_up_to
from engine.model.step_weights import StepWeights
from kernels.forms import StepRows

Ints = npt.NDArray[np.int64]

MOST_DRAFTS_IN_GROUP = SPARE_ROWS // 2 - 1
"""Two steps under way write so many rows twice, and if the first is void its first row is computed again: rings must
still have all that it reads."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Rows of a pass: `places` are theirs in `streams`, which the next pass writes over."""

    batch: RowBatch
    streams: Tensor
    places: Ints


class StepDrafter:
    """See the module, and `drafting.Proposer`. Not thread-safe.

    Attributes:
        drafts: behind each row, as far as a ring has room; 0 on a rank that only keeps the context.
        draft_rows: most sequences of a step that verifies and drafts.
        steps: what verifies and drafts by itself, once made.
        is_grouped: the target's experts are spread over ranks. This layer's are all here, so that drafting needs no
            exchange; and the host judges no drafts, as ranks would have to agree on the steps for it.
    """

    def __init__(
        self,
        shape: ModelShape,
        target: StepWeights,
        weights: AheadWeights,
        arena: StepArena,
        ops: Ops,
        *,
        max_tokens: int,
        drafts: int = 0,
        draft_rows: int = 0,
        peers: Callable[[int], Peers] | None = None,
    ) -> None:
        """All are borrowed.

        Args:
            max_tokens: of a sequence.
            drafts, draft_rows: see above.
            peers: of a rank of a group, as `StepModel` takes it; for the target's rows only.
        """
        records = arena.records
        assert records.streams is not None and records.stages
        self.drafts = min(drafts, SPARE_ROWS - 1 if peers is None else MOST_DRAFTS_IN_GROUP)
        self.draft_rows = draft_rows
        self.is_grouped = peers is not None
        self._peers = peers
        self._shape = shape
        self._target = target
        self._arena = arena
        self._ops = ops
        self._max_tokens = max_tokens
        self._place = records.streams
        self._device = arena.bytes.device
        self._layer = StepAhead(shape, target, weights, records.stages[0], arena.bytes, ops)
        self._staged: StepAhead | None = None
        if records.staging_stages:
            self._staged = StepAhead(shape, target, weights, records.staging_stages[0], arena.bytes, ops)
        self._prompts: dict[int, PromptSlots] = {}
        self._seen: _Seen | None = None
        self._ends: RowBatch | None = None
        self._last: list[Tensor] = []
        self.steps: DraftSizes | None = None
        self._proposals: dict[int, tuple[ProposeStep, StepGraph[Tensor] | None]] = {}

    @property
    def max_drafts(self) -> int:
        """See `Proposer.max_drafts`: there are no steps for more."""
        return self.drafts

    def open_steps(self, *, decode_rows: int) -> None:
        """Makes `steps` for so many rows, and has compiled whatever is launched for steps that the host judges."""
        assert self.drafts
        self.steps = DraftSizes(
            self._shape,
            self._target,
            self._layer,
            self._arena,
            self._ops,
            max_tokens=self._max_tokens,
            decode_rows=decode_rows,
            drafts=self.drafts,
            draft_rows=min(self.draft_rows, decode_rows),
            peers=self._peers,
        )
        streams = self._streams.unflatten(1, (self._shape.num_streams, self._shape.hidden))
        for count in sizes_up_to(min(self.draft_rows, decode_rows)) if self.draft_rows and not self.is_grouped else ():
            step = ProposeStep(self._layer, streams, self._target.embed.dtype, count, self.drafts)
            graph = StepGraph(step, pool_of(self._arena.bytes)) if self._device.type == "cuda" else None
            self._proposals[count] = step, graph
        for count in sizes_up_to(max(decode_rows, self.draft_rows * (1 + self.drafts))):
            slabs = np.zeros(count, np.int64)
            rows = self._rows(slabs, slabs - 1)
            self._layer.predict(self._enter(self._read_streams(slabs), slabs, rows), rows)

    def follow_prompt(self, step: StepForward) -> PromptSlots:
        """Around a prompt's step, of whose rows the context is kept."""
        assert self._staged is not None
        slots = self._prompts[step.size.rows] = PromptSlots(step, self._staged)
        return slots

    def tell_nexts(self, rows: int, ids: Ints) -> None:
        """The next step of a prompt with so many rows: the tokens behind its first ones, none behind the others."""
        nexts = np.full(rows, -1, np.int32)
        nexts[: len(ids)] = ids
        self._prompts[rows].nexts.copy_(torch.from_numpy(nexts))

    def open_prompt(self, slab: int, start: int, token: int) -> None:
        """Rows of a prompt follow: `token` at `start`. An earlier chunk has left the streams of the slot before."""
        if start:
            slabs = np.array([slab])
            self._write_slots(slabs, np.array([start - 1]), np.array([token]), self._read_streams(slabs))

    def see_prompt(self, streams: Tensor | None, row: int) -> None:
        """The next prompt's rows have run; `row` of the last step's was the last."""
        assert streams is not None
        # Not to the slab yet: a pass that breaks off and runs again reads what was there before. A copy also of what is
        # float32 already: the next prompt's graph writes the same memory.
        self._last.append(streams[row].to(torch.float32, copy=True))

    def see_prompts(self, batch: RowBatch) -> None:
        """A pass of prompts begins."""
        self._ends, self._seen = batch, None
        self._last.clear()

    def see_rows(self, batch: RowBatch, streams: Tensor | None, places: Ints) -> None:
        """A pass has run whose rows are at these places of its streams."""
        assert streams is not None
        self._ends, self._seen = None, _Seen(batch, streams, places)

    @torch.inference_mode()
    def keep(self, counts: Ints | None, nexts: Ints, *, reopens: bool = False) -> None:
        """See `Proposer.keep`."""
        ends, seen = self._ends, self._seen
        self._ends = self._seen = None
        if ends is not None:
            # All but the last slots were written by the steps.
            if counts is not None and (counts < ends.spans).any():
                raise DeviceError(f"drafts of {len(counts)} rows were judged, a step has some up to {self.draft_rows}")
            self._streams[self._send(ends.slabs)] = torch.stack(self._last).flatten(1)
            told = np.flatnonzero(nexts >= 0)
            if len(told):
                slabs, positions = ends.slabs[told], (ends.starts + ends.spans - 1)[told]
                self._write_slots(slabs, positions, nexts[told], self._read_streams(slabs))
        if seen is None:
            return
        batch = seen.batch
        lengths = batch.spans if counts is None else counts
        last = batch.firsts + lengths - 1
        rows = np.flatnonzero(np.arange(batch.rows) <= last[batch.owner])
        owner = batch.owner[rows]
        is_end = rows == last[owner]
        tokens = np.where(is_end, nexts[owner], batch.ids[np.minimum(rows + 1, batch.rows - 1)])
        known = tokens >= 0
        slabs, positions = batch.slabs[owner], batch.positions[rows]
        if reopens:
            open_ones = np.flatnonzero(batch.starts > 0)
            if len(open_ones):
                before = batch.slabs[open_ones]
                firsts = batch.ids[batch.firsts[open_ones]]
                self._write_slots(before, batch.starts[open_ones] - 1, firsts, self._read_streams(before))
        if known.any():
            streams = seen.streams.index_select(0, self._send(seen.places[rows[known]]))
            self._write_slots(slabs[known], positions[known], tokens[known], streams)
        ending = seen.streams.index_select(0, self._send(seen.places[last]))
        self._streams[self._send(batch.slabs)] = ending.flatten(1).float()

    @torch.inference_mode()
    def propose(
        self, slabs: Ints, anchors: Ints, positions: Ints, count: int, *, pick: Pick | None = None, rounds: int = 0
    ) -> Proposal:
        """See `Proposer.propose`."""
        count, n = min(count, self.max_drafts), len(slabs)
        drafts = np.empty((n, count), np.int64)
        if not n:
            return Proposal(drafts)
        if pick is None and count == self.drafts and n <= max(self._proposals, default=0):
            return Proposal(self._propose_likeliest(slabs, anchors, positions))
        streams = self._read_streams(slabs)
        tokens = anchors
        for number in range(count):
            slots = positions - 1 + number
            rows = self._rows(slabs, slots)
            predicted = self._layer.predict(self._enter(streams, tokens, rows), rows)
            streams = predicted.streams[:n]
            if pick is None:
                tokens = predicted.greedy[:n].cpu().numpy()
            else:
                tokens = pick(predicted.logits[:n].cpu(), slots + 2)
            drafts[:, number] = tokens
        return Proposal(drafts)

    def _propose_likeliest(self, slabs: Ints, anchors: Ints, positions: Ints) -> Ints:
        step, graph = self._proposals[next(size for size in sorted(self._proposals) if size >= len(slabs))]
        more = len(step.slabs) - len(slabs)
        slots = np.arange(self.drafts)[:, None] + positions - 1
        slots = np.where(slots < self._max_tokens, slots, -1)
        step.slabs.copy_(self._send(np.pad(slabs, (0, more))))
        step.tokens.copy_(self._send(np.pad(anchors, (0, more))))
        step.slots.copy_(self._send(np.pad(slots, ((0, 0), (0, more)), constant_values=-1)))
        found = step.run() if graph is None else graph.replay()
        drafts: Ints = found[:, : len(slabs)].T.cpu().numpy()
        return drafts

    @property
    def _streams(self) -> Tensor:
        """float32[slabs, streams * hidden], a view."""
        records, width = self._arena.records, self._shape.stream_width
        return self._arena.bytes.view(torch.float32).as_strided(
            (records.num_slabs, width), (self._place.stride // 4, 1), self._place.data // 4
        )

    def _read_streams(self, slabs: Ints) -> Tensor:
        """A[n, streams, hidden] as the slabs have them."""
        shape = self._shape
        rows = self._streams.index_select(0, self._send(slabs)).to(self._target.embed.dtype)
        return rows.unflatten(1, (shape.num_streams, shape.hidden))

    def _write_slots(self, slabs: Ints, positions: Ints, tokens: Ints, streams: Tensor) -> None:
        """Only the window records of slots."""
        self._enter(streams, tokens, self._rows(slabs, positions))

    def _enter(self, streams: Tensor, tokens: Ints, rows: StepRows) -> Entered:
        """`StepAhead.enter` of streams and tokens of the first rows; the others are padding."""
        more = rows.rows - len(tokens)
        if more:
            streams = torch.cat((streams, streams.new_zeros((more, *streams.shape[1:]))))
        return self._layer.enter(streams.contiguous(), self._send(np.pad(tokens, (0, more))).int(), rows)

    def _rows(self, slabs: Ints, positions: Ints) -> StepRows:
        """One row for each, and padding up to a power of two: kernels know few sizes. A position behind the longest
        sequence is padding, too: whatever is drafted there is never verified."""
        count = 1 << (len(slabs) - 1).bit_length()
        places = np.full(count, -1, np.int64)
        places[: len(positions)] = np.where(positions < self._max_tokens, positions, -1)
        used = self._send(np.pad(slabs, (0, count - len(slabs)))).int()
        return StepRows(self._send(places).int(), used, torch.zeros_like(used).unsqueeze(1), 1)

    def _send(self, column: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(self._device)
