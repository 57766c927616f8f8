"""Running: the sequences that generate, as columns, so that a step costs array operations and not work for each token.

Every running sequence has a slot; `planned`, `count`, `token` and what a row says of it are columns by slot. A step
takes the first rows in order of arrival that are not planned to their end (the *roster*), and the roster stays the same
object until a sequence comes, goes, is planned to its end, or leaves its `min_tokens` behind.

Two rules are kept here. A slot is free only when no submitted step names it: a sequence that left while steps were
under way keeps its slot until they are awaited. And `planned - count` is the number of submitted steps that name a
slot: where that is 0 the host knows the last token, else the device has it.

Each step is planned to bring one token. With drafts it may bring more; then both columns grow by what it brought beyond
the one. So `planned` is what a sequence comes to at least, and a row may be planned that has reached its end by then:
the device knows, and it brings nothing. As long as a step that may verify drafts is not awaited, positions are the
device's to know as well.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core.drafted import DraftMeter
from engine.core.lineup import Brought, Lineup, NewTokens
from engine.core.plan import DecodeRows, Ints, Roster, Scores
from engine.core.request import RequestKey, Sequence, judge_token, sampling_at
from engine.core.runs import Runs
from engine.core.scores import keep_rows
from engine.errors import LocalProtocolError
from transport.messages import FinishReason, Sampling

_FIRST_SLOTS = 16
MOST_HISTORY = 1 << 15
"""Tokens of a completion that are remembered for its hand-back, at most: a longer one stays on its rank. What is so
long is thought rather than said, and thoughts are not in the next prompt."""
# As arrays: a number would be made one for each sum, which costs more than the sum.
_ONE, _ONE_INT32 = np.array(1, np.int64), np.array(1, np.int32)


class Running:
    """See the module.

    Args:
        drafts: drafts behind each row at most; 0 where nobody drafts.
        draft_rows: a step with more rows has none.
        remembers: tokens of completions are there until these end, see `history_of`.
    """

    def __init__(self, drafts: int = 0, draft_rows: int = 0, *, remembers: bool = False) -> None:
        self._drafts, self._draft_rows = drafts, draft_rows
        # By slot, the completion's tokens by index; one more column takes what is not remembered. None: nobody asks.
        self._history = np.zeros((_FIRST_SLOTS, 64), np.int32) if remembers else None
        # No place that is noted next lies beyond it.
        self._longest = 0
        self.drafted = DraftMeter()
        self.sequences: dict[RequestKey, Sequence] = {}
        """In order of arrival."""
        # By slot and in the same order, of those that are not known to be planned to their end: themselves, and what a
        # roster says of them, so that a new lineup is made without a look at each.
        self._open: dict[int, Sequence] = {}
        self._open_pages: dict[int, Runs] = {}
        self._open_sampling: dict[int, Sampling] = {}
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
        self._proposed = np.zeros(_FIRST_SLOTS, np.int64)
        self._accepted = np.zeros(_FIRST_SLOTS, np.int64)
        self._tables = np.zeros((_FIRST_SLOTS, 1), np.int64)
        self._width = np.zeros(_FIRST_SLOTS, np.int64)
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._fresh: dict[int, Sequence] = {}
        self._num_gone = 0
        # Sequences here that follow a grammar.
        self._num_said = 0
        self._lineup: Lineup | None = None
        # Of the present lineup: submitted steps that are not awaited; steps until a row of it is planned to its end.
        self._num_ahead = self._num_left = 0
        # And where its rows stand in the next step, and how many steps were planned that `planned` does not show yet:
        # as long as nobody drafts, each moves all rows by one.
        self._positions = np.zeros(0, np.int64)
        self._num_unplanned = 0
        # Submitted steps that may verify drafts.
        self._num_drafting = 0
        # Of the lineup of the step awaited last: awaited steps in which no row of it comes to its limit.
        self._awaited: Lineup | None = None
        self._num_endless = 0
        # And the places of the next tokens, the last ones, and how many of each row `count` and `token` do not show.
        self._indices = np.zeros(0, np.int32)
        self._last_tokens = np.zeros(0, np.int32)
        self._num_uncounted = 0

    def join(self, sequence: Sequence) -> None:
        """It runs from now on: `count` tokens are there, and `next_token` is the last of them."""
        if not self._free:
            self._grow_slots()
        slot = sequence.slot = self._free.pop()
        self._planned[slot] = self._count[slot] = sequence.count
        self._token[slot] = sequence.next_token
        if self._history is not None:
            self._longest = max(self._longest, sequence.count)
            self._note(np.array([slot]), np.array([sequence.count - 1]), np.array([sequence.next_token], np.int32))
        self._limit[slot], self._slab[slot] = sequence.limit, sequence.slab
        self._request[slot], self._attempt[slot] = sequence.key
        self._base[slot] = sequence.prompt_tokens - 1
        self._proposed[slot] = self._accepted[slot] = 0
        self._least[slot], self._may_stop[slot] = sequence.sampling.min_tokens, bool(sequence.sampling.stop_ids)
        width = self._width[slot] = len(sequence.pages)
        if width > self._tables.shape[1]:
            more = max(width, 2 * self._tables.shape[1]) - self._tables.shape[1]
            self._tables = np.pad(self._tables, ((0, 0), (0, more)))
        self._tables[slot] = 0
        self._tables[slot, :width] = sequence.pages.to_array()
        self._fresh[slot] = sequence
        self._num_said += bool(sequence.said)
        self.sequences[sequence.key] = self._open[slot] = sequence
        self._open_pages[slot], self._open_sampling[slot] = sequence.pages, sequence.sampling
        self._drop_lineup()

    def leave(self, sequence: Sequence) -> None:
        """It runs no longer. `count` is what it came to, and `steps` the submitted steps that still name its memory."""
        del self.sequences[sequence.key]
        self._num_said -= bool(sequence.said)
        self._note_planned()
        self._note_counted()
        slot = sequence.slot
        sequence.count = int(self._count[slot])
        sequence.steps = int(self._planned[slot]) - sequence.count
        if self._drafts:
            origin = sequence.reserve.prefill_rank, sequence.prefill_generation
            self.drafted.add_request(*origin, int(self._proposed[slot]), int(self._accepted[slot]))
        self._fresh.pop(slot, None)
        # As a rule it was planned to its end, and the present lineup is without it already.
        if self._close(slot):
            self._drop_lineup()
        if sequence.steps:
            self._num_gone += 1
        else:
            self._free.append(slot)

    def history_of(self, sequence: Sequence) -> bytes:
        """All tokens of this attempt of a sequence that runs, int32 each; empty where they are too many, or nobody
        remembers any."""
        self._note_counted()
        slot, count = sequence.slot, int(self._count[sequence.slot])
        if self._history is None or count > MOST_HISTORY:
            return b""
        return self._history[slot, sequence.reserve.generated : count].tobytes()

    def _note(self, slots: Ints, places: npt.NDArray[np.integer[Any]], tokens: npt.NDArray[np.int32]) -> None:
        """Remembers these tokens of completions, by their places in them."""
        history = self._history
        assert history is not None
        width = history.shape[1]
        # A step brings so many at most. So it takes a look at all of them only where the bound is at the edge.
        self._longest += 1 + self._drafts
        if self._longest >= width:
            self._note_counted()
            self._longest = int(max(self._count.max(), places.max())) + 1 + self._drafts
            while width <= min(self._longest, MOST_HISTORY):
                width = min(2 * width, MOST_HISTORY + 1)
            if width > history.shape[1]:
                history = self._history = np.pad(history, ((0, 0), (0, width - history.shape[1])))
        history[slots, places if self._longest < width else np.minimum(places, width - 1)] = tokens

    @property
    def can_plan(self) -> bool:
        """Whether a step would have a row."""
        self._note_planned()
        return any(self._planned[sequence.slot] < sequence.limit for sequence in self.sequences.values())

    def plan(self, most: int) -> tuple[Lineup, DecodeRows, int] | None:
        """The rows of the next step, which count as submitted from now on, and its drafts; None when there are none."""
        lineup = self._lineup or self._renew(most)
        slots = lineup.slots
        if not len(slots):
            return None
        if self._drafts:  # its rows do not move alike
            self._positions = lineup.bases + self._planned[slots]
        for row, minimum in lineup.minima:
            if self._positions[row] - lineup.bases[row] >= minimum:
                lineup = self._renew(most)
                break
        if self._num_ahead:
            tokens = lineup.unknown
        else:
            self._note_planned()
            self._note_counted()
            tokens = np.where(self._planned[slots] > self._count[slots], -1, self._token[slots])
        rows = DecodeRows(lineup.roster, self._positions, tokens)
        drafts = 0
        if self._drafts:
            self._planned[slots] += 1
            if self._num_drafting:
                rows.positions = np.where(tokens < 0, -1, rows.positions)
            if len(slots) <= self._draft_rows:
                drafts = self._drafts
                self._num_drafting += 1
        else:
            self._positions = self._positions + _ONE  # a new one: the rows' does not change any more
            self._num_unplanned += 1
        self._num_ahead += 1
        self._num_left -= 1
        if self._num_left <= 0:
            self._drop_lineup()
        return lineup, rows, drafts

    def apply(
        self,
        lineup: Lineup,
        tokens: npt.NDArray[np.int32],
        eos_ids: frozenset[int],
        scores: Scores | None = None,
    ) -> NewTokens:
        """Takes the tokens of the oldest submitted step, one for each of its rows. If it may have verified drafts,
        `end_drafting` comes before."""
        slots, limits, may_stop, sequences = lineup.slots, lineup.limits, lineup.may_stop, lineup.sequences
        requests, attempts = lineup.roster.requests, lineup.attempts
        released: list[Sequence] = []
        if lineup is self._lineup:
            self._num_ahead -= 1
        if lineup is not self._awaited:
            self._note_counted()
            self._awaited = lineup
            count = self._count[slots]
            self._indices = count.astype(np.int32)
            self._num_endless = int(np.minimum.reduce(limits - count))  # half of what `min` costs
        indices = self._indices
        self._indices = following = indices + _ONE_INT32
        self._last_tokens = tokens
        self._num_uncounted += 1
        self._num_endless -= 1
        if self._history is not None:
            self._note(slots, indices, tokens)
        if self._num_gone:
            self._note_counted()  # before a slot of them is another's
            is_gone = [self.sequences.get(sequence.key) is not sequence for sequence in sequences]
            if any(is_gone):
                released = [s for s, gone in zip(sequences, is_gone, strict=True) if gone and self._count_off(s)]
                kept = np.flatnonzero(~np.array(is_gone))
                requests, attempts, indices = requests[kept], attempts[kept], indices[kept]
                following, tokens = following[kept], tokens[kept]
                limits, may_stop = limits[kept], None if may_stop is None else may_stop[kept]
                sequences = tuple(sequences[row] for row in kept.tolist())
                scores = None if scores is None else keep_rows(scores, kept)
        new = NewTokens(requests, attempts, indices, tokens, [], [], released, scores)
        if self._fresh:
            new.fresh = self._take_fresh(sequences)
        may_end = may_stop
        if self._num_endless <= 0:
            is_full = following >= limits
            may_end = is_full if may_end is None else may_end | is_full
        told = tokens.tobytes()
        for end in eos_ids:
            # Where its bytes are, it may be; to search them takes a third of the time of a comparison.
            if end.to_bytes(4, sys.byteorder, signed=True) in told:
                is_end = tokens == end
                may_end = is_end if may_end is None else may_end | is_end
        if may_end is not None:
            for row in np.flatnonzero(may_end).tolist():
                sequence = sequences[row]
                sampling = sequence.reserve.sampling
                reason = judge_token(int(tokens[row]), int(following[row]), sequence.limit, sampling, eos_ids)
                if reason is not None:
                    new.ended.append((sequence, reason))
        return new

    def end_drafting(self) -> None:
        """A step that might verify drafts was awaited."""
        self._num_drafting -= 1

    def apply_brought(
        self, lineup: Lineup, brought: Brought, eos_ids: frozenset[int], scores: Scores | None = None
    ) -> NewTokens:
        """`apply` for a step that brought as many tokens as the device says. What is behind the end of a sequence is
        dropped: the device does not know which ids end a text.

        Raises:
            LocalProtocolError: a sequence that has not come to its end got nothing.
        """
        self._note_planned()
        self._note_counted()
        slots, sequences = lineup.slots, lineup.sequences
        tokens, counts = brought.tokens, brought.counts
        accepted = np.maximum(counts - 1, 0)
        self.drafted.add_step(brought.proposed, accepted)
        self._proposed[slots] += brought.proposed
        self._accepted[slots] += accepted
        before = self._count[slots]
        self._count[slots] = before + counts
        self._planned[slots] += counts - 1
        ends = np.cumsum(counts)
        has_some = counts > 0
        self._token[slots[has_some]] = tokens[ends[has_some] - 1]
        if self._history is not None and len(tokens):
            places = np.arange(len(tokens)) + (before - ends + counts).repeat(counts)
            self._note(slots.repeat(counts), places, tokens)
        if lineup is self._lineup:
            self._num_ahead -= 1
        self._awaited = None
        is_live = np.ones(len(slots), np.bool_)
        released: list[Sequence] = []
        if self._num_gone:
            is_live = np.array([self.sequences.get(sequence.key) is sequence for sequence in sequences])
            gone = np.flatnonzero(~is_live).tolist()
            released = [sequences[row] for row in gone if self._count_off(sequences[row])]
        if not has_some[is_live].all():
            row = int(np.flatnonzero(is_live & ~has_some)[0])
            raise LocalProtocolError(f"request {sequences[row].key} runs and got no token")
        row_of = np.repeat(np.arange(len(slots)), counts)
        kept = counts.copy()
        ended: list[tuple[Sequence, FinishReason]] = []
        for row in np.flatnonzero(self._find_ends(lineup, before, tokens, counts, row_of, eos_ids) & is_live).tolist():
            first = int(ends[row] - counts[row])
            reason, taken = _find_end(sequences[row], tokens[first : ends[row]].tolist(), int(before[row]), eos_ids)
            if reason is not None:
                ended.append((sequences[row], reason))
                kept[row] = taken
        if ended:
            dropped = counts - kept
            for row in np.flatnonzero(dropped).tolist():
                sequences[row].beyond = int(dropped[row])
            self._count[slots] -= dropped
            self._planned[slots] -= dropped
        if len(ended) or released or not is_live.all():
            place = np.arange(len(tokens)) - np.repeat(ends - counts, counts)
            stays = np.flatnonzero(is_live[row_of] & (place < kept[row_of]))
            tokens, scores = tokens[stays], None if scores is None else keep_rows(scores, stays)
        if self._lineup is not None and len(self._lineup.slots):
            # Some may have come to their end, which a plan without them shows sooner than the device.
            self._num_left = int((self._lineup.limits - self._planned[self._lineup.slots]).min())
            if self._num_left <= 0:
                self._drop_lineup()
        # Who left is not among the fresh any more.
        fresh = self._take_fresh(sequences) if self._fresh else []
        return NewTokens(
            lineup.roster.requests[is_live],
            lineup.attempts[is_live],
            before[is_live].astype(np.int32),
            tokens,
            fresh,
            ended,
            released,
            scores,
            kept[is_live].astype(np.int32),
        )

    def _find_ends(
        self,
        lineup: Lineup,
        before: Ints,
        tokens: npt.NDArray[np.int32],
        counts: Ints,
        row_of: Ints,
        eos_ids: frozenset[int],
    ) -> npt.NDArray[np.bool_]:
        """bool[rows]: which may have come to their end."""
        may_end = before + counts >= lineup.limits
        if lineup.may_stop is not None:
            may_end |= lineup.may_stop
        for end in eos_ids:
            may_end[row_of[tokens == end]] = True
        return may_end

    def _take_fresh(self, sequences: tuple[Sequence, ...]) -> list[Sequence]:
        """Those of them whose first own token has come only now."""
        fresh = [sequence for sequence in self._fresh.values() if sequence in sequences]
        for sequence in fresh:
            del self._fresh[sequence.slot]
        return fresh

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
        self._drop_lineup()
        lineup = self._lineup = self._line_up(most)
        planned = self._planned[lineup.slots]
        left = lineup.limits - planned
        self._positions = lineup.bases + planned
        self._num_ahead, self._num_left = 0, int(np.minimum.reduce(left)) if len(left) else 0
        return lineup

    def _drop_lineup(self) -> None:
        """The next step has another one."""
        self._note_planned()
        self._lineup = None

    def _note_planned(self) -> None:
        """Brings `planned` up to date."""
        if self._num_unplanned:
            assert self._lineup is not None
            self._planned[self._lineup.slots] += self._num_unplanned
            self._num_unplanned = 0

    def _note_counted(self) -> None:
        """Brings `count` and `token` up to date."""
        if self._num_uncounted:
            assert self._awaited is not None
            slots = self._awaited.slots
            self._count[slots] += self._num_uncounted
            self._token[slots] = self._last_tokens
            self._num_uncounted = 0

    def _line_up(self, most: int) -> Lineup:
        slots = np.fromiter(self._open, np.int64, len(self._open))
        is_open = self._planned[slots] < self._limit[slots]
        if b"\x00" in is_open.tobytes():
            for slot in slots[~is_open].tolist():
                self._close(slot)
            slots = slots[is_open]
        slots, sequences = slots[:most], tuple(self._open.values())[:most]
        least = self._least[slots]
        may_wait = np.count_nonzero(least) > 0  # a quarter of what `flatnonzero` costs
        for row in np.flatnonzero(least).tolist() if may_wait else ():
            sequence, slot = sequences[row], int(slots[row])
            sequence.sampling = self._open_sampling[slot] = sampling_at(sequence.sampling, int(self._planned[slot]))
            self._least[slot] = sequence.sampling.min_tokens
        pages, sampling = tuple(self._open_pages.values())[:most], tuple(self._open_sampling.values())[:most]
        widths = self._width[slots]
        roster = Roster(
            requests=self._request[slots],
            slabs=self._slab[slots],
            pages=pages,
            sampling=sampling,
            tables=self._tables[slots, : np.maximum.reduce(widths, initial=0)],
            widths=widths,
            ends=self._base[slots] + self._limit[slots] if self._drafts else None,
            said=tuple([each.said for each in sequences]) if self._num_said else (),
        )
        may_stop, least = self._may_stop[slots], self._least[slots] if may_wait else least
        return Lineup(
            slots=slots,
            roster=roster,
            sequences=sequences,
            attempts=self._attempt[slots],
            bases=self._base[slots],
            limits=self._limit[slots],
            may_stop=may_stop if b"\x01" in may_stop.tobytes() else None,
            minima=tuple([(row, int(least[row])) for row in np.flatnonzero(least).tolist()]) if may_wait else (),
            unknown=_unknown(len(slots)),
        )

    def _close(self, slot: int) -> bool:
        """No further step has a row for it, which is final; whether that was not known."""
        self._open_pages.pop(slot, None)
        self._open_sampling.pop(slot, None)
        return self._open.pop(slot, None) is not None

    def _grow_slots(self) -> None:
        old = len(self._planned)
        for name in (
            "planned", "count", "token", "limit", "request", "attempt", "slab", "base", "least", "may_stop",
            "proposed", "accepted", "width",
        ):  # fmt: skip
            setattr(self, f"_{name}", np.pad(getattr(self, f"_{name}"), (0, old)))
        self._tables = np.pad(self._tables, ((0, old), (0, 0)))
        if self._history is not None:
            self._history = np.pad(self._history, ((0, old), (0, 0)))
        self._free.extend(range(2 * old - 1, old - 1, -1))


@functools.lru_cache(maxsize=1024)
def _unknown(rows: int) -> Ints:
    """So many tokens that the host does not know."""
    tokens = np.full(rows, -1, np.int64)
    tokens.flags.writeable = False
    return tokens


def _find_end(
    sequence: Sequence, tokens: list[int], count: int, eos_ids: frozenset[int]
) -> tuple[FinishReason | None, int]:
    """Why a sequence of `count` tokens ends with one of these, if it does, and how many of them it has then."""
    sampling = sequence.reserve.sampling
    for taken, token in enumerate(tokens, 1):
        reason = judge_token(token, count + taken, sequence.limit, sampling, eos_ids)
        if reason is not None:
            return reason, taken
    return None, len(tokens)
