"""PagePool against a naive model, and the moves it must refuse."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.pages import ALLOWED, PagePool, PageState
from engine.errors import LocalProtocolError


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_units_are_handed_out_once_and_come_back(total: int, script: list[tuple[bool, int]]) -> None:
    pool = PagePool("page", total)
    free, held = set(range(total)), []
    for takes, number in script:
        if takes:
            units = pool.allocate(number)
            if number > len(free):
                assert units is None
                continue
            assert units is not None and len(units) == number
            assert set(units) <= free
            free -= set(units)
            held.append(units)
        elif held:
            units = held.pop(number % len(held))
            pool.free(units, PageState.OWNED)
            free |= set(units)
        pool.check()
        assert pool.num_free == len(free)
        assert pool.count(PageState.OWNED) == total - len(free)


@given(st.integers(1, 30), st.sets(st.integers(0, 29)), st.integers(1, 30))
def test_a_run_is_used_where_one_fits_and_the_fewest_pieces_where_none_does(
    total: int, taken: set[int], count: int
) -> None:
    pool = PagePool("page", total)
    everything = pool.allocate(total)
    assert everything is not None
    pool.free([unit for unit in everything if unit not in taken], PageState.OWNED)
    runs: list[int] = []
    for unit in range(total):
        if unit not in taken:
            runs = [*runs[:-1], runs[-1] + 1] if runs and unit and unit - 1 not in taken else [*runs, 1]
    units = pool.allocate(count)
    if count > sum(runs):
        assert units is None
        return
    assert units is not None
    pieces = 1 + sum(b != a + 1 for a, b in itertools.pairwise(units))
    fewest, left = 0, count
    for length in sorted(runs, reverse=True):
        if left > 0:
            fewest, left = fewest + 1, left - length
    assert pieces <= fewest
    if any(length >= count for length in runs):
        assert pieces == 1


@pytest.mark.parametrize("source", PageState)
@pytest.mark.parametrize("target", PageState)
def test_only_the_allowed_moves_exist(source: PageState, target: PageState) -> None:
    pool = PagePool("page", 4)
    units = pool.allocate(2)
    assert units is not None
    path = {
        PageState.FREE: [],
        PageState.OWNED: [],
        PageState.IN_FLIGHT: [PageState.IN_FLIGHT],
        PageState.GRANTED: [PageState.GRANTED],
        PageState.QUARANTINED: [PageState.GRANTED, PageState.QUARANTINED],
        PageState.CACHED: [PageState.CACHED],
    }[source]
    at = PageState.OWNED
    for step in path:
        pool._mark(units, at, step)
        at = step
    if source is PageState.FREE:
        pool.free(units, PageState.OWNED)
    if (source, target) in ALLOWED:
        if target is PageState.FREE:
            pool.free(units, source)
        else:
            pool._mark(units, source, target)
            if source is PageState.FREE:
                return  # only `allocate` may do this, which also cuts the run
        assert pool.state_of(units[0]) is target
        pool.check()
    else:
        with pytest.raises(LocalProtocolError):
            pool._mark(units, source, target)
        assert pool.state_of(units[0]) is source
        pool.check()


def test_a_refused_move_changes_nothing() -> None:
    pool = PagePool("slab", 4)
    units = pool.allocate(3)
    assert units is not None
    pool.grant(units[:1])
    with pytest.raises(LocalProtocolError, match="slab 0 is GRANTED, not OWNED"):
        pool.free((units[1], units[0]), PageState.OWNED)
    with pytest.raises(LocalProtocolError, match="outside the arena"):
        pool.free((units[1], 9), PageState.OWNED)
    with pytest.raises(LocalProtocolError, match="named twice"):
        pool.free((units[1], units[1]), PageState.OWNED)
    assert pool.count(PageState.OWNED) == 2 and pool.count(PageState.GRANTED) == 1
    pool.check()


def test_check_notices_a_page_that_went_astray() -> None:
    pool = PagePool("page", 8)
    units = pool.allocate(3)
    assert units is not None
    pool._states[units[0]] = PageState.CACHED
    with pytest.raises(LocalProtocolError):
        pool.check()
