"""Streams: when headers go out, what keeps them alive, hang-ups in every state, readers who are too slow."""

from __future__ import annotations

import asyncio
import logging

import pytest

from engine.config import HttpConfig
from engine.front import completions, connection
from tests.front.rig import ids_of, open_client, run, running_front, wait_for

CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000}
STREAM = CHAT | {"stream": True}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(completions, "VERDICT_S", 0.05)


def test_a_refusal_comes_before_any_header():
    async def main():
        async with running_front() as rig:
            for code, status, name in (
                ("queue_full", 429, "queue_full"),
                ("draining", 503, "draining"),
                ("too_long", 400, "context_length_exceeded"),
                ("bad_request", 400, "invalid_field"),
            ):
                async with rig.client() as client:
                    await client.post(CHAT_PATH, STREAM)
                    rig.head.fail(await rig.head.next(), code, retryable=status > 400, words="maximum context length")
                    answer = await client.answer()
                assert (answer.status, answer.error["code"]) == (status, name)
                assert ("retry-after" in answer.headers) is (status > 400)
                assert "maximum context length" in answer.error["message"]

    run(main)


def test_a_stream_that_waits_says_so(quick):
    async def main():
        async with running_front(http=HttpConfig(keepalive_s=0.05)) as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            head = await client.head()
            assert head.status == 200
            assert await client.piece() == b": queued\n\n"
            assert await client.piece() == b": waiting\n\n"
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            await client.piece_with(b'"role":"assistant","content":"Hello"')
            assert await client.piece_with(b"waiting") == b": waiting\n\n", "also between tokens"
            rig.head.finish(one)
            answer = await client.rest(head)
        assert answer.events[-1] == "[DONE]"

    run(main)


def test_an_error_inside_a_stream_ends_it_without_its_end():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            head = await client.head()
            await client.piece_with(b"Hello")
            rig.head.fail(one, "timeout", retryable=False, words="no step for 12 s")
            answer = await client.rest(head)
            assert answer.events == [
                {"error": {"message": "no step for 12 s", "type": "server_error", "param": None, "code": "timeout"}}
            ]
            rig.head.auto = ids_of("x")
            await client.post(CHAT_PATH, CHAT)
            assert (await client.answer()).status == 200, "the connection goes on"

    run(main)


def test_all_that_comes_together_is_one_write():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM | {"n": 2})
            runs = [await rig.head.next(), await rig.head.next()]
            for one in runs:
                rig.head.start(one)
            rig.head.say(*((one, ids_of("Hello")) for one in runs))
            head = await client.head()
            await client.piece_with(b'"index":1')
            before = rig.front.counts.total("frames")
            rig.head.say(*((one, ids_of(" you there")) for one in runs))
            both = await client.piece()
            assert both.count(b"data: ") == 2 and rig.front.counts.total("frames") == before + 1
            for one in runs:
                rig.head.finish(one)
            assert (await client.rest(head)).events[-1] == "[DONE]"

    run(main)


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("state", ["queued", "decode"])
@pytest.mark.parametrize("way", ["reset", "half close"])
def test_a_hang_up_is_felt_at_once_and_reaches_the_head(body, state, way, quick):
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, body)
            one = await rig.head.next()
            if state == "decode":
                rig.head.start(one)
                rig.head.say((one, ids_of("Hello")))
                await wait_for(lambda: any(each.first_token_at for each in rig.front.generations))
            if way == "reset":
                await client.hang_up()
            else:
                client.writer.write_eof()
            async with asyncio.timeout(5):
                await one.cancelled.wait()
            await wait_for(lambda: not rig.front.generations)
            assert rig.front.counts.total(f"gone {state}") == 1
            assert rig.front.counts.total("chat 499") == 1
            await wait_for(lambda: rig.front.link.num_open == 0)

    run(main)


def test_a_hang_up_while_the_body_comes_or_is_prepared():
    async def main():
        async with running_front() as rig:
            async with rig.client() as client:
                await client.send_raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
                await wait_for(lambda: rig.front._waiting == 1)
                await client.hang_up()
                await wait_for(lambda: rig.front.counts.total("completions 499") == 1)
            async with rig.client() as client:
                words = "word " * 200_000
                await client.post("/v1/completions", {"prompt": words})
                await client.hang_up()
                await wait_for(lambda: sum(rig.front.counts.total(f"completions {code}") for code in (499, 400)) == 2)
            assert rig.front._waiting == 0 and rig.front._body_bytes == 0
            assert not rig.head.seen

    run(main)


