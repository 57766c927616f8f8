"""MemoryFabric: fabrics of one process that copy between their arenas, with latency and faults. For simulation.

A `MemoryWorld` stands for the wires. Time is trio's, so it is virtual under a virtual clock, and there are no threads;
chance is the `random.Random` given, drawn in the order of pushes, so a run is a function of its seed. The bytes are
really copied: a late or lost write corrupts the arena just as it would in a cluster.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import msgspec
import trio

from transport.background import open_background
from transport.blocks import RUNS_LIMIT, BlockTable, Indices, Int64s, count_descriptors, pair_blocks
from transport.errors import FabricError
from transport.fabric import BlockRun, Target, Transfer, TransferReport
from transport.wire import unpack_struct

DESCRIPTION_LIMIT = 64 << 10
TRANSFERS_LIMIT = 4096

_Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per transfer, drawn at the push; all zero is a perfect wire.

    Attributes:
        delay: it takes up to `delay_s` longer.
        fail: `wait` raises. Whether the bytes landed before that is a coin of its own, `fail_landed`.
        late: a transfer that fails lands all the same, up to `delay_s` *after* `wait` raised: what a writer does that
            was stopped between its check and its write. Only a quarantine helps against it.
        stuck: it never ends and never lands: a peer that hangs.
    """

    delay: float = 0.0
    delay_s: float = 0.1
    fail: float = 0.0
    fail_landed: float = 0.5
    late: float = 0.0
    stuck: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ExtraFaults:
    """More of the same, drawn by a generator of their own: worlds without them draw what they always drew.

    Attributes:
        twice: it lands, and lands again up to `twice_s` later; only then is it over. What a transport does that
            resends: whoever reuses what a push reads before `wait` returned, or opens a grant's memory to others
            before the word of it, is found out by the second landing.
        corrupt: one bit of what lands is wrong, and `wait` says that all is well.
    """

    twice: float = 0.0
    twice_s: float = 0.1
    corrupt: float = 0.0


