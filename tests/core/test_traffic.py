"""Intervals between tokens by frames, against the same thing row by row."""

from __future__ import annotations

import random

import pytest

from engine.core.latency import LatencyCounts
from engine.core.traffic import Traffic, Turns
from transport.messages import RequestFinished, RequestStarted, Timings


def start(traffic: Traffic, turns: Turns, number: int, accepted_at: float | None = None) -> None:
    traffic.note_start(turns, number, RequestStarted(number, 1, 10, 4, 0, 1, 0, 0, 0, Timings()), accepted_at)


@pytest.mark.parametrize("seed", range(60))
def test_counts_are_those_of_every_row_that_was_in_the_turn_before(seed):
    """A rank whose steps have all its rows, with starts beside steps and between them, ends, and idle times."""
    rng = random.Random(seed)
    traffic, turns = Traffic(), Turns()
    intervals, first_waits = LatencyCounts(), LatencyCounts()
    token_at: dict[int, float] = {}  # of each request that runs: when its last token came
    late: set[int] = set()  # those whose first token came since the last turn
    now, turn_at, number, tokens = 0.0, 0.0, 0, 0
    for _ in range(300):
        now += rng.choice((0.001, 0.004, 0.03, 2.0)) * (1 + rng.random())
        has_step = bool(token_at) and rng.random() < 0.7
        fresh = list(range(number + 1, number + 1 + (rng.randrange(3) if rng.random() < 0.4 else 0)))
        number += len(fresh)
        for one in fresh:
            accepted_at = now - rng.random() if rng.random() < 0.8 else None
            start(traffic, turns, one, accepted_at)
            if accepted_at is not None:
                first_waits.add(1e6 * (now - accepted_at))
        rows = len(fresh)
        if has_step:
            for one, at in token_at.items():
                intervals.add(1e6 * (now - (turn_at if one in late else at)))
            token_at = dict.fromkeys(token_at, now)
            rows += len(token_at)
        if has_step or not token_at:
            turn_at = now
            late.clear()
        else:
            late.update(fresh)
        token_at.update(dict.fromkeys(fresh, now))
        if rows:
            tokens += rows
            traffic.note_turn(turns, rows, now)
            traffic.generated_tokens += rows
        for ended in [one for one in token_at if rng.random() < 0.1]:
            del token_at[ended]
            turns.streams.discard(ended)
    report = traffic.report(now, waiting=0, waiting_tokens=0, running=len(token_at))
    assert report.itl == intervals.counts() and sum(report.itl) > 30
    assert report.ttft == first_waits.counts() and sum(report.ttft) > 10
    assert (report.generated_tokens, report.prompt_tokens, report.cached_tokens) == (tokens, 10 * number, 4 * number)


def test_a_first_token_between_two_turns_moves_no_clock():
    traffic, turns = Traffic(), Turns()
    start(traffic, turns, 1)
    traffic.note_turn(turns, 1, 1.0)
    traffic.note_turn(turns, 1, 1.020)
    start(traffic, turns, 2)
    traffic.note_turn(turns, 1, 1.035)
    traffic.note_turn(turns, 2, 1.040)
    expected = LatencyCounts()
    expected.add(20_000, 3)
    assert traffic.itl.counts() == expected.counts()


def test_an_idle_rank_has_no_interval():
    traffic, turns = Traffic(), Turns()
    start(traffic, turns, 1)
    traffic.note_turn(turns, 1, 1.0)
    traffic.note_turn(turns, 1, 1.020)
    turns.streams.discard(1)
    start(traffic, turns, 2)
    traffic.note_turn(turns, 1, 50.0)
    traffic.note_turn(turns, 1, 50.020)
    expected = LatencyCounts()
    expected.add(20_000, 2)
    assert traffic.itl.counts() == expected.counts()


def test_a_request_that_needed_no_step_has_no_handoff():
    traffic = Traffic()
    traffic.note_finish(RequestFinished(1, 1, "stop", 1, 0))
    traffic.note_finish(RequestFinished(2, 1, "stop", 5, 700))
    assert traffic.finished == 2 and sum(traffic.handoff.counts()) == 1
