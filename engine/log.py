"""Events on stderr, one per line, as text for people or JSON for machines.

An event is a stable dotted name (`rank.ready`) with fields; names and fields are an interface, wording is not. stdout
is never written. Warnings and errors that repeat word for word within `REPEAT_S` are counted and the count is told with
the next one, so a fault that comes a thousand times a second costs one line.

Text: `14:02:31.204 head INFO    rank.ready rank=17 role=decode generation=2 took_s=0.74`; a `msg` follows after ` | `.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, TextIO

REPEAT_S = 10.0
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+/:,%@#<>()[]")


def configure_log(form: str, level: str, who: str, stream: TextIO | None = None) -> None:
    """Sends all log records of this process to `stream` (stderr). `who` names the process: `head`, `p0`, `d1`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonEvents(who) if form == "json" else _TextEvents(who))
    handler.addFilter(_Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])


def log_event(logger: logging.Logger, level: str, event: str, **fields: object) -> None:
    """Logs `event` with `fields`; None fields are left out. `msg` is the field for a sentence to people."""
    number = _LEVELS[level]
    if logger.isEnabledFor(number):
        shown = {name: value for name, value in fields.items() if value is not None}
        logger.log(number, event, extra={"fields": shown})


class _Repeats(logging.Filter):
    """Lets the first of equal warnings through and counts the rest for `REPEAT_S`."""

    _KINDS = 256

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        fields: dict[str, Any] = getattr(record, "fields", {})
        kind = (record.msg, *sorted((name, str(value)) for name, value in fields.items()))
        since, count = self._seen.get(kind, (record.created - REPEAT_S, 0))
        if record.created - since < REPEAT_S:
            self._seen[kind] = (since, count + 1)
            return False
        if count:
            record.fields = {**fields, "repeated": count}
        self._seen.pop(kind, None)
        self._seen[kind] = (record.created, 0)
        if len(self._seen) > self._KINDS:
            del self._seen[next(iter(self._seen))]
        return True


class _TextEvents(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        sentence = fields.pop("msg", None)
        parts = [f"{at} {self._who:<5}{record.levelname:<8}{record.getMessage()}"]
        parts += [f"{name}={_text(value)}" for name, value in fields.items()]
        if sentence is not None:
            parts.append("| " + str(sentence).replace("\n", " | "))
        if record.exc_info:
            parts.append("\n" + self.formatException(record.exc_info))
        return " ".join(parts)


class _JsonEvents(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "ts": at,
            "level": record.levelname.lower(),
            "who": self._who,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _text(value: object) -> str:
    """Short numbers; text is quoted only where a reader could not tell where it ends."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)
