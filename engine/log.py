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
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from engine.core.events import EventRing

REPEAT_S = 10.0
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+/:,%@#<>()[]")


def configure_log(form: str, level: str, who: str, stream: TextIO | None = None) -> None:
    """Sends all log records of this process to `stream` (stderr). `who` names the process: `head`, `p0`, `d1`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonEvents(who) if form == "json" else _TextEvents(who))
    handler.addFilter(_Repeats())
    handler.setLevel(_LEVELS[level])
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])


def keep_events(ring: EventRing) -> None:
    """Also writes what this process logs from now on into `ring`, from info on, whatever level stderr has. Call it
    after `configure_log`, in a process that logs from one thread only."""
    handler = _KeepEvents(ring)
    handler.addFilter(_Repeats())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(min(root.level, logging.INFO))


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
        # Without the count that another handler's filter may have added.
        shown = ((name, str(value)) for name, value in fields.items() if name != "repeated")
        kind = (record.msg, *sorted(shown))
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


class _KeepEvents(logging.Handler):
    def __init__(self, ring: EventRing) -> None:
        super().__init__(logging.INFO)
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        level: Any = "info"
        if record.levelno >= logging.WARNING:
            level = "warning" if record.levelno < logging.ERROR else "error"
        if hasattr(record, "fields"):
            name, parts = record.getMessage(), [*_describe_fields(record)]
        else:  # a library's: its message is a sentence, not a name
            name, parts = record.name, [record.getMessage()]
        if record.exc_info and record.exc_info[1] is not None:
            parts.append(f"| {type(record.exc_info[1]).__name__}: {record.exc_info[1]}")
        self._ring.add(level, name, " ".join(parts), int(1e3 * record.created))


class _TextEvents(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        parts = [f"{at} {self._who:<5}{record.levelname:<8}{record.getMessage()}", *_describe_fields(record)]
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


def _describe_fields(record: logging.LogRecord) -> list[str]:
    """`name=value` for each field, then the sentence. Kept with the record: it is most of what a line costs, and two
    handlers want it."""
    known: list[str] | None = getattr(record, "described", None)
    if known is None:
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        sentence = fields.pop("msg", None)
        known = [f"{name}={_text(value)}" for name, value in fields.items()]
        if sentence is not None:
            known.append("| " + str(sentence).replace("\n", " | "))
        record.described = known
    return known


def _text(value: object) -> str:
    """Short numbers; text is quoted only where a reader could not tell where it ends."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)
