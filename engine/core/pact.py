"""The pact: the words that the ranks of a group say in the first exchange of a step, and what follows from them.

Everybody computes `agree` from the same words, so all ranks decide alike, at the same step, and nobody coordinates.
Rules that make it sound:

- A step takes one snapshot of its rank's words, before its first exchange; what the host changes later is said in the
  next step.
- What is agreed in a step holds from the next one on; only the numbers of passes and of drafts are for the step itself,
  since they say which exchanges it will have.
- Steps are counted from 0 within a membership. The number is in every frame, so a missed step is a named error.
- An active epoch never goes down.

Used by the CPU device, the simulated one and tests alike; no tensors, no waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import RemoteProtocolError
from transport.messages import Part

PARTS: tuple[Part, ...] = ("main", "draft")
"""Parts of a model whose experts are placed separately, in the order of every tuple by part."""
_WORDS = struct.Struct(f"<7q{len(PARTS)}q")


class Words(NamedTuple):
    """What one rank says in one step.

    Attributes:
        generation: life of its process.
        rows: rows that it brings, over all its passes.
        passes: passes through the model that they need, 0 for an idle rank.
        idle: steps in a row, this one included, that it had neither rows nor another reason to go on.
        join: greatest membership that it is ready to join; its present one if there is no other.
        drafts: drafts that it wants proposed for each of its rows behind these passes, 0 for none.
        stop: 1 if nothing is left to do here and the head wants it to end.
        ready: per part, the greatest epoch that it is ready for.
    """

    generation: int
    rows: int
    passes: int
    idle: int
    join: int
    stop: int
    drafts: int
    ready: tuple[int, ...]

    def pack(self) -> bytes:
        return _WORDS.pack(*self[:-1], *self.ready)


WORDS_BYTES = _WORDS.size


def unpack_words(data: bytes | memoryview) -> Words:
    """The reverse of `Words.pack`. Raises RemoteProtocolError for another length."""
    if len(data) != WORDS_BYTES:
        raise RemoteProtocolError(f"the words of a rank have {WORDS_BYTES} bytes, not {len(data)}")
    generation, rows, passes, idle, join, stop, drafts, *ready = _WORDS.unpack(data)
    return Words(generation, rows, passes, idle, join, stop, drafts, tuple(ready))


class Agreement(NamedTuple):
    """What a step's words mean for all ranks of the group.

    Attributes:
        passes: of this step, for every rank; a rank with fewer of its own adds passes of no rows.
        active: per part, the epoch in force from the next step on.
        park: no step is begun after the *next* one until the group is woken.
        leave: the membership to join after this step, or 0.
        stop: this step is the last of the group: all ranks have nothing left and end.
        drafts: of this step, for every rank: the most that any of them wants; where it is not 0, all of them go through
            the drafter's exchanges behind the last pass, whoever wants none with no rows.
    """

    passes: int
    active: tuple[int, ...]
    park: bool
    leave: int
    stop: bool
    drafts: int


def agree(words: Sequence[Words], active: tuple[int, ...], membership: int, idle_limit: int) -> Agreement:
    """What `words` of all ranks, in any order, mean.

    Args:
        active: per part, the epoch in force in this step.
        membership: the present one.
        idle_limit: steps without rows on all ranks after which the group parks.
    """
    _, _, passes, idle, joins, stops, drafts, ready = zip(*words, strict=True)
    join = min(joins)
    leave = join if join > membership else 0
    stop = all(stops)
    least = [min(epochs) for epochs in zip(*ready, strict=True)]
    return Agreement(
        # A step without rows anywhere still has one pass: it carries the words.
        passes=max(1, *passes),
        active=tuple([max(pair) for pair in zip(active, least, strict=False)]),
        park=not leave and not stop and min(idle) >= idle_limit,
        leave=leave,
        stop=stop,
        drafts=max(drafts),
    )


class GroupStep(NamedTuple):
    """What a result says of the group's step in which it was computed.

    Attributes:
        membership, step: where it was; `step` counts from 0 within the membership.
        active: per part, the epoch in force *in* this step.
        park, stop: as agreed in it.
    """

    membership: int
    step: int
    active: tuple[int, ...]
    park: bool
    stop: bool
