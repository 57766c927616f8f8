"""LookTimes: how long a worker may sleep before it looks again whether a step has ended.

Steps of one size take about as long as the last ones did. So one sleep lasts until shortly before the end that is to be
expected; from there on looks are LOOK_S apart, and an end is told as early as if it had been looked at all the time. A
look out of a sleep of milliseconds costs several times what the next one does, so there is one of them and not some.

A step that is suddenly shorter is told when it would have ended as the shortest of the last ones did. That waits for
nobody, since another step is queued behind it, unless two of them fit into the sleep.
"""

from __future__ import annotations

import collections

LOOK_S = 1e-4
"""Between two looks at a step that may end any moment."""
NEAR_SHARE = 1 / 100
"""Such a share of its length, and a look, before its expected end a step may end any moment: it began up to a look
before that was seen."""
LAST = 8
"""Steps of a size that are remembered. The shortest of them counts."""


class LookTimes:
    """See the module. Without clock: whoever asks says how long a step has run."""

    def __init__(self) -> None:
        self._lengths: dict[int, collections.deque[float]] = {}

    def note(self, rows: int, length_s: float) -> None:
        """A step of so many rows has taken so long."""
        lengths = self._lengths.get(_size(rows))
        if lengths is None:
            lengths = self._lengths[_size(rows)] = collections.deque(maxlen=LAST)
        lengths.append(length_s)

    def find_wait(self, rows: int, elapsed_s: float, most_s: float) -> float:
        """Seconds until the next look at a step.

        Args:
            rows: of it.
            elapsed_s: since it began.
            most_s: an answer is never longer.
        """
        lengths = self._lengths.get(_size(rows))
        if lengths is None:
            return LOOK_S
        left_s = min(lengths) * (1 - NEAR_SHARE) - LOOK_S - elapsed_s
        return max(LOOK_S, min(left_s, most_s))


def _size(rows: int) -> int:
    """Steps are made for powers of two of rows."""
    return max(rows - 1, 0).bit_length()
