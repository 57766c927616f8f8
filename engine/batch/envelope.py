"""Envelope: what a line of input says before its body is looked into: which form it has, its id, its labels.

Three forms: an OpenAI Batch line `{custom_id, method, url, body}`; a bare body with `messages` or `prompt`; a JSON
string, which is a prompt. Labels are the top-level keys that are neither; they come back under `meta`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec

from engine.batch.fields import BODY_KEYS
from engine.errors import EngineError

MAX_ID_CHARACTERS = 1024
Kind = Literal["chat", "completion"]
URL_TO_KIND: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_as_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_as_string = msgspec.json.Decoder(str)
_as_id = msgspec.json.Decoder(str | int)


class LineRefused(EngineError):
    """A line that gets an error record instead of an answer.

    Attributes:
        kind: `bad_line`, `bad_request`, `too_long`, ... as the error file's `type`.
        code: for programs, finer than `kind`.
    """

    def __init__(self, kind: str, code: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """A line that has one of the three forms. `meta` is JSON of an object."""

    custom_id: str | None
    kind: Kind
    body: dict[str, msgspec.Raw]
    meta: bytes


def read_envelope(data: bytes) -> Envelope:
    """Reads a line.

    Raises:
        LineRefused: `bad_line`, with the reason.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineRefused("bad_line", "invalid_utf8", f"not UTF-8: byte {error.start}") from error
    text = data.strip(b" \t\r")
    if text.startswith(b'"'):
        return Envelope(None, "completion", {"prompt": msgspec.Raw(_check_json(text, _as_string))}, b"{}")
    if not text.startswith(b"{"):
        _check_json(text, msgspec.json.Decoder(msgspec.Raw))
        raise LineRefused("bad_line", "not_a_request", "neither an object nor a string")
    keys = _read_object(text)
    if "body" in keys:
        return _read_batch_line(keys)
    return _read_bare_body(keys)


def _read_batch_line(keys: dict[str, msgspec.Raw]) -> Envelope:
    method, url = keys.pop("method", None), keys.pop("url", None)
    if method is not None and _string(method) != "POST":
        raise LineRefused("bad_line", "invalid_method", "method: only POST is possible")
    raw_body = bytes(keys.pop("body"))
    if not raw_body.startswith(b"{"):
        raise LineRefused("bad_line", "invalid_body", "body: not an object")
    body = _read_object(raw_body)
    custom_id = _take_id(keys, ("custom_id",))
    if url is None:
        kind = _kind_of(body)
    else:
        path = _string(url) or ""
        if path not in URL_TO_KIND:
            raise LineRefused("bad_line", "invalid_url", f"url: {path[:128]!r} is not one of {', '.join(URL_TO_KIND)}")
        kind = URL_TO_KIND[path]
    return Envelope(custom_id, kind, body, _read_meta(keys))


def _read_bare_body(keys: dict[str, msgspec.Raw]) -> Envelope:
    kind = _kind_of(keys)
    custom_id = _take_id(keys, ("custom_id", "id"))
    body = {name: keys.pop(name) for name in list(keys) if name in BODY_KEYS}
    return Envelope(custom_id, kind, body, _read_meta(keys))


def _kind_of(body: dict[str, msgspec.Raw]) -> Kind:
    if "messages" in body and "prompt" in body:
        raise LineRefused("bad_line", "not_a_request", "has both messages and prompt; only one of them is possible")
    if "messages" in body:
        return "chat"
    if "prompt" in body:
        return "completion"
    raise LineRefused("bad_line", "not_a_request", "has neither body, messages nor prompt")


def _take_id(keys: dict[str, msgspec.Raw], names: tuple[str, ...]) -> str | None:
    for name in names:
        raw = keys.pop(name, None)
        if raw is None or bytes(raw) == b"null":
            continue
        try:
            custom_id = str(_as_id.decode(raw))
        except msgspec.DecodeError as error:
            raise LineRefused("bad_line", "invalid_id", f"{name}: {error}") from error
        if not 0 < len(custom_id) <= MAX_ID_CHARACTERS:
            raise LineRefused("bad_line", "invalid_id", f"{name}: must have 1 to {MAX_ID_CHARACTERS} characters")
        return custom_id
    return None


def _read_meta(keys: dict[str, msgspec.Raw]) -> bytes:
    """The labels as JSON. A label `meta` that is an object is not wrapped once more."""
    if not keys:
        return b"{}"
    own = keys.get("meta")
    if own is not None and bytes(own).startswith(b"{"):
        del keys["meta"]
        keys = _read_object(bytes(own)) | keys
    try:
        # Without white space: a carriage return between values would look like a line end to some readers.
        return msgspec.json.format(msgspec.json.encode(keys), indent=-1)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineRefused("bad_line", "invalid_json", _json_problem(error)) from error


def _read_object(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _as_object.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineRefused("bad_line", "invalid_json", _json_problem(error)) from error


def _check_json(data: bytes, decoder: msgspec.json.Decoder[str] | msgspec.json.Decoder[msgspec.Raw]) -> bytes:
    try:
        decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineRefused("bad_line", "invalid_json", _json_problem(error)) from error
    return data


def _json_problem(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"


def _string(raw: msgspec.Raw) -> str | None:
    try:
        return _as_string.decode(raw)
    except msgspec.DecodeError:
        return None
