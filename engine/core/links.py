"""PeerTable: the pair streams of one side, by number and by rank, and which peer processes are known to be dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Peer(Protocol):
    """One life of the process at the other end."""

    @property
    def rank(self) -> int: ...
    @property
    def generation(self) -> int: ...


T = TypeVar("T", bound=Peer)


class PeerTable(Generic[T]):
    """At most one link per rank; link numbers are never reused."""

    def __init__(self) -> None:
        self._link_to_peer: dict[int, T] = {}
        self._rank_to_link: dict[int, int] = {}
        self._rank_to_dead: dict[int, int] = {}

    def add(self, link: int, peer: T) -> None:
        """The rank must have no link; `link_to` tells, and `pop` ends it."""
        assert peer.rank not in self._rank_to_link
        self._link_to_peer[link] = peer
        self._rank_to_link[peer.rank] = link

    def pop(self, link: int) -> T | None:
        """Ends a link; None if it is not here (any more)."""
        peer = self._link_to_peer.pop(link, None)
        if peer is not None:
            del self._rank_to_link[peer.rank]
        return peer

    def find(self, link: int) -> T | None:
        return self._link_to_peer.get(link)

    def link_to(self, rank: int) -> int | None:
        return self._rank_to_link.get(rank)

    def bury(self, rank: int, generation: int) -> int | None:
        """A life, and all before it, are over; returns the link to it that is still here."""
        self._rank_to_dead[rank] = max(generation, self._rank_to_dead.get(rank, 0))
        link = self._rank_to_link.get(rank)
        if link is None or self._link_to_peer[link].generation > generation:
            return None
        return link

    def is_dead(self, rank: int, generation: int) -> bool:
        return generation <= self._rank_to_dead.get(rank, 0)

    def __iter__(self) -> Iterator[T]:
        return iter(self._link_to_peer.values())
