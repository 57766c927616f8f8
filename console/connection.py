"""The link to the head: asks, takes answers and events, dials again. No drawing.

One round asks all that the visible screen needs in one write. The next one begins when all answers came, when `gate`
says that they are drawn and that the terminal has taken what was drawn, and when the period is over. So a slow terminal
makes rounds rarer, and what it shows is never older than two of them: answers grow old in no queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from console.dial import Dialled, Target, dial
from console.view import ClusterView, LinkState, Phase, mismatch_of
from transport.errors import EngineError, PeerGone, RemoteProtocolError
from transport.link import FrameLink
from transport.messages import (
    PROTOCOL_VERSION,
    AskExperts,
    AskHeat,
    AskLinks,
    AskRequests,
    AskStatus,
    AskTraffic,
    EventsHappened,
    ExpertsReport,
    HeatReport,
    LinksReport,
    Message,
    Refused,
    RequestsReport,
    StatusReport,
    TrafficReport,
    WatchEvents,
)
from transport.wire import Frame

BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
"""Pauses before the link is dialled again; the last one for ever."""
SILENT_S = 20.0
"""Answers that are due for longer: the link is given up."""
ACT_S = 60.0
"""For the answer to a change: a plan is made within seconds."""

REPORTS: dict[type[Message], type[Message]] = {
    AskStatus: StatusReport,
    AskExperts: ExpertsReport,
    AskTraffic: TrafficReport,
    AskRequests: RequestsReport,
    AskHeat: HeatReport,
    AskLinks: LinksReport,
}
"""Which report answers which question. AskHeat may be Refused instead: the part is gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    """What the link asks of the app.

    Attributes:
        questions: of the visible screen, beyond the three that are always asked.
        draw: all answers of a round are there; returns when they were drawn.
        changed: the link has another state, which is to be seen at once.
        noted: events came, which are to be seen soon: there may be thousands in a second.
        drained: returns when the terminal has taken everything that was drawn.
        period: seconds from one round to the next.
        pause: how long to wait before the link is dialled again, given how long it should be.
        now: the view's clock.
        wall_ms: milliseconds since 1970.
    """

    questions: Callable[[], Sequence[Message]]
    draw: Callable[[], Awaitable[None]]
    changed: Callable[[], None]
    noted: Callable[[], None]
    drained: Callable[[], Awaitable[None]]
    period: Callable[[], float]
    pause: Callable[[float], float]
    now: Callable[[], float]
    wall_ms: Callable[[], int]


class _Mismatch(EngineError):
    """The head speaks another protocol version, the argument; 0 if it could not even say so."""

    def __init__(self, version: int, why: str) -> None:
        super().__init__(why)
        self.version = version


