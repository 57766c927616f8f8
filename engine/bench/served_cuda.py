"""Served on a GPU: the cases of `step.py` once more, on the same weights and arena, as a decode rank's loop runs them.

The model is a rank's, with a graph for each power of two of rows. Its arena is full of random records, so a prompt has
nothing to fill; the first token is drawn by chance, and the others follow from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import trio

from engine.bench.cases import DeviceCase
from engine.bench.rig import PAGE_TOKENS, StepBench, positions_of
from engine.bench.served import ServedSample, describe_sample, serve_batch
from engine.config import Limits, RankConfig
from engine.errors import ConfigError
from engine.model.device import TorchDevice
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo

AHEAD, STEPS = 10, 100
"""Steps of a sample that are not timed, and that are."""
SAMPLES = 3


class ServedBench:
    """A rank's model over a bench's weights and arena, for its cases with one row of each request."""

    def __init__(self, bench: StepBench) -> None:
        """Captures.

        Raises:
            ConfigError: no case can be served.
        """
        options = bench.options
        cases = [case for case in options.cases if is_served(case)]
        if not cases:
            raise ConfigError(f"--served needs a case with one row of each request and {AHEAD + STEPS + 3} tokens")
        assert bench.step_arena is not None
        rows, longest = max(case.requests for case in cases), max(case.length for case in options.cases)
        records = bench.records
        self._config = RankConfig(
            role="decode",
            model=options.model,
            device=bench.arena.device.type,
            fabric="nixl",
            page_tokens=PAGE_TOKENS,
            max_model_tokens=longest,
            num_pages=records.num_pages,
            num_slabs=records.num_slabs,
            kv_dtype="fp8",
            threads=1,
            replay_rows=0,
            config_digest="",
            limits=Limits(decode_rows=rows),
        )
        self._info = DeviceInfo(
            name=str(bench.arena.device),
            layout_digest="",
            page_tokens=PAGE_TOKENS,
            page_bytes=records.page_bytes,
            num_pages=records.num_pages,
            slab_bytes=records.slab_bytes,
            num_slabs=records.num_slabs,
            vocab_size=bench.shape.vocab_size,
            max_model_tokens=longest,
            eos_ids=(bench.shape.eos_token_id,),
        )
        self._seed = options.seed
        self._gpu = (bench.arena.device.index or 0) if bench.arena.device.type == "cuda" else None
        self._model = StepModel(
            bench.shape,
            bench.weights,
            bench.step_arena,
            bench.ops,
            max_tokens=longest,
            decode_rows=rows,
            prompt_rows=(),
        )

    def measure(self, case: DeviceCase, forward_us: float) -> dict[str, Any] | None:
        """What is added to a case's entry of a record; None for one that can not be served.

        Args:
            forward_us: the bare step's median.

        Raises:
            EngineError: the batch did not end.
        """
        if not is_served(case):
            return None
        samples = [trio.run(self._serve, case, False) for _ in range(SAMPLES)]
        split = trio.run(self._serve, case, True)
        if self._gpu is not None:
            torch.cuda.synchronize()
        return judge_samples(samples, split, forward_us)

    async def _serve(self, case: DeviceCase, split: bool) -> ServedSample:
        device = TorchDevice(self._model, self._info, gpu=self._gpu)
        generator = np.random.default_rng(self._seed)

        async def fill(row: int, pages: Sequence[int], slab: int) -> int:
            return int(generator.integers(self._info.vocab_size))

        # The last timed step stands where the bare one does.
        lengths = [max(ends[-1] - AHEAD - STEPS, 1) for ends in positions_of(case)]
        try:
            return await serve_batch(self._config, device, lengths, fill, steps=STEPS, ahead=AHEAD, split=split)
        finally:
            with trio.CancelScope(shield=True):
                await device.aclose()


def judge_samples(samples: Sequence[ServedSample], split: ServedSample, forward_us: float) -> dict[str, Any]:
    """A rank's samples as figures of a record.

    Args:
        split: one more, with parts; its own totals stand under `split`.
        forward_us: the bare step's median.
    """
    medians = [statistics.median(sample.step_us) for sample in samples]
    median_us = statistics.median(medians)
    device_us = statistics.median(us for sample in samples for us in sample.device_us)
    return {
        "median_us": median_us,
        "spread_pct": (max(medians) - min(medians)) / median_us * 100,
        "samples_us": medians,
        "gap_us": median_us - forward_us,
        "device_us": device_us,
        "idle_us": median_us - device_us,
        "loop_us": statistics.median(sample.loop_us for sample in samples),
        "worker_us": statistics.median(sample.worker_us for sample in samples),
        "split": {"loop_us": split.loop_us, "worker_us": split.worker_us},
        "parts_us": split.parts_us,
        "samples": [describe_sample(sample) for sample in samples],
    }


def is_served(case: DeviceCase) -> bool:
    """Whether a rank's loop can run it: there is no drafter here, and the batch has to have a length to begin with."""
    return case.rows == 1 and case.length >= AHEAD + STEPS + 3
