"""AgentThread: the one thread that owns a NIXL agent, and the way to talk to it from a trio loop.

Why a thread: an agent may be used by one thread only (two crash it), has no completion event of any kind, and copies
inside its posting call; polled from the trio loop it would either block the loop or be polled too rarely. Why not
NIXL's own progress thread: it spins a core for ever.

The thread does what it is told in order, polls what is in flight, and between that rests until it is told something:
for a moment only while transfers run or ran just now. Naps are a share of what a transfer has taken so far, up to some
50 us: the end of a short one is seen in a few microseconds, that of a long one costs little to look for, and what needs
several polls to end has them soon after another. A target has to be polled as well, for UCX to wire up and to answer
what is not a plain copy: so who has a transfer that does not end rings the peer's door (see `nixl_door`), and only in
case that does not reach us, an agent that receives is polled now and then. The longer transfers stay in flight without
an event, the slower they are polled: a peer that hangs must not cost a core.
"""

from __future__ import annotations

import collections
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import trio

from transport.errors import FabricError
from transport.nixl_door import Door
from transport.nixl_naps import choose_nap, sharpen_timers
from transport.timed_queue import TimedQueue

AWAKE_S = 2e-3
"""How long after the last event the thread keeps napping instead of resting."""
AWAKE_NAP_S = 1e-4
"""Its naps then, if nothing is in flight."""
REST_MS = 1
RECEIVE_MS = 25
"""Rest of an idle agent that receives. Each poll takes the interpreter from a thread that computes: polling every
millisecond cost a CPU rank 8 to 10 % of its step."""
RING_S = 1e-3
"""Between two rings at the doors of peers that transfers wait for."""
CALL_LIMIT_S = 30.0
"""A command waits behind whatever the thread does: at worst a posting call that copies gigabytes."""
JOIN_LIMIT_S = 30.0

_T = TypeVar("_T")


class Work(Protocol):
    """A transfer as the owner thread sees it. All but `settle` run in the owner thread, `settle` in trio."""

    @property
    def door(self) -> str:
        """Of the peer."""
        ...

    def prepare(self, agent: Any) -> None:
        """What of `start` can be done before the bytes are there."""
        ...

    def start(self, agent: Any) -> bool:
        """Posts it; True if it is already over. An error of the library makes it failed."""
        ...

    def poll(self, agent: Any) -> bool:
        """True if it is over."""
        ...

    def release(self) -> None:
        """It is over, and whoever waits has been told: what the library holds of it may go."""
        ...

    def drop(self, why: str) -> None:
        """The agent is going away; it is over, and released."""
        ...

    def settle(self) -> None:
        """It is over: wake who waits."""
        ...


class _Call(Generic[_T]):
    """A function to run in the owner thread, and what became of it."""

    def __init__(self, fn: Callable[[Any], _T]) -> None:
        self.fn = fn
        self.done = trio.Event()
        self.result: _T
        self.error: Exception | None = None


