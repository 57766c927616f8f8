"""BatchOptions: what the command line of `engine batch` says, checked and with units."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Literal

import msgspec

from engine.batch.fields import FIELD_TO_DECODER, decode_field
from engine.errors import ConfigError, RequestRefused

STDIO = "-"


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorBudget:
    """How many lines may fail: a count, or a share of the lines that have ended (judged from `least` of them on)."""

    count: int | None = None
    share: float | None = None
    least: int = 100

    def is_spent(self, errors: int, ended: int, *, final: bool = False) -> bool:
        """Whether more lines failed than may. `final`: no line follows, so a small number of lines counts too."""
        if self.count is not None:
            return errors > self.count
        if self.share is not None and (final or ended >= self.least):
            return errors > self.share * ended
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class BatchOptions:
    """Everything that the runner needs to know. Times are seconds.

    Attributes:
        input, output: paths, or `-`.
        errors: path, or None: error lines go into the output.
        window: lines that may be read ahead, and finished lines that `order="input"` may hold.
        inflight: requests at the head at once; the head's own limit applies too.
        retry: further attempts of a request that failed for a retryable reason.
        retry_for: how long to look for a daemon that went away, and how long to bear a head that says "full".
        defaults: body field to JSON, for bodies that lack the field.
        seed: draws of line i are a function of (seed, id of line i); None: a fresh seed for each line, written down.
        any_model: a body's `model` is not compared with the model that is served.
        priority: of all requests, lower first.
        label: of the client, in the head's log.
        resume_command: printed when the run can be continued.
    """

    input: str = STDIO
    output: str = STDIO
    errors: str | None = None
    resume: bool = False
    keep_errors: bool = False
    order: Literal["completion", "input"] = "completion"
    inflight: int = 256
    window: int = 4096
    max_errors: ErrorBudget = ErrorBudget()
    retry: int = 2
    retry_for: float = 600.0
    deadline: float | None = None
    stall: float = 120.0
    grace: float = 30.0
    defaults: dict[str, bytes] = dataclasses.field(default_factory=dict)
    model: str | None = None
    any_model: bool = False
    seed: int | None = None
    strict: bool = False
    progress: Literal["auto", "line", "json", "none"] = "auto"
    summary: str | None = None
    priority: int = 0
    label: str = "batch"
    resume_command: str = ""


def parse_default(text: str) -> tuple[str, bytes]:
    """`max_tokens=64` or `stop=["\\n"]`: a field of a body, and its JSON. What is not JSON is taken as a string.

    Raises:
        ConfigError: no `=`, not a field that a body can have, or not a value of it.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(f"--default {text}: write --default field=value")
    if name not in FIELD_TO_DECODER or name in ("messages", "prompt"):
        near = difflib.get_close_matches(name, FIELD_TO_DECODER, 1)
        raise ConfigError(
            f"--default {text}: unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    raw = value.strip().encode()
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raw = msgspec.json.encode(value)
    try:
        decode_field(name, raw)
    except RequestRefused as error:
        raise ConfigError(f"--default {text}: {error}") from error
    return name, raw


def parse_error_budget(text: str) -> ErrorBudget:
    """`20` lines, or `1%` of the lines.

    Raises:
        ConfigError: neither.
    """
    number, percent = (text[:-1], True) if text.endswith("%") else (text, False)
    try:
        value = float(number) if percent else int(number)
    except ValueError:
        raise ConfigError(f"--max-errors {text}: write a count such as 20, or a share such as 1%") from None
    if value < 0 or (percent and not value <= 100):
        raise ConfigError(f"--max-errors {text}: out of range")
    return ErrorBudget(share=value / 100) if percent else ErrorBudget(count=int(value))
