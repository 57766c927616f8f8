"""Chooses implementations and puts processes together: the head, a rank, a caller's cluster. Nothing else does.

Each function is one process's composition; the parts know only their ports. torch and NIXL are imported inside the
branch that needs them, so that the head carries neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import trio

from engine.cluster import PrivateCluster, default_requests_path, start_cluster
from engine.config import ClusterConfig, RankConfig
from engine.errors import ConfigError, EngineError, FabricError, PeerGone, RankLost
from engine.log import configure_log, keep_events, log_event
from engine.runtime import RuntimeDirectory
from engine.spawn import SpawnedRank, die_with_parent, rank_command, spawn_rank

if TYPE_CHECKING:
    from engine.core.events import EventRing

__all__ = ["PrivateCluster", "default_requests_path", "run_head_process", "run_rank_process", "start_cluster"]

E = TypeVar("E", bound=BaseException)
logger = logging.getLogger("engine.compose")

_OWN_LINE = re.compile(r"\{|\d\d:\d\d:\d\d\.\d{3} [pd]\d+ ")
"""How a line begins that a rank's own log wrote: it has time and rank already."""


# ---------------------------------------------------------------- the head's process


def run_head_process(
    config: ClusterConfig,
    *,
    lifeline: int | None = None,
    parent: int | None = None,
    ready_within_s: float = math.inf,
    command: Sequence[str] = (),
) -> int:
    """Runs a head until it ends; returns the exit code.

    Args:
        lifeline: descriptor whose end of file means that whoever started this head is gone.
        parent: pid of that starter, if the head shall die with it.
        ready_within_s: time for all ranks to become ready.
        command: program of a rank; the engine's own if empty.

    Raises:
        ConfigError, HeadRuns: it could not start.
    """
    from engine.actors.head import NotReady
    from engine.core.events import EventRing

    if parent is not None:
        # A plain stop, not a kill: the head then ends its ranks in order and clears its directory.
        die_with_parent(parent, signal.SIGTERM)
    directory = RuntimeDirectory(config.admin_dir)
    directory.prepare()
    configure_log(config.log_format, config.log_level, "head")
    events = EventRing()
    keep_events(events)
    codes: dict[type[EngineError], int] = {RankLost: 4, NotReady: 4, ConfigError: 2}
    try:
        with directory.own(is_private=lifeline is not None):
            signals = trio.run(
                _run_head, config, directory, events, lifeline, ready_within_s, command or rank_command(),
                clock=_open_clock(config),
            )  # fmt: skip
    except BaseExceptionGroup as group:
        for kind, code in codes.items():
            found = first_of(group, kind)
            if found is not None:
                log_event(logger, "error", "head.failed", msg=str(found))
                return code
        raise
    return 130 if signals > 1 else 0


def _open_clock(config: ClusterConfig) -> trio.abc.Clock | None:
    """A simulated rack has one of its own; None is trio's."""
    if config.device != "sim":
        return None
    from engine.sim.clock import RealClock

    return RealClock()


