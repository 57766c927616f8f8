"""What a request body may hold: every field with its type, and the few that are only allowed to say nothing.

A field that this engine does not know is ignored and reported. A field that it knows and can not honour is refused
unless it asks for nothing (`best_of: 1`, `functions: []`), because a client must be able to rely on what it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from engine.errors import RequestRefused
from engine.faces.body import MOST_PRIORITY
from engine.faces.chat import ChatMessage
from engine.faces.grammar import ResponseFormat, StructuredOutputs
from engine.faces.tools import ToolChoice, ToolList
from transport.messages import BIAS_LIMIT, TOP_LIMIT

MAX_STOPS = 16
MAX_CHOICES = 128
"""Answers to one prompt."""
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Tops = Annotated[int, msgspec.Meta(ge=0, le=TOP_LIMIT)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class ChatOptions(msgspec.Struct, frozen=True):
    """`chat_template_kwargs`. Both spellings that clients use for "reason first"."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


FIELD_TO_TYPE: dict[str, Any] = {
    "model": str,
    "messages": Annotated[list[ChatMessage], msgspec.Meta(min_length=1)],
    "prompt": str | list[int | str | list[int]],
    "max_tokens": Count,
    "max_completion_tokens": Count,
    "min_tokens": Id,
    "temperature": Annotated[float, msgspec.Meta(ge=0, le=100)],
    "top_p": Annotated[float, msgspec.Meta(gt=0, le=1)],
    "top_k": Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)],
    "seed": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "stop": StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)],
    "stop_token_ids": Annotated[list[Id], msgspec.Meta(max_length=64)],
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "add_special_tokens": bool,
    "continue_final_message": bool,
    "chat_template_kwargs": ChatOptions,
    "min_p": Annotated[float, msgspec.Meta(ge=0, le=1)],
    "repetition_penalty": Annotated[float, msgspec.Meta(gt=0, le=100)],
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "logit_bias": Annotated[dict[str, Bias], msgspec.Meta(max_length=BIAS_LIMIT)],
    "n": Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)],
    "logprobs": bool | Tops,
    "top_logprobs": Tops,
    "prompt_logprobs": Tops,
    "echo": bool,
    "return_token_ids": bool,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
    "tools": ToolList,
    "tool_choice": ToolChoice,
    "parallel_tool_calls": bool,
    # How it is treated; its answer is the same.
    "cache_salt": Annotated[str, msgspec.Meta(min_length=1, max_length=256)],
    "priority": Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)],
    # Known, without effect on the answer.
    "user": str,
    # Known and not supported: only the values below are taken.
    "best_of": int,
    "stream": bool,
    "suffix": str,
    "functions": list[msgspec.Raw],
    "guided_json": msgspec.Raw,
    "guided_regex": str,
    "guided_choice": list[str],
}
FIELD_TO_DECODER: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(type_) for name, type_ in FIELD_TO_TYPE.items()
}
FIELD_TO_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "suffix": ("",),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
}
"""Values of unsupported fields that ask for nothing."""
FIELD_TO_IDLE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "echo": (False,),
    "return_token_ids": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": (ResponseFormat("text"),),
    "structured_outputs": (StructuredOutputs(),),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}
"""Values of supported fields that say what their absence says, so that a line's digest is the same."""
TREATMENT = frozenset({"user", "cache_salt", "priority"})
"""Fields that no answer depends on."""
CHAT_ONLY = frozenset(
    {
        *("messages", "continue_final_message", "chat_template_kwargs", "max_completion_tokens"),
        *("tools", "tool_choice", "parallel_tool_calls"),
    }
)
COMPLETION_ONLY = frozenset({"prompt", "add_special_tokens", "best_of", "echo", "suffix"})
BODY_KEYS = frozenset(FIELD_TO_TYPE)
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")


class FieldRefused(RequestRefused):
    """A body field that can not be honoured. `code` is `bad_request`, `field_code` says more."""

    def __init__(self, message: str, field_code: str) -> None:
        super().__init__("bad_request", message)
        self.field_code = field_code


def decode_field(name: str, raw: bytes | msgspec.Raw) -> Any:
    """The value of a known field; None for JSON null.

    Raises:
        FieldRefused: of a wrong type (`invalid_field`), or a wish that is not supported (`unsupported_field`).
    """
    data = bytes(raw)
    if data.strip() == b"null":
        return None
    try:
        value = FIELD_TO_DECODER[name].decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FieldRefused(f"{name}: {error}", "invalid_field") from error
    if name in FIELD_TO_NEUTRAL and not _is_neutral(value, FIELD_TO_NEUTRAL[name]):
        raise FieldRefused(f"{name}: this value is not supported yet; leave the field out", "unsupported_field")
    return value


def says_nothing(name: str, value: Any) -> bool:
    """Whether a supported field with this value asks for what is done without it."""
    return name in FIELD_TO_IDLE and _is_neutral(value, FIELD_TO_IDLE[name])


def read_fields(
    body: Mapping[str, msgspec.Raw], defaults: Mapping[str, bytes], *, chat: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The known fields of a body with the defaults for those it lacks, and the names of the fields that were ignored.

    Fields of the other kind of request (`messages` in a completion) count as ignored, but for `prompt` and `messages`
    themselves, which contradict each other.

    Raises:
        FieldRefused: see `decode_field`.
    """
    foreign = COMPLETION_ONLY if chat else CHAT_ONLY
    values: dict[str, Any] = {}
    ignored = []
    for name, raw in body.items():
        if name not in FIELD_TO_TYPE or name in foreign:
            ignored.append(name)
            continue
        value = decode_field(name, raw)
        if value is not None and name not in FIELD_TO_NEUTRAL:
            values[name] = value
    has_limit = any(name in values for name in LIMIT_FIELDS)
    for name, default in defaults.items():
        if name in values or name in foreign or (has_limit and name in LIMIT_FIELDS):
            continue
        value = decode_field(name, default)
        if value is not None and name not in FIELD_TO_NEUTRAL:
            values[name] = value
    return values, tuple(ignored)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        value = {key: bytes(item) if isinstance(item, msgspec.Raw) else item for key, item in value.items()}
    # `False == 0` in Python, but a number is no answer to a question of yes or no.
    return any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in neutral)
