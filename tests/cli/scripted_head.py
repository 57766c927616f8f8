"""A head that answers operators on real sockets as a test says, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import trio

from engine.errors import EngineError
from engine.runtime import RuntimeDirectory
from tests.faces.experts_samples import make_status, make_traffic
from transport.messages import (
    HEAD_FROM_OPERATOR,
    AskExperts,
    AskStatus,
    AskTraffic,
    ExpertsReport,
    Message,
    PartReport,
    Rebalance,
    RebalanceAnswer,
    Refused,
    StatusReport,
    TrafficReport,
)
from transport.stream import FrameStream, run_link
from transport.unix import open_unix_listener


class ScriptedHead:
    """What it answers, and what it was asked to do.

    Attributes:
        status, traffic: the answers to AskStatus and AskTraffic.
        parts: one entry for each AskExperts; the last one is repeated.
        answers: action -> what becomes of it; None is silence, an action that is missing is refused.
        acts: every Rebalance, in order.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.status: StatusReport = make_status()
        self.traffic: TrafficReport = make_traffic()
        self.parts: list[tuple[PartReport, ...]] = [()]
        self.answers: dict[str, Callable[[Rebalance], Message | None]] = {}
        self.acts: list[Rebalance] = []

    def answer(self, action: str, part: PartReport, done: str = "done") -> None:
        self.answers[action] = lambda _: RebalanceAnswer(done, part)

    def actions(self) -> list[tuple[str, int]]:
        return [(act.action, act.plan) for act in self.acts]

    async def run(self, started: Callable[[], None]) -> None:
        runtime = RuntimeDirectory(self.directory)
        async with trio.open_nursery() as nursery:
            for path, may_change in ((runtime.read_socket, False), (runtime.admin_socket, True)):
                listener = await open_unix_listener(path, 0o600 if may_change else 0o660)
                nursery.start_soon(self._listen, listener, may_change)
            started()

    async def _listen(self, listener, may_change: bool) -> None:
        async with listener, trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._serve, await listener.accept(), may_change)

    async def _serve(self, stream, may_change: bool) -> None:
        link = FrameStream(stream, accepts=HEAD_FROM_OPERATOR, out_limit_bytes=1 << 24, stall_s=5, name="operator")

        def take(frames) -> None:
            for frame in frames:
                reply = self._reply(frame.message, may_change)
                if reply is not None:
                    link.post(reply)

        async with link:
            with contextlib.suppress(EngineError):
                await run_link(link, take)

    def _reply(self, message: Message, may_change: bool) -> Message | None:
        match message:
            case AskStatus():
                return self.status
            case AskTraffic():
                return self.traffic
            case AskExperts():
                return ExpertsReport(self.parts.pop(0) if len(self.parts) > 1 else self.parts[0])
            case Rebalance() if may_change:
                self.acts.append(message)
                answer = self.answers.get(message.action, lambda _: Refused("the script has no answer for it"))
                return answer(message)
            case _:
                return Refused(f"{type(message).__name__} is for admin.sock")


@contextlib.contextmanager
def scripted_head(directory) -> Iterator[ScriptedHead]:
    """Listens in `directory` until the end of the block."""
    head = ScriptedHead(str(directory))
    started = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:
            stop.append(lambda: token.run_sync_soon(scope.cancel))
            await head.run(started.set)

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert started.wait(10)
        yield head
    finally:
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()
