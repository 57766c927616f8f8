"""Jobs and StepRunner: a step as passes through the model, which there are, in order, and one of them at a time.

A pass ends with its sampled tokens, and only there the cell of a slab's last token is written and the token counted for
penalties. So a pass of a group that broke off in the middle can run again: what it wrote before is addressed by
position. One thing is not harmless to repeat: a long chunk's rows go round the rings of its slab, over rows that its
repetition reads. Such slabs are kept before the pass, and put back before it is repeated.

A chunk with a base begins where another prompt's state was kept: slab and open page are copied when its pass begins, so
a repetition begins there again. What it is to keep itself is copied where its pass has ended.
"""

from __future__ import annotations

import dataclasses
import time
from typing import overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.core.pact import GroupStep
from engine.core.plan import Base, Scores, StepPlan, StepResult
from engine.errors import DeviceError
from engine.model.choosing import Chooser
from engine.model.decoding import UNKNOWN, Decode, Decoder, Wanted
from engine.model.drafting import Proposer
from engine.model.grammars import Grammars, Guide, Guides
from engine.model.keeping import Keeper
from engine.model.kv import SPARE_ROWS
from engine.model.penalties import count_ids
from engine.model.row_model import RowModel
from engine.model.rows import RowBatch
from engine.model.sampling import Sampler
from engine.model.scoring import join_scores, score_targets
from engine.ports import DeviceInfo
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)  # as core.plan.StepPlan
class Chunk:
    """A prefill chunk, copied out of its plan."""

    slab: int
    start: int
    tokens: Ints
    pages: Ints
    sampling: Sampling | None
    seen: Ints | None = None
    generated: int = 0
    targets: Ints | None = None
    target_tops: int = 0
    base: Base | None = None
    keep: int = -1


