"""Pushes between ranks as a matrix: prefill ranks down, decode ranks across; what is low, sums, filters. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from console.filters import Field
from console.view import ClusterView

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LOW_SHARE = 0.4
"""A pair is low if it carries less than this of the median pair, and has a reason not to: pushes in flight, or pushes
that took longer than the median's. A pair that merely had nothing to do is not low."""
SLOW_TIMES = 3.0
"""A pair whose pushes take so many times the median's is slow."""
LOW_PAIRS = 4
"""So many pairs have to be busy before there is a median worth the name."""


@dataclass(frozen=True)
class Pair:
    """One cell."""

    prefill: str
    decode: str
    rate: float
    p99_us: float
    failed: float
    inflight: float
    is_low: bool


PAIR_FIELDS: Sequence[Field[Pair]] = (
    Field("p", "text", lambda pair: pair.prefill),
    Field("d", "text", lambda pair: pair.decode),
    Field("rate", "number", lambda pair: pair.rate / 1e9),
    Field("p99", "number", lambda pair: pair.p99_us / 1e3),
    Field("failed", "number", lambda pair: pair.failed),
    Field("inflight", "number", lambda pair: pair.inflight),
    Field("low", "text", lambda pair: "yes" if pair.is_low else "no"),
)
"""`rate` in GB/s, `p99` in milliseconds."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Columns of a LinksReport by pair. Arrays are [prefill, decode]; `index` is -1 where a pair never pushed."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    index: Ints
    rate: Floats
    """Bytes in a second; not a number without a pair, as in all of these."""
    p99_us: Floats
    failed: Floats
    inflight: Floats
    bytes: Floats
    pushes: Floats

    @cached_property
    def busy_median(self) -> float:
        """Of the rates of pairs that carry anything; not a number while there are too few."""
        busy = self.rate[self.rate > 0]
        return float(np.median(busy)) if busy.size >= LOW_PAIRS else math.nan

    @cached_property
    def is_low(self) -> Flags:
        """Pairs far below the median that have a reason not to be."""
        if not math.isfinite(self.busy_median):
            return np.zeros(self.rate.shape, dtype=bool)
        p99_median = float(np.nanmedian(np.where(self.rate > 0, self.p99_us, np.nan)))
        is_below = self.rate < LOW_SHARE * self.busy_median
        has_reason: Flags = (self.inflight > 0) | (self.p99_us > p99_median)
        return is_below & has_reason

    def notable(self) -> list[tuple[int, int]]:
        """Cells worth a look, the worst first: low ones, such as have failed, and such as are far slower than most."""
        busy = self.p99_us[self.rate > 0]
        slow = SLOW_TIMES * float(np.median(busy)) if busy.size >= LOW_PAIRS else math.inf
        is_slow = np.nan_to_num(self.p99_us) > slow
        found = np.argwhere(self.is_low | (self.failed > 0) | is_slow)
        cells = [(int(y), int(x)) for y, x in found]
        cells.sort(key=lambda at: (not self.is_low[at], -self.failed[at], -self.p99_us[at]))
        return cells

    def pair(self, view: ClusterView, y: int, x: int) -> Pair:
        """One cell with names."""
        return Pair(
            view.name(self.prefill[y]),
            view.name(self.decode[x]),
            float(self.rate[y, x]),
            float(self.p99_us[y, x]),
            float(self.failed[y, x]),
            float(self.inflight[y, x]),
            bool(self.is_low[y, x]),
        )


def make_matrix(view: ClusterView) -> Matrix:
    """All ranks that the head names or that have pushed, in the order of their numbers."""
    pairs = view.pairs
    prefill = {rank.rank for rank in view.ranks("prefill")} | set(pairs.prefill.tolist() if pairs else ())
    decode = {rank.rank for rank in view.ranks("decode")} | set(pairs.decode.tolist() if pairs else ())
    down, across = tuple(sorted(prefill)), tuple(sorted(decode))
    shape = (len(down), len(across))
    index = np.full(shape, -1, dtype=np.int64)
    if pairs is not None and len(pairs.prefill):
        y = np.searchsorted(np.asarray(down), pairs.prefill)
        x = np.searchsorted(np.asarray(across), pairs.decode)
        index[y, x] = np.arange(len(pairs.prefill))

    def spread(column: npt.NDArray[np.generic] | None) -> Floats:
        if column is None or not len(column):
            return np.full(shape, np.nan)
        return np.where(index >= 0, column.astype(np.float64)[index], np.nan)

    columns = (
        (pairs.rates, pairs.p99_us, pairs.failed, pairs.inflight, pairs.bytes, pairs.pushes) if pairs else [None] * 6
    )
    rate, p99_us, failed, inflight, size, pushes = (spread(column) for column in columns)
    return Matrix(down, across, index, rate, p99_us, failed, inflight, size, pushes)


def total(values: Floats) -> float:
    """A sum that leaves out what is not known; not a number if nothing is."""
    return float(np.nansum(values)) if np.isfinite(values).any() else math.nan


def worst(values: Floats) -> float:
    """The largest that is known; not a number if nothing is."""
    return float(np.nanmax(values)) if np.isfinite(values).any() else math.nan
