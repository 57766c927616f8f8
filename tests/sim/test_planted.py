"""Bugs planted into the production code, each a small patch, each found by a named checker within a few seeds.

This is the proof that the checkers see: a simulator that finds nothing may be looking at nothing. The seeds are those
that `engine simulate --seed` draws; the clusters, loads and faults are not made for the bugs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import trio

from engine.actors import push, rank, router
from engine.actors.intake import PushDone
from engine.core import backlog, decode, fence, plan, prefill, prefix, reuse, running
from engine.core.handoff import (
    DECODE,
    PREFILL,
    Action,
    DecodeEvent,
    DecodePhase,
    PrefillEvent,
    PrefillPhase,
)
from engine.core.pages import PageState
from engine.core.request import judge_token
from engine.core.tables import Transition
from engine.sim import device
from engine.sim.play import play
from engine.sim.scenario import draw_scenario
from transport.fabric import TransferReport
from transport.messages import PagesPushed, PairCounts, RankSnapshot

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True)
class Bug:
    """`checkers`: who may find it first. `seeds`: within so many, from 0 on; `first`: where the search begins here, to
    save the time of the seeds before it."""

    plant: Plant
    checkers: frozenset[str]
    seeds: int
    first: int = 0


BUGS: dict[str, Bug] = {}


def bug(*checkers: str, seeds: int, first: int = 0) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        BUGS[plant.__name__] = Bug(plant, frozenset(checkers), seeds, first)
        return plant

    return add


@bug("quarantine", "late-write", seeds=20)
def page_reused_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    for event in (DecodeEvent.ABORT, DecodeEvent.OVERDUE, DecodeEvent.LINK_LOST):
        _, actions = DECODE[(DecodePhase.GRANTED, event)]
        changed = (*(a for a in actions if a is not Action.QUARANTINE), Action.FREE)
        patch.setitem(DECODE, (DecodePhase.GRANTED, event), Transition(DecodePhase.CLOSED, changed))


@bug("late-write", seeds=20)
def failed_push_believed_to_be_over(patch: pytest.MonkeyPatch) -> None:
    for phase, actions in ((PrefillPhase.WORKING, (Action.FAIL,)), (PrefillPhase.ENDING, ())):
        patch.setitem(PREFILL, (phase, PrefillEvent.PUSH_FAILED), Transition(PrefillPhase.ENDING, actions))


@bug("late-write", seeds=40, first=4)
def epoch_ended_while_a_write_runs(patch: pytest.MonkeyPatch) -> None:
    events = (PrefillEvent.REVOKE, ()), (PrefillEvent.ABORT, (Action.ACK,)), (PrefillEvent.PUSH_OVERDUE, (Action.FAIL,))
    for event, actions in events:
        early = Transition(PrefillPhase.ENDING, (*actions, Action.END_EPOCH))
        patch.setitem(PREFILL, (PrefillPhase.WORKING, event), early)


@bug("commit-data", seeds=20)
def late_push_accepted(patch: pytest.MonkeyPatch) -> None:
    """An overdue or failed write counts as done."""

    async def wait(pushing, order, transfer, link) -> None:
        with trio.move_on_after(0.01):
            await transfer.done.wait()
        pushing.tell(PushDone(order.key, order.first, order.count, TransferReport(1, 1, 1, 1)))
        link.count_push(-1)

    patch.setattr(push.Pushing, "_wait", wait)


@bug("liveness", seeds=10)
def commit_lost(patch: pytest.MonkeyPatch) -> None:
    original = prefill.PrefillSide._commit

    def commit(self, prompt, now_us):
        if prompt.key[0] % 4:
            original(self, prompt, now_us)

    patch.setattr(prefill.PrefillSide, "_commit", commit)


@bug("commit-data", seeds=10)
def commit_before_data(patch: pytest.MonkeyPatch) -> None:
    original = prefill.PrefillSide._push

    def early(self, prompt, is_last):
        original(self, prompt, is_last)
        if is_last:
            self._commit(prompt, prompt.computed_us)

    patch.setattr(prefill.PrefillSide, "_push", early)


@bug("commit-once", seeds=10)
def commit_sent_twice(patch: pytest.MonkeyPatch) -> None:
    original = prefill.PrefillSide._commit

    def commit(self, prompt, now_us):
        original(self, prompt, now_us)
        original(self, prompt, now_us)

    patch.setattr(prefill.PrefillSide, "_commit", commit)


@bug("epochs", seeds=10)
def grant_with_an_old_epoch(patch: pytest.MonkeyPatch) -> None:
    original = decode.DecodeSide._grant

    def grant(self, sequence):
        original(self, sequence)
        if not sequence.epoch % 3:
            self._next_epoch -= 1

    patch.setattr(decode.DecodeSide, "_grant", grant)


@bug("stream", seeds=20)
def token_emitted_twice_after_recovery(patch: pytest.MonkeyPatch) -> None:
    original = decode.DecodeSide._run

    def run(self, sequence):
        original(self, sequence)
        if sequence.reserve.generated:
            self._emitted.add(sequence.key, sequence.count - 1, sequence.next_token)

    patch.setattr(decode.DecodeSide, "_run", run)


@bug("pages", "leftover", seeds=20)
def cancelled_request_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(DECODE, (DecodePhase.RUNNING, DecodeEvent.ABORT), Transition(DecodePhase.CLOSED, (Action.ACK,)))


@bug("heartbeat", seeds=20)
def heartbeat_in_the_step_loop(patch: pytest.MonkeyPatch) -> None:
    original = rank.run_report

    async def report(head, inbox, read_gauges, meters, **rest):
        class StepHead:
            pending_bytes = 0
            is_free = True

            def post(self, message: RankSnapshot | PairCounts, blob: bytes = b"") -> None:
                # The loop can not speak while it waits for its device.
                if isinstance(message, RankSnapshot):
                    self.is_free = message.step_age_ms < 2 * rest["snapshot_s"] * 1000
                if self.is_free:
                    head.post(message, blob)

        await original(StepHead(), inbox, read_gauges, meters, **rest)

    patch.setattr(rank, "run_report", report)


@bug("commit-count", seeds=10)
def chunk_count_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def pushed(request, epoch, first, count, num_bytes, checksum):
        return PagesPushed(request, epoch, first, count - (count > 1), num_bytes, checksum)

    patch.setattr(prefill, "PagesPushed", pushed)


@bug("in-flight", seeds=20)
def page_freed_while_a_submitted_step_names_it(patch: pytest.MonkeyPatch) -> None:
    original = decode.DecodeSide._free

    def free(self, sequence, before):
        if before is DecodePhase.RUNNING:
            self.arena.free(sequence.pages, sequence.slab, PageState.OWNED)
        else:
            original(self, sequence, before)

    patch.setattr(decode.DecodeSide, "_free", free)
    patch.setattr(decode.DecodeSide, "_release", lambda self, sequence: None)


@bug("bounds", seeds=30)
def queue_of_the_head_has_no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backlog.Backlog, "why_full", lambda self, num_ids: None)


@bug("liveness", seeds=60)
def writer_that_owes_an_end_is_never_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fence.Fence, "look", lambda self, *args, **more: [])


@bug("stream", seeds=10)
def completion_one_token_too_short(patch: pytest.MonkeyPatch) -> None:
    original = running.Running._line_up

    def judge(token, count, limit, sampling, eos_ids):
        return judge_token(token, count + 1, limit, sampling, eos_ids)

    def line_up(self, most):
        lineup = original(self, most)
        return dataclasses.replace(lineup, limits=lineup.limits - 1)

    patch.setattr(running, "judge_token", judge)
    patch.setattr(running.Running, "_line_up", line_up)


@bug("leftover", seeds=20)
def prefill_rank_not_told_of_an_abort(patch: pytest.MonkeyPatch) -> None:
    original = router.Router._abort_parts

    def abort(self, entry):
        prefill_rank, entry.prefill = entry.prefill, None
        original(self, entry)
        entry.prefill = prefill_rank

    patch.setattr(router.Router, "_abort_parts", abort)


@bug("tags", seeds=20)
def row_placed_while_a_step_with_drafts_is_under_way(patch: pytest.MonkeyPatch) -> None:
    original = running.Running.plan

    def plan(self, most):
        kept, self._num_drafting = self._num_drafting, 0
        planned = original(self, most)
        self._num_drafting += kept
        return planned

    patch.setattr(running.Running, "plan", plan)


@bug("stream", seeds=40)
def drafts_behind_an_end_are_told(patch: pytest.MonkeyPatch) -> None:
    original = running._find_end

    def find_end(sequence, tokens, count, eos_ids):
        return original(sequence, tokens, count, eos_ids)[0], len(tokens)

    patch.setattr(running, "_find_end", find_end)


@bug("ends", seeds=10)
def end_of_a_row_beyond_its_pages(patch: pytest.MonkeyPatch) -> None:
    original = running.Running._line_up

    def line_up(self, most):
        lineup = original(self, most)
        ends = None if lineup.roster.ends is None else lineup.roster.ends + 64
        return dataclasses.replace(lineup, roster=dataclasses.replace(lineup.roster, ends=ends))

    patch.setattr(running.Running, "_line_up", line_up)


@bug("pages", "tags", seeds=40)
def cut_evicted_that_a_prompt_goes_on_from(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix.PrefixTree, "pin", lambda self, cut: None)
    patch.setattr(prefix.PrefixTree, "unpin", lambda self, cut: None)


@bug("pages", "tags", seeds=60, first=40)
def cut_let_go_before_the_last_push_is_over(patch: pytest.MonkeyPatch) -> None:
    original, unpin = prefill.PrefillSide._push, prefix.PrefixTree.unpin

    def push(self, prompt, is_last):
        original(self, prompt, is_last)
        if is_last and prompt.cut is not None:
            unpin(self.cache._tree, prompt.cut)

    patch.setattr(prefill.PrefillSide, "_push", push)
    patch.setattr(prefix.PrefixTree, "unpin", lambda self, cut: unpin(self, cut) if cut.pins else None)


@bug("pages", seeds=10)
def prompt_donated_before_its_last_push_is_over(patch: pytest.MonkeyPatch) -> None:
    original, donate, give_back = prefill.PrefillSide._push, reuse.PrefixCache.donate, reuse.PrefixCache.give_back
    donated = set()

    def push(self, prompt, is_last):
        original(self, prompt, is_last)
        if is_last:
            kept = prompt.pages, prompt.slab
            donate(self.cache, prompt, 0)
            prompt.pages, prompt.slab = kept
            donated.add(prompt)

    patch.setattr(prefill.PrefillSide, "_push", push)
    patch.setattr(reuse.PrefixCache, "donate", lambda self, prompt, now_us: None)
    patch.setattr(
        reuse.PrefixCache, "give_back", lambda self, prompt: None if prompt in donated else give_back(self, prompt)
    )


@bug("tags", seeds=20)
def state_kept_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = device.SimDevice._run_chunk

    def run_chunk(self, chunk, ids):
        if chunk.keep >= 0:
            self._copy_slab(chunk.slab, chunk.keep)
        return original(self, dataclasses.replace(chunk, keep=-1), ids)

    patch.setattr(device.SimDevice, "_run_chunk", run_chunk)


@bug("tags", seeds=20)
def open_page_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reuse, "Base", lambda slab, page: plan.Base(slab))


@bug("stream", seeds=60, first=12)
def prefix_found_by_its_length(patch: pytest.MonkeyPatch) -> None:
    """The ids behind the last page end are not compared."""
    original = prefix.PrefixTree.find

    def find(self, digests, ids, most):
        cut, known = original(self, digests, ids, most)
        if cut is not None:
            alike = [each for each in self._places() if each.end == cut.end and each.tail and each.position <= most]
            cut = next((each for each in alike if each is not cut), cut)
        return cut, known

    patch.setattr(prefix.PrefixTree, "find", find)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hunt(name, BUGS[name], monkeypatch)


def hunt(name: str, planted: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug and plays its seeds until a checker that may find it does."""
    planted.plant(monkeypatch)
    for seed in range(planted.first, planted.seeds):
        outcome = play(draw_scenario(seed))
        if outcome.crash is not None:
            raise outcome.crash
        if outcome.violation is not None:
            print(f"{name}: seed {seed}: {outcome.violation}")
            assert outcome.violation.checker in planted.checkers, outcome.violation
            return
    pytest.fail(f"{planted.seeds} seeds did not find it")
