"""A StatusReport as a table for people and as JSON for programs. `"schema": 1` grows by new keys only."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.faces.plain import make_plain
from engine.faces.ranks import describe_ranks, name_rank
from transport.messages import ExpertsReport, Message, PartReport, RankStatus, StatusReport

STATE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "joining": "yellow",
    "draining": "yellow",
    "restarting": "red",
    "lost": "bold red",
}


def status_json(report: StatusReport, experts: ExpertsReport) -> dict[str, Any]:
    """Both reports as plain data; ratios and units are in the keys' names."""
    return {"schema": 1, **message_json(report), "experts": message_json(experts.parts)}


def message_json(value: object) -> Any:
    """Messages as objects by name; on the wire they are arrays, so msgspec's own conversion would give those."""
    if isinstance(value, Message):
        return {name: message_json(held) for name, held in msgspec.structs.asdict(value).items()}
    return [message_json(held) for held in value] if isinstance(value, tuple) else value


def render_status(report: StatusReport, experts: ExpertsReport) -> RenderableType:
    """Verdict first, then one line per rank, then one per group of several."""
    if report.ready:
        verdict = Text("ready", style="green")
    else:
        verdict = Text("not ready: " + "; ".join(report.reasons), style="bold red")
    for sentence in report.degraded:
        verdict.append(f"\ndegraded: {make_plain(sentence)}", style="yellow")
    title = Text.assemble(
        (report.cluster, "bold"), "  model ", report.model, "  pid ", str(report.head_pid),
        "  up ", describe_age(report.uptime_ms / 1e3), "\n", verdict,
        f"\nwaiting {report.waiting}  running {report.running}  finished {report.finished}"
        f"  cancelled {report.cancelled}  failed {report.failed}",
    )  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("rank", no_wrap=True)
    # The one that gives way on a narrow terminal; 80 columns are enough for all.
    table.add_column("state", min_width=8, overflow="fold")
    for name in ("step", "run", "wait", "pages", "pushed", "lag p99", "step p50", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in report.ranks:
        table.add_row(*_rank_cells(rank))
    groups = [describe_group(part) for part in experts.parts if part.part == "main"]
    return Group(title, table, *([Text("\n".join(groups))] if groups else []))


def describe_group(part: PartReport) -> str:
    """Members, membership, epoch and skew of a group, by its main model; fits 80 columns up to a thousand ranks."""
    skew = f"{part.skew.max_over_mean:.2f}" if part.steps else "-"
    return (
        f"{part.pool} group {part.group}: ranks {describe_ranks(part.ranks)}  {part.state}"
        f"  membership {part.membership}  epoch {part.epoch}  skew {skew}"
    )


def _rank_cells(rank: RankStatus) -> list[RenderableType]:
    state = Text(rank.state, style=STATE_STYLES.get(rank.state, ""))
    if rank.phase:
        state.append(f" {rank.phase}", style="dim")
    if rank.restarts:
        state.append(f" (life {rank.generation})", style="dim")
    name = name_rank(rank)
    age = describe_age(rank.age_ms / 1e3)
    snapshot = rank.snapshot
    if snapshot is None:
        return [name, state, *["-"] * 7, age]
    used = snapshot.pages_total - snapshot.pages_available
    return [
        name,
        state,
        str(snapshot.step),
        str(snapshot.running),
        str(snapshot.waiting),
        f"{used}/{snapshot.pages_total}",
        describe_bytes(snapshot.pushed_bytes),
        f"{snapshot.loop_lag_us_p99 / 1e3:.1f}ms",
        f"{snapshot.step_us_p50 / 1e3:.1f}ms",
        age,
    ]


def print_status(report: StatusReport, experts: ExpertsReport) -> None:
    """Writes the table to stdout."""
    open_console().print(render_status(report, experts))


def open_console() -> Console:
    """stdout; as wide as it needs to be when it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def describe_bytes(count: int) -> str:
    """`1.5GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f}{unit}" if unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    raise AssertionError("the loop returns")


def describe_age(seconds: float) -> str:
    """`0.3s`, `4m12s`, `3h05m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
