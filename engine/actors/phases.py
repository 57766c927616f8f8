"""PhaseReport: a rank's start-up, phase by phase, as log events with rate and time left.

Progress may be told a thousand times a second; a phase is logged when it begins, when it ends, and once a second
between.
"""

from __future__ import annotations

import logging

import trio

from engine.log import log_event
from transport.messages import RankStarting, Role

logger = logging.getLogger("engine.supervisor")

PERIOD_S = 1.0


class PhaseReport:
    """One life's start-up."""

    def __init__(self, rank: int, role: Role) -> None:
        self._rank = rank
        self._role = role
        self.started_at = trio.current_time()
        self._phase = ""
        self._began_at = self.started_at
        self._began_done = 0
        self._logged_at = 0.0

    def progress(self, message: RankStarting, now: float) -> None:
        """Takes one progress message."""
        is_new = message.phase != self._phase
        if is_new:
            self._phase, self._began_at, self._began_done = message.phase, now, message.done
        is_over = message.done >= message.total
        if not is_new and not is_over and now - self._logged_at < PERIOD_S:
            return
        self._logged_at = now
        elapsed = now - self._began_at
        gained = message.done - self._began_done
        rate = gained / elapsed if elapsed > 0.01 and gained > 0 else None
        log_event(
            logger,
            "info",
            "rank.phase",
            rank=self._rank,
            role=self._role,
            phase=message.phase,
            progress=describe_progress(message.done, message.total, message.unit),
            rate=describe_rate(rate, message.unit) if rate is not None else None,
            eta_s=(message.total - message.done) / rate if rate is not None and not is_over else None,
            took_s=elapsed if is_over and not is_new else None,
        )


def describe_progress(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{done / 2**20:.0f}/{total / 2**20:.0f}MiB"
    return f"{done}/{total}{'_' + unit if unit else ''}"


def describe_rate(rate: float, unit: str) -> str:
    return f"{rate / 2**20:.0f}MiB/s" if unit == "bytes" else f"{rate:.3g}_{unit or 'items'}/s"
