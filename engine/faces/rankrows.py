"""One row for each rank, with what a group's loads say of it: sorted, filtered, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from engine.faces.plain import make_plain
from engine.faces.ranks import name_rank
from engine.faces.status import STATE_STYLES, describe_age, message_json
from transport.messages import ExpertsReport, HeatReport, PartReport, RankStatus, StatusReport


@dataclasses.dataclass(frozen=True, slots=True)
class RankHeat:
    """The load of a rank in its group, by the main model.

    Attributes:
        skew: mean over layers of its load / the layer's mean load; 1 is even.
        layer, load, expert: where its load is highest, how high, and the busiest expert there; -1 if it has none.
    """

    skew: float
    layer: int
    load: float
    expert: int


@dataclasses.dataclass(frozen=True, slots=True)
class RankRow:
    status: RankStatus
    group: str
    """`decode/0`; empty for a rank that has all experts."""
    heat: RankHeat | None


SORTS: dict[str, Callable[[RankRow], float]] = {
    "rank": lambda row: row.status.rank,
    "skew": lambda row: -row.heat.skew if row.heat else 0.0,
    "load": lambda row: -row.heat.load if row.heat else 0.0,
    "step": lambda row: -row.status.snapshot.step_us_p50 if row.status.snapshot else 0,
    "p99": lambda row: -row.status.snapshot.step_us_p99 if row.status.snapshot else 0,
    "run": lambda row: -row.status.snapshot.running if row.status.snapshot else 0,
    "wait": lambda row: -row.status.snapshot.waiting if row.status.snapshot else 0,
    "pages": lambda row: -_used_share(row.status),
    "age": lambda row: -row.status.age_ms,
    "restarts": lambda row: -row.status.restarts,
}
"""By what rows can be sorted: the highest first, but for `rank`."""


def read_heat(report: HeatReport, blob: memoryview) -> list[RankHeat]:
    """One entry for each rank of the group, in the order of its part's `ranks`; none while nothing was counted."""
    if not report.steps:
        return []
    size = report.ranks * report.layers
    loads = blob[: 4 * size].cast("f")
    hottest = blob[4 * size : 8 * size].cast("i")
    heats = []
    for place in range(report.ranks):
        row = loads[place * report.layers : (place + 1) * report.layers].tolist()
        layer = max(range(report.layers), key=row.__getitem__)
        heats.append(RankHeat(sum(row) / report.layers, layer, row[layer], hottest[place * report.layers + layer]))
    return heats


def make_rows(
    status: StatusReport, experts: ExpertsReport, heats: Iterable[tuple[PartReport, Sequence[RankHeat]]]
) -> list[RankRow]:
    """All ranks, in order of their numbers."""
    groups = {rank: f"{part.pool}/{part.group}" for part in experts.parts for rank in part.ranks}
    rank_to_heat = {rank: heat for part, of_part in heats for rank, heat in zip(part.ranks, of_part, strict=False)}
    return [RankRow(rank, groups.get(rank.rank, ""), rank_to_heat.get(rank.rank)) for rank in status.ranks]


def filter_rows(rows: Iterable[RankRow], words: Sequence[str]) -> list[RankRow]:
    """Rows that all words fit, and none of those that begin with `!`. A word fits a rank's name (`d17`), pool, group
    (`decode/0`), the beginning of its state or phase, or a part of its reason."""

    def fits(row: RankRow, word: str) -> bool:
        status = row.status
        return (
            word in (name_rank(status), str(status.rank), status.role, row.group)
            or status.state.startswith(word)
            or (bool(status.phase) and status.phase.startswith(word))
            or word in status.reason.lower()
        )

    wanted = [word.lower() for word in words if not word.startswith("!")]
    unwanted = [word[1:].lower() for word in words if len(word) > 1 and word.startswith("!")]
    return [
        row for row in rows if all(fits(row, word) for word in wanted) and not any(fits(row, word) for word in unwanted)
    ]


def sort_rows(rows: Iterable[RankRow], key: str) -> list[RankRow]:
    """By one of SORTS; equal ones by their numbers."""
    return sorted(rows, key=lambda row: (SORTS[key](row), row.status.rank))


def row_json(row: RankRow) -> dict[str, Any]:
    heat = None if row.heat is None else dataclasses.asdict(row.heat)
    return {**message_json(row.status), "group": row.group or None, "heat": heat}


def render_rows(rows: Sequence[RankRow]) -> Table:
    """One line for each rank; fits 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("group", no_wrap=True)
    table.add_column("state", min_width=8, overflow="fold")
    for name in ("run", "wait", "pages", "step p50", "p99", "skew", "hottest", "load", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: RankRow) -> list[str | Text]:
    status, snapshot = row.status, row.status.snapshot
    state = Text(status.state, style=STATE_STYLES.get(status.state, ""))
    if status.phase:
        state.append(f" {make_plain(status.phase)}", style="dim")
    cells: list[str | Text] = [name_rank(status), row.group or "-", state]
    if snapshot is None:
        cells += ["-"] * 5
    else:
        cells += [
            str(snapshot.running),
            str(snapshot.waiting),
            f"{100 * _used_share(status):.0f}%",
            f"{snapshot.step_us_p50 / 1e3:.1f}ms",
            f"{snapshot.step_us_p99 / 1e3:.1f}ms",
        ]
    if row.heat is None:
        cells += ["-"] * 3
    else:
        expert = f" E{row.heat.expert}" if row.heat.expert >= 0 else ""
        cells += [f"{row.heat.skew:.2f}", f"L{row.heat.layer}{expert}", f"{row.heat.load:.2f}"]
    return [*cells, describe_age(status.age_ms / 1e3)]


def _used_share(status: RankStatus) -> float:
    snapshot = status.snapshot
    if snapshot is None or not snapshot.pages_total:
        return 0.0
    return (snapshot.pages_total - snapshot.pages_available) / snapshot.pages_total
