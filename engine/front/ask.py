"""Ask: one completion that a front wants of the head, and who is told what becomes of it."""

from __future__ import annotations

import array
import dataclasses
from typing import Protocol

from engine.actors.told import Told
from transport.messages import RequestStarted, Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why an ask ended without an answer: `code` is a FailureCode, or `engine_lost`."""

    code: str
    message: str
    retryable: bool = False


class AskOwner(Protocol):
    """Whoever is told what becomes of asks. Called from the reading task; must not block."""

    def tokens_came(self, ask: Ask, count: int) -> None:
        """The last `count` ids of `ask.generated` are new."""

    def ask_finished(self, ask: Ask, reason: str) -> None:
        """All ids are there; nothing follows."""

    def ask_failed(self, ask: Ask, failure: Failure) -> None:
        """It is over without an answer; nothing follows."""

    def batch_over(self) -> None:
        """Everything of one read from the head was told. What is to be written is written now, at once."""


@dataclasses.dataclass(slots=True, eq=False)
class Ask:
    """One completion.

    Attributes:
        prompt: int32[num_prompt] as bytes.
        owner: None once nobody wants it any more.
        generated: int32 ids of the completion so far.
        request, attempt: number on the present connection, and submissions so far.
        started: the engine's account of the latest attempt that got so far.
        affinity, cache_salt, priority: as in `Submit`.
        handoff_us: as in `RequestFinished`; None before.
        told, prompt_told: log-probabilities of `generated` and of the prompt, where `sampling` asks for them.
    """

    prompt: bytes
    sampling: Sampling
    label: str
    owner: AskOwner | None
    generated: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    request: int = 0
    attempt: int = 0
    started: RequestStarted | None = None
    told: Told | None = None
    prompt_told: Told | None = None
    affinity: str = ""
    cache_salt: str = ""
    priority: int = 0
    handoff_us: int | None = None
