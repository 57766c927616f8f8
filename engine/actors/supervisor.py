"""Supervisor: the process table. It starts every rank, watches it, and starts it again when it died.

Three detectors, from fast to slow: the control stream's end (milliseconds after a crash), the process's own end (its
pidfd, the only *proof*), and silence (finds a hang). A life of a rank goes

    starting [-> joining] -> ready -> lost -> restarting -> starting ...      `stopped` at the end of the head

`joining` is a rank of a group until its group steps with it; then requests may go there.

with a new generation each time. Invariants: a rank's next life starts only after the process of the one before is
confirmed dead; PeerDown goes to other ranks only after that too, because what they free on it may be written by nobody.
The nursery of `run` never ends while a rank process lives.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import trio

from engine.actors.balancer import Balancer
from engine.actors.group import Wire
from engine.actors.phases import PhaseReport, describe_progress
from engine.actors.processes import RankProcess, Row, describe_status
from engine.actors.router import Router
from engine.core.drafted import add_counts, find_bad_origins
from engine.core.drains import Drains
from engine.core.orders import GROUP_WORDS
from engine.core.pushes import build_links, read_pairs
from engine.errors import ConfigError, EngineError, RankLost, RemoteProtocolError
from engine.log import log_event
from transport.messages import (
    HEAD_FROM_RANK,
    PROTOCOL_VERSION,
    DraftCounts,
    Drain,
    LinksReport,
    PairCounts,
    PeerDown,
    PeerUp,
    PrefixCounts,
    RankHello,
    RankReady,
    RankSnapshot,
    RankStarting,
    RankStatus,
    Role,
    TokensEmitted,
    TurnCounts,
    WriterOverdue,
)
from transport.stream import FrameStream, run_link
from transport.wire import Frame

logger = logging.getLogger("engine.supervisor")
_Counts = TypeVar("_Counts", PrefixCounts, TurnCounts)

FLUSH_S = 0.5
"""From a process's end to the end of what it had written; more only if somebody else holds its socket."""
EXIT_S = 1.0
"""From the end of its control stream to a rank's own exit; a device context takes its time."""
KILL_S = 30.0
"""From SIGKILL to the process's end; more means that it hangs in the kernel, and nothing can be done about that."""
RESTART_PAUSE_MOST_S = 5.0
REASON_LIMIT = 1024
"""Characters of one reason; a pool may have thousands of ranks."""
CONFIG_STATUS = 2
"""Exit status by which a rank says that its configuration is wrong, so that another life would end the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """The numbers of `Limits` that supervision needs."""

    link_out_bytes: int
    link_stall_s: float
    start_s: float
    snapshot_s: float
    heartbeat_s: float
    restarts: int
    restart_window_s: float
    restart_pause_s: float
    stop_s: float
    progress_s: float


class Supervisor:
    """See the module.

    Args:
        roles: rank to role.
        spawn: starts the process of (rank, generation).
        router: is told which ranks are ready or lost, and gets their frames about requests.
        config_digest: what a rank must say in its hello.
        balancer: is told of the ranks that have a group, and gets their frames about it.
    """

    def __init__(
        self,
        roles: Mapping[int, Role],
        spawn: Callable[[int, int], RankProcess],
        router: Router,
        limits: SupervisorLimits,
        config_digest: str,
        balancer: Balancer,
    ) -> None:
        self._rows = {rank: Row(rank, role) for rank, role in sorted(roles.items())}
        self._spawn = spawn
        self._router = router
        self._limits = limits
        self._digest = config_digest
        self._balancer = balancer
        self._drains = Drains(roles)
        self._drafted_before = DraftCounts()
        self._prefix_before = PrefixCounts()
        self._turns_before = TurnCounts()
        self._stopping = False
        self._stopped = trio.Event()
        self.became_ready = trio.Event()
        """Set when every rank was ready at the same time, once."""

    # ------------------------------------------------------------ what others may know

    def rank_statuses(self) -> tuple[RankStatus, ...]:
        now = trio.current_time()
        return tuple(self._status(row, now) for row in self._rows.values())

    def _status(self, row: Row, now: float) -> RankStatus:
        progress = row.progress if row.state == "starting" else None
        state, phase, reason = row.state, row.phase, self._drains.reasons.get(row.rank, "")
        if state in ("lost", "restarting"):
            reason = row.why or ""
        elif state == "ready" and row.rank in self._drains.reasons:
            state, phase = "draining", "" if self._router.requests_on(row.rank) else "drained"
        return RankStatus(
            rank=row.rank,
            role=row.role,
            generation=row.generation,
            pid=row.pid,
            state=state,
            phase=phase,
            age_ms=int(1e3 * max(0.0, now - row.heard_at)),
            restarts=row.restarts,
            snapshot=row.snapshot,
            phase_done=0 if progress is None else progress.done,
            phase_total=0 if progress is None else progress.total,
            phase_unit="" if progress is None else progress.unit,
            phase_ms=0 if progress is None else int(1e3 * max(0.0, now - row.phase_at)),
            reason=reason[:REASON_LIMIT],
        )

    def degraded(self) -> tuple[str, ...]:
        """One sentence for each reason for which operators have drained ranks, and for each prefill rank whose KV seems
        to be bad."""
        snapshots = [row.snapshot for row in self._rows.values() if row.snapshot is not None]
        tallies = [tally for snapshot in snapshots for tally in snapshot.draft_origins]
        lives = {row.rank: row.generation for row in self._rows.values() if row.role == "prefill"}
        sentences = [*self._drains.sentences(), *find_bad_origins(tallies, lives)]
        return tuple(sentence[:REASON_LIMIT] for sentence in sentences)

    def drafted(self) -> DraftCounts:
        """What became of drafts, of all lives of all ranks."""
        present = (row.snapshot.drafted for row in self._rows.values() if row.snapshot is not None)
        return add_counts((self._drafted_before, *present))

    def prefix(self) -> PrefixCounts:
        """What prefix caches did, of all lives of all ranks."""
        present = (row.snapshot.prefix for row in self._rows.values() if row.snapshot is not None)
        return _add_fields(PrefixCounts, (self._prefix_before, *present))

    def turns(self) -> TurnCounts:
        """What became of finished turns, of all lives of all ranks."""
        present = (row.snapshot.turns for row in self._rows.values() if row.snapshot is not None)
        return _add_fields(TurnCounts, (self._turns_before, *present))

    def links(self) -> tuple[LinksReport, bytes]:
        """What living prefill ranks have pushed to whom, as they last said it."""
        alive = (row for row in self._rows.values() if row.link is not None)
        return build_links({row.rank: row.pairs for row in alive if row.pairs is not None})

    def why_not_ready(self) -> tuple[str, ...]:
        """One sentence for each thing that keeps the cluster from serving; empty if nothing does."""
        reasons = []
        for role in ("prefill", "decode"):
            rows = [row for row in self._rows.values() if row.role == role]
            if not any(row.state == "ready" and row.rank not in self._drains.reasons for row in rows):
                states = ", ".join(f"rank {row.rank} is {self._describe(row)}" for row in rows)
                reasons.append(f"no {role} rank is ready: {states}"[:REASON_LIMIT])
        for row in self._rows.values():
            age_s = row.snapshot.step_age_ms / 1e3 if row.snapshot is not None and row.state == "ready" else 0.0
            if age_s > self._limits.progress_s:
                reasons.append(f"{row.role} rank {row.rank} has work and finished no step for {age_s:.1f} s")
        return tuple(reasons)

    def _describe(self, row: Row) -> str:
        if row.state == "ready" and row.rank in self._drains.reasons:
            return self._drains.reasons[row.rank] or "drained"
        return f"{row.state} {row.phase}".rstrip()

    # ------------------------------------------------------------ operators

    def set_drain(self, ranks: Sequence[int], drain: bool, reason: str) -> str:
        """Takes ranks out of routing, or puts them back; what they have is finished, and they stay up. A drained rank
        stays so through its next lives.

        Args:
            reason: who drains it, and why: `drained by alice (fans)`.

        Returns:
            What was done, in words.

        Raises:
            ValueError: says why nothing was done: no such rank, or the last of its role that takes requests.
        """
        if drain:
            ready = frozenset(row.rank for row in self._rows.values() if row.state == "ready")
            done, changed = self._drains.drain(ranks, reason, ready)
        else:
            done, changed = self._drains.undrain(ranks)
        for rank in sorted(changed):
            self._router.set_drained(rank, drain)
        log_event(logger, "info", "rank.drain" if drain else "rank.undrain", ranks=sorted(ranks), msg=reason or done)
        return done

    # ------------------------------------------------------------ life of the table

    async def run(self) -> None:
        """Keeps all ranks alive until `stop`; returns when the last process is gone.

        Raises (in a group):
            RankLost: a rank died more often than its budget allows, or can not be killed.
            ConfigError: a rank says that its configuration can not work.
        """
        async with trio.open_nursery() as nursery:
            for row in self._rows.values():
                nursery.start_soon(self._keep, row)
        self._stopped.set()

    async def stop(self) -> None:
        """Drain to all ranks, then the end of those that do not go by themselves within `stop_s`."""
        self._stopping = True
        self._balancer.stop()
        for row in self._rows.values():
            if row.state == "restarting":
                row.scope.cancel()
            elif row.state == "starting":
                row.end("stopped while it started")
            else:
                row.state = "draining"
                row.tell(Drain())
        with trio.move_on_after(self._limits.stop_s):
            await self._stopped.wait()
        for row in self._rows.values():
            row.end("did not stop in time")
        await self._stopped.wait()

    async def _keep(self, row: Row) -> None:
        """Life after life of one rank."""
        limits = self._limits
        deaths: collections.deque[float] = collections.deque()
        while not self._stopping:
            await self._live(row)
            if self._stopping:
                break
            now = trio.current_time()
            deaths.append(now)
            while deaths[0] < now - limits.restart_window_s:
                deaths.popleft()
            if len(deaths) > limits.restarts:
                self._give_up(row, len(deaths))
            pause = min(RESTART_PAUSE_MOST_S, limits.restart_pause_s * 2 ** (len(deaths) - 1))
            row.state = "restarting"
            log_event(logger, "warning", "rank.restart", rank=row.rank, generation=row.generation + 1, pause_s=pause)
            row.scope = trio.CancelScope()
            with row.scope:
                await trio.sleep(pause)
            row.restarts += 1
        row.state = "stopped"

    def _give_up(self, row: Row, deaths: int) -> None:
        lines = row.process.last_lines()[-5:] if row.process is not None else ()
        said = "; its last lines: " + " | ".join(lines) if lines else "; it said nothing"
        raise RankLost(
            row.rank,
            f"{deaths} deaths within {self._limits.restart_window_s:g} s (limits.restarts is"
            f" {self._limits.restarts}), the last: {row.why}{said}",
        )

    async def _live(self, row: Row) -> None:
        """One life: from spawn to confirmed death. `row.why` says how it ended."""
        row.generation += 1
        row.state, row.phase, row.why = "starting", "", None
        if row.snapshot is not None:
            self._drafted_before = add_counts((self._drafted_before, row.snapshot.drafted))
            self._prefix_before = _add_fields(PrefixCounts, (self._prefix_before, row.snapshot.prefix))
            self._turns_before = _add_fields(TurnCounts, (self._turns_before, row.snapshot.turns))
        row.snapshot = row.ready = row.process = row.progress = row.pairs = None
        row.scope = trio.CancelScope()
        row.phases = PhaseReport(row.rank, row.role)
        row.heard_at = trio.current_time()
        try:
            process = self._spawn(row.rank, row.generation)
        except OSError as error:
            row.why = f"its process could not be started: {error}"
            row.state = "lost"
            return
        row.process, row.pid = process, process.pid
        log_event(logger, "info", "rank.start", rank=row.rank, role=row.role, generation=row.generation, pid=row.pid)
        row.link = link = FrameStream(
            process.control,
            accepts=HEAD_FROM_RANK,
            out_limit_bytes=self._limits.link_out_bytes,
            stall_s=self._limits.link_stall_s,
            name=f"rank {row.rank}",
        )
        try:
            with row.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(process.run_output)
                    nursery.start_soon(self._watch_exit, row, process)
                    nursery.start_soon(self._watch_silence, row)
                    nursery.start_soon(self._converse, row, link)
        finally:
            row.link = None
            with trio.CancelScope(shield=True):
                await self._bury(row, process, link)

    async def _converse(self, row: Row, link: FrameStream) -> None:
        try:
            await run_link(link, functools.partial(self._take, row))
        except EngineError as error:
            row.end(str(error))
        row.end("closed its control stream")

    async def _watch_exit(self, row: Row, process: RankProcess) -> None:
        status = await process.wait()
        # What it had written before it died is still in the socket, and is still true.
        await trio.sleep(FLUSH_S)
        row.end(describe_status(status))

    async def _watch_silence(self, row: Row) -> None:
        limits = self._limits
        started = trio.current_time()
        while True:
            await trio.sleep(min(limits.heartbeat_s, limits.start_s) / 8)
            now = trio.current_time()
            if row.state == "starting" and now - started > limits.start_s:
                row.end(f"not ready within limits.start_s ({limits.start_s:g} s), phase {row.phase or 'unknown'}")
            elif row.state != "starting" and now - row.heard_at > limits.heartbeat_s:
                row.end(f"silent for limits.heartbeat_s ({limits.heartbeat_s:g} s)")

    async def _bury(self, row: Row, process: RankProcess, link: FrameStream) -> None:
        """After a life: tell the router, wait for the proof of death, tell the others."""
        was = row.state
        row.state = "stopped" if self._stopping else "lost"
        row.end("the head ends it")
        why = row.why or ""
        self._router.rank_lost(row.rank, why)
        await link.aclose()
        async with trio.open_nursery() as nursery:
            output = trio.Event()
            nursery.start_soon(_finish_output, process, output)
            with trio.move_on_after(EXIT_S):
                await process.wait()
            process.kill()
            with trio.move_on_after(KILL_S) as patience:
                status = await process.wait()
            if patience.cancelled_caught:
                raise RankLost(row.rank, f"process {process.pid} does not die within {KILL_S:g} s of SIGKILL")
            with trio.move_on_after(FLUSH_S):
                await output.wait()  # its last words, which say why
            nursery.cancel_scope.cancel()
        if not self._stopping or status not in (0, -signal.SIGKILL):
            row.why = why = f"{describe_status(status)} ({why})" if describe_status(status) not in why else why
        log_event(
            logger,
            "info" if self._stopping else "warning",
            "rank.down",
            rank=row.rank,
            role=row.role,
            generation=row.generation,
            pid=row.pid,
            was=was,
            msg=why,
        )
        for other in self._rows.values():
            if other is not row and other.ready is not None:
                other.tell(PeerDown(rank=row.rank, generation=row.generation))
        if self._balancer.has_group(row.rank):
            self._balancer.rank_down(row.rank, row.generation)
        if status == CONFIG_STATUS and was == "starting" and not self._stopping:
            lines = process.last_lines()
            raise ConfigError(f"rank {row.rank} can not start: {lines[-1] if lines else 'it did not say why'}")

    # ------------------------------------------------------------ what a rank says

    def _take(self, row: Row, frames: list[Frame]) -> None:
        row.heard_at = trio.current_time()
        if len(frames) == 1 and type(frames[0].message) is TokensEmitted and row.ready is not None:
            self._router.rank_frames(row.rank, frames)  # nearly all that a rank says
            return
        about_requests, about_group = [], []
        for frame in frames:
            message = frame.message
            if isinstance(message, TokensEmitted):
                about_requests.append(frame)
            elif isinstance(message, RankSnapshot):
                _check_self(row, message.rank, message.generation)
                row.snapshot = message
                self._router.rank_snapshot(message)
            elif isinstance(message, PairCounts):
                self._take_pairs(row, message, frame.blob)
            elif isinstance(message, RankStarting):
                progress = describe_progress(message.done, message.total, message.unit[:64]).replace("_", " ")
                row.phase = f"{message.phase[:128]} {progress}"
                if row.progress is None or row.progress.phase != message.phase:
                    row.phase_at = row.heard_at
                row.progress = message
                if row.phases is not None:
                    row.phases.progress(message, row.heard_at)
            elif isinstance(message, RankHello):
                self._take_hello(row, message)
            elif isinstance(message, RankReady):
                self._take_ready(row, message, bytes(frame.blob))
            elif isinstance(message, WriterOverdue):
                self._end_writer(row, message)
            elif type(message) in GROUP_WORDS:
                about_group.append(frame)
            else:
                about_requests.append(frame)
        if about_group:
            if row.ready is None or not self._balancer.has_group(row.rank):
                raise RemoteProtocolError(f"{type(about_group[0].message).__name__} of a rank that is in no group")
            self._balancer.rank_frames(row.rank, about_group)
        if about_requests:
            if row.ready is None:
                raise RemoteProtocolError(f"{type(about_requests[0].message).__name__} before RankReady")
            self._router.rank_frames(row.rank, about_requests)

    def _take_pairs(self, row: Row, message: PairCounts, blob: memoryview) -> None:
        _check_self(row, message.rank, message.generation)
        if row.role != "prefill":
            raise RemoteProtocolError("counts pushes, and is no prefill rank")
        decode_ranks = {other.rank for other in self._rows.values() if other.role == "decode"}
        row.pairs = read_pairs(message, blob, decode_ranks)

    def _take_hello(self, row: Row, hello: RankHello) -> None:
        _check_self(row, hello.rank, hello.generation)
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"speaks protocol {hello.version}, this head {PROTOCOL_VERSION}")
        if hello.role != row.role or hello.config_digest != self._digest:
            raise RemoteProtocolError(
                f"says {hello.role} with configuration {hello.config_digest}, not what it was given"
            )

    def _take_ready(self, row: Row, ready: RankReady, description: bytes) -> None:
        _check_self(row, ready.rank, ready.generation)
        if row.ready is not None or self._stopping:
            return
        if row.role == "decode" and not ready.address:
            raise RemoteProtocolError("a decode rank must say where it listens")
        has_group = self._balancer.has_group(row.rank)
        row.ready, row.state, row.phase = ready, "joining" if has_group else "ready", ""
        others = [other for other in self._rows.values() if other.ready is not None and other.role != row.role]
        # PeerUp first: the router may place requests on the pair as soon as it knows of this rank.
        for other in others:
            prefill, decode = (row, other) if row.role == "prefill" else (other, row)
            assert decode.ready is not None
            prefill.tell(PeerUp(rank=decode.rank, generation=decode.generation, address=decode.ready.address))
        log_event(
            logger,
            "info",
            "rank.ready",
            rank=row.rank,
            role=row.role,
            generation=row.generation,
            device=ready.device,
            fabric=ready.fabric,
            pages=ready.num_pages,
            page_tokens=ready.page_tokens,
            slabs=ready.num_slabs,
            took_s=trio.current_time() - row.phases.started_at if row.phases is not None else None,
        )
        if has_group:
            generation = row.generation
            wire = Wire(generation, row.tell, row.end, lambda: self._serve(row, generation))
            self._balancer.rank_ready(ready, description, wire)
        else:
            self._serve(row, row.generation)

    def _serve(self, row: Row, generation: int) -> None:
        """Requests may go there from now on."""
        if row.generation != generation or row.link is None or row.ready is None or self._stopping:
            return  # that life is ending, and the router knows
        row.state = "ready"
        self._router.rank_ready(generation, row.role, row.link, row.ready, row.end)
        if all(other.state == "ready" for other in self._rows.values()):
            self.became_ready.set()

    def _end_writer(self, row: Row, message: WriterOverdue) -> None:
        """Its word does not come, so its death must: nothing else frees what a rank of the other role granted it."""
        writer = self._rows.get(message.rank)
        if writer is None or writer.role == row.role:
            raise RemoteProtocolError(f"accuses rank {message.rank}, which writes nothing to it")
        if writer.generation == message.generation and not self._stopping:
            writer.end(f"{message.pages} pages of {row.role} rank {row.rank} are in quarantine until it is gone")


def _add_fields(kind: Callable[..., _Counts], counts: Iterable[_Counts]) -> _Counts:
    """Counters of many ranks, field by field."""
    return kind(*map(sum, zip(*map(msgspec.structs.astuple, counts), strict=True)))


async def _finish_output(process: RankProcess, done: trio.Event) -> None:
    await process.run_output()
    done.set()


def _check_self(row: Row, rank: int, generation: int) -> None:
    if (rank, generation) != (row.rank, row.generation):
        raise RemoteProtocolError(f"says it is rank {rank} generation {generation}, not {row.rank} of {row.generation}")
