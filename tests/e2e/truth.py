"""Truth: what one device that computes a whole text in one pass says about it, and how an answer is held against that.

The paged path promises a row's bits whatever its chunk, batch and rank; so an answer may differ from the truth nowhere.
Should it differ all the same, a difference is excused only behind a choice (expert, entry, block, arg-max) that was
closer to a tie than TIE.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.config import NANO, model_directory
from engine.model.checkpoint import load_checkpoint
from engine.model.engram import EngramTables, load_tables
from engine.model.kv import ID_RING, Arena, KvLayout, plan_layout
from engine.model.layers import WeightMap
from engine.model.rows import RowBatch
from engine.model.sampling import sample_tokens
from engine.model.shapes import ModelShape
from engine.model.transformer import PagedTransformer, Probe
from tests.e2e.duo import Request
from tests.e2e.watch import State

TIE = 1e-5
LONGEST = 2048


@functools.cache
def load_nano() -> tuple[ModelShape, WeightMap, EngramTables]:
    """The bundled model, read once a run."""
    directory = model_directory(NANO)
    shape, weights = load_checkpoint(directory)
    return shape, weights, load_tables(directory, shape)


def make_nano(*, page_tokens: int = 64, num_pages: int = 40, num_slabs: int = 2) -> PagedTransformer:
    """The bundled model over a poisoned arena; takes LONGEST rows in one pass and keeps its choices."""
    torch.set_num_threads(1)
    shape, weights, tables = load_nano()
    arena = Arena(plan_layout(shape, page_tokens), num_pages, num_slabs, LONGEST + shape.window - 1, poison=True)
    probe = Probe([0] * shape.num_layers, choices=True)
    return PagedTransformer(shape, weights, tables, arena, max_tokens=LONGEST, probe=probe)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is wrong with an answer. Empty is right."""

    wrong: tuple[str, ...] = ()
    excused: tuple[str, ...] = ()


