"""Bugs planted into the hand-back of finished turns, each found by a named checker within a few seeds."""

from __future__ import annotations

import pytest

from engine.core import reuse, taking
from engine.core.handback import GIVER, TAKER, Action, GiverEvent, GiverPhase, TakerEvent, TakerPhase
from engine.core.tables import Transition
from tests.sim.test_planted import Bug, hunt


def granted_page_reused_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    for event in (TakerEvent.NEEDED, TakerEvent.OVERDUE, TakerEvent.LINK_LOST):
        _, actions = TAKER[(TakerPhase.GRANTED, event)]
        changed = (*(a for a in actions if a is not Action.QUARANTINE), Action.FREE)
        patch.setitem(TAKER, (TakerPhase.GRANTED, event), Transition(TakerPhase.CLOSED, changed))


def turn_committed_before_its_data(patch: pytest.MonkeyPatch) -> None:
    _, actions = GIVER[(GiverPhase.OFFERED, GiverEvent.GRANT)]
    early = Transition(GiverPhase.PUSHING, (*actions, Action.COMMIT))
    patch.setitem(GIVER, (GiverPhase.OFFERED, GiverEvent.GRANT), early)
    patch.setitem(GIVER, (GiverPhase.PUSHING, GiverEvent.PUSHED), Transition(GiverPhase.CLOSED, (Action.FREE,)))


def turn_granted_under_an_old_epoch(patch: pytest.MonkeyPatch) -> None:
    original = taking.Taker._grant

    def grant(self, gift):
        if gift.key[0] % 3 == 0 and self._next_epoch > 1 and self._next_epoch - 1 not in self._gifts:
            self._next_epoch -= 1
        original(self, gift)

    patch.setattr(taking.Taker, "_grant", grant)


def epoch_ended_while_the_turn_is_written(patch: pytest.MonkeyPatch) -> None:
    for event in (GiverEvent.REVOKE, GiverEvent.PUSH_OVERDUE):
        early = Transition(GiverPhase.ENDING, (Action.END_EPOCH,))
        patch.setitem(GIVER, (GiverPhase.PUSHING, event), early)


def failed_push_of_a_turn_believed_to_be_over(patch: pytest.MonkeyPatch) -> None:
    for phase in (GiverPhase.PUSHING, GiverPhase.ENDING):
        over = Transition(GiverPhase.CLOSED, (Action.END_EPOCH, Action.FREE))
        patch.setitem(GIVER, (phase, GiverEvent.PUSH_FAILED), over)


def turn_entered_one_id_too_far(patch: pytest.MonkeyPatch) -> None:
    opened, kept = reuse.PrefixCache.open_turn, reuse.PrefixCache.keep_turn
    lasts: dict[reuse.Turn, bytes] = {}

    def open_turn(self, key, said):
        turn = opened(self, key, said)
        if isinstance(turn, reuse.Turn):
            lasts[turn] = bytes(said[-4:])
        return turn

    def keep_turn(self, turn, now_us):
        if turn.num_ids % self._page_tokens not in (0, self._page_tokens - 1):
            turn.ids = memoryview(bytes(turn.ids) + lasts.pop(turn))
        kept(self, turn, now_us)

    patch.setattr(reuse.PrefixCache, "open_turn", open_turn)
    patch.setattr(reuse.PrefixCache, "keep_turn", keep_turn)


def withdrawn_offer_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(GIVER, (GiverPhase.OFFERED, GiverEvent.WITHDRAW), Transition(GiverPhase.CLOSED, ()))


def turn_whose_pages_are_out_of_order(patch: pytest.MonkeyPatch) -> None:
    kept = reuse.PrefixCache.keep_turn

    def keep_turn(self, turn, now_us):
        turn.pages = reuse.Runs.of((*turn.pages[1:], *turn.pages[:1]))
        kept(self, turn, now_us)

    patch.setattr(reuse.PrefixCache, "keep_turn", keep_turn)


BUGS = (
    Bug(granted_page_reused_without_quarantine, frozenset({"quarantine", "late-write"}), 40),
    Bug(turn_committed_before_its_data, frozenset({"commit-data"}), 10),
    Bug(turn_granted_under_an_old_epoch, frozenset({"epochs"}), 20),
    Bug(epoch_ended_while_the_turn_is_written, frozenset({"late-write"}), 40),
    Bug(failed_push_of_a_turn_believed_to_be_over, frozenset({"late-write"}), 100),
    Bug(turn_entered_one_id_too_far, frozenset({"tags"}), 40),
    Bug(withdrawn_offer_keeps_its_pages, frozenset({"pages"}), 100, first=30),
    Bug(turn_whose_pages_are_out_of_order, frozenset({"tags"}), 40),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    hunt(bug.plant.__name__, bug, monkeypatch)
