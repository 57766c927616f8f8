"""plan_step and apply_result against a naive simulation, over seeds."""

from __future__ import annotations

import random
from array import array

import pytest

from engine.core.handoff import DecodePhase, PrefillPhase
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Prompt, Sequence, completion_limit
from engine.core.schedule import Schedule, StepLimits, apply_result, plan_step
from engine.errors import LocalProtocolError
from transport.messages import ReservePages, Sampling, StartPrefill

EOS = 1


def token_at(request: int, position: int) -> int:
    return random.Random(request * 1_000_003 + position).randrange(1, 40)


def run_device(plan: StepPlan) -> StepResult:
    chunks = tuple(None if c.sample is None else token_at(c.request, c.start + c.num_tokens) for c in plan.chunks)
    return StepResult(plan.step, chunks, tuple(token_at(r.request, r.position + 1) for r in plan.rows), 1)


def make_sequence(request: int, num_ids: int, generated: int, max_tokens: int) -> Sequence:
    reserve = ReservePages(request, 1, 0, num_ids, generated, Sampling(max_tokens=max_tokens))
    limit = completion_limit(num_ids, generated, max_tokens, 10_000)
    sequence = Sequence((request, 1), reserve, limit, 0, request, phase=DecodePhase.RUNNING)
    sequence.count = generated + 1
    sequence.next_token = token_at(request, num_ids)
    return sequence


@pytest.mark.parametrize("seed", range(60))
def test_rows_make_every_token_once_and_stop_at_the_first_end(seed: int) -> None:
    rng = random.Random(seed)
    limits = StepLimits(64, 8, rng.randrange(1, 5), frozenset({EOS}))
    state = Schedule()
    pending = [make_sequence(n, 5 + rng.randrange(20), rng.randrange(4), 4 + rng.randrange(20)) for n in range(12)]
    everything = list(pending)
    got: dict[int, list[int]] = {s.key[0]: [s.next_token] for s in pending}
    ended: dict[int, str] = {}
    submitted: list[StepPlan] = []
    while pending or state.running.sequences or submitted:
        if pending and rng.random() < 0.3:
            sequence = pending.pop()
            if sequence.count >= sequence.limit:
                ended[sequence.key[0]] = "length"
            else:
                state.running.join(sequence)
        before = {row.request for waiting in submitted for row in waiting.rows}
        plan = plan_step(state, limits) if len(submitted) < 2 else None
        if plan is not None:
            assert 0 < len(plan.rows) <= limits.rows
            for row in plan.rows:
                assert (row.token is None) == (row.request in before)
                if row.token is None:
                    # The token is still on the device, so it must be that of the step just before.
                    assert submitted[-1].step == plan.step - 1
                    assert row.request in [r.request for r in submitted[-1].rows]
                else:
                    assert row.token == got[row.request][-1] == token_at(row.request, row.position)
            submitted.append(plan)
        if submitted and (plan is None or rng.random() < 0.5):
            applied = apply_result(state, run_device(submitted.pop(0)), limits)
            rows = applied.rows
            assert rows is not None
            for request, index, token in zip(
                *(c.tolist() for c in (rows.requests, rows.indices, rows.tokens)), strict=True
            ):
                got[request].append(token)
                assert index == everything[request].reserve.generated + len(got[request]) - 1
            for sequence, reason in rows.ended:
                ended[sequence.key[0]] = reason
                sequence.phase = DecodePhase.CLOSED
                state.running.leave(sequence)
            assert all(sequence.steps == 0 for sequence in rows.released)
    for sequence in everything:
        # The naive one: sample one token after the other until the first end id or the limit.
        position, wanted, reason = sequence.reserve.num_ids, [], "length"
        for count in range(sequence.reserve.generated + 1, sequence.limit + 1):
            wanted.append(token_at(sequence.key[0], position))
            position += 1
            if wanted[-1] == EOS and count > sequence.reserve.generated + 1:
                reason = "stop"
                break
        assert (got[sequence.key[0]], ended[sequence.key[0]]) == (wanted, reason)
        assert sequence.steps == 0


@pytest.mark.parametrize("seed", range(60))
def test_chunks_cover_every_prompt_once_in_order_and_in_whole_pages(seed: int) -> None:
    rng = random.Random(seed)
    page_tokens = rng.choice((4, 8))
    limits = StepLimits(page_tokens * rng.randrange(1, 6), page_tokens, 4, frozenset(), prompts=rng.randrange(1, 5))
    state = Schedule()
    prompts = []
    for number in range(10):
        ids = array("i", range(rng.randrange(1, 70)))
        start = StartPrefill(number, 1, 1, 0, Sampling(), 0)
        prompts.append(Prompt((number, 1), 1, phase=PrefillPhase.WORKING, start=start, ids=memoryview(ids.tobytes())))
    waiting = list(prompts)
    submitted: list[StepPlan] = []
    seen: dict[int, list[int]] = {p.key[0]: [] for p in prompts}
    order: list[int] = []
    while waiting or state.prompts or submitted:
        if waiting and rng.random() < 0.5:
            state.prompts.append(waiting.pop(0))
        plan = plan_step(state, limits) if len(submitted) < 2 else None
        if plan is not None:
            assert sum(chunk.num_tokens for chunk in plan.chunks) <= limits.chunk_tokens
            assert len(plan.chunks) <= limits.prompts
            for chunk in plan.chunks:
                assert chunk.start % page_tokens == 0 and chunk.start == len(seen[chunk.request])
                seen[chunk.request] += memoryview(bytes(chunk.tokens)).cast("i").tolist()
                is_last = len(seen[chunk.request]) == prompts[chunk.request].num_ids
                assert (chunk.sample is not None) == is_last
                assert is_last or chunk.num_tokens % page_tokens == 0
                order.append(chunk.request)
            if state.prompts and len(plan.chunks) < limits.prompts:
                # A step that could hold another prompt is left unfilled only by less than a page.
                used = sum(chunk.num_tokens for chunk in plan.chunks)
                assert limits.chunk_tokens - used < page_tokens
            submitted.append(plan)
        if submitted and (plan is None or rng.random() < 0.5):
            applied = apply_result(state, run_device(submitted.pop(0)), limits)
            assert sum(is_last for *_, is_last in applied.chunks) == sum(
                token is not None for _, token, _, _ in applied.chunks
            )
    assert order == sorted(order)
    for prompt in prompts:
        assert seen[prompt.key[0]] == list(range(prompt.num_ids))
        assert prompt.computed == prompt.planned == prompt.num_ids and prompt.steps == 0


def test_a_result_out_of_order_or_of_the_wrong_size_is_a_bug() -> None:
    limits = StepLimits(64, 8, 4, frozenset())
    state = Schedule()
    sequence = make_sequence(1, 5, 0, 9)
    state.running.join(sequence)
    first, second = plan_step(state, limits), plan_step(state, limits)
    assert first is not None and second is not None
    with pytest.raises(LocalProtocolError, match="not the oldest"):
        apply_result(state, run_device(second), limits)
    with pytest.raises(LocalProtocolError, match="a token per row"):
        apply_result(state, StepResult(first.step, (), (1, 2), 1), limits)


def test_nothing_to_compute_is_no_step() -> None:
    state = Schedule()
    assert plan_step(state, StepLimits(64, 8, 4, frozenset())) is None
    assert state.next_step == 1 and not state.flights
