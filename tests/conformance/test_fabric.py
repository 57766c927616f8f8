"""Fabric's contract: the same bodies over memory, TCP and NIXL (UCX's own choice, and forced to TCP).

The peer of a TCP or NIXL fabric is a process of its own, so that a crash of the library is a failed test.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conformance.fabric_peer import (
    BIG_BYTES,
    NUM_BLOCKS,
    NUM_PAGES,
    NUM_SLABS,
    PAGE_BYTES,
    SLAB_BYTES,
    Arena,
    Peer,
    open_fabric,
    receive_value,
    send_value,
)
from transport.errors import FabricError
from transport.fabric import BlockRun, Fabric, Target
from transport.memory_fabric import MemoryWorld
from transport.nixl_fabric import is_available

ROOT = Path(__file__).parents[2]
SLAB, BIG = NUM_PAGES, NUM_PAGES + NUM_SLABS
PROCESS_ENGINES = ["tcp", "nixl", "nixl-tcp"]

needs_nixl = pytest.mark.skipif(not is_available(), reason="no nixl wheel is installed")
ENGINES = [
    "memory",
    "tcp",
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("nixl-tcp", marks=needs_nixl),
]


class PeerError(Exception):
    """The peer's command raised this."""


class RemotePeer:
    """Commands to a peer process."""

    def __init__(self, engine: str) -> None:
        ours, theirs = socket.socketpair()
        script = str(Path(__file__).with_name("fabric_peer.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, engine, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        )
        theirs.close()
        self._socket = ours

    async def do(self, command: str, *arguments: Any) -> Any:
        copy = self._socket.dup()
        copy.setblocking(False)
        with trio.fail_after(30), trio.socket.from_stdlib_socket(copy) as sock:
            await send_value(sock, [command, *arguments])
            state, value = await receive_value(sock)
        if state != "ok":
            raise PeerError(value)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._socket.close()  # the peer ends at end of stream
        try:
            assert self.process.wait(timeout=20) in (0, -signal.SIGKILL)
        finally:
            self.process.kill()


class LocalPeer:
    """The same commands to a fabric of this process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def do(self, command: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._peer, command)(*arguments)
        except FabricError as error:
            raise PeerError(f"FabricError: {error}") from None


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, RemotePeer]]:
    """One long-lived peer per engine: starting one takes most of a test's time."""
    peers: dict[str, RemotePeer] = {}
    yield peers
    for peer in peers.values():
        peer.close()


@dataclasses.dataclass
class Pair:
    """A fabric of this process with its arena, connected to a peer whose arena is poisoned."""

    engine: str
    fabric: Fabric
    arena: Arena
    target: Target
    peer: RemotePeer | LocalPeer


@pytest.fixture(params=ENGINES)
async def pair(request: pytest.FixtureRequest, processes: dict[str, RemotePeer]) -> AsyncIterator[Pair]:
    async with open_pair(request.param, processes) as pair:
        yield pair


@asynccontextmanager
async def open_pair(engine: str, processes: dict[str, RemotePeer]) -> AsyncIterator[Pair]:
    peer: RemotePeer | LocalPeer
    async with AsyncExitStack() as stack:
        if engine == "memory":
            world = MemoryWorld(random.Random(1))
            fabric: Fabric = await stack.enter_async_context(world.open_fabric("here"))
            other = Peer(await stack.enter_async_context(world.open_fabric("there")))
            await other.fabric.register(other.arena.runs)
            peer = LocalPeer(other)
        else:
            if engine not in processes:
                processes[engine] = RemotePeer(engine)
            peer = processes[engine]
            fabric = await stack.enter_async_context(open_fabric(engine, "here"))
        arena = Arena()
        arena.fill(7)
        await fabric.register(arena.runs)
        await peer.do("poison")
        target = await fabric.connect(await peer.do("describe"))
        yield Pair(engine, fabric, arena, target, peer)


async def push(pair: Pair, local: list[int], remote: list[int]) -> int:
    with trio.fail_after(20):
        report = await pair.fabric.wait(pair.fabric.push(pair.target, local, remote))
    return report.num_bytes


async def check_arrived(pair: Pair, local: list[int], remote: list[int]) -> None:
    for ours, theirs in zip(local, remote, strict=True):
        assert await pair.peer.do("read", theirs) == pair.arena.block(ours).tobytes(), (ours, theirs)
    assert await pair.peer.do("untouched", remote)


async def test_a_push_that_was_expected_ends_as_any_other(pair: Pair) -> None:
    for number in range(3):
        pair.fabric.expect_push()
        if number:  # at the owner thread's rest, at its nap, and right before a push
            await trio.sleep(0.004 * (number - 1))
        await pair.fabric.wait(pair.fabric.push(pair.target, [number], [number]))
    pair.fabric.expect_push()  # and one that does not come


async def test_a_push_that_was_prepared_ends_as_any_other(pair: Pair) -> None:
    local, remote = [10, 11, SLAB + 2], [20, 21, SLAB + 7]
    pair.fabric.prepare_push(pair.target, local, remote)
    pair.fabric.prepare_push(pair.target, local, remote)
    await trio.sleep(0.002)
    assert await pair.peer.do("untouched", [])
    pair.arena.fill(9)  # what is there when it begins is what counts
    for _ in range(2):
        assert await push(pair, local, remote) == 2 * PAGE_BYTES + SLAB_BYTES
        await check_arrived(pair, local, remote)


async def test_prepared_pushes_that_do_not_come_or_can_not_change_nothing(pair: Pair) -> None:
    for block in range(NUM_PAGES):
        pair.fabric.prepare_push(pair.target, [block], [block])
    pair.fabric.prepare_push(pair.target, [1], [NUM_BLOCKS])
    with pytest.raises(FabricError, match="outside the table"):
        pair.fabric.push(pair.target, [1], [NUM_BLOCKS])
    await push(pair, [0, 2], [0, 2])
    await push(pair, [NUM_PAGES - 1], [NUM_PAGES - 1])
    await check_arrived(pair, [0, 2, NUM_PAGES - 1], [0, 2, NUM_PAGES - 1])
    await pair.fabric.forget(pair.target)
    pair.fabric.prepare_push(pair.target, [1], [1])
    with pytest.raises(FabricError, match="was forgotten"):
        pair.fabric.push(pair.target, [1], [1])
    pair.target = await pair.fabric.connect(await pair.peer.do("describe"))
    pair.fabric.prepare_push(pair.target, [3], [3])


async def test_bytes_arrive_where_they_were_sent_and_nowhere_else(pair: Pair) -> None:
    assert await push(pair, [3], [5]) == PAGE_BYTES
    await check_arrived(pair, [3], [5])
    assert await push(pair, [4], [6]) == PAGE_BYTES
    await check_arrived(pair, [3, 4], [5, 6])


async def test_the_source_is_only_read(pair: Pair) -> None:
    before = pair.arena.memory.copy()
    await push(pair, list(range(10)), list(range(10)))
    assert (pair.arena.memory == before).all()


async def test_first_and_last_blocks_of_every_run(pair: Pair) -> None:
    edges = [0, NUM_PAGES - 1, SLAB, SLAB + NUM_SLABS - 1]
    assert await push(pair, edges, edges) == 2 * PAGE_BYTES + 2 * SLAB_BYTES
    await check_arrived(pair, edges, edges)


async def test_pages_and_slabs_go_in_one_push_and_the_report_adds_up(pair: Pair) -> None:
    local, remote = [10, 11, 12, SLAB + 2], [20, 21, 22, SLAB + 7]
    with trio.fail_after(20):
        transfer = pair.fabric.push(pair.target, local, remote)
        report = await pair.fabric.wait(transfer)
    assert transfer.num_bytes == report.num_bytes == 3 * PAGE_BYTES + SLAB_BYTES
    assert report.num_descriptors == 2  # three neighbouring pages are one write
    assert 0 <= report.post_us <= 10_000_000
    assert 0 <= report.transfer_us <= 20_000_000
    await check_arrived(pair, local, remote)


async def test_shuffled_blocks(pair: Pair) -> None:
    rng = random.Random(5)
    local, remote = list(range(NUM_PAGES)), list(range(NUM_PAGES))
    rng.shuffle(local)
    rng.shuffle(remote)
    assert await push(pair, local, remote) == NUM_PAGES * PAGE_BYTES
    await check_arrived(pair, local, remote)


async def test_one_source_block_may_go_to_several_places(pair: Pair) -> None:
    await push(pair, [9, 9, 9], [1, 3, 2])
    await check_arrived(pair, [9, 9, 9], [1, 3, 2])


async def test_many_pushes_at_once_waited_for_in_any_order(pair: Pair) -> None:
    rng = random.Random(6)
    blocks = list(range(NUM_PAGES + NUM_SLABS))
    transfers = [pair.fabric.push(pair.target, [block], [block]) for block in blocks]
    rng.shuffle(transfers)
    total = 0
    with trio.fail_after(20):
        for transfer in transfers:
            total += (await pair.fabric.wait(transfer)).num_bytes
    assert total == NUM_PAGES * PAGE_BYTES + NUM_SLABS * SLAB_BYTES
    await check_arrived(pair, blocks, blocks)


async def test_a_large_block(pair: Pair) -> None:
    assert await push(pair, [BIG, 2], [BIG, 3]) == BIG_BYTES + PAGE_BYTES
    await check_arrived(pair, [BIG, 2], [BIG, 3])


async def test_a_cancelled_wait_can_be_repeated(pair: Pair) -> None:
    transfer = pair.fabric.push(pair.target, [BIG, 1], [BIG, 1])
    with trio.CancelScope() as scope:
        scope.cancel()
        await pair.fabric.wait(transfer)
    assert scope.cancelled_caught
    with trio.fail_after(20):
        report = await pair.fabric.wait(transfer)
        assert await pair.fabric.wait(transfer) == report
    assert report.num_bytes == BIG_BYTES + PAGE_BYTES
    await check_arrived(pair, [BIG, 1], [BIG, 1])


async def test_several_tasks_may_wait_for_one_transfer(pair: Pair) -> None:
    transfer = pair.fabric.push(pair.target, [1], [1])
    reports = []

    async def wait() -> None:
        reports.append(await pair.fabric.wait(transfer))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
    assert len(reports) == 3 and reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        ([1], [NUM_BLOCKS], f"remote block {NUM_BLOCKS} is outside the table of {NUM_BLOCKS} blocks"),
        ([NUM_BLOCKS + 5], [1], f"local block {NUM_BLOCKS + 5} is outside"),
        ([-1], [1], "local block -1 is outside"),
        ([1], [-1], "remote block -1 is outside"),
        ([2**40], [1], "local block 1099511627776 is outside"),
        ([1], [SLAB], f"local block 1 has {PAGE_BYTES} bytes, remote block {SLAB} has {SLAB_BYTES}"),
        ([1, SLAB], [SLAB, 1], "bytes"),
        ([1, 2], [1], "2 local blocks for 1 remote"),
        ([1, 2, 3], [7, 8, 7], "remote block 7 is named twice"),
        ([], [], "non-empty"),
        ([1.5], [1], "integers"),
    ],
)
async def test_an_invalid_push_is_refused_before_anything_moves(
    pair: Pair, local: list[int], remote: list[int], message: str
) -> None:
    with pytest.raises(FabricError, match=message):
        pair.fabric.push(pair.target, local, remote)
    await push(pair, [0], [0])
    await check_arrived(pair, [0], [0])


