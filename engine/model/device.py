"""TorchDevice: the Device of a rank. One worker thread runs the steps, in order; the trio loop only hands over.

The worker is the one thread of a rank that computes, on a CPU itself, on a GPU by what it launches and waits for. Its
results come back by calls that it leaves for the loop.
After a failed step the arena's contents are unknown, so the device refuses everything that follows. In a group a step
that breaks off because of another rank has not failed: `group.GroupWorker` runs it again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import trio

from engine.config import NANO, RankConfig, model_directory, plan_num_pages
from engine.core.effects import Stretch
from engine.core.plan import StepPlan, StepResult
from engine.errors import ConfigError, DeviceError, GroupBroken, LocalProtocolError
from engine.model.checkpoint import load_checkpoint
from engine.model.decoding import MOST_DRAFTS
from engine.model.dispatch import Dispatch, Warmup
from engine.model.drafting import Proposer
from engine.model.engram import load_tables
from engine.model.expert_slots import TorchExpertSlots
from engine.model.grammars import Grammars
from engine.model.group import Connect, DispatchSteps, GroupWorker, Jobs, Signal, Steps
from engine.model.grouping import Grouping, open_grouping
from engine.model.kv import Arena, plan_layout
from engine.model.passes import Job, StepRunner, copy_plan
from engine.model.pipeline import Launched, Pipeline
from engine.model.proposers import make_proposer
from engine.model.row_model import RowModel
from engine.model.rows import RowBatch
from engine.model.step_model import StepModel
from engine.model.transformer import PagedTransformer
from engine.ports import DeviceInfo, ExpertSlots
from transport.checksum import BlockReader
from transport.fabric import BlockRun
from transport.thread_calls import ThreadCalls

if TYPE_CHECKING:
    from engine.model.gpu_group import GraphSteps
    from engine.model.gpu_rank import GpuGroup

QUEUE_DEPTH = 2
SWITCH_INTERVAL_S = 5e-5
"""The interpreter's default of 5 ms would be the loop's wake-up time while a step runs."""
NAP_S = 1.0
"""Longest sleep of the worker while a step is under way."""
SLABS_PER_ROW = 2
"""Default slabs: sequences that are being received or wait for their turn need one as well."""

ReportPhase = Callable[[str, int, int, str], None]
ReadChecksums = Callable[[Sequence[Sequence[int]]], tuple[int, ...]]


class StepTicket:
    """A submitted step of a TorchDevice."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_done = False
        self.result: StepResult | None = None
        self.failure: str | None = None
        self.broken: collections.deque[GroupBroken] = collections.deque()
        """Breakages of its group that `wait` has not told yet."""


