"""Scoring: log-probabilities of tokens and of the likeliest ids, of the distribution as the model gave it.

That is the log-softmax of the logits before bias, penalties, temperature and cuts. Sums are float64, and each row's is
its own, so a row has the same numbers alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.plan import Scores

SLICE_ROWS = 64
"""Rows that are scored at a time: their keys take eight bytes for each id of the vocabulary."""
_INDEX = 0xFFFFFFFF


def order_keys(scores: Tensor) -> Tensor:
    """Integers that order like float32[..., n] scores, equal ones by index, the lowest above: int64[..., n]."""
    # Adding zero makes -0 the other zero; then a float's bits, with negative ones flipped, order like the float.
    bits = (scores + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (ordered << 32) | (_INDEX - torch.arange(scores.shape[-1]))


def choose_likeliest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` greatest of float32[..., n], the greatest first: int64[..., count]."""
    return _INDEX - (order_keys(scores).topk(count, -1, sorted=True).values & _INDEX)


def score_tokens(
    logits: Tensor, tokens: npt.NDArray[np.int64], tops: Sequence[int], rows: npt.NDArray[np.int64]
) -> Scores:
    """Scores of one token for each row of logits.

    Args:
        logits: float32[n, vocab], unprocessed; not changed.
        tokens: int64[n].
        tops: likeliest ids to tell of each.
        rows: int64[n], what the rows are called in the result.
    """
    vocab = logits.shape[1]
    at = torch.from_numpy(tokens).unsqueeze(1)
    chosen = logits.gather(1, at)
    places = 1 + (logits > chosen).sum(1) + ((logits == chosen) & (torch.arange(vocab) < at)).sum(1)
    total = torch.stack([row.double().logsumexp(0) for row in logits]) if len(logits) else logits.new_zeros(0).double()
    counts = np.minimum(np.array(tops, np.int32), np.int32(vocab))
    widest = int(counts.max(initial=0))
    ids = choose_likeliest(logits, widest) if widest else at[:, :0]
    shares = logits.gather(1, ids).double() - total.unsqueeze(1)
    told = np.arange(widest) < counts[:, None]
    return Scores(
        rows=rows,
        logprobs=(chosen[:, 0].double() - total).float().numpy(),
        places=places.to(torch.int32).numpy(),
        counts=counts,
        top_ids=ids.to(torch.int32).numpy()[told],
        top_logprobs=shares.float().numpy()[told],
    )


def score_targets(logits: Tensor, targets: npt.NDArray[np.int64], tops: int, first: int) -> Scores:
    """Scores of ids that are there already: those at positions `first` and following; `tops` likeliest of each.

    Args:
        logits: float32[n, vocab], which predict them.
        targets: int64[n], at least one.
    """
    parts = []
    for start in range(0, len(targets), SLICE_ROWS):
        piece = targets[start : start + SLICE_ROWS]
        rows = np.arange(first + start, first + start + len(piece))
        parts.append(score_tokens(logits[start : start + len(piece)], piece, [tops] * len(piece), rows))
    joined = join_scores(parts)
    assert joined is not None, "no targets"
    return joined


def join_scores(parts: Sequence[Scores]) -> Scores | None:
    """Scores of rows that follow one another, as one; None for none."""
    if not parts:
        return None
    names = ("rows", "logprobs", "places", "counts", "top_ids", "top_logprobs")
    return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
