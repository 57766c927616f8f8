"""Groups and re-placement from the head's side, with scripted ranks on virtual time."""

from __future__ import annotations

import msgspec
import pytest
import trio

from engine.actors.balancer import BalanceLimits
from engine.core.epochs import StagePhase
from engine.errors import RemoteProtocolError
from tests.actors.group_rig import EXPERTS, LAYERS, Rig
from transport.messages import (
    AskWake,
    CopyFailed,
    EpochReady,
    ExpertLoads,
    JoinGroup,
    NameGroup,
    PeerAccused,
    PrepareEpoch,
    SlotsCopied,
    WakeGroup,
)
from transport.wire import Frame

SKEWED = [[40, 30, 1, 1, 1, 1], [1, 1, 1, 1, 30, 40]]
EVEN = [[5] * EXPERTS] * LAYERS


def say(rig: Rig, place: int, message: msgspec.Struct, blob: bytes = b"") -> None:
    rig.balancer.rank_frames(rig.ranks[place], [Frame(message, memoryview(blob))])


def sets(rig: Rig) -> list:
    return rig.part.placement.count_per_rank().tolist()


def ready_rig(**values: object) -> Rig:
    rig = Rig(**values)  # type: ignore[arg-type]
    rig.start_all()
    rig.load(SKEWED)
    return rig


# ---------------------------------------------------------------- memberships


async def test_ranks_serve_once_all_of_the_group_have_joined(autojump_clock) -> None:
    rig = Rig()
    assert rig.balancer.has_group(1) and not rig.balancer.has_group(0)
    rig.start(0)
    rig.start(1)
    rig.pump()
    assert rig.balancer.report().parts[0].state == "forming" and rig.balancer.degraded() == ()
    third = rig.start(2)
    third.holds = {"joined"}
    rig.pump()
    assert not any(life.serves for life in rig.alive)
    third.release("joined")
    rig.pump()
    assert all(life.serves for life in rig.alive)
    (report,) = rig.balancer.report().parts
    assert (report.state, report.membership, report.epoch, report.ranks) == ("idle", 1, 1, (1, 2, 3))
    assert report.empty_slots == 3 * 8 - LAYERS * EXPERTS
    rig.check_slots()


async def test_a_lost_rank_leaves_its_experts_to_the_others_and_gets_its_row_back(autojump_clock) -> None:
    rig = ready_rig()
    before = rig.part.placement
    rig.kill(1)
    rig.pump()
    (report,) = rig.balancer.report().parts
    assert report.state == "incomplete" and report.membership == 2
    assert rig.balancer.degraded() == ("decode group 0 goes on without rank 2",)
    assert rig.part.placement.table[1].tolist() == [-1] * 8
    rig.check_slots()
    assert "rank 2 is missing" in await rig.refused("plan")
    rig.start(1)
    rig.pump()
    assert rig.balancer.degraded() == () and rig.lives[1].serves
    assert rig.part.placement.table[1].tolist() == before.table[1].tolist()
    assert rig.part.placement == before, "what others took over is given back"
    assert rig.part.previous is None and not rig.balancer.report().parts[0].history
    rig.check_slots()
    rig.kill(2)
    rig.pump()
    assert rig.group.roster.number > 3 and rig.balancer.degraded() == ("decode group 0 goes on without rank 3",)
    rig.check_slots()


async def test_without_room_the_group_waits_and_says_why(autojump_clock) -> None:
    rig = ready_rig(slots=4)
    rig.kill(2)
    rig.pump()
    assert rig.group.roster.number == 1
    (reason,) = rig.balancer.degraded()
    assert reason.startswith("decode group 0 stands still until rank 3 is back: 4 experts of part main find no")
    rig.start(2)
    rig.pump()
    assert rig.balancer.degraded() == () and rig.group.roster.is_complete
    rig.check_slots()


async def test_whoever_does_not_answer_is_ended_once_and_parked_groups_are_woken(autojump_clock) -> None:
    rig = ready_rig()
    say(rig, 0, PeerAccused(3, 1, 1, 17, "sent nothing for 10 s"))
    say(rig, 1, PeerAccused(1, 1, 1, 17, "sent nothing for 10 s"))
    assert rig.lives[2].ended == ["did not answer rank 1 in step 17 of membership 1: sent nothing for 10 s"]
    assert rig.lives[0].ended == []
    say(rig, 1, AskWake(1, 40))
    rig.pump()
    assert all(life.log[-1] == WakeGroup(1, 40) for life in rig.alive)
    with pytest.raises(RemoteProtocolError, match="membership 2"):
        say(rig, 1, AskWake(2, 40))


