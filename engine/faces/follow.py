"""Watches one re-placement until it has ended: progress for people, and how it ended."""

from __future__ import annotations

from collections.abc import Callable

import trio

from engine.errors import EngineError
from engine.faces.admin import open_operator
from engine.faces.rebalance import Aim, describe_progress
from transport.messages import PartReport, PastRebalance

POLL_S = 0.25
"""Between two questions; the head answers each within a turn of its loop."""


async def follow_rebalance(
    read_socket: str, aim: Aim, plan: int, tell: Callable[[str], None], patience_s: float
) -> tuple[PastRebalance | None, PartReport]:
    """Asks until the plan's line in the history says how it ended.

    Args:
        plan: its number, as the answer to `apply` or `rollback` told.
        tell: is given the progress whenever the words change.
        patience_s: how long to watch; the re-placement goes on without a watcher.

    Returns:
        its line (None if it had not ended in time), and the part as it was then.

    Raises:
        PeerGone: the head went away.
        EngineError: the part went away, or the history has lost the plan.
    """
    told = ""
    async with open_operator(read_socket) as head:
        deadline = trio.current_time() + patience_s
        while True:
            part = aim.find(await head.ask_experts())
            if part is None:
                raise EngineError(f"the head knows no {aim} any more")
            past = find_past(part, plan)
            if past is not None and past.result != "running":
                return past, part
            if past is None and part.state == "idle":
                raise EngineError(f"the head knows no plan {plan} of {aim} any more, and nothing moves")
            if (words := describe_progress(part)) != told:
                told = words
                tell(words)
            if trio.current_time() >= deadline:
                return None, part
            await trio.sleep(POLL_S)


def find_past(part: PartReport, plan: int) -> PastRebalance | None:
    """The plan's line in the history."""
    return next((past for past in part.history if past.plan == plan), None)
