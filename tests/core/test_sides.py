"""Prefill and decode sides together, under random order, broken links, failed and late writes, and deaths."""

from __future__ import annotations

import collections
import random

import msgspec
import pytest

from engine.core import reuse
from engine.core.handback import GiverPhase
from engine.core.handoff import PrefillPhase
from engine.core.pages import PageState
from engine.core.plan import Base
from engine.core.prefill import PrefillSide
from engine.core.prefix import PrefixTree
from engine.core.request import Prompt
from engine.errors import LocalProtocolError
from tests.core.cluster import Client, Cluster, Node, expect
from transport.messages import Sampling

ROOMS = ((24, 1), (24, 2), (24, 3), (24, 6), (80, 4), (80, 8), (80, 20), (240, 20))
"""Pages and slabs of clusters with caches."""


def play(seed: int, *, faults: bool, checksums: bool = False, caches: bool = False, turns: bool = False) -> Cluster:
    """Thirty requests with faults, then quiet until nothing moves. With caches most begin as others do."""
    num_pages, num_slabs = random.Random(seed).choice(ROOMS) if caches else (24, 4)
    cluster = Cluster(
        seed,
        num_pages=num_pages,
        num_slabs=num_slabs,
        num_prefill=2,
        num_decode=2,
        checksums=checksums,
        caches=caches,
        turns=turns,
    )
    cluster.faults = faults
    cluster.death_weight = (0.0, 0.003, 0.02)[seed % 3]
    rng = cluster.rng
    waiting = [
        Client(
            number,
            [rng.randrange(2, 30) for _ in range(rng.randrange(1, 45))],
            Sampling(max_tokens=rng.randrange(1, 20)),
        )
        for number in range(30)
    ]
    if caches:
        _have_alike(waiting, random.Random(seed))
    for _ in range(30_000):
        if waiting and rng.random() < 0.05:
            cluster.submit(waiting.pop())
        if rng.random() < 0.004 and cluster.clients:
            cluster.abort(rng.choice(list(cluster.clients.values())))
        cluster.faults = faults and bool(waiting)
        if cluster.step() or waiting:
            continue
        if all(client.outcome for client in cluster.clients.values()):
            return cluster
        # Quarantine took the room that somebody waits for: the head kills the writers at its cap.
        writers = [node for node in cluster.nodes if is_burnt(node)]
        assert writers, "stalled"
        for node in writers:
            cluster.kill(node)
    raise AssertionError("it never comes to rest")


def is_burnt(node: Node) -> bool:
    """It owes the end of an epoch that its word can not end."""
    side = node.side
    if isinstance(side, PrefillSide):
        return any(prompt.phase is PrefillPhase.BURNT for prompt in side.prompts.values())
    return any(offer.phase is GiverPhase.BURNT for offer in side.giver._offers.values())


def _have_alike(clients: list[Client], rng: random.Random) -> None:
    """Most begin as another one, with its tokens behind it or without, up to anywhere; some are the same."""
    for place, client in reversed(list(enumerate(clients))):  # the last one is submitted first
        client.salt = rng.choice(["", "", "", "", "salt"])
        client.affinity = rng.choice(["", "one", "other"])
        if rng.random() < 0.1:
            client.sampling = msgspec.structs.replace(client.sampling, prompt_logprobs=1)
        if rng.random() < 0.8 and place + 1 < len(clients):
            other = rng.choice(clients[place + 1 :])
            ids = [*other.prompt, *expect(other)[0]]
            begin = ids[: rng.choice([len(ids), len(other.prompt), rng.randrange(len(ids) + 1)])]
            client.prompt = (begin + client.prompt[: rng.randrange(len(client.prompt) + 1)])[:28] or client.prompt


