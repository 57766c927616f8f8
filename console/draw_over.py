"""Screen 1: the whole cluster in one look, as blocks side by side; more room gives graphs, names and events. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from console.lines import Line, beside, clip, fit_text, line, pad, text_width
from console.marks import level_mark, state_mark
from console.spark import bar, braille, level, spark
from console.verdict import find_worst, name_part, worst_part
from console.view import NOT_UP, ClusterView, is_silent
from console.words import NONE, clock, count, rate, ratio, share, short, us
from transport.messages import PartReport, RankStatus, Role

LOW, HIGH = 0.5, 2.0
"""Load over the mean at the ends of the ranks' bars."""


@dataclasses.dataclass(slots=True)
class OverState:
    """What a person chose here: how far back the events are scrolled."""

    back: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A title and lines that are built for a width."""

    title: str
    draw: Callable[[int], list[Line]]


def build(view: ClusterView, ui: OverState, width: int, height: int, now: float) -> list[Line]:
    """Traffic and latency, pools, transfer and experts, the ranks, and the newest events in what is left."""
    is_wide = width >= 110
    graphs = 0 if height < 30 else min(12, (height - 22) // 3)
    traffic = Block("traffic 5 min", lambda w: _traffic(view, w, now))
    latency = Block("latency 1 min", lambda w: _latency(view, w))
    prefill = Block(_pool_title(view, "prefill"), lambda w: _prefill(view, w, now))
    decode = Block(_pool_title(view, "decode"), lambda w: _decode(view, w, now))
    push = Block("transfer", lambda w: _push(view, w, now))
    worst = worst_part(view)
    experts = Block(f"experts {name_part(worst)}" if worst else "experts", lambda w: _experts(view, w, now))
    if is_wide:
        lines = _row([traffic, latency, Block("per rank", lambda w: _per_rank(view, w))], width)
        if graphs:
            lines += _row([Block("tokens a second, 5 min", lambda w: _graph(view, w - 1, graphs, now))], width)
        lines += [*_row([prefill, decode, push], width), *_row([experts], width)]
    else:
        lines = [*_row([traffic, latency], width), *_row([prefill, decode], width), *_row([push, experts], width)]
    lines += _ranks(view, width, max(2, min((height - len(lines)) // 2, 12 if is_wide else 4)))
    lines += _events(view, ui, width, height - len(lines))
    return lines[:height]


def _row(blocks: Sequence[Block], width: int) -> list[Line]:
    """Blocks of about the same width, each under its title."""
    gap = 2
    each = (width - gap * (len(blocks) - 1)) // len(blocks)
    widths = [each] * len(blocks)
    widths[0] += width - gap * (len(blocks) - 1) - each * len(blocks)
    drawn = [([title(block.title, w), *block.draw(w)], w) for block, w in zip(blocks, widths, strict=True)]
    return beside(drawn, gap)


def title(text: str, width: int, right: str = "") -> Line:
    """A rule with a title in it, as wide as its block."""
    said = f" {right} " if right else ""
    left = f"─ {text} " if text else ""
    gap = max(0, width - text_width(left) - text_width(said))
    return clip(line(("─ ", "rule"), (f"{text} ", "head"), ("─" * gap, "rule"), (said, "value")), width)


def _per_s(value: float) -> str:
    """A rate of single things: `0.7`, `182`; nothing is plain 0."""
    return "0" if value == 0 else short(value) if not value < 10 else f"{value:.1f}"


def _figure(
    label: str, value: str, width: int, *, points: Sequence[float] = (), style: str = "value", high: float | None = None
) -> Line:
    """A label, a value at a fixed place, and a sparkline in what is left."""
    head = line((f" {label:<9}", "label"), (fit_text(value, 11, ">"), style), " ")
    room = width - 22
    if points and room >= 4:
        return line(head, (spark(list(points)[-room:], room, high=high), "spark"))
    return clip(head, width)


def _two(
    left: tuple[str, str], right: tuple[str, str], width: int, styles: tuple[str, str] = ("value", "value")
) -> Line:
    """Two figures in one line, each with its label at the left and its value at the right of a half."""
    half = min(width // 2, 30)

    def one(said: tuple[str, str], room: int, style: str) -> Line:
        label, value = said
        gap = room - text_width(label) - text_width(value) - 1
        return pad(line((f"{label}{' ' * max(1, gap)}", "label"), (value, style)), room)

    return line(" ", one(left, half - 1, styles[0]), " ", one(right, half - 1, styles[1]))


# ---------------------------------------------------------------- blocks


def _traffic(view: ClusterView, width: int, now: float) -> list[Line]:
    status, traffic = view.status, view.traffic
    room = max(4, width - 22)
    points = min(room, 60)
    step = max(1, 300 // points)

    def window(name: str) -> list[float]:
        return view.window(name, now, points, step)

    waiting = status.waiting if status else 0
    limit = status.waiting_limit if status else 0
    is_full = bool(limit) and waiting >= 0.8 * limit
    refused, failed = view.rate("refused_s"), view.rate("failed_s")
    lines = [
        _figure("req/s", _per_s(view.rate("req_s")), width, points=window("req_s")),
        _figure("tok/s out", short(view.rate("tok_s")), width, points=window("tok_s")),
        _figure("running", count(status.running if status else None), width, points=window("running")),
        _two(
            ("queue", f"{waiting:,}" + (f"/{limit:,}" if limit else "")),
            ("refused/s", _per_s(refused)),
            width,
            ("warn" if is_full else "value", "warn" if refused > 0 else "value"),
        ),
    ]
    if traffic is not None:
        lines.append(
            _two(
                ("gone/min", _per_s(60 * view.rate("cancelled_s"))),
                ("failed/min", _per_s(60 * failed)),
                width,
                ("value", "bad" if failed > 0 else "value"),
            )
        )
    return lines


def _graph(view: ClusterView, width: int, height: int, now: float) -> list[Line]:
    """Prompts and answers over five minutes, each scaled to its own largest value."""
    points = min(2 * width, 300)

    def scaled(name: str) -> list[float]:
        values = view.window(name, now, points, max(1, 300 // points))
        top = max((value for value in values if math.isfinite(value)), default=0.0)
        return [value / top if top > 0 else value for value in values]

    legend = line(
        (" prompts ", "first"),
        (short(view.rate("prompt_s")), "value"),
        ("   answers ", "second"),
        (short(view.rate("tok_s")), "value"),
        ("   each against its own top", "dim"),
    )
    dots = braille(scaled("prompt_s"), scaled("tok_s"), width, height - 1, high=1.05)
    return [legend, *(line(" ", entry) for entry in dots)]


def _latency(view: ClusterView, width: int) -> list[Line]:
    traffic = view.traffic
    limits = {"ttft": traffic.ttft_limit_us, "itl": traffic.itl_limit_us} if traffic else {}
    has_limits = any(limits.values())
    cell = min(10, (width - 10) // (4 if has_limits else 3))
    names = ("p50", "p90", "p99", *(("limit",) if has_limits else ()))
    lines: list[Line] = [line(" " * 10, *((fit_text(name, cell, ">"), "head") for name in names))]
    for kind, label in (("ttft", "TTFT"), ("itl", "ITL"), ("handoff", "hand-off")):
        found = view.percentiles(kind)  # type: ignore[arg-type]
        limit = limits.get(kind, 0)
        is_missed = bool(limit) and found[2] > limit
        runs: list[tuple[str, str]] = [(f" {label:<9}", "label")]
        for n, value in enumerate(found):
            runs.append((fit_text(us(value), cell, ">"), "bad" if is_missed and n == 2 else "value"))
        if has_limits:
            runs.append((fit_text(us(limit) if limit else NONE, cell, ">"), "dim"))
        lines.append(clip(tuple(runs), width))
    return lines


def _per_rank(view: ClusterView, width: int) -> list[Line]:
    """Tokens a second of one rank of each role, the mean of those that are up."""
    decode = sum(1 for rank in view.ranks("decode") if rank.state not in NOT_UP) or math.nan
    prefill = sum(1 for rank in view.ranks("prefill") if rank.state not in NOT_UP) or math.nan
    cached, prompt = view.rate("cached_s"), view.rate("prompt_s")
    figures = (("cached", cached / prefill), ("new", (prompt - cached) / prefill), ("out", view.rate("tok_s") / decode))
    top = max((value for _, value in figures if math.isfinite(value)), default=0.0)
    lines = []
    for label, value in figures:
        drawn = bar(value / top if top > 0 else 0.0, max(0, width - 21))
        lines.append(line((f" {label:<9}", "label"), (fit_text(short(value), 8, ">"), "value"), "  ", (drawn, "bar")))
    known = share(cached / prompt if prompt else math.nan, 1)
    lines.append(line((" cached    ", "label"), (f"{known} ", "value"), ("of the prompts' tokens", "label")))
    return lines


def _pool_title(view: ClusterView, role: Role) -> str:
    """`prefill 8×DEP2`, `decode DEP32`, `decode 4 ranks`."""
    sizes = {part.group: len(part.ranks) for part in (view.experts.parts if view.experts else ()) if part.pool == role}
    if not sizes:
        number = len(view.ranks(role))
        return f"{role} {number} rank{'s' if number != 1 else ''}"
    times = f"{len(sizes)}×" if len(sizes) > 1 else ""
    return f"{role} {times}DEP{max(sizes.values())}"


def _sums(view: ClusterView, role: Role) -> tuple[int, int, int]:
    """Ranks that are up, and their running and waiting requests."""
    up = [rank.snapshot for rank in view.ranks(role) if rank.state not in NOT_UP and rank.snapshot is not None]
    return len(up), sum(snapshot.running for snapshot in up), sum(snapshot.waiting for snapshot in up)


def _prefill(view: ClusterView, width: int, now: float) -> list[Line]:
    _, running, waiting = _sums(view, "prefill")
    prompt, cached = view.rate("prompt_s"), view.rate("cached_s")
    points = view.window("busy:prefill", now, 60, 5)
    return [
        _figure("busy", share(view.rate("busy:prefill")), width, points=points, high=1.0),
        _two(("running", f"{running:,}"), ("waiting", f"{waiting:,}"), width),
        _two(("prompt/s", short(prompt)), ("cached", share(cached / prompt if prompt else math.nan, 1)), width),
    ]


def _decode(view: ClusterView, width: int, now: float) -> list[Line]:
    up, running, _ = _sums(view, "decode")
    points = view.window("step_us:decode", now, 60, 5)
    return [
        _figure("step", us(view.rate("step_us:decode")), width, points=points),
        _two(("rows/rank", f"{running / up:.0f}" if up else NONE), ("KV used", share(view.rate("kv:decode"))), width),
        _two(("tok/s out", short(view.rate("tok_s"))), ("busy", share(view.rate("busy:decode"))), width),
    ]


def _push(view: ClusterView, width: int, now: float) -> list[Line]:
    pairs = view.pairs
    bytes_s = float(pairs.rates.sum()) if pairs is not None and len(pairs.rates) else view.rate("push_bytes_s")
    inflight = int(pairs.inflight.sum()) if pairs is not None else None
    worst = int(pairs.p99_us.max()) if pairs is not None and len(pairs.p99_us) else math.nan
    failed = int(pairs.failed.sum()) if pairs is not None else 0
    corrupt = sum(rank.snapshot.corrupt_pushes for rank in view.ranks("decode") if rank.snapshot)
    return [
        _figure("push", rate(bytes_s), width, points=view.window("push_bytes_s", now, 60, 5)),
        _two(("in flight", count(inflight)), ("p99 worst", us(worst)), width),
        _two(
            ("failed", f"{failed:,}"),
            ("corrupt", f"{corrupt:,}"),
            width,
            ("warn" if failed else "value", "bad" if corrupt else "value"),
        ),
    ]


def _experts(view: ClusterView, width: int, now: float) -> list[Line]:
    """The part that loses most: where, and what it costs."""
    part = worst_part(view)
    if part is None:
        return [line((" no groups: no experts to place", "dim")), (), ()]
    worst = find_worst(view, part)
    cost = part.skew.lost_us_per_step
    expert = f" e{worst.expert}" if worst.expert >= 0 else ""
    where = f"{view.name(worst.rank)} L{worst.layer}{expert} {worst.ratio:.2f}×" if part.steps else NONE
    key = f"{part.pool}/{part.group}/{part.part}"
    graph = view.window(f"max_over_mean:{key}", now, 60, 5)
    return [
        _figure("skew", f"{ratio(part.skew.max_over_mean)}", width, points=graph),
        clip(line((" worst    ", "label"), (where, "hot" if part.skew.max_over_mean >= 1.1 else "value")), width),
        clip(line((" costs    ", "label"), (us(cost), "value"), ("/step  ", "dim"), (_doing(part), "")), width),
    ]


def _doing(part: PartReport) -> str:
    """What happens with a part, in a few words."""
    if part.state in ("idle", "planning"):
        return part.mode if part.state == "idle" else part.state
    return f"{part.state} {part.copied_slots}/{part.total_slots}" if part.total_slots else part.state


# ---------------------------------------------------------------- ranks


def _ranks(view: ClusterView, width: int, room: int) -> list[Line]:
    """One bar for each rank: its fullest layer over that layer's mean; named in tens, or each if there is room."""
    ranks = view.ranks()
    worst = _slowest(view)
    head = title("ranks, fullest layer over mean", width, worst)
    each = 6
    per_row = max(1, (width - 1) // each)
    if len(ranks) <= per_row * (room - 1):
        cells = [line((f"{view.name(rank.rank)} ", "label"), _bar(view, rank), " ") for rank in ranks]
        rows = [line(" ", *cells[n : n + per_row]) for n in range(0, len(cells), per_row)]
        return [head, *rows[: room - 1]]
    tens: list[Line] = []
    for role in ("prefill", "decode"):
        pool = [rank for rank in ranks if rank.role == role]
        for start in range(0, len(pool), 10):
            some = pool[start : start + 10]
            tens.append(line((f"{view.name(some[0].rank)} ", "label"), *(_bar(view, rank) for rank in some), " "))
    across = max(1, (width - 1) // 15)
    rows = [line(" ", *tens[n : n + across]) for n in range(0, len(tens), across)]
    return [head, *(clip(row, width) for row in rows[: room - 1])]


def _bar(view: ClusterView, rank: RankStatus) -> tuple[str, str]:
    """A glyph for a rank: its state if it has one to tell, else the height of its load."""
    if is_silent(rank):
        mark = state_mark("stale")
        return mark.glyph, mark.style
    if rank.state != "ready":
        mark = state_mark("drained" if rank.phase == "drained" else rank.state)
        return mark.glyph, mark.style
    hot = view.hot(rank.rank)
    if hot is None:
        return "▁", "rest"
    style = "hot" if hot.load >= 1.4 else "spark"
    return level(hot.load, HIGH, low=LOW), style


def _slowest(view: ClusterView) -> str:
    """`fullest: d25 1.83×`; nothing before loads are known."""
    found = [(hot.load, rank.rank) for rank in view.ranks() if (hot := view.hot(rank.rank)) is not None]
    if not found:
        return ""
    load, rank = max(found)
    return f"fullest: {view.name(rank)} {load:.2f}×"


# ---------------------------------------------------------------- events


def _events(view: ClusterView, ui: OverState, width: int, room: int) -> list[Line]:
    """The newest ones, newest first, as many as there is room for."""
    if room < 2:
        return []
    events = list(view.events)
    ui.back = max(0, min(ui.back, len(events) - (room - 1)))
    last = len(events) - ui.back
    shown = events[max(0, last - (room - 1)) : last]
    said = f"{ui.back} newer" if ui.back else ""
    lines = [title("events", width, said)]
    for event in reversed(shown):
        mark = level_mark(event.level)
        lines.append(
            clip(
                line(
                    (f" {clock(event.at_ms)} ", "dim"),
                    (f"{mark.glyph} ", mark.style),
                    (f"{event.name} ", "value"),
                    (event.text, "" if event.level == "info" else mark.style),
                ),
                width,
            )
        )
    if not shown:
        lines.append(line((" nothing has happened yet", "dim")))
    return lines
