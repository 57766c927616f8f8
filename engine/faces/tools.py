"""Tools: which functions an answer may call, what the prompt says of them, and the grammar of calls that are asked for.

Calls are DSML, as `faces.chat` writes them and `faces.calls` reads them:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from engine.errors import RequestRefused
from engine.faces.lark import json_rule, quote
from engine.faces.text import DSML, TextCodec

MOST_TOOLS = 128
MOST_CALLS = 16
"""In one answer whose calls a grammar makes."""
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PLAIN = frozenset({"type", "title", "description", "default", "examples"})
"""Keywords of a text that any text satisfies."""
_FLAT = frozenset(
    {
        *("type", "title", "description", "$schema", "$defs", "definitions"),
        *("properties", "required", "additionalProperties"),
    }
)
"""Keywords of parameters that are given one by one."""


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function as clients describe it; `parameters` is the schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: ChosenFunction


ToolList = Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The functions that an answer may call.

    Attributes:
        shown: what the prompt tells of.
        callable: of these, what a forced call may name.
        is_forced: the answer is calls and nothing else.
        parallel: it may be several.
    """

    shown: tuple[Function, ...]
    callable: tuple[Function, ...]
    is_forced: bool
    parallel: bool


def read_tools(values: Mapping[str, Any]) -> Tools | None:
    """The tools of a chat's body; None if the answer calls none.

    Raises:
        RequestRefused: a choice without a tool, or a name that can not be one.
    """
    tools: list[Tool] = values.get("tools", [])
    choice: Any = values.get("tool_choice", "auto")
    is_forced = choice not in ("none", "auto")
    if not tools:
        if is_forced:
            raise RequestRefused("bad_request", "tool_choice: asks for a call, and there are no tools")
        return None
    functions = tuple(tool.function for tool in tools)
    names = [function.name for function in functions]
    for place, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise RequestRefused(
                "bad_request", f"tools[{place}].function.name: 1 to 64 of letters, digits, '_', '-' and '.'"
            )
        if name in names[:place]:
            raise RequestRefused("bad_request", f"tools[{place}].function.name: {name!r} is there twice")
    if choice == "none":
        return None
    chosen = functions
    if isinstance(choice, ChosenTool):
        chosen = tuple(function for function in functions if function.name == choice.function.name)
        if not chosen:
            raise RequestRefused("bad_request", f"tool_choice: there is no tool {choice.function.name[:64]!r}")
    return Tools(functions, chosen, is_forced, values.get("parallel_tool_calls", True))


def describe_tools(codec: TextCodec, functions: Sequence[Function]) -> list[str | int]:
    """What the prompt says of the tools, behind the system's text: str is text, int a named token."""
    mark = mark_id(codec)
    pieces: list[str | int] = []
    for piece in re.split("(@)", _INTRODUCTION):
        pieces.append(mark if piece == "@" else piece)
    schemas = "\n".join(msgspec.json.encode(function).decode() for function in functions)
    return [*pieces, schemas + _CONCLUSION]


def mark_id(codec: TextCodec) -> int:
    """The named token of DSML. Raises RequestRefused if the tokenizer has none."""
    number = codec.named_id(DSML)
    if number is None:
        raise RequestRefused("bad_request", f"tools: this model's tokenizer has no {DSML} token")
    return number


_INTRODUCTION = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<@tool_calls>" block like the following:

<@tool_calls>
<@invoke name="$TOOL_NAME">
<@parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</@parameter>
...
</@invoke>
<@invoke name="$TOOL_NAME2">
...
</@invoke>
</@tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

### Available Tool Schemas

"""
_CONCLUSION = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls."""


def calls_grammar(tools: Tools, codec: TextCodec) -> str:
    """Rules in Lark, of which `calls` is any valid block of calls: of the named parameters, in the order of the schema,
    those that are required and any of the others.

    Raises:
        RequestRefused: parameters that can not be given one by one.
    """
    mark = f"<[{mark_id(codec)}]>"
    count = f"{{1,{MOST_CALLS}}}" if tools.parallel else ""
    rules = [
        f'calls: "\\n\\n<" {mark} "tool_calls>\\n" invoke{count} "</" {mark} "tool_calls>"',
        "invoke: " + " | ".join(f"f{place}" for place in range(len(tools.callable))),
        # A text ends with the first "</": the lexer can not look at the token behind it.
        r"text: /([^<]|<[^\/])*<\//",
    ]
    for place, function in enumerate(tools.callable):
        rules += _function_rules(function, place, mark)
    return "\n".join(rules)


def _function_rules(function: Function, place: int, mark: str) -> Iterator[str]:
    where = f"tools: the parameters of {function.name}"
    schema = function.parameters or {}
    others = sorted(set(schema) - _FLAT)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if others or schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise RequestRefused(
            "bad_request",
            f"{where} have to be an object with properties where a call is forced"
            + (f", without {others[0][:64]!r} beside them" if others else ""),
        )
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestRefused("bad_request", f"{where}: required is a list of names")
    defined: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    all_properties = {**dict.fromkeys(required, True), **properties} if required else properties
    names = [*properties, *(name for name in all_properties if name not in properties)]
    parts = []
    for index, name in enumerate(names):
        if re.search(r'["<>\n]', name):
            raise RequestRefused("bad_request", f'{where}: {name[:64]!r} has one of ", <, > and line end')
        own = all_properties[name]
        rule = f"f{place}p{index}"
        is_text = isinstance(own, dict) and own.get("type") == "string" and not set(own) - _PLAIN
        head = quote(f'parameter name="{name}" string="{str(is_text).lower()}">')
        if is_text:
            yield f'{rule}: "<" {mark} {head} text {mark} "parameter>\\n"'
        else:
            tree = {} if own is True else own
            if not isinstance(tree, dict):
                raise RequestRefused("bad_request", f"{where}: {name[:64]!r} has no schema that is an object")
            yield f'{rule}: "<" {mark} {head} {rule}v "</" {mark} "parameter>\\n"'
            yield f"{rule}v: {json_rule({**defined, **tree}, where)}"
        parts.append(rule if name in required else f"{rule}?")
    head = quote(f'invoke name="{function.name}">\n')
    yield f'f{place}: "<" {mark} {head} {" ".join(parts)} "</" {mark} "invoke>\\n"'
