"""Sampling: from logits to the next token of every row, as a pure function of (logits, settings, seed, position).

Draws are counter-based: a uniform number is a hash of (seed, position, lane), so a request gives the same text alone,
in a batch, after a restart and on any rank. A draw takes the first token whose cumulative probability exceeds it.
Probabilities are float64: a float32 sum over a vocabulary is off by more than rare tokens weigh.

Ties go to the lowest id, in the arg-max and at the edges of top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transport.messages import Sampling

HEAD_TOKENS = 256
"""Likeliest tokens that are ordered at first; most cuts fall among them, and ordering a vocabulary costs far more."""

_INDEX = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniform(seeds: Sequence[int], positions: Sequence[int], lane: int = 0) -> npt.NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per row, each a function of its own seed, position and the lane.

    Args:
        seeds: up to 53 bits each.
        positions: position of the token that is drawn.
        lane: tells apart several draws for one position (acceptance of a draft, residual, ...).

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


def forbid_ends(logits: Tensor, rows: Sequence[Sampling], eos_ids: Sequence[int]) -> None:
    """Give -inf to ids that would end a text, in rows whose `min_tokens` is above 0. In place.

    Args:
        logits: float32[rows, vocab].
        rows: settings of each row.
        eos_ids: the model's end-of-text ids.
    """
    for row, settings in enumerate(rows):
        if settings.min_tokens > 0:
            ends = [*settings.stop_ids, *(() if settings.ignore_eos else eos_ids)]
            known = [token for token in ends if token < logits.shape[1]]
            if known:
                logits[row, known] = -torch.inf


@torch.inference_mode()
def sample_tokens(
    logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int], eos_ids: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Choose the next token of every row.

    Args:
        logits: float32[rows, vocab]; may be overwritten.
        rows: settings of each row.
        positions: position of the token that is chosen.
        eos_ids: the model's end-of-text ids, for `min_tokens`.

    Returns:
        int64[rows].
    """
    if not rows:
        return np.zeros(0, np.int64)
    forbid_ends(logits, rows, eos_ids)
    best = logits.argmax(-1).numpy()
    drawn = [row for row, settings in enumerate(rows) if settings.temperature > 0]
    if drawn:
        uniform = draw_uniform([rows[row].seed for row in drawn], [positions[row] for row in drawn])
        whole = [i for i, row in enumerate(drawn) if _keeps_all(rows[row])]
        cut = [i for i, row in enumerate(drawn) if not _keeps_all(rows[row])]
        for part, choose in ((whole, _draw_whole), (cut, _draw_cut)):
            if part:
                at = [drawn[i] for i in part]
                best[at] = choose(logits[at], [rows[row] for row in at], uniform[part])
    return best


@torch.inference_mode()
def keep_likeliest(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """The distribution that each row is drawn from: float64[rows, vocab], sums of 1.

    A greedy row is a point mass. This is what a verifier compares a draft's distribution with.
    """
    result = torch.zeros(logits.shape, dtype=torch.float64)
    for row, settings in enumerate(rows):
        if settings.temperature == 0:
            result[row, logits[row].argmax()] = 1
        elif _keeps_all(settings):
            result[row] = _shares(logits[row : row + 1], [settings])[0]
        else:
            ids, mass, _ = _ordered(logits[row : row + 1], [settings], logits.shape[1])
            result[row, ids[0]] = mass[0] / mass.sum()
    return result


def _order_keys(scores: Tensor) -> Tensor:
    """Integers that order like float32[...] scores: int64[...] within 32 signed bits; the two zeros are one."""
    # Adding zero makes -0 the other zero; then a float's bits, with negative ones flipped, order like the float.
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)


def _keeps_all(settings: Sampling) -> bool:
    return settings.top_k == 0 and settings.top_p >= 1


def _shares(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Softmax at each row's temperature: float64[rows, vocab]."""
    temperature = torch.tensor([settings.temperature for settings in rows], dtype=torch.float64).unsqueeze(1)
    wide = logits.double()
    # The maximum goes first: a tiny temperature must not turn differences into inf - inf.
    return ((wide - wide.amax(1, keepdim=True)) / temperature).softmax(-1)


def _draw_whole(logits: Tensor, rows: Sequence[Sampling], uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Draw from the whole vocabulary, in id order."""
    return _invert(_shares(logits, rows), uniform)


def _draw_cut(logits: Tensor, rows: Sequence[Sampling], uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Draw from the likeliest tokens, in order of likelihood."""
    count = min(HEAD_TOKENS, logits.shape[1])
    ids, mass, complete = _ordered(logits, rows, count)
    chosen = ids.gather(1, torch.from_numpy(_invert(mass, uniform)).unsqueeze(1))[:, 0].numpy()
    for row in np.nonzero(~complete.numpy())[0].tolist():
        part = slice(row, row + 1)
        ids, mass, _ = _ordered(logits[part], rows[part], logits.shape[1])
        chosen[row] = ids[0, int(_invert(mass, uniform[part])[0])]
    return chosen


def _ordered(logits: Tensor, rows: Sequence[Sampling], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` likeliest tokens of each row and what top-k and top-p leave of their mass.

    Returns:
        (ids int64[rows, count], likeliest first; mass float64[rows, count], 0 where cut; complete bool[rows], whether
        the cut falls within `count`).
    """
    vocab = logits.shape[1]
    index = torch.arange(vocab)
    keys = (_order_keys(logits) << 32) | (_INDEX - index)
    ids = _INDEX - (keys.topk(count, -1, sorted=True).values & _INDEX)
    mass = _shares(logits, rows).gather(1, ids)
    limit = torch.tensor([settings.top_k or vocab for settings in rows]).unsqueeze(1)
    share = torch.tensor([settings.top_p for settings in rows], dtype=torch.float64).unsqueeze(1)
    before = mass.cumsum(1) - mass
    kept = (torch.arange(count) < limit) & ((before < share) | (share >= 1))
    kept[:, 0] = True
    complete = torch.full((len(rows),), True) if count == vocab else ~kept[:, -1] | (limit[:, 0] <= count)
    return ids, mass.masked_fill(~kept, 0), complete


def _invert(mass: Tensor, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """First place of each row whose cumulative mass exceeds its uniform number times the total; never one of mass 0."""
    cumulative = mass.cumsum(1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, torch.from_numpy(uniform).unsqueeze(1) * total, right=True)
    last = mass.shape[1] - 1 - (mass.flip(1) > 0).to(torch.int8).argmax(1, keepdim=True)
    return torch.minimum(place, last)[:, 0].numpy()