async def _run_head(
    config: ClusterConfig,
    directory: RuntimeDirectory,
    events: EventRing,
    lifeline: int | None,
    ready_within_s: float,
    command: Sequence[str],
) -> int:
    from engine.actors.head import HeadPorts, run_head
    from engine.faces.desk import run_operators
    from engine.planner import call_planner
    from transport.unix import open_unix_listener

    def spawn(rank: int, generation: int) -> SpawnedRank:
        rank_config = config.rank_config(rank)
        return spawn_rank(
            command,
            {
                "rank": rank,
                "place": config.place_of(rank),
                "generation": generation,
                "parent": os.getpid(),
                "socket": directory.rank_socket(rank, generation),
                "log_format": config.log_format,
                "log_level": config.log_level,
                "config": dataclasses.asdict(rank_config),
            },
            threads=config.threads,
            say=lambda line: _say_rank_line(rank, line, config.log_format),
        )

    async def parent_gone() -> None:
        assert lifeline is not None
        os.set_blocking(lifeline, False)
        while True:
            await trio.lowlevel.wait_readable(lifeline)
            with contextlib.suppress(BlockingIOError):
                if not os.read(lifeline, 4096):
                    return

    async with contextlib.AsyncExitStack() as beside:
        signals = beside.enter_context(trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        if config.http.is_on:
            from engine.fronts import keep_fronts

            await beside.enter_async_context(keep_fronts(config, directory))
        # requests.sock last: who finds it finds a head that also answers operators.
        admin = await open_unix_listener(directory.admin_socket, 0o600)
        read = await open_unix_listener(directory.read_socket, 0o660)
        requests = await open_unix_listener(directory.requests_socket, 0o600)
        ports = HeadPorts(
            requests=requests,
            read=read,
            admin=admin,
            serve_operators=run_operators,
            spawn=spawn,
            plan=call_planner(config.limits.balance_s),
            signals=signals,
            parent_gone=parent_gone if lifeline is not None else None,
            pid=os.getpid(),
            events=events,
        )
        if config.device == "sim":
            from engine.sim.realtime import describe_rack, run_rack

            log_event(logger, "warning", "head.simulated", scenario=config.scenario, msg=describe_rack(config))
        log_event(
            logger, "info", "head.start",
            pid=os.getpid(), dir=directory.path, cluster=config.cluster, model=config.model,
            ranks=len(config.roles), digest=config.digest,
        )  # fmt: skip
        if config.device == "sim":
            return await run_rack(ports, config, ready_within_s)
        return await run_head(ports, config, ready_within_s=ready_within_s)


def _say_rank_line(rank: int, line: str, form: str) -> None:
    """A rank's own log lines pass as they are; anything else (a traceback, a library's print) becomes an event."""
    if _OWN_LINE.match(line):
        print(line, file=sys.stderr, flush=True)
    else:
        log_event(logger, "info", "rank.stderr", rank=rank, msg=line)


def first_of(group: BaseException, kind: type[E]) -> E | None:
    """The first exception of `kind` among the leaves, if all others are errors that we raise on purpose."""
    if isinstance(group, kind):
        return group
    if not isinstance(group, BaseExceptionGroup):
        return None
    matched, rest = group.split(kind)
    if matched is None or (rest is not None and rest.split((EngineError, trio.Cancelled))[1] is not None):
        return None
    leaf: BaseException = matched
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert isinstance(leaf, kind)
    return leaf


# ---------------------------------------------------------------- a rank's process


def run_rank_process(control: int, given: dict[str, Any]) -> int:
    """Runs one rank until its control stream ends; returns the exit code.

    Args:
        control: descriptor of the connected control socket.
        given: what `spawn` passed.
    """
    import msgspec

    die_with_parent(given["parent"], signal.SIGKILL)
    # What is loaded is no garbage, so nobody looks for any until `run_rank` has its say. That saves a rank 0.1 s.
    gc.disable()
    # A computing thread holds the GIL at most this long before the loop gets it.
    sys.setswitchinterval(5e-5)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the terminal's; the head decides what they mean for ranks
    config = msgspec.convert(given["config"], RankConfig)
    configure_log(given["log_format"], given["log_level"], f"{config.role[0]}{given['rank']}")
    try:
        trio.run(_run_rank, control, given, config)
    except BaseExceptionGroup as group:
        problem = first_of(group, ConfigError)
        if problem is not None:
            log_event(logger, "error", "rank.config", msg=str(problem))
            return 2
        failure = first_of(group, EngineError)
        if failure is None:
            raise  # a bug: the traceback is its report
        if not isinstance(failure, PeerGone):  # the head went away, and so does this
            log_event(logger, "error", "rank.failed", msg=str(failure))
            return 1
    finally:
        gc.freeze()  # the interpreter's end would look through all of torch once more: another 0.1 s
    return 0


async def _run_rank(control: int, given: dict[str, Any], config: RankConfig) -> None:
    from engine.actors.rank import run_rank
    from engine.ports import Device, RankIdentity, RankPorts
    from transport.fabric import Fabric
    from transport.unix import open_unix_listener, open_unix_stream

    rank: int = given["rank"]
    head = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=control)))
    async with trio.open_nursery() as nursery:

        async def open_device(report: Callable[[str, int, int, str], None]) -> Device:
            from engine.model.device import open_torch_device

            # Its tickets are its own; whoever holds one got it from this device.
            mesh_address = f"{given['socket']}.mesh" if config.group > 1 else ""
            device = await open_torch_device(
                config, report, mesh_address=mesh_address, rank=rank, place=given["place"]
            )
            return cast(Device, device)

        async def open_fabric() -> Fabric:
            # The fabric's own tasks live here, around the rank's, so they may end in any order.
            fabric: Fabric = await nursery.start(_hold_fabric, rank, config)
            return fabric

        listener = None
        if config.role == "decode":
            listener = await open_unix_listener(given["socket"], 0o600)
        ports = RankPorts(
            head=head,
            open_device=open_device,
            open_fabric=open_fabric,
            peer_listener=listener,
            peer_address=given["socket"] if listener is not None else "",
            dial=open_unix_stream,
        )
        try:
            await run_rank(ports, RankIdentity(rank=rank, generation=given["generation"], config=config))
        finally:
            if listener is not None:
                # Shielded, and before the nursery is cancelled: a Cancelled from here would replace the rank's error.
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(listener)
            nursery.cancel_scope.cancel()


async def _hold_fabric(
    rank: int, config: RankConfig, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED
) -> None:
    """Opens the configured fabric and keeps it until cancelled; `auto` takes NIXL where it starts, else TCP, which
    carries host memory only."""
    name = f"rank{rank}"
    if config.fabric != "tcp":
        try:
            await _hold(_nixl(name, config, rank), task_status)
            return
        except FabricError as error:
            if config.fabric == "nixl" or config.device == "cuda":
                raise
            log_event(logger, "warning", "fabric.fallback", msg=f"{error}; pages go over TCP")
    from transport.tcp_fabric import open_tcp_fabric

    await _hold(open_tcp_fabric(name), task_status)


def _nixl(name: str, config: RankConfig, rank: int) -> AbstractAsyncContextManager[Any]:
    from transport.nixl_fabric import open_nixl_fabric

    if config.device == "cpu":
        # Else UCX rewrites, in every loaded library, the functions that map memory: for caches of what it registered by
        # itself, which is nothing here, where the arena is registered once and stays. With torch loaded it takes 0.4 s.
        os.environ.setdefault("UCX_MEM_EVENTS", "n")
    # Members of a group write experts into each other's slots, and decode ranks hand turns back.
    receives = config.role == "decode" or config.group > 1 or config.hand_back.enabled
    if config.device != "cuda":
        return open_nixl_fabric(name, receives=receives)
    import torch

    from engine.model.device import choose_gpu

    gpu = choose_gpu(rank)
    return open_nixl_fabric(name, receives=receives, device=gpu, on_thread_start=lambda: torch.cuda.set_device(gpu))


async def _hold(opening: AbstractAsyncContextManager[Any], task_status: trio.TaskStatus[Any]) -> None:
    async with opening as fabric:
        task_status.started(fabric)
        await trio.sleep_forever()
