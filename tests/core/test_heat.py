"""Heat's blob against a plain loop over slots, on drawn placements; and what is kept from one question to the next."""

from __future__ import annotations

import os
import random
import struct

import numpy as np
import pytest

from engine.core.heat import Heat, HeatInput, Moved, find_moved
from engine.core.load import Loads, LoadWindow
from engine.core.placement import EMPTY, Placement

Table = list[list[int]]
FRESH = int(os.environ.setdefault("FRESH_SEED", str(random.SystemRandom().randrange(1 << 30))))
"""The same in every process of a test run: parameters have to be."""


def draw_table(rng: random.Random, layers: int, experts: int, ranks: int) -> Table:
    """Every expert somewhere, replicas here and there, some slots empty, some ranks without anything."""
    keys = list(range(layers * experts))
    keys += [rng.randrange(layers * experts) for _ in range(rng.randrange(layers * experts))]
    rng.shuffle(keys)
    rows: Table = [[] for _ in range(ranks)]
    bare = set(rng.sample(range(ranks), rng.randrange(ranks)))
    homes = [rank for rank in range(ranks) if rank not in bare]
    for key in keys:
        rows[rng.choice(homes)].append(key)
    slots = max(map(len, rows)) + rng.randrange(3)
    for row in rows:
        row += [EMPTY] * (slots - len(row))
        rng.shuffle(row)
    return rows


def make(layers: int, experts: int, table: Table) -> Placement:
    return Placement(layers, experts, np.array(table, np.int32))


def draw_loads(rng: random.Random, layers: int, experts: int) -> list[list[float]]:
    """Sixteenths, so that sums are exact; equals and zeros among them."""
    silent = rng.randrange(layers) if rng.random() < 0.3 else -1
    return [
        [0.0 if layer == silent else rng.choice([0.0, 1.0, rng.randrange(160) / 16]) for _ in range(experts)]
        for layer in range(layers)
    ]