async def test_what_is_no_description_is_refused(pair: Pair) -> None:
    good = pair.fabric.describe()
    assert len(good) <= 64 << 10
    for bad in (b"", b"\x90", b"hello", good[:-3], good + b"\0", b"\x91" * 5000, bytes(70_000)):
        with pytest.raises(FabricError, match="description"):
            await pair.fabric.connect(bad)


async def test_connecting_twice_is_refused(pair: Pair) -> None:
    with pytest.raises(FabricError, match="connected already"):
        await pair.fabric.connect(await pair.peer.do("describe"))


async def test_a_forgotten_peer_takes_no_pushes_until_it_is_connected_again(pair: Pair) -> None:
    await push(pair, [1], [1])
    await pair.fabric.forget(pair.target)
    await pair.fabric.forget(pair.target)
    with pytest.raises(FabricError, match="was forgotten"):
        pair.fabric.push(pair.target, [2], [2])
    pair.target = await pair.fabric.connect(await pair.peer.do("describe"))
    await push(pair, [3], [3])
    await check_arrived(pair, [1, 3], [1, 3])


async def test_both_directions(pair: Pair) -> None:
    await pair.peer.do("fill", 11)
    pair.arena.poison()
    index = await pair.peer.do("connect", pair.fabric.describe())
    assert await pair.peer.do("push", index, [4, SLAB], [9, SLAB + 1]) == PAGE_BYTES + SLAB_BYTES
    assert pair.arena.block(9).tobytes() == await pair.peer.do("read", 4)
    assert pair.arena.block(SLAB + 1).tobytes() == await pair.peer.do("read", SLAB)
    assert pair.arena.untouched([9, SLAB + 1])
    with pytest.raises(PeerError, match="FabricError: remote block"):
        await pair.peer.do("push", index, [4], [NUM_BLOCKS])
    await pair.peer.do("forget", index)