async def test_the_end_of_the_head_names_no_group(autojump_clock) -> None:
    rig = ready_rig()
    rig.balancer.stop()
    rig.kill(0)
    rig.pump()
    assert rig.group.roster.number == 1 and rig.balancer.degraded() == ()
    assert await rig.refused("plan") == "the engine is shutting down"


# ---------------------------------------------------------------- acts


async def test_a_plan_is_made_applied_and_measured(autojump_clock) -> None:
    rig = ready_rig()
    answer = await rig.done("plan")
    plan = answer.report.plan
    assert plan.plan == 1 and plan.pays and plan.moved_slots > 0 and plan.stages > 0
    assert plan.before.max_over_mean > plan.after.max_over_mean
    assert plan.moved_bytes == 1000 * plan.moved_slots
    assert answer.report.state == "idle" and answer.report.skew == plan.before
    answer = await rig.done("apply", plan=1, reason="skew")
    assert answer.report.state == "moving" and answer.report.total_slots == plan.moved_slots
    rig.pump()
    rig.check_slots()
    report = rig.balancer.report().parts[0]
    assert report.state == "idle" and report.epoch == 1 + plan.stages
    assert report.skew.max_over_mean == pytest.approx(plan.after.max_over_mean)
    (past,) = report.history
    assert (past.result, past.by, past.reason, past.realised) == ("applied", "ann@host", "skew", -1.0)
    assert past.moved_slots == plan.moved_slots and past.moved_bytes == plan.moved_bytes
    rig.load(SKEWED, rounds=3)
    assert rig.balancer.report().parts[0].history[0].realised == -1.0
    rig.load(SKEWED)
    (past,) = rig.balancer.report().parts[0].history
    assert past.realised == pytest.approx(1.0, abs=0.02) and past.after == pytest.approx(past.predicted, rel=0.02)


async def test_time_lost_to_skew_adds_up_over_steps_and_is_priced_as_measured(autojump_clock) -> None:
    rig = ready_rig()
    report = rig.balancer.report().parts[0]
    # Each layer: one rank has all of the 70 rows of two experts, times three ranks that send them; 10 us a row.
    lost_us = 2 * (3 * 70 - 3 * 74 / 3) * 10
    assert report.steps == 64 and report.skew.lost_us_per_step == pytest.approx(lost_us)
    assert report.lost_us_total == pytest.approx(64 * lost_us)
    rig.load(EVEN)
    assert rig.balancer.report().parts[0].lost_us_total == pytest.approx(64 * lost_us)


async def test_ranks_that_report_alone_are_not_taken_for_the_whole_group(autojump_clock) -> None:
    rig = ready_rig()
    counts = b"\1\0\0\0" * LAYERS * EXPERTS
    for _ in range(4):
        say(rig, 0, ExpertLoads("main", 10, 12, 5, LAYERS, EXPERTS), counts)
    assert rig.balancer.report().parts[0].steps == 64 + 30, "the fourth is not over yet"
    with pytest.raises(RemoteProtocolError, match="negative"):
        say(rig, 0, ExpertLoads("main", 10, 12, 5, LAYERS, EXPERTS), b"\xff" * len(counts))
    with pytest.raises(RemoteProtocolError, match="shape"):
        say(rig, 0, ExpertLoads("main", 10, 12, 5, 1, EXPERTS), b"\0" * 4 * EXPERTS)
    with pytest.raises(RemoteProtocolError, match="part draft"):
        say(rig, 0, ExpertLoads("draft", 10, 12, 5, LAYERS, EXPERTS), counts)


async def test_pause_holds_and_resume_goes_on(autojump_clock) -> None:
    rig = ready_rig()
    for life in rig.alive:
        life.holds = {"copied"}
    await rig.done("apply")
    rig.pump()
    answer = await rig.done("pause")
    assert answer.report.state == "paused" and answer.report.progress_age_ms == 0
    assert "is paused already" in await rig.refused("pause")
    rig.pump()
    assert all(life.parts[0].held for life in rig.alive)
    assert "is being carried out" in await rig.refused("plan")
    assert (await rig.done("resume")).report.state == "moving"
    assert "is not paused" in await rig.refused("resume")
    for life in rig.alive:
        life.release("copied")
    rig.pump()
    rig.check_slots()
    assert rig.balancer.report().parts[0].history[-1].result == "applied"
    assert "nothing is being moved" in await rig.refused("pause")