def free_or_cached(node: Node) -> bool:
    """Nothing is in use: all memory is free, or cached by nobody who still needs it."""
    pools = node.side.arena.pages, node.side.arena.slabs
    is_unused = all(pool.num_free + pool.count(PageState.CACHED) == pool.total for pool in pools)
    return is_unused and node.side.gauges().pages_pinned == 0


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_everything_is_answered_exactly_and_all_memory_is_free(seed: int) -> None:
    cluster = play(seed, faults=False)
    for client in cluster.clients.values():
        assert client.outcome in ("finished", "aborted") and client.attempt == 1
    for node in cluster.nodes:
        assert node.side.arena.pages.num_free == node.side.arena.pages.total and node.side.arena.slabs.num_free == 4
        assert not getattr(node.side, "prompts", None) and not getattr(node.side, "sequences", None)


@pytest.mark.parametrize("seed", range(80))
def test_with_faults_no_write_hits_the_wrong_memory_and_only_burnt_epochs_keep_any(seed: int) -> None:
    cluster = play(seed, faults=True, checksums=seed >= 60)
    for client in cluster.clients.values():
        assert client.outcome in ("finished", "aborted")
    burnt = [prompt for node in cluster.nodes[:2] for prompt in node.side.prompts.values()]
    kept = [sequence for node in cluster.nodes[2:] for sequence in node.side.sequences.values()]
    assert all(prompt.phase is PrefillPhase.BURNT for prompt in burnt)
    assert {sequence.key for sequence in kept} == {prompt.key for prompt in burnt}
    # The death of the writers gives back what is left.
    for node in list(cluster.nodes[:2]):
        cluster.kill(node)
    while cluster.step():
        pass
    for node in cluster.nodes:
        node.side.check()
        assert node.side.arena.pages.num_free == node.side.arena.pages.total and node.side.arena.slabs.num_free == 4


def test_the_faults_really_happen() -> None:
    seen: collections.Counter[str] = collections.Counter()
    wanted = {"death", "failed push", "rank_lost", "transfer_failed", "write into quarantine"}
    for seed in range(12):
        seen += play(seed, faults=True).seen
        if wanted <= set(seen):
            return
    raise AssertionError(seen)


def test_with_checksums_everything_is_read_back_once_and_corruption_costs_an_attempt() -> None:
    calm = play(1, faults=False, checksums=True)
    assert all(client.outcome in ("finished", "aborted") and client.attempt == 1 for client in calm.clients.values())
    assert calm.seen["read back"] >= 25 and not calm.seen["corrupt"]
    rough = play(62, faults=True, checksums=True)
    assert rough.seen["corrupt"] and rough.seen["kv_corrupt"] <= rough.seen["corrupt"]
    assert max(client.attempt for client in rough.clients.values()) > 1
    assert sum(node.side.gauges().corrupt_pushes for node in rough.nodes if not node.is_dead) <= rough.seen["corrupt"]


@pytest.mark.parametrize("seed", range(40))
def test_with_caches_and_without_faults_nothing_waits_for_ever_or_goes_on_from_other_ids(seed: int) -> None:
    cluster = play(seed, faults=False, caches=True)
    for client in cluster.clients.values():
        assert client.outcome in ("finished", "aborted") and client.attempt == 1
    for node in cluster.nodes:
        assert free_or_cached(node)
        assert not getattr(node.side, "prompts", None) and not getattr(node.side, "sequences", None)


@pytest.mark.parametrize("seed", range(80))
def test_with_caches_and_faults_memory_is_accounted_for_on_every_way_out(seed: int) -> None:
    cluster = play(seed, faults=True, caches=True, checksums=seed >= 60)
    for client in cluster.clients.values():
        assert client.outcome in ("finished", "aborted")
    assert all(free_or_cached(node) for node in cluster.nodes[:2] if not node.is_dead)