async def test_a_fabric_can_push_to_itself(pair: Pair) -> None:
    target = await pair.fabric.connect(pair.fabric.describe())
    with trio.fail_after(20):
        await pair.fabric.wait(pair.fabric.push(target, [1, SLAB], [2, SLAB + 1]))
    assert (pair.arena.block(1) == pair.arena.block(2)).all()
    assert (pair.arena.block(SLAB) == pair.arena.block(SLAB + 1)).all()
    await pair.fabric.forget(target)


async def test_a_closed_fabric_refuses_everything_and_the_body_goes_on(pair: Pair) -> None:
    transfer = pair.fabric.push(pair.target, [1], [1])
    await pair.fabric.aclose()
    await pair.fabric.aclose()
    with pytest.raises(FabricError):
        pair.fabric.push(pair.target, [1], [1])
    with trio.move_on_after(5) as scope:
        try:
            await pair.fabric.wait(transfer)
        except FabricError as error:
            assert "closed" in str(error)  # it may also have ended before
    assert not scope.cancelled_caught
    await trio.lowlevel.checkpoint()


async def test_the_memory_is_registered_once(pair: Pair) -> None:
    with pytest.raises(FabricError, match="once"):
        await pair.fabric.register([BlockRun(pair.arena.memory.ctypes.data, 1, 1)])


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_dead_peer_fails_pushes_and_its_next_life_can_be_connected(
    engine: str, processes: dict[str, RemotePeer]
) -> None:
    if engine == "memory":
        world = MemoryWorld(random.Random(1))
        async with world.open_fabric("here") as fabric:
            arena, first, second = Arena(), Arena(), Arena()
            arena.fill(1)
            await fabric.register(arena.runs)
            async with world.open_fabric("there") as there:
                await there.register(first.runs)
                target = await fabric.connect(there.describe())
                await fabric.wait(fabric.push(target, [1], [1]))
                running = fabric.push(target, [2], [2])
            with pytest.raises(FabricError):
                await fabric.wait(running)
            with pytest.raises(FabricError):
                await fabric.wait(fabric.push(target, [3], [3]))
            assert first.untouched([1])
            await fabric.forget(target)
            async with world.open_fabric("there") as there:
                await there.register(second.runs)
                target = await fabric.connect(there.describe())
                await fabric.wait(fabric.push(target, [3], [3]))
            assert second.untouched([3]) and (second.block(3) == arena.block(3)).all()
        return
    victim = RemotePeer(engine)
    try:
        own: dict[str, RemotePeer] = {engine: victim}
        async with open_pair(engine, own) as pair:
            await push(pair, [1], [1])
            await pair.peer.do("read", 1)
            victim.kill()
            with trio.fail_after(8):
                for _ in range(2):
                    with pytest.raises(FabricError, match=r"push to peer-.* failed"):
                        await pair.fabric.wait(pair.fabric.push(pair.target, [BIG, 2], [BIG, 2]))
            await pair.fabric.forget(pair.target)
            pair.peer = processes[engine]
            await pair.peer.do("poison")
            pair.target = await pair.fabric.connect(await pair.peer.do("describe"))
            await push(pair, [3, SLAB], [3, SLAB])
            await check_arrived(pair, [3, SLAB], [3, SLAB])
    finally:
        victim.close()


