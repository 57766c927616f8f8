"""Placements: invariants, difference, choice of replicas, plain values."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.placement import EMPTY, Placement, Replica, choose_replica, choose_replicas, diff, lay_out


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    layers, experts, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    slots = -(-layers * experts // ranks) + draw(st.integers(0, 3))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extra = chance.integers(0, layers * experts, int(chance.integers(0, ranks * slots - layers * experts + 1)))
    keys = np.concatenate([np.arange(layers * experts), extra])
    table = np.full(ranks * slots, EMPTY, dtype=np.int32)
    table[chance.permutation(ranks * slots)[: keys.size]] = keys
    return Placement(layers, experts, table.reshape(ranks, slots))


@settings(max_examples=100, deadline=None)
@given(placements())
def test_a_placement_survives_json(placement: Placement) -> None:
    again = Placement.from_plain(json.loads(json.dumps(placement.to_plain())))
    assert again == placement and hash(again) == hash(placement)


@settings(max_examples=100, deadline=None)
@given(placements())
def test_all_views_of_a_placement_agree(placement: Placement) -> None:
    counts, places = placement.build_tables()
    per_rank = placement.count_per_rank()
    np.testing.assert_array_equal(per_rank.sum(axis=2), counts)
    np.testing.assert_array_equal(placement.count_replicas(), counts)
    assert placement.has_doubles() == bool((per_rank > 1).any())
    assert sum(placement.count_empty()) == placement.table.size - counts.sum()
    for layer in range(placement.layers):
        for expert in range(placement.experts):
            found = placement.find_replicas(layer, expert)
            assert len(found) == counts[layer, expert] >= 1
            expected = [rank * placement.slots + slot for rank, slot in found]
            listed = places[layer, expert].tolist()
            assert listed == expected + [expected[0]] * (len(listed) - len(expected))
            assert all(placement.table[place] == layer * placement.experts + expert for place in found)


@settings(max_examples=100, deadline=None)
@given(placements(), st.integers(0, 2**32 - 1))
def test_rank_loads_are_the_replicas_shares_added_one_by_one(placement: Placement, seed: int) -> None:
    loads = np.random.default_rng(seed).exponential(size=(placement.layers, placement.experts))
    expected = np.zeros((placement.layers, placement.ranks))
    for (rank, _), key in np.ndenumerate(placement.table):
        if key != EMPTY:
            layer, expert = divmod(int(key), placement.experts)
            expected[layer, rank] += loads[layer, expert] / len(placement.find_replicas(layer, expert))
    np.testing.assert_allclose(placement.sum_rank_loads(loads), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_difference_leads_from_one_placement_to_the_other(data: st.DataObject) -> None:
    before = data.draw(placements())
    cells = data.draw(st.permutations(range(before.table.size)))
    after = Placement(before.layers, before.experts, before.table.ravel()[cells].reshape(before.table.shape))
    change = diff(before, after)
    counts = before.count_per_rank().copy()
    for replica in change.arrivals:
        counts[replica] += 1
    for replica in change.departures:
        counts[replica] -= 1
    np.testing.assert_array_equal(counts, after.count_per_rank())
    assert not set(change.arrivals) & set(change.departures)
    assert diff(before, before).arrivals == diff(before, before).departures == ()


def test_a_difference_by_hand() -> None:
    before = Placement(1, 3, np.array([[0, 1, -1], [2, 0, -1]], dtype=np.int32))
    after = Placement(1, 3, np.array([[1, -1, 2], [-1, 0, 2]], dtype=np.int32))
    change = diff(before, after)
    assert change.arrivals == (Replica(0, 2, 0),)
    assert change.departures == (Replica(0, 0, 0),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1]], "expert 2 of layer 0 has no slot"),
        ([[0, 1, 2, 3]], "slot 3 of rank 0 holds 3, limit is 3"),
        ([[0, 1], [2, -2]], "slot 1 of rank 1 holds -2"),
    ],
)
def test_a_broken_placement_can_not_be_built(table: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(1, 3, np.array(table, dtype=np.int32))


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"layers": 1, "experts": 1}, "table is missing"),
        ({"layers": 1, "experts": 1, "table": [[0]], "more": 1}, "more is missing or unknown"),
        ({"layers": True, "experts": 1, "table": [[0]]}, "integers"),
        ({"layers": 1, "experts": 1, "table": [[0.0]]}, "list of lists of integers"),
        ({"layers": 1, "experts": 1, "table": [[0], [0, 0]]}, "equal numbers of slots"),
        ({"layers": 1, "experts": 1, "table": [[2**31]]}, "below"),
        ({"layers": 0, "experts": 1, "table": [[0]]}, "places nothing"),
        ({"layers": 1, "experts": 1, "table": []}, "equal numbers"),
    ],
)
def test_plain_values_that_are_no_placement_are_refused(plain: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.from_plain(plain)


def test_a_placement_is_immutable() -> None:
    with pytest.raises(ValueError, match="read-only"):
        lay_out(1, 4, 2, 2).table[0, 0] = 1


@pytest.mark.parametrize(("layers", "experts", "ranks"), [(3, 8, 4), (5, 6, 4), (2, 7, 3), (1, 2, 4), (43, 256, 32)])
def test_the_first_placement_is_even_and_has_no_replicas(layers: int, experts: int, ranks: int) -> None:
    slots = -(-layers * experts // ranks) + 1
    placement = lay_out(layers, experts, ranks, slots)
    assert (placement.count_replicas() == 1).all()
    empty = placement.count_empty()
    assert max(empty) - min(empty) <= 1
    per_layer = placement.count_per_rank().sum(axis=1)
    assert per_layer.max() - per_layer.min() <= 1
    with pytest.raises(ValueError, match="can not hold"):
        lay_out(layers, experts, ranks, layers * experts // ranks - 1)


def test_what_only_lost_ranks_hold_is_found() -> None:
    placement = Placement(2, 2, np.array([[0, 1, -1], [1, 2, 3], [3, -1, 0]], dtype=np.int32))
    assert placement.find_stranded([0]) == ()
    assert placement.find_stranded([1]) == ((1, 0),)
    assert placement.find_stranded([0, 1]) == ((0, 1), (1, 0))


def test_a_rows_replica_is_a_function_of_row_and_expert_alone() -> None:
    chance = np.random.default_rng(5)
    rows, keys, counts = chance.integers(0, 2**40, 500), chance.integers(0, 20_000, 500), chance.integers(1, 40, 500)
    together = choose_replicas(rows, keys, counts)
    order = chance.permutation(500)
    np.testing.assert_array_equal(choose_replicas(rows[order], keys[order], counts[order]), together[order])
    alone = [choose_replica(int(r), int(k), int(c)) for r, k, c in zip(rows, keys, counts, strict=True)]
    np.testing.assert_array_equal(alone, together)
    assert (together >= 0).all() and (together < counts).all()


def test_the_choice_is_the_documented_arithmetic_on_unbounded_integers() -> None:
    chance = np.random.default_rng(6)
    for row, key, count in zip(*chance.integers(1, 2**31, (3, 200)).tolist(), strict=True):
        count = 1 + count % 2**15
        mixed = (row * 0x9E3779B1 + key * 0x85EBCA6B) % 2**32
        mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
        mixed ^= mixed >> 16
        assert choose_replica(row, key, count) == (mixed >> 16) * count >> 16


@pytest.mark.parametrize("count", [2, 3, 7, 32])
def test_rows_spread_evenly_over_replicas(count: int) -> None:
    rows = np.arange(20_000)
    for key in (0, 1, 383, 22_000):
        share = np.bincount(choose_replicas(rows, [key], [count]), minlength=count) / rows.size
        # Six standard deviations of a binomial share.
        assert np.abs(share - 1 / count).max() < 6 * np.sqrt(1 / count / rows.size)


def test_experts_of_one_row_choose_independently() -> None:
    rows = np.arange(20_000)
    first, second = choose_replicas(rows, [10], [2]), choose_replicas(rows, [11], [2])
    assert abs(float((first == second).mean()) - 0.5) < 0.03
