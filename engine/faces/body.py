"""A request body's fields as a prompt's ids, sampling and wishes: what a line of a batch and an HTTP request have in
common. Which fields exist and which values they take is `batch.fields`; `values` are what that read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import RequestRefused
from engine.faces.chat import encode_chat
from engine.faces.text import TextCodec, pack_ids
from engine.faces.tools import read_tools
from transport.messages import Sampling

SEED_MASK = 2**53 - 1
MOST_PRIORITY = 100


class BodyRefused(RequestRefused):
    """A body whose fields do not go together, or do not fit the model.

    Attributes:
        code: `bad_request` or `too_long`.
        field_code: finer, for programs: `invalid_field` or `context_length_exceeded`.
    """

    def __init__(self, code: str, field_code: str, message: str) -> None:
        super().__init__(code, message)
        self.field_code = field_code


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What the served model allows: ids in [0, vocab_size), prompt and completion together in `max_model_tokens`."""

    vocab_size: int
    max_model_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What an answer is to hold beside the text; -1 for no log-probabilities, else how many likeliest tokens.
    `token_ids`: the ids of prompt and completion.
    """

    logprobs: int = -1
    prompt_logprobs: int = -1
    echo: bool = False
    skip_special: bool = True
    token_ids: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Treatment:
    """How a request is treated, whatever its answer: see `transport.messages.Submit`."""

    priority: int = 0
    cache_salt: str = ""


def read_treatment(values: Mapping[str, Any], *, priority: int = 0) -> Treatment:
    """`priority`: what the body's own is added to."""
    wanted = priority + values.get("priority", 0)
    return Treatment(max(-MOST_PRIORITY, min(MOST_PRIORITY, wanted)), values.get("cache_salt", ""))


def wants_thinking(values: Mapping[str, Any]) -> bool:
    """Whether a chat asks the model to reason first."""
    options = values.get("chat_template_kwargs")
    return bool(options and (options.thinking or options.enable_thinking))


def list_stops(values: Mapping[str, Any]) -> list[str]:
    """The stop strings."""
    stop = values.get("stop", [])
    return [stop] if isinstance(stop, str) else list(stop)


def encode_messages(codec: TextCodec, values: Mapping[str, Any], bounds: Bounds) -> bytes:
    """The prompt of a chat: int32[num_ids].

    Raises:
        RequestRefused: the chat format has no place for it.
        BodyRefused: it can not fit.
    """
    if "messages" not in values:
        raise RequestRefused("bad_request", "messages: missing")
    messages = values["messages"]
    num_characters = sum(
        len(part if isinstance(part, str) else part.text or "")
        for message in messages
        for part in ([message.content] if isinstance(message.content, str) else message.content or ())
    )
    tools = read_tools(values)
    functions = () if tools is None else tools.shown
    num_characters += len(msgspec.json.encode(functions)) // 4  # UTF-8 has at most four bytes for a character
    _check_fits(codec, num_characters, bounds)
    return encode_chat(
        codec,
        messages,
        thinking=wants_thinking(values),
        continue_final=values.get("continue_final_message", False),
        functions=functions,
    )


def encode_prompt(codec: TextCodec, prompt: str | list[int], bounds: Bounds, *, add_special: bool = True) -> bytes:
    """One prompt of a completion, given as text or as ids: int32[num_ids].

    Raises:
        RequestRefused: it is empty, or an id is not the model's.
        BodyRefused: it can not fit.
    """
    limit = bounds.max_model_tokens
    if isinstance(prompt, str):
        _check_fits(codec, len(prompt), bounds)
        encoded = codec.encode_document(prompt, bos=add_special)
        if not encoded:
            raise RequestRefused("bad_request", "prompt: empty")
        return encoded
    if not prompt:
        raise RequestRefused("bad_request", "prompt: empty")
    if len(prompt) <= limit and not all(0 <= token < bounds.vocab_size for token in prompt):
        raise RequestRefused("bad_request", f"prompt: token ids must be in [0, {bounds.vocab_size})")
    return pack_ids(prompt) if len(prompt) <= limit else pack_ids([0] * (limit + 1))


