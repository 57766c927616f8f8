"""ExpertSide: whole groups that do anything at any time, each rule seen to matter, and single ranks step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.core.effects import FreeSlots, Join, LoadTable, NoteCopied, Prepare, SetReady, StartCopy, ToHead, Withdraw
from engine.core.epochs import RANK, Action, RankEvent, RankPhase
from engine.core.experts import ExpertSide
from engine.core.group import Membership, PartPlacement, encode_membership, encode_stage, pack_slots
from engine.core.migrate import Outcome
from engine.core.moves import order_moves
from engine.core.pact import GroupStep
from engine.core.parking import Parking
from engine.core.placement import EMPTY, Placement
from engine.core.plan import StepPlan
from engine.core.switch import Epoch, Switch
from engine.core.tables import Transition
from engine.errors import GroupBroken, LocalProtocolError, RemoteProtocolError
from tests.core.pact import ROW, Group
from transport import messages as m
from transport.messages import Member, Message, PartInfo

# ---------------------------------------------------------------- a whole group


def draw_placement(chance: np.random.Generator, slots: int, experts: int, ranks: int = 3) -> Placement:
    table = np.full(ranks * slots, EMPTY, dtype=np.int32)
    spare = ranks * slots - experts
    extra = chance.integers(0, experts, int(chance.integers(0, spare)))
    keys = np.concatenate([np.arange(experts), extra])
    table[chance.permutation(ranks * slots)[: keys.size]] = keys
    return Placement(1, experts, table.reshape(ranks, slots))


SHAPES = ((4, 7), (3, 5))
"""Slots and experts of both parts."""


def run_group(seed: int, bug: str = "", *, parts: int = 2, faults: bool = True) -> Group:
    """Migrations of all parts, with rows, an operator, deaths and failed copies at random moments; twice."""
    chance = np.random.default_rng(seed)
    group = Group([draw_placement(chance, *shape) for shape in SHAPES[:parts]], seed, bug)
    group.settle()
    for _ in range(2):
        for part in range(parts):
            if chance.random() < 0.8:
                group.migrate(part, draw_placement(chance, *SHAPES[part]), int(chance.integers(1, 6)))
        for _ in range(400):
            group.act(faults)
        group.settle()
    group.drain()
    return group


def test_whatever_happens_steps_are_the_same_for_all_and_have_their_weights() -> None:
    groups = [run_group(seed) for seed in range(60)]
    outcomes = [x.outcome for group in groups for x in group.migrations if x is not None]
    # The runs are worth their name only if they met the hard cases.
    assert sum(group.breaks for group in groups) >= 100
    assert sum(group.rejoins for group in groups) >= 50
    assert sum(group.parks for group in groups) >= 300
    assert outcomes.count(Outcome.DONE) >= 40 and outcomes.count(Outcome.ABORTED) >= 10
    assert sum(group.overtaken_withdrawals for group in groups) >= 3


def test_without_faults_the_copies_are_those_of_the_stages() -> None:
    for seed in range(20):
        chance = np.random.default_rng(seed)
        before, after = draw_placement(chance, 4, 7), draw_placement(chance, 4, 7)
        stages = order_moves(before, after, (0, 0, 0))
        group = Group([before], seed)
        group.settle()
        if group.migrate(0, after):
            group.settle()
            assert group.copied == sum(len(stage.copies) for stage in stages)
            assert np.array_equal(group.placements[0].count_per_rank(), after.count_per_rank())
        group.drain()


Plant = Callable[[pytest.MonkeyPatch], None]


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def _row(phase: RankPhase, event: RankEvent, to: RankPhase, *actions: Action) -> Plant:
    return lambda patch: patch.setitem(RANK, (phase, event), Transition(to, actions))


def _no_reason(inner: Any) -> Any:
    return lambda self: self._draining


def _count_all_parks(inner: Any) -> Any:
    def on_result(self: Parking, group: GroupStep) -> None:
        self._park = (-9, -9) if group.park else self._park
        inner(self, group)

    return on_result


def _forget_early_wakes(inner: Any) -> Any:
    def on_wake(self: Parking, membership: int, step: int) -> None:
        if self.is_parked:
            inner(self, membership, step)

    return on_wake


def _stop_at_once(inner: Any) -> Any:
    return lambda self, step: self.is_parked


def _end_alone(inner: Any) -> Any:
    return lambda self, *, is_drained: is_drained


def _trust_withdrawal(inner: Any) -> Any:
    def on_order(self: Switch, epoch: int, event: RankEvent, submitted: int) -> None:
        inner(self, epoch, event, -5)

    return on_order


def _free_under_copies(inner: Any) -> Any:
    def settle(self: Switch, epoch: Epoch) -> None:
        running, epoch.running = epoch.running, {}
        inner(self, epoch)
        epoch.running = running

    return settle


def _forget_failed(inner: Any) -> Any:
    def failed(self: Switch, order: StartCopy, why: str, *, never_ran: bool) -> None:
        inner(self, order, why, never_ran=True)

    return failed


def _ready_for_others(inner: Any) -> Any:
    def on_prepare(self: Switch, stage: Any, *, is_broken: bool) -> None:
        inner(self, stage, is_broken=is_broken)
        if self._epoch.phase is RankPhase.RECEIVING and self._epoch.missing:
            self._outbox.append(SetReady(self._part, stage.epoch))

    return on_prepare


def _deaf_to_losses(inner: Any) -> Any:
    return lambda self: None


def _newest_join_only(inner: Any) -> Any:
    def on_join(self: ExpertSide, number: int) -> None:
        inner(self, number)
        self._joining = {number: self._joining[number]}

    return on_join


RULES: dict[str, Plant] = {
    "a rank becomes ready before its weights are there (c)": _patch(Switch, "on_prepare", _ready_for_others),
    "a rank becomes ready after it declined (e)": _row(
        RankPhase.DECLINED, RankEvent.COMPLETE, RankPhase.DECLINED, Action.SET_READY
    ),
    "a withdrawal is trusted before a step has carried it (a)": _patch(Switch, "on_order", _trust_withdrawal),
    "a burned epoch's slots are reused under a copy": _patch(Switch, "_settle", _free_under_copies),
    "a failed copy counts as over": _patch(Switch, "on_copy_failed", _forget_failed),
    "a loss is not told to the epochs (h)": _patch(Switch, "on_broken", _deaf_to_losses),
    "a rank is ready for an epoch that it hears of while the group is broken": _patch(
        Switch, "on_prepare", lambda inner: lambda self, stage, *, is_broken: inner(self, stage, is_broken=False)
    ),
    "a parked group is not woken for a flip (f)": _patch(ExpertSide, "_has_reason", _no_reason),
    "a park counts that was agreed in the last step before a park": _patch(Parking, "on_result", _count_all_parks),
    "a wake counts only when it is late enough": _patch(Parking, "on_wake", _forget_early_wakes),
    "a rank that takes two results at once stops a step early": _patch(Parking, "_is_beyond", _stop_at_once),
    "rows of a parked rank wake nobody": _patch(Parking, "note_rows", lambda inner: lambda self, step: None),
    "a drained rank ends by itself": _patch(ExpertSide, "is_over", _end_alone),
    "only the last of two memberships that were told is joined": _patch(ExpertSide, "_on_join", _newest_join_only),
}
OTHERS = ("flips one rank early", "burns at the first word", "goes on at the first flip")
"""Bugs of the head and of the device, which the miniature plants itself."""


@pytest.mark.parametrize("rule", [*RULES, *OTHERS])
def test_each_rule_is_missed_where_it_does_not_hold(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule in RULES:
        RULES[rule](monkeypatch)
    for seed in range(250):
        try:
            run_group(seed, "" if rule in RULES else rule)
        except (AssertionError, RemoteProtocolError, LocalProtocolError):
            return
    pytest.fail(f"250 runs did not notice that {rule}")


# ---------------------------------------------------------------- one rank


BEFORE = Placement(1, 4, np.array([[0, 1, EMPTY], [2, 3, EMPTY]], np.int32))
AFTER = Placement(1, 4, np.array([[0, 2, EMPTY], [1, 3, EMPTY]], np.int32))
INFO = PartInfo("main", 1, 4, 3, 10)
LIVES = (Member(4, 1, "", 0), Member(5, 1, "", 0))


def name(number: int, epoch: int = 0, placement: Placement = BEFORE, lives: tuple[Member, ...] = LIVES) -> Membership:
    return Membership(number, lives, (b"",) * len(lives), (PartPlacement(epoch, placement),))


class Driver:
    """Rank 4, at place 0 of two, and its last outbox."""

    def __init__(self) -> None:
        self.side = ExpertSide(4, 1, (INFO,))
        self.step = 0
        self.number = 0

    def hear(self, message: Message, blob: bytes = b"") -> list[Any]:
        self.side.on_head(message, memoryview(blob))
        return self.side.take_outbox()

    def submit(self, rows: bool = False, *, is_drained: bool = False) -> StepPlan | None:
        plan = self.side.plan(StepPlan(1, (), (ROW,)) if rows else None, is_drained=is_drained)
        return plan

    def result(self, epoch: int = 0, *, park: bool = False, stop: bool = False) -> list[Any]:
        self.side.on_result(GroupStep(self.number, self.step, (epoch,), park, stop))
        self.step += 1
        return self.side.take_outbox()

    def join(self, membership: Membership) -> list[Any]:
        self.hear(*encode_membership(membership))
        self.side.on_prepared(membership.number)
        self.hear(m.JoinGroup(membership.number))
        self.submit()
        self.submit()
        self.number, self.step = membership.number, 0
        return self.result(membership.parts[0].epoch)

    def prepare(self, epoch: int = 1) -> list[Any]:
        (stage,) = order_moves(BEFORE, AFTER, (0, 0))
        return self.hear(*encode_stage(0, epoch, stage, step_bytes=10))


def joined() -> Driver:
    driver = Driver()
    driver.join(name(1))
    return driver


def said(effects: list[Any]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, ToHead)]


def test_a_membership_is_prepared_told_joined_and_said() -> None:
    driver = Driver()
    assert driver.submit() is None
    (effect,) = driver.hear(*encode_membership(name(1)))
    assert isinstance(effect, Prepare) and effect.membership.number == 1
    with pytest.raises(RemoteProtocolError, match="membership 1 is to be joined, prepared is 0"):
        driver.hear(m.JoinGroup(1))
    driver.side.on_prepared(1)
    assert said(driver.side.take_outbox()) == [m.GroupPrepared(4, 1, 1)]
    assert driver.submit() is None
    assert driver.hear(m.JoinGroup(1)) == [Join(1)]
    plan = driver.submit()
    assert plan is not None and plan.is_empty and plan.idle == 0
    driver.number = 1
    assert said(driver.result()) == [m.GroupJoined(4, 1, 1)]


def test_a_membership_that_was_replaced_while_it_was_prepared_is_not_said() -> None:
    driver = Driver()
    driver.hear(*encode_membership(name(1)))
    driver.hear(*encode_membership(name(2)))
    driver.side.on_prepared(1)
    assert driver.side.take_outbox() == []
    with pytest.raises(RemoteProtocolError, match="membership 2 is named after membership 2"):
        driver.hear(*encode_membership(name(2)))


@pytest.mark.parametrize(
    ("membership", "why"),
    [
        (name(1, lives=(Member(4, 2, "", 0), Member(5, 1, "", 0))), "without life 1 of 4"),
        (name(1, placement=Placement(1, 4, np.array([[0, 1], [2, 3]], np.int32))), "places"),
        (Membership(1, LIVES, (b"", b""), ()), "has 0 parts, not 1"),
    ],
)
def test_a_membership_that_does_not_fit_is_refused(membership: Membership, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        Driver().hear(*encode_membership(membership))


def test_a_missed_step_and_an_unknown_membership_are_named() -> None:
    driver = joined()
    driver.step += 1
    with pytest.raises(LocalProtocolError, match="step 2 of membership 1 follows step 0: one was missed"):
        driver.result()
    driver = joined()
    driver.number = 2
    with pytest.raises(LocalProtocolError, match="a step of membership 2, told to be joined are"):
        driver.result()


def test_idle_steps_count_until_a_park_and_one_more_is_run() -> None:
    driver = joined()
    assert [driver.submit().idle for _ in range(1)] == [1]
    driver.result()
    assert driver.submit().idle == 2
    driver.result(park=True)
    # Two were submitted beyond the awaited ones before the park was known: nothing more.
    assert driver.submit() is None
    driver.result(park=True)  # void: said before the first was known
    assert driver.submit() is None
    assert said(driver.hear(m.WakeGroup(1, 2))) == []
    plan = driver.submit()
    assert plan is not None and plan.idle == 1


def test_a_rank_that_was_late_still_runs_the_step_behind_the_park() -> None:
    driver = joined()
    driver.result()
    driver.submit()
    driver.result(park=True)
    assert driver.submit() is not None
    assert driver.submit() is None


def test_rows_of_a_parked_rank_are_submitted_and_ask_for_a_wake_once() -> None:
    driver = joined()
    driver.submit()
    driver.result(park=True)
    driver.result()
    assert driver.submit(rows=True) is not None
    assert said(driver.side.take_outbox()) == [m.AskWake(1, 1)]
    driver.submit(rows=True)
    assert driver.side.take_outbox() == []
    assert driver.submit() is None
    driver.hear(m.WakeGroup(1, 1))
    assert driver.submit() is not None


def test_a_wake_of_an_earlier_park_or_membership_wakes_nobody() -> None:
    driver = joined()
    driver.submit()
    driver.result(park=True)
    driver.result()
    driver.hear(m.WakeGroup(1, 0))
    driver.hear(m.WakeGroup(0, 7))
    assert driver.submit() is None


@pytest.mark.parametrize("order", [m.Drain(), "epoch", "join"])
def test_what_the_head_tells_all_ranks_wakes_each_by_itself(order: Any) -> None:
    driver = joined()
    driver.submit()
    driver.result(park=True)
    driver.result()
    assert driver.submit() is None
    if order == "epoch":
        driver.prepare()
    elif order == "join":
        driver.hear(*encode_membership(name(2)))
        driver.side.on_prepared(2)
        assert driver.submit() is None
        driver.hear(m.JoinGroup(2))
    else:
        driver.hear(order)
    plan = driver.submit()
    assert plan is not None and plan.idle == 0


def test_a_drained_rank_goes_on_with_the_word_stop_until_all_say_so() -> None:
    driver = joined()
    driver.hear(m.Drain())
    plan = driver.submit(is_drained=True)
    assert plan is not None and plan.stop and not driver.side.is_over(is_drained=True)
    driver.result(stop=True)
    assert driver.side.is_over(is_drained=True) and driver.submit(is_drained=True) is None
    driver.step -= 1
    assert driver.result(stop=True) == []  # what was queued behind it is no step of the group


def test_a_drained_rank_that_never_had_a_group_ends() -> None:
    driver = Driver()
    driver.hear(m.Drain())
    assert driver.side.is_over(is_drained=True) and not driver.side.is_over(is_drained=False)


def test_an_epoch_is_copied_ready_active_and_reclaimed() -> None:
    driver = joined()
    (load,) = driver.prepare()
    assert isinstance(load, LoadTable) and load.epoch == 1
    driver.submit()
    (copy,) = driver.result()
    assert copy == StartCopy(0, 1, slot=1, place=1, rank=5, generation=1, remote_slot=2)
    driver.side.on_copy_done(copy, 10, 3)
    assert said(driver.side.take_outbox()) == [m.SlotsCopied("main", 1, 1, 1, 10, 3)]
    told = m.SlotsCopied("main", 1, 0, 1, 10, 0)
    assert driver.hear(told, pack_slots([2])) == [
        NoteCopied(0, {2: 2}),
        SetReady(0, 1),
        ToHead(m.EpochReady("main", 1)),
    ]
    for _ in range(3):
        driver.submit()
    assert driver.result(0) == []
    assert said(driver.result(1)) == [m.EpochFlipped("main", 1, 1, 3)]
    assert driver.result(1) == []
    driver.submit()
    assert driver.result(1) == [FreeSlots(0, (1,)), ToHead(m.EpochReclaimed("main", 1))]


def test_copies_wait_while_they_are_held() -> None:
    driver = joined()
    driver.prepare()
    driver.hear(m.HoldCopies("main", 1))
    driver.submit()
    assert driver.result() == []
    driver.hear(m.ReleaseCopies("main", 1))
    driver.submit()
    assert len(driver.result()) == 1


def test_a_withdrawal_is_said_when_a_step_submitted_after_it_was_awaited() -> None:
    driver = joined()
    driver.prepare()
    driver.hear(m.SlotsCopied("main", 1, 0, 1, 10, 0), pack_slots([2]))
    driver.submit()
    assert driver.hear(m.WithdrawEpoch("main", 1)) == [Withdraw(0, 1)]
    driver.submit()
    assert said(driver.result()) == said(driver.result()) == []  # both were submitted before
    assert said(driver.result()) == [m.EpochWithdrawn("main", 1)]


def test_an_adopted_epoch_frees_old_slots_only_two_steps_later() -> None:
    driver = joined()
    driver.prepare()
    driver.hear(m.SlotsCopied("main", 1, 0, 1, 10, 0), pack_slots([2]))
    driver.submit()
    driver.result()[0]
    driver.side.on_copy_failed(StartCopy(0, 1, 1, 1, 5, 1, 2), "x", never_ran=True)
    driver.side.take_outbox()
    # It flipped elsewhere; here a step of the time before is still in the queue.
    assert said(driver.hear(m.AdoptEpoch("main", 1))) == [m.EpochFlipped("main", 1, 1, 1)]
    driver.submit()
    driver.submit()
    assert driver.result(0) == []
    assert driver.result(1) == [FreeSlots(0, (1,)), ToHead(m.EpochReclaimed("main", 1))]


def test_a_broken_group_declines_what_it_hears_of_until_it_has_joined_again() -> None:
    driver = joined()
    driver.side.on_broken(GroupBroken(1, 1, 5, "is gone", overdue=False))
    assert driver.side.take_outbox() == [] and driver.side.is_stalled
    driver.prepare()
    assert driver.hear(m.SlotsCopied("main", 1, 0, 1, 10, 0), pack_slots([2])) == []
    assert said(driver.hear(m.WithdrawEpoch("main", 1))) == [m.EpochWithdrawn("main", 1)]
    driver.hear(m.BurnEpoch("main", 1))
    driver.join(name(2))
    assert not driver.side.is_stalled
    driver.submit()
    assert driver.result() == [FreeSlots(0, (2,)), ToHead(m.EpochReclaimed("main", 1))]


def test_only_who_is_overdue_is_accused() -> None:
    driver = joined()
    driver.side.on_broken(GroupBroken(1, 3, 5, "did not answer", overdue=True))
    assert said(driver.side.take_outbox()) == [m.PeerAccused(5, 1, 1, 3, "did not answer")]


def test_a_failed_copy_is_told_once_and_keeps_the_epoch_until_its_target_is_dead() -> None:
    driver = joined()
    driver.prepare()
    driver.submit()
    (copy,) = driver.result()
    driver.side.on_copy_failed(copy, "slow", never_ran=False)
    driver.side.on_copy_failed(copy, "broken", never_ran=False)
    assert said(driver.side.take_outbox()) == [m.CopyFailed("main", 1, "slow")]
    driver.hear(m.WithdrawEpoch("main", 1))
    driver.hear(m.BurnEpoch("main", 1))
    for _ in range(4):
        driver.submit()
        assert driver.result() == []
    assert driver.hear(m.PeerDown(5, 1)) == [FreeSlots(0, (2,)), ToHead(m.EpochReclaimed("main", 1))]


def test_words_about_epochs_that_can_not_come_are_refused() -> None:
    driver = joined()
    with pytest.raises(RemoteProtocolError, match="epoch 1 of part main is held, but was not prepared"):
        driver.hear(m.HoldCopies("main", 1))
    with pytest.raises(RemoteProtocolError, match="BurnEpoch for epoch 1 of part main, not at hand"):
        driver.hear(m.BurnEpoch("main", 1))
    with pytest.raises(RemoteProtocolError, match="part draft, this model has none"):
        driver.hear(m.BurnEpoch("draft", 1))
    driver.prepare(2)
    with pytest.raises(RemoteProtocolError, match="epoch 3 of part main is prepared after epoch 2"):
        driver.prepare(3)
    with pytest.raises(RemoteProtocolError, match="slot 1 has no copy to come"):
        driver.hear(m.SlotsCopied("main", 2, 0, 1, 10, 0), pack_slots([1]))
    with pytest.raises(RemoteProtocolError, match="slots of place 1 were copied"):
        driver.hear(m.SlotsCopied("main", 2, 1, 1, 10, 0), pack_slots([2]))


def test_an_epoch_that_is_active_without_this_rank_is_a_bug_of_the_pact() -> None:
    driver = joined()
    driver.prepare()
    driver.submit()
    with pytest.raises(LocalProtocolError, match="receiving"):
        driver.result(1)
    driver = joined()
    driver.result()
    driver.join(name(2, epoch=3))
    with pytest.raises(LocalProtocolError, match="went back from epoch 3 to 2"):
        driver.result(2)
