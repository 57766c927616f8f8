"""Latencies in buckets: what a percentile may lose, what differences keep, and when a limit counts as missed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.latency import NUM_BUCKETS, LatencyCounts, counts_since, percentile_us, sum_us
from engine.core.slo import LEAST_VALUES, MARK_S, WINDOW_S, LatencyWatch
from transport.messages import LATENCY_BOUNDS_US, Counts, TrafficReport
from transport.wire import FrameReader, encode_frame

latencies = st.lists(st.integers(81, LATENCY_BOUNDS_US[-1]), max_size=60)


def counted(values: list[int]) -> LatencyCounts:
    counts = LatencyCounts()
    for value in values:
        counts.add(value)
    return counts


@given(st.lists(latencies, min_size=1, max_size=4), st.floats(0.001, 1.0))
def test_a_percentile_of_merged_counts_is_within_twelve_percent(groups, share):
    values = sorted(value for group in groups for value in group)
    looks = [counted(group).counts() for group in groups]
    merged = [sum(column) for column in zip(*(look for look in looks if look), strict=True)]
    found = percentile_us(merged, share)
    if not values:
        assert found == 0
        return
    truth = values[max(0, math.ceil(share * len(values)) - 1)]
    assert abs(found - truth) <= 0.12 * truth
    assert abs(sum_us(merged) - sum(values)) <= 0.12 * sum(values)


@given(latencies, latencies)
def test_the_difference_of_two_looks_is_what_came_between(before, after):
    counts = counted(before)
    first = counts.counts()
    for value in after:
        counts.add(value)
    assert counts_since(counts.counts(), first) == counted(after).counts()
    assert counts.total == len(before) + len(after)


@pytest.mark.parametrize(("us", "bucket"), [(0, 0), (100, 0), (101, 1), (125, 1), (125.5, 2), (1e12, NUM_BUCKETS - 1)])
def test_a_bound_belongs_to_its_own_bucket(us, bucket):
    counts = LatencyCounts()
    assert counts.counts() == ()
    counts.add(us, 3)
    assert [at for at, count in enumerate(counts.counts()) if count] == [bucket]
    assert counts.counts()[bucket] == 3


def test_counts_fit_the_message_that_carries_them():
    counts: Counts = counted([50, 10**9]).counts()
    report = TrafficReport(*[0] * 12, ttft=counts, itl=(), handoff=counts)
    reader = FrameReader(frozenset({TrafficReport}))
    reader.feed(b"".join(encode_frame(report)))
    frame = reader.next()
    assert frame is not None and frame.message == report and len(counts) == len(LATENCY_BOUNDS_US) + 1


# ---------------------------------------------------------------- limits


class Watched:
    """A limit of 20 ms for 99 %, looked at every second."""

    def __init__(self, limit_us: int = 20_000) -> None:
        self.counts = LatencyCounts()
        self.watch = LatencyWatch("time between tokens, p99,", "slo.itl_p99", 0.99, limit_us, self.counts.counts)
        self.now = 0.0

    def live(self, seconds: int, *, us: int, per_s: int = 10) -> None:
        for _ in range(seconds):
            self.now += 1.0
            if per_s:
                self.counts.add(us, per_s)
            self.watch.mark(self.now)

    def why(self) -> str | None:
        return self.watch.why_missed(self.now)


def test_a_missed_limit_names_the_figure_and_the_limit():
    watched = Watched()
    watched.live(30, us=40_000)
    why = watched.why()
    assert why is not None and why.startswith("time between tokens, p99, is 37 ms")
    assert why.endswith("ms over the last minute, above slo.itl_p99 (20 ms)")


def test_a_limit_is_missed_by_one_value_of_fifty_and_kept_by_one_of_two_hundred():
    watched = Watched()
    watched.counts.add(10_000, 98)
    watched.counts.add(90_000, 2)
    assert watched.why() is not None
    watched.counts.add(10_000, 300)
    assert watched.why() is None


def test_a_miss_is_forgotten_a_minute_after_the_last_one():
    watched = Watched()
    watched.live(100, us=40_000)
    watched.live(int(WINDOW_S) - 1, us=5_000)
    assert watched.why() is not None
    watched.live(int(MARK_S) + 1, us=5_000)
    assert watched.why() is None
    watched.live(1, us=40_000)
    assert watched.why() is not None


def test_a_few_values_say_nothing_and_no_limit_is_never_missed():
    watched = Watched()
    watched.counts.add(40_000, LEAST_VALUES - 1)
    assert watched.why() is None
    watched.counts.add(40_000)
    assert watched.why() is not None
    watched.live(120, us=0, per_s=0)
    assert watched.why() is None
    unlimited = Watched(0)
    unlimited.live(100, us=10**7)
    assert unlimited.why() is None
