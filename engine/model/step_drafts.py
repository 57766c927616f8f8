"""DraftStep: a step that verifies drafts and makes the next. ProposeStep: drafts alone.

All are sequences of launches over static buffers, as `StepForward` is, so a graph holds all of one. What a step needs
of the one before it is on the device, by slab: where the sequence stands, its last token, its drafts. So a host that
does not know yet how many drafts held can launch the next step all the same.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.model.ops import Ops
from engine.model.step_ahead import Predicted, StepAhead
from engine.model.step_forward import StepForward
from kernels.forms import DraftState, StepRows, StreamPlace

TOLD = 5
"""Lines of what the host tells before the drafts themselves, see `kernels.reference.open_rows`."""


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What a step gives. In a graph every replay writes the same memory.

    Attributes:
        result: int32[sequences, 3 + span + rounds], see `kernels.forms.Judged`.
        logits: float32[rows, vocab], of the target.
        greedy: int64[rows], the likeliest tokens.
        ids: per layer of the target the experts chosen, then of each round of drafting.
    """

    result: Tensor
    logits: Tensor
    greedy: Tensor
    ids: tuple[Tensor, ...]


class DraftStep:
    """See the module. Not thread-safe.

    Attributes:
        step: the target's, whose tokens, positions and slabs are written here; its page tables are input.
        told: int32[TOLD + most, sequences], input, see `kernels.reference.open_rows`.
        rounds: drafts that it makes behind each sequence; 0 for a step that only keeps the context of later ones.
    """

    def __init__(
        self, step: StepForward, ahead: StepAhead, state: DraftState, place: StreamPlace, ops: Ops, *, rounds: int
    ) -> None:
        """Borrows all of it; `told` is all padding."""
        self.step = step
        self.rounds = rounds
        self._ahead = ahead
        self._state = state
        self._place = place
        self._ops = ops
        most = state.drafts.shape[1]
        self.told = torch.zeros((TOLD + most, step.size.sequences), dtype=torch.int32, device=step.arena.device)
        self.told[:2] = -1
        self.told[2] = len(state.stands) - 1

    @torch.inference_mode()
    def run(self) -> Drafted:
        """Enqueue the step: reads `told` and the state, writes the arena and the state."""
        ops, step, state, ahead = self._ops, self.step, self._state, self._ahead
        slabs, tables = step.rows.slabs, step.rows.tables
        ops.open_rows(self.told, state, step.rows, step.tokens)
        outputs = step.run()
        assert outputs.streams is not None
        judged = ops.judge_rows(outputs.greedy, step.tokens, step.rows.positions, self.told, state, self.rounds)
        ops.keep_streams(outputs.streams, judged, slabs, step.arena, self._place)
        kept = StepRows(judged.kept, slabs, tables, step.size.span)
        entered = ahead.enter(outputs.streams, judged.nexts, kept)
        rounds: list[Predicted] = []
        for number in range(self.rounds):
            rows = StepRows(judged.slots[number], slabs, tables, 1)
            if rounds:
                entered = ahead.enter(rounds[-1].streams, rounds[-1].greedy, rows)
            else:
                entered = entered.pick(judged.last, ops)
            rounds.append(ahead.predict(entered, rows))
        if rounds:
            ops.keep_drafts(torch.stack([each.greedy for each in rounds]), self.told, judged, state)
        return Drafted(judged.result, outputs.logits, outputs.greedy, (*outputs.ids, *(each.ids for each in rounds)))


class ProposeStep:
    """Drafts behind sequences that stand where their slabs' streams were left, for steps that the host has judged.

    Attributes:
        slabs: int32[sequences], input.
        tokens: int32[sequences], input: the tokens that drafts follow.
        slots: int32[rounds, sequences], input: the position of the slot that each round runs, -1 for padding.
    """

    def __init__(self, ahead: StepAhead, streams: Tensor, dtype: torch.dtype, sequences: int, rounds: int) -> None:
        """All are borrowed; slots are all padding.

        Args:
            streams: float32[slabs, streams, hidden], the slabs'.
            dtype: A.
        """
        self._ahead = ahead
        self._streams = streams
        self._dtype = dtype
        self.slabs = torch.zeros(sequences, dtype=torch.int32, device=streams.device)
        self.tokens = torch.zeros_like(self.slabs)
        self.slots = torch.full((rounds, sequences), -1, dtype=torch.int32, device=streams.device)
        self._tables = self.slabs.unsqueeze(1)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Enqueue it: int64[rounds, sequences], the likeliest tokens."""
        streams, tokens = self._streams.index_select(0, self.slabs).to(self._dtype), self.tokens
        found = []
        for slots in self.slots:
            rows = StepRows(slots, self.slabs, self._tables, 1)
            predicted = self._ahead.predict(self._ahead.enter(streams, tokens, rows), rows)
            streams, tokens = predicted.streams, predicted.greedy
            found.append(tokens)
        return torch.stack(found)