@pytest.mark.parametrize("engine", ENGINES[1:])
async def test_a_peer_killed_in_the_middle_fails_what_is_in_flight(engine: str) -> None:
    victim = RemotePeer(engine)
    try:
        async with open_pair(engine, {engine: victim}) as pair:
            await push(pair, [1], [1])
            transfers = [pair.fabric.push(pair.target, [BIG, 1], [BIG, 1]) for _ in range(40)]
            victim.process.kill()
            failures = 0
            with trio.fail_after(10):
                for transfer in transfers:
                    try:
                        await pair.fabric.wait(transfer)
                    except FabricError:
                        failures += 1
            assert failures > 0
            with trio.fail_after(5):
                await pair.fabric.forget(pair.target)
    finally:
        victim.close()


@pytest.mark.parametrize("engine", ENGINES[1:])
async def test_a_stopped_peer_only_stops_the_waiting(engine: str, processes: dict[str, RemotePeer]) -> None:
    async with open_pair(engine, processes) as pair:
        assert isinstance(pair.peer, RemotePeer)
        await push(pair, [1], [1])
        pair.peer.process.send_signal(signal.SIGSTOP)
        try:
            transfer = pair.fabric.push(pair.target, [BIG], [BIG])
            with trio.move_on_after(0.1):
                await pair.fabric.wait(transfer)
        finally:
            pair.peer.process.send_signal(signal.SIGCONT)
        with trio.fail_after(20):
            assert (await pair.fabric.wait(transfer)).num_bytes == BIG_BYTES
        await check_arrived(pair, [1, BIG], [1, BIG])


