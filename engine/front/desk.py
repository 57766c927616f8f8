"""HeadDesk: what a front asks the head on `read.sock`: how it is, and what a scrape shows.

One connection, one question at a time, dialled again after any trouble. What was asked a moment ago is not asked again,
so that balancers who look ten times a second cost the head nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TypeVar

from engine.errors import EngineError, PeerGone, RemoteProtocolError
from engine.faces.metrics import absence_text, metrics_text
from transport.link import FrameLink, open_unix_link
from transport.messages import (
    OPERATOR_FROM_HEAD,
    AskExperts,
    AskStatus,
    AskTraffic,
    ExpertsReport,
    Message,
    StatusReport,
    TrafficReport,
)

CACHE_S = 0.5
REPLY_S = 2.0
"""From a question to its answer: the head answers between two events of its loop."""
OUT_LIMIT_BYTES = 1 << 20

M = TypeVar("M", bound=Message)
Reason = dict[str, str]


class HeadDesk:
    """See the module. `path` is the head's socket for reading."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._link: FrameLink | None = None
        self._lock = asyncio.Lock()
        self._status: StatusReport | None = None
        self._asked_at = -CACHE_S

    async def status(self) -> StatusReport | None:
        """The cluster at a moment not longer ago than `CACHE_S`; None if the head does not answer."""
        async with self._lock:
            if time.monotonic() - self._asked_at >= CACHE_S:
                try:
                    self._status = await self._ask(AskStatus(), StatusReport)
                except EngineError:
                    self._status = None
                self._asked_at = time.monotonic()
            return self._status

    def forget(self) -> None:
        """What was asked before is not true any more."""
        self._asked_at = -CACHE_S

    async def metrics(self) -> str:
        """What the head has to say to a scrape; if it does not answer, that."""
        async with self._lock:
            try:
                status = await self._ask(AskStatus(), StatusReport)
                experts = await self._ask(AskExperts(), ExpertsReport)
                traffic = await self._ask(AskTraffic(), TrafficReport)
            except EngineError:
                return absence_text()
        return metrics_text(status, experts, traffic, time.time())

    async def aclose(self) -> None:
        async with self._lock:
            await self._drop()

    async def _ask(self, question: Message, kind: type[M]) -> M:
        try:
            async with asyncio.timeout(REPLY_S):
                if self._link is None:
                    self._link = await open_unix_link(
                        self._path,
                        accepts=OPERATOR_FROM_HEAD,
                        out_limit_bytes=OUT_LIMIT_BYTES,
                        stall_s=REPLY_S,
                        name="head",
                    )
                await self._link.send(question)
                answer = (await self._link.receive())[0].message
        except TimeoutError:
            await self._drop()
            raise PeerGone(f"the head did not answer within {REPLY_S:g} s") from None
        except BaseException:
            # Whatever broke off, an answer may still be on its way: the next question has a link of its own.
            await self._drop()
            raise
        if not isinstance(answer, kind):
            await self._drop()
            raise RemoteProtocolError(f"the head answered {type(answer).__name__}")
        return answer

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(EngineError):
                await link.aclose()


def why_not_ready(report: StatusReport | None, *, is_draining: bool, progress_s: float) -> list[Reason]:
    """Codes and sentences for what keeps requests from being served; empty if nothing does.

    Args:
        report: of the head; None if it did not answer.
        is_draining: this front is about to end.
        progress_s: a rank that has work and finishes no step for so long is stalled.
    """
    if is_draining:
        return [_reason("draining", "this front ends")]
    if report is None:
        return [_reason("unreachable", "the engine's head does not answer")]
    reasons = [_reason("draining", "the engine ends")] if report.is_stopping else []
    for role in ("prefill", "decode"):
        ranks = [rank for rank in report.ranks if rank.role == role]
        if not any(rank.state == "ready" for rank in ranks):
            starts = bool(ranks) and all(rank.state in ("starting", "joining") for rank in ranks)
            states = ", ".join(f"{rank.rank} is {rank.state}" for rank in ranks[:16])
            reasons.append(_reason("starting" if starts else f"no_{role}_rank", f"no {role} rank is ready: {states}"))
        for rank in ranks:
            age_s = rank.snapshot.step_age_ms / 1e3 if rank.snapshot is not None and rank.state == "ready" else 0.0
            if age_s > progress_s:
                words = f"{role} rank {rank.rank} has work and finished no step for {age_s:.1f} s"
                reasons.append(_reason(f"{role}_stalled", words))
    if not report.ready and not reasons:
        reasons = [_reason("not_ready", words) for words in report.reasons] or [_reason("not_ready", "not ready")]
    return reasons


def _reason(code: str, message: str) -> Reason:
    return {"code": code, "message": message}
