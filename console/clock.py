"""Time as the console sees it; tests bring their own."""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def period(self, hz: float) -> float:
        """Seconds from one refresh to the next."""
        return 1.0 / hz

    def pause(self, seconds: float) -> float:
        """How long a pause really takes: as long as it should."""
        return seconds
