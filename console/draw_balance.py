"""Screen 6: what experts would be moved, what that saves and costs, what is being moved, what came of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from console import words
from console.balance_state import RUNNING, BalanceState, aim_of, newest_first
from console.draw_moves import RESULT_STYLES, draw_moves, draw_past
from console.draw_plan import name_aim, plan_box, since_answer
from console.lines import Line, Run, clip, fit_text, join, joined, line, width_of, wrap
from console.spark import bar_line
from console.verdict import SKEW_NOTED, describe_place, describe_skew, find_worst
from console.view import ClusterView
from transport.messages import PartReport, PastRebalance

ITL_WINDOW_S = 10.0
"""The inter-token p99 beside a running re-placement is of so many seconds: it has to show what the moves do."""
QUIET_MS = 5000
"""A re-placement without progress for so long is said to have none."""
BAR = 22


def build(view: ClusterView, ui: BalanceState, width: int, height: int, now: float) -> list[Line]:
    """At most `height` lines of at most `width` cells."""
    part = ui.find_part(view)
    if part is None:
        known = view.experts is not None
        text = "Every rank has all experts: nothing can be moved." if known else "No answer yet."
        lines = [line((" 6 Balance ", "title")), (), line(f" {text}", style="dim")]
    else:
        lines = _compose(view, ui, part, width, height, now)
    return [clip(one, width) for one in lines[:height]]


def _compose(view: ClusterView, ui: BalanceState, part: PartReport, width: int, height: int, now: float) -> list[Line]:
    head = [_title(view, ui, part, width), *_mode(view, part, now, width)]
    if ui.detail == "moves":
        return [*head, *draw_moves(view, ui, part, width, height - len(head))]
    if ui.detail == "past":
        return [*head, *draw_past(ui, part, width)]
    body = [*plan_box(view, ui, part, width, now), *_progress(view, ui, part, width, now)]
    totals = _totals(part, width)
    room = height - len(head) - len(body) - len(totals)
    ui.history_y = len(head) + len(body) + 1
    return [*head, *body, *_history(ui, part, width, room), *totals]


# ---------------------------------------------------------------- what it is about


def _title(view: ClusterView, ui: BalanceState, part: PartReport, width: int) -> Line:
    """All parts; where they do not fit, the chosen one and its neighbours."""
    parts = view.experts.parts if view.experts else ()
    cells = []
    here = 0
    for n, one in enumerate(parts):
        is_here = aim_of(one) == aim_of(part)
        here = n if is_here else here
        skew = f" {one.skew.max_over_mean:.2f}" if one.steps else ""
        cells.append((f" {name_aim(one)}{skew} ", "chosen" if is_here else "dim"))
    title: Run = (" 6 Balance  ", "title")
    room = width - width_of((title,))

    def size(first: int) -> int:
        return sum(len(text) + 1 for text, _ in cells[first : here + 1])

    first = 0
    while first < here and size(first) + (2 if first else 0) > room:
        first += 1
    runs = [title, *([("… ", "dim")] if first else [])]
    for cell in cells[first:]:
        runs += [cell, (" ", "")]
    return clip(joined(runs), width)


def _mode(view: ClusterView, part: PartReport, now: float, width: int) -> Iterator[Line]:
    """Who starts moves; and the skew in one sentence."""
    runs: list[Run] = [(" mode ", "label"), (part.mode, "value")]
    if part.mode == "auto" and part.next_check_ms:
        left = max(0.0, part.next_check_ms / 1e3 - since_answer(view, now))
        runs += [(", next check in ", "label"), (words.age(left), "value")]
    runs += [("   state ", "label"), (part.state, "value" if part.state == "idle" else "info")]
    last = next((past for past in newest_first(part) if past.result in ("applied", "rolled_back")), None)
    if last is not None:
        ago = words.age(last.ended_ago_ms / 1e3 + since_answer(view, now))
        runs.append((f"   plan {last.plan} {last.result.replace('_', ' ')} {ago} ago", "label"))
    yield clip(joined(runs), width)
    if not part.steps:
        yield line((" skew ", "label"), ("not known: no steps yet", "value"))
        return
    worst = find_worst(view, part)
    style = "hot" if part.skew.max_over_mean >= SKEW_NOTED else "good"
    where = f"; worst: {describe_place(view, worst)}"
    yield clip(line((f" {describe_skew(part)}", style), (where, "value")), width)


# ---------------------------------------------------------------- what runs, and what has been


def _progress(view: ClusterView, ui: BalanceState, part: PartReport, width: int, now: float) -> Iterator[Line]:
    if part.state not in RUNNING:
        return
    share = part.copied_slots / part.total_slots if part.total_slots else 0.0
    slots = f" {part.copied_slots:,} of {part.total_slots:,} slots ({int(100 * share)} %)"
    state = "warn" if part.state != "moving" else "info"
    left = line((f" {part.state} ".ljust(9), state), bar_line(share, BAR), (slots, "value"))
    yield join(left, _latency(view), width)
    text = part.done_text
    quiet = part.progress_age_ms + 1e3 * since_answer(view, now)
    if part.progress_age_ms >= QUIET_MS and part.state != "paused":
        text = (
            f"no progress for {words.age(quiet / 1e3)}; {text}" if text else f"no progress for {words.age(quiet / 1e3)}"
        )
        yield clip(line((f" {text}", "warn")), width)
    elif text:
        yield clip(line((f" {text}", "dim")), width)


def _latency(view: ClusterView) -> Line:
    p99 = view.percentiles("itl", ITL_WINDOW_S)[2]
    limit = view.traffic.itl_limit_us if view.traffic else 0
    style = "bad" if limit and math.isfinite(p99) and p99 > limit else "value"
    most = f" (limit {words.us(limit)})" if limit else ""
    return (("token p99 ", "label"), (words.us(p99), style), (f"{most} ", "label"))


_COLUMNS = (
    ("plan", 4, ">"), ("ended", 10, ">"), ("result", 11, "<"), ("before", 6, ">"), ("pred", 4, ">"), ("after", 5, ">"),
    ("came", 5, ">"), ("slots", 6, ">"), ("bytes", 8, ">"), ("took", 7, ">"), ("by", 10, "<"), ("why", 0, "<"),
)  # fmt: skip
"""Name, cells, side. The last one takes what is left; what does not fit is left out, the detail has it."""
WHY_FROM = 12
"""Cells without which `why` is not shown."""


def _history(ui: BalanceState, part: PartReport, width: int, room: int) -> list[Line]:
    history = newest_first(part)
    if room < 2:
        return []
    if not history:
        return [line((" history  ", "head"), ("nothing was moved yet", "dim"))]
    shown = room - 1
    cursor = ui.row - 1
    first = max(0, min(cursor - shown + 1, len(history) - shown))
    ui.history_first = first
    lines = [_row([name for name, _, _ in _COLUMNS], width, "head")]
    for n, past in enumerate(history[first : first + shown], first):
        row = _row(_cells(past), width, "value", RESULT_STYLES[past.result])
        lines.append(joined((text, f"{style} cursor".strip()) for text, style in row) if n == cursor else row)
    return lines


def _row(cells: Sequence[str], width: int, style: str, result: str = "") -> Line:
    runs: list[Run] = []
    left = width
    for (name, size, align), text in zip(_COLUMNS, cells, strict=True):
        if not size:
            size = left - 1 if left > WHY_FROM else 0
        if not size or size + 1 > left:
            continue
        runs += [(" ", style), (fit_text(text, size, align), result or style if name == "result" else style)]
        left -= size + 1
    return joined(runs)


def _cells(past: PastRebalance) -> list[str]:
    came = past.realised != -1
    return [
        str(past.plan),
        "now" if past.result == "running" else f"{words.age(past.ended_ago_ms / 1e3)} ago",
        past.result.replace("_", " "),
        words.ratio(past.before),
        words.ratio(past.predicted),
        words.ratio(past.after) if came else words.NONE,
        words.share(past.realised) if came else words.NONE,
        words.short(past.moved_slots),
        words.size(past.moved_bytes),
        words.us(past.took_ms * 1e3),
        past.by,
        past.reason,
    ]


def _totals(part: PartReport, width: int) -> list[Line]:
    """Since the head started."""
    counts = (("applied", part.applied), ("skipped", part.skipped), ("failed", part.failed), ("back", part.rolled_back))
    said = ", ".join(f"{count:,} {word}" for word, count in counts)
    moved = f"{words.short(part.moved_slots_total)} slots, {words.size(part.moved_bytes_total)}"
    text = f"{said};  moved {moved};  skew cost {words.us(part.lost_us_total)}"
    return [line(((" all   " if not n else "").ljust(7), "label"), (piece, "value")) for n, piece in
            enumerate(wrap(text, width - 8))]  # fmt: skip
