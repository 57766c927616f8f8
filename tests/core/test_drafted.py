"""What became of drafts: the totals, the tallies by origin, and how seldom a sound prefill rank is suspected."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.drafted import LEAST_REQUESTS, MOST_REQUESTS, DraftMeter, add_counts, find_bad_origins
from transport.messages import DRAFT_ORIGINS, DraftCounts, DraftOrigin


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_totals_by_place() -> None:
    meter = DraftMeter()
    assert meter.counts() == DraftCounts()
    meter.add_step(longs(3, 3, 0, 1), longs(3, 1, 0, 0))
    meter.add_step(longs(0, 0), longs(0, 0))
    meter.add_step(longs(7), longs(7))
    assert meter.counts() == DraftCounts(4, 14, 11, (3, 2, 2, 1, 1, 1, 1))
    both = add_counts((meter.counts(), DraftCounts(), DraftCounts(1, 3, 2, (1, 1, 0, 0, 0, 0, 0))))
    assert both == DraftCounts(5, 17, 13, (4, 3, 2, 1, 1, 1, 1))
    assert add_counts(()) == DraftCounts()


def test_tallies_are_of_one_life_and_fade() -> None:
    meter = DraftMeter()
    meter.add_request(3, 1, 0, 0)  # nothing was drafted, nothing is told
    assert meter.origins() == ()
    meter.add_request(3, 1, 10, 4)
    meter.add_request(3, 1, 2, 1)
    assert meter.origins() == (DraftOrigin(3, 1, 2, 12, 5, 104, 17, 42),)
    meter.add_request(3, 2, 5, 5)
    assert meter.origins() == (DraftOrigin(3, 2, 1, 5, 5, 25, 25, 25),)
    for _ in range(5 * MOST_REQUESTS):
        meter.add_request(3, 2, 10, 9)
    for _ in range(2 * MOST_REQUESTS):
        meter.add_request(3, 2, 10, 0)
    (origin,) = meter.origins()
    assert MOST_REQUESTS // 2 <= origin.requests <= MOST_REQUESTS
    assert origin.accepted < 0.25 * origin.proposed  # nine in ten for long, and nothing of late


def test_a_snapshot_has_the_origins_with_most_requests() -> None:
    meter = DraftMeter()
    for rank in range(2 * DRAFT_ORIGINS):
        for _ in range(1 + rank % 2):
            meter.add_request(rank, 1, 3, 1)
    assert [origin.rank for origin in meter.origins()] == list(range(1, 2 * DRAFT_ORIGINS, 2))


def draw_tally(rng: np.random.Generator, rank: int, requests: int, factor: float = 1.0) -> DraftOrigin:
    proposed = np.maximum(1, np.exp(rng.normal(4, 1.2, requests)).astype(int))
    accepted = rng.binomial(proposed, factor * rng.random(requests))
    sums = ((proposed * proposed).sum(), (accepted * accepted).sum(), (proposed * accepted).sum())
    return DraftOrigin(rank, 1, requests, int(proposed.sum()), int(accepted.sum()), *map(int, sums))


def test_sound_ranks_are_not_suspected_and_bad_ones_are() -> None:
    rng = np.random.default_rng(7)
    lives = dict.fromkeys(range(4), 1)
    found = 0
    for trial in range(1000):
        sound = [draw_tally(rng, rank, LEAST_REQUESTS) for rank in range(4)]
        assert find_bad_origins(sound, lives) == []
        bad = [draw_tally(rng, rank, LEAST_REQUESTS, 0.05 if rank == trial % 4 else 1.0) for rank in range(4)]
        sentences = find_bad_origins(bad, lives)
        assert all(f"rank {trial % 4} " in sentence for sentence in sentences)
        found += len(sentences)
    assert found > 900


def test_the_sentence_has_the_figures_of_all_decode_ranks() -> None:
    bad = [DraftOrigin(1, 2, 50, 5_000, 100, 500_000, 200, 10_000)] * 2
    good = [DraftOrigin(0, 1, 50, 5_000, 3_000, 500_000, 180_000, 300_000)] * 2
    assert find_bad_origins([*bad, *good], {0: 1, 1: 2}) == [
        "2% of 10,000 drafts on KV of prefill rank 1 were accepted, 60% of 10,000 on that of others: what it pushes may"
        " be wrong"
    ]
    assert find_bad_origins([*bad, *good], {0: 1, 1: 3}) == []  # that life is over
    assert find_bad_origins([bad[0], *good], {0: 1, 1: 2}) == []  # too few
    assert find_bad_origins(bad, {1: 2}) == []  # nobody to compare with
    assert find_bad_origins((), {}) == []


@pytest.mark.parametrize("accepted", [0, 1])
def test_ranks_with_nothing_accepted_compare(accepted: int) -> None:
    """No division by nothing, and no certainty out of zeros."""
    same = [DraftOrigin(rank, 1, 64, 64, 64 * accepted, 64, 64 * accepted, 64 * accepted) for rank in range(3)]
    assert find_bad_origins(same, dict.fromkeys(range(3), 1)) == []