class TorchDevice:
    """An accelerator or a CPU share with the model loaded. Made by `open_torch_device`; all methods belong to the trio
    loop."""

    def __init__(
        self,
        model: RowModel,
        info: DeviceInfo,
        *,
        threads: int = 1,
        grouping: Grouping | GpuGroup | None = None,
        proposer: Proposer | None = None,
        rejects: bool = False,
        grammars: Grammars | None = None,
        read_checksums: ReadChecksums | None = None,
        gpu: int | None = None,
    ) -> None:
        """Starts the worker. Must run inside trio.

        Args:
            model: taken. In a group of CPUs its `mixture` is set.
            info: what the rank is told.
            threads: torch threads of the worker. Bitwise equal rows are promised for 1.
            grouping: what a rank of a group has beyond the model; taken.
            proposer: drafts for the model; taken. Without one, plans that ask for drafts get none.
            rejects: drafts are drawn, and judged by rejection.
            grammars: taken. Without them a row with a grammar fails.
            read_checksums: for an arena that the host can not read; see `BlockReader.checksums`.
            gpu: number of the CUDA device that the worker launches on.
        """
        self._gpu = gpu
        self._grammars = grammars
        self._model = model
        self._info = info
        self._threads = max(1, threads)
        self._jobs = Jobs()
        self._tickets: collections.deque[StepTicket] = collections.deque()
        self._read_checksums = read_checksums or BlockReader(model.arena.block_runs()).checksums
        self._queued = 0
        self._failure: str | None = None
        # What the loop has heard of it: until then it submits, and the step says why it failed.
        self._told_failure: str | None = None
        self._closed = False
        self._runner = StepRunner(model, info, proposer, rejects=rejects, grammars=grammars)
        self._pipeline = Pipeline(model, info, self._runner.decoder) if isinstance(model, StepModel) else None
        self._grouping = grouping
        self._experts: TorchExpertSlots | None = None
        self._group: GroupWorker | None = None
        self._ahead: GraphSteps | None = None
        if grouping is not None:
            self._experts, self._group = self._open_group(grouping)
        self._told = ThreadCalls()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._worker = threading.Thread(target=self._work, name="torch-device", daemon=True)
        self._worker.start()

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def model(self) -> RowModel:
        """For tests and tools; not to be run while steps are queued."""
        return self._model

    @property
    def experts(self) -> ExpertSlots | None:
        """See `ports.Device.experts`."""
        return self._experts

    def block_runs(self) -> Sequence[BlockRun]:
        """See `ports.Device.block_runs`."""
        runs = self._model.arena.block_runs()
        return runs if self._grouping is None else (*runs, *(pool.run for pool in self._grouping.pools))

    def submit(self, plan: StepPlan) -> StepTicket:
        """See `ports.Device.submit`.

        Raises:
            DeviceError: the device has failed or is closed.
            LocalProtocolError: two steps are queued already.
        """
        if self._closed:
            raise DeviceError(f"step {plan.step} was submitted to a closed device")
        if self._told_failure is not None:
            raise DeviceError(f"step {plan.step} can not run: {self._told_failure}")
        if self._queued >= QUEUE_DEPTH:
            raise LocalProtocolError(f"step {plan.step} would be a third queued step (limit {QUEUE_DEPTH})")
        job, ticket = copy_plan(plan), StepTicket(plan.step)
        self._queued += 1
        self._tickets.append(ticket)
        self._jobs.put(job)
        return ticket

    async def wait(self, ticket: StepTicket) -> StepResult:
        """See `ports.Device.wait`.

        Raises:
            DeviceError: the step failed.
            GroupBroken: once for each breakage; the step goes on in the next membership.
        """
        if ticket.is_done or ticket.broken:
            await trio.lowlevel.checkpoint()
        while not ticket.is_done and not ticket.broken:
            await self._told.wait()
        if ticket.broken:
            raise ticket.broken.popleft()
        if ticket.result is None:
            raise DeviceError(f"step {ticket.step} failed: {ticket.failure}")
        return ticket.result

    def foresee(self, grammar: str) -> None:
        """See `ports.Device.foresee`."""
        if self._grammars is not None and not self._closed:
            self._grammars.foresee(grammar)

    async def checksums(self, stretches: Sequence[Stretch]) -> tuple[int, ...]:
        """See `ports.Device.checksums`. In a thread beside the worker: behind queued steps it would delay hand-offs."""
        num_pages = self._info.num_pages
        blocks = [[*pages] if slab < 0 else [*pages, num_pages + slab] for pages, slab in stretches]
        return await trio.to_thread.run_sync(self._read_checksums, blocks)

    async def aclose(self) -> None:
        """See `ports.Device.aclose`. In a group that does not go on, queued steps are given up: after
        `limits.exchange_s` at the latest, and at once where the next membership is waited for."""
        is_first = not self._closed
        if is_first:
            self._closed = True
            self._jobs.put(Signal.CLOSE)
        # The worker ends after the queued steps; a step that hangs is ended with the process by its supervisor.
        await trio.to_thread.run_sync(self._worker.join, abandon_on_cancel=True)
        if is_first:
            self._told.close()
        if self._grammars is not None:
            self._grammars.close()

    def _open_group(self, grouping: Grouping | GpuGroup) -> tuple[TorchExpertSlots, GroupWorker]:
        experts = TorchExpertSlots(
            grouping.pools, grouping.sources, grouping.address, lambda: self._jobs.put(Signal.LOOK)
        )
        steps: Steps
        if isinstance(grouping, Grouping):
            dispatch = Dispatch(grouping.pools, grouping.idle_steps)
            self._model.mixture = dispatch
            steps = DispatchSteps(self._runner, dispatch, experts)
        else:
            assert isinstance(self._model, StepModel) and self._pipeline is not None
            steps = self._ahead = grouping.make_steps(self._runner, self._model, self._pipeline, experts)
        worker = GroupWorker(
            self._runner,
            steps,
            experts,
            grouping.connect,
            group_s=grouping.group_s,
            is_closing=lambda: self._closed,
        )
        return experts, worker

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        try:
            while (job := self._take()) is not None:
                if not self._launch(job):
                    self._end_next(functools.partial(self._run, job))
            while self._pipeline:
                self._end_launched(self._pipeline)
        finally:
            if self._group is not None and self._grouping is not None:
                self._group.end()
                if self._ahead is not None and self._failure is None:
                    self._ahead.close()
                self._grouping.close()

    def _end_next(self, run: Callable[[StepTicket], StepResult]) -> None:
        """Ends the first step that has not ended, by what `run` makes of its ticket."""
        ticket = self._tickets.popleft()
        if self._failure is None:
            try:
                ticket.result = run(ticket)
            except Exception as error:  # the rank boundary: whatever a step dies of is reported to its waiter
                self._fail(error)
        ticket.failure = self._failure
        self._told.put(self._finish, ticket)

    def _launch(self, job: Job) -> bool:
        """Whether the job is under way, and ends later. If not, all before it have ended."""
        pipeline, failure = self._pipeline, None
        try:
            if pipeline is not None and self._failure is None and self._start(job, pipeline):
                return True
        except Exception as error:  # the rank boundary; those before it end as they would have
            failure = error
        while pipeline:
            self._end_launched(pipeline)
        if failure is not None and self._failure is None:
            self._fail(failure)
        return False

    def _start(self, job: Job, pipeline: Pipeline) -> bool:
        if self._ahead is not None and self._group is not None:
            return self._ahead.launch(self._group, job, functools.partial(self._end_launched, pipeline))
        if not pipeline.accepts(job):
            return False
        pipeline.check(job)
        pipeline.launch(job)
        return True

    def _end_launched(self, pipeline: Pipeline) -> None:
        """Ends the first step under way. On a device that has failed nobody waits for it."""
        self._end_next(functools.partial(self._finish_launched, pipeline, pipeline.take_first()))

    def _finish_launched(self, pipeline: Pipeline, first: Launched, ticket: StepTicket) -> StepResult:
        if self._ahead is None or self._group is None:
            return pipeline.finish(first)
        return self._ahead.finish(self._group, first, self._jobs, functools.partial(self._tell_broken, ticket))

    def _take(self) -> Job | None:
        """The next job, None at the end. What is under way ends meanwhile; memberships are joined."""
        try:
            return self._take_job()
        except Exception as error:  # the rank boundary, between two steps: whoever waits next hears of it
            self._fail(error)
        return self._take_job()

    def _take_job(self) -> Job | None:
        pipeline, group = self._pipeline, self._group
        while True:
            if pipeline and (self._failure is not None or pipeline.has_ended):
                self._end_launched(pipeline)
                continue
            if pipeline and self._ahead is not None and group is not None:
                self._ahead.watch(group)
            elif group is not None and group.can_meet:
                group.meet()
                continue
            timeout_s = pipeline.find_wait(NAP_S) if pipeline else None
            if group is not None:
                item = group.next_item(self._jobs, timeout_s)
            else:
                item = self._jobs.get_nowait() if self._jobs.wait(timeout_s) else None
            if isinstance(item, Job):
                return item
            if item is Signal.CLOSE:
                return None

    def _run(self, job: Job, ticket: StepTicket) -> StepResult:
        if self._group is None:
            return self._runner.run(job)
        return self._group.run(job, self._jobs, functools.partial(self._tell_broken, ticket))

    def _tell_broken(self, ticket: StepTicket, breakage: GroupBroken) -> None:
        self._told.put(ticket.broken.append, breakage)

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        if self._group is not None:
            self._group.end()

    def _finish(self, ticket: StepTicket) -> None:
        self._queued -= 1
        self._told_failure = ticket.failure
        ticket.is_done = True


