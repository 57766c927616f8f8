"""The chat format of DeepSeek-V4, as code: messages in, user text and named tokens out.

    BOS system <｜User｜>question<｜Assistant｜></think>answer EOS <｜User｜>...<｜Assistant｜></think>

The last mark says how the model is to begin: `<think>` to reason first, `</think>` to answer at once. Reasoning of
earlier turns is left out, as in training. Results of tools stand in a user turn; calls of tools are DSML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.errors import RequestRefused
from engine.faces.text import ASSISTANT, DSML, END_THINK, THINK, USER, TextCodec
from engine.faces.tools import Function, describe_tools


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content. Only `text` is supported."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is an object, or the text of one, as the OpenAI surface has it."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made in an earlier turn."""

    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. Fields that the format has no place for (`name`, `tool_call_id`) are not read."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


def encode_chat(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    *,
    thinking: bool = False,
    continue_final: bool = False,
    functions: Sequence[Function] = (),
) -> bytes:
    """The prompt that asks for the next answer: int32[num_ids].

    Args:
        codec: the model's tokenizer.
        messages: the conversation, at least one message.
        thinking: the model reasons first.
        continue_final: the last message is the beginning of the answer; the model goes on from it.
        functions: what the answer may call. They are described behind the system's text.

    Raises:
        RequestRefused: `bad_request`, naming the message, for a role or content that the format has no place for.
    """
    return codec.encode_segments(
        chat_segments(codec, messages, thinking=thinking, continue_final=continue_final, functions=functions)
    )


def chat_segments(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    *,
    thinking: bool = False,
    continue_final: bool = False,
    functions: Sequence[Function] = (),
) -> list[str | int]:
    """As `encode_chat`, before the text is encoded: str is text of the user, int a named token."""
    if not messages:
        raise RequestRefused("bad_request", "messages: at least one message is needed")
    if continue_final and messages[-1].role != "assistant":
        raise RequestRefused("bad_request", "continue_final_message: the last message is not the assistant's")
    user, assistant, answer = (_id(codec, name) for name in (USER, ASSISTANT, END_THINK))
    segments: list[str | int] = [codec.bos_id]
    previous = ""
    systems = next((n for n, each in enumerate(messages) if each.role not in ("system", "developer")), len(messages))
    for place, message in enumerate(messages):
        if functions and place == systems:
            segments += ["\n\n"] if systems else []
            segments += describe_tools(codec, functions)
        where = f"messages[{place}]"
        text = message_text(message, where)
        match message.role:
            case "system" | "developer":
                segments.append("\n\n" + text if previous == "system" else text)
            case "user":
                segments += [user, text]
            case "tool":
                segments += ["\n\n"] if previous == "tool" else [user]
                segments.append(f"<tool_result>{text}</tool_result>")
            case "assistant":
                segments += [assistant, answer, text, *_call_segments(codec, message.tool_calls or (), where)]
                if not (continue_final and place == len(messages) - 1):
                    segments.append(codec.eos_id)
            case role:
                raise RequestRefused(
                    "bad_request", f"{where}.role: {role[:64]!r} is not one of system, developer, user, assistant, tool"
                )
        previous = "system" if message.role == "developer" else message.role
    if functions and systems == len(messages):
        segments += ["\n\n", *describe_tools(codec, functions)]
    if not continue_final:
        segments += [assistant, _id(codec, THINK) if thinking else answer]
    return segments


def message_text(message: ChatMessage, where: str) -> str:
    """The text of a message's content, whichever form it has; `where` names the message in errors.

    Raises:
        RequestRefused: a part that is not text, or no content where the role needs one.
    """
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise RequestRefused("bad_request", f"{where}.content: a {message.role[:64]} message needs content")
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestRefused(
                "bad_request",
                f"{where}.content[{place}]: parts of type {part.type[:64]!r} are not supported, only text",
            )
        texts.append(part.text)
    return "".join(texts)


def _id(codec: TextCodec, name: str) -> int:
    number = codec.named_id(name)
    if number is None:
        raise RequestRefused("bad_request", f"this model's tokenizer has no {name} token")
    return number


def _call_segments(codec: TextCodec, calls: Sequence[ToolCall], where: str) -> Iterator[str | int]:
    """Calls as DSML. Names and values are the user's text; only the marks between them are named tokens."""
    if not calls:
        return
    mark = _id(codec, DSML)
    yield from ("\n\n<", mark, "tool_calls>\n")
    for place, call in enumerate(calls):
        yield from ("<", mark, f'invoke name="{call.function.name}">\n')
        for name, value in _arguments(call.function, f"{where}.tool_calls[{place}]").items():
            is_text = isinstance(value, str)
            text = value if is_text else msgspec.json.encode(value).decode()
            yield from (
                "<",
                mark,
                f'parameter name="{name}" string="{str(is_text).lower()}">{text}</',
                mark,
                "parameter>\n",
            )
        yield from ("</", mark, "invoke>\n")
    yield from ("</", mark, "tool_calls>")


def _arguments(function: FunctionCall, where: str) -> Mapping[str, Any]:
    if not isinstance(function.arguments, str):
        return function.arguments
    if not function.arguments.strip():
        return {}
    try:
        arguments: dict[str, Any] = msgspec.json.decode(function.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused("bad_request", f"{where}.function.arguments: not a JSON object ({error})") from error
    return arguments
