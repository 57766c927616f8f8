"""plan_step and apply_result: which rows and chunks the next step has, and what an awaited step means.

Theory of operation. Steps are planned ahead of results: while step n runs, n + 1 waits in the device's queue. So a plan
rests on an *assumed* state (`planned`, of a Prompt and in the columns of `running`), which `apply_result` reconciles.
Without drafts lengths are known without results; the only surprise is an id that ends a text: the row that was planned
after it is computed in vain and discarded. A row's input token is named where the host knows it and left to the device
(None) where the step before has yet to produce it. With drafts the device alone knows how many tokens a step brought
until its result is there, and so where the rows of the next one stand: see `running`.

Two rules keep that sound. A sequence that is in a queued step is in the next plan too, unless it is complete
(`running` keeps the order of arrival and a plan takes the first rows), so "the token of the step before" has one
meaning. And every record counts the submitted steps that name its memory; whoever frees it asks that count.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.core.lineup import Brought, Lineup, NewTokens
from engine.core.plan import PrefillChunk, Scores, StepPlan, StepResult
from engine.core.request import Prompt, sampling_at
from engine.core.running import Running
from engine.errors import LocalProtocolError


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step, and the ids that end a text.

    Attributes:
        chunk_tokens: prompt ids; a whole number of pages.
        page_tokens: ids in a page.
        rows: decode rows.
        prompts: prompts with a chunk in it, within `chunk_tokens` together.
        drafts: drafts behind each decode row; 0 for none.
        draft_rows: a step with more decode rows has no drafts.
    """

    chunk_tokens: int
    page_tokens: int
    rows: int
    eos_ids: frozenset[int]
    prompts: int = 1
    drafts: int = 0
    draft_rows: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class HandBack:
    """Bounds of the hand-back of finished turns.

    Attributes:
        tokens: a turn with fewer generated tokens stays.
        share: of a rank's pages, or of its slabs, that turns on their way may hold.
        wait_us: an offer without an answer is withdrawn after it.
    """

    tokens: int
    share: float
    wait_us: int

    def bounds(self, sizes: SideSizes) -> tuple[int, int]:
        """Pages and slabs that turns on their way may hold on a rank."""
        return int(self.share * sizes.num_pages), max(1, int(self.share * sizes.num_slabs))


@dataclasses.dataclass(frozen=True, slots=True)
class SideSizes:
    """What a side needs to know of its rank, device and limits.

    Attributes:
        max_waiting: requests that may wait here before they are refused with `queue_full`.
        grant_us: decode side: how long a grant may stay without any news of its writer.
        quarantine_share, cap_us, room_us: decode side: see `fence.Fence`. `room_us` bounds reading back, too.
        checksums: every push tells its checksum, and the decode side believes none before it was read back.
        prefix_cache: prefill side: what prompts have computed stays for those that begin alike.
        why_no_grammar: prefill side: why requests with a grammar are refused; empty if they are not.
        hand_back: finished turns go back to the prefill rank; None where they do not.
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
    checksums: bool = False
    prefix_cache: bool = False
    why_no_grammar: str = ""
    hand_back: HandBack | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """A submitted step: what its result will be matched with. `chunks` holds (prompt, ids, is the last), `drafts` is
    the plan's."""

    step: int
    chunks: list[tuple[Prompt, int, bool]]
    lineup: Lineup | None = None
    drafts: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Schedule:
    """Everything that can be in a step.

    Attributes:
        prompts: admitted prompts with ids left to plan, first come first served.
        running: sequences that generate.
        flights: submitted steps, oldest first.
    """

    next_step: int = 1
    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    running: Running = dataclasses.field(default_factory=Running)
    flights: collections.deque[Flight] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass(slots=True)
class Applied:
    """What a result brought.

    Attributes:
        chunks: (prompt, sampled token, number of ids, is the last), also of prompts that were given up.
        chunk_scores: of these tokens, by place in `chunks`; None where nobody asks.
        target_scores: of prompts' own ids, by position.
        rows: the tokens of live rows, and what they mean; None for a step without rows.
    """

    chunks: list[tuple[Prompt, int | None, int, bool]]
    rows: NewTokens | None
    chunk_scores: Scores | None = None
    target_scores: tuple[tuple[Prompt, Scores], ...] = ()


def plan_step(state: Schedule, limits: StepLimits) -> StepPlan | None:
    """The next step on the assumed state, which it moves on; None when there is nothing to compute."""
    flight = Flight(state.next_step, [])
    chunks = _plan_chunks(state, limits, flight)
    planned = state.running.plan(limits.rows)
    if planned is not None:
        flight.lineup, flight.drafts = planned[0], planned[2]
    elif not chunks:
        return None
    state.next_step += 1
    state.flights.append(flight)
    return StepPlan(flight.step, chunks, () if planned is None else planned[1], drafts=flight.drafts)


