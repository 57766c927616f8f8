"""A front in this process on uvloop, behind a real port, before a scripted head; and a client that sees every byte."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import h11
import uvloop

from engine.config import HttpConfig
from engine.front.app import Front
from engine.front.bodies import Served
from engine.front.connection import Door
from engine.front.counts import FrontCounts, make_counts_file
from engine.front.desk import HeadDesk
from engine.front.guard import Guard
from engine.front.headlink import HeadLink
from engine.front.process import load_served, serve_front
from tests.front.scripted_head import WAIT_S, ScriptedHead


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Runs a test's coroutine as a front's process would."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


@functools.cache
def served() -> Served:
    return load_served("nano", 8192, 2048)


def ids_of(text: str) -> list[int]:
    """The text as the bundled model would say it."""
    return served().codec.encode(text)


@dataclasses.dataclass
class Rig:
    """A running front."""

    head: ScriptedHead
    front: Front
    door: Door
    port: int
    signals: asyncio.Queue[int]
    ending: asyncio.Task[None]

    def client(self) -> contextlib.AbstractAsyncContextManager[Client]:
        return open_client(self.port)

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        """One request on a connection of its own."""
        async with self.client() as client:
            await client.post(path, body, **headers)
            return await client.answer()

    async def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        async with self.client() as client:
            await client.send(method, path, b"", headers)
            return await client.answer()


@contextlib.asynccontextmanager
async def running_front(
    *, http: HttpConfig | None = None, keys: tuple[bytes, ...] = (), with_head: bool = True, send_buffer: int = 0
) -> AsyncIterator[Rig]:
    """A front that is linked (unless there is no head), for as long as the block lasts."""
    head = ScriptedHead()
    with contextlib.ExitStack() as held:
        place = held.enter_context(tempfile.TemporaryDirectory(prefix="front-"))
        requests, read = os.path.join(place, "requests.sock"), os.path.join(place, "read.sock")
        descriptor = make_counts_file(1)
        held.callback(os.close, descriptor)
        counts = FrontCounts(descriptor, 0)
        held.callback(counts.close)
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        async with contextlib.AsyncExitStack() as beside:
            if with_head:
                await beside.enter_async_context(head.serve(requests, read))
            link = HeadLink(requests, "http 0")
            front = Front(
                http or HttpConfig(), served(), link, HeadDesk(read), counts, Guard(list(keys)), progress_s=12.0
            )
            door = Door(front.http, counts)
            signals: asyncio.Queue[int] = asyncio.Queue()
            port = listener.getsockname()[1]
            ending = asyncio.create_task(serve_front(front, door, listener, signals))
            await wait_for(lambda: not with_head or link.hello is not None)
            try:
                yield Rig(head, front, door, port, signals, ending)
            finally:
                front.http = dataclasses.replace(front.http, drain_s=0.0)
                signals.put_nowait(15)
                async with asyncio.timeout(WAIT_S):
                    await ending
    assert head.breaches == []


async def wait_for(condition: Callable[[], object]) -> None:
    """Until it is true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the condition is anybody's
            await asyncio.sleep(0.002)


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; comments are left out, the end is the string."""
        blocks = [block for block in self.body.decode().split("\n\n") if block.startswith("data: ")]
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]

    @property
    def comments(self) -> list[str]:
        return [block for block in self.body.decode().split("\n\n") if block.startswith(":")]

    def text(self, index: int = 0, key: str = "content") -> str:
        """What a stream says of a choice."""
        pieces = []
        for event in self.events:
            if event == "[DONE]" or "error" in event:
                continue
            for choice in event["choices"]:
                if choice["index"] == index:
                    pieces.append(choice["delta"].get(key, "") if "delta" in choice else choice["text"])
        return "".join(pieces)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        self.writes: list[bytes] = []
        """Pieces of the present body, as they were read."""

    async def post(self, path: str, body: object, **headers: str) -> None:
        await self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self._http.send(h11.Request(method=method, target=path, headers=[("Host", "x")]))
        self._http.send(h11.EndOfMessage())
        await self.send_raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def send_raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        """Status and headers of the next answer."""
        event = await self._event()
        assert isinstance(event, h11.Response), event
        headers = {name.decode().lower(): value.decode() for name, value in event.headers}
        return Answer(event.status_code, headers, b"")

    async def piece(self) -> bytes | None:
        """The next bytes of the body; None at its end."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def piece_with(self, words: bytes) -> bytes:
        """The body until it has these words."""
        seen = b""
        while words not in seen:
            piece = await self.piece()
            assert piece is not None, seen
            seen += piece
        return seen

    async def rest(self, answer: Answer) -> Answer:
        """The answer with its body."""
        pieces = []
        try:
            while (piece := await self.piece()) is not None:
                pieces.append(piece)
        except (ConnectionError, h11.RemoteProtocolError):
            answer.is_whole = False
        self.writes = pieces
        answer.body += b"".join(pieces)
        return answer

    async def answer(self) -> Answer:
        return await self.rest(await self.head())

    async def ended(self) -> bytes:
        """What still comes until the other side closes."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def hang_up(self) -> None:
        self.writer.transport.abort()

    async def _event(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self.reader.read(1 << 16))
            return event


@contextlib.asynccontextmanager
async def open_client(port: int, *, receive_buffer: int = 0) -> AsyncIterator[Client]:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
