"""The head's requests as operators see them: RequestRow of an Entry, the oldest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from engine.actors.seats import Entry
from transport.messages import AskRequests, RequestRow, RequestsReport, RequestState, Timings

_NOT_STARTED = Timings()


def list_requests(
    entries: Iterable[Entry], ask: AskRequests, generated: Callable[[int], int], now: float
) -> RequestsReport:
    """Rows of what was accepted at least `ask.older_ms` ago, and how many there are without the limit.

    Args:
        entries: in the order in which they were accepted.
        generated: how many tokens of a request have come, by its number.
        now: seconds, of the clock that entries have their times of.
    """
    latest = now - ask.older_ms / 1e3
    matching = itertools.takewhile(lambda entry: entry.queued_at <= latest, entries)
    rows = tuple(_row(entry, generated(entry.number), now) for entry in itertools.islice(matching, ask.limit))
    return RequestsReport(total=len(rows) + sum(1 for _ in matching), rows=rows)


def _row(entry: Entry, generated: int, now: float) -> RequestRow:
    submit, started = entry.submit, entry.started
    timings = _NOT_STARTED if started is None else started.timings
    return RequestRow(
        request=entry.number,
        client=entry.client_name,
        label=submit.label,
        state=_state(entry),
        age_ms=_ms(now - entry.queued_at),
        state_ms=_ms(now - entry.state_at),
        attempt=submit.attempt,
        prompt_tokens=entry.num_ids - submit.generated,
        cached_tokens=0 if started is None else started.cached_tokens,
        generated=generated,
        max_tokens=submit.sampling.max_tokens,
        prefill_rank=-1 if entry.prefill is None else entry.prefill,
        decode_rank=-1 if entry.decode is None else entry.decode,
        queue_us=timings.queue_us,
        prefill_us=timings.prefill_us,
        push_us=timings.push_us,
    )


def _state(entry: Entry) -> RequestState:
    if entry.is_aborting:
        return "stopping"
    if entry.prefill is None:
        return "queued"
    return "prefill" if entry.started is None else "decode"


def _ms(seconds: float) -> int:
    return int(1e3 * max(0.0, seconds))
