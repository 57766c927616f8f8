"""Ways to hand KV over, on the same cluster and load: who waits for how much of the wire."""

from __future__ import annotations

import dataclasses

from engine.sim.play import play
from engine.sim.scenario import load_scenario


def handoff_ms(way: str) -> tuple[float, float]:
    base = load_scenario("handoff", 1)
    shape = dataclasses.replace(base.shape, handoff=way, fabric_bytes_per_s=1e9)  # type: ignore[arg-type]
    load = dataclasses.replace(base.load, requests=12, arrive_s=3.0, output=(5, 10))
    outcome = play(dataclasses.replace(base, shape=shape, load=load))
    assert outcome.is_good, outcome.violation or outcome.crash
    assert outcome.answers.outcomes == {"finished": 12} and outcome.answers.num_attempts == 12
    return outcome.answers.handoff_s.percentile(0.5) * 1e3, outcome.answers.first_token_s.percentile(0.5) * 1e3


def test_pushing_while_the_prompt_is_computed_hides_the_wire() -> None:
    chunks, end, pull = (handoff_ms(way) for way in ("chunks", "end", "pull"))
    assert chunks[0] * 2 < end[0] <= pull[0]
    assert chunks[1] < end[1]
