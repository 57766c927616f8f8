"""NixlFabric: pushes as NIXL WRITEs through UCX, from host or device memory.

WRITE only: a reader that dies can abort the process it reads from. No notifications: they can not be awaited. Blocks
are prepared once (the local table at `register`, each peer's at `connect`), so posting costs index lists only and NIXL
merges neighbours. What NIXL does not do, and callers must not expect: time out on a hung peer, or stop a transfer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import trio

from transport.blocks import RUNS_LIMIT, BlockTable, Indices, pair_blocks
from transport.errors import FabricError
from transport.fabric import BlockRun, Target, Transfer, TransferReport
from transport.nixl_load import Nixl, load_nixl
from transport.nixl_load import is_available as is_available
from transport.nixl_load import nixl_status as nixl_status
from transport.nixl_owner import AgentThread, describe_error
from transport.wire import unpack_struct

DESCRIPTION_LIMIT = 64 << 10
TRANSFERS_LIMIT = 4096
"""Transfers in flight of one fabric."""
PREPARED_LIMIT = 16
"""Pushes that are prepared and have not come; beyond that the oldest is prepared in vain."""
DRAIN_S = 0.05
"""Two full socket buffers (some 10 MB) at TCP's 2 GB/s, ten times over."""

_Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    engine: Literal["nixl"]
    version: Literal[1]
    agent: Annotated[str, msgspec.Meta(max_length=256)]
    metadata: bytes
    memory: Literal["DRAM", "VRAM"]
    device: Annotated[int, msgspec.Meta(ge=0, le=1023)]
    runs: Annotated[tuple[tuple[_Word, _Word, _Word], ...], msgspec.Meta(max_length=RUNS_LIMIT)]


class NixlTarget:
    """A peer whose metadata is loaded and whose blocks are prepared."""

    def __init__(self, name: str, table: BlockTable, blocks: Any) -> None:
        self.name = name
        self.table = table
        self.blocks = blocks
        self.forgotten = False


class NixlTransfer:
    """One WRITE; a `Work` of the owner thread."""

    def __init__(self, fabric: NixlFabric, target: NixlTarget, ours: Indices, theirs: Indices, num_bytes: int) -> None:
        self.target = target
        self.num_bytes = num_bytes
        self.done = trio.Event()
        self.report: TransferReport | None = None
        self.failure: str | None = None
        self._fabric = fabric
        self._ours = ours
        self._theirs = theirs
        self._handle: Any = None

    @property
    def door(self) -> str:
        return self.target.name

    def prepare(self, agent: Any) -> None:
        self._handle = agent.make_prepped_xfer(
            "WRITE", self._fabric._blocks, self._ours, self.target.blocks, self._theirs
        )

    def start(self, agent: Any) -> bool:
        try:
            if self._handle is None:
                self.prepare(agent)
            return self._look(agent, agent.transfer(self._handle))
        except self._fabric._nixl.errors as error:
            return self._fail(error)

    def poll(self, agent: Any) -> bool:
        try:
            return self._look(agent, agent.check_xfer_state(self._handle))
        except self._fabric._nixl.errors as error:
            return self._fail(error)

    def _look(self, agent: Any, state: str) -> bool:
        if state == "PROC":
            return False
        if state != "DONE":
            return self._fail(RuntimeError(f"transfer state {state}"))
        told = agent.get_xfer_telemetry(self._handle)
        self.report = TransferReport(
            num_bytes=told.totalBytes,
            num_descriptors=told.descCount,
            post_us=told.postDuration,
            transfer_us=told.xferDuration,
        )
        return True

    def _fail(self, error: Exception) -> bool:
        self.failure = describe_error(error)
        return True

    def drop(self, why: str) -> None:
        self.failure = why
        self.release()

    def release(self) -> None:
        # The handle keeps the agent alive, and may be freed only in this thread.
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.release()
            except self._fabric._nixl.errors:
                pass  # it was in flight at an error: the library frees it with the agent

    def settle(self) -> None:
        self._fabric._num_transfers -= 1
        self.done.set()


_Key = tuple[NixlTarget, tuple[int, ...], tuple[int, ...]]
"""What names a prepared push."""


