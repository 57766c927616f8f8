"""What ranks say of a step's graphs and agree on; a rank's way through them; and whether the others are still there."""

from __future__ import annotations

import itertools
import math
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RemoteProtocolError
from engine.model.exchange import Key, Link, Mesh
from engine.model.launches import Launches, Turns, merge_launches, unpack_launches

SOME = st.builds(Launches, st.lists(st.integers(1, 256), max_size=6).map(tuple), st.integers(0, 64))


@given(SOME)
def test_launches_come_back_as_they_were_said(launches: Launches) -> None:
    assert unpack_launches(memoryview(launches.pack()), 3) == launches


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", Launches((3,), 1).pack()[:-1], Launches((3,), 1).pack() + b"1", Launches((0,), 1).pack(),
     Launches((), -1).pack()],
)  # fmt: skip
def test_what_is_no_launches_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="rank 7 says"):
        unpack_launches(memoryview(data), 7)


@given(st.lists(SOME, min_size=1, max_size=4))
def test_every_rank_finds_room_for_its_rows_in_what_all_launch(said: list[Launches]) -> None:
    """All go through the same graphs in the same order, each large enough for whoever has rows for it."""
    agreed = merge_launches(said)
    ways = []
    for own in said:
        turns, way = Turns(own, agreed, lambda: None), []
        for piece in own.pieces:
            assert turns.reads_prompts
            way.append(turns.take_piece())
            assert way[-1] >= piece
        assert not turns.reads_prompts
        while turns.has_pieces:
            way.append(turns.take_piece())
        way.append(turns.take_decode())
        assert way[-1] >= own.decode and turns.take_decode() == 0
        ways.append(way)
    assert all(way == ways[0] for way in ways)
    assert max(ways[0], default=0) == max(max((*own.pieces, own.decode)) for own in said)


def test_an_ended_connection_is_seen_between_two_exchanges() -> None:
    """Also behind a frame that nobody has read."""
    pairs = [socket.socketpair() for _ in range(2)]
    mesh = Mesh(0, [Link(at + 1, 10 + at, ours) for at, (ours, _) in enumerate(pairs)], 1.0)
    try:
        assert mesh.find_gone() is None
        pairs[1][1].send(b"a frame's beginning")
        assert mesh.find_gone() is None
        pairs[1][1].close()
        gone = mesh.find_gone()
        assert gone is not None and (gone.place, gone.overdue) == (2, False)
        mesh.close()
        assert mesh.find_gone() is None
    finally:
        mesh.close()
        pairs[0][1].close()


@pytest.mark.parametrize("look_s", [0.0, 3e-4, 4e-3, math.inf])
def test_who_waits_for_words_looks_when_it_said_it_would_and_sees_words_at_once(look_s: float) -> None:
    key: Key = (1, 0, 0, 0)
    ours, theirs = socket.socketpair()
    mesh, other = Mesh(0, [Link(1, 11, ours)], 10.0), Mesh(1, [Link(0, 10, theirs)], 10.0)
    looks = itertools.count(1)
    looked = 0

    def look() -> float:
        nonlocal looked
        looked = next(looks)
        return look_s if looked < 5 else math.inf

    mesh.start(key, {1: (b"mine",)})
    timer = threading.Timer(0.15, other.start, (key, {0: (b"yours",)}))
    timer.start()
    try:
        assert bytes(mesh.finish(key, look)[1]) == b"yours"
    finally:
        timer.join()
        mesh.close()
        other.close()
    assert looked == (1 if look_s == math.inf else 5)
