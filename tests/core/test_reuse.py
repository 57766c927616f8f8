"""What a prefill rank with a prefix cache does with prompts that begin alike, one rule at a time."""

from __future__ import annotations

import random
from array import array

import pytest

from engine.core.effects import StartPush, ToHead, ToPeer
from engine.core.handoff import PrefillPhase
from engine.core.plan import PrefillChunk, StepPlan, StepResult
from engine.core.prefill import PrefillSide
from engine.core.schedule import SideSizes, StepLimits
from transport.messages import (
    Abort,
    ForgetPrompts,
    GrantRevoked,
    Message,
    PagesGranted,
    PeerDown,
    PeerWelcome,
    PrefillCommitted,
    Sampling,
    StartPrefill,
)

T, LINK = 4, 7
NOTHING = memoryview(b"")


class Rank:
    """A prefill rank and the one decode rank that it pushes to."""

    def __init__(
        self, num_pages: int = 64, num_slabs: int = 8, *, prompts: int = 1, chunk: int = 16, is_on: bool = True
    ):
        step = StepLimits(chunk_tokens=chunk, page_tokens=T, rows=1, eos_ids=frozenset(), prompts=prompts)
        sizes = SideSizes(
            rank=0,
            num_pages=num_pages,
            num_slabs=num_slabs,
            vocab_size=1000,
            max_model_tokens=1000,
            max_waiting=100,
            grant_us=1,
            quarantine_share=1.0,
            cap_us=1,
            room_us=1,
            step=step,
            prefix_cache=is_on,
        )
        self.side = PrefillSide(sizes)
        self.side.on_link_up(LINK, PeerWelcome(1, 1, 1, "x", 1000, 1000), 0)
        self.said: list[Message] = []
        self.pushes: list[StartPush] = []
        self.plans: list[StepPlan] = []
        self.number = 0
        self.now_us = 0

    def start(self, ids: list[int], *, salt: str = "", tops: int = -1, generated: int = 0) -> int:
        self.number += 1
        sampling = Sampling(max_tokens=500, prompt_logprobs=tops)
        start = StartPrefill(self.number, 1, 1, generated, sampling, 0, cache_salt=salt)
        self.side.on_head(start, memoryview(array("i", ids).tobytes()), self.now_us)
        pages = array("i", range(-(-len(ids) // T)))
        grant = PagesGranted(self.number, 1, self.number, 0, len(pages))
        self.side.on_peer(LINK, grant, memoryview(pages.tobytes()), self.now_us)
        self.settle()
        return self.number

    def settle(self) -> None:
        self.side.settle(self.now_us)
        self.take()

    def take(self) -> None:
        self.side.check()
        for effect in self.side.take_outbox():
            match effect:
                case StartPush():
                    self.pushes.append(effect)
                case ToHead() | ToPeer():
                    self.said.append(effect.message)

    def step(self) -> list[PrefillChunk]:
        """Plans a step and its result."""
        plan = self.side.plan(self.now_us)
        if plan is None:
            return []
        self.take()
        tokens = tuple(None if chunk.sample is None else 5 for chunk in plan.chunks)
        self.side.apply(StepResult(plan.step, tokens, (), 1), self.now_us)
        self.take()
        self.settle()
        return list(plan.chunks)

    def push(self) -> None:
        """All pushes end well."""
        while self.pushes:
            push = self.pushes.pop(0)
            self.side.on_push_done(push.key, push.first, push.count, 1, 1, self.now_us)
            self.take()
        self.settle()

    def serve(self, ids: list[int], *, salt: str = "", tops: int = -1) -> tuple[int, list[PrefillChunk]]:
        """Alone, to its commit: ids that were not computed, and its chunks."""
        self.now_us += 1_000_000
        number = self.start(ids, salt=salt, tops=tops)
        chunks: list[PrefillChunk] = []
        while more := self.step():
            chunks += more
            self.push()
        commit = self.said[-1]
        assert isinstance(commit, PrefillCommitted) and commit.request == number
        assert commit.num_pages == -(-len(ids) // T)
        return commit.cached_tokens, chunks

    @property
    def prefix(self) -> tuple[int, int, int, int]:
        counts = self.side.gauges().prefix
        return counts.queried, counts.hit, counts.possible, counts.evicted_pages


def words(seed: int, count: int) -> list[int]:
    return [random.Random(f"{seed} {at}").randrange(1000) for at in range(count)]


def test_a_turn_goes_on_from_the_state_at_the_end_of_the_one_before() -> None:
    rank = Rank()
    first = words(1, 10)
    cached, chunks = rank.serve(first)
    assert cached == 0 and chunks[-1].keep >= 0 and rank.side.gauges().pages_cached == 3
    second = [*first, *words(2, 13)]
    rank.now_us += 1
    number = rank.start(second)
    prompt = rank.side.prompts[(number, 1)]
    assert prompt.cached == 10 and prompt.pages[:2] == chunks[-1].pages[:2] and prompt.pages[2] != chunks[-1].pages[2]
    assert rank.side.gauges().pages_pinned == 3
    (chunk,) = rank.step()
    # The open page is copied: what the earlier turn left stays as it was.
    assert chunk.base is not None and (chunk.base.slab, chunk.base.page) == (chunks[-1].keep, chunks[-1].pages[2])
    assert (chunk.start, chunk.num_tokens) == (10, 13)
    (push,) = rank.pushes
    assert (push.first, push.pages) == (0, prompt.pages), "a decode rank has none of it"
    rank.push()
    assert rank.said[-1].cached_tokens == 10
    gauges = rank.side.gauges()
    assert (gauges.pages_cached, gauges.pages_pinned, gauges.slabs_cached) == (3 + 4, 0, 2)
    assert gauges.pages_owned == 0 and gauges.pages_free == 64 - 7
    assert rank.serve([*second, 1])[0] == 23
    assert rank.prefix == (10 + 23 + 24, 10 + 23, 10 + 23, 0)


def test_a_turn_is_pushed_from_the_first_page_though_its_chunks_begin_in_the_middle() -> None:
    rank = Rank(chunk=8)
    rank.serve(words(1, 10))
    number = rank.start([*words(1, 10), *words(2, 20)])
    spans = []
    while rank.step():
        spans += [(push.first, push.count) for push in rank.pushes]
        rank.push()
    assert spans == [(0, 4), (4, 2), (6, 2)] and rank.said[-1].request == number


def test_the_same_prompt_again_is_found_the_third_time_also_where_it_fills_its_pages() -> None:
    for length in (3 * T, 3 * T + 1, 5 * T - 1):
        rank = Rank()
        ids = words(length, length)
        whole = (length - 1) // T * T
        assert rank.serve(ids)[0] == 0
        cached, chunks = rank.serve(ids)
        assert cached == 0 and [c.start + c.num_tokens for c in chunks] == [whole, length]
        pages = rank.side.gauges().pages_cached
        for _ in range(3):
            assert rank.serve(ids)[0] == whole
        # Pages and states that are there are not kept twice.
        assert rank.side.gauges().pages_cached == pages == -(-length // T)
        assert rank.side.gauges().slabs_cached == 2


def test_what_many_prompts_begin_with_is_found_from_the_third_of_them_on() -> None:
    rank = Rank(num_pages=128)
    system = words(0, 6 * T + 3)
    assert rank.serve([*system, *words(1, 9)])[0] == 0
    cached, chunks = rank.serve([*system, *words(2, 9)])
    assert cached == 0 and any(c.start + c.num_tokens == 6 * T and c.keep >= 0 for c in chunks)
    for number in range(3, 6):
        cached, chunks = rank.serve([*system, *words(number, 9)])
        assert cached == 6 * T and chunks[0].base is not None and chunks[0].base.page == -1
    assert rank.side.gauges().pages_cached == 6 + 5 * 3


def test_a_branch_cut_is_worth_two_pages() -> None:
    rank = Rank()
    rank.serve(words(1, 7 * T))
    assert rank.serve([*words(1, T), *words(2, 9)])[0] == 0
    assert rank.serve([*words(1, T), *words(3, 9)])[0] == 0
    assert rank.serve([*words(1, 2 * T), *words(4, 9)])[0] == 0
    assert rank.serve([*words(1, 2 * T), *words(5, 9)])[0] == 2 * T


def test_at_least_one_id_is_computed_and_shorter_prompts_take_nothing_from_longer_ones() -> None:
    rank = Rank()
    ids = words(1, 3 * T)
    rank.serve(ids)
    assert rank.serve(ids[:-1])[0] == 0
    assert rank.serve(ids)[0] == 3 * T - 1


def test_salts_do_not_share() -> None:
    rank = Rank()
    for salt in ("", "a", "b"):
        assert rank.serve(words(1, 10), salt=salt)[0] == 0
        assert rank.serve([*words(1, 10), 1], salt=salt)[0] == 10
    assert rank.prefix == (3 * 21, 3 * 10, 3 * 10, 0)


def test_who_asks_for_the_prompts_log_probabilities_has_all_of_it_computed_and_leaves_it_to_others() -> None:
    rank = Rank()
    rank.serve(words(1, 10))
    cached, chunks = rank.serve([*words(1, 10), *words(2, 7)], tops=1)
    assert cached == 0 and sum(chunk.num_tokens for chunk in chunks) == 17
    assert rank.serve([*words(1, 10), *words(2, 7), 3])[0] == 17
    assert rank.prefix[0] == 10 + 18, "it does not count as asked"


def test_pages_are_given_up_for_a_prompt_least_used_first_and_only_as_many_as_it_needs() -> None:
    rank = Rank(num_pages=10)
    for number in range(3):
        rank.serve(words(number, 3 * T))
    assert rank.side.gauges().pages_free == 1
    rank.serve([*words(0, 3 * T), 1])  # a page more, and the first is used again
    assert rank.side.gauges().pages_free == 0 and rank.prefix[3] == 0
    rank.serve(words(8, T))
    assert rank.prefix[3] == 3
    assert rank.serve([*words(1, 3 * T), 1])[0] == 0, "the oldest that nobody went on from"
    assert rank.serve([*words(0, 3 * T), 1, 2])[0] == 3 * T + 1


def test_a_cache_is_emptied_but_for_what_prompts_use() -> None:
    rank = Rank(num_slabs=12)
    shared = words(1, 5 * T)
    for seed in range(2, 6):  # a tree with forks, branch cuts and cuts inside pages
        rank.serve([*shared, *words(seed, 3 + seed)])
    used = [*shared, *words(2, 5)]
    number = rank.start([*used, *words(9, 10)])
    cut = rank.side.prompts[(number, 1)].cached
    assert cut == len(used) and rank.side.gauges().pages_pinned == 7
    rank.side.on_head(ForgetPrompts(), memoryview(b""), 1)
    rank.take()
    gauges = rank.side.gauges()
    assert (gauges.pages_cached, gauges.pages_pinned, gauges.slabs_cached) == (7, 7, 1)
    while rank.step():
        rank.push()
    assert rank.said[-1].cached_tokens == cut, "the prompt under way keeps what it goes on from"
    rank.side.on_head(ForgetPrompts(), memoryview(b""), 2)
    rank.take()
    assert rank.side.gauges().pages_free == 64 and rank.side.gauges().slabs_cached == 0
    assert rank.serve(used)[0] == 0 and rank.serve([*used, 1])[0] == len(used)


def test_a_prompt_that_only_fits_without_what_it_could_go_on_from_takes_its_room() -> None:
    rank = Rank(num_pages=4, num_slabs=8)
    rank.serve(words(1, 2 * T + 1))
    # Four pages of its own would do; with two shared ones it needs two more, and the open page is a fifth.
    assert rank.serve([*words(1, 2 * T + 1), *words(2, 7)])[0] == 0
    assert rank.side.gauges().pages_cached == 4


@pytest.mark.parametrize("num_slabs", [1, 2, 3])
def test_few_slabs_make_nobody_wait(num_slabs: int) -> None:
    plain, caching = Rank(num_slabs=num_slabs, prompts=4, is_on=False), Rank(num_slabs=num_slabs, prompts=4)
    for rank in (plain, caching):
        for number in range(6):
            rank.start(words(number % 2, 5 + number))
    rng = random.Random(num_slabs)
    for _ in range(200):
        does_step = rng.random() < 0.5
        for rank in (plain, caching):
            if does_step:
                rank.step()
            elif rank.pushes:
                push = rank.pushes.pop(0)
                rank.side.on_push_done(push.key, push.first, push.count, 1, 1, 0)
                rank.take()
                rank.settle()
        waiting = [sum(p.phase is PrefillPhase.QUEUED for p in rank.side.prompts.values()) for rank in (plain, caching)]
        assert waiting[1] <= waiting[0]
    assert not caching.side.prompts


def test_a_kept_state_is_given_back_for_a_prompt_that_has_no_slab() -> None:
    rank = Rank(num_slabs=3)
    one = rank.start(words(1, 10))
    rank.step()
    assert list(rank.side.prompts[(one, 1)].keeps) == [10]
    rank.start(words(2, 10))
    assert list(rank.side.prompts[(one, 1)].keeps) == [10]
    third = rank.start(words(3, 10))
    assert rank.side.prompts[(third, 1)].phase is PrefillPhase.WORKING and not rank.side.prompts[(one, 1)].keeps
    rank.push()
    assert rank.side.gauges().pages_cached == 0


def test_one_chunk_of_a_prompt_is_in_a_step_and_the_rest_of_the_budget_is_for_others() -> None:
    rank = Rank(prompts=3, chunk=32)
    rank.serve(words(1, 20))
    one = rank.start([*words(1, 12), *words(2, 10)])
    other = rank.start(words(3, 9))
    first = rank.step()
    assert [(c.request, c.start, c.num_tokens) for c in first] == [(one, 0, 12), (other, 0, 9)]
    assert [(c.request, c.start, c.num_tokens) for c in rank.step()] == [(one, 12, 10)]


def end_in(rank: Rank, how: str, number: int) -> None:
    """A prompt that works is given up in one of the ways there are."""
    side = rank.side
    match how:
        case "abort":
            side.on_head(Abort(number, 1), NOTHING, 0)
        case "revoke":
            side.on_peer(LINK, GrantRevoked(number, number), NOTHING, 0)
        case "link lost":
            side.on_link_lost(LINK)
        case "peer down":
            side.on_head(PeerDown(1, 1), NOTHING, 0)
        case "void" | "failed" | "overdue":
            push = rank.pushes[0]
            if how != "overdue":
                rank.pushes.pop(0)
            side.on_push_failed(push.key, "why", how)  # type: ignore[arg-type]
    rank.take()


WAYS = ("abort", "revoke", "link lost", "peer down", "void", "failed", "overdue")


@pytest.mark.parametrize("how", WAYS)
def test_every_way_out_drops_the_pin_frees_what_is_its_own_and_keeps_nothing(how: str) -> None:
    rank = Rank(chunk=8)
    rank.serve(words(1, 10))
    before = rank.side.gauges()
    number = rank.start([*words(1, 10), *words(2, 30)])
    rank.step()
    flying = rank.side.plan(0)
    assert flying is not None and rank.side.gauges().pages_pinned == 3
    end_in(rank, how, number)
    assert rank.side.gauges().pages_pinned == 3, "a step and a write still read what it shares"
    rank.side.apply(StepResult(flying.step, (None,), (), 1), 0)
    rank.take()
    for push in rank.pushes:
        rank.side.on_push_done(push.key, push.first, push.count, 1, 1, 0)
    rank.take()
    after = rank.side.gauges()
    assert (after.pages_cached, after.pages_pinned, after.slabs_cached) == (before.pages_cached, 0, 1)
    assert (after.pages_free, after.slabs_free) == (before.pages_free, before.slabs_free)
    left = {prompt.phase for prompt in rank.side.prompts.values()}
    assert left == ({PrefillPhase.BURNT} if how == "failed" else set())


def test_without_a_cache_nothing_stays() -> None:
    rank = Rank(is_on=False)
    for _ in range(3):
        cached, chunks = rank.serve(words(1, 20))
        assert cached == 0 and all(chunk.keep < 0 and chunk.base is None for chunk in chunks)
        assert rank.side.gauges().pages_free == 64 and rank.prefix == (0, 0, 0, 0)
