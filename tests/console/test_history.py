"""Series by the second, rates from totals, percentiles from counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.history import Growth, Series, minus, percentile
from transport.messages import LATENCY_BOUNDS_US


def test_a_second_keeps_its_newest_value():
    series = Series()
    series.add(10.1, 1)
    series.add(10.9, 2)
    series.add(12.0, 4)
    assert series.last == 4
    window = series.window(12.5, 4)
    assert math.isnan(window[0]) and window[1] == 2 and math.isnan(window[2]) and window[3] == 4


def test_a_point_does_not_change_when_time_moves_on():
    series = Series()
    for second in range(100):
        series.add(second, second)
    before = series.window(99.5, 10, 5)
    assert before[-1] == 97  # seconds 95 to 99
    series.add(100, 100)
    after = series.window(100.2, 10, 5)
    assert after[:-1] == before[1:] and after[-1] == 100


def test_old_seconds_leave():
    series = Series(keep=3)
    for second in range(5):
        series.add(second, second)
    assert len(series) == 3 and math.isnan(series.window(4.5, 5)[0])


def test_copy_stays():
    series = Series()
    series.add(1, 1)
    kept = series.copy()
    series.add(2, 2)
    assert kept.last == 1


def test_growth_over_two_seconds():
    growth = Growth()
    assert growth.rates() is None
    for n in range(9):
        growth.add(n * 0.5, (n * 10.0, n * 1.0))
    assert growth.rates() == (20.0, 2.0)
    # A burst is spread over the window: that is what it is for.
    growth.add(4.5, (180.0, 9.0))
    assert growth.rates() == (pytest.approx(130 / 2), 2.0)


def test_growth_begins_anew_when_totals_shrink_and_ignores_repeats():
    growth = Growth()
    growth.add(1.0, (100.0,))
    growth.add(2.0, (200.0,))
    growth.add(2.0, (900.0,))
    assert growth.rates() == (100.0,)
    growth.add(3.0, (5.0,))
    assert growth.rates() is None
    growth.add(4.0, (15.0,))
    assert growth.rates() == (10.0,)


@given(st.lists(st.integers(0, 50), min_size=len(LATENCY_BOUNDS_US) + 1, max_size=len(LATENCY_BOUNDS_US) + 1))
def test_percentiles_are_within_their_bucket_and_rise(counts):
    shares = (0.01, 0.5, 0.9, 0.99, 1.0)
    found = [percentile(counts, share) for share in shares]
    if not sum(counts):
        assert all(math.isnan(value) for value in found)
        return
    assert found == sorted(found)
    for share, value in zip(shares, found, strict=True):
        # The bucket that brute force finds.
        n = next(n for n in range(len(counts)) if sum(counts[: n + 1]) >= share * sum(counts))
        high = LATENCY_BOUNDS_US[min(n, len(LATENCY_BOUNDS_US) - 1)]
        low = LATENCY_BOUNDS_US[n - 1] if n else 0
        assert low <= value <= high


def test_counts_of_another_head_count_from_zero():
    assert minus([5, 7], [2, 3]) == [3, 4]
    assert minus([1, 7], [2, 3]) == [1, 7]
    assert minus([1, 2], ()) == [1, 2]
