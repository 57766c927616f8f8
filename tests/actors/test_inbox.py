"""The inbox and the report: bounded where others write, never lost, newest wins."""

from __future__ import annotations

import trio
import trio.testing

from engine.actors.intake import DeviceFailed, HeadFrame, Inbox, LinkLost
from engine.actors.report import run_lag, run_report
from engine.core.telemetry import Gauges, Meters
from transport.messages import Drain, RankSnapshot
from transport.stream import FrameStream

GAUGES = Gauges(1, 2, 3, 4, 5, 6, 18, 7, 8, 9, 10, 11, 12, 13)
FRAME = HeadFrame(Drain(), memoryview(b""))


async def test_readers_wait_for_room_and_own_facts_do_not(autojump_clock: trio.abc.Clock) -> None:
    inbox = Inbox(capacity=3)
    written: list[int] = []

    async def read() -> None:
        for number in range(10):
            await inbox.put_frame(FRAME)
            written.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert len(written) == 3
        inbox.put(LinkLost(1))
        taken = inbox.take()
        assert len(taken) == 4 and taken[-1] == LinkLost(1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(written) == 6
        while len(written) < 10:
            inbox.take()
            await trio.testing.wait_all_tasks_blocked()


async def test_a_wait_ends_with_the_first_fact_and_at_once_if_there_is_one(autojump_clock: trio.abc.Clock) -> None:
    inbox = Inbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.wait)
        await trio.testing.wait_all_tasks_blocked()
        inbox.put(LinkLost(1))
    await inbox.wait()
    assert inbox.take() == [LinkLost(1)] and inbox.take() == []


async def test_snapshots_come_at_their_pace_and_stop_while_nobody_reads(autojump_clock: trio.abc.Clock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    head = FrameStream(ours, accepts=frozenset(), out_limit_bytes=1 << 20, stall_s=5, name="head")
    reader = FrameStream(theirs, accepts=frozenset({RankSnapshot}), out_limit_bytes=1 << 20, stall_s=5, name="rank")
    inbox, meters = Inbox(), Meters()
    meters.step, meters.last_step_us = 17, int((trio.current_time() - 0.5) * 1e6)

    async def report() -> None:
        await run_report(
            head,
            inbox,
            lambda: GAUGES,
            meters,
            rank=3,
            generation=2,
            snapshot_s=0.25,
            step_s=4.0,
            read_rss_bytes=lambda: 1 << 20,
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(report)
        await trio.sleep(0.9)
        assert head.pending_bytes > 0
        nursery.start_soon(head.run_writer)
        snapshots = [frame.message for frame in await reader.receive()]
        assert len(snapshots) == 3
        first = snapshots[0]
        assert isinstance(first, RankSnapshot)
        assert (first.rank, first.generation, first.step, first.pages_total, first.slabs_free) == (3, 2, 17, 18, 7)
        assert first.step_age_ms == 750 and first.rss_bytes > 0
        # The step never ends: found once, by the step's own limit.
        await trio.sleep(4)
        (failed,) = inbox.take()
        assert isinstance(failed, DeviceFailed) and "step 18 of rank 3 is not done after 4 s" in str(failed.error)
        nursery.cancel_scope.cancel()


async def test_the_lag_of_a_loop_that_is_never_late_is_nothing(autojump_clock: trio.abc.Clock) -> None:
    meters = Meters()
    with trio.move_on_after(1):
        await run_lag(meters)
    assert len(meters.loop_lag_us) > 10 and meters.loop_lag_us.percentiles(1.0) == (0,)
