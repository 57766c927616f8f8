"""The head's end of the operators' sockets, over real unix sockets: questions, rights, audit, events, order."""

from __future__ import annotations

import logging
import os
import pwd
import struct
import threading

import pytest
import trio

from engine.core.events import EventRing
from engine.faces import desk as desk_module
from engine.log import keep_events
from tests.faces.desk_rig import Caller, make_acts, make_answers, open_caller, open_desk, wait_until
from tests.faces.experts_samples import make_part
from transport import messages as m

ME = pwd.getpwuid(os.getuid()).pw_name
QUESTIONS = [
    (m.AskStatus(), m.StatusReport),
    (m.AskExperts(), m.ExpertsReport),
    (m.AskTraffic(), m.TrafficReport),
    (m.AskRequests(limit=2, older_ms=0), m.RequestsReport),
    (m.AskHeat("decode", 0, "main", 2), m.HeatReport),
    (m.AskHeat("decode", 9, "main", 2), m.Refused),
    (m.AskLinks(), m.LinksReport),
]


def rebalance(action: str, plan: int = 0, mode: str = "", reason: str = "") -> m.Rebalance:
    """With a name in it that is not ours."""
    return m.Rebalance(action, "decode", 0, "main", plan, mode, "the-president", "there", reason)  # type: ignore[arg-type]


