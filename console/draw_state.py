"""What is drawn where a screen has nothing to show yet: connecting, never reached, another version, starting. Pure."""

from __future__ import annotations

import dataclasses
import math
import shlex

from console.lines import Line, clip, line, pad, width_of, wrap
from console.marks import state_mark
from console.spark import bar_line
from console.view import ClusterView
from console.words import age, count, plural, rank_name, rate, short, size
from transport.messages import PROTOCOL_VERSION, RankStatus


def draw_state(view: ClusterView, screen: str, width: int, height: int, now: float) -> list[Line] | None:
    """The body instead of a screen's own; None where the screen draws itself, dimmed if it is not current."""
    phase = view.phase(now)
    if phase == "mismatch":
        return _centre(_mismatch(view, width, now), width, height)
    if view.status is None:
        lines = _never(view, width, now) if phase == "never" else _connecting(view, width, now)
        return _centre(lines, width, height)
    if screen == "over" and view.stage() == "starting":
        return draw_starting(view, width, height)
    return None


def start_command(view: ClusterView) -> str:
    """The command that starts an engine where this console looks for one."""
    link = view.link
    where = f" --dir {shlex.quote(link.directory)}" if link.directory else ""
    if link.address.startswith("ssh://"):
        return f"ssh {link.address.removeprefix('ssh://')} engine up --detach{where}"
    return f"engine up --detach{where}"


def _retry(view: ClusterView, now: float) -> str:
    left = view.link.retry_at - now
    return f"Again in {math.ceil(left)} s." if left > 0 else "Trying now."


def _connecting(view: ClusterView, width: int, now: float) -> list[Line]:
    since = now - view.link.since
    return [
        line(("Connecting", "title")),
        (),
        *_text(f"to {view.link.address}", width),
        *([line((f"for {age(since)}", "dim"))] if since >= 1 else []),
    ]


def _never(view: ClusterView, width: int, now: float) -> list[Line]:
    advice: list[Line] = [
        line("To start one:"),
        *(line(("  " + part, "key")) for part in wrap(start_command(view), width - 4)),
    ]
    if "ermission denied" in view.link.why:
        # An engine may well run there.
        advice = _text("What a user may do is decided by the modes of its sockets: read.sock for its group.", width)
    return [
        line(("No engine answers", "bad")),
        (),
        *_text(view.link.why, width),
        line((_retry(view, now), "dim")),
        (),
        *advice,
        (),
        line(("To look for it elsewhere: ", "dim"), "--dir DIR", (" or ", "dim"), "--connect URL"),
        line(("q leaves, ? shows all keys", "dim")),
    ]


def _mismatch(view: ClusterView, width: int, now: float) -> list[Line]:
    theirs = view.link.their_version
    return [
        line(("Another version", "bad")),
        (),
        line(("this console  ", "dim"), f"protocol {PROTOCOL_VERSION}"),
        line(("the engine    ", "dim"), f"protocol {theirs}" if theirs else "one that this console can not read"),
        (),
        *_text(view.link.why, width),
        *_text("Start the console of the engine's release. This one does not disturb the engine.", width),
        line((_retry(view, now), "dim")),
    ]


def _text(text: str, width: int) -> list[Line]:
    return [line(part) for part in wrap(text, min(width - 2, 76))]


