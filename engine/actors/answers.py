"""Answers and acts: what the operators' sockets ask of a head, as calls; the sockets know no other part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import trio

from engine.core.events import EventRing
from transport.messages import (
    ActDone,
    AskHeat,
    AskRequests,
    CancelRequests,
    ExpertsReport,
    HeatReport,
    LinksReport,
    Rebalance,
    RebalanceAnswer,
    Refused,
    RequestsReport,
    ResetCache,
    SetDrain,
    Shutdown,
    StatusReport,
    TrafficReport,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """What may be asked by whoever can open one of the sockets. Nothing of it waits; bytes are a report's blob."""

    status: Callable[[], StatusReport]
    experts: Callable[[], ExpertsReport]
    traffic: Callable[[], TrafficReport]
    requests: Callable[[AskRequests], RequestsReport]
    heat: Callable[[AskHeat], tuple[HeatReport, bytes] | Refused]
    links: Callable[[], tuple[LinksReport, bytes]]
    events: EventRing


@dataclasses.dataclass(frozen=True, slots=True)
class Acts:
    """What may be changed through the socket for it. The text is the user, as the kernel knows him.

    Attributes:
        shutdown: begins a shutdown; how many requests there are.
        rebalance: does what Rebalance asks for, `user` in it included; may wait for a plan.
        drain: takes ranks out of routing, or back.
        cancel: ends requests.
        reset: empties the prefix caches.
    """

    shutdown: Callable[[Shutdown, str], int]
    rebalance: Callable[[Rebalance], Awaitable[RebalanceAnswer | Refused]]
    drain: Callable[[SetDrain, str], ActDone | Refused]
    cancel: Callable[[CancelRequests, str], ActDone | Refused]
    reset: Callable[[ResetCache, str], ActDone | Refused]


ServeOperators = Callable[[trio.abc.Listener[trio.SocketStream], Answers, Acts | None], Awaitable[None]]
"""Serves one of the operators' sockets until cancelled. No acts: the socket that only reads."""
