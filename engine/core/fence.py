"""Fence: when a writer has to go, because what it was granted stays in quarantine and somebody needs the memory.

Quarantine ends by the writer's word or by its death, never by a deadline. So where the word does not come, the head is
asked for the death. Three reasons, each with its patience: the quarantine is at its cap (`limits.quarantined_pages`, a
share of pages or of slabs); a request waits for room that the quarantine takes; or the writer has no link, since it
makes none anew while a write of the old one runs, and so serves nobody here. Time counts from the start of each
quarantine, so that a rank which aborts much, and is answered, never accuses anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.core.arena import Arena
from engine.core.pages import PageState

Writer = tuple[int, int]
"""Rank and generation."""


class Lent(Protocol):
    """Memory under an epoch. `quarantined_us`: when it was first seen in quarantine; 0 if it was not."""

    quarantined_us: int

    @property
    def is_quarantined(self) -> bool: ...
    @property
    def writer(self) -> Writer: ...
    @property
    def num_pages(self) -> int: ...


class Fence:
    """Of one rank that grants memory: a decode rank's to prefill ranks, or a prefill rank's to decode ranks.

    Args:
        share: of all pages, or of all slabs, in quarantine: the cap.
        cap_us: patience with a quarantine while the cap is reached; a revoke is answered in milliseconds.
        room_us: patience with a quarantine while a request waits for room, or while its writer has no link; a write may
            rightly take so long.
    """

    def __init__(self, *, share: float, cap_us: int, room_us: int) -> None:
        self._share = share
        self._cap_us = cap_us
        self._room_us = room_us
        self._accused: set[Writer] = set()
        self.next_us: int | None = None
        """When to look again, if nothing happens until then."""
        self.is_on_guard = False
        """It has looked since it was told to rest."""

    def rest(self) -> None:
        """Nothing is in quarantine."""
        self._accused.clear()
        self.next_us = None
        self.is_on_guard = False

    def look(
        self,
        arena: Arena,
        epochs: Iterable[Lent],
        *,
        is_short: bool,
        is_linked: Callable[[int], bool],
        now_us: int,
    ) -> list[tuple[Writer, int]]:
        """The writers to accuse now, each once, with the pages that they hold up.

        Args:
            epochs: all whose epoch is open.
            is_short: the first waiting request finds no room.
            is_linked: whether a rank has a pair stream.
        """
        self.next_us = None
        self.is_on_guard = True
        if not arena.slabs.count(PageState.QUARANTINED):
            self.rest()
            return []
        is_capped = any(
            pool.count(PageState.QUARANTINED) >= self._share * pool.total for pool in (arena.pages, arena.slabs)
        )
        patience_us = self._cap_us if is_capped else self._room_us
        writers: dict[Writer, int] = {}
        for lent in epochs:
            if not lent.is_quarantined:
                continue
            lent.quarantined_us = lent.quarantined_us or now_us
            writer = lent.writer
            due_us = lent.quarantined_us + patience_us
            is_needed = is_capped or is_short or not is_linked(writer[0])
            if not is_needed or writer in self._accused:
                continue
            if due_us <= now_us:
                writers[writer] = writers.get(writer, 0) + lent.num_pages
            else:
                self.next_us = due_us if self.next_us is None else min(self.next_us, due_us)
        self._accused.update(writers)
        return sorted(writers.items())
