"""TorchDevice: the Device of a rank on CPU. One worker thread runs the steps, in order; the trio loop only hands over.

The worker is the one thread of a rank that computes (a GPU needs none). Its results come back through the trio token.
After a failed step the arena's contents are unknown, so the device refuses everything that follows.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import trio

from engine.config import RankConfig, model_directory, plan_num_pages
from engine.core.plan import StepPlan, StepResult
from engine.errors import ConfigError, DeviceError, LocalProtocolError
from engine.model.checkpoint import load_checkpoint
from engine.model.engram import load_tables
from engine.model.kv import Arena, plan_layout
from engine.model.rows import RowBatch
from engine.model.sampling import sample_tokens
from engine.model.transformer import PagedTransformer
from engine.ports import DeviceInfo
from transport.fabric import BlockRun
from transport.messages import Sampling

QUEUE_DEPTH = 2
SWITCH_INTERVAL_S = 5e-5
"""The interpreter's default of 5 ms would be the loop's wake-up time while a step runs."""
SLABS_PER_ROW = 2
"""Default slabs: sequences that are being received or wait for their turn need one as well."""

ReportPhase = Callable[[str, int, int, str], None]
Ints = npt.NDArray[np.int64]


class StepTicket:
    """A submitted step of a TorchDevice."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.done = trio.Event()
        self.result: StepResult | None = None
        self.failure: str | None = None


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A prefill chunk, copied out of its plan."""

    slab: int
    start: int
    tokens: Ints
    pages: Ints
    sampling: Sampling | None


@dataclasses.dataclass(frozen=True)
class _Decode:
    """The decode rows of a step as columns; `tokens` is -1 where the slab knows the token."""

    slabs: Ints
    positions: Ints
    tokens: Ints
    tables: Ints
    widths: Ints
    sampling: tuple[Sampling, ...]


@dataclasses.dataclass(frozen=True)
class _Job:
    ticket: StepTicket
    chunks: tuple[_Chunk, ...]
    decode: _Decode | None


class TorchDevice:
    """A CPU share with the model loaded. Made by `open_torch_device`; all methods belong to the trio loop."""

    def __init__(self, model: PagedTransformer, info: DeviceInfo, *, threads: int = 1) -> None:
        """Starts the worker. Must run inside trio.

        Args:
            model: taken.
            info: what the rank is told.
            threads: torch threads of the worker. Bitwise equal rows are promised for 1.
        """
        self._model = model
        self._info = info
        self._threads = max(1, threads)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._queued = 0
        self._failure: str | None = None
        self._closed = False
        self._token = trio.lowlevel.current_trio_token()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._worker = threading.Thread(target=self._work, name="torch-device", daemon=True)
        self._worker.start()

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def model(self) -> PagedTransformer:
        """For tests and tools; not to be run while steps are queued."""
        return self._model

    def block_runs(self) -> Sequence[BlockRun]:
        """See `ports.Device.block_runs`."""
        return self._model.arena.block_runs()

    def submit(self, plan: StepPlan) -> StepTicket:
        """See `ports.Device.submit`.

        Raises:
            DeviceError: the device has failed or is closed.
            LocalProtocolError: two steps are queued already.
        """
        if self._closed:
            raise DeviceError(f"step {plan.step} was submitted to a closed device")
        if self._failure is not None:
            raise DeviceError(f"step {plan.step} can not run: {self._failure}")
        if self._queued >= QUEUE_DEPTH:
            raise LocalProtocolError(f"step {plan.step} would be a third queued step (limit {QUEUE_DEPTH})")
        job = _copy_plan(plan)
        self._queued += 1
        self._jobs.put(job)
        return job.ticket

    async def wait(self, ticket: StepTicket) -> StepResult:
        """See `ports.Device.wait`.

        Raises:
            DeviceError: the step failed.
        """
        await ticket.done.wait()
        if ticket.result is None:
            raise DeviceError(f"step {ticket.step} failed: {ticket.failure}")
        return ticket.result

    async def aclose(self) -> None:
        """See `ports.Device.aclose`."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        # The worker ends after the queued steps; a step that hangs is ended with the process by its supervisor.
        await trio.to_thread.run_sync(self._worker.join, abandon_on_cancel=True)

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            ticket = job.ticket
            failure = self._failure
            if failure is None:
                try:
                    ticket.result = self._run(job)
                except Exception as error:  # the rank boundary: whatever a step dies of is reported to its waiter
                    failure = f"{type(error).__name__}: {error}"
                    self._failure = failure
            ticket.failure = failure
            try:
                self._token.run_sync_soon(self._finish, ticket)
            except trio.RunFinishedError:
                return

    def _finish(self, ticket: StepTicket) -> None:
        self._queued -= 1
        ticket.done.set()

    def _run(self, job: _Job) -> StepResult:
        started = time.perf_counter_ns()
        chunk_tokens = tuple(token for chunks in self._passes(job.chunks) for token in self._run_chunks(chunks))
        row_tokens = () if job.decode is None else self._run_decode(job.decode)
        device_us = (time.perf_counter_ns() - started) // 1000
        return StepResult(step=job.ticket.step, chunk_tokens=chunk_tokens, row_tokens=row_tokens, device_us=device_us)

    def _passes(self, chunks: tuple[_Chunk, ...]) -> list[list[_Chunk]]:
        """Which chunks go through the model together, in order: as many as its staging rows hold.

        A pass of a few rows costs more than half of one of fifty, so short prompts gain much from company.
        """
        passes: list[list[_Chunk]] = []
        room = 0
        for chunk in chunks:
            need = len(chunk.tokens) + min(chunk.start, self._model.shape.window - 1)
            if need > room or self._model.replay_rows:
                passes.append([])
                room = self._model.arena.staging_rows
            passes[-1].append(chunk)
            room -= need
        return passes

    def _run_chunks(self, chunks: list[_Chunk]) -> list[int | None]:
        """One pass; the token that follows each chunk which asks for one."""
        slabs = np.array([chunk.slab for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([len(chunk.tokens) for chunk in chunks])
        tables, widths = _stack([chunk.pages for chunk in chunks])
        self._check_places(slabs, tables, widths, starts + counts)
        tokens, _ = _stack([chunk.tokens for chunk in chunks])
        self._check_ids(tokens)
        batch = RowBatch(slabs, starts, tokens, tables, counts if len(chunks) > 1 else None)
        asking = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        wanted = (batch.firsts + counts - 1)[asking].tolist()
        logits = self._model.forward_prompt(batch, last=bool(asking), wanted=wanted)
        followers: list[int | None] = [None] * len(chunks)
        if asking:
            sampling = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
            drawn = sample_tokens(logits, sampling, (starts + counts)[asking].tolist(), self._info.eos_ids)
            self._keep_sampled(slabs[asking], drawn)
            for index, token in zip(asking, drawn.tolist(), strict=True):
                followers[index] = token
        return followers

    def _run_decode(self, decode: _Decode) -> tuple[int, ...]:
        self._check_places(decode.slabs, decode.tables, decode.widths, decode.positions + 1)
        first, stride = self._model.arena.sampled_cell()
        cells = first + decode.slabs * stride
        sampled = self._model.arena.ints.numpy()[cells]
        tokens = np.where(decode.tokens < 0, sampled, decode.tokens)
        self._check_ids(tokens)
        batch = RowBatch(decode.slabs, decode.positions, tokens[:, None], decode.tables)
        logits = self._model.forward(batch)
        positions = (decode.positions + 1).tolist()
        drawn = sample_tokens(logits, decode.sampling, positions, self._info.eos_ids)
        self._keep_sampled(decode.slabs, drawn)
        return tuple(drawn.tolist())

    def _keep_sampled(self, slabs: Ints, tokens: Ints) -> None:
        first, stride = self._model.arena.sampled_cell()
        self._model.arena.ints.numpy()[first + slabs * stride] = tokens

    def _check_ids(self, tokens: Ints) -> None:
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._info.vocab_size:
            raise DeviceError(f"a token id is outside 0..{self._info.vocab_size - 1}")

    def _check_places(self, slabs: Ints, pages: Ints, widths: Ints, lengths: Ints) -> None:
        """A wrong number here would read or write another sequence's memory."""
        info = self._info
        if int(slabs.min()) < 0 or int(slabs.max()) >= info.num_slabs:
            raise DeviceError(f"a slab is outside 0..{info.num_slabs - 1}")
        if pages.size and (int(pages.min()) < 0 or int(pages.max()) >= info.num_pages):
            raise DeviceError(f"a page id is outside 0..{info.num_pages - 1}")
        longest = int(lengths.max())
        short = np.nonzero(lengths > widths * info.page_tokens)[0]
        if len(short):
            row = int(short[0])
            raise DeviceError(f"{int(lengths[row])} tokens need more pages than the {int(widths[row])} given")
        if longest > info.max_model_tokens:
            raise DeviceError(f"{longest} tokens are more than max_model_tokens ({info.max_model_tokens})")


def _copy_plan(plan: StepPlan) -> _Job:
    """Copy everything that a plan only lends."""
    chunks = tuple(
        _Chunk(
            slab=chunk.slab,
            start=chunk.start,
            tokens=np.frombuffer(chunk.tokens, "<i4").astype(np.int64),
            pages=np.array(chunk.pages, np.int64),
            sampling=chunk.sample,
        )
        for chunk in plan.chunks
    )
    decode = None
    if plan.rows:
        tables, widths = _stack([np.array(row.pages, np.int64) for row in plan.rows])
        decode = _Decode(
            slabs=np.array([row.slab for row in plan.rows]),
            positions=np.array([row.position for row in plan.rows]),
            tokens=np.array([-1 if row.token is None else row.token for row in plan.rows]),
            tables=tables,
            widths=widths,
            sampling=tuple(row.sampling for row in plan.rows),
        )
    return _Job(StepTicket(plan.step), chunks, decode)


def _stack(lines: list[Ints]) -> tuple[Ints, Ints]:
    """Lines of several lengths as one table, filled up with zeros: int64[n, widest], and int64[n] lengths."""
    lengths = np.array([len(line) for line in lines])
    table = np.zeros((len(lines), int(lengths.max())), np.int64)
    for index, line in enumerate(lines):
        table[index, : len(line)] = line
    return table, lengths


async def open_torch_device(config: RankConfig, report_phase: ReportPhase, *, poison: bool = False) -> TorchDevice:
    """Load the model, allocate the arena, run a step to warm up.

    Args:
        config: the rank's configuration. `num_pages` or `num_slabs` of 0 ask for a default: pages for `decode_rows`
            sequences of full length within a quarter of the machine's memory, and two slabs per decode row.
        report_phase: called in the trio loop with (phase, done, total, unit).
        poison: fill the arena with NaN, so that a test sees a read of something never written.

    Raises:
        ConfigError: the device is not a CPU, or the checkpoint can not be used.
    """
    if config.device != "cpu":
        raise ConfigError(f"device must be 'cpu', found {config.device!r}")

    def report(phase: str, done: int, total: int, unit: str) -> None:
        trio.from_thread.run_sync(report_phase, phase, done, total, unit)

    # Loading is not cancellable half-way: what a supervisor wants to stop, it kills.
    model, info = await trio.to_thread.run_sync(_load, config, report, poison)
    return TorchDevice(model, info, threads=config.threads)


def _load(config: RankConfig, report: ReportPhase, poison: bool) -> tuple[PagedTransformer, DeviceInfo]:
    torch.set_num_threads(max(1, config.threads))
    directory = model_directory(config.model)
    files = sorted(directory.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    report("weights", 0, total, "bytes")
    shape, weights = load_checkpoint(directory)
    tables = load_tables(directory, shape)
    report("weights", total, total, "bytes")

    max_tokens = min(config.max_model_tokens or shape.max_length, shape.max_length)
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

    model = PagedTransformer(shape, weights, tables, arena, max_tokens=max_tokens, replay_rows=config.replay_rows)
    report("warmup", 0, 1, "steps")
    nothing, row = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    model.forward(RowBatch(nothing, nothing, row, row))
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
    )
    return model, info
