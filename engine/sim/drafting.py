"""Drafting: what a simulated device has proposed, and which drafts hold: a pure function of request and position.

So a request's text does not depend on it, but how many tokens each of its steps brings does, and repeats with the seed.
"""

from __future__ import annotations

import dataclasses
import random
import struct
import zlib
from typing import TYPE_CHECKING

from engine.core.plan import DecodeRows, StepPlan

if TYPE_CHECKING:
    from engine.sim.world import WorldShape

_PLACE = struct.Struct("<qq")


def is_drafting(plan: StepPlan) -> bool:
    """Its rows may bring several tokens, or none, or are where only the device knows."""
    rows = plan.rows
    if plan.drafts > 0:
        return len(rows) > 0
    if not isinstance(rows, DecodeRows) or rows.roster.ends is None:
        return False
    return len(rows) > 0 and bool((rows.positions < 0).any())


class Drafting:
    """See the module.

    Args:
        share: of places at which a draft holds.
    """

    def __init__(self, num_slabs: int, share: float) -> None:
        self._share = share
        self._proposals: dict[int, tuple[int, int]] = {}

    def propose(self, slab: int, position: int, count: int) -> None:
        """`count` drafts wait for the row at `position`; none if that is 0."""
        self._proposals[slab] = (position, count)

    def proposed(self, slab: int, position: int) -> int:
        """How many wait for a row: what was proposed behind another place is of no use."""
        at, count = self._proposals.get(slab, (-1, 0))
        return count if at == position else 0

    def forget(self, slab: int) -> None:
        self._proposals.pop(slab, None)

    def accepted(self, request: int, position: int, held: int) -> int:
        """How many of the drafts behind a row hold."""
        for place in range(held):
            word = zlib.crc32(_PLACE.pack(request, position + 1 + place)) * 0x9E3779B1 & 0xFFFFFFFF
            if word >= self._share * 2**32:
                return place
        return held


def draw_drafts(shape: WorldShape, seed: int) -> WorldShape:
    """A third of the seeds draft. By a generator of its own, so that all else of a seed stays what it was."""
    rng = random.Random(f"{seed}:drafts")
    drafts, share, rows = rng.randint(1, 7), rng.choice((0.2, 0.7, 0.95)), rng.choice((1, 2, 4, 32))
    if rng.random() >= 1 / 3:
        return shape
    return dataclasses.replace(shape, drafts=drafts, draft_share=share, draft_rows=rows)
