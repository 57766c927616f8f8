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

import numpy as np
import numpy.typing as npt
import torch

from engine.core.pact import GroupStep
from engine.core.plan import StepResult
from engine.errors import DeviceError
from engine.model.decoding import Decode, Decoder
from engine.model.draft_launch import DraftLaunch
from engine.model.envelope import Envelope, Envelopes, Words
from engine.model.look_times import LookTimes
from engine.model.passes import Job
from engine.model.sampling import Sampler
from engine.model.step_greedy import BEST, STARTS
from engine.model.step_model import StepModel
from engine.ports import DeviceInfo
from transport.messages import Sampling

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass
class Launched:
    """A step under way.

    Attributes:
        job: what it is, for whoever has to run it again.
        brought: int32[rows, BEST + 1] of the envelope, once `ended`; of a step that drafts what `DraftLaunch.finish`
            takes; None without rows.
        envelope: what it is told and brings; its events, on the step's stream, are around it.
        cpu_us: what it took there.
        rows: that the target computes.
        group: the step of its group, if it has one.
        failure: int64[1] on the host once `ended`, what of its group has failed; None without a group.
        is_void: a step before it has failed, so nothing of it counts.
        is_over: somebody has seen that it has ended.
    """

    job: Job
    brought: Words | None
    envelope: Envelope
    cpu_us: int = 0
    rows: int = 0
    group: GroupStep | None = None
    failure: Ints | None = None
    is_void: bool = False
    is_over: bool = False

    @property
    def step(self) -> int:
        """Its number."""
        return self.job.step

    @property
    def ended(self) -> torch.cuda.Event | None:
        """The event behind it; None on a CPU, where it has ended."""
        return self.envelope.ended


