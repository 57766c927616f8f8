"""vary: a scenario with groups as each seed draws it anew: which faults, operators, links and sizes it has."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sim.scenario import Scenario


def vary(scenario: Scenario) -> Scenario:
    """The same scenario with some of its fault kinds, at its own rates and sizes. A function of its seed."""
    rng = random.Random(f"variety {scenario.seed}")
    shape, swarm, operators = scenario.shape, scenario.swarm, scenario.operators
    assert shape.experts is not None
    limits = dataclasses.replace(shape.limits, idle_steps=rng.choice((1, 3, 8, 40)))
    experts = dataclasses.replace(
        shape.experts,
        draft_layers=rng.choice((0, 0, 1)),
        draft_experts=rng.choice((4, 7)),
        experts=rng.choice((6, 8, 11, 40)),
        spare_slots=rng.choice((1, 2, 4, 24)),
        mode=rng.choice(("manual", "manual", "auto")),
        max_bytes_per_step=rng.choice((1 << 20, 4 << 20, 1 << 30)),
        link_bytes_per_s=rng.choice((5e7, 1e9, 300e9)),
        load_bytes_per_s=rng.choice((1e8, 5e9)),
        zipf=rng.choice((0.8, 1.5)),
        flip_s=rng.choice((0.0, 3.0)),
    )
    shape = dataclasses.replace(
        shape,
        limits=limits,
        experts=experts,
        eos_share=rng.choice((0.0, 0.05)),
        link_latency_s=rng.choice((0.0, 50e-6, 5e-3)),
        fabric_latency_s=rng.choice((0.0, 20e-6, 20e-3)),
    )
    is_calm = rng.random() < 0.2
    swarm = dataclasses.replace(
        swarm,
        kinds=() if is_calm else tuple(kind for kind in swarm.kinds if rng.random() < 0.5),
        per_s=swarm.per_s * rng.choice((0.3, 1.0, 3.0)),
        most_s=rng.choice((0.1, 1.0, 5.0)),
    )
    operators = dataclasses.replace(operators, per_s=operators.per_s * rng.choice((0.0, 0.5, 1.0, 3.0)))
    load = dataclasses.replace(scenario.load, arrive_s=rng.choice((0.5, 6.0, swarm.until_s)))
    signals = (rng.random() * swarm.until_s,) if rng.random() < 0.1 else ()
    return dataclasses.replace(scenario, shape=shape, swarm=swarm, operators=operators, load=load, signals=signals)
