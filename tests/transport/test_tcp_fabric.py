"""TcpFabric against strangers and liars: who does not know the secret, or lies about sizes, writes nothing."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import numpy as np
import pytest
import trio

from transport import tcp_arena
from transport.errors import FabricError
from transport.fabric import BlockRun
from transport.tcp_fabric import TcpFabric, open_tcp_fabric

SIZE, COUNT = 1024, 16
HEADER = struct.Struct("<IIQ")


@asynccontextmanager
async def victim() -> AsyncIterator[tuple[TcpFabric, np.ndarray, tuple[str, int], bytes]]:
    async with open_tcp_fabric("victim") as fabric:
        memory = np.zeros(SIZE * COUNT, np.uint8)
        await fabric.register([BlockRun(memory.ctypes.data, SIZE, COUNT)])
        _, _, _, host, port, secret, _ = msgpack.unpackb(fabric.describe())
        yield fabric, memory, (host, port), secret


async def talk(address: tuple[str, int], data: bytes) -> bytes:
    """Sends, then reads to the end of the stream."""
    answer = b""
    with trio.fail_after(5):
        async with await trio.open_tcp_stream(*address) as stream:
            try:
                await stream.send_all(data)
                while part := await stream.receive_some():
                    answer += part
            except trio.BrokenResourceError:
                pass  # refused while we were still sending
    return answer


def transfer(count: int, num_bytes: int, blocks: list[int], body: bytes = b"\xee" * SIZE * 4) -> bytes:
    return HEADER.pack(1, count, num_bytes) + struct.pack(f"<{len(blocks)}i", *blocks) + body


async def test_a_stranger_without_the_secret_learns_and_writes_nothing() -> None:
    async with victim() as (_, memory, address, secret):
        wrong = bytes([secret[0] ^ 1]) + secret[1:]
        for hello in (b"CPFB\x01" + wrong, b"CPFB\x01" + bytes(32), b"CPFB\x02" + secret, b"GET / HTTP/1.1\r\n" * 9):
            assert await talk(address, hello + bytes(32) + transfer(1, SIZE, [0])) == b""
        assert not memory.any()


@pytest.mark.parametrize(
    ("count", "num_bytes", "blocks"),
    [
        (1, SIZE, [COUNT]),
        (1, SIZE, [-1]),
        (1, SIZE + 1, [0]),
        (1, SIZE - 1, [0]),
        (2, SIZE, [0, 1]),
        (2, 2 * SIZE, [3, 3]),
        (0, 0, []),
        (2**32 - 1, 2**63, [0]),
        (COUNT + 1, SIZE, [0]),
    ],
)
async def test_a_pusher_that_lies_is_cut_off_before_a_byte_lands(count: int, num_bytes: int, blocks: list[int]) -> None:
    async with victim() as (_, memory, address, secret):
        hello = b"CPFB\x01" + secret + bytes(32)
        assert await talk(address, hello + transfer(count, num_bytes, blocks)) == b"ok\x01\n"
        assert not memory.any()


async def test_an_honest_pusher_is_answered_after_its_bytes_are_in_memory() -> None:
    async with victim() as (_, memory, address, secret):
        with trio.fail_after(5):
            async with await trio.open_tcp_stream(*address) as stream:
                await stream.send_all(b"CPFB\x01" + secret + bytes(32) + transfer(2, 2 * SIZE, [3, 5], b""))
                await stream.send_all(b"\xee" * SIZE)
                assert await stream.receive_some() == b"ok\x01\n"
                await stream.send_all(b"\xdd" * SIZE)
                assert await stream.receive_some() == struct.pack("<I", 1)
        assert (memory[3 * SIZE : 4 * SIZE] == 0xEE).all()
        assert (memory[5 * SIZE : 6 * SIZE] == 0xDD).all()
        assert np.count_nonzero(memory) == 2 * SIZE


async def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_arena, "HANDSHAKE_S", 0.05)
    async with victim() as (_, _, address, _):
        assert await talk(address, b"CPFB") == b""


async def test_nobody_listening_is_named() -> None:
    async with open_tcp_fabric("here") as here:
        async with victim() as (fabric, _, _, _):
            description = fabric.describe()
        with pytest.raises(FabricError, match=r"connect to victim-\w+ at 127\.0\.0\.1:\d+"):
            await here.connect(description)


async def test_a_severed_pusher_can_not_come_back() -> None:
    async with victim() as (fabric, memory, _, _), open_tcp_fabric("dead") as dead:
        await dead.register([BlockRun(memory.ctypes.data, SIZE, COUNT)])
        await fabric.sever(dead.describe())
        with pytest.raises(FabricError, match="connect to victim"):
            await dead.connect(fabric.describe())


async def test_a_users_error_comes_out_of_the_block_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with victim():
            raise KeyError("mine")
