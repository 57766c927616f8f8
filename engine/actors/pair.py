"""Pair streams: one control stream between each prefill and each decode rank; who dials, greets, accepts and buries.

The prefill rank dials when the head says PeerUp, and again while the head does not say PeerDown. The decode rank
accepts whoever has the same layout and is not known to be dead.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable

import trio

from engine.actors.intake import Inbox, LinkLost, LinkUp, PeerFrame, Unreachable
from engine.actors.links import Link, Links
from engine.errors import EngineError, FabricError, PeerGone, RemoteProtocolError
from engine.log import log_event
from engine.ports import DeviceInfo
from transport.fabric import Fabric, Target
from transport.messages import (
    DECODE_FROM_PREFILL,
    PREFILL_FROM_DECODE,
    PROTOCOL_VERSION,
    Message,
    PeerDown,
    PeerHello,
    PeerUp,
    PeerWelcome,
    Refused,
)
from transport.stream import FrameStream, run_link
from transport.wire import Frame

logger = logging.getLogger(__name__)

DIAL_TRIES = 8
"""Failures in a row after which a decode rank counts as unreachable, until the head says PeerUp again."""
DIAL_PAUSE_S = 0.05
DIAL_PAUSE_MAX_S = 1.0
FORGET_S = 1.0
SEVER_S = 10.0
"""Bounds of the fabric's own clean-up after a peer."""
CONNECT_S = 10.0
"""For a prefill rank's fabric to answer."""


class Callers:
    """The processes at the other ends of pair streams that may write here, and which of them are dead: those that
    greeted a decode rank, and those that a prefill rank takes turns back from. A decode rank has the targets of its
    turns here: they outlive links, so that a write which runs never keeps a new link waiting."""

    def __init__(self) -> None:
        self.fabric: Fabric | None = None
        self._life_to_description: dict[tuple[int, int], bytes] = {}
        self._life_to_target: dict[tuple[int, int], Target] = {}
        self._rank_to_dead: dict[int, int] = {}
        self._turn = trio.Lock()

    def admit(self, rank: int, generation: int, description: bytes) -> bool:
        """False for a process that is dead: its greeting was still under way."""
        if generation <= self._rank_to_dead.get(rank, 0):
            return False
        self._life_to_description[(rank, generation)] = description
        return True

    async def connect(self, rank: int, generation: int) -> Target:
        """The target of a process that has greeted, connected when it is first asked for.

        Raises:
            FabricError: it is dead, or does not answer.
        """
        life = (rank, generation)
        async with self._turn:
            target = self._life_to_target.get(life)
            if target is not None:
                return target
            description = self._life_to_description.get(life)
            if description is None or self.fabric is None:
                raise FabricError(f"life {generation} of rank {rank} is over")
            try:
                with trio.fail_after(CONNECT_S):
                    target = await self.fabric.connect(description)
            except trio.TooSlowError:
                raise FabricError(f"rank {rank} is not connected within {CONNECT_S:g} s") from None
            if life not in self._life_to_description:
                await self.fabric.forget(target)
                raise FabricError(f"life {generation} of rank {rank} is over")
            self._life_to_target[life] = target
            return target

    async def bury(self, down: PeerUp | PeerDown) -> None:
        """Makes sure that nothing of a dead process lands in this rank's memory any more, and ends the waiting for what
        was sent to it.

        Raises:
            FabricError: that can not be made sure, so nothing may be used again here: the end of this rank.
        """
        self._rank_to_dead[down.rank] = max(down.generation, self._rank_to_dead.get(down.rank, 0))
        for life in [life for life in self._life_to_description if life[0] == down.rank and life[1] <= down.generation]:
            description, target = self._life_to_description.pop(life), self._life_to_target.pop(life, None)
            if self.fabric is not None:
                try:
                    with trio.fail_after(SEVER_S):
                        await self.fabric.sever(description)
                        if target is not None:
                            await self.fabric.forget(target)
                except trio.TooSlowError:
                    raise FabricError(f"rank {down.rank} not severed within {SEVER_S:g} s") from None