async def test_abort_empties_what_was_not_in_force_yet(autojump_clock) -> None:
    rig = ready_rig()
    before = rig.part.placement
    rig.lives[0].holds = {"ready"}
    await rig.done("apply")
    rig.pump()
    for life in rig.alive:
        life.holds.add("withdrawn")
    answer = await rig.done("abort", reason="enough")
    rig.pump()
    assert answer.report.state == "withdrawing" and rig.balancer.report().parts[0].state == "withdrawing"
    for life in rig.alive:
        life.release("withdrawn")
    rig.pump()
    rig.check_slots()
    report = rig.balancer.report().parts[0]
    assert rig.part.placement == before and report.epoch == 1
    assert (report.history[-1].result, report.history[-1].reason) == ("failed", "enough")
    # The burnt epoch is never given out again.
    rig.lives[0].release("ready")
    await rig.done("apply")
    rig.pump()
    epochs = [message.epoch for message in rig.lives[0].log if isinstance(message, PrepareEpoch)]
    assert epochs[:2] == [2, 3] and sorted(set(epochs)) == epochs
    rig.check_slots()


async def test_a_copy_that_fails_ends_the_migration_with_its_reason(autojump_clock) -> None:
    rig = ready_rig()
    rig.lives[1].holds = {"copied"}
    await rig.done("apply")
    rig.pump()
    say(rig, 1, CopyFailed("main", 2, "no answer within 30 s"))
    rig.pump()
    past = rig.balancer.report().parts[0].history[-1]
    assert (past.result, past.reason) == ("failed", "rank 2 can not copy: no answer within 30 s")
    rig.check_slots()
    rig.lives[1].kept.clear()
    say(rig, 1, CopyFailed("main", 2, "and again"))


async def test_rollback_restores_the_same_experts_on_each_rank_and_can_be_undone(autojump_clock) -> None:
    rig = ready_rig()
    assert "no placement to go back to" in await rig.refused("rollback")
    before = sets(rig)
    await rig.done("apply")
    rig.pump()
    after, epoch = sets(rig), rig.part.epoch
    answer = await rig.done("rollback", user="bob")
    assert answer.report.plan.is_rollback and answer.report.plan.saved_us_per_step < 0
    rig.pump()
    assert before == sets(rig) != after and rig.part.epoch > epoch
    rig.check_slots()
    assert [past.result for past in rig.balancer.report().parts[0].history] == ["applied", "rolled_back"]
    await rig.done("rollback")
    rig.pump()
    assert sets(rig) == after


async def test_rollback_of_a_migration_that_was_given_up_half_way(autojump_clock) -> None:
    rig = ready_rig()
    await rig.done("plan")
    made = rig.part.last
    assert made is not None
    rig.lives[0].holds = {"reclaimed"}
    before = sets(rig)
    await rig.done("apply", plan=1)
    rig.pump()
    await rig.done("abort")
    rig.lives[0].release("reclaimed")
    rig.pump()
    assert sets(rig) != before, "what is in force stays so"
    await rig.done("rollback")
    rig.pump()
    assert sets(rig) == before
    rig.check_slots()


async def test_of_two_operators_the_second_is_told_who_runs_what(autojump_clock) -> None:
    rig = ready_rig()
    rig.lives[0].holds = {"ready"}
    answers: dict[str, object] = {}

    async def apply(user: str) -> None:
        answers[user] = await rig.act("apply", user=user)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply, "ann")
        nursery.start_soon(apply, "bob")
    kinds = {user: type(answer).__name__ for user, answer in answers.items()}
    assert sorted(kinds.values()) == ["RebalanceAnswer", "Refused"]
    (winner,) = [user for user, kind in kinds.items() if kind == "RebalanceAnswer"]
    (loser,) = [user for user in kinds if user != winner]
    assert answers[loser].message == f"a plan for {winner}@host is being made"  # type: ignore[attr-defined]
    assert f"plan 1 of {winner}@host is being carried out" in await rig.refused("apply", plan=1, user=loser)
    assert len(rig.plans) == 1


