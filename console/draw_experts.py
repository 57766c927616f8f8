"""Screen 3: the experts of one part of one group as a heat map, with a sentence for the cell under the cursor. Pure."""

from __future__ import annotations

import math

import numpy as np

from console import words
from console.expertcells import (
    METRIC_WORDS,
    ORDER_WORDS,
    describe_cell,
    describe_rank_layer,
    hottest_experts,
    layer_skews,
    mean_rows,
)
from console.expertmap import LABEL, TAIL, Scene, cell_width, choose_scale, draw_map, set_scene
from console.experts_state import ExpertsState, find_heat
from console.heatmap import Scale, window
from console.lines import Line, Run, beside, clip, join, joined, line, wrap
from console.marks import HEAT_GLYPHS, heat_name
from console.spark import spark
from console.verdict import SKEW_NOTED, name_part
from console.view import ClusterView
from transport.messages import PartReport

SIDE = 42
"""Cells of the panel at the right, where there is room for it."""
SIDE_FROM = 116
SMALL = 60
"""Below this, which is below what a console is made for, lines are cut."""
WIDE = 110
"""From here on every sentence fits one line."""
SIDE_ROWS = 12
"""Lines of each of its lists, at most."""


def build(view: ClusterView, ui: ExpertsState, width: int, height: int, now: float) -> list[Line]:
    """At most `height` lines of at most `width` cells."""
    part = ui.find_part(view)
    heat = find_heat(view, part) if part else None
    if part is None:
        known = view.experts is not None
        text = "Every rank has all experts: no pool has groups of several ranks." if known else "No answer yet."
        lines = [line((" 3 Experts ", "title")), (), line(f" {text}", style="dim")]
    elif heat is None or heat.report.steps == 0:
        text = "No steps were counted yet." if heat is not None else "The loads of this part were not told yet."
        lines = [_title(ui, part, width), (), line(f" {text}", style="dim")]
    else:
        lines = _compose(set_scene(view, ui, part, heat), width, height)
        if width >= SMALL:
            return lines[:height]
    return [clip(one, width) for one in lines[:height]]


def describe_cursor(view: ClusterView, ui: ExpertsState) -> str:
    """The sentence for the cell under the cursor; "" while nothing is known."""
    part = ui.find_part(view)
    heat = find_heat(view, part) if part else None
    return _sentence(set_scene(view, ui, part, heat)) if part and heat else ""


def _compose(scene: Scene, width: int, height: int) -> list[Line]:
    # A row of experts needs all the width that there is.
    wants_all = scene.ui.order == "experts" and width < LABEL + scene.part.experts + TAIL + SIDE
    side = SIDE if width >= SIDE_FROM and not wants_all else 0
    room = width - side - (1 if side else 0)
    scale = choose_scale(scene)
    title = join(_title(scene.ui, scene.part, width), _legend(scene.ui, scale), width)
    bottom = [line((f" {text}", "value")) for text in wrap(_sentence(scene), width - 2)[: 2 if width < WIDE else 1]]
    if len(bottom) == 1 and width < WIDE:
        # One or two lines, but always the room of two: the map must not jump when the cursor moves.
        bottom.append(())
    bottom += _notes(scene, width)
    strip = _strip(scene, room)
    grid = draw_map(scene, scale, room, height - 1 - len(strip) - len(bottom))
    left = [*strip, *grid]
    left += [()] * (height - 1 - len(bottom) - len(left))
    if side:
        left = beside([(left, room), (_side(scene, len(left)), side)])
    return [title, *left, *bottom]


def _title(ui: ExpertsState, part: PartReport, width: int) -> Line:
    name = name_part(part) if part.part == "draft" else f"{name_part(part)} main"
    fields = [name, METRIC_WORDS[ui.shown_metric]]
    if width >= WIDE:
        fields.insert(1, ORDER_WORDS[ui.order])
    if width >= WIDE or not ui.is_after:
        # The line below the strip names the layer as well.
        fields.append(f"layer {ui.find_layer(part)} of {part.layers}")
    if width >= WIDE and not ui.is_after:
        fields.append(f"{part.steps:,} steps seen")
    runs: list[Run] = [(" 3 Experts", "title"), *((f"  {field}", "value") for field in fields)]
    if ui.is_after:
        runs.append((f"  after plan {part.plan.plan}" if part.plan.plan else "  no plan", "info"))
    return clip(joined(runs), width)


def _legend(ui: ExpertsState, scale: Scale) -> Line:
    if ui.shown_metric == "moved":
        return (("moved ", "label"), _swatch(ui, 7), ("  other ", "label"), _swatch(ui, 1), (" ", ""))
    glyphs, _, numbers = scale.legend().partition(" ")
    if ui.is_mono:
        return ((f"{glyphs} {numbers} ", "label"),)
    return (*(_swatch(ui, step) for step in (1, 2, 3, 5, 7)), (f" {numbers} ", "label"))


