"""keep_connection: the link to the head, dialled again after a loss where the engine may come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from engine.actors.client import HeadClient, RequestSink, run_head_client
from engine.errors import EngineError, PeerGone
from transport.messages import HeadHello
from transport.stream import open_unix_stream

FIRST_REDIAL_S = 0.1
LONGEST_REDIAL_S = 5.0


async def keep_connection(
    path: str,
    sink: RequestSink,
    *,
    name: str,
    retry_for: float,
    greeted: Callable[[HeadHello], Awaitable[None]],
    attach: Callable[[HeadClient], None],
    detach: Callable[[HeadClient, EngineError], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> EngineError:
    """Keeps a connection until the engine is lost; returns the reason. Started means connected.

    Args:
        path: the head's request socket.
        sink: is told what becomes of rows.
        name: of this client, for the head's log.
        retry_for: seconds to look for an engine that went away; 0 for one that can not come back.
        greeted: checks what a head says of itself, before its connection is used; may raise EngineError.
        attach, detach: a connection is there, is gone and why.

    Raises:
        EngineError: the first connection failed.
    """
    give_up_at: float | None = None
    pause = FIRST_REDIAL_S
    while True:
        problem: EngineError | None = None
        client: HeadClient | None = None
        try:
            async with _connected(path, sink, name) as opened:
                await greeted(opened.hello)
                client = opened
                attach(client)
                if give_up_at is None:
                    task_status.started()
                await trio.sleep_forever()
        except* EngineError as group:
            problem = first_leaf(group)
        assert problem is not None, "a connection ends with an error or is cancelled"
        now = trio.current_time()
        if client is not None:
            detach(client, problem)
            give_up_at, pause = now + retry_for, FIRST_REDIAL_S
        elif give_up_at is None:
            raise problem
        # Only an absent engine may come back; one that breaks the protocol or serves something else stays as it is.
        if not isinstance(problem, PeerGone) or now >= give_up_at:
            return problem
        await trio.sleep(min(pause, give_up_at - now))
        pause = min(2 * pause, LONGEST_REDIAL_S)


@contextlib.asynccontextmanager
async def _connected(path: str, sink: RequestSink, name: str) -> AsyncIterator[HeadClient]:
    stream = await open_unix_stream(path)

    async def run(task_status: trio.TaskStatus[HeadClient]) -> None:
        await run_head_client(stream, sink, name=name, task_status=task_status)

    async with trio.open_nursery() as nursery:
        client: HeadClient = await nursery.start(run)
        yield client


def first_leaf(group: BaseExceptionGroup[EngineError]) -> EngineError:
    """One of the errors in a group; they have one cause, and the first was raised first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineError)
    return error
