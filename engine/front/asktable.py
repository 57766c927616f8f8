"""AskTable: the asks that the head has, by their numbers, and what its frames say of them.

It is strict with the head: a token that is not the next one, a number that was never given out or another attempt's
words end the connection, so that no text is ever made of what belongs to something else.
"""

from __future__ import annotations

import sys

from engine.actors.told import Told, read_scores, take_prompt
from engine.errors import PeerGone, RemoteProtocolError
from engine.front.ask import Ask, AskOwner, Failure
from transport import messages
from transport.messages import RequestFailed, RequestFinished, RequestStarted
from transport.wire import Frame


class AskTable:
    """See the module. A cancelled ask stays until the head has answered for it; its owner is None."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise AssertionError("token columns are little-endian and read in place")
        self._asks: dict[int, Ask] = {}
        self._numbers = 0
        self._touched: dict[AskOwner, None] = {}

    def __len__(self) -> int:
        return len(self._asks)

    def add(self, ask: Ask) -> None:
        """Gives the ask its next number and attempt."""
        self._numbers += 1
        ask.request, ask.attempt = self._numbers, ask.attempt + 1
        self._asks[ask.request] = ask

    def remove(self, ask: Ask) -> None:
        if self.holds(ask):
            del self._asks[ask.request]

    def holds(self, ask: Ask) -> bool:
        return self._asks.get(ask.request) is ask

    def unanswered(self) -> list[Ask]:
        return list(self._asks.values())

    def clear(self) -> list[Ask]:
        """Takes all of them out: the connection is gone."""
        asks, self._asks = self._asks, {}
        return list(asks.values())

    def fail(self, ask: Ask, failure: Failure) -> None:
        """Tells the ask's owner that it is over."""
        if ask.owner is not None:
            self._touched[ask.owner] = None
            ask.owner.ask_failed(ask, failure)

    def tell_over(self) -> None:
        """Tells all owners who heard something that this was all for now."""
        touched, self._touched = self._touched, {}
        for owner in touched:
            owner.batch_over()

    def take(self, frame: Frame) -> tuple[Ask, RequestFailed] | None:
        """Takes one frame of the head. What failed is left to the caller, who may try it again.

        Raises:
            PeerGone: it refuses this front.
            RemoteProtocolError: it says what it must not.
        """
        match frame.message:
            case messages.TokensEmitted() as fact:
                self._take_tokens(fact, frame.blob)
            case RequestStarted() as fact:
                ask = self._find(fact.request, fact.attempt)
                if ask is not None:
                    ask.started = fact
            case RequestFinished() as fact:
                ask = self._find(fact.request, fact.attempt)
                if ask is None:
                    return None
                if fact.completion_tokens != len(ask.generated):
                    raise RemoteProtocolError(
                        f"request {fact.request} finished with {fact.completion_tokens} tokens,"
                        f" but {len(ask.generated)} came"
                    )
                del self._asks[fact.request]
                ask.handoff_us = fact.handoff_us
                if ask.owner is not None:
                    self._touched[ask.owner] = None
                    ask.owner.ask_finished(ask, fact.reason)
            case RequestFailed() as fact:
                ask = self._find(fact.request, fact.attempt)
                if ask is not None:
                    del self._asks[fact.request]
                    return ask, fact
            case messages.LogprobsEmitted() as fact:
                for scored in read_scores(fact, frame.blob):
                    ask = self._find(scored.request, scored.attempt)
                    if ask is not None:
                        ask.told = ask.told or Told()
                        ask.told.extend(scored.index, *scored.columns)
            case messages.PromptScored() as fact:
                ask = self._find(fact.request, fact.attempt)
                if ask is not None:
                    ask.prompt_told = ask.prompt_told or Told(missing=1)
                    take_prompt(ask.prompt_told, fact, frame.blob)
            case messages.Refused() as fact:
                raise PeerGone(f"the head refused this front: {fact.message}")
            case other:
                raise RemoteProtocolError(f"the head sent {type(other).__name__} out of turn")
        return None

    def _find(self, request: int, attempt: int) -> Ask | None:
        ask = self._asks.get(request)
        if ask is None:
            if request > self._numbers:
                raise RemoteProtocolError(f"the head speaks of request {request}; the last one was {self._numbers}")
            return None
        if ask.attempt != attempt:
            raise RemoteProtocolError(f"request {request} is at attempt {ask.attempt}, the head says {attempt}")
        return ask

    def _take_tokens(self, fact: messages.TokensEmitted, blob: memoryview) -> None:
        rows = fact.num_rows
        requests = blob[: 8 * rows].cast("q").tolist()
        attempts, indexes, counts = (blob[at * rows : (at + 4) * rows].cast("i").tolist() for at in (8, 12, 16))
        ids = blob[20 * rows :].cast("i").tolist()
        if sum(counts) != fact.num_tokens or min(counts, default=0) < 0:
            raise RemoteProtocolError(f"TokensEmitted says {fact.num_tokens} tokens, its rows say {sum(counts)}")
        place = 0
        for request, attempt, index, count in zip(requests, attempts, indexes, counts, strict=True):
            first, place = place, place + count
            ask = self._find(request, attempt)
            if ask is None:
                continue
            if ask.started is None or ask.started.attempt != attempt:
                raise RemoteProtocolError(f"request {request}: tokens came before its start")
            if index != len(ask.generated):
                raise RemoteProtocolError(f"request {request}: token {index} came where {len(ask.generated)} was next")
            ask.generated.extend(ids[first:place])
            if ask.owner is not None:
                self._touched[ask.owner] = None
                ask.owner.tokens_came(ask, count)