async def test_an_operator_that_goes_while_a_plan_is_made_blocks_nobody(autojump_clock) -> None:
    rig = ready_rig()
    with trio.move_on_after(0.05):
        await rig.act("apply")
    assert rig.part.migration is None
    assert (await rig.done("plan")).report.plan.plan == 1


async def test_plans_that_are_out_of_date_are_refused_in_words(autojump_clock) -> None:
    rig = ready_rig()
    assert await rig.refused("apply", plan=4) == "there is no plan 4: none was made yet"
    await rig.done("plan")
    await rig.done("plan")
    assert "plan 1 is not the last one, that is plan 2" in await rig.refused("apply", plan=1)
    await trio.sleep(61)
    assert "plan 2 is 61 s old" in await rig.refused("apply", plan=2)
    await rig.done("plan")
    rig.kill(0)
    rig.pump()
    rig.start(0)
    rig.pump()
    assert "the placement has changed since plan 3" in await rig.refused("apply", plan=3)
    await rig.done("apply")
    rig.pump()
    assert "the placement has changed since plan 4" in await rig.refused("apply", plan=4)


async def test_a_placement_that_changes_while_it_is_planned_for_is_not_moved(autojump_clock) -> None:
    rig = ready_rig()
    answers = []

    async def apply() -> None:
        answers.append(await rig.refused("apply"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply)
        await trio.sleep(0.05)
        rig.kill(0)
        rig.pump()
        rig.start(0)
        rig.pump()
    assert "the placement has changed since plan 1" in answers[0]


async def test_off_and_wrong_names_are_refused_in_words(autojump_clock) -> None:
    rig = ready_rig(mode="off")
    for action in ("plan", "apply", "rollback"):
        assert "mode of part main is off" in await rig.refused(action)
    assert (await rig.done("mode", mode="manual")).done == "mode manual, was off"
    await rig.done("plan")
    assert "say which mode" in await rig.refused("mode")
    assert "the model has no part draft" in await rig.refused("plan", part="draft")
    assert "no rank of decode group 0 is ready" in await Rig().refused("plan")
    new = Rig()
    new.start_all()
    assert "no loads were measured" in await new.refused("plan")


async def test_a_plan_that_moves_nothing_says_so(autojump_clock) -> None:
    rig = Rig()
    rig.start_all()
    rig.load(EVEN)
    answer = await rig.done("apply")
    assert answer.done == "plan 1 moves nothing: nothing is lost to skew under these loads"
    assert answer.report.history[-1].result == "skipped"
    assert "plan 1 moves nothing" in await rig.refused("apply", plan=1)


# ---------------------------------------------------------------- planners


async def test_a_planner_that_hangs_is_bounded_and_makes_the_cluster_degraded(autojump_clock) -> None:
    rig = ready_rig()
    rig.plan_takes_s = 1e9
    begun = trio.current_time()
    assert "did not answer within limits.balance (60 s)" in await rig.refused("plan")
    assert trio.current_time() - begun == pytest.approx(60)
    assert "no plan for part main of decode group 0: the planner did not answer" in rig.balancer.degraded()[0]
    rig.plan_takes_s, rig.plan_error = 0.1, "the planner ended with status -9: it said nothing"
    assert "status -9" in await rig.refused("plan")
    assert "status -9" in rig.balancer.degraded()[0]
    rig.plan_error = ""
    await rig.done("plan")
    assert rig.balancer.degraded() == ()


async def test_a_migration_without_progress_is_told_and_logged_once(autojump_clock, caplog) -> None:
    rig = ready_rig()
    rig.lives[2].holds = {"ready"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.balancer.run)
        await rig.done("apply")
        rig.pump()
        await trio.sleep(55)
        assert rig.balancer.degraded() == () and rig.balancer.report().parts[0].progress_age_ms > 50_000
        await trio.sleep(100)
        (reason,) = rig.balancer.degraded()
        assert "plan 1 of ann@host is being carried out" in reason and "no progress for 155 s" in reason
        rig.lives[2].release("ready")
        rig.pump()
        assert rig.balancer.degraded() == ()
        nursery.cancel_scope.cancel()
    assert [record.message for record in caplog.records].count("rebalance.stuck") == 1


async def test_a_rank_whose_copies_never_end_is_ended_so_that_others_can_go_on(autojump_clock) -> None:
    rig = ready_rig()
    rig.lives[1].holds = {"ready", "reclaimed"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.balancer.run)
        await rig.done("apply")
        rig.pump()
        await rig.done("abort")
        rig.pump()
        await trio.sleep(110)
        assert not rig.lives[1].ended and len(rig.balancer.degraded()) == 1
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert rig.lives[1].ended[0] == "its copies of epoch 2 of part main neither end nor fail"
    assert not rig.lives[0].ended and not rig.lives[2].ended
    rig.kill(1)
    rig.start(1)
    rig.pump()
    rig.check_slots()


# ---------------------------------------------------------------- auto


async def test_auto_moves_only_what_pays(autojump_clock) -> None:
    rig = Rig(mode="auto", interval_s=30.0, min_gain_us=20.0)
    rig.start_all()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.balancer.run)
        await trio.sleep(31)
        assert not rig.plans, "no loads yet"
        rig.load(EVEN)
        await trio.sleep(60)
        assert len(rig.plans) == 2
        (past,) = rig.balancer.report().parts[0].history
        assert (past.result, past.by, past.plan) == ("skipped", "auto", 2)
        rig.load(SKEWED, rounds=40)
        await trio.sleep(30)
        rig.pump()
        past = rig.balancer.report().parts[0].history[-1]
        assert (past.result, past.by) == ("applied", "auto")
        rig.check_slots()
        assert (await rig.done("mode", mode="manual")).done == "mode manual, was auto"
        count = len(rig.plans)
        rig.load(EVEN, rounds=200)
        await trio.sleep(100)
        assert len(rig.plans) == count
        nursery.cancel_scope.cancel()


