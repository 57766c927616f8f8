"""Running with drafts against a plain model: texts as lists of tokens, and a device that knows its own lengths."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.handoff import DecodePhase
from engine.core.plan import Scores, StepPlan, StepResult
from engine.core.request import Sequence, completion_limit, judge_token
from engine.core.running import Running
from engine.core.schedule import Schedule, StepLimits, apply_result, plan_step
from engine.errors import LocalProtocolError
from transport.messages import ReservePages, Sampling

EOS = 1


def token_at(request: int, position: int, *, allows_end: bool = True) -> int:
    token = random.Random(request * 1_000_003 + position).randrange(1, 25)
    return token if allows_end or token != EOS else 24


def make_sequence(request: int, num_ids: int, generated: int, sampling: Sampling) -> Sequence:
    reserve = ReservePages(request, 1, request % 3, num_ids, generated, sampling)
    limit = completion_limit(num_ids, generated, sampling.max_tokens, 10_000)
    sequence = Sequence((request, 1), reserve, limit, 0, request, phase=DecodePhase.RUNNING, sampling=sampling)
    sequence.slab, sequence.prefill_generation = request, 1
    sequence.count, sequence.next_token = generated + 1, token_at(request, num_ids, allows_end=False)
    return sequence


class Device:
    """Computes plans in order; what it keeps of a slab is where it stands and how many drafts wait."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.stands: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.seen: collections.Counter[str] = collections.Counter()

    def run(self, plan: StepPlan) -> StepResult:
        tokens: list[int] = []
        counts: list[int] = []
        proposed: list[int] = []
        columns = plan.columns
        ends = columns.roster.ends
        for at, row in enumerate(plan.rows):
            stand = self.stands.get(row.slab)
            assert row.position >= 0 or (stand is not None and row.token is None)
            position = row.position if row.position >= 0 else self.stands[row.slab]
            assert stand in (None, position), "the host named a place where the slab does not stand"
            if row.token is not None:
                assert position == row.position
            end = 1 << 30 if ends is None else int(ends[at])
            if position >= end:
                assert position == end
                counts.append(0)
                proposed.append(0)
                self.seen["nothing"] += 1
                continue
            held = min(plan.drafts, self.waiting.get(row.slab, 0), end - 1 - position)
            if row.sampling.min_tokens:
                held = 0
            accepted = self.rng.randint(0, held) if held else 0
            new = [token_at(row.request, position + 1 + n, allows_end=not row.sampling.min_tokens) for n in
                   range(accepted + 1)]  # fmt: skip
            tokens += new
            counts.append(len(new))
            proposed.append(held)
            self.seen["several"] += accepted > 0
            self.stands[row.slab] = position + len(new)
            self.waiting[row.slab] = plan.drafts
        is_told = plan.drafts > 0 or bool((columns.positions < 0).any())
        rows = np.arange(len(tokens), dtype=np.int64)
        scores = Scores(
            rows, np.array(tokens, np.float32), np.ones(len(tokens), np.int32), np.zeros(len(tokens), np.int32),
            np.zeros(0, np.int32), np.zeros(0, np.float32),
        )  # fmt: skip
        if not is_told:
            return StepResult(plan.step, (), tuple(tokens), 1, row_scores=scores)
        return StepResult(
            plan.step, (), tuple(tokens), 1, row_scores=scores, row_counts=tuple(counts), row_proposed=tuple(proposed)
        )


def expect(sequence: Sequence) -> tuple[list[int], str]:
    """The text without drafts, token after token."""
    sampling, tokens = sequence.reserve.sampling, [sequence.next_token]
    count, position = sequence.reserve.generated + 1, sequence.reserve.num_ids
    while (reason := judge_token(tokens[-1], count, sequence.limit, sampling, {EOS})) is None:
        position, count = position + 1, count + 1
        tokens.append(token_at(sequence.key[0], position, allows_end=count > sampling.min_tokens))
    return tokens, reason