def check_turns(cluster: Cluster, *, faults: bool) -> None:
    """Nothing is on its way any more but what burnt epochs keep, and the death of their writers gives that back."""
    for client in cluster.clients.values():
        assert client.outcome in ("finished", "aborted")
        assert faults or client.attempt == 1
    for node in list(cluster.nodes[2:]):
        if is_burnt(node):
            cluster.kill(node)
    while cluster.step():
        pass
    for node in cluster.nodes:
        node.side.check()
        if isinstance(node.side, PrefillSide):
            assert free_or_cached(node) and node.side.taker.is_quiet
        else:
            assert not node.side._held and node.side.giver.is_quiet
            kept = node.side.arena.pages.count(PageState.QUARANTINED)
            assert node.side.arena.pages.num_free + kept == node.side.arena.pages.total


@pytest.mark.parametrize("seed", range(40))
def test_turns_come_back_and_nothing_waits_for_them(seed: int) -> None:
    check_turns(play(seed, faults=False, caches=True, turns=True, checksums=seed >= 30), faults=False)


@pytest.mark.parametrize("seed", range(80))
def test_with_turns_and_faults_memory_is_accounted_for_on_every_way_out(seed: int) -> None:
    check_turns(play(seed, faults=True, caches=True, turns=True, checksums=seed >= 60), faults=True)


def test_turns_are_really_handed_back() -> None:
    seen: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    kinds = ("offered", "withdrawn", "declined", "failed", "granted", "gone", "full", "kept", "kept_pages")
    for seed in range(40):
        cluster = play(seed, faults=seed % 2 > 0, caches=True, turns=True)
        seen += cluster.seen
        for node in cluster.nodes:
            totals.update(msgspec.structs.asdict(node.side.gauges().turns))
        assert totals["kept"] <= totals["granted"] <= totals["offered"]
        if seen["turn landed"] > 100 and seen["turn into quarantine"] and all(totals[what] > 0 for what in kinds):
            return
    raise AssertionError((seen, totals))


def test_caches_are_really_used() -> None:
    seen: collections.Counter[str] = collections.Counter()
    evicted = 0
    for seed in range(12):
        cluster = play(seed, faults=seed % 2 > 0, caches=True)
        seen += cluster.seen
        for node in cluster.nodes[:2]:
            evicted += node.side.gauges().prefix.evicted_pages
            counts = node.side.gauges().prefix
            assert 0 <= counts.hit <= counts.possible <= counts.queried
        if seen["cached"] > 160 and seen["kept"] > 40 and evicted > 40:
            return
    raise AssertionError((seen, evicted))


def keeps_pins_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixTree, "pin", lambda self, cut: None)
    patch.setattr(PrefixTree, "unpin", lambda self, cut: None)


def leaves_the_pin_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixTree, "unpin", lambda self, cut: None)


def forgets_the_open_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reuse, "Base", lambda slab, page: Base(slab))


def donates_when_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    """And not when all of it was pushed."""
    original = PrefillSide._push

    def push(self: PrefillSide, prompt: Prompt, is_last: bool) -> None:
        original(self, prompt, is_last)
        if is_last:
            self.cache.donate(prompt, 0)

    patch.setattr(PrefillSide, "_push", push)


def finds_what_only_begins_alike(patch: pytest.MonkeyPatch) -> None:
    original = PrefixTree.find

    def find(self, digests, ids, most):
        cut, known = original(self, digests, ids, most)
        deeper = [each for each in self._places() if cut is not None and each.parent is cut.parent and each.slab >= 0]
        return (deeper[0] if deeper and deeper[0].position <= most else cut), known

    patch.setattr(PrefixTree, "find", find)


PLANTED = (
    keeps_pins_for_itself,
    leaves_the_pin_behind,
    forgets_the_open_page,
    donates_when_it_is_computed,
    finds_what_only_begins_alike,
)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_of_the_cache_is_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(80):
        try:
            cluster = play(seed, faults=seed % 2 > 0, caches=True)
        except (AssertionError, LocalProtocolError):
            return
        if not all(free_or_cached(node) for node in cluster.nodes[:2] if not node.is_dead):
            return
    pytest.fail("80 seeds did not find it")
