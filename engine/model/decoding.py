"""Decoder: the decode rows of a step in one pass, each with the drafts behind it, and what of them holds.

The target draws its own token for every row, by the draw that it would make without drafts: a function of settings,
seed and position. A draft holds while it is what was drawn for the row before. So the text is the one without drafting,
token for token, and drafts only say how many tokens a step brings. The other rule, `rejection`, has more drafts hold;
there a text that is drawn depends on what was drafted, though its distribution does not.

Of each slab the decoder knows where it stands and what was proposed to follow: private to the device, no part of the
arena, changed where a pass has ended and nowhere else. Proposing is a pass of its own behind it, a function of slabs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.plan import Scores
from engine.errors import DeviceError
from engine.model.choosing import Chooser
from engine.model.drafting import Proposer
from engine.model.grammars import Guide, Guides
from engine.model.kv import SPARE_ROWS
from engine.model.rejection import DrawnDrafts
from engine.model.row_model import RowModel
from engine.model.rows import RowBatch
from engine.model.sampling import Sampler
from engine.model.scoring import join_scores
from engine.ports import DeviceInfo
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]

MOST_DRAFTS = SPARE_ROWS - 1
"""Drafts behind a row that rings have room for."""
UNKNOWN = -1


@dataclasses.dataclass(slots=True)  # as core.plan.StepPlan
class Decode:
    """The decode rows of a step as columns.

    Attributes:
        positions: UNKNOWN where the row stands where its slab does.
        tokens: UNKNOWN where the slab knows the token.
        ends: as in `core.plan.Roster`.
        drafts: as in `core.plan.StepPlan`.
        said: as in `core.plan.Roster`.
    """

    slabs: Ints
    positions: Ints
    tokens: Ints
    tables: Ints
    widths: Ints
    sampling: tuple[Sampling, ...]
    ends: Ints | None = None
    drafts: int = 0
    said: tuple[bytes, ...] = ()


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be proposed: `count` drafts behind each anchor. int64[n] each, see `Proposer.propose`; `sampling` of
    each, where drafts are drawn."""

    slabs: Ints
    anchors: Ints
    positions: Ints
    count: int
    sampling: tuple[Sampling, ...] = ()


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a pass of decode rows brought.

    Attributes:
        tokens, counts, proposed, scores: as `row_tokens` and so on in `core.plan.StepResult`.
        wanted: what is to be proposed now.
    """

    tokens: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    proposed: tuple[int, ...] | None = None
    scores: Scores | None = None
    wanted: Wanted | None = None


class Decoder:
    """See the module. Belongs to the device's worker thread."""

    def __init__(
        self,
        model: RowModel,
        info: DeviceInfo,
        chooser: Chooser,
        proposer: Proposer | None,
        *,
        rejects: bool = False,
        guides: Guides,
    ) -> None:
        """All are borrowed. Without a proposer nothing is drafted. `rejects`: drafts are drawn, and judged by
        rejection."""
        self._guides = guides
        self._model = model
        self._info = info
        self._chooser = chooser
        self._proposer = proposer
        self._sampler = Sampler((), ())
        self._stands = np.full(info.num_slabs, UNKNOWN, np.int64)
        self._drafts = np.zeros((info.num_slabs, MOST_DRAFTS), np.int64)
        self._num_drafts = np.zeros(info.num_slabs, np.int64)
        self._drawn = DrawnDrafts() if rejects else None

    def note_prompts(self, slabs: Ints, stands: Ints) -> None:
        """Passes over prompts have ended; the slabs stand at these positions, or UNKNOWN where nothing was sampled."""
        self._stands[slabs] = stands
        self._forget_drafts(slabs)
        self._guides.forget(slabs)

    def note_rows(self, slabs: Ints, stands: Ints, drafts: Ints | None = None, counts: Ints | None = None) -> None:
        """A pass of rows has ended that was not `run` here.

        Args:
            slabs: int64[n].
            stands: int64[n], where they stand.
            drafts: int64[n, any], what was proposed to follow, `counts` of them each; None for nothing.
        """
        self._stands[slabs] = stands
        self._forget_drafts(slabs)
        if drafts is not None and counts is not None:
            self._drafts[slabs, : drafts.shape[1]] = drafts
            self._num_drafts[slabs] = counts

    def recall(self, slabs: Ints) -> tuple[Ints, Ints, Ints]:
        """Where slabs stand (UNKNOWN where no pass has left them anywhere), how many drafts each has, and these as
        int64[n, most]."""
        return self._stands[slabs], self._num_drafts[slabs], self._drafts[slabs]

    def check_ends(self, decode: Decode, ends: Ints) -> None:
        """`check` for rows that may stand anywhere below these ends."""
        self._chooser.check_slabs(decode.slabs)
        self._chooser.check_pages(decode.tables, decode.widths, ends)
        self._chooser.check_ids(decode.tokens[decode.tokens != UNKNOWN])

    def check(self, decode: Decode) -> None:
        """Raises DeviceError if a row of known position, without drafts, names a place or an id that there is not."""
        self._chooser.check_slabs(decode.slabs)
        self._chooser.check_pages(decode.tables, decode.widths, decode.positions + 1)
        self._chooser.check_ids(decode.tokens[decode.tokens != UNKNOWN])

    def run(self, decode: Decode) -> Decoded:
        """One pass. In a group it makes its exchanges also if no row is left to compute.

        Raises:
            DeviceError: a row names a place that there is not, or that nobody knows.
        """
        if not 0 <= decode.drafts <= MOST_DRAFTS:
            raise DeviceError(f"{decode.drafts} drafts are asked for, a slab has room for {MOST_DRAFTS}")
        self._chooser.check_slabs(decode.slabs)
        is_told = decode.drafts > 0 or bool((decode.positions < 0).any())
        stands = self._stands[decode.slabs]
        positions = np.where(decode.positions < 0, stands, decode.positions)
        if int(positions.min()) < 0:
            slab = int(decode.slabs[positions < 0][0])
            raise DeviceError(f"a row is where slab {slab} stands, and no pass of this device has left it anywhere")
        sampled = self._model.arena.read_sampled(decode.slabs)
        tokens = np.where(decode.tokens < 0, sampled, decode.tokens)
        # Drafts follow what this device sampled, at the place where it did.
        follows = (stands == positions) & (tokens == sampled)
        held = np.where(follows, np.minimum(self._num_drafts[decode.slabs], decode.drafts), 0)
        if decode.drafts:
            held[[each.min_tokens > 0 for each in decode.sampling]] = 0
        live = np.arange(len(positions))
        if decode.ends is not None:
            held = np.minimum(held, decode.ends - 1 - positions).clip(min=0)
            live = np.flatnonzero(positions < decode.ends)
        if not len(live):
            if self._model.mixture is not None:
                self._model.forward_nothing()
            nothing = (0,) * len(positions)
            return Decoded((), nothing, nothing)
        batch = self._lay_out(decode, live, positions[live], tokens[live], held[live])
        logits = self._model.forward(batch)
        drawn, counts, scores = self._accept(decode, live, batch, logits)
        last = drawn[np.arange(len(live)), counts - 1]
        if self._proposer is not None:
            self._proposer.keep(None if batch.span == 1 else counts, last)
        stands = batch.starts + counts
        self._stands[batch.slabs] = stands
        self._forget_drafts(decode.slabs)
        found = tuple(drawn[np.arange(batch.span) < counts[:, None]].tolist())
        if not is_told and len(live) == len(positions):
            return Decoded(found, scores=scores)
        all_counts = np.zeros(len(positions), np.int64)
        all_counts[live] = counts
        wanted = None
        if decode.drafts and self._proposer is not None:
            # The token before a sequence's end is the last that is computed: nothing is drafted behind it.
            going = np.arange(len(live)) if decode.ends is None else np.flatnonzero(stands + 1 < decode.ends[live])
            drawn_by = tuple([decode.sampling[row] for row in live[going].tolist()]) if self._drawn is not None else ()
            wanted = Wanted(batch.slabs[going], last[going], stands[going], decode.drafts, drawn_by)
        return Decoded(found, tuple(all_counts.tolist()), tuple(held.tolist()), scores, wanted)

    def propose(self, wanted: Wanted | None, rounds: int) -> None:
        """The pass that proposes; `rounds` as in `Proposer.propose`. None: for others of the group only."""
        assert self._proposer is not None
        nothing = np.empty(0, np.int64)
        wanted = wanted or Wanted(nothing, nothing, nothing, 1)
        pick, shares = self._drawn.begin(wanted.sampling) if self._drawn is not None else (None, [])
        tokens = self._proposer.propose(
            wanted.slabs, wanted.anchors, wanted.positions, wanted.count, pick=pick, rounds=rounds
        ).tokens
        if len(wanted.slabs):
            self._drafts[wanted.slabs, : tokens.shape[1]] = tokens
            self._num_drafts[wanted.slabs] = tokens.shape[1]
            if self._drawn is not None:
                self._drawn.keep(wanted.slabs, wanted.sampling, shares)

    def _forget_drafts(self, slabs: Ints) -> None:
        self._num_drafts[slabs] = 0
        if self._drawn is not None:
            self._drawn.forget(slabs)

    def _lay_out(self, decode: Decode, live: Ints, positions: Ints, tokens: Ints, held: Ints) -> RowBatch:
        """The rows of the pass: of each live one its token and the drafts behind it."""
        slabs, tables, widths = decode.slabs, decode.tables, decode.widths
        if len(live) < len(slabs):
            slabs, tables, widths = slabs[live], tables[live], widths[live]
        most = int(held.max())
        ids = np.concatenate((tokens[:, None], self._drafts[slabs, :most]), 1)
        ids[np.arange(most + 1) > held[:, None]] = 0
        self._chooser.check_pages(tables, widths, positions + held + 1)
        self._chooser.check_ids(ids)
        return RowBatch(slabs, positions, ids, tables, None if int(held.min()) == most else held + 1)

    def _accept(self, decode: Decode, live: Ints, batch: RowBatch, logits: Tensor) -> tuple[Ints, Ints, Scores | None]:
        """Draws row by row until a draft is another token than the one drawn, or does not hold.

        Returns:
            (int64[live, span] tokens drawn, int64[live] how many of them, scores by place in all of these).
        """
        drawn = np.zeros((len(live), batch.span), np.int64)
        counts = np.zeros(len(live), np.int64)
        parts: list[tuple[Ints, int, Scores]] = []
        going = np.arange(len(live))
        for depth in range(batch.span):
            part = logits if batch.span == 1 else logits[torch.from_numpy(batch.firsts[going] + depth)]
            sampler = self._find_sampler(decode.sampling, live[going])
            guesses = None
            if self._drawn is not None and depth + 1 < batch.span:
                drafts = np.where(batch.spans[going] > depth + 1, batch.tokens[going, depth + 1], UNKNOWN)
                guesses = self._drawn.guess(batch.slabs[going], drafts, depth)
            # A draft that holds is what was drawn: guides move along the drafts by what is drawn.
            guides = {row: self._find_guide(decode, int(live[going[row]])) for row in sampler.guided}
            tokens, scores = self._chooser.choose(
                sampler, part, batch.slabs[going], batch.starts[going] + depth + 1, guesses, guides
            )
            drawn[going, depth] = tokens
            counts[going] += 1
            if scores is not None:
                parts.append((going[scores.rows], depth, scores))
            if depth + 1 == batch.span:
                break
            holds = (batch.spans[going] > depth + 1) & (batch.tokens[going, depth + 1] == tokens)
            going = going[holds]
            if not len(going):
                break
        firsts = np.cumsum(counts) - counts
        placed = [dataclasses.replace(scores, rows=firsts[rows] + depth) for rows, depth, scores in parts]
        joined = join_scores(placed)
        return drawn, counts, joined if len(placed) < 2 or joined is None else sort_scores(joined)

    def _find_guide(self, decode: Decode, row: int) -> Guide:
        said = decode.said[row] if decode.said else b""
        return self._guides.find(int(decode.slabs[row]), decode.sampling[row].grammar, said)

    def _find_sampler(self, sampling: Sequence[Sampling], rows: Ints) -> Sampler:
        """Of these rows; that of all rows is kept for the next step."""
        if len(rows) < len(sampling):
            return Sampler([sampling[row] for row in rows.tolist()], self._info.eos_ids)
        if self._sampler.rows is not sampling:
            self._sampler = Sampler(sampling, self._info.eos_ids)
        return self._sampler


def sort_scores(scores: Scores) -> Scores:
    """The same in ascending order of their rows."""
    order = np.argsort(scores.rows, kind="stable")
    starts = np.cumsum(scores.counts) - scores.counts
    counts = scores.counts[order]
    below = np.arange(int(counts.sum())) + np.repeat(starts[order] - (np.cumsum(counts) - counts), counts)
    return Scores(
        scores.rows[order],
        scores.logprobs[order],
        scores.places[order],
        counts,
        scores.top_ids[below],
        scores.top_logprobs[below],
    )