PLAN = rebalance("plan", reason="look")
CHANGES = [
    (PLAN, "admin.plan", "decode group 0 part main"),
    (rebalance("apply", plan=18), "admin.apply", "decode group 0 part main plan 18"),
    (rebalance("mode", mode="auto"), "admin.mode", "decode group 0 part main to auto"),
    (m.SetDrain((3, 1, 2), True, "there", "fans"), "admin.drain", "ranks 1-3"),
    (m.SetDrain((3,), False, "there", ""), "admin.undrain", "ranks 3"),
    (m.CancelRequests((7, 8), "there", "stuck"), "admin.cancel", "requests 7,8"),
    (m.ResetCache("there", "cold"), "admin.reset_cache", "prefix caches"),
    (m.Shutdown(1500, "upgrade"), "admin.shutdown", "engine within 1.5 s"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def kept():
    """What is logged meanwhile, as the head keeps it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    ring = EventRing()
    keep_events(ring)
    yield ring
    root.handlers[:] = handlers
    root.setLevel(level)


def audited(ring: EventRing) -> list[m.HeadEvent]:
    return [event for event in ring.after(0)[1] if event.name.startswith("admin.")]


@pytest.mark.parametrize("name", ["read", "admin"])
async def test_both_sockets_answer_every_question_in_order(tmp_path, name):
    with trio.fail_after(20):
        async with open_desk(tmp_path) as desk, open_caller(getattr(desk, name)) as caller:
            caller.post(*(question for question, _ in QUESTIONS))
            frames = [await caller.take_frame() for _ in QUESTIONS]
    assert [type(frame.message) for frame in frames] == [kind for _, kind in QUESTIONS]
    assert len(frames[3].message.rows) == 2 and frames[3].message.total == 5
    assert struct.unpack_from("<f", frames[4].blob)[0] == 1.0 and len(frames[6].blob) == 40


@pytest.mark.parametrize(("change", "name", "what"), CHANGES, ids=[name for _, name, _ in CHANGES])
async def test_the_socket_that_reads_refuses_each_change_and_lives(tmp_path, kept, change, name, what):
    done = []
    acts = make_acts(shutdown=lambda *_: done.append(1) or 0, drain=lambda *_: done.append(1), cancel=done.append)
    with trio.fail_after(20):
        async with open_desk(tmp_path, acts=acts) as desk, open_caller(desk.read) as caller:
            answer = await caller.ask(change)
            assert isinstance(answer, m.Refused)
            assert answer.message == f"{type(change).__name__} is for admin.sock; this socket only reads"
            assert isinstance(await caller.ask(m.AskStatus()), m.StatusReport)
    [event] = audited(kept)
    assert not done and event.name == name and event.level == "warning"
    assert f"user={ME} uid={os.getuid()}" in event.text and "outcome=refused" in event.text
    assert f'what="{what}"' in event.text


@pytest.mark.parametrize(("change", "name", "what"), CHANGES, ids=[name for _, name, _ in CHANGES])
async def test_each_act_is_audited_with_the_user_that_the_kernel_knows(tmp_path, kept, change, name, what):
    with trio.fail_after(20):
        async with open_desk(tmp_path) as desk, open_caller(desk.admin) as caller:
            answer = await caller.ask(change)
    if not isinstance(change, m.Shutdown):
        assert f"for {ME}" in answer.done, "a name in the message counts for nothing"
    [event] = audited(kept)
    assert event.name == name and event.level == "info"
    assert event.text.startswith(f"user={ME} uid={os.getuid()} ") and f'what="{what}" outcome=done | ' in event.text
    assert ("host=there" in event.text) == (not isinstance(change, m.Shutdown))
    assert (f"reason={change.reason}" in event.text) == bool(change.reason)


async def test_what_the_head_refuses_is_audited_too(tmp_path, kept):
    acts = make_acts(drain=lambda *_: m.Refused("rank 3 is the last decode rank that takes requests"))
    with trio.fail_after(20):
        async with open_desk(tmp_path, acts=acts) as desk, open_caller(desk.admin) as caller:
            drain = m.SetDrain((3,), True, "there", "")
            assert isinstance(await caller.ask(drain), m.Refused) and isinstance(await caller.ask(drain), m.Refused)
    first, second = audited(kept)
    assert first.text == second.text, "each of them, though they are equal"
    assert first.text.endswith("outcome=refused | rank 3 is the last decode rank that takes requests")


async def test_a_user_without_a_name_is_a_number(tmp_path, kept, monkeypatch):
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with trio.fail_after(20):
        async with open_desk(tmp_path) as desk, open_caller(desk.admin) as caller:
            assert (await caller.ask(PLAN)).done == f"plan for uid {os.getuid()}"


async def test_a_directory_of_users_that_hangs_costs_a_second_and_no_other_answer(tmp_path, monkeypatch):
    asked, stuck = threading.Event(), threading.Event()

    def hang(uid: int) -> None:
        asked.set()
        stuck.wait(10)

    monkeypatch.setattr(pwd, "getpwuid", hang)
    monkeypatch.setattr(desk_module, "NAME_S", 0.3)
    answers: list[m.Message] = []
    try:
        with trio.fail_after(20):
            async with open_desk(tmp_path) as desk, open_caller(desk.admin) as one, open_caller(desk.admin) as two:
                one.post(PLAN)
                await wait_until(asked.is_set)
                answers.append(await two.ask(m.AskStatus()))
                answers.append(await one.take())  # though nobody has said who he is
    finally:
        stuck.set()
    assert [type(answer) for answer in answers] == [m.StatusReport, m.RebalanceAnswer]
    assert answers[1].done == f"plan for uid {os.getuid()}"


# ---------------------------------------------------------------- acts that take a while


class Planner:
    """Rebalance acts that wait until a test lets them."""

    def __init__(self) -> None:
        self.go = trio.Event()
        self.has_begun = trio.Event()
        self.began = 0
        self.ended = 0

    async def rebalance(self, act: m.Rebalance) -> m.RebalanceAnswer | m.Refused:
        self.began += 1
        self.has_begun.set()
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return m.Refused("no") if act.action == "abort" else m.RebalanceAnswer(act.reason, make_part())


async def test_a_plan_under_way_blocks_no_other_answer(tmp_path):
    planner = Planner()
    with trio.fail_after(20):
        async with (
            open_desk(tmp_path, acts=make_acts(rebalance=planner.rebalance)) as desk,
            open_caller(desk.admin) as caller,
        ):
            caller.post(m.AskStatus(), PLAN, m.AskExperts(), m.SetDrain((1,), True, "", ""), m.AskTraffic())
            kinds = [type(await caller.take()) for _ in range(4)]
            assert kinds == [m.StatusReport, m.ExpertsReport, m.ActDone, m.TrafficReport]
            await planner.has_begun.wait()  # on its way in a task of its own
            planner.go.set()
            assert (await caller.take()).done == "look"


async def test_four_acts_may_be_under_way_and_a_fifth_is_refused(tmp_path, kept):
    planner = Planner()
    with trio.fail_after(20):
        async with (
            open_desk(tmp_path, acts=make_acts(rebalance=planner.rebalance)) as desk,
            open_caller(desk.admin) as caller,
        ):
            caller.post(*[PLAN] * 5)
            refused = await caller.take()
            assert refused == m.Refused("4 acts are under way on this connection (the limit)")
            planner.go.set()
            assert [type(await caller.take()) for _ in range(4)] == [m.RebalanceAnswer] * 4
            assert isinstance(await caller.ask(PLAN), m.RebalanceAnswer), "there is room again"
    assert [("outcome=done" in event.text) for event in audited(kept)] == [False, True, True, True, True, True]


async def test_who_leaves_takes_his_plan_with_him(tmp_path, kept):
    planner = Planner()
    with trio.fail_after(20):
        async with open_desk(tmp_path, acts=make_acts(rebalance=planner.rebalance)) as desk:
            async with open_caller(desk.admin) as caller:
                caller.post(PLAN)
                await wait_until(lambda: planner.began == 1)
            await wait_until(lambda: planner.ended == 1)
            async with open_caller(desk.admin) as caller:
                assert isinstance(await caller.ask(m.AskStatus()), m.StatusReport)
    [event] = audited(kept)
    assert event.text.endswith("outcome=left | whoever asked is gone")


async def test_one_connection_too_many_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(desk_module, "OPERATORS", 1)
    with trio.fail_after(20):
        async with open_desk(tmp_path) as desk, open_caller(desk.read) as first:
            assert isinstance(await first.ask(m.AskStatus()), m.StatusReport)
            async with open_caller(desk.read) as second:
                answer = await second.ask(m.AskStatus())
                assert isinstance(answer, m.Refused) and "1 operators' connections (the limit)" in answer.message


# ---------------------------------------------------------------- events


def add(ring: EventRing, count: int, text: str = "rank=3") -> None:
    for _ in range(count):
        ring.add("info", "rank.ready", text, 1_700_000_000_000)


async def take_events(caller: Caller, count: int) -> tuple[int, list[int]]:
    """Until so many have come: how many are told lost, and their numbers."""
    lost, numbers = 0, []
    while len(numbers) < count:
        message = await caller.take()
        assert isinstance(message, m.EventsHappened)
        lost += message.lost
        numbers += [event.seq for event in message.events]
    return lost, numbers


async def test_events_come_at_once_and_then_as_they_happen(tmp_path):
    answers = make_answers()
    add(answers.events, 3)
    with trio.fail_after(20):
        async with open_desk(tmp_path, answers) as desk, open_caller(desk.read) as caller:
            caller.post(m.WatchEvents(1))
            assert await take_events(caller, 2) == (0, [2, 3])
            add(answers.events, 2)
            assert await take_events(caller, 2) == (0, [4, 5])
            assert isinstance(await caller.ask(m.AskStatus()), m.StatusReport)
            again = await caller.ask(m.WatchEvents(0))
            assert isinstance(again, m.Refused) and "watches events already" in again.message
            add(answers.events, 1)
            assert await take_events(caller, 1) == (0, [6])


async def test_the_first_message_comes_even_if_there_is_nothing_to_tell(tmp_path):
    with trio.fail_after(20):
        async with open_desk(tmp_path) as desk, open_caller(desk.read) as caller:
            assert await caller.ask(m.WatchEvents(0)) == m.EventsHappened(0, ())


async def test_a_gap_is_told_and_a_number_of_another_head_counts_for_nothing(tmp_path):
    answers = make_answers(events=EventRing(4))
    add(answers.events, 10)
    with trio.fail_after(20):
        async with open_desk(tmp_path, answers) as desk:
            for after, expected in ((2, (4, [7, 8, 9, 10])), (8, (0, [9, 10])), (500, (6, [7, 8, 9, 10]))):
                async with open_caller(desk.read) as caller:
                    caller.post(m.WatchEvents(after))
                    assert await take_events(caller, len(expected[1])) == expected


async def test_a_backlog_comes_in_full_messages_and_ends_with_one_that_is_not(tmp_path):
    answers = make_answers()
    add(answers.events, 512, "ü" * 4000)
    with trio.fail_after(20):
        async with open_desk(tmp_path, answers) as desk, open_caller(desk.read) as caller:
            caller.post(m.WatchEvents(0))
            sizes = [len((await caller.take()).events) for _ in range(3)]
    assert sizes == [256, 256, 0]


async def test_a_watcher_that_stands_still_costs_the_head_nothing_and_is_told_what_it_missed(tmp_path):
    answers = make_answers(events=EventRing(256))
    with trio.fail_after(20):
        async with open_desk(tmp_path, answers) as desk, open_caller(desk.read) as stalled:
            assert await stalled.ask(m.WatchEvents(0)) == m.EventsHappened(0, ())
            async with open_caller(desk.read) as other:
                for _ in range(20):  # 20 MiB, while nobody reads
                    add(answers.events, 256, "x" * 4000)
                    await trio.sleep(0.06)
                    with trio.fail_after(1):
                        assert isinstance(await other.ask(m.AskStatus()), m.StatusReport)
            total = 20 * 256
            lost, numbers = 0, []
            while not numbers or numbers[-1] < total:
                message = await stalled.take()
                lost += message.lost
                numbers += [event.seq for event in message.events]
    assert lost + len(numbers) == total and lost > total / 2, "what fell out of the ring is told, nothing comes twice"
    assert numbers == sorted(set(numbers))
    assert len(numbers) <= 256 * 5, "the queue, what the system holds, and the ring"


async def test_who_never_reads_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(desk_module, "STALL_S", 0.3)
    answers = make_answers(events=EventRing(256))
    with trio.fail_after(20):
        async with open_desk(tmp_path, answers) as desk, open_caller(desk.read) as stalled:
            stalled.post(m.WatchEvents(0))
            await wait_until(lambda: len(answers.events._watchers) == 1)
            for _ in range(4):
                add(answers.events, 256, "x" * 4000)
                await trio.sleep(0.06)
            await wait_until(lambda: not answers.events._watchers)
