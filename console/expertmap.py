"""The heat map of the Experts screen: one scene (a report, what is chosen, what both come to) as lines. Pure."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from console.expertcells import Floats, Layout, expert_cells, lay_out, layer_cells, layer_loads, slot_cells
from console.experts_state import ExpertsState, cursor_of
from console.heatmap import (
    CURSOR_GLYPH,
    EXPERT_SCALE,
    LAYER_SCALE,
    LOWER_CURSOR,
    MOVED_SCALE,
    REPLICA_SCALE,
    UPPER_CURSOR,
    Scale,
    paired_rows,
    put_cursor,
    ruler,
    scale_to,
    single_rows,
    to_steps,
    window,
)
from console.lines import Line, Run, joined
from console.marks import HEAT_GLYPHS, heat_name
from console.verdict import SKEW_NOTED
from console.view import ClusterView, Heat
from transport.messages import PartReport

LABEL = 8
"""Cells before the columns: ` d16/17 `."""
TAIL = 5
"""Cells behind the columns: a rank's load over all layers, or in the one layer that is shown."""
MAX_CELL = 3
"""A figure is not drawn wider than that."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What one drawing is of: the report, what was chosen, and what both come to.

    Attributes:
        loads: of every rank in every layer, as `layer_loads`.
        names: of the group's ranks in order.
        row, layer: of the cursor.
        expert, place: the same, as `cursor_of`.
    """

    heat: Heat
    ui: ExpertsState
    part: PartReport
    loads: Floats
    layout: Layout
    names: list[str]
    row: int
    layer: int
    expert: int
    place: int

    @property
    def has_slots(self) -> bool:
        """Whether the slots that were told are those of the chosen layer: they come one answer later."""
        return self.heat.report.layer == self.layer


def set_scene(view: ClusterView, ui: ExpertsState, part: PartReport, heat: Heat) -> Scene:
    layout = lay_out(heat, is_after=ui.is_after)
    expert, place = cursor_of(ui, part, layout)
    if ui.order != "layers" and heat.report.layer == ui.find_layer(part):
        ui.keep_cursor(expert, place)
    return Scene(
        heat=heat,
        ui=ui,
        part=part,
        loads=layer_loads(heat, is_after=ui.is_after),
        layout=layout,
        names=[view.name(rank) for rank in part.ranks],
        row=ui.find_row(part),
        layer=ui.find_layer(part),
        expert=expert,
        place=place,
    )


def choose_scale(scene: Scene) -> Scale:
    ui, heat = scene.ui, scene.heat
    metric = ui.shown_metric
    if metric == "ratio":
        return LAYER_SCALE if ui.order == "layers" else EXPERT_SCALE
    if metric == "replicas":
        return REPLICA_SCALE
    if metric == "moved":
        return MOVED_SCALE
    if ui.order == "layers":
        return scale_to(layer_cells(heat, scene.loads, metric))
    return scale_to(slot_cells(heat, scene.layout, metric))


