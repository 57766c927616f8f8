"""Lines: cells are counted, not characters, and nothing is wider than it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from console.lines import (
    beside,
    clip,
    clip_text,
    fit_text,
    join,
    joined,
    line,
    pad,
    plain,
    restyle,
    text_width,
    width_of,
    wrap,
)

# Letters of one cell, of two, and of none.
TEXTS = st.text(alphabet="ab 漢字é\u0301▁", max_size=24)
LINES = st.lists(st.tuples(TEXTS, st.sampled_from(["", "bad", "dim"])), max_size=6).map(tuple)
WIDTHS = st.integers(0, 30)


def test_wide_letters_count_twice():
    assert text_width("漢字") == 4
    assert width_of((("ab", ""), ("漢", "bad"))) == 4


@given(LINES, WIDTHS)
def test_pad_is_exact(runs, width):
    assert width_of(pad(runs, width)) == width


@given(LINES, LINES, WIDTHS)
def test_join_is_exact_and_keeps_the_right_end(left, right, width):
    found = join(left, right, width)
    assert width_of(found) == width
    if width and width_of(right) <= width:
        assert plain(found).endswith(plain(right))


@given(LINES, WIDTHS)
def test_clip_never_grows_and_says_what_it_cut(runs, width):
    found = clip(runs, width)
    assert width_of(found) <= width
    if width and width_of(runs) <= width:
        assert plain(found) == plain(runs)
    elif width:
        assert "…" in plain(found)


@given(TEXTS, WIDTHS, st.sampled_from("<>^"))
def test_fit_text_is_exact(text, width, align):
    assert text_width(fit_text(text, width, align)) == width


@given(TEXTS, st.integers(-1, 30))
def test_wrap_loses_no_word_and_ends(text, width):
    lines = wrap(text, width)
    assert all(text_width(part) <= max(2, width) for part in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_runs_of_one_style_are_joined():
    assert joined([("a", "x"), ("b", "x"), ("", "y"), ("c", "x")]) == (("abc", "x"),)
    assert line("a", ("b", "bad"), (("c", "bad"), ("d", ""))) == (("a", ""), ("bc", "bad"), ("d", ""))
    assert restyle((("a", "x"), ("b", "y")), "gone") == (("ab", "gone"),)


def test_blocks_stand_side_by_side():
    found = beside([([line("a"), line("bcd")], 2), ([line("e")], 3)], gap=1)
    assert [plain(entry) for entry in found] == ["a  e  ", "b…    "]


def test_clip_text():
    assert clip_text("abc", 3) == "abc"
    assert clip_text("abcd", 3) == "ab…"
    assert clip_text("abcd", 1) == "…"
    assert clip_text("abcd", 0) == ""
