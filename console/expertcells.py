"""What a HeatReport comes to, cell by cell: which expert is where, how loaded, what it costs. Arrays and sentences.

Pure. Three orders of the same loads: rank x layer (where), rank x slot of one layer (which expert sits where), rank x
expert of one layer. Loads are multiples of a mean: a layer's mean over ranks in the first, over experts in the others.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from console import words
from console.view import Heat
from transport.messages import HeatReport

Order = Literal["layers", "slots", "experts"]
ORDERS: tuple[Order, ...] = ("layers", "slots", "experts")
ORDER_WORDS: dict[Order, str] = {"layers": "rank x layer", "slots": "rank x slot", "experts": "rank x expert"}
Metric = Literal["ratio", "rows", "cost", "replicas", "moved"]
METRICS: tuple[Metric, ...] = ("ratio", "rows", "cost", "replicas", "moved")
METRIC_WORDS: dict[Metric, str] = {
    "ratio": "load/mean",
    "rows": "rows a step",
    "cost": "us above mean",
    "replicas": "replicas",
    "moved": "moved last",
}
OF_LAYERS: frozenset[Metric] = frozenset({"ratio", "rows", "cost"})
"""What a whole layer on a rank has; the others belong to single experts."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The slots of one layer, now or after the plan.

    Attributes:
        packed: int[n, w]: per rank the places of its slots that hold an expert of the layer, ascending; -1 beyond them.
            Slots are a pool of all layers, so most of a rank's slots hold nothing of this one.
        expert: int[n, w]: the expert in each of these; -1 beyond them.
        replicas: int[experts]. share: float[experts]: a replica's load, of the mean over experts.
        moved: bool[n, w]: the last re-placement put it there; after the plan: the plan puts it there.
    """

    packed: Ints
    expert: Ints
    replicas: Ints
    share: Floats
    moved: npt.NDArray[np.bool_]

    @property
    def width(self) -> int:
        return int(self.packed.shape[1])


def lay_out(heat: Heat, *, is_after: bool) -> Layout:
    """The chosen layer's slots of a report; `is_after`: as the last plan has them."""
    slots = heat.next_slots if is_after else heat.slots
    held = slots >= 0
    n = slots.shape[0]
    counts = held.sum(axis=1)
    w = int(counts.max()) if n else 0
    packed = np.full((n, w), -1, dtype=np.int64)
    expert = np.full((n, w), -1, dtype=np.int64)
    moved = np.zeros((n, w), dtype=np.bool_)
    row, slot = np.nonzero(held)
    # `nonzero` goes row by row, so a slot's place among those of its rank is its index less the row's first.
    place = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    packed[row, place] = slot
    expert[row, place] = slots[row, slot]
    fresh = heat.next_slots != heat.slots if is_after else heat.moved != 0
    moved[row, place] = fresh[row, slot]
    replicas = np.bincount(slots[row, slot], minlength=heat.report.experts).astype(np.int64)
    share = heat.load.astype(np.float64) / np.maximum(replicas, 1)
    return Layout(packed, expert, replicas, share, moved)


def mean_rows(report: HeatReport) -> float:
    """Rows per step of the mean expert of a layer; `rows_per_step` is the mean rank's."""
    return report.rows_per_step * report.ranks / report.experts if report.experts else 0.0


def layer_loads(heat: Heat, *, is_after: bool) -> Floats:
    """float[n, layers]: load of each rank in each layer, of the layer's mean over ranks. After the plan only the chosen
    layer is known: its column is what the plan makes of it, the others are as they are."""
    loads = heat.rank_load.astype(np.float64)
    if is_after and heat.report.has_plan and heat.report.layer < loads.shape[1]:
        loads[:, heat.report.layer] = planned_loads(heat)
    return loads


def planned_loads(heat: Heat) -> Floats:
    """float[n]: load of each rank in the chosen layer under the plan's slots, of the mean over ranks."""
    layout = lay_out(heat, is_after=True)
    cells = np.where(layout.expert >= 0, layout.share[np.maximum(layout.expert, 0)], 0.0)
    sums = cells.sum(axis=1)
    mean = float(sums.mean()) if sums.size else 0.0
    planned: Floats = sums / mean if mean > 0 else sums
    return planned


def layer_skews(loads: Floats) -> Floats:
    """float[layers]: the fullest rank of each layer over the mean; 1 is even, 0 has no load."""
    skews: Floats = loads.max(axis=0) if loads.size else np.zeros(loads.shape[1])
    return skews