def expect(
    layer: int, loads: list[list[float]], table: Table, after: Table | None, before: Table | None, absent: set[int]
) -> list[list[float]]:
    """The six columns, by loops alone. `before`: what the table was when the last re-placement began."""
    layers, experts, ranks = len(loads), len(loads[0]), len(table)
    times: dict[int, int] = {}
    for row in table:
        for key in row:
            times[key] = times.get(key, 0) + 1
    rank_load, hottest = [], []
    for at in range(layers):
        mean = sum(loads[at]) / ranks
        for rank in range(ranks):
            total, best, name = 0.0, -1.0, -1
            for key in sorted(key for key in table[rank] if key != EMPTY and key // experts == at):
                share = loads[at][key % experts] / times[key]
                total += share
                if share > best:
                    best, name = share, key % experts
            rank_load.append((rank, at, total / mean if mean and rank not in absent else 0.0))
            hottest.append((rank, at, name if rank not in absent else -1))

    def name_slots(rows: Table) -> list[float]:
        names = []
        for rank, row in enumerate(rows):
            for key in row:
                is_here = key != EMPTY and key // experts == layer and rank not in absent
                names.append(key % experts if is_here else -1)
        return names

    mean = sum(loads[layer]) / experts
    moved = []
    for rank, row in enumerate(table):
        for slot, key in enumerate(row):
            is_new = before is not None and key not in (EMPTY, before[rank][slot])
            moved.append(int(is_new and key // experts == layer and rank not in absent))
    return [
        [load for _, _, load in sorted(rank_load)],
        [name for _, _, name in sorted(hottest)],
        name_slots(table),
        name_slots(table if after is None else after),
        [load / mean if mean else 0.0 for load in loads[layer]],
        moved,
    ]


def unpack(blob: bytes, layers: int, experts: int, ranks: int, slots: int) -> list[list[float]]:
    """The blob's columns, as HeatReport's docstring has them."""
    counts = [("f", ranks * layers), ("i", ranks * layers), ("i", ranks * slots), ("i", ranks * slots)]
    columns, at = [], 0
    for kind, count in [*counts, ("f", experts), ("B", ranks * slots)]:
        columns.append(list(struct.unpack_from(f"<{count}{kind}", blob, at)))
        at += count * struct.calcsize(kind)
    assert at == len(blob)
    return columns


def give(
    loads: list[list[float]], placement: Placement, after: Placement | None = None, moved: Moved | None = None,
    absent: set[int] | None = None,
) -> HeatInput:  # fmt: skip
    array = np.array(loads)
    return HeatInput(
        array, placement.sum_rank_loads(array), placement, after, moved or Moved(), frozenset(absent or set())
    )


@pytest.mark.parametrize("seed", range(FRESH, FRESH + 40))
def test_the_blob_is_what_a_plain_loop_says(seed: int) -> None:
    rng = random.Random(seed)
    layers, experts, ranks = rng.randrange(1, 5), rng.randrange(1, 9), rng.randrange(1, 7)
    heat = Heat()
    table = draw_table(rng, layers, experts, ranks)
    for _ in range(6):
        # The same Heat from question to question: whatever it keeps must not be told of something else.
        loads, absent = draw_loads(rng, layers, experts), {rank for rank in range(ranks) if rng.random() < 0.2}
        before, after = None, None
        if rng.random() < 0.5:
            before = [[EMPTY if rng.random() < 0.2 else key for key in row] for row in table]
        if rng.random() < 0.5:
            after = [row[::-1] for row in table]
        placement = make(layers, experts, table)
        old = np.array(before, np.int32) if before is not None else placement.table
        slots = np.flatnonzero((old != placement.table) & (placement.table != EMPTY))
        moved = Moved(slots, placement.table.ravel()[slots].astype(np.int64))
        given = give(loads, placement, None if after is None else make(layers, experts, after), moved, absent)
        for layer in rng.sample(range(layers), layers):
            blob = heat.pack(layer, given)
            got = unpack(blob, layers, experts, ranks, placement.slots)
            wanted = expect(layer, loads, table, after, before, absent)
            assert got[1:4] == wanted[1:4] and got[5] == wanted[5]
            assert got[0] == pytest.approx(wanted[0], rel=1e-6) and got[4] == pytest.approx(wanted[4], rel=1e-6)
        if rng.random() < 0.5:
            table = rng.sample(table, ranks)


def test_what_was_moved_is_what_lies_where_it_did_not_lie() -> None:
    before = make(1, 3, [[0, 1, EMPTY], [2, EMPTY, EMPTY]])
    after = make(1, 3, [[0, 2, EMPTY], [EMPTY, 1, 2]])
    moved = find_moved(before, after)
    assert moved.slots.tolist() == [1, 4, 5] and moved.keys.tolist() == [2, 1, 2]
    assert not find_moved(after, after).slots.size
    # Later another expert got one of these slots, and one is empty: neither is what was moved.
    later = make(1, 3, [[0, 1, EMPTY], [EMPTY, 1, 2]])
    (*_, marks) = unpack(Heat().pack(0, give([[1.0, 1.0, 1.0]], later, moved=moved)), 1, 3, 2, 3)
    assert marks == [0, 0, 0, 0, 1, 1]


def test_nothing_is_drawn_again_while_nothing_changed() -> None:
    heat, given = Heat(), give([[1.0, 2.0, 3.0]], make(1, 3, [[0, 1], [2, EMPTY]]))
    first = heat.pack(0, given)
    same = HeatInput(given.loads, given.rank_loads, given.placement, None, given.moved, frozenset())
    assert heat.pack(0, same) is first
    gone = HeatInput(given.loads, given.rank_loads, given.placement, None, given.moved, frozenset({1}))
    assert unpack(heat.pack(0, gone), 1, 3, 2, 2)[:2] == [[1.0, 0.0], [1, -1]]
    assert heat.pack(0, given) == first


def test_the_loads_to_plan_with_are_one_array_until_the_window_moves() -> None:
    window = LoadWindow(1, 2)
    first = window.expected()
    assert window.expected() is first and not first.flags.writeable
    window.add(Loads(np.array([[3, 5]]), 1))
    second = window.expected()
    assert second is not first and second.tolist() == [[3.0, 5.0]] and window.expected() is second
