"""Ledger: what became of one part's plans, for people: a bounded history, and how much of a promise came true.

Half a promise is kept when the drop of max/mean that was measured is half the predicted one. It is measured on the fast
load window once that has seen one half-life of steps under the new placement.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import Literal

from engine.core.balance import Bill
from engine.core.load import Skew
from transport.messages import REBALANCE_BOUNDS_MS, PastRebalance

ENTRIES = 64
UNKNOWN = -1.0

Result = Literal["applied", "skipped", "failed", "rolled_back", "running"]


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """One plan's fate. Skews as max/mean over the sums of layers; times in seconds of one clock."""

    plan: int
    by: str
    reason: str
    before: float
    predicted: float
    started_at: float
    result: Result = "running"
    after: float = 0.0
    realised: float = UNKNOWN
    moved_slots: int = 0
    moved_bytes: int = 0
    ended_at: float = 0.0
    measure_at_steps: int = 0
    """Steps of the load window at which `after` can be said; 0 if it will not be."""


@dataclasses.dataclass(slots=True, eq=False)
class Totals:
    """What only grows, for metrics: the history forgets.

    Attributes:
        ended: result -> plans.
        moved_slots, moved_bytes: that arrived, of the migration that runs too.
        took_ms, took_counts: of migrations that moved something and have ended: sum, and how many up to each of
            `REBALANCE_BOUNDS_MS`, with one more for longer ones.
    """

    ended: collections.Counter[Result] = dataclasses.field(default_factory=collections.Counter)
    moved_slots: int = 0
    moved_bytes: int = 0
    took_ms: int = 0
    took_counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(REBALANCE_BOUNDS_MS) + 1))


class Ledger:
    """The last `ENTRIES` plans that were carried out, given up or skipped, oldest first; `totals` are of all."""

    def __init__(self) -> None:
        self._entries: collections.deque[Entry] = collections.deque(maxlen=ENTRIES)
        self.totals = Totals()

    @property
    def last(self) -> Entry | None:
        return self._entries[-1] if self._entries else None

    def open(self, plan: int, bill: Bill, by: str, reason: str, now: float) -> Entry:
        """A migration begins. Earlier ones that wait to be measured never will be: another placement comes."""
        for entry in self._entries:
            entry.measure_at_steps = 0
        entry = Entry(plan, by, reason, max_over_mean(bill.before), max_over_mean(bill.after), now)
        self._entries.append(entry)
        return entry

    def add_copies(self, entry: Entry, slots: int, num_bytes: int) -> None:
        """So much has arrived."""
        entry.moved_slots += slots
        entry.moved_bytes += num_bytes
        self.totals.moved_slots += slots
        self.totals.moved_bytes += num_bytes

    def close(self, entry: Entry) -> None:
        """It has ended; its result and time are set."""
        self.totals.ended[entry.result] += 1
        if entry.moved_slots:
            took_ms = max(0, round(1e3 * (entry.ended_at - entry.started_at)))
            self.totals.took_ms += took_ms
            self.totals.took_counts[bisect.bisect_left(REBALANCE_BOUNDS_MS, took_ms)] += 1

    def skip(self, plan: int, bill: Bill, by: str, reason: str, now: float) -> None:
        """A plan that is not carried out. It replaces a skipped one before it."""
        if self._entries and self._entries[-1].result == "skipped":
            self._entries.pop()
        before, after = max_over_mean(bill.before), max_over_mean(bill.after)
        self._entries.append(Entry(plan, by, reason, before, after, now, "skipped", ended_at=now))
        self.close(self._entries[-1])

    def due(self, steps: int) -> list[Entry]:
        """Entries that can be measured now."""
        return [entry for entry in self._entries if 0 < entry.measure_at_steps <= steps]

    def report(self, now: float) -> tuple[PastRebalance, ...]:
        return tuple(
            PastRebalance(
                plan=entry.plan,
                ended_ago_ms=0 if entry.result == "running" else max(0, int(1e3 * (now - entry.ended_at))),
                result=entry.result,
                reason=entry.reason[:4096],
                by=entry.by[:256],
                before=entry.before,
                predicted=entry.predicted,
                after=entry.after,
                realised=entry.realised,
                moved_slots=entry.moved_slots,
                moved_bytes=entry.moved_bytes,
                took_ms=max(0, int(1e3 * ((now if entry.result == "running" else entry.ended_at) - entry.started_at))),
            )
            for entry in self._entries
        )


def measure(entry: Entry, after: float) -> None:
    """Says what came of it: `after` is max/mean as it is now."""
    entry.measure_at_steps, entry.after = 0, after
    promised = entry.before - entry.predicted
    entry.realised = (entry.before - after) / promised if promised > 1e-9 else UNKNOWN


def max_over_mean(skew: Skew) -> float:
    """Sum over layers of the fullest rank's load / sum of the mean ones; 1 is even."""
    return 1.0 / skew.balancedness if skew.balancedness > 0 else 1.0