@dataclasses.dataclass(frozen=True, slots=True)
class PairSettings:
    """Who we are to our peers, and the limits of a pair stream. `takes_turns`: decode ranks push them to us, if we are
    a prefill rank."""

    rank: int
    generation: int
    info: DeviceInfo
    out_limit_bytes: int
    stall_s: float
    takes_turns: bool = False


async def serve_pairs(
    listener: trio.abc.Listener[trio.abc.Stream],
    fabric: Fabric,
    callers: Callers,
    settings: PairSettings,
    inbox: Inbox,
    links: Links,
) -> None:
    """Decode rank: accepts prefill ranks, for ever."""

    async def serve(stream: trio.abc.Stream) -> None:
        info = settings.info
        async with _frame(stream, DECODE_FROM_PREFILL, settings, "a prefill rank") as frames:

            async def accept(frame: Frame, scope: trio.CancelScope) -> Link:
                hello = frame.message
                if not isinstance(hello, PeerHello):
                    raise RemoteProtocolError(f"greeted with {type(hello).__name__}")
                frames.name = f"prefill rank {hello.rank}"
                why = _mismatch(hello.version, hello.layout_digest, info.layout_digest)
                if why is None and not callers.admit(hello.rank, hello.generation, bytes(frame.blob)):
                    why = f"life {hello.generation} of rank {hello.rank} is over"
                if why is not None:
                    frames.post(Refused(why))
                    raise RemoteProtocolError(why)
                welcome = PeerWelcome(
                    version=PROTOCOL_VERSION,
                    rank=settings.rank,
                    generation=settings.generation,
                    layout_digest=info.layout_digest,
                    num_pages=info.num_pages,
                    num_slabs=info.num_slabs,
                )
                frames.post(welcome, fabric.describe())
                return Link(frames, scope, None, hello.num_pages, hello.rank, hello.generation)

            try:
                await _talk(frames, accept, settings, inbox, links)
            except EngineError as error:
                log_event(logger, "info", "link.end", msg=str(error))

    await trio.serve_listeners(serve, [listener])


async def run_dialler(
    orders: trio.MemoryReceiveChannel[PeerUp | PeerDown],
    dial: Callable[[str], Awaitable[trio.abc.Stream]],
    fabric: Fabric,
    callers: Callers,
    settings: PairSettings,
    inbox: Inbox,
    links: Links,
) -> None:
    """Prefill rank: keeps a pair stream to every decode rank that the head calls up, until it calls it down."""
    rank_to_scope: dict[int, tuple[int, trio.CancelScope]] = {}

    async def keep(up: PeerUp, scope: trio.CancelScope) -> None:
        with scope:
            failures, why = 0, ""
            while failures < DIAL_TRIES:
                welcomed, why = await _dial_once(up, dial, fabric, callers, settings, inbox, links)
                failures = 0 if welcomed else failures + 1
                await trio.sleep(min(DIAL_PAUSE_S * 2**failures, DIAL_PAUSE_MAX_S))
            log_event(logger, "warning", "link.unreachable", rank=up.rank, address=up.address, tries=failures, msg=why)
            inbox.put(Unreachable(up.rank, why))

    async with trio.open_nursery() as nursery:
        async for order in orders:
            known = rank_to_scope.get(order.rank)
            if known is not None and known[0] <= order.generation:
                known[1].cancel()
                del rank_to_scope[order.rank]
            if isinstance(order, PeerUp):
                scope = trio.CancelScope()
                rank_to_scope[order.rank] = (order.generation, scope)
                nursery.start_soon(keep, order, scope)


