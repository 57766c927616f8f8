"""Routing and the backlog: the right choice among all, and the order in which requests wait."""

from __future__ import annotations

import random

import pytest

from engine.core.backlog import Backlog
from engine.core.routing import BROKEN_PAIR_S, BrokenPairs, Pair, RankLoad, can_ever_hold, choose_pair


def load(
    rank: int, *, requests: int = 0, tokens: int = 0, pages: int = 0, quarantined: int = 0, num_pages: int = 100
) -> RankLoad:
    return RankLoad(rank, requests, tokens, pages, page_tokens=16, num_pages=num_pages, quarantined_pages=quarantined)


def choose(
    prefill: list[RankLoad], decode: list[RankLoad], *, num_ids: int = 16, longest: int = 64, waiting: int = 8
) -> Pair | None:
    return choose_pair(prefill, decode, num_ids=num_ids, max_tokens_total=longest, rank_waiting=waiting)


def test_prefill_goes_where_the_fewest_ids_are_left():
    prefill = [load(0, requests=1, tokens=900), load(1, requests=5, tokens=80)]
    assert choose(prefill, [load(2)]) == Pair(1, 2)


def test_decode_goes_where_the_fewest_sequences_run():
    decode = [load(1, requests=3, pages=3), load(2, requests=2, pages=40)]
    assert choose([load(0)], decode) == Pair(0, 2)


def test_a_rank_with_room_now_beats_a_rank_with_fewer_sequences():
    decode = [load(1, requests=1, pages=97), load(2, requests=5, pages=50)]
    assert choose([load(0)], decode) == Pair(0, 2)


def test_pages_in_quarantine_are_no_room():
    decode = [load(1, quarantined=98), load(2, requests=5)]
    assert choose([load(0)], decode) == Pair(0, 2)


def test_ties_go_to_the_lowest_rank_whatever_the_order():
    loads = [load(rank) for rank in (5, 3, 4)]
    assert choose(loads, [load(9), load(8)]) == Pair(3, 8)
    assert choose(loads[::-1], [load(8), load(9)]) == Pair(3, 8)


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_a_full_pool_means_wait(full):
    busy = load(0, requests=8)
    assert choose([busy if full == "prefill" else load(0)], [busy if full == "decode" else load(1)]) is None


def test_a_sequence_that_fits_no_arena_is_known_at_once():
    assert can_ever_hold([load(0, num_pages=3), load(1, num_pages=4)], 64)
    assert not can_ever_hold([load(0, num_pages=3), load(1, num_pages=4)], 65)


@pytest.mark.parametrize("seed", range(50))
def test_the_choice_is_never_worse_than_any_other(seed):
    rng = random.Random(seed)

    def loads(first: int) -> list[RankLoad]:
        return [
            load(first + i, requests=rng.randrange(9), tokens=rng.randrange(500), pages=rng.randrange(100))
            for i in range(rng.randrange(1, 6))
        ]

    prefill, decode = loads(0), loads(10)
    pair = choose(prefill, decode)
    free_prefill = [one for one in prefill if one.requests < 8]
    free_decode = [one for one in decode if one.requests < 8]
    if pair is None:
        assert not free_prefill or not free_decode
        return
    chosen = {one.rank: one for one in prefill + decode}
    assert chosen[pair.prefill].tokens == min(one.tokens for one in free_prefill)
    fitting = [one for one in free_decode if one.pages + 4 <= one.num_pages] or free_decode
    assert chosen[pair.decode].requests == min(one.requests for one in fitting)


@pytest.mark.parametrize("seed", range(30))
def test_the_backlog_gives_priority_then_arrival_through_any_history(seed):
    rng = random.Random(seed)
    backlog: Backlog[int] = Backlog(max_requests=10, max_ids=200)
    model: list[tuple[int, int, int]] = []  # priority, number, ids
    for number in range(300):
        if rng.random() < 0.6:
            ids, priority = rng.randrange(1, 80), rng.randrange(-2, 3)
            full = len(model) >= 10 or (bool(model) and sum(one[2] for one in model) + ids > 200)
            assert (backlog.why_full(ids) is not None) == full
            if not full:
                backlog.add(number, number, priority=priority, num_ids=ids)
                model.append((priority, number, ids))
        elif model:
            victim = rng.choice(model) if rng.random() < 0.5 else min(model)
            assert backlog.remove(victim[1])
            assert not backlog.remove(victim[1])
            model.remove(victim)
        assert backlog.first() == (min(model)[1] if model else None)
        assert (backlog.num_requests, backlog.num_ids) == (len(model), sum(one[2] for one in model))


def test_a_prompt_larger_than_the_whole_queue_may_wait_alone():
    backlog: Backlog[str] = Backlog(max_requests=4, max_ids=10)
    assert backlog.why_full(1000) is None
    backlog.add(1, "large", priority=0, num_ids=1000)
    assert "limit 10" in (backlog.why_full(1) or "")


def test_a_broken_pair_is_used_only_when_there_is_no_other():
    prefill, decode = [load(0), load(1, tokens=500)], [load(2), load(3, requests=7)]

    def route(*broken: tuple[int, int]) -> Pair | None:
        return choose_pair(
            prefill, decode, num_ids=16, max_tokens_total=64, rank_waiting=8, broken=frozenset(broken)
        )

    assert route() == Pair(0, 2)
    assert route((0, 2)) == Pair(0, 3)
    assert route((0, 2), (0, 3)) == Pair(1, 2)
    assert route((0, 2), (0, 3), (1, 2), (1, 3)) == Pair(0, 2)


def test_a_pair_is_broken_for_a_while_or_until_one_of_its_ranks_begins_anew():
    broken = BrokenPairs()
    broken.mark(0, 2, 10.0)
    broken.mark(1, 2, 12.0)
    assert broken.current(12.0) == {(0, 2), (1, 2)}
    assert broken.current(10.0 + BROKEN_PAIR_S) == {(1, 2)}
    broken.mark(0, 3, 13.0)
    broken.forget(2)
    assert broken.current(13.0) == {(0, 3)}


def test_a_drained_rank_is_never_chosen_and_still_counts_as_one_that_could_hold_it():
    drained = load(2)._replace(is_drained=True)
    assert choose([load(0)], [drained, load(3, requests=7)]) == Pair(0, 3)
    assert choose([load(0)], [drained]) is None
    assert choose([load(0)._replace(is_drained=True), load(1, tokens=900)], [load(3)]) == Pair(1, 3)
    pair = choose_pair([load(0)], [drained, load(3)], num_ids=1, max_tokens_total=2, rank_waiting=8,
                       broken=frozenset({(0, 3)}))  # fmt: skip
    assert pair == Pair(0, 3), "rather a pair that is broken"
    assert can_ever_hold([drained], 64)
