"""What ranks say of a step is read anew where somebody says something else, and means what it would mean each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.pact import Words, agree
from engine.errors import RemoteProtocolError
from engine.model.launches import Launches, merge_launches
from engine.model.said import Said

IDLE_LIMIT = 2
SMALL = st.integers(0, 2)
WORDS = st.builds(Words, st.just(1), SMALL, SMALL, SMALL, SMALL, SMALL, st.just(0), st.tuples(SMALL, SMALL))
LAUNCHES = st.builds(Launches, st.lists(st.integers(1, 2), max_size=1).map(tuple), SMALL)
ONE = st.tuples(WORDS, LAUNCHES)


@given(st.lists(st.tuples(st.lists(ONE, min_size=3, max_size=3), SMALL, st.booleans()), min_size=1, max_size=4))
def test_every_step_means_what_it_would_mean_alone(steps: list[tuple[list[tuple[Words, Launches]], int, bool]]) -> None:
    said = Said(IDLE_LIMIT)
    for each, membership, is_twice in steps:
        for _ in range(1 + is_twice):
            frames = [Said(IDLE_LIMIT).pack(*words) for words in each]
            assert said.pack(*each[0]) == frames[0]
            heard = {place: memoryview(bytearray(frames[place])) for place in (2, 1)}
            agreed = agree([words for words, _ in each], (0, 1), membership, IDLE_LIMIT)
            expected = merge_launches([launches for _, launches in each]), agreed
            assert said.read(heard, [7, 8, 9], (0, 1), membership) == expected


@pytest.mark.parametrize("frame", [b"", b"1" * 40, b"1" * 300])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    said = Said(IDLE_LIMIT)
    said.pack(Words(1, 0, 0, 0, 0, 0, 0, (0, 0)), Launches((), 0))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            said.read({1: memoryview(frame)}, [7, 8], (0, 0), 1)
