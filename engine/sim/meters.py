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

    def add(self, value: float) -> None:
        self._buckets[int(math.log(max(value, 1e-9)) / _GROWTH)] += 1
        self.count += 1

    def add_many(self, values: npt.NDArray[np.float64]) -> None:
        """The same for all of `values`."""
        if not len(values):
            return
        if values.tobytes() == values[:1].tobytes() * len(values):  # rows of one step, as a rule
            bucket = int(np.log(np.maximum(values[:1], 1e-9))[0] / _GROWTH)
            self._buckets[bucket] += len(values)
        else:
            buckets = (np.log(np.maximum(values, 1e-9)) / _GROWTH).astype(np.int64)
            least = int(buckets.min())
            counts = np.bincount(buckets - least)
            for bucket in np.flatnonzero(counts).tolist():
                self._buckets[least + bucket] += int(counts[bucket])
        self.count += len(values)

    def percentile(self, share: float) -> float:
        """The value that `share` of all do not exceed, within 2 %; 0 while empty."""
        left = math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return math.exp(bucket * _GROWTH)
        return 0.0
