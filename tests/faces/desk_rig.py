"""What a head would answer, as plain values, and real sockets around it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio

from engine.actors.answers import Acts, Answers
from engine.core.events import EventRing
from engine.faces.desk import run_operators
from tests.faces.experts_samples import make_part, make_status, make_traffic
from transport import messages as m
from transport.stream import FrameStream
from transport.unix import open_unix_listener, open_unix_stream
from transport.wire import Frame

HOT_LAYER, HOT_EXPERT = 4, 7


def make_request(request: int, **changes: object) -> m.RequestRow:
    fields: dict = {
        "request": request, "client": "batch", "label": f"line-{request}", "state": "decode", "age_ms": 90_000,
        "state_ms": 12_000, "attempt": 1, "prompt_tokens": 900, "cached_tokens": 0, "generated": 40, "max_tokens": 256,
        "prefill_rank": 0, "decode_rank": 3, **changes,
    }  # fmt: skip
    return m.RequestRow(**fields)


def make_heat(ask: m.AskHeat, part: m.PartReport, *, steps: int = 500) -> tuple[m.HeatReport, bytes]:
    """Even, but for place 1, which is hot in HOT_LAYER by HOT_EXPERT."""
    ranks, layers, experts = len(part.ranks), part.layers, part.experts
    slots = part.slots // ranks // layers
    loads = [1.0] * (ranks * layers)
    hottest = list(range(ranks * layers))
    loads[layers + HOT_LAYER], hottest[layers + HOT_LAYER] = 2.5, HOT_EXPERT
    rows = list(range(ranks * slots))
    blob = struct.pack(f"<{len(loads)}f", *loads) + struct.pack(f"<{len(hottest)}i", *hottest)
    blob += 2 * struct.pack(f"<{len(rows)}i", *rows) + struct.pack(f"<{experts}f", *[1.0] * experts) + bytes(len(rows))
    report = m.HeatReport(
        ask.pool, ask.group, ask.part, ask.layer, layers, experts, ranks, slots, False, steps, 1.5, 64.0
    )  # fmt: skip
    return report, blob


def make_answers(**changes: Any) -> Answers:
    part = make_part()

    def heat(ask: m.AskHeat) -> tuple[m.HeatReport, bytes] | m.Refused:
        return m.Refused(f"there is no {ask.pool} group {ask.group}") if ask.group else make_heat(ask, part)

    def requests(ask: m.AskRequests) -> m.RequestsReport:
        rows = tuple(make_request(number) for number in range(5))
        return m.RequestsReport(len(rows), rows[: ask.limit])

    answers = Answers(
        status=make_status,
        experts=lambda: m.ExpertsReport((part,)),
        traffic=make_traffic,
        requests=requests,
        heat=heat,
        links=lambda: (m.LinksReport(1), struct.pack("<iiiqqiii", 0, 1, 3, 4096, 2, 0, 0, 350)),
        events=EventRing(),
    )
    return dataclasses.replace(answers, **changes)


async def _nothing(act: m.Rebalance) -> m.RebalanceAnswer | m.Refused:
    return m.RebalanceAnswer(f"{act.action} for {act.user}", make_part())


def make_acts(**changes: Any) -> Acts:
    acts = Acts(
        shutdown=lambda message, user: 3,
        rebalance=_nothing,
        drain=lambda message, user: m.ActDone(f"drained {message.ranks} for {user}"),
        cancel=lambda message, user: m.ActDone(f"cancelled {message.requests} for {user}"),
        reset=lambda message, user: m.ActDone(f"reset for {user}"),
    )
    return dataclasses.replace(acts, **changes)


@dataclasses.dataclass
class Desk:
    """Both sockets of a head that is not there."""

    read: str
    admin: str
    answers: Answers


@contextlib.asynccontextmanager
async def open_desk(path: os.PathLike[str], answers: Answers | None = None, acts: Acts | None = None):
    """Serves `read.sock` and `admin.sock` in a folder until the end of the block."""
    desk = Desk(os.path.join(path, "read.sock"), os.path.join(path, "admin.sock"), answers or make_answers())
    async with (
        await open_unix_listener(desk.read, 0o660) as reads,
        await open_unix_listener(desk.admin, 0o600) as changes,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(run_operators, reads, desk.answers, None)
        nursery.start_soon(run_operators, changes, desk.answers, acts or make_acts())
        yield desk
        nursery.cancel_scope.cancel()


class Caller:
    """An operator that may send anything at any time, and sees all that comes."""

    def __init__(self, link: FrameStream) -> None:
        self.link = link
        self._frames: list[Frame] = []

    def post(self, *questions: m.Message) -> None:
        for question in questions:
            self.link.post(question)

    async def take_frame(self) -> Frame:
        while not self._frames:
            self._frames = await self.link.receive()
        return self._frames.pop(0)

    async def take(self) -> m.Message:
        return (await self.take_frame()).message

    async def ask(self, question: m.Message) -> m.Message:
        self.post(question)
        return await self.take()


@contextlib.asynccontextmanager
async def open_caller(path: str) -> AsyncIterator[Caller]:
    stream = await open_unix_stream(path)
    link = FrameStream(stream, accepts=m.OPERATOR_FROM_HEAD, out_limit_bytes=1 << 24, stall_s=5, name="head")
    async with link, trio.open_nursery() as nursery:
        nursery.start_soon(link.run_writer)
        yield Caller(link)
        nursery.cancel_scope.cancel()


async def wait_until(question: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Asks again and again until the answer is yes."""
    with trio.move_on_after(timeout_s):
        while not question():  # noqa: ASYNC110
            await trio.sleep(0.005)
        return
    raise AssertionError(f"not within {timeout_s:g} s")