async def open_torch_device(
    config: RankConfig,
    report_phase: ReportPhase,
    *,
    poison: bool = False,
    mesh_address: str = "",
    connect: Connect | None = None,
    rank: int = 0,
    place: int = 0,
) -> TorchDevice:
    """Load the model, allocate the arena, run a step to warm up.

    Args:
        config: the rank's configuration. On a CPU `num_pages` or `num_slabs` of 0 ask for a default: pages for
            `decode_rows` sequences of full length within a quarter of the machine's memory, and two slabs per decode
            row.
        report_phase: called in the trio loop with (phase, done, total, unit).
        poison: fill the arena with NaN, so that a test sees a read of something never written.
        mesh_address: of a rank in a group: path of the socket where the others find it.
        connect: of a rank in a group: in place of a mesh of sockets, for tests.
        rank: which GPU, where device is cuda: ranks take those of the host in turn.
        place: of a rank of a group among its members.

    Raises:
        ConfigError: there is no such device, or the checkpoint can not be used on it.
        EngineError, OSError: the mesh's socket can not be bound.
    """
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu' or 'cuda', found {config.device!r}")
    gpu = choose_gpu(rank) if config.device == "cuda" else None

    def report(phase: str, done: int, total: int, unit: str) -> None:
        trio.from_thread.run_sync(report_phase, phase, done, total, unit)

    # Loading is not cancellable half-way: what a supervisor wants to stop, it kills.
    model: RowModel
    grouping: Grouping | GpuGroup | None = None
    proposer: Proposer | None = None
    read_checksums: ReadChecksums | None = None
    if gpu is not None:
        on_gpu, info, grouping = await trio.to_thread.run_sync(
            _load_on_gpu, config, report, poison, gpu, mesh_address, place
        )
        model, read_checksums, proposer = on_gpu, on_gpu.arena.read_checksums, on_gpu.drafter
    else:
        model, info, grouping, proposer = await trio.to_thread.run_sync(
            _load, config, report, poison, mesh_address, connect
        )
    rejects = config.draft.acceptance == "rejection"
    grammars = Grammars(model_directory(config.model), info.vocab_size, info.eos_ids[0])
    if config.role == "prefill" and config.model != NANO:
        # All requests pass a prefill rank. Found here it costs a request; found in a step it would cost the rank.
        fault = await trio.to_thread.run_sync(grammars.find_fault)
        info = dataclasses.replace(info, why_no_grammar=fault)
    return TorchDevice(
        model,
        info,
        threads=config.threads,
        grouping=grouping,
        proposer=proposer,
        rejects=rejects,
        grammars=grammars,
        read_checksums=read_checksums,
        gpu=gpu,
    )


