"""Prompt and Sequence: a request as each side of the hand-off sees it, and the rule that says when it ends.

Both are rows of a table, changed by nobody but the step actor: a Prompt on the prefill rank, a Sequence on the decode
rank. Positions count from the first id of the prompt; a completion index counts from the first token that the request
ever produced, so a later attempt starts at `generated`, not at 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from engine.core.fingerprint import Digests
from engine.core.handoff import DecodePhase, PrefillPhase
from engine.core.plan import Base
from engine.core.prefix import Cut
from engine.core.runs import NO_UNITS, Runs
from transport.messages import (
    GRAMMAR_LIMIT,
    TEXT_LIMIT,
    FailureCode,
    FinishReason,
    PagesGranted,
    PrefillCommitted,
    RequestFailed,
    ReservePages,
    Sampling,
    StartPrefill,
    Timings,
    TokenScored,
)

RequestKey = tuple[int, int]
"""(request, attempt): unique in the cluster."""


@dataclasses.dataclass(slots=True, eq=False)
class Prompt:
    """A prompt on its prefill rank, from the first word of it until its memory is free again.

    `start` or `grant` is None until that message came; either may be first, they travel on different links.

    Attributes:
        planned, computed: ids in submitted and in awaited steps.
        pushed: pages handed to a push; arrived: pages whose push is over.
        steps, pushes: submitted steps and running transfers that name its memory.
        cached: ids that it has not to compute, since it goes on from `cut`; the pages that they fill are shared.
        base: where its first chunk finds the state at `cached`.
        branch: where it is to leave a branch cut, 0 for nowhere.
        keeps: position to slab: states that are to be kept, or are, with the steps that come to there.
        digests: of its ids at page ends; None where nothing of it is kept, or before it was admitted.
    """

    key: RequestKey
    decode_rank: int
    phase: PrefillPhase = PrefillPhase.NEW
    start: StartPrefill | None = None
    grant: PagesGranted | None = None
    link: int = 0
    decode_generation: int = 0
    remote_pages: Runs = NO_UNITS
    ids: memoryview = dataclasses.field(default_factory=lambda: memoryview(b""))
    pages: Runs = NO_UNITS
    slab: int = -1
    planned: int = 0
    computed: int = 0
    pushed: int = 0
    arrived: int = 0
    steps: int = 0
    pushes: int = 0
    cached: int = 0
    cut: Cut | None = None
    base: Base | None = None
    branch: int = 0
    keeps: dict[int, int] = dataclasses.field(default_factory=dict)
    digests: Digests | None = None
    first_token: int = -1
    first_scored: TokenScored | None = None
    pushed_bytes: int = 0
    num_pushes: int = 0
    post_us: int = 0
    started_us: int = 0
    submitted_us: int = 0
    computed_us: int = 0

    @property
    def num_ids(self) -> int:
        return len(self.ids) // 4

    @property
    def is_quiet(self) -> bool:
        """Nothing that was started still reads or writes its memory."""
        return self.steps == 0 and self.pushes == 0

    def timings(self, now_us: int) -> Timings:
        queued_us = self.start.queued_us if self.start else 0
        return Timings(
            queue_us=queued_us + self.submitted_us - self.started_us,
            prefill_us=self.computed_us - self.submitted_us,
            push_us=now_us - self.computed_us,
        )


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request on its decode rank, from the reservation until its memory is free again.

    Attributes:
        limit: completion tokens at which it ends with `length`, those of earlier attempts included.
        count: completion tokens known to the host, those of earlier attempts included; while it runs, as it began.
        slot: its place in the columns of `running.Running` while a submitted step may name it.
        steps: once it runs no longer: submitted steps that name its memory.
        granted: of its pages those of its prompt, once they were granted; `prompt_pages` is their number.
        pushed_mask: bit p is set once page p of the prompt was written.
        told: (first page, pages, checksum) of each push, where pushes have checksums.
        next_token: the last token when it began to run.
        said: with a grammar: ids of its completion when it began to run, int32 each. Until then those of earlier
            attempts.
        history: once it has finished, and where turns are handed back: all tokens of this attempt, int32 each.
        beyond: tokens behind its end with which its device went on.
        is_offered: once its memory is free of steps, the turn may be offered.
    """

    key: RequestKey
    reserve: ReservePages
    limit: int
    arrived_us: int
    order: int
    phase: DecodePhase = DecodePhase.NEW
    link: int = 0
    prefill_generation: int = 0
    epoch: int = 0
    quarantined_us: int = 0
    granted_us: int = 0
    prompt_pages: int = 0
    pages: Runs = NO_UNITS
    granted: Runs = NO_UNITS
    slab: int = -1
    pushed_mask: int = 0
    told: tuple[tuple[int, int, int], ...] = ()
    count: int = 0
    slot: int = -1
    steps: int = 0
    next_token: int = -1
    said: bytes = b""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    reason: FinishReason | None = None
    commit: PrefillCommitted | None = None
    committed_us: int = 0
    handoff_us: int = 0
    history: bytes = b""
    beyond: int = 0
    is_offered: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Ids the client sent as prompt; the rest of `num_ids` are tokens of earlier attempts."""
        return self.reserve.num_ids - self.reserve.generated

    @property
    def sort_key(self) -> tuple[int, int]:
        return (self.reserve.priority, self.order)

    @property
    def is_quarantined(self) -> bool:
        return self.phase is DecodePhase.QUARANTINED

    @property
    def writer(self) -> tuple[int, int]:
        """Rank and generation of the process that its memory is granted to."""
        return self.reserve.prefill_rank, self.prefill_generation

    @property
    def num_pages(self) -> int:
        return len(self.pages)


def completion_limit(num_ids: int, generated: int, max_tokens: int, max_model_tokens: int) -> int:
    """Completion tokens a request may have in all; not above `generated` when nothing is left to produce."""
    return min(max_tokens, max_model_tokens - (num_ids - generated))


def num_history(num_ids: int, generated: int, limit: int) -> int:
    """Positions whose KV is ever stored: all of prompt and completion but the last token, which nobody reads."""
    return num_ids + max(limit - generated, 1) - 1


def count_pages(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_tokens)


def sampling_at(sampling: Sampling, index: int) -> Sampling:
    """How to draw the completion token `index`: `min_tokens` is kept while ends are forbidden, else 0 (see plan.py)."""
    if sampling.min_tokens == 0 or index < sampling.min_tokens:
        return sampling
    return sampling.without_minimum()


def judge_token(token: int, count: int, limit: int, sampling: Sampling, eos_ids: Container[int]) -> FinishReason | None:
    """Whether a completion ends with `token` as its `count`-th token (the first is 1)."""
    ends = token in sampling.stop_ids or (not sampling.ignore_eos and token in eos_ids)
    if ends and count > sampling.min_tokens:
        return "stop"
    return "length" if count >= limit else None


def build_failure(key: RequestKey, code: FailureCode, why: str) -> RequestFailed:
    """RequestFailed as a rank sends it: always definite, since it emits nothing of a request that it gave up."""
    retryable = code not in ("bad_request", "too_long", "cancelled")
    # A cause may quote another process; a message longer than its field would be refused, and cost the link.
    return RequestFailed(*key, code=code, message=why[:TEXT_LIMIT], definite=True, retryable=retryable)


def find_unfit_sampling(sampling: Sampling, vocab_size: int) -> str | None:
    """What is wrong with settings that are each within their limits, or None. A device takes what passes here."""
    ids = sampling.bias_ids
    if len(ids) != len(sampling.biases):
        return f"logit_bias: {len(ids)} ids and {len(sampling.biases)} values"
    if ids and max(ids) >= vocab_size:
        return f"logit_bias: id {max(ids)} is outside the vocabulary ({vocab_size} ids)"
    if len(set(ids)) < len(ids):
        return "logit_bias: an id is there twice"
    num_bytes = len(sampling.grammar.encode())
    if num_bytes > GRAMMAR_LIMIT:
        return f"the grammar has {num_bytes} bytes (limit {GRAMMAR_LIMIT})"
    if num_bytes and (sampling.min_tokens or sampling.ignore_eos):
        return "min_tokens, ignore_eos: a grammar alone says where its text may end"
    return None


def find_misfit(
    num_ids: int, generated: int, sampling: Sampling, max_model_tokens: int, vocab_size: int = 2**31
) -> tuple[FailureCode, str] | None:
    """Why a request of these lengths and settings can not be served by any rank, or None."""
    if num_ids == 0 or generated >= num_ids:
        return "bad_request", f"{num_ids} ids, {generated} of them generated"
    if completion_limit(num_ids, generated, sampling.max_tokens, max_model_tokens) <= generated:
        return "too_long", f"{num_ids} ids leave no room for a token (limit {max_model_tokens})"
    unfit = find_unfit_sampling(sampling, vocab_size)
    return None if unfit is None else ("bad_request", unfit)