async def test_auto_leaves_small_gains_alone(autojump_clock) -> None:
    rig = ready_rig(mode="auto", min_gain_us=1e6)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.balancer.run)
        await trio.sleep(31)
        nursery.cancel_scope.cancel()
    (past,) = rig.balancer.report().parts[0].history
    assert past.result == "skipped" and "min_gain is 1000000.0 us" in past.reason and rig.part.migration is None


# ---------------------------------------------------------------- two parts


async def test_main_and_drafter_move_at_the_same_time(autojump_clock) -> None:
    rig = ready_rig(drafter=True)
    rig.load([row[::-1] for row in SKEWED], part="draft")
    for life in rig.alive:
        life.holds = {"ready"}
    await rig.done("apply")
    await rig.done("apply", part="draft", user="bob")
    rig.pump()
    main, draft = rig.balancer.report().parts
    assert main.state == draft.state == "moving" and main.copied_slots and draft.copied_slots
    rig.lives[0].release("ready")
    await rig.done("abort", part="draft")
    for life in rig.alive[1:]:
        life.release("ready")
    rig.pump()
    rig.check_slots()
    main, draft = rig.balancer.report().parts
    assert main.history[-1].result == "applied" and draft.history[-1].result == "failed"
    assert main.epoch > 1 and draft.epoch == 1


# ---------------------------------------------------------------- deaths


