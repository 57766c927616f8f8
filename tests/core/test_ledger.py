"""Ledger: totals grow with every end and every copy, though the history forgets."""

from __future__ import annotations

import numpy as np

from engine.core.balance import Bill
from engine.core.ledger import ENTRIES, Ledger
from engine.core.load import measure_skew
from transport.messages import REBALANCE_BOUNDS_MS

SKEW = measure_skew(np.array([[3.0, 1.0]]), 1.0)
BILL = Bill(2, 200, 0, 1.0, 10.0, 1.0, SKEW, SKEW)


def end(ledger: Ledger, plan: int, result: str, *, began: float, took_s: float, slots: int) -> None:
    entry = ledger.open(plan, BILL, "ada@north", "", began)
    if slots:
        ledger.add_copies(entry, slots, 100 * slots)
    entry.result, entry.ended_at = result, began + took_s  # type: ignore[assignment]
    ledger.close(entry)


def test_totals_count_ends_copies_and_lengths() -> None:
    ledger = Ledger()
    end(ledger, 1, "applied", began=10.0, took_s=0.1, slots=2)  # a bound belongs to its bucket
    end(ledger, 2, "failed", began=20.0, took_s=0.101, slots=1)
    end(ledger, 3, "failed", began=30.0, took_s=5.0, slots=0)  # nothing moved: no length
    end(ledger, 4, "rolled_back", began=40.0, took_s=301.0, slots=2)
    ledger.skip(5, BILL, "auto", "no gain", 400.0)
    ledger.skip(6, BILL, "auto", "no gain", 410.0)
    totals = ledger.totals
    assert dict(totals.ended) == {"applied": 1, "failed": 2, "rolled_back": 1, "skipped": 2}
    assert (totals.moved_slots, totals.moved_bytes) == (5, 500)
    assert totals.took_counts == [1, 1, *[0] * (len(REBALANCE_BOUNDS_MS) - 2), 1]
    assert totals.took_ms == 100 + 101 + 301_000
    assert [past.plan for past in ledger.report(500.0)] == [1, 2, 3, 4, 6], "a skipped plan takes the place of another"


def test_copies_count_before_the_end() -> None:
    ledger = Ledger()
    entry = ledger.open(1, BILL, "auto", "", 0.0)
    ledger.add_copies(entry, 1, 100)
    ledger.add_copies(entry, 2, 200)
    assert (entry.moved_slots, entry.moved_bytes) == (ledger.totals.moved_slots, ledger.totals.moved_bytes) == (3, 300)
    assert not ledger.totals.ended


def test_what_the_history_has_forgotten_is_still_counted() -> None:
    ledger = Ledger()
    for plan in range(1, ENTRIES + 11):
        end(ledger, plan, "applied", began=float(plan), took_s=0.5, slots=1)
    assert len(ledger.report(1000.0)) == ENTRIES and ledger.totals.ended["applied"] == ENTRIES + 10
