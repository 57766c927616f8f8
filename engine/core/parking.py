"""Parking: whether a rank of a group without rows runs empty steps, or waits until the group is woken.

All ranks of a group run the same steps. What makes them stop at the same one is the pact: a park agreed in step g is
seen by all in the result of g, when g + 1 may be in a rank's queue already and g + 2 is in nobody's, since two steps
are queued at a time. So all run g + 1 and stop; a rank that takes the results of g - 1 and g at once has yet to submit
it. Step g + 1 may agree on a park as well, by words that were said before anybody knew of the first: that one is void.
The next park that counts is agreed in g + 2 or later, after a wake.

A rank with a *reason* that the head gave to all ranks (a membership to join, an epoch at hand, a drain) goes on by
itself, since all others do. One with rows submits them and asks the head to wake the others.
"""

from __future__ import annotations

from engine.core.pact import GroupStep
from engine.core.plan import IDLE_STEP, StepPlan
from transport.messages import AskWake

Point = tuple[int, int]
"""(membership, step)."""
NEVER: Point = (-1, -1)


class Parking:
    """One rank's place between steps.

    Attributes:
        is_parked: after the step behind the park nothing is submitted here but rows.
    """

    def __init__(self) -> None:
        self.is_parked = False
        self._idle = 0
        self._park = NEVER
        self._woken = NEVER
        self._has_asked = False

    def note_rows(self, step: int) -> AskWake | None:
        """A step with rows is submitted as that one of the group. The question to the head that it needs, once per
        park."""
        self._idle = 0
        if not self.is_parked or not self._is_beyond(step) or self._has_asked:
            return None
        self._has_asked = True
        return AskWake(*self._park)

    def plan_idle(self, step: int, *, has_reason: bool, stop: bool) -> StepPlan | None:
        """The next step of a rank that has no rows; None while it is parked.

        Args:
            step: which one of the group it will be.
            has_reason: all ranks of the group were told something that takes steps, and it is not over here.
            stop: nothing is left to do here, and the head wants the rank to end.
        """
        if has_reason:
            self.is_parked = False
            self._idle = 0
        elif self._is_beyond(step):
            return None
        else:
            self._idle += 1
        return StepPlan(IDLE_STEP, (), (), idle=self._idle, stop=stop)

    def on_result(self, group: GroupStep) -> None:
        """A step was awaited."""
        if not group.park:
            return
        at = (group.membership, group.step)
        if at != (self._park[0], self._park[1] + 1):
            self._park = at
            self._has_asked = False
            self.is_parked = True
            self._try_wake()

    def on_wake(self, membership: int, step: int) -> None:
        """The head's word; it may come before the result that says park."""
        self._woken = max(self._woken, (membership, step))
        self._try_wake()

    def start(self) -> None:
        """The first step of a membership was awaited: what was agreed in the one before is over."""
        self.is_parked = False
        self._park = NEVER

    def _is_beyond(self, step: int) -> bool:
        return self.is_parked and step > self._park[1] + 1

    def _try_wake(self) -> None:
        if self.is_parked and self._woken >= self._park:
            self.is_parked = False
            self._idle = 0