async def _dial_once(
    up: PeerUp,
    dial: Callable[[str], Awaitable[trio.abc.Stream]],
    fabric: Fabric,
    callers: Callers,
    settings: PairSettings,
    inbox: Inbox,
    links: Links,
) -> tuple[bool, str]:
    """One life of a pair stream, from dialling until its target is forgotten. Says whether it was welcomed, and why it
    ended."""
    greeted: Link | None = None
    why = ""

    async def accept(frame: Frame, scope: trio.CancelScope) -> Link:
        nonlocal greeted
        welcome = frame.message
        if isinstance(welcome, Refused):
            raise RemoteProtocolError(f"decode rank {up.rank} refused: {welcome.message}")
        if not isinstance(welcome, PeerWelcome):
            raise RemoteProtocolError(f"decode rank {up.rank} greeted with {type(welcome).__name__}")
        why = _mismatch(welcome.version, welcome.layout_digest, settings.info.layout_digest)
        if why is not None or (welcome.rank, welcome.generation) != (up.rank, up.generation):
            answers = f"rank {welcome.rank}, life {welcome.generation} answers at {up.address}"
            raise RemoteProtocolError(why or answers)
        if settings.takes_turns and not callers.admit(welcome.rank, welcome.generation, bytes(frame.blob)):
            raise RemoteProtocolError(f"life {welcome.generation} of rank {welcome.rank} is over")
        target = await fabric.connect(bytes(frame.blob))
        greeted = Link(frames, scope, target, welcome.num_pages, up.rank, up.generation)
        return greeted

    try:
        try:
            with trio.fail_after(settings.stall_s):
                stream = await dial(up.address)
            async with _frame(stream, PREFILL_FROM_DECODE, settings, f"decode rank {up.rank}") as frames:
                info = settings.info
                table = (info.num_pages, info.num_slabs) if settings.takes_turns else (0, 0)
                hello = PeerHello(PROTOCOL_VERSION, settings.rank, settings.generation, info.layout_digest, *table)
                frames.post(hello, fabric.describe())
                await _talk(frames, accept, settings, inbox, links)
        except (OSError, trio.TooSlowError, EngineError) as error:
            why = str(error) or f"no answer within {settings.stall_s:g} s"
            log_event(logger, "info", "link.end", rank=up.rank, address=up.address, msg=why)
        if greeted is not None:
            # Forgetting a target does not stop its transfers, but would make them look ended: a live decode rank could
            # be told so and reuse memory that is still written. So only their end, or its death, goes on from here.
            with trio.move_on_after(settings.stall_s) as patience:
                await greeted.wait_quiet()
            if patience.cancelled_caught:
                inbox.put(Unreachable(up.rank, f"its link ended ({why}) while writes to it were in flight"))
                await greeted.wait_quiet()
    finally:
        if greeted is not None and greeted.target is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FORGET_S):
                await fabric.forget(greeted.target)
    return greeted is not None, why


async def _talk(
    frames: FrameStream,
    accept: Callable[[Frame, trio.CancelScope], Awaitable[Link]],
    settings: PairSettings,
    inbox: Inbox,
    links: Links,
) -> None:
    """Greets within `stall_s`, then passes frames on until the stream ends (an EngineError) or the link is dropped."""
    number = 0
    with trio.CancelScope(deadline=trio.current_time() + settings.stall_s) as scope:

        async def take(batch: list[Frame]) -> None:
            nonlocal number
            for frame in batch:
                if number:
                    await inbox.put_frame(PeerFrame(number, frame.message, frame.blob))
                else:
                    link = await accept(frame, scope)
                    scope.deadline = math.inf
                    number = links.add(link)
                    inbox.put(LinkUp(number, frame.message))

        try:
            await run_link(frames, take)
        finally:
            if number:
                links.remove(number)
                inbox.put(LinkLost(number))
    if scope.cancelled_caught:
        raise PeerGone(f"{frames.name}: dropped" if number else f"{frames.name}: no greeting in {settings.stall_s} s")


def _frame(
    stream: trio.abc.Stream, accepts: frozenset[type[Message]], settings: PairSettings, name: str
) -> FrameStream:
    return FrameStream(
        stream, accepts=accepts, out_limit_bytes=settings.out_limit_bytes, stall_s=settings.stall_s, name=name
    )


def _mismatch(version: int, layout: str, own_layout: str) -> str | None:
    if version != PROTOCOL_VERSION:
        return f"protocol version {version}, not {PROTOCOL_VERSION}"
    if layout != own_layout:
        return f"KV layout {layout}, not {own_layout}: model, page size or format differ"
    return None
