"""StepPlan and StepResult: what a device is asked to do in one step, and what it did. Values only; no tensors."""

from __future__ import annotations

import dataclasses

from transport.messages import Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A stretch of one prompt to compute: ids [start, start + len(tokens)) of the request.

    Attributes:
        request: cluster-wide request number, for traces.
        slab: state slab of the sequence (window rings, open compressor rows, trailing ids).
        start: position of the first id. 0 resets the slab's state.
        tokens: little-endian int32 ids as bytes; a whole number of pages, but for the last chunk.
        pages: page ids of the sequence in order, at least up to the chunk's end.
        sample: set on the last chunk only: sample the token that follows it. `sample.min_tokens` > 0 as in DecodeRow.
    """

    request: int
    slab: int
    start: int
    tokens: memoryview
    pages: tuple[int, ...]
    sample: Sampling | None

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
    """

    request: int
    slab: int
    position: int
    token: int | None
    pages: tuple[int, ...]
    sampling: Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows that a later step depends on are ordered by the device: plans run in submission order."""

    step: int
    chunks: tuple[PrefillChunk, ...]
    rows: tuple[DecodeRow, ...]

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.rows


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What came out.

    Attributes:
        chunk_tokens: per chunk, the sampled token, or None where `sample` was None.
        row_tokens: per decode row, the sampled token.
        device_us: time the device worked on it, microseconds (its own measure).
    """

    step: int
    chunk_tokens: tuple[int | None, ...]
    row_tokens: tuple[int, ...]
    device_us: int
