"""FrameLink (asyncio) against FrameStream (trio) over a real unix socket: same frames, same words for errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio

from transport.errors import Overflow, PeerGone, RemoteProtocolError
from transport.link import FrameLink, open_unix_link
from transport.messages import HEAD_FROM_CLIENT, CancelRequest, Drain, Sampling, Submit
from transport.stream import FrameStream
from transport.unix import open_unix_listener
from transport.wire import Frame

Listening = tuple[str, Callable[[], Awaitable[FrameStream]]]


@pytest.fixture
async def listening(tmp_path: Path) -> AsyncIterator[Listening]:
    path = str(tmp_path / "head.sock")
    async with await open_unix_listener(path) as listener:

        async def accept() -> FrameStream:
            return FrameStream(
                await listener.accept(), accepts=HEAD_FROM_CLIENT, out_limit_bytes=8 << 20, stall_s=5, name="link"
            )

        yield path, accept


async def dial(path: str, limit: int = 8 << 20, stall_s: float = 5) -> FrameLink:
    return await open_unix_link(path, accepts=HEAD_FROM_CLIENT, out_limit_bytes=limit, stall_s=stall_s, name="head")


async def in_asyncio(body: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await body()

    await trio.to_thread.run_sync(asyncio.run, run())


def make_frames() -> list[tuple[Submit, bytes]]:
    rng = random.Random(3)
    return [(Submit(i, 1, 0, Sampling()), rng.randbytes(4 * rng.choice([0, 9, 20_000, 200_000]))) for i in range(50)]


async def test_frames_cross_in_both_directions_whole_and_in_order(listening: Listening) -> None:
    path, accept = listening
    frames = make_frames()
    here: list[Frame] = []
    there: list[Frame] = []

    async def client() -> None:
        link = await dial(path)
        for message, blob in frames:
            await link.send(message, blob)
        while len(there) < len(frames):
            there.extend(await link.receive())
        await link.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_asyncio, client)
        async with await accept() as stream:
            while len(here) < len(frames):
                here.extend(await stream.receive())
            async with trio.open_nursery() as writing:  # whoever wants all to be sent lets the writer return
                writing.start_soon(stream.run_writer)
                for message, blob in frames:
                    await stream.send(message, blob)
                stream.close()
            with pytest.raises(PeerGone, match=r"link: end of stream$"):
                await stream.receive()
    assert [(f.message, bytes(f.blob)) for f in here] == frames
    assert [(f.message, bytes(f.blob)) for f in there] == frames


async def test_a_cancelled_receive_loses_nothing(listening: Listening) -> None:
    path, accept = listening
    frames = make_frames()
    got: list[Frame] = []
    cancels = 0

    async def client() -> None:
        nonlocal cancels
        link = await dial(path)
        while len(got) < len(frames):
            try:
                async with asyncio.timeout(0.0005 if len(got) % 3 else 5):
                    got.extend(await link.receive())
            except TimeoutError:
                cancels += 1
        await link.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_asyncio, client)
        async with await accept() as stream:
            async with trio.open_nursery() as writing:
                writing.start_soon(stream.run_writer)
                for message, blob in frames:
                    await stream.send(message, blob)
                    await trio.sleep(0.001)
                stream.close()
            with pytest.raises(PeerGone):
                await stream.receive()
    assert [(f.message, bytes(f.blob)) for f in got] == frames
    assert cancels > 0


async def test_violations_and_torn_frames_are_named_alike(listening: Listening) -> None:
    path, accept = listening
    seen: list[str] = []

    async def client() -> None:
        link = await dial(path)
        assert [f.message for f in await link.receive()] == [CancelRequest(1)]
        with pytest.raises(RemoteProtocolError, match=r"kind 29 \(Drain\) is not accepted on this link"):
            await link.receive()
        await link.aclose()
        link = await dial(path)
        with pytest.raises(PeerGone, match="head: end of stream inside a frame"):
            await link.receive()
        with pytest.raises(PeerGone, match="head: end of stream inside a frame"):
            link.post(CancelRequest(1))
        await link.aclose()
        seen.append("done")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_asyncio, client)
        async with await accept() as stream:
            stream.post(CancelRequest(1))
            stream.post(Drain())
            stream.close()
            await stream.run_writer()
            with pytest.raises(PeerGone):
                await stream.receive()
        async with await accept() as stream:
            await stream._stream.send_all(b"\x01\0\0\0\0")
    assert seen == ["done"]


async def test_a_head_that_does_not_read_fills_the_queue_and_is_gone(listening: Listening) -> None:
    path, accept = listening
    done = trio.Event()

    async def client() -> None:
        link = await dial(path, limit=2_000_000, stall_s=0.1)
        with pytest.raises(Overflow, match=r"send queue of head \(bytes\) is full \(limit 2000000\)"):
            for i in range(20):
                link.post(Submit(i, 1, 0, Sampling()), bytes(400_000))
        assert 1_000_000 < link.pending_bytes <= 2_000_000
        with pytest.raises(PeerGone, match=r"head: does not read: queue still full after 0.1 s"):
            await link.send(CancelRequest(1))
        await link.aclose()

    async def run_client() -> None:
        await in_asyncio(client)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_client)
        async with await accept():
            await done.wait()


async def test_dialling_where_nobody_listens_is_peer_gone(tmp_path: Path) -> None:
    async def client() -> None:
        with pytest.raises(PeerGone, match="No such file"):
            await dial(str(tmp_path / "none.sock"))

    await in_asyncio(client)