@pytest.mark.parametrize("engine", ENGINES[1:])
async def test_forgetting_a_stopped_peer_ends_the_waiting_for_it(engine: str) -> None:
    victim = RemotePeer(engine)
    try:
        async with open_pair(engine, {engine: victim}) as pair:
            await push(pair, [1], [1])
            victim.process.send_signal(signal.SIGSTOP)
            transfers = [pair.fabric.push(pair.target, [BIG], [BIG]) for _ in range(8)]
            with trio.fail_after(10):
                await pair.fabric.forget(pair.target)
                for transfer in transfers:
                    try:
                        await pair.fabric.wait(transfer)
                    except FabricError as error:
                        assert "failed" in str(error)
            with pytest.raises(FabricError, match="was forgotten"):
                pair.fabric.push(pair.target, [1], [1])
    finally:
        victim.process.kill()
        victim.close()


async def test_nothing_of_a_severed_peer_lands(pair: Pair) -> None:
    """The peer is told that we are dead: so whatever of ours it still finds must be ignored (TCP, memory)."""
    await push(pair, [1], [1])
    await pair.peer.do("sever", pair.fabric.describe())
    if pair.engine.startswith("nixl"):
        return  # sever only waits there: a dead process writes no more, and this one lives
    with trio.fail_after(5):
        transfer = pair.fabric.push(pair.target, [2], [2])
        if pair.engine == "tcp":
            with pytest.raises(FabricError, match="closed"):
                await pair.fabric.wait(transfer)
        else:
            await pair.fabric.wait(transfer)
    await check_arrived(pair, [1], [1])
