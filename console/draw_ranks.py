"""The Ranks screen as lines: a row for each rank, and below all that is known of the one under the cursor. Pure."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from console import marks, words
from console.lines import Line, Run, beside, clip, clip_text, joined, pad, width_of, wrap
from console.ranktable import RankRow, make_rows, make_table, mention_of
from console.requesttable import request_name
from console.tablemodel import TableModel
from console.view import ClusterView

Page = Literal["load", "links", "requests", "events"]
PAGES: tuple[Page, ...] = ("load", "links", "requests", "events")
STUCK_MS = 1000
"""A rank that has work and made no step for longer is worth a line."""
WIDE = 118
HIGH = 16
"""Cells and lines of a detail from which all its pages stand next to each other."""


@dataclass
class RanksState:
    """What is chosen on this screen. `is_open`: the detail of the rank under the cursor is shown; `page`: which one of
    its pages, where there is no room for all."""

    table: TableModel[RankRow] = field(default_factory=make_table)
    is_open: bool = False
    page: int = 0
    table_y: int = 1
    """Line of the table's heading, for a click."""


def build(view: ClusterView, ui: RanksState, width: int, height: int, now: float) -> list[Line]:
    """At most `height` lines of at most `width` cells."""
    rows = make_rows(view, now)
    ui.table.set_rows(rows)
    if view.status is None:
        return [_title(ui, rows, width), (), ((" no data yet: the head has not answered", "dim"),)][:height]
    row = ui.table.current
    pane = _detail(view, ui, row, width, _pane_height(height), now) if ui.is_open and row is not None else []
    lines = [_title(ui, rows, width), *ui.table.lines(width, height - 1 - len(pane))]
    if len(lines) == 2:
        said = "no rank matches the filter" if ui.table.total else "the head has no ranks"
        lines.append(((f" {said}", "dim"),))
    lines += [()] * (height - len(pane) - len(lines))
    return (lines + pane)[:height]


def is_wide(width: int, height: int) -> bool:
    """Whether a body of this size shows all pages of a detail at once."""
    return width >= WIDE and _pane_height(height) >= HIGH


