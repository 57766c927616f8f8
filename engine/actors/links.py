"""Links: the pair streams that are up, by number, and what runs over each.

A link's number is unique in its process; a new stream to the same rank is a new link, so nothing meant for one process
life can reach another. Written by `pair` only; the step actor posts through it, the push actor asks it for targets.
"""

from __future__ import annotations

import dataclasses
import logging

import trio

from engine.errors import EngineError
from engine.log import log_event
from transport.fabric import Target
from transport.messages import Message
from transport.stream import FrameStream

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Link:
    """A greeted pair stream, and the life at its other end. `target` is a prefill rank's: a decode rank has the targets
    of its turns in `pair.Callers`. `remote_pages`: where slabs begin in the peer's block table; `pushes` counts running
    transfers."""

    frames: FrameStream
    scope: trio.CancelScope
    target: Target | None = None
    remote_pages: int = 0
    rank: int = -1
    generation: int = 0
    pushes: int = 0
    quiet: trio.lowlevel.ParkingLot = dataclasses.field(default_factory=trio.lowlevel.ParkingLot)

    def count_push(self, change: int) -> None:
        self.pushes += change
        if self.pushes == 0:
            self.quiet.unpark_all()

    async def wait_quiet(self) -> None:
        """Until no transfer runs over it. Unbounded on purpose: only the peer's death may cut this short."""
        while self.pushes:
            await self.quiet.park()


class Links:
    """Number to link, of links that are up."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}
        self._next = 1

    def add(self, link: Link) -> int:
        number = self._next
        self._next += 1
        self._links[number] = link
        return number

    def remove(self, number: int) -> None:
        del self._links[number]

    def find(self, number: int) -> Link | None:
        return self._links.get(number)

    def list_ranks(self) -> list[int]:
        """Decode ranks with a link, on a prefill rank."""
        return [link.rank for link in self._links.values()]

    def post(self, number: int, message: Message, blob: bytes) -> None:
        """Queues a frame. On a link that is gone, or does not take it, the loss is told by LinkLost."""
        link = self._links.get(number)
        if link is None:
            return
        try:
            link.frames.post(message, blob)
        except EngineError as error:
            self.drop(number, str(error))

    def drop(self, number: int, why: str) -> None:
        link = self._links.get(number)
        if link is not None:
            log_event(logger, "warning", "link.drop", peer=link.frames.name, msg=why)
            link.scope.cancel()
