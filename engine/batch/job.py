"""Job: one answer that a line of input asks for, from the moment it is a request until the line's record is written.

A line that asks for several answers to its prompt (`n`) is as many jobs, which share `Choices`; its record is written
when the last of them has ended.
"""

from __future__ import annotations

import dataclasses

from engine.actors.client import Row
from engine.batch.envelope import Kind
from engine.faces.body import Wishes
from engine.faces.stops import StopSearch
from engine.faces.text import Detokenizer, TextCodec
from transport.messages import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a line came from, for its record.

    Attributes:
        custom_id: given, or made from the line number.
        line, offset: place in the input.
        digest: of all that decides the answer; of the raw line if that could not be read.
        meta: JSON of an object, the caller's labels.
        raw: first bytes of the line.
    """

    custom_id: str
    line: int
    offset: int
    digest: str
    meta: bytes
    raw: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended: finish reason, whether its last id ended the text and stands for nothing, microseconds of the
    hand-off (None if it ended on this side), trio time."""

    reason: FinishReason
    drop_last: bool
    handoff_us: int | None
    at: float


@dataclasses.dataclass(slots=True, eq=False)
class Choices:
    """All jobs of one line, in the order of their answers. `failed`: one of them did, and with it the line."""

    jobs: list[Job]
    failed: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """A request on its way.

    Attributes:
        place: among the lines that get a record in this run, counted from 0.
        row: ids and sampling; what the head is given.
        stops: search of stop strings, None if the request has none; then ids become text only at the end.
        text: what the search has let through.
        fed: ids that have become text.
        stopped_at: tokens of the completion when a stop string was complete; None before.
        thinking: the prompt asked the model to reason first.
        may_call: the answer may hold calls of tools.
        ignored: fields of the body that this engine does not know.
        retries: further attempts that count against `--retry`.
        stalls: how often it was cancelled because no token came.
        cancelled_at: trio time of a cancellation that was not answered yet; 0.0 if there is none.
        overtaken_at: when a request that was submitted later got its first token before this one; 0.0 before.
        full_since: when the head first said that it takes no more; 0.0 before.
        started_at, answered_at: trio times of the first submission and of the first token of the first attempt that
            had one; 0.0 before.
        codec: the model's tokenizer, for what `wishes` ask for.
        choices: all jobs of its line; None if it is the only one.
        ending: how it ended; None before.
    """

    source: Source
    place: int
    kind: Kind
    row: Row
    detokenizer: Detokenizer
    stops: StopSearch | None
    thinking: bool
    ignored: tuple[str, ...]
    may_call: bool = False
    text: list[str] = dataclasses.field(default_factory=list)
    fed: int = 0
    stopped_at: int | None = None
    retries: int = 0
    stalls: int = 0
    cancelled_at: float = 0.0
    overtaken_at: float = 0.0
    full_since: float = 0.0
    started_at: float = 0.0
    answered_at: float = 0.0
    codec: TextCodec | None = None
    wishes: Wishes = dataclasses.field(default_factory=Wishes)
    choices: Choices | None = None
    ending: Ending | None = None

    @property
    def line_jobs(self) -> list[Job]:
        """All jobs of its line."""
        return [self] if self.choices is None else self.choices.jobs

    @property
    def num_bytes(self) -> int:
        """What it keeps of its line: the prompt's ids, the labels, the first bytes."""
        return len(self.row.prompt) + len(self.source.meta) + len(self.source.raw)

    def search_stops(self) -> bool:
        """Feeds the stop search with the ids that came. True if a stop string is complete now.

        The newest id waits until it is known not to be the one that ended the text, which stands for no text. Ids are
        fed one by one, so that usage counts exactly the tokens that were needed.
        """
        return self._feed(len(self.row.generated) - 1)

    def end_text(self, *, drop_last: bool) -> str:
        """The completion's text, once no id follows. `drop_last`: the last id is the one that ended it."""
        self._feed(len(self.row.generated) - drop_last)
        if self.stopped_at is None:
            tail = self.detokenizer.finish()
            self.text += [tail] if self.stops is None else [self.stops.push(tail), self.stops.finish()]
            if self.stops is not None and self.stops.matched is not None:
                self.stopped_at = self.fed
        return "".join(self.text)

    def ended(self, eos_id: int) -> tuple[FinishReason, bool] | None:
        """Whether all its tokens are there, judged without the head: finish reason, and whether the last id is the one
        that ended the text; None if it has to go on."""
        sampling, generated = self.row.sampling, self.row.generated
        if self.stopped_at is not None:
            return "stop", False
        if generated and len(generated) >= sampling.min_tokens:
            last = generated[-1]
            if last in sampling.stop_ids or (last == eos_id and not sampling.ignore_eos):
                return "stop", True
        return ("length", False) if len(generated) >= sampling.max_tokens else None

    def _feed(self, end: int) -> bool:
        generated = self.row.generated
        if self.stops is None:
            self.text.append(self.detokenizer.push(generated[self.fed : end]))
            self.fed = max(end, self.fed)
            return False
        while self.fed < end and self.stopped_at is None:
            self.text.append(self.stops.push(self.detokenizer.push((generated[self.fed],))))
            self.fed += 1
            if self.stops.matched is not None:
                self.stopped_at = self.fed
                return True
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A line that gets an error record."""

    source: Source
    place: int
    kind: str
    code: str
    message: str
    retryable: bool = False
    attempts: int = 0
