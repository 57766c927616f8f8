"""Mailbox: memory of a rank in which the others put rows, parts of sums and flags; where each of them lies.

All ranks of a group lay theirs out alike, so a rank knows where to put something from where another's begins.

**Exchanges.** A layer has two, each with its own flags: `DISPATCH` brings rows to all ranks, `COMBINE` brings parts of
sums to the ranks that own the rows. Exchanges of a phase are counted from 0 within a membership. A flag is a word of
membership, rows and that number, put by one chunk of the sender's programs behind its data, and waited for by the same
chunk of the receiver's. Equality counts, so neither an older membership's flag is taken for a new one, nor one of
ranks that disagree about the size of the step.

**Reuse.** Data and flags of a phase lie in halves; consecutive exchanges never share one. (An odd number of layers
needs a third: its last layer is followed by the first one of the next step.) Say A puts exchange e + 2 where it has put
e, in B's memory. Kernels of a stream, and of branches joined to it, come one after another; one that is launched early
waits for those before it before it touches a mailbox. So:

1. A's kernel of e + 1 has ended: each of its chunks has seen B's flag of e + 1.
2. B put this flag in its kernel of e + 1, which began after all that B had enqueued before, the wait of e and
   everything that reads what came with e as long as it is enqueued before e + 1. So B has taken the flag, and has read.

Hence a rank is never more than one exchange ahead, whatever it waits for elsewhere, and no phase needs the other to be
safe. What arrives with an exchange may be read until the reader puts the next of its phase; ids and weights lie by
layer, and may be read until the layer comes again. A step's rows may differ from the last one's: an exchange never
leaves its half.

After a wait has expired none of this holds. That rank puts nothing more and waits for nothing; what it computes is
void until it enters a membership (`engine/model/nvlink.py`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

DISPATCH, COMBINE = 0, 1
"""Phases of a layer."""
SCALE_COLUMNS = 128
"""Columns of a narrow row that share a scale."""
MOST_ROWS = 4095
"""Rows of a rank: 12 bits of a flag."""
LEAST_LAYERS = 2
"""Exchanges of a phase in a step: one layer would follow itself, in the same half."""
MOST_PARTS = 4
"""Programs that share a row, at most; each has a flag of its own."""
COUNTER_BITS, ROWS_BITS = 40, 12
"""Bits of a flag's number and rows; above them is the membership, modulo what fits beside a sign."""
HALVES = 3
"""Room in the state; layers that are even in number use two."""
FAILURE, LIMIT, STATE_WORDS = 2 * HALVES, 2 * HALVES + 1, 2 * HALVES + 2
"""Places in a mailbox's state, after the next word of each phase and half."""
FAILED = 1 << 62
"""In a failure's word, with the phase from bit 60, the peer from bit 52, and the exchange's number."""


