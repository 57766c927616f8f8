"""Routing: which prefill and which decode rank a request goes to. Pure: the same loads give the same pair.

The head is the only one that submits, so its own count of what it gave to a rank is never late; snapshots add what only
the rank knows (pages in quarantine). Ties go to the lowest rank number, which keeps runs repeatable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class RankLoad:
    """What counts for choosing a rank.

    Attributes:
        requests: given to it and not ended there.
        tokens: ids that these have to compute (prefill), or will hold at their longest (decode).
        pages: pages that these take at their longest.
        page_tokens, num_pages: its arena.
        quarantined_pages: of its last snapshot.
    """

    rank: int
    requests: int
    tokens: int
    pages: int
    page_tokens: int
    num_pages: int
    quarantined_pages: int = 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The choice."""

    prefill: int
    decode: int


def can_ever_hold(loads: Iterable[RankLoad], num_tokens: int) -> bool:
    """Whether one of the ranks, empty, has pages enough for a sequence of `num_tokens`."""
    return any(load.pages_for(num_tokens) <= load.num_pages for load in loads)


def choose_pair(
    prefill: Iterable[RankLoad],
    decode: Iterable[RankLoad],
    *,
    num_ids: int,
    max_tokens_total: int,
    rank_waiting: int,
) -> Pair | None:
    """The pair for a request, or None while no rank of a pool may take one more.

    Prefill: least ids still to compute, for its queue runs one after another. Decode: first a rank whose free pages fit
    the request now, then fewest sequences (a step's time grows with its rows), then fewest pages taken.

    Args:
        prefill, decode: ready ranks of each pool.
        num_ids: ids to compute.
        max_tokens_total: length of the sequence at its longest.
        rank_waiting: requests that one rank may have at a time.
    """
    sources = [load for load in prefill if load.requests < rank_waiting and load.pages_for(num_ids) <= load.num_pages]
    sinks = [
        load for load in decode if load.requests < rank_waiting and load.pages_for(max_tokens_total) <= load.num_pages
    ]
    if not sources or not sinks:
        return None

    def decode_cost(load: RankLoad) -> tuple[bool, int, int, int]:
        room = load.num_pages - load.quarantined_pages - load.pages
        return (load.pages_for(max_tokens_total) > room, load.requests, load.pages, load.rank)

    return Pair(
        prefill=min(sources, key=lambda load: (load.tokens, load.requests, load.rank)).rank,
        decode=min(sinks, key=decode_cost).rank,
    )
