"""Calls a running engine through the official client, in an interpreter of its own; says what came as JSON."""

from __future__ import annotations

import json
import sys

import openai


def main(url: str) -> dict[str, object]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="first-key", max_retries=0, timeout=60)
    ask = {"model": "nano", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    sure = {"temperature": 0, "max_tokens": 12, "seed": 1}
    said: dict[str, object] = {"models": [model.id for model in client.models.list()]}
    whole = client.chat.completions.create(**ask, **sure)
    said["chat"] = [whole.choices[0].message.content, whole.usage.model_dump()]
    chunks = list(client.chat.completions.create(**ask, **sure, stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    said["stream"] = ["".join(pieces), chunks[-1].usage.model_dump()]
    text = client.completions.create(model="nano", prompt="The capital", logprobs=2, echo=True, **sure)
    said["completion"] = text.choices[0].text
    said["logprobs"] = text.choices[0].logprobs.model_dump()
    several = client.completions.create(model="nano", prompt=["One", [5, 6]], n=2, max_tokens=4)
    said["several"] = [choice.index for choice in several.choices]
    stopped = client.chat.completions.create(**ask, **sure, stop=" is")
    said["stopped"] = [stopped.choices[0].message.content, stopped.choices[0].finish_reason]
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    drawn = {"temperature": 0.8, "max_tokens": 300}
    formed = [client.chat.completions.create(**ask, **drawn, seed=seed, response_format=form) for seed in range(2)]
    said["formed"] = [[each.choices[0].message.content, each.choices[0].finish_reason] for each in formed]
    chunks = list(client.chat.completions.create(**ask, **drawn, seed=0, response_format=form, stream=True))
    said["formed stream"] = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    drawn["extra_body"] = {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
    chosen = client.completions.create(model="nano", prompt="Is it?", n=4, **drawn)
    said["chosen"] = [choice.text for choice in chosen.choices]
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.create(**ask, temperature=0.8, max_tokens=300, seed=2, **forced)
    streamed = client.chat.completions.create(**ask, temperature=0.8, max_tokens=300, seed=2, **forced, stream=True)
    deltas = [choice.delta.tool_calls or [] for chunk in streamed for choice in chunk.choices]
    (call,) = called.choices[0].message.tool_calls
    said["called"] = [called.choices[0].finish_reason, call.function.name, call.function.arguments]
    said["called stream"] = [[each.function.name, each.function.arguments] for told in deltas for each in told]
    raw = client.chat.completions.with_raw_response.create(**ask, max_tokens=1, extra_headers={"X-Request-Id": "mine"})
    said["request_id"] = raw.headers["x-request-id"]
    errors = []
    for change in (
        {"model": "gpt"},
        {"max_tokens": 10**6},
        {"tools": [{"type": "function", "function": {"name": "no name"}}]},
    ):
        try:
            client.chat.completions.create(**{**ask, **change})
        except openai.APIStatusError as error:
            errors.append([type(error).__name__, error.status_code, error.code])
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.APIStatusError as error:
        errors.append([type(error).__name__, error.status_code, error.code])
    said["errors"] = errors
    with client.chat.completions.create(**ask, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    return said


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
