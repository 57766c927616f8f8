"""Runs: unit numbers (pages, slabs) in order, kept as runs of neighbours.

So what is done to the pages of a long prompt costs by the run and not by the page. An arena hands out as few runs as it
can: a request has one as a rule, whatever its length.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class Runs(Sequence[int]):
    """Immutable. Equal to any sequence of the same numbers.

    Args:
        ranges: not empty, of step 1, each taken as it is.
    """

    __slots__ = ("_length", "ranges")

    def __init__(self, ranges: tuple[range, ...] = ()) -> None:
        self.ranges = ranges
        self._length = len(ranges[0]) if len(ranges) == 1 else sum(map(len, ranges))

    @classmethod
    def of(cls, units: Iterable[int]) -> Runs:
        """The same numbers in the same order; `units` itself where it is made of runs."""
        if isinstance(units, Runs):
            return units
        if isinstance(units, tuple) and len(units) == 1:
            return cls((range(units[0], units[0] + 1),))
        ranges: list[range] = []
        for unit in units:
            if ranges and ranges[-1].stop == unit:
                ranges[-1] = range(ranges[-1].start, unit + 1)
            else:
                ranges.append(range(unit, unit + 1))
        return cls(tuple(ranges))

    @classmethod
    def from_bytes(cls, said: bytes) -> Runs:
        """Numbers as a message has them: little-endian int32."""
        first, count = int.from_bytes(said[:4], "little", signed=True), len(said) // 4
        if said == np.arange(first, first + count).astype("<i4").tobytes():
            return cls((range(first, first + count),)) if said else NO_UNITS
        units = np.frombuffer(said, "<i4")
        ends = [*(np.flatnonzero(units[1:] != units[:-1] + 1) + 1).tolist(), count]
        firsts = units[[0, *ends[:-1]]].tolist()
        lengths = map(operator.sub, ends, [0, *ends[:-1]])
        return cls(tuple([range(first, first + length) for first, length in zip(firsts, lengths, strict=True)]))

    @classmethod
    def join(cls, parts: Iterable[Runs]) -> Runs:
        """All numbers of `parts`, one part after the other."""
        ranges: list[range] = []
        for part in parts:
            for run in part.ranges:
                if ranges and ranges[-1].stop == run.start:
                    ranges[-1] = range(ranges[-1].start, run.stop)
                else:
                    ranges.append(run)
        return cls(tuple(ranges))

    def is_within(self, total: int) -> bool:
        """Whether all are units of an arena of so many."""
        return all(run.start >= 0 and run.stop <= total for run in self.ranges)

    def to_bytes(self) -> bytes:
        """See `from_bytes`."""
        return self.to_array("<i4").tobytes()

    def __len__(self) -> int:
        return self._length

    def __add__(self, other: Runs) -> Runs:
        return Runs.join((self, other)) if self and other else self or other

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Runs: ...
    def __getitem__(self, at: int | slice) -> int | Runs:
        if isinstance(at, slice):
            first, end, step = at.indices(self._length)
            if step != 1:
                raise ValueError(f"runs are cut by step 1, not {step}")
            return self if first == 0 and end == self._length else self._cut(first, end)
        left = at + self._length if at < 0 else at
        for run in self.ranges if left >= 0 else ():
            if left < len(run):
                return run[left]
            left -= len(run)
        raise IndexError(f"place {at} of {self._length} units")

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.ranges)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Runs) and self.ranges == other.ranges:
            return True
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Runs.of({[*self]})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """For `np.asarray`, which would else ask for one number after the other."""
        return self.to_array(np.int64 if dtype is None else dtype)

    def to_array(self, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """A new array of the numbers."""
        if len(self.ranges) == 1:
            return np.arange(self.ranges[0].start, self.ranges[0].stop, dtype=dtype)
        lengths = np.array([len(run) for run in self.ranges], np.int64)
        shifts = np.array([run.start for run in self.ranges], np.int64) - (lengths.cumsum() - lengths)
        return (np.arange(self._length) + shifts.repeat(lengths)).astype(dtype)

    def _cut(self, first: int, end: int) -> Runs:
        if len(self.ranges) == 1:
            part = self.ranges[0][first:end]
            return Runs((part,)) if part else NO_UNITS
        ranges = []
        for run in self.ranges:
            part = run[max(first, 0) : max(end, 0)]
            if part:
                ranges.append(part)
            first, end = first - len(run), end - len(run)
        return Runs(tuple(ranges))


NO_UNITS = Runs()
