"""Served: a batch that a decode rank's loop runs, as `loop.py` has it: its steps' time, and what they cost a host.

All sequences are granted memory, filled by the caller as a prefill rank would, and committed in one turn: so they
decode together from the first step on. Times are taken with nothing of the rank changed. What a step costs the
processor is read from the clocks of the loop's thread and of the device's worker; which calls spend it, in a run of its
own, where these calls read a clock.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from engine.bench.forward import quiet_garbage
from engine.bench.loop import PREFILL, RankLoop, open_loop
from engine.bench.record import percentile
from engine.config import RankConfig
from engine.core.tokens import unpack_tokens
from engine.errors import ConfigError
from engine.model.device import TorchDevice
from engine.ports import Device
from transport.messages import (
    PagesGranted,
    PagesPushed,
    PrefillCommitted,
    RequestFinished,
    ReservePages,
    Sampling,
    Timings,
    TokensEmitted,
)

Ints = npt.NDArray[np.int64]
Fill = Callable[[int, Sequence[int], int], Awaitable[int]]
"""Of a row: fills its pages and slab, given by number, with its prompt; the first token of its completion."""

CASE_S = 300.0
"""Longest wait for a batch to end."""
PARTS = ("admit", "plan", "submit", "sample", "emit")
"""What the processor is spent on: taking requests and grants in, planning, handing a step to the device and launching
it there, drawing tokens or taking over those that the device drew, and telling them."""
WORKER = "torch-device"
"""The thread that computes or launches."""


@dataclasses.dataclass(frozen=True)
class ServedSample:
    """What one run gave.

    Attributes:
        step_us: of each timed step, from one result to the next.
        device_us: the device's own measure of the same steps.
        loop_us, worker_us: processor time of a step in the loop's thread and in the device's.
        tokens: int64[rows, 1 + ahead + steps], the completions.
        parts_us: processor time of a step by PARTS, both threads together; empty where it was not asked for.
    """

    step_us: list[int]
    device_us: list[int]
    loop_us: float
    worker_us: float
    tokens: Ints
    parts_us: dict[str, float]


async def serve_batch(
    config: RankConfig,
    device: TorchDevice,
    lengths: Sequence[int],
    fill: Fill,
    *,
    steps: int,
    ahead: int = 0,
    split: bool = False,
) -> ServedSample:
    """Runs one batch in a loop of its own.

    Args:
        config: of the decode rank. It drafts nothing.
        device: borrowed; nothing may be queued.
        lengths: prompt ids of each sequence.
        fill: see Fill; called in order, while no step runs.
        steps: that are timed, behind `ahead` others.
        split: also which calls spend the processor; the times are worth less then.

    Raises:
        ConfigError: the batch does not fit the rank.
        EngineError: it did not end.
    """
    # Its tickets are its own; whoever holds one got it from this device.
    async with open_loop(plan_config(config), cast(Device, device)) as loop:
        return await run_batch(loop, config, device, lengths, fill, steps=steps, ahead=ahead, split=split)


def plan_config(config: RankConfig) -> RankConfig:
    """Of a decode rank that drafts nothing."""
    drafting = dataclasses.replace(config.draft, tokens=0)
    return dataclasses.replace(config, role="decode", draft=drafting, checksum_pushes=False)


async def run_batch(
    loop: RankLoop,
    config: RankConfig,
    device: TorchDevice,
    lengths: Sequence[int],
    fill: Fill,
    *,
    steps: int,
    ahead: int = 0,
    split: bool = False,
    meet: Callable[[], Awaitable[None]] | None = None,
) -> ServedSample:
    """The same in a loop that runs, of `plan_config`. `meet`: awaited when all is ready to begin."""
    _check(config, device, lengths, ahead + steps)
    loop.forget()
    sampling = Sampling(max_tokens=ahead + steps + 1, ignore_eos=True)
    rows = {next(loop.numbers): row for row in range(len(lengths))}
    for request, row in rows.items():
        word = ReservePages(
            request=request, attempt=1, prefill_rank=PREFILL, num_ids=lengths[row], generated=0, sampling=sampling
        )
        loop.say_as_head(word)
    grants = await loop.wait_for(loop.peer, PagesGranted, len(lengths), CASE_S)
    firsts = [
        await fill(rows[grant.request], np.frombuffer(blob, "<i4").tolist(), grant.slab) for grant, blob in grants
    ]
    with quiet_garbage(), ExitStack() as wrapped:
        if meet is not None:
            await meet()
        spending = Spending() if split else None
        if spending is not None:
            wrapped.enter_context(_wrap_all(spending, loop, device))
        clocks = _Clocks(ahead, steps, spending)
        loop.meters.noted = clocks.note
        for (grant, _), first in zip(grants, firsts, strict=True):
            _commit(loop, grant, lengths[rows[grant.request]], first)
        await loop.wait_for(loop.head, RequestFinished, len(lengths), CASE_S)
    times = loop.meters.times_us[ahead : ahead + steps]
    completions: list[list[int]] = [[] for _ in lengths]
    for message, blob in loop.head.find(TokensEmitted):
        for emitted in unpack_tokens(message.num_rows, message.num_tokens, blob):
            completions[rows[emitted.request]] += emitted.tokens
    return ServedSample(
        [step_us for step_us, _ in times],
        [device_us for _, device_us in times],
        *clocks.spent_us(),
        np.array(completions),
        clocks.parts_us(),
    )


def describe_sample(sample: ServedSample) -> dict[str, Any]:
    """Figures of a run, as a record has them."""
    times_ms = [step_us / 1e3 for step_us in sample.step_us]
    found: dict[str, Any] = {
        "step_ms_median": round(statistics.median(times_ms), 4),
        "step_ms_min": round(min(times_ms), 4),
        "step_ms_max": round(max(times_ms), 4),
        "step_ms_p99": round(percentile(times_ms, 0.99), 4),
        "step_ms_mean": round(statistics.fmean(times_ms), 4),
        "device_ms_median": round(statistics.median(sample.device_us) / 1e3, 4),
        "loop_us_per_step": round(sample.loop_us, 1),
        "worker_us_per_step": round(sample.worker_us, 1),
    }
    if sample.parts_us:
        found["parts_us_per_step"] = {name: round(us, 1) for name, us in sample.parts_us.items()}
    return found


class Spending:
    """Processor time by part, of whichever thread spends it."""

    def __init__(self) -> None:
        self.parts_ns = dict.fromkeys(PARTS, 0)

    @contextmanager
    def wrap(self, owner: object, name: str, part: str) -> Iterator[None]:
        """Counts the calls of one object's method as a part's, for as long as the block runs."""
        plain, parts_ns = getattr(owner, name), self.parts_ns

        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return plain(*given, **named)
            finally:
                parts_ns[part] += time.thread_time_ns() - began

        setattr(owner, name, timed)
        try:
            yield
        finally:
            delattr(owner, name)


@contextmanager
def _wrap_all(spending: Spending, loop: RankLoop, device: TorchDevice) -> Iterator[None]:
    """The calls that PARTS consist of, one beside another: none of them calls another one."""
    calls: list[tuple[object, str, str]] = [
        *((loop.side, name, "admit") for name in ("on_head", "on_peer", "on_link_up", "settle")),
        (loop.side, "plan", "plan"),
        (device, "submit", "submit"),
        (loop.side, "apply", "emit"),
        (loop.side, "take_outbox", "emit"),
        (loop.head, "post", "emit"),
        (loop.peer, "post", "emit"),
    ]
    pipeline = device._pipeline
    if pipeline is not None:
        calls += [(pipeline, "launch", "submit"), (pipeline, "finish", "sample")]
    else:
        calls.append((device._runner._chooser, "choose", "sample"))
    with ExitStack() as wrapped:
        for owner, name, part in calls:
            wrapped.enter_context(spending.wrap(owner, name, part))
        yield


class _Clocks:
    """Reads the two threads' clocks, and what was counted, when the timed steps begin and when they have ended."""

    def __init__(self, ahead: int, steps: int, spending: Spending | None) -> None:
        worker = next(thread for thread in threading.enumerate() if thread.name == WORKER and thread.is_alive())
        assert worker.ident is not None
        self._clock = time.pthread_getcpuclockid(worker.ident)
        self._steps = steps
        self._spending = spending
        self._moments = (ahead, ahead + steps)
        self._read: list[tuple[int, int, dict[str, int]]] = []
        self.note(0)

    def note(self, count: int) -> None:
        """So many steps have ended."""
        if count in self._moments:
            parts = {} if self._spending is None else dict(self._spending.parts_ns)
            self._read.append((time.thread_time_ns(), time.clock_gettime_ns(self._clock), parts))

    def spent_us(self) -> tuple[float, float]:
        """Of a step, in the loop's thread and in the worker."""
        (loop, worker, _), (loop_end, worker_end, _) = self._read
        return (loop_end - loop) / 1e3 / self._steps, (worker_end - worker) / 1e3 / self._steps

    def parts_us(self) -> dict[str, float]:
        """The same by part."""
        (_, _, before), (_, _, after) = self._read
        return {name: (after[name] - before[name]) / 1e3 / self._steps for name in after}


