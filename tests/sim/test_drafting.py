"""Drafting in simulated worlds: who drafts, that it happens, that a seed stays one run, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.sim.drafting import Drafting, draw_drafts
from engine.sim.play import Outcome, play
from engine.sim.scenario import SMALL_LIMITS, Scenario, draw_scenario, load_scenario
from engine.sim.trace import Trace
from engine.sim.workload import Load
from engine.sim.world import World, WorldShape
from transport.messages import DraftCounts

CALM = Scenario(
    "calm",
    1,
    WorldShape(prefill=2, decode=2, limits=SMALL_LIMITS, eos_share=0.02, drafts=3, draft_share=0.7),
    Load(requests=30, clients=2, sample_share=0.5, end_share=0.3, minimum_share=0.3),
)


def check(outcome: Outcome) -> Outcome:
    wrong = outcome.violation or outcome.crash
    if wrong is not None:
        raise wrong
    return outcome


def test_a_third_of_the_seeds_draft_and_nothing_else_of_them_changes() -> None:
    drafting = 0
    for seed in range(300):
        shape = draw_scenario(seed).shape
        plain = dataclasses.replace(shape, drafts=0, draft_share=0.7, draft_rows=32)
        assert draw_drafts(plain, seed) == shape
        drafting += shape.drafts > 0
    assert 70 < drafting < 130
    for name in ("small", "storm", "groups"):
        assert {load_scenario(name, seed).shape.drafts > 0 for seed in range(12)} == {True, False}
    assert all(load_scenario(name, seed).shape.drafts == 0 for name in ("rack", "skew", "handoff") for seed in range(6))


def test_texts_come_out_right_and_the_head_knows_of_drafts() -> None:
    told: list[DraftCounts] = []

    def look(world: World) -> None:
        assert world.report is not None
        told.append(world.report().drafted)

    check(play(CALM, hook=lambda world: world.clock.at(1.5, look, world)))
    (drafted,) = told
    assert drafted.rows > 50
    assert 0.4 < drafted.accepted / drafted.proposed < 0.7


def test_a_seed_that_drafts_is_one_run() -> None:
    seed = next(seed for seed in range(100) if draw_scenario(seed).shape.drafts)
    first, second = Trace(), Trace()
    check(play(draw_scenario(seed), trace=first))
    check(play(draw_scenario(seed), trace=second))
    assert first.digest == second.digest


@pytest.mark.parametrize("seed", range(6))
def test_groups_that_draft_keep_every_promise(seed: int) -> None:
    scenario = load_scenario("groups", seed)
    shape = dataclasses.replace(scenario.shape, drafts=1 + seed, draft_share=0.7, draft_rows=3)
    check(play(dataclasses.replace(scenario, shape=shape)))


def test_what_holds_is_a_function_of_request_and_place() -> None:
    drafting, rng = Drafting(4, 0.6), random.Random(1)
    for _ in range(200):
        request, position, held = rng.randrange(1 << 40), rng.randrange(1000), rng.randrange(1, 8)
        accepted = drafting.accepted(request, position, held)
        assert 0 <= accepted <= held
        # However they are cut into steps, the same places hold.
        assert drafting.accepted(request, position, accepted) == accepted
        if accepted:
            assert drafting.accepted(request, position + 1, held) >= accepted - 1
    drafting.propose(2, 10, 3)
    assert drafting.proposed(2, 10) == 3 and drafting.proposed(2, 11) == 0 and drafting.proposed(1, 10) == 0
    drafting.forget(2)
    assert drafting.proposed(2, 10) == 0
