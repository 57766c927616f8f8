"""CallReader: finds calls of functions in text that arrives in pieces; what is no call stays text.

A call is told when it is whole. A block that does not become one, in its form or because the text ends, is text.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Any

import msgspec

from engine.faces.text import DSML

_BEGIN = f"<{DSML}tool_calls>"
_BEGINS = (f"\n\n{_BEGIN}", f"\n{_BEGIN}", _BEGIN)
_END = f"</{DSML}tool_calls>"
_INVOKE = f'<{DSML}invoke name="'
_INVOKE_END = f"</{DSML}invoke>"
_HEAD = re.compile(rf'<{DSML}invoke name="([^"<>\n]+)">\n?')
_PARAMETER = re.compile(
    rf'\s*<{DSML}parameter name="([^"<>\n]*)"(?: string="(true|false)")?>(.*?)</{DSML}parameter>', re.DOTALL
)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call. `arguments` is the text of a JSON object."""

    number: str
    name: str
    arguments: str

    def render(self) -> dict[str, Any]:
        """In the shape of the OpenAI surface."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.number, "type": "function", "function": function}


class CallReader:
    """Text in, text that is certainly no call out. Calls are in `calls`, in their order."""

    __slots__ = ("_held", "_is_inside", "_searched", "calls")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._held = ""
        self._is_inside = False
        self._searched = 0

    def push(self, text: str) -> str:
        """Takes the next piece; returns what can be shown now."""
        self._held += text
        shown = []
        while True:
            before = self._is_inside, len(self._held)
            shown.append(self._read_calls() if self._is_inside else self._read_text())
            if (self._is_inside, len(self._held)) == before:
                return "".join(shown)

    def finish(self) -> str:
        """The text is over: what was held back was text after all."""
        held, self._held = self._held, ""
        return held

    def _read_text(self) -> str:
        """Up to a block's begin, or to what may become one. The begin itself is held until the block has a call."""
        held = self._held
        at = held.find(_BEGIN)
        if at >= 0:
            begin = next(at + len(_BEGIN) - len(each) for each in _BEGINS if held.endswith(each, 0, at + len(_BEGIN)))
            self._held, self._is_inside, self._searched = held[begin:], True, 0
            return held[:begin]
        longest = min(len(_BEGINS[0]) - 1, len(held))
        keep = next(
            (size for size in range(longest, 0, -1) if any(each.startswith(held[-size:]) for each in _BEGINS)), 0
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _read_calls(self) -> str:
        """A call, or the block's end, or the whole as text if it is neither."""
        rest = self._held.lstrip().removeprefix(_BEGIN).lstrip()
        if rest.startswith(_END):
            self._held, self._is_inside = rest[len(_END) :], False
            return ""
        if rest.startswith(_INVOKE):
            # What was searched before is not searched again: arguments may be long.
            end = self._held.find(_INVOKE_END, max(0, self._searched - len(_INVOKE_END)))
            self._searched = len(self._held)
            if end < 0:
                return ""
            call = _read_call(rest[: end - (len(self._held) - len(rest))])
            if call is not None:
                self.calls.append(call)
                self._held, self._searched = self._held[end + len(_INVOKE_END) :], 0
                return ""
        elif _END.startswith(rest) or _INVOKE.startswith(rest):
            return ""
        shown, self._held, self._is_inside = self._held, "", False
        return shown


def _read_call(text: str) -> Call | None:
    """The text of an invoke without its end mark, or None if it is not of the form."""
    head = _HEAD.match(text)
    if head is None:
        return None
    arguments: dict[str, Any] = {}
    at = head.end()
    while found := _PARAMETER.match(text, at):
        name, is_text, value = found.groups()
        arguments[name] = value if is_text == "true" else _read_value(value)
        at = found.end()
    if text[at:].strip():
        return None
    return Call(f"call_{secrets.token_hex(12)}", head[1], msgspec.json.encode(arguments).decode())


def _read_value(text: str) -> Any:
    """JSON as it is, and what is none as a text."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return msgspec.Raw(text.strip().encode())
