"""run_push: starts the pushes of a prefill rank and waits for them; the sole owner of transfers in flight.

A transfer is never given up, only the waiting for it is: one that is overdue is reported as failed, and waited for on,
because until it ends it reads this rank's pages and writes the decode rank's.
"""

from __future__ import annotations

import trio

from engine.actors.intake import Inbox, PushDone, PushFailed
from engine.actors.links import Link, Links
from engine.core.effects import StartPush
from engine.core.pushes import PushMeter
from engine.errors import FabricError
from engine.ports import Device
from transport.fabric import Fabric, Transfer


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
) -> None:
    """Carries out orders in order, each in a task of its own once it is posted.

    Transfers are few (one per chunk) and bounded by the rank's pages, since each names at least one.

    Args:
        meter: counts them by decode rank.
        num_pages: pages of this rank: slab s is block `num_pages + s` of its block table.
        transfer_s: after so long a transfer counts as overdue.
        reader: computes a checksum of what each push reads, while it runs; None for no checksums.
    """
    async with trio.open_nursery() as nursery:
        async for order in orders:
            link = links.find(order.link)
            if link is None or link.target is None:
                inbox.put(PushFailed(order.key, "the link to the decode rank is gone", "void"))
                continue
            local, remote = list(order.pages), list(order.remote_pages)
            if order.slabs is not None:
                local.append(num_pages + order.slabs[0])
                remote.append(link.remote_pages + order.slabs[1])
            try:
                transfer = fabric.push(link.target, local, remote)
            except FabricError as error:
                meter.fail(link.rank)
                inbox.put(PushFailed(order.key, str(error), "void"))
                continue
            link.count_push(+1)
            meter.start(link.rank)
            nursery.start_soon(_wait, order, transfer, link, fabric, inbox, meter, transfer_s, reader)


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
