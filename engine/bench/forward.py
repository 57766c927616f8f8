"""Forward: the model's step alone, in this process, with no runtime around it.

This is the time that serving adds to: the same weights, arena and sampling as a rank's device, sequences that were
really prefilled (random ids, so that experts and selections differ from row to row), one thread, no event loop. A
sample runs `steps` consecutive decode steps from the same context on, so positions are those of a served run.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import trio

from engine.bench.processor import read_thread_times
from engine.bench.prompts import make_prompts
from engine.bench.record import percentile
from engine.bench.summary import summarise_forward
from engine.config import ClusterConfig
from engine.core.request import count_pages
from engine.errors import ConfigError
from engine.model.device import open_torch_device
from engine.model.rows import RowBatch
from engine.model.sampling import sample_tokens
from engine.model.transformer import PagedTransformer
from engine.ports import DeviceInfo
from transport.messages import Sampling

GREEDY = Sampling(ignore_eos=True)

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class StepCase:
    """`rows` sequences of `context` ids each, decoded for `ahead` steps and then for `steps` that are timed."""

    rows: int
    context: int
    steps: int
    ahead: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a case took and gave.

    Attributes:
        times_ms: of each timed step.
        spent: processor time per timed step.
        tokens: int64[rows, 1 + ahead + steps], the completions.
    """

    times_ms: list[float]
    spent: dict[str, float]
    tokens: Ints


class BareModel:
    """The model over an arena of its own, driven step by step."""

    def __init__(self, model: PagedTransformer, info: DeviceInfo) -> None:
        self.info = info
        self._model = model

    @property
    def model(self) -> PagedTransformer:
        """To be run by one at a time."""
        return self._model

    def run_steps(self, case: StepCase, seed: int) -> Sample:
        """Prefills the case's sequences and decodes them.

        Raises:
            ConfigError: the case does not fit the arena.
        """
        tables = self._place(case)
        slabs = np.arange(case.rows)
        prompts = make_prompts(case.rows, case.context, self.info.vocab_size, seed)
        tokens = np.array([self._prefill(row, prompt, tables[row]) for row, prompt in enumerate(prompts)])
        completions = [tokens]
        settings = [GREEDY] * case.rows
        times_ms: list[float] = []
        before = read_thread_times(os.getpid())
        with quiet_garbage():
            for step in range(case.ahead + case.steps):
                if step == case.ahead:
                    before = read_thread_times(os.getpid())
                began = time.perf_counter_ns()
                positions = np.full(case.rows, case.context + step)
                logits = self._model.forward(RowBatch(slabs, positions, tokens[:, None], tables))
                tokens = sample_tokens(logits, settings, (positions + 1).tolist(), self.info.eos_ids)
                times_ms.append((time.perf_counter_ns() - began) / 1e6)
                completions.append(tokens)
            spent = read_thread_times(os.getpid()).since(before, case.steps)
        return Sample(times_ms[case.ahead :], spent, np.stack(completions, axis=1))

    def run_prefill(self, length: int, chunk: int, seed: int) -> float:
        """Milliseconds of a whole prompt, in chunks as a rank computes them.

        Raises:
            ConfigError: it does not fit the arena.
        """
        tables = self._place(StepCase(1, length, 1))
        (prompt,) = make_prompts(1, length, self.info.vocab_size, seed)
        with quiet_garbage():
            began = time.perf_counter_ns()
            self._prefill(0, prompt, tables[0], chunk)
            return (time.perf_counter_ns() - began) / 1e6

    def _place(self, case: StepCase) -> Ints:
        """Page tables int64[rows, pages]: sequences one after the other."""
        info = self.info
        need = case.context + case.ahead + case.steps
        pages = count_pages(need, info.page_tokens)
        if need > info.max_model_tokens:
            raise ConfigError(f"{need} tokens are more than max_model_tokens ({info.max_model_tokens})")
        if case.rows > info.num_slabs or case.rows * pages > info.num_pages:
            raise ConfigError(
                f"{case.rows} rows of {need} tokens need {case.rows} slabs and {case.rows * pages} pages; the arena"
                f" has {info.num_slabs} and {info.num_pages} (--set num_slabs=, num_pages=)"
            )
        return np.arange(case.rows * pages).reshape(case.rows, pages)

    def _prefill(self, slab: int, prompt: Sequence[int], table: Ints, chunk: int = 0) -> int:
        ids = np.array(prompt, np.int64)
        size = min(chunk or self._model.max_chunk, self._model.max_chunk)
        token = 0
        for low in range(0, len(ids), size):
            part = ids[None, low : low + size]
            is_last = low + size >= len(ids)
            batch = RowBatch(np.array([slab]), np.array([low]), part, table[None])
            wanted = [part.shape[1] - 1] if is_last else []
            logits = self._model.forward_prompt(batch, last=is_last, wanted=wanted)
            if is_last:
                token = int(sample_tokens(logits, [GREEDY], [len(ids)], self.info.eos_ids)[0])
        return token


@contextmanager
def quiet_garbage() -> Iterator[None]:
    """As in a rank, no collection in the middle of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def open_bare_model(config: ClusterConfig) -> BareModel:
    """Loads the model as the first decode rank would. Blocks for seconds.

    Raises:
        ConfigError: the checkpoint can not be used.
    """
    rank_config = config.rank_config(config.decode.ranks[0])

    async def load() -> BareModel:
        device = await open_torch_device(rank_config, lambda *_: None)
        await device.aclose()  # its thread; the model stays
        assert isinstance(device.model, PagedTransformer)
        return BareModel(device.model, device.info)

    bare = trio.run(load)
    torch.set_num_threads(max(1, config.threads))
    return bare


def measure_forward(
    bare: BareModel,
    cases: Sequence[StepCase],
    prefills: Sequence[int],
    *,
    samples: int,
    chunk: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All cases, `samples` times in turn, so that a disturbance of the machine meets all of them.

    Args:
        prefills: prompt lengths.
        chunk: ids of a prefill chunk.
        tell: gets a line of progress per measurement.

    Returns:
        `runs` and `summary` of a record.
    """
    runs: list[dict[str, Any]] = []
    for case in cases:
        bare.run_steps(StepCase(case.rows, case.context, 1, ahead=3), seed)  # first calls allocate
    for number in range(samples):
        for case in cases:
            sample = bare.run_steps(case, seed)
            times_ms = sample.times_ms
            runs.append(
                {
                    **dataclasses.asdict(case),
                    "kind": "decode",
                    "sample": number,
                    "step_ms_median": round(statistics.median(times_ms), 4),
                    "step_ms_min": round(min(times_ms), 4),
                    "step_ms_max": round(max(times_ms), 4),
                    "step_ms_p99": round(percentile(times_ms, 0.99), 4),
                    "step_ms_mean": round(statistics.fmean(times_ms), 4),
                    **sample.spent,
                }
            )
            tell(f"forward {case.rows} rows at {case.context}: {runs[-1]['step_ms_median']:.2f} ms a step")
        for length in prefills:
            spent_ms = bare.run_prefill(length, chunk, seed)
            runs.append({"kind": "prefill", "sample": number, "tokens": length, "prefill_ms": round(spent_ms, 4)})
            tell(f"prefill of {length}: {length / spent_ms * 1e3:.0f} tokens/s")
    return {"runs": runs, "summary": summarise_forward(runs)}
