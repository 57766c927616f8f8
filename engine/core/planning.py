"""One request to the planner and its answer: where experts should go, and in which order they get there.

Pure, and the slow part of a balancer: tens of milliseconds for a large group, so the head has it done elsewhere
(`engine.planner`).
"""

from __future__ import annotations

import dataclasses

from engine.core.balance import Bill, Floats, Plan, Prices, plan_placement
from engine.core.load import measure_skew
from engine.core.moves import Stage, order_moves
from engine.core.placement import Placement
from engine.core.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        current: the placement in force.
        loads: float64[layers, experts], tokens per step.
        target: where to go, whatever that brings, as a rollback wants it; None lets the planner choose.
        why: the reason that a plan to `target` gives.
    """

    current: Placement
    loads: Floats
    topology: Topology
    prices: Prices
    target: Placement | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedMoves:
    """A plan, and the stages that carry it out; none if nothing moves."""

    plan: Plan
    stages: tuple[Stage, ...]


def plan_moves(request: PlanRequest) -> PlannedMoves:
    """Answers a request.

    Raises:
        ValueError: loads, placements and topology do not belong together, or no slot is spare where one is needed.
    """
    hosts = request.topology.hosts
    if request.target is None:
        plan = plan_placement(request.current, request.loads, request.topology, request.prices)
        return PlannedMoves(plan, order_moves(request.current, plan.target, hosts) if plan.pays else ())
    stages = order_moves(request.current, request.target, hosts)
    return PlannedMoves(_price(request, request.target, stages), stages)


def _price(request: PlanRequest, target: Placement, stages: tuple[Stage, ...]) -> Plan:
    """The bill of a move that is made for another reason than its gain."""
    prices = request.prices
    before, after = (
        measure_skew(placement.sum_rank_loads(request.loads), prices.us_per_token)
        for placement in (request.current, target)
    )
    copies = [copy for stage in stages for copy in stage.copies]
    far = sum(copy.far for copy in copies)
    saved = before.lost_us_per_step - after.lost_us_per_step
    near_us, far_us = (prices.slot_bytes / rate for rate in (prices.link_bytes_per_us, prices.far_bytes_per_us))
    bill = Bill(
        moved_slots=len(copies),
        moved_bytes=len(copies) * prices.slot_bytes,
        far_slots=far,
        saved_us_per_step=saved,
        gain_us=saved * prices.horizon_steps,
        cost_us=(len(copies) - far) * near_us + far * far_us,
        before=before,
        after=after,
    )
    return Plan(target, bill, bool(stages), request.why if stages else "the same experts are on each rank already")
