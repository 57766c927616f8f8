"""What opens on the Balance screen: a plan's moves in one layer, and one line of the history in full. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from console import words
from console.balance_state import BalanceState, aim_of, newest_first
from console.expertcells import lay_out, layer_loads, planned_loads
from console.lines import Line, clip, line, wrap
from console.view import ClusterView, Heat
from transport.messages import PartReport

RESULT_STYLES = {"applied": "good", "running": "info", "skipped": "dim", "failed": "bad", "rolled_back": "warn"}


def draw_past(ui: BalanceState, part: PartReport, width: int) -> Iterator[Line]:
    """One line of the history in full."""
    history = newest_first(part)
    if not 1 <= ui.row <= len(history):
        yield line((" it is no longer in the history", "dim"))
        return
    past = history[ui.row - 1]
    came = past.realised != -1
    yield line((f" plan {past.plan}  ", "head"), (past.result.replace("_", " "), RESULT_STYLES[past.result]))
    ended = "runs" if past.result == "running" else f"{words.age(past.ended_ago_ms / 1e3)} ago"
    rows = [
        ("ended", ended),
        ("by", past.by),
        ("skew before", words.ratio(past.before)),
        ("predicted", words.ratio(past.predicted)),
        ("after", words.ratio(past.after) if came else "not measured (yet)"),
        ("came true", f"{words.share(past.realised)} of the predicted drop" if came else words.NONE),
        ("moved", f"{past.moved_slots:,} slots, {words.size(past.moved_bytes)}"),
        ("took", words.us(past.took_ms * 1e3)),
    ]
    for label, text in rows:
        yield line((f" {label:<12}", "label"), (text, "value"))
    for n, piece in enumerate(wrap(past.reason or "no reason was given", width - 15)):
        yield line(((" why" if not n else "").ljust(13), "label"), (piece, "value"))
    yield line((" Esc goes back", "dim"))


def draw_moves(view: ClusterView, ui: BalanceState, part: PartReport, width: int, room: int) -> list[Line]:
    """What the plan does in one layer, expert by expert."""
    layer = ui.find_layer(part)
    title = line(
        (f" plan {part.plan.plan}, layer {layer} of {part.layers}", "head"), ("   [ ] other layers, Esc back", "dim")
    )
    if not part.plan.plan:
        return [line((" There is no plan, so there are no moves; R makes one.", "dim"))]
    heat = view.heats.get(aim_of(part))
    if heat is None or heat.report.layer != layer or not heat.report.has_plan:
        return [title, line((" The head has not told this layer's slots yet.", "dim"))]
    skew_now = float(layer_loads(heat, is_after=False)[:, layer].max())
    skew_then = float(planned_loads(heat).max())
    lines = [title, line((" fullest rank ", "label"), (f"{skew_now:.2f}x → {skew_then:.2f}x the mean", "value"))]
    moves = list(describe_moves(heat, [view.name(rank) for rank in part.ranks]))
    if not moves:
        return [*lines, line((" The plan moves nothing in this layer.", "dim"))]
    lines.append(line((" expert  x mean  now → then", "head")))
    shown = max(1, room - len(lines) - 1)
    ui.top = max(0, min(ui.top, len(moves) - shown))
    lines += [clip(line((text, "value")), width) for text in moves[ui.top : ui.top + shown]]
    if len(moves) > shown:
        lines.append(line((f" {ui.top + 1} to {min(len(moves), ui.top + shown)} of {len(moves)}", "dim")))
    return lines


def describe_moves(heat: Heat, names: Sequence[str]) -> Iterator[str]:
    """One line for each expert of the layer whose ranks change, the hottest first: `   203    6.71  d17 → d17 +d05`."""
    now, then = _holders(heat, is_after=False), _holders(heat, is_after=True)
    changed = np.flatnonzero((now != then).any(axis=0))
    for expert in sorted(changed.tolist(), key=lambda expert: -float(heat.load[expert])):
        before, after = np.flatnonzero(now[:, expert]).tolist(), np.flatnonzero(then[:, expert]).tolist()
        left = " ".join(names[n] if n in after else f"-{names[n]}" for n in before)
        right = " ".join(names[n] if n in before else f"+{names[n]}" for n in after)
        yield f" {expert:>6}  {float(heat.load[expert]):>6.2f}  {left} → {right}"


def _holders(heat: Heat, *, is_after: bool) -> npt.NDArray[np.bool_]:
    """bool[ranks, experts] of the chosen layer: who holds what."""
    experts = lay_out(heat, is_after=is_after).expert
    held = np.zeros((experts.shape[0], heat.report.experts), dtype=np.bool_)
    row, place = np.nonzero(experts >= 0)
    held[row, experts[row, place]] = True
    return held
