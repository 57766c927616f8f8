"""DrawnDrafts: drafts that were drawn from the drafter's own distribution, and their judgement by rejection.

Drafts are drawn by temperature and cuts of their request, from (seed, position), without bias and penalties: whatever
they are drawn from, tokens come as the target has them (`verification`), and a draft that is a little less likely to
hold costs nothing but itself. What each was drawn from is kept until it was judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.drafting import Pick
from engine.model.sampling import (
    LANE_ACCEPT,
    LANE_DRAFT,
    LANE_RESIDUAL,
    draw_uniform,
    invert_mass,
    keep_likeliest,
)
from engine.model.verification import Uniforms, verify_drawn
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts for one place of some rows.

    Attributes:
        rows: int64[n], which rows.
        tokens: int64[n], the drafts.
        shares: float64[n, vocab], what each was drawn from.
    """

    rows: Ints
    tokens: Ints
    shares: Tensor


class DrawnDrafts:
    """See the module. Belongs to the device's worker thread."""

    def __init__(self) -> None:
        self._slab_to_shares: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Slabs with drawn drafts."""
        return len(self._slab_to_shares)

    def begin(self, rows: Sequence[Sampling]) -> tuple[Pick, list[Tensor]]:
        """A `Pick` for a proposal of rows with these settings, and where it leaves float64[rows, vocab] for each draft.
        Greedy rows get their likeliest token."""
        seeds = [row.seed for row in rows]
        shares: list[Tensor] = []

        def pick(logits: Tensor, positions: Ints) -> Ints:
            mass = keep_likeliest(logits, rows)
            shares.append(mass)
            return invert_mass(mass, draw_uniform(seeds, positions, LANE_DRAFT))

        return pick, shares

    def keep(self, slabs: Ints, rows: Sequence[Sampling], shares: Sequence[Tensor]) -> None:
        """A proposal has ended. Greedy drafts are judged by what they are, and have nothing kept.

        What earlier ones left goes: never is more kept than the rows of one step have. A draft without it holds while
        it is what the target draws, which is as exact.
        """
        self._slab_to_shares.clear()
        for place, (slab, row) in enumerate(zip(slabs.tolist(), rows, strict=True)):
            if row.temperature > 0:
                self._slab_to_shares[slab] = torch.stack([share[place] for share in shares])

    def forget(self, slabs: Ints) -> None:
        """Their drafts were judged, or will not be."""
        for slab in slabs.tolist():
            self._slab_to_shares.pop(slab, None)

    def guess(self, slabs: Ints, drafts: Ints, depth: int) -> Guesses | None:
        """What was drafted behind `depth` drafts that held.

        Args:
            slabs: int64[rows].
            drafts: int64[rows], the drafts at that place; -1 for a row that has none there.
        """
        found = [
            (row, shares[depth])
            for row, (slab, draft) in enumerate(zip(slabs.tolist(), drafts.tolist(), strict=True))
            if draft >= 0 and (shares := self._slab_to_shares.get(slab)) is not None
        ]
        if not found:
            return None
        rows = np.array([row for row, _ in found], np.int64)
        return Guesses(rows, drafts[rows], torch.stack([share for _, share in found]))


def judge_guesses(logits: Tensor, settings: Sequence[Sampling], positions: Ints, guesses: Guesses) -> Ints:
    """The tokens at the places of the drafts: those that hold, and what the target has above them for the others.

    Args:
        logits: float32[n, vocab] of the target, biased and penalised, at the places of `guesses`.
        settings: of each row.
        positions: int64[n], of the tokens.
    """
    seeds = [each.seed for each in settings]
    target = keep_likeliest(logits, settings)
    accept = torch.from_numpy(draw_uniform(seeds, positions, LANE_ACCEPT)).unsqueeze(1)
    final = torch.from_numpy(draw_uniform(seeds, positions, LANE_RESIDUAL)).unsqueeze(1)
    verdict = verify_drawn(
        # What follows a draft that holds is another call's: the second row is for nobody.
        target.unsqueeze(1).expand(-1, 2, -1),
        guesses.shares.unsqueeze(1),
        torch.from_numpy(guesses.tokens).unsqueeze(1),
        Uniforms(accept, final.expand(-1, 2)),
    )
    tokens: Ints = verdict.tokens[:, 0].numpy()
    return tokens
