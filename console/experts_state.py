"""What of the experts is looked at: part, layer, cursor, order, metric; and what each key makes of it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from console.expertcells import METRICS, OF_LAYERS, ORDERS, Layout, Metric, Order, lay_out
from console.verdict import is_noted, worst_part
from console.view import ClusterView, Heat
from transport.messages import AskHeat, PartReport


@dataclasses.dataclass(slots=True)
class ExpertsState:
    """What of the experts is looked at. What is None becomes the worst at the first look, and then stays: nothing
    moves under a cursor by itself.

    Attributes:
        aim: pool, group and part.
        layer, row: of the cursor; `row` is the index of a rank in its group.
        expert: under the cursor in the two orders that show experts; -1: the one at `place`, an index into the rank's
            slots of the layer.
        is_chosen: a key has moved something, so that coming back to the screen does not go to the worst again.
        is_after: slots and loads as the last plan makes them.
        is_mono: no colours, so glyphs have to say it, and each rank has a line of its own.
        top, left: first row and column that are shown; kept by the drawing, so that a cursor moves before the map does.
        shown_rows: ranks that were shown last, for a page up or down.
        grid: where the map was drawn last, for the mouse: line of its first row, column of its first cell, ranks in a
            line, cells of a column.
    """

    aim: tuple[str, int, str] | None = None
    layer: int | None = None
    row: int | None = None
    expert: int | None = None
    place: int = 0
    is_chosen: bool = False
    order: Order = "layers"
    metric: Metric = "ratio"
    is_after: bool = False
    is_mono: bool = False
    top: int = 0
    left: int = 0
    shown_rows: int = 1
    grid: tuple[int, int, int, int] = (0, 0, 1, 1)

    @property
    def shown_metric(self) -> Metric:
        """The chosen one, or load/mean where the order has no such figure."""
        return self.metric if self.order != "layers" or self.metric in OF_LAYERS else "ratio"

    def find_part(self, view: ClusterView) -> PartReport | None:
        """The chosen part as it is now; the worst one if none was chosen, or if it is gone. One that nobody chose is
        left when it is even and another one is not."""
        part = view.part(*self.aim) if self.aim else None
        if part is None or (not self.is_chosen and not is_noted(part)):
            worst = worst_part(view)
            if worst is not None and (part is None or is_noted(worst)):
                if self.aim is not None:
                    self.go_worst()
                part, self.aim = worst, _key(worst)
        return part

    def find_layer(self, part: PartReport) -> int:
        if self.layer is None and part.steps:
            self.layer = part.skew.layer
        return max(0, min(self.layer or 0, part.layers - 1))

    def find_row(self, part: PartReport) -> int:
        if self.row is None and part.steps and part.skew.rank in part.ranks:
            self.row = part.ranks.index(part.skew.rank)
        return max(0, min(self.row or 0, len(part.ranks) - 1))

    def keep_cursor(self, expert: int, place: int) -> None:
        """What the drawing found under the cursor: from now on it stays there, wherever the loads go."""
        self.expert = expert
        if place >= 0:
            self.place = place

    def question(self, view: ClusterView) -> AskHeat | None:
        """What to ask the head for; None while no part is known."""
        part = self.find_part(view)
        if part is None:
            return None
        return AskHeat(pool=part.pool, group=part.group, part=part.part, layer=self.find_layer(part))

    # ------------------------------------------------------------ keys

    def turn_layer(self, part: PartReport, by: int) -> None:
        self.layer = max(0, min(self.find_layer(part) + by, part.layers - 1))
        self.expert, self.is_chosen = None, True

    def move_row(self, part: PartReport, by: int) -> None:
        self.row = max(0, min(self.find_row(part) + by, len(part.ranks) - 1))
        self.is_chosen = True
        if self.order == "layers":
            self.expert = None
        elif self.order == "slots":
            self.expert = -1

    def move_column(self, view: ClusterView, part: PartReport, by: int) -> None:
        """Left and right: the layer, or the slot or expert under the cursor."""
        heat = find_heat(view, part)
        if self.order == "layers" or heat is None:
            self.turn_layer(part, by)
            return
        layout = lay_out(heat, is_after=self.is_after)
        expert, place = cursor_of(self, part, layout)
        self.is_chosen = True
        if self.order == "experts":
            self.expert = max(0, min(expert + by, part.experts - 1))
        else:
            self.place, self.expert = max(0, place + by), -1

    def go_worst(self) -> None:
        """To the worst layer as it is now, its fullest rank and the hottest expert there."""
        self.layer = self.row = self.expert = None

    def arrive(self) -> None:
        """The screen is shown: on the worst of all, unless something was chosen."""
        if not self.is_chosen:
            self.aim = None
            self.go_worst()

    def go_worst_part(self) -> None:
        """To the part of all groups that loses most."""
        self.aim, self.is_chosen = None, False
        self.top = self.left = 0
        self.go_worst()

    def turn_order(self, by: int = 1) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + by) % len(ORDERS)]
        self.left = 0

    def turn_metric(self, by: int = 1) -> None:
        metrics = [metric for metric in METRICS if self.order != "layers" or metric in OF_LAYERS]
        self.metric = metrics[(metrics.index(self.shown_metric) + by) % len(metrics)]

    def go_in(self) -> None:
        """Enter: what is inside of what is under the cursor: a layer's slots, then its experts."""
        if self.order != "experts":
            self.turn_order()

    def go_out(self) -> bool:
        """Esc: back to the layers; False if these are shown."""
        was = self.order
        self.order, self.left = "layers", 0
        return was != "layers"

    def put_cursor(self, view: ClusterView, part: PartReport, x: int, y: int) -> None:
        """A click on the map."""
        first_y, first_x, per, cell = self.grid
        if y < first_y or x < first_x:
            return
        row, column = self.top + (y - first_y) * per, self.left + (x - first_x) // cell
        if row >= len(part.ranks):
            return
        self.row, self.is_chosen = row, True
        if self.order == "layers" and column < part.layers:
            self.layer, self.expert = column, None
        elif self.order == "experts" and column < part.experts:
            self.expert = column
        elif self.order == "slots":
            self.place, self.expert = column, -1

    def turn_part(self, view: ClusterView) -> None:
        """Main model or drafter of the same group."""
        part = self.find_part(view)
        if part is None or view.experts is None:
            return
        others = [one for one in view.experts.parts if (one.pool, one.group) == (part.pool, part.group)]
        self._aim_at(others, part, 1)

    def turn_group(self, view: ClusterView, by: int) -> None:
        """Another group of any pool, the same part where it has one."""
        part = self.find_part(view)
        if part is None or view.experts is None:
            return
        same = [one for one in view.experts.parts if one.part == part.part]
        self._aim_at(same, part, by)

    def _aim_at(self, parts: Sequence[PartReport], part: PartReport, by: int) -> None:
        here = next(n for n, one in enumerate(parts) if _key(one) == _key(part))
        self.aim, self.is_chosen = _key(parts[(here + by) % len(parts)]), True
        if self.aim != _key(part):
            self.go_worst()
            self.top = self.left = 0


def _key(part: PartReport) -> tuple[str, int, str]:
    return part.pool, part.group, part.part


def find_heat(view: ClusterView, part: PartReport) -> Heat | None:
    """The part's heat, if the head has told it and it fits what is known of the part."""
    heat = view.heats.get(_key(part))
    return heat if heat is not None and heat.report.ranks == len(part.ranks) else None


def cursor_of(ui: ExpertsState, part: PartReport, layout: Layout) -> tuple[int, int]:
    """(expert, place): the expert under the cursor, and which of its rank's slots of the layer holds it (-1: none)."""
    held = layout.expert[ui.find_row(part)]
    count = int((held >= 0).sum())
    if ui.expert is None and count:
        # The hottest one there.
        at = int(layout.share[held[:count]].argmax())
        return int(held[at]), at
    expert = max(0, min(ui.expert or 0, part.experts - 1)) if ui.expert != -1 else -1
    place = np.flatnonzero(held[:count] == expert)
    if place.size:
        return expert, int(place[0])
    if ui.order == "slots" and count:
        at = max(0, min(ui.place, count - 1))
        return int(held[at]), at
    return max(0, expert), -1
