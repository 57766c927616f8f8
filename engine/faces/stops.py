"""StopSearch: finds stop strings in text that arrives in pieces, and holds back what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Text in, text that is certainly before any stop string out.

    The stop string that is *complete* first wins (of several that end at one place, the longest), so the result does
    not depend on how the text was cut into pieces. Nothing is held back but the longest tail that could still begin a
    stop string.

    Attributes:
        matched: the stop string that was found, or None. After a match `push` takes nothing more.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would stop every text at once")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece; returns what can be shown now. On a match that is the text up to the stop string."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        found = self._first_complete(pending)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return pending[:start]
        keep = self._possible_start(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """The text is over: what was held back was text after all."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, pending: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, pending: str) -> int:
        """Length of the longest tail of `pending` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(pending)), 0, -1):
            tail = pending[len(pending) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