class Truth:
    """One device. Every question starts on a poisoned arena."""

    def __init__(self, page_tokens: int = 64) -> None:
        self.model = make_nano(page_tokens=page_tokens)
        self.eos_ids = (self.model.shape.eos_token_id,)

    @property
    def layout(self) -> KvLayout:
        return self.model.arena.layout

    def run(self, ids: Sequence[int], sizes: Sequence[int] = (LONGEST,)) -> tuple[Tensor, Tensor]:
        """Compute a text from nothing in chunks of `sizes`, the last one repeated.

        Returns:
            float32[len(ids), vocab] logits and float32[len(ids)], each row's smallest distance to a tie.
        """
        self.model.arena.poison()
        pages = np.arange(self.model.arena.num_pages)[None, ::-1].copy()
        array, left = np.array(ids, np.int64), list(sizes)
        logits, gaps, start = [], [], 0
        assert self.model.probe is not None
        while start < len(array):
            size = left.pop(0) if len(left) > 1 else left[0]
            part = array[None, start : start + size]
            logits.append(self.model.forward(RowBatch(np.array([1]), np.array([start]), part, pages)))
            gaps.append(self.model.probe.gaps.smallest)
            start += size
        return torch.cat(logits), torch.cat(gaps)

    def state(self, length: int) -> State:
        """What `run` left behind, as a rank would push it for a text of `length` ids."""
        arena, count = self.model.arena, -(-length // self.layout.page_tokens)
        pages = [arena.page_bytes_of(arena.num_pages - 1 - index) for index in range(count)]
        return State(torch.stack(pages), arena.slab_bytes_of(1).clone())

    def judge(self, request: Request, sizes: Sequence[int], arrived: State | None = None) -> Verdict:
        """Hold a finished request against one pass over its whole text, and against its prompt cut into `sizes`.

        Args:
            request: finished with `length`.
            sizes: of the chunks, the last one repeated.
            arrived: its state as it was pushed; None where nobody looked.
        """
        name = f"request {request.number} ({len(request.prompt)} ids)"
        if request.failed is not None or request.finished is None:
            return Verdict((f"{name} failed: {request.failed}",))
        if len(request.tokens) != request.sampling.max_tokens:
            return Verdict((f"{name} has {len(request.tokens)} tokens, not {request.sampling.max_tokens}",))
        cut, _ = self.run(request.prompt, sizes)
        parts = [] if arrived is None else self.differing_parts(len(request.prompt), arrived)
        wrong = [f"{name}: {part} as it was pushed differs from one cut into {list(sizes)}" for part in parts]
        logits, gaps = self.run([*request.prompt, *request.tokens[:-1]])
        if not torch.equal(cut, logits[: len(cut)]):
            wrong.append(f"{name}: logits of chunks of {list(sizes)} differ from one pass")
        first = len(request.prompt) - 1
        expected = self.sample(logits[first:], request)
        if expected == request.tokens:
            return Verdict(tuple(wrong))
        at = next(i for i, pair in enumerate(zip(expected, request.tokens, strict=True)) if pair[0] != pair[1])
        best = logits[first + at].topk(2).values
        closest = min(float(gaps[: first + at + 1].min()), float(best[0] - best[1]))
        told = f"{name}: token {at} is {request.tokens[at]}, one pass says {expected[at]}; closest choice {closest:.1e}"
        return Verdict(tuple(wrong), (told,)) if closest < TIE else Verdict((*wrong, told))

    def differing_parts(self, length: int, theirs: State) -> list[str]:
        """Names the pages, and the slab, whose meaningful bytes are not those that `run` left for `length` ids."""
        ours = self.state(length)
        parts = [
            f"page {page}"
            for page in range(len(theirs.pages))
            if bool(((ours.pages[page] != theirs.pages[page]) & written_bytes(self.layout, length, page)).any())
        ]
        if bool(((ours.slab != theirs.slab) & state_bytes(self.layout, self.model.shape, length)).any()):
            parts.append("the slab")
        return parts

    def sample(self, logits: Tensor, request: Request) -> list[int]:
        """The tokens that follow each row, by the request's own settings."""
        positions = [len(request.prompt) + index for index in range(len(logits))]
        rows = [request.sampling] * len(logits)
        return [int(token) for token in sample_tokens(logits.clone(), rows, positions, self.eos_ids)]


def written_bytes(layout: KvLayout, length: int, page: int) -> Tensor:
    """bool[page_bytes], the bytes of a text's page that hold what `length` ids have closed."""
    mask = torch.zeros(layout.page_bytes, dtype=torch.bool)
    for plane in layout.planes:
        rows = min(max(length // plane.ratio - page * plane.rows, 0), plane.rows)
        part = mask[plane.offset : plane.offset + plane.rows * plane.row_bytes]
        if plane.kind == "entry":
            part[: rows * plane.row_bytes] = True
        else:
            item = layout.torch_dtype.itemsize
            part.view(-1, plane.rows, item)[:, :rows] = True
    return mask


def state_bytes(layout: KvLayout, shape: ModelShape, length: int) -> Tensor:
    """bool[slab_bytes], the bytes of a slab that the next row of a text of `length` ids may read."""
    mask = torch.zeros(layout.slab_bytes, dtype=torch.bool)
    for layer in range(shape.num_layers):
        for position in range(max(0, length - shape.window), length):
            at = (layer * layout.ring + position % layout.ring) * layout.window_row_bytes
            mask[at : at + layout.window_row_bytes] = True
    for pool in layout.pools:
        for position in range(max(0, length - pool.ratio), length):
            at = pool.offset + position % pool.ring * pool.width * 4
            mask[at : at + pool.width * 4] = True
    for position in range(max(0, length - ID_RING), length):
        at = layout.ids_offset + position % ID_RING * 4
        mask[at : at + 4] = True
    return mask
