"""Calls of tools: found in text however it is cut, and what a grammar makes of tools is always a valid call."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import engine.nano
from engine.errors import RequestRefused
from engine.faces.calls import CallReader
from engine.faces.chat import ChatMessage, FunctionCall, ToolCall, chat_segments
from engine.faces.grammar import ResponseFormat, StructuredOutputs, read_grammar
from engine.faces.text import TextCodec
from engine.faces.tools import ChosenFunction, ChosenTool, Function, Tool, read_tools
from engine.model.grammars import Grammars

NANO = Path(engine.nano.__file__).parent
CODEC = TextCodec.load(NANO)
BLOCK = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'
    'x < "y"\n</b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, {"k": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
CALLS = [("f", {"a": 'x < "y"\n</b>', "n": [1, {"k": None}]}), ("g", {})]


def read(text: str, rng: random.Random | None = None) -> tuple[str, list[tuple[str, Any]]]:
    reader, shown, at = CallReader(), "", 0
    while at < len(text):
        size = len(text) if rng is None else rng.randrange(1, 12)
        shown += reader.push(text[at : at + size])
        at += size
    shown += reader.finish()
    return shown, [(call.name, json.loads(call.arguments)) for call in reader.calls]


TEXTS: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "calls alone": (BLOCK, "", CALLS),
    "calls behind text": ("Let me look.\n" + BLOCK, "Let me look.\n", CALLS),
    "text around calls": ("A" + BLOCK + " B\n", "A B\n", CALLS),
    "two blocks": (BLOCK + BLOCK, "", CALLS + CALLS),
    "no call": ("a < b\n\n<｜DSML｜tool", "a < b\n\n<｜DSML｜tool", []),
    "a value that is no JSON": (
        BLOCK.replace('[1, {"k": null}]', "about 7"), "", [("f", {"a": 'x < "y"\n</b>', "n": "about 7"}), ("g", {})]
    ),
    "something else in the block": (
        BLOCK.replace('<｜DSML｜invoke name="f">', "<b>"),
        BLOCK.replace('<｜DSML｜invoke name="f">', "<b>").lstrip("\n"),
        [],
    ),
    "cut in the second call": (
        BLOCK[: BLOCK.index('"g"')], "\n<｜DSML｜invoke name=", CALLS[:1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_and_the_rest_stays_text_however_it_is_cut(name: str) -> None:
    text, shown, calls = TEXTS[name]
    whole = read(text)
    assert whole[1] == calls
    assert whole[0].lstrip("\n") == shown.lstrip("\n")
    for seed in range(60):
        assert read(text, random.Random(seed)) == whole


def test_text_without_calls_comes_out_at_once() -> None:
    reader = CallReader()
    assert reader.push("a text") == "a text"
    assert reader.push("\n\n<") == ""
    assert reader.push("b") == "\n\n<b"


PLAIN = {"type": "string", "description": "any text"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", 'O"slo', "a</b"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "where": {"$ref": "#/$defs/place"},
        "note": PLAIN,
    },
    "required": ["city", "where"],
    "$defs": {
        "place": {
            "type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False
        }
    },
}  # fmt: skip
TOOLS = [Tool("function", Function("weather", "w", PARAMETERS)), Tool("function", Function("now"))]
SCHEMAS = {"weather": PARAMETERS, "now": {"type": "object", "maxProperties": 0}}


ENDS = {b"</", b'"', b"</think>", CODEC.bytes_of(CODEC.eos_id)}
GRAMMARS = Grammars(NANO, CODEC.vocab_size, CODEC.eos_id)


def walk(grammar: str, rng: random.Random) -> str:
    """A text of the grammar from nowhere: any id that may come next, often a short one."""
    guide = GRAMMARS.start(grammar, np.empty(0, np.int64))
    ids: list[int] = []
    while len(ids) < 4000:
        logits = torch.zeros(CODEC.vocab_size)
        guide.restrict(logits)
        allowed = torch.nonzero(logits == 0)[:, 0].tolist()
        ends = [token for token in allowed if CODEC.bytes_of(token) in ENDS]
        token = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
        if token == CODEC.eos_id:
            return CODEC.decode(ids, skip_special=False)
        ids.append(token)
        guide.take(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("choice", ["required", "named", "single"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_call_is_valid(choice: str, thinking: bool) -> None:
    chosen: Any = ChosenTool("function", ChosenFunction("weather")) if choice == "named" else "required"
    values = {"tools": TOOLS, "tool_choice": chosen, "parallel_tool_calls": choice != "single"}
    grammar = read_grammar(values, CODEC, read_tools(values), thinking=thinking)
    for seed in range(8):
        text = walk(grammar, random.Random(seed))
        if thinking:
            _, mark, text = text.partition("</think>")
            assert mark
        shown, calls = read(text)
        assert shown == "" and 1 <= len(calls) <= (1 if choice == "single" else 16)
        for name, arguments in calls:
            assert choice != "named" or name == "weather"
            jsonschema.validate(arguments, SCHEMAS[name])


def test_with_a_form_and_tools_a_text_is_either() -> None:
    form = ResponseFormat("json_object")
    values = {"tools": TOOLS[1:], "response_format": form}
    grammar = read_grammar(values, CODEC, read_tools(values), thinking=False)
    kinds = set()
    for seed in range(24):
        shown, calls = read(walk(grammar, random.Random(seed)))
        if calls:
            assert shown == ""
        else:
            assert isinstance(json.loads(shown), dict)
        kinds.add(bool(calls))
    assert kinds == {True, False}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tools": ({"tool_choice": "required"}, "there are no tools"),
    "unknown": (
        {"tools": TOOLS, "tool_choice": ChosenTool("function", ChosenFunction("other"))}, "there is no tool 'other'"
    ),
    "twice": ({"tools": TOOLS + TOOLS}, "'weather' is there twice"),
    "name": ({"tools": [Tool("function", Function("a b"))]}, "1 to 64 of letters"),
    "anyOf": (
        {"tools": [Tool("function", Function("f", None, {"anyOf": []}))], "tool_choice": "required"}, "without 'anyOf'"
    ),
    "not an object": (
        {"tools": [Tool("function", Function("f", None, {"type": "array"}))], "tool_choice": "required"},
        "have to be an object",
    ),
    "a parameter's name": (
        {
            "tools": [Tool("function", Function("f", None, {"properties": {'a"': PLAIN}}))],
            "tool_choice": "required",
        },
        "has one of",
    ),
    "a keyword": (
        {
            "tools": [Tool("function", Function("f", None, {"properties": {"a": {"not": {}}}}))],
            "tool_choice": "required",
        },
        "Unimplemented keys",
    ),
    "form and outputs": (
        {"response_format": ResponseFormat("json_object"), "structured_outputs": StructuredOutputs(regex="a")},
        "can not be together with response_format",
    ),
    "minimum": ({"response_format": ResponseFormat("json_object"), "min_tokens": 3}, "min_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_is_refused_with_its_reason(name: str) -> None:
    values, why = REFUSED[name]
    with pytest.raises(RequestRefused, match=why):
        read_grammar(values, CODEC, read_tools(values), thinking=False)


def test_the_prompt_tells_of_tools_behind_the_systems_text() -> None:
    user = ChatMessage("user", "Hi")
    functions = [TOOLS[1].function]
    user_id = CODEC.named_id("<｜User｜>")
    marks = {CODEC.named_id("｜DSML｜")}
    with_system = chat_segments(CODEC, [ChatMessage("system", "Be kind."), user], functions=functions)
    assert with_system[:4] == [CODEC.bos_id, "Be kind.", "\n\n", with_system[3]] and "## Tools" in str(with_system[3])
    without = chat_segments(CODEC, [user], functions=functions)
    assert without[1:] == with_system[3:]
    text = "".join("@" if segment in marks else str(segment) for segment in without)
    assert '<@invoke name="$TOOL_NAME">' in text and '{"name":"now"}' in text
    last = max(place for place, segment in enumerate(without) if "Tool Schemas" in str(segment))
    assert last < without.index(user_id)


def test_calls_that_were_found_are_written_as_the_model_wrote_them() -> None:
    shown, calls = read(BLOCK)
    told = [ToolCall(FunctionCall(name, json.dumps(arguments))) for name, arguments in calls]
    segments = chat_segments(CODEC, [ChatMessage("user", "Hi"), ChatMessage("assistant", shown, told)])
    mark = CODEC.named_id("｜DSML｜")
    text = "".join(
        "｜DSML｜" if segment == mark else segment
        for segment in segments
        if isinstance(segment, str) or segment == mark
    )
    assert read(text)[1] == CALLS
