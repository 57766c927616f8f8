"""RowModel: what passes need of a model, whatever computes it: rows in, logits out, and an arena to look into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.model.fused import Mixture
from engine.model.rows import RowBatch
from engine.model.shapes import ModelShape
from transport.fabric import BlockRun

Ints = npt.NDArray[np.int64]


class RowArena(Protocol):
    """State of sequences: pages, slabs, and what of a slab only samplers look at."""

    @property
    def staging_rows(self) -> int:
        """Rows that the chunks of one pass may have together, their look-back included."""
        ...

    @property
    def slabs(self) -> Tensor:
        """uint8[slabs, slab bytes]."""
        ...

    def read_sampled(self, slabs: Ints) -> Ints:
        """int64[n], the token that each slab sampled last."""
        ...

    def write_sampled(self, slabs: Ints, tokens: Ints) -> None:
        """Keeps int64[n] tokens as those that the slabs sampled last."""
        ...

    def read_counts(self, slabs: Ints) -> Tensor:
        """int16[n, vocab] on the CPU, a copy of the slabs' counts (`penalties`)."""
        ...

    def write_count(self, slab: int, counts: Tensor) -> None:
        """int16[vocab] become a slab's counts."""
        ...

    def add_counts(self, slabs: Ints, tokens: Ints) -> None:
        """Each of these slabs, all different, has one more of its token."""
        ...

    def page_bytes_of(self, page_id: int) -> Tensor:
        """uint8[page bytes], a view."""
        ...

    def slab_bytes_of(self, slab: int) -> Tensor:
        """uint8[slab bytes], a view."""
        ...

    def block_runs(self) -> tuple[BlockRun, BlockRun]:
        """The run of pages, then the run of slabs."""
        ...


class RowModel(Protocol):
    """A target model over an arena. One pass at a time."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def arena(self) -> RowArena: ...

    @property
    def replay_rows(self) -> int:
        """See `PagedTransformer`."""
        ...

    mixture: Mixture | None

    def forward(self, batch: RowBatch, wanted: Sequence[int] | None = None) -> Tensor:
        """float32[wanted, vocab] on the model's device; see `PagedTransformer.forward`."""
        ...

    def forward_prompt(self, batch: RowBatch, *, last: bool, wanted: Sequence[int] | None = None) -> Tensor:
        """See `PagedTransformer.forward_prompt`."""
        ...

    def forward_nothing(self) -> None:
        """See `PagedTransformer.forward_nothing`."""
        ...

    def settle(self) -> None:
        """Waits until all that passes have written is in the arena: whoever is told of a pass may push its pages."""
        ...
