"""The front's link: heads that are absent, that go, that lie; attempts that go on where the last one stopped."""

from __future__ import annotations

import asyncio

import pytest

from engine.front import headlink
from tests.front.rig import ids_of, run, running_front, wait_for
from tests.front.scripted_head import tokens_frame

CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
STREAM = CHAT | {"stream": True}


def test_without_a_head_nothing_is_promised():
    async def main():
        async with running_front(with_head=False) as rig:
            answer = await rig.post(CHAT_PATH, CHAT)
            assert (answer.status, answer.error["code"]) == (503, "engine_lost") and "retry-after" in answer.headers
            assert (await rig.get("/health")).status == 200
            ready = await rig.get("/ready")
            assert ready.status == 503 and ready.json["reasons"][0]["code"] == "unreachable"
            assert "engine:up 0.0" in (await rig.get("/metrics")).body.decode()

    run(main)


def test_a_head_that_does_not_answer_questions_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("engine.front.desk.REPLY_S", 0.05)

    async def main():
        async with running_front() as rig:
            rig.head.answers_questions = False
            first, second = await asyncio.gather(rig.get("/ready"), rig.get("/ready"))
            assert first.status == second.status == 503 and rig.head.asked == 1
            rig.head.answers_questions = True
            rig.front.desk.forget()
            assert (await rig.get("/ready")).status == 200

    run(main)


@pytest.mark.parametrize("code", ["rank_lost", "transfer_failed", "kv_corrupt"])
def test_what_may_be_tried_again_is_and_the_stream_goes_on(code, monkeypatch):
    monkeypatch.setattr(headlink, "RETRY_PAUSE_S", 0.01)

    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            ids = ids_of("Hello again, friend")
            rig.head.start(one)
            rig.head.say((one, ids[:2]))
            rig.head.fail(one, code)
            two = await rig.head.next()
            assert (two.submit.attempt, two.submit.generated) == (2, 2)
            assert (two.prompt, two.said) == (one.prompt, ids[:2]) and two.submit.sampling == one.submit.sampling
            rig.head.start(two)
            rig.head.say((two, ids[2:]))
            rig.head.finish(two)
            answer = await client.answer()
            assert answer.text() == "Hello again, friend" and answer.events[-1] == "[DONE]"

    run(main)


def test_attempts_have_an_end(monkeypatch):
    monkeypatch.setattr(headlink, "RETRY_PAUSE_S", 0.001)

    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, CHAT)
            for _ in range(headlink.ATTEMPTS):
                rig.head.fail(await rig.head.next(), "rank_lost", words="rank 1 is lost")
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "rank_lost")
            assert len(rig.head.seen) == headlink.ATTEMPTS and rig.front.link.num_open == 0

    run(main)


def test_a_lost_connection_is_made_again_and_streams_go_on():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            ids = ids_of("Hello again, friend")
            rig.head.start(one)
            rig.head.say((one, ids[:1]))
            head = await client.head()
            first = await client.piece()
            rig.head.drop()
            two = await rig.head.next()
            assert two.said == ids[:1]
            rig.head.complete(two, ids[1:])
            answer = await client.rest(head)
            answer.body = first + answer.body
            assert answer.text() == "Hello again, friend" and answer.events[-1] == "[DONE]"

    run(main)


def test_a_head_that_does_not_come_back_fails_what_waits(monkeypatch):
    monkeypatch.setattr(headlink, "RELINK_S", 0.05)

    async def main():
        async with running_front() as rig, rig.client() as client, rig.client() as other:
            await client.post(CHAT_PATH, CHAT)
            await other.post(CHAT_PATH, STREAM)
            await rig.head.next()
            one = await rig.head.next()
            rig.front.link._path += ".gone"
            if one.submit.request == 2:
                rig.head.start(one)
                rig.head.say((one, ids_of("Hello")))
                await client_or(other)
            rig.head.drop()
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "engine_lost")
            assert (await rig.post(CHAT_PATH, CHAT)).status == 503

    async def client_or(client):
        await client.head()
        await client.piece_with(b"Hello")

    run(main)


@pytest.mark.parametrize("lie", ["token out of order", "unknown request", "tokens before the start", "wrong count"])
def test_a_head_that_lies_loses_the_connection(lie):
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, CHAT)
            one = await rig.head.next()
            if lie != "tokens before the start":
                rig.head.start(one)
            if lie == "token out of order":
                one.said = [7]
                message, blob = tokens_frame([(one, ids_of("x"))])
                rig.head.post(one.writer, message, blob)
            elif lie == "unknown request":
                rig.head.post(one.writer, *_of_another(one))
            elif lie == "wrong count":
                one.said = [7]
                rig.head.finish(one)
            else:
                rig.head.post(one.writer, *tokens_frame([(one, ids_of("x"))]))
            two = await rig.head.next()
            assert two.submit.attempt == 2 and two.said == []
            rig.head.complete(two, ids_of("well"))
            assert (await client.answer()).json["choices"][0]["message"]["content"] == "well"

    run(main)


def _of_another(one):
    from tests.front.scripted_head import Run

    other = Run(type(one.submit)(request=99, attempt=1, generated=0, sampling=one.submit.sampling), [], [], one.writer)
    return tokens_frame([(other, [5])])


def test_another_model_ends_the_front():
    async def main():
        with pytest.raises(headlink.OtherModel, match="elsewhere"):
            async with running_front() as rig:
                rig.head.hello = type(rig.head.hello)(
                    **{name: getattr(rig.head.hello, name) for name in rig.head.hello.__struct_fields__}
                    | {"model": "elsewhere"}
                )
                rig.head.drop()
                await wait_for(rig.ending.done)

    run(main)


def test_a_cancel_never_overtakes_what_it_cancels():
    """A client may go while his request still waits for room in the queue to the head."""

    async def main():
        async with running_front() as rig, rig.client() as client:
            link = rig.front.link._link
            send, gate = link.send, asyncio.Event()

            async def slow_send(*frame):
                await gate.wait()
                await send(*frame)

            link.send = slow_send
            await client.post(CHAT_PATH, CHAT)
            await wait_for(lambda: rig.front.generations)
            await client.hang_up()
            await wait_for(lambda: any(each.is_gone for each in rig.front.generations))
            gate.set()
            one = await rig.head.next()
            async with asyncio.timeout(5):
                await one.cancelled.wait()

    run(main)
