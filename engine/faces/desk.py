"""The operators' sockets, the head's end: `read.sock` answers questions, `admin.sock` also takes changes.

What a caller may do is decided by the file permissions of the socket that he could open (0660 and 0600), and who he is
by the kernel; nothing of that is taken from a message. Answers come at once and in the order of the questions, but for
Rebalance, which may wait for a plan. Nothing is sent unasked but events, to those who watch them.
"""

from __future__ import annotations

import logging
import pwd

import msgspec
import trio

from engine.actors.answers import Acts, Answers
from engine.errors import EngineError
from engine.faces.audit import Act, log_act
from engine.log import log_event
from transport.messages import (
    HEAD_FROM_OPERATOR,
    ActDone,
    AskExperts,
    AskHeat,
    AskLinks,
    AskRequests,
    AskStatus,
    AskTraffic,
    CancelRequests,
    EventsHappened,
    Message,
    Rebalance,
    RebalanceAnswer,
    Refused,
    ResetCache,
    SetDrain,
    Shutdown,
    ShutdownAccepted,
    WatchEvents,
)
from transport.stream import FrameStream, run_link
from transport.unix import peer_credentials
from transport.wire import Frame

logger = logging.getLogger("engine.admin")

OUT_LIMIT_BYTES = 16 << 20
"""A report of 4,096 ranks is about 2 MiB."""
STALL_S = 10.0
OPERATORS = 64
"""Connections to each socket."""
REBALANCES = 4
"""Rebalance acts under way on one connection."""
EVENTS = 256
"""In one EventsHappened. A message with fewer has the newest event of that moment."""
EVENT_QUEUE_BYTES = 256 << 10
"""While a link has more to send, events wait in the ring."""
EVENT_PAUSE_S = 0.05
"""Between two messages of events, so that a burst of them costs few."""
NAME_S = 1.0
"""For the name of a user: directories of users may be on the network."""


async def run_operators(listener: trio.abc.Listener[trio.SocketStream], answers: Answers, acts: Acts | None) -> None:
    """Serves one of the sockets until cancelled.

    Args:
        acts: None on the socket that only reads.
    """
    count = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal count
        count += 1
        try:
            await _serve_operator(stream, answers, acts, is_too_many=count > OPERATORS)
        finally:
            count -= 1

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(serve, await listener.accept())


async def _serve_operator(stream: trio.SocketStream, answers: Answers, acts: Acts | None, *, is_too_many: bool) -> None:
    link = FrameStream(
        stream, accepts=HEAD_FROM_OPERATOR, out_limit_bytes=OUT_LIMIT_BYTES, stall_s=STALL_S, name="operator"
    )

    def turn_away(_: list[Frame]) -> None:
        link.post(Refused(message=f"the head has {OPERATORS} operators' connections (the limit)"))
        link.close()

    async with link, trio.open_nursery() as nursery:
        caller = _Caller(link, peer_credentials(stream).uid, answers, acts, nursery)
        try:
            await run_link(link, turn_away if is_too_many else caller.take)
        except EngineError as error:
            log_event(logger, "debug", "operator.end", msg=str(error))
        nursery.cancel_scope.cancel()


