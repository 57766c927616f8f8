"""Served on a CPU: the cases of `forward.py` once more, on the same model, as a decode rank's loop runs them."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import trio

from engine.bench.admission import measure_admissions
from engine.bench.forward import GREEDY, BareModel, StepCase
from engine.bench.prompts import make_prompts
from engine.bench.served import Fill, ServedSample, describe_sample, serve_batch
from engine.bench.summary import summarise_served
from engine.config import ClusterConfig, RankConfig
from engine.core.plan import PrefillChunk, StepPlan
from engine.model.device import TorchDevice


def add_served(
    record: dict[str, Any],
    config: ClusterConfig,
    bare: BareModel,
    cases: Sequence[StepCase],
    *,
    samples: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Adds to a `forward` record what serving its cases takes: runs, their summary, and admissions.

    Raises:
        ConfigError: a case does not fit the rank.
        EngineError: a batch did not end.
    """
    served = measure_served(config, bare, cases, samples=samples, seed=seed, tell=tell)
    record["runs"] += served
    summarise_served(record["summary"]["decode"], served)
    rows = max((case.rows for case in cases), default=1)
    record["admissions"] = measure_admissions(rows - 1, tell)


def measure_served(
    config: ClusterConfig,
    bare: BareModel,
    cases: Sequence[StepCase],
    *,
    samples: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Entries of a record with `kind` `served`: all cases, `samples` times in turn.

    Raises:
        ConfigError: a case does not fit the rank.
        EngineError: a batch did not end.
    """
    rank_config = config.rank_config(config.decode.ranks[0])
    runs: list[dict[str, Any]] = []
    for number in range(samples):
        for case in cases:
            # Which calls spend it differs little from sample to sample.
            runs.append({**dataclasses.asdict(case), "kind": "served", "sample": number})
            for split in (False, True) if number == 0 else (False,):
                sample = trio.run(_serve, rank_config, bare, case, seed, split)
                found = describe_sample(sample)
                runs[-1] |= found if not split else {"parts_us_per_step": found["parts_us_per_step"]}
            tell(f"served  {case.rows} rows at {case.context}: {runs[-1]['step_ms_median']:.2f} ms a step")
    return runs


async def _serve(config: RankConfig, bare: BareModel, case: StepCase, seed: int, split: bool) -> ServedSample:
    device = TorchDevice(bare.model, bare.info, threads=config.threads)
    try:
        prompts = make_prompts(case.rows, case.context, bare.info.vocab_size, seed)
        fill = make_fill(device, prompts, config.limits.prefill_chunk_tokens)
        lengths = [case.context] * case.rows
        return await serve_batch(config, device, lengths, fill, steps=case.steps, ahead=case.ahead, split=split)
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


def make_fill(device: TorchDevice, prompts: Sequence[Sequence[int]], chunk: int) -> Fill:
    """Computes prompts on the device itself, chunk by chunk."""

    async def fill(row: int, pages: Sequence[int], slab: int) -> int:
        token: int | None = None
        for start in range(0, len(prompts[row]), chunk):
            part = prompts[row][start : start + chunk]
            ids = memoryview(array.array("i", part).tobytes())
            sample = GREEDY if start + len(part) == len(prompts[row]) else None
            plan = StepPlan(1, (PrefillChunk(row, slab, start, ids, pages, sample),), ())
            (token,) = (await device.wait(device.submit(plan))).chunk_tokens
        assert token is not None
        return token

    return fill
