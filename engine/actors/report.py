"""run_report: the rank's snapshots, newest wins, its loop's lag, and the watchdog over its device."""

from __future__ import annotations

from collections.abc import Callable

import trio

from engine.actors.intake import DeviceFailed, Inbox
from engine.core.telemetry import Gauges, Meters, build_snapshot
from engine.errors import DeviceError
from transport.messages import PairCounts
from transport.stream import FrameStream

LAG_PERIOD_S = 0.05
UNREAD_BYTES = 256 << 10
"""With so much unread by the head a snapshot is skipped: the next one says more."""


async def run_report(
    head: FrameStream,
    inbox: Inbox,
    read_gauges: Callable[[], Gauges],
    meters: Meters,
    *,
    rank: int,
    generation: int,
    snapshot_s: float,
    step_s: float,
    read_rss_bytes: Callable[[], int],
    is_stalled: Callable[[], bool] = lambda: False,
    count_pairs: Callable[[], tuple[PairCounts, bytes]] | None = None,
) -> None:
    """Posts a snapshot every `snapshot_s`, and what was pushed to whom; a step that is not done after `step_s` is
    reported as a failed device.

    Args:
        is_stalled: the step waits for other ranks, which the device bounds by itself.
        count_pairs: of a prefill rank: what it has pushed to whom, with its blob.
    """
    while True:
        await trio.sleep(snapshot_s)
        now_us = int(trio.current_time() * 1e6)
        is_late = meters.last_step_us is not None and now_us - meters.last_step_us > step_s * 1e6
        if is_late and not is_stalled():
            error = DeviceError(f"step {meters.step + 1} of rank {rank} is not done after {step_s:g} s (step_s)")
            inbox.put(DeviceFailed(error))
            return
        if head.pending_bytes <= UNREAD_BYTES:
            rss_bytes = read_rss_bytes()
            head.post(build_snapshot(rank, generation, read_gauges(), meters, now_us=now_us, rss_bytes=rss_bytes))
            if count_pairs is not None:
                head.post(*count_pairs())


async def run_lag(meters: Meters) -> None:
    """Measures how late the loop wakes a sleeper: what every other task of the rank waits at least."""
    while True:
        due = trio.current_time() + LAG_PERIOD_S
        await trio.sleep_until(due)
        meters.loop_lag_us.add(int((trio.current_time() - due) * 1e6))
