"""Admission: processor time that a rank's loop spends on taking one more request in, by the length of its prompt.

Sides alone, with no device and no streams: facts in, plans and effects out, as the step loop calls them. On a decode
rank others run beside the one that comes, since all that is kept of a line-up is made anew for it. On a prefill rank a
prompt is also followed to its commit, all chunks and pushes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from engine.actors.rank import side_sizes
from engine.bench.loop import DECODE, LIFE, PREFILL
from engine.config import Limits, RankConfig
from engine.core.decode import DecodeSide
from engine.core.effects import StartPush, ToPeer
from engine.core.plan import StepPlan, StepResult
from engine.core.prefill import PrefillSide
from engine.core.schedule import SideSizes
from engine.model.passes import copy_plan
from engine.ports import DeviceInfo, RankIdentity
from transport.messages import (
    PROTOCOL_VERSION,
    PagesGranted,
    PagesPushed,
    PeerHello,
    PeerWelcome,
    PrefillCommitted,
    ReservePages,
    Sampling,
    StartPrefill,
    Timings,
)

VOCAB = 129_280
LINK = 1
LENGTHS, SAMPLES = (1024, 131_072), 15
ROUNDS = 64
"""Requests that come one after another while the others run."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionCase:
    """A request with so many prompt ids, beside `rows` that run at the same length; chunks of `chunk` ids."""

    ids: int
    rows: int = 15
    chunk: int = 2048
    page_tokens: int = 256