@given(
    seed=st.integers(0, 2**32), drafts=st.integers(1, 7), most=st.integers(1, 5), draft_rows=st.integers(1, 5),
    cancels=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_texts_are_those_without_drafts(seed: int, drafts: int, most: int, draft_rows: int, cancels: bool) -> None:
    rng = random.Random(seed)
    limits = StepLimits(64, 8, most, frozenset({EOS}), drafts=drafts, draft_rows=draft_rows)
    state = Schedule(running=Running(drafts, draft_rows))
    device = Device(rng)
    pending = []
    for number in range(8):
        stops = (rng.randrange(2, 25),) if rng.random() < 0.3 else ()
        minimum = rng.choice((0, 0, 3, 9))
        sampling = Sampling(max_tokens=max(minimum, 3) + rng.randrange(20), stop_ids=stops, min_tokens=minimum)
        if rng.random() < 0.2:
            sampling = Sampling(max_tokens=20, ignore_eos=True)
        pending.append(make_sequence(number, 3 + rng.randrange(9), rng.randrange(2), sampling))
    everything, released = list(pending), 0
    got = {sequence.key[0]: [sequence.next_token] for sequence in everything}
    ended: dict[int, str] = {}
    left: set[int] = set()
    submitted: list[StepPlan] = []
    while pending or state.running.sequences or submitted:
        if pending and rng.random() < 0.3:
            sequence = pending.pop()
            reason = judge_token(sequence.next_token, sequence.count, sequence.limit, sequence.reserve.sampling, {EOS})
            if reason is not None:
                ended[sequence.key[0]] = reason
            else:
                state.running.join(sequence)
        if cancels and state.running.sequences and rng.random() < 0.05:
            sequence = rng.choice(list(state.running.sequences.values()))
            named = sum(sequence.key[0] in [row.request for row in plan.rows] for plan in submitted)
            state.running.leave(sequence)
            assert sequence.steps == named
            left.add(sequence.key[0])
        plan = plan_step(state, limits) if len(submitted) < 2 else None
        if plan is not None:
            assert plan.drafts == (drafts if len(plan.rows) <= draft_rows else 0)
            submitted.append(plan)
        if submitted and (plan is None or rng.random() < 0.5):
            rows = apply_result(state, device.run(submitted.pop(0)), limits).rows
            assert rows is not None
            counts = np.ones(len(rows.requests), int) if rows.counts is None else rows.counts
            assert counts.sum() == len(rows.tokens) and (counts > 0).all()
            assert rows.scores is not None
            assert rows.scores.rows.tolist() == list(range(len(rows.tokens)))
            assert rows.scores.logprobs.tolist() == rows.tokens.tolist()
            at = 0
            columns = (rows.requests.tolist(), rows.indices.tolist(), counts.tolist())
            for request, index, count in zip(*columns, strict=True):
                assert index == everything[request].reserve.generated + len(got[request])
                got[request] += rows.tokens[at : at + count].tolist()
                at += count
            for sequence, reason in rows.ended:
                named = sum(sequence.key[0] in [row.request for row in plan.rows] for plan in submitted)
                state.running.leave(sequence)
                assert sequence.count == sequence.reserve.generated + len(got[sequence.key[0]])
                assert sequence.steps == named
                ended[sequence.key[0]] = reason
            assert all(sequence.steps == 0 for sequence in rows.released)
            released += len(rows.released)
    for sequence in everything:
        wanted, reason = expect(sequence)
        number = sequence.key[0]
        if number in left and number not in ended:
            assert got[number] == wanted[: len(got[number])]
        else:
            assert (got[number], ended[number]) == (wanted, reason)
        assert sequence.steps == 0
    counts = state.running.drafted.counts()
    assert counts.accepted <= counts.proposed and sum(counts.accepted_at) == counts.accepted


def test_rows_at_their_end_bring_nothing_and_several_tokens_come() -> None:
    """The property above would hold if nobody ever drafted: this says that it is not so."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(20):
        limits = StepLimits(64, 8, 4, frozenset(), drafts=3, draft_rows=4)
        state, device = Schedule(running=Running(3, 4)), Device(random.Random(seed))
        for number in range(4):
            state.running.join(make_sequence(number, 5, 0, Sampling(max_tokens=12)))
        submitted: list[StepPlan] = []
        while state.running.sequences or submitted:
            while len(submitted) < 2 and (plan := plan_step(state, limits)) is not None:
                submitted.append(plan)
            rows = apply_result(state, device.run(submitted.pop(0)), limits).rows
            assert rows is not None
            for sequence, _ in rows.ended:
                state.running.leave(sequence)
        seen += device.seen
    assert seen["several"] > 100 and seen["nothing"] > 5


def test_places_are_the_devices_to_know_only_while_a_step_with_drafts_is_under_way() -> None:
    state = Schedule(running=Running(3, 1))
    limits = StepLimits(64, 8, 4, frozenset(), drafts=3, draft_rows=1)
    state.running.join(make_sequence(0, 5, 0, Sampling(max_tokens=40)))
    first, second = plan_step(state, limits), plan_step(state, limits)
    assert first is not None and second is not None
    assert (first.drafts, second.drafts) == (3, 3)
    assert first.columns.positions.tolist() == [5] and second.columns.positions.tolist() == [-1]
    assert first.columns.roster.ends is not None and first.columns.roster.ends.tolist() == [44]
    state.running.join(make_sequence(1, 7, 0, Sampling(max_tokens=40)))
    apply_result(state, StepResult(1, (), (9, 9, 9), 1, row_counts=(3,), row_proposed=(3,)), limits)
    third = plan_step(state, limits)
    assert third is not None and third.drafts == 0  # two rows are more than draft_rows
    assert third.columns.positions.tolist() == [-1, 7]
    apply_result(state, StepResult(2, (), (9, 9), 1, row_counts=(2,), row_proposed=(3,)), limits)
    fourth = plan_step(state, limits)
    assert fourth is not None
    assert fourth.columns.positions.tolist() == [5 + 5 + 1, 8]  # nothing under way may bring more than a token
    assert fourth.columns.tokens.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "tokens, counts, proposed",
    [((9, 9), (1,), (3,)), ((9,), (1, 0), (0, 0)), ((9, 9, 9), (3,), (1,)), ((), (0,), (0,)), ((9,), (1,), (0, 0))],
)
def test_counts_that_can_not_be_are_a_bug(
    tokens: tuple[int, ...], counts: tuple[int, ...], proposed: tuple[int, ...]
) -> None:
    state = Schedule(running=Running(3, 4))
    limits = StepLimits(64, 8, 4, frozenset(), drafts=3, draft_rows=4)
    state.running.join(make_sequence(0, 5, 0, Sampling(max_tokens=40)))
    assert plan_step(state, limits) is not None
    with pytest.raises(LocalProtocolError):
        apply_result(state, StepResult(1, (), tokens, 1, row_counts=counts, row_proposed=proposed), limits)