@dataclasses.dataclass(slots=True)  # as core.plan.StepPlan
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
        wanted: what is to be proposed when none waits any more.
        chunk_tokens, row_tokens, and so on as in StepResult: of those that are.
        device_ns: time worked on it, broken passes included.
        kept: slabs and their bytes as they were before the first of `waiting`, once it has begun.
    """

    waiting: list[Pass]
    wanted: Wanted | None = None
    chunk_tokens: list[int | None] = dataclasses.field(default_factory=list)
    row_tokens: tuple[int, ...] = ()
    row_counts: tuple[int, ...] | None = None
    row_proposed: tuple[int, ...] | None = None
    row_scores: Scores | None = None
    chunk_scores: list[Scores] = dataclasses.field(default_factory=list)
    target_scores: list[tuple[int, Scores]] = dataclasses.field(default_factory=list)
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

    def __init__(
        self,
        model: RowModel,
        info: DeviceInfo,
        proposer: Proposer | None = None,
        *,
        rejects: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        """All are borrowed. `proposer`: of the model; None drafts nothing. `rejects`: see `Decoder`. `grammars`: None
        where no request has one."""
        self._model = model
        self._info = info
        self._proposer = proposer
        self._chooser = Chooser(model.arena, info)
        self._guides = Guides(grammars)
        self._decoder = Decoder(model, info, self._chooser, proposer, rejects=rejects, guides=self._guides)
        self._keeper = Keeper(model.arena, info, replay_rows=model.replay_rows)

    @property
    def decoder(self) -> Decoder:
        """What knows where slabs stand."""
        return self._decoder

    def run(self, job: Job) -> StepResult:
        """A whole step of a rank without a group."""
        started = time.perf_counter_ns()
        progress = self.begin(job)
        while progress.waiting:
            self.run_next(progress)
        if progress.wanted is not None:
            self.propose(progress)
        progress.device_ns = time.perf_counter_ns() - started
        return self.finish(job, progress)

    def begin(self, job: Job) -> Progress:
        """Chunks first, then the decode rows.

        Raises:
            DeviceError: a chunk's base or what it is to keep can not be that.
        """
        self._keeper.check(job)
        waiting: list[Pass] = [*self._split(job.chunks)]
        return Progress(waiting if job.decode is None else [*waiting, job.decode])

    def finish(self, job: Job, progress: Progress, group: GroupStep | None = None) -> StepResult:
        """The result of a job with no passes left; `group`: the step of its group."""
        return StepResult(
            step=job.step,
            chunk_tokens=tuple(progress.chunk_tokens),
            row_tokens=progress.row_tokens,
            row_counts=progress.row_counts,
            row_proposed=progress.row_proposed,
            device_us=progress.device_ns // 1000,
            group=group,
            row_scores=progress.row_scores,
            chunk_scores=join_scores(progress.chunk_scores),
            target_scores=tuple(progress.target_scores),
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
            self._run_decode(part, progress)
        else:
            self._run_chunks(part, progress)
        # A chunk that samples nothing brings nothing to the host, which has waited for nothing then.
        self._model.settle()
        del progress.waiting[0]
        progress.kept = None

    def run_nothing(self) -> None:
        """A pass without rows, see `PagedTransformer.forward_nothing`."""
        self._model.forward_nothing()

    def count_drafts(self, progress: Progress) -> int:
        """Drafts that are to be proposed for each row of the job when its passes have run; 0 for no proposing."""
        if self._proposer is None:
            return 0
        if progress.wanted is not None:
            return progress.wanted.count
        return max((part.drafts for part in progress.waiting if isinstance(part, Decode)), default=0)

    def propose(self, progress: Progress, rounds: int = 0) -> None:
        """What is wanted, if anything is. May break off in a group, and be called again.

        Args:
            rounds: the largest `count_drafts` in the group.
        """
        self._decoder.propose(progress.wanted, rounds)
        progress.wanted = None

    def _keep_slabs(self, part: Pass, progress: Progress) -> None:
        """Keeps the slabs that a repetition would find changed; before a repetition puts them back."""
        slabs = self._model.arena.slabs
        if progress.kept is not None:
            slabs[progress.kept[0]] = progress.kept[1]
        elif isinstance(part, list) and max(len(chunk.tokens) for chunk in part) > SPARE_ROWS:
            # A prompt's first chunk reads nothing of its slab; one with a base copies it again.
            which = np.array([chunk.slab for chunk in part if chunk.start and chunk.base is None], np.int64)
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

    def _run_chunks(self, chunks: list[Chunk], progress: Progress) -> None:
        """One pass; the token that follows each chunk which asks for one."""
        slabs = np.array([chunk.slab for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        lengths = np.array([len(chunk.tokens) for chunk in chunks])
        tables, widths = _stack([chunk.pages for chunk in chunks])
        self._chooser.check_slabs(slabs)
        self._chooser.check_pages(tables, widths, starts + lengths)
        tokens, _ = _stack([chunk.tokens for chunk in chunks])
        self._chooser.check_ids(tokens)
        for chunk in chunks:
            if chunk.base is not None:
                self._keeper.copy_in(chunk.slab, chunk.start, chunk.pages, chunk.base)
        batch = RowBatch(slabs, starts, tokens, tables, lengths if len(chunks) > 1 else None)
        asking = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        wanted: list[int] = (batch.firsts + lengths - 1)[asking].tolist()
        targets = [(at, chunk.targets) for at, chunk in enumerate(chunks) if chunk.targets is not None]
        for at, ids in targets:
            wanted += range(int(batch.firsts[at]), int(batch.firsts[at]) + len(ids))
        if targets:
            # Every row is asked for, so every row goes through all layers.
            logits = self._model.forward(batch, wanted)
        else:
            logits = self._model.forward_prompt(batch, last=bool(asking), wanted=wanted)
        followers: list[int | None] = [None] * len(chunks)
        first, end = len(progress.chunk_tokens), len(asking)
        for at, ids in targets:
            if len(ids):
                lines = logits[end : end + len(ids)].cpu()
                told = score_targets(lines, ids, chunks[at].target_tops, chunks[at].start + 1)
                progress.target_scores.append((first + at, told))
                end += len(ids)
        if asking:
            sampler = Sampler([each.sampling for each in chunks if each.sampling is not None], self._info.eos_ids)
            self._count_seen([chunks[index] for index in asking])
            guides = {row: self._start_guide(chunks[asking[row]]) for row in sampler.guided}
            drawn, scores = self._chooser.choose(
                sampler, logits[: len(asking)], slabs[asking], (starts + lengths)[asking], guides=guides
            )
            if scores is not None:
                rows = first + np.array(asking)[scores.rows]
                progress.chunk_scores.append(dataclasses.replace(scores, rows=rows))
            for index, token in zip(asking, drawn.tolist(), strict=True):
                followers[index] = token
        progress.chunk_tokens += followers
        known = np.array([UNKNOWN if token is None else token for token in followers])
        if self._proposer is not None:
            self._proposer.keep(None, known, reopens=True)
        self._decoder.note_prompts(slabs, np.where(known < 0, UNKNOWN, starts + lengths))
        for chunk in chunks:
            if chunk.keep >= 0:
                self._keeper.copy_out(chunk.slab, chunk.keep)

    def _run_decode(self, decode: Decode, progress: Progress) -> None:
        decoded = self._decoder.run(decode)
        progress.row_tokens, progress.row_scores = decoded.tokens, decoded.scores
        progress.row_counts, progress.row_proposed = decoded.counts, decoded.proposed
        progress.wanted = decoded.wanted

    def _start_guide(self, chunk: Chunk) -> Guide:
        """For the one token that is drawn here; whoever decodes makes a guide of its own."""
        if chunk.sampling is None or chunk.seen is None:
            raise DeviceError("a prompt's last chunk has a grammar and not the ids that have followed it")
        return self._guides.start(chunk.sampling.grammar, chunk.seen[len(chunk.seen) - chunk.generated :])

    def _count_seen(self, ends: list[Chunk]) -> None:
        """Makes the counts of the slabs whose requests have penalties, whatever was in them."""
        for chunk in ends:
            if chunk.sampling is not None and chunk.sampling.has_penalties:
                if chunk.seen is None:
                    raise DeviceError("a prompt's last chunk has penalties and not the ids that they are for")
                self._chooser.check_ids(chunk.seen)
                counts = count_ids(chunk.seen, chunk.generated, self._info.vocab_size)
                self._model.arena.write_count(chunk.slab, counts)


def copy_plan(plan: StepPlan) -> Job:
    """Copy everything that a plan only lends."""
    chunks = tuple(
        Chunk(
            slab=chunk.slab,
            start=chunk.start,
            tokens=_copy_ids(chunk.tokens),
            pages=np.array(chunk.pages, np.int64),
            sampling=chunk.sample,
            seen=_copy_ids(chunk.seen),
            generated=chunk.generated,
            targets=_copy_ids(chunk.targets),
            target_tops=chunk.target_tops,
            base=chunk.base,
            keep=chunk.keep,
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
            widths=rows.roster.widths,
            sampling=rows.roster.sampling,
            ends=rows.roster.ends,
            drafts=plan.drafts,
            said=rows.roster.said,
        )
    return Job(plan.step, chunks, decode, plan.idle, plan.stop)


@overload
def _copy_ids(ids: memoryview) -> Ints: ...
@overload
def _copy_ids(ids: memoryview | None) -> Ints | None: ...
def _copy_ids(ids: memoryview | None) -> Ints | None:
    return None if ids is None else np.frombuffer(ids, "<i4").astype(np.int64)


def _stack(lines: list[Ints]) -> tuple[Ints, Ints]:
    """Lines of several lengths as one table, filled up with zeros: int64[n, widest], and int64[n] lengths."""
    lengths = np.array([len(line) for line in lines])
    table = np.zeros((len(lines), int(lengths.max())), np.int64)
    for index, line in enumerate(lines):
        table[index, : len(line)] = line
    return table, lengths
