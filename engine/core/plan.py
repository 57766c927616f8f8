"""StepPlan and StepResult: what a device is asked to do in one step, and what it did. Values only; no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Self, overload

import numpy as np
import numpy.typing as npt

from engine.core.pact import GroupStep
from transport.messages import Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """Kept state that a prompt's first computed chunk goes on from. Copied by the device before it computes the chunk.

    Attributes:
        slab: its bytes become those of the chunk's own slab.
        page: where the chunk begins inside a page, the page that holds what comes before; its bytes become those of the
            chunk's page there. -1 where the chunk begins at a page's start.
    """

    slab: int
    page: int = -1


@dataclasses.dataclass(slots=True)  # as StepPlan
class PrefillChunk:
    """A stretch of one prompt to compute: ids [start, start + len(tokens)) of the request.

    Attributes:
        request: cluster-wide request number, for traces.
        slab: state slab of the sequence (window rings, open compressor rows, trailing ids).
        start: position of the first id. 0 resets the slab's state.
        tokens: little-endian int32 ids as bytes; up to the end of a page, but for the last chunk.
        pages: page ids of the sequence in order, at least up to the chunk's end.
        sample: set on the last chunk only: sample the token that follows it. `sample.min_tokens` > 0 as in DecodeRow.
        seen: with `sample.needs_seen`: all ids of the request, as bytes, of which the last `generated` are tokens of
            earlier attempts. The slab's counts are made from them, and the grammar follows them.
        targets: where the request asks for its prompt's log-probabilities: the ids that follow each id of the chunk,
            as far as they are the prompt's; else None.
        target_tops: likeliest ids to tell at each of them.
        base: what a chunk with `start` > 0 begins from, where no earlier chunk of the request was computed; else None.
        keep: a slab whose bytes become those of the chunk's slab once it is computed; -1 for none.
    """

    request: int
    slab: int
    start: int
    tokens: memoryview
    pages: Sequence[int]
    sample: Sampling | None
    seen: memoryview | None = None
    generated: int = 0
    targets: memoryview | None = None
    target_tops: int = 0
    base: Base | None = None
    keep: int = -1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRow:
    """One input token of one running sequence.

    Attributes:
        slab: its state slab.
        position: position of the input token, which is also how many entries of history it has.
        token: the input id where the host knows it; None says "the token that this slab sampled in the step before",
            which may still be on the device when the plan is made.
        pages: page ids in order, at least up to `position`.
        sampling: how to choose the next token. Its draw is a function of (seed, position + 1). `min_tokens` > 0 in a
            plan says "no id that ends a text in this draw" (the end-of-text ids unless `ignore_eos`, and `stop_ids`):
            the planner counts, and gives 0 once the request's own minimum is reached.
        said: with `sampling.grammar`: int32 ids of the completion up to the sequence's first row on this device. One
            object as long as it is one sequence: by that the device knows that it has followed it.
    """

    request: int
    slab: int
    position: int
    token: int | None
    pages: Sequence[int]
    sampling: Sampling
    said: bytes = b""


Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)  # as StepPlan
class Roster:
    """What stays the same from step to step as long as the same sequences take part. Arrays are never written.

    Attributes:
        requests, slabs: int64[rows].
        pages, sampling: of each row, as in DecodeRow.
        tables: int64[rows, widest], the page ids, filled up with zeros.
        ends: int64[rows], the position at which each sequence's last token would stand, which is never computed: no row
            may have a position of so much, drafted ones included. None: nobody drafts.
        said: of each row, as in DecodeRow; empty where no row has a grammar.
        widths: int64[rows], pages of each row.
    """

    requests: Ints
    slabs: Ints
    pages: tuple[Sequence[int], ...]
    sampling: tuple[Sampling, ...]
    tables: Ints
    widths: Ints
    ends: Ints | None = None
    said: tuple[bytes, ...] = ()


def build_roster(
    requests: Ints,
    slabs: Ints,
    pages: tuple[Sequence[int], ...],
    sampling: tuple[Sampling, ...],
    said: tuple[bytes, ...] = (),
) -> Roster:
    """A roster with its table of pages."""
    widths = np.fromiter(map(len, pages), np.int64, len(pages))
    tables = np.zeros((len(pages), int(widths.max(initial=0))), np.int64)
    for line, units in zip(tables, pages, strict=True):
        line[: len(units)] = units
    return Roster(requests, slabs, pages, sampling, tables, widths, said=said)


class DecodeRows(Sequence[DecodeRow]):
    """The decode rows of a step: a sequence of DecodeRow, kept as columns.

    Attributes:
        roster: who takes part.
        positions: int64[rows]; -1 where only the device knows: a step before it may have brought several tokens.
        tokens: int64[rows], -1 where the token is None.
    """

    __slots__ = ("positions", "roster", "tokens")

    def __init__(self, roster: Roster, positions: Ints, tokens: Ints) -> None:
        self.roster, self.positions, self.tokens = roster, positions, tokens

    @classmethod
    def of(cls, rows: Sequence[DecodeRow]) -> Self:
        """The same rows as columns."""
        roster = build_roster(
            np.array([row.request for row in rows], np.int64),
            np.array([row.slab for row in rows], np.int64),
            tuple(row.pages for row in rows),
            tuple(row.sampling for row in rows),
            tuple(row.said for row in rows) if any(row.sampling.grammar for row in rows) else (),
        )
        tokens = [-1 if row.token is None else row.token for row in rows]
        return cls(roster, np.array([row.position for row in rows], np.int64), np.array(tokens, np.int64))

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, at: int) -> DecodeRow: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[DecodeRow]: ...
    def __getitem__(self, at: int | slice) -> DecodeRow | Sequence[DecodeRow]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        roster, token = self.roster, int(self.tokens[at])
        return DecodeRow(
            int(roster.requests[at]),
            int(roster.slabs[at]),
            int(self.positions[at]),
            None if token < 0 else token,
            roster.pages[at],
            roster.sampling[at],
            roster.said[at] if roster.said else b"",
        )

    def __iter__(self) -> Iterator[DecodeRow]:
        roster = self.roster
        columns = roster.requests.tolist(), roster.slabs.tolist(), self.positions.tolist(), self.tokens.tolist()
        said = roster.said or (b"",) * len(self)
        for request, slab, position, token, pages, sampling, ids in zip(
            *columns, roster.pages, roster.sampling, said, strict=True
        ):
            yield DecodeRow(request, slab, position, None if token < 0 else token, pages, sampling, ids)


IDLE_STEP = 0
"""Number of every step without rows: it has no place in the order of a rank's own steps, which count from 1."""


