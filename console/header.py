"""The two lines at the top: whose cluster this is and how fresh what is shown is; then the verdict.

Pure. It goes on while a screen is frozen.
"""

from __future__ import annotations

import dataclasses
import math

from console.lines import Line, Run, clip, clip_text, join, line, width_of
from console.marks import level_mark
from console.view import ClusterView
from console.words import clock, plural
from transport.messages import Role


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderState:
    """What a header needs beside the view: refreshes a second, whether the screen is frozen, what `:why` gave, the
    time of day in milliseconds, the verdict with its level (`good`, `info`, `warning`, `error`), and where it leads."""

    hz: float
    is_frozen: bool
    why: str
    wall_ms: int
    verdict: str
    level: str
    hint: str = ""


_LETTERS: tuple[tuple[Role, str], ...] = (("prefill", "P"), ("decode", "D"))


def topology(view: ClusterView) -> str:
    """`8P1D · decode DEP32`: groups that compute prompts and groups that generate, and how large the latter are.

    A rank without a group is a group of one. Where decode ranks have no groups, the size is that of the prefill groups.
    """
    grouped: dict[str, dict[int, int]] = {"prefill": {}, "decode": {}}
    members: set[int] = set()
    for part in view.experts.parts if view.experts else ():
        grouped[part.pool][part.group] = len(part.ranks)
        members.update(part.ranks)
    if not view.ranks():
        return ""
    counts = []
    sizes = []
    for role, letter in _LETTERS:
        alone = sum(1 for rank in view.ranks(role) if rank.rank not in members)
        groups = grouped[role]
        counts.append(f"{len(groups) + alone}{letter}")
        if groups:
            largest = max(groups.values())
            sizes.append(f"{role} DEP{largest}")
    return " · ".join(["".join(counts), *sizes[-1:]])


def hz_text(hz: float) -> str:
    return f"{hz:g} Hz"


def age_text(seconds: float) -> str:
    """The age of what is shown, of constant width while it is young."""
    if math.isinf(seconds):
        return "no data"
    return f"age {seconds:.1f}s" if seconds < 10 else f"age {seconds:.0f}s"


def build_header(view: ClusterView, state: HeaderState, width: int, now: float) -> list[Line]:
    """Exactly two lines."""
    return [_first(view, state, width, now), _second(view, state, width, now)]


def _first(view: ClusterView, state: HeaderState, width: int, now: float) -> Line:
    phase = view.phase(now)
    status = view.status
    right: list[Run] = []
    if status is None:
        pass  # what may be done is known with the first answer
    elif view.link.is_admin:
        right.append((" ADMIN ", "admin"))
    else:
        right.append((" READ-ONLY ", "readonly"))
    if state.is_frozen:
        right += [(" ", ""), (" frozen ‖ ", "ask")]
    age = view.age(now)
    right += [
        (f"  {clock(state.wall_ms)}  ", "dim"),
        (age_text(age), "" if phase == "live" else "bad" if phase == "lost" else "stale"),
        (f"  {hz_text(state.hz)} ", "dim"),
    ]
    left: list[Run] = [(" engine ▸ " if width >= 100 else " ▸ ", "dim")]
    if status is None:
        left.append((view.link.address, "title"))
    else:
        left.append((status.cluster or "engine", "title"))
        name = status.model.rstrip("/").rpartition("/")[2]
        # While groups still form, it would change with each of them.
        shape = topology(view) if status.ready or status.is_stopping else ""
        room = width - width_of(tuple(right)) - width_of(tuple(left)) - 3
        if room >= len(shape) + 2:
            name = clip_text(name, room - len(shape) - 2) if room - len(shape) - 2 >= 6 else ""
            left += [(f"  {name}" if name else "", ""), (f"  {shape}", "dim")]
        elif room >= len(name):
            left.append((f"  {name}", ""))
    return join(tuple(left), tuple(right), width)


def _second(view: ClusterView, state: HeaderState, width: int, now: float) -> Line:
    phase = view.phase(now)
    if phase in ("connecting", "never", "mismatch", "lost", "stale"):
        return _link_line(view, width, now)
    missing = view.missing()
    mark = level_mark(state.level)
    runs: list[Run] = [(f" {mark.glyph} ", mark.style), (state.verdict, mark.style if state.level == "error" else "")]
    if view.stage() == "partial":
        names = ", ".join(view.name(rank.rank) for rank in missing[:3]) + (", …" if len(missing) > 3 else "")
        said = f" {plural(len(missing), 'rank')} missing: {names} "
        if width_of(tuple(runs)) + len(said) <= width:
            return join(tuple(runs), ((said, "bad"),), width)
    if state.why:
        return join(tuple(runs), ((f" why: {clip_text(state.why, 24)} ", "info"),), width)
    if state.hint and width_of(tuple(runs)) + len(state.hint) + 3 <= width:
        return join(tuple(runs), ((f" {state.hint} ", "dim"),), width)
    return clip(tuple(runs), width)


def _link_line(view: ClusterView, width: int, now: float) -> Line:
    phase = view.phase(now)
    link = view.link
    again = ""
    if link.retry_at > now:
        again = f"; again in {math.ceil(link.retry_at - now)} s"
    words = {
        "connecting": ("◔", "warn", f"connecting to {link.address}"),
        "never": ("✖", "bad", f"no engine answers: {link.why}{again}"),
        "mismatch": ("✖", "bad", link.why),
        "lost": ("✖", "bad", f"link lost {view.age(now):.0f} s ago: {link.why}{again}"),
        "stale": ("◷", "stale", f"the head has not answered for {now - view.asked_at:.0f} s; this is its last word"),
    }
    glyph, style, text = words[phase]
    return clip(line((f" {glyph} ", style), (text, style)), width)
