"""run_verify: has the device read pushed pages back for their checksums, request after request, beside the steps."""

from __future__ import annotations

import trio

from engine.actors.intake import Inbox, PagesRead
from engine.core.effects import ReadBack
from engine.ports import Device


async def run_verify(orders: trio.MemoryReceiveChannel[ReadBack], device: Device, inbox: Inbox) -> None:
    """Carries out orders in order, until cancelled. Reading takes as long as the memory is large; the side has a
    deadline of its own for the requests that wait for it."""
    async for order in orders:
        inbox.put(PagesRead(order.key, await device.checksums(order.stretches)))
