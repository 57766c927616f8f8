"""The pact: what all ranks make of the same words."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from engine.core.pact import WORDS_BYTES, Words, agree, unpack_words
from engine.errors import RemoteProtocolError

IDLE = Words(generation=1, rows=0, passes=0, idle=9, join=1, stop=0, drafts=0, ready=(5, 0))

small = st.integers(0, 6)
words = st.builds(Words, small, small, small, small, small, st.integers(0, 1), small, st.tuples(small, small))


@hypothesis.given(words)
def test_words_survive_their_bytes(said: Words) -> None:
    data = said.pack()
    assert len(data) == WORDS_BYTES and unpack_words(memoryview(data)) == said


def test_words_of_another_length_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=f"have {WORDS_BYTES} bytes, not 3"):
        unpack_words(b"abc")


@hypothesis.given(st.lists(words, min_size=1, max_size=4), st.tuples(small, small), small)
def test_the_order_of_ranks_does_not_matter_and_epochs_never_go_down(
    said: list[Words], active: tuple[int, int], membership: int
) -> None:
    agreed = {agree(order, active, membership, 3) for order in itertools.permutations(said)}
    assert len(agreed) == 1
    (found,) = agreed
    assert all(later >= now for later, now in zip(found.active, active, strict=True))
    assert found.leave == 0 or found.leave > membership
    assert found.passes >= max(1, *(word.passes for word in said))


def test_an_epoch_is_active_once_the_least_ready_word_reaches_it() -> None:
    said = [IDLE._replace(ready=(7, 2)), IDLE._replace(ready=(6, 2))]
    assert agree(said, (5, 1), 1, 3).active == (6, 2)
    assert agree([*said, IDLE], (5, 1), 1, 3).active == (5, 1)


def test_a_restarted_ranks_zero_lowers_nothing() -> None:
    assert agree([IDLE, IDLE._replace(generation=2, ready=(0, 0))], (5, 3), 1, 3).active == (5, 3)


@pytest.mark.parametrize(
    ("change", "parks"),
    [({}, True), ({"idle": 2}, False), ({"idle": 3}, True), ({"stop": 1}, True), ({"join": 2}, True)],
)
def test_a_group_parks_when_all_are_idle(change: dict[str, int], parks: bool) -> None:
    assert agree([IDLE, IDLE._replace(**change)], (5, 0), 1, 3).park is parks


def test_a_group_that_joins_or_stops_does_not_park() -> None:
    joins = agree([IDLE._replace(join=2), IDLE._replace(join=3)], (5, 0), 1, 3)
    assert (joins.leave, joins.park) == (2, False)
    stops = agree([IDLE._replace(stop=1)] * 2, (5, 0), 1, 3)
    assert (stops.stop, stops.park) == (True, False)
    assert not agree([IDLE._replace(stop=1), IDLE], (5, 0), 1, 3).stop


def test_all_run_as_many_passes_as_the_rank_with_most_and_one_at_least() -> None:
    assert agree([IDLE._replace(passes=3), IDLE], (5, 0), 1, 3).passes == 3
    assert agree([IDLE, IDLE], (5, 0), 1, 3).passes == 1


def test_all_draft_as_far_as_the_rank_that_drafts_furthest() -> None:
    said = [IDLE._replace(drafts=3, rows=1, passes=1, idle=0), IDLE._replace(drafts=5, rows=2, passes=1, idle=0), IDLE]
    assert {agree(order, (5, 0), 1, 3).drafts for order in itertools.permutations(said)} == {5}
    assert agree([IDLE, IDLE], (5, 0), 1, 3).drafts == 0
