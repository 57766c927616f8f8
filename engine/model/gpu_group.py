"""GraphSteps: the steps of a group whose ranks exchange rows inside their graphs, and what of them is under way.

The words of a step go over the mesh of sockets before its graphs are launched, with the rows that each rank has. That
is while the graphs of the step before are computed, so nobody waits for words but who has nothing to do; steps that end
meanwhile are told. Graphs of all ranks have the same sizes in the same order then (`launches.py`), and find one
another's memory by themselves.

Rows that do not come make their step and those behind it void (`Pipeline.void`): they are run again in the next
membership. A member whose connection ends is not waited for any longer.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from engine.core.pact import GroupStep
from engine.core.plan import StepResult
from engine.errors import DeviceError
from engine.model.decoding import Decode
from engine.model.device_loads import DeviceLoads
from engine.model.device_slots import DevicePart
from engine.model.dispatch import Mesh
from engine.model.envelope import Envelope
from engine.model.exchange import Key, MeshBroken
from engine.model.expert_slots import Prepared, TorchExpertSlots
from engine.model.group import GroupWorker, Jobs, OnBroken, StepVoid
from engine.model.launches import Launches, Turns
from engine.model.nvlink import PHASES, NvlinkExchange, read_failure
from engine.model.passes import Job, Progress, StepRunner
from engine.model.peer_memory import PeerMapping, SharedMemory
from engine.model.pipeline import Ints, Launched, Pipeline
from engine.model.said import Said
from engine.model.step_model import StepModel

NO_PEERS: Mapping[int, PeerMapping] = {}
LOOK_S = 5e-5
"""How often it looks whether a step that it waits for has ended."""
WATCH_S = 2e-3
"""How often the worker looks whether a member has gone, at most: it does where it looks whether a step has ended. A
step without that member would not have ended sooner, so nobody need wake for it."""
HELD = 4
"""Words of failures on the host: as many as steps can be under way, and more."""


class PeerMesh(Mesh, Protocol):
    """What is needed of `exchange.Mesh` beyond what dispatch needs."""

    @property
    def peers(self) -> Mapping[int, PeerMapping]: ...
    def finish(self, key: Key, look: Callable[[], float] | None = None) -> dict[int, memoryview]: ...
    def find_gone(self) -> MeshBroken | None: ...


class GraphSteps:
    """See the module; `group.Steps`. Belongs to the device's worker thread."""

    def __init__(
        self,
        runner: StepRunner,
        model: StepModel,
        pipeline: Pipeline,
        experts: TorchExpertSlots,
        parts: Sequence[DevicePart],
        exchange: NvlinkExchange,
        share: SharedMemory,
        loads: DeviceLoads,
        *,
        limit_s: float,
        idle_limit: int,
    ) -> None:
        """All but the last four are borrowed.

        Args:
            exchange: of this rank's place; what `model`'s steps were made with.
            share: its mailbox; taken.
            loads: taken.
            limit_s: of `exchange`, for its name.
            idle_limit: as `pact.agree` takes it.
        """
        self._runner = runner
        self._model = model
        self._pipeline = pipeline
        self._experts = experts
        self._parts = tuple(parts)
        self._exchange = exchange
        self._share = share
        self._loads = loads
        self._limit_s = limit_s
        self._said = Said(idle_limit)
        self._peers = NO_PEERS
        self._ranks: list[int] = []
        self._watch_after = 0.0
        on_gpu = share.device.type == "cuda"
        self._ended = torch.cuda.Event() if on_gpu else None
        # Each as a tensor and as an array.
        held = [torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu) for _ in range(HELD)]
        self._failures = deque((word, word.numpy()) for word in held)

    def enter(self, mesh: Mesh, prepared: Prepared) -> None:
        """See `Steps.enter`.

        Raises:
            DeviceError: the head has given this rank another place than the one that its steps were made for.
        """
        number, own = prepared.membership.number, self._exchange.mailbox.rank
        if prepared.place != own:
            raise DeviceError(f"membership {number} has this rank at place {prepared.place}, its steps are of {own}")
        self._model.settle()
        self._unmap()
        self._peers = _peers_of(mesh).peers
        self._ranks = [member.rank for member in prepared.membership.members]
        addresses = {place: peer.address for place, peer in self._peers.items()}
        self._exchange.enter(number, addresses | {own: self._share.address})

    def run(self, group: GroupWorker, job: Job, progress: Progress) -> StepResult:
        """See `Steps.run`. Waits for all of it; nothing is under way meanwhile."""
        prompts = [len(chunk.tokens) for part in progress.waiting if isinstance(part, list) for chunk in part]
        decode = sum(len(part.slabs) for part in progress.waiting if isinstance(part, Decode))
        own = self._model.plan_launches(prompts, decode)
        launches, step = self._agree(group, job, own)
        began = time.perf_counter_ns()
        self._model.turns = Turns(own, launches, functools.partial(self._check, group, step))
        try:
            while progress.waiting:
                self._runner.run_next(progress, repeatable=True)
            self._model.run_rest()
            self._check(group, step)
        finally:
            progress.device_ns += time.perf_counter_ns() - began
        self._count(progress.device_ns // 1000, job)
        return self._runner.finish(job, progress, step)

    def launch(self, group: GroupWorker, job: Job, tell: Callable[[], None]) -> bool:
        """Agrees on a step and enqueues it, if it can be launched ahead. If not, nothing has been said of it.

        Args:
            group: whose step.
            job: the step.
            tell: ends the first step under way: called for those that end while the others' words are waited for.

        Raises:
            DeviceError: a row names a place that there is not; or a step that was told meanwhile has failed.
        """
        if group.mesh is None or group.is_stopped or group.has_news:
            return False
        is_empty = job.decode is None and not job.chunks
        if not is_empty and not self._pipeline.accepts(job):
            return False
        self._pipeline.check(job)
        own = self._model.plan_launches((), self._pipeline.count_rows(job))
        try:
            launches, step = self._agree(group, job, own, functools.partial(self._tell_ended, group, tell))
        except MeshBroken as broken:
            self._give_up(group, broken)
            return False
        self._model.turns = Turns(own, launches, lambda: None)
        self._pipeline.launch(job, step, self._copy_failure)
        return True

    def finish(self, group: GroupWorker, first: Launched, jobs: Jobs, on_broken: OnBroken) -> StepResult:
        """What the first step under way brought, in this membership or, if it is void, in a later one. Arguments as
        of `GroupWorker.run`."""
        if not first.is_void:
            if not first.is_over:
                self._await(group, first.ended)
            word = self._pipeline.wait(first)
            if not word:
                result = self._pipeline.finish(first)
                self._count(result.device_us, first.job)
                return result
            self._pipeline.void()
            assert first.group is not None
            group.note_broken(self._blame(group, word, first.group))
        return group.run(first.job, jobs, on_broken)

    def watch(self, group: GroupWorker) -> None:
        """Looks whether a member has gone while steps are under way: they end without it then, void."""
        now = time.monotonic()
        if group.mesh is not None and not group.is_stopped and now >= self._watch_after:
            self._watch_after = now + WATCH_S
            gone = _peers_of(group.mesh).find_gone()
            if gone is not None:
                self._give_up(group, gone)

    def close(self) -> None:
        """Ends; not on a device that has failed."""
        # Steps that nobody waited for, because the loop has ended, still put rows into what is unmapped here.
        self._model.settle()
        self._unmap()
        self._share.close()

    def _agree(
        self, group: GroupWorker, job: Job, own: Launches, look: Callable[[], float] | None = None
    ) -> tuple[Launches, GroupStep]:
        """The exchange of words, and the tables of the step's epoch. `look`: see `Mesh.finish`.

        Raises:
            MeshBroken: a member did not answer.
            RemoteProtocolError: a frame that is none.
            DeviceError: a slot does not hold what the table of the epoch names.
        """
        assert group.mesh is not None
        frame = (self._said.pack(group.say(job, rows=own.rows, passes=own.passes, drafts=0), own),)
        key = (group.step, 0, 0, 0)
        group.mesh.start(key, {other: frame for other in group.mesh.places if other != group.place})
        heard = _peers_of(group.mesh).finish(key, look)
        launches, agreed = self._said.read(heard, self._ranks, self._experts.active, group.number)
        for at, part in enumerate(self._parts):
            # On the steps' stream: those under way keep the table that they have.
            part.tables.put(self._experts.find_table(at), group.place, part.pool)
        return launches, group.latch(agreed)

    def _tell_ended(self, group: GroupWorker, tell: Callable[[], None]) -> float:
        """Tells of steps that have ended, between words. Returns the seconds until others may have.

        Raises:
            StepVoid: one does not count, so those behind it do not, nor the step that is agreed on.
            DeviceError: the device has failed.
        """
        while self._pipeline and self._pipeline.has_ended:
            first = self._pipeline.first
            if word := self._pipeline.wait(first):
                assert first.group is not None
                raise self._blame(group, word, first.group)
            tell()
            if group.mesh is None:
                raise DeviceError("a step that was under way has failed")
        return self._pipeline.find_wait(math.inf) if self._pipeline else math.inf

    def _give_up(self, group: GroupWorker, broken: MeshBroken) -> None:
        group.note_broken(broken)
        self._exchange.abort(broken.place)

    def _check(self, group: GroupWorker, step: GroupStep) -> None:
        """Waits for all that is enqueued. Raises StepVoid if rows of others did not come."""
        failure = self._copy_failure()
        if self._ended is not None:
            self._ended.record()
        self._await(group, self._ended)
        if word := int(failure[0]):
            raise self._blame(group, word, step)

    def _await(self, group: GroupWorker, ended: torch.cuda.Event | None) -> None:
        """Until the device has come so far, which the limit of its own waits bounds; members that go end it sooner."""
        while ended is not None and not ended.query():
            self.watch(group)
            time.sleep(LOOK_S)

    def _copy_failure(self, envelope: Envelope | None = None) -> Ints:
        """int64[1] on the host, once the device has come so far; good for as many steps as can be under way."""
        host, word = self._failures[0]
        self._failures.rotate(-1)
        failure = self._exchange.failure
        if envelope is None or envelope.calls is None:
            host.copy_(failure, non_blocking=True)
        else:
            envelope.calls.copy(host.data_ptr(), failure.data_ptr(), word.nbytes)
        return word

    def _blame(self, group: GroupWorker, word: int, step: GroupStep) -> StepVoid:
        """Who was waited for in vain. Whose connection has ended is not accused: he may have waited in vain himself."""
        expiry = read_failure(word, self._exchange.mailbox.layout.layers)
        assert expiry is not None
        gone = None if group.mesh is None else _peers_of(group.mesh).find_gone()
        if gone is not None:
            return StepVoid(gone.place, gone.why, step=step.step, overdue=False)
        why = f"sent no rows in the {PHASES[expiry.phase]} of layer {expiry.layer} within {self._limit_s:g} s"
        return StepVoid(expiry.place, why, step=step.step, overdue=True)

    def _count(self, device_us: int, job: Job) -> None:
        self._loads.note_step(device_us=device_us, has_rows=bool(job.chunks) or job.decode is not None)
        found = self._loads.look()
        if found is not None:
            loads, steps = found
            self._experts.add_loads(loads, steps=steps)

    def _unmap(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = NO_PEERS


def _peers_of(mesh: Mesh) -> PeerMesh:
    """The mesh as the one that members with shared memory have made."""
    assert hasattr(mesh, "peers")
    return mesh  # type: ignore[return-value]