def test_a_hang_up_behind_a_request_that_was_sent_ahead(monkeypatch):
    """The connection is not read while the next request waits in it, so the end is looked for."""
    monkeypatch.setattr(connection, "SWEEP_S", 0.02)

    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, CHAT)
            one = await rig.head.next()
            await client.send_raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            client.writer.write_eof()
            async with asyncio.timeout(5):
                await one.cancelled.wait()
            assert not one.is_complete

    run(main)


def test_a_slow_reader_is_dropped_and_nobody_waits_for_him(caplog):
    caplog.set_level(logging.INFO)
    words = ids_of(" many words that fill the buffers of the kernel")

    async def main():
        http = HttpConfig(stream_tokens=500)
        async with running_front(http=http, send_buffer=4096) as rig:
            async with open_client(rig.port, receive_buffer=4096) as slow, rig.client() as quick:
                slow.reader._limit = 1024  # asyncio's own reader takes 128 KiB ahead
                await slow.post(CHAT_PATH, STREAM, X_Request_Id="slow-one")
                stuck = None
                await quick.post(CHAT_PATH, STREAM)
                runs = {}
                for _ in range(2):
                    each = await rig.head.next()
                    runs[each.submit.label] = each
                    rig.head.start(each)
                stuck = runs.pop("slow-one")
                (other,) = runs.values()
                head = await asyncio.wait_for(_head_of(rig, quick, other), 5)
                turns = 0
                while not stuck.cancelled.is_set():
                    rig.head.say((stuck, words))
                    turns += 1
                    assert turns < 100_000
                    await asyncio.sleep(0)
                await wait_for(lambda: len(rig.front.generations) == 1)
                assert rig.front.counts.total("stalled") == 1
                rig.head.say((other, ids_of(" well")))
                rig.head.finish(other)
                answer = await quick.rest(head)
                assert answer.text().endswith(" well") and answer.events[-1] == "[DONE]"
                await slow.ended()
        dropped = [record for record in caplog.records if record.message == "stream.dropped"]
        assert [record.fields["request_id"] for record in dropped] == ["slow-one"]

    run(main)


async def _head_of(rig, client, one):
    rig.head.say((one, ids_of("All is")))
    head = await client.head()
    await client.piece_with(b"All is")
    return head


def test_a_hang_up_while_the_last_bytes_wait(caplog):
    caplog.set_level(logging.INFO)

    async def main():
        async with running_front(send_buffer=4096) as rig, open_client(rig.port, receive_buffer=4096) as client:
            client.reader._limit = 1024
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            (generation,) = rig.front.generations
            while not any(each.is_congested for each in rig.door.open):
                rig.head.say((one, ids_of(" again")))
                await asyncio.sleep(0)
            rig.head.finish(one)
            await wait_for(lambda: generation.is_answered)
            await client.hang_up()
            await wait_for(lambda: not rig.front.generations)
            assert rig.front.counts.total("gone flush") == 1

    run(main)
    (finish,) = [record for record in caplog.records if record.message == "request.finish"]
    assert (finish.fields["stage"], finish.fields["status"]) == ("flush", 499)


def test_one_line_of_the_log_for_each_request_and_never_its_words(caplog):
    caplog.set_level(logging.DEBUG)

    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("the answer")
            body = {"messages": [{"role": "user", "content": "the question"}], "max_tokens": 3, "stream": True}
            await rig.post(CHAT_PATH, body, X_Request_Id="abc", traceparent=f"00-{'a' * 32}-{'b' * 16}-00")
            await rig.post(CHAT_PATH, {"messages": "the question"})

    run(main)
    good, bad = [record.fields for record in caplog.records if record.message == "request.finish"]
    assert good["route"] == "chat" and good["status"] == 200 and good["request_id"] == "abc"
    assert good["trace_id"] == "a" * 32 and good["finish"] == "length" and good["prefill_rank"] == 0
    names = {"tokens_in", "tokens_cached", "tokens_out", "queue_ms", "ttft_ms", "total_ms", "decode_rank", "stream"}
    assert names <= good.keys() and good["tokens_out"] == len(ids_of("the answer"))
    assert (bad["status"], bad["code"]) == (400, "invalid_field")
    assert not any("question" in str(vars(record)) or "answer" in str(vars(record)) for record in caplog.records)
