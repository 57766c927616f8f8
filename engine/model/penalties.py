"""Penalties: what was seen of each id of a sequence, and what settings make of logits before a token is drawn.

A line of counts is int16[vocab]: how often the id was generated in the low 15 bits, which stop at their largest number,
and bit 15 if the prompt has it. The order in which logits are changed is that of `docs/sampling.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transport.messages import Sampling

IN_PROMPT = -(1 << 15)
MOST = (1 << 15) - 1


def count_ids(ids: npt.NDArray[np.int64], generated: int, vocab_size: int) -> Tensor:
    """The counts of a request: int16[vocab_size].

    Args:
        ids: all of its ids, each in [0, vocab_size).
        generated: how many of them, at the end, are its completion.
    """
    at = len(ids) - generated
    times = np.bincount(ids[at:], minlength=vocab_size).clip(max=MOST).astype(np.int16)
    times[ids[:at]] |= np.int16(IN_PROMPT)
    return torch.from_numpy(times)


def add_tokens(counts: Tensor, lines: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
    """Each of these lines has one more of its token. In place.

    Args:
        counts: int16[*, vocab].
        lines: different ones.
        tokens: one for each.
    """
    cells = counts.numpy()[lines, tokens]
    counts.numpy()[lines, tokens] = cells + ((cells & MOST) < MOST)


def count_drafts(line: Tensor, drafts: Sequence[int]) -> Tensor:
    """The counts for the token in place of each draft, and after the last: int16[drafts + 1, vocab]."""
    lines = line.repeat(len(drafts) + 1, 1)
    for place, token in enumerate(drafts):
        add_tokens(lines, np.arange(place + 1, len(lines)), np.full(len(drafts) - place, token))
    return lines


class Adjuster:
    """What the settings of some rows do to logits, put together once for as long as the rows stay.

    Attributes:
        penalised: int64[n], the rows that need counts.
        is_idle: nothing is to be done at all.
    """

    def __init__(self, rows: Sequence[Sampling], eos_ids: Sequence[int]) -> None:
        self.penalised = np.array([row for row, each in enumerate(rows) if each.has_penalties], np.int64)
        asking = [rows[row] for row in self.penalised.tolist()]
        self._repetition = _column([each.repetition_penalty for each in asking])
        self._presence = _column([each.presence_penalty for each in asking])
        self._frequency = _column([each.frequency_penalty for each in asking])
        biased = [
            (row, *pair) for row, each in enumerate(rows) for pair in zip(each.bias_ids, each.biases, strict=True)
        ]
        self._bias_at = torch.tensor([[row, token] for row, token, _ in biased], dtype=torch.int64).reshape(-1, 2).T
        self._biases = torch.tensor([bias for _, _, bias in biased], dtype=torch.float32)
        self._ends = [
            (row, [*each.stop_ids, *(() if each.ignore_eos else eos_ids)])
            for row, each in enumerate(rows)
            if each.min_tokens > 0
        ]
        self.is_idle = not (len(self.penalised) or biased or self._ends)

    def apply(self, logits: Tensor, counts: Tensor | None) -> None:
        """Bias, repetition, frequency, presence, then -inf for ids that may not end a text yet. In place.

        Args:
            logits: float32[rows, vocab].
            counts: int16[penalised, vocab]; may be None where there are none.
        """
        if self.is_idle:
            return
        if len(self._biases):
            row, token = self._bias_at
            logits[row, token] += self._biases
        if len(self.penalised):
            assert counts is not None, "rows with penalties need their counts"
            part = logits[self.penalised]
            worse = torch.where(part > 0, part / self._repetition, part * self._repetition)
            part = torch.where(counts != 0, worse, part)
            times = counts & MOST
            part -= self._frequency * times
            part -= self._presence * (times > 0)
            logits[self.penalised] = part
        for row, ends in self._ends:
            known = [token for token in ends if token < logits.shape[1]]
            if known:
                logits[row, known] = -torch.inf


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)
