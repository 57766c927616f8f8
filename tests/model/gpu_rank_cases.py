"""Ranks of a group with the steps of a GPU, each a process: what they run, and how a test speaks to them."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from engine.config import ExpertsConfig, Limits, RankConfig
from engine.core.plan import IDLE_STEP, DecodeRow, PrefillChunk, StepPlan
from engine.model.step_loading import PROMPT_ROWS
from transport.messages import Sampling

ROOT = Path(__file__).parents[2]
SLABS, PAGES_EACH, PAGE_TOKENS = 4, 2, 64
ROWS_TO_PROMPT_ROWS = {"plain": (16, 32), "interpreted": (24,), "cuda": PROMPT_ROWS}
"""Interpreted exchanges have one program for each of 24 rows; fewer would be cut into four each."""
ANSWER_S = 60.0
GREEDY = Sampling()
ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def rank_config(directory: Path, group: int, **limits: Any) -> RankConfig:
    return RankConfig(
        role="decode",
        model=str(directory),
        device="cuda",
        fabric="nixl",
        page_tokens=PAGE_TOKENS,
        max_model_tokens=PAGES_EACH * PAGE_TOKENS,
        num_pages=SLABS * PAGES_EACH,
        num_slabs=SLABS,
        kv_dtype="float32",
        threads=1,
        replay_rows=0,
        config_digest="0",
        limits=dataclasses.replace(Limits(prefill_chunk_tokens=48, decode_rows=SLABS, idle_steps=4), **limits),
        group=group,
        experts_main=ExpertsConfig(spare_slots=60),
    )


def draw_plans(seed: int, steps: int) -> list[StepPlan]:
    """Prompts in chunks, rows that are greedy for steps on end, or drawn; steps of both and of nothing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 60, SLABS)
    ids = [rng.integers(3, 310, length).astype("<i4") for length in lengths]
    done = np.zeros(SLABS, int)
    plans = []
    kind, left = "prefill", 1
    for number in range(1, steps + 1):
        if not left:
            kind = rng.choice(["idle", "prefill", "greedy", "drawn", "both"], p=[0.1, 0.25, 0.4, 0.1, 0.15])
            left = int(rng.integers(2, 5)) if kind == "greedy" else 1
        left -= 1
        chunks, rows = [], []
        able = np.flatnonzero((done >= lengths) & (done < PAGES_EACH * PAGE_TOKENS - 1))
        if kind in ("prefill", "both"):
            for slab in rng.permutation(np.flatnonzero(done < lengths))[:2].tolist():
                start = int(done[slab])
                end = min(int(lengths[slab]), start + int(rng.choice([16, 48])))
                pages = tuple(slab + SLABS * page for page in range(PAGES_EACH))
                chunk = memoryview(ids[slab][start:end].tobytes())
                sampling = GREEDY if end == lengths[slab] else None
                chunks.append(PrefillChunk(slab + 1, slab, start, chunk, pages, sampling))
                done[slab] = end
        if kind in ("greedy", "drawn", "both"):
            for slab in able.tolist():
                pages = tuple(slab + SLABS * page for page in range(PAGES_EACH))
                drawn = Sampling(temperature=0.9, seed=int(rng.integers(1 << 30)))
                sampling = drawn if kind == "drawn" else GREEDY
                rows.append(DecodeRow(slab + 1, slab, int(done[slab]), None, pages, sampling))
                done[slab] += 1
        plans.append(StepPlan(number if chunks or rows else IDLE_STEP, tuple(chunks), tuple(rows)))
    return plans


def few_plans() -> list[StepPlan]:
    """A prompt of a few ids and the row behind it."""
    pages = tuple(range(PAGES_EACH))
    ids = np.arange(40, 45, dtype="<i4")
    chunk = PrefillChunk(1, 0, 0, memoryview(ids.tobytes()), pages, GREEDY)
    return [StepPlan(1, (chunk,), ()), StepPlan(2, (), (DecodeRow(1, 0, len(ids), None, pages, GREEDY),))]


class RankProcess:
    """One rank; `said` has what it told meanwhile."""

    module = "tests.model.gpu_rank_process"

    def __init__(
        self, directory: Path, place: int, size: int, *, generation: int = 1, limit_s: float = 20.0,
        rows: str = "plain", meeting: Path | None = None,
    ) -> None:  # fmt: skip
        """`meeting`: folder of the ranks' sockets; None for that of the model."""
        self.meeting = directory if meeting is None else meeting
        command = [sys.executable, "-m", self.module, str(directory)]
        self.process = subprocess.Popen(
            [*command, str(place), str(size), str(generation), str(limit_s), rows, str(self.meeting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | ({} if rows == "cuda" else ON_CPU),
        )
        self.said: list[dict[str, Any]] = []
        self._buffer = b""

    def post(self, action: str, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([action, options]).encode() + b"\n")
        self.process.stdin.flush()

    def await_word(self, word: str) -> Any:
        """What it says under a word, everything before it kept in `said`."""
        assert self.process.stdout is not None
        due = time.monotonic() + ANSWER_S
        while True:
            for at, answer in enumerate(self.said):
                if word in answer:
                    return self.said.pop(at)[word]
            wait_s = due - time.monotonic()
            assert wait_s > 0 and select.select([self.process.stdout], [], [], wait_s)[0], f"no {word}: {self.said}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the rank has ended and said no {word}: {self.said}"
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            self.said += [json.loads(line) for line in lines]

    def call(self, action: str, **options: Any) -> Any:
        self.post(action, **options)
        return self.await_word(action)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
