"""StopSearch: the result is that of a search in the whole text, however it was cut, and nothing is held for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.faces.stops import StopSearch

letters = st.text(alphabet="abé", max_size=30)
stops_strategy = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grows the text by one character and looks whether it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, stops_strategy, st.data())
@settings(max_examples=500, deadline=None)
def test_any_cut_gives_the_same_result(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    search = StopSearch(stops)
    shown = ""
    for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += search.push(text[first:last])
    wanted, stop = brute_force(text, stops)
    assert wanted.startswith(shown), "nothing may be shown that is not in the result"
    assert shown + search.finish() == wanted
    assert search.matched == stop


@given(letters, stops_strategy)
@settings(max_examples=300, deadline=None)
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    search = StopSearch(stops)
    shown = search.push(text)
    if search.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            len(tail) > len(held) and any(stop.startswith(tail) for stop in stops)
            for tail in (text[place:] for place in range(len(text)))
        )


def test_a_stop_string_over_three_pieces() -> None:
    search = StopSearch(["<END>"])
    assert [search.push(piece) for piece in ("hi <", "EN", "D", "> more")] == ["hi ", "", "", ""]
    assert search.matched == "<END>" and search.push("x") == "" and search.finish() == ""


def test_a_false_beginning_is_released() -> None:
    search = StopSearch(["<END>"])
    assert [search.push(piece) for piece in ("a<EN", "C<", "E")] == ["a", "<ENC", ""]
    assert search.finish() == "<E" and search.matched is None


def test_an_empty_stop_string_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopSearch(["a", ""])
