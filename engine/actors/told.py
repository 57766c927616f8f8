"""Told: what the engine tells of a row's tokens and prompt beyond their ids, as columns that grow.

A row has one only where it asks for log-probabilities. What a later attempt tells again takes the place of what came
before.
"""

from __future__ import annotations

import array
import dataclasses

import numpy as np
import numpy.typing as npt

from engine.errors import RemoteProtocolError
from transport.messages import LogprobsEmitted, PromptScored

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class Told:
    """Log-probabilities, one entry for each token.

    Attributes:
        logprobs, places: float32 and int32; places count from 1, the likeliest.
        counts: int32, how many likeliest ids each entry has.
        top_ids, top_logprobs: int32 and float32, of each the likeliest first.
        missing: leading entries that nobody can tell: 1 for the first id of a prompt, which nothing predicts.
    """

    logprobs: array.array[float] = dataclasses.field(default_factory=lambda: array.array("f"))
    places: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    counts: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    top_ids: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    top_logprobs: array.array[float] = dataclasses.field(default_factory=lambda: array.array("f"))
    missing: int = 0

    def __len__(self) -> int:
        return self.missing + len(self.logprobs)

    def cut(self, end: int) -> None:
        """Forgets the entries from `end` on."""
        end = max(0, end - self.missing)
        tops = sum(self.counts[:end])
        for column in (self.logprobs, self.places, self.counts):
            del column[end:]
        del self.top_ids[tops:], self.top_logprobs[tops:]

    def extend(
        self, first: int, logprobs: Floats, places: Ints, counts: Ints, top_ids: Ints, top_logprobs: Floats
    ) -> None:
        """Entries from `first` on.

        Raises:
            RemoteProtocolError: there is nothing yet of an entry before.
        """
        if not self.missing <= first <= len(self):
            raise RemoteProtocolError(f"log-probabilities from {first} on came where {len(self)} was next")
        if first < len(self):
            self.cut(first)
        self.logprobs.frombytes(logprobs.tobytes())
        self.places.frombytes(places.tobytes())
        self.counts.frombytes(counts.tobytes())
        self.top_ids.frombytes(top_ids.tobytes())
        self.top_logprobs.frombytes(top_logprobs.tobytes())


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredRow:
    """A token's entry in a LogprobsEmitted."""

    request: int
    attempt: int
    index: int
    columns: tuple[Floats, Ints, Ints, Ints, Floats]
    """As `Told.extend` takes them, one entry."""


def read_scores(fact: LogprobsEmitted, blob: memoryview) -> list[ScoredRow]:
    """The entries of a frame whose blob has the right length, in order.

    Raises:
        RemoteProtocolError: its counts do not add up.
    """
    rows, tops = fact.num_rows, fact.num_tops
    requests = np.frombuffer(blob, "<i8", rows).tolist()
    ints = np.frombuffer(blob, "<i4", 5 * rows, 8 * rows).reshape(5, rows)
    floats = np.frombuffer(blob, "<f4", 5 * rows, 8 * rows).reshape(5, rows)
    ids, values = np.frombuffer(blob, "<i4", tops, 28 * rows), np.frombuffer(blob, "<f4", tops, 28 * rows + 4 * tops)
    counts = ints[2]
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    if (rows and int(counts.min()) < 0) or (ends[-1] if rows else 0) != tops:
        raise RemoteProtocolError(f"LogprobsEmitted says {tops} likeliest ids, its rows say otherwise")
    attempts, indices = ints[0].tolist(), ints[1].tolist()
    entries = []
    for at, (request, attempt, index, end) in enumerate(zip(requests, attempts, indices, ends, strict=True)):
        one, below = slice(at, at + 1), slice(end - int(counts[at]), end)
        columns = (floats[3, one], ints[4, one], counts[one], ids[below], values[below])
        entries.append(ScoredRow(request, attempt, index, columns))
    return entries


def take_prompt(told: Told, fact: PromptScored, blob: memoryview) -> None:
    """Adds a piece of a prompt; `told.missing` is 1.

    Raises:
        RemoteProtocolError: a piece before it is missing.
    """
    count, tops = fact.count, fact.tops
    told.extend(
        fact.first,
        np.frombuffer(blob, "<f4", count),
        np.frombuffer(blob, "<i4", count, 4 * count),
        np.full(count, tops, np.int32),
        np.frombuffer(blob, "<i4", count * tops, 8 * count),
        np.frombuffer(blob, "<f4", count * tops, 8 * count + 4 * count * tops),
    )
