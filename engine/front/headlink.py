"""HeadLink: a front's connection to the head's request socket, on asyncio, dialled again whenever it ends.

An ask keeps its prompt and every id generated so far until it ends, so it can be submitted again after a lost rank or a
lost connection: the next attempt goes on where the last one stopped, and whoever reads the stream notices nothing but
the pause. Its owner hears each token once, in order, and exactly one end.

Everything is bounded: the send queue by its bytes, asks by the head's own limit, attempts by `ATTEMPTS`, the time
without a head by `RELINK_S`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging

from engine.errors import EngineError, Overflow, PeerGone, RemoteProtocolError
from engine.front.ask import Ask, Failure
from engine.front.asktable import AskTable
from engine.log import log_event
from transport import messages
from transport.link import FrameLink, open_unix_link
from transport.messages import HeadHello, RequestFailed
from transport.wire import Frame

logger = logging.getLogger("engine.front")

OUT_LIMIT_BYTES = 64 << 20
"""Queued submissions; a prompt of a million ids is 4 MiB."""
STALL_S = 30.0
"""A head that reads nothing for so long is gone."""
HELLO_S = 10.0
"""From the connection to the head's answer."""
FIRST_REDIAL_S, LONGEST_REDIAL_S = 0.05, 2.0
RELINK_S = 5.0
"""Asks wait so long for a connection that was lost; then they fail."""
ATTEMPTS = 3
"""Submissions of one ask. Refusals for want of room are told at once and cost none."""
RETRY_PAUSE_S = 0.1
_ROOM = ("queue_full", "draining")


class OtherModel(EngineError):
    """The head that answers now does not serve what the one before did; a fresh front has to be started."""


