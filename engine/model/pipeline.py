"""Pipeline: decode steps launched before those in front of them have ended, so that a GPU need not wait for a host.

A step can be launched ahead if all that the host knows already makes it: its rows' positions, and that each takes the
likeliest id of its logits. What a row reads is told by the host or is what its slab sampled last, which is on the
device. Any other step waits until those before it have ended.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.plan import StepResult
from engine.model.decoding import Decoder
from engine.model.passes import Job
from engine.model.sampling import Sampler
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass
class Launched:
    """A step under way.

    Attributes:
        slabs, positions: int64[rows].
        tokens: int64[rows], on the host once `ended`.
        began, ended: events on the step's stream; None on a CPU, where it has ended.
        cpu_us: what it took there.
    """

    step: int
    slabs: Ints
    positions: Ints
    tokens: Tensor
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    cpu_us: int = 0


class Pipeline:
    """See the module. Belongs to the device's worker thread; all steps of the model go on one stream."""

    def __init__(self, model: StepModel, info: DeviceInfo, decoder: Decoder) -> None:
        """All are borrowed. `decoder`: is told where slabs stand when a step has ended."""
        self._model = model
        self._info = info
        self._decoder = decoder
        self._launched: collections.deque[Launched] = collections.deque()
        self._settings: Sequence[Sampling] | None = None
        self._takes_best = False

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._launched)

    def accepts(self, job: Job) -> bool:
        """Whether a step can be launched ahead."""
        decode = job.decode
        if decode is None or job.chunks or decode.drafts or decode.ends is not None:
            return False
        if len(decode.slabs) > self._model.most_rows or int(decode.positions.min()) < 0:
            return False
        if self._settings is not decode.sampling:
            self._settings = decode.sampling
            self._takes_best = Sampler(decode.sampling, self._info.eos_ids).takes_best
        return self._takes_best

    @torch.inference_mode()
    def launch(self, job: Job) -> None:
        """Enqueues a step that `accepts` took.

        Raises:
            DeviceError: a row names a place that there is not.
        """
        decode = job.decode
        assert decode is not None
        self._decoder.check(decode)
        on_gpu = self._model.arena.bytes.device.type == "cuda"
        began = _record() if on_gpu else None
        started = time.perf_counter_ns()
        tokens = self._model.step_greedily(decode.tokens, decode.positions, decode.slabs, decode.tables)
        cpu_us = (time.perf_counter_ns() - started) // 1000
        ended = _record() if on_gpu else None
        self._launched.append(Launched(job.step, decode.slabs, decode.positions, tokens, began, ended, cpu_us))

    @property
    def has_ended(self) -> bool:
        """Whether the first one under way has.

        Raises:
            RuntimeError: the device has failed.
        """
        first = self._launched[0]
        return first.ended is None or bool(first.ended.query())

    def take_first(self) -> Launched:
        """The first one under way, which is to be finished, or given up where the device has failed."""
        return self._launched.popleft()

    def finish(self, first: Launched) -> StepResult:
        """What a step brought that was the first one under way; waits for it.

        Raises:
            RuntimeError: the device has failed.
        """
        device_us = first.cpu_us
        if first.began is not None and first.ended is not None:
            first.ended.synchronize()
            device_us = round(first.began.elapsed_time(first.ended) * 1000)
        tokens = first.tokens.numpy()
        self._model.arena.note_sampled(first.slabs, tokens)
        self._decoder.note_rows(first.slabs, first.positions + 1)
        return StepResult(first.step, (), tuple(tokens.tolist()), device_us)


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event
