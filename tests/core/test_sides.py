"""Prefill and decode sides together, under random order, broken links, failed and late writes, and deaths."""

from __future__ import annotations

import collections

import pytest

from engine.core.handoff import PrefillPhase
from tests.core.cluster import Client, Cluster
from transport.messages import Sampling


def play(seed: int, *, faults: bool, checksums: bool = False) -> Cluster:
    """Thirty requests with faults, then quiet until nothing moves."""
    cluster = Cluster(seed, num_pages=24, num_slabs=4, num_prefill=2, num_decode=2, checksums=checksums)
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
        writers = [node for node in cluster.nodes[:2] if node.side.prompts]
        assert any(p.phase is PrefillPhase.BURNT for node in writers for p in node.side.prompts.values()), "stalled"
        for node in writers:
            cluster.kill(node)
    raise AssertionError("it never comes to rest")


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
    for seed in range(12):
        seen += play(seed, faults=True).seen
    assert {"death", "failed push", "rank_lost", "transfer_failed", "write into quarantine"} <= set(seen)


def test_with_checksums_everything_is_read_back_once_and_corruption_costs_an_attempt() -> None:
    calm = play(1, faults=False, checksums=True)
    assert all(client.outcome in ("finished", "aborted") and client.attempt == 1 for client in calm.clients.values())
    assert calm.seen["read back"] >= 25 and not calm.seen["corrupt"]
    rough = play(62, faults=True, checksums=True)
    assert rough.seen["corrupt"] and rough.seen["kv_corrupt"] <= rough.seen["corrupt"]
    assert max(client.attempt for client in rough.clients.values()) > 1
    assert sum(node.side.gauges().corrupt_pushes for node in rough.nodes if not node.is_dead) <= rough.seen["corrupt"]
