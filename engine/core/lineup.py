"""Lineup, Brought and NewTokens: who is in a step, what it brought, and what that means. Values only."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from engine.core.plan import Ints, Roster, Scores
from engine.core.request import Sequence
from transport.messages import FinishReason


@dataclasses.dataclass(slots=True)  # as core.plan.StepPlan
class Lineup:
    """The sequences of a step, and what of them stays the same while it does.

    Attributes:
        slots: int64[rows].
        roster: as the device sees them; its `ends` are there where somebody may draft.
        sequences: of each row.
        attempts: int32[rows].
        bases: int64[rows], position of the input token less the tokens planned before it.
        limits: int64[rows], completion tokens at which each ends.
        may_stop: bool[rows], where an id of the request's own may end it; None where that is nowhere.
        minima: rows whose ends are still forbidden, and the completion token from which they are not.
        unknown: int64[rows] of -1, the input tokens of a step behind one with the same rows.
    """

    slots: Ints
    roster: Roster
    sequences: tuple[Sequence, ...]
    attempts: npt.NDArray[np.int32]
    bases: Ints
    limits: Ints
    may_stop: npt.NDArray[np.bool_] | None
    minima: tuple[tuple[int, int], ...]
    unknown: Ints


@dataclasses.dataclass(slots=True)
class NewTokens:
    """What a step brought to sequences that still run, as columns, and to whom it brought more than a token.

    Attributes:
        requests: int64[rows], attempts: int32[rows], indices: int32[rows] (place of the first in the completion).
        tokens: int32, of each row all its tokens, one row after the other.
        counts: int32[rows], how many tokens each row has; None: one each.
        fresh: sequences whose first own token is among them.
        ended: sequences that end with theirs, and why.
        released: sequences that are over and that no submitted step names any more.
        scores: of tokens whose requests ask for them, `rows` being places in `tokens`; None where none does.
    """

    requests: Ints
    attempts: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    fresh: list[Sequence]
    ended: list[tuple[Sequence, FinishReason]]
    released: list[Sequence]
    scores: Scores | None = None
    counts: npt.NDArray[np.int32] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Brought:
    """Tokens of a step with drafts: see `StepResult`. All int64[rows] but `tokens`.

    Attributes:
        counts: tokens of each row; proposed: drafts that were verified in it.
    """

    tokens: npt.NDArray[np.int32]
    counts: Ints
    proposed: Ints
