"""Head: the nursery that wires router, supervisor and sockets, and the order in which they end.

    running --first stop--> draining (bounded) --idle, deadline or second stop--> stopping --> gone

Draining refuses new requests and finishes the rest; stopping fails what is left, for its clients to try elsewhere, then
drains and ends the ranks. Operators' connections end last, so that whoever asked for the shutdown sees its end. No
process outlives `run_head`, whichever way it ends.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import trio

from engine.actors.accept import ClientLimits, run_clients
from engine.actors.answers import Acts, Answers, ServeOperators
from engine.actors.balancer import REASONS, BalanceLimits, Balancer, MakePlan
from engine.actors.processes import RankProcess
from engine.actors.router import Router, RouterLimits, run_deadlines
from engine.actors.supervisor import Supervisor, SupervisorLimits
from engine.config import ClusterConfig
from engine.core.events import EventRing
from engine.errors import EngineError
from engine.log import log_event
from transport.messages import (
    PROTOCOL_VERSION,
    TEXT_LIMIT,
    ActDone,
    CancelRequests,
    HeadHello,
    Refused,
    ResetCache,
    SetDrain,
    Shutdown,
    StatusReport,
)

logger = logging.getLogger("engine.head")

GONE_LISTED = 20
"""Requests that an answer to CancelRequests names."""

T = TypeVar("T")

class NotReady(EngineError):
    """The ranks were not ready in the time that the caller gave."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadPorts:
    """All that a head is given.

    Attributes:
        requests, read, admin: listening sockets; the head closes them.
        serve_operators: serves one of the operators' sockets.
        spawn: starts the process of (rank, generation).
        plan: plans a placement of experts, not in this loop: it takes a core for a while.
        signals: yields for every request to stop from the terminal or the system.
        parent_gone: returns when whoever started this head for himself is gone; None if nobody did.
        pid: of this process.
        events: what this process logs, kept for operators.
    """

    requests: trio.abc.Listener[trio.SocketStream]
    read: trio.abc.Listener[trio.SocketStream]
    admin: trio.abc.Listener[trio.SocketStream]
    serve_operators: ServeOperators
    spawn: Callable[[int, int], RankProcess]
    plan: MakePlan
    signals: AsyncIterator[int]
    parent_gone: Callable[[], Awaitable[None]] | None
    pid: int
    events: EventRing


class _Stop:
    """When to stop, by whoever says the earliest time."""

    def __init__(self) -> None:
        self.wanted = trio.Event()
        self.scope = trio.CancelScope()
        self.signals = 0

    def ask(self, drain_s: float) -> None:
        self.scope.deadline = min(self.scope.deadline, trio.current_time() + drain_s)
        self.wanted.set()


