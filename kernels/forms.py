"""Forms: what kernels are handed beside plain tensors: weights with scales, rows of a step, places in an arena.

Values only. They hold tensors and numbers, own nothing, and are never changed; a captured graph reads the tensors
anew in each replay, and the numbers are baked into it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

RecordFormat = Literal["fp8", "bf16", "fp32"]

SCALE_CHANNELS = 64
"""Channels of an fp8 entry that share one scale."""
READ_ROWS = 512
"""Rows that one launch of what reads the arena takes, as a prompt has more of them: its scores and partial results grow
with rows and context."""
UNIT_INDEX_HEADS = 256
"""Index heads of all rows of a sequence that the fp8 matrix unit's scores are made for."""
LARGEST_SLOT_SCALE = 192
"""Largest e8m0 byte, 2^65, that the experts' products take as it is; whoever fills slots has to look."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """The matrix of a linear layer, [out, in].

    Attributes:
        data: bf16, float32 or float8_e4m3fn [out, in], contiguous.
        scale: uint8[ceil(out / block[0]), ceil(in / block[1])], e8m0 bytes (exponent + 127), for float8; else None.
        block: edge lengths of the blocks that share a scale.
    """

    data: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (128, 128)

    @property
    def num_bytes(self) -> int:
        """Bytes that one use of all of it reads."""
        return self.data.nbytes + (self.scale.nbytes if self.scale is not None else 0)


@dataclasses.dataclass(frozen=True)
class SlotWeights:
    """Expert weights by slot, all layers together. A slot holds one expert of any layer.

    MXFP4 keeps the vendor's bytes: two values in a byte, the even column in the low nibble, and e8m0 scales of 32
    columns.

    Attributes:
        up: uint8[slots, 2 * width, hidden / 2] for MXFP4, else bf16 or float32 [slots, 2 * width, hidden]; w1 (the
            gate) in the first `width` rows, then w3.
        up_scale: uint8[slots, 2 * width, hidden / 32] for MXFP4, else None.
        down: uint8[slots, hidden, width / 2] for MXFP4, else [slots, hidden, width]; w2.
        down_scale: uint8[slots, hidden, width / 32] for MXFP4, else None.
    """

    up: Tensor
    up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None

    @property
    def is_mxfp4(self) -> bool:
        """Whether two values share a byte."""
        return self.up.dtype == torch.uint8

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, scales included."""
        parts = (self.up, self.up_scale, self.down, self.down_scale)
        return sum(part[0].nbytes for part in parts if part is not None)


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The rows of a step: `span` consecutive positions of each of B sequences; row r belongs to sequence r // span.

    A row with position -1 is padding: it reads nothing, writes nothing, and its results are finite and unused. Within a
    sequence padding comes last.

    Attributes:
        positions: int32[B * span].
        slabs: int32[B], the state slab of each sequence. Padding sequences have any valid one.
        tables: int32[B, pages], page ids of each sequence, in order.
        span: rows of a sequence: 1 in a decode step, 1 + drafts in a verify step; at most 8.
    """

    positions: Tensor
    slabs: Tensor
    tables: Tensor
    span: int

    @property
    def rows(self) -> int:
        """All rows, padding included."""
        return int(self.positions.shape[0])

    def parts(self) -> list[tuple[slice, StepRows]]:
        """Whole sequences, up to READ_ROWS rows of them in each part; which rows these are, and themselves."""
        each = max(READ_ROWS // self.span, 1)
        if len(self.slabs) <= each:
            return [(slice(None), self)]
        found = []
        for first in range(0, len(self.slabs), each):
            sequences = slice(first, first + each)
            rows = slice(first * self.span, (first + each) * self.span)
            own = StepRows(self.positions[rows], self.slabs[sequences], self.tables[sequences], self.span)
            found.append((rows, own))
        return found


@dataclasses.dataclass(frozen=True)
class Plane:
    """Where records of one kind lie in the arena, a uint8 tensor. All offsets and strides are multiples of 16 bytes.

    Record `row` of block `block` (a page id, or a slab) has its data at `data + block * stride + row * data_bytes`
    and, for fp8, its scales at `scale + block * stride + row * scale_bytes`. Use 64-bit arithmetic: offsets pass 2^31.

    Formats, for a record of `width` channels whose last `rope` ones are rotated:
    - "fp32", "bf16": the channels; no scales.
    - "fp8" with rope > 0 (an attention entry): width - rope bytes of e4m3, then `rope` bf16. Scales: one e8m0 byte for
      each SCALE_CHANNELS of the e4m3 channels, and padding to `scale_bytes`. Value = e4m3 * 2^(byte - 127); the byte is
      that of `reference.scale_byte(amax / 448)`.
    - "fp8" with rope == 0 (an index key): `width` bytes of e4m3. Scale: one float32, amax / 448 rounded up to a power
      of two; 1.0 for a record of zeros.

    Attributes:
        data, scale: bytes from the arena's start to the planes of block 0.
        stride: bytes from one block to the next.
        rows: records in a block; a ring has its length here.
        width, rope: channels.
        format: see above.
        data_bytes, scale_bytes: of one record.
    """

    data: int
    scale: int
    stride: int
    rows: int
    width: int
    rope: int
    format: RecordFormat
    data_bytes: int
    scale_bytes: int


@dataclasses.dataclass(frozen=True)
class RawRing:
    """The ring of raw compressor rows of one layer inside every slab: float32, position `p` at row `p % rows`.

    Attributes:
        data: bytes from the arena's start to row 0 of slab 0; a multiple of 16.
        stride: bytes from one slab to the next.
        rows: positions kept; 0 where a record is made of a single row, which no later step reads.
        width: float32 numbers in a row: latents, then gates.
    """

    data: int
    stride: int
    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class IdRing:
    """The ring of a sequence's latest token ids inside every slab: int32, position `p` at place `p % rows`.

    Attributes:
        data: bytes from the arena's start to place 0 of slab 0; a multiple of 16.
        stride: bytes from one slab to the next.
        rows: positions kept: at least those of a step and the ids before them that a memory looks at.
    """

    data: int
    stride: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How groups of raw rows become records.

    Attributes:
        ratio: tokens of a group.
        overlaps: a record pools the group before its own too: raw rows have two halves in latents and in gates, the
            first for the record after the row's own, the second for its own.
        bias: float32[ratio, gate channels], added to the gate by position in the group; None for none.
        norm: float32[width].
        eps: of the norm.
        ring: where raw rows lie.
        target: where records go.
    """

    ratio: int
    overlaps: bool
    bias: Tensor | None
    norm: Tensor
    eps: float
    ring: RawRing
    target: Plane


