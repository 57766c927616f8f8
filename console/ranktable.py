"""Ranks as rows of the Ranks screen: what is known of each, and the columns that say it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from console import marks, words
from console.columns import Cell, Column
from console.filters import Field
from console.spark import spark
from console.tablemodel import TableModel
from console.verdict import SKEW_NOTED, find_worst
from console.view import NOT_UP, ClusterView, Hot, is_silent
from transport.messages import HeadEvent, RankStatus

SPARK_S = 60
"""The small graph's seconds."""


@dataclass(frozen=True)
class RankRow:
    """One rank at one moment. Figures of a rank that is not up are not numbers: what it was is no news."""

    view: ClusterView
    status: RankStatus
    now: float
    is_worst: bool
    """Some part of a group waits for it most, and that is worth a word."""
    wait_us: float
    push_rate: float

    @cached_property
    def name(self) -> str:
        return self.view.name(self.status.rank)

    @cached_property
    def state(self) -> str:
        """As `marks.STATE_MARKS` has them."""
        status = self.status
        if status.state in NOT_UP:
            return status.state
        if is_silent(status):
            return "stale"
        if status.state == "draining":
            return "drained" if status.phase == "drained" else "draining"
        return "hot" if self.is_worst and status.state == "ready" else status.state

    @cached_property
    def hot(self) -> Hot | None:
        """Its fullest layer; of a rank that is not up there is none."""
        return self.view.hot(self.status.rank) if self.is_up else None

    @property
    def is_up(self) -> bool:
        return self.status.state not in NOT_UP and self.status.snapshot is not None

    def series(self, name: str) -> float:
        """The newest value of one of its series."""
        return self.view.rate(f"{name}:{self.status.rank}") if self.is_up else math.nan

    def figure(self, name: str) -> float:
        """A figure of its snapshot."""
        return float(getattr(self.status.snapshot, name)) if self.is_up else math.nan

    @property
    def pages_share(self) -> float:
        """Of its pages, what is taken, in per cent; cached pages that nobody uses are not."""
        total = self.figure("pages_total")
        return 100 * (1 - self.figure("pages_available") / total) if total > 0 else math.nan

    @property
    def state_text(self) -> str:
        """The state in words: `ok`, `HOT`, `LOST 14:01:58`, `stale 4 s`, `starting 43% weights`."""
        status, mark = self.status, marks.state_mark(self.state)
        if self.state == "lost":
            down = last_event(self.view, status.rank, "rank.down")
            return f"{mark.word} {words.clock(down.at_ms) if down else words.age(status.age_ms / 1e3)}"
        if self.state in ("stale", "restarting"):
            return f"{mark.word} {words.age(status.age_ms / 1e3)}"
        if self.state in ("starting", "joining"):
            done = f" {100 * status.phase_done // status.phase_total}%" if status.phase_total else ""
            return f"{mark.word}{done} {status.phase}".rstrip()
        if self.state == "draining" and status.snapshot is not None:
            return f"{mark.word} {status.snapshot.running + status.snapshot.waiting}"
        return mark.word

    def state_cell(self, width: int) -> Cell:
        """Its mark and its state in words; the phase gives way, what says the state does not."""
        mark = marks.state_mark(self.state)
        text = self.state_text
        if len(text) + 2 > width:
            text = text.removesuffix(f" {self.status.phase}")
        return (f"{mark.glyph} {text}", mark.style)


def last_event(view: ClusterView, rank: int, name: str) -> HeadEvent | None:
    """The newest event of this name about this rank that is still known."""
    about = mention_of(rank, view.name(rank))
    return next((event for event in reversed(view.events) if event.name == name and about.search(event.text)), None)


def mention_of(rank: int, name: str) -> re.Pattern[str]:
    """Finds a rank in the text of an event: `rank=17`, `decode_rank=17`, `ranks=[3, 17]`, or by its name."""
    return re.compile(rf'rank={rank}\b|\b{name}\b|ranks="?\[?(?:\d+,\s*)*{rank}\b')


def make_rows(view: ClusterView, now: float) -> list[RankRow]:
    """All ranks, in the order of the report."""
    worst = set()
    for part in view.experts.parts if view.experts else ():
        if part.steps and part.skew.max_over_mean >= SKEW_NOTED:
            worst.add(find_worst(view, part).rank)
    waits, pushed = find_waits(view), sum_pushes(view)
    return [
        RankRow(
            view,
            status,
            now,
            status.rank in worst,
            waits.get(status.rank, math.nan) if status.state not in NOT_UP else math.nan,
            pushed.get(status.rank, math.nan) if status.state not in NOT_UP else math.nan,
        )
        for status in view.ranks()
    ]


