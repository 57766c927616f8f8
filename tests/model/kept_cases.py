"""Prompts that go on from kept state on a device, and the same prompts computed from their first id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.plan import Base, DecodeRow, DecodeRows, PrefillChunk, StepPlan, StepResult
from engine.model.device import TorchDevice
from tests.model.paged_cases import Source, make_model
from tests.model.speculation_cases import read_scores, wrap
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]
SETTINGS = [
    Sampling(ignore_eos=True, logprobs=5),
    Sampling(ignore_eos=True, temperature=0.9, seed=5, logprobs=2),
    Sampling(
        ignore_eos=True, temperature=1.2, seed=8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5
    ),
    Sampling(ignore_eos=True, frequency_penalty=1.1, logprobs=1),
]
DRAFTS = 3


@dataclasses.dataclass(frozen=True)
class Cut:
    """A kept state: at position `at` of `ids`, all pages up to there."""

    ids: Ints
    at: int
    slab: int
    pages: tuple[int, ...]

    def base(self, page_tokens: int) -> Base:
        return Base(self.slab, self.pages[self.at // page_tokens] if self.at % page_tokens else -1)


@dataclasses.dataclass
class Told:
    """All that came of one request: logits of its prompt's chunks, tokens, what was told of them, drafts by step."""

    first: int = -1
    chunk_scores: list[object] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    row_scores: list[object] = dataclasses.field(default_factory=list)
    drafts: list[list[int]] = dataclasses.field(default_factory=list)


class Bench:
    """A device whose memory is handed out by hand. Pages and slabs are poisoned until they are written."""

    def __init__(self, source: Source, *, page_tokens: int, pages: int, slabs: int, eos: int) -> None:
        model = make_model(source, page_tokens=page_tokens, pages=pages, slabs=slabs, chunk=320, max_tokens=512)
        self.device: TorchDevice = wrap(model, source, "own", eos)
        self.page_tokens = page_tokens
        self._page = self._slab = self._step = 0
        self.logits: list[Tensor] = []
        """Of the last rows of prompts, one tensor a pass."""
        forward = model.forward

        def record(batch: object, wanted: Sequence[int] | None = None) -> Tensor:
            found = forward(batch, wanted)  # type: ignore[arg-type]
            self.logits.append(found.clone())
            return found

        model.forward = record  # type: ignore[assignment, method-assign]

    def new_pages(self, count: int) -> tuple[int, ...]:
        first, self._page = self._page, self._page + count
        return tuple(range(first, self._page))[::-1]

    def new_slab(self) -> int:
        self._slab += 1
        return self._slab - 1

    def recycle(self, pages: int, slabs: int) -> None:
        """What was handed out after these marks may be handed out again; it is poisoned."""
        arena = self.device.model.arena
        for page in range(pages, self._page):
            arena.page_bytes_of(page).fill_(0xFF)
        for slab in range(slabs, self._slab):
            arena.slab_bytes_of(slab).fill_(0xFF)
        self._page, self._slab = pages, slabs

    @property
    def marks(self) -> tuple[int, int]:
        return self._page, self._slab

    async def run(self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow] = (), drafts: int = 0) -> StepResult:
        self._step += 1
        columns = DecodeRows.of(rows) if rows else ()
        plan = StepPlan(self._step, tuple(chunks), columns, drafts=drafts)
        return await self.device.wait(self.device.submit(plan))

    def place(self, length: int, cut: Cut | None) -> tuple[int, tuple[int, ...]]:
        """A slab of its own, and pages: those of the cut that are full, then own ones."""
        shared = () if cut is None else cut.pages[: cut.at // self.page_tokens]
        return self.new_slab(), (*shared, *self.new_pages(-(-length // self.page_tokens) - len(shared)))

    def chunk(
        self, ids: Ints, slab: int, pages: tuple[int, ...], start: int, end: int, sampling: Sampling | None,
        *, base: Base | None = None, keep: int = -1,
    ) -> PrefillChunk:  # fmt: skip
        def pack(part: Ints) -> memoryview:
            return memoryview(part.astype("<i4").tobytes())

        last = sampling if end == len(ids) else None
        seen = pack(ids) if last is not None and last.has_penalties else None
        return PrefillChunk(1 + slab, slab, start, pack(ids[start:end]), pages, last, seen, base=base, keep=keep)

    async def answer(
        self, ids: Ints, sampling: Sampling, sizes: Sequence[int], new_tokens: int, cut: Cut | None = None
    ) -> Told:
        """One request, alone: its prompt in chunks of these sizes over and over, then rows with drafts."""
        slab, pages = self.place(len(ids) + new_tokens + DRAFTS + 1, cut)
        at, told = 0 if cut is None else cut.at, Told()
        base = None if cut is None else cut.base(self.page_tokens)
        turn = 0
        while at < len(ids):
            end = min(at + sizes[turn % len(sizes)], len(ids))
            result = await self.run([self.chunk(ids, slab, pages, at, end, sampling, base=base)])
            at, base, turn = end, None, turn + 1
        token = result.chunk_tokens[0]
        assert token is not None
        told.first = token
        told.chunk_scores.append(read_scores(result.chunk_scores))
        await self.decode(told, sampling, slab, pages, len(ids), new_tokens)
        return told

    async def decode(
        self, told: Told, sampling: Sampling, slab: int, pages: tuple[int, ...], length: int, new_tokens: int
    ) -> None:
        """Rows with drafts behind the first token, and what the drafter proposed behind each step."""
        decoder = self.device._runner._decoder
        while len(told.tokens) < new_tokens:
            row = DecodeRow(1 + slab, slab, length + len(told.tokens), None, pages, sampling)
            result = await self.run((), [row], DRAFTS)
            told.tokens += result.row_tokens
            told.counts += result.row_counts or ()
            told.row_scores.append(read_scores(result.row_scores))
            told.drafts.append(decoder._drafts[slab, : int(decoder._num_drafts[slab])].tolist())


def same_logits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))
