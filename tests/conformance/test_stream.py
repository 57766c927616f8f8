"""FrameStream's contract: the same bodies over unix sockets, TCP sockets and memory streams."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from transport import messages
from transport.errors import Overflow, PeerGone, RemoteProtocolError
from transport.messages import HEAD_FROM_CLIENT, CancelRequest, ClientHello, Sampling, Submit
from transport.stream import FrameStream, run_link
from transport.wire import Frame, encode_frame

Pair = tuple[FrameStream, FrameStream]


def socket_pair(family: str) -> tuple[trio.SocketStream, trio.SocketStream]:
    if family == "unix":
        raw_a, raw_b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            raw_a = socket.create_connection(server.getsockname())
            raw_b, _ = server.accept()
    raw_a.setblocking(False)
    raw_b.setblocking(False)
    a, b = trio.socket.from_stdlib_socket(raw_a), trio.socket.from_stdlib_socket(raw_b)
    return trio.SocketStream(a), trio.SocketStream(b)


def raw_pair(kind: str) -> tuple[trio.abc.Stream, trio.abc.Stream]:
    if kind == "memory":
        return trio.testing.memory_stream_pair()
    if kind == "lockstep":
        return trio.testing.lockstep_stream_pair()
    return socket_pair(kind)


def wrap(stream: trio.abc.Stream, name: str = "peer", limit: int = 8 << 20, stall_s: float = 5.0) -> FrameStream:
    return FrameStream(stream, accepts=HEAD_FROM_CLIENT, out_limit_bytes=limit, stall_s=stall_s, name=name, grace_s=0.5)


@pytest.fixture(params=["unix", "tcp", "memory", "lockstep"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    raw_a, raw_b = raw_pair(request.param)
    async with wrap(raw_a, "b") as a, wrap(raw_b, "a") as b:
        yield a, b


def submit(number: int, blob: bytes = b"") -> tuple[Submit, bytes]:
    return Submit(number, 1, 0, Sampling(seed=number), label=f"n{number}"), blob


async def drain(frames: FrameStream, into: list[Frame]) -> str:
    """Receives until the peer is gone; the reason it gave."""
    try:
        while True:
            into.extend(await frames.receive())
    except PeerGone as gone:
        return str(gone)


async def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    a, b = pair
    rng = random.Random(1)
    sent = [submit(i, rng.randbytes(4 * rng.choice([0, 1, 25, 9_000, 40_000, 400_000]))) for i in range(60)]
    got: list[Frame] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run_writer)
        for message, blob in sent[:10]:
            a.post(message, blob)

        async def send_rest() -> None:
            for message, blob in sent[10:]:
                await a.send(message, blob)
            a.close()

        nursery.start_soon(send_rest)
        while len(got) < len(sent):
            got += await b.receive()
    assert [(f.message, bytes(f.blob)) for f in got] == sent
    assert a.pending_bytes == 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_cancelled_receive_loses_nothing(pair: Pair, seed: int) -> None:
    a, b = pair
    rng = random.Random(seed)
    sent = [submit(i, rng.randbytes(4 * rng.choice([0, 25, 17_000, 75_000]))) for i in range(60)]
    got: list[Frame] = []
    cancels = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run_writer)

        async def send() -> None:
            for message, blob in sent:
                await a.send(message, blob)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(send)
        while len(got) < len(sent):
            with trio.CancelScope() as scope:
                if rng.random() < 0.7:
                    scope.deadline = trio.current_time() + rng.choice([0, 1e-5, 1e-4])
                got += await b.receive()
            cancels += scope.cancelled_caught
        a.close()
    assert [(f.message, bytes(f.blob)) for f in got] == sent
    assert cancels > 0


async def test_a_cancelled_send_is_queued_or_not_and_never_torn(pair: Pair) -> None:
    a, b = pair
    queued = 0
    got: list[Frame] = []
    blob = bytes(3_000_000)
    why = ""
    async with trio.open_nursery() as nursery:

        async def write_and_close() -> None:
            await a.run_writer()
            await a.aclose()

        nursery.start_soon(write_and_close)

        async def produce() -> None:
            nonlocal queued
            while True:
                await a.send(*submit(queued, blob))
                queued += 1

        async def consume() -> None:
            nonlocal why
            why = await drain(b, got)

        nursery.start_soon(consume)
        for i in range(12):
            with trio.move_on_after(0.001 * (i % 4)):
                await produce()
        a.close()
    assert [f.message.request for f in got if isinstance(f.message, Submit)] == list(range(queued))
    assert queued > 0
    assert why == "a: end of stream"


async def test_a_cancelled_writer_flushes_whole_frames(pair: Pair) -> None:
    a, b = pair
    got: list[Frame] = []
    why = ""

    async def consume() -> None:
        nonlocal why
        why = await drain(b, got)

    async with trio.open_nursery() as outer:
        outer.start_soon(consume)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run_writer)
            for i in range(20):
                a.post(*submit(i, bytes(300_000)))
            nursery.cancel_scope.cancel()
        with pytest.raises(PeerGone, match="closing"):
            a.post(*submit(99))
        assert a.pending_bytes == 0
        await a.aclose()
    assert len(got) == 20
    assert why == "a: end of stream"


async def test_close_lets_the_writer_flush_and_return(pair: Pair) -> None:
    a, b = pair
    a.post(CancelRequest(1))
    a.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run_writer)
        assert (await b.receive())[0].message == CancelRequest(1)
    with pytest.raises(PeerGone, match="b: connection is closing"):
        await a.send(CancelRequest(2))


async def test_the_queue_is_bounded_in_bytes(pair: Pair) -> None:
    a, _ = pair
    with pytest.raises(Overflow, match=r"send queue of b \(bytes\) is full \(limit 8388608\)"):
        for i in range(100):
            a.post(*submit(i, bytes(1_000_000)))
    assert 7_000_000 < a.pending_bytes <= 8 << 20
    a.post(CancelRequest(1))  # a smaller one still fits


@pytest.mark.parametrize("kind", ["unix", "memory"])
async def test_a_frame_larger_than_the_queue_is_refused_at_once(kind: str) -> None:
    raw_a, raw_b = raw_pair(kind)
    async with wrap(raw_a, limit=1000) as a, wrap(raw_b):
        for _ in range(2):
            with pytest.raises(Overflow):
                await a.send(*submit(1, bytes(2000)))
        with pytest.raises(Overflow):
            a.post(*submit(1, bytes(2000)))
        assert a.pending_bytes == 0


async def test_many_senders_that_wait_for_room_all_make_progress() -> None:
    raw_a, raw_b = raw_pair("unix")
    got: list[Frame] = []
    async with wrap(raw_a, limit=200_000) as a, wrap(raw_b) as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run_writer)
            done = 0

            async def sender(number: int) -> None:
                nonlocal done
                for _ in range(5):
                    await a.send(*submit(number, bytes(180_000 if number % 2 else 40)))
                done += 1

            for number in range(8):
                nursery.start_soon(sender, number)
            await trio.testing.wait_all_tasks_blocked()
            assert done < 8  # they do have to wait
            with trio.fail_after(10):
                while len(got) < 40:
                    got += await b.receive()
            a.close()
    counts = dict.fromkeys(range(8), 0)
    for frame in got:
        assert isinstance(frame.message, Submit)
        counts[frame.message.request] += 1
    assert counts == dict.fromkeys(range(8), 5)


async def test_a_waiting_sender_hears_that_the_link_ended() -> None:
    raw_a, raw_b = raw_pair("unix")
    async with wrap(raw_a, limit=300_000) as a, wrap(raw_b):
        failures: list[str] = []

        async def sender() -> None:
            try:
                while True:
                    await a.send(*submit(1, bytes(100_000)))
            except PeerGone as gone:
                failures.append(str(gone))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender)
            nursery.start_soon(sender)
            await trio.testing.wait_all_tasks_blocked()
            a.close()
        assert failures == ["peer: connection is closing"] * 2


@pytest.mark.parametrize("kind", ["unix", "lockstep"])
async def test_a_peer_that_does_not_read_is_gone(kind: str) -> None:
    raw_a, raw_b = raw_pair(kind)
    async with wrap(raw_a, stall_s=0.05) as a, wrap(raw_b):
        for i in range(7):
            a.post(*submit(i, bytes(1_000_000)))
        with trio.fail_after(5), pytest.raises(PeerGone, match=r"peer: does not read: nothing sent for 0.05 s"):
            await a.run_writer()
        with pytest.raises(PeerGone, match="does not read"):
            a.post(CancelRequest(1))
        assert a.pending_bytes == 0


async def test_a_cancelled_writer_gives_a_deaf_peer_only_its_grace() -> None:
    raw_a, raw_b = raw_pair("unix")
    async with wrap(raw_a, stall_s=60) as a, wrap(raw_b):
        for i in range(7):
            a.post(*submit(i, bytes(1_000_000)))
        with trio.fail_after(5), trio.CancelScope() as scope, trio.move_on_after(0.01):
            await a.run_writer()
        assert not scope.cancelled_caught
        with pytest.raises(PeerGone, match=r"not flushed within 0.5 s: \d+ bytes left"):
            a.post(CancelRequest(1))


class _Closing(trio.abc.Stream):
    """Takes all that is sent, and has the frames above closed before it says so."""

    def __init__(self) -> None:
        self.frames: FrameStream | None = None
        self.data = b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data
        assert self.frames is not None
        await self.frames.aclose()

    async def wait_send_all_might_not_block(self) -> None: ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return b""

    async def aclose(self) -> None: ...


async def test_a_write_that_ends_after_the_close_is_not_counted_twice() -> None:
    under = _Closing()
    under.frames = wrap(under)
    under.frames.post(*submit(1, bytes(400)))
    with pytest.raises(PeerGone, match="peer: closed on this side"):
        await under.frames.run_writer()
    assert under.data == b"".join(encode_frame(*submit(1, bytes(400))))
    assert under.frames.pending_bytes == 0


async def test_a_torn_frame_is_named(pair: Pair) -> None:
    a, b = pair
    raw = b"".join(encode_frame(*submit(1, bytes(400))))

    async def tear() -> None:
        await a._stream.send_all(raw + raw[:-1])
        await a._stream.aclose()

    got: list[Frame] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tear)
        assert await drain(b, got) == "a: end of stream inside a frame"
    assert len(got) == 1


async def test_frames_before_a_violation_are_delivered_and_then_it_is_raised(pair: Pair) -> None:
    a, b = pair
    good = b"".join(encode_frame(CancelRequest(7)))
    bad = b"".join(encode_frame(messages.Drain()))

    async def send() -> None:
        await a._stream.send_all(good + bad + good)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        got: list[Frame] = []
        with pytest.raises(RemoteProtocolError, match=r"kind 29 \(Drain\) is not accepted"):
            while True:
                got += await b.receive()
        assert [f.message for f in got] == [CancelRequest(7)]
        with pytest.raises(RemoteProtocolError):
            await b.receive()
        nursery.cancel_scope.cancel()


async def test_every_split_of_the_bytes_gives_the_same_frames() -> None:
    raw = b"".join(b"".join(encode_frame(*submit(i, bytes(8)))) for i in range(5))
    for step in (1, 2, 11, 12, 13, 37, 4096):
        raw_a, raw_b = raw_pair("memory")
        async with wrap(raw_b) as b:
            got: list[Frame] = []
            for at in range(0, len(raw), step):
                await raw_a.send_all(raw[at : at + step])
            await raw_a.aclose()
            await drain(b, got)
            assert [f.message.request for f in got if isinstance(f.message, Submit)] == list(range(5))


async def test_closing_here_wakes_the_receiver(pair: Pair) -> None:
    a, _ = pair
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run_writer)

        async def expect() -> None:
            with pytest.raises(PeerGone, match="b: closed on this side"):
                await a.receive()

        nursery.start_soon(expect)
        await trio.testing.wait_all_tasks_blocked()
        await a.aclose()


async def test_small_frames_share_system_calls() -> None:
    raw_a, raw_b = raw_pair("unix")
    async with wrap(raw_a) as a, wrap(raw_b) as b:
        for i in range(300):
            a.post(CancelRequest(i))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run_writer)
            batches = []
            while sum(batches) < 300:
                batches.append(len(await b.receive()))
            a.close()
        assert max(batches) >= 64


# ---------------------------------------------------------------- run_link


async def test_run_link_answers_and_ends_when_the_peer_goes(pair: Pair) -> None:
    a, b = pair
    seen: list[messages.Message] = []

    def answer(frames: list[Frame]) -> None:
        for frame in frames:
            seen.append(frame.message)
            b.post(CancelRequest(1))

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            with pytest.raises(PeerGone, match="a: end of stream"):
                await run_link(b, answer)

        nursery.start_soon(serve)
        nursery.start_soon(a.run_writer)
        a.post(ClientHello(1, "x"))
        assert (await a.receive())[0].message == CancelRequest(1)
        a.close()
        await trio.testing.wait_all_tasks_blocked()
        await a.aclose()
    assert seen == [ClientHello(1, "x")]


async def test_run_link_raises_what_the_handler_says_of_the_peer_and_flushes_its_last_word(pair: Pair) -> None:
    a, b = pair

    async def refuse(frames: list[Frame]) -> None:
        await b.send(CancelRequest(9))
        raise RemoteProtocolError("not in this state")

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            with pytest.raises(RemoteProtocolError, match="not in this state"):
                await run_link(b, refuse)

        nursery.start_soon(serve)
        nursery.start_soon(a.run_writer)
        a.post(CancelRequest(1))
        assert (await a.receive())[0].message == CancelRequest(9)
        a.close()


async def test_run_link_returns_after_close(pair: Pair) -> None:
    a, b = pair
    b.post(CancelRequest(5))
    b.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_link, b, lambda frames: None)
        assert (await a.receive())[0].message == CancelRequest(5)


async def test_run_link_puts_a_handlers_bug_in_a_group(pair: Pair) -> None:
    a, b = pair

    def bug(frames: list[Frame]) -> None:
        raise KeyError("bug")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run_writer)
        a.post(CancelRequest(1))
        with pytest.raises(ExceptionGroup) as caught:
            await run_link(b, bug)
        assert caught.group_contains(KeyError)
        a.close()


async def test_run_link_can_be_cancelled(pair: Pair) -> None:
    _, b = pair
    with trio.move_on_after(0.01) as scope:
        await run_link(b, lambda frames: None)
    assert scope.cancelled_caught


async def test_a_frame_that_the_socket_takes_needs_no_turn_of_the_writer() -> None:
    ours, theirs = socket_pair("unix")
    async with wrap(ours) as frames, trio.open_nursery() as nursery:
        message, blob = submit(1, bytes(range(40)))
        frames.post(message, blob)  # nobody writes yet
        assert frames.pending_bytes > 0
        nursery.start_soon(frames.run_writer)
        await trio.testing.wait_all_tasks_blocked()
        first = await theirs.receive_some()
        frames.post(message, blob)
        assert frames.pending_bytes == 0
        # No checkpoint between the post and this: what the kernel has was not written by a task.
        raw = socket.socket(fileno=theirs.socket.fileno())
        assert raw.recv(1 << 16, socket.MSG_DONTWAIT) == first == b"".join(encode_frame(message, blob))
        raw.detach()
        frames.close()
    await theirs.aclose()


async def test_what_the_socket_does_not_take_at_once_is_the_writers_and_stays_in_order() -> None:
    ours, theirs = socket_pair("unix")
    async with wrap(ours) as a, wrap(theirs) as b, trio.open_nursery() as nursery:
        nursery.start_soon(a.run_writer)
        await trio.testing.wait_all_tasks_blocked()
        sent = [submit(i, bytes([i]) * 4 * size) for i, size in enumerate((250_000, 10, 250_000, 1, 0))]
        for message, blob in sent:
            a.post(message, blob)
        assert a.pending_bytes > 0
        got: list[Frame] = []
        while len(got) < len(sent):
            got += await b.receive()
        assert [(f.message, bytes(f.blob)) for f in got] == sent
        await trio.testing.wait_all_tasks_blocked()
        a.post(*sent[1])
        assert a.pending_bytes == 0
        a.close()


async def test_a_post_to_a_peer_that_is_gone_is_the_writers_to_find_out() -> None:
    ours, theirs = socket_pair("unix")
    async with wrap(ours) as frames, trio.open_nursery() as nursery:
        ends: list[str] = []

        async def write() -> None:
            try:
                await frames.run_writer()
            except PeerGone as gone:
                ends.append(str(gone))

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        await theirs.aclose()
        frames.post(*submit(1))
        await trio.testing.wait_all_tasks_blocked()
        assert ends and "EPIPE" in ends[0]
        with pytest.raises(PeerGone, match="EPIPE"):
            frames.post(*submit(2))
