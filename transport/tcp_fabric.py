"""TcpFabric: pushes over plain TCP sockets, where NIXL is missing. Same contract, evented instead of polled.

One connection per (pusher, target), opened by `connect`; its protocol is in `tcp_arena`, which has the other end. The
end of a connection fails every transfer that was not answered; some of its bytes may have landed.
"""

from __future__ import annotations

import collections
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import msgspec
import trio

from transport.background import open_background
from transport.blocks import RUNS_LIMIT, BlockTable, Indices, count_descriptors, pair_blocks
from transport.errors import FabricError
from transport.fabric import BlockRun, Target, Transfer, TransferReport
from transport.tcp_arena import ANSWER, HANDSHAKE_S, HEADER, MAGIC, SECRET_BYTES, WELCOME, TcpArena, digest_name
from transport.tcp_bytes import prepare_socket, receive_exactly, send_views
from transport.wire import unpack_struct

DESCRIPTION_LIMIT = 64 << 10
TRANSFERS_LIMIT = 4096
"""Transfers of one fabric that are not answered, queued ones included."""
WINDOW = 16
"""Transfers on one connection that are sent and not answered: enough to hide the answer's way back."""

_Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    engine: Literal["tcp"]
    version: Literal[1]
    name: Annotated[str, msgspec.Meta(max_length=256)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    runs: Annotated[tuple[tuple[_Word, _Word, _Word], ...], msgspec.Meta(max_length=RUNS_LIMIT)]


class TcpTransfer:
    """One push: queued, sent, then answered or failed."""

    def __init__(self, target: TcpTarget, ours: Indices, theirs: Indices, num_bytes: int) -> None:
        self.target = target
        self.num_bytes = num_bytes
        self.ours = ours
        self.theirs = theirs
        self.done = trio.Event()
        self.report: TransferReport | None = None
        self.failure: str | None = None
        self.begun = time.perf_counter()
        self.post_us = 0


class TcpTarget:
    """A peer with its connection."""

    def __init__(self, name: str, table: BlockTable, sock: trio.socket.SocketType) -> None:
        self.name = name
        self.table = table
        self.sock = sock
        self.queue: collections.deque[TcpTransfer] = collections.deque()
        self.sent: collections.deque[TcpTransfer] = collections.deque()
        self.work = trio.Event()
        self.window = trio.Semaphore(WINDOW)
        self.forgotten = False
        self.failure: str | None = None


class TcpFabric:
    """See `transport.fabric.Fabric`. Made by `open_tcp_fabric`; its tasks live in the nursery given."""

    engine = "tcp"

    def __init__(
        self, name: str, nursery: trio.Nursery, listener: trio.socket.SocketType, user_timeout_s: float
    ) -> None:
        self.name = name
        self._nursery = nursery
        self._listener = listener
        self._user_timeout_s = user_timeout_s
        self._arena: TcpArena | None = None
        self._targets: dict[str, TcpTarget] = {}
        self._num_transfers = 0
        self._closed = False

    # ------------------------------------------------------------ Fabric

    async def register(self, runs: Sequence[BlockRun]) -> None:
        await trio.lowlevel.checkpoint()
        if self._arena is not None:
            raise FabricError("memory is registered once per fabric")
        self._arena = TcpArena(self._listener, BlockTable(runs), self._user_timeout_s)
        self._nursery.start_soon(self._arena.run)

    def describe(self) -> bytes:
        if self._arena is None:
            raise FabricError("describe before register")
        host, port = self._listener.getsockname()
        runs = tuple((run.address, run.block_bytes, run.count) for run in self._arena.table.runs)
        description = _Description("tcp", 1, self.name, host, port, self._arena.secret, runs)
        return msgspec.msgpack.encode(description)

    async def connect(self, description: bytes) -> Target:
        peer = _read_description(description)
        if self._closed:
            raise FabricError(f"{self.name}: the fabric is closed")
        if peer.name in self._targets:
            raise FabricError(f"{peer.name} is connected already; forget it first")
        table = BlockTable([BlockRun(*run) for run in peer.runs])
        sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            prepare_socket(sock, self._user_timeout_s)
            with trio.fail_after(HANDSHAKE_S):
                await sock.connect((peer.host, peer.port))
                await send_views(sock, [memoryview(MAGIC + peer.secret + digest_name(self.name))])
                if bytes(await receive_exactly(sock, len(WELCOME))) != WELCOME:
                    raise FabricError(f"{peer.name} at {peer.host}:{peer.port} does not speak this protocol")
        except (OSError, EOFError) as error:
            sock.close()
            raise FabricError(f"connect to {peer.name} at {peer.host}:{peer.port}: {error or 'refused'}") from error
        except trio.TooSlowError:
            sock.close()
            raise FabricError(f"connect to {peer.name}: no answer in {HANDSHAKE_S} s") from None
        except BaseException:
            sock.close()
            raise
        target = TcpTarget(peer.name, table, sock)
        self._targets[peer.name] = target
        self._nursery.start_soon(self._run_target, target)
        return target

    def push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        assert isinstance(target, TcpTarget)
        begun = time.perf_counter()
        if self._closed:
            raise FabricError(f"{self.name}: the fabric is closed")
        if target.forgotten:
            raise FabricError(f"{target.name} was forgotten")
        if self._arena is None:
            raise FabricError("push before register")
        if self._num_transfers >= TRANSFERS_LIMIT:
            raise FabricError(f"{self._num_transfers} transfers are in flight (limit {TRANSFERS_LIMIT})")
        ours, theirs, num_bytes = pair_blocks(self._arena.table, target.table, local_blocks, remote_blocks)
        transfer = TcpTransfer(target, ours, theirs, num_bytes)
        transfer.begun = begun
        self._num_transfers += 1
        if target.failure is not None:
            self._settle(transfer, target.failure)
        else:
            target.queue.append(transfer)
            target.work.set()
        transfer.post_us = round((time.perf_counter() - begun) * 1e6)
        return transfer

    def prepare_push(self, target: Target, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        """Nothing: to push takes nothing that could be done before."""

    def expect_push(self) -> None:
        """Nothing: the loop itself sends."""

    async def wait(self, transfer: Transfer) -> TransferReport:
        assert isinstance(transfer, TcpTransfer)
        await transfer.done.wait()
        if transfer.report is None:
            raise FabricError(f"push to {transfer.target.name} failed: {transfer.failure}")
        return transfer.report

    async def forget(self, target: Target) -> None:
        assert isinstance(target, TcpTarget)
        await trio.lowlevel.checkpoint()
        target.forgotten = True
        self._fail_target(target, "the peer was forgotten")
        if self._targets.get(target.name) is target:
            del self._targets[target.name]

    async def sever(self, description: bytes) -> None:
        name = _read_description(description).name
        await trio.lowlevel.checkpoint()
        if self._arena is not None:
            self._arena.sever(name)

    async def aclose(self) -> None:
        """Closes all connections; what is in flight fails. Idempotent."""
        self._closed = True
        self._nursery.cancel_scope.cancel()  # first, or the tasks would see their sockets close
        for target in list(self._targets.values()):
            self._fail_target(target, "the fabric was closed")
        self._targets.clear()
        self._listener.close()
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ pushing

    async def _run_target(self, target: TcpTarget) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_answers, target, nursery.cancel_scope)
            await self._send_transfers(target, nursery.cancel_scope)

    async def _send_transfers(self, target: TcpTarget, scope: trio.CancelScope) -> None:
        sequence = 0
        arena = self._arena
        assert arena is not None
        try:
            while True:
                await target.window.acquire()
                while not target.queue:
                    target.work = trio.Event()
                    await target.work.wait()
                transfer = target.queue.popleft()
                target.sent.append(transfer)
                sequence = (sequence + 1) & 0xFFFFFFFF
                head = HEADER.pack(sequence, transfer.theirs.size, transfer.num_bytes) + transfer.theirs.tobytes()
                ranges = arena.table.ranges(transfer.ours)
                body = [arena.views[run][at : at + length] for run, at, length in ranges]
                await send_views(target.sock, [memoryview(head), *body])
        except (OSError, trio.ClosedResourceError) as error:
            self._fail_target(target, _describe(error))
        scope.cancel()

    async def _read_answers(self, target: TcpTarget, scope: trio.CancelScope) -> None:
        expected = 0
        try:
            while True:
                (sequence,) = ANSWER.unpack(await receive_exactly(target.sock, ANSWER.size))
                expected = (expected + 1) & 0xFFFFFFFF
                if sequence != expected or not target.sent:
                    raise EOFError(f"answer {sequence} where {expected} was due")
                target.window.release()
                self._settle(target.sent.popleft(), None)
        except (OSError, EOFError, trio.ClosedResourceError) as error:
            self._fail_target(target, _describe(error))
        scope.cancel()

    def _settle(self, transfer: TcpTransfer, failure: str | None) -> None:
        self._num_transfers -= 1
        if failure is None:
            assert self._arena is not None
            table = self._arena.table
            sizes = table.sizes(transfer.ours)
            ours, theirs = table.addresses(transfer.ours), transfer.target.table.addresses(transfer.theirs)
            transfer.report = TransferReport(
                num_bytes=transfer.num_bytes,
                num_descriptors=count_descriptors(ours, theirs, sizes),
                post_us=transfer.post_us,
                transfer_us=round((time.perf_counter() - transfer.begun) * 1e6),
            )
        transfer.failure = failure
        transfer.done.set()

    def _fail_target(self, target: TcpTarget, why: str) -> None:
        if target.failure is None:
            target.failure = why
        target.sock.close()
        for transfers in (target.sent, target.queue):
            while transfers:
                self._settle(transfers.popleft(), target.failure)


def _read_description(description: bytes) -> _Description:
    if len(description) > DESCRIPTION_LIMIT:
        raise FabricError(f"description of {len(description)} bytes (limit {DESCRIPTION_LIMIT})")
    try:
        return unpack_struct(description, _Description, bin_limit=SECRET_BYTES)
    except (ValueError, TypeError) as error:
        raise FabricError(f"not a description of a TCP fabric: {error}") from None


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


@asynccontextmanager
async def open_tcp_fabric(name: str, *, host: str = "127.0.0.1", user_timeout_s: float = 5) -> AsyncIterator[TcpFabric]:
    """A TCP fabric for as long as the block runs.

    Args:
        name: of this process; a random part is added, so that each life has a name of its own.
        host: address to listen on, and told to peers.
        user_timeout_s: seconds after which a silent host counts as gone.
    """
    listener = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        await listener.bind((host, 0))
        listener.listen(128)
        async with open_background() as nursery:
            fabric = TcpFabric(f"{name}-{secrets.token_hex(6)}", nursery, listener, user_timeout_s)
            try:
                yield fabric
            finally:
                with trio.CancelScope(shield=True):
                    await fabric.aclose()
    finally:
        listener.close()
