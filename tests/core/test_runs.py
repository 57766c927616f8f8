"""Runs against plain lists of the same numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.pages import PagePool, PageState
from engine.core.runs import NO_UNITS, Runs

units = st.lists(st.integers(-1, 12), max_size=24)


@given(units, st.integers(-30, 30), st.integers(-30, 30))
def test_runs_are_the_numbers_that_they_were_made_of(numbers: list[int], first: int, end: int) -> None:
    runs = Runs.of(numbers)
    assert [*runs] == numbers and len(runs) == len(numbers) and Runs.of(runs) is runs
    assert runs == numbers and runs == tuple(numbers) and hash(runs) == hash(Runs.of(tuple(numbers)))
    assert runs != [*numbers, 7] and runs != "runs"
    assert [*runs[first:end]] == numbers[first:end] and len(runs[first:end]) == len(numbers[first:end])
    assert all(runs[at] == numbers[at] for at in range(-len(numbers), len(numbers)))
    for at in (len(numbers), -len(numbers) - 1):
        with pytest.raises(IndexError):
            runs[at]
    for dtype in (np.int64, np.int32):
        assert runs.to_array(dtype).dtype == dtype
        np.testing.assert_array_equal(runs.to_array(dtype), np.array(numbers, dtype))
    np.testing.assert_array_equal(np.asarray(runs), np.array(numbers, np.int64))


@given(units)
def test_neighbours_are_one_run(numbers: list[int]) -> None:
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(numbers))
    assert len(Runs.of(numbers).ranges) == (breaks + 1 if numbers else 0)


@given(units, units)
def test_runs_are_told_and_joined(numbers: list[int], more: list[int]) -> None:
    runs = Runs.of(numbers)
    said = np.array(numbers, "<i4").tobytes()
    assert runs.to_bytes() == said
    assert Runs.from_bytes(said) == numbers and Runs.from_bytes(said).ranges == runs.ranges
    assert (runs + Runs.of(more)).ranges == Runs.of([*numbers, *more]).ranges
    assert runs.is_within(12) == all(0 <= number < 12 for number in numbers)


def test_the_ends_of_int32_are_within_no_arena() -> None:
    for numbers in ([2**31 - 1], [2**31 - 2, 2**31 - 1], [2**31 - 1, -(2**31)], [-(2**31), 4]):
        assert not Runs.from_bytes(np.array(numbers, "<i4").tobytes()).is_within(2**31 - 1)


def test_runs_are_cut_by_one() -> None:
    assert NO_UNITS == () and NO_UNITS[:] == []
    with pytest.raises(ValueError, match="step 1"):
        Runs.of(range(4))[::2]


@given(st.sets(st.integers(0, 39), min_size=1), st.randoms())
def test_numbers_one_by_one_and_as_runs_are_moved_alike(chosen: set[int], rng: object) -> None:
    order = sorted(chosen)
    rng.shuffle(order)  # type: ignore[attr-defined]
    pools = PagePool("page", 40), PagePool("page", 40)
    for pool, named in zip(pools, (order, Runs.of(order)), strict=True):
        everything = pool.allocate(40)
        assert everything is not None and len(everything.ranges) == 1
        pool.grant(named)
        assert pool.find(everything, PageState.GRANTED) == min(order)
        assert pool.find_other(named, PageState.GRANTED) is None
        pool.free(named, PageState.GRANTED)
        pool.check()
        again = pool.allocate(len(order))
        assert again is not None and {*again} == chosen
        pool.check()
    assert pools[0]._states == pools[1]._states
