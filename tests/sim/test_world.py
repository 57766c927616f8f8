"""The whole cluster on virtual time: what it answers, and that one seed is one run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.sim.faults import Swarm
from engine.sim.play import Outcome, play
from engine.sim.scenario import SMALL_LIMITS, Scenario, draw_scenario
from engine.sim.trace import Trace
from engine.sim.workload import Load
from engine.sim.world import WorldShape

CALM = Scenario(
    "calm",
    1,
    WorldShape(prefill=2, decode=2, limits=SMALL_LIMITS),
    Load(requests=30, clients=2, sample_share=0.5, end_share=0.3, minimum_share=0.3),
)


def check(outcome: Outcome) -> Outcome:
    if outcome.crash is not None:
        raise outcome.crash
    if outcome.violation is not None:
        raise outcome.violation
    return outcome


def test_a_calm_cluster_answers_everything_at_the_first_attempt() -> None:
    outcome = check(play(CALM))
    answers = outcome.answers
    assert answers.outcomes == {"finished": 30}
    assert answers.num_attempts == 30 and answers.num_connections == 2 and not answers.failures
    assert outcome.lives == 4 and outcome.commits == 30 and outcome.landings >= 30
    assert answers.first_token_s.count == 30
    assert answers.between_tokens_s.count + 30 <= answers.num_tokens


@pytest.mark.parametrize("seed", range(8))
def test_drawn_clusters_with_drawn_faults_keep_every_promise(seed: int) -> None:
    check(play(draw_scenario(seed)))


def test_a_lost_decode_rank_costs_a_pause_and_no_token() -> None:
    swarm = Swarm(kinds=("crash",), per_s=1.0, until_s=10.0)
    load = Load(requests=30, arrive_s=8.0, output=(30, 60))
    outcome = check(play(Scenario("crashes", 3, CALM.shape, load, swarm)))
    assert outcome.answers.outcomes == {"finished": 30}
    assert outcome.lives > 8 and outcome.answers.most_attempts > 1
    assert outcome.answers.failures.keys() <= {"rank_lost"}


def digest(seed: int) -> str:
    outcome = play(draw_scenario(seed))
    return f"{outcome.trace.digest} {outcome.trace.num_events} {outcome.virtual_s!r} {outcome.is_good}"


def test_one_seed_is_one_run_in_fresh_processes_with_other_hash_seeds() -> None:
    seeds = (2, 9)
    code = f"from tests.sim.test_world import digest; print([digest(seed) for seed in {seeds}])"
    said = {repr([digest(seed) for seed in seeds])}
    for hash_seed in ("0", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        said.add(done.stdout.strip())
    assert len(said) == 1


def test_traces_of_two_seeds_differ_and_say_where() -> None:
    traces = []
    for seed in (1, 2):
        trace = Trace(keep=True)
        check(play(Scenario("calm", seed, CALM.shape, CALM.load), trace=trace))
        traces.append(trace)
    assert traces[0].first_difference(traces[1]) is not None
    again = Trace(keep=True, show=range(3))
    check(play(CALM, trace=again))
    assert traces[0].first_difference(again) is None and traces[0].digest == again.digest
    assert len(again.shown) == 3 and again.shown[0].startswith("#0 0.000000000 s process.start")
