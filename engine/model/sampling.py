"""Sampling: from logits to the next token of every row, a pure function of logits, settings, position and counts.

Draws are counter-based: a uniform number is a hash of (seed, position, lane), so a request gives the same text alone,
in a batch, after a restart and on any rank. A draw takes the first token whose cumulative probability exceeds it.
Probabilities are float64: a float32 sum over a vocabulary is off by more than rare tokens weigh.

Ties go to the lowest id, in the arg-max and at the edges of top-k and top-p. What is done to logits before, `penalties`
has; `docs/sampling.md` says all of it in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.penalties import Adjuster
from engine.model.scoring import choose_likeliest
from transport.messages import Sampling

HEAD_TOKENS = 256
"""Likeliest tokens that are ordered at first; most cuts fall among them, and ordering a vocabulary costs far more."""
LANE_SAMPLE, LANE_ACCEPT, LANE_RESIDUAL, LANE_DRAFT = range(4)
"""What a draw is for: a token, whether a draft holds, the token in place of one that does not, a draft."""

Numbers = Sequence[int] | npt.NDArray[Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniform(seeds: Numbers, positions: Numbers, lane: int = LANE_SAMPLE) -> npt.NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per row, each a function of its own seed, position and the lane.

    Args:
        seeds: up to 53 bits each.
        positions: position of the token that is drawn.
        lane: tells apart several draws for one position.

    *Source:* SplitMix64's output function, applied once per input word.
    """
    state = _mix(np.asarray(seeds, np.uint64) + _GOLDEN)
    state = _mix(state ^ np.asarray(positions, np.uint64))
    state = _mix(state + np.uint64(lane * int(_GOLDEN) % (1 << 64)))
    # 53 bits and half a step: never 0, never 1.
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Chooses tokens for some rows, step after step, as long as they stay: what their settings mean is found out once.

    Attributes:
        rows: settings of each row.
        penalised: int64[n], the rows whose counts it needs.
        scored: int64[n], the rows that ask for log-probabilities of their tokens.
        guided: rows with a grammar.
        takes_best: every row takes the likeliest id of its logits as they are, and no more is asked.
    """

    def __init__(self, rows: Sequence[Sampling], eos_ids: Sequence[int]) -> None:
        self.rows = rows
        self._adjuster = Adjuster(rows, eos_ids)
        self.penalised = self._adjuster.penalised
        self.scored = np.array([row for row, each in enumerate(rows) if each.logprobs >= 0], np.int64)
        self.guided = [row for row, each in enumerate(rows) if each.grammar]
        drawn = [row for row, each in enumerate(rows) if each.temperature > 0]
        self._drawn = np.array(drawn, np.int64)
        self.takes_best = not (drawn or self.guided or len(self.scored)) and self._adjuster.is_idle
        self._seeds = np.array([rows[row].seed for row in drawn], np.uint64)
        self._whole = [place for place, row in enumerate(drawn) if _keeps_all(rows[row])]
        self._cut = [place for place, row in enumerate(drawn) if not _keeps_all(rows[row])]

    @torch.inference_mode()
    def choose(self, logits: Tensor, positions: Numbers, counts: Tensor | None = None) -> npt.NDArray[np.int64]:
        """The next token of every row: int64[rows].

        Args:
            logits: float32[rows, vocab]; may be overwritten.
            positions: position of the token that is chosen.
            counts: int16[penalised, vocab], see `penalties`; only read.
        """
        if not len(self.rows):
            return np.zeros(0, np.int64)
        self._adjuster.apply(logits, counts)
        best = logits.argmax(-1).numpy()
        if len(self._drawn):
            uniform = draw_uniform(self._seeds, np.asarray(positions, np.int64)[self._drawn])
            for part, choose in ((self._whole, _draw_whole), (self._cut, _draw_cut)):
                if part:
                    at = self._drawn[part]
                    best[at] = choose(logits[at], [self.rows[row] for row in at], uniform[part])
        return best


def sample_tokens(
    logits: Tensor,
    rows: Sequence[Sampling],
    positions: Sequence[int],
    eos_ids: Sequence[int],
    counts: Tensor | None = None,
) -> npt.NDArray[np.int64]:
    """Choose the next token of every row, once.

    Args:
        logits: float32[rows, vocab]; may be overwritten.
        rows: settings of each row.
        positions: position of the token that is chosen.
        eos_ids: the model's end-of-text ids, for `min_tokens`.
        counts: int16[rows with penalties, vocab], in their order.

    Returns:
        int64[rows].
    """
    return Sampler(rows, eos_ids).choose(logits, positions, counts)


@torch.inference_mode()
def process_logits(
    logits: Tensor, rows: Sequence[Sampling], counts: Tensor | None = None, eos_ids: Sequence[int] = ()
) -> Tensor:
    """The distribution that each row's token is drawn from: float64[rows, vocab], sums of 1.

    A greedy row is a point mass. This is what drafts are verified against.

    Args:
        logits: float32[rows, vocab]; not changed.
        rows: settings of each row.
        counts: int16[rows with penalties, vocab], in their order.
        eos_ids: the model's end-of-text ids, for `min_tokens`.
    """
    adjuster = Adjuster(rows, eos_ids)
    if not adjuster.is_idle:
        logits = logits.clone()
        adjuster.apply(logits, counts)
    return keep_likeliest(logits, rows)


@torch.inference_mode()
def keep_likeliest(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """The distribution that each row of adjusted logits is drawn from: float64[rows, vocab], sums of 1."""
    result = torch.zeros(logits.shape, dtype=torch.float64)
    greedy = [row for row, each in enumerate(rows) if each.temperature == 0]
    whole = [row for row, each in enumerate(rows) if each.temperature > 0 and _keeps_all(each)]
    cut = [row for row, each in enumerate(rows) if each.temperature > 0 and not _keeps_all(each)]
    if greedy:
        result[greedy, logits[greedy].argmax(1)] = 1
    if whole:
        result[whole] = _shares(logits[whole], [rows[row] for row in whole])
    if cut:
        ids, mass, _ = _ordered(logits[cut], [rows[row] for row in cut], logits.shape[1])
        result[cut] = torch.zeros_like(mass).scatter_(1, ids, mass / mass.sum(1, keepdim=True))
    return result


def _keeps_all(settings: Sampling) -> bool:
    return settings.top_k == 0 and settings.top_p >= 1 and settings.min_p == 0


def _shares(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Softmax at each row's temperature: float64[rows, vocab]."""
    temperature = torch.tensor([settings.temperature for settings in rows], dtype=torch.float64).unsqueeze(1)
    wide = logits.double()
    # The maximum goes first: a tiny temperature must not turn differences into inf - inf.
    return ((wide - wide.amax(1, keepdim=True)) / temperature).softmax(-1)


