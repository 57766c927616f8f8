"""Choice: one answer of a request, from ids to text that can be shown, and what is told of its tokens.

Text is shown as soon as it is settled: never a part of a character, never what may become a stop string. An id that
ends the text stands for no text. Where the prompt opened the reasoning, the text up to its end is kept apart, and where
tools may be called so are whole calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.actors.told import Told
from engine.faces.calls import Call, CallReader
from engine.faces.stops import StopSearch
from engine.faces.text import END_THINK, TextCodec
from engine.front.ask import Ask
from transport.messages import Sampling


class Choice:
    """See the module.

    Attributes:
        index: among the choices of its request.
        ask: what the head is asked for it.
        reason: `stop`, `length` or `tool_calls`; None while it goes on.
        tokens: ids that count: those up to a stop string, or all.
        lag: tokens that came since the writer last looked.
        text_length: characters of the text so far, shown or not.
    """

    __slots__ = (
        "_calls",
        "_calls_at",
        "_codec",
        "_detokenizer",
        "_fed",
        "_held_thought",
        "_ids_at",
        "_offsets",
        "_stops",
        "_text",
        "_thinking",
        "_thought",
        "_tops_at",
        "_wants_scores",
        "ask",
        "begun",
        "index",
        "lag",
        "reason",
        "scored",
        "text_length",
        "tokens",
        "visible",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        ask: Ask,
        codec: TextCodec,
        *,
        stops: Sequence[str],
        skip_special: bool,
        thinking: bool,
        wants_scores: bool,
        may_call: bool = False,
    ) -> None:
        self.index = index
        self.ask = ask
        self.reason: str | None = None
        self.tokens = 0
        self.lag = 0
        self.text_length = 0
        self.visible = 0
        """Characters before the stop search that are certainly shown."""
        self.scored = 0
        """Tokens whose log-probabilities were taken."""
        self.begun = False
        """Whether anything was taken."""
        self._codec = codec
        self._detokenizer = codec.detokenizer(skip_special=skip_special)
        self._stops = StopSearch(stops) if stops else None
        self._fed = 0
        self._text: list[str] = []
        self._thought: list[str] = []
        self._thinking = thinking
        self._held_thought = ""
        self._calls = CallReader() if may_call else None
        self._calls_at = 0
        self._wants_scores = wants_scores
        self._offsets: list[int] = []
        self._tops_at = 0
        self._ids_at = 0

    def feed(self) -> bool:
        """Takes the ids that came. True if a stop string is complete now: nothing more is wanted."""
        generated = self.ask.generated
        self.lag += len(generated) - self._fed
        while self._fed < len(generated) and self.reason is None:
            token = generated[self._fed]
            self._fed += 1
            self.tokens = self._fed
            if _ends(self.ask.sampling, token, self._fed, self._codec.eos_id):
                continue  # the head says so next
            self._push(self._detokenizer.push((token,)), is_token=True)
        return self.reason is not None

    def finish(self, reason: str) -> None:
        """No id follows."""
        if self.reason is not None:
            return
        self._push(self._detokenizer.finish(), is_token=False)
        if self.reason is None:
            if self._stops is not None:
                self._show(self._stops.finish())
            self.reason = reason
            self._let_go()
            if self._calls is not None and self._calls.calls and reason == "stop":
                self.reason = "tool_calls"

    def _push(self, text: str, *, is_token: bool) -> None:
        if self._wants_scores and is_token:
            self._offsets.append(self.text_length)
        self.text_length += len(text)
        if self._stops is None:
            self._show(text)
            return
        self._show(self._stops.push(text))
        if self._stops.matched is not None:
            self.reason = "stop"
            self._let_go()

    def _let_go(self) -> None:
        """No text follows: what was held back was what it seemed to be."""
        if self._held_thought:
            self._thought.append(self._held_thought)
            self._held_thought = ""
        if self._calls is not None and (text := self._calls.finish()):
            self._text.append(text)

    def _say(self, text: str) -> None:
        """Text behind the reasoning."""
        if self._calls is not None:
            text = self._calls.push(text)
        if text:
            self._text.append(text)

    def _show(self, text: str) -> None:
        if not text:
            return
        self.visible += len(text)
        if not self._thinking:
            self._say(text)
            return
        pending = self._held_thought + text
        thought, mark, rest = pending.partition(END_THINK)
        if mark:
            self._thinking, self._held_thought = False, ""
            self._thought.append(thought)
            self._say(rest)
            return
        sizes = range(min(len(END_THINK) - 1, len(pending)), 0, -1)
        keep = next((size for size in sizes if END_THINK.startswith(pending[-size:])), 0)
        self._held_thought = pending[len(pending) - keep :]
        self._thought.append(pending[: len(pending) - keep])

    # ------------------------------------------------------------ what is taken from it

    @property
    def has_news(self) -> bool:
        """Whether there is something to show."""
        return bool(self._text or self._thought or self._has_calls) or (not self.begun and self._fed > 0)

    @property
    def _has_calls(self) -> bool:
        return self._calls is not None and len(self._calls.calls) > self._calls_at

    def take_calls(self) -> tuple[int, list[Call]]:
        """Calls that are whole and were not taken before, and how many were."""
        if self._calls is None:
            return 0, []
        first, self._calls_at = self._calls_at, len(self._calls.calls)
        return first, self._calls.calls[first:]

    def take_text(self) -> tuple[str, str]:
        """Text and reasoning since the last call."""
        text, thought = "".join(self._text), "".join(self._thought)
        self._text.clear()
        self._thought.clear()
        self.begun = True
        return text, thought

    def take_ids(self) -> list[int]:
        """Ids that count and were not taken before, whether their text is shown yet or not."""
        first, self._ids_at = self._ids_at, self.tokens
        return self.ask.generated[first : self.tokens].tolist()

    def take_scores(self) -> tuple[list[int], list[int], Told]:
        """Ids whose text is shown by now and was not told before, where each begins in the text, and their
        log-probabilities. Ids of a stop string are never told."""
        end = self.scored
        if self.reason is not None and (self._stops is None or self._stops.matched is None):
            end = len(self._offsets)
        else:
            while end < len(self._offsets) and self._offsets[end] < self.visible:
                end += 1
        told = self.ask.told
        if told is None or end > len(told):
            return [], [], Told()
        first, self.scored = self.scored, end
        counts = told.counts[first:end]
        tops, self._tops_at = self._tops_at, self._tops_at + sum(counts)
        window = Told(
            told.logprobs[first:end],
            told.places[first:end],
            counts,
            told.top_ids[tops : self._tops_at],
            told.top_logprobs[tops : self._tops_at],
        )
        return self.ask.generated[first:end].tolist(), self._offsets[first:end], window


def _ends(sampling: Sampling, token: int, count: int, eos_id: int) -> bool:
    """Whether the token ends the text and so stands for none; `count` ids are there with it."""
    if count < sampling.min_tokens:
        return False
    return token in sampling.stop_ids or (token == eos_id and not sampling.ignore_eos)