def _pane_height(height: int) -> int:
    return max(12, min(22, height // 2))


def _title(ui: RanksState, rows: Sequence[RankRow], width: int) -> Line:
    runs: list[Run] = [(" Ranks  ", "title"), *ui.table.caption()]
    counts = collections.Counter(row.state for row in rows)
    for state in ("lost", "restarting", "stale", "starting", "joining", "draining", "drained"):
        if counts[state]:
            mark = marks.STATE_MARKS[state]
            runs.append((f"  {mark.glyph} {counts[state]} {state}", mark.style))
    return clip(joined(runs), width)


# ------------------------------------------------------------ the detail


def _detail(view: ClusterView, ui: RanksState, row: RankRow, width: int, height: int, now: float) -> list[Line]:
    is_whole = width >= WIDE and height >= HIGH
    lines = [_pane_rule(row, ui, is_whole, width)]
    room = height - 1
    if not is_whole:
        page = PAGES[ui.page % len(PAGES)]
        body = {
            "load": lambda: _load_columns(row, width),
            "links": lambda: _links(view, row, width, room),
            "requests": lambda: _requests(view, row, width, room),
            "events": lambda: _events(view, row, width, room),
        }[page]()
    else:
        body = _pages(view, row, width, room)
    lines += [clip(line, width) for line in body[:room]]
    return lines + [()] * (height - len(lines))


def _pages(view: ClusterView, row: RankRow, width: int, height: int) -> list[Line]:
    """All pages at once: figures at the left, pairs and requests beside them, events below."""
    top, left = height - 4, 80
    rest = width - left - 2
    if rest >= 76:
        size = (rest - 2) // 2
        right = beside(
            [
                ([_heading("links"), *_links(view, row, size, top - 1)], size),
                ([_heading("requests"), *_requests(view, row, size, top - 1)], size),
            ],
            gap=2,
        )
    else:
        half = top // 2
        links = [_heading("links"), *_links(view, row, rest, half - 1)]
        right = links + [()] * (half - len(links))
        right += [_heading("requests"), *_requests(view, row, rest, top - half - 1)]
    body = beside([(_load_columns(row, left)[:top], left), (right[:top], rest)], gap=2)
    return [*body, *([()] * (top - len(body))), _heading("events"), *_events(view, row, width, 3)]


def _pane_rule(row: RankRow, ui: RanksState, is_whole: bool, width: int) -> Line:
    status = row.status
    life = f"life {status.generation}" + (f", {words.plural(status.restarts, 'restart')}" if status.restarts else "")
    runs: list[Run] = [("── ", "rule"), (row.name, "bold"), (f" {status.role}  {life}  pid {status.pid} ", "label")]
    if not is_whole:
        for n, page in enumerate(PAGES):
            is_here = n == ui.page % len(PAGES)
            runs.append((f" [{page}]" if is_here else f"  {page} ", "chosen" if is_here else "label"))
        runs.append((" ", ""))
    gap = width - width_of(tuple(runs))
    return clip(joined([*runs, ("─" * max(0, gap), "rule")]), width)


def _heading(text: str) -> Line:
    return ((f" {text}", "head"),)


def _figures(row: RankRow) -> list[tuple[str, str]]:
    """Everything that is known of a rank, as labels and words of at most 24 cells: two columns fit 80. What a rank that
    is not up once was is left out."""
    status, hot, snapshot = row.status, row.hot, row.status.snapshot
    said = [("state", row.state_text), ("heard of", f"{words.age(status.age_ms / 1e3)} ago")]
    if not row.is_up or snapshot is None:
        if status.phase_total:
            amount = words.size if status.phase_unit == "bytes" else words.short
            said.append((status.phase, f"{amount(status.phase_done)} of {amount(status.phase_total)}"))
        if status.phase_ms:
            said.append(("phase since", words.age(status.phase_ms / 1e3)))
        return said
    if hot is not None:
        expert = f", expert {hot.expert}" if hot.expert >= 0 else ""
        said.append(("fullest layer", f"{hot.layer}: {hot.load:.2f}x{expert}"))
        said.append(("all layers", f"{hot.mean:.2f}x the mean"))
    if math.isfinite(row.wait_us):
        said.append(("waits a step", f"{words.us(row.wait_us)} for fuller ranks"))
    is_decode = status.role == "decode"
    corrupt = f", {snapshot.corrupt_pushes:,} corrupt" if snapshot.corrupt_pushes else ""
    said += [
        ("requests", f"{snapshot.running:,} run, {snapshot.waiting:,} wait"),
        ("tokens", f"{words.short(row.series('tok_s'))}/s {'generated' if is_decode else 'of prompts'}"),
        ("step", words.us(row.series("step"))),
        ("step p50/99", f"{words.us(snapshot.step_us_p50)}, {words.us(snapshot.step_us_p99)}"),
        ("device p50/99", f"{words.us(snapshot.device_us_p50)}, {words.us(snapshot.device_us_p99)}"),
        ("pages", f"{snapshot.pages_free:,} of {snapshot.pages_total:,} free"),
        ("", f"{snapshot.pages_owned:,} owned, {snapshot.pages_granted:,} granted"),
        ("slabs", f"{snapshot.slabs_free:,} free"),
        ("pushes", f"{words.rate(row.push_rate)} {'in' if is_decode else 'out'}{corrupt}"),
        ("in flight", f"{snapshot.pushes_inflight:,}, {words.size(snapshot.pushed_bytes)} so far"),
        ("lag p50/99", f"{words.us(snapshot.loop_lag_us_p50)}, {words.us(snapshot.loop_lag_us_p99)}"),
        ("memory", words.size(snapshot.rss_bytes)),
        ("steps", f"{snapshot.step:,}"),
        ("so far", f"{words.short(snapshot.prompt_tokens)} in, {words.short(snapshot.generated_tokens)} out"),
    ]
    if snapshot.pages_cached:
        prefix = snapshot.prefix
        said.append(
            ("cached", f"{words.short(snapshot.pages_cached)} pages, {words.short(snapshot.pages_pinned)} used")
        )
        if prefix.queried:
            hit = 100 * prefix.hit / prefix.queried
            said.append(("prompts hit", f"{hit:.1f}%, {words.short(prefix.evicted_pages)} evicted"))
    if snapshot.pages_quarantined:
        said.append(("quarantined", f"{snapshot.pages_quarantined:,} pages"))
    if snapshot.step_age_ms > STUCK_MS:
        said.insert(1, ("no step for", words.age(snapshot.step_age_ms / 1e3)))
    return said


def _because(row: RankRow, width: int) -> list[Line]:
    """Why it is as it is, if that is known."""
    return [((f" {part}", "warn"),) for part in wrap(row.status.reason, width - 2)[:2]] if row.status.reason else []


def _load(row: RankRow, width: int) -> list[Line]:
    return _because(row, width) + _figure_lines(row, width)


def _figure_lines(row: RankRow, width: int) -> list[Line]:
    return [
        pad(joined([(f" {label:<14}", "label"), (clip_text(text, width - 15), "value")]), width)
        for label, text in _figures(row)
    ]


def _load_columns(row: RankRow, width: int) -> list[Line]:
    """The same in two columns, for a low pane."""
    half = (width - 2) // 2
    lines = _figure_lines(row, half)
    middle = (len(lines) + 1) // 2
    return _because(row, width) + beside([(lines[:middle], half), (lines[middle:], half)], gap=2)


def _links(view: ClusterView, row: RankRow, width: int, height: int) -> list[Line]:
    """Its pairs, the busiest first."""
    pairs, rank = view.pairs, row.status.rank
    if pairs is None:
        return [((" not asked yet", "dim"),)]
    mine, other = (pairs.decode, pairs.prefill) if row.status.role == "decode" else (pairs.prefill, pairs.decode)
    found = np.flatnonzero(mine == rank)
    if not found.size:
        return [((" nothing was pushed yet", "dim"),)]
    order = found[np.argsort(-pairs.rates[found], kind="stable")]
    lines: list[Line] = []
    is_roomy = width >= 60
    for at in order[: height - 1 if len(order) > height else height].tolist():
        failed = int(pairs.failed[at])
        runs: list[Run] = [
            (f" {view.name(int(other[at])):<5}", "bold"),
            (f"{words.rate(float(pairs.rates[at])):>10}", "value"),
            (f"  p99 {words.us(int(pairs.p99_us[at])):>7}", ""),
        ]
        if is_roomy:
            runs.append((f"  {words.size(int(pairs.bytes[at])):>8} in {int(pairs.pushes[at]):,} pushes", "label"))
            runs.append((f", {int(pairs.inflight[at]):,} in flight", "label"))
        if failed:
            runs.append((f"  {marks.STATE_MARKS['lost'].glyph} {failed:,}" + (" failed" if is_roomy else ""), "bad"))
        lines.append(joined(runs))
    if len(order) > height:
        lines.append(((f" and {words.plural(len(order) - height + 1, 'more pair')}", "dim"),))
    return lines


def _requests(view: ClusterView, row: RankRow, width: int, height: int) -> list[Line]:
    """Its requests, the oldest first."""
    if view.requests is None:
        return [((" not asked yet", "dim"),)]
    rank = row.status.rank
    found = [held for held in view.requests.rows if rank in (held.prefill_rank, held.decode_rank)]
    if not found:
        return [((" it has no requests", "dim"),)]
    lines: list[Line] = []
    for held in found[: height - 1 if len(found) > height else height]:
        runs: list[Run] = [
            (f" {request_name(held.request):<9}", "bold"),
            (f"{held.state:<9}", ""),
            (f"{words.age(held.age_ms / 1e3):>7}", "value"),
            (f"  {words.short(held.prompt_tokens):>5} in", "label"),
        ]
        if width >= 60:
            runs.append((f"  {held.generated:,} of {held.max_tokens:,} out", "label"))
            runs.append((f"  {held.label or held.client}", "dim"))
        lines.append(clip(joined(runs), width))
    if len(found) > height:
        lines.append(((f" and {words.count(len(found) - height + 1)} more", "dim"),))
    return lines


def _events(view: ClusterView, row: RankRow, width: int, height: int) -> list[Line]:
    """The newest events that name it, newest first."""
    about = mention_of(row.status.rank, row.name)
    lines: list[Line] = []
    for event in reversed(view.events):
        if len(lines) == height:
            break
        if about.search(event.text):
            mark = marks.level_mark(event.level)
            runs = [(f" {words.clock(event.at_ms)} ", "label"), (f"{mark.glyph} ", mark.style)]
            lines.append(clip(joined([*runs, (event.name, "bold"), (f" {event.text}", "")]), width))
    return lines or [((" none that name it", "dim"),)]


def describe(row: RankRow) -> Sequence[tuple[str, str]]:
    """The figures of one rank in words, for whoever copies or exports them."""
    return _figures(row)
