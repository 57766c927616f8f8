"""Frames: what a generation says, as chunks of a stream or as one body, in the shapes of the OpenAI surface.

What is the same in every chunk of a stream is rendered once. A chunk of a choice has all that came since the one
before, and the first one of a chat has the role, so that whoever counts chunks measures tokens.
"""

from __future__ import annotations

import array
from typing import Any

import msgspec

from engine.actors.told import Told
from engine.faces.calls import Call
from engine.faces.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, text_offsets
from engine.front.bodies import Served, Wanted
from engine.front.choice import Choice
from engine.front.generation import Generation
from engine.front.replies import encoder

DONE = b"data: [DONE]\n\n"
Scores = tuple[list[int], list[int], Told]


class Renderer:
    """Renders one request's answer.

    Args:
        number: hex digits that make the answer's id.
        created: seconds since 1970.
    """

    def __init__(self, wanted: Wanted, generation: Generation, served: Served, number: str, created: int) -> None:
        self._wanted = wanted
        self._generation = generation
        self._codec = served.codec
        kind = ("chatcmpl", "chat.completion") if wanted.is_chat else ("cmpl", "text_completion")
        self._common: dict[str, Any] = {
            "id": f"{kind[0]}-{number}", "object": kind[1], "created": created, "model": served.name,
        }  # fmt: skip
        chunk = self._common | ({"object": "chat.completion.chunk"} if wanted.is_chat else {})
        self._head = b"data: " + encoder.encode(chunk)[:-1] + b',"choices":['
        self._ended: set[int] = set()
        self._echoes: dict[int, str] = {}
        self._has_prompt = False

    # ------------------------------------------------------------ a stream

    def chunks(self) -> bytes:
        """All that is new, choice by choice; empty if nothing is."""
        parts: list[bytes] = []
        for choice in self._generation.choices:
            if not choice.begun and self._lacks_prompt(choice):
                choice.lag = 0
                continue
            is_end = choice.reason is not None and choice.index not in self._ended
            is_counted = self._tells_all and choice.lag > 0 and choice.index not in self._ended
            choice.lag = 0  # the reader keeps up, whether there is text to show or not
            if is_end or is_counted or choice.has_news:
                if is_end:
                    self._ended.add(choice.index)
                prompt = self._chunk_prompt(choice)
                parts += (self._head, self._chunk(choice), b"]", prompt, self._chunk_usage(), b"}\n\n")
        return b"".join(parts)

    def last_chunks(self) -> bytes:
        """What follows the last choice's end."""
        if not self._wanted.include_usage:
            return DONE
        metrics = self._metrics()
        told = b"" if metrics is None else b',"metrics":' + encoder.encode(metrics)
        return b"".join((self._head, b'],"usage":', encoder.encode(self.usage()), told, b"}\n\n", DONE))

    def _chunk(self, choice: Choice) -> bytes:
        is_first = not choice.begun
        text, thought = choice.take_text()
        if self._wanted.is_chat:
            said = self._delta(text, thought, choice.take_calls(), is_first=is_first)
            scores = self._scores(choice)
        else:
            echoed = self._echo(choice) if is_first else ""
            said = b'"text":' + encoder.encode(echoed + text)
            scores = self._scores(choice, echoed=echoed if is_first else None)
        reason = b"null" if choice.reason is None else encoder.encode(choice.reason)
        index = str(choice.index).encode()
        told = encoder.encode(scores)
        ids = self._chunk_ids(choice, is_first=is_first)
        return b"".join(
            (b'{"index":', index, b",", said, b',"logprobs":', told, ids, b',"finish_reason":', reason, b"}")
        )

    @property
    def _tells_all(self) -> bool:
        """Whether tokens without text have a chunk, too."""
        return self._wanted.continuous_usage or self._wanted.wishes.token_ids

    def _chunk_ids(self, choice: Choice, *, is_first: bool) -> bytes:
        """Where ids are asked for: those that are new; in a completion's first chunk the prompt's as well."""
        if not self._wanted.wishes.token_ids:
            return b""
        told = b',"token_ids":' + encoder.encode(choice.take_ids())
        if is_first and not self._wanted.is_chat:
            told += b',"prompt_token_ids":' + encoder.encode(_ids(choice))
        return told

    def _chunk_prompt(self, choice: Choice) -> bytes:
        """A chat's prompt is that of all its choices, so its ids are in the first chunk and not in the choice's."""
        if self._has_prompt or not (self._wanted.is_chat and self._wanted.wishes.token_ids):
            return b""
        self._has_prompt = True
        return b',"prompt_token_ids":' + encoder.encode(_ids(choice))

    def _delta(self, text: str, thought: str, told: tuple[int, list[Call]], *, is_first: bool) -> bytes:
        first, calls = told
        fields = []
        if is_first:
            fields.append(b'"role":"assistant"')
        if thought:
            fields.append(b'"reasoning_content":' + encoder.encode(thought))
        if text or (is_first and not thought and not calls):
            fields.append(b'"content":' + encoder.encode(text))
        if calls:
            rendered = [{"index": place, **call.render()} for place, call in enumerate(calls, first)]
            fields.append(b'"tool_calls":' + encoder.encode(rendered))
        return b'"delta":{' + b",".join(fields) + b"}"

    def _chunk_usage(self) -> bytes:
        if self._wanted.continuous_usage:
            return b',"usage":' + encoder.encode(self.usage())
        return b',"usage":null' if self._wanted.include_usage else b""

    # ------------------------------------------------------------ one body

    def body(self) -> bytes:
        """The whole answer, once every choice has ended."""
        whole: dict[str, Any] = {**self._common, "choices": list(map(self._whole, self._generation.choices))}
        whole["usage"] = self.usage()
        metrics = self._metrics()
        if metrics is not None:
            whole["metrics"] = metrics
        if self._wanted.is_chat and self._wanted.wishes.token_ids:
            whole["prompt_token_ids"] = _ids(self._generation.choices[0])
        if self._wanted.is_chat and self._wanted.wishes.prompt_logprobs >= 0:
            whole["prompt_logprobs"] = self._prompt_logprobs(self._generation.choices[0])
        return encoder.encode(whole)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text, thought = choice.take_text()
        if self._wanted.is_chat:
            _, calls = choice.take_calls()
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message |= {"content": text or None, "tool_calls": [call.render() for call in calls]}
            if self._wanted.thinking:
                message["reasoning_content"] = thought
            said: dict[str, Any] = {"message": message, "logprobs": self._scores(choice)}
        else:
            echoed = self._echo(choice)
            said = {"text": echoed + text, "logprobs": self._scores(choice, echoed=echoed)}
            if self._wanted.wishes.prompt_logprobs >= 0:
                said["prompt_logprobs"] = self._prompt_logprobs(choice)
            if self._wanted.wishes.token_ids:
                said["prompt_token_ids"] = _ids(choice)
        if self._wanted.wishes.token_ids:
            said["token_ids"] = choice.take_ids()
        return {"index": choice.index, **said, "finish_reason": choice.reason}

    # ------------------------------------------------------------ parts of either

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt counts once, whatever the number of its answers."""
        choices = self._generation.choices
        firsts = choices[:: self._per_prompt]
        prompt = self._wanted.num_prompt_tokens
        completion = sum(choice.tokens for choice in choices)
        cached = sum(choice.ask.started.cached_tokens for choice in firsts if choice.ask.started is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _metrics(self) -> dict[str, float | None] | None:
        """Where the time of an answer went, in milliseconds; None for several choices, which have no common one."""
        generation = self._generation
        started = generation.choices[0].ask.started
        if len(generation.choices) > 1 or started is None:
            return None
        handoff_us = generation.choices[0].ask.handoff_us
        return {
            "queue_time_ms": started.timings.queue_us / 1e3,
            "time_to_first_token_ms": round(1e3 * (generation.first_token_at - generation.began_at), 3),
            # A text that ended here, by a stop string, was not reported on by the engine.
            "handoff_ms": None if handoff_us is None else handoff_us / 1e3,
        }

    @property
    def _per_prompt(self) -> int:
        return len(self._wanted.samplings[0])

    def _prompt_told(self, choice: Choice) -> Told | None:
        """The log-probabilities of the choice's prompt, once all of them are there. Its first choice asks for them."""
        first = self._generation.choices[choice.index - choice.index % self._per_prompt].ask
        told = first.prompt_told
        return told if told is not None and len(told) >= len(first.prompt) // 4 else None

    def _lacks_prompt(self, choice: Choice) -> bool:
        """Whether the first chunk has to wait for what it echoes. It waits for nobody whose end was told."""
        wishes = self._wanted.wishes
        if self._wanted.is_chat or not wishes.echo or wishes.logprobs < 0:
            return False
        first = self._generation.choices[choice.index - choice.index % self._per_prompt].ask
        return first.owner is not None and self._prompt_told(choice) is None

    def _echo(self, choice: Choice) -> str:
        """The text of the choice's prompt, where the answer begins with it."""
        if not self._wanted.wishes.echo:
            return ""
        place = choice.index // self._per_prompt
        if place not in self._echoes:
            self._echoes[place] = self._codec.decode(_ids(choice), skip_special=self._wanted.wishes.skip_special)
        return self._echoes[place]

    def _scores(self, choice: Choice, *, echoed: str | None = None) -> dict[str, Any] | None:
        """`logprobs` of what is new of a choice. `echoed`: the prompt's text, where its tokens are told, too."""
        wishes = self._wanted.wishes
        if wishes.logprobs < 0:
            return None
        ids, offsets, told = choice.take_scores()
        if self._wanted.is_chat:
            return chat_logprobs(self._codec, ids, told, wishes.logprobs)
        parts = [(told, len(ids))]
        if wishes.echo:
            length = len(self._echo(choice))
            offsets = [length + offset for offset in offsets]
            scored = self._prompt_told(choice)
            if echoed is not None and scored is not None:
                prompt = _ids(choice)
                before = text_offsets(self._codec, prompt, skip_special=wishes.skip_special)
                ids, offsets = [*prompt, *ids], [*before, *offsets]
                parts = [(scored, len(prompt)), *parts]
        return completion_logprobs(self._codec, ids, offsets, parts, wishes.logprobs)

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None] | None:
        told = self._prompt_told(choice)
        if told is None:
            return None
        return prompt_logprobs(self._codec, _ids(choice), told, self._wanted.wishes.prompt_logprobs)


def _ids(choice: Choice) -> list[int]:
    ids = array.array("i")
    ids.frombytes(choice.ask.prompt)
    return ids.tolist()


def error_frame(body: bytes) -> bytes:
    """An error after the headers are out; the stream then ends without its `[DONE]`."""
    return b"data: " + msgspec.json.format(body, indent=-1) + b"\n\n"