class _Caller:
    """One connection: what is asked there, and what is under way for it."""

    def __init__(self, link: FrameStream, uid: int, answers: Answers, acts: Acts | None, nursery: trio.Nursery) -> None:
        self._link, self._uid, self._answers, self._acts, self._nursery = link, uid, answers, acts, nursery
        self._user: str | None = None
        self._rebalances = 0
        self._is_watching = False

    async def take(self, frames: list[Frame]) -> None:
        for frame in frames:
            message = frame.message
            if isinstance(message, Act):
                await self._act(message)
            elif isinstance(message, WatchEvents):
                self._watch(message)
            else:
                self._answer(message)

    # -- questions

    def _answer(self, message: Message) -> None:
        answers = self._answers
        match message:
            case AskStatus():
                self._link.post(answers.status())
            case AskExperts():
                self._link.post(answers.experts())
            case AskTraffic():
                self._link.post(answers.traffic())
            case AskRequests():
                self._link.post(answers.requests(message))
            case AskLinks():
                self._link.post(*answers.links())
            case AskHeat():
                told = answers.heat(message)
                if isinstance(told, Refused):
                    self._link.post(told)
                else:
                    self._link.post(*told)
            case _:
                raise AssertionError(f"{type(message).__name__} is accepted and not answered")

    # -- events

    def _watch(self, message: WatchEvents) -> None:
        if self._is_watching:
            self._link.post(Refused("this connection watches events already"))
            return
        self._is_watching = True
        self._nursery.start_soon(self._push_events, message.after)

    async def _push_events(self, seq: int) -> None:
        """Sends events as they come; what a slow reader misses in the ring is told as lost. The first message comes at
        once and one after every full one, even if they are empty: so a reader knows when he has all."""
        ring, news = self._answers.events, trio.Event()
        if seq > ring.last_seq:
            seq = 0  # a number of a head before this one

        def wake() -> None:
            news.set()

        unwatch = ring.watch(wake)
        try:
            is_due = True
            while True:
                news = trio.Event()
                lost, events = ring.after(seq, EVENTS)
                if events or is_due:
                    self._link.post(EventsHappened(lost=lost, events=events))
                if events:
                    seq = events[-1].seq
                is_due = len(events) == EVENTS
                if not is_due:
                    await news.wait()
                    await trio.sleep(EVENT_PAUSE_S)
                while self._link.pending_bytes > EVENT_QUEUE_BYTES:  # noqa: ASYNC110 - ends with the link, after STALL_S
                    await trio.sleep(EVENT_PAUSE_S)
        except EngineError as error:
            self._end(error)
        finally:
            unwatch()

    # -- acts

    async def _act(self, message: Act) -> None:
        user = await self._name_user()
        acts = self._acts
        if acts is None:
            kind = type(message).__name__
            self._refuse(user, message, f"{kind} is for admin.sock; this socket only reads")
            return
        match message:
            case Shutdown():
                running = acts.shutdown(message, user)
                self._log(user, message, "done", f"{running} requests have {message.drain_ms / 1e3:g} s")
                self._link.post(ShutdownAccepted(running=running))
            case Rebalance() if self._rebalances >= REBALANCES:
                self._refuse(user, message, f"{REBALANCES} acts are under way on this connection (the limit)")
            case Rebalance():
                self._rebalances += 1
                self._nursery.start_soon(self._rebalance, acts, msgspec.structs.replace(message, user=user))
            case SetDrain():
                self._tell(user, message, acts.drain(message, user))
            case CancelRequests():
                self._tell(user, message, acts.cancel(message, user))
            case ResetCache():
                self._tell(user, message, acts.reset(message, user))

    async def _rebalance(self, acts: Acts, message: Rebalance) -> None:
        answer: RebalanceAnswer | Refused | None = None
        why = "whoever asked is gone"
        try:
            answer = await acts.rebalance(message)
            self._tell(message.user, message, answer)
        except EngineError as error:
            why = str(error)
            self._end(error)
        finally:
            self._rebalances -= 1
            if answer is None:
                self._log(message.user, message, "left", why)

    def _tell(self, user: str, message: Act, answer: ActDone | RebalanceAnswer | Refused) -> None:
        """Logs an act's outcome and answers it."""
        if isinstance(answer, Refused):
            self._log(user, message, "refused", answer.message)
        else:
            self._log(user, message, "done", answer.done)
        self._link.post(answer)

    def _refuse(self, user: str, message: Act, why: str) -> None:
        self._tell(user, message, Refused(why))

    def _log(self, user: str, message: Act, outcome: str, said: str | None) -> None:
        log_act(message, user, self._uid, outcome, said, is_allowed=self._acts is not None)

    def _end(self, error: EngineError) -> None:
        """Ends the connection: it broke, or does not read."""
        log_event(logger, "debug", "operator.end", msg=str(error))
        self._nursery.cancel_scope.cancel()

    async def _name_user(self) -> str:
        """In a thread, and not for long: the loop serves requests meanwhile."""
        if self._user is None:
            with trio.move_on_after(NAME_S):
                self._user = await trio.to_thread.run_sync(_find_user, self._uid, abandon_on_cancel=True)
        return self._user or f"uid {self._uid}"


def _find_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name[:256]
    except KeyError:  # a container's user need not have a name
        return f"uid {uid}"
