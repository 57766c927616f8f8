"""Verification: which of a row's drafted tokens hold, and the token that follows them, as pure functions.

Row i of a sequence has the target's distribution after i drafts; it judges draft i, and the row behind the last draft
gives one token more (the *bonus*). Greedy: a draft holds while it is the arg-max. Drawn: draft x holds with probability
min(1, p(x) / q(x)), q being what it was drawn from; at the first that does not, the token is drawn from what p has
above q, max(p - q, 0) made whole. So tokens come out as if each had been drawn from p, whatever q is: a bad drafter
costs speed and changes nothing. A drafter that does not draw is a point mass: x holds with probability p(x), else the
token is drawn from p without x. A processed greedy row is a point too, so one call serves greedy and drawn sequences.

p is the *processed* distribution (`sampling.process_logits`), each row with its own counts (`penalties.count_drafts`).
Draws take the lowest id whose cumulative probability exceeds the uniform number.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.sampling import LANE_ACCEPT, LANE_RESIDUAL, LANE_SAMPLE, Numbers, draw_uniform

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Uniforms:
    """Uniform numbers of one verification of n sequences with k drafts each.

    Attributes:
        accept: float64[n, k], whether each draft holds.
        final: float64[n, k + 1], for the token after so many drafts that held.
    """

    accept: Tensor
    final: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification of n sequences with k drafts each came to.

    Attributes:
        accepted: int64[n], drafts that hold, from the first on.
        tokens: int64[n, k + 1], these, then the token that follows, then -1.
        source: float64[n, vocab], the distribution that the following token was drawn from.
    """

    accepted: Tensor
    tokens: Tensor
    source: Tensor


def draw_uniforms(seeds: Numbers, positions: Numbers, drafts: int) -> Uniforms:
    """The numbers that sequences verify with: each a function of (seed, position, purpose) alone.

    Args:
        seeds: int[n].
        positions: int[n], of the first drafted token.
        drafts: k.
    """
    places = np.asarray(positions, np.int64)[:, None] + np.arange(drafts + 1)
    seeds = np.broadcast_to(np.asarray(seeds, np.uint64)[:, None], places.shape)
    final = draw_uniform(seeds, places, LANE_RESIDUAL)
    final[:, drafts] = draw_uniform(seeds[:, drafts], places[:, drafts], LANE_SAMPLE)
    accept = draw_uniform(seeds[:, :drafts], places[:, :drafts], LANE_ACCEPT)
    return Uniforms(torch.from_numpy(accept), torch.from_numpy(final))


@torch.inference_mode()
def verify_greedy(target: Tensor, drafts: Tensor) -> Verdict:
    """Drafts against the arg-max; ties go to the lowest id.

    Args:
        target: float[n, k + 1, vocab], adjusted logits or probabilities.
        drafts: int64[n, k].
    """
    best = target.argmax(-1)
    accepted = _leading(drafts == best[:, :-1])
    source = torch.zeros((len(target), target.shape[2]), dtype=torch.float64)
    last = best.gather(1, accepted.unsqueeze(1))
    source.scatter_(1, last, 1.0)
    return Verdict(accepted, _line_up(drafts, accepted, last[:, 0]), source)


@torch.inference_mode()
def verify_drawn(target: Tensor, draft: Tensor, drafts: Tensor, uniforms: Uniforms) -> Verdict:
    """Drafts that were drawn from `draft`, by rejection.

    Args:
        target: float[n, k + 1, vocab], sums of 1.
        draft: float[n, k, vocab], sums of 1: what each draft was drawn from, given those before it.
        drafts: int64[n, k].
        uniforms: see there.
    """
    target, draft = target.double(), draft.double()
    at = drafts.unsqueeze(2)
    ours, theirs = target[:, :-1].gather(2, at)[:, :, 0], draft.gather(2, at)[:, :, 0]
    # A draft that its drafter could not have drawn does not hold: 0 / 0 counts as 0.
    holds = uniforms.accept < torch.where(theirs > 0, ours / theirs, 0.0).clamp(max=1.0)
    return _finish(target, draft, drafts, _leading(holds), uniforms.final)


@torch.inference_mode()
def verify_point(target: Tensor, drafts: Tensor, uniforms: Uniforms) -> Verdict:
    """Drafts of a drafter that does not draw: each is all of its own distribution.

    Args:
        target: float[n, k + 1, vocab], sums of 1.
        drafts: int64[n, k].
        uniforms: see there.
    """
    draft = torch.zeros((*drafts.shape, target.shape[2]), dtype=torch.float64)
    draft.scatter_(2, drafts.unsqueeze(2), 1.0)
    return verify_drawn(target, draft, drafts, uniforms)


def _finish(target: Tensor, draft: Tensor, drafts: Tensor, accepted: Tensor, final: Tensor) -> Verdict:
    """Draws what follows the drafts that hold."""
    n, k = drafts.shape
    rows = torch.arange(n)
    # Behind the last draft there is nothing to take away.
    padded = torch.cat((draft, draft.new_zeros((n, 1, draft.shape[2]))), 1)
    p, q = target[rows, accepted], padded[rows, accepted]
    source = torch.where((accepted == k).unsqueeze(1), p, (p - q).clamp(min=0.0))
    total = source.sum(1, keepdim=True)
    # Only rounding can leave nothing: p and q are the same there, and p is as good as what is left of it.
    source = torch.where(total > 0, source / total, p)
    cumulative = source.cumsum(1)
    uniform = final.gather(1, accepted.unsqueeze(1))
    token = (cumulative <= uniform).sum(1)
    last = source.shape[1] - 1 - (source.flip(1) > 0).to(torch.int8).argmax(1)
    return Verdict(accepted, _line_up(drafts, accepted, torch.minimum(token, last)), source)


def _leading(holds: Tensor) -> Tensor:
    """How many are true before the first that is not: int64[n] of bool[n, k]."""
    return holds.to(torch.int64).cumprod(1).sum(1)


def _line_up(drafts: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    n, k = drafts.shape
    place = torch.arange(k + 1)
    padded = torch.cat((drafts.to(torch.int64), last.new_zeros((n, 1))), 1)
    tokens = torch.where(place < accepted.unsqueeze(1), padded, -1)
    return torch.where(place == accepted.unsqueeze(1), last.unsqueeze(1), tokens)
