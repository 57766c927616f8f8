"""What a front takes of anybody: bytes, connections, requests; and what is no HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.config import HttpConfig
from engine.front import bodies, connection
from tests.front.rig import ids_of, run, running_front, wait_for

CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
STREAM = CHAT | {"stream": True}


def test_a_full_queue_is_told_at_once_and_has_room_again():
    async def main():
        async with running_front(http=HttpConfig(queue=1)) as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            answer = await rig.post(CHAT_PATH, CHAT)
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert answer.error["type"] == "rate_limit_error" and "http.queue" in answer.error["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            await client.head()
            rig.head.auto = ids_of("x")
            assert (await rig.post(CHAT_PATH, CHAT)).status == 200, "the first one has its first token"
            assert rig.front.counts.total("rejected queue") == 1

    run(main)


def test_a_body_that_is_too_large_is_refused_and_read_to_its_end():
    async def main():
        async with running_front(http=HttpConfig(body_bytes=1000)) as rig, rig.client() as client:
            await client.post(CHAT_PATH, b"x" * 1500)
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (413, "request_too_large")
            assert "1000 bytes (http.body_bytes)" in answer.error["message"]
            rig.head.auto = ids_of("x")
            await client.post(CHAT_PATH, CHAT)
            assert (await client.answer()).status == 200, "the same connection"
            assert rig.front._body_bytes == 0

    run(main)


def test_a_body_of_unknown_length_is_counted_as_it_comes():
    async def main():
        async with running_front(http=HttpConfig(body_bytes=1000)) as rig, rig.client() as client:
            await client.send_raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                await client.send_raw(b"64\r\n" + b"x" * 100 + b"\r\n")
                await asyncio.sleep(0.001)
            data = await asyncio.wait_for(client.reader.read(4096), 5)
            assert data.startswith(b"HTTP/1.1 413")
            async with asyncio.timeout(5):
                while not client.writer.is_closing():  # what was refused is not read for ever
                    client.writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
                    await asyncio.sleep(0.001)

    run(main)


def test_bodies_together_have_a_bound():
    async def main():
        async with running_front(http=HttpConfig(body_bytes=1000)) as rig, _many(rig, 8) as clients:
            for client in clients:
                await client.send_raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            await wait_for(lambda: rig.front._body_bytes == 8000)
            answer = await rig.post(CHAT_PATH, CHAT)
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert "http.body_bytes" in answer.error["message"]

    run(main)


def _many(rig, count):
    import contextlib

    @contextlib.asynccontextmanager
    async def opened():
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(rig.client()) for _ in range(count)]

    return opened()


def test_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(bodies, "BODY_S", 0.05)

    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.send_raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            data = await client.ended()
            assert data.startswith(b"HTTP/1.1 408") and b"request_timeout" in data

    run(main)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost"])
def test_a_connection_that_never_says_a_request_ends(sent, monkeypatch):
    monkeypatch.setattr(connection, "REQUEST_S", 0.05)

    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.send_raw(sent)
            assert await client.ended() == b""
            await wait_for(lambda: not rig.door.open)

    run(main)


def test_one_connection_too_many_is_told_so():
    async def main():
        async with running_front(http=HttpConfig(connections=2)) as rig, rig.client() as one, rig.client() as two:
            for client in (one, two):
                await client.send("GET", "/health", b"", {})
                assert (await client.answer()).status == 200
            async with rig.client() as three:
                data = await three.ended()
            assert data.startswith(b"HTTP/1.1 503") and b"2 connections (http.connections)" in data
            await one.hang_up()
            await wait_for(lambda: len(rig.door.open) == 1)
            assert (await rig.get("/health")).status == 200

    run(main)


@pytest.mark.parametrize("size", [3000, 40_000])
def test_headers_have_a_bound(size):
    async def main():
        async with running_front(http=HttpConfig(header_bytes=2048)) as rig, rig.client() as client:
            await client.send_raw(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * size + b"\r\n\r\n")
            data = await client.ended()
            assert data.startswith(b"HTTP/1.1 431") and b"(http.header_bytes)" in data.replace(b"limit 2048, ", b"(")

    run(main)


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET \xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=range(7),
)
def test_what_is_no_http_gets_an_error_that_can_be_read(sent):
    async def main():
        async with running_front() as rig:
            async with rig.client() as client:
                await client.send_raw(sent)
                if sent.startswith(b"\x16"):
                    client.writer.write_eof()  # TLS waits for us; there is no line to judge yet
                    await client.ended()
                else:
                    data = await client.ended()
                    top, _, body = data.partition(b"\r\n\r\n")
                    assert top.startswith(b"HTTP/1.1 400")
                    assert json.loads(body)["error"]["code"] == "invalid_http"
            assert (await rig.get("/health")).status == 200
            await wait_for(lambda: not rig.front.generations)

    run(main)


def test_garbage_within_a_running_answer_ends_the_connection_and_the_request():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            await client.head()
            await client.send_raw(b"NONSENSE\r\n\r\n")
            rig.head.finish(one)
            await client.ended()
            assert (await rig.get("/health")).status == 200

    run(main)


def test_requests_sent_ahead_are_answered_in_order():
    async def main():
        async with running_front() as rig, rig.client() as client:
            rig.head.auto = ids_of("x")
            body = json.dumps(CHAT).encode()
            post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: %d\r\nContent-Length: %d\r\n\r\n%s"
            await client.send_raw(b"".join(post % (at, len(body), body) for at in range(5)))
            seen = b""
            while seen.count(b'"finish_reason"') < 5:
                seen += await asyncio.wait_for(client.reader.read(4096), 5)
        places = [seen.index(b"x-request-id: %d\r" % at) for at in range(5)]
        assert places == sorted(places)

    run(main)
