"""DraftSizes: steps that verify and draft by themselves, of all sizes, and what they share: the state by slab."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.envelope import Envelope
from engine.model.ops import Ops
from engine.model.shapes import ModelShape
from engine.model.step_ahead import StepAhead
from engine.model.step_arena import StepArena
from engine.model.step_drafts import Drafted, DraftStep
from engine.model.step_forward import Peers, StepForward, StepSize
from engine.model.step_sized import SizedStep, sizes_up_to
from engine.model.step_weights import StepWeights
from kernels.forms import DraftState

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class ToldRows:
    """Rows of a step that is launched, as the host knows them. All int64[n], -1 where only the device knows.

    Attributes:
        tokens: of each row; positions: theirs.
        slabs: of each sequence; ends: see `core.plan.Roster`.
        counts: drafts behind each row that the host knows; drafts: int64[n, any], these.
        tables: int64[n, pages].
    """

    tokens: Ints
    positions: Ints
    slabs: Ints
    ends: Ints
    counts: Ints
    drafts: Ints
    tables: Ints


class DraftSizes:
    """See the module. Not thread-safe.

    Attributes:
        state: where slabs stand, as the steps leave them.
        plain, drafting: steps without drafts and with them, by the places that they have for rows.
    """

    def __init__(
        self,
        shape: ModelShape,
        target: StepWeights,
        layer: StepAhead,
        arena: StepArena,
        ops: Ops,
        *,
        max_tokens: int,
        decode_rows: int,
        drafts: int,
        draft_rows: int,
        peers: Callable[[int], Peers] | None = None,
    ) -> None:
        """Steps are made, and on a CUDA device compiled and captured, here. All are borrowed.

        Args:
            max_tokens: of a sequence.
            decode_rows: most sequences of a step.
            drafts: behind each, at least 1.
            draft_rows: most sequences of a step with drafts. In a group as many as there are places for in one without.
            peers: of a rank of a group, as `StepModel` takes it.
        """
        self._shape = shape
        self._target = target
        self._layer = layer
        self._arena = arena
        self._ops = ops
        self._max_tokens = max_tokens
        self._drafts = drafts
        self._peers = peers
        self._device = arena.bytes.device
        last = arena.last_tokens
        self.state = DraftState(
            torch.full_like(last, -1), last, torch.zeros_like(last), last.new_zeros((len(last), drafts))
        )  # fmt: skip
        self.plain: dict[int, SizedStep[Drafted]] = {}
        self.drafting: dict[int, SizedStep[Drafted]] = {}
        span = 1 + drafts
        for count in sizes_up_to(decode_rows):
            self.plain[count] = self._open(count, 0, count)
            # In a group a rank that drafts meets others that do not: in steps with as many places for rows.
            if peers is not None and count >= span:
                self.drafting[count] = self._open(count // span, drafts, count)
        if peers is None and draft_rows:
            for count in sizes_up_to(draft_rows):
                self.drafting[count * span] = self._open(count, drafts, count * span)

    def find_drafts(self, sequences: int, drafts: int) -> int | None:
        """How many drafts a step of so many sequences judges and makes behind each, where `drafts` are asked for: as
        many, or 0 where there are only steps without; None where there is no step for them at all."""
        if drafts == self._drafts and sequences * (1 + drafts) <= max(self.drafting, default=0):
            return drafts
        return 0 if drafts in (0, self._drafts) and sequences <= max(self.plain) else None

    @torch.inference_mode()
    def launch(self, rows: ToldRows, drafts: int, agreed: int = 0, envelope: Envelope | None = None) -> Tensor:
        """Enqueues a step.

        Args:
            rows: of the sequences.
            drafts: what `find_drafts` says of them.
            agreed: in a group, the rows that the step has places for at least.
            envelope: for this step; out until the result has been read. None for one of its own.

        Returns:
            int32[n, 3 + span + rounds] of the envelope once the device has come so far, see `kernels.forms.Judged`.
        """
        count = len(rows.slabs)
        sizes = self.drafting if drafts else self.plain
        places = max(count * (1 + drafts), agreed)
        sized = sizes[next(size for size in sorted(sizes) if size >= places)]
        draft_step = sized.whole
        assert isinstance(draft_step, DraftStep)
        if envelope is None:
            envelope = Envelope(on_gpu=self._device.type == "cuda")
        sheet = envelope.sheet("told", *draft_step.told.shape)
        told = sheet.words
        told[:] = 0
        told[:2], told[2] = -1, len(self.state.stands) - 1
        columns = (rows.tokens, rows.positions, rows.slabs, rows.ends, rows.counts, *rows.drafts.T)
        for line, column in zip(told, columns, strict=False):
            line[:count] = column
        calls, place = envelope.calls, draft_step.told
        if calls is None or sized.graph is None:
            place.copy_(sheet.tensor, non_blocking=True)
        else:
            calls.copy(place.data_ptr(), sheet.address, sheet.num_bytes)
        sized.set_tables(rows.tables, envelope.write_table)
        if calls is None or sized.graph is None:
            result = sized.replay().result
            brought = envelope.sheet("brought", *result.shape)
            brought.tensor.copy_(result, non_blocking=True)
        else:
            result = sized.graph.outputs.result
            brought = envelope.sheet("brought", *result.shape)
            calls.launch(sized.graph.handle)
            calls.copy(brought.address, result.data_ptr(), brought.num_bytes)
        return brought.tensor[:count]

    def _open(self, count: int, drafts: int, places: int) -> SizedStep[Drafted]:
        arena = self._arena
        records = arena.records
        pages = -(-self._max_tokens // records.page_tokens)
        size = StepSize(count, 1 + drafts, pages)
        branches = self._device.type == "cuda"
        peers = None if self._peers is None else self._peers(places)
        step = StepForward(
            self._shape, self._target, records, arena.bytes, self._ops, size, peers=peers, branches=branches
        )  # fmt: skip
        assert records.streams is not None
        return SizedStep(step, DraftStep(step, self._layer, self.state, records.streams, self._ops, rounds=drafts))