def measure_admissions(rows: int, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Entries of a record: a short and a long prompt beside `rows` others, in pages and chunks of V4-Flash's size."""
    found = [measure_admission(AdmissionCase(ids, rows), SAMPLES) for ids in LENGTHS]
    for each in found:
        tell(describe_admission(each))
    return found


def measure_admission(case: AdmissionCase, samples: int, seed: int = 1) -> dict[str, Any]:
    """An entry of a record: medians over requests, microseconds of processor time."""
    samples = min(samples, ROUNDS)
    decode, told = zip(*_time_decode(case, samples), strict=True)
    admits, wholes = zip(*_time_prefill(case, samples, seed), strict=True)
    return {
        **dataclasses.asdict(case),
        "samples": samples,
        "decode_us": round(statistics.median(decode), 1),
        "decode_pushes_us": round(statistics.median(told), 1),
        "prefill_us": round(statistics.median(admits), 1),
        "prefill_whole_us": round(statistics.median(wholes), 1),
    }


def describe_admission(found: dict[str, Any]) -> str:
    """It for people, in one line."""
    return (
        f"admission of {found['ids']} ids, processor: decode rank {found['decode_us'] / 1e3:.2f} ms beside"
        f" {found['rows']} rows, {found['decode_pushes_us'] / 1e3:.2f} of it for the news of pushes; prefill rank"
        f" {found['prefill_us'] / 1e3:.2f} ms, to its commit {found['prefill_whole_us'] / 1e3:.2f} ms"
    )


def _time_decode(case: AdmissionCase, samples: int) -> list[tuple[float, float]]:
    """From its reservation to a submitted plan with it in, for one request after another; and what is spent of it on
    the news of pushes, which come while a prompt is computed: one for each chunk, made here too."""
    side, times = DecodeSide(_sizes(case, "decode")), []
    hello = PeerHello(version=PROTOCOL_VERSION, rank=PREFILL, generation=LIFE, layout_digest="")
    side.on_link_up(LINK, hello, 0)
    others = Sampling(max_tokens=_count_tokens(case), ignore_eos=True)
    for request in range(case.rows):
        _end_step(side, _admit(side, case, request, others)[0])
    for request in range(case.rows, case.rows + samples):
        began = time.thread_time_ns()
        plan, told_ns = _admit(side, case, request, Sampling(max_tokens=2, ignore_eos=True))
        copy_plan(plan)
        times.append(((time.thread_time_ns() - began) / 1e3, told_ns / 1e3))
        _end_step(side, plan)
    return times


def _admit(side: DecodeSide, case: AdmissionCase, request: int, sampling: Sampling) -> tuple[StepPlan, int]:
    """Takes a request in as far as the plan that it is in first, whose step is left to its caller; and nanoseconds
    spent on the news of pushes."""
    word = ReservePages(
        request=request, attempt=1, prefill_rank=PREFILL, num_ids=case.ids, generated=0, sampling=sampling
    )
    side.on_head(word, memoryview(b""), 1)
    side.settle(1)
    (grant,) = [
        effect.message
        for effect in side.take_outbox()
        if isinstance(effect, ToPeer) and isinstance(effect.message, PagesGranted)
    ]
    step = case.chunk // case.page_tokens
    began = time.thread_time_ns()
    for first in range(0, grant.num_pages, step):
        count = min(step, grant.num_pages - first)
        pushed = PagesPushed(request=request, epoch=grant.epoch, first=first, count=count, num_bytes=1)
        side.on_peer(LINK, pushed, memoryview(b""), 1)
    told_ns = time.thread_time_ns() - began
    committed = PrefillCommitted(
        request=request,
        epoch=grant.epoch,
        num_ids=case.ids,
        num_pages=grant.num_pages,
        first_token=1,
        pushed_bytes=1,
        pushes=1,
        post_us=1,
        timings=Timings(),
    )
    side.on_peer(LINK, committed, memoryview(b""), 1)
    side.settle(1)
    plan = side.plan(1)
    assert plan is not None
    side.take_outbox()
    return plan, told_ns


def _end_step(side: DecodeSide, plan: StepPlan) -> None:
    side.apply(StepResult(plan.step, (), (1,) * len(plan.rows), 1), 1)
    side.take_outbox()
    side.settle(1)


def _time_prefill(case: AdmissionCase, samples: int, seed: int) -> list[tuple[float, float]]:
    """Of each of some prompts: until it is admitted, and until it is committed."""
    side, times = PrefillSide(_sizes(case, "prefill")), []
    pages = -(-case.ids // case.page_tokens)
    welcome = PeerWelcome(
        version=PROTOCOL_VERSION, rank=DECODE, generation=LIFE, layout_digest="", num_pages=pages, num_slabs=1
    )
    side.on_link_up(LINK, welcome, 0)
    generator = np.random.default_rng(seed)
    granted = memoryview(np.arange(pages, dtype="<i4").tobytes())
    for request in range(samples):
        ids = memoryview(generator.integers(16, VOCAB, case.ids, dtype=np.int32).tobytes())
        began = time.thread_time_ns()
        word = StartPrefill(
            request=request, attempt=1, decode_rank=DECODE, generated=0, sampling=Sampling(), queued_us=0
        )
        side.on_head(word, ids, 1)
        grant = PagesGranted(request=request, attempt=1, epoch=request + 1, slab=0, num_pages=pages)
        side.on_peer(LINK, grant, granted, 1)
        side.settle(1)
        admitted = time.thread_time_ns()
        _follow(side, request)
        times.append(((admitted - began) / 1e3, (time.thread_time_ns() - began) / 1e3))
    return times


def _follow(side: PrefillSide, request: int) -> None:
    """All chunks and pushes of the one prompt that there is."""
    while (plan := side.plan(1)) is not None:
        copy_plan(plan)
        tokens = tuple(None if chunk.sample is None else 1 for chunk in plan.chunks)
        side.apply(StepResult(plan.step, tokens, (), 1), 1)
        for effect in side.take_outbox():
            if isinstance(effect, StartPush):
                side.on_push_done(effect.key, effect.first, effect.count, 1, 1, 1)
        side.take_outbox()
        side.settle(1)
    assert (request, 1) not in side.prompts, "it is committed"


def _count_tokens(case: AdmissionCase) -> int:
    """Tokens of those that run beside all that come: a step for each that is admitted."""
    return case.rows + ROUNDS + 2


def _sizes(case: AdmissionCase, role: Literal["prefill", "decode"]) -> SideSizes:
    pages = -(-(case.ids + _count_tokens(case)) // case.page_tokens)
    num_pages = pages * (case.rows + 2)
    config = RankConfig(
        role=role,
        model="",
        device="sim",
        fabric="nixl",
        page_tokens=case.page_tokens,
        max_model_tokens=pages * case.page_tokens,
        num_pages=num_pages,
        num_slabs=2 * (case.rows + 2),
        kv_dtype="fp8",
        threads=1,
        replay_rows=0,
        config_digest="",
        limits=Limits(decode_rows=case.rows + 1, prefill_chunk_tokens=case.chunk),
    )
    drafting = dataclasses.replace(config.draft, tokens=0)
    back = dataclasses.replace(config.hand_back, enabled=False)
    config = dataclasses.replace(config, draft=drafting, hand_back=back)
    info = DeviceInfo(
        name="none",
        layout_digest="",
        page_tokens=case.page_tokens,
        page_bytes=1,
        num_pages=num_pages,
        slab_bytes=1,
        num_slabs=config.num_slabs,
        vocab_size=VOCAB,
        max_model_tokens=config.max_model_tokens,
        eos_ids=(1,),
    )
    return side_sizes(RankIdentity(PREFILL if role == "prefill" else DECODE, LIFE, config), info)