def _centre(lines: list[Line], width: int, height: int) -> list[Line]:
    """A block a third from the top, as wide as its widest line; everything in it is left-aligned."""
    block = min(width, max(width_of(entry) for entry in lines))
    left = " " * max(0, (width - block) // 2)
    top = max(0, (height - len(lines)) // 3)
    return [*([()] * top), *(clip(line(left, entry), width) for entry in lines)][:height]


@dataclasses.dataclass(frozen=True, slots=True)
class StartFigures:
    """How far one rank's start-up phase is. `eta_s` and `per_s` are NaN where they can not be said."""

    share: float
    per_s: float
    eta_s: float


def start_figures(rank: RankStatus) -> StartFigures:
    """From its count, total and time so far."""
    seconds = rank.phase_ms / 1000
    share = rank.phase_done / rank.phase_total if rank.phase_total else math.nan
    per_s = rank.phase_done / seconds if seconds > 0.2 and rank.phase_done else math.nan
    left = max(0, rank.phase_total - rank.phase_done)
    return StartFigures(share, per_s, left / per_s if rank.phase_total and per_s > 0 else math.nan)


def draw_starting(view: ClusterView, width: int, height: int) -> list[Line]:
    """One line for each rank that is not up: its phase, how far, how fast, how long still; the slowest first."""
    ranks = view.ranks()
    up = [rank for rank in ranks if rank.state in ("ready", "draining")]
    rest = [rank for rank in ranks if rank not in up]

    def order(rank: RankStatus) -> tuple[float, float, int]:
        figures = start_figures(rank)
        eta = figures.eta_s if math.isfinite(figures.eta_s) else -1.0
        return (0.0 if rank.state in ("lost", "restarting") else 1.0, -eta, rank.rank)

    rest.sort(key=order)
    etas = [figures.eta_s for figures in map(start_figures, rest) if math.isfinite(figures.eta_s)]
    status = view.status
    said = [f"{len(up)} of {plural(len(ranks), 'rank')} ready"]
    if etas:
        said.append(f"this phase takes about {age(max(etas))} more")
    lines: list[Line] = [line((" starting  ", "title"), " · ".join(said))]
    for reason in status.reasons[:2] if status else ():
        lines.append(clip(line(("   ", ""), (reason, "dim")), width))
    lines.append(())
    columns = max(1, width // 100) if len(rest) > height - len(lines) - 1 else 1
    cell = (width - 1) // columns
    rows = max(1, height - len(lines) - 1)
    shown = rest[: rows * columns]
    cells = [_start_line(rank, cell - 1) for rank in shown]
    for y in range(min(rows, len(cells))):
        parts: list[Line] = []
        for x in range(columns):
            at = x * rows + y
            if at < len(cells):
                parts.append(pad(line(" ", cells[at]), cell))
        lines.append(line(*parts))
    if len(rest) > len(shown):
        lines.append(line((f"   and {plural(len(rest) - len(shown), 'rank')} more", "dim")))
    return lines


def _start_line(rank: RankStatus, width: int) -> Line:
    mark = state_mark(rank.state)
    figures = start_figures(rank)
    # Of one that starts the phase says more than the state, which the glyph says too.
    # A head says how far it is in the phase's text as well, which stands beside it here.
    word = rank.phase.split(" ", 1)[0] if rank.phase and rank.state in ("starting", "joining") else rank.state
    runs: list[Line] = [
        line((f"{mark.glyph} ", mark.style), (f"{rank_name(rank.role, rank.rank):<5}", "value"), f"{word:<11}")
    ]
    if rank.phase_total:
        bar = max(6, min(30, width - 66))
        done, per_s = _amount(rank, figures.per_s)
        runs += [bar_line(figures.share, bar), line(f" {100 * figures.share:3.0f}%")]
        runs.append(line((f"  {done:<18}", ""), (f"{per_s:>10}", "dim")))
        if math.isfinite(figures.eta_s):
            runs.append(line(f"{age(figures.eta_s):>7} left"))
    elif rank.phase_ms:
        runs.append(line((f"for {age(rank.phase_ms / 1000)}", "dim")))
    if rank.reason:
        runs.append(line((f"  {rank.reason}", "bad" if rank.state == "lost" else "dim")))
    if rank.restarts:
        runs.append(line((f"  restarted {rank.restarts}×", "warn")))
    return clip(line(*runs), width)


def _amount(rank: RankStatus, per_s: float) -> tuple[str, str]:
    if rank.phase_unit == "bytes":
        return f"{size(rank.phase_done)}/{size(rank.phase_total)}", rate(per_s) if math.isfinite(per_s) else ""
    unit = rank.phase_unit or ""
    pace = f"{short(per_s)}/s" if math.isfinite(per_s) else ""
    return f"{count(rank.phase_done)}/{count(rank.phase_total)} {unit}", pace
