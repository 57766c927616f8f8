"""What of the re-placements is looked at, what was asked and what came of it; and what each key makes of that. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from console.verdict import worst_part
from console.view import ClusterView
from transport.messages import AskHeat, PartReport, PastRebalance, RebalanceAnswer

Aim = tuple[str, int, str]
"""Pool, group, part."""
Mode = Literal["off", "manual", "auto"]
MODES: tuple[Mode, ...] = ("off", "manual", "auto")
RUNNING = frozenset({"moving", "paused", "withdrawing"})
"""States of a part whose experts are being moved."""


def aim_of(part: PartReport) -> Aim:
    return part.pool, part.group, part.part


def newest_first(part: PartReport) -> list[PastRebalance]:
    """Its history; what runs comes before all that has ended."""
    return sorted(part.history, key=lambda past: (past.result != "running", past.ended_ago_ms, -past.plan))


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What the head answered to an act: `plan` is the last plan's number at that time."""

    action: str
    text: str
    is_refused: bool
    plan: int
    at: float


@dataclasses.dataclass(slots=True)
class BalanceState:
    """What is looked at.

    Attributes:
        aim: None: the part that loses most, until a key says otherwise.
        row: under the cursor: 0 the plan, n the nth line of the history.
        detail: what is open: the plan's moves, or one line of the history.
        layer: of the moves; None: the worst one.
        top: the first line of an open detail that is shown.
        asked: acts whose answer is due, by part: the action and since when.
        said: the last answer, by part.
        offer: which mode `a` offers next, counted from the one in force.
        is_chosen: a key has turned to this part, or something was done to it.
        history_y, history_first: kept by the drawing, for the mouse: the line of the first history row that is shown,
            and which one that is.
    """

    aim: Aim | None = None
    row: int = 0
    detail: Literal["", "moves", "past"] = ""
    layer: int | None = None
    top: int = 0
    asked: dict[Aim, tuple[str, float]] = dataclasses.field(default_factory=dict)
    said: dict[Aim, Said] = dataclasses.field(default_factory=dict)
    offer: int = 0
    is_chosen: bool = False
    history_y: int = 0
    history_first: int = 0

    def find_part(self, view: ClusterView) -> PartReport | None:
        """The chosen part as it is now. The worst one is chosen once and then kept: acts must not change their aim."""
        part = view.part(*self.aim) if self.aim else None
        if part is None:
            part = worst_part(view)
            self.aim = aim_of(part) if part else None
        return part

    def find_layer(self, part: PartReport) -> int:
        layer = part.skew.layer if self.layer is None else self.layer
        return max(0, min(layer, part.layers - 1))

    def arrive(self) -> None:
        """The screen is shown: on the worst part as it is now, unless one was chosen or something is due there."""
        if not self.is_chosen and not self.asked:
            self.aim, self.layer = None, None
            self.row = self.offer = 0
            self.detail = ""

    def question(self, view: ClusterView) -> AskHeat | None:
        """What to ask the head for; None while no part is known."""
        part = self.find_part(view)
        if part is None:
            return None
        return AskHeat(pool=part.pool, group=part.group, part=part.part, layer=self.find_layer(part))

    # ------------------------------------------------------------ keys

    def move(self, part: PartReport, by: int) -> None:
        """The cursor over plan and history; in an open list of moves, the list."""
        self.is_chosen = True
        if self.detail == "moves":
            self.top = max(0, self.top + by)
        else:
            self.row = max(0, min(self.row + by, len(part.history)))

    def row_at(self, y: int) -> int | None:
        """What the line `y` of the drawing belongs to: a row as `row` counts them; None in an open detail."""
        if self.detail:
            return None
        return 0 if y < self.history_y else self.history_first + y - self.history_y + 1

    def turn_layer(self, part: PartReport, by: int) -> None:
        self.layer = max(0, min(self.find_layer(part) + by, part.layers - 1))
        self.top = 0

    def turn_part(self, view: ClusterView) -> None:
        """Main model or drafter of the same group."""
        part = self.find_part(view)
        if part is not None:
            self._turn(view, part, 1, lambda one: (one.pool, one.group) == (part.pool, part.group))

    def turn_group(self, view: ClusterView, by: int) -> None:
        """Another group of any pool, the same part."""
        part = self.find_part(view)
        if part is not None:
            self._turn(view, part, by, lambda one: one.part == part.part)

    def _turn(self, view: ClusterView, part: PartReport, by: int, is_like: Callable[[PartReport], bool]) -> None:
        parts = [one for one in view.experts.parts if is_like(one)] if view.experts else []
        aims = [aim_of(one) for one in parts]
        self.aim, self.is_chosen = aims[(aims.index(aim_of(part)) + by) % len(aims)], True
        if self.aim != aim_of(part):
            self.row = self.top = self.offer = 0
            self.layer, self.detail = None, ""

    def open(self) -> None:
        """Enter: the moves of the plan, or the line of the history under the cursor."""
        self.detail, self.is_chosen = ("past" if self.row else "moves"), True
        self.top = 0

    def close(self) -> bool:
        was, self.detail = self.detail, ""
        return bool(was)

    def next_mode(self, part: PartReport) -> Mode:
        """What `a` offers: another mode each time it is pressed."""
        self.offer = self.offer % (len(MODES) - 1) + 1
        return MODES[(MODES.index(part.mode) + self.offer) % len(MODES)]

    # ------------------------------------------------------------ acts

    def note_asked(self, aim: Aim, action: str, now: float) -> None:
        self.asked[aim] = (action, now)
        self.is_chosen = True

    def note_said(self, aim: Aim, action: str, answer: RebalanceAnswer | str, plan: int, now: float) -> None:
        """An answer came, however late; a string is a refusal or what kept it from coming."""
        self.asked.pop(aim, None)
        is_refused = isinstance(answer, str)
        text = answer if isinstance(answer, str) else answer.done
        self.said[aim] = Said(action, text, is_refused, plan, now)
        if action == "mode":
            self.offer = 0
