"""Pieces of grammars in Lark as llguidance has it, and what the library says against one."""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec

from engine.errors import RequestRefused

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,16}"}
"""Of every schema: JSON with blanks as models like to write it, and not so many that a text consists of them."""
REASON_LENGTH = 1000
"""Characters of the library's reason in an answer."""


def quote(text: str) -> str:
    """Lark that matches just this text."""
    return msgspec.json.encode(text).decode()


@functools.lru_cache(256)
def find_fault(grammar: str) -> str:
    """Why the library refuses a grammar, in its words; empty if it does not."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
    said = LLMatcher.validate_grammar(grammar, None, limits=limits)
    if not said or said.startswith("WARNING"):
        return ""
    # The first line; below it are lines of a grammar that the client did not write.
    return re.sub(r"^(at )?\d+\(\d+\): ", "", said.partition("\n")[0])[:REASON_LENGTH]


def json_rule(schema: Any, where: str) -> str:
    """`%json` and a schema, which may also be given as its text.

    Raises:
        RequestRefused: it is no schema at all.
    """
    try:
        tree = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused("bad_request", f"{where}: {error}") from error
    if tree is True:
        tree = {}
    if not isinstance(tree, dict):
        raise RequestRefused("bad_request", f"{where}: a schema is an object")
    return "%json " + msgspec.json.encode({**tree, "x-guidance": JSON_OPTIONS}).decode()