class AgentThread:
    """Owns one agent.

    Args:
        name: for the thread's name and for messages.
        make_agent: makes the agent; runs in the thread.
        errors: exception classes that the agent's calls raise.
        receives: whether peers may write to us, so that an idle agent is polled all the same.
    """

    def __init__(
        self, name: str, make_agent: Callable[[], Any], errors: tuple[type[Exception], ...], *, receives: bool
    ) -> None:
        self.name = name
        self._make_agent = make_agent
        self._errors = errors
        self._receives = receives
        self._todo: TimedQueue[_Call[Any] | Work] = TimedQueue()
        self._now: _Call[Any] | Work | None = None
        self._prepared: dict[Work, None] = {}
        """Not begun yet. Of the thread."""
        self._live: list[Work] = []
        self._ended_works: list[Work] = []
        """Not released yet."""
        self._over: collections.deque[Work | _Call[Any]] = collections.deque()
        self._stopping = False
        self._ended = False
        self._why = "the owner thread failed; its traceback is on stderr"
        self._bell = -1
        self._rests = False
        """The thread hears the bell and nothing else, or is about to look whether it was told something before that."""
        self._door: Door | None = None
        self._alerted = False
        self._rung = 0.0
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)

    # ------------------------------------------------------------ called from the trio loop

    async def start(self) -> None:
        """Starts the thread and waits until the agent is made.

        Raises:
            FabricError: the agent could not be made.
        """
        self._token = trio.lowlevel.current_trio_token()
        try:
            self._door = Door(self.name)
        except OSError as error:
            raise FabricError(f"{self.name}: no socket for peers to ring: {error}") from error
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Told before the thread runs: an agent that can not be made refuses it with the reason.
        started = _Call(lambda agent: None)
        self._tell(started)
        self._thread.start()
        await self._answer(started, "start the agent")

    async def call(self, fn: Callable[[Any], _T], what: str) -> _T:
        """Runs `fn(agent)` in the thread. Cancelled, it still runs, and its result is dropped.

        Raises:
            FabricError: `fn` raised an error of the library, or the thread has ended or is stuck.
        """
        call = _Call(fn)
        self._tell(call)
        return await self._answer(call, what)

    async def _answer(self, call: _Call[_T], what: str) -> _T:
        with trio.move_on_after(CALL_LIMIT_S):
            await call.done.wait()
        if not call.done.is_set():
            raise FabricError(f"{self.name}: {what}: the owner thread did not answer in {CALL_LIMIT_S} s")
        if call.error is not None:
            raise FabricError(f"{self.name}: {what}: {describe_error(call.error)}") from call.error
        return call.result

    def prepare(self, work: Work) -> None:
        """Prepares a transfer for `begin` or `discard`; returns at once. An error comes again when it begins."""

        def prepare(agent: Any) -> None:
            self._prepared[work] = None
            work.prepare(agent)

        self._tell(_Call(prepare))

    def discard(self, work: Work) -> None:
        """A prepared transfer will not begin; returns at once."""

        def discard(agent: Any) -> None:
            del self._prepared[work]
            work.release()

        self._tell(_Call(discard))

    def begin(self, work: Work) -> None:
        """Hands a transfer to the thread; returns at once."""
        self._tell(work)

    def alert(self) -> None:
        """Something will be told soon: until then the thread naps, `AWAKE_S` at most, where it would rest.

        A thread whose core has slept takes three times as long to wake, and it can do that while the loop is still
        finding out what to tell it.
        """
        self._alerted = True
        if self._rests and self._bell >= 0:
            self._ring()

    async def stop(self) -> None:
        """Ends the thread; whatever is in flight is dropped with the agent. Takes effect even if cancelled.

        Raises:
            FabricError: the thread is stuck inside the library.
        """
        if self._bell < 0:
            return
        self._stopping = True
        self._ring()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join, JOIN_LIMIT_S)
        if self._thread.is_alive():
            raise FabricError(f"{self.name}: the owner thread did not end in {JOIN_LIMIT_S} s")
        self._settle_all()
        os.close(self._bell)
        self._bell = -1

    def _tell(self, item: _Call[Any] | Work) -> None:
        if self._stopping or self._bell < 0:
            raise FabricError(f"{self.name}: the fabric is closed")
        if self._ended:
            raise FabricError(f"{self.name}: {self._why}")
        self._todo.put(item)
        if self._rests:  # else its nap ends with what is put there
            self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _settle_all(self) -> None:
        if self._ended:
            self._refuse_rest()  # what was told in the very moment of the end
        while self._over:
            item = self._over.popleft()
            if isinstance(item, _Call):
                item.done.set()
            else:
                item.settle()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        agent = None
        try:
            agent = self._make_agent()
            self._loop(agent)
            self._why = "the fabric was closed"
        except self._errors as error:
            self._why = describe_error(error)
        finally:
            self._ended = True
            if self._door is not None:
                self._door.close()
            if self._now is not None:
                self._refuse(self._now)
            for work in self._live:
                self._refuse(work)
            self._live.clear()
            self._release_ended()
            for work in self._prepared:
                work.release()
            self._refuse_rest()
            # Dropping the agent is the only way to stop a transfer; it must happen in this thread.
            del agent
            self._hand_over()

    def _refuse_rest(self) -> None:
        while True:
            try:
                self._refuse(self._todo.get_nowait())
            except queue.Empty:
                return

    def _refuse(self, item: _Call[Any] | Work) -> None:
        if isinstance(item, _Call):
            item.error = FabricError(self._why)
        else:
            item.drop(self._why)
        self._over.append(item)

    def _loop(self, agent: Any) -> None:
        assert self._door is not None
        sharpen_timers()
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.register(self._door, select.POLLIN)
        last_event = time.monotonic()
        while not self._stopping:
            happened = self._do_told(agent)
            happened |= self._poll_live(agent)
            if happened:
                # Before anything else is done: somebody waits for it.
                self._hand_over()
                self._release_ended()
            if self._live or self._receives:
                # Nobody sends us notifications; asking for them is what moves UCX for those who write to us.
                happened |= bool(agent.get_new_notifs())
            now = time.monotonic()
            if happened or self._alerted:
                # An alert that comes right here is lost, and costs the time that it would have saved.
                self._alerted = False
                last_event = now
            quiet = now - last_event
            if self._live and now - self._rung > RING_S:
                self._rung = now
                for door in dict.fromkeys(work.door for work in self._live):
                    self._door.ring(door)
            if self._live or quiet < AWAKE_S:
                nap = choose_nap(quiet) if self._live else AWAKE_NAP_S
                if nap < REST_MS / 1e3:
                    self._take(nap)
                    continue
            self._rests = True
            found = poller.poll(self._rest_ms()) if self._todo.empty() else ()
            self._rests = False
            for ready, _ in found:
                if ready == self._bell:
                    os.eventfd_read(self._bell)
                elif self._door.answer():
                    last_event = time.monotonic()

    def _rest_ms(self) -> int | None:
        if self._live:
            return REST_MS
        return RECEIVE_MS if self._receives else None

    def _do_told(self, agent: Any) -> bool:
        happened = False
        expected: tuple[type[Exception], ...] = (*self._errors, FabricError)
        while self._now is not None or self._take(0):
            item = self._now
            assert item is not None
            happened = True
            if isinstance(item, _Call):
                # It may give up what a transfer that is over still holds.
                self._hand_over()
                self._release_ended()
                try:
                    item.result = item.fn(agent)
                except expected as error:
                    item.error = error
                self._over.append(item)
            else:
                self._prepared.pop(item, None)
                if item.start(agent):
                    self._end(item)
                else:
                    self._live.append(item)
            self._now = None
        return happened

    def _take(self, wait_s: float) -> bool:
        """Takes what comes next into `_now`; whether there was something within that time."""
        try:
            self._now = self._todo.get(timeout=wait_s) if wait_s else self._todo.get_nowait()
        except queue.Empty:
            return False
        return True

    def _poll_live(self, agent: Any) -> bool:
        if not self._live:
            return False
        running = []
        for work in self._live:
            if work.poll(agent):
                self._end(work)
            else:
                running.append(work)
        happened = len(running) < len(self._live)
        self._live = running
        return happened

    def _end(self, work: Work) -> None:
        self._over.append(work)
        self._ended_works.append(work)

    def _release_ended(self) -> None:
        for work in self._ended_works:
            work.release()
        self._ended_works.clear()

    def _hand_over(self) -> None:
        if not self._over or self._token is None:
            return
        try:
            self._token.run_sync_soon(self._settle_all, idempotent=True)
        except trio.RunFinishedError:
            pass  # nobody is left to be told


def describe_error(error: Exception) -> str:
    """The class name matters: the library's messages alone are often empty."""
    return f"{type(error).__name__}: {error}" if not isinstance(error, FabricError) else str(error)
