"""Bodies: what a POST brings, within its limits, as prompts and sampling that can be submitted.

Prompts and sampling are made by the code that `engine batch` uses (`batch.fields`, `faces.body`); what is HTTP's alone
is here: streams, several prompts in one body, and `max_tokens` that has to fit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.batch.fields import FieldRefused, read_fields
from engine.config import HttpConfig
from engine.errors import RequestRefused
from engine.faces.body import (
    BodyRefused,
    Bounds,
    Treatment,
    Wishes,
    encode_messages,
    encode_prompt,
    list_stops,
    read_sampling,
    read_treatment,
    read_wishes,
    spread_seeds,
    wants_thinking,
)
from engine.faces.grammar import read_grammar
from engine.faces.text import TextCodec
from engine.faces.tools import read_tools
from engine.front.replies import HttpError, refuse_field
from transport.messages import Sampling

BODY_S = 60.0
"""For a body to arrive."""
COMPLETION_MAX_TOKENS = 16
"""Of a completion that says none, as clients of that surface expect."""
IGNORED_NAMES = 32
"""At most so many ignored fields are named in the response's header."""
COMPILED_FIELDS = (b'"response_format"', b'"structured_outputs"', b'"tools"')
"""A body with one of them may hold a grammar, which takes a while to compile however short it is."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_as_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_as_bool = msgspec.json.Decoder(bool)


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`; what else it holds is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_as_options = msgspec.json.Decoder(StreamOptions)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What is served, and how long requests may be.

    Attributes:
        name: as answers name the model; `names` are all by which a body may ask for it, the head's own last.
        created: seconds since 1970, of the front.
    """

    codec: TextCodec
    bounds: Bounds
    name: str
    names: tuple[str, ...]
    created: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A body that can be submitted.

    Attributes:
        prompts: int32[num_ids] each.
        samplings: of each prompt, one for each of its choices.
        ignored: fields that mean nothing here.
        may_call: answers may hold calls of tools.
    """

    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompts: tuple[bytes, ...]
    samplings: tuple[tuple[Sampling, ...], ...]
    stops: tuple[str, ...]
    wishes: Wishes
    treatment: Treatment
    thinking: bool
    ignored: tuple[str, ...]
    may_call: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts) // 4


async def read_body(receive: Any, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        HttpError: 413 beyond the limit, 408 if it does not arrive in time.
        ClientLeft: it never will.
    """
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise HttpError(408, "request_timeout", f"the body did not arrive within {BODY_S:g} s", closes=True) from None


class ClientLeft(Exception):
    """The connection ended before the request was there."""


def _too_large(limit_bytes: int) -> HttpError:
    return HttpError(413, "request_too_large", f"a body may have {limit_bytes} bytes (http.body_bytes)")


def read_object(data: bytes) -> dict[str, msgspec.Raw]:
    """The body's fields.

    Raises:
        HttpError: 400.
    """
    try:
        data.decode("utf-8")
        return _as_object.decode(data)
    except UnicodeDecodeError as error:
        raise HttpError(400, "invalid_json", f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise HttpError(400, "invalid_json", "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise HttpError(400, "invalid_json", f"the body is no JSON object: {error}") from None


def check_model(fields: Mapping[str, msgspec.Raw], served: Served) -> None:
    """Raises HttpError 404 if the body asks for another model; without a name it is the one that is served."""
    raw = fields.get("model")
    if raw is None or bytes(raw) == b"null":
        return
    try:
        model = msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError as error:
        raise refuse_field("invalid_field", f"model: {error}") from None
    if model not in served.names:
        raise HttpError(
            404, "model_not_found", f"the model {model[:128]!r} does not exist; {served.name!r} is served here",
            param="model",
        )  # fmt: skip


def read_wanted(data: bytes, served: Served, http: HttpConfig, *, is_chat: bool) -> Wanted:
    """A body to what is to be submitted. CPU work that grows with the prompt; never waits.

    Raises:
        HttpError: 400 or 404, naming the field and the limit.
    """
    fields = read_object(data)
    check_model(fields, served)
    stream = bool(_take(fields, "stream", _as_bool))
    options = _take(fields, "stream_options", _as_options) or StreamOptions()
    try:
        values, ignored = read_fields(fields, {}, chat=is_chat)
        wishes = read_wishes(values, chat=is_chat)
        if stream and wishes.prompt_logprobs >= 0:
            raise BodyRefused(
                "bad_request", "unsupported_field", "prompt_logprobs: not supported in a stream; see echo"
            )
        if is_chat:
            prompts = [encode_messages(served.codec, values, served.bounds)]
        else:
            prompts = _encode_prompts(values, served, http)
        thinking = is_chat and wants_thinking(values)
        tools = read_tools(values) if is_chat else None
        grammar = read_grammar(values, served.codec, tools, thinking=thinking)
        choices = values.get("n", 1)
        if choices * len(prompts) > http.choices:
            raise refuse_field(
                "invalid_field",
                f"n: {choices} answers to {len(prompts)} prompts are {choices * len(prompts)} choices"
                f" (limit {http.choices}, http.choices)",
            )
        samplings = tuple(
            tuple(
                spread_seeds(
                    read_sampling(
                        values,
                        len(prompt) // 4,
                        wishes,
                        served.bounds,
                        seed=secrets.randbits(53),
                        default_max_tokens=http.default_max_tokens if is_chat else COMPLETION_MAX_TOKENS,
                        shorten=False,
                        grammar=grammar,
                    ),
                    choices,
                )
            )
            for prompt in prompts
        )
    except (BodyRefused, FieldRefused) as error:
        if error.field_code == "context_length_exceeded":
            where = "messages" if is_chat else "prompt"
            raise HttpError(400, error.field_code, str(error), param=where) from None
        raise refuse_field(error.field_code, str(error)) from None
    except RequestRefused as error:
        raise refuse_field("invalid_field", str(error)) from None
    return Wanted(
        is_chat=is_chat,
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        prompts=tuple(prompts),
        samplings=samplings,
        stops=tuple(list_stops(values)),
        wishes=wishes,
        treatment=read_treatment(values),
        thinking=thinking,
        may_call=tools is not None,
        ignored=ignored,
    )


def _encode_prompts(values: Mapping[str, Any], served: Served, http: HttpConfig) -> list[bytes]:
    """The prompts of a completion: a text, ids, or a list of either."""
    if "prompt" not in values:
        raise RequestRefused("bad_request", "prompt: missing")
    prompt = values["prompt"]
    if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
        prompts = [prompt]
    elif any(isinstance(one, int) for one in prompt):
        raise RequestRefused("bad_request", "prompt: a list holds texts, or ids, or lists of ids, not both")
    else:
        prompts = prompt
    if len(prompts) > http.choices:
        raise RequestRefused("bad_request", f"prompt: {len(prompts)} prompts (limit {http.choices}, http.choices)")
    add_special = values.get("add_special_tokens", True)
    return [encode_prompt(served.codec, one, served.bounds, add_special=add_special) for one in prompts]


def _take(fields: dict[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    raw = fields.pop(name, None)
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise refuse_field("invalid_field", f"{name}: {error}") from None


def ignored_header(ignored: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """`engine-ignored-fields`, with the names that a header can carry."""
    names = [name for name in ignored[:IGNORED_NAMES] if _HEADER_NAME.fullmatch(name)]
    return [(b"engine-ignored-fields", ",".join(names).encode())] if names else []