@dataclasses.dataclass(frozen=True)
class MailboxLayout:
    """Sizes of a mailbox; equal on all ranks of a group.

    Attributes:
        ranks: places in the group, the own one included.
        layers: exchanges of each phase in a step, at least 2.
        capacity: rows of a rank, at most.
        hidden, top_k: of the model.
        dtype: A, of rows as the experts read them.
        narrow: rows travel as e4m3 with a power of two for each SCALE_COLUMNS columns.
        part_dtype: in which parts of sums travel; None for A, which a sum is rounded to anyway. float32 is twice the
            bytes of bf16.
    """

    ranks: int
    layers: int
    capacity: int
    hidden: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    narrow: bool = False
    part_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.layers < LEAST_LAYERS:
            raise ValueError(f"a mailbox needs {LEAST_LAYERS} layers or more to be used in turns, not {self.layers}")
        if not 1 <= self.capacity <= MOST_ROWS:
            raise ValueError(f"a mailbox takes 1 to {MOST_ROWS} rows of each rank, not {self.capacity}")
        if self.narrow and self.hidden % SCALE_COLUMNS:
            raise ValueError(f"narrow rows need a multiple of {SCALE_COLUMNS} columns, not {self.hidden}")

    @property
    def halves(self) -> int:
        """How many exchanges of a phase find room at once."""
        return 2 + self.layers % 2

    def half(self, layer: int) -> int:
        """Where a layer's exchanges lie."""
        return 2 if self.layers % 2 and layer == self.layers - 1 else layer % 2

    def flags_at(self, phase: int, layer: int) -> int:
        """Bytes to int64[ranks, capacity * MOST_PARTS], by the rank that puts them and its chunk."""
        return (phase * self.halves + self.half(layer)) * self._flag_bytes

    def ids_at(self, layer: int) -> int:
        """Bytes to int32[ranks, rows, top_k]."""
        return 2 * self.halves * self._flag_bytes + layer * self._choice_bytes

    def weights_at(self, layer: int) -> int:
        """Bytes to float32[ranks, rows, top_k]."""
        return self.ids_at(self.layers) + layer * self._choice_bytes

    def rows_at(self, layer: int) -> int:
        """Bytes to A[ranks, rows, hidden]; e4m3 where narrow."""
        return self.weights_at(self.layers) + self.half(layer) * self._row_bytes

    def scales_at(self, layer: int) -> int:
        """Bytes to uint8[ranks, rows, hidden / SCALE_COLUMNS], e8m0; none where not narrow."""
        return self.weights_at(self.layers) + self.halves * self._row_bytes + self.half(layer) * self._scale_bytes

    def parts_at(self, layer: int) -> int:
        """Bytes to part_type[ranks, rows, hidden], by the rank that computed them."""
        start = self.weights_at(self.layers) + self.halves * (self._row_bytes + self._scale_bytes)
        return start + self.half(layer) * self._part_bytes

    @property
    def num_bytes(self) -> int:
        """Of the whole mailbox."""
        start = self.weights_at(self.layers) + self.halves * (self._row_bytes + self._scale_bytes)
        return start + self.halves * self._part_bytes

    @property
    def row_type(self) -> torch.dtype:
        """Of rows as they travel."""
        return torch.float8_e4m3fn if self.narrow else self.dtype

    @property
    def part_type(self) -> torch.dtype:
        """Of parts as they travel."""
        return self.part_dtype or self.dtype

    @property
    def _flag_bytes(self) -> int:
        return _round_up(8 * self.ranks * self.capacity * MOST_PARTS)

    @property
    def _choice_bytes(self) -> int:
        return _round_up(4 * self.ranks * self.capacity * self.top_k)

    @property
    def _row_bytes(self) -> int:
        return _round_up(self.ranks * self.capacity * self.hidden * self.row_type.itemsize)

    @property
    def _scale_bytes(self) -> int:
        return _round_up(self.ranks * self.capacity * self.hidden // SCALE_COLUMNS) if self.narrow else 0

    @property
    def _part_bytes(self) -> int:
        return _round_up(self.ranks * self.capacity * self.hidden * self.part_type.itemsize)


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """A rank's end of its group's exchanges.

    Attributes:
        layout: of all mailboxes of the group.
        rank: the own one.
        memory: uint8[layout.num_bytes], the own mailbox.
        addresses: int64[ranks], where each rank's mailbox begins for a kernel of this rank; 0 for a place whose rank is
            lost. On the device, so that graphs outlive a membership.
        state: int64[STATE_WORDS] on the device: by phase and half the word of the next exchange there; FAILURE, 0 or
            what has expired; LIMIT, the longest wait in nanoseconds.
    """

    layout: MailboxLayout
    rank: int
    memory: Tensor
    addresses: Tensor
    state: Tensor

    def ids(self, layer: int, rows: int) -> Tensor:
        """int32[ranks * rows, top_k] of a layer's latest exchange."""
        shape = (self.layout.ranks * rows, self.layout.top_k)
        return self._view(self.layout.ids_at(layer), torch.int32, shape)

    def weights(self, layer: int, rows: int) -> Tensor:
        """float32[ranks * rows, top_k]."""
        shape = (self.layout.ranks * rows, self.layout.top_k)
        return self._view(self.layout.weights_at(layer), torch.float32, shape)

    def rows(self, layer: int, rows: int) -> Tensor:
        """row_type[ranks * rows, hidden]."""
        shape = (self.layout.ranks * rows, self.layout.hidden)
        return self._view(self.layout.rows_at(layer), self.layout.row_type, shape)

    def own_rows(self, layer: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of these three, the places of the own rows."""
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        return self.rows(layer, rows)[own], self.ids(layer, rows)[own], self.weights(layer, rows)[own]

    def _view(self, start: int, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        end = start + shape[0] * shape[1] * dtype.itemsize
        return self.memory[start:end].view(dtype).view(shape)


def first_words(layout: MailboxLayout, membership: int) -> dict[int, int]:
    """The words of the state before the first exchange of a membership, by their places."""
    word = membership % (1 << 63 - COUNTER_BITS - ROWS_BITS) << COUNTER_BITS + ROWS_BITS
    return {phase * HALVES + layout.half(0): word for phase in (DISPATCH, COMBINE)}


def _round_up(size: int) -> int:
    """To a multiple of 256 bytes, so that whatever follows can be read in the widest pieces."""
    return -(-size // 256) * 256
