"""StepModel: the target's forward for passes, by the device's step: rows in, logits out.

Rows of one position each are a step of a fixed number of sequences, filled up with padding. Longer ones are a prompt's:
one sequence at a time, so many rows at a time, through the long rings of the arena's private block (`staging.py`).

In a group the graphs of a step are those that its ranks have agreed on (`launches.py`): larger than the own rows need,
or of padding only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.envelope import Envelope, Words
from engine.model.fused import Mixture
from engine.model.kv import SPARE_ROWS
from engine.model.launches import Launches, Turns
from engine.model.ops import Ops
from engine.model.records import Records
from engine.model.rows import RowBatch
from engine.model.shapes import ModelShape
from engine.model.staging import Staging
from engine.model.step_arena import StepArena
from engine.model.step_drafter import StepDrafter
from engine.model.step_forward import Passed, Peers, StepForward, StepOutputs, StepSize
from engine.model.step_greedy import GreedyStep, SizedGreedy
from engine.model.step_prompt import PromptStep
from engine.model.step_shared import open_step
from engine.model.step_sized import SizedStep, sizes_up_to
from engine.model.step_weights import StepWeights
from kernels.forms import UNIT_INDEX_HEADS, DraftState

Ints = npt.NDArray[np.int64]
HEAD_ROWS = (1, 32, 64, 128)
"""Numbers of rows for which the product with the head differs in how it is cut."""


class StepModel:
    """See the module; a `RowModel`. Not thread-safe.

    Attributes:
        shape, arena: as of a `RowModel`.
        replay_rows: 0, nothing is left out.
        mixture: None: experts are here, or their exchanges are inside the steps.
        turns: of the step of a group that is run; None without a group.
        drafter: what keeps its context of every pass, and drafts; None where nobody does.
        dense_bytes: that a step reads whatever its rows are.
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
        peers: Callable[[int], Peers] | None = None,
        drafter: StepDrafter | None = None,
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
            peers: of a rank of a group, by rows of a step, its way to the others; they are not waited for in here.
            drafter: of the same model and arena, borrowed; sees all passes.
        """
        self.shape = shape
        self.arena = arena
        self.replay_rows = 0
        self.mixture: Mixture | None = None
        self.turns: Turns | None = None
        self.drafter = drafter
        self.dense_bytes = weights.dense_bytes
        records = arena.records
        pages = -(-max_tokens // records.page_tokens)
        branches = arena.bytes.device.type == "cuda"

        def open_one(size: StepSize, layout: Records) -> StepForward:
            others = None if peers is None else peers(size.rows)
            return open_step(shape, weights, layout, arena.bytes, ops, size, peers=others, branches=branches)

        def read_prompt(count: int) -> SizedStep[Passed]:
            step = open_one(StepSize(1, count, pages, read_span=read_span), records.staged())
            return SizedStep(step, PromptStep(step) if drafter is None else drafter.follow_prompt(step))

        def verify(count: int, span: int) -> SizedStep[StepOutputs]:
            step = open_one(StepSize(count, span, pages), records)
            return SizedStep(step, step)

        # What steps of all sizes share; where slabs stand is told, so only their tokens are read again.
        last = arena.last_tokens
        state = DraftState(torch.full_like(last, -1), last, torch.zeros_like(last), last.new_zeros((len(last), 0)))
        self._decodes = {
            count: SizedGreedy(GreedyStep(open_one(StepSize(count, 1, pages), records), state, ops))
            for count in sizes_up_to(decode_rows)
        }
        self._most_rows = max(self._decodes)
        read_span = _read_span(shape.index_heads)
        self._prompts = {count: read_prompt(count) for count in prompt_rows}
        for rows in HEAD_ROWS if prompt_rows and branches else ():
            # Compiles what makes the logits of the rows of a prompt that are asked for.
            self._prompts[prompt_rows[0]].step.judge(weights.embed.new_zeros((rows, shape.hidden)))
        self._staging = Staging(records, arena.bytes, shape.window)
        self._verifies: dict[int, SizedStep[StepOutputs]] = {}
        if drafter is not None and drafter.drafts and not drafter.is_grouped:
            span, most = 1 + drafter.drafts, min(drafter.draft_rows, decode_rows)
            self._verifies = {count: verify(count, span) for count in sizes_up_to(most)}

    @torch.inference_mode()
    def forward(self, batch: RowBatch, wanted: Sequence[int] | None = None) -> Tensor:
        """See `RowModel`."""
        asked = np.arange(batch.rows) if wanted is None else np.array(wanted, np.int64)
        if 1 < batch.span <= self._most_span and batch.sequences <= max(self._verifies):
            return self._verify(batch, asked)
        is_decode = batch.span == 1 and batch.sequences <= max(self._decodes)
        if self.turns is not None:
            is_decode = not self.turns.reads_prompts
        if is_decode:
            logits = self._decode(batch, asked)
        else:
            if self.drafter is not None:
                self.drafter.see_prompts(batch)
            logits = torch.empty((len(asked), self.shape.vocab_size), device=self.arena.bytes.device)
            for sequence in range(batch.sequences):
                first, count = int(batch.firsts[sequence]), int(batch.spans[sequence])
                mine = np.flatnonzero((asked >= first) & (asked < first + count))
                self._read_prompt(batch, sequence, asked[mine] - first, logits, mine)
        if self.turns is not None:
            self.turns.check()
        return logits

    def plan_launches(self, prompts: Sequence[int], decode: int) -> Launches:
        """The steps that passes come to.

        Args:
            prompts: lengths of the chunks of prompts, in order.
            decode: rows that decode.
        """
        pieces = [piece for length in prompts for piece in self._cut(length)]
        if decode > self.most_rows:
            return Launches((*pieces, *[1] * decode), 0)
        return Launches(tuple(pieces), decode)

    def run_rest(self) -> None:
        """What is left of the agreed steps, with no rows."""
        assert self.turns is not None
        self._pass_pieces(self.turns)
        rows = self.turns.take_decode()
        if rows:
            self._decodes[self._size(self._decodes, rows)].run_padding()

    @property
    def most_rows(self) -> int:
        """Of one position each, in a step."""
        return self._most_rows

    def step_greedily(
        self, tokens: Ints, positions: Ints, slabs: Ints, tables: Ints, envelope: Envelope, *, goes_on: bool = False
    ) -> Words:
        """Enqueues a step of one row for each slab, and keeps the likeliest ids as what the slabs sampled last.

        Args:
            tokens: int64[n], -1 for what the slab sampled last.
            positions, slabs: int64[n].
            tables: int64[n, pages].
            envelope: for this step; out until the result has been read.
            goes_on: see `SizedGreedy.launch`.

        Returns:
            int32[n, BEST + 1] on the host, see `kernels.forms.Judged`, once the device has come so far.
        """
        sized = self._find_decode(len(slabs))
        return sized.launch(tokens, positions, slabs, tables, envelope, goes_on=goes_on)

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
        outputs = self._find_decode(batch.sequences).run(batch.ids, batch.positions, batch.slabs, batch.tables).outputs
        if self.drafter is not None:
            self.drafter.see_rows(batch, outputs.streams, np.arange(batch.rows))
        if np.array_equal(asked, np.arange(len(outputs.logits))):
            # Passes that follow write the same memory; whoever wants these logits is done with them before.
            return outputs.logits
        return self._pick(outputs.logits, asked)

    @property
    def _most_span(self) -> int:
        """Rows of a sequence whose drafts the host judges; 0 where nobody drafts."""
        return 1 + self.drafter.drafts if self.drafter is not None and self._verifies else 0

    def _verify(self, batch: RowBatch, asked: Ints) -> Tensor:
        """Sequences of a few rows each, through the rings of their slabs."""
        assert self.drafter is not None
        sized = self._verifies[self._size(self._verifies, batch.sequences)]
        span = sized.step.size.span
        places = batch.owner * span + np.arange(batch.rows) - batch.firsts[batch.owner]
        tokens, positions = np.zeros(batch.sequences * span, np.int64), np.full(batch.sequences * span, -1)
        tokens[places], positions[places] = batch.ids, batch.positions
        outputs = sized.run(tokens, positions, batch.slabs, batch.tables)
        self.drafter.see_rows(batch, outputs.streams, places)
        return self._pick(outputs.logits, places[asked])

    def _find_decode(self, count: int) -> SizedGreedy:
        """The step for so many sequences; in a group, of as many rows as were agreed."""
        return self._decodes[min(_round_up(max(count, self.take_turn())), self._most_rows)]

    def take_turn(self) -> int:
        """In a group, launches the pieces of prompts in front of the step that decodes; the rows agreed for that one.
        0 without a group."""
        if self.turns is None:
            return 0
        self._pass_pieces(self.turns)
        return self.turns.take_decode()

    def _pass_pieces(self, turns: Turns) -> None:
        """The agreed pieces of prompts that are left, of which none is of this rank."""
        while turns.has_pieces:
            self._prompts[self._size(self._prompts, turns.take_piece())].run_padding()

    def _cut(self, length: int) -> list[int]:
        """A prompt's rows by the steps that they go through."""
        most = max(self._prompts)
        return [min(most, length - start) for start in range(0, length, most)]

    @staticmethod
    def _size(sizes: Collection[int], rows: int) -> int:
        return next(size for size in sorted(sizes) if size >= rows)

    def _read_prompt(self, batch: RowBatch, sequence: int, asked: Ints, logits: Tensor, places: Ints) -> None:
        """The rows of one sequence; logits of its rows `asked` go to `places`."""
        slab, start, count = (int(column[sequence]) for column in (batch.slabs, batch.starts, batch.spans))
        ids, table = batch.tokens[sequence, :count], batch.tables[sequence : sequence + 1]
        if self.drafter is not None:
            self.drafter.open_prompt(slab, start, int(ids[0]))
        self._staging.fetch(slab, start)
        done = 0
        for part in self._cut(count):
            rows = part if self.turns is None else self.turns.take_piece()
            size = self._size(self._prompts, rows)
            positions = np.arange(start + done, start + done + part)
            if self.drafter is not None:
                self.drafter.tell_nexts(size, ids[done + 1 : done + part + 1])
            sized = self._prompts[size]
            passed = sized.run(ids[done : done + part], positions, np.zeros(1, np.int64), table)
            here = np.flatnonzero((asked >= done) & (asked < done + part))
            if len(here):
                judged = sized.step.judge(self._pick(passed.hidden, asked[here] - done))
                logits[torch.from_numpy(places[here]).to(logits.device)] = judged
            done += part
            if done == count and self.drafter is not None:
                self.drafter.see_prompt(passed.streams, part - 1)
        self._staging.store(slab, start + count)

    def _pick(self, logits: Tensor, rows: Ints) -> Tensor:
        return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _read_span(index_heads: int) -> int:
    """Rows of a prompt that what reads the arena takes together: as many as the fast scores of keys are made for."""
    fitting = UNIT_INDEX_HEADS // max(index_heads, 1)
    return min(SPARE_ROWS, 1 << max(fitting.bit_length() - 1, 0))


def _round_up(rows: int) -> int:
    """To a power of two: what steps are made for, but for the largest."""
    return 1 << max(rows - 1, 0).bit_length()
