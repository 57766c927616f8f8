"""Chooser: the end of a pass, where tokens are drawn, scored, counted for penalties and kept in their slabs; checks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.plan import Scores
from engine.errors import DeviceError
from engine.model.grammars import Guide
from engine.model.rejection import Guesses, judge_guesses
from engine.model.row_model import RowArena
from engine.model.sampling import Sampler
from engine.model.scoring import score_tokens
from engine.ports import DeviceInfo

Ints = npt.NDArray[np.int64]
NO_GUIDES: Mapping[int, Guide] = MappingProxyType({})


class Chooser:
    """See the module. Belongs to the device's worker thread."""

    def __init__(self, arena: RowArena, info: DeviceInfo) -> None:
        """Borrows the arena."""
        self._arena = arena
        self._info = info
        # Columns that were right when they were checked last. A step as a rule has those of the one before.
        self._slabs = self._pages = np.empty(0, np.int64)

    def choose(
        self,
        sampler: Sampler,
        logits: Tensor,
        slabs: Ints,
        positions: Ints,
        guesses: Guesses | None = None,
        guides: Mapping[int, Guide] = NO_GUIDES,
    ) -> tuple[Ints, Scores | None]:
        """Draws the next token of each slab and keeps it; only here it is counted.

        Args:
            sampler: of these rows.
            logits: float32[rows, vocab], on the model's device; may be overwritten. They come to the host only where
                more than the likeliest ids is asked of them.
            slabs: int64[rows], different ones.
            positions: int64[rows], of the tokens.
            guesses: drafts that are judged by rejection; their rows draw by that rule.
            guides: of the rows with a grammar; moved on.

        Returns:
            (int64[rows], scores of rows that ask for some).
        """
        if sampler.takes_best and guesses is None:
            best: Ints = logits.argmax(-1).cpu().numpy()
            self._arena.write_sampled(slabs, best)
            return best, None
        logits = logits.cpu()
        scored, counts = sampler.scored, None
        raw = logits[scored] if len(scored) else None
        lines = slabs[sampler.penalised]
        if len(lines):
            counts = self._arena.read_counts(lines)
        for row, guide in guides.items():
            guide.restrict(logits[row])
        drawn = sampler.choose(logits, positions, counts)
        if guesses is not None:
            # What the sampler has left of the logits are biased and penalised ones.
            at = guesses.rows
            settings = [sampler.rows[row] for row in at.tolist()]
            drawn[at] = judge_guesses(logits[torch.from_numpy(at)], settings, positions[at], guesses)
        for row, guide in guides.items():
            guide.take(int(drawn[row]))
        scores = None
        if raw is not None:
            tops = [sampler.rows[row].logprobs for row in scored.tolist()]
            scores = score_tokens(raw, drawn[scored], tops, scored)
        if len(lines):
            self._arena.add_counts(lines, drawn[sampler.penalised])
        self._arena.write_sampled(slabs, drawn)
        return drawn, scores

    def check_ids(self, tokens: Ints) -> None:
        """Raises DeviceError for an id that is none of the vocabulary's."""
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._info.vocab_size:
            raise DeviceError(f"a token id is outside 0..{self._info.vocab_size - 1}")

    def check_slabs(self, slabs: Ints) -> None:
        """Raises DeviceError for a slab that there is not. The array is never written again."""
        if slabs is self._slabs:
            return
        if int(slabs.min()) < 0 or int(slabs.max()) >= self._info.num_slabs:
            raise DeviceError(f"a slab is outside 0..{self._info.num_slabs - 1}")
        self._slabs = slabs

    def check_pages(self, pages: Ints, widths: Ints, lengths: Ints) -> None:
        """Raises DeviceError unless each line's pages are there and hold so many tokens: a wrong number would read or
        write another sequence's memory.

        Args:
            pages: int64[lines, widest], never written again.
            widths: int64[lines], pages of each line.
            lengths: int64[lines].
        """
        info = self._info
        if pages is not self._pages and pages.size and (int(pages.min()) < 0 or int(pages.max()) >= info.num_pages):
            raise DeviceError(f"a page id is outside 0..{info.num_pages - 1}")
        self._pages = pages
        longest = int(lengths.max())
        short = np.nonzero(lengths > widths * info.page_tokens)[0]
        if len(short):
            row = int(short[0])
            raise DeviceError(f"{int(lengths[row])} tokens need more pages than the {int(widths[row])} given")
        if longest > info.max_model_tokens:
            raise DeviceError(f"{longest} tokens are more than max_model_tokens ({info.max_model_tokens})")
