"""How a front ends: ready no more, nothing new, what runs may finish, the rest is told."""

from __future__ import annotations

import asyncio

from engine.config import HttpConfig
from tests.front.rig import ids_of, run, running_front, wait_for

CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
STREAM = CHAT | {"stream": True}


def test_what_runs_finishes_and_nothing_new_begins():
    async def main():
        async with running_front() as rig, rig.client() as client, rig.client() as other:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            head = await client.head()
            rig.signals.put_nowait(15)
            await wait_for(lambda: rig.front.is_draining)
            await other.post(CHAT_PATH, CHAT)
            refused = await other.answer()
            assert (refused.status, refused.error["code"]) == (503, "draining") and "retry-after" in refused.headers
            ready = await rig.get("/ready")
            assert ready.status == 503 and ready.json["reasons"][0]["code"] == "draining"
            assert (await rig.get("/health")).status == 200
            rig.head.say((one, ids_of(" there")))
            rig.head.finish(one)
            answer = await client.rest(head)
            assert answer.text() == "Hello there" and answer.events[-1] == "[DONE]"
            async with asyncio.timeout(5):
                await rig.ending

    run(main)


def test_what_does_not_finish_in_time_is_told():
    async def main():
        async with running_front(http=HttpConfig(drain_s=0.1)) as rig, rig.client() as client, rig.client() as other:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            head = await client.head()
            await other.post(CHAT_PATH, CHAT)
            two = await rig.head.next()
            rig.signals.put_nowait(15)
            answer, refused = await client.rest(head), await other.answer()
            assert answer.text() == "Hello" and answer.events[-1]["error"]["code"] == "draining"
            assert (refused.status, refused.error["code"]) == (503, "draining")
            async with asyncio.timeout(5):
                await asyncio.gather(one.cancelled.wait(), two.cancelled.wait())
                await rig.ending

    run(main)


def test_a_second_signal_does_not_wait():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            head = await client.head()
            rig.signals.put_nowait(15)
            rig.signals.put_nowait(15)
            answer = await client.rest(head)
            assert answer.events[-1]["error"]["code"] == "draining"
            async with asyncio.timeout(5):
                await rig.ending

    run(main)


def test_an_engine_that_drains_is_passed_on():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, STREAM)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            head = await client.head()
            rig.head.fail(one, "draining", words="the engine is shutting down")
            answer = await client.rest(head)
            assert answer.events[-1]["error"]["code"] == "draining" and len(rig.head.seen) == 1

    run(main)