async def run_head(ports: HeadPorts, config: ClusterConfig, *, ready_within_s: float = math.inf) -> int:
    """Runs the cluster until it is told to stop.

    Args:
        ready_within_s: time for all ranks to become ready.

    Returns:
        How many signals ended it: 2 or more means that somebody lost patience.

    Raises (in groups):
        RankLost: a rank died too often.
        ConfigError: a rank can not work with the configuration.
        NotReady: see `ready_within_s`.
    """
    limits = config.limits
    routing = _pick(
        RouterLimits,
        limits,
        vocab_size=config.vocab_size,
        max_model_tokens=config.max_model_tokens,
        ttft_limit_us=round(1e6 * config.slo.ttft_p90_s),
        itl_limit_us=round(1e6 * config.slo.itl_p99_s),
        prefix_cache=config.keeps_prompts,
    )
    router = Router(routing)
    balancer = Balancer(
        {"prefill": config.prefill, "decode": config.decode},
        (config.experts_main, config.experts_draft),
        ports.plan,
        _pick(BalanceLimits, limits),
    )
    supervisor = Supervisor(config.roles, ports.spawn, router, _pick(SupervisorLimits, limits), config.digest, balancer)
    stop = _Stop()
    started_at = trio.current_time()

    def report() -> StatusReport:
        reasons = supervisor.why_not_ready()
        if router.is_draining:
            reasons = ("draining", *reasons)
        return StatusReport(
            version=PROTOCOL_VERSION,
            cluster=config.cluster,
            model=config.model,
            head_pid=ports.pid,
            uptime_ms=int(1e3 * (trio.current_time() - started_at)),
            ready=not reasons,
            reasons=reasons,
            waiting=router.num_waiting,
            running=router.num_running,
            finished=router.num_finished,
            failed=router.num_failed,
            cancelled=router.num_cancelled,
            ranks=supervisor.rank_statuses(),
            degraded=(*router.missed_limits(), *supervisor.degraded(), *balancer.degraded())[:REASONS],
            is_stopping=router.is_draining,
            waiting_limit=limits.queue_requests,
            drafted=supervisor.drafted(),
            prefix=supervisor.prefix(),
            turns=supervisor.turns(),
        )

    def shutdown(message: Shutdown, user: str) -> int:
        log_event(logger, "info", "head.shutdown", user=user, drain_s=message.drain_ms / 1e3, msg=message.reason)
        stop.ask(message.drain_ms / 1e3)
        return router.num_running + router.num_waiting

    def drain(message: SetDrain, user: str) -> ActDone | Refused:
        why = f"{'drained' if message.drain else 'undrained'} by {user}"
        why += f" ({message.reason})" if message.reason else ""
        try:
            done = supervisor.set_drain(message.ranks, message.drain, why[:TEXT_LIMIT])
        except ValueError as refusal:
            return Refused(str(refusal)[:TEXT_LIMIT])
        return ActDone(done[:TEXT_LIMIT])

    def cancel(message: CancelRequests, user: str) -> ActDone | Refused:
        return describe_cancel(message.requests, router.cancel_requests(message.requests))

    def reset(message: ResetCache, user: str) -> ActDone | Refused:
        if not config.keeps_prompts:
            return Refused("there is no prefix cache (prefix_cache.enabled)")
        return ActDone(f"{router.forget_prompts()} prefill ranks give up what no prompt uses of their prefix caches")

    async def watch_signals() -> None:
        async for signum in ports.signals:
            stop.signals += 1
            drain_s = limits.drain_s if stop.signals == 1 else 0.0
            log_event(logger, "info", "head.signal", signal=signum, drain_s=drain_s)
            stop.ask(drain_s)

    async def watch_parent(parent_gone: Callable[[], Awaitable[None]]) -> None:
        await parent_gone()
        log_event(logger, "info", "head.orphan", msg="whoever started this head is gone")
        stop.ask(0.0)

    async def watch_ready() -> None:
        with trio.move_on_after(ready_within_s):
            await supervisor.became_ready.wait()
            log_event(logger, "info", "head.ready", took_s=trio.current_time() - started_at)
            return
        raise NotReady(f"not ready within {ready_within_s:g} s: {'; '.join(supervisor.why_not_ready())}")

    hello = HeadHello(
        version=PROTOCOL_VERSION,
        cluster=config.cluster,
        model=config.model,
        vocab_size=config.vocab_size,
        max_model_tokens=config.max_model_tokens,
        config_digest=config.digest,
        max_inflight=limits.client_inflight,
    )
    answers = Answers(
        status=report,
        experts=balancer.report,
        traffic=router.traffic,
        requests=router.list_requests,
        heat=balancer.heat,
        links=supervisor.links,
        events=ports.events,
    )
    acts = Acts(shutdown=shutdown, rebalance=balancer.act, drain=drain, cancel=cancel, reset=reset)
    async with ports.requests, ports.read, ports.admin, trio.open_nursery() as operators:
        operators.start_soon(ports.serve_operators, ports.read, answers, None)
        operators.start_soon(ports.serve_operators, ports.admin, answers, acts)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            nursery.start_soon(balancer.run)
            nursery.start_soon(run_clients, ports.requests, router, hello, _pick(ClientLimits, limits))
            nursery.start_soon(run_deadlines, router, limits.abort_s / 8)
            nursery.start_soon(router.tokens.run)
            nursery.start_soon(watch_signals)
            nursery.start_soon(watch_ready)
            if ports.parent_gone is not None:
                nursery.start_soon(watch_parent, ports.parent_gone)
            await stop.wanted.wait()
            router.drain()
            log_event(logger, "info", "head.drain", running=router.num_running, waiting=router.num_waiting)
            with stop.scope:
                await router.wait_idle()
            router.fail_all("the engine is shutting down")
            await supervisor.stop()
            nursery.cancel_scope.cancel()
        counts = {"finished": router.num_finished, "cancelled": router.num_cancelled, "failed": router.num_failed}
        log_event(logger, "info", "head.gone", **counts)
        operators.cancel_scope.cancel()
    return stop.signals


def describe_cancel(asked: Sequence[int], known: Sequence[int]) -> ActDone | Refused:
    """What became of an operator's wish to end the requests `asked`, of which the router knew `known`."""
    ended = set(known)
    gone = [str(number) for number in dict.fromkeys(asked) if number not in ended]
    listed = ", ".join(gone[:GONE_LISTED]) + (" ..." if len(gone) > GONE_LISTED else "")
    if not known:
        return Refused(f"no such request, or it has ended: {listed}")
    done = f"cancelled {len(known)} request{'s' if len(known) > 1 else ''}"
    return ActDone(f"{done}; had ended before: {listed}" if gone else done)


def _pick(kind: type[T], limits: object, **more: object) -> T:
    """The fields of `kind` out of `limits`, so that a component gets its numbers and not the configuration."""
    fields: Any = kind
    names = [field.name for field in dataclasses.fields(fields) if field.name not in more]
    return kind(**{name: getattr(limits, name) for name in names}, **more)