def _check_fits(codec: TextCodec, num_characters: int, bounds: Bounds) -> None:
    """Spares the tokenizer a text that can not fit: no token is longer than `longest_token_bytes`."""
    limit = bounds.max_model_tokens
    if num_characters > limit * codec.longest_token_bytes:
        least = -(-num_characters // codec.longest_token_bytes)
        raise _too_long(limit, f"at least {least}")


def read_sampling(
    values: Mapping[str, Any],
    num_prompt: int,
    wishes: Wishes,
    bounds: Bounds,
    *,
    seed: int,
    default_max_tokens: int,
    shorten: bool,
    grammar: str = "",
) -> Sampling:
    """How tokens are chosen.

    Args:
        num_prompt: ids of the prompt.
        seed: in force if the body has none.
        default_max_tokens: the same; what does not fit beside the prompt is left out.
        shorten: `max_tokens` that does not fit beside the prompt is shortened, not refused.
        grammar: what the text has to follow, see `read_grammar`.

    Raises:
        BodyRefused: there is no room for an answer, or fields contradict each other.
    """
    limit = bounds.max_model_tokens
    room = limit - num_prompt
    if room < 1:
        raise _too_long(limit, str(num_prompt))
    asked = values.get("max_completion_tokens", values.get("max_tokens"))
    wanted: int = default_max_tokens if asked is None else asked
    if wanted > room and asked is not None and not shorten:
        raise BodyRefused(
            "too_long",
            "context_length_exceeded",
            f"this model's maximum context length is {limit} tokens, but the prompt has {num_prompt} and max_tokens is"
            f" {asked}, which makes {num_prompt + asked}",
        )
    max_tokens = min(wanted, room)
    min_tokens = values.get("min_tokens", 0)
    if min_tokens > wanted:
        raise BodyRefused(
            "bad_request", "invalid_field", f"min_tokens: {min_tokens} is more than max_tokens, which is {wanted}"
        )
    biases = _read_biases(values.get("logit_bias", {}), bounds.vocab_size)
    own_seed = values.get("seed")
    return Sampling(
        temperature=values.get("temperature", 1.0),
        top_p=values.get("top_p", 1.0),
        top_k=max(values.get("top_k", 0), 0),
        seed=(seed if own_seed is None else own_seed) & SEED_MASK,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        ignore_eos=values.get("ignore_eos", False),
        stop_ids=tuple(values.get("stop_token_ids", ())),
        min_p=values.get("min_p", 0.0),
        repetition_penalty=values.get("repetition_penalty", 1.0),
        presence_penalty=values.get("presence_penalty", 0.0),
        frequency_penalty=values.get("frequency_penalty", 0.0),
        bias_ids=tuple(biases),
        biases=tuple(biases.values()),
        logprobs=wishes.logprobs,
        prompt_logprobs=max(wishes.prompt_logprobs, wishes.logprobs if wishes.echo else -1),
        grammar=grammar,
    )


def _read_biases(asked: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """By id. JSON has ids as strings here."""
    biases: dict[int, float] = {}
    for name, bias in asked.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) < vocab_size):
            raise BodyRefused(
                "bad_request", "invalid_field", f"logit_bias: {name[:32]!r} is not a token id in [0, {vocab_size})"
            )
        if int(name) in biases:
            raise BodyRefused("bad_request", "invalid_field", f"logit_bias: id {int(name)} is there twice")
        biases[int(name)] = bias
    return biases


def read_wishes(values: Mapping[str, Any], *, chat: bool) -> Wishes:
    """What the answer is to hold beside the text. In a chat `logprobs` is yes or no and `top_logprobs` a number; in a
    completion `logprobs` is the number.

    Raises:
        BodyRefused: they do not go together.
    """
    logprobs, tops = values.get("logprobs", False), values.get("top_logprobs", 0)
    if chat and not isinstance(logprobs, bool):
        raise BodyRefused("bad_request", "invalid_field", "logprobs: in a chat true or false; top_logprobs is a number")
    if chat and tops and not logprobs:
        raise BodyRefused("bad_request", "invalid_field", "top_logprobs: needs logprobs to be true")
    if not chat and tops:
        raise BodyRefused("bad_request", "invalid_field", "top_logprobs: is for chats; here logprobs is a number")
    if not chat and logprobs is True:
        raise BodyRefused("bad_request", "invalid_field", "logprobs: in a completion a number of likeliest tokens")
    if chat:
        count = tops if logprobs else -1
    else:
        count = -1 if logprobs is False else logprobs
    return Wishes(
        logprobs=count,
        prompt_logprobs=values.get("prompt_logprobs", -1),
        echo=values.get("echo", False),
        skip_special=values.get("skip_special_tokens", True),
        token_ids=values.get("return_token_ids", False),
    )


def spread_seeds(sampling: Sampling, choices: int) -> list[Sampling]:
    """The settings of each answer to one prompt. The first has the seed itself, so that it is the answer of `n: 1`."""
    result = [sampling]
    for choice in range(1, choices):
        text = f"{sampling.seed}:{choice}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"choice").digest(), "little") & SEED_MASK
        # The prompt is the same for all of them: it is scored once.
        result.append(msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=-1))
    return result


def _too_long(limit: int, has: str) -> BodyRefused:
    return BodyRefused(
        "too_long",
        "context_length_exceeded",
        f"this model's maximum context length is {limit} tokens, the prompt has {has} and no room for an answer",
    )
