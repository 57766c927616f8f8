"""run_push: starts the pushes of a rank and waits for them; the sole owner of transfers in flight.

A transfer is never given up, only the waiting for it is: one that is overdue is reported as failed, and waited for on,
because until it ends it reads this rank's pages and writes the peer's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import trio

from engine.actors.intake import Inbox, PushDone, PushFailed
from engine.actors.links import Link, Links
from engine.core.effects import StartPush
from engine.core.pushes import PushMeter
from engine.errors import FabricError
from engine.ports import Device
from transport.fabric import Fabric, Target, Transfer


async def run_push(
    orders: trio.MemoryReceiveChannel[StartPush],
    fabric: Fabric,
    links: Links,
    inbox: Inbox,
    meter: PushMeter,
    *,
    num_pages: int,
    transfer_s: float,
    reader: Device | None = None,
    connect: Callable[[int, int], Awaitable[Target]] | None = None,
) -> None:
    """Carries out orders in order, each in a task of its own once it is posted.

    Transfers are few (one per chunk, or per turn) and bounded by the rank's pages, since each names at least one.

    Args:
        meter: counts them by peer.
        num_pages: pages of this rank: slab s is block `num_pages + s` of its block table.
        transfer_s: after so long a transfer counts as overdue.
        reader: computes a checksum of what each push reads, while it runs; None for no checksums.
        connect: of a decode rank: the target for a life of a prefill rank, as `pair.Callers.connect`.
    """
    async with trio.open_nursery() as nursery:
        pushing = _Pushing(fabric, inbox, meter, num_pages, transfer_s, reader, nursery)
        async for order in orders:
            link = links.find(order.link)
            if link is not None and link.target is not None:
                pushing.begin(order, link, link.target)
            elif link is not None and connect is not None:
                nursery.start_soon(pushing.meet, order, link, connect)
            else:
                inbox.put(PushFailed(order.key, "the link to the peer is gone", "void"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Pushing:
    """What all transfers of a rank have in common; see `run_push`."""

    fabric: Fabric
    inbox: Inbox
    meter: PushMeter
    num_pages: int
    transfer_s: float
    reader: Device | None
    nursery: trio.Nursery

    async def meet(self, order: StartPush, link: Link, connect: Callable[[int, int], Awaitable[Target]]) -> None:
        """Begins a push once there is a target for it."""
        try:
            target = await connect(link.rank, link.generation)
        except FabricError as error:
            self.inbox.put(PushFailed(order.key, str(error), "void"))
            return
        self.begin(order, link, target)

    def begin(self, order: StartPush, link: Link, target: Target) -> None:
        local, remote = list(order.pages), list(order.remote_pages)
        if order.slabs is not None:
            local.append(self.num_pages + order.slabs[0])
            remote.append(link.remote_pages + order.slabs[1])
        try:
            transfer = self.fabric.push(target, local, remote)
        except FabricError as error:
            self.meter.fail(link.rank)
            self.inbox.put(PushFailed(order.key, str(error), "void"))
            return
        link.count_push(+1)
        self.meter.start(link.rank)
        self.nursery.start_soon(
            _wait, order, transfer, link, self.fabric, self.inbox, self.meter, self.transfer_s, self.reader
        )


async def _wait(
    order: StartPush,
    transfer: Transfer,
    link: Link,
    fabric: Fabric,
    inbox: Inbox,
    meter: PushMeter,
    transfer_s: float,
    reader: Device | None,
) -> None:
    checksum = None
    if reader is not None:
        # Before anything is said of the push: until then these blocks keep their owner, so they are what it reads.
        (checksum,) = await reader.checksums([(order.pages, -1 if order.slabs is None else order.slabs[0])])
    try:
        with trio.move_on_after(transfer_s) as overdue:
            report = await fabric.wait(transfer)
        if overdue.cancelled_caught:
            meter.fail(link.rank)
            why = f"a write of {order.count} pages to {link.frames.name} is not done after {transfer_s:g} s"
            inbox.put(PushFailed(order.key, why, "overdue"))
            report = await fabric.wait(transfer)
    except FabricError as error:
        if not overdue.cancelled_caught:
            meter.fail(link.rank)
        inbox.put(PushFailed(order.key, str(error), "failed"))
    else:
        meter.land(link.rank, report.num_bytes, report.transfer_us)
        inbox.put(PushDone(order.key, order.first, order.count, report, checksum))
    # Only now: whoever waits for quiet forgets the target, and the end must be told before that.
    meter.end(link.rank)
    link.count_push(-1)