def find_waits(view: ClusterView) -> dict[int, float]:
    """Microseconds in each step that a rank waits for fuller ones, by the main model's loads and the measured price of
    a row: in each layer all wait for the fullest. Ranks whose price is not known are not in it."""
    waits: dict[int, float] = {}
    for (pool, group, name), heat in view.heats.items():
        part = view.part(pool, group, name)
        report = heat.report
        if part is None or name != "main" or not report.steps or report.us_per_row <= 0:
            continue
        loads = heat.rank_load
        if loads.size == 0:
            continue
        missing = (loads.max(axis=0, keepdims=True) - loads).sum(axis=1, dtype=np.float64)
        for rank, layers in zip(part.ranks, missing.tolist(), strict=False):
            waits[rank] = layers * report.rows_per_step * report.us_per_row
    return waits


def sum_pushes(view: ClusterView) -> dict[int, float]:
    """Bytes in a second by rank: what a prefill rank sends, what a decode rank is sent."""
    pairs = view.pairs
    if pairs is None:
        return {}
    sums: dict[int, float] = {}
    for column in (pairs.prefill, pairs.decode):
        for rank, rate in zip(column.tolist(), pairs.rates.tolist(), strict=True):
            sums[rank] = sums.get(rank, 0.0) + rate
    return sums


def _hottest(row: RankRow) -> str:
    hot = row.hot
    if hot is None:
        return words.NONE
    return f"L{hot.layer} e{hot.expert}" if hot.expert >= 0 else f"L{hot.layer}"


def _graph(row: RankRow, width: int) -> Cell:
    return (spark(row.view.window(f"tok_s:{row.status.rank}", row.now, SPARK_S), width), "spark")


def _lag(row: RankRow) -> float:
    return row.figure("loop_lag_us_p99")


def _skew(row: RankRow) -> float | None:
    return row.hot.load if row.hot else None


def make_columns() -> Sequence[Column[RankRow]]:
    """All columns; those with a high priority only where there is room."""
    column = Column[RankRow]
    return [
        column(
            "rank", "rank", 4, lambda row: row.name, lambda row: (row.name, "bold"),
            align="<", kind="text", is_descending=False,
        ),
        column("run", "run", 4, lambda row: row.figure("running"), lambda row: words.count(row.figure("running")),
               priority=4),
        column("wait", "wait", 4, lambda row: row.figure("waiting"), lambda row: words.count(row.figure("waiting")),
               priority=5),
        column("kv", "kv%", 5, lambda row: row.pages_share, lambda row: _decimal(row.pages_share, 1), priority=5),
        column("tok/s", "tok/s", 6, lambda row: row.series("tok_s"), lambda row: words.short(row.series("tok_s")),
               priority=3),
        column("step_ms", "step ms", 7, lambda row: row.series("step") / 1e3, lambda row: words.ms(row.series("step")),
               priority=2),
        column("wait_ms", "wait ms", 7, lambda row: row.wait_us / 1e3, lambda row: words.ms(row.wait_us, 2),
               priority=7),
        column("skew", "skew", 5, _skew, _skew_cell),
        column("hottest", "hottest", 9, lambda row: _hottest(row), lambda row: _hottest(row),
               align="<", priority=1, kind="text", is_descending=False),
        column("mean", "mean", 5, lambda row: row.hot.mean if row.hot else None,
               lambda row: words.ratio(row.hot.mean if row.hot else None), priority=10),
        column("push", "push GB/s", 9, lambda row: row.push_rate / 1e9, lambda row: _decimal(row.push_rate / 1e9, 2),
               priority=8),
        column("lag_ms", "lag ms", 6, lambda row: _lag(row) / 1e3, lambda row: words.ms(_lag(row)), priority=9),
        column("p99_ms", "step p99", 8, lambda row: row.figure("step_us_p99") / 1e3,
               lambda row: words.ms(row.figure("step_us_p99")), priority=11),
        column("device_ms", "device ms", 9, lambda row: row.figure("device_us_p50") / 1e3,
               lambda row: words.ms(row.figure("device_us_p50")), priority=11),
        column("slabs", "slabs free", 10, lambda row: row.figure("slabs_free"),
               lambda row: words.count(row.figure("slabs_free")), priority=12, is_descending=False),
        column("memory", "memory", 8, lambda row: row.figure("rss_bytes"),
               lambda row: words.size(row.figure("rss_bytes")), priority=12),
        column("life", "life", 4, lambda row: row.status.generation, lambda row: str(row.status.generation),
               priority=12),
        column("60s", "tok/s 60 s", 12, lambda row: None, lambda row: _graph(row, 12),
               align="<", priority=6, grow=18, can_sort=False, fits=_graph),
        column("state", "state", 15, lambda row: row.state_text, lambda row: row.state_cell(15),
               align="<", kind="text", grow=8, is_descending=False, fits=RankRow.state_cell),
    ]  # fmt: skip


def make_table() -> TableModel[RankRow]:
    """The rank that others wait for is at the top."""
    extra = [Field[RankRow]("pool", "text", lambda row: row.status.role)]
    return TableModel(make_columns(), lambda row: row.status.rank, "skew", extra)


def _skew_cell(row: RankRow) -> Cell:
    return (words.ratio(_skew(row)), "hot" if row.state == "hot" else "")


def _decimal(value: float, digits: int) -> str:
    return words.NONE if not math.isfinite(value) else f"{value:,.{digits}f}"