def _draw_whole(logits: Tensor, rows: Sequence[Sampling], uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Draw from the whole vocabulary, in id order."""
    return invert_mass(_shares(logits, rows), uniform)


def _draw_cut(logits: Tensor, rows: Sequence[Sampling], uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Draw from the likeliest tokens, in order of likelihood."""
    count = min(HEAD_TOKENS, logits.shape[1])
    ids, mass, complete = _ordered(logits, rows, count)
    chosen = ids.gather(1, torch.from_numpy(invert_mass(mass, uniform)).unsqueeze(1))[:, 0].numpy()
    for row in np.nonzero(~complete.numpy())[0].tolist():
        part = slice(row, row + 1)
        ids, mass, _ = _ordered(logits[part], rows[part], logits.shape[1])
        chosen[row] = ids[0, int(invert_mass(mass, uniform[part])[0])]
    return chosen


def _ordered(logits: Tensor, rows: Sequence[Sampling], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` likeliest tokens of each row and what top-k, top-p and min-p leave of their mass.

    Returns:
        (ids int64[rows, count], likeliest first; mass float64[rows, count], 0 where cut; complete bool[rows], whether
        the cut falls within `count`).
    """
    vocab = logits.shape[1]
    ids = choose_likeliest(logits, count)
    mass = _shares(logits, rows).gather(1, ids)
    limit = torch.tensor([settings.top_k or vocab for settings in rows]).unsqueeze(1)
    share = torch.tensor([settings.top_p for settings in rows], dtype=torch.float64).unsqueeze(1)
    least = torch.tensor([settings.min_p for settings in rows], dtype=torch.float64).unsqueeze(1) * mass[:, :1]
    before = mass.cumsum(1) - mass
    kept = (torch.arange(count) < limit) & ((before < share) | (share >= 1)) & (mass >= least)
    kept[:, 0] = True
    complete = torch.full((len(rows),), True) if count == vocab else ~kept[:, -1] | (limit[:, 0] <= count)
    return ids, mass.masked_fill(~kept, 0), complete


def invert_mass(mass: Tensor, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """First place of each row whose cumulative mass exceeds its uniform number times the total; never one of mass 0."""
    cumulative = mass.cumsum(1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, torch.from_numpy(uniform).unsqueeze(1) * total, right=True)
    last = mass.shape[1] - 1 - (mass.flip(1) > 0).to(torch.int8).argmax(1, keepdim=True)
    return torch.minimum(place, last)[:, 0].numpy()
