"""A scripted head of 72 ranks, 256 experts and 61 layers whose numbers are all other ones in every answer.

`python -m tests.console.bigscene DIRECTORY` serves it there until its stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec
import numpy as np

from tests.console.servedscene import NumberedHead
from tests.console.stubhead import Scene, make_event, make_heat, make_part, make_requests, make_skew, make_status
from transport.errors import PeerGone
from transport.link import FrameLink
from transport.messages import (
    AskHeat,
    AskStatus,
    EventsHappened,
    ExpertsReport,
    HeatReport,
    LinksReport,
    Message,
    PartReport,
    RequestsReport,
)

PREFILL, DECODE, LAYERS, EXPERTS, SPARE = 8, 64, 61, 256, 1
ROUND_S = 0.5
"""So much time goes by in the scene from one answer to the next."""
REQUESTS = 500
EVENTS = 20
"""That happen from one round to the next."""
KEPT = 100
"""Of them, for a console that comes; one message has no room for thousands."""


class BigHead(NumberedHead):
    """Everything goes on before each round."""

    def __init__(self, directory: str) -> None:
        part = make_part(
            ranks=tuple(range(PREFILL, PREFILL + DECODE)), layers=LAYERS, experts=EXPERTS,
            slots=LAYERS * (EXPERTS + SPARE * DECODE), empty_slots=LAYERS * SPARE * DECODE,
            skew=make_skew(layer=41, rank=PREFILL + 17),
        )  # fmt: skip
        scene = Scene(
            status=make_status(PREFILL, DECODE),
            experts=ExpertsReport(parts=(part,)),
            requests=make_requests(REQUESTS),
            heat=self._heat,
        )
        super().__init__(directory, scene)
        self._chance = np.random.default_rng(7)

    def _answer(self, link: FrameLink, message: Message, is_admin: bool) -> None:
        if isinstance(message, AskStatus):
            self._go_on()
        super()._answer(link, message, is_admin)

    def _go_on(self) -> None:
        scene, chance = self.scene, self._chance
        scene.advance(ROUND_S)
        scene.set_part(
            steps=12_000 + int(scene.seconds * 110),
            skew=make_skew(
                layer=41, rank=PREFILL + 17, max_over_mean=1.2 + 0.1 * chance.random(),
                lost_us_per_step=600 + 100 * chance.random(), imbalance=0.8 + 0.2 * chance.random(),
            ),
        )  # fmt: skip
        noise = chance.integers(0, 100, (len(scene.status.ranks), 6)).tolist()
        ranks = []
        for status, (run, free, p50, p99, lag, age) in zip(scene.status.ranks, noise, strict=True):
            assert status.snapshot is not None
            snapshot = msgspec.structs.replace(
                status.snapshot, running=60 + run, pages_free=200 + 4 * free, step_us_p50=8500 + 10 * p50,
                step_us_p99=10_000 + 20 * p99, loop_lag_us_p99=300 + 3 * lag,
                step_us_sum=status.snapshot.step_us_sum + 2000 * p50,
                generated_tokens=status.snapshot.generated_tokens + 10 * p99,
            )  # fmt: skip
            ranks.append(msgspec.structs.replace(status, snapshot=snapshot, age_ms=20 + 5 * age))
        scene.status = msgspec.structs.replace(scene.status, ranks=tuple(ranks))
        rows = tuple(
            msgspec.structs.replace(
                row, age_ms=row.age_ms + 500, state_ms=row.state_ms + 500, generated=row.generated + 57
            )
            for row in scene.requests.rows
        )
        scene.requests = RequestsReport(total=scene.requests.total, rows=rows)
        scene.links = self._jog(*scene.links)
        first = scene.events[-1].seq + 1
        events = tuple(make_event(first + n, "request.finish", f"request={first + n}", ago_s=0) for n in range(EVENTS))
        scene.events = [*scene.events, *events][-KEPT:]
        for watcher in [*self._watchers]:
            with contextlib.suppress(PeerGone):  # a console that was just killed
                watcher.post(EventsHappened(lost=0, events=events))

    def _jog(self, report: LinksReport, blob: bytes) -> tuple[LinksReport, bytes]:
        """Other rates and pushes in flight."""
        count, chance = report.count, self._chance
        columns = np.frombuffer(blob, "u1").copy()
        at = count * (4 + 4 + 4)  # behind source, life and destination
        columns[at : at + 8 * count].view("<i8")[:] += chance.integers(0, 200_000_000, count)
        at += count * (8 + 8)
        columns[at : at + 4 * count].view("<i4")[:] = chance.integers(0, 9, count)
        return report, columns.tobytes()

    def _heat(self, ask: AskHeat, part: PartReport) -> tuple[HeatReport, bytes]:
        report, blob = make_heat(ask, part, hot_place=17, hot_layer=41, hot_expert=203, hot=1.83)
        ranks, slots = report.ranks, report.slots_per_rank
        data = bytearray(blob)
        size = 4 * ranks * report.layers
        shape = np.frombuffer(blob, "<f4", ranks * report.layers)
        data[:size] = (shape * self._chance.lognormal(0, 0.25, shape.size)).astype("<f4").tobytes()
        at = 2 * size + 2 * 4 * ranks * slots
        load = np.frombuffer(blob, "<f4", report.experts, at)
        data[at : at + 4 * report.experts] = (load * self._chance.lognormal(0, 0.25, load.size)).astype("<f4").tobytes()
        return report, bytes(data)


async def serve(directory: str) -> None:
    head = BigHead(directory)
    await head.start()
    print("serves", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await head.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
