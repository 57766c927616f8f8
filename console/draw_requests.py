"""The Requests screen as lines: what runs and waits, the oldest first, and the time line of one of them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from console import words
from console.lines import Line, Run, clip, clip_text, joined, width_of
from console.requesttable import (
    OVERDUE,
    first_token_limit_ms,
    make_table,
    request_name,
    token_us,
    why_overdue,
)
from console.tablemodel import TableModel
from console.view import ClusterView
from transport.messages import RequestRow

PANE = 9
"""Lines of the detail."""


@dataclass
class RequestsState:
    """What is chosen on this screen. `is_open`: the time line of the request under the cursor is shown."""

    table: TableModel[RequestRow] = field(init=False)
    is_open: bool = False
    table_y: int = 1
    """Line of the table's heading, for a click."""
    view: ClusterView | None = None
    """What was drawn last: limits and names come from it."""

    def __post_init__(self) -> None:
        self.table = make_table(self.limit_ms, self.name_of)

    def limit_ms(self) -> float:
        """From when a request without a token is marked."""
        return first_token_limit_ms(self.view) if self.view is not None else math.inf

    def name_of(self, rank: int) -> str:
        return self.view.name(rank) if self.view is not None else str(rank)


def build(view: ClusterView, ui: RequestsState, width: int, height: int, now: float) -> list[Line]:
    """At most `height` lines of at most `width` cells."""
    ui.view = view
    report = view.requests
    if report is None:
        return [_title(ui, width, 0), (), ((" no data yet: the head has not answered", "dim"),)][:height]
    ui.table.set_rows(report.rows)
    row = ui.table.current
    pane = _detail(view, ui, row, width) if ui.is_open and row is not None else []
    lines = [_title(ui, width, report.total), *ui.table.lines(width, height - 1 - len(pane))]
    if len(lines) == 2:
        said = "no request matches the filter" if ui.table.total else "no request runs or waits"
        lines.append(((f" {said}", "dim"),))
    lines += [()] * (height - len(pane) - len(lines))
    return (lines + pane)[:height]


def _title(ui: RequestsState, width: int, total: int) -> Line:
    runs: list[Run] = [(" Requests  ", "title"), *ui.table.caption()]
    if total > ui.table.total:
        runs.append((f"  the oldest of {total:,}", "warn"))
    view = ui.view
    late = 0
    if view is not None and view.requests is not None:
        limit = ui.limit_ms()
        late = sum(1 for row in view.requests.rows if why_overdue(row, limit))
    if late:
        runs.append((f"  {OVERDUE} {late:,} overdue", "bad"))
    return clip(joined(runs), width)


# ------------------------------------------------------------ the detail


def _detail(view: ClusterView, ui: RequestsState, row: RequestRow, width: int) -> list[Line]:
    late = why_overdue(row, ui.limit_ms())
    who = words.safe(f"{row.label}  of {row.client}" if row.label else row.client)
    head: list[Run] = [("── ", "rule"), (request_name(row.request), "bold"), (f"  {who} ", "label")]
    rule = clip(joined([*head, ("─" * max(0, width - width_of(tuple(head))), "rule")]), width)
    is_gone = ui.table.is_gone(row.request)
    state: list[Run] = [(f" {row.state}", "bold"), (f" for {words.age(row.state_ms / 1e3)}", "")]
    state += [(f", accepted {words.age(row.age_ms / 1e3)} ago", ""), (f", attempt {row.attempt}", "label")]
    if is_gone:
        state = [(" ended: this is what was last heard of it", "stale")]
    lines = [rule, clip(joined(state), width)]
    if late and not is_gone:
        lines.append(((f" {OVERDUE} {clip_text(late, width - 3)}", "bad"),))
    lines += [_ranks_line(view, row, width), *_token_lines(row), *_time_line(row, width, is_late=bool(late))]
    return [clip(line, width) for line in lines[:PANE]] + [()] * (PANE - len(lines))


def _ranks_line(view: ClusterView, row: RequestRow, width: int) -> Line:
    def name(rank: int) -> str:
        if rank < 0:
            return "no rank yet"
        status = view.rank(rank)
        return view.name(rank) + (f" ({status.state})" if status is not None and status.state != "ready" else "")

    text = f" prompt on {name(row.prefill_rank)}, generates on {name(row.decode_rank)}"
    if row.prefill_rank < 0 and row.decode_rank < 0:
        text = " no ranks yet"
    return ((clip_text(text, width), ""),)


def _token_lines(row: RequestRow) -> list[Line]:
    each = token_us(row)
    pace = f", {words.us(each)} each" if math.isfinite(each) else ""
    return [
        ((" in   ", "label"), (f"{row.prompt_tokens:,} tokens, {row.cached_tokens:,} of them cached", "")),
        ((" out  ", "label"), (f"{row.generated:,} of at most {row.max_tokens:,} tokens{pace}", "")),
    ]


def stages(row: RequestRow) -> list[tuple[str, float, str]]:
    """Its time line: name, microseconds, and how it is known: `done`, `now`, or `rest` for what lies between.

    `Timings` come with the first token, so before it all there is to say is where it is and since when.
    """
    age, here = 1e3 * row.age_ms, 1e3 * row.state_ms
    if row.state == "queued":
        return [("queued", age, "now")]
    if row.state == "prefill":
        return [("queued", max(0.0, age - here), "done"), ("prefill+push", here, "now")]
    known = [("queued", row.queue_us), ("prefill", row.prefill_us), ("push", row.push_us)]
    result = [(name, float(took), "done") for name, took in known if took]
    last = "decode" if row.state == "decode" else "stopping"
    rest = age - here - sum(took for _, took, _ in result)
    # What no stage owns: the way to the decode rank, earlier attempts, and generating before it was stopped.
    if rest > 0.02 * age:
        result.append(("decode" if row.state == "stopping" and row.generated else "other", rest, "rest"))
    return [*result, (last, here, "now")]


_GLYPHS = {
    "queued": "░",
    "prefill": "▒",
    "prefill+push": "▒",
    "push": "▓",
    "decode": "█",
    "stopping": "█",
    "other": "·",
}
_STYLES = {"done": "spark", "now": "value", "rest": "dim"}


def _time_line(row: RequestRow, width: int, *, is_late: bool) -> list[Line]:
    """A bar of all stages, each with its share of the whole and every one seen; then their durations."""
    found = stages(row)
    styles = {**_STYLES, "now": "bad"} if is_late else _STYLES
    room = min(width - 2, 120)
    total = sum(took for _, took, _ in found)
    bar: list[Run] = [(" ", "")]
    left = room
    for n, (name, took, how) in enumerate(found):
        later = len(found) - n - 1
        cells = left if not later else max(1, min(left - later, round(room * took / total) if total else 1))
        left -= cells
        bar.append((_GLYPHS[name] * cells, styles[how]))
    legends: list[list[Run]] = [[(" ", "")]]
    for n, (name, took, how) in enumerate(found):
        runs: list[Run] = [(" → ", "dim")] if n else []
        runs += [(f"{_GLYPHS[name]} {name} ", styles[how]), (words.us(took), "value")]
        if n and width_of((*legends[-1], *runs)) > width:
            legends.append([(" ", "")])
        legends[-1] += runs
    return [joined(bar), *map(joined, legends)]
