"""When a completion ends, what memory it takes, and the blob of emitted tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import (
    build_failure,
    completion_limit,
    count_pages,
    judge_token,
    num_history,
    sampling_at,
)
from engine.core.telemetry import Histogram
from engine.core.tokens import EmittedRow, pack_tokens, unpack_tokens
from engine.errors import RemoteProtocolError
from transport.messages import Sampling


@pytest.mark.parametrize(
    ("token", "count", "sampling", "expected"),
    [
        (1, 3, Sampling(max_tokens=9), "stop"),
        (1, 3, Sampling(max_tokens=9, ignore_eos=True), None),
        (5, 3, Sampling(max_tokens=9, ignore_eos=True, stop_ids=(5,)), "stop"),
        (5, 9, Sampling(max_tokens=9, stop_ids=(5,)), "stop"),
        (6, 9, Sampling(max_tokens=9), "length"),
        (1, 3, Sampling(max_tokens=9, min_tokens=3), None),
        (1, 4, Sampling(max_tokens=9, min_tokens=3), "stop"),
        (1, 9, Sampling(max_tokens=9, min_tokens=9), "length"),
    ],
)
def test_a_completion_ends_at_an_end_id_or_at_its_limit(
    token: int, count: int, sampling: Sampling, expected: str | None
) -> None:
    assert judge_token(token, count, 9, sampling, {1}) == expected


def test_limits_count_the_tokens_of_earlier_attempts() -> None:
    assert completion_limit(num_ids=130, generated=30, max_tokens=50, max_model_tokens=1000) == 50
    assert completion_limit(num_ids=130, generated=30, max_tokens=5000, max_model_tokens=1000) == 900
    assert num_history(num_ids=130, generated=30, limit=50) == 149
    assert num_history(num_ids=130, generated=30, limit=31) == 130
    assert [count_pages(tokens, 8) for tokens in (1, 8, 9)] == [1, 1, 2]


def test_min_tokens_is_told_to_the_device_until_it_is_reached() -> None:
    sampling = Sampling(0.5, 0.9, 3, 7, 20, 4, True, (5,))
    assert sampling_at(sampling, 3) is sampling
    assert sampling_at(sampling, 4) == Sampling(0.5, 0.9, 3, 7, 20, 0, True, (5,))


def test_a_full_queue_may_be_tried_again_and_a_too_long_prompt_may_not() -> None:
    assert build_failure((1, 2), "queue_full", "x").retryable
    assert not build_failure((1, 2), "too_long", "x").retryable


Rows = st.lists(
    st.builds(
        EmittedRow,
        st.integers(0, 2**53),
        st.integers(1, 9),
        st.integers(0, 2**31 - 1),
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    )
)


@given(Rows)
def test_emitted_rows_survive_packing(rows: list[EmittedRow]) -> None:
    num_rows, num_tokens, blob = pack_tokens(rows)
    assert len(blob) == 20 * num_rows + 4 * num_tokens
    assert unpack_tokens(num_rows, num_tokens, memoryview(blob)) == rows


@given(Rows, st.integers(-1, 1), st.integers(-1, 1), st.integers(0, 200), st.integers(0, 255))
def test_a_blob_that_does_not_fit_its_numbers_is_refused(
    rows: list[EmittedRow], more_rows: int, more_tokens: int, at: int, byte: int
) -> None:
    num_rows, num_tokens, blob = pack_tokens(rows)
    broken = bytearray(blob)
    if at < len(broken):
        broken[at] = byte
    if num_rows + more_rows < 0 or num_tokens + more_tokens < 0:
        return
    try:
        found = unpack_tokens(num_rows + more_rows, num_tokens + more_tokens, bytes(broken))
    except RemoteProtocolError:
        return
    assert len(found) == num_rows + more_rows
    assert sum(len(row.tokens) for row in found) == num_tokens + more_tokens


@given(st.lists(st.integers(0, 10**6), max_size=50), st.integers(1, 20))
def test_a_histogram_ranks_the_newest_values(values: list[int], capacity: int) -> None:
    histogram = Histogram(capacity)
    for value in values:
        histogram.add(value)
    kept = sorted(values[-capacity:])
    assert len(histogram) == len(kept)
    p50, top = histogram.percentiles(0.5, 1.0)
    if not kept:
        assert (p50, top) == (0, 0)
    else:
        assert top == kept[-1]
        assert sum(value <= p50 for value in kept) * 2 >= len(kept)
        assert sum(value < p50 for value in kept) * 2 < len(kept) or p50 == kept[0]
