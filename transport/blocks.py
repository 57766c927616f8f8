"""BlockTable: the numbering of an arena's blocks, and what it takes for a push to be valid.

All three fabrics check pushes here, so that they refuse the same things in the same words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.errors import FabricError
from transport.fabric import BlockRun

RUNS_LIMIT = 64
BLOCKS_LIMIT = 1 << 24
"""Blocks of one table: 16 million pages."""

Indices = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class BlockTable:
    """Runs of equally sized blocks, numbered through.

    Args:
        runs: from this process or from a peer's description; checked either way.

    Raises:
        FabricError: no runs, too many, or sizes and addresses that no memory can have.
    """

    def __init__(self, runs: Sequence[BlockRun]) -> None:
        if not 0 < len(runs) <= RUNS_LIMIT:
            raise FabricError(f"a block table of {len(runs)} runs (1 to {RUNS_LIMIT} are possible)")
        for run in runs:
            if run.count < 1 or run.block_bytes < 1 or run.address < 1:
                raise FabricError(f"{run} is not a run of blocks")
            if run.address + run.count * run.block_bytes > 2**63 - 1:
                raise FabricError(f"{run} reaches beyond the address space")
        self.runs = tuple(runs)
        self.num_blocks = sum(run.count for run in runs)
        if self.num_blocks > BLOCKS_LIMIT:
            raise FabricError(f"a block table of {self.num_blocks} blocks (limit {BLOCKS_LIMIT})")
        counts = np.array([run.count for run in runs], np.int64)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._sizes = np.array([run.block_bytes for run in runs], np.int64)
        self._addresses = np.array([run.address for run in runs], np.int64)

    def indices(self, blocks: Sequence[int] | npt.NDArray[np.integer], what: str) -> Indices:
        """The numbers as int32[n], all of them inside the table.

        Raises:
            FabricError: no blocks, not integers, or one outside the table; `what` names the side.
        """
        array = np.asarray(blocks)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise FabricError(f"{what} blocks must be a non-empty sequence of integers")
        bad = (array < 0) | (array >= self.num_blocks)
        if np.count_nonzero(bad):  # a third of what `any` costs
            raise FabricError(f"{what} block {array[bad][0]} is outside the table of {self.num_blocks} blocks")
        return array.astype(np.int32)

    def sizes(self, indices: Indices) -> Int64s:
        """Bytes of each block: int64[n]."""
        sizes: Int64s = self._sizes[self._ends.searchsorted(indices, side="right")]
        return sizes

    def addresses(self, indices: Indices) -> Int64s:
        """First address of each block: int64[n]."""
        run = self._ends.searchsorted(indices, side="right")
        offsets: Int64s = (indices - self._starts[run]) * self._sizes[run]
        addresses: Int64s = self._addresses[run] + offsets
        return addresses

    def ranges(self, indices: Indices) -> list[tuple[int, int, int]]:
        """The blocks' memory in order as (run, offset in it, length); neighbours of one run are merged."""
        run = self._ends.searchsorted(indices, side="right")
        first = np.ones(indices.size, bool)
        first[1:] = (indices[:-1] + 1 != indices[1:]) | (run[:-1] != run[1:])
        starts = np.flatnonzero(first)
        sizes = self._sizes[run]
        offsets = (indices - self._starts[run]) * sizes
        lengths = np.add.reduceat(sizes, starts)
        return list(zip(run[starts].tolist(), offsets[starts].tolist(), lengths.tolist(), strict=True))


def pair_blocks(
    local: BlockTable,
    remote: BlockTable,
    local_blocks: Sequence[int] | npt.NDArray[np.integer],
    remote_blocks: Sequence[int] | npt.NDArray[np.integer],
) -> tuple[Indices, Indices, int]:
    """Checks a push. Returns both sides' block numbers and the bytes to move.

    Raises:
        FabricError: numbers outside their tables, unequal counts or sizes, or a remote block named twice (which of the
            two writes would win is not defined).
    """
    ours = local.indices(local_blocks, "local")
    theirs = remote.indices(remote_blocks, "remote")
    if ours.size != theirs.size:
        raise FabricError(f"{ours.size} local blocks for {theirs.size} remote blocks")
    our_sizes, their_sizes = local.sizes(ours), remote.sizes(theirs)
    differs = our_sizes != their_sizes
    if np.count_nonzero(differs):
        at = int(np.argmax(differs))
        raise FabricError(
            f"local block {ours[at]} has {our_sizes[at]} bytes, remote block {theirs[at]} has {their_sizes[at]}"
        )
    ordered = theirs.copy()
    ordered.sort()
    repeated = ordered[1:] == ordered[:-1]
    if np.count_nonzero(repeated):
        raise FabricError(f"remote block {ordered[1:][repeated][0]} is named twice in one push")
    return ours, theirs, int(np.add.reduce(our_sizes))


def count_descriptors(ours: Int64s, theirs: Int64s, sizes: Int64s) -> int:
    """Writes that are left after merging pairs whose both sides are neighbours of the pair before."""
    joined = (ours[:-1] + sizes[:-1] == ours[1:]) & (theirs[:-1] + sizes[:-1] == theirs[1:])
    return int(sizes.size - np.count_nonzero(joined))


def view_runs(table: BlockTable) -> list[memoryview]:
    """One writable view per run of a table of this process."""
    return [view_memory(run.address, run.block_bytes * run.count) for run in table.runs]


def view_memory(address: int, num_bytes: int) -> memoryview:
    """Process memory as a writable byte view. The caller knows that it is mapped and stays so."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
