"""Turns of a conversation go where earlier ones were computed, as far as that pays; placing costs what it did."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from engine.actors.router import Client
from tests.actors.head_rig import VOCAB, End, Rig, pack
from transport.messages import RequestStarted, Sampling, StartPrefill, Submit, Timings
from transport.wire import Frame


class Talk:
    """A client whose requests are computed at once, unless told otherwise; prefill ranks 0 and 1, decode rank 5."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.client: Client
        self.client, _, _ = rig.client()
        self.prefills: dict[int, End] = {0: rig.rank(0, "prefill"), 1: rig.rank(1, "prefill")}
        self.decode = rig.rank(5, "decode")
        self.requests = 0

    async def ask(
        self, ids: list[int], affinity: str = "", salt: str = "", *, cached: int | None = 0, **sampling: object
    ) -> int:
        """The prefill rank that it went to. `cached`: what that had of it; None leaves it uncomputed."""
        self.requests += 1
        message = Submit(
            self.requests, 1, 0, Sampling(max_tokens=4, **sampling), affinity=affinity, cache_salt=salt
        )  # fmt: skip
        self.rig.router.client_frames(self.client, [Frame(message, memoryview(pack(ids)))])
        came = [(rank, word) for rank, end in self.prefills.items() for word in await end.take()]
        [(rank, start)] = came
        assert isinstance(start, StartPrefill)
        assert (start.affinity, start.cache_salt) == (affinity, salt)
        await self.decode.take()
        if cached is not None:
            number = start.request
            self.rig.from_rank(5, RequestStarted(number, 1, len(ids), cached, rank, 5, 100, 1, 1, Timings()))
            self.rig.started.add((number, 1))
            self.rig.finish(5, number)
        return rank


def turns(number: int, length: int) -> list[int]:
    return [(number * 31 + place * 7) % VOCAB for place in range(length)]


@pytest.fixture
def limits() -> dict[str, int]:
    return {"max_model_tokens": 1000, "queue_prompt_tokens": 10_000, "rank_waiting": 8}


async def test_turns_go_to_the_rank_that_had_the_one_before(nursery, limits) -> None:
    talk = Talk(Rig(nursery, **limits))
    await talk.ask(turns(9, 300), cached=None)  # rank 0 is busy: conversation a begins on rank 1
    assert await talk.ask(turns(1, 290), "a") == 1
    # Now rank 1 has more to do, though not as much more as rank 0 would have to compute.
    assert await talk.ask(turns(8, 500), cached=None) == 1
    assert await talk.ask(turns(2, 10), "b", cached=None) == 0
    assert await talk.ask(turns(1, 400), "a", cached=290) == 1


async def test_a_backlog_longer_than_what_is_spared_sends_it_elsewhere(nursery, limits) -> None:
    talk = Talk(Rig(nursery, **limits))
    assert await talk.ask(turns(1, 100), "a") == 0
    assert await talk.ask(turns(3, 90), "b", cached=None) == 0
    assert await talk.ask(turns(1, 101), "a", cached=None) == 0, "10 ids wait there, at most"
    assert await talk.ask(turns(4, 190), "c", cached=None) == 1
    assert await talk.ask(turns(4, 200), "d", cached=None) == 0
    # 291 ids wait on rank 0, and 190 on rank 1: a hundred less than what going there costs.
    assert await talk.ask(turns(1, 102), "a") == 1
    # Both have it now: what counts is the backlog.
    assert await talk.ask(turns(1, 103), "a", cached=102) == 1


async def test_without_a_name_the_first_ids_are_the_conversation(nursery, limits) -> None:
    talk = Talk(Rig(nursery, **limits))
    await talk.ask(turns(9, 300), cached=None)
    ids = turns(1, 280)
    assert await talk.ask(ids) == 1
    assert await talk.ask(turns(8, 310), cached=None) == 1
    assert await talk.ask([*ids, 1, 2, 3], cached=280) == 1
    assert await talk.ask([*ids, 1, 2, 4], salt="other") == 0


@pytest.mark.parametrize("how", ["lost", "drained"])
async def test_a_rank_that_is_lost_or_drained_is_forgotten(nursery, limits, how: str) -> None:
    talk = Talk(Rig(nursery, **limits))
    assert await talk.ask(turns(1, 300), "a") == 0
    assert await talk.ask(turns(1, 310), "a", cached=300) == 0
    if how == "lost":
        talk.rig.router.rank_lost(0, "killed")
        assert await talk.ask(turns(1, 320), "a") == 1
        talk.prefills[0] = talk.rig.rank(0, "prefill", generation=2)
    else:
        talk.rig.router.set_drained(0, True)
        assert await talk.ask(turns(1, 320), "a") == 1
        talk.rig.router.set_drained(0, False)
    assert await talk.ask(turns(1, 330), "a", cached=320) == 1


async def test_loads_count_what_is_expected_to_be_computed(nursery, limits) -> None:
    talk = Talk(Rig(nursery, **limits))
    await talk.ask(turns(1, 300), "a")
    await talk.ask(turns(1, 320), "a", cached=None)
    seats = talk.rig.router._seats
    assert seats[0].load().tokens == 20
    await talk.ask(turns(1, 330), "a", cached=None, prompt_logprobs=1)
    assert seats[0].load().tokens + seats[1].load().tokens == 350, "log-probabilities of a prompt need all of it"


async def test_without_a_cache_only_backlogs_count(nursery, limits) -> None:
    talk = Talk(Rig(nursery, prefix_cache=False, **limits))
    assert await talk.ask(turns(1, 300), "a") == 0
    await talk.ask(turns(2, 10), "b", cached=None)
    assert await talk.ask(turns(1, 310), "a") == 1
    assert len(talk.rig.router._affinities) == 0


def count_calls(work: Callable[[], object]) -> int:
    """Calls of Python and of C that it makes."""
    calls = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


async def test_placing_costs_the_same_whatever_is_known_and_however_long_the_prompt(nursery) -> None:
    rig = Rig(nursery, max_model_tokens=1 << 20, queue_prompt_tokens=1 << 24, rank_waiting=1000, client_inflight=1000)
    client, _, _ = rig.client(limit=1 << 26)
    for rank in (0, 1):
        rig.rank(rank, "prefill", num_pages=1 << 20)
    rig.rank(5, "decode", num_pages=1 << 20)
    numbers = iter(range(1, 1000))

    def place(length: int) -> int:
        message = Submit(next(numbers), 1, 0, Sampling(max_tokens=4), affinity="a")
        frames = [Frame(message, memoryview(pack([1] * length)))]
        return count_calls(lambda: rig.router.client_frames(client, frames))

    place(300)
    few = {place(300), place(200_000)}
    for key in range(20_000):
        rig.router._affinities.note(key.to_bytes(16), key % 2, num_ids=key, guessed=0, cached=0)
    many = {place(300), place(200_000)}
    assert max(few | many) - min(few | many) <= 6, (few, many)
