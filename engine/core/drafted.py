"""What became of drafts: totals of a decode rank, tallies by the prefill rank that the KV came from, what follows.

The totals only grow. A tally is of late: at MOST_REQUESTS all of it is halved, so that what was long ago fades.

Why by prefill rank: a drafter drafts from the KV that the prompt's rank has pushed. Text that goes on, but from KV that
is not quite right, is drafted badly, and no checksum sees it if the bytes were wrong before they were sent. Prompts are
spread by load and not by what is in them, so all prefill ranks should do alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from engine.core.plan import Ints
from transport.messages import DRAFT_ORIGINS, MOST_DRAFTS, DraftCounts, DraftOrigin

MOST_REQUESTS = 1024
"""Of one tally."""
LEAST_REQUESTS = 64
"""A rank with fewer, or others with fewer together, tell nothing yet."""
LEAST_DISTANCE = 6.0
"""Standard errors between a rank's share of accepted drafts and that of all others."""
LEAST_RATIO = 0.5
"""A rank whose share is more than so much of the others' is not suspected, however sure the difference is."""


class DraftMeter:
    """Counts what became of a decode rank's drafts."""

    def __init__(self) -> None:
        self._rows = self._proposed = self._accepted = 0
        self._accepted_at = np.zeros(MOST_DRAFTS + 1, np.int64)
        self._origins: dict[int, DraftOrigin] = {}

    def add_step(self, proposed: Ints, accepted: Ints) -> None:
        """Of each row of a step: drafts that were verified, and how many of them held."""
        num_proposed = int(proposed.sum())
        if num_proposed:
            self._rows += int(np.count_nonzero(proposed))
            self._proposed += num_proposed
            self._accepted += int(accepted.sum())
            self._accepted_at += np.bincount(accepted, minlength=MOST_DRAFTS + 1)

    def add_request(self, rank: int, generation: int, proposed: int, accepted: int) -> None:
        """A request whose KV came from that life of a prefill rank has ended; figures of another life are dropped."""
        if not proposed:
            return
        origin = self._origins.get(rank)
        if origin is None or origin.generation != generation:
            origin = DraftOrigin(rank, generation)
        elif origin.requests >= MOST_REQUESTS:
            origin = DraftOrigin(rank, generation, *(figure // 2 for figure in _figures(origin)))
        more = (1, proposed, accepted, proposed * proposed, accepted * accepted, proposed * accepted)
        self._origins[rank] = DraftOrigin(
            rank, generation, *(old + new for old, new in zip(_figures(origin), more, strict=True))
        )

    def counts(self) -> DraftCounts:
        """The totals so far."""
        # A row with three accepted ones had its first, second and third accepted.
        at_least = self._accepted_at[::-1].cumsum()[::-1][1:]
        return DraftCounts(self._rows, self._proposed, self._accepted, tuple(at_least.tolist()) if self._rows else ())

    def origins(self) -> tuple[DraftOrigin, ...]:
        """The tallies of those ranks that most requests came from, by rank."""
        most = sorted(self._origins.values(), key=lambda origin: -origin.requests)[:DRAFT_ORIGINS]
        return tuple(sorted(most, key=lambda origin: origin.rank))


def add_counts(counts: Iterable[DraftCounts]) -> DraftCounts:
    """The sum of several totals."""
    rows = proposed = accepted = 0
    accepted_at = [0] * MOST_DRAFTS
    for each in counts:
        rows, proposed, accepted = rows + each.rows, proposed + each.proposed, accepted + each.accepted
        for place, count in enumerate(each.accepted_at[:MOST_DRAFTS]):
            accepted_at[place] += count
    return DraftCounts(rows, proposed, accepted, tuple(accepted_at) if rows else ())


def find_bad_origins(tallies: Iterable[DraftOrigin], generations: Mapping[int, int]) -> list[str]:
    """One sentence for each prefill rank whose drafts are accepted far less than those of the others.

    The share of a rank is accepted / proposed over its requests. Requests differ much in how well they can be drafted
    and drafts within one are no independent draws, so the error of a share is reckoned from requests, by the residuals
    accepted - share * proposed of each. False alarms, where prompts are spread without a look at what is in them: none
    in 192,000 looks at ranks with 64 requests, whose lengths differ by a factor of 10 and whose shares are even, nearly
    all or nothing, all alike, or mostly nothing; so below one in 60,000 with 95 % confidence. Of ranks that fell to a
    twentieth 94 to 100 % are found with 64 requests for each of four ranks, but for the last kind: it takes more.

    Args:
        tallies: of all decode ranks.
        generations: the present life of each living prefill rank; tallies of others are left out.
    """
    sums: dict[int, tuple[int, ...]] = {}
    for tally in tallies:
        if generations.get(tally.rank) == tally.generation:
            old = sums.get(tally.rank, (0,) * 6)
            sums[tally.rank] = tuple(a + b for a, b in zip(old, _figures(tally), strict=True))
    total = tuple(sum(column) for column in zip(*sums.values(), strict=True))
    sentences = []
    for rank, mine in sorted(sums.items()):
        others = tuple(a - b for a, b in zip(total, mine, strict=True))
        if min(mine[0], others[0]) < LEAST_REQUESTS:
            continue
        share, error = _share(mine)
        other_share, other_error = _share(others)
        if share < LEAST_RATIO * other_share and other_share - share > LEAST_DISTANCE * math.hypot(error, other_error):
            sentences.append(
                f"{share:.0%} of {mine[1]:,} drafts on KV of prefill rank {rank} were accepted, {other_share:.0%} of"
                f" {others[1]:,} on that of others: what it pushes may be wrong"
            )
    return sentences


def _share(figures: tuple[int, ...]) -> tuple[float, float]:
    """A share, and its standard error over requests."""
    requests, proposed, accepted, proposed2, accepted2, both = figures
    share = accepted / proposed
    squares = accepted2 - 2 * share * both + share * share * proposed2
    # Not below that of one request that is all wrong: where all have nothing accepted, the next one may differ.
    return share, math.sqrt(max(squares, proposed2 / requests)) / proposed


def _figures(origin: DraftOrigin) -> tuple[int, ...]:
    """What adds up."""
    return (
        origin.requests, origin.proposed, origin.accepted, origin.proposed2, origin.accepted2, origin.both,
    )  # fmt: skip