def layer_cells(heat: Heat, loads: Floats, metric: Metric) -> Floats:
    """float[n, layers] of a metric; what a layer does not have is told as load/mean."""
    if metric == "rows":
        return loads * heat.report.rows_per_step
    if metric == "cost":
        return cost_us(loads, heat.report.rows_per_step, heat.report.us_per_row)
    return loads


def slot_cells(heat: Heat, layout: Layout, metric: Metric) -> Floats:
    """float[n, w] of a metric, for each of `Layout.packed`; NaN where there is no slot."""
    expert = np.maximum(layout.expert, 0)
    values: Floats
    if metric == "replicas":
        values = layout.replicas[expert].astype(np.float64)
    elif metric == "moved":
        values = layout.moved.astype(np.float64)
    else:
        values = layout.share[expert]
        rows = mean_rows(heat.report)
        if metric == "rows":
            values = values * rows
        elif metric == "cost":
            values = cost_us(values, rows, heat.report.us_per_row)
    return np.where(layout.expert >= 0, values, np.nan)


def expert_cells(heat: Heat, layout: Layout, metric: Metric) -> Floats:
    """float[n, experts] of a metric; NaN where the rank does not hold the expert. Of two on one rank the last."""
    cells = np.full((layout.expert.shape[0], heat.report.experts), np.nan)
    row, place = np.nonzero(layout.expert >= 0)
    cells[row, layout.expert[row, place]] = slot_cells(heat, layout, metric)[row, place]
    return cells


def cost_us(ratios: Floats, rows_per_step: float, us_per_row: float) -> Floats:
    """Microseconds a step above the mean: rows that are more than it, at the price of a row; 0 below the mean."""
    costs: Floats = np.maximum(ratios - 1.0, 0.0) * (rows_per_step * us_per_row)
    return costs


# ---------------------------------------------------------------- sentences


def describe_rank_layer(heat: Heat, loads: Floats, row: int, layer: int, name: str) -> str:
    """`d17 layer 41, hottest expert 203: 1.83x mean, 328 rows a step, costs 610 us a step`."""
    report, ratio = heat.report, float(loads[row, layer])
    expert = int(heat.hottest[row, layer])
    rows = ratio * report.rows_per_step
    cost = float(cost_us(loads[row : row + 1, layer], report.rows_per_step, report.us_per_row)[0])
    hottest = f", hottest expert {expert}" if expert >= 0 else ""
    return f"{name} layer {layer}{hottest}: {ratio:.2f}x mean, {rows:,.0f} rows, {say_cost(report, cost)}"


def describe_cell(heat: Heat, layout: Layout, row: int, expert: int, names: list[str]) -> str:
    """`d17 slot 31: expert 203 (2 replicas: d05, d17) 4.1x mean, 12.3 % of the layer's rows, costs 610 us a step`.

    Args:
        names: of the ranks in the report's order.
    """
    report = heat.report
    holders = [names[n] for n in np.flatnonzero((layout.expert == expert).any(axis=1)) if n < len(names)]
    place = np.flatnonzero(layout.expert[row] == expert)
    where = f"{names[row]} slot {int(layout.packed[row, place[0]])}" if place.size else f"not on {names[row]}"
    listed = ", ".join(holders[:4]) + (f", +{len(holders) - 4}" if len(holders) > 4 else "")
    replicas = f"({words.plural(int(layout.replicas[expert]), 'replica')}: {listed})"
    load = float(heat.load[expert])
    share = load / report.experts if report.experts else 0.0
    text = f"{where}: expert {expert} {replicas} {load:.1f}x mean, {100 * share:.1f} % of the layer's rows"
    if not place.size:
        return text
    cost = float(cost_us(layout.share[expert : expert + 1], mean_rows(report), report.us_per_row)[0])
    return f"{text}, {say_cost(report, cost)}"


def say_cost(report: HeatReport, cost: float) -> str:
    """`costs 610 us a step`, `not above the mean`, or that no price is known."""
    if not report.us_per_row:
        return "price not measured yet"
    return f"costs {words.us(cost)} a step" if cost >= 0.5 else "costs nothing"


def hottest_experts(heat: Heat, layout: Layout, count: int) -> list[int]:
    """The experts of the chosen layer whose replicas carry most, at most `count`."""
    if heat.report.steps == 0:
        return []
    return [int(expert) for expert in np.argsort(-layout.share, kind="stable")[:count] if layout.replicas[expert]]