class Pipeline:
    """See the module. Belongs to the device's worker thread; all steps of the model go on one stream."""

    def __init__(self, model: StepModel, info: DeviceInfo, decoder: Decoder) -> None:
        """All are borrowed. `decoder`: is told where slabs stand when a step has ended."""
        self._model = model
        self._info = info
        self._decoder = decoder
        self._launched: collections.deque[Launched] = collections.deque()
        # Of the step launched last; of that accepted last, if it is the next one of the same rows; tokens that are
        # known to be unknown; and steps until a row of these may have no room.
        self._last: Decode | None = None
        self._next: Decode | None = None
        self._unknown = np.empty(0, np.int64)
        self._steps_left = 0
        self._looks = LookTimes()
        self._first_since = 0.0
        self._envelopes = Envelopes(model.arena.bytes.device)
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
            has_step = decode.ends is None and not decode.drafts
            if has_step and not self._is_next(decode):
                has_step = len(decode.slabs) <= self._model.most_rows and int(decode.positions.min()) >= 0
        if not has_step:
            return False
        if self._settings is not decode.sampling:
            self._settings = decode.sampling
            self._takes_best = Sampler(decode.sampling, self._info.eos_ids).takes_best
        return self._takes_best

    def _is_next(self, decode: Decode) -> bool:
        """Whether each of these rows is behind one of the step launched last. Arrays of a roster are one object as long
        as it is one, so most of what is looked at for a step need be looked at once for a roster."""
        last = self._last
        is_next = last is not None and decode.slabs is last.slabs and decode.tables is last.tables
        if is_next and last is not None:
            is_next = decode.positions.tobytes() == (last.positions + 1).tobytes()
        self._next = decode if is_next else None
        return is_next

    def count_rows(self, job: Job) -> int:
        """Rows of a step that `accepts` took, or that has none."""
        if job.decode is None:
            return 0
        return len(job.decode.slabs) if self._drafts is None else self._drafts.count_rows(job.decode)

    def check(self, job: Job) -> None:
        """Raises DeviceError if a row of a step that `accepts` took names a place that there is not."""
        decode = job.decode
        if decode is None:
            return
        if self._drafts is not None:
            self._drafts.check(decode)
            return
        if self._next is decode and decode.tokens is self._unknown and self._steps_left > 0:
            self._steps_left -= 1
            return
        self._decoder.check(decode)
        room = np.minimum(decode.widths * self._info.page_tokens, self._info.max_model_tokens)
        self._steps_left = int((room - decode.positions).min()) - 1

    def launch(
        self, job: Job, group: GroupStep | None = None, read_failure: Callable[[Envelope], Ints] | None = None
    ) -> None:
        """Enqueues a step that `accepts` took, and `check`; in a group also one without rows.

        Args:
            group: the step of its group; the model has the turns of it.
            read_failure: enqueues the copy of `Launched.failure`.
        """
        envelope = self._envelopes.take()
        envelope.begin()
        started = time.perf_counter_ns()
        brought = None
        if (decode := job.decode) is not None and self._drafts is not None:
            under_way = [each.job.decode.slabs for each in self._launched if each.job.decode is not None]
            brought = self._drafts.launch(decode, under_way, self._model.take_turn(), envelope)
        elif decode is not None:
            goes_on = self._goes_on(decode)
            self._last = decode
            brought = self._model.step_greedily(
                decode.tokens, decode.positions, decode.slabs, decode.tables, envelope, goes_on=goes_on
            )
        else:
            self._model.run_rest()
        failure = None if read_failure is None else read_failure(envelope)
        cpu_us = (time.perf_counter_ns() - started) // 1000
        envelope.end()
        if not self._launched:
            self._first_since = time.monotonic()
        self._launched.append(Launched(job, brought, envelope, cpu_us, self.count_rows(job), group, failure))

    def _goes_on(self, decode: Decode) -> bool:
        """Whether all rows are behind those of the step launched last, and read what that samples."""
        if self._next is not decode:
            return False
        if decode.tokens is not self._unknown:
            if int(decode.tokens.max()) >= 0:
                return False
            self._unknown = decode.tokens
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the first one under way has.

        Raises:
            RuntimeError: the device has failed.
        """
        first = self._launched[0]
        if not first.is_over:
            first.is_over = first.is_void or first.ended is None or bool(first.ended.query())
        return first.is_over

    @property
    def first(self) -> Launched:
        """The first one under way."""
        return self._launched[0]

    def find_wait(self, most_s: float) -> float:
        """Seconds, at most so many, until it should be looked again whether the first one has ended."""
        elapsed_s = time.monotonic() - self._first_since
        return self._looks.find_wait(self._launched[0].rows, elapsed_s, most_s)

    def take_first(self) -> Launched:
        """The first one under way, which is to be finished, or given up where the device has failed."""
        self._first_since = time.monotonic()
        return self._launched.popleft()

    def void(self) -> None:
        """What is under way does not count: it is run again by whoever takes it. Waits until it has ended.

        Nothing has to be put back: what a step writes lies by its positions, and what slabs sampled last is told by
        the host where a step is not launched ahead.
        """
        self._last = self._next = None
        for each in self._launched:
            if not each.is_void:
                each.is_void = True
                if each.ended is not None:
                    each.ended.synchronize()
                self._envelopes.give(each.envelope)

    def wait(self, first: Launched) -> int:
        """Until a step has ended; what of its group has failed by then, 0 for nothing.

        Raises:
            RuntimeError: the device has failed.
        """
        if not first.is_over and first.ended is not None:
            first.ended.synchronize()
        first.is_over = True
        return 0 if first.failure is None else int(first.failure[0])

    def finish(self, first: Launched) -> StepResult:
        """What a step brought that was the first one under way; waits for it.

        Raises:
            RuntimeError: the device has failed.
        """
        self.wait(first)
        device_us, envelope = first.cpu_us, first.envelope
        if envelope.began is not None and envelope.ended is not None:
            device_us = round(envelope.began.elapsed_time(envelope.ended) * 1000)
        self._looks.note(first.rows, device_us / 1e6)
        result = self._read(first, device_us)
        self._envelopes.give(envelope)
        return result

    def _read(self, first: Launched, device_us: int) -> StepResult:
        decode = first.job.decode
        if decode is None or first.brought is None:
            return StepResult(first.step, (), (), device_us, group=first.group)
        if self._drafts is not None:
            found = self._drafts.finish(decode, first.brought)
            return StepResult(
                first.step,
                (),
                found.tokens,
                device_us,
                group=first.group,
                row_counts=found.counts,
                row_proposed=found.proposed,
            )
        if int(first.brought[0, STARTS]) != int(decode.positions[0]):
            raise DeviceError(f"the rows of step {first.step} were computed at other positions than they were to be")
        # A copy, of what the next step with this envelope overwrites.
        tokens = first.brought[:, BEST].copy()
        self._model.arena.note_sampled(decode.slabs, tokens)
        self._decoder.note_rows(decode.slabs, decode.positions + 1)
        return StepResult(first.step, (), tokens.data, device_us, group=first.group)
