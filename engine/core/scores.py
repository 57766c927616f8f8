"""Scores on their way: log-probabilities of tokens and prompts as the blobs of LogprobsEmitted and PromptScored.

Columns throughout. A row of the first is a token of a request; a row of the second is an id of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.core.plan import Ints, Scores
from engine.core.tokens import Ints as Int32s
from transport.messages import LogprobsEmitted, PromptScored, TokenScored

PIECE_IDS = 16384
"""Ids of a prompt that one PromptScored tells of at most: within the blob's limit even with all 20 likeliest."""


def keep_rows(scores: Scores, kept: Ints) -> Scores:
    """What belongs to the rows `kept` (ascending), which are numbered from 0 now."""
    at = np.searchsorted(kept, scores.rows)
    stays = at < len(kept)
    stays[stays] = kept[at[stays]] == scores.rows[stays]
    below = np.repeat(stays, scores.counts)
    return Scores(
        at[stays],
        scores.logprobs[stays],
        scores.places[stays],
        scores.counts[stays],
        scores.top_ids[below],
        scores.top_logprobs[below],
    )


def find_score(scores: Scores | None, row: int) -> TokenScored | None:
    """What is told of one row, as a value; None if nothing is."""
    if scores is None:
        return None
    at = int(np.searchsorted(scores.rows, row))
    if at == len(scores.rows) or scores.rows[at] != row:
        return None
    first = int(scores.counts[:at].sum())
    below = slice(first, first + int(scores.counts[at]))
    return TokenScored(
        logprob=float(scores.logprobs[at]),
        place=int(scores.places[at]),
        ids=tuple(scores.top_ids[below].tolist()),
        logprobs=tuple(scores.top_logprobs[below].tolist()),
    )


class ScoreBuffer:
    """What is to be told of tokens since the last frame. Nothing is kept while nobody asks."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, Int32s, Int32s, Scores]] = []

    def add(self, key: tuple[int, int], index: int, scored: TokenScored) -> None:
        """One token; `index` is its place in the completion."""
        scores = Scores(
            np.zeros(1, np.int64),
            np.array([scored.logprob], np.float32),
            np.array([scored.place], np.int32),
            np.array([len(scored.ids)], np.int32),
            np.array(scored.ids, np.int32),
            np.array(scored.logprobs, np.float32),
        )
        request, attempt = key
        self._parts.append((np.array([request]), np.array([attempt], np.int32), np.array([index], np.int32), scores))

    def extend(
        self, requests: Ints, attempts: Int32s, indices: Int32s, scores: Scores, counts: Int32s | None = None
    ) -> None:
        """Tokens of a step: `scores.rows` are places among its tokens, of which each request has `counts`, or one."""
        rows = scores.rows
        if not len(rows):
            return
        if counts is not None:
            row_of = np.repeat(np.arange(len(counts)), counts)
            places = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
            requests, attempts = requests[row_of], attempts[row_of]
            indices = (indices[row_of] + places).astype(np.int32)
        self._parts.append((requests[rows], attempts[rows], indices[rows], scores))

    def take(self, step: int) -> tuple[LogprobsEmitted, bytes] | None:
        """The frame, and an empty buffer after it; None when there is nothing to tell."""
        if not self._parts:
            return None
        parts, self._parts = self._parts, []
        requests, attempts, indices = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:3])
        scores = [part[3] for part in parts]
        top_ids = np.concatenate([each.top_ids for each in scores])
        columns = (
            requests.astype("<i8"),
            attempts.astype("<i4"),
            indices.astype("<i4"),
            np.concatenate([each.counts for each in scores]).astype("<i4"),
            np.concatenate([each.logprobs for each in scores]).astype("<f4"),
            np.concatenate([each.places for each in scores]).astype("<i4"),
            top_ids.astype("<i4"),
            np.concatenate([each.top_logprobs for each in scores]).astype("<f4"),
        )
        frame = LogprobsEmitted(step, len(requests), len(top_ids))
        return frame, b"".join(column.tobytes() for column in columns)


def split_prompt(key: tuple[int, int], epoch: int, scores: Scores) -> Iterator[tuple[PromptScored, bytes]]:
    """The frames that tell of ids of a prompt; `scores.rows` are consecutive positions, all with as many likeliest."""
    tops = int(scores.counts[0]) if len(scores.counts) else 0
    for start in range(0, len(scores.rows), PIECE_IDS):
        piece = slice(start, start + PIECE_IDS)
        below = slice(start * tops, (start + PIECE_IDS) * tops)
        columns = (
            scores.logprobs[piece].astype("<f4"),
            scores.places[piece].astype("<i4"),
            scores.top_ids[below].astype("<i4"),
            scores.top_logprobs[below].astype("<f4"),
        )
        word = PromptScored(*key, epoch, int(scores.rows[start]), len(columns[0]), tops)
        yield word, b"".join(column.tobytes() for column in columns)
