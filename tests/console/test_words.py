"""Figures in words: short, never ambiguous, and never wider than their column."""

from __future__ import annotations

import math
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import words


@pytest.mark.parametrize(
    ("given_us", "said"),
    [
        (0, "0 us"),
        (412.4, "412 us"),
        (999.6, "1.00 ms"),
        (8_910, "8.91 ms"),
        (41_200, "41.2 ms"),
        (999_400, "999 ms"),
        (999_600, "1.00 s"),
        (1_220_000, "1.22 s"),
        (412e6, "412 s"),
        (1_200e6, "20 min"),
        (math.nan, "–"),
        (math.inf, "–"),
        (None, "–"),
    ],
)
def test_durations(given_us: float | None, said: str) -> None:
    assert words.us(given_us) == said
    assert words.us_per_step(given_us) == (said if said == "–" else f"{said}/step")


def test_bytes_are_binary_where_they_lie_and_decimal_where_they_flow() -> None:
    assert [words.size(n) for n in (0, 812, 1024, 64 * 2**20, int(3.125 * 2**30))] == [
        "0 B", "812 B", "1.00 KiB", "64.0 MiB", "3.12 GiB",
    ]  # fmt: skip
    assert [words.rate(n) for n in (0, 212e6, 999.9e6, 6.8e9)] == ["0 B/s", "212 MB/s", "1.00 GB/s", "6.80 GB/s"]


def test_counts_and_shares() -> None:
    assert [words.count(n) for n in (0, 5812, None)] == ["0", "5,812", "–"]
    assert [words.short(n) for n in (9_999, 10_000, 41_234, 131_072, 999_600, 1_200_000)] == [
        "9,999", "10.0k", "41.2k", "131k", "1.00M", "1.20M",
    ]  # fmt: skip
    assert (words.share(0.781), words.share(0.781, 1), words.share(None)) == ("78%", "78.1%", "–")
    assert (words.ratio(1.834), words.ratio(math.nan)) == ("1.83", "–")
    assert (words.plural(1, "rank"), words.plural(1200, "rank"), words.plural(2, "entry", "entries")) == (
        "1 rank", "1,200 ranks", "2 entries",
    )  # fmt: skip


@given(st.floats(0, 1e13))
def test_a_short_count_fits_its_column(value: float) -> None:
    assert len(words.short(value)) <= 5


@given(st.floats(0, 1e12))
def test_durations_and_ages_fit_their_columns(value: float) -> None:
    assert len(words.us(value)) <= 8
    assert len(words.age(value / 1e6)) <= 7


@given(st.floats(0, 1e7))
def test_nothing_is_said_to_be_older_than_it_is(seconds: float) -> None:
    figure, unit = words.age(seconds).split()
    assert float(figure) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit] <= seconds


@given(st.floats(1e-3, 1e12), st.floats(1, 10))
def test_figures_keep_their_order_of_magnitude(value: float, times: float) -> None:
    def read(said: str) -> float:
        figure, unit = said.replace(",", "").split()
        return float(figure) * {"us": 1, "ms": 1e3, "s": 1e6, "min": 60e6, "h": 3600e6, "d": 86400e6}[unit]

    assert read(words.us(value)) <= read(words.us(value * times)) * 1.001
    assert read(words.us(value)) == pytest.approx(value, rel=0.51, abs=1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("line-000123 ünïcode 日本語 a\xa0b", "line-000123 ünïcode 日本語 a\xa0b"),
        ("\x1b[31mred\x1b]52;c;eA==\x07", "\ufffd[31mred\ufffd]52;c;eA==\ufffd"),
        ("two\nlines\tand\u202eback", "two\ufffdlines\ufffdand\ufffdback"),
        ("c1 \x9b2J", "c1 \ufffd2J"),
    ],
)
def test_what_others_wrote_is_shown_and_never_obeyed(text: str, shown: str) -> None:
    assert words.safe(text) == shown


def test_ranks_are_as_wide_as_the_largest() -> None:
    assert words.number_width([]) == 2
    assert words.rank_name("decode", 7, words.number_width(range(72))) == "d07"
    assert words.rank_name("prefill", 7, words.number_width(range(512))) == "p007"


def test_the_clock_is_in_the_zone_that_is_asked_for() -> None:
    assert words.clock(1_764_511_351_000, UTC) == "14:02:31"
