"""BlockTable's arithmetic against a loop over all blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from transport.blocks import BLOCKS_LIMIT, BlockTable, count_descriptors, pair_blocks, view_runs
from transport.errors import FabricError
from transport.fabric import BlockRun


@pytest.mark.parametrize("seed", range(20))
def test_addresses_sizes_and_ranges_agree_with_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    runs = [BlockRun(rng.randrange(1, 10**6), rng.randrange(1, 999), rng.randrange(1, 9)) for _ in range(4)]
    table = BlockTable(runs)
    plain = [(run.address + i * run.block_bytes, run.block_bytes) for run in runs for i in range(run.count)]
    assert table.num_blocks == len(plain)
    blocks = [rng.randrange(len(plain)) for _ in range(30)] + list(range(len(plain)))
    indices = table.indices(blocks, "local")
    assert table.addresses(indices).tolist() == [plain[block][0] for block in blocks]
    assert table.sizes(indices).tolist() == [plain[block][1] for block in blocks]
    flat = []
    for run, offset, length in table.ranges(indices):
        size = runs[run].block_bytes
        flat += [(runs[run].address + offset + at, size) for at in range(0, length, size)]
    assert flat == [plain[block] for block in blocks]


def test_neighbours_in_order_are_one_range() -> None:
    table = BlockTable([BlockRun(1000, 10, 5), BlockRun(1050, 10, 5)])
    indices = table.indices([1, 2, 3, 4, 5, 6, 3, 2], "local")
    assert table.ranges(indices) == [(0, 10, 40), (1, 0, 20), (0, 30, 10), (0, 20, 10)]
    addresses, sizes = table.addresses(indices), table.sizes(indices)
    assert count_descriptors(addresses, addresses, sizes) == 3  # the two runs touch
    apart = table.addresses(table.indices([1, 2, 3, 8, 5, 6, 3, 2], "remote"))
    assert count_descriptors(addresses, apart, sizes) == 5  # both sides must be neighbours


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "0 runs"),
        ([BlockRun(1, 1, 1)] * 65, "65 runs"),
        ([BlockRun(0, 1, 1)], "not a run"),
        ([BlockRun(1, 0, 1)], "not a run"),
        ([BlockRun(1, 1, 0)], "not a run"),
        ([BlockRun(2**62, 2**40, 2**23)], "address space"),
        ([BlockRun(1, 1, BLOCKS_LIMIT), BlockRun(1, 1, 1)], "16777217 blocks"),
    ],
)
def test_impossible_tables_are_refused(runs: list[BlockRun], message: str) -> None:
    with pytest.raises(FabricError, match=message):
        BlockTable(runs)


def test_arrays_of_any_integer_type_are_block_numbers() -> None:
    table = BlockTable([BlockRun(1000, 10, 5)])
    for kind in (np.int32, np.int64, np.uint8):
        ours, theirs, size = pair_blocks(table, table, np.array([1, 2], kind), [3, 4])
        assert (ours.dtype, ours.tolist(), theirs.tolist(), size) == (np.int32, [1, 2], [3, 4], 20)
    with pytest.raises(FabricError, match="integers"):
        pair_blocks(table, table, np.array([[1]]), [3])
    with pytest.raises(FabricError, match="18446744073709551615 is outside"):
        pair_blocks(table, table, np.array([2**64 - 1], np.uint64), [3])


def test_views_are_the_memory_itself() -> None:
    memory = np.zeros(64, np.uint8)
    one, two = view_runs(BlockTable([BlockRun(memory.ctypes.data, 8, 4), BlockRun(memory.ctypes.data + 32, 16, 2)]))
    one[3] = 7
    two[0] = 9
    assert (one.nbytes, two.nbytes) == (32, 32)
    assert np.flatnonzero(memory).tolist() == [3, 32]
