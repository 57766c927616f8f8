"""Load windows and the figures of skew."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.load import Loads, LoadWindow, add_ranks, measure_skew


def count(*layers: list[int], steps: int = 10) -> Loads:
    return Loads(np.array(layers, dtype=np.int64), steps)


def test_a_window_of_constant_traffic_gives_its_rate_at_once() -> None:
    window = LoadWindow(1, 3, fast_steps=4, slow_steps=100)
    assert not window.expected().any()
    for _ in range(5):
        window.add(count([50, 30, 0]))
        np.testing.assert_allclose(window.fast(), [[5, 3, 0]])
        np.testing.assert_allclose(window.slow(), [[5, 3, 0]])


@pytest.mark.parametrize("half_life", [8.0, 64.0])
def test_counts_of_one_half_life_ago_weigh_half(half_life: float) -> None:
    window = LoadWindow(1, 2, fast_steps=half_life, slow_steps=half_life)
    window.add(count([100, 0], steps=1))
    window.add(count([0, 0], steps=int(half_life) - 1))
    window.add(count([0, 100], steps=1))
    fast = window.fast()[0]
    assert fast[0] / fast[1] == pytest.approx(0.5)


def test_the_slow_half_life_remembers_what_the_fast_one_forgot() -> None:
    window = LoadWindow(1, 2, fast_steps=10, slow_steps=1000)
    for _ in range(20):
        window.add(count([100, 0]))
    for _ in range(5):
        window.add(count([0, 100]))
    assert window.fast()[0, 1] > 9 and window.slow()[0, 1] < 3
    assert window.total_steps == 250


def test_a_change_of_traffic_is_believed_layer_by_layer() -> None:
    window = LoadWindow(2, 4, fast_steps=20, slow_steps=2000)
    chance = np.random.default_rng(3)
    even, skewed = [0.25] * 4, [0.85, 0.05, 0.05, 0.05]
    for turn in range(200):
        second = even if turn < 160 else skewed
        window.add(Loads(np.stack([chance.multinomial(400, even), chance.multinomial(400, second)]), 10))
    drift = window.measure_drift()
    assert drift[0] < 0.03 < 0.3 < drift[1]
    np.testing.assert_array_equal(window.expected()[0], window.slow()[0])
    np.testing.assert_array_equal(window.expected()[1], window.fast()[1])


def test_noise_of_few_counts_is_not_taken_for_drift() -> None:
    chance = np.random.default_rng(4)
    believed = 0
    for _ in range(50):
        window = LoadWindow(1, 64, fast_steps=2, slow_steps=200)
        for _ in range(100):
            window.add(Loads(chance.multinomial(40, [1 / 64] * 64)[None], 1))
        believed += int(window.measure_drift()[0] > 0.1)
    assert believed <= 2


def test_loads_of_ranks_add_up_over_the_same_steps() -> None:
    total = add_ranks([count([1, 2]), count([3, 4])])
    assert total.counts.tolist() == [[4, 6]] and total.steps == 10
    with pytest.raises(ValueError, match="different layers or experts"):
        add_ranks([count([1, 2]), count([1, 2, 3])])


def test_what_is_not_a_load_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        count([1, -1])
    with pytest.raises(ValueError, match="negative"):
        count([1], steps=-1)
    with pytest.raises(ValueError, match="int64"):
        Loads(np.zeros((1, 2)), 1)
    with pytest.raises(ValueError, match="fast comes first"):
        LoadWindow(1, 1, fast_steps=5, slow_steps=4)
    with pytest.raises(ValueError, match="window of"):
        LoadWindow(1, 2).add(count([1, 2, 3]))
    with pytest.raises(ValueError, match="read-only"):
        count([1, 2]).counts[0, 0] = 5


def test_skew_by_hand() -> None:
    # Layer 0: mean 10, max 16. Layer 1: mean 4, max 8: the worse one, on rank 1.
    skew = measure_skew(np.array([[16.0, 4.0], [0.0, 8.0]]), us_per_token=0.5)
    assert skew.balancedness == pytest.approx(14 / 24)
    assert skew.imbalance == pytest.approx(1.0)
    assert skew.lost_us_per_step == pytest.approx(0.5 * (6 + 4))
    assert (skew.layer, skew.rank) == (1, 1)


def test_no_load_is_no_skew() -> None:
    skew = measure_skew(np.zeros((2, 3)), us_per_token=1.0)
    assert (skew.balancedness, skew.imbalance, skew.lost_us_per_step) == (1.0, 0.0, 0.0)


def test_even_ranks_have_no_skew_and_more_skew_is_worse_in_all_three_figures() -> None:
    before = measure_skew(np.full((3, 4), 7.0), 1.0)
    assert before.imbalance == before.lost_us_per_step == 0.0 and before.balancedness == 1.0
    for extra in (1.0, 2.0, 4.0):
        loads = np.full((3, 4), 7.0)
        loads[1] += [extra, -extra, 0, 0]
        after = measure_skew(loads, 1.0)
        assert after.balancedness < before.balancedness
        assert after.imbalance > before.imbalance
        assert after.lost_us_per_step > before.lost_us_per_step
        before = after