def choose_gpu(rank: int) -> int:
    """The number of the CUDA device of a rank of this host.

    Raises:
        ConfigError: there is none.
    """
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("device is cuda, and this process sees no CUDA device; use cpu, or a build of torch for CUDA")
    return rank % count


def _load_on_gpu(
    config: RankConfig, report: ReportPhase, poison: bool, gpu: int, mesh_address: str, place: int
) -> tuple[StepModel, DeviceInfo, GpuGroup | None]:
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    # Triton, which a CPU's rank does not need.
    if config.group > 1:
        from engine.model.gpu_rank import load_gpu_group

        return load_gpu_group(config, report, device, place=place, mesh_address=mesh_address, poison=poison)
    from engine.model.step_loading import load_step_model

    model, info = load_step_model(config, report, device, poison=poison)
    return model, info, None


def _load(
    config: RankConfig, report: ReportPhase, poison: bool, mesh_address: str, connect: Connect | None
) -> tuple[PagedTransformer, DeviceInfo, Grouping | None, Proposer | None]:
    torch.set_num_threads(max(1, config.threads))
    directory = model_directory(config.model)
    files = sorted(directory.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    report("weights", 0, total, "bytes")
    grouped = config.group > 1
    shape, weights = load_checkpoint(directory, experts=not grouped)
    tables = load_tables(directory, shape)
    report("weights", total, total, "bytes")

    max_tokens = min(config.max_model_tokens or shape.max_length, shape.max_length)
    if config.kv_dtype == "fp8":
        raise ConfigError("kv_dtype 'fp8' is for device 'cuda'")
    layout = plan_layout(shape, config.page_tokens, config.kv_dtype)
    num_pages = config.num_pages or plan_num_pages(
        decode_rows=config.limits.decode_rows,
        max_model_tokens=max_tokens,
        page_tokens=config.page_tokens,
        page_bytes=layout.page_bytes,
        ranks=1,
    )
    num_slabs = config.num_slabs or SLABS_PER_ROW * config.limits.decode_rows
    chunk = max(config.limits.prefill_chunk_tokens, config.replay_rows, config.page_tokens)
    size = num_pages * layout.page_bytes + num_slabs * layout.slab_bytes
    report("arena", 0, size, "bytes")
    arena = Arena(layout, num_pages, num_slabs, chunk + shape.window - 1, poison=poison)
    report("arena", size, size, "bytes")

    grouping = open_grouping(config, directory, shape, weights, mesh_address, connect) if grouped else None
    model = PagedTransformer(
        shape,
        weights,
        tables,
        arena,
        max_tokens=max_tokens,
        replay_rows=config.replay_rows,
        mixture=Warmup() if grouped else None,
    )
    report("warmup", 0, 1, "steps")
    nothing, row = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    model.forward(RowBatch(nothing, nothing, row, row))
    # After the step that warms up, which is nobody's context.
    proposer = make_proposer(model, weights) if config.draft.tokens else None
    if poison:
        arena.poison()
    report("warmup", 1, 1, "steps")
    info = DeviceInfo(
        name="cpu",
        layout_digest=layout.digest,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        num_pages=num_pages,
        slab_bytes=layout.slab_bytes,
        num_slabs=num_slabs,
        vocab_size=shape.vocab_size,
        max_model_tokens=max_tokens,
        eos_ids=(shape.eos_token_id,),
        mesh_address=mesh_address,
        parts=tuple(pool.info for pool in grouping.pools) if grouping is not None else (),
        max_drafts=0 if proposer is None else min(proposer.max_drafts, MOST_DRAFTS),
    )
    return model, info, grouping, proposer
