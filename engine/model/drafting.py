"""Proposer: what drafts tokens on the paged path, and which of its two forms a model has.

A proposer keeps a context of every sequence in the slab's window rings past the target's layers (`num_layers + stage`).
`keep` extends it at the end of each pass, for every row that holds and for no other, so it never depends on drafts that
were rejected; whoever takes the slab over can draft at once. `propose` is a function of the slab, of the anchor (the
last token of the sequence, which no pass has computed yet) and of the number of drafts: not of the batch, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.shapes import LayerRole, ModelShape

Ints = npt.NDArray[np.int64]
Pick = Callable[[Tensor, Ints], Ints]
"""From logits float32[n, vocab] and the positions int64[n] of the tokens that they predict, to tokens int64[n]."""

DRAFT_PART = 1
"""The drafter's index in `core.pact.PARTS`."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafts of some sequences.

    Attributes:
        tokens: int64[n, count], the tokens proposed to follow each anchor.
        confidence: float32[n, count], the drafter's own estimate that each is accepted if those before it are; None
            from one that has none.
    """

    tokens: Ints
    confidence: npt.NDArray[np.float32] | None = None


class Proposer(Protocol):
    """See the module. Belongs to the thread that runs the passes.

    Attributes:
        max_drafts: most that `propose` returns for a sequence.
    """

    @property
    def max_drafts(self) -> int: ...

    def keep(self, counts: Ints | None, nexts: Ints, *, reopens: bool = False) -> None:
        """The pass that ran last has ended: takes what is to be kept of it. A second time does nothing.

        Args:
            counts: int64[sequences], rows of each that hold, at least 1; None for all.
            nexts: int64[sequences], the token after each sequence's last row that holds; -1 where nobody knows it yet.
            reopens: the sequences go on where an earlier pass left them without that token.
        """
        ...

    def propose(
        self, slabs: Ints, anchors: Ints, positions: Ints, count: int, *, pick: Pick | None = None, rounds: int = 0
    ) -> Proposal:
        """Drafts what follows the anchors.

        Args:
            slabs: int64[n], which may be none.
            anchors: int64[n], tokens.
            positions: int64[n], where they stand, at least 1.
            count: drafts for each, at least 1. It may change all of them.
            pick: chooses a token; None takes the likeliest, the lowest id of equals.
            rounds: in a group, the largest `count` of all members: whoever has fewer goes along with no rows.

        Raises:
            MeshBroken: a member of the group is gone. The same call may be made again in the next membership.
        """
        ...


def pick_likeliest(logits: Tensor, positions: Ints) -> Ints:
    """The `Pick` of None."""
    best: Ints = logits.argmax(-1).numpy()
    return best


def make_stage_role(shape: ModelShape, stage: int) -> LayerRole:
    """The role of a window-only layer past the target's."""
    return LayerRole(
        index=shape.num_layers + stage,
        ratio=0,
        kv_source=None,
        is_kv_source=False,
        selection_source=None,
        is_index_source=False,
        candidate_source=None,
        is_candidate_source=False,
        has_engram=False,
    )


def take_turns(table: Tensor, positions: Ints) -> Tensor:
    """Rotary rows of positions. Those past the table's end get its last: no draft there is ever verified."""
    return table.index_select(0, torch.from_numpy(np.minimum(positions, len(table) - 1)))
