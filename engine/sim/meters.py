"""What a run measured: times as histograms of logarithmic buckets, so that millions of tokens cost nothing."""

from __future__ import annotations

import collections
import math

import numpy as np
import numpy.typing as npt

_GROWTH = math.log(1.02)


class LogHistogram:
    """Positive values in buckets 2 % apart."""

    def __init__(self) -> None:
        self._buckets: collections.Counter[int] = collections.Counter()
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        self._buckets[int(math.log(max(value, 1e-9)) / _GROWTH)] += count
        self.count += count

    def add_many(self, values: npt.NDArray[np.float64]) -> None:
        """The same for all of `values`."""
        if not len(values):
            return
        first = float(values[0])
        others = values[values != first]  # rows of one step: few, or none
        self.add(first, len(values) - len(others))
        if len(others):
            buckets = (np.log(np.maximum(others, 1e-9)) / _GROWTH).astype(np.int64)
            self._buckets.update(buckets.tolist())
            self.count += len(others)

    def percentile(self, share: float) -> float:
        """The value that `share` of all do not exceed, within 2 %; 0 while empty."""
        left = math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return math.exp(bucket * _GROWTH)
        return 0.0
