"""Small graphs: the width that was asked for, the shape of the values, nothing made up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import spark
from console.lines import plain, width_of

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=80)


def test_a_rising_series() -> None:
    assert spark.spark(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert spark.spark(range(8), 8, ascii=True) == "_.-:=+*#"
    assert spark.spark([1, 1, 1], 3, high=2) == "▅▅▅"
    assert spark.spark([5, -1], 2, high=2) == "█▁"


def test_gaps_and_short_series_are_blank() -> None:
    assert spark.spark([1.0, math.nan, 1.0], 5) == "  █ █"
    assert spark.spark([], 3) == "   "
    assert spark.spark([0, 0], 2) == "▁▁"
    assert spark.spark([1], 0) == ""


@given(VALUES, st.integers(0, 40), st.one_of(st.none(), st.floats(-10, 1e6)), st.booleans())
def test_width_is_kept(values: list[float], width: int, high: float | None, ascii: bool) -> None:
    said = spark.spark(values, width, high=high, ascii=ascii)
    assert len(said) == width
    assert said.isascii() or not ascii


@given(VALUES, st.integers(1, 40))
def test_resampling_keeps_the_range_and_the_newest(values: list[float], width: int) -> None:
    points = spark.resample(values, width)
    known = [value for value in values if math.isfinite(value)]
    assert len(points) == width
    for point in points:
        assert math.isnan(point) or min(known) - 1e-6 <= point <= max(known) + 1e-6
    if len(values) <= width:
        np.testing.assert_array_equal(points[width - len(values) :], values)


def test_resampling_takes_means() -> None:
    assert spark.resample([1, 3, 5, 7], 2) == [2, 6]
    assert spark.resample([1, math.nan, 5, 7], 2) == [1, 6]


@pytest.mark.parametrize(("share", "said"), [(0, "    "), (1, "████"), (2, "████"), (0.5, "██  "), (0.53, "██▏ ")])
def test_bars(share: float, said: str) -> None:
    assert spark.bar(share, 4) == said


def test_something_is_seen_of_a_little() -> None:
    assert spark.bar(1e-9, 4) == "▏   "
    assert spark.bar(1e-9, 4, ascii=True) == "#   "
    assert spark.bar(math.nan, 4) == "    "
    assert plain(spark.bar_line(0.5, 4)) == "██··" and plain(spark.bar_line(0.5, 4, ascii=True)) == "##.."


@given(VALUES, VALUES, st.integers(1, 30), st.integers(1, 4), st.booleans())
def test_dots_keep_their_place(first: list[float], second: list[float], width: int, height: int, ascii: bool) -> None:
    drawn = spark.braille(first, second, width, height, ascii=ascii)
    assert len(drawn) == height
    assert all(width_of(line) == width for line in drawn)


def test_two_series_in_dots() -> None:
    (line,) = spark.braille([0, 1, 2, 3], [math.nan, math.nan, 3, 3], 2, 1)
    # Left: levels 0 and 1 of the first series. Right: 2 and 3, and the second series at the top.
    assert line == ((chr(0x2800 | 0x40 | 0x20), "first"), (chr(0x2800 | 0x02 | 0x08 | 0x01), "both"))
    flat = spark.braille([0, 0], [], 1, 1)
    assert flat == [((chr(0x2800 | 0x40 | 0x80), "first"),)]
    # A jump is one stroke.
    tall = spark.braille([0, 7], [], 1, 2, high=7)
    assert [plain(row) for row in tall] == [
        chr(0x2800 | 0x08 | 0x10 | 0x20 | 0x80),
        chr(0x2800 | 0x40 | 0x08 | 0x10 | 0x20),
    ]
