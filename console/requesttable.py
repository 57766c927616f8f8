"""Requests as rows of the Requests screen: what is overdue, and the columns. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from console import words
from console.columns import Cell, Column
from console.filters import Field
from console.tablemodel import TableModel
from console.view import ClusterView
from transport.messages import RequestRow

FIRST_TOKEN_MS = 30_000
"""Without a token for longer is overdue, where the operator has set no limit under `[slo]`."""
STOPPING_MS = 5_000
"""Ranks answer an abort within a turn of their loops."""
QUIET_MS = 10_000
"""A request that generates with this much for each of its tokens does not move."""
OVERDUE = "▲"


def request_name(number: int) -> str:
    """`#1204`: the head's number."""
    return f"#{number}"


def first_token_limit_ms(view: ClusterView) -> float:
    """How long a request may be without a token before it is marked."""
    limit_us = view.traffic.ttft_limit_us if view.traffic is not None else 0
    return limit_us / 1e3 if limit_us else FIRST_TOKEN_MS


def why_overdue(row: RequestRow, first_token_ms: float) -> str:
    """What is late about it, in words; "" if nothing is."""
    if row.state in ("queued", "prefill") and row.age_ms > first_token_ms:
        return f"no token after {words.age(row.age_ms / 1e3)}, limit {words.age(first_token_ms / 1e3)}"
    if row.state == "stopping" and row.state_ms > STOPPING_MS:
        return f"stopping for {words.age(row.state_ms / 1e3)}, its ranks have not answered"
    if row.state == "decode" and row.state_ms > QUIET_MS * max(1, row.generated):
        return f"{words.plural(row.generated, 'token')} in {words.age(row.state_ms / 1e3)}"
    return ""


def token_us(row: RequestRow) -> float:
    """Mean microseconds for each token since the first one; not a number before the second."""
    return 1e3 * row.state_ms / (row.generated - 1) if row.state == "decode" and row.generated > 1 else math.nan


def make_table(limit_ms: Callable[[], float], name_of: Callable[[int], str]) -> TableModel[RequestRow]:
    """The oldest at the top. `limit_ms` is asked when a row is drawn, `name_of` names ranks."""
    extra = [
        Field[RequestRow]("overdue", "text", lambda row: "yes" if why_overdue(row, limit_ms()) else "no"),
        Field[RequestRow]("client", "text", lambda row: row.client),
        Field[RequestRow]("max", "number", lambda row: row.max_tokens),
    ]
    return TableModel(_columns(limit_ms, name_of), lambda row: row.request, "age", extra)


def _columns(limit_ms: Callable[[], float], name_of: Callable[[int], str]) -> Sequence[Column[RequestRow]]:
    column = Column[RequestRow]

    def state(row: RequestRow) -> Cell:
        if why_overdue(row, limit_ms()):
            return (f"{row.state} {OVERDUE}", "bad")
        return (row.state, "dim" if row.state == "queued" else "warn" if row.state == "stopping" else "")

    def rank(number: int) -> str:
        return name_of(number) if number >= 0 else words.NONE

    def whole(row: RequestRow, width: int) -> Cell:
        return words.safe(row.label or row.client)

    return [
        column("id", "id", 8, lambda row: row.request, lambda row: (request_name(row.request), "bold"), align="<",
               grow=3, is_descending=False),
        column("state", "state", 10, lambda row: row.state, state, align="<", kind="text", is_descending=False),
        column("age", "age", 7, lambda row: row.age_ms / 1e3, lambda row: words.age(row.age_ms / 1e3), kind="seconds"),
        column("in_state", "in state", 8, lambda row: row.state_ms / 1e3, lambda row: words.age(row.state_ms / 1e3),
               kind="seconds", priority=3),
        column("in", "in", 5, lambda row: row.prompt_tokens, lambda row: words.short(row.prompt_tokens)),
        column("cached", "cached", 6, lambda row: row.cached_tokens, lambda row: words.short(row.cached_tokens),
               priority=6),
        column("out", "out", 5, lambda row: row.generated, lambda row: words.short(row.generated), priority=1),
        column("p", "P", 4, lambda row: rank(row.prefill_rank), lambda row: rank(row.prefill_rank), align="<",
               kind="text", is_descending=False),
        column("d", "D", 4, lambda row: rank(row.decode_rank), lambda row: rank(row.decode_rank), align="<",
               kind="text", is_descending=False),
        column("queue_ms", "queue", 7, lambda row: row.queue_us / 1e3, lambda row: _stage(row.queue_us), priority=5),
        column("prefill_ms", "prefill", 7, lambda row: row.prefill_us / 1e3, lambda row: _stage(row.prefill_us),
               priority=5),
        column("push_ms", "push", 7, lambda row: row.push_us / 1e3, lambda row: _stage(row.push_us), priority=5),
        column("token_ms", "ms/token", 8, lambda row: token_us(row) / 1e3, lambda row: words.ms(token_us(row)),
               priority=4),
        column("try", "try", 3, lambda row: row.attempt,
               lambda row: (str(row.attempt), "warn" if row.attempt > 1 else ""), priority=7),
        column("label", "label", 12, lambda row: row.label or row.client, lambda row: whole(row, 12), align="<",
               kind="text", priority=2, grow=40, is_descending=False, fits=whole),
    ]  # fmt: skip


def _stage(value_us: int) -> str:
    """0 until it has started."""
    return words.us(value_us) if value_us else words.NONE