def _swatch(ui: ExpertsState, step: int) -> Run:
    return (HEAT_GLYPHS[step], "") if ui.is_mono else (" ", heat_name(step))


# ---------------------------------------------------------------- layers


def _strip(scene: Scene, room: int) -> list[Line]:
    """Skew by layer as a line of bars over the map's columns, and the cursor's layer in words below it."""
    skews = layer_skews(scene.loads)
    count, layer = int(skews.size), scene.layer
    cell = cell_width(room - LABEL - TAIL, count)
    shown = min(count, (room - LABEL - TAIL) // cell)
    first = window(scene.ui.left if scene.ui.order == "layers" else layer - shown // 2, shown, count, layer)
    high = max(1.0 + 1e-6, float(skews.max()))
    bars = spark(skews[first : first + shown], shown, low=1.0, high=high)
    marks: list[Run] = []
    for n, bar in enumerate(bars, first):
        # Reversed, a full bar would be a blank; without colours the ruler's mark has to do.
        chosen = "bold" if scene.ui.is_mono else "chosen"
        look = chosen if n == layer else "hot" if skews[n] >= max(SKEW_NOTED, 0.9 * high) else "spark"
        marks.append((bar * cell, look))
    worst = int(skews.argmax())
    here = f"layer {layer}: fullest rank {skews[layer]:.2f}x its mean"
    if worst == layer:
        other: Run = ("the worst layer", "hot" if skews[worst] >= SKEW_NOTED else "label")
    else:
        other = (f"worst is {worst}: {skews[worst]:.2f}x (w)", "label")
    return [
        joined([(" skew".ljust(LABEL), "label"), *marks]),
        clip(line((" " * LABEL, ""), (here, "value"), ("   ", ""), other), room),
    ]


# ---------------------------------------------------------------- words


def _sentence(scene: Scene) -> str:
    if scene.ui.order == "layers":
        return describe_rank_layer(scene.heat, scene.loads, scene.row, scene.layer, scene.names[scene.row])
    if not scene.has_slots:
        return f"layer {scene.layer} is asked for; shown are the slots of layer {scene.heat.report.layer}"
    return describe_cell(scene.heat, scene.layout, scene.row, scene.expert, scene.names)


def _notes(scene: Scene, width: int) -> list[Line]:
    """What has to be known to read the map."""
    if not scene.ui.is_after:
        return []
    report, plan = scene.heat.report, scene.part.plan.plan
    if not report.has_plan:
        text = "There is no plan, so this is as it is now; R makes one."
    elif scene.ui.order == "layers":
        text = f"Layer {report.layer} is as plan {plan} makes it; the other layers are as they are now."
    else:
        text = f"As plan {plan} makes it; + marks experts that it puts there."
    return [clip(line((f" {text}", "info")), width)]


def _side(scene: Scene, rows: int) -> list[Line]:
    """The hottest experts of the layer and the fullest layers of the rank, for the right of wide screens."""
    heat, row, names = scene.heat, scene.row, scene.names
    room = max(1, min(SIDE_ROWS, (rows - 6) // 2))
    lines: list[Line] = [
        line((f"hottest experts of layer {heat.report.layer}", "head")),
        line(("expert  x mean   rows  where", "label")),
    ]
    for expert in hottest_experts(heat, scene.layout, room):
        held = np.flatnonzero((scene.layout.expert == expert).any(axis=1))
        where = " ".join(names[n] for n in held[:4]) + (f" +{held.size - 4}" if held.size > 4 else "")
        load = float(heat.load[expert])
        rows_text = words.short(load * mean_rows(heat.report))
        look = "chosen" if row in held else "value"
        lines.append(line((f"{expert:>6}  {load:>6.2f}  {rows_text:>5}  ", "value"), (where, look)))
    loads = scene.loads[row]
    lines += [(), line((f"fullest layers of {names[row]}", "head")), line(("layer  x mean  hottest expert", "label"))]
    for layer in np.argsort(-loads, kind="stable")[:room].tolist():
        expert = int(heat.hottest[row, layer])
        said = str(expert) if expert >= 0 else words.NONE
        look = "chosen" if layer == scene.layer else "value"
        lines.append(line((f"{layer:>5}  {loads[layer]:>6.2f}  {said:>14}", look)))
    mean = float(loads.mean())
    if math.isfinite(mean):
        lines += [(), line((f"{names[row]} over all layers: {mean:.2f}x mean", "value"))]
    return lines[:rows]