def apply_result(state: Schedule, result: StepResult, limits: StepLimits) -> Applied:
    """Reconciles the assumed state with the result of the oldest submitted step.

    Raises:
        LocalProtocolError: not the oldest step, or not as many tokens as its rows and chunks have.
    """
    if not state.flights or state.flights[0].step != result.step:
        raise LocalProtocolError(f"result of step {result.step}, which is not the oldest in flight")
    flight = state.flights.popleft()
    num_rows = 0 if flight.lineup is None else len(flight.lineup.slots)
    told = result.row_tokens if result.row_counts is None else result.row_counts
    if num_rows != len(told) or len(flight.chunks) != len(result.chunk_tokens):
        raise LocalProtocolError(f"step {result.step}: result does not have a token per row and chunk")
    applied = Applied([], None, result.chunk_scores)
    if result.target_scores:
        applied.target_scores = tuple([(flight.chunks[chunk][0], scores) for chunk, scores in result.target_scores])
    for (prompt, num_ids, is_last), sampled in zip(flight.chunks, result.chunk_tokens, strict=True):
        if is_last and sampled is None:
            raise LocalProtocolError(f"step {result.step}: no token sampled after the last chunk of {prompt.key}")
        prompt.steps -= 1
        prompt.computed += num_ids
        applied.chunks.append((prompt, sampled, num_ids, is_last))
    if flight.lineup is not None:
        told = result.row_tokens
        tokens = np.frombuffer(told, np.int32) if type(told) is memoryview else np.array(told, np.int32)
        if flight.drafts:
            state.running.end_drafting()
        if result.row_counts is None:
            applied.rows = state.running.apply(flight.lineup, tokens, limits.eos_ids, result.row_scores)
        else:
            brought = _read_counts(result, tokens, result.row_counts)
            applied.rows = state.running.apply_brought(flight.lineup, brought, limits.eos_ids, result.row_scores)
    return applied


def _read_counts(result: StepResult, tokens: npt.NDArray[np.int32], row_counts: Sequence[int]) -> Brought:
    """Raises LocalProtocolError where counts, tokens and drafts do not belong together."""
    counts = np.array(row_counts, np.int64)
    proposed = np.array([0] * len(counts) if result.row_proposed is None else result.row_proposed, np.int64)
    is_right = len(proposed) == len(counts) and int(counts.sum()) == len(tokens)
    if not is_right or int(counts.min()) < 0 or bool((counts - 1 > proposed).any()):
        raise LocalProtocolError(f"step {result.step}: its rows' tokens, counts and drafts do not belong together")
    return Brought(tokens, counts, proposed)


def _plan_chunks(state: Schedule, limits: StepLimits, flight: Flight) -> tuple[PrefillChunk, ...]:
    chunks: list[PrefillChunk] = []
    budget = limits.chunk_tokens
    at = 0
    while at < len(state.prompts) and len(chunks) < limits.prompts:
        prompt = state.prompts[at]
        end = _find_end(prompt, budget, limits.page_tokens)
        count = end - prompt.planned
        if count <= 0:
            break
        is_last = end == prompt.num_ids
        assert prompt.start is not None
        sampling = sampling_at(prompt.start.sampling, prompt.start.generated) if is_last else None
        tokens = prompt.ids[4 * prompt.planned : 4 * end]
        chunk = PrefillChunk(prompt.key[0], prompt.slab, prompt.planned, tokens, prompt.pages, sampling)
        if prompt.keeps or prompt.base is not None:
            chunk.base = prompt.base if prompt.planned == prompt.cached else None
            chunk.keep = prompt.keeps.get(end, -1)
        if sampling is not None and sampling.needs_seen:
            chunk.seen, chunk.generated = prompt.ids, prompt.start.generated
        tops = prompt.start.sampling.prompt_logprobs
        if tops >= 0:
            own = 4 * (prompt.num_ids - prompt.start.generated)
            chunk.targets = prompt.ids[min(4 * prompt.planned + 4, own) : min(4 * end + 4, own)]
            chunk.target_tops = tops
        chunks.append(chunk)
        prompt.planned = end
        prompt.steps += 1
        flight.chunks.append((prompt, count, is_last))
        budget -= count
        if is_last:
            state.prompts.pop(at)
        elif end == prompt.branch:
            at += 1  # one chunk of a prompt in a step: what is left of the budget is for others
    return tuple(chunks)


def _find_end(prompt: Prompt, budget: int, page_tokens: int) -> int:
    """Where the next chunk of a prompt ends, within so many ids: where it began if that is nowhere."""
    # Only a prompt's last chunk may end inside a page: a page is pushed once, when it is finished.
    end = prompt.planned + budget
    end = prompt.num_ids if prompt.num_ids <= end else max(prompt.planned, end // page_tokens * page_tokens)
    stops = prompt.planned < prompt.branch < end and prompt.branch in prompt.keeps
    return prompt.branch if stops else end