def _check(config: RankConfig, device: TorchDevice, lengths: Sequence[int], steps: int) -> None:
    info = device.info
    rows = len(lengths)
    if rows > min(config.limits.decode_rows, info.num_slabs):
        raise ConfigError(
            f"{rows} rows are served together by limits.decode_rows {config.limits.decode_rows} and num_slabs"
            f" {info.num_slabs} at most; raise them (--set)"
        )
    pages = sum(-(-(length + steps) // info.page_tokens) for length in lengths)
    if pages > info.num_pages or max(lengths) + steps + 1 > min(config.max_model_tokens, info.max_model_tokens):
        raise ConfigError(
            f"{rows} rows of {max(lengths)} ids and {steps + 1} tokens need {pages} pages and max_model_tokens above"
            f" {max(lengths) + steps}; there are {info.num_pages} and {config.max_model_tokens}"
        )


def _commit(loop: RankLoop, grant: PagesGranted, num_ids: int, first: int) -> None:
    """What a prefill rank says of a prompt that is there."""
    pushed = PagesPushed(request=grant.request, epoch=grant.epoch, first=0, count=grant.num_pages, num_bytes=0)
    loop.say_as_peer(pushed)
    loop.say_as_peer(
        PrefillCommitted(
            request=grant.request,
            epoch=grant.epoch,
            num_ids=num_ids,
            num_pages=grant.num_pages,
            first_token=first,
            pushed_bytes=0,
            pushes=1,
            post_us=0,
            timings=Timings(),
        )
    )