def cell_width(room: int, count: int) -> int:
    """Cells of one column: more where all columns fit."""
    return max(1, min(MAX_CELL, room // max(1, count)))


def draw_map(scene: Scene, scale: Scale, room: int, rows: int) -> list[Line]:
    """The heat map in at most `rows` lines, its ruler first."""
    ui, layout, n, row = scene.ui, scene.layout, len(scene.names), scene.row
    if ui.order == "layers":
        cells, at = layer_cells(scene.heat, scene.loads, ui.shown_metric), scene.layer
    elif ui.order == "experts":
        cells, at = expert_cells(scene.heat, layout, ui.shown_metric), scene.expert
    else:
        cells, at = slot_cells(scene.heat, layout, ui.shown_metric), scene.place
    lines = max(1, rows - 1)
    per = 2 if not ui.is_mono and ui.order != "slots" and n > lines else 1
    ui.top = _first_row(ui.top, lines, n, row, per)
    bottom = min(n, ui.top + lines * per)
    ui.shown_rows = max(1, bottom - ui.top)
    digits = len(str(max(0, scene.part.experts - 1)))
    space, columns = room - LABEL - TAIL, int(cells.shape[1])
    cell = digits + 2 if ui.order == "slots" else cell_width(space, columns)
    # Above the map: title, strip, ruler.
    ui.grid = (4, LABEL, per, cell)
    shown = max(0, min(columns, space // cell))
    ui.left = window(ui.left, shown, columns, max(0, at))
    steps = to_steps(cells[ui.top : bottom, ui.left : ui.left + shown], scale)
    if ui.order == "slots":
        drawn = _numbered_rows(scene, steps, digits)
    else:
        drawn = paired_rows(steps, cell) if per == 2 else single_rows(steps, cell, is_mono=ui.is_mono)
    title = {"layers": " layer", "slots": " slots", "experts": " expert"}[ui.order]
    head = ruler(ui.left, shown, cell, at) if ui.order != "slots" else ((" " * (shown * cell), ""),)
    sums = scene.loads.mean(axis=1) if ui.order == "layers" else scene.loads[:, scene.layer]
    x = (at - ui.left) * cell if at >= 0 else -1
    result: list[Line] = [
        joined([(title.ljust(LABEL), "label"), *head, (" mean" if ui.order == "layers" else " rank", "label")])
    ]
    for first, runs in zip(range(ui.top, bottom, per), drawn, strict=True):
        has_cursor = first <= row < first + per
        if has_cursor and 0 <= x < shown * cell:
            runs = _with_cursor(ui, runs, x, cell, per, row - first)
        peak = float(sums[first : first + per].max())
        look = "hot" if peak >= SKEW_NOTED else "label"
        tail = (f" {peak:.2f}", look)
        result.append(joined([(_label(scene.names, first, per), "chosen" if has_cursor else look), *runs, tail]))
    return result


def _first_row(top: int, lines: int, n: int, row: int, per: int) -> int:
    """The first rank that is shown; even where two share a line, so that pairs stay pairs."""
    return window(top // per, lines, -(-n // per), row // per) * per


def _label(names: list[str], first: int, per: int) -> str:
    both = per == 2 and first + 1 < len(names)
    text = f" {names[first]}/{names[first + 1][1:]}" if both else f" {names[first]}"
    return text.ljust(LABEL)[:LABEL]


def _with_cursor(ui: ExpertsState, runs: list[Run], x: int, cell: int, per: int, half: int) -> list[Run]:
    if per == 2:
        glyph = LOWER_CURSOR if half else UPPER_CURSOR
        return put_cursor(runs, x, cell, text=glyph.ljust(cell), style="cursor")
    if ui.order == "slots":
        # The number stays, its ground is the cursor's.
        return put_cursor(runs, x, cell - 1, style="chosen")
    if ui.is_mono:
        return put_cursor(runs, x, cell, style="chosen")
    return put_cursor(runs, x, 1, text=CURSOR_GLYPH)


def _numbered_rows(scene: Scene, steps: npt.NDArray[np.uint8], digits: int) -> list[list[Run]]:
    """Each slot as its expert's number, in the heat's colour or with its glyph; `+`: the plan puts it there."""
    ui = scene.ui
    part = (slice(ui.top, ui.top + steps.shape[0]), slice(ui.left, ui.left + steps.shape[1]))
    rows: list[list[Run]] = []
    for numbers, heats, fresh in zip(
        scene.layout.expert[part].tolist(), steps.tolist(), scene.layout.moved[part].tolist(), strict=True
    ):
        runs: list[Run] = []
        for number, step, is_fresh in zip(numbers, heats, fresh, strict=True):
            if number < 0:
                runs.append((" " * (digits + 2), ""))
                continue
            text = f"{'+' if is_fresh and ui.is_after else ''}{number}".rjust(digits + 1)
            if ui.is_mono:
                runs.append((text + HEAT_GLYPHS[step], "" if step < 5 else heat_name(step)))
            else:
                runs += [(text, heat_name(step)), (" ", "")]
        rows.append(runs)
    return rows
