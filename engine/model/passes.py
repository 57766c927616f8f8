"""Jobs and StepRunner: a step as passes through the model, which there are, in order, and one of them at a time.

A pass ends with its sampled tokens, and only there the cell of a slab's last token is written. So a pass of a group
that broke off in the middle can run again: what it wrote before is addressed by position. One thing is not harmless to
repeat: a long chunk's rows go round the rings of its slab, over rows that its repetition reads. Such slabs are kept
before the pass, and put back before it is repeated.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.core.pact import GroupStep
from engine.core.plan import StepPlan, StepResult
from engine.errors import DeviceError
from engine.model.kv import SPARE_ROWS
from engine.model.rows import RowBatch
from engine.model.sampling import sample_tokens
from engine.model.transformer import PagedTransformer
from engine.ports import DeviceInfo
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A prefill chunk, copied out of its plan."""

    slab: int
    start: int
    tokens: Ints
    pages: Ints
    sampling: Sampling | None


@dataclasses.dataclass(frozen=True)
class Decode:
    """The decode rows of a step as columns; `tokens` is -1 where the slab knows the token."""

    slabs: Ints
    positions: Ints
    tokens: Ints
    tables: Ints
    widths: Ints
    sampling: tuple[Sampling, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """A plan of which nothing is borrowed any more. `idle`, `stop`: see `StepPlan`."""

    step: int
    chunks: tuple[Chunk, ...]
    decode: Decode | None
    idle: int
    stop: bool


Pass = list[Chunk] | Decode


@dataclasses.dataclass
class Progress:
    """How far a job is.

    Attributes:
        waiting: passes not finished, in order.
        chunk_tokens, row_tokens: of those that are.
        device_ns: time worked on it, broken passes included.
        kept: slabs and their bytes as they were before the first of `waiting`, once it has begun.
    """

    waiting: list[Pass]
    chunk_tokens: list[int | None] = dataclasses.field(default_factory=list)
    row_tokens: tuple[int, ...] = ()
    device_ns: int = 0
    kept: tuple[Ints, Tensor] | None = None

    @property
    def rows(self) -> int:
        """Rows of the passes that wait."""
        return sum(
            len(part.slabs) if isinstance(part, Decode) else sum(len(chunk.tokens) for chunk in part)
            for part in self.waiting
        )


class StepRunner:
    """Runs passes on a model. Belongs to the device's worker thread."""

    def __init__(self, model: PagedTransformer, info: DeviceInfo) -> None:
        self._model = model
        self._info = info

    def run(self, job: Job) -> StepResult:
        """A whole step of a rank without a group."""
        started = time.perf_counter_ns()
        progress = self.begin(job)
        while progress.waiting:
            self.run_next(progress)
        progress.device_ns = time.perf_counter_ns() - started
        return self.finish(job, progress)

    def begin(self, job: Job) -> Progress:
        """Chunks first, then the decode rows."""
        waiting: list[Pass] = [*self._split(job.chunks)]
        return Progress(waiting if job.decode is None else [*waiting, job.decode])

    def finish(self, job: Job, progress: Progress, group: GroupStep | None = None) -> StepResult:
        """The result of a job with no passes left; `group`: the step of its group."""
        return StepResult(
            step=job.step,
            chunk_tokens=tuple(progress.chunk_tokens),
            row_tokens=progress.row_tokens,
            device_us=progress.device_ns // 1000,
            group=group,
        )

    def run_next(self, progress: Progress, *, repeatable: bool = False) -> None:
        """The first pass that waits.

        Args:
            repeatable: it may break off, and is run again then by another call.
        """
        part = progress.waiting[0]
        if repeatable:
            self._keep_slabs(part, progress)
        if isinstance(part, Decode):
            progress.row_tokens = self._run_decode(part)
        else:
            progress.chunk_tokens += self._run_chunks(part)
        del progress.waiting[0]
        progress.kept = None

    def run_nothing(self) -> None:
        """A pass without rows, see `PagedTransformer.forward_nothing`."""
        self._model.forward_nothing()

    def _keep_slabs(self, part: Pass, progress: Progress) -> None:
        """Keeps the slabs that a repetition would find changed; before a repetition puts them back."""
        slabs = self._model.arena.slabs
        if progress.kept is not None:
            slabs[progress.kept[0]] = progress.kept[1]
        elif isinstance(part, list) and max(len(chunk.tokens) for chunk in part) > SPARE_ROWS:
            # A prompt's first chunk reads nothing of its slab.
            which = np.array([chunk.slab for chunk in part if chunk.start], np.int64)
            progress.kept = which, slabs[which]

    def _split(self, chunks: tuple[Chunk, ...]) -> list[list[Chunk]]:
        """Which chunks go through the model together, in order: as many as its staging rows hold.

        A pass of a few rows costs more than half of one of fifty, so short prompts gain much from company.
        """
        passes: list[list[Chunk]] = []
        room = 0
        for chunk in chunks:
            need = len(chunk.tokens) + min(chunk.start, self._model.shape.window - 1)
            if need > room or self._model.replay_rows:
                passes.append([])
                room = self._model.arena.staging_rows
            passes[-1].append(chunk)
            room -= need
        return passes

    def _run_chunks(self, chunks: list[Chunk]) -> list[int | None]:
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

    def _run_decode(self, decode: Decode) -> tuple[int, ...]:
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


def copy_plan(plan: StepPlan) -> Job:
    """Copy everything that a plan only lends."""
    chunks = tuple(
        Chunk(
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
        rows = plan.columns
        decode = Decode(
            slabs=rows.roster.slabs,
            positions=rows.positions,
            tokens=rows.tokens,
            tables=rows.roster.tables,
            widths=np.array([len(pages) for pages in rows.roster.pages]),
            sampling=rows.roster.sampling,
        )
    return Job(plan.step, chunks, decode, plan.idle, plan.stop)


def _stack(lines: list[Ints]) -> tuple[Ints, Ints]:
    """Lines of several lengths as one table, filled up with zeros: int64[n, widest], and int64[n] lengths."""
    lengths = np.array([len(line) for line in lines])
    table = np.zeros((len(lines), int(lengths.max())), np.int64)
    for index, line in enumerate(lines):
        table[index, : len(line)] = line
    return table, lengths
