"""Arena: a rank's pages and slabs, moved together as the memory of one request."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.pages import PagePool, PageState
from engine.errors import LocalProtocolError

Holding = tuple[tuple[int, ...], int, PageState, tuple[int, ...], PageState]
"""Pages of a request, its slab (-1 for none) and their state; then further pages and theirs."""


class Arena:
    """Two pools. Every method takes pages and a slab, and raises LocalProtocolError where `pages.ALLOWED` says no."""

    def __init__(self, num_pages: int, num_slabs: int) -> None:
        self.pages = PagePool("page", num_pages)
        self.slabs = PagePool("slab", num_slabs)

    def has_room(self, num_pages: int) -> bool:
        return self.slabs.num_free > 0 and self.pages.num_free >= num_pages

    def allocate(self, num_pages: int) -> tuple[tuple[int, ...], int]:
        """Pages and a slab, owned. Ask `has_room` before."""
        pages, slabs = self.pages.allocate(num_pages), self.slabs.allocate(1)
        if pages is None or slabs is None:
            raise LocalProtocolError(f"no room for {num_pages} pages and a slab")
        return pages, slabs[0]

    def grant(self, pages: tuple[int, ...], slab: int) -> None:
        self.pages.grant(pages)
        self.slabs.grant((slab,))

    def adopt(self, pages: tuple[int, ...], slab: int) -> None:
        self.pages.adopt(pages)
        self.slabs.adopt((slab,))

    def quarantine(self, pages: tuple[int, ...], slab: int) -> None:
        self.pages.quarantine(pages)
        self.slabs.quarantine((slab,))

    def hold(self, pages: tuple[int, ...], slab: int) -> None:
        self.pages.hold(pages)
        self.slabs.hold((slab,))

    def free(self, pages: tuple[int, ...], slab: int, source: PageState) -> None:
        self.pages.free(pages, source)
        self.slabs.free((slab,), source)

    def check(self, holdings: Iterable[Holding]) -> None:
        """Conservation: both pools add up; what is not free is held exactly once, in the state that its holder says.

        Raises:
            LocalProtocolError: names the first unit that is wrong.
        """
        self.pages.check()
        self.slabs.check()
        held: dict[tuple[str, int], PageState] = {}
        for pages, slab, state, more, more_state in holdings:
            units = [("page", page, state) for page in pages] + [("page", page, more_state) for page in more]
            if slab >= 0:
                units.append(("slab", slab, state))
            for what, unit, wanted in units:
                pool = self.pages if what == "page" else self.slabs
                if (what, unit) in held:
                    raise LocalProtocolError(f"{what} {unit} belongs to two requests")
                held[(what, unit)] = wanted
                if pool.state_of(unit) is not wanted:
                    raise LocalProtocolError(f"{what} {unit} is {pool.state_of(unit).name}, not {wanted.name}")
        used = self.pages.total - self.pages.num_free + self.slabs.total - self.slabs.num_free
        if used != len(held):
            raise LocalProtocolError(f"{used} pages and slabs are in use, {len(held)} belong to requests")
