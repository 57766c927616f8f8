"""Seeds: those that failed once, fresh ones, and a crash at every step of a small run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from engine.sim.play import Outcome, play
from engine.sim.scenario import SMALL_LIMITS, Scenario, draw_scenario
from engine.sim.workload import Load
from engine.sim.world import World, WorldShape

LINES = Path(__file__).with_name("seeds.txt").read_text(encoding="utf-8").splitlines()
SEEDS = [int(line.split()[0]) for line in LINES if not line.startswith("#")]
FRESH_S = float(os.environ.get("ENGINE_TEST_FRESH_S", "15"))
"""Wall seconds for fresh seeds."""
FRESH_MOST = 400


def check(outcome: Outcome) -> None:
    """Raises what went wrong, and says how to see it again."""
    wrong = outcome.violation or outcome.crash
    if wrong is not None:
        wrong.add_note(f"again: {outcome.scenario.replay_line()}")
        raise wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_that_failed_once_passes(seed: int) -> None:
    check(play(draw_scenario(seed)))


def test_fresh_seeds_keep_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    first = int.from_bytes(os.urandom(4), "little")
    began, count = time.monotonic(), 0
    while count < FRESH_MOST and (count < 3 or time.monotonic() - began < FRESH_S):
        check(play(draw_scenario(first + count)))
        count += 1
    with capsys.disabled():
        print(f"\n{count} fresh seeds from {first} in {time.monotonic() - began:.1f} s")


# ---------------------------------------------------------------- a crash at every k-th step

SMALL = Scenario(
    "every step",
    5,
    WorldShape(prefill=1, decode=1, num_pages=32, num_slabs=4, limits=SMALL_LIMITS, start_s=0.01),
    Load(requests=4, arrive_s=0.05, prompt=(20, 70), output=(3, 12), cancel_share=0.25, cancel_s=0.1),
)


TALK = Scenario(
    "every step of turns that are handed back",
    9,
    WorldShape(prefill=1, decode=1, num_pages=40, num_slabs=8, limits=SMALL_LIMITS, start_s=0.01, hand_back=True),
    Load(requests=6, arrive_s=0.1, prompt=(10, 40), output=(4, 12), talk_share=1.0),
)


class Strike(trio.abc.Instrument):
    """Kills a rank's process just before the k-th step of any task; counts steps if there is no k."""

    def __init__(self, rank: int, at: int | None) -> None:
        self.rank, self.at = rank, at
        self.count = 0
        self.world: World | None = None
        self.struck = False

    def meet(self, world: World) -> None:
        self.world = world

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.world is None or not self.world.num_lives:
            return
        self.count += 1
        if self.count == self.at:
            process = self.world.processes.get(self.rank)
            if process is not None:
                process.kill()
            self.struck = True


def count_steps(scenario: Scenario = SMALL) -> int:
    strike = Strike(0, None)
    check(play(scenario, instrument=strike, hook=strike.meet))
    return strike.count


def crash_at(rank: int, step: int, scenario: Scenario = SMALL) -> None:
    strike = Strike(rank, step)
    outcome = play(scenario, instrument=strike, hook=strike.meet)
    assert strike.struck, f"the run was over before step {step}"
    if not outcome.is_good:
        (outcome.violation or outcome.crash).add_note(f"rank {rank} killed before step {step}")  # type: ignore[union-attr]
    check(outcome)


@pytest.mark.parametrize("rank", [0, 1], ids=["prefill", "decode"])
def test_a_crash_at_every_kth_step_costs_nobody_a_token(rank: int) -> None:
    steps = count_steps()
    stride = max(1, steps // 20)
    for step in range(1 + rank * stride // 2, steps, stride):
        crash_at(rank, step)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["prefill", "decode"])
def test_a_crash_at_every_step_costs_nobody_a_token(rank: int) -> None:
    for step in range(1, count_steps()):
        crash_at(rank, step)


@pytest.mark.parametrize("rank", [0, 1], ids=["prefill", "decode"])
def test_a_crash_at_every_kth_step_of_turns_that_are_handed_back(rank: int) -> None:
    worlds: list[World] = []
    check(play(TALK, hook=worlds.append))
    assert worlds[0].auditor.num_turns >= 5
    steps = count_steps(TALK)
    stride = max(1, steps // 20)
    for step in range(1 + rank * stride // 2, steps, stride):
        crash_at(rank, step, TALK)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["prefill", "decode"])
def test_a_crash_at_every_step_of_turns_that_are_handed_back(rank: int) -> None:
    for step in range(1, count_steps(TALK)):
        crash_at(rank, step, TALK)
