"""Pace: how soon the head takes the next of those that wait, and so how long one waits who comes now. Pure."""

from __future__ import annotations

SHARE = 1 / 16
"""Weight of the newest interval in the mean."""


class Pace:
    """Intervals between two requests that were taken while others waited. Nothing is learnt while nobody waits: who is
    taken at once says nothing of how soon another would be."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._since: float | None = None

    def note_taken(self, now: float) -> None:
        """The first in the line was taken."""
        if self._since is not None:
            interval = now - self._since
            self._mean_s = interval if self._mean_s is None else self._mean_s + (interval - self._mean_s) * SHARE
            self._since = now

    def note_line(self, now: float, *, is_empty: bool) -> None:
        """All are taken that could be; who is left waits."""
        if is_empty:
            self._since = None
        elif self._since is None:
            self._since = now

    def predict_s(self, before: int, now: float) -> float:
        """How long one waits who has so many before him, seconds; 0 with none. A line that stands still is as slow as
        it has been standing."""
        if not before or self._since is None:
            return 0.0
        return (before + 1) * max(self._mean_s or 0.0, now - self._since)
