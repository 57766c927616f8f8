"""Which expert is in which slot of which rank: one part's placement, its invariants, the difference of two.

All slots of a model part have one shape, so a slot holds any layer's expert: the slots of a rank are one pool across
layers. `table[rank, slot]` is `layer * experts + expert`, or EMPTY. An expert in a slot is a replica; an expert has at
least one at any time, a placement without one can not be built. A replica carries load / number of replicas, since
`choose_replica` spreads rows evenly.

This file does not choose placements (`balance`) and does not change them live (`moves`, `migrate`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

EMPTY = -1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Replica(NamedTuple):
    """An expert of a layer on a rank, whatever the slot."""

    layer: int
    expert: int
    rank: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Slot <-> expert of one model part over the ranks of a group. Immutable; compares by value.

    Attributes:
        layers, experts: shape of the part: layers with experts, experts of each.
        table: int32[ranks, slots], `layer * experts + expert` or EMPTY. Taken, and made read-only.

    Raises:
        ValueError: a value out of range, or an expert without a replica.
    """

    layers: int
    experts: int
    table: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.layers < 1 or self.experts < 1:
            raise ValueError(f"a placement of {self.layers} layers x {self.experts} experts places nothing")
        if self.table.ndim != 2 or self.table.dtype != np.int32:
            raise ValueError(f"a placement's table is int32[ranks, slots], not {self.table.dtype}{self.table.shape}")
        num_keys = self.layers * self.experts
        if self.table.size and not (int(self.table.min()) >= EMPTY and int(self.table.max()) < num_keys):
            rank, slot = np.argwhere((self.table < EMPTY) | (self.table >= num_keys))[0]
            value = int(self.table[rank, slot])
            raise ValueError(f"slot {slot} of rank {rank} holds {value}, limit is {num_keys} experts of all layers")
        missing = np.flatnonzero(self.count_replicas().ravel() == 0)
        if missing.size:
            layer, expert = divmod(int(missing[0]), self.experts)
            raise ValueError(f"expert {expert} of layer {layer} has no slot, and {missing.size - 1} more have none")
        self.table.flags.writeable = False

    @property
    def ranks(self) -> int:
        return int(self.table.shape[0])

    @property
    def slots(self) -> int:
        """Slots of one rank, spare ones included."""
        return int(self.table.shape[1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return (self.layers, self.experts) == (other.layers, other.experts) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash((self.layers, self.experts, self.table.shape, self.table.tobytes()))

    def count_replicas(self) -> Ints:
        """int64[layers, experts]."""
        used = self.table[self.table != EMPTY]
        return np.bincount(used, minlength=self.layers * self.experts).reshape(self.layers, self.experts)

    def count_per_rank(self) -> Ints:
        """int64[layers, experts, ranks]: how many slots of the rank hold the expert (2 would waste one)."""
        rank, slot = np.nonzero(self.table != EMPTY)
        keys = self.table[rank, slot].astype(np.int64) * self.ranks + rank
        shape = (self.layers, self.experts, self.ranks)
        return np.bincount(keys, minlength=self.layers * self.experts * self.ranks).reshape(shape)

    def has_doubles(self) -> bool:
        """True if a rank holds an expert twice, which wastes a slot."""
        cells = self.table.astype(np.int64) + np.arange(self.ranks)[:, None] * self.layers * self.experts
        cells = np.sort(cells[self.table != EMPTY])
        return bool((cells[1:] == cells[:-1]).any())

    def count_empty(self) -> tuple[int, ...]:
        """Free slots of each rank."""
        return tuple(int(n) for n in (self.table == EMPTY).sum(axis=1))

    def find_replicas(self, layer: int, expert: int) -> tuple[tuple[int, int], ...]:
        """(rank, slot) of each replica, ascending: the order that `choose_replica` indexes."""
        return tuple((int(r), int(s)) for r, s in np.argwhere(self.table == layer * self.experts + expert))

    def sum_rank_loads(self, loads: Floats) -> Floats:
        """float64[layers, ranks]: what each rank gets to do under `loads` (float64[layers, experts])."""
        if loads.shape != (self.layers, self.experts):
            raise ValueError(f"loads of shape {loads.shape} for a placement of {self.layers} x {self.experts}")
        share = (loads / self.count_replicas()).ravel()
        rank, slot = np.nonzero(self.table != EMPTY)
        keys = self.table[rank, slot].astype(np.int64)
        where = keys // self.experts * self.ranks + rank
        sums: Floats = np.bincount(where, weights=share[keys], minlength=self.layers * self.ranks).astype(np.float64)
        return sums.reshape(self.layers, self.ranks)

    def find_stranded(self, ranks: Collection[int]) -> tuple[tuple[int, int], ...]:
        """(layer, expert) of all that only `ranks` hold: what has to be loaded again when they are lost."""
        kept = np.delete(self.table, sorted(ranks), axis=0)
        counts = np.bincount(kept[kept != EMPTY], minlength=self.layers * self.experts)
        return tuple(divmod(int(key), self.experts) for key in np.flatnonzero(counts == 0))

    def build_tables(self) -> tuple[Ints, Ints]:
        """What a device looks replicas up in, both int64.

        Returns:
            (counts[layers, experts], places[layers, experts, max replicas]): a place is `rank * slots + slot`,
            ascending; beyond the count it repeats the first, so that a wrong index still finds the expert.
        """
        counts = self.count_replicas()
        places = np.flatnonzero(self.table.ravel() != EMPTY)
        keys = self.table.ravel()[places].astype(np.int64)
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        first = np.cumsum(counts.ravel()) - counts.ravel()
        out = np.repeat(places[first][:, None], int(counts.max()), axis=1)
        out[keys, np.arange(keys.size) - first[keys]] = places
        return counts, out.reshape(self.layers, self.experts, -1)

    def to_plain(self) -> dict[str, object]:
        """Ints and lists only, for JSON and MessagePack."""
        return {"layers": self.layers, "experts": self.experts, "table": self.table.tolist()}

    @classmethod
    def from_plain(cls, plain: dict[str, object]) -> Placement:
        """The reverse of `to_plain`. Raises ValueError for anything that is not a placement."""
        unknown = sorted(set(plain) ^ {"layers", "experts", "table"})
        if unknown:
            raise ValueError(f"a placement has layers, experts and table; {unknown[0]} is missing or unknown")
        layers, experts, table = plain["layers"], plain["experts"], plain["table"]
        if type(layers) is not int or type(experts) is not int or not isinstance(table, list):
            raise ValueError("a placement's layers and experts are integers, its table a list of lists")
        if any(not isinstance(row, list) or any(type(value) is not int for value in row) for row in table):
            raise ValueError("a placement's table is a list of lists of integers")
        if len({len(row) for row in table}) != 1:
            raise ValueError("the ranks of a placement have equal numbers of slots")
        bound = 2**31
        if any(not -bound <= value < bound for row in table for value in row):
            raise ValueError(f"a placement's table holds integers below {bound}")
        return cls(layers, experts, np.array(table, dtype=np.int32))


def lay_out(layers: int, experts: int, ranks: int, slots: int) -> Placement:
    """The placement to start with: experts in order, one replica each, spare slots last.

    Rank r gets experts [r * experts / ranks, (r + 1) * experts / ranks) of every layer; where that does not divide,
    layers begin at different ranks, so that ranks differ by one slot at most.
    """
    if ranks < 1 or ranks * slots < layers * experts:
        raise ValueError(f"{ranks} ranks x {slots} slots can not hold {layers} layers x {experts} experts")
    if experts % ranks == 0:
        owner = np.tile(np.arange(experts) // (experts // ranks), layers)
    else:
        owner = np.sort(np.arange(layers * experts).reshape(layers, experts) % ranks, axis=1).ravel()
    table = np.full((ranks, slots), EMPTY, dtype=np.int32)
    for rank in range(ranks):
        keys = np.flatnonzero(owner == rank)
        if keys.size > slots:
            raise ValueError(f"{slots} slots per rank can not hold {keys.size} experts")
        table[rank, : keys.size] = keys
    return Placement(layers, experts, table)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """What turns one placement into another, slots aside. Each arrival is one slot's bytes to copy.

    Attributes:
        arrivals: replicas to make, departures: replicas to give up; both ascending.
    """

    arrivals: tuple[Replica, ...]
    departures: tuple[Replica, ...]


def diff(before: Placement, after: Placement) -> Difference:
    """Raises ValueError if the two are not placements of one part over the same ranks."""
    if (before.layers, before.experts, before.ranks) != (after.layers, after.experts, after.ranks):
        raise ValueError("two placements of different layers, experts or ranks can not be compared")
    change = after.count_per_rank() - before.count_per_rank()
    return Difference(arrivals=_list_replicas(change), departures=_list_replicas(-change))


def _list_replicas(change: Ints) -> tuple[Replica, ...]:
    where = np.argwhere(change > 0)
    times = change[tuple(where.T)]
    return tuple(Replica(*row) for row in np.repeat(where, times, axis=0).tolist())


def choose_replica(row: int, key: int, num_replicas: int) -> int:
    """Which replica of expert `key` (`layer * experts + expert`) computes row `row`: an index below `num_replicas`.

    A function of its arguments alone, so a row's result does not depend on the rest of its batch. `row` is any
    identity that the row keeps (its low 32 bits count). 32-bit products and shifts only, at most 2**15 replicas: the
    device does the same in int64.
    """
    return int(choose_replicas([row], [key], [num_replicas])[0])


def choose_replicas(rows: Sequence[int] | Ints, keys: Sequence[int] | Ints, counts: Sequence[int] | Ints) -> Ints:
    """`choose_replica` over arrays that broadcast."""
    mask = np.uint64(0xFFFFFFFF)
    row, key = (np.asarray(values, dtype=np.int64).astype(np.uint64) & mask for values in (rows, keys))
    # Two rounds of multiply and shift (constants of MurmurHash3's finaliser): neighbouring rows and experts part ways.
    mixed = (row * np.uint64(0x9E3779B1) + key * np.uint64(0x85EBCA6B)) & mask
    mixed = ((mixed ^ (mixed >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & mask
    mixed = ((mixed ^ (mixed >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & mask
    mixed ^= mixed >> np.uint64(16)
    chosen = ((mixed >> np.uint64(16)) * np.asarray(counts, dtype=np.int64).astype(np.uint64)) >> np.uint64(16)
    return chosen.astype(np.int64)
