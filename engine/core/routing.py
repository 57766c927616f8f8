"""Routing: which prefill and which decode rank a request goes to. Pure: the same loads give the same pair.

The head is the only one that submits, so its own count of what it gave to a rank is never late; snapshots add what only
the rank knows (pages in quarantine). Ties go to the lowest rank number, which keeps runs repeatable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

BROKEN_PAIR_S = 5.0
"""How long a pair is avoided after it lost a request; a link is normally made anew within a second."""


class RankLoad(NamedTuple):
    """What counts for choosing a rank.

    Attributes:
        requests: given to it and not ended there.
        tokens: ids that these are expected to compute (prefill), or will hold at their longest (decode).
        pages: pages that these take at their longest.
        page_tokens, num_pages: its arena.
        quarantined_pages: of its last snapshot.
        is_drained: it takes no new requests, because an operator said so.
    """

    rank: int
    requests: int
    tokens: int
    pages: int
    page_tokens: int
    num_pages: int
    quarantined_pages: int = 0
    is_drained: bool = False

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The choice."""

    prefill: int
    decode: int


def can_ever_hold(loads: Iterable[RankLoad], num_tokens: int) -> bool:
    """Whether one of the ranks, empty, has pages enough for a sequence of `num_tokens`. Drained ones count: an operator
    may put them back."""
    return any(load.pages_for(num_tokens) <= load.num_pages for load in loads)


def choose_pair(
    prefill: Iterable[RankLoad],
    decode: Iterable[RankLoad],
    *,
    num_ids: int,
    max_tokens_total: int,
    rank_waiting: int,
    broken: frozenset[tuple[int, int]] = frozenset(),
    spared: Mapping[int, int] | None = None,
) -> Pair | None:
    """The pair for a request, or None while no rank of a pool may take one more.

    Prefill: least ids still to compute, this request's included, for its queue runs one after another. So a rank that
    has the beginning of the prompt gets it unless its backlog is longer than another's by more ids than that spares.

    Decode: first a rank whose free pages fit the request now, then fewest sequences (a step's time grows with its
    rows), then fewest pages taken.

    Args:
        prefill, decode: ready ranks of each pool; drained ones are never chosen.
        num_ids: ids to compute.
        max_tokens_total: length of the sequence at its longest.
        rank_waiting: requests that one rank may have at a time.
        broken: pairs (prefill, decode) to use only when there is no other.
        spared: by prefill rank, ids of the request that it is expected to have in its cache; fewer than `num_ids`.
    """
    sources = _list_open(prefill, num_ids, rank_waiting)
    sinks = _list_open(decode, max_tokens_total, rank_waiting)
    if not sources or not sinks:
        return None

    def decode_cost(load: RankLoad) -> tuple[bool, int, int, int]:
        room = load.num_pages - load.quarantined_pages - load.pages
        return (load.pages_for(max_tokens_total) > room, load.requests, load.pages, load.rank)

    def prefill_cost(load: RankLoad) -> tuple[int, int, int, int]:
        known = spared.get(load.rank, 0) if spared else 0
        return (load.tokens - known, -known, load.requests, load.rank)

    if broken:
        for source in sorted(sources, key=prefill_cost):
            sound = [sink for sink in sinks if (source.rank, sink.rank) not in broken]
            if sound:
                return Pair(prefill=source.rank, decode=min(sound, key=decode_cost).rank)
    return Pair(prefill=min(map(prefill_cost, sources))[-1], decode=min(map(decode_cost, sinks))[-1])


def _list_open(loads: Iterable[RankLoad], num_tokens: int, rank_waiting: int) -> list[RankLoad]:
    """Ranks that may take one more sequence of so many tokens."""
    return [
        load
        for load in loads
        if load.requests < rank_waiting and not load.is_drained and -(-num_tokens // load.page_tokens) <= load.num_pages
    ]


class BrokenPairs:
    """Pairs of ranks that lately lost a request to what is between them, though both ranks live.

    Without it a pair whose link is down attracts every request: it is always the least loaded.
    """

    def __init__(self) -> None:
        self._pair_to_until: dict[tuple[int, int], float] = {}

    def mark(self, prefill: int, decode: int, now: float) -> None:
        """A request was just lost there."""
        self._pair_to_until[(prefill, decode)] = now + BROKEN_PAIR_S

    def forget(self, rank: int) -> None:
        """The rank's next life has links of its own."""
        for pair in [pair for pair in self._pair_to_until if rank in pair]:
            del self._pair_to_until[pair]

    def current(self, now: float) -> frozenset[tuple[int, int]]:
        """Pairs to avoid now."""
        if self._pair_to_until:
            for pair in [pair for pair, until in self._pair_to_until.items() if until <= now]:
                del self._pair_to_until[pair]
        return frozenset(self._pair_to_until)
