"""A StatusReport as a table for people and as JSON for programs. `"schema": 1` grows by new keys only."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from transport.messages import RankStatus, StatusReport

STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "restarting": "red", "lost": "bold red"}


def status_json(report: StatusReport) -> dict[str, Any]:
    """The report as plain data; ratios and units are in the keys' names."""
    data: dict[str, Any] = {"schema": 1, **msgspec.structs.asdict(report)}
    data["reasons"] = list(report.reasons)
    data["ranks"] = [_rank_json(rank) for rank in report.ranks]
    return data


def _rank_json(rank: RankStatus) -> dict[str, Any]:
    data = msgspec.structs.asdict(rank)
    data["snapshot"] = None if rank.snapshot is None else msgspec.structs.asdict(rank.snapshot)
    return data


def render_status(report: StatusReport) -> RenderableType:
    """Verdict first, then one line per rank."""
    if report.ready:
        verdict = Text("ready", style="green")
    else:
        verdict = Text("not ready: " + "; ".join(report.reasons), style="bold red")
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
    return Group(title, table)


def _rank_cells(rank: RankStatus) -> list[RenderableType]:
    state = Text(rank.state, style=STATE_STYLES.get(rank.state, ""))
    if rank.phase:
        state.append(f" {rank.phase}", style="dim")
    if rank.restarts:
        state.append(f" (life {rank.generation})", style="dim")
    name = f"{rank.role[0]}{rank.rank}"
    age = describe_age(rank.age_ms / 1e3)
    snapshot = rank.snapshot
    if snapshot is None:
        return [name, state, *["-"] * 7, age]
    used = snapshot.pages_total - snapshot.pages_free
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


def print_status(report: StatusReport) -> None:
    """Writes the table to stdout; as wide as it needs to be when stdout is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(render_status(report))


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