class HeadLink:
    """See the module.

    Attributes:
        hello: what the head said of itself; None while there is none.
    """

    def __init__(self, path: str, name: str) -> None:
        self.hello: HeadHello | None = None
        self._path = path
        self._name = name
        self._known: HeadHello | None = None
        self._link: FrameLink | None = None
        self._was_up = False
        self._asks = AskTable()
        self._again: dict[Ask, None] = {}
        """Wait for the next connection."""
        self._pauses: dict[Ask, asyncio.Task[None]] = {}
        """Wait for their next attempt."""
        self._cancels: collections.deque[messages.CancelRequest] = collections.deque()

    @property
    def num_open(self) -> int:
        """Asks that have not ended."""
        return len(self._asks) + len(self._again) + len(self._pauses)

    async def submit(self, ask: Ask) -> None:
        """Submits an ask; waits while the send queue is full. Cancelled means not submitted.

        Raises:
            PeerGone: there is no head.
            Overflow: the prompt alone is larger than a frame may be.
        """
        link = self._link
        if link is None or self.hello is None:
            raise PeerGone("the engine does not answer")
        self._asks.add(ask)
        message = messages.Submit(
            request=ask.request,
            attempt=ask.attempt,
            generated=len(ask.generated),
            sampling=ask.sampling,
            priority=ask.priority,
            label=ask.label,
            affinity=ask.affinity,
            cache_salt=ask.cache_salt,
        )
        try:
            await link.send(message, ask.prompt + ask.generated.tobytes())
        except BaseException:
            self._asks.remove(ask)
            self._again.pop(ask, None)
            raise
        if ask.owner is None:  # cancelled while it waited for room: the word went out before it
            self._cancels.append(messages.CancelRequest(ask.request))
            self._flush_cancels()

    def cancel(self, ask: Ask, *, is_complete: bool = False) -> None:
        """Nobody wants more of it. The head is told, and what still comes of it is dropped. `is_complete`: it has
        come to its end, as at a stop string."""
        ask.owner = None
        self._again.pop(ask, None)
        pause = self._pauses.pop(ask, None)
        if pause is not None:
            pause.cancel()
        if self._asks.holds(ask):
            self._cancels.append(messages.CancelRequest(ask.request, is_complete))
            self._flush_cancels()

    def fail_all(self, failure: Failure) -> None:
        """Ends every ask, because the front is ending."""
        for ask in [*self._asks.unanswered(), *self._again, *self._pauses]:
            owner = ask.owner
            self.cancel(ask)
            ask.owner = owner
            self._asks.fail(ask, failure)
        self._asks.tell_over()

    async def run(self) -> None:
        """Dials, reads, dials again, until cancelled.

        Raises:
            OtherModel: see there.
        """
        pause, lost_at = FIRST_REDIAL_S, asyncio.get_running_loop().time()
        while True:
            try:
                await self._run_once()
            except OtherModel:
                raise
            except EngineError as error:
                if self._was_up:
                    self._was_up = False
                    pause, lost_at = FIRST_REDIAL_S, asyncio.get_running_loop().time()
                    level = "warning" if self._again else "info"
                    log_event(logger, level, "front.unlinked", waiting=len(self._again), msg=str(error))
                else:
                    log_event(logger, "debug", "front.dial", msg=str(error))
            if self._again and asyncio.get_running_loop().time() - lost_at >= RELINK_S:
                self._fail_waiting()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_REDIAL_S)

    # ------------------------------------------------------------ one connection

    async def _run_once(self) -> None:
        link = await open_unix_link(
            self._path,
            accepts=messages.CLIENT_FROM_HEAD,
            out_limit_bytes=OUT_LIMIT_BYTES,
            stall_s=STALL_S,
            name="head",
        )
        try:
            link.post(messages.ClientHello(version=messages.PROTOCOL_VERSION, name=self._name))
            try:
                async with asyncio.timeout(HELLO_S):
                    frames = await link.receive()
            except TimeoutError:
                raise PeerGone(f"the head did not answer within {HELLO_S:g} s") from None
            hello = _check_hello(frames[0])
            known = self._known
            if known is not None and (known.model, known.max_model_tokens) != (hello.model, hello.max_model_tokens):
                raise OtherModel(f"the head serves {hello.model} now, not {known.model}")
            self._link, self.hello, self._known, self._was_up = link, hello, hello, True
            log_event(logger, "info", "front.linked", model=hello.model, cluster=hello.cluster)
            again, self._again = self._again, {}
            for ask in again:
                await self._submit_again(ask)
            self._handle(frames[1:])
            while True:
                self._handle(await link.receive())
        finally:
            self._drop_link()
            with contextlib.suppress(EngineError):
                await link.aclose()

    def _drop_link(self) -> None:
        """The connection is gone: what it had waits for the next one."""
        self._link = self.hello = None
        self._cancels.clear()
        for ask in self._asks.clear():
            if ask.owner is not None:
                self._wait_again(ask)
        self._asks.tell_over()

    def _wait_again(self, ask: Ask) -> None:
        if ask.attempt >= ATTEMPTS:
            self._asks.fail(ask, Failure("engine_lost", f"the engine was lost, {ask.attempt} times", retryable=True))
        else:
            self._again[ask] = None

    def _fail_waiting(self) -> None:
        again, self._again = self._again, {}
        for ask in again:
            self._asks.fail(
                ask, Failure("engine_lost", f"the engine was not back within {RELINK_S:g} s", retryable=True)
            )
        self._asks.tell_over()

    async def _submit_again(self, ask: Ask) -> None:
        if ask.owner is None:
            return
        try:
            await self.submit(ask)
        except Overflow as error:
            self._asks.fail(ask, Failure("bad_request", str(error)))
        except PeerGone:
            if ask.owner is not None:
                self._wait_again(ask)

    async def _retry(self, ask: Ask) -> None:
        await asyncio.sleep(RETRY_PAUSE_S * 2 ** (ask.attempt - 1))
        self._pauses.pop(ask, None)
        await self._submit_again(ask)
        self._asks.tell_over()

    def _flush_cancels(self) -> None:
        """What finds no room goes with the next frames that come."""
        link = self._link
        while self._cancels and link is not None:
            try:
                link.post(self._cancels[0])
            except (Overflow, PeerGone):
                return
            self._cancels.popleft()

    # ------------------------------------------------------------ what the head says

    def _handle(self, frames: list[Frame]) -> None:
        self._flush_cancels()
        try:
            for frame in frames:
                failed = self._asks.take(frame)
                if failed is not None:
                    self._take_failure(*failed)
        finally:
            self._asks.tell_over()

    def _take_failure(self, ask: Ask, fact: RequestFailed) -> None:
        if ask.owner is None:
            return
        if fact.retryable and fact.code not in _ROOM and ask.attempt < ATTEMPTS:
            log_event(logger, "info", "request.again", label=ask.label, attempt=ask.attempt, code=fact.code)
            self._pauses[ask] = asyncio.get_running_loop().create_task(self._retry(ask))
            return
        self._asks.fail(ask, Failure(fact.code, fact.message, retryable=fact.retryable))


def _check_hello(frame: Frame) -> HeadHello:
    message = frame.message
    if isinstance(message, messages.Refused):
        raise PeerGone(f"the head refused this front: {message.message}")
    if not isinstance(message, HeadHello):
        raise RemoteProtocolError(f"the head's first word was {type(message).__name__}")
    if message.version != messages.PROTOCOL_VERSION:
        raise RemoteProtocolError(f"the head speaks protocol {message.version}, not {messages.PROTOCOL_VERSION}")
    return message
