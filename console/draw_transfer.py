"""The Transfer screen as lines: what prefill ranks push to decode ranks, as a matrix that scrolls both ways. Pure."""

from __future__ import annotations

import math

from console import marks, words
from console.lines import Line, Run, clip, clip_text, fit_text, joined, pad, width_of
from console.pairmatrix import Matrix, make_matrix, total, worst
from console.ranktable import mention_of
from console.transfer_state import CELL, LEFT, RIGHT, TransferState, arrange, keep_in_sight
from console.view import ClusterView

PANE = 9


def build(view: ClusterView, ui: TransferState, width: int, height: int, now: float) -> list[Line]:
    """At most `height` lines of at most `width` cells."""
    matrix = make_matrix(view)
    arrange(view, ui, matrix)
    if view.pairs is None:
        return [_title(view, ui, matrix, width), (), ((" no data yet: the head has not answered", "dim"),)][:height]
    if not ui.rows or not ui.columns:
        said = "no pair matches the filter" if ui.filter.text else "there is no pair of a prefill and a decode rank"
        return [_title(view, ui, matrix, width), (), ((f" {said}", "dim"),)][:height]
    pane = _detail(view, ui, matrix, width) if ui.is_open and ui.cursor is not None else []
    # Around the rows: title, names, three lines of sums, a line about the cursor.
    ui.height = max(1, min(len(ui.rows), height - 6 - len(pane)))
    ui.width = max(1, min(len(ui.columns), (width - LEFT - RIGHT) // CELL))
    keep_in_sight(ui)
    lines = [_title(view, ui, matrix, width), _names(view, ui, width)]
    lines += [_row(view, ui, matrix, prefill, width) for prefill in ui.rows[ui.top : ui.top + ui.height]]
    lines += _sums(ui, matrix, width)
    lines.append(_cursor_line(view, ui, matrix, width))
    # Right below: how many rows there are changes rarely.
    lines += pane
    return (lines + _notable_lines(view, matrix, width, height - len(lines)))[:height]


# ------------------------------------------------------------ the matrix


def _scale(matrix: Matrix) -> tuple[float, str]:
    """The unit in which the largest pair has a figure before the point."""
    largest = worst(matrix.rate)
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if largest >= 0.95 * unit or unit == 1e3:
            return unit, name
    return 1e9, "GB/s"


def _title(view: ClusterView, ui: TransferState, matrix: Matrix, width: int) -> Line:
    _, unit = _scale(matrix)
    when = " of the last seconds" if width >= 110 else ""
    runs: list[Run] = [(" Transfer  ", "title"), (f"P → D, {unit}{when}", "label")]
    everything = total(matrix.rate)
    if math.isfinite(everything):
        runs.append((f"  {words.rate(everything)} in all", "value"))
    if len(ui.columns) > ui.width > 1:
        first, last = ui.columns[ui.left], ui.columns[min(len(ui.columns), ui.left + ui.width) - 1]
        runs.append((f"  {view.name(first)}-{view.name(last)} of {len(ui.columns)}", "label"))
    low = int(matrix.is_low.sum())
    if low:
        runs.append((f"  {marks.LOW} {low:,} low", "warn"))
    if ui.order != "rank" or ui.is_reversed:
        # Ranks begin with the smallest, figures with the largest.
        is_rising = ui.is_reversed == (ui.order != "rank")
        runs.append((f"  sort {ui.order} {'▲' if is_rising else '▼'}", "label"))
    if ui.filter.text:
        runs.append((f"  filter {ui.filter.text}", "value"))
    if ui.cursor is not None and ui.order != "rank":
        runs.append((f"  {marks.FROZEN}", "warn"))
    return clip(joined(runs), width)


def _names(view: ClusterView, ui: TransferState, width: int) -> Line:
    runs: list[Run] = [(" " * LEFT, "")]
    here = ui.cursor[1] if ui.cursor is not None else None
    for rank in ui.columns[ui.left : ui.left + ui.width]:
        runs.append((fit_text(view.name(rank), CELL - 1, ">"), "sorted" if rank == here else "head"))
        runs.append((" ", ""))
    before, after = ui.left, len(ui.columns) - ui.left - ui.width
    if before:
        runs[0] = (" " * (LEFT - 1) + "‹", "key")
    if after:
        runs[-1] = ("›", "key")
    runs += [(f"{'sum':>7} {'p99 ms':>8} {'fail':>5}", "head")]
    return clip(joined(runs), width)


def _row(view: ClusterView, ui: TransferState, matrix: Matrix, prefill: int, width: int) -> Line:
    unit, _ = _scale(matrix)
    is_here = ui.cursor is not None and ui.cursor[0] == prefill
    y = matrix.prefill.index(prefill)
    name = view.name(prefill)
    runs: list[Run] = [(f"{'▸' if is_here else ' '}{name:<{LEFT - 1}}", "sorted" if is_here else "bold")]
    for decode in ui.columns[ui.left : ui.left + ui.width]:
        x = matrix.decode.index(decode)
        style = _cell_style(view, ui, matrix, y, x)
        mark = marks.LOW if matrix.is_low[y, x] else " "
        if ui.cursor == (prefill, decode):
            style = f"{style} chosen".strip()
        runs.append((fit_text(_figure(float(matrix.rate[y, x]) / unit), CELL - 1, ">") + mark, style))
    runs += _right(total(matrix.rate[y]) / unit, worst(matrix.p99_us[y]), total(matrix.failed[y]))
    return clip(joined(runs), width)


def _cell_style(view: ClusterView, ui: TransferState, matrix: Matrix, y: int, x: int) -> str:
    if ui.filter.text and not ui.filter.matches(matrix.pair(view, y, x)):
        return "gone"
    if matrix.failed[y, x] > 0 and matrix.is_low[y, x]:
        return "bad"
    if matrix.is_low[y, x]:
        return "warn"
    return "" if matrix.rate[y, x] > 0 else "dim"


def _right(rate: float, p99_us: float, failed: float) -> list[Run]:
    return [
        (fit_text(_figure(rate), 7, ">"), "value"),
        (fit_text(words.ms(p99_us), 9, ">"), ""),
        (fit_text(words.count(failed), 6, ">"), "bad" if failed > 0 else ""),
    ]


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return "·"
    if value == 0:
        return "0"
    if value < 0.05:
        return "<0.1"
    return f"{value:.1f}" if value < 99.95 else words.short(value)


def _sums(ui: TransferState, matrix: Matrix, width: int) -> list[Line]:
    """Sum, p99 and failures of each decode rank."""
    unit, _ = _scale(matrix)
    columns = [matrix.decode.index(rank) for rank in ui.columns[ui.left : ui.left + ui.width]]
    rates, p99s, failures = [("sum", "label")], [("p99", "label")], [("fail", "label")]
    everything: tuple[list[Run], ...] = (rates, p99s, failures)
    for runs in everything:
        runs[0] = (f" {runs[0][0]:<{LEFT - 1}}", "label")
    for x in columns:
        failed = total(matrix.failed[:, x])
        rates.append((fit_text(_figure(total(matrix.rate[:, x]) / unit), CELL - 1, ">") + " ", "value"))
        p99s.append((fit_text(_milliseconds(worst(matrix.p99_us[:, x])), CELL - 1, ">") + " ", ""))
        failures.append((fit_text(words.count(failed), CELL - 1, ">") + " ", "bad" if failed > 0 else ""))
    rates += _right(total(matrix.rate) / unit, worst(matrix.p99_us), total(matrix.failed))
    return [clip(joined(runs), width) for runs in everything]


def _milliseconds(value_us: float) -> str:
    """A p99 in five cells."""
    return words.ms(value_us) if not value_us >= 999_950 else words.short(value_us / 1e3)


def _cursor_line(view: ClusterView, ui: TransferState, matrix: Matrix, width: int) -> Line:
    if ui.cursor is None:
        return clip(
            (("  ", ""), (f"{marks.LOW} far below the median of all busy pairs; arrows choose a pair", "dim")), width
        )
    y, x = matrix.prefill.index(ui.cursor[0]), matrix.decode.index(ui.cursor[1])
    text = "  " + describe_pair(view, matrix, y, x)
    return ((clip_text(text, width), "warn" if matrix.is_low[y, x] else ""),)


def describe_pair(view: ClusterView, matrix: Matrix, y: int, x: int) -> str:
    """`p03 → d09  0.40 GB/s, 0.13 of the median  p99 38.0 ms  3 in flight  2 failed`."""
    name = f"{view.name(matrix.prefill[y])} → {view.name(matrix.decode[x])}"
    if matrix.index[y, x] < 0:
        return f"{name}  nothing was pushed"
    rate = float(matrix.rate[y, x])
    share = f", {rate / matrix.busy_median:.2f} of the median" if matrix.busy_median > 0 else ""
    return (
        f"{name}  {words.rate(rate)}{share}  p99 {words.us(float(matrix.p99_us[y, x]))}"
        f"  {int(matrix.inflight[y, x]):,} in flight  {int(matrix.failed[y, x]):,} failed"
    )


def _notable_lines(view: ClusterView, matrix: Matrix, width: int, room: int) -> list[Line]:
    """Pairs that are worth a look, wherever the window is; nothing where there is no room."""
    if room < 3:
        return []
    cells = matrix.notable()
    if not cells and not math.isfinite(matrix.busy_median):
        return []
    lines: list[Line] = [(), ((" worth a look", "head"),)] if cells else [(), ((" all pairs are alike", "dim"),)]
    shown = cells[: room - len(lines)]
    for y, x in shown:
        style = "bad" if matrix.failed[y, x] > 0 else "warn"
        lines.append(
            clip(
                ((f" {marks.LOW if matrix.is_low[y, x] else ' '} ", style), (describe_pair(view, matrix, y, x), "")),
                width,
            )
        )
    if len(shown) < len(cells):
        lines[-1] = ((f" and {words.plural(len(cells) - len(shown) + 1, 'more pair')}", "dim"),)
    return lines


# ------------------------------------------------------------ the detail


def _detail(view: ClusterView, ui: TransferState, matrix: Matrix, width: int) -> list[Line]:
    assert ui.cursor is not None
    prefill, decode = ui.cursor
    y, x = matrix.prefill.index(prefill), matrix.decode.index(decode)
    head: list[Run] = [("── ", "rule"), (f"{view.name(prefill)} → {view.name(decode)}", "bold"), (" ", "")]
    lines: list[Line] = [joined([*head, ("─" * max(0, width - width_of(tuple(head))), "rule")])]
    for rank in (prefill, decode):
        lines.append(_end_line(view, rank))
    if matrix.index[y, x] >= 0:
        pushes, size = matrix.pushes[y, x], matrix.bytes[y, x]
        each = f", {words.size(size / pushes)} each" if pushes else ""
        lines.append(
            ((f" since this life of {view.name(prefill)} began: {words.size(size)} in {pushes:,.0f} pushes{each}", ""),)
        )
    both = [mention_of(rank, view.name(rank)) for rank in (prefill, decode)]
    found = [event for event in reversed(view.events) if any(about.search(event.text) for about in both)]
    # What names both comes before what names one of them.
    found.sort(key=lambda event: not all(about.search(event.text) for about in both))
    for event in found[: PANE - len(lines)]:
        mark = marks.level_mark(event.level)
        runs = [(f" {words.clock(event.at_ms)} ", "label"), (f"{mark.glyph} ", mark.style)]
        lines.append(joined([*runs, (event.name, "bold"), (f" {event.text}", "")]))
    if not found:
        lines.append(((" no event names either of them", "dim"),))
    return [pad(clip(line, width), width) for line in lines] + [()] * (PANE - len(lines))


def _end_line(view: ClusterView, rank: int) -> Line:
    status = view.rank(rank)
    if status is None:
        return ((f" {view.name(rank)} ", "bold"), ("is not known to the head", "warn"))
    mark = marks.state_mark(status.state)
    runs: list[Run] = [(f" {view.name(rank)} ", "bold"), (f"{mark.glyph} {mark.word}", mark.style)]
    snapshot = status.snapshot
    runs.append((f"  life {status.generation}, heard of {words.age(status.age_ms / 1e3)} ago", "label"))
    if snapshot is not None:
        lag = words.us(snapshot.loop_lag_us_p99)
        runs.append((f"  {snapshot.pushes_inflight:,} pushes in flight, loop lag p99 {lag}", "label"))
        if snapshot.corrupt_pushes:
            runs.append((f"  {snapshot.corrupt_pushes:,} corrupt pushes", "bad"))
    return joined(runs)
