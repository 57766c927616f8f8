"""Pipeline: decode steps launched before those in front of them have ended, so that a GPU need not wait for a host.

A step can be launched ahead if all that the host knows already makes it: its rows' positions, and that each takes the
likeliest id of its logits. What a row reads is told by the host or is what its slab sampled last, which is on the
device; on a rank that drafts its position and its drafts are there, too (`draft_launch.py`). Any other step waits until
those before it have ended.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.core.pact import GroupStep
from engine.core.plan import StepResult
from engine.model.decoding import Decoder
from engine.model.draft_launch import DraftLaunch
from engine.model.passes import Job
from engine.model.sampling import Sampler
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo
from transport.messages import Sampling


@dataclasses.dataclass
class Launched:
    """A step under way.

    Attributes:
        job: what it is, for whoever has to run it again.
        tokens: int64[rows], on the host once `ended`; of a step that drafts what `DraftLaunch.finish` takes.
        began, ended: events on the step's stream; None on a CPU, where it has ended.
        cpu_us: what it took there.
        group: the step of its group, if it has one.
        failure: int64[1] on the host once `ended`, what of its group has failed; None without a group.
        is_void: a step before it has failed, so nothing of it counts.
    """

    job: Job
    tokens: Tensor
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    cpu_us: int = 0
    group: GroupStep | None = None
    failure: Tensor | None = None
    is_void: bool = False

    @property
    def step(self) -> int:
        """Its number."""
        return self.job.step


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
        self._drafts: DraftLaunch | None = None
        if model.drafter is not None and model.drafter.steps is not None:
            self._drafts = DraftLaunch(model.drafter, model.arena, info, decoder)

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._launched)

    def accepts(self, job: Job) -> bool:
        """Whether a step can be launched ahead."""
        decode = job.decode
        if decode is None or job.chunks:
            return False
        if self._drafts is not None:
            has_step = self._drafts.accepts(decode)
        else:
            has_step = len(decode.slabs) <= self._model.most_rows and not decode.drafts and decode.ends is None
            has_step = has_step and int(decode.positions.min()) >= 0
        if not has_step:
            return False
        if self._settings is not decode.sampling:
            self._settings = decode.sampling
            self._takes_best = Sampler(decode.sampling, self._info.eos_ids).takes_best
        return self._takes_best

    def count_rows(self, job: Job) -> int:
        """Rows of a step that `accepts` took, or that has none."""
        if job.decode is None:
            return 0
        return len(job.decode.slabs) if self._drafts is None else self._drafts.count_rows(job.decode)

    def check(self, job: Job) -> None:
        """Raises DeviceError if a row of a step that `accepts` took names a place that there is not."""
        if job.decode is not None:
            (self._drafts or self._decoder).check(job.decode)

    @torch.inference_mode()
    def launch(
        self, job: Job, group: GroupStep | None = None, read_failure: Callable[[], Tensor] | None = None
    ) -> None:
        """Enqueues a step that `accepts` took, and `check`; in a group also one without rows.

        Args:
            group: the step of its group; the model has the turns of it.
            read_failure: enqueues the copy of `Launched.failure`.
        """
        on_gpu = self._model.arena.bytes.device.type == "cuda"
        began = _record() if on_gpu else None
        started = time.perf_counter_ns()
        tokens = torch.empty(0, dtype=torch.int64)
        if (decode := job.decode) is not None and self._drafts is not None:
            under_way = [each.job.decode.slabs for each in self._launched if each.job.decode is not None]
            tokens = self._drafts.launch(decode, under_way, self._model.take_turn())
        elif decode is not None:
            tokens = self._model.step_greedily(decode.tokens, decode.positions, decode.slabs, decode.tables)
        else:
            self._model.run_rest()
        failure = None if read_failure is None else read_failure()
        cpu_us = (time.perf_counter_ns() - started) // 1000
        ended = _record() if on_gpu else None
        self._launched.append(Launched(job, tokens, began, ended, cpu_us, group, failure))

    @property
    def has_ended(self) -> bool:
        """Whether the first one under way has.

        Raises:
            RuntimeError: the device has failed.
        """
        first = self._launched[0]
        return first.is_void or first.ended is None or bool(first.ended.query())

    def take_first(self) -> Launched:
        """The first one under way, which is to be finished, or given up where the device has failed."""
        return self._launched.popleft()

    def void(self) -> None:
        """What is under way does not count: it is run again by whoever takes it. Waits until it has ended.

        Nothing has to be put back: what a step writes lies by its positions, and what slabs sampled last is told by
        the host where a step is not launched ahead.
        """
        for each in self._launched:
            each.is_void = True
            if each.ended is not None:
                each.ended.synchronize()

    def wait(self, first: Launched) -> int:
        """Until a step has ended; what of its group has failed by then, 0 for nothing.

        Raises:
            RuntimeError: the device has failed.
        """
        if first.ended is not None:
            first.ended.synchronize()
        return 0 if first.failure is None else int(first.failure[0])

    def finish(self, first: Launched) -> StepResult:
        """What a step brought that was the first one under way; waits for it.

        Raises:
            RuntimeError: the device has failed.
        """
        self.wait(first)
        device_us = first.cpu_us
        if first.began is not None and first.ended is not None:
            device_us = round(first.began.elapsed_time(first.ended) * 1000)
        if (decode := first.job.decode) is not None and self._drafts is not None:
            found = self._drafts.finish(decode, first.tokens)
            return StepResult(
                first.step,
                (),
                found.tokens,
                device_us,
                group=first.group,
                row_counts=found.counts,
                row_proposed=found.proposed,
            )
        tokens = first.tokens.numpy()
        if decode is not None:
            self._model.arena.note_sampled(decode.slabs, tokens)
            self._decoder.note_rows(decode.slabs, decode.positions + 1)
        return StepResult(first.step, (), tuple(tokens.tolist()), device_us, group=first.group)


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event
