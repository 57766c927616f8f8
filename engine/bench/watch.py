"""Watch: what the engine's own ranks say of their steps while a measurement runs.

The head is asked often; a rank's snapshot counts for a stretch of time if it was new to us inside it. Means come from
the difference of two snapshots' totals, so they are of that stretch alone; percentiles are the rank's own, over its
last 1,024 steps.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import trio

from engine.bench.processor import ThreadTimes, read_thread_times
from engine.faces.admin import Operator
from transport.messages import RankSnapshot, RankStatus

POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Sighting:
    """A snapshot when it was first seen; it did not exist yet at `after`."""

    after: float
    seen: float
    rank: RankStatus
    snapshot: RankSnapshot


class Watch:
    """Sightings of all ranks, in order. `run` polls until cancelled."""

    def __init__(self, head: Operator) -> None:
        self._head = head
        self._sightings: list[Sighting] = []
        self._latest: dict[int, RankSnapshot] = {}
        self._name_to_pid: dict[str, int] = {"client": os.getpid()}

    async def run(self) -> None:
        """Asks every `POLL_S`.

        Raises:
            PeerGone: the head went away.
        """
        after = trio.current_time()
        while True:
            asked = trio.current_time()
            report = await self._head.ask_status()
            now = trio.current_time()
            self._name_to_pid["head"] = report.head_pid
            for rank in report.ranks:
                self._name_to_pid[f"{rank.role}{rank.rank}"] = rank.pid
                snapshot = rank.snapshot
                if snapshot is not None and snapshot != self._latest.get(rank.rank):
                    self.add(Sighting(after, now, rank, snapshot))
            after = asked
            await trio.sleep(POLL_S)

    def add(self, sighting: Sighting) -> None:
        """Notes one."""
        self._latest[sighting.rank.rank] = sighting.snapshot
        self._sightings.append(sighting)

    def forget(self) -> None:
        """Drops what was seen so far; what comes next is compared with the newest of it."""
        self._sightings.clear()

    def thread_times(self) -> dict[str, ThreadTimes]:
        """Of every process so far: `client` (this one), `head`, and ranks by role and number."""
        return {name: read_thread_times(pid) for name, pid in self._name_to_pid.items()}

    def figures(self, start: float, end: float) -> list[dict[str, Any]]:
        """Per rank, what it did between two moments of trio's clock; ranks with fewer than two sightings lack means."""
        ranks = sorted({sighting.rank.rank for sighting in self._sightings})
        return [self._rank_figures(rank, start, end) for rank in ranks]

    def _rank_figures(self, rank: int, start: float, end: float) -> dict[str, Any]:
        mine = [sighting for sighting in self._sightings if sighting.rank.rank == rank]
        newest = mine[-1].snapshot
        figures: dict[str, Any] = {
            "rank": rank,
            "role": mine[-1].rank.role,
            "step_us_p50": newest.step_us_p50,
            "step_us_p99": newest.step_us_p99,
            "device_us_p50": newest.device_us_p50,
            "device_us_p99": newest.device_us_p99,
            "loop_lag_us_p50": newest.loop_lag_us_p50,
            "loop_lag_us_p99": newest.loop_lag_us_p99,
        }
        inside = [sighting for sighting in mine if start <= sighting.after and sighting.seen <= end]
        if len(inside) < 2:
            return figures
        first, last = inside[0], inside[-1]
        steps = last.snapshot.step - first.snapshot.step
        if steps > 0:
            step_us = last.snapshot.step_us_sum - first.snapshot.step_us_sum
            device_us = last.snapshot.device_us_sum - first.snapshot.device_us_sum
            figures |= {
                "steps": steps,
                "step_us_mean": round(step_us / steps, 1),
                "device_us_mean": round(device_us / steps, 1),
                "overhead_share": round(1 - device_us / step_us, 4),
            }
        return figures
