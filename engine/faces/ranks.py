"""Ranks in words: spans and names of ranks, and which ranks an operator's words mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transport.messages import RankStatus

_SPAN = re.compile(r"([pd]?)(\d{1,9})(?:-([pd]?)(\d{1,9}))?")
POOLS = ("prefill", "decode")


class NoSuchRank(ValueError):
    """A word means no rank that is there; the message says why."""


def describe_ranks(ranks: Sequence[int]) -> str:
    """`2-33`, `0,2,4-5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def name_rank(rank: RankStatus) -> str:
    """`p0`, `d17`."""
    return f"{rank.role[0]}{rank.rank}"


def pick_ranks(words: Sequence[str], ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    """The ranks that the words mean, in order and each once.

    Args:
        words: `17`, `d17`, `2-5`, `d2-d5`, several of them with commas between, or `prefill` or `decode` for all of a
            pool.
        ranks: all that there are.

    Raises:
        NoSuchRank: a word is none of these, or means a rank that there is not.
    """
    roles = {rank.rank: rank.role for rank in ranks}
    picked: set[int] = set()
    for word in (part.strip() for given in words for part in given.split(",")):
        if word in POOLS:
            of_pool = {rank for rank, role in roles.items() if role == word}
            if not of_pool:
                raise NoSuchRank(f"the pool {word} has no ranks")
            picked |= of_pool
            continue
        found = _SPAN.fullmatch(word)
        if found is None:
            raise NoSuchRank(f"{word!r} is no rank: write 17, d17, 2-5, prefill or decode")
        letter, first, last_letter, last = found[1], int(found[2]), found[3] or found[1], int(found[4] or found[2])
        if last < first:
            raise NoSuchRank(f"{word!r} ends before it begins")
        if last > max(roles, default=-1):
            raise NoSuchRank(f"there is no rank {last}; there are {describe_ranks(sorted(roles))}")
        for rank in range(first, last + 1):
            if rank not in roles:
                raise NoSuchRank(f"there is no rank {rank}; there are {describe_ranks(sorted(roles))}")
            if {letter, last_letter} - {"", roles[rank][0]}:
                raise NoSuchRank(f"{word!r}: rank {rank} is a {roles[rank]} rank")
            picked.add(rank)
    return tuple(sorted(picked))
