"""Audit: one event in the log for everything that an operator changes, or is refused."""

from __future__ import annotations

import logging

from engine.faces.ranks import describe_ranks
from engine.log import log_event
from transport.messages import CancelRequests, Rebalance, ResetCache, SetDrain, Shutdown

Act = Shutdown | Rebalance | SetDrain | CancelRequests | ResetCache

logger = logging.getLogger("engine.admin")

LISTED = 20
"""Requests that an event names."""


def log_act(act: Act, user: str, uid: int, outcome: str, said: str | None, *, is_allowed: bool) -> None:
    """Logs an act under `admin.` and its name.

    Args:
        user, uid: who, as the kernel knows him.
        outcome: `done`, `refused`, or `left` if he went before there was an answer.
        said: the answer's words.
        is_allowed: whether he may change things at all. If not it is a warning, and one that repeats word for word is
            counted: whoever may only read can not fill the disk with it.
    """
    host = "" if isinstance(act, Shutdown) else act.host
    log_event(
        logger, "info" if is_allowed else "warning", f"admin.{_name(act)}",
        user=user, uid=uid, host=host or None, reason=act.reason or None, what=_what(act), outcome=outcome, msg=said,
    )  # fmt: skip


def _name(act: Act) -> str:
    match act:
        case Shutdown():
            return "shutdown"
        case Rebalance():
            return act.action
        case SetDrain():
            return "drain" if act.drain else "undrain"
        case CancelRequests():
            return "cancel"
        case ResetCache():
            return "reset_cache"


def _what(act: Act) -> str:
    match act:
        case Shutdown():
            return f"engine within {act.drain_ms / 1e3:g} s"
        case Rebalance():
            more = f" to {act.mode}" if act.mode else f" plan {act.plan}" if act.plan else ""
            return f"{act.pool} group {act.group} part {act.part}{more}"
        case SetDrain():
            return f"ranks {describe_ranks(sorted(set(act.ranks)))}"
        case CancelRequests():
            more = " ..." if len(act.requests) > LISTED else ""
            return f"requests {','.join(map(str, act.requests[:LISTED]))}{more}"
        case ResetCache():
            return "prefix caches"
