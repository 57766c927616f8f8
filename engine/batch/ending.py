"""Ending: what the way in which a run ended means for its exit code, and how to go on."""

from __future__ import annotations

import dataclasses

from engine.actors.client import ClientRefused
from engine.batch.options import STDIO, BatchOptions
from engine.errors import ConfigError, EngineError, RequestRefused

OK, SOME_FAILED, USAGE, STOPPED, UNREACHABLE, REFUSED, DROPPED = 0, 1, 2, 3, 4, 5, 130
STOP_TO_EXIT = {
    "signal": STOPPED,
    "deadline": STOPPED,
    "engine lost": STOPPED,
    "input failed": STOPPED,
    "output failed": STOPPED,
    "output closed": STOPPED,
    "too many errors": SOME_FAILED,
    "input changed": USAGE,
    "bad lines": USAGE,
}
"""Why a run stopped early, and its exit code."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended.

    Attributes:
        stopped: a key of STOP_TO_EXIT, or None if nothing stopped it.
        dropped: a second signal ended it.
        all_read: the input is at its end.
        complete: every line has its record, and all records are written.
        failed: some records are errors.
    """

    stopped: str | None
    dropped: bool
    all_read: bool
    complete: bool
    failed: bool

    @property
    def is_quiet(self) -> bool:
        """Whether nobody wants to hear of it: whoever read the output had enough."""
        return self.stopped == "output closed" and not self.dropped

    @property
    def can_resume(self) -> bool:
        """Whether the rest could be done by a later run."""
        return not self.is_quiet and (self.exit_code() in (STOPPED, DROPPED) or self.stopped == "too many errors")

    def exit_code(self) -> int:
        """The exit code."""
        if self.dropped:
            return DROPPED
        if self.stopped == "output closed":
            return OK if self.all_read else STOPPED
        if self.stopped is not None and not (self.complete and self.stopped in ("signal", "deadline")):
            return STOP_TO_EXIT[self.stopped]
        assert self.complete, "a run that was not stopped ended with lines that have no record"
        return SOME_FAILED if self.failed else OK


def exit_code_of(error: EngineError) -> int:
    """What an error that kept a run from beginning means for the exit code."""
    match error:
        case ConfigError():
            return USAGE
        case RequestRefused() | ClientRefused():
            return REFUSED
        case _:
            return UNREACHABLE


def resume_hint(options: BatchOptions) -> str:
    """How to go on with a run that was stopped."""
    if options.output == STDIO:
        return "the output went to stdout, so this run can not be resumed; with -o FILE it could"
    same = ", with the same input on stdin" if options.input == STDIO else ""
    return f"resume with: {options.resume_command or '--resume'}{same}"
