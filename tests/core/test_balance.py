"""The planner: against brute force, against other people's balancer (tests/oracle/eplb), and its promises."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from engine.core.balance import Plan, Prices, pack_placement, plan_placement
from engine.core.placement import EMPTY, Placement, diff, lay_out
from engine.core.topology import Topology

ORACLE = Path(__file__).parents[1] / "oracle" / "eplb"
CASES = load_file(ORACLE / "eplb.safetensors")
MOVES = load_file(ORACLE / "moves.safetensors")
KEYS = sorted({name.rsplit(".", 1)[0] for name in CASES if not name.startswith("loads")})


def price(slot: float, *, far: float | None = None, horizon: float = 1.0) -> Prices:
    """A slot costs `slot` tokens of the largest rank load; a token is worth a microsecond, for `horizon` steps."""
    return Prices(1.0, horizon, 1, 1 / max(slot, 1e-12), 1 / max(slot if far is None else far, 1e-12))


def find_most(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Largest rank load of each layer, as a multiple of the mean."""
    ranks = placement.sum_rank_loads(loads)
    return ranks.max(axis=1) / ranks.mean(axis=1)


# ---------------------------------------------------------------- the oracle


def read_key(key: str) -> tuple[int, int, Topology]:
    """Experts, ranks, and the topology of a key: its rows are layers with slots / ranks slots of each rank."""
    experts, slots, ranks, groups, nodes = (int(part[1:]) for part in key.split("."))
    return experts, ranks, Topology((0,) * ranks, layer_slots=slots // ranks, groups=groups, nodes=nodes)


@pytest.mark.parametrize("key", KEYS)
def test_packing_is_as_even_as_deepseeks(key: str) -> None:
    experts, ranks, topology = read_key(key)
    loads = CASES[f"loads.{experts}"].astype(np.float64)
    layers = len(loads)
    packed = pack_placement(lay_out(layers, experts, ranks, layers * topology.layer_slots), loads, topology)
    check_limits(packed, topology)
    assert not packed.has_doubles()
    most, theirs, bound = (
        find_most(packed, loads),
        CASES[f"{key}.after_max_over_mean"],
        CASES[f"{key}.lower_bound"],
    )
    print(key, "over theirs", (most - theirs).round(4), "over the bound", (most - bound).round(4))
    assert (most <= theirs + 0.002).all()
    assert (most >= bound - 1e-9).all()


@pytest.mark.parametrize("key", KEYS)
def test_moving_reaches_their_balance_with_a_third_of_their_moves(key: str) -> None:
    experts, ranks, topology = read_key(key)
    loads = MOVES[f"loads2.{experts}"].astype(np.float64)
    rows = MOVES[f"{key}.placement"]
    layers = len(rows)
    table = rows.reshape(layers, ranks, -1) + (np.arange(layers) * experts)[:, None, None]
    current = Placement(layers, experts, table.transpose(1, 0, 2).reshape(ranks, -1).astype(np.int32))
    np.testing.assert_allclose(find_most(current, loads), MOVES[f"{key}.stay_max_over_mean"], rtol=1e-6)
    bar, limit = MOVES[f"{key}.moved_max_over_mean"] * 1.02, MOVES[f"{key}.their_moved_slots"] / 3
    reached, moved = np.full(layers, np.inf), np.full(layers, np.inf)
    # Each row is a case of its own, with the dearest of a few prices at which a plan reaches the bar: a share of the
    # mean rank load for as many moves as are allowed.
    for share in (0.2, 0.1, 0.05, 0.025, 0.0125):
        plan = plan_placement(current, loads, topology, price(share * loads[0].sum() / ranks / limit.mean()))
        check_limits(plan.target, topology)
        most = find_most(plan.target, loads)
        count = np.bincount([arrival.layer for arrival in diff(current, plan.target).arrivals], minlength=layers)
        new = (most <= bar) & np.isinf(moved)
        reached[new], moved[new] = most[new], count[new]
    print(key, "of their balance", (reached / bar * 1.02).round(3), "of their moves", (moved / limit / 3).round(3))
    assert (reached <= bar).all()
    assert (moved <= limit).all()


def check_limits(placement: Placement, topology: Topology) -> None:
    held = placement.count_per_rank()
    if topology.layer_slots is not None:
        assert held.sum(axis=1).max() <= topology.layer_slots
    if topology.nodes > 1:
        shape = (placement.layers, topology.groups, -1, topology.nodes, placement.ranks // topology.nodes)
        on_node = held.reshape(shape).any(axis=(2, 4))
        assert (on_node.sum(axis=2) == 1).all()
        assert (on_node.sum(axis=1) == topology.groups // topology.nodes).all()


# ---------------------------------------------------------------- brute force


def list_placements(experts: int, ranks: int, slots: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to hold each expert on a non-empty set of ranks within `slots` slots of each."""
    sets = [s for size in range(1, ranks + 1) for s in itertools.combinations(range(ranks), size)]
    for chosen in itertools.product(sets, repeat=experts):
        used = collections.Counter(rank for ranks_of in chosen for rank in ranks_of)
        if max(used.values()) <= slots:
            yield chosen


def test_tiny_cases_against_every_placement() -> None:
    ratios, nets, bests = [], [], []
    for seed in range(60):
        chance = np.random.default_rng(seed)
        ranks = int(chance.integers(2, 4))
        experts = int(chance.integers(ranks, 6 if ranks == 2 else 5))
        slots = -(-experts // ranks) + int(chance.integers(0, 2))
        loads = chance.lognormal(0, 1, (1, experts)) * 100
        current, topology = lay_out(1, experts, ranks, slots), Topology((0,) * ranks, layer_slots=slots)
        slot_price = float(chance.choice([1, 5, 20]))
        here = current.count_per_rank()[0] > 0
        stay = current.sum_rank_loads(loads).max()
        least, best = np.inf, 0.0
        for chosen in list_placements(experts, ranks, slots):
            sums = np.zeros(ranks)
            moves = 0
            for expert, on in enumerate(chosen):
                for rank in on:
                    sums[rank] += loads[0, expert] / len(on)
                    moves += not here[expert, rank]
            least = min(least, sums.max())
            best = max(best, stay - sums.max() - slot_price * moves)
        ratios.append(pack_placement(current, loads, topology).sum_rank_loads(loads).max() / least)
        plan = plan_placement(current, loads, topology, price(slot_price))
        assert -1e-9 <= plan.bill.net_us <= best + 1e-6
        nets.append(plan.bill.net_us)
        bests.append(best)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05 and np.mean(ratios) <= 1.005
    assert sum(nets) >= 0.85 * sum(bests)


# ---------------------------------------------------------------- promises


@st.composite
def problems(draw: st.DrawFn) -> tuple[Placement, np.ndarray, Topology]:
    """A placement with spare slots, loads that do not fit it, and a topology with or without limits."""
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes = draw(st.sampled_from([1, 1, 1, 2]))
    ranks = nodes * draw(st.integers(1, 4))
    layers, experts = draw(st.integers(1, 4)), 4 * draw(st.integers(1, 6))
    base = -(-experts // ranks)
    hosts = tuple(int(host) for host in chance.integers(0, 2, ranks))
    per_layer = draw(st.booleans())
    spare = draw(st.integers(1, 3))
    topology = Topology(
        hosts,
        reserve_slots=draw(st.integers(0, 1)) if not per_layer else 0,
        layer_slots=base + spare if per_layer else None,
        groups=4 if nodes > 1 else 1,
        nodes=nodes,
    )
    slots = layers * (base + (spare if per_layer else 0)) + (0 if per_layer else spare)
    first = chance.zipf(1.5, (layers, experts)).clip(0, 1000).astype(np.float64)
    current = pack_placement(lay_out(layers, experts, ranks, slots), first, topology)
    loads = first * chance.lognormal(0, draw(st.sampled_from([0.1, 1.0])), first.shape)
    if draw(st.booleans()):
        loads[:, chance.integers(0, experts, 2)] = 0.0
    return current, loads, topology


@settings(max_examples=40, deadline=None)
@given(problems(), st.floats(0, 100))
def test_a_plan_keeps_its_limits_and_its_bill_is_true(
    problem: tuple[Placement, np.ndarray, Topology], slot_price: float
) -> None:
    current, loads, topology = problem
    prices = price(slot_price, far=3 * slot_price, horizon=2.0)
    plan = plan_placement(current, loads, topology, prices)
    check_limits(plan.target, topology)
    assert min(plan.target.count_empty()) >= min(topology.reserve_slots, min(current.count_empty()))
    # The bill, from the placements alone.
    change = diff(current, plan.target)
    host = np.array(topology.hosts)
    here = current.count_per_rank() > 0
    far = sum(not here[a.layer, a.expert, host == host[a.rank]].any() for a in change.arrivals)
    lost = [
        (sums.max(axis=1) - sums.mean(axis=1)).sum()
        for sums in (current.sum_rank_loads(loads), plan.target.sum_rank_loads(loads))
    ]
    assert (plan.bill.moved_slots, plan.bill.far_slots) == (len(change.arrivals), far)
    assert plan.bill.moved_bytes == len(change.arrivals) * prices.slot_bytes
    assert plan.bill.before.lost_us_per_step == pytest.approx(lost[0], abs=1e-6)
    assert plan.bill.after.lost_us_per_step == pytest.approx(lost[1], abs=1e-6)
    assert plan.bill.gain_us == pytest.approx(2 * (lost[0] - lost[1]), abs=1e-6)
    assert plan.bill.cost_us == pytest.approx((len(change.arrivals) + 2 * far) * max(slot_price, 1e-12), abs=1e-6)
    assert plan.bill.net_us >= -1e-6
    assert plan.pays == (plan.target != current) and plan.reason
    # What stays keeps its slot.
    stays = plan.target.table == current.table
    assert len(change.arrivals) == int((~stays & (plan.target.table != EMPTY)).sum())


@settings(max_examples=15, deadline=None)
@given(problems())
def test_dearer_moves_are_fewer_and_a_longer_horizon_saves_no_less(
    problem: tuple[Placement, np.ndarray, Topology],
) -> None:
    current, loads, topology = problem
    plans = [plan_placement(current, loads, topology, price(cost)) for cost in (0, 0.1, 1, 10, 100, 1e9)]
    moved = [plan.bill.moved_slots for plan in plans]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0
    plans = [plan_placement(current, loads, topology, price(10, horizon=steps)) for steps in (0, 0.1, 1, 10, 100, 1e6)]
    for shorter, longer in itertools.pairwise(plans):
        assert longer.bill.saved_us_per_step >= shorter.bill.saved_us_per_step - 1e-6
        assert longer.bill.moved_slots >= shorter.bill.moved_slots
        assert longer.bill.net_us >= shorter.bill.net_us - 1e-6


@settings(max_examples=20, deadline=None)
@given(problems())
def test_packing_keeps_the_limits_and_repeats(
    problem: tuple[Placement, np.ndarray, Topology],
) -> None:
    current, loads, topology = problem
    packed = pack_placement(current, loads, topology)
    check_limits(packed, topology)
    assert not packed.has_doubles()
    assert min(packed.count_empty()) >= topology.reserve_slots
    assert pack_placement(current, loads, topology) == packed


@settings(max_examples=15, deadline=None)
@given(problems(), st.floats(0.01, 10))
def test_planning_is_a_function_of_its_arguments(
    problem: tuple[Placement, np.ndarray, Topology], slot_price: float
) -> None:
    current, loads, topology = problem
    before = loads.copy(), current.table.copy()
    first, second = (plan_placement(current, loads, topology, price(slot_price)) for _ in range(2))
    assert first == second
    np.testing.assert_array_equal(loads, before[0])
    np.testing.assert_array_equal(current.table, before[1])


def test_layers_with_slots_of_their_own_are_planned_independently() -> None:
    chance = np.random.default_rng(7)
    loads = chance.lognormal(0, 1, (4, 16))
    topology = Topology((0,) * 4, layer_slots=5)
    together = plan_placement(lay_out(4, 16, 4, 20), loads, topology, price(0.01))
    for layer in range(4):
        alone = plan_placement(lay_out(1, 16, 4, 5), loads[layer : layer + 1], topology, price(0.01))
        np.testing.assert_array_equal(alone.target.count_per_rank()[0], together.target.count_per_rank()[layer])


def test_spare_slots_go_to_the_layer_that_needs_them() -> None:
    loads = np.ones((3, 8))
    loads[1, 2] = 40.0
    plan = plan_placement(lay_out(3, 8, 4, 7), loads, Topology((0,) * 4), price(0.0))
    counts = plan.target.count_replicas()
    assert counts[1, 2] == 4 and counts[[0, 2]].sum() == 16
    assert plan.bill.after.lost_us_per_step < 0.1 * plan.bill.before.lost_us_per_step


def test_a_replica_on_the_same_host_is_cheaper_than_one_between_hosts() -> None:
    loads = np.array([[12.0, 4.0, 6.0, 2.0]])
    current = Placement(1, 4, np.array([[0, 1, EMPTY], [2, 3, EMPTY]], dtype=np.int32))
    near = plan_placement(current, loads, Topology((0, 0)), price(1.0, far=50.0))
    far = plan_placement(current, loads, Topology((0, 1)), price(1.0, far=50.0))
    assert near.pays and near.bill.moved_slots > 0 and near.bill.far_slots == 0
    assert not far.pays and far.target is current


# ---------------------------------------------------------------- words and errors


def plan_even(loads: list[float], slot_price: float) -> Plan:
    current = Placement(1, 4, np.array([[0, 1, EMPTY], [2, 3, EMPTY]], dtype=np.int32))
    return plan_placement(current, np.array([loads]), Topology((0, 0)), price(slot_price))


def test_the_reason_says_why_nothing_moves() -> None:
    assert plan_even([1, 1, 1, 1], 1.0).reason == "nothing is lost to skew under these loads"
    assert plan_even([0, 0, 0, 0], 1.0).reason == "nothing is lost to skew under these loads"
    dear = plan_even([5, 1, 1, 1], 100.0)
    assert not dear.pays and dear.bill.moved_slots == 0
    assert "moves do not pay" in dear.reason and "2.0 us per step are lost" in dear.reason
    full = Placement(1, 2, np.array([[0], [1]], dtype=np.int32))
    stuck = plan_placement(full, np.array([[5.0, 1.0]]), Topology((0, 0)), price(0.0))
    assert "no move found lowers" in stuck.reason


def test_the_reason_says_what_a_plan_costs_and_saves() -> None:
    plan = plan_even([5, 1, 1, 1], 0.5)
    assert plan.pays and plan.bill.moved_slots == 1
    assert plan.reason.startswith("moving 1 slots (0.0 MB, 0 between hosts) costs") and "saves" in plan.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": (0,)}, "1 hosts for 2 ranks"),
        ({"groups": 3}, "3 groups"),
        ({"nodes": 2, "groups": 2}, "several nodes"),
        ({"layer_slots": 1}, "layer_slots is 1"),
    ],
)
def test_a_topology_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    current = Placement(1, 4, np.array([[0, 2, EMPTY], [1, 3, EMPTY]], dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        plan_placement(current, np.ones((1, 4)), Topology(**{"hosts": (0, 0), **change}), price(1.0))


def test_loads_that_make_no_sense_are_refused() -> None:
    current = lay_out(1, 4, 2, 3)
    for loads in (np.ones((2, 4)), np.full((1, 4), np.nan), np.full((1, 4), -1.0)):
        with pytest.raises(ValueError, match="loads"):
            plan_placement(current, loads, Topology((0, 0)), price(1.0))
    with pytest.raises(ValueError, match="above 0"):
        Prices(1.0, 1.0, 1, 0.0, 1.0)
    with pytest.raises(ValueError, match="can not hold"):
        pack_placement(current, np.ones((1, 4)), Topology((0, 0), reserve_slots=2))


# ---------------------------------------------------------------- speed


@pytest.mark.parametrize("layer_slots", [13, None])
def test_planning_a_rack_takes_well_under_a_second(layer_slots: int | None) -> None:
    """The goal is 50 ms on a quiet machine (printed); asserted is only what a busy one keeps too."""
    layers, experts, ranks, slots = 60, 384, 32, 416
    chance = np.random.default_rng(0)
    loads = chance.permuted(np.tile(1 / np.arange(1, experts + 1) ** 0.8, (layers, 1)), axis=1)
    loads *= 6 * 4096 / loads.sum(axis=1, keepdims=True)
    topology = Topology(tuple(rank // 8 for rank in range(ranks)), 0 if layer_slots else 4, layer_slots)
    first = lay_out(layers, experts, ranks, layers * slots // ranks)
    packed = pack_placement(first, loads, topology)
    drifted = loads * chance.lognormal(0, 0.1, loads.shape)
    prices = Prices(0.05, 20_000, 20_000_000, 300_000, 50_000)
    for name, current, now in (("drift", packed, drifted), ("from scratch", first, loads)):
        taken = []
        for _ in range(5):
            begin = time.perf_counter()
            plan = plan_placement(current, now, topology, prices)
            taken.append(time.perf_counter() - begin)
        print(f"{name}, layer_slots {layer_slots}: min {min(taken) * 1e3:.1f} ms; {plan.reason}")
        assert plan.pays and plan.bill.after.balancedness > plan.bill.before.balancedness
        assert min(taken) < 1
