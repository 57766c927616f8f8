"""Arena: a rank's pages and slabs, moved together as the memory of one request, or of one cut of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.pages import PagePool, PageState
from engine.core.runs import Runs
from engine.errors import LocalProtocolError

Holding = tuple[Sequence[int], int, PageState, Sequence[int], PageState]
"""Pages of a request or of the prefix cache, their slab (-1 for none) and state; then further pages and theirs."""


class Arena:
    """Two pools. Every method takes pages and a slab, and raises LocalProtocolError where `pages.ALLOWED` says no."""

    def __init__(self, num_pages: int, num_slabs: int) -> None:
        self.pages = PagePool("page", num_pages)
        self.slabs = PagePool("slab", num_slabs)

    def has_room(self, num_pages: int) -> bool:
        return self.slabs.num_free > 0 and self.pages.num_free >= num_pages

    def allocate(self, num_pages: int) -> tuple[Runs, int]:
        """Pages and a slab, owned. Ask `has_room` before."""
        pages, slabs = self.pages.allocate(num_pages), self.slabs.allocate(1)
        if pages is None or slabs is None:
            raise LocalProtocolError(f"no room for {num_pages} pages and a slab")
        return pages, slabs[0]

    def grant(self, pages: Sequence[int], slab: int) -> None:
        self.pages.grant(pages)
        self.slabs.grant((slab,))

    def adopt(self, pages: Sequence[int], slab: int) -> None:
        self.pages.adopt(pages)
        self.slabs.adopt((slab,))

    def quarantine(self, pages: Sequence[int], slab: int) -> None:
        self.pages.quarantine(pages)
        self.slabs.quarantine((slab,))

    def hold(self, pages: Sequence[int], slab: int) -> None:
        self.pages.hold(pages)
        self.slabs.hold((slab,))

    def cache(self, pages: Sequence[int], slab: int) -> None:
        self.pages.cache(pages)
        self.slabs.cache((slab,))

    def evict(self, pages: Sequence[int], slab: int) -> None:
        self.free(pages, slab, PageState.CACHED)

    def free(self, pages: Sequence[int], slab: int, source: PageState) -> None:
        self.pages.free(pages, source)
        self.slabs.free((slab,), source)

    def check(self, holdings: Iterable[Holding]) -> None:
        """Conservation: both pools add up; what is not free is held exactly once, in the state that its holder says.

        Raises:
            LocalProtocolError: names the first unit that is wrong.
        """
        self.pages.check()
        self.slabs.check()
        held_pages, held_slabs = bytearray(self.pages.total), bytearray(self.slabs.total)
        num_held = 0
        for pages, slab, state, more, more_state in holdings:
            parts = [(self.pages, held_pages, pages, state)]
            if more:
                parts.append((self.pages, held_pages, more, more_state))
            if slab >= 0:
                parts.append((self.slabs, held_slabs, (slab,), state))
            for pool, held, units, wanted in parts:
                runs = Runs.of(units)
                other = pool.find_other(runs, wanted)
                if other is not None:
                    raise LocalProtocolError(f"{pool.what} {other} is {pool.state_of(other).name}, not {wanted.name}")
                for run in runs.ranges:
                    twice = held.find(1, run.start, run.stop)
                    if twice >= 0:
                        raise LocalProtocolError(f"{pool.what} {twice} is held twice")
                    held[run.start : run.stop] = b"\x01" * len(run)
                num_held += len(runs)
        used = self.pages.total - self.pages.num_free + self.slabs.total - self.slabs.num_free
        if used != num_held:
            raise LocalProtocolError(f"{used} pages and slabs are in use, {num_held} are held")