@dataclasses.dataclass(slots=True)  # nobody changes it; frozen, it would take three times as long to make
class StepPlan:
    """One step. Rows that a later step depends on are ordered by the device: plans run in submission order.

    Attributes:
        step: number, ascending; IDLE_STEP for one without rows and chunks, which a rank of a group runs because others
            have some.
        idle: pact word: steps in a row, this one included, without rows or another reason to go on.
        stop: pact word: nothing is left to do here and the head wants the rank to end.
        drafts: drafted tokens that the device may verify in each decode row of this step, and is to propose for the
            next; 0 for none. A row has fewer near its end, and none while its `min_tokens` holds or where nothing was
            proposed.
    """

    step: int
    chunks: tuple[PrefillChunk, ...]
    rows: Sequence[DecodeRow]
    idle: int = 0
    stop: bool = False
    drafts: int = 0

    @property
    def columns(self) -> DecodeRows:
        """`rows` as columns; what `plan_step` makes has them already."""
        return self.rows if isinstance(self.rows, DecodeRows) else DecodeRows.of(self.rows)

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.rows


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens, before any processing, as columns.

    Attributes:
        rows: int64[n], ascending: which rows, chunks or positions they belong to.
        logprobs: float32[n].
        places: int32[n], among the likeliest ids, from 1.
        counts: int32[n], how many likeliest ids each has below.
        top_ids, top_logprobs: int32 and float32[sum(counts)], of each the likeliest first.
    """

    rows: Ints
    logprobs: npt.NDArray[np.float32]
    places: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclasses.dataclass(slots=True)  # as StepPlan
class StepResult:
    """What came out.

    Attributes:
        chunk_tokens: per chunk, the sampled token, or None where `sample` was None.
        row_tokens: per decode row, the sampled token; a `memoryview` of int32 where the device has them as a
            column. With drafts all new tokens of each row, one row after the other.
        row_counts: with drafts, how many of them each row has: at least 1, but 0 for a row whose sequence had reached
            its end on the device. None: one each.
        row_proposed: with drafts, how many drafted tokens were verified in each row; `row_counts - 1` of them held.
        device_us: time the device worked on it, microseconds (its own measure). In a group, waiting for others is
            part of it.
        group: the group's step that it was computed in; None for a rank without a group.
        row_scores, chunk_scores: of sampled tokens whose `sampling.logprobs` asks for it; None where nobody does. Their
            `rows` are places in `row_tokens` and `chunk_tokens`.
        target_scores: (chunk, scores of its targets by position) for chunks that have some.
    """

    step: int
    chunk_tokens: tuple[int | None, ...]
    row_tokens: Sequence[int]
    device_us: int
    group: GroupStep | None = None
    row_scores: Scores | None = None
    chunk_scores: Scores | None = None
    target_scores: tuple[tuple[int, Scores], ...] = ()
    row_counts: Sequence[int] | None = None
    row_proposed: Sequence[int] | None = None
