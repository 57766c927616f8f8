"""Running: the sequences that generate, as columns, so that a step costs array operations and not work for each token.

Every running sequence has a slot; `planned`, `count`, `token` and what a row says of it are columns by slot. A step
takes the first rows in order of arrival that are not planned to their end (the *roster*), and the roster stays the same
object until a sequence comes, goes, is planned to its end, or leaves its `min_tokens` behind.

Two rules are kept here. A slot is free only when no submitted step names it: a sequence that left while steps were
under way keeps its slot, and `count` of that slot counts them off like those of the living. And what steps have yet to
produce is `planned - count`: where that is 0 the host knows the last token, else the device has it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from engine.core.plan import DecodeRows, Ints, Roster, Scores
from engine.core.request import RequestKey, Sequence, judge_token, sampling_at
from engine.core.scores import keep_rows
from transport.messages import FinishReason

_FIRST_SLOTS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Lineup:
    """The sequences of a step, and what of them stays the same while it does.

    Attributes:
        slots: int64[rows].
        roster: as the device sees them.
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
        requests: int64, attempts: int32, indices: int32 (place in the completion), tokens: int32.
        fresh: sequences whose first own token is among them.
        ended: sequences that end with theirs, and why.
        released: sequences that are over and that no submitted step names any more.
        scores: of tokens whose requests ask for them, `rows` being places in the columns; None where none does.
    """

    requests: Ints
    attempts: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    fresh: list[Sequence]
    ended: list[tuple[Sequence, FinishReason]]
    released: list[Sequence]
    scores: Scores | None = None


class Running:
    """See the module."""

    def __init__(self) -> None:
        self.sequences: dict[RequestKey, Sequence] = {}
        """In order of arrival."""
        self._planned = np.zeros(_FIRST_SLOTS, np.int64)
        self._count = np.zeros(_FIRST_SLOTS, np.int64)
        self._token = np.zeros(_FIRST_SLOTS, np.int64)
        self._limit = np.zeros(_FIRST_SLOTS, np.int64)
        self._request = np.zeros(_FIRST_SLOTS, np.int64)
        self._attempt = np.zeros(_FIRST_SLOTS, np.int32)
        self._slab = np.zeros(_FIRST_SLOTS, np.int64)
        self._base = np.zeros(_FIRST_SLOTS, np.int64)
        self._least = np.zeros(_FIRST_SLOTS, np.int64)
        self._may_stop = np.zeros(_FIRST_SLOTS, np.bool_)
        self._tables = np.zeros((_FIRST_SLOTS, 1), np.int64)
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._fresh: set[int] = set()
        self._num_gone = 0
        self._lineup: Lineup | None = None
        # Of the present lineup: submitted steps that are not awaited; steps until a row of it is planned to its end.
        self._num_ahead = self._num_left = 0
        # Of the lineup of the step awaited last: awaited steps in which no row of it comes to its limit.
        self._awaited: Lineup | None = None
        self._num_endless = 0

    def join(self, sequence: Sequence) -> None:
        """It runs from now on: `count` tokens are there, and `next_token` is the last of them."""
        if not self._free:
            self._grow_slots()
        slot = sequence.slot = self._free.pop()
        self._planned[slot] = self._count[slot] = sequence.count
        self._token[slot] = sequence.next_token
        self._limit[slot], self._slab[slot] = sequence.limit, sequence.slab
        self._request[slot], self._attempt[slot] = sequence.key
        self._base[slot] = sequence.prompt_tokens - 1
        self._least[slot], self._may_stop[slot] = sequence.sampling.min_tokens, bool(sequence.sampling.stop_ids)
        if len(sequence.pages) > self._tables.shape[1]:
            more = max(len(sequence.pages), 2 * self._tables.shape[1]) - self._tables.shape[1]
            self._tables = np.pad(self._tables, ((0, 0), (0, more)))
        self._tables[slot] = 0
        self._tables[slot, : len(sequence.pages)] = sequence.pages
        self._fresh.add(slot)
        self.sequences[sequence.key] = sequence
        self._lineup = None

    def leave(self, sequence: Sequence) -> None:
        """It runs no longer. `count` is what it came to, and `steps` the submitted steps that still name its memory."""
        del self.sequences[sequence.key]
        slot = sequence.slot
        sequence.count = int(self._count[slot])
        sequence.steps = int(self._planned[slot]) - sequence.count
        self._fresh.discard(slot)
        self._lineup = None
        if sequence.steps:
            self._num_gone += 1
        else:
            self._free.append(slot)

    @property
    def can_plan(self) -> bool:
        """Whether a step would have a row."""
        return any(self._planned[sequence.slot] < sequence.limit for sequence in self.sequences.values())

    def plan(self, most: int) -> tuple[Lineup, DecodeRows] | None:
        """The rows of the next step, which count as submitted from now on; None when there are none."""
        lineup = self._lineup or self._renew(most)
        slots = lineup.slots
        if not len(slots):
            return None
        planned = self._planned[slots]
        for row, minimum in lineup.minima:
            if planned[row] >= minimum:
                lineup = self._renew(most)
                break
        if self._num_ahead:
            tokens = lineup.unknown
        else:
            tokens = np.where(planned > self._count[slots], -1, self._token[slots])
        rows = DecodeRows(lineup.roster, lineup.bases + planned, tokens)
        planned += 1
        self._planned[slots] = planned
        self._num_ahead += 1
        self._num_left -= 1
        if self._num_left <= 0:
            self._lineup = None
        return lineup, rows

    def apply(
        self,
        lineup: Lineup,
        tokens: npt.NDArray[np.int32],
        eos_ids: frozenset[int],
        scores: Scores | None = None,
    ) -> NewTokens:
        """Takes the tokens of the oldest submitted step, one for each of its rows."""
        slots, limits, may_stop, sequences = lineup.slots, lineup.limits, lineup.may_stop, lineup.sequences
        requests, attempts = lineup.roster.requests, lineup.attempts
        released: list[Sequence] = []
        count = self._count[slots]
        indices = count.astype(np.int32)
        count += 1
        self._count[slots] = count
        self._token[slots] = tokens
        if lineup is self._lineup:
            self._num_ahead -= 1
        if lineup is not self._awaited:
            self._awaited = lineup
            self._num_endless = int((limits - count).min())
        else:
            self._num_endless -= 1
        if self._num_gone:
            is_gone = [self.sequences.get(sequence.key) is not sequence for sequence in sequences]
            if any(is_gone):
                released = [s for s, gone in zip(sequences, is_gone, strict=True) if gone and self._count_off(s)]
                kept = np.flatnonzero(~np.array(is_gone))
                requests, attempts, indices = requests[kept], attempts[kept], indices[kept]
                count, tokens = count[kept], tokens[kept]
                limits, may_stop = limits[kept], None if may_stop is None else may_stop[kept]
                sequences = tuple(sequences[row] for row in kept.tolist())
                scores = None if scores is None else keep_rows(scores, kept)
        new = NewTokens(requests, attempts, indices, tokens, [], [], released, scores)
        if self._fresh:
            new.fresh = [sequence for sequence in sequences if sequence.slot in self._fresh]
            self._fresh.difference_update([sequence.slot for sequence in new.fresh])
        may_end = may_stop
        if self._num_endless <= 0:
            is_full = count >= limits
            may_end = is_full if may_end is None else may_end | is_full
        for end in eos_ids:
            is_end = tokens == end
            if b"\x01" in is_end.tobytes():  # a fifth of what `any` costs
                may_end = is_end if may_end is None else may_end | is_end
        if may_end is not None:
            for row in np.flatnonzero(may_end).tolist():
                sequence = sequences[row]
                sampling = sequence.reserve.sampling
                reason = judge_token(int(tokens[row]), int(count[row]), sequence.limit, sampling, eos_ids)
                if reason is not None:
                    new.ended.append((sequence, reason))
        return new

    def _count_off(self, sequence: Sequence) -> bool:
        """One step less names the memory of a sequence that left; whether none does now."""
        sequence.steps -= 1
        if sequence.steps:
            return False
        self._num_gone -= 1
        self._free.append(sequence.slot)
        return True

    def _renew(self, most: int) -> Lineup:
        """A new lineup, which is the present one from now on."""
        lineup = self._lineup = self._line_up(most)
        left = lineup.limits - self._planned[lineup.slots]
        self._num_ahead, self._num_left = 0, int(left.min()) if len(left) else 0
        return lineup

    def _line_up(self, most: int) -> Lineup:
        everyone = list(self.sequences.values())
        slots = np.array([sequence.slot for sequence in everyone], np.int64)
        first = np.flatnonzero(self._planned[slots] < self._limit[slots])[:most]
        slots = slots[first]
        sequences = tuple([everyone[row] for row in first.tolist()])
        for row in np.flatnonzero(self._least[slots]).tolist():
            sequence, slot = sequences[row], int(slots[row])
            sequence.sampling = sampling_at(sequence.sampling, int(self._planned[slot]))
            self._least[slot] = sequence.sampling.min_tokens
        pages = tuple([sequence.pages for sequence in sequences])
        sampling = tuple([sequence.sampling for sequence in sequences])
        roster = Roster(
            requests=self._request[slots],
            slabs=self._slab[slots],
            pages=pages,
            sampling=sampling,
            tables=self._tables[slots, : max(map(len, pages), default=0)],
        )
        may_stop, least = self._may_stop[slots], self._least[slots]
        return Lineup(
            slots=slots,
            roster=roster,
            sequences=sequences,
            attempts=self._attempt[slots],
            bases=self._base[slots],
            limits=self._limit[slots],
            may_stop=may_stop if may_stop.any() else None,
            minima=tuple([(row, int(least[row])) for row in np.flatnonzero(least).tolist()]),
            unknown=np.full(len(slots), -1, np.int64),
        )

    def _grow_slots(self) -> None:
        old = len(self._planned)
        for name in (
            "planned", "count", "token", "limit", "request", "attempt", "slab", "base", "least", "may_stop",
        ):  # fmt: skip
            setattr(self, f"_{name}", np.pad(getattr(self, f"_{name}"), (0, old)))
        self._tables = np.pad(self._tables, ((0, old), (0, 0)))
        self._free.extend(range(2 * old - 1, old - 1, -1))
