"""Seeded reports of a busy rack for Ranks, Requests and Transfer: several rounds, so that there are rates."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from console.view import ClusterView, LinkState
from tests.console.expertdata import (
    NOW,
    Experts,
    Rack,
    dataclasses_replace,
    make_part,
    make_snapshot,
    make_status,
    make_traffic,
)
from transport.messages import (
    EventsHappened,
    ExpertsReport,
    HeadEvent,
    LinksReport,
    RankStatus,
    RequestRow,
    RequestsReport,
    StatusReport,
)

ROUNDS = 6
"""Seconds that a view has heard."""
WALL_MS = 1_764_511_351_000
"""14:02:31 UTC."""


def make_links(
    rack: Rack,
    second: int,
    *,
    low: tuple[int, int] | None = (3, 9),
    failed: dict[tuple[int, int], int] | None = None,
    count: int | None = None,
) -> tuple[LinksReport, bytes]:
    """All pairs of a rack after so many seconds. `low`: a prefill rank and a place among the decode ranks whose pair
    carries an eighth of what the others do, with pushes in flight. `failed`: by pair,
    likewise. `count`: only so many pairs, from the first."""
    draw = np.random.default_rng(rack.seed)
    prefill = np.repeat(np.arange(rack.prefill), rack.decode)
    decode = np.tile(np.asarray(rack.ranks), rack.prefill)
    rate = draw.normal(3.0e9, 0.2e9, prefill.size)
    p99 = draw.integers(7_000, 9_000, prefill.size)
    inflight = np.zeros(prefill.size, dtype=np.int64)
    failures = np.zeros(prefill.size, dtype=np.int64)
    for (p, d), times in (failed or {}).items():
        failures[p * rack.decode + d] = times
    if low is not None:
        at = low[0] * rack.decode + low[1]
        rate[at], p99[at], inflight[at] = rate[at] / 8, 38_000, 3
    size = (rate * second).astype(np.int64)
    columns = (
        prefill.astype("<i4"), np.ones(prefill.size, "<i4"), decode.astype("<i4"), size.astype("<i8"),
        (size // 10_000_000).astype("<i8"), inflight.astype("<i4"), failures.astype("<i4"), p99.astype("<i4"),
    )  # fmt: skip
    count = prefill.size if count is None else count
    return LinksReport(count), b"".join(column[:count].tobytes() for column in columns)


def make_request(number: int, **changes: object) -> RequestRow:
    row = RequestRow(
        request=number, client="batch-7", label=f"line-{number:06d}", state="decode", age_ms=41_000, state_ms=39_400,
        attempt=1, prompt_tokens=131_072, cached_tokens=128_000, generated=1204, max_tokens=4096, prefill_rank=1,
        decode_rank=17, queue_us=410_000, prefill_us=1_000_000, push_us=120_000,
    )  # fmt: skip
    return dataclasses_replace(row, changes)


def make_requests(count: int, rack: Rack | None = None) -> RequestsReport:
    """The oldest first, as the head tells them: most generate, the youngest wait; the third of them is late."""
    rack = rack or Rack()
    rows = []
    for n in range(count):
        age = (count - n) * 25 + 1200
        state = "decode" if n < count * 0.8 else "prefill" if n < count * 0.9 else "queued"
        is_late = n == 2
        rows.append(
            make_request(
                1000 + n,
                client=f"batch-{n % 7}",
                state="prefill" if is_late else state,
                age_ms=age + (40_000 if n <= 2 else 0),
                state_ms=39_000 if is_late else max(0, age - 1100),
                generated=0 if is_late or state != "decode" else 1 + age // 26,
                prompt_tokens=300 + 977 * n % 131_072,
                cached_tokens=0,
                prefill_rank=-1 if state == "queued" else n % rack.prefill,
                decode_rank=-1 if state == "queued" else rack.ranks[n % rack.decode],
                **({} if state == "decode" and not is_late else {"queue_us": 0, "prefill_us": 0, "push_us": 0}),
            )
        )
    return RequestsReport(total=count, rows=tuple(rows))


def make_ranks(rack: Rack, second: int, changed: dict[int, dict[str, object]] | None = None) -> tuple[RankStatus, ...]:
    """All ranks after so many seconds. `changed`: other fields of a RankStatus by rank."""
    ranks = []
    for status in make_status(rack).ranks:
        rank = status.rank
        is_decode = status.role == "decode"
        slow = 1.14 if rank == rack.prefill + rack.hot_rank else 1.0
        steps = int(110 / slow) * second
        snapshot = make_snapshot(
            rank, step=51_000 + steps, running=88 + rank % 7, waiting=rank % 3, pages_free=1200 - 10 * rank,
            step_us_p50=int(8900 * slow), step_us_sum=450_000_000 + int(steps * 8900 * slow),
            device_us_sum=440_000_000 + int(steps * 8500 * slow),
            generated_tokens=4_000_000 + (5_790 + 11 * rank) * second if is_decode else 0,
            prompt_tokens=9_000_000 + (41_000 + 130 * rank) * second, loop_lag_us_p99=300 + 10 * rank,
            pushed_bytes=0 if is_decode else 96_000_000_000 * second, pushes=0 if is_decode else 9_600 * second,
            pushes_inflight=0 if is_decode else 3,
        )  # fmt: skip
        new = dataclasses_replace(status, {"snapshot": snapshot, "age_ms": 200})
        ranks.append(dataclasses_replace(new, (changed or {}).get(rank, {})))
    return tuple(ranks)


def make_rack_status(rack: Rack, second: int, changed: dict[int, dict[str, object]] | None = None) -> StatusReport:
    ranks = make_ranks(rack, second, changed)
    return make_status(rack, ranks=ranks, uptime_ms=3_600_000 + 1000 * second)


def make_events(*said: tuple[str, str, str]) -> EventsHappened:
    """Level, name, text of each, a second apart, the last one at `WALL_MS`."""
    events = tuple(
        HeadEvent(seq=n + 1, at_ms=WALL_MS - 1000 * (len(said) - 1 - n), level=level, name=name, text=text)  # type: ignore[arg-type]
        for n, (level, name, text) in enumerate(said)
    )
    return EventsHappened(lost=0, events=events)


EVENTS = make_events(
    ("info", "rank.ready", "rank=17 role=decode generation=1 took_s=12.1"),
    ("warning", "link.end", "rank=17 prefill_rank=3 | pair stream p03 ended: reset"),
    ("info", "rebalance.flip", "pool=decode epoch=9"),
    ("warning", "rank.down", "rank=22 generation=1 | killed by signal 9"),
)


@functools.cache
def make_experts_of(rack: Rack) -> Experts:
    """Made once: nobody changes them."""
    return Experts(rack)


def make_busy_view(
    rack: Rack | None = None, *, requests: int = 40, changed: dict[int, dict[str, object]] | None = None,
    groups: bool = True, links: Iterable[int] = range(ROUNDS), **link_changes: object,
) -> ClusterView:  # fmt: skip
    """A live view that has heard `ROUNDS` seconds of a busy rack. `changed` holds in the last one."""
    rack = rack or Rack()
    experts = make_experts_of(rack) if groups else None
    part = make_part(experts) if experts is not None else None
    view = ClusterView()
    view.link = LinkState(phase="live", since=NOW - 60, address="unix:/run/engine", is_admin=True)
    links = set(links)
    for second in range(ROUNDS):
        now = NOW - ROUNDS + 1 + second
        is_last = second == ROUNDS - 1
        view.take(make_rack_status(rack, second, changed if is_last else None), b"", now)
        view.take(ExpertsReport((part,) if part is not None else ()), b"", now)
        view.take(make_traffic(int(now * 1e3), 1000 * second), b"", now)
        if experts is not None and part is not None:
            view.take(*experts.heat(part, part.skew.layer, has_plan=False), now)
        if second in links:
            view.take(*make_links(rack, second, **link_changes), now)  # type: ignore[arg-type]
    view.take(make_requests(requests, rack), b"", NOW)
    view.take(EVENTS, b"", NOW)
    view.answered_at = NOW
    return view
