"""DraftLaunch: steps that draft, launched before those in front of them have ended: what the host tells and is told.

Of a slab that no step under way names the host knows all; where it stands, its token and its drafts are told then. Of
any other only the device knows. So what the device keeps by slab is read only where a launched step has written it, and
the two never have to be made equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.errors import DeviceError
from engine.model.decoding import UNKNOWN, Decode, Decoder
from engine.model.draft_sizes import ToldRows
from engine.model.envelope import Envelope, Words
from engine.model.step_arena import StepArena
from engine.model.step_drafter import StepDrafter
from engine.ports import DeviceInfo

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a step brought: as `row_tokens`, `row_counts` and `row_proposed` in `core.plan.StepResult`."""

    tokens: tuple[int, ...]
    counts: tuple[int, ...] | None
    proposed: tuple[int, ...] | None


class _Kept:
    """By slab where launched steps left it, how many drafts they made, and these."""

    def __init__(self, slabs: int, drafts: int) -> None:
        self.stands = np.full(slabs, UNKNOWN, np.int64)
        self.counts = np.zeros(slabs, np.int64)
        self.drafts = np.zeros((slabs, drafts), np.int64)


class DraftLaunch:
    """See the module. Belongs to the device's worker thread."""

    def __init__(self, drafter: StepDrafter, arena: StepArena, info: DeviceInfo, decoder: Decoder) -> None:
        """All are borrowed. `decoder`: knows where slabs stand, and is told."""
        assert drafter.steps is not None
        self._steps = drafter.steps
        self._most = drafter.drafts
        self._arena = arena
        self._info = info
        self._decoder = decoder
        # Where the host judges no drafts, those of the decoder's are none.
        self._own = _Kept(info.num_slabs, drafter.drafts) if drafter.is_grouped else None

    def accepts(self, decode: Decode) -> bool:
        """Whether there is a step for so many rows."""
        return self._steps.find_drafts(len(decode.slabs), decode.drafts) is not None

    def count_rows(self, decode: Decode) -> int:
        """Rows that the target computes for these, which `accepts` took."""
        return len(decode.slabs) * (1 + self._find_drafts(decode))

    def check(self, decode: Decode) -> None:
        """Raises DeviceError if a row names a place that there is not, or might come to one."""
        lengths = self._find_ends(decode)
        if decode.ends is None:
            lengths = np.where(decode.positions < 0, lengths, decode.positions + 1)
        self._decoder.check_ends(decode, lengths)

    def launch(
        self, decode: Decode, under_way: Iterable[Ints], agreed: int = 0, envelope: Envelope | None = None
    ) -> Words:
        """Enqueues a step.

        Args:
            decode: `accepts` and `check` took it.
            under_way: slabs of each step that has not ended.
            agreed, envelope: see `DraftSizes.launch`.

        Returns:
            What `finish` takes, once the device has come so far.

        Raises:
            DeviceError: a row is where its slab stands, and nobody knows where that is.
        """
        slabs = decode.slabs
        is_known = ~np.isin(slabs, np.concatenate([np.empty(0, np.int64), *under_way]))
        stands, counts, drafts = self._decoder.recall(slabs)
        left_at = stands
        if self._own is not None:
            left_at, counts, drafts = self._own.stands[slabs], self._own.counts[slabs], self._own.drafts[slabs]
        sampled = self._arena.read_sampled(slabs)
        positions = np.where(is_known & (decode.positions < 0), stands, decode.positions)
        tokens = np.where(is_known & (decode.tokens < 0), sampled, decode.tokens)
        if (is_lost := is_known & (positions < 0)).any():
            slab = int(slabs[is_lost][0])
            raise DeviceError(f"a row is where slab {slab} stands, and no pass of this device has left it anywhere")
        # Drafts follow what this device sampled, at the place where it did.
        follows = (left_at == positions) & (tokens == sampled)
        counts = np.where(is_known, np.where(follows, counts, 0), UNKNOWN)
        told = ToldRows(
            tokens, positions, slabs, self._find_ends(decode), counts, drafts[:, : self._most], decode.tables
        )
        return self._steps.launch(told, self._find_drafts(decode), agreed, envelope).numpy()

    def finish(self, decode: Decode, told: Words) -> Verdict:
        """What a step brought that has ended."""
        lines = told.astype(np.int64)
        span = 1 + self._find_drafts(decode)
        starts, counts, proposed = lines[:, 0], lines[:, 1], lines[:, 2]
        tokens, drafts = lines[:, 3 : 3 + span], lines[:, 3 + span :]
        live = np.flatnonzero(counts)
        slabs = decode.slabs[live]
        self._arena.note_sampled(slabs, tokens[live, counts[live] - 1])
        stands, made, num_made = (starts + counts)[live], drafts[live], (drafts[live] >= 0).sum(1)
        if self._own is None:
            self._decoder.note_rows(slabs, stands, made, num_made)
        else:
            self._decoder.note_rows(slabs, stands)
            self._own.stands[slabs], self._own.counts[slabs] = stands, num_made
            self._own.drafts[slabs, : made.shape[1]] = made
        found = tuple(tokens[np.arange(span) < counts[:, None]].tolist())
        if not decode.drafts and int(decode.positions.min()) >= 0 and len(live) == len(counts):
            return Verdict(found, None, None)
        return Verdict(found, tuple(counts.tolist()), tuple(proposed.tolist()))

    def _find_drafts(self, decode: Decode) -> int:
        drafts = self._steps.find_drafts(len(decode.slabs), decode.drafts)
        assert drafts is not None
        return drafts

    def _find_ends(self, decode: Decode) -> Ints:
        """Where each row must not come: its sequence's end, or that of its pages and of all texts."""
        if decode.ends is not None:
            return decode.ends
        return np.minimum(decode.widths * self._info.page_tokens, self._info.max_model_tokens)
