"""The seam for bulk bytes: one-sided pushes of blocks from this process's arena into a peer's.

A *block table* numbers everything a process can send or receive: run after run of equally sized blocks (a rank has two
runs, its pages and then its state slabs). A push names local and remote block numbers pairwise; blocks of a pair must
have the same size. Neighbouring blocks with neighbouring targets merge into one write where the engine can do it, so
callers keep runs in order.

There is no abort: a transfer that was started writes until it ends. `wait` with a deadline gives up *waiting*; whoever
owns the memory keeps both sides tainted (see docs/protocol.md, quarantine). There are no notifications either: the
caller tells the peer over its own control stream once `wait` returned.

Implementations: `nixl_fabric` (production), `tcp_fabric` (no NIXL on this machine), `memory_fabric` (one process,
virtual time, faults). tests/conformance runs one body over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks of `block_bytes` from `address` on, one after the other."""

    address: int
    block_bytes: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class TransferReport:
    """What a finished transfer did, by the engine's own telemetry.

    `num_bytes` moved; `num_descriptors` after merging; `post_us` inside the posting call; `transfer_us` from posting to
    the poll that saw the end.
    """

    num_bytes: int
    num_descriptors: int
    post_us: int
    transfer_us: int


class Target(Protocol):
    """A connected peer. Opaque; made by `Fabric.connect`."""

    @property
    def name(self) -> str: ...


class Transfer(Protocol):
    """A push in flight. Opaque; made by `Fabric.push`."""

    @property
    def num_bytes(self) -> int: ...


class Fabric(Protocol):
    """One per process. All methods are called from the owning trio loop."""

    @property
    def engine(self) -> str:
        """`nixl`, `tcp` or `memory`, with the transport where known (`nixl/UCX`)."""
        ...

    async def register(self, runs: Sequence[BlockRun]) -> None:
        """Makes the memory reachable. Called once, before `describe`. The memory must outlive the fabric."""
        ...

    def describe(self) -> bytes:
        """What a peer needs for `connect`: at most 64 KiB, to be carried opaquely over a control stream."""
        ...

    async def connect(self, description: bytes) -> Target:
        """Prepares pushes to the peer that made `description`.

        Raises:
            FabricError: not a description of this engine, or the peer can not be reached.
        """
        ...

    def push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        """Starts writing local blocks into the peer's blocks; returns before completion.

        The local blocks must not change until `wait` returned.

        Raises:
            FabricError: a block number is outside its table, sizes of a pair differ, or the peer was forgotten.
        """
        ...

    def prepare_push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        """Says that a push of just these blocks is likely, which then starts earlier. It need not come, nothing is read
        or written before it does, and what is wrong with it is said then."""
        ...

    def expect_push(self) -> None:
        """Says that a push is likely within a millisecond or two, which then starts earlier. It need not come."""
        ...

    async def wait(self, transfer: Transfer) -> TransferReport:
        """Until the bytes are in the peer's memory. Cancelling stops the waiting, not the transfer; wait again is fine.

        Raises:
            FabricError: the transfer failed. Whether bytes landed is unknown.
        """
        ...

    async def forget(self, target: Target) -> None:
        """Drops a peer that is gone. Transfers to it fail or are already over."""
        ...

    async def sever(self, description: bytes) -> None:
        """Makes sure that nothing of the peer that made `description` lands here after this returns.

        Called once its process is *confirmed dead*, and before the pages that it was granted are used again: a dead
        process starts no writes, but its last bytes may still wait in a socket's buffer.
        """
        ...

    async def aclose(self) -> None:
        """Ends everything. The memory may be unmapped only after peers were told."""
        ...
