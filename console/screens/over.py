"""Screen 1, Over: everything in one look."""

from __future__ import annotations

from collections.abc import Sequence

from console.draw_over import OverState, build
from console.lines import Line
from console.screens.base import LiveScreen
from console.verdict import worst_part
from transport.messages import AskHeat, AskLinks, Message

HEAT_S = 0.9
"""Loads have a window of many seconds; asking more often shows nothing new."""


class OverScreen(LiveScreen):
    """Everything in one look."""

    NAME = "over"
    NUMBER = 1
    TITLE_TEXT = "Over"
    FEATURES = frozenset({"move"})

    def __init__(self) -> None:
        super().__init__()
        self.ui = OverState()
        self._turn = 0

    def questions(self) -> Sequence[Message]:
        return (AskLinks(), *self._heats())

    def _heats(self) -> list[AskHeat]:
        """The part that loses most, and the others one in each round: a report is some 100 KiB, and all that this
        screen takes from it is a bar for each rank."""
        view, now = self.desk.view, self.desk.now()
        worst = worst_part(view)
        if worst is None:
            return []
        parts = [part for part in (view.experts.parts if view.experts else ()) if part.part == "main"]
        wanted = [worst]
        others = [part for part in parts if part is not worst]
        if others:
            self._turn = (self._turn + 1) % len(others)
            wanted.append(others[self._turn])
        asks = []
        for part in wanted:
            known = view.heats.get((part.pool, part.group, part.part))
            if known is None or now - known.at >= HEAT_S:
                asks.append(AskHeat(part.pool, part.group, part.part, part.skew.layer))
        return asks

    def build(self, width: int, height: int, now: float) -> list[Line]:
        return build(self.view, self.ui, width, height, now)

    def move(self, rows: int) -> None:
        self.ui.back += rows

    def jump(self, end: int) -> None:
        self.ui.back = 0 if end < 0 else len(self.view.events)

    def export(self) -> object:
        view = self.view
        hot = {view.name(rank.rank): found for rank in view.ranks() if (found := view.hot(rank.rank)) is not None}
        return {
            name: {"layer": found.layer, "expert": found.expert, "load": found.load, "mean": found.mean}
            for name, found in hot.items()
        }
