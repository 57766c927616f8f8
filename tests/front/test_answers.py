"""What clients are told: bodies, chunks, usage, tokens, models, errors."""

from __future__ import annotations

import json

import pytest

from engine.config import HttpConfig
from tests.front.rig import ids_of, run, running_front, served, wait_for

CHAT = {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
TEXT = {"prompt": "Once", "max_tokens": 50}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def test_a_chat_is_answered_in_one_body():
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("Hello there")
            answer = await rig.post(CHAT_PATH, CHAT | {"seed": 7, "temperature": 0.5, "user": "me", "shiny": 1})
            submit = rig.head.seen[0].submit
        assert answer.status == 200 and answer.headers["engine-ignored-fields"] == "shiny"
        body = answer.json
        assert body["object"] == "chat.completion" and body["model"] == "nano" and body["id"].startswith("chatcmpl-")
        message = {"role": "assistant", "content": "Hello there"}
        assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        prompt, completion = body["usage"]["prompt_tokens"], len(ids_of("Hello there"))
        assert body["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip
        assert (submit.sampling.seed, submit.sampling.temperature, submit.sampling.max_tokens) == (7, 0.5, 50)

    run(main)


def test_a_stream_has_the_role_with_the_first_token_and_then_usage_and_its_end():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(CHAT_PATH, CHAT | {"stream": True, "stream_options": {"include_usage": True}})
            one = await rig.head.next()
            rig.head.start(one, cached=1)
            first, *others = ids_of("Hello there, friend")
            rig.head.say((one, [first]))
            head = await client.head()
            assert head.status == 200 and head.headers["content-type"].startswith("text/event-stream")
            piece = await client.piece()
            assert json.loads(piece[6:])["choices"] == [
                {"index": 0, "delta": {"role": "assistant", "content": served().codec.decode([first])},
                 "logprobs": None, "finish_reason": None}
            ]  # fmt: skip
            for token in others:
                rig.head.say((one, [token]))
            rig.head.finish(one)
            answer = await client.rest(head)
            answer.body = piece + answer.body
        *events, last, end = answer.events
        assert end == "[DONE]" and answer.text() == "Hello there, friend"
        assert sum("role" in choice["delta"] for event in events for choice in event["choices"]) == 1
        assert all(event["usage"] is None and event["object"] == "chat.completion.chunk" for event in events)
        assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 1 + len(others)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}

    run(main)


def test_continuous_usage_is_in_every_chunk():
    async def main():
        async with running_front() as rig, rig.client() as client:
            options = {"include_usage": True, "continuous_usage_stats": True}
            await client.post(TEXT_PATH, TEXT | {"stream": True, "stream_options": options})
            one = await rig.head.next()
            rig.head.start(one)
            ids = ids_of(" upon a time there")
            rig.head.say((one, ids[:2]))
            await client.head()
            pieces = [await client.piece()]
            rig.head.say((one, ids[2:3]))
            pieces.append(await client.piece())
            rig.head.say((one, ids[3:]))
            rig.head.finish(one)
            pieces.append(await client.piece())
        counts = [json.loads(piece.split(b"\n\n")[0][6:])["usage"]["completion_tokens"] for piece in pieces]
        assert counts == [2, 3, len(ids)]

    run(main)


@pytest.mark.parametrize(("options", "chunks"), [({}, 2), ({"continuous_usage_stats": True}, 11)])
def test_tokens_without_text_are_no_lag_and_are_told_where_usage_is_continuous(options, chunks):
    async def main():
        async with running_front(http=HttpConfig(stream_tokens=3)) as rig, rig.client() as client:
            await client.post(TEXT_PATH, TEXT | {"stream": True, "ignore_eos": True, "stream_options": options})
            one = await rig.head.next()
            rig.head.start(one)
            (generation,) = rig.front.generations
            (choice,) = generation.choices
            for place in range(10):
                rig.head.say((one, [served().codec.eos_id]))
                await wait_for(lambda at=place: len(choice.ask.generated) == at + 1 and choice.lag == 0)
            rig.head.say((one, ids_of("end")))
            rig.head.finish(one)
            answer = await client.answer()
        assert answer.text() == "end" and answer.events[-1] == "[DONE]"
        assert len(answer.events) - 1 == chunks

    run(main)


def test_a_stop_string_across_tokens_is_never_shown_and_the_rest_is_cancelled():
    async def main():
        async with running_front() as rig, rig.client() as client:
            await client.post(TEXT_PATH, TEXT | {"stream": True, "stop": ["STOP"]})
            one = await rig.head.next()
            rig.head.start(one)
            for piece in ("go S", "T and S", "TO", "P not this"):
                rig.head.say((one, ids_of(piece)))
            answer = await client.answer()
            await one.cancelled.wait()
            assert one.is_complete
            rig.head.auto = ids_of("go ST and STOP not this")
            whole_answer = (await rig.post(TEXT_PATH, TEXT | {"stop": "STOP"})).json
        assert answer.text() == "go ST and " and answer.events[-1] == "[DONE]"
        assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"
        assert whole_answer["choices"][0] == {
            "index": 0, "text": "go ST and ", "logprobs": None, "finish_reason": "stop"
        }  # fmt: skip

    run(main)


def test_characters_are_never_split_and_the_id_that_ends_a_text_has_none():
    async def main():
        text = "wörld 🌍!"
        async with running_front() as rig, rig.client() as client:
            await client.post(TEXT_PATH, TEXT | {"stream": True})
            one = await rig.head.next()
            rig.head.start(one)
            ids = ids_of(text)
            assert len(ids) > len(text), "some character has several tokens"
            for token in ids:
                rig.head.say((one, [token]))
            rig.head.say((one, [served().codec.eos_id]))
            rig.head.finish(one, "stop")
            answer = await client.answer()
        assert answer.text() == text and "\N{REPLACEMENT CHARACTER}" not in answer.body.decode()
        assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"

    run(main)


def test_reasoning_is_told_apart_wherever_its_end_is_cut():
    async def main():
        codec = served().codec
        end = codec.named_id("</think>")
        for ids in (
            [*ids_of("because"), end, *ids_of("so")],
            [*ids_of("because</th"), *ids_of("ink>so")],
        ):
            async with running_front() as rig:
                rig.head.auto = ids
                body = CHAT | {"chat_template_kwargs": {"thinking": True}}
                whole = (await rig.post(CHAT_PATH, body)).json["choices"][0]["message"]
                stream = await rig.post(CHAT_PATH, body | {"stream": True})
            assert whole == {"role": "assistant", "content": "so", "reasoning_content": "because"}
            assert (stream.text(), stream.text(key="reasoning_content")) == ("so", "because")

    run(main)


def test_several_prompts_with_several_answers_each():
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("yes")
            body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 5, "seed": 3}
            answer = (await rig.post(TEXT_PATH, body)).json
            runs = rig.head.seen
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(at, "yes") for at in range(4)]
        assert [run.prompt for run in runs] == [run.prompt for run in (runs[0], runs[0], runs[2], runs[2])]
        assert runs[0].submit.sampling.seed == 3 != runs[1].submit.sampling.seed
        prompt_tokens = len(runs[0].prompt) + len(runs[2].prompt)
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
        assert answer["usage"]["completion_tokens"] == 4 * len(ids_of("yes"))

    run(main)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_ids_are_taken_as_they_are(prompt):
    async def main():
        async with running_front() as rig:
            rig.head.auto = ids_of("x")
            assert (await rig.post(TEXT_PATH, {"prompt": prompt})).status == 200
            assert rig.head.seen[0].prompt == [5, 6, 7]
            assert rig.head.seen[0].submit.sampling.max_tokens == 16

    run(main)


