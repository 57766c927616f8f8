"""plan_step and apply_result: which rows and chunks the next step has, and what an awaited step means.

Theory of operation. Steps are planned ahead of results: while step n runs, n + 1 waits in the device's queue. So a plan
rests on an *assumed* state (`Prompt.planned`, `Sequence.planned`), which `apply_result` reconciles. Lengths are known
without results; the only surprise is an id that ends a text: the row that was planned after it is computed in vain and
discarded. A row's input token is named where the host knows it and left to the device (None) where the step before has
yet to produce it.

Two rules keep that sound. A sequence that is in a queued step is in the next plan too, unless it is complete
(`running` keeps the order of arrival and a plan takes the first rows), so "the token of the step before" has one
meaning. And every record counts the submitted steps that name its memory; whoever frees it asks that count.
"""

from __future__ import annotations

import collections
import dataclasses

from engine.core.handoff import DecodePhase
from engine.core.plan import DecodeRow, PrefillChunk, StepPlan, StepResult
from engine.core.request import Prompt, RequestKey, Sequence, judge_token, sampling_at
from engine.errors import LocalProtocolError
from transport.messages import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step, and the ids that end a text.

    Attributes:
        chunk_tokens: prompt ids; a whole number of pages.
        page_tokens: ids in a page.
        rows: decode rows.
        prompts: prompts with a chunk in it, within `chunk_tokens` together.
    """

    chunk_tokens: int
    page_tokens: int
    rows: int
    eos_ids: frozenset[int]
    prompts: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class SideSizes:
    """What a side needs to know of its rank, device and limits.

    Attributes:
        max_waiting: requests that may wait here before they are refused with `queue_full`.
        grant_us: decode side: how long a grant may stay without any news of its writer.
        quarantine_share, cap_us, room_us: decode side: see `fence.Fence`.
    """

    rank: int
    num_pages: int
    num_slabs: int
    vocab_size: int
    max_model_tokens: int
    max_waiting: int
    grant_us: int
    quarantine_share: float
    cap_us: int
    room_us: int
    step: StepLimits


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """A submitted step: what its result will be matched with. `chunks` holds (prompt, ids, is the last)."""

    step: int
    chunks: list[tuple[Prompt, int, bool]]
    rows: list[Sequence]


@dataclasses.dataclass(slots=True, eq=False)
class Schedule:
    """Everything that can be in a step.

    Attributes:
        prompts: admitted prompts with ids left to plan, first come first served.
        running: sequences by key, in order of arrival.
        flights: submitted steps, oldest first.
    """

    next_step: int = 1
    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    running: dict[RequestKey, Sequence] = dataclasses.field(default_factory=dict)
    flights: collections.deque[Flight] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass(slots=True)
class Applied:
    """What a result brought.

    Attributes:
        chunks: (prompt, sampled token, number of ids, is the last), also of prompts that were given up.
        tokens: (sequence, token, why it ends there or None) of live rows.
        released: sequences that are over and that no submitted step names any more.
    """

    chunks: list[tuple[Prompt, int | None, int, bool]] = dataclasses.field(default_factory=list)
    tokens: list[tuple[Sequence, int, FinishReason | None]] = dataclasses.field(default_factory=list)
    released: list[Sequence] = dataclasses.field(default_factory=list)


def plan_step(state: Schedule, limits: StepLimits) -> StepPlan | None:
    """The next step on the assumed state, which it moves on; None when there is nothing to compute."""
    flight = Flight(state.next_step, [], [])
    plan = StepPlan(state.next_step, _plan_chunks(state, limits, flight), _plan_rows(state, limits, flight))
    if plan.is_empty:
        return None
    state.next_step += 1
    state.flights.append(flight)
    return plan


def apply_result(state: Schedule, result: StepResult, limits: StepLimits) -> Applied:
    """Reconciles the assumed state with the result of the oldest submitted step.

    Raises:
        LocalProtocolError: not the oldest step, or not one token per row and chunk.
    """
    if not state.flights or state.flights[0].step != result.step:
        raise LocalProtocolError(f"result of step {result.step}, which is not the oldest in flight")
    flight = state.flights.popleft()
    if len(flight.rows) != len(result.row_tokens) or len(flight.chunks) != len(result.chunk_tokens):
        raise LocalProtocolError(f"step {result.step}: result does not have a token per row and chunk")
    applied = Applied()
    for (prompt, num_ids, is_last), sampled in zip(flight.chunks, result.chunk_tokens, strict=True):
        if is_last and sampled is None:
            raise LocalProtocolError(f"step {result.step}: no token sampled after the last chunk of {prompt.key}")
        prompt.steps -= 1
        prompt.computed += num_ids
        applied.chunks.append((prompt, sampled, num_ids, is_last))
    eos_ids = limits.eos_ids
    for sequence, token in zip(flight.rows, result.row_tokens, strict=True):
        sequence.steps -= 1
        if sequence.phase is not DecodePhase.RUNNING:
            if sequence.steps == 0:
                applied.released.append(sequence)
            continue
        sequence.count += 1
        sequence.next_token = token
        reason = judge_token(token, sequence.count, sequence.limit, sequence.reserve.sampling, eos_ids)
        applied.tokens.append((sequence, token, reason))
    return applied


def _plan_chunks(state: Schedule, limits: StepLimits, flight: Flight) -> tuple[PrefillChunk, ...]:
    chunks: list[PrefillChunk] = []
    budget = limits.chunk_tokens
    while state.prompts and len(chunks) < limits.prompts:
        prompt = state.prompts[0]
        left = prompt.num_ids - prompt.planned
        # Only a prompt's last chunk may end inside a page: a later one would start there, and a page is pushed once.
        count = left if left <= budget else budget // limits.page_tokens * limits.page_tokens
        if count == 0:
            break
        is_last = count == left
        end = prompt.planned + count
        assert prompt.start is not None
        sampling = sampling_at(prompt.start.sampling, prompt.start.generated) if is_last else None
        tokens = prompt.ids[4 * prompt.planned : 4 * end]
        chunks.append(PrefillChunk(prompt.key[0], prompt.slab, prompt.planned, tokens, prompt.pages, sampling))
        prompt.planned = end
        prompt.steps += 1
        flight.chunks.append((prompt, count, is_last))
        budget -= count
        if is_last:
            state.prompts.pop(0)
    return tuple(chunks)


def _plan_rows(state: Schedule, limits: StepLimits, flight: Flight) -> tuple[DecodeRow, ...]:
    rows: list[DecodeRow] = []
    for sequence in state.running.values():
        planned = sequence.planned
        if planned >= sequence.limit:
            continue
        if len(rows) == limits.rows:
            break
        sampling = sequence.sampling
        if sampling.min_tokens:
            sampling = sequence.sampling = sampling_at(sampling, planned)
        token = None if sequence.steps else sequence.next_token
        rows.append(DecodeRow(sequence.key[0], sequence.slab, sequence.next_position, token, sequence.pages, sampling))
        sequence.planned = planned + 1
        sequence.steps += 1
        flight.rows.append(sequence)
    return tuple(rows)
