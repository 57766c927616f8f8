"""Naps: how long the owner thread rests between two looks at transfers in flight, and that it does not oversleep.

A share of the time since the last event: the end of a short transfer is seen in a few microseconds, that of a long one
costs little to look for, and what hangs is looked at ever less often.
"""

from __future__ import annotations

import ctypes

NAP_S = 50e-6
"""At most, of what has an event now and then."""
SHARE = 16
LONG_SHARE = 50
"""Of what has no event for long."""
SLACK_NS = 1
"""By so much may the kernel wake the thread late. Its default, 50 us, is as long as a nap."""
_PR_SET_TIMERSLACK = 29


def choose_nap(quiet: float) -> float:
    """Seconds until what is in flight is looked at again, `quiet` seconds after the last event."""
    return max(min(NAP_S, quiet / SHARE), quiet / LONG_SHARE)


def sharpen_timers() -> None:
    """This thread's naps end when they should. Where the kernel refuses, they are longer and nothing else."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