def test_ids_and_traces_are_passed_on():
    async def main():
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        async with running_front() as rig:
            rig.head.auto = ids_of("x")
            given = await rig.post(CHAT_PATH, CHAT, X_Request_Id="bench-1-0", traceparent=trace)
            made = await rig.post(CHAT_PATH, CHAT, X_Request_Id="with space", traceparent="00-nonsense")
            labels = [run.submit.label for run in rig.head.seen]
        assert given.headers["x-request-id"] == "bench-1-0" and labels[0] == f"bench-1-0 {trace}"
        assert made.headers["x-request-id"].startswith("req-") and labels[1] == made.headers["x-request-id"]

    run(main)


def test_log_probabilities_go_with_the_text_that_they_are_of():
    async def main():
        async with running_front() as rig, rig.client() as client:
            body = TEXT | {"logprobs": 1, "stream": True, "stop": ["STOP"]}
            await client.post(TEXT_PATH, body)
            one = await rig.head.next()
            assert (one.submit.sampling.logprobs, one.submit.sampling.prompt_logprobs) == (1, -1)
            rig.head.start(one)
            ids = [*ids_of(" a b"), *ids_of("STOP")]
            for place, token in enumerate(ids):
                rig.head.score(one, place, token, -0.5 - place, [(token, -0.5 - place)])
                rig.head.say((one, [token]))
            stream = await client.answer()
            await client.post(CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2})
            one = await rig.head.next()
            rig.head.start(one)
            rig.head.score(one, 0, ids[0], -0.25, [(ids[1], -0.125), (ids[0], -0.25)])
            rig.head.say((one, ids[:1]))
            rig.head.finish(one)
            chat = (await client.answer()).json["choices"][0]["logprobs"]["content"]
        told = [event["choices"][0]["logprobs"] for event in stream.events[:-1]]
        shown = [token for logprobs in told for token in logprobs["tokens"]]
        assert "".join(shown) == stream.text() == " a b", "nothing is told of the stop string"
        assert [value for logprobs in told for value in logprobs["token_logprobs"]] == [-0.5, -1.5][: len(shown)]
        assert [offset for logprobs in told for offset in logprobs["text_offset"]] == [0, 2][: len(shown)]
        assert [entry["logprob"] for entry in chat] == [-0.25]
        assert [top["logprob"] for top in chat[0]["top_logprobs"]] == [-0.125, -0.25]

    run(main)


def test_an_echo_waits_for_the_scores_of_the_prompt():
    async def main():
        async with running_front() as rig, rig.client() as client:
            body = {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 0, "echo": True, "stream": True, "n": 2}
            await client.post(TEXT_PATH, body)
            one, two = await rig.head.next(), await rig.head.next()
            assert (one.submit.sampling.prompt_logprobs, two.submit.sampling.prompt_logprobs) == (0, -1)
            for each in (one, two):
                rig.head.start(each)
                rig.head.score(each, 0, 9, -0.5, [])
                rig.head.say((each, [9]))
            await wait_for(lambda: all(len(each.ask.generated) for each in next(iter(rig.front.generations)).choices))
            rig.head.score_prompt(one, 1, [-1.5])
            rig.head.score_prompt(one, 2, [-2.5])
            for each in (two, one):
                rig.head.score(each, 1, 9, -0.25, [])
                rig.head.say((each, [9]))
                rig.head.finish(each)
            answer = await client.answer()
        for index in (0, 1):
            told = [
                choice["logprobs"]["token_logprobs"]
                for event in answer.events[:-1] for choice in event["choices"] if choice["index"] == index
            ]  # fmt: skip
            assert told[0][:4] == [None, -1.5, -2.5, -0.5] and sum(map(len, told)) == 5
            assert answer.text(index) == served().codec.decode([5, 6, 7, 9, 9])

    run(main)