class Connection:
    """The link, from its first dialling until `run` is cancelled. `rounds` counts full sets of answers."""

    def __init__(self, target: Target, view: ClusterView, gate: Gate) -> None:
        self.target = target
        self.rounds = 0
        self._view = view
        self._gate = gate
        self._due: list[type[Message]] = []
        self._answered = asyncio.Event()
        self._hurry = asyncio.Event()
        view.link = LinkState(address=target.address, since=gate.now(), directory=target.directory)

    def hurry(self) -> None:
        """Ends a pause: dial now, or ask now if the last answers are drawn (another screen wants other answers)."""
        self._hurry.set()

    async def run(self) -> None:
        """Dials, asks, and dials again; never ends by itself."""
        failures = 0
        while True:
            rounds = self.rounds
            error = await self._live()
            if self.rounds > rounds:
                failures = 0
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            self._say_broken(error, pause)
            await self._pause(self._gate.pause(pause))

    async def act(self, message: Message) -> Message:
        """Sends one change on a link of its own, so that a plan that takes a second does not hold up the screen.

        Raises:
            EngineError: the head was not reached, or did not answer in time; what became of the change is not known.
        """
        async with asyncio.timeout(ACT_S):
            dialled = await dial(self.target)
            try:
                dialled.link.post(message)
                frames = await dialled.link.receive()
            finally:
                await dialled.aclose()
        return frames[0].message

    # ------------------------------------------------------------------ one link

    async def _live(self) -> EngineError:
        """One link from its dialling to its end; returns what ended it."""
        dialled: Dialled | None = None
        tasks: list[asyncio.Task[None]] = []
        try:
            dialled = await dial(self.target)
            await self._greet(dialled)
            tasks = [
                asyncio.create_task(self._receive(dialled.link), name="answers"),
                asyncio.create_task(self._ask(dialled.link), name="questions"),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            raise AssertionError("both tasks of a link end with an error only")
        except EngineError as error:
            if dialled is None or not isinstance(error, PeerGone):
                return error
            return PeerGone(await dialled.explain(str(error)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if dialled is not None:
                await dialled.aclose()

    async def _greet(self, dialled: Dialled) -> None:
        """Asks who is there before anything else is asked: an older head might not know the other questions."""
        view, now = self._view, self._gate.now
        dialled.link.post(AskStatus())
        try:
            async with asyncio.timeout(SILENT_S):
                frames = await dialled.link.receive()
        except TimeoutError:
            raise PeerGone(f"no answer within {SILENT_S:g} s") from None
        except RemoteProtocolError as error:
            raise _Mismatch(0, f"what answers does not speak protocol {PROTOCOL_VERSION}: {error}") from None
        report = frames[0].message
        if isinstance(report, Refused):
            raise PeerGone(report.message)
        if not isinstance(report, StatusReport):
            raise _Mismatch(0, f"what answers does not speak protocol {PROTOCOL_VERSION}")
        theirs = mismatch_of(report)
        if theirs:
            raise _Mismatch(
                theirs,
                f"the engine speaks protocol {theirs}, this console {PROTOCOL_VERSION}: "
                f"use the console of the engine's release",
            )
        heads = view.heads
        view.take(report, b"", now())
        if heads and view.heads > heads:
            view.note("head_restarted", f"another head answers: pid {report.head_pid}", self._gate.wall_ms(), "warning")
        is_admin = await dialled.is_admin()
        view.link = LinkState(
            phase="live",
            since=now(),
            address=self.target.address,
            is_admin=is_admin,
            directory=self.target.directory,
        )
        dialled.link.post(WatchEvents(after=view.last_seq))

    async def _ask(self, link: FrameLink) -> None:
        gate, view = self._gate, self._view
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            questions = [AskStatus(), AskExperts(), AskTraffic(), *gate.questions()]
            self._due = [REPORTS[type(question)] for question in questions]
            self._answered.clear()
            view.begin_round(gate.now())
            # The link's transport writes at the first post and keeps the rest: one write, but for a full socket.
            for question in questions:
                link.post(question)
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._answered.wait()
            except TimeoutError:
                missing = ", ".join(report.__name__ for report in self._due)
                raise PeerGone(f"no answer within {SILENT_S:g} s ({missing})") from None
            self.rounds += 1
            view.end_round(gate.now())
            self._hurry.clear()
            await gate.draw()
            await gate.drained()
            await self._pause(gate.period() - (loop.time() - began))

    async def _receive(self, link: FrameLink) -> None:
        while True:
            for frame in await link.receive():
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        message = frame.message
        view = self._view
        if isinstance(message, EventsHappened):
            view.take(message, b"", self._gate.now())
            self._gate.noted()
            return
        kind = HeatReport if isinstance(message, Refused) else type(message)
        if kind not in self._due:
            said = f": {message.message}" if isinstance(message, Refused) else ""
            raise RemoteProtocolError(f"{type(message).__name__} answers no question{said}")
        self._due.remove(kind)
        if not isinstance(message, Refused):
            view.take(message, frame.blob, self._gate.now())
        if not self._due:
            self._answered.set()

    # ------------------------------------------------------------------ between two links

    def _say_broken(self, error: EngineError, pause: float) -> None:
        view, now = self._view, self._gate.now()
        view.asked_at = 0.0
        before = view.link
        phase: Phase = "lost" if view.answered_at else "never"
        if isinstance(error, _Mismatch):
            phase = "mismatch"
        view.link = dataclasses.replace(
            before,
            phase=phase,
            why=str(error),
            since=before.since if before.phase == phase else now,
            retry_at=now + pause,
            their_version=error.version if isinstance(error, _Mismatch) else 0,
        )
        self._gate.changed()

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        self._hurry.clear()
