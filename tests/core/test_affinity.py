"""What the head knows of prompts that ranks have computed: by conversation, bounded, and no more than it can know."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from engine.core.affinity import FIRST_IDS, MOST_RANKS, Affinities, affinity_key
from engine.core.routing import Pair, RankLoad, choose_pair


def pack(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def load(rank: int, *, tokens: int = 0, requests: int = 0) -> RankLoad:
    return RankLoad(rank, requests, tokens, 0, 16, 1 << 20)


def choose(loads: list[RankLoad], num_ids: int, spared: dict[int, int]) -> int:
    pair = choose_pair(
        loads, [load(9)], num_ids=num_ids, max_tokens_total=num_ids, rank_waiting=8, spared=spared
    )  # fmt: skip
    assert isinstance(pair, Pair)
    return pair.prefill


def test_a_conversation_is_what_its_client_names_or_what_begins_alike() -> None:
    ids = pack(*range(FIRST_IDS))
    assert affinity_key("", "", ids) == affinity_key("", "", ids + pack(7)) == affinity_key("", "", memoryview(ids))
    assert affinity_key("", "", ids[:-4]) != affinity_key("", "", ids)
    assert affinity_key("a", "", ids) == affinity_key("a", "", pack(1))
    keys = {
        affinity_key("", "", ids), affinity_key("a", "", ids), affinity_key("b", "", ids), affinity_key("", "a", ids),
        affinity_key("a", "a", ids), affinity_key("", "", b"a"),
    }  # fmt: skip
    assert len(keys) == 6


def test_no_id_past_the_first_ones_is_looked_at() -> None:
    seen = []

    class Ids(bytes):
        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            seen.append(key)
            return super().__getitem__(key)

    affinity_key("", "", Ids(pack(*range(100_000))))
    assert seen == [slice(None, 4 * FIRST_IDS, None)]
    affinity_key("named", "", Ids(pack(*range(100_000))))
    assert len(seen) == 1


def test_a_rank_is_preferred_as_long_as_waiting_there_costs_less_than_it_spares() -> None:
    assert choose([load(0), load(1)], 1000, {1: 600}) == 1
    assert choose([load(0), load(1, tokens=600)], 1000, {1: 600}) == 1
    assert choose([load(0), load(1, tokens=601)], 1000, {1: 600}) == 0
    assert choose([load(0, tokens=500), load(1, tokens=601)], 1000, {1: 600}) == 1
    # Both have it: what counts is the backlog again.
    assert choose([load(0, tokens=10), load(1)], 1000, {0: 600, 1: 600}) == 1
    assert choose([load(0, requests=8), load(1)], 1000, {0: 999}) == 1, "rank 0 may not have more"
    assert choose([load(0)._replace(is_drained=True), load(1, tokens=5000)], 1000, {0: 999}) == 1


def test_lost_ranks_are_forgotten_and_their_next_lives_begin_with_nothing() -> None:
    known = Affinities()
    known.note(b"k", 0, num_ids=100, guessed=0, cached=0)
    known.note(b"k", 1, num_ids=200, guessed=0, cached=0)
    assert known.find(b"k") == ({0: 100, 1: 200}, 1.0)
    known.forget(0)
    assert known.find(b"k")[0] == {1: 200}
    known.note(b"k", 0, num_ids=150, guessed=0, cached=0)
    assert known.find(b"k")[0] == {0: 150, 1: 200}
    known.forget(1)
    known.forget(1)
    assert known.find(b"k")[0] == {0: 150}


def test_guesses_that_do_not_come_true_count_for_less_and_those_that_do_for_more() -> None:
    known = Affinities()
    known.note(b"k", 0, num_ids=100, guessed=0, cached=0)
    trusts = []
    for cached in (0, 0, 0, 100, 100, 100):
        known.note(b"k", 0, num_ids=100, guessed=100, cached=cached)
        trusts.append(known.find(b"k")[1])
    assert trusts == [0.5, 0.25, 0.125, 0.5625, 0.78125, 0.890625]
    # Nothing was guessed, so nothing is learned.
    known.note(b"k", 1, num_ids=100, guessed=0, cached=0)
    assert known.find(b"k")[1] == trusts[-1]


def test_the_longest_unasked_key_and_rank_go_first() -> None:
    known = Affinities(most_keys=3)
    for key in (b"a", b"b", b"c"):
        known.note(key, 0, num_ids=1, guessed=0, cached=0)
    assert known.find(b"a")[0]
    known.note(b"d", 0, num_ids=1, guessed=0, cached=0)
    assert [bool(known.find(key)[0]) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    for rank in range(MOST_RANKS + 1):
        known.note(b"a", rank, num_ids=rank, guessed=0, cached=0)
        known.note(b"a", 0, num_ids=7, guessed=0, cached=0)
    assert sorted(known.find(b"a")[0]) == [0, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 50), st.booleans())))
def test_it_stays_bounded(words: list[tuple[int, int, int, bool]]) -> None:
    known = Affinities(most_keys=5)
    for key, rank, ids, is_lost in words:
        if is_lost:
            known.forget(rank)
        else:
            found, trust = known.find(bytes([key]))
            known.note(bytes([key]), rank, num_ids=ids, guessed=found.get(rank, 0), cached=min(ids, 20))
            assert 0 <= trust <= 1
        assert len(known) <= 5
        assert len(known.find(bytes([key]))[0]) <= MOST_RANKS
