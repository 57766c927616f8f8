"""Filters as people type them: `pool=decode skew>1.4 !lost`. A filter is compiled once and then asked for every row.

All terms must hold. A term is a word, which any text of the row may contain; `!word`, which none may; or a column, an
operator (`=` `!=` `>` `>=` `<` `<=`) and a value. Text compares without case, and `*` stands for anything. Numbers may
have k, M or G behind them; columns of time take `ms`, `s`, `m`, `h`. Quotes keep blanks and operators: `"two words"`.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Generic, Literal, TypeVar

Row = TypeVar("Row")
Kind = Literal["text", "number", "seconds"]
Value = str | float | int | None

_TERM = re.compile(r'\s*(?P<not>!?)(?:"(?P<quoted>[^"]*)"|(?P<bare>(?:[^\s"]|"[^"]*")*))')
_COMPARE = re.compile(r"(?P<name>[A-Za-z_][\w%./-]*)(?P<sign>!=|>=|<=|=|>|<)(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"(?P<figure>[+-]?(?:\d[\d,_]*\.?\d*|\.\d+))\s*(?P<unit>[a-zA-Z%]*)")
_UNITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "%": 1.0}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class FilterError(ValueError):
    """What was typed is no filter; the text says why, and what would be."""


@dataclass(frozen=True)
class Field(Generic[Row]):
    """A column as filters see it. `get` gives what is compared; None is equal to nothing and not more than anything."""

    name: str
    kind: Kind
    get: Callable[[Row], Value]


@dataclass(frozen=True)
class Filter(Generic[Row]):
    """A compiled filter: `matches(row)`. `text` is what was typed; an empty one lets everything through."""

    text: str
    tests: tuple[Callable[[Row], bool], ...]

    def matches(self, row: Row) -> bool:
        """Whether all terms hold."""
        return all(test(row) for test in self.tests)


def compile_filter(text: str, fields: Sequence[Field[Row]]) -> Filter[Row]:
    """Raises FilterError."""
    tests: list[Callable[[Row], bool]] = []
    at = 0
    text = text.strip()
    while at < len(text):
        found = _TERM.match(text, at)
        assert found is not None, "everything in it is optional"
        at = found.end()
        if text[at : at + 1] == '"':
            raise FilterError('a quote is not closed: "')
        is_not = found["not"] == "!"
        if found["quoted"] is not None:
            tests.append(_word(found["quoted"], is_not, fields))
        elif compared := _COMPARE.fullmatch(found["bare"]):
            test = _comparison(compared["name"], compared["sign"], compared["value"].replace('"', ""), fields)
            tests.append(_negated(test) if is_not else test)
        else:
            tests.append(_word(found["bare"].replace('"', ""), is_not, fields))
    return Filter(text, tuple(tests))


def _negated(test: Callable[[Row], bool]) -> Callable[[Row], bool]:
    return lambda row: not test(row)


def _word(word: str, is_not: bool, fields: Sequence[Field[Row]]) -> Callable[[Row], bool]:
    wanted = word.casefold()
    if not wanted:
        raise FilterError("a word is missing" + (" after !" if is_not else ""))
    getters = [field.get for field in fields if field.kind == "text"]

    def contains(row: Row) -> bool:
        # One column after the other: a word never matches across two of them.
        return any(wanted in str(held).casefold() for get in getters if (held := get(row)) is not None) != is_not

    return contains


def _comparison(name: str, sign: str, value: str, fields: Sequence[Field[Row]]) -> Callable[[Row], bool]:
    field = next((field for field in fields if field.name.casefold() == name.casefold()), None)
    if field is None:
        near = difflib.get_close_matches(name, [field.name for field in fields], n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise FilterError(f"No column `{name}`.{hint} Columns: {', '.join(field.name for field in fields)}")
    if not value:
        raise FilterError(f"a value is missing after `{name}{sign}`")
    get = field.get
    if field.kind == "text":
        return _text_test(field.name, sign, value, get)
    compare, wanted = _SIGNS[sign], _figure(field, value)
    if sign == "!=":
        return lambda row: _number(get(row)) != wanted
    # Not a number is less, more and equal to nothing.
    return lambda row: compare(_number(get(row)), wanted)


def _text_test(name: str, sign: str, value: str, get: Callable[[Row], Value]) -> Callable[[Row], bool]:
    if sign not in ("=", "!="):
        raise FilterError(f"`{name}` is text: it takes = and !=, not {sign}")
    # fnmatch knows brackets and question marks too; here they are themselves.
    pattern = re.compile(translate(re.sub(r"([\[?])", r"[\1]", value.casefold())))
    is_equal = sign == "="

    def test(row: Row) -> bool:
        held = get(row)
        return (pattern.match("" if held is None else str(held).casefold()) is not None) == is_equal

    return test


def _figure(field: Field[Row], value: str) -> float:
    units = _SECONDS if field.kind == "seconds" else _UNITS
    found = _NUMBER.fullmatch(value.strip())
    if found is None:
        raise FilterError(f"`{field.name}` is a number, and `{value}` is none")
    if found["unit"] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise FilterError(f"`{field.name}` knows no unit `{found['unit']}`; units: {known}")
    return float(found["figure"].replace(",", "").replace("_", "")) * units[found["unit"]]


def _number(value: Value) -> float:
    try:
        return math.nan if value is None else float(value)
    except ValueError:
        return math.nan
