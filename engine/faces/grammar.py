"""What a body says of its answer's form (`response_format`, `structured_outputs`) as a grammar that the text follows.

Grammars are in Lark as llguidance has it, and are compiled here once, so that what the library refuses is refused with
its reason. That takes no tokenizer: named tokens are in it by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from engine.errors import RequestRefused
from engine.faces.lark import find_fault, json_rule, quote
from engine.faces.text import END_THINK, TextCodec
from engine.faces.tools import Tools, calls_grammar
from transport.messages import GRAMMAR_LIMIT

THOUGHT = r"/(.|\n)*/"
"""Any text without a named token."""


class JsonSchema(msgspec.Struct, frozen=True):
    """`response_format.json_schema`; a schema holds always, whatever `strict` says."""

    schema: Any = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Texts = Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """`structured_outputs`, as clients of vLLM name it: one of these. What else it may hold there only tunes vLLM."""

    json: Any = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


def read_grammar(values: Mapping[str, Any], codec: TextCodec, tools: Tools | None, *, thinking: bool) -> str:
    """The grammar of a body's answer; empty if it may be any text. Compiles it: milliseconds, rarely more.

    Args:
        tools: those that the answer may call.
        thinking: the text begins inside of the reasoning, which is free.

    Raises:
        RequestRefused: the fields contradict each other, or the grammar is too long or none.
    """
    rules = _read_form(values)
    calls = calls_grammar(tools, codec) if tools is not None and (tools.is_forced or rules) else None
    if rules is None and (calls is None or tools is None or not tools.is_forced):
        return ""
    where, text = rules or ("tools", "")
    if calls is not None and tools is not None:
        if tools.is_forced:
            text = f"start: calls\n{calls}"
        elif where == "structured_outputs.grammar":
            raise RequestRefused("bad_request", f"{where}: can not be together with tools that may be called")
        else:
            text = f"start: calls | answer\n{calls}\n{text}"
    elif where != "structured_outputs.grammar":
        text = f"start: answer\n{text}"
    if thinking:
        if where == "structured_outputs.grammar":
            raise RequestRefused("bad_request", f"{where}: can not be together with reasoning")
        mark = codec.named_id(END_THINK)
        text = text.replace("start: ", f"start: thought <[{mark}]> body\nthought: {THOUGHT}\nbody: ", 1)
    num_bytes = len(text.encode())
    if num_bytes > GRAMMAR_LIMIT:
        raise RequestRefused("bad_request", f"{where}: a grammar of {num_bytes} bytes (limit {GRAMMAR_LIMIT})")
    reason = find_fault(text)
    if reason:
        raise RequestRefused("bad_request", f"{where}: {reason}")
    if values.get("min_tokens") or values.get("ignore_eos"):
        name = "min_tokens" if values.get("min_tokens") else "ignore_eos"
        raise RequestRefused("bad_request", f"{name}: can not be together with {where}, which says where the text ends")
    return text


def _read_form(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field that says the answer's form, and the rules of `answer` (of a grammar: all of it)."""
    form: ResponseFormat | None = values.get("response_format")
    outputs: StructuredOutputs | None = values.get("structured_outputs")
    has_form = form is not None and form.type != "text"
    asked = {} if outputs is None else msgspec.structs.asdict(outputs)
    asked = {name: value for name, value in asked.items() if value is not None and value is not False}
    if has_form and asked:
        raise RequestRefused("bad_request", "structured_outputs: can not be together with response_format")
    if len(asked) > 1:
        raise RequestRefused("bad_request", f"structured_outputs: only one of {', '.join(asked)} can be in force")
    if has_form and form is not None:
        if form.type == "json_object":
            return "response_format", "answer: " + json_rule({"type": "object"}, "")
        where = "response_format.json_schema.schema"
        if form.json_schema is None or form.json_schema.schema is None:
            raise RequestRefused("bad_request", f"{where}: missing")
        return where, "answer: " + json_rule(form.json_schema.schema, where)
    for name, value in asked.items():
        where = f"structured_outputs.{name}"
        match name:
            case "json":
                # There a schema may be given as a text, too.
                return where, "answer: " + json_rule(value, where)
            case "json_object":
                return where, "answer: " + json_rule({"type": "object"}, where)
            case "choice":
                return where, "answer: " + " | ".join(map(quote, value))
            case "regex":
                from llguidance import regex_to_lark

                return where, f"answer: /{regex_to_lark(value)}/"
            case _:
                return where, value
    return None