class _Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    engine: Literal["memory"]
    version: Literal[1]
    name: Annotated[str, msgspec.Meta(max_length=256)]
    runs: Annotated[tuple[tuple[_Word, _Word, _Word], ...], msgspec.Meta(max_length=RUNS_LIMIT)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Fate:
    """What chance decided for one transfer."""

    extra_s: float
    fails: bool
    lands: bool
    late_s: float | None
    stuck: bool
    twice_s: float | None
    flip_at: float | None


class MemoryWorld:
    """The wires between the fabrics opened in it.

    Args:
        rng: the source of all faults.
        latency_s: from the start of sending to the last byte's arrival, beyond the time on the wire.
        bytes_per_s: of one sender's wire; its transfers take their turns. None is infinitely fast.
        faults: may be replaced while the world runs.
        extra_rng: the source of `extra`, which may be replaced as well.
        sleep_until: how to wait for an instant of trio's clock.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        latency_s: float = 20e-6,
        bytes_per_s: float | None = None,
        faults: Faults = Faults(),
        extra_rng: random.Random | None = None,
        sleep_until: Callable[[float], Awaitable[None]] = trio.sleep_until,
    ) -> None:
        self.faults = faults
        self.extra = ExtraFaults()
        self.on_landing: Callable[[str, str, Sequence[int]], None] | None = None
        """Called just before bytes land, with the names of writer and target and the target's block numbers."""
        self.landing: MemoryTransfer | None = None
        """Whose bytes `on_landing` is called for."""
        self.weigh: Callable[[MemoryFabric, MemoryTransfer], float] | None = None
        """What a push that begins now counts on the wire, in bytes; its own size without this. For blocks that stand
        for larger ones."""
        self._rng = rng
        self._extra_rng = extra_rng or random.Random(0)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._sleep_until = sleep_until
        self._lives: dict[str, MemoryFabric] = {}
        self._num_lives = 0

    @asynccontextmanager
    async def open_fabric(self, name: str) -> AsyncIterator[MemoryFabric]:
        """A member for as long as the block runs; leaving it is the death of its process: its writes stop, those to it
        fail, and what it had in flight never lands."""
        self._num_lives += 1
        life = f"{name}#{self._num_lives}"
        async with open_background() as nursery:
            fabric = MemoryFabric(self, life, nursery)
            self._lives[life] = fabric
            try:
                yield fabric
            finally:
                with trio.CancelScope(shield=True):
                    await fabric.aclose()

    def _draw(self) -> _Fate:
        faults, rng = self.faults, self._rng
        extra_s = rng.random() * faults.delay_s if rng.random() < faults.delay else 0.0
        stuck = rng.random() < faults.stuck
        fails = rng.random() < faults.fail
        lands = not fails or rng.random() < faults.fail_landed
        late_s = rng.random() * faults.delay_s if fails and rng.random() < faults.late else None
        return _Fate(extra_s, fails, lands, late_s, stuck, *self._draw_extra())

    def _draw_extra(self) -> tuple[float | None, float | None]:
        """Until the second landing; where in its bytes one is flipped."""
        extra, rng = self.extra, self._extra_rng
        twice = extra.twice > 0 and rng.random() < extra.twice
        corrupt = extra.corrupt > 0 and rng.random() < extra.corrupt
        return rng.random() * extra.twice_s if twice else None, rng.random() if corrupt else None


class MemoryTarget:
    """A peer, in one of its lives."""

    def __init__(self, name: str, table: BlockTable) -> None:
        self.name = name
        self.table = table
        self.forgotten = False


class MemoryTransfer:
    """One push."""

    def __init__(self, target: MemoryTarget, ours: Indices, theirs: Indices, num_bytes: int, begun: float) -> None:
        self.target = target
        self.num_bytes = num_bytes
        self.ours = ours
        self.theirs = theirs
        self.begun = begun
        self.done = trio.Event()
        self.mark = 0
        """A note of `MemoryWorld.weigh` for `on_landing`."""
        self.report: TransferReport | None = None
        self.failure: str | None = None
        self._found: tuple[Int64s, Int64s, Int64s] | None = None

    def find(self, table: BlockTable) -> tuple[Int64s, Int64s, Int64s]:
        """Addresses in the writer's `table`, addresses in the target's, bytes of each block; looked for once."""
        if self._found is None:
            ours, theirs = table.addresses(self.ours), self.target.table.addresses(self.theirs)
            self._found = ours, theirs, table.sizes(self.ours)
        return self._found


class MemoryFabric:
    """See `transport.fabric.Fabric`. Made by `MemoryWorld.open_fabric`."""

    engine = "memory"

    def __init__(self, world: MemoryWorld, name: str, nursery: trio.Nursery) -> None:
        self.name = name
        self._world = world
        self._nursery = nursery
        self._table: BlockTable | None = None
        self._targets: dict[str, MemoryTarget] = {}
        self._running: dict[MemoryTransfer, None] = {}
        self._severed: set[str] = set()
        self._wire_free_at = 0.0
        self._closed = False
        self.stopped_until = 0.0
        """Until then its process is stopped: what it would write lands when it goes on."""

    @property
    def running(self) -> tuple[MemoryTransfer, ...]:
        """Pushes that are not over, oldest first."""
        return tuple(self._running)

    async def register(self, runs: Sequence[BlockRun]) -> None:
        await trio.lowlevel.checkpoint()
        if self._table is not None:
            raise FabricError("memory is registered once per fabric")
        self._table = BlockTable(runs)

    def describe(self) -> bytes:
        if self._table is None:
            raise FabricError("describe before register")
        runs = tuple((run.address, run.block_bytes, run.count) for run in self._table.runs)
        return msgspec.msgpack.encode(_Description("memory", 1, self.name, runs))

    async def connect(self, description: bytes) -> Target:
        peer = _read_description(description)
        if self._closed:
            raise FabricError(f"{self.name}: the fabric is closed")
        await trio.sleep(self._world._latency_s)
        if peer.name in self._targets:
            raise FabricError(f"{peer.name} is connected already; forget it first")
        if peer.name not in self._world._lives:
            raise FabricError(f"connect to {peer.name}: it is gone")
        target = MemoryTarget(peer.name, BlockTable([BlockRun(*run) for run in peer.runs]))
        self._targets[peer.name] = target
        return target

    def push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        assert isinstance(target, MemoryTarget)
        if self._closed:
            raise FabricError(f"{self.name}: the fabric is closed")
        if target.forgotten:
            raise FabricError(f"{target.name} was forgotten")
        if self._table is None:
            raise FabricError("push before register")
        if len(self._running) >= TRANSFERS_LIMIT:
            raise FabricError(f"{len(self._running)} transfers are in flight (limit {TRANSFERS_LIMIT})")
        ours, theirs, num_bytes = pair_blocks(self._table, target.table, local_blocks, remote_blocks)
        transfer = MemoryTransfer(target, ours, theirs, num_bytes, trio.current_time())
        self._running[transfer] = None
        fate = self._world._draw()
        weigh = self._world.weigh
        weight = num_bytes if weigh is None else weigh(self, transfer)
        on_wire_s = weight / self._world._bytes_per_s if self._world._bytes_per_s else 0.0
        self._wire_free_at = max(self._wire_free_at, transfer.begun) + on_wire_s
        arrival = self._wire_free_at + self._world._latency_s + fate.extra_s
        self._nursery.start_soon(self._carry, transfer, fate, arrival)
        return transfer

    def prepare_push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        """Nothing: to push takes nothing that could be done before."""

    def expect_push(self) -> None:
        """Nothing: there is no thread to wake."""

    async def wait(self, transfer: Transfer) -> TransferReport:
        assert isinstance(transfer, MemoryTransfer)
        await transfer.done.wait()
        if transfer.report is None:
            raise FabricError(f"push to {transfer.target.name} failed: {transfer.failure}")
        return transfer.report

    async def forget(self, target: Target) -> None:
        assert isinstance(target, MemoryTarget)
        await trio.lowlevel.checkpoint()
        target.forgotten = True
        for transfer in [running for running in self._running if running.target is target]:
            self._settle(transfer, "the peer was forgotten")
        if self._targets.get(target.name) is target:
            del self._targets[target.name]

    async def sever(self, description: bytes) -> None:
        self._severed.add(_read_description(description).name)
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Ends this life; what is in flight fails and does not land. Idempotent."""
        self.end()
        await trio.lowlevel.checkpoint()

    def end(self) -> None:
        """The same in no time: the death of its process."""
        self._closed = True
        self._world._lives.pop(self.name, None)
        self._nursery.cancel_scope.cancel()
        for transfer in list(self._running):
            self._settle(transfer, "the fabric was closed")

    # ------------------------------------------------------------ the wire

    async def _carry(self, transfer: MemoryTransfer, fate: _Fate, arrival: float) -> None:
        if fate.stuck:
            return  # only `forget` and `aclose` end it
        await self._sleep_until(arrival)
        if transfer.target.name not in self._world._lives:
            self._settle(transfer, "the peer is gone")
            return
        # A transfer that was forgotten meanwhile writes all the same: nothing can stop it.
        if fate.lands:
            self._copy(transfer, fate.flip_at)
        if fate.twice_s is not None and fate.lands:
            await self._sleep_until(trio.current_time() + fate.twice_s)
            self._copy(transfer, fate.flip_at)
        self._settle(transfer, "the wire failed" if fate.fails else None)
        if fate.late_s is not None:
            await self._sleep_until(trio.current_time() + fate.late_s)
            self._copy(transfer)

    async def _sleep_until(self, when: float) -> None:
        await self._world._sleep_until(when)
        if self.stopped_until > trio.current_time():
            await self._world._sleep_until(self.stopped_until)

    def _copy(self, transfer: MemoryTransfer, flip_at: float | None = None) -> None:
        peer = self._world._lives.get(transfer.target.name)
        if peer is None or self.name in peer._severed:
            return
        assert self._table is not None and peer._table is not None
        self._world.landing = transfer
        if self._world.on_landing is not None:
            self._world.on_landing(self.name, peer.name, transfer.theirs.tolist())
        source, target, sizes = transfer.find(self._table)
        for write in zip(target.tolist(), source.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*write)
        if flip_at is not None:
            block, offset = divmod(flip_at * sizes.size, 1.0)
            byte = ctypes.c_ubyte.from_address(int(target[int(block)]) + int(offset * int(sizes[int(block)])))
            byte.value ^= 0x10

    def _settle(self, transfer: MemoryTransfer, failure: str | None) -> None:
        if transfer.done.is_set():
            return
        self._running.pop(transfer, None)
        if failure is None:
            assert self._table is not None
            ours, theirs, sizes = transfer.find(self._table)
            transfer.report = TransferReport(
                num_bytes=transfer.num_bytes,
                num_descriptors=count_descriptors(ours, theirs, sizes),
                post_us=0,
                transfer_us=round((trio.current_time() - transfer.begun) * 1e6),
            )
        transfer.failure = failure
        transfer.done.set()


def _read_description(description: bytes) -> _Description:
    if len(description) > DESCRIPTION_LIMIT:
        raise FabricError(f"description of {len(description)} bytes (limit {DESCRIPTION_LIMIT})")
    try:
        return unpack_struct(description, _Description)
    except (ValueError, TypeError) as error:
        raise FabricError(f"not a description of a memory fabric: {error}") from None
