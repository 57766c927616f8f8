"""What clients say of how a request is treated, and what they are told of how it was: conversations, salts, ranks."""

from __future__ import annotations

import json

import pytest

from tests.front.rig import ids_of, run, running_front

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
TEXT = {"prompt": "Once", "max_tokens": 50}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
METRICS = {"queue_time_ms", "time_to_first_token_ms", "handoff_ms"}


@pytest.mark.parametrize(
    ("headers", "affinity"),
    [
        ({}, ""),
        ({"X_Session_ID": "s 1"}, "s 1"),
        ({"X_Correlation_ID": "c1"}, "c1"),
        ({"X_Session_Affinity": "a1"}, "a1"),
        ({"X_Session_Affinity": "a1", "X_Correlation_ID": "c1"}, "c1"),
        ({"X_Session_Affinity": "a1", "X_Correlation_ID": "c1", "x_session_id": "s1"}, "s1"),
        ({"X_Session_ID": "x" * 256}, "x" * 256),
        ({"X_Session_ID": "x" * 257}, ""),
        ({"X_Session_ID": "käse"}, ""),
    ],
)
def test_a_conversation_has_the_name_of_the_first_header(headers, affinity):
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("Hello")
            for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT | {"n": 2})):
                assert (await rig.post(path, body, **headers)).status == 200
            assert [seen.submit.affinity for seen in rig.head.seen] == [affinity] * 3
            assert all(seen.submit.cache_salt == "" and seen.submit.priority == 0 for seen in rig.head.seen)

    run(main)


def test_salt_and_priority_go_to_the_head_and_are_kept_when_it_is_asked_again():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(TEXT_PATH, TEXT | {"cache_salt": "team 7", "priority": -3}, X_Session_ID="s")
            one = await rig.head.next()
            rig.head.fail(one, "rank_lost")
            again = await rig.head.next()
            rig.head.start(again)
            rig.head.say((again, ids_of("Hello")))
            rig.head.finish(again)
            assert (await client.answer()).status == 200
            for seen in (one, again):
                submit = seen.submit
                assert (submit.cache_salt, submit.priority, submit.affinity) == ("team 7", -3, "s")
            assert again.submit.attempt == 2

    run(main)


@pytest.mark.parametrize(
    ("field", "value"),
    [("cache_salt", ""), ("cache_salt", "x" * 257), ("cache_salt", 7), ("priority", 101), ("priority", 1.5),
     ("return_token_ids", "yes")],
)  # fmt: skip
def test_what_they_can_not_be_is_refused_by_name(field, value):
    async def main():
        async with running_front() as rig:
            answer = await rig.post(TEXT_PATH, TEXT | {field: value})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_field", field)

    run(main)


def test_ids_are_told_where_they_are_asked_for():
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("go ST and STOP not this")
            wishes = {"return_token_ids": True, "stop": "STOP"}
            text = (await rig.post(TEXT_PATH, TEXT | wishes | {"n": 2})).json
            chat = (await rig.post(CHAT_PATH, CHAT | wishes)).json
            plain = (await rig.post(TEXT_PATH, TEXT | {"return_token_ids": False})).json
            prompts = [run.prompt for run in rig.head.seen]
        for choice in text["choices"]:
            assert choice["prompt_token_ids"] == prompts[0]
            assert choice["token_ids"] == rig.head.auto[: len(choice["token_ids"])]
        assert sum(len(choice["token_ids"]) for choice in text["choices"]) == text["usage"]["completion_tokens"]
        assert chat["prompt_token_ids"] == prompts[2] and "prompt_token_ids" not in chat["choices"][0]
        assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"] > 5
        assert "token_ids" not in plain["choices"][0]

    run(main)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_a_stream_tells_every_id_once_also_where_text_is_held_back(path):
    async def main():
        body = (CHAT if path == CHAT_PATH else TEXT) | {"stream": True, "return_token_ids": True, "stop": "STOP"}
        async with running_front() as rig, rig.client() as client:
            await client.post(path, body)
            one = await rig.head.next()
            rig.head.start(one)
            ids = ids_of("wörld 🌍! S")
            head = None
            pieces = b""
            for token in ids:
                rig.head.say((one, [token]))
                head = head or await client.head()
                piece = await client.piece()
                assert json.loads(piece[6:])["choices"][0]["token_ids"] == [token]
                pieces += piece
            rig.head.finish(one)
            answer = await client.rest(head)
            answer.body = pieces + answer.body
        events = answer.events[:-1]
        told = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
        assert told == ids and answer.text() == "wörld 🌍! S"
        assert events[-1]["choices"][0]["token_ids"] == []
        places = [event if path == CHAT_PATH else event["choices"][0] for event in events]
        assert [place.get("prompt_token_ids") for place in places] == [one.prompt] + [None] * (len(places) - 1)

    run(main)


def test_the_last_chunk_says_where_the_time_went():
    async def main():
        async with running_front() as rig, rig.client() as client:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            await client.post(CHAT_PATH, CHAT | options)
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.say((one, ids_of("Hello")))
            rig.head.finish(one)
            stream = (await client.answer()).events
            rig.head.auto = ids_of("go STOP")
            whole = (await rig.post(TEXT_PATH, TEXT)).json
            stopped = (await rig.post(TEXT_PATH, TEXT | {"stop": "STOP"})).json
            two = (await rig.post(TEXT_PATH, TEXT | {"n": 2})).json
        for place in (stream[-2], whole, stopped):
            assert place["metrics"].keys() == METRICS
            assert place["metrics"]["queue_time_ms"] == 2.0 and place["metrics"]["time_to_first_token_ms"] > 0
        assert stream[-2]["metrics"]["handoff_ms"] == whole["metrics"]["handoff_ms"] == 0.01
        assert all("metrics" not in event for event in stream[:-2])
        assert "metrics" not in two, "two answers have no common time"

    run(main)


def test_ranks_are_named_to_those_who_ask():
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("Hello")
            wish = {"engine_show_ranks": "1"}
            whole = await rig.post(TEXT_PATH, TEXT | {"n": 2}, **wish)
            stream = await rig.post(CHAT_PATH, CHAT | {"stream": True}, **wish)
            silent = await rig.post(TEXT_PATH, TEXT)
        for answer in (whole, stream):
            assert (answer.headers["engine-prefill-rank"], answer.headers["engine-decode-rank"]) == ("0", "1")
        assert not any(name.startswith("engine-") for name in silent.headers)

    run(main)