MOMENTS = {
    "copy": StagePhase.COPY,
    "held": StagePhase.HELD,
    "ready": StagePhase.READY,
    "flip": StagePhase.FLIP,
    "flip seen by the victim": StagePhase.FLIP,
    "reclaim": StagePhase.RECLAIM,
    "withdrawing": StagePhase.WITHDRAWING,
    "draining": StagePhase.DRAINING,
}


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("slots", [8, 5], ids=["roomy", "tight"])
async def test_a_death_at_any_moment_ends_the_migration_and_nothing_is_mixed_up(
    autojump_clock, moment: str, victim: int, slots: int
) -> None:
    rig = ready_rig(slots=slots, spare_slots=slots - 4)
    before = rig.part.placement
    survivors = [place for place in range(3) if place != victim]
    hold = {"copy": "copied", "held": "copied", "ready": "ready", "reclaim": "reclaimed"}.get(moment, "none")
    if moment in ("withdrawing", "draining"):
        hold = "ready"
    for life in rig.alive:
        life.holds = {hold}
    if moment == "ready":
        rig.flip_only = set()  # all are ready, and the step that would show it is still to come
        for life in rig.alive:
            life.holds = set()
    elif moment.startswith("flip"):
        rig.flip_only = {victim} if moment.endswith("victim") else {survivors[0]}
    await rig.done("apply")
    rig.pump()
    if moment == "held":
        await rig.done("pause")
    elif moment == "withdrawing":
        for life in rig.alive:
            life.holds.add("withdrawn")
        await rig.done("abort")
    elif moment == "draining":
        for life in rig.alive:
            life.holds.add("reclaimed")
        await rig.done("abort")
    rig.pump()
    assert rig.part.migration is not None and rig.part.migration.phase is MOMENTS[moment]
    number = rig.group.roster.number
    rig.kill(victim)
    if moment not in ("reclaim", "draining"):
        assert rig.part.blocks_membership and rig.group.roster.number == number
    rig.flip_only = None
    for life in rig.alive:
        life.kept = [kept for kept in life.kept if kept[0] != "ready"]
        life.release("withdrawn", "copied", "flipped")
    rig.pump()
    for life in rig.alive:
        life.release("reclaimed", "ready")
    rig.pump()
    assert rig.part.migration is None and not rig.part.blocks_membership
    (past,) = rig.balancer.report().parts[0].history
    assert past.result in ("applied", "failed")
    flipped = moment.startswith("flip") or moment == "reclaim"
    assert rig.part.epoch == (2 if flipped else 1)
    kept = rig.part.placement.count_per_rank()[:, :, survivors]
    assert (kept >= before.count_per_rank()[:, :, survivors]).all() != flipped
    if slots == 8:
        assert rig.group.roster.number > number and len(rig.group.roster.running) == 2
        rig.check_slots()
    rig.start(victim)
    rig.pump()
    assert rig.group.roster.is_complete and rig.balancer.degraded() == ()
    rig.check_slots()
    rig.load(EVEN, rounds=3)
    rig.load([row[::-1] for row in SKEWED], rounds=100)
    await rig.done("apply")
    rig.pump()
    rig.check_slots()


async def test_deaths_of_all_ranks_begin_anew_with_what_was_in_force(autojump_clock) -> None:
    rig = ready_rig()
    await rig.done("apply")
    rig.pump()
    after = sets(rig)
    for place in range(3):
        rig.kill(place)
    rig.start_all()
    assert sets(rig) == after or rig.part.placement.count_replicas().sum() >= LAYERS * EXPERTS
    rig.check_slots()
    await rig.done("plan")


async def test_words_about_epochs_that_nobody_gave_out_end_their_rank(autojump_clock) -> None:
    rig = ready_rig()
    with pytest.raises(RemoteProtocolError, match="epoch 2"):
        say(rig, 0, EpochReady("main", 2))
    say(rig, 0, EpochReady("main", 1))
    for life in rig.alive:
        life.holds = {"copied"}
    await rig.done("apply")
    rig.pump()
    word, copied, blob = next(kept for life in rig.alive for kept in life.kept if kept[0] == "copied")
    owner = next(life for life in rig.alive if (word, copied, blob) in life.kept)
    stranger = next(life for life in rig.alive if life is not owner)
    with pytest.raises(RemoteProtocolError, match="is not this rank's to copy"):
        say(rig, stranger.place, copied, blob)
    say(rig, owner.place, copied, blob)
    with pytest.raises(RemoteProtocolError, match="is not this rank's to copy"):
        say(rig, owner.place, copied, blob)


async def test_a_migration_hands_nothing_to_the_next_life_of_a_target(autojump_clock) -> None:
    rig = ready_rig()
    for life in rig.alive:
        life.holds = {"copied", "withdrawn"}
    await rig.done("apply")
    rig.pump()
    target = next(kept[1].place for life in rig.alive for kept in life.kept)
    rig.kill(target)
    rig.start(target)
    rig.pump()
    assert not any(isinstance(message, NameGroup | JoinGroup) for message in rig.lives[target].log)
    for life in rig.alive:
        life.release("copied", "withdrawn")
    rig.pump()
    assert not any(isinstance(message, SlotsCopied) for message in rig.lives[target].log)
    assert rig.group.roster.is_complete
    rig.check_slots()


async def test_limits_are_those_that_were_given(autojump_clock) -> None:
    rig = ready_rig(limits=BalanceLimits(balance_s=2.0, plan_age_s=5.0))
    await rig.done("plan")
    await trio.sleep(6)
    assert "limits.plan_age is 5 s" in await rig.refused("apply", plan=1)