class NixlFabric:
    """See `transport.fabric.Fabric`. Made by `open_nixl_fabric`."""

    def __init__(self, nixl: Nixl, thread: AgentThread, agent_name: str, device: int | None, engine: str) -> None:
        self.engine = engine
        self.agent_name = agent_name
        self._nixl = nixl
        self._thread = thread
        self._memory: Literal["DRAM", "VRAM"] = "DRAM" if device is None else "VRAM"
        self._device = device or 0
        self._table: BlockTable | None = None
        self._blocks: Any = None
        self._description = b""
        self._targets: dict[str, NixlTarget] = {}
        self._prepared: dict[_Key, NixlTransfer] = {}
        self._num_transfers = 0

    async def register(self, runs: Sequence[BlockRun]) -> None:
        if self._table is not None:
            raise FabricError("memory is registered once per fabric")
        table = BlockTable(runs)
        regions = [(run.address, run.block_bytes * run.count, self._device, "") for run in runs]

        def register(agent: Any) -> tuple[Any, bytes]:
            agent.register_memory(regions, self._memory)
            blocks = agent.prep_xfer_dlist("", _list_blocks(table, self._device), self._memory)
            return blocks, bytes(agent.get_agent_metadata())

        self._blocks, metadata = await self._thread.call(register, "register memory")
        self._table = table
        description = _Description(
            engine="nixl",
            version=1,
            agent=self.agent_name,
            metadata=metadata,
            memory=self._memory,
            device=self._device,
            runs=tuple((run.address, run.block_bytes, run.count) for run in runs),
        )
        self._description = msgspec.msgpack.encode(description)
        if len(self._description) > DESCRIPTION_LIMIT:
            raise FabricError(f"description of {len(self._description)} bytes (limit {DESCRIPTION_LIMIT})")

    def describe(self) -> bytes:
        if not self._description:
            raise FabricError("describe before register")
        return self._description

    async def connect(self, description: bytes) -> Target:
        peer = _read_description(description)
        if peer.agent in self._targets:
            raise FabricError(f"{peer.agent} is connected already; forget it first")
        table = BlockTable([BlockRun(*run) for run in peer.runs])

        def connect(agent: Any) -> Any:
            # A connect that was cancelled may have left this agent loaded; loading it again is fine. Our own name
            # stands for loopback, which needs no metadata.
            if peer.agent != self.agent_name:
                told = agent.add_remote_agent(peer.metadata)
                name = told.decode() if isinstance(told, bytes) else told
                if name != peer.agent:
                    agent.remove_remote_agent(name)
                    raise FabricError(f"its metadata is of agent {name}")
            return agent.prep_xfer_dlist(peer.agent, _list_blocks(table, peer.device), peer.memory)

        blocks = await self._thread.call(connect, f"connect {peer.agent}")
        target = NixlTarget(peer.agent, table, blocks)
        self._targets[peer.agent] = target
        return target

    def push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        assert isinstance(target, NixlTarget)
        if self._table is None:
            raise FabricError("push before register")
        if target.forgotten:
            raise FabricError(f"{target.name} was forgotten")
        if self._num_transfers >= TRANSFERS_LIMIT:
            raise FabricError(f"{self._num_transfers} transfers are in flight (limit {TRANSFERS_LIMIT})")
        transfer = None
        if self._prepared:
            transfer = self._prepared.pop(_make_key(target, local_blocks, remote_blocks), None)
        if transfer is None:
            transfer = self._check_push(self._table, target, local_blocks, remote_blocks)
        self._thread.begin(transfer)
        self._num_transfers += 1
        return transfer

    def _check_push(
        self, table: BlockTable, target: NixlTarget, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> NixlTransfer:
        ours, theirs, num_bytes = pair_blocks(table, target.table, local_blocks, remote_blocks)
        return NixlTransfer(self, target, ours, theirs, num_bytes)

    def prepare_push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        """See `transport.fabric.Fabric`: checks the blocks, and has the library's handle made."""
        assert isinstance(target, NixlTarget)
        key = _make_key(target, local_blocks, remote_blocks)
        if self._table is None or target.forgotten or key in self._prepared:
            return
        with contextlib.suppress(FabricError):
            transfer = self._check_push(self._table, target, local_blocks, remote_blocks)
            self._thread.prepare(transfer)
            self._prepared[key] = transfer
            if len(self._prepared) > PREPARED_LIMIT:
                self._thread.discard(self._prepared.pop(next(iter(self._prepared))))

    def expect_push(self) -> None:
        """See `transport.fabric.Fabric`: the owner thread wakes now, beside whoever is about to push."""
        self._thread.alert()

    async def wait(self, transfer: Transfer) -> TransferReport:
        assert isinstance(transfer, NixlTransfer)
        await transfer.done.wait()
        if transfer.report is None:
            raise FabricError(f"push to {transfer.target.name} failed: {transfer.failure}")
        return transfer.report

    async def forget(self, target: Target) -> None:
        assert isinstance(target, NixlTarget)
        if target.forgotten:
            return
        target.forgotten = True
        errors = self._nixl.errors
        with contextlib.suppress(FabricError):  # the thread has ended, and released them
            for key in [key for key in self._prepared if key[0] is target]:
                self._thread.discard(self._prepared.pop(key))

        def forget(agent: Any) -> None:
            blocks, target.blocks = target.blocks, None
            try:
                blocks.release()
            finally:
                if target.name != self.agent_name:
                    agent.remove_remote_agent(target.name)

        try:
            await self._thread.call(forget, f"forget {target.name}")
        except FabricError as error:
            # After an endpoint error the library may have dropped it by itself; anything else is worth hearing.
            if not isinstance(error.__cause__, errors):
                raise
        finally:
            if self._targets.get(target.name) is target:
                del self._targets[target.name]

    async def sever(self, description: bytes) -> None:
        """See `transport.fabric.Fabric`. A dead process copies no more (CMA, cuda_ipc), but over TCP its last bytes may
        wait in a socket that UCX reads when polled: so it is polled hard until that has long been read. That is an
        observation, not a promise of the library."""
        _read_description(description)

        def drain(agent: Any) -> None:
            end = time.monotonic() + DRAIN_S
            while time.monotonic() < end:
                agent.get_new_notifs()

        await self._thread.call(drain, "sever")

    async def aclose(self) -> None:
        """Ends the owner thread; what is in flight fails. Idempotent."""
        for target in self._targets.values():
            target.forgotten = True
        await self._thread.stop()


def _make_key(target: NixlTarget, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> _Key:
    return target, tuple(local_blocks), tuple(remote_blocks)


def _read_description(description: bytes) -> _Description:
    if len(description) > DESCRIPTION_LIMIT:
        raise FabricError(f"description of {len(description)} bytes (limit {DESCRIPTION_LIMIT})")
    try:
        return unpack_struct(description, _Description, bin_limit=DESCRIPTION_LIMIT)
    except (ValueError, TypeError) as error:
        raise FabricError(f"not a description of a NIXL fabric: {error}") from None


def _list_blocks(table: BlockTable, device: int) -> Any:
    """NIXL's compressed form, one row per run: uint64[runs, 5] (address, length, device, stride, count)."""
    rows = [(run.address, run.block_bytes, device, run.block_bytes, run.count) for run in table.runs]
    return np.array(rows, np.uint64)


@asynccontextmanager
async def open_nixl_fabric(
    name: str,
    *,
    devices: str = "lo",
    tls: str | None = None,
    user_timeout_s: int = 5,
    device: int | None = None,
    receives: bool = True,
    on_thread_start: Callable[[], None] | None = None,
) -> AsyncIterator[NixlFabric]:
    """A NIXL fabric for as long as the block runs.

    Args:
        name: of this process, for logs; the agent's own name is unique per life.
        devices: network devices that UCX may listen on and use. By default it would take every one of the host.
        tls: one UCX transport to force (`tcp`); None lets UCX choose (shared memory copies within a host).
        user_timeout_s: seconds after which TCP gives a silent host up.
        device: None for host memory, else the CUDA device that the arena is on.
        receives: whether peers push to us. An idle fabric that receives is polled: when a peer on this host has to wait
            for it, and now and then.
        on_thread_start: runs first in the owner thread: select the CUDA device here, before any NIXL call.

    Raises:
        FabricError: NIXL is missing or its UCX backend does not start.
    """
    try:
        nixl = load_nixl()
    except ImportError as error:
        raise FabricError(f"NIXL can not be imported: {error}") from error
    agent_name = f"{name}-{os.getpid()}-{secrets.token_hex(6)}"
    config = f"NET_DEVICES={devices},TCP_USER_TIMEOUT={user_timeout_s}s"
    if tls is not None:
        config += f",TLS={tls}"

    def make_agent() -> Any:
        if on_thread_start is not None:
            on_thread_start()
        agent = nixl.api.nixl_agent(
            agent_name, nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[], capture_telemetry=True)
        )
        # `peer` makes UCX report a dead peer instead of waiting for it.
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "engine_config": config})
        return agent

    thread = AgentThread(agent_name, make_agent, nixl.errors, receives=receives)
    fabric = NixlFabric(nixl, thread, agent_name, device, "nixl/UCX" if tls is None else f"nixl/UCX:{tls}")
    try:
        await thread.start()
        yield fabric
    finally:
        await fabric.aclose()
