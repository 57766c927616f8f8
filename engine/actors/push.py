"""Pushing: starts the pushes of a rank and waits for them; the sole owner of transfers in flight.

A transfer is never given up, only the waiting for it is: one that is overdue is reported as failed, and waited for on,
because until it ends it reads this rank's pages and writes the peer's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from engine.actors.intake import Inbox, PushDone, PushFailed
from engine.actors.links import Link, Links
from engine.core.effects import StartPush
from engine.core.pushes import PushMeter
from engine.errors import FabricError
from engine.ports import Device
from transport.fabric import Fabric, Target, Transfer


class Pushing:
    """See the module. What is asked is done in the loop's turn: a task of its own would have to wake first."""

    def __init__(
        self,
        fabric: Fabric,
        links: Links,
        inbox: Inbox,
        meter: PushMeter,
        nursery: trio.Nursery,
        *,
        num_pages: int,
        transfer_s: float,
        reader: Device | None = None,
        connect: Callable[[int, int], Awaitable[Target]] | None = None,
    ) -> None:
        """All are borrowed.

        Args:
            meter: counts pushes by peer.
            nursery: for a task that waits for each. They are few (one per chunk, or per turn) and bounded by the
                rank's pages, since each push names at least one that is in no other.
            num_pages: pages of this rank: slab s is block `num_pages + s` of its block table.
            transfer_s: after so long a transfer counts as overdue.
            reader: computes a checksum of what each push reads, while it runs; None for no checksums.
            connect: of a decode rank: the target for a life of a prefill rank, as `pair.Callers.connect`.
        """
        self._fabric, self._links, self._inbox, self._meter, self._nursery = fabric, links, inbox, meter, nursery
        self.tell: Callable[[PushDone], None] = inbox.put
        """How the end of a push is told. Who takes facts may put in his own way."""
        self._num_pages, self._transfer_s, self._reader, self._connect = num_pages, transfer_s, reader, connect

    def expect(self, order: StartPush) -> None:
        """What the fabric can do beforehand for a push that will be ordered soon."""
        link = self._links.find(order.link)
        if link is not None and link.target is not None:
            self._fabric.prepare_push(link.target, *self._list_blocks(order, link))

    def start(self, order: StartPush) -> None:
        """Starts a push; its end, or why it did not begin, comes as a fact."""
        link = self._links.find(order.link)
        if link is not None and link.target is not None:
            self._begin(order, link, link.target)
        elif link is not None and self._connect is not None:
            self._nursery.start_soon(self._meet, order, link, self._connect)
        else:
            self._inbox.put(PushFailed(order.key, "the link to the peer is gone", "void"))

    async def _meet(self, order: StartPush, link: Link, connect: Callable[[int, int], Awaitable[Target]]) -> None:
        """Begins a push once there is a target for it."""
        try:
            target = await connect(link.rank, link.generation)
        except FabricError as error:
            self._inbox.put(PushFailed(order.key, str(error), "void"))
            return
        self._begin(order, link, target)

    def _list_blocks(self, order: StartPush, link: Link) -> tuple[list[int], list[int]]:
        """Local and remote blocks of a push, pairwise."""
        local, remote = list(order.pages), list(order.remote_pages)
        if order.slabs is not None:
            local.append(self._num_pages + order.slabs[0])
            remote.append(link.remote_pages + order.slabs[1])
        return local, remote

    def _begin(self, order: StartPush, link: Link, target: Target) -> None:
        try:
            transfer = self._fabric.push(target, *self._list_blocks(order, link))
        except FabricError as error:
            self._meter.fail(link.rank)
            self._inbox.put(PushFailed(order.key, str(error), "void"))
            return
        link.count_push(+1)
        self._meter.start(link.rank)
        self._nursery.start_soon(self._wait, order, transfer, link)

    async def _wait(self, order: StartPush, transfer: Transfer, link: Link) -> None:
        fabric, inbox, meter, checksum = self._fabric, self._inbox, self._meter, None
        if self._reader is not None:
            # Before anything is said of the push: until then these blocks keep their owner, so they are what it reads.
            slab = -1 if order.slabs is None else order.slabs[0]
            (checksum,) = await self._reader.checksums([(order.pages, slab)])
        try:
            with trio.move_on_after(self._transfer_s) as overdue:
                report = await fabric.wait(transfer)
            if overdue.cancelled_caught:
                meter.fail(link.rank)
                why = f"a write of {order.count} pages to {link.frames.name} is not done after {self._transfer_s:g} s"
                inbox.put(PushFailed(order.key, why, "overdue"))
                report = await fabric.wait(transfer)
        except FabricError as error:
            if not overdue.cancelled_caught:
                meter.fail(link.rank)
            inbox.put(PushFailed(order.key, str(error), "failed"))
        else:
            meter.land(link.rank, report.num_bytes, report.transfer_us)
            self.tell(PushDone(order.key, order.first, order.count, report, checksum))
        # Only now: whoever waits for quiet forgets the target, and the end must be told before that.
        meter.end(link.rank)
        link.count_push(-1)