@dataclasses.dataclass(frozen=True)
class KeyProjection:
    """How an index key is made of what an attention entry is before it is rotated.

    Attributes:
        matrix: bf16 or float32[target.width, width], contiguous.
        norm: float32[target.width], of the norm behind it.
        target: where keys go.
    """

    matrix: Tensor
    norm: Tensor
    target: Plane


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """One layer's n-gram memory: which lines of its table the latest ids of a sequence stand for.

    f_i is the folded id i positions back, r_0 = f_0 a_0 and r_i = r_(i-1) xor f_i a_i with the multipliers a. Line k of
    a row is r_i % primes[k] + offsets[k], where i - 1 = k // (lines / history).

    Attributes:
        data: bf16, float32 or float8_e4m3fn [rows, width], contiguous; on the device, or pinned on the host.
        scale: uint8[rows, width / 32], e8m0 bytes, beside it, for float8; else None.
        folded: int32[vocab], the class of each id.
        pad: the class that stands for positions before the first, and for all that lie behind an id below 0.
        multipliers: int64[history + 1].
        primes, offsets: int64[lines].
    """

    data: Tensor
    scale: Tensor | None
    folded: Tensor
    pad: int
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @property
    def history(self) -> int:
        """Earlier ids that are looked at."""
        return len(self.multipliers) - 1

    @property
    def width(self) -> int:
        """Channels of all lines of a row of the step."""
        return len(self.primes) * self.data.shape[1]


@dataclasses.dataclass(frozen=True)
class HyperWeights:
    """Coefficients of one hyper-connection of n streams.

    Attributes:
        fn: float32[n * (2 + n), n * hidden]; a head's is [n, n * hidden].
        base: float32[n * (2 + n)].
        scale: float32[3], of pre, post and combination; a head's is [1].
        norm: float32[hidden], the weight of the norm behind the collapse.
        iterations: of Sinkhorn's.
        eps: hc_eps.
        norm_eps: of both norms.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor
    iterations: int
    eps: float
    norm_eps: float


@dataclasses.dataclass(frozen=True)
class PairSums:
    """What the routed experts gave a step's rows, not yet added up: sum over places, in order, and then the base.

    Attributes:
        pairs: float32[T, k, hidden], contiguous, with the routing weights in them. Where a place's expert is not on
            this rank, anything.
        ids: int32[T, k], contiguous, -1 for none.
        expert_to_slot: int32[experts], -1 for an expert of another rank.
        base: A[R, hidden], contiguous, R <= T: only the first R rows are wanted. None for all, and no base.
    """

    pairs: Tensor
    ids: Tensor
    expert_to_slot: Tensor
    base: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class DraftState:
    """Where each slab stands, and what was drafted to follow: what a step takes from the steps in front of it where the
    host does not know it yet. The last place is for sequences of padding.

    Attributes:
        stands: int32[slabs + 1], the position of the token that the slab sampled last; -1 where nobody knows.
        tokens: int32[slabs + 1], that token.
        counts: int32[slabs + 1], drafts behind it.
        drafts: int32[slabs + 1, most], these.
    """

    stands: Tensor
    tokens: Tensor
    counts: Tensor
    drafts: Tensor


@dataclasses.dataclass(frozen=True)
class Judged:
    """What became of a step's drafts. B sequences of `span` rows.

    Attributes:
        nexts: int32[B * span], the token that the target has after each row.
        kept: int32[B * span], positions of the rows that hold, and -1.
        last: int32[B], number of each sequence's last row that holds; its first where there is none.
        slots: int32[rounds, B], the position of the slot that each round of drafting runs, -1 where a draft would be
            behind the sequence's end.
        result: int32[B, 3 + span + rounds]: position of the first row (-1: the sequence has nothing in the step), rows
            that hold, drafts that were verified; `nexts`; drafts, which are not there yet.
    """

    nexts: Tensor
    kept: Tensor
    last: Tensor
    slots: Tensor
    result: Tensor


@dataclasses.dataclass(frozen=True)
class StreamPlace:
    """Where every slab has the target's streams at its sequence's last position: float32[streams * hidden].

    Attributes:
        data: bytes from the arena's start to those of slab 0; a multiple of 16.
        stride: bytes from one slab to the next.
    """

    data: int
    stride: int
