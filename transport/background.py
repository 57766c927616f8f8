"""A nursery for the tasks behind a context manager: they end with its body, whose error comes out as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_background() -> AsyncIterator[trio.Nursery]:
    """Like `trio.open_nursery`, with three differences.

    The tasks are cancelled when the body ends. Cancelling the nursery given does not cancel the body, so that a user
    may close early what runs in it. A lone error is not put in a group: else using a fabric would change the types of
    its user's errors. A task that fails cancels the body.
    """
    lone: Exception | None = None
    try:
        async with trio.open_nursery() as outer:
            inner: trio.Nursery = await outer.start(_host)
            try:
                yield inner
            finally:
                inner.cancel_scope.cancel()
    except ExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        lone = group.exceptions[0]
    if lone is not None:
        raise lone


async def _host(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()
