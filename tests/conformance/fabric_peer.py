"""The other end of the fabric conformance tests: a process with an arena that does what it is told on a socket.

Run as `python fabric_peer.py ENGINE FD`. Requests and answers are MessagePack arrays behind a four-byte length.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgpack
import numpy as np
import trio

from transport.errors import EngineError
from transport.fabric import BlockRun, Fabric, Target
from transport.nixl_fabric import open_nixl_fabric
from transport.tcp_fabric import open_tcp_fabric

POISON = 0xA5
GUARD = 4096
PAGE_BYTES, NUM_PAGES = 16_384, 64
SLAB_BYTES, NUM_SLABS = 1_000, 8
BIG_BYTES, NUM_BIG = 16 << 20, 1
NUM_BLOCKS = NUM_PAGES + NUM_SLABS + NUM_BIG


def open_fabric(engine: str, name: str) -> AbstractAsyncContextManager[Fabric]:
    if engine == "tcp":
        return open_tcp_fabric(name)
    return open_nixl_fabric(name, tls="tcp" if engine == "nixl-tcp" else None)


class Arena:
    """Three runs (pages, slabs, a large block) with guards around each, all poisoned at first."""

    def __init__(self) -> None:
        sizes = [PAGE_BYTES * NUM_PAGES, SLAB_BYTES * NUM_SLABS, BIG_BYTES * NUM_BIG]
        self.memory = np.full(sum(sizes) + 4 * GUARD, POISON, np.uint8)
        base = self.memory.ctypes.data
        self.starts = [GUARD, 2 * GUARD + sizes[0], 3 * GUARD + sizes[0] + sizes[1]]
        self.runs = [
            BlockRun(base + self.starts[0], PAGE_BYTES, NUM_PAGES),
            BlockRun(base + self.starts[1], SLAB_BYTES, NUM_SLABS),
            BlockRun(base + self.starts[2], BIG_BYTES, NUM_BIG),
        ]

    def block(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        for start, run in zip(self.starts, self.runs, strict=True):
            if number < run.count:
                return self.memory[start + number * run.block_bytes :][: run.block_bytes]
            number -= run.count
        raise IndexError(number)

    def fill(self, seed: int) -> None:
        """Every block random, guards left alone."""
        for start, run in zip(self.starts, self.runs, strict=True):
            size = run.block_bytes * run.count
            values = np.random.default_rng([seed, start]).bytes(size)
            self.memory[start : start + size] = np.frombuffer(values, np.uint8)

    def poison(self) -> None:
        self.memory[:] = POISON

    def untouched(self, except_blocks: Sequence[int] = ()) -> bool:
        """Whether all bytes but those of the blocks named still are poison."""
        touched = self.memory != POISON
        for number in except_blocks:
            first = self.block(number).ctypes.data - self.memory.ctypes.data
            touched[first : first + self.block(number).size] = False
        return not touched.any()


async def receive_exactly(sock: trio.socket.SocketType, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = await sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


async def receive_value(sock: trio.socket.SocketType) -> Any:
    (size,) = struct.unpack("<I", await receive_exactly(sock, 4))
    return msgpack.unpackb(await receive_exactly(sock, size))


async def send_value(sock: trio.socket.SocketType, value: Any) -> None:
    data = memoryview(struct.pack("<I", len(packed := msgpack.packb(value))) + packed)
    while data:
        data = data[await sock.send(data) :]


class Peer:
    """The commands; each is a method."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.arena = Arena()
        self.targets: list[Target] = []

    async def describe(self) -> bytes:
        return self.fabric.describe()

    async def fill(self, seed: int) -> None:
        self.arena.fill(seed)

    async def poison(self) -> None:
        self.arena.poison()

    async def read(self, number: int) -> bytes:
        return self.arena.block(number).tobytes()

    async def untouched(self, except_blocks: list[int]) -> bool:
        return self.arena.untouched(except_blocks)

    async def connect(self, description: bytes) -> int:
        self.targets.append(await self.fabric.connect(description))
        return len(self.targets) - 1

    async def push(self, target: int, local: list[int], remote: list[int]) -> int:
        report = await self.fabric.wait(self.fabric.push(self.targets[target], local, remote))
        return report.num_bytes

    async def forget(self, target: int) -> None:
        await self.fabric.forget(self.targets[target])

    async def sever(self, description: bytes) -> None:
        await self.fabric.sever(description)


async def serve(engine: str, fd: int) -> None:
    sock = trio.socket.from_stdlib_socket(socket.socket(fileno=fd))
    async with open_fabric(engine, "peer") as fabric:
        peer = Peer(fabric)
        await fabric.register(peer.arena.runs)
        while True:
            try:
                command, *arguments = await receive_value(sock)
            except EOFError:
                return
            try:
                answer = ["ok", await getattr(peer, command)(*arguments)]
            except EngineError as error:
                answer = ["error", f"{type(error).__name__}: {error}"]
            await send_value(sock, answer)


if __name__ == "__main__":
    # Die with the test run, however it ends: no peer may be left over.
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    trio.run(serve, sys.argv[1], int(sys.argv[2]))
